"""A method that devices learn is added, not spread: three files and an entry in each of three tables.

The files are those of `tests/integration/headavg`; nothing else of the product knows the method's name. Source:
docs/design.md 4; CONTRIBUTING.md, "Add a method that devices learn".
"""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from PIL import Image
from tests.export.conftest import make_predictor, write_run
from tests.integration.headavg import device, graph, method
from tests.shared import operators_read_once
from tests.told import told_task

from edgefl_client.home import Home
from edgefl_client.learning.errors import LearningError
from edgefl_client.learning.learner_table import LEARNERS
from edgefl_client.learning.limits import LearningLimits
from edgefl_client.learning.live_round import LiveRound, learn_live
from edgefl_client.learning.options import TrainOptions
from edgefl_client.learning.own_pictures import Table, read_dealt
from edgefl_export import cli
from edgefl_export.methods.table import GRAPHS
from edgefl_protocol import Payload
from edgefl_protocol.bundle import Bundle, load_bundle
from edgefl_trainer.contract import Examples, Phase, Site, State, Task
from edgefl_trainer.data.lesions import draw_lesion
from edgefl_trainer.engine.models import open_run
from edgefl_trainer.methods import METHODS

pytestmark = pytest.mark.slow  # its bundle traces a step

NAME = "headavg"
OPTIONS = TrainOptions(threads=1, limits=LearningLimits(battery=lambda: None))


@pytest.fixture(scope="module")
def tables() -> object:
    """One entry in each table."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(METHODS, NAME, method.HeadAvg)
        patch.setitem(LEARNERS, NAME, device.HeadAvgLearner)  # type: ignore[arg-type]
        patch.setitem(GRAPHS, NAME, graph.LEARNED)
        yield


@pytest.fixture(scope="module")
def run_folder(tables: object, tmp_path_factory: pytest.TempPathFactory) -> Path:
    predictor = make_predictor("vit:64x1/12", output="softmax", head_norm="none", prompts=())
    folder = write_run(tmp_path_factory.mktemp("added") / "run", predictor)
    settings = replace(open_run(folder).settings, method=NAME, hyper={"lr": 0.25})
    (folder / "config.toml").write_text(settings.to_toml())
    return folder


@pytest.fixture(scope="module")
def bundle(run_folder: Path) -> Bundle:
    """Made by the command line: the gate compares ten steps of the graph with PyTorch's."""
    runner, keys, file = CliRunner(), run_folder / "keys", run_folder / "north.edgefl"
    assert runner.invoke(cli.main, ["keygen", str(keys)]).exit_code == 0
    words = ["bundle", str(run_folder), "--site", "north", "--sign", str(keys), "-o", str(file), "--with-training"]
    with operators_read_once():
        result = runner.invoke(cli.main, [*words, "--created", "1790000000", "--json"])
    assert result.exit_code == 0, result.stderr
    figures = json.loads(result.stdout)["training"]
    assert set(figures) == {"loss", *method.HEAD} and all(one["worst"] <= one["allowed"] for one in figures.values())
    signer = bytes.fromhex((keys / "signing.pub").read_text())
    return load_bundle(file.read_bytes(), [signer], 1_790_000_000_000)


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Table:
    folder, rows = tmp_path_factory.mktemp("pictures"), ["image,label"]
    for label in ("MEL", "NV"):
        for number in range(26):
            Image.fromarray(draw_lesion(label.upper(), site=0, number=number, px=48)[0]).save(
                folder / f"{label}{number}.png"
            )
            rows.append(f"{label}{number}.png,{label}")
    (folder / "labels.csv").write_text("\n".join(rows))
    return Table(file=folder / "labels.csv")


def a_round(bundle: Bundle, broadcast: Payload, **settings: float) -> LiveRound:
    task = told_task(
        method=NAME, classes=bundle.labels.classes, epochs=2, seed=5, train_rounds=2, travels=("weights",),
        settings=settings, backbone={"sha256": bundle.training.frozen_sha256},
    )  # fmt: skip
    return LiveRound(federation="skin", site="ward", task=task, broadcast=broadcast, permitted=lambda kinds, size: None)


