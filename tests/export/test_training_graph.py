"""The training graph against the trainer's own local round, and as a member of a bundle that a device learns with.

Tracing a step takes half a minute of processor time even for a network of two blocks: what needs one is marked slow.
"""

import copy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from PIL import Image
from tests.export.conftest import write_run
from tests.export.learning_bundles import prompt_bundle
from tests.shared import Shared

from edgefl_client.home import Home
from edgefl_client.learning import fedevprompt
from edgefl_client.learning.fedevprompt import FedEvPromptLearner
from edgefl_client.learning.options import TrainOptions
from edgefl_client.learning.own_pictures import Dealt
from edgefl_client.learning.picture_rows import PreparedRows
from edgefl_client.learning.round_alone import run_train
from edgefl_client.learning.round_learner import Circumstances, PointFile
from edgefl_client.scoring.personal import load_personal
from edgefl_export.bundles.assemble import build_members, site_model
from edgefl_export.bundles.training import learned_method, traced
from edgefl_export.errors import ExportError, GateError
from edgefl_export.methods.fedevprompt import (
    FedEvPromptTrainerSteps,
    prepared,
    prompt_form,
    rate_inputs,
    step_of,
    training_plan,
)
from edgefl_export.parity.step_parity import check_steps, run_step
from edgefl_protocol import Payload
from edgefl_protocol.bundle import Bundle
from edgefl_protocol.bundle.fedevprompt_plan import FedEvPromptPlan, PromptForm, constants, fresh_state
from edgefl_protocol.bundle.learning_plan import GRAPH
from edgefl_protocol.bundle.onnx_wire import read_graph
from edgefl_protocol.pictures.preprocess import Preprocess
from edgefl_trainer.contract import Examples, Predictor, Site, State, Task
from edgefl_trainer.data.lesions import draw_lesion
from edgefl_trainer.engine.models import open_run
from edgefl_trainer.learning.evidential import STATISTICS, EvidentialRecipe
from edgefl_trainer.learning.maps.sharing import MapSharing
from edgefl_trainer.methods.fedevprompt import FedEvPrompt

ROWS, BATCH = 77, 8  # ten batches, the last of five


@pytest.fixture(scope="module")
def bundle(shared: Shared) -> Bundle:
    """Made by the command line, with its training step."""
    made = prompt_bundle(shared)
    assert {"loss", "prompts.b", "prompts.t", "head.weight", "head.bias"} <= set(made.gates)
    assert all(figure["worst"] <= figure["allowed"] for figure in made.gates.values())
    return made.load()


def a_site(backbone, classes: int, seed: int, losses: list[float]) -> Site:
    rng = np.random.default_rng(5)
    images = rng.integers(0, 256, (ROWS, 36, 36, 3), np.uint8)
    labels = rng.choice(classes, ROWS, p=[0.6, 0.3, 0.1])
    rows = Examples(images, labels, np.arange(ROWS))
    none = replace(rows, rows=rows.rows[:0])
    task = Task(name="all", classes=tuple("abc"), backbone=backbone.spec, rounds=5, epochs=1, seed=seed)

    def report(facts) -> None:
        if "step" in facts:
            losses.append(facts["loss"])

    return Site(name="north", task=task, backbone=backbone, train=rows, tune=none, unlabelled=none, report=report)


def others(tokens: int) -> dict[str, np.ndarray]:
    """Maps of two peers; nobody holds class 2, and the peers hold different numbers."""
    rng = np.random.default_rng(6)
    maps = {"maps.0.0": 5, "maps.1.0": 2, "maps.1.1": 3}
    return {
        name: (lambda m: m / m.max(1, keepdims=True))(rng.random((n, tokens))).astype(np.float16)
        for name, n in maps.items()
    }


