"""Told to stop, and made to forget. Source: docs/reference/device-learning.md; docs/design.md, section 10."""

import datetime
import json
import os
import signal
import subprocess
import sys
import threading
from dataclasses import replace

import pytest
from click.testing import CliRunner

from edgefl_client.cli import cli, main
from edgefl_client.commands import train as train_command
from edgefl_client.commands.stopping import pausing
from edgefl_client.home import Home
from edgefl_client.learning.checkpoint import only_one
from edgefl_client.learning.errors import Paused
from edgefl_client.learning.limits import TOLD_TO_STOP, LearningLimits
from edgefl_client.learning.options import TrainOptions
from edgefl_client.learning.round_alone import run_train
from edgefl_client.scoring.personal import load_personal
from edgefl_client.trust import models
from edgefl_client.trust.trusted_keys import add_trusted, remove_trusted


@pytest.fixture
def train(school, lab, tmp_path):
    """Starts `edgefl train` in a process of its own, which gets a signal after its third epoch."""
    file = tmp_path / "model.edgefl"
    file.write_bytes(school.learning_bytes())
    code = (
        "import os, sys\nfrom edgefl_client.cli import main\n"
        "import edgefl_client.commands.train as train_command\n"
        "kind, shown = int(sys.argv[1]), train_command.progress()\n"
        "def told(facts):\n"
        "    shown(facts)\n"
        "    if kind and facts.get('summary') == 3:\n"
        "        os.kill(os.getpid(), kind)\n"
        "train_command.progress = lambda: told\n"
        "main(sys.argv[2:])\n"
    )

    def start(home, labels, *more, kind=0):
        given = ["--labels", labels, "--model", file, "--trust", lab.SIGNER.public.hex(), "--home", tmp_path / home]
        words = [
            sys.executable,
            "-c",
            code,
            str(int(kind)),
            "train",
            *map(str, given),
            "--threads",
            "1",
            "--json",
            *map(str, more),
        ]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)

    return start