def test_a_device_learns_a_round_of_an_added_method(bundle: Bundle, run_folder: Path, table: Table, tmp_path: Path):
    """The device's reply is the trainer's of the same pictures, draws and settings, and the server averages both."""
    backbone, classes = open_run(run_folder).backbone, bundle.labels.classes
    task = Task(name="all", classes=classes, backbone=backbone.spec, rounds=2, epochs=2, seed=5)
    ours = method.HeadAvg(lr=0.05)  # the federation's rate, neither the default nor the run's
    server, phase = ours.start(task, ["ward", "clinic"]), Phase("train", 1)
    sent = ours.broadcast(server, phase, ["ward", "clinic"])["ward"]
    broadcast = Payload(sent.arrays, {"phase": "train", "round": 1, "rounds": 2})

    facts, reply = learn_live(Home(tmp_path), bundle, table, OPTIONS, a_round(bundle, broadcast, lr=0.05))
    assert (facts["state"], facts["learned_from"]) == ("done", 12)

    rows = read_dealt(Home(tmp_path), bundle, table, OPTIONS.limits, lambda told: None).learn
    examples = Examples(rows.images, rows.labels, np.arange(len(rows)))
    none = replace(examples, rows=examples.rows[:0])
    site = Site(name="ward", task=task, backbone=backbone, train=examples, tune=none, unlabelled=none)
    _, expected = ours.local_round(site, State(), broadcast)
    for name in method.HEAD:
        far = np.linalg.norm(reply.arrays[name] - expected.arrays[name]) / np.linalg.norm(expected.arrays[name])
        assert far <= 1e-4 and np.linalg.norm(expected.arrays[name]) > 1e-3, (name, far)
    averaged = ours.aggregate(server, phase, {"ward": reply, "clinic": expected}).arrays
    np.testing.assert_allclose(averaged["head.weight"], expected.arrays["head.weight"], rtol=1e-3, atol=1e-6)


def test_its_settings_come_from_the_federation_and_its_record(bundle: Bundle, table: Table, tmp_path: Path):
    """What a federation does not name has the method's default, which the bundle tells."""
    from edgefl_client.learning.round_plan import agreed

    assert (bundle.training.kind, bundle.training.settings["lr"]) == (NAME, 0.25)
    assert agreed(bundle, {}, {}, complete=True).training.settings["lr"] == method.HeadAvg().lr
    assert agreed(bundle, {}, {}, complete=False).training.settings["lr"] == 0.25
    for settings, backbone, sentence in (
        ({"warmth": 3}, {}, "sets warmth, which this version does not know"),
        ({"lr": "fast"}, {}, "cannot learn with these settings: lr must be"),
        ({}, {"sha256": "0" * 64}, r"frozen network \(SHA-256\)"),
    ):
        with pytest.raises(LearningError, match=sentence):
            agreed(bundle, settings, backbone, complete=True)
    live = a_round(bundle, Payload({}, {"phase": "train", "round": 1}))
    with pytest.raises(LearningError, match="in this order"):  # rows of a head follow the classes' numbers
        other = replace(live.task, classes=live.task.classes[::-1])
        learn_live(Home(tmp_path), bundle, table, OPTIONS, replace(live, task=other))


def test_a_device_that_lacks_the_method_scores_and_says_so(bundle: Bundle, table: Table, tmp_path: Path):
    """An older device loads the bundle, whose record it can check, and asks for a newer version to learn with."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delitem(LEARNERS, NAME)  # type: ignore[arg-type]
        with pytest.raises(LearningError, match="does not know how to learn headavg; install a newer edgefl-derm"):
            live = a_round(bundle, Payload({}, {"phase": "train", "round": 1}))
            learn_live(Home(tmp_path), bundle, table, OPTIONS, live)
