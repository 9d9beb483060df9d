"""Time of one training step on a device: the bundle's graph on onnxruntime against the trainer's step in PyTorch eager.

Both learn the same batches on the same number of threads in one process, in alternating blocks of warm repeats; printed
are medians of block medians, as ratios, of wall time and of processor time (on a busy machine the second is the one to
read). FedEvPrompt: PyTorch is timed with the others' maps, where every block's probabilities are needed, and without,
where its attention is fused; the graph always computes the maps. FedCLF: views are given, augmentation is not timed.
onnxruntime is set up as on a device.

    python -m benchmarks.device.device_training_step fedevprompt --backbone vit:192x12/12 --image-px 84 --batch 32
    python -m benchmarks.device.device_training_step fedclf --backbone cnn:resnet18 --image-px 72 --batch 64
"""

import argparse
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch

from edgefl_client.runtime import load_graph
from edgefl_export.bundles.training import traced
from edgefl_export.methods import fedclf as clf
from edgefl_export.methods import fedevprompt as prompts
from edgefl_protocol.bundle.fedevprompt_plan import FedEvPromptPlan, fresh_state
from edgefl_protocol.bundle.learning_plan import GRAPH, NEXT
from edgefl_trainer.contract import Predictor
from edgefl_trainer.engine.settings import RunSettings
from edgefl_trainer.learning.evidential import EvidentialRecipe, initial_tensors
from edgefl_trainer.learning.maps.sharing import MapSharing
from edgefl_trainer.methods.fedclf import FedCLF
from edgefl_trainer.models.backbones import load_backbone
from edgefl_trainer.models.cnn import FrozenCNN
from edgefl_trainer.models.scoring import ScoreModule, ScoreOptions

CLASSES = 8
HELD = 1024  # negatives of a FedCLF step
DEFAULTS = {"fedevprompt": ("vit:192x12/12", 84, 32), "fedclf": ("cnn:resnet18", 72, 64)}
Step = Callable[[], Any]
Ways = tuple[dict[str, Step], str]


