"""FedCLF's graphs against the trainer's own round, and devices and trainer sites in one federation.

Tracing a step takes half a minute of processor time even for a small network: what needs one is marked slow.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.export.learning_bundles import HYPER, SIDE, LearningBundle, cnn_run, contrast_bundle, learned_run
from tests.shared import Shared

from edgefl_client.learning.learner_table import learner_for
from edgefl_client.learning.options import TrainOptions
from edgefl_client.learning.own_pictures import Dealt
from edgefl_client.learning.picture_rows import PreparedRows
from edgefl_client.learning.round_learner import Circumstances, PointFile, RoundLearner
from edgefl_client.learning.views import draw, views
from edgefl_export.errors import ExportError, GateError
from edgefl_export.methods.fedclf import FedCLFTrainerSteps, check_contrast, contrast_method, network
from edgefl_protocol import Payload
from edgefl_protocol.bundle import Bundle
from edgefl_protocol.bundle.fedclf_plan import ENCODER, FedCLFPlan
from edgefl_protocol.bundle.learning_plan import GRAPH
from edgefl_protocol.rules.draws import generator
from edgefl_trainer.augment import normalised
from edgefl_trainer.contract import Examples, Phase, Site, State, Task
from edgefl_trainer.engine.hyper_parameters import build
from edgefl_trainer.engine.models import open_run
from edgefl_trainer.learning.unlabelled import self_supervised
from edgefl_trainer.methods.fedclf import FedCLF
from edgefl_trainer.models.backbones import load_backbone

ROWS = 33  # with sixteen a batch: two batches, a single picture joins the last one
PIXELS = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


@pytest.fixture(scope="module")
def made(shared: Shared) -> LearningBundle:
    return contrast_bundle(shared)


@pytest.fixture(scope="module")
def run(made: LearningBundle) -> Path:
    return made.run


@pytest.fixture(scope="module")
def bundle(made: LearningBundle) -> Bundle:
    """Made by the command line, with its training step."""
    facts = made.gates
    assert {"loss", "parameters", "slow parameters", "momentum buffers", "statistics", "features"} <= set(facts)
    assert all(figure["worst"] <= figure["allowed"] for figure in facts.values())
    return made.load()


def plan_of(bundle: Bundle) -> FedCLFPlan:
    assert isinstance(bundle.training, FedCLFPlan)
    return bundle.training


def pictures(seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    coarse = rng.integers(0, 256, (ROWS, 6, 6, 3)).repeat(6, axis=1).repeat(6, axis=2)
    return np.clip(coarse + rng.integers(-20, 21, (ROWS, SIDE, SIDE, 3)), 0, 255).astype(np.uint8)


def the_task(rounds: int) -> Task:
    spec = load_backbone("cnn:test_resnet", image_px=SIDE, seed=1).spec
    return Task(name="pixels", classes=(), backbone=spec, rounds=rounds, epochs=1, seed=4)


def trainer_site(name: str, task: Task, seed: int) -> Site:
    rows = Examples(pictures(seed), np.full(ROWS, -1), np.arange(ROWS))
    none = replace(rows, rows=rows.rows[:0])
    return Site(name=name, task=task, backbone=None, train=none, tune=none, unlabelled=rows)


def device(bundle: Bundle, name: str, seed: int, folder: Path) -> RoundLearner:
    images = pictures(seed)
    rows = PreparedRows(images, np.zeros(ROWS, np.int64), tuple(f"{index:064x}" for index in range(ROWS)))
    none = rows.take(np.zeros(ROWS, np.bool_))
    around = Circumstances(
        points=PointFile(folder / f"{name}.payload"), site=name, options=TrainOptions(threads=1), maps_per_class=0
    )
    return learner_for(bundle, Dealt(learn=rows, held=none), around)


def with_phase(payload: Payload, phase: Phase, rounds: int) -> Payload:
    return Payload(payload.arrays, {"phase": phase.kind, "round": phase.round, "rounds": rounds})


def distances(reference: Mapping[str, np.ndarray], found: Mapping[str, np.ndarray]) -> dict[str, float]:
    assert set(reference) == set(found)
    assert {n: (v.dtype, v.shape) for n, v in reference.items()} == {n: (v.dtype, v.shape) for n, v in found.items()}
    wide = {name: value.astype(np.float64) for name, value in reference.items()}
    return {n: float(np.linalg.norm(v - found[n]) / max(np.linalg.norm(v), 1e-30)) for n, v in wide.items()}


@pytest.fixture
def same_views(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trainer sees what the device draws: kornia's draws cannot be repeated without it."""

    def prepared(site: Site, recipe, kind: str, count: int):
        side, steps = recipe.side(site.task.backbone), iter(range(1000))

        def prepare(images, rng):
            if count == 2:  # a step of learning: the device draws each step apart
                rng = generator(site.task.seed, site.name, "views", 1, 0, next(steps))
            pixels = images.numpy()
            found = [views(pixels, draw(rng, len(pixels), SIDE), side) for _ in range(count)]
            return tuple(normalised(torch.from_numpy(view), *PIXELS) for view in found)

        return prepare

    monkeypatch.setattr(self_supervised, "views", prepared)