def a_round_apart(
    predictor: Predictor, score: bytes, graph: bytes, plan: FedEvPromptPlan, method: FedEvPrompt, folder: Path
) -> dict[str, float]:
    """‖Δ‖₂/‖reference‖₂ of everything that round 2 leaves, from the trainer's state after round 1: what
    `FedEvPrompt.local_round` gives against what a device does with these two graphs. The device's bundle is calibrated,
    the trainer's model is not yet; both send the same pictures' maps."""
    losses: list[float] = []
    module = predictor.module
    site = a_site(module.backbone, 3, plan.seed, losses)
    maps = others(module.vit.spec.tokens)
    weights = {name: np.array(value) for name, value in predictor.tensors.items()}
    begun = State(
        {name: weights[name] for name in (*method.recipe.trained, *STATISTICS) if name in weights},
        {"readout": module.options.readout},
    )
    first, second = (Payload(maps, {"round": number, "rounds": 5, "phase": "train"}) for number in (1, 2))
    before, _ = method.local_round(site, begun, first)
    losses.clear()
    reference, reply = method.local_round(site, before, second)

    weights["temperature"] = np.full((), 0.2, np.float32)
    manifest, labels = SimpleNamespace(min_runtime="1.23"), SimpleNamespace(classes=site.task.classes)
    bundle = SimpleNamespace(
        weights=weights, extras={GRAPH: graph}, manifest=manifest, labels=labels, training=plan, score_onnx=score,
        sha256="0" * 64, preprocess=Preprocess(size=site.train.images.shape[1]),
    )  # fmt: skip
    rows = PreparedRows(site.train.images, site.train.targets, tuple(f"{row:064x}" for row in range(ROWS)))
    around = Circumstances(points=PointFile(folder / "point"), site=site.name, options=TrainOptions(threads=1))
    learner = FedEvPromptLearner(bundle, Dealt(learn=rows, held=rows.take(np.zeros(ROWS, np.bool_))), around)
    state = {name: before.arrays[name] for name in plan.state if name in before.arrays}
    state["optimizer.step"] = np.asarray(before.values["optimizer.step"], np.int64)
    told: list[dict[str, Any]] = []
    found, sent = learner.local_round(state, second, lambda facts: told.append(dict(facts)))

    assert int(found["optimizer.step"]) == int(reference.values["optimizer.step"]) == 20
    assert plan.kl_weight(2, 0) == 0.5 and next(facts["kd"] for facts in told if "summary" in facts) > 0  # both active
    pairs = {name: (reference.arrays[name], found[name]) for name in plan.state if name != "optimizer.step"}
    pairs["loss"] = (np.array(losses), np.array([facts["loss"] for facts in told if "step" in facts]))
    moved = np.linalg.norm(reference.arrays["prompts.t"] - before.arrays["prompts.t"])
    assert moved > 1e-3  # something was learned
    assert set(sent.arrays) == set(reply.arrays) == {"maps.0", "maps.1", "maps.2"}
    for name, value in reply.arrays.items():  # the same pictures' maps, in half precision
        np.testing.assert_allclose(sent.arrays[name], value, atol=2e-3, err_msg=name)
    return {name: float(np.linalg.norm(a - b) / np.linalg.norm(a)) for name, (a, b) in pairs.items()}


@pytest.fixture
def no_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    """A site of the trainer has no gate: whatever a round learned is shared."""
    monkeypatch.setattr(
        fedevprompt, "judge", lambda *given, **more: SimpleNamespace(passed=True, no_worse_than_bundle=True)
    )


def assert_parity(distances: dict[str, float]) -> None:
    for name, distance in distances.items():
        assert distance <= (1e-3 if name.startswith("optimizer.") else 1e-4), (name, distance)


@pytest.mark.slow
def test_a_devices_round_is_the_trainers(predictor, bundle, no_gate, tmp_path):
    """docs/design.md 9: float32, same draws, KL and distillation active, ten steps from a trained state; softplus,
    renormalised rollout. Distillation weighs a hundred times what it usually does: at 1e-6 its whole gradient is less
    than moments may differ by."""
    sharing = MapSharing(kd_weight=1e-4)
    recipe = EvidentialRecipe(batch=BATCH, b_blocks=1, anneal_epochs=2, head_norm="standardise", readout="cls")
    plan = replace(bundle.training, batch=BATCH, epochs=1, epochs_before=0, anneal_epochs=2, kd_weight=1e-4)
    assert dict(plan.rates) == {"prompts.b": 2.5e-4, "prompts.t": 5e-4, "head.weight": 5e-4, "head.bias": 5e-4}
    method = FedEvPrompt(recipe=recipe, maps=sharing)
    assert_parity(a_round_apart(predictor, bundle.score_onnx, bundle.extras[GRAPH], plan, method, tmp_path))


