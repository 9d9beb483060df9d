"""A FedEvPrompt epoch against the plain PyTorch loop that it replaces: images per second, memory, what each part gives.

Both loops, and what they learn, stand in `training_loops.py`. They learn the same prompts and head on the same frozen
network from the same photographs, in the same batches, turned the same way, with the KL term at full weight and the
distillation term against the same peers' maps. Before anything is timed, the losses of the first steps must agree to
1e-4 relative; the constant of FedEvPrompt's eq. 7, which our distance leaves out because it has no gradient, is added
for that.

Turns alternate in one process, on one thread. On a CPU the ratio is that of processor seconds (worker processes
included), on CUDA that of elapsed seconds. The target: no slower than the faster of the plain loops. Memory is the peak
of a process that makes one epoch of one loop and nothing else: resident on a CPU, allocated on the card on CUDA.

    python -m benchmarks.training.training_epoch --json
"""

import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from benchmarks.processes import started
from benchmarks.training.training_loops import (
    KD_WEIGHT,
    ROUND,
    Case,
    draw_photos,
    edgefl_epoch,
    make_case,
    patch_attention,
    plain_batches,
    plain_buffer,
    plain_distance,
    plain_epoch,
    plain_rollout,
    terms_of,
)
from edgefl_protocol.errors import EdgeflError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

TARGET = 1.0
TOLERANCE = 1e-4  # relative, of the losses
CHECKED_STEPS = 3
EDGEFL = "edgefl"
PLAIN = "plain-0"
LOOP_OF = {EDGEFL: EDGEFL, "plain": PLAIN}
COUNT = click.IntRange(min=1)


def measure(case: Case, workers: int, repeats: int) -> dict[str, Any]:
    """The figures of both loops but for the memory, ready for JSON.

    Raises:
        EdgeflError: the losses of the first steps differ.
    """
    import torch

    from edgefl_trainer.models.spec import require_vit

    site, spec = case.site, require_vit(case.site.task.backbone, "fedevprompt")
    on_cuda = site.device.type == "cuda"
    loops: dict[str, Callable[[], Any]] = {EDGEFL: partial(edgefl_epoch, case)}
    loops |= {f"plain-{count}": partial(plain_epoch, case, count) for count in sorted({0, workers})}
    losses = compare_losses(case)
    images = len(site.train)
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in loops}
    for turn in range(repeats + 1):
        for name in loops if turn % 2 else reversed(list(loops)):  # whoever comes later finds a warmer machine
            seconds = spent(loops[name], site.device)
            if turn:  # the first warms up
                taken[name].append(seconds)
    elapsed, processor = (
        {name: statistics.median(pair[column] for pair in taken[name]) for name in loops} for column in (0, 1)
    )
    judged = elapsed if on_cuda else processor
    ratios = {name: judged[name] / judged[EDGEFL] for name in loops if name != EDGEFL}
    flops = flops_of_an_image(case)
    return {
        "device": torch.cuda.get_device_name() if on_cuda else "cpu",
        "autocast": str(site.autocast).removeprefix("torch.") if site.autocast else "none",
        "backbone": spec.name,
        "image_px": spec.image_px,
        "tokens": spec.tokens,
        "images": images,
        "batch": case.recipe.batch,
        "maps_of_a_class": sum(len(maps) for name, maps in case.maps.items() if name.endswith(".0")),
        **losses,
        "elapsed_seconds": elapsed,
        "cpu_seconds": processor,
        "images_per_second": {name: images / value for name, value in elapsed.items()},
        "images_per_cpu_second": {name: images / value for name, value in processor.items()},
        "ratios": ratios,
        "elapsed_ratios": {name: elapsed[name] / elapsed[EDGEFL] for name in ratios},
        "ratio": min(ratios.values()),
        "target": TARGET,
        "parts": parts(case, repeats, {name: value / images for name, value in judged.items()}),
        "decoding_once_cpu_seconds": case.decoding_seconds,
        "flops_of_an_image": flops,
        "bf16": bf16_share(flops, {name: images / value for name, value in elapsed.items()}) if on_cuda else None,
    }


