"""Time of one FedEvPrompt training step: the bundle's graph on onnxruntime against the trainer's step in PyTorch eager.

Both learn the same batches on the same number of threads in one process, in alternating blocks of warm repeats; printed
are medians of block medians, as ratios, of wall time and of processor time (on a busy machine the second is the one to
read). PyTorch is timed with the others' maps, where every block's probabilities are needed, and without, where its
attention is fused; the graph always computes the maps. onnxruntime's threads do not spin, as on a device.

    python benchmarks/device_training_step.py --backbone vit:192x12/12 --image-px 84 --batch 32
"""

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import onnxruntime
import torch

from edgefl_export.training_gates import Batches, TrainerSteps, drawn_batches, rate_inputs
from edgefl_export.training_graph import export_training_graph
from edgefl_export.training_members import example_inputs, training_step
from edgefl_export.training_step import FedEvPromptStep
from edgefl_protocol.training import NEXT, TrainingPlan, constants, fresh_state
from edgefl_trainer.contract import Predictor
from edgefl_trainer.learning.evidential import EvidentialRecipe, initial_tensors
from edgefl_trainer.models.backbones import load_backbone
from edgefl_trainer.models.scoring import ScoreModule, ScoreOptions

CLASSES = 8
Step = Callable[[], None]


def main() -> None:
    """Read the arguments, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backbone", default="vit:192x12/12")
    parser.add_argument("--image-px", type=int, default=84)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--blocks", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=3)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    recipe = EvidentialRecipe()
    step, plan, weights = a_step(given.backbone, given.image_px, recipe)
    began = time.process_time()
    graph = export_training_graph(step, plan, example_inputs(step, plan, weights))
    print(f"exported in {time.process_time() - began:.0f} s of processor time, {len(graph):,} bytes")
    batches = drawn_batches(plan, given.image_px, CLASSES, step.module.vit.spec.tokens)
    rng = np.random.default_rng(0)
    side = given.image_px
    image = rng.integers(0, 256, (given.batch, side, side, 3), np.uint8)
    target = rng.integers(0, CLASSES, given.batch)
    ways = {
        "graph, onnxruntime": graph_step(graph, plan, weights, image, target, batches, given.threads),
        "PyTorch, with maps": trainer_step(step, plan, weights, image, target, batches, need_maps=True),
        "PyTorch, without maps": trainer_step(step, plan, weights, image, target, batches, need_maps=False),
    }
    print(
        f"{given.backbone} at {given.image_px} px, batch {given.batch}, {given.threads} threads, load average "
        f"{os.getloadavg()[0]:.1f}; onnxruntime {onnxruntime.__version__}, torch {torch.__version__}"
    )
    times = measure(ways, given.blocks, given.repeats)
    base = times["PyTorch, with maps"]
    print("| step | wall s | ratio | processor s | ratio |\n|---|---|---|---|---|")
    for name, (wall, busy) in times.items():
        print(f"| {name} | {wall:.3f} | {wall / base[0]:.2f} | {busy:.3f} | {busy / base[1]:.2f} |")


def a_step(
    backbone: str, image_px: int, recipe: EvidentialRecipe
) -> tuple[FedEvPromptStep, TrainingPlan, dict[str, Any]]:
    """A fresh model: times do not depend on the values."""
    network = load_backbone(backbone, image_px=image_px, seed=0)
    tensors = initial_tensors(recipe, network.spec, CLASSES, 0)
    weights: dict[str, Any] = {name: value.numpy() for name, value in tensors.items()}
    weights |= {"prior": np.ones(CLASSES, np.float32), "temperature": np.asarray(1, np.float32)}
    module = ScoreModule(network, ScoreOptions())
    rates = {name: 2.5e-4 if name == "prompts.b" else 5e-4 for name in recipe.trained}
    plan = TrainingPlan(
        trained=recipe.trained, rates=rates, weight_decay=1e-2, batch=32, epochs=2, epochs_before=0, anneal_epochs=10,
        anneal_clock="run", kd_weight=1e-6, kd_peers="sum", prior_floor=1e-2, balance="none", augment="none", seed=0,
    )  # fmt: skip
    return training_step(Predictor(module, weights, (True,) * CLASSES), plan), plan, weights


def graph_step(
    graph: bytes,
    plan: TrainingPlan,
    weights: dict[str, Any],
    image: np.ndarray,
    target: np.ndarray,
    batches: Batches,
    threads: int,
) -> Step:
    """One step on onnxruntime; the state goes round as on a device."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    session = onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
    numbers = {name: np.asarray(value, np.float32) for name, value in batches.settings[-1].items()}
    fixed = {"image": image, "target": target, **numbers, **batches.peers, **rate_inputs(plan)}
    fixed |= constants(plan, weights)
    state, names = fresh_state(plan, weights), list(plan.outputs)

    def run() -> None:
        found = dict(zip(names, session.run(names, {**fixed, **state}), strict=True))
        state.update({name: found[NEXT + name] for name in plan.state})

    return run


def trainer_step(
    step: FedEvPromptStep,
    plan: TrainingPlan,
    weights: dict[str, Any],
    image: np.ndarray,
    target: np.ndarray,
    batches: Batches,
    *,
    need_maps: bool,
) -> Step:
    """One step of the trainer."""
    trainer = TrainerSteps(step, plan, weights)

    def run() -> None:
        trainer.step(image, target, batches.settings[-1], batches.peers, need_maps=need_maps)

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
