"""docs/guides/papers-tables.md: its commands run, in order, as a reader types them.

docs/reference/experiment-files.md: its examples are files that are read.
"""

import os
import re
import shlex
from pathlib import Path

import pytest
from tests.trainer.conftest import edgefl_train

from edgefl_trainer.experiments.files import read_experiment
from edgefl_trainer.experiments.planning import Choice, plan_runs, pretraining_of

ROOT = Path(__file__).parents[3]
GUIDE = ROOT / "docs/guides/papers-tables.md"
REFERENCE = ROOT / "docs/reference/experiment-files.md"


def blocks(page: Path, kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```", page.read_text(encoding="utf-8"), re.M | re.S)


@pytest.mark.slow
def test_the_commands_run(cached, forks, tmp_path, monkeypatch):
    """Here; with workers in a process of its own, whose runs need not load the libraries."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("EDGEFL_DATA", str(tmp_path))
    (tmp_path / "experiments").symlink_to(ROOT / "experiments")
    lines = [line.removeprefix("$ ") for block in blocks(GUIDE, "console") for line in block.splitlines()]
    assert len(lines) == 7
    for line in lines:
        words = shlex.split(line)
        assert words[0] == "edgefl-train"
        more = ("--device", "cpu") if words[1] == "experiment" else ()
        if "--workers" in words:
            found = forks.run([*words, *more], tmp_path, os.environ)
            assert found.returncode == 0, (line, found.stderr)
            assert found.stdout
        else:
            found = edgefl_train(*words[1:], *more)
            assert found.code == 0, (line, found.err)
            assert found.out
    assert (tmp_path / "runs/try.png").exists()
    assert not (tmp_path / "runs/positions").exists() and not (tmp_path / "runs/stages").exists()


def test_the_commands_for_real_data_plan(tmp_path, monkeypatch):
    """Files, parts and options are there; nothing is run."""
    text = "\n".join(blocks(GUIDE, "sh")).replace("\\\n", " ").replace("$EDGEFL_DATA", "/data")
    monkeypatch.setenv("EDGEFL_DATA", "/data")
    monkeypatch.chdir(ROOT)
    ours = [line for line in text.splitlines() if "experiment " in line]
    assert len(ours) == 5
    for line in ours:
        found = edgefl_train(*shlex.split(line)[1:], "--dry-run")
        assert found.code == 0 and "edgefl-train run " in found.out, found.err


@pytest.mark.parametrize(
    ("place", "methods", "first"), [(0, ["fedavg", "fedevprompt"], []), (1, ["finetune"] * 4, ["fedmae"])]
)
def test_the_examples_are_files(place, methods, first, tmp_path):
    (tmp_path / "mine.toml").write_text(blocks(REFERENCE, "toml")[place], encoding="utf-8")
    experiment = read_experiment(tmp_path / "mine.toml")
    for tiny in (False, True):
        runs = plan_runs(experiment, Choice(out=tmp_path, tiny=tiny), {})
        assert [run.settings.method for run in runs] == methods
        assert [run.settings.method for run in pretraining_of(runs)] == first