def compare_losses(case: Case) -> dict[str, Any]:
    """The losses of the first steps of both loops, without autocast.

    Raises:
        EdgeflError: they differ by more than `TOLERANCE`.
    """
    site, recipe = replace(case.site, autocast=None), case.recipe
    order = site.epoch_order(site.train, ROUND, 0)
    exact = replace(case, site=site)
    constants = spreads(case)[site.train.targets[order]]
    ours = [
        loss + KD_WEIGHT * float(constants[at : at + recipe.batch].mean())
        for loss, at in zip(edgefl_epoch(exact), range(0, len(order), recipe.batch), strict=True)
    ][:CHECKED_STEPS]
    plain = plain_epoch(exact, 0)[:CHECKED_STEPS]
    worst = max(abs(a - b) / abs(b) for a, b in zip(ours, plain, strict=True))
    if not worst <= TOLERANCE:
        raise EdgeflError(f"the two loops do not compute the same loss: {ours} and {plain}.", "benchmark")
    return {"losses": {EDGEFL: ours, "plain": plain}, "loss_difference": worst}


def spreads(case: Case) -> Any:
    """(K,) eq. 7's constant: for each class the squared distances of the peers' maps to their mean."""
    import numpy as np

    found = []
    for peers in plain_buffer(case).values():
        stacks = [stack.double().cpu().numpy() for stack in peers]
        mean = np.mean([stack.mean(axis=0) for stack in stacks], axis=0)
        found.append(sum(np.square(stack - mean).sum(axis=(1, 2)).mean() for stack in stacks))
    return np.array(found)


def spent(call: "Callable[[], Any]", device: "torch.device") -> tuple[float, float]:
    """Elapsed and processor seconds of a call, its ended child processes included."""
    import torch

    def now() -> tuple[float, float]:
        if device.type == "cuda":
            torch.cuda.synchronize()
        used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        return time.perf_counter(), sum(one.ru_utime + one.ru_stime for one in used)

    before = now()
    call()
    after = now()
    return after[0] - before[0], after[1] - before[1]