@pytest.mark.parametrize("kind", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_told_to_stop_it_keeps_a_point_and_ends_with_0(train, bundle, labels, tmp_path, kind):
    """docs/design.md, section 10: the point is kept although none was due, and the round ends with the same bits."""
    process = train("told", labels, "--epochs", "40", "--checkpoint-every", "3600", kind=kind)
    out, err = process.communicate(timeout=120)
    paused = json.loads(out)
    assert process.returncode == 0 and "stopping after the present step; a second Ctrl-C ends at once" in err
    assert (paused["state"], paused["reason"], paused["epoch"]) == ("paused", TOLD_TO_STOP, 3)
    epochs: list[int] = []
    options = TrainOptions(threads=1, epochs=40)
    whole = run_train(Home(tmp_path / "whole"), bundle, labels, options)
    goes_on = replace(options, report=lambda facts: epochs.append(facts.get("summary", 0)))
    found = run_train(Home(tmp_path / "told"), bundle, labels, goes_on)
    assert found["state"] == "done" and 1 not in epochs and 4 in epochs
    assert (found["state_sha256"], found["weights_sha256"]) == (whole["state_sha256"], whole["weights_sha256"])


def test_between_two_pictures_it_stops_without_a_step(bundle, labels, home):
    """Told to stop while pictures are read, or judged: nothing is half done, and the round goes on another time."""
    stop = threading.Event()
    stop.set()
    with pytest.raises(Paused, match=TOLD_TO_STOP):
        run_train(home, bundle, labels, TrainOptions(threads=1, epochs=2, report=pausing(lambda facts: None, stop)))
    assert load_personal(home, bundle) is None
    stop.clear()

    def at_the_first_judged(facts):
        if "judging" in facts:
            stop.set()

    options = TrainOptions(threads=1, epochs=60, report=pausing(at_the_first_judged, stop))
    paused = run_train(home, bundle, labels, options)
    assert (paused["state"], paused["gate"], load_personal(home, bundle)) == ("paused", None, None)
    steps = []
    done = run_train(
        home, bundle, labels,
        TrainOptions(threads=1, epochs=60, report=lambda facts: steps.append(facts) if "step" in facts else None),
    )  # fmt: skip
    assert done["state"] == "done" and done["gate"]["passed"] and not steps  # judged only


def test_a_word_from_outside_is_a_limit():
    assert LearningLimits(battery=lambda: None).reached(0.0) is None
    assert LearningLimits(battery=lambda: None, stopped=lambda: True).reached(0.0) == TOLD_TO_STOP


@pytest.fixture
def learned(bundle, labels, home):
    """A home whose personal values passed their gate."""
    assert run_train(home, bundle, labels, TrainOptions(threads=1, epochs=60))["gate"]["passed"]
    return home


def call(home, *words):
    return CliRunner().invoke(cli, ["personal", *words, "--home", str(home.root)])


def test_removed_values_are_scored_with_no_more(learned, bundle, labels):
    """`edgefl personal remove`: back to the bundle's for good; what was learned goes on, unless --all forgets it."""
    assert json.loads(call(learned, "show", "--json").stdout)["personal"]["round"] == 1
    result = call(learned, "remove", "--json")
    assert result.exit_code == 0 and json.loads(result.stdout) == {"removed": ["personal.payload"]}
    assert load_personal(learned, bundle) is None
    assert json.loads(call(learned, "show", "--json").stdout)["personal"] is None
    assert json.loads(call(learned, "remove", "--json").stdout) == {"removed": []}
    assert run_train(learned, bundle, labels, TrainOptions(threads=1, epochs=1))["round"] == 2
    removed = json.loads(call(learned, "remove", "--all", "--json").stdout)["removed"]
    assert {"alone.payload", "table.json", "held.json"} <= set(removed)
    assert [path.name for path in learned.learning.iterdir()] == ["lock"]
    assert run_train(learned, bundle, labels, TrainOptions(threads=1, epochs=1))["round"] == 1


def test_damaged_values_can_be_removed(learned, bundle):
    (learned.learning / "personal.payload").write_bytes(b"rubbish")
    assert call(learned, "show").exception.code == "damaged"
    assert call(learned, "remove").exit_code == 0
    assert load_personal(learned, bundle) is None


def test_nothing_is_removed_while_another_process_learns(learned, bundle):
    with only_one(learned):
        assert call(learned, "remove", "--all").exception.code == "busy"
    assert load_personal(learned, bundle) is not None


def test_where_nothing_was_learned_nothing_is_made(home):
    assert json.loads(call(home, "remove", "--all", "--json").stdout) == {"removed": []}
    assert "the bundle's" in call(home, "show").stdout
    assert not home.root.exists()


def test_it_ends_with_the_trust_in_its_bundle(school, lab, labels, home, monkeypatch, capsys):
    """docs/security.md 2.6.5: its signer is removed after an epoch: `edgefl score`'s sentence, and nothing is kept."""
    where = ["--home", str(home.root), "--threads", "1"]
    summaries: list[int] = []

    def told(facts):
        summaries.append(facts.get("summary", 0))
        if facts.get("summary") == 1:
            remove_trusted(home, lab.SIGNER.key_id)

    def ended(*words: str) -> tuple[int, str]:
        with pytest.raises(SystemExit) as left:
            main([*words, *where])
        return left.value.code, capsys.readouterr().err.splitlines()[-1]

    add_trusted(home, lab.SIGNER.public_key, "signer", datetime.date(2026, 9, 21))
    models.install(home, school.learning_bytes(), school.learning_bundle())
    monkeypatch.setattr(train_command, "progress", lambda: told)
    train = ended("train", "--labels", str(labels), "--epochs", "60")
    assert train == ended("score", str(labels.parent / "MEL0.png")) and train[0] == 3 and max(summaries) == 1
    assert not (home.learning / "personal.payload").exists()