@pytest.mark.slow
@pytest.mark.long
def test_a_devices_round_with_the_other_choices_is_the_trainers(make, no_gate, tmp_path):
    """The same with ReLU evidence, mean readout, sink rollout, nearest metric and the mean over peers."""
    sharing = MapSharing(rollout="sink", kd_metric="nearest", kd_peers="mean5", kd_weight=1e-4)
    recipe = EvidentialRecipe(
        batch=BATCH, b_blocks=1, anneal_epochs=2, head_norm="none", readout="mean", evidence="relu", lr_b=1e-3
    )
    predictor = make("vit:128x2/12", readout="mean", evidence="relu", head_norm="none", prefix_mode="sink")
    plan = FedEvPromptPlan(
        trained=recipe.trained, rates=recipe.rates, weight_decay=recipe.weight_decay, batch=BATCH, epochs=1,
        epochs_before=0, anneal_epochs=2, anneal_clock="run", kd_weight=1e-4, kd_peers="mean5", prior_floor=1e-2,
        balance="none", augment="dihedral", seed=0, form=prompt_form(predictor, sharing),
    )  # fmt: skip
    assert (plan.form.evidence, plan.form.readout, plan.form.rollout) == ("relu", "mean", "sink")
    ready, step = prepared(plan, predictor, predictor.tensors), step_of(plan, predictor)
    graphs = traced(ready)
    graph = graphs[GRAPH]
    score = build_members(site_model(open_run(write_run(tmp_path / "run", predictor)), "north")).files["score.onnx"]
    method = FedEvPrompt(recipe=recipe, maps=sharing)
    assert_parity(a_round_apart(predictor, score, graph, plan, method, tmp_path))
    wrong = replace(plan, rates={**plan.rates, "prompts.b": 2e-3})
    figures = ready.check(graphs)
    assert max(figure.worst for figure in figures) < 1e-4
    with pytest.raises(GateError, match="within 10 steps"):  # the gate is able to fail
        check_steps(graph, FedEvPromptTrainerSteps(replace(step, gram=step.gram * 50), wrong, predictor.tensors))


@pytest.mark.slow
def test_bundle_tells_nothing_of_this_machine_and_takes_any_batch(bundle, predictor):
    """docs/security.md check 29; the batch axis is free, as an epoch's last batch is smaller."""
    graph = bundle.extras[GRAPH]
    assert not any(text in graph for text in (b".py", b"/home", b"stack_trace", b"site-packages", b"edgefl_trainer"))
    assert bundle.training.batch == 32 and bundle.training.kd_weight == 1e-6
    plan, weights, rng = bundle.training, bundle.weights, np.random.default_rng(7)
    step, session = step_of(plan, predictor), onnxruntime.InferenceSession(graph)
    numbers = {name: np.asarray(0.5, np.float32) for name in ("kl_weight", "kd_weight", "weight_decay")}
    means = rng.random((3, bundle_tokens(bundle)), np.float32)
    fixed = {"peers.means": means, "peers.counts": np.array([2, 0, 1], np.float32), **numbers, **rate_inputs(plan)}
    for size in (1, 2, 19):  # traced with four
        image = rng.integers(0, 256, (size, 36, 36, 3), np.uint8)
        given = {"image": image, "target": rng.integers(0, 3, size), **fresh_state(plan, weights), **fixed}
        given |= constants(plan, weights)
        tensors = {name: torch.from_numpy(np.array(value)) for name, value in given.items()}
        expected, found = step(tensors), run_step(session, given)
        for name in ("loss", "kd", "next.optimizer.exp_avg.prompts.t", "next.head.weight"):
            np.testing.assert_allclose(found[name], expected[name].numpy(), rtol=1e-4, atol=1e-6, err_msg=name)


