"""A FedEvPrompt training step against 10,000 buffered maps, beside the same step against 10.

The distillation term reads one mean map of each class, folded once a round, so a step should not feel how many maps
the federation holds (docs/methods.md 1.5). Both learn the same drawn images on the same untrained network, in turns in
one process, on one thread. Prints the median processor seconds of a step with each buffer and their ratio; the target
is 1.1 at most. Elapsed seconds stand beside, which other work on the machine disturbs, and the cost of folding, once a
round.

    python -m benchmarks.training.buffer_size --json
"""

import json
import statistics
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from edgefl_protocol.errors import EdgeflError

if TYPE_CHECKING:
    from edgefl_trainer.contract import Arrays, Site
    from edgefl_trainer.learning.loss_terms import Term

TARGET = 1.1
CLASSES = ("nevus", "other")
MAPS_OF_A_CLASS = 5  # M; a buffer smaller than a peer's share has peers of one map


def measure(
    backbone: str, image_px: int, sizes: tuple[int, int], batch: int, steps: int, repeats: int
) -> dict[str, Any]:
    """The figures, ready for JSON.

    Args:
        backbone: name of an untrained network.
        image_px: side of its input in pixels; 0: its own.
        sizes: maps in the small and the large buffer.
        batch: images of a step.
        steps: steps of a turn.
        repeats: turns of each buffer.

    Raises:
        EdgeflError: there is no such backbone.
    """
    import torch

    from edgefl_trainer.learning.maps.sharing import MapSharing, distillation
    from edgefl_trainer.models.spec import require_vit

    torch.set_num_threads(1)
    site = drawn_site(backbone, image_px, batch * steps)
    tokens = require_vit(site.task.backbone, "distillation").tokens
    terms: dict[int, list[Term]] = {}
    folding: dict[int, float] = {}
    for size in sizes:
        maps = drawn_maps(size, tokens)
        started = time.perf_counter()
        terms[size] = [*distillation(MapSharing(), site, maps)]
        folding[size] = time.perf_counter() - started
    taken: dict[int, list[tuple[float, float]]] = {size: [] for size in sizes}
    for turn in range(repeats + 1):
        for size in sizes if turn % 2 else reversed(sizes):  # whoever comes second finds a warmer machine
            seconds = one_turn(site, terms[size], batch)
            if turn:  # the first warms up
                taken[size].append((seconds[0] / steps, seconds[1] / steps))
    figures: dict[str, Any] = {"backbone": backbone, "tokens": tokens, "batch": batch}
    for column, unit in enumerate(("elapsed_seconds", "cpu_seconds")):
        small, large = (statistics.median(pair[column] for pair in taken[size]) for size in sizes)
        figures |= {f"{unit}_of_a_step": {str(sizes[0]): small, str(sizes[1]): large}}
        figures["elapsed_ratio" if column == 0 else "ratio"] = large / small
    return {**figures, "folding_seconds": {str(size): value for size, value in folding.items()}, "target": TARGET}


def drawn_site(backbone: str, image_px: int, images: int) -> "Site":
    """A site with that many training images of noise, half of them of each class."""
    import numpy as np

    from edgefl_trainer.contract import Examples, Site, Task
    from edgefl_trainer.models.backbones import load_backbone

    vit = load_backbone(backbone, image_px=image_px, seed=0)
    task = Task(name="nevus", classes=CLASSES, backbone=vit.spec, rounds=1, epochs=1, seed=0)
    side, rng = vit.spec.image_px, np.random.default_rng(0)
    pixels = rng.integers(0, 256, (images, side, side, 3), dtype=np.uint8)
    train = Examples(pixels, np.arange(images, dtype=np.int64) % 2, np.arange(images, dtype=np.int64))
    return Site(name="a", task=task, backbone=vit, train=train, tune=train, unlabelled=train)


def drawn_maps(size: int, tokens: int) -> "Arrays":
    """A broadcast of `size` maps, M of each class from every peer, or one where that is too many."""
    import numpy as np

    each = MAPS_OF_A_CLASS if size >= 2 * MAPS_OF_A_CLASS * 10 else 1
    rng = np.random.default_rng(1)
    peers = max(1, size // (len(CLASSES) * each))
    return {
        f"maps.{peer}.{k}": rng.random((each, tokens)).astype(np.float16)
        for peer in range(peers)
        for k in range(len(CLASSES))
    }


def one_turn(site: "Site", terms: "list[Term]", batch: int) -> tuple[float, float]:
    """Elapsed and processor seconds of one epoch from the same start."""
    from edgefl_trainer.learning import evidential
    from edgefl_trainer.learning.named_arrays import as_arrays

    recipe = evidential.EvidentialRecipe(batch=batch, readout="cls")
    fresh = evidential.initial_tensors(recipe, site.task.backbone, len(CLASSES), 0)
    tensors = evidential.trainable(recipe, {**as_arrays(fresh), **statistics_of(site)}, site.device)
    optimizer = evidential.make_optimizer(recipe, tensors, None)
    elapsed, processor = time.perf_counter(), time.process_time()
    evidential.learn(recipe, site, tensors, "cls", 1, optimizer=optimizer, terms=terms)
    return time.perf_counter() - elapsed, time.process_time() - processor


def statistics_of(site: "Site") -> "Arrays":
    """Feature statistics that change nothing."""
    import numpy as np

    width = site.task.backbone.width
    return {"features.mean": np.zeros(width, np.float32), "features.std": np.ones(width, np.float32)}


def text(found: Mapping[str, Any]) -> str:
    """Lines for people to read."""
    lines = [f"{'maps':>8}{'step, s':>12}{'elapsed, s':>14}{'folding, s':>12}"]
    for size, seconds in found["cpu_seconds_of_a_step"].items():
        elapsed, folding = found["elapsed_seconds_of_a_step"][size], found["folding_seconds"][size]
        lines.append(f"{size:>8}{seconds:>12.4f}{elapsed:>14.4f}{folding:>12.4f}")
    ratios = f"ratio {found['ratio']:.3f} (target at most {found['target']}), elapsed {found['elapsed_ratio']:.3f}"
    return "\n".join([*lines, ratios])


@click.command()
@click.option("--backbone", default="vit:192x12/12", show_default=True, metavar="NAME", help="Untrained network.")
@click.option("--image-px", default=84, show_default=True, metavar="PIXELS", help="Side of its input; 0: its own.")
@click.option("--small", default=10, show_default=True, metavar="N", help="Maps in the small buffer.")
@click.option("--large", default=10_000, show_default=True, metavar="N", help="Maps in the large buffer.")
@click.option("--batch", default=32, show_default=True, metavar="N", help="Images of a step.")
@click.option("--steps", default=3, show_default=True, metavar="N", help="Steps of a turn.")
@click.option("--repeats", default=7, show_default=True, metavar="N", help="Turns of each buffer.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
@click.pass_context
def main(
    context: click.Context,
    backbone: str,
    image_px: int,
    small: int,
    large: int,
    batch: int,
    steps: int,
    repeats: int,
    as_json: bool,
) -> None:
    """Measure what a large buffer of maps costs a training step. Exit status 1 where it is more than the target."""
    try:
        found = measure(backbone, image_px, (small, large), batch, steps, repeats)
    except EdgeflError as error:
        raise click.ClickException(str(error)) from error
    click.echo(json.dumps(found, allow_nan=False) if as_json else text(found))
    context.exit(0 if found["ratio"] <= TARGET else 1)


if __name__ == "__main__":
    main()