def parts(case: Case, repeats: int, whole: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """Seconds an image of what the loops do differently, each alone, forward and backward; judged as the ratio is.

    `network` holds the prompted network and the rollout of its attention; `rest` is what is left of a whole step. The
    plain loop is the one without workers.
    """
    from edgefl_trainer.augment import dihedral

    site, recipe = case.site, case.recipe
    column = 0 if site.device.type == "cuda" else 1

    def own_images() -> None:
        rng = site.rng("augment", ROUND, 0)
        for images, _ in site.batches(site.train, recipe.batch, ROUND, 0):
            dihedral(images, rng)

    def plain_images() -> None:
        for images, _ in plain_batches(case, 0):
            images.to(site.device)

    batch = min(recipe.batch, len(site.train))
    calls = {"images": (own_images, plain_images, len(site.train))}
    calls |= {name: (*pair, batch) for name, pair in {**network_calls(case), **map_calls(case)}.items()}
    found: dict[str, dict[str, float]] = {}
    for name, (own, plain, images) in calls.items():
        taken = [(spent(own, site.device)[column], spent(plain, site.device)[column]) for _ in range(repeats + 1)][1:]
        medians = [statistics.median(pair[i] for pair in taken) / images for i in (0, 1)]
        found[name] = dict(zip((EDGEFL, "plain"), medians, strict=True))
    alone = {name: whole[key] - sum(part[name] for part in found.values()) for name, key in LOOP_OF.items()}
    return {**found, "rest": alone, "whole": {name: whole[key] for name, key in LOOP_OF.items()}}


def network_calls(case: Case) -> "dict[str, tuple[Callable[[], None], Callable[[], None]]]":
    """One batch through the prompted network and its rollout, and back to the prompts."""
    import torch

    from edgefl_trainer.learning.evidential import trainable
    from edgefl_trainer.models.scoring import ScoreModule
    from edgefl_trainer.models.vit import ViTOutput
    from edgefl_trainer.rollout import max_normalise, rollout_from_factors

    site, recipe = case.site, case.recipe
    assert site.backbone is not None
    module = ScoreModule(site.backbone, recipe.options(site.task.backbone, "cls"))
    tensors = trainable(recipe, case.start, site.device)
    pixels = next(site.batches(site.train, recipe.batch, ROUND, 0))[0]
    planes = site.backbone.normalise(pixels)
    prefix = tensors["prompts.b"].shape[2]
    leaves = [tensors[name] for name in recipe.prompt_names]

    def own() -> None:
        with torch.autocast(site.device.type, dtype=site.autocast, enabled=site.autocast is not None):
            output = module.output(pixels, tensors, need_attention=True)
        assert isinstance(output, ViTOutput)
        maps = max_normalise(rollout_from_factors(output.factors))
        torch.autograd.grad(output.cls.float().sum() + maps.sum(), leaves)

    def plain() -> None:
        seen: list[Tensor] = []
        patch_attention(case.network, tensors, seen)
        with torch.autocast(site.device.type, dtype=site.autocast, enabled=site.autocast is not None):
            features = case.network.forward_features(planes)[:, 0]
        maps = plain_rollout(seen, prefix)
        torch.autograd.grad(features.float().sum() + (maps / maps.amax(dim=1, keepdim=True)).sum(), leaves)

    return {"network": (own, plain)}


def map_calls(case: Case) -> "dict[str, tuple[Callable[[], None], Callable[[], None]]]":
    """The distance of a batch of maps to the buffer, and its gradient."""
    import torch

    from edgefl_trainer.learning.loss_terms import Step
    from edgefl_trainer.models.spec import require_vit

    site = case.site
    batch, tokens = min(case.recipe.batch, len(site.train)), require_vit(site.task.backbone, "distillation").tokens
    maps = torch.rand((batch, tokens), generator=torch.Generator().manual_seed(0)).to(site.device).requires_grad_(True)
    target = (torch.arange(batch) % len(site.task.classes)).to(site.device)
    term, buffer = terms_of(case)[0], plain_buffer(case)

    def own() -> None:
        torch.autograd.grad(term(Step(maps, maps, maps, target, {})), maps)

    def plain() -> None:
        torch.autograd.grad(KD_WEIGHT * plain_distance(maps, target, buffer), maps)

    return {"distance": (own, plain)}


def flops_of_an_image(case: Case) -> int:
    """Floating-point operations of the network's matrix products, forward and backward, of one image.

    Forward 24·T·D² + 4·T·(P+T)·D a block, and the patches. Backward: once the linear layers (frozen weights have no
    gradient) and twice the attention, without what stands before the first block's prefix. Rollout, head and loss,
    which are small, are not counted.
    """
    from edgefl_trainer.models.spec import require_vit

    spec, prefix = require_vit(case.site.task.backbone, "fedevprompt"), int(case.start["prompts.b"].shape[2])
    tokens, width = 1 + spec.tokens, spec.width
    linear, attention = 24 * tokens * width**2, 4 * tokens * (prefix + tokens) * width
    forward = 2 * spec.tokens * 3 * spec.patch**2 * width + spec.depth * (linear + attention)
    backward = spec.depth * (linear + 2 * attention) - linear // 4 - attention // 2
    return forward + backward


def bf16_share(flops: int, speed: Mapping[str, float]) -> dict[str, Any]:
    """Share of the card's bf16 peak; the peak is that of a product of two 8192 × 8192 matrices, measured here."""
    import torch

    side, products = 8192, 20
    left, right = (torch.randn(side, side, device="cuda", dtype=torch.bfloat16) for _ in range(2))

    def multiply() -> None:
        for _ in range(products):
            left @ right

    seconds = statistics.median([spent(multiply, left.device)[0] for _ in range(6)][1:])
    peak = products * 2 * side**3 / seconds
    return {"measured_peak_flops": peak, "share": {name: flops * value / peak for name, value in speed.items()}}


def memory_alone(name: str, arguments: Sequence[str]) -> dict[str, int]:
    """Bytes before and at the peak of a process that makes one epoch of one loop only.

    To be called while this process is small: a child's figure starts with its parent's.

    Raises:
        EdgeflError: it failed.
    """
    command = [*started("benchmarks.training.training_epoch"), "--only", name, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise EdgeflError(done.stderr.strip().removeprefix("Error: ")[-400:], "benchmark")
    found: dict[str, int] = json.loads(done.stdout)
    return found


def one_epoch(case: Case, loop: str) -> dict[str, int]:
    """Bytes before and at the peak of one epoch."""
    before = peak_bytes(case.site.device)
    if loop == EDGEFL:
        edgefl_epoch(case)
    else:
        plain_epoch(case, 0)
    return {"before": before, "peak": peak_bytes(case.site.device)}


def peak_bytes(device: "torch.device") -> int:
    """Highest size so far: allocated on the card, else resident in this process."""
    import torch

    if device.type == "cuda":
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def text(found: Mapping[str, Any]) -> str:
    """Tables for people to read."""
    lines = [f"{'loop':<12}{'images/s':>10}{'images/CPU s':>14}{'peak MiB':>10}{'ratio':>8}{'elapsed':>9}"]
    for name, speed in found["images_per_second"].items():
        memory = found["memory_bytes"].get(name)
        shown = "–" if memory is None else f"{memory['peak'] / 2**20:.0f}"
        ratios = [f"{found[key].get(name, 1.0):.2f}" for key in ("ratios", "elapsed_ratios")]
        per_cpu = found["images_per_cpu_second"][name]
        lines.append(f"{name:<12}{speed:>10.1f}{per_cpu:>14.1f}{shown:>10}{ratios[0]:>8}{ratios[1]:>9}")
    lines.append(f"{'ms an image':<12}{'edgefl':>10}{'plain':>14}")
    for name, pair in found["parts"].items():
        lines.append(f"{name:<12}{1000 * pair[EDGEFL]:>10.3f}{1000 * pair['plain']:>14.3f}")
    if found["bf16"]:
        shares = ", ".join(f"{name} {share:.1%}" for name, share in found["bf16"]["share"].items())
        lines.append(f"bf16: {found['bf16']['measured_peak_flops'] / 1e12:.0f} TFLOP/s measured; used by {shares}")
    once = found["decoding_once_cpu_seconds"]
    lines.append(f"losses differ by {found['loss_difference']:.1e}; decoding once, before: {once:.2f} CPU s")
    return "\n".join([*lines, f"ratio {found['ratio']:.2f} (target at least {found['target']})"])


@click.command()
@click.option("--backbone", default="vit:192x12/12", show_default=True, metavar="NAME", help="Untrained network.")
@click.option("--image-px", default=84, type=COUNT, show_default=True, metavar="PIXELS", help="Side of its input.")
@click.option("--photo-px", default=600, type=COUNT, show_default=True, metavar="PIXELS", help="Side of drawn photos.")
@click.option("--images", default=96, type=COUNT, show_default=True, metavar="N", help="Images of an epoch.")
@click.option("--batch", default=32, type=COUNT, show_default=True, metavar="N", help="Images of a step.")
@click.option("--maps", default=25, type=COUNT, show_default=True, metavar="N", help="Peers' maps of each class.")
@click.option("--workers", default=2, show_default=True, metavar="N", help="A second plain loop has these; 0: none.")
@click.option("--repeats", default=5, type=COUNT, show_default=True, metavar="N", help="Turns of each loop.")
@click.option(
    "--device", default="auto", show_default=True, type=click.Choice(["auto", "cpu", "cuda"]), help="Where to compute."
)
@click.option(
    "--photos",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Photographs at SITE/CLASS/NAME; drawn into it where it does not exist.  [default: drawn, not kept]",
)
@click.option("--only", type=click.Choice([EDGEFL, PLAIN]), help="One epoch of that loop; prints this process's bytes.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
@click.pass_context
def main(
    context: click.Context,
    backbone: str,
    image_px: int,
    photo_px: int,
    images: int,
    batch: int,
    maps: int,
    workers: int,
    repeats: int,
    device: str,
    photos: Path | None,
    only: str | None,
    as_json: bool,
) -> None:
    """Measure a training epoch beside the plain loop. Exit status 1 where it is slower than the target."""
    sizes = {"image_px": image_px, "images": images, "batch": batch, "maps": maps}
    options = [word for name, n in sizes.items() for word in (f"--{name.replace('_', '-')}", str(n))]
    with tempfile.TemporaryDirectory() as temporary:
        folder = photos or Path(temporary) / "photos"
        try:
            if not folder.is_dir():
                draw_photos(folder, images, photo_px)
            if only is not None:
                click.echo(json.dumps(one_epoch(make_case(folder, backbone, sizes, device), only)))
                return
            given = ["--backbone", backbone, "--photos", str(folder), "--device", device, *options]
            memory = {name: memory_alone(name, given) for name in (EDGEFL, PLAIN)}
            found = measure(make_case(folder, backbone, sizes, device), workers, repeats)
        except EdgeflError as error:
            raise click.ClickException(str(error)) from error
    found["memory_bytes"] = memory
    click.echo(json.dumps(found, allow_nan=False) if as_json else text(found))
    context.exit(0 if found["ratio"] >= TARGET else 1)


if __name__ == "__main__":
    main()