@pytest.mark.slow
def test_a_device_learns_a_round_with_it(bundle, tmp_path):
    """From a table of pictures to a verdict, with nothing but numpy, Pillow and onnxruntime behind it."""
    rows = ["image,label"]
    for label in ("MEL", "NV"):
        for number in range(26):
            picture = draw_lesion(label, site=0, number=number, px=48)[0]
            Image.fromarray(picture).save(tmp_path / f"{label}{number}.png")
            rows.append(f"{label}{number}.png,{label}")
    (tmp_path / "labels.csv").write_text("\n".join(rows))
    options = TrainOptions(threads=1, epochs=3, batch=4)
    others_maps = Payload(others(bundle_tokens(bundle)), {"round": 1})
    found = run_train(Home(tmp_path / "home"), bundle, tmp_path / "labels.csv", options, others=others_maps)
    assert (found["state"], found["learned_from"], found["held_back"]) == ("done", 12, 40)
    assert found["classes_with_others_maps"] == 2
    assert found["gate"]["least_of_a_class"] == 20
    assert (load_personal(Home(tmp_path / "home"), bundle) is not None) is found["gate"]["passed"]


def bundle_tokens(bundle: Bundle) -> int:
    return read_graph(bundle.score_onnx).outputs["map"].dims[-1]


def test_methods_without_a_step_are_refused(run_folder, predictor):
    """One sentence that says what a device can learn."""
    run = open_run(run_folder)
    other = replace(run, settings=replace(run.settings, method="fedavg"))
    with pytest.raises(ExportError, match=r"is fedavg; a device can learn fedevprompt with .*, or fedclf on"):
        learned_method(other, predictor)


@pytest.mark.parametrize("hyper", [{"rollout_from": 1}, {"kd_batch": "sum"}], ids=str)
def test_a_run_whose_maps_a_device_cannot_make_is_not_exported_for_learning(run_folder, predictor, hyper):
    """The step in a bundle rolls out all blocks and takes the mean over a batch; docs/methods.md 1.4 and 1.5."""
    run = open_run(run_folder)
    other = replace(run, settings=replace(run.settings, hyper=hyper))
    with pytest.raises(ExportError, match=f"{next(iter(hyper))}.*which no device can do: leave --with-training out"):
        training_plan(other, predictor)


def test_a_run_with_another_optimiser_is_not_exported_for_learning(run_folder, predictor):
    """The step in a bundle is AdamW's; docs/methods.md 1.6."""
    run = open_run(run_folder)
    other = replace(run, settings=replace(run.settings, hyper={"optimizer": "sgd"}))
    with pytest.raises(ExportError, match="optimizer is sgd, but a device learns with adamw"):
        learned_method(other, predictor).prepare(other, predictor, predictor.tensors)


def test_a_record_holds_the_batch_of_a_gpu_server(run_folder, predictor):
    """docs/decisions/0037: a run in batches of 2,048 is exported; a device's step takes as many pictures as it has."""
    run = open_run(run_folder)
    assert training_plan(replace(run, settings=replace(run.settings, hyper={"batch": 2048})), predictor).batch == 2048


def test_settings_that_no_device_can_have_are_a_sentence(run_folder, predictor):
    """A run of 20,000 epochs a round, as no run of today has: no traceback, and what to do."""
    run = open_run(run_folder)
    settings = copy.copy(run.settings)
    object.__setattr__(settings, "epochs", 20_000)
    other = replace(run, settings=settings)
    with pytest.raises(ExportError, match=r"a device cannot learn as the run did: epochs must be.*--with-training"):
        training_plan(other, predictor)


def test_the_record_says_what_stands_in_the_graph(make):
    """Decision 0028: every choice that a device cannot change is told in the words of the method's settings."""
    predictor = make("vit:128x2/12", readout="mean", evidence="relu", head_norm="none", prefix_mode="sink")
    told = prompt_form(predictor, MapSharing(kd_metric="nearest"))
    prompts = predictor.tensors["prompts.b"]
    assert told == PromptForm(
        network=predictor.module.vit.spec.sha256, prompts="bt", b_blocks=1, prompt_length=prompts.shape[2],
        prefix="after", evidence="relu", readout="mean", head_norm="none", rollout="sink",
        kd_metric="nearest",
    )  # fmt: skip