def main() -> None:
    """Read the arguments, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("method", choices=DEFAULTS)
    parser.add_argument("--backbone")
    parser.add_argument("--image-px", type=int)
    parser.add_argument("--batch", type=int)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--blocks", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--graph", type=Path, help="keep the traced graph here, and use it where it is there")
    given = parser.parse_args()
    backbone, side, batch = DEFAULTS[given.method]
    given.backbone, given.image_px = given.backbone or backbone, given.image_px or side
    given.batch = given.batch or batch
    torch.set_num_threads(given.threads)
    ways, base = (fedevprompt if given.method == "fedevprompt" else fedclf)(given)
    print(
        f"{given.method}: {given.backbone} at {given.image_px} px, batch {given.batch}, {given.threads} threads, "
        f"load average {os.getloadavg()[0]:.1f}; {platform.machine()}, onnxruntime {onnxruntime.__version__}, torch "
        f"{torch.__version__}"
    )
    times = measure(ways, given.blocks, given.repeats)
    print("| step | wall s | ratio | processor s | ratio |\n|---|---|---|---|---|")
    for name, (wall, busy) in times.items():
        print(f"| {name} | {wall:.3f} | {wall / times[base][0]:.2f} | {busy:.3f} | {busy / times[base][1]:.2f} |")


def fedevprompt(given: argparse.Namespace) -> Ways:
    """Ways to take a step of FedEvPrompt, and the one that ratios refer to."""
    plan, predictor, weights = a_model(given.backbone, given.image_px, EvidentialRecipe())
    step = prompts.step_of(plan, predictor)
    graph = kept(given.graph, lambda: traced(prompts.prepared(plan, predictor, weights))[GRAPH])
    rng, side = np.random.default_rng(0), given.image_px
    drawn = {
        **prompts.FedEvPromptTrainerSteps(step, plan, weights).batch(0),
        "image": rng.integers(0, 256, (given.batch, side, side, 3), np.uint8),
        "target": rng.integers(0, CLASSES, given.batch),
    }
    session, state = load_graph(graph, given.threads), fresh_state(plan, weights)
    ways: dict[str, Step] = {"graph, onnxruntime": stepping(session, plan.outputs, drawn, state)}
    for name, need_maps in (("PyTorch, with maps", True), ("PyTorch, without maps", False)):
        trainer = prompts.FedEvPromptTrainerSteps(step, plan, weights)

        def run(trainer: prompts.FedEvPromptTrainerSteps = trainer, need_maps: bool = need_maps) -> None:
            trainer.step(drawn, need_maps=need_maps)

        ways[name] = run
    return ways, "PyTorch, with maps"


def fedclf(given: argparse.Namespace) -> Ways:
    """Ways to take a step of FedCLF, and the one that ratios refer to."""
    backbone = load_backbone(given.backbone, image_px=given.image_px, seed=0)
    if not isinstance(backbone, FrozenCNN):
        sys.exit(f"{given.backbone} is no convolutional network; name one such as cnn:resnet18")
    spec, method = backbone.spec, FedCLF()
    settings = RunSettings(method="fedclf", data=("lesions:",), backbone=given.backbone, image_px=given.image_px)
    model = clf.network(method.contrast, spec, 0, backbone)
    plan = clf.contrast_plan(method, settings, spec, model)
    graph = kept(given.graph, lambda: traced(clf.prepared(plan, model, spec))[GRAPH])
    rng = np.random.default_rng(0)
    first, second = (rng.random((given.batch, 3, plan.view_px, plan.view_px), np.float32) for _ in range(2))
    trainer = clf.FedCLFTrainerSteps(model, plan, spec, held=HELD)
    drawn = trainer.inputs(first, second, plan.lr)
    trainer.step(drawn)
    ways: dict[str, Step] = {
        "graph, onnxruntime": stepping(load_graph(graph, given.threads), plan.outputs, drawn, trainer.state()),
        "PyTorch": lambda: trainer.step(drawn),
    }
    return ways, "PyTorch"


def kept(place: Path | None, make: Callable[[], bytes]) -> bytes:
    """The graph in a file, or a fresh one, which is then kept there."""
    if place is not None and place.exists():
        return place.read_bytes()
    began = time.process_time()
    graph = make()
    print(f"exported in {time.process_time() - began:.0f} s of processor time, {len(graph):,} bytes", flush=True)
    if place is not None:
        place.write_bytes(graph)
    return graph


def a_model(
    backbone: str, image_px: int, recipe: EvidentialRecipe
) -> tuple[FedEvPromptPlan, Predictor, dict[str, Any]]:
    """A fresh model: times do not depend on the values."""
    frozen = load_backbone(backbone, image_px=image_px, seed=0)
    tensors = initial_tensors(recipe, frozen.spec, CLASSES, 0)
    weights: dict[str, Any] = {name: value.numpy() for name, value in tensors.items()}
    weights |= {"prior": np.ones(CLASSES, np.float32), "temperature": np.asarray(1, np.float32)}
    predictor = Predictor(ScoreModule(frozen, ScoreOptions()), weights, (True,) * CLASSES)
    rates = {name: 2.5e-4 if name == "prompts.b" else 5e-4 for name in recipe.trained}
    plan = FedEvPromptPlan(
        trained=recipe.trained, rates=rates, weight_decay=1e-2, batch=32, epochs=2, epochs_before=0, anneal_epochs=10,
        anneal_clock="run", kd_weight=1e-6, kd_peers="sum", prior_floor=1e-2, balance="none", augment="none", seed=0,
        form=prompts.prompt_form(predictor, MapSharing()),
    )  # fmt: skip
    return plan, predictor, weights


def stepping(
    session: onnxruntime.InferenceSession, outputs: tuple[str, ...], fixed: dict[str, Any], state: dict[str, Any]
) -> Step:
    """One step on onnxruntime; the state goes round as on a device."""
    names = list(outputs)

    def run() -> None:
        found = dict(zip(names, session.run(names, {**fixed, **state}), strict=True))
        state.update({name: found[NEXT + name] for name in state})

    return run


def measure(ways: dict[str, Step], blocks: int, repeats: int) -> dict[str, tuple[float, float]]:
    """Median of block medians of wall and processor seconds, blocks alternating."""
    wall: dict[str, list[float]] = {name: [] for name in ways}
    busy: dict[str, list[float]] = {name: [] for name in ways}
    for block in range(blocks):
        for name, run in ways.items():
            run()  # warm
            marks = []
            for _ in range(repeats):
                started, worked = time.perf_counter(), time.process_time()
                run()
                marks.append((time.perf_counter() - started, time.process_time() - worked))
            wall[name].append(statistics.median(mark[0] for mark in marks))
            busy[name].append(statistics.median(mark[1] for mark in marks))
            print(
                f"block {block + 1}: {name} {wall[name][-1]:.2f} s, {busy[name][-1]:.2f} s", file=sys.stderr, flush=True
            )
    return {name: (statistics.median(wall[name]), statistics.median(busy[name])) for name in ways}


if __name__ == "__main__":
    main()