@pytest.mark.slow
@pytest.mark.parametrize("negatives", ["remote", "both", "local"])
def test_a_round_of_the_device_is_the_trainers(bundle, tmp_path, same_views, negatives):
    """docs/design.md 9: the same pictures, views and draws give the trainer's round: bank, weights, statistics.

    Orders, batches, rates, the slow encoder's pace, the others' features that enter and both queues must agree."""
    task, method = the_task(rounds=5), build(FedCLF, {**HYPER, "negatives": negatives})
    bundle = replace(bundle, training=replace(plan_of(bundle), negatives=negatives))
    site, ours = trainer_site("south", task, 7), device(bundle, "south", 7, tmp_path)
    server = method.start(task, ["south", "west"])
    rng = np.random.default_rng(8)
    others = rng.normal(size=(50, 128)).astype(np.float32)
    others = (others / np.linalg.norm(others, axis=1, keepdims=True)).astype(np.float16)
    state, kept = State(), ours.start()
    for phase in [phase for phase in method.phases(5) if phase.round <= 1]:
        sent = method.broadcast(server, phase, ["south", "west"])["south"]
        arrays = {**sent.arrays, **({"remote": others} if phase.kind == "train" and negatives != "local" else {})}
        broadcast = with_phase(Payload(arrays, {}), phase, 5)
        state, expected = method.local_round(site, state, broadcast)
        kept, found = ours.local_round(kept, broadcast, lambda facts: None)
        assert found.scalars["n_train"] == expected.scalars["n_train"] == ROWS
        far = distances(expected.arrays, found.arrays)
        features = far.pop("features", 0.0)
        assert features <= 1e-3  # of float16
        # A gradient that turns on the corner of a ReLU shows in a shift of batch norm or two, which began at zero.
        assert sorted(far.values(), reverse=True)[2:3] <= [1e-4] and max(far.values(), default=0.0) <= 1e-2
        assert max(distances(state.arrays, kept).values()) <= 1e-4
    assert np.linalg.norm(found.arrays["head.0.weight"] - server.arrays["head.0.weight"]) > 1e-3  # it learned


@pytest.mark.slow
def test_devices_and_trainer_sites_learn_in_one_federation(bundle, tmp_path):
    """docs/design.md 4 and 9: the server's half takes their replies alike, and averages them by numbers of images."""
    rounds, names = 2, ("a-site", "b-device", "c-site", "d-device")
    task, method = the_task(rounds), build(FedCLF, HYPER)
    sites = {name: trainer_site(name, task, ord(name[0])) for name in names if name.endswith("site")}
    learners = {name: device(bundle, name, ord(name[0]), tmp_path) for name in names if name.endswith("device")}
    server, states = method.start(task, names), {name: State() for name in names}
    for phase in method.phases(rounds):
        broadcasts = method.broadcast(server, phase, names)
        replies = {}
        for name in names:
            broadcast = with_phase(broadcasts[name], phase, rounds)
            if name in sites:
                states[name], replies[name] = method.local_round(sites[name], states[name], broadcast)
            else:
                kept, replies[name] = learners[name].local_round(states[name].arrays, broadcast, lambda facts: None)
                states[name] = State(kept)
                assert replies[name].scalars["site_sha256"] == states[name].digest()
        forms = [{n: (v.dtype, v.shape) for n, v in reply.arrays.items()} for reply in replies.values()]
        assert forms[0] == forms[1] == forms[2] == forms[3]
        if phase.kind == "train":
            assert broadcasts["b-device"].arrays["remote"].shape == (3 * ROWS, 128)  # what a round made, not all of K
        server = method.aggregate(server, phase, replies)
        if phase.kind == "train":
            mean = np.mean([reply.arrays["head.2.weight"].astype(np.float64) for reply in replies.values()], axis=0)
            np.testing.assert_allclose(server.arrays["head.2.weight"], mean, rtol=1e-6)  # all hold as many pictures
    assert {f"features.{name}" for name in names} <= set(server.arrays)
    assert all(np.isfinite(value).all() for value in server.arrays.values())


@pytest.mark.slow
def test_the_gate_refuses_another_step(bundle, run):
    """docs/design.md 9: a graph that learns otherwise makes no bundle; here its temperature is another."""
    plan, finished = plan_of(bundle), open_run(run)
    method, settings = contrast_method(finished)
    spec = finished.backbone.spec
    model = network(method.contrast, spec, settings.seed, finished.backbone)
    other = replace(plan, temperature=0.3)
    with pytest.raises(GateError, match=r"differs from the trainer by .* no bundle is made"):
        check_contrast(bundle.extras[GRAPH], bundle.extras[ENCODER], FedCLFTrainerSteps(model, other, spec))


@pytest.mark.slow
def test_the_file_of_a_step_stays_small(bundle):
    """docs/design.md 9: weights are inputs, so the graph holds none."""
    plan = plan_of(bundle)
    assert len(bundle.extras[GRAPH]) < 1_000_000
    assert plan.view_px == SIDE * 8 // 9 and plan.batch == 16 and plan.queue == 40 and plan.seed == 4
    assert sum(name.endswith("running_var") for name in plan.statistics) == len(plan.counters)


def test_how_it_learns_comes_from_the_run_that_learned_the_backbone(tmp_path):
    """docs/decisions/0027: FedCLF's settings of that run, the method's defaults for any other, no guess where it is
    gone."""
    (tmp_path / "known").mkdir()
    method, settings = contrast_method(open_run(learned_run(tmp_path / "known")))
    assert method.contrast.queue == 40 and method.contrast.sgd.batch == 16 and settings.method == "fedclf"
    fresh, settings = contrast_method(open_run(cnn_run(tmp_path / "fresh", None)))
    assert fresh == FedCLF() and settings.method == "head"
    gone = cnn_run(tmp_path / "gone", tmp_path / "nowhere")
    with pytest.raises(ExportError, match="nowhere, the run that learned the backbone, does not exist"):
        contrast_method(open_run(gone))
