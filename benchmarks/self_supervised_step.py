"""A self-supervised training step against the same step written plainly in PyTorch: images per second.

Each row of `ROWS` names a method and makes two loops over the same random images: ours, as a run makes it (reading
from the image store, views, loss, optimiser, reports), and the plain one: the same network, augmentations and formulas
in one function, with torchvision's views of one image at a time, as a data loader of the public code makes them. Turns
alternate in one process, on one thread. On a CPU the ratio is that of processor seconds, which other work on a machine
hardly changes; on CUDA that of elapsed seconds.

    python benchmarks/self_supervised_step.py --images 256 --batch 64 --json
"""

import copy
import json
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    import torch

    from edgefl_trainer.contract import Site

COUNT = click.IntRange(min=1)
TEMPERATURE, MOMENTUM, LR = 0.2, 0.99, 0.03


@dataclass(frozen=True)
class Row:
    """One method: what makes the loop of ours and the plain one, each one epoch long."""

    network: str
    image_px: int
    ours: "Callable[[Site, int], Callable[[], None]]"
    plain: "Callable[[Site, int], Callable[[], None]]"


def fedclf(site: "Site", batch: int) -> Callable[[], None]:
    """An epoch of FedCLF with as many remote features as three sites of a full bank share."""
    from edgefl_trainer.contract import State
    from edgefl_trainer.learning import contrast
    from edgefl_trainer.learning.contrast import ContrastRecipe
    from edgefl_trainer.learning.self_supervised import SgdRecipe

    recipe = ContrastRecipe(sgd=SgdRecipe(batch=batch), key_momentum=MOMENTUM)
    start = contrast.start(recipe, site.task).arrays
    bank, others = unit_vectors(1024, site.device), unit_vectors(2048, site.device)
    state = State({contrast.BANK: bank.cpu().numpy()})

    def epoch() -> None:
        contrast.contrast_round(recipe, site, state, start, 1, others=others, keeps_local=False)

    return epoch


def plain_fedclf(site: "Site", batch: int) -> Callable[[], None]:
    """The same epoch as a script would have it."""
    import torch
    from torch.nn.functional import cross_entropy, normalize

    from edgefl_trainer.learning.contrast import ContrastRecipe

    start = ContrastRecipe().build(site.task)
    view = torchvision_views(site, 64 * site.task.backbone.image_px // 72)
    remote = unit_vectors(2048, site.device)
    store = site.unlabelled

    def epoch() -> None:
        model = copy.deepcopy(start).to(site.device).train()
        slow, negatives, place = copy.deepcopy(model), remote.clone(), 0
        optimizer = torch.optim.SGD(model.parameters(), LR, momentum=0.9, weight_decay=1e-4)
        order = torch.randperm(len(store)).numpy()
        for begin in range(0, len(order), batch):
            images = torch.from_numpy(store.images[store.rows[order[begin : begin + batch]]]).permute(0, 3, 1, 2)
            first = torch.stack([view(image) for image in images]).to(site.device)
            second = torch.stack([view(image) for image in images]).to(site.device)
            with torch.autocast(site.device.type, dtype=site.autocast, enabled=site.autocast is not None):
                queries = normalize(model(first).float(), dim=1)
                with torch.no_grad():
                    for theirs, ours in zip(slow.parameters(), model.parameters(), strict=True):
                        theirs.mul_(MOMENTUM).add_(ours, alpha=1 - MOMENTUM)
                    keys = normalize(slow(second).float(), dim=1)
            logits = torch.cat([(queries * keys).sum(1, keepdim=True), queries @ negatives.T], dim=1) / TEMPERATURE
            loss = cross_entropy(logits, torch.zeros(len(logits), dtype=torch.long, device=site.device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            loss.item()
            drawn = remote[torch.randint(len(remote), (len(keys),), device=site.device)]
            negatives = negatives.clone()
            negatives[torch.arange(place, place + len(keys), device=site.device) % len(negatives)] = drawn
            place = (place + len(keys)) % len(negatives)

    return epoch


ROWS: Mapping[str, Row] = {"fedclf": Row("cnn:resnet18", 72, fedclf, plain_fedclf)}


def torchvision_views(site: "Site", side: int) -> "Callable[[torch.Tensor], torch.Tensor]":
    """MoCo v2's views of one image, as its public code composes them."""
    import torch
    from torchvision.transforms import v2

    from edgefl_trainer.augment import blur_kernel

    spec = site.task.backbone
    return v2.Compose(
        [
            v2.RandomResizedCrop(side, scale=(0.2, 1.0), antialias=True),
            v2.RandomApply([v2.ColorJitter(0.4, 0.4, 0.4, 0.1)], p=0.8),
            v2.RandomGrayscale(0.2),
            v2.RandomApply([v2.GaussianBlur(blur_kernel(side), (0.1, 2.0))], p=0.5),
            v2.RandomHorizontalFlip(),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize(spec.mean, spec.std),
        ]
    )


def unit_vectors(count: int, device: "torch.device") -> "torch.Tensor":
    import torch

    drawn = torch.randn(count, 128, generator=torch.Generator().manual_seed(count))
    return torch.nn.functional.normalize(drawn, dim=1).to(device)


def make_site(row: Row, images: int, device: str) -> "tuple[Site, list[Mapping[str, Any]]]":
    """A site with random pictures, and the list in which its reports end up."""
    import numpy as np
    import torch

    from edgefl_trainer.contract import Examples, Site, Task
    from edgefl_trainer.models.backbones import load_backbone

    pictures = np.random.default_rng(0).integers(0, 256, (images, row.image_px, row.image_px, 3), dtype=np.uint8)
    rows = Examples(pictures, np.full(images, -1, dtype=np.int64), np.arange(images, dtype=np.int64))
    spec = load_backbone(row.network, image_px=row.image_px).spec
    task = Task(name="pixels", classes=("a", "b"), backbone=spec, rounds=1, epochs=1, seed=0)
    told: list[Mapping[str, Any]] = []
    site = Site(
        name="bench",
        task=task,
        backbone=None,
        train=rows,
        tune=rows,
        unlabelled=rows,
        device=torch.device(device),
        autocast=torch.bfloat16 if device == "cuda" else None,
        report=told.append,
    )
    return site, told


def seconds(epoch: Callable[[], None], device: str) -> tuple[float, float]:
    """What one epoch takes by the clock, and what counts: processor seconds on a CPU, the clock on CUDA."""
    import torch

    if device == "cuda":
        torch.cuda.synchronize()
    begun, worked = time.perf_counter(), time.process_time()
    epoch()
    if device == "cuda":
        torch.cuda.synchronize()
    elapsed = time.perf_counter() - begun
    return elapsed, elapsed if device == "cuda" else time.process_time() - worked


def measure(name: str, images: int, batch: int, repeats: int, device: str) -> dict[str, Any]:
    """Images per second of both loops in alternating turns, and our share of time without anything to learn from."""
    row = ROWS[name]
    site, told = make_site(row, images, device)
    loops = {"edgefl": row.ours(site, batch), "plain": row.plain(site, batch)}
    for epoch in loops.values():
        seconds(epoch, device)  # warm-up
    told.clear()
    took: dict[str, list[float]] = {"edgefl": [], "plain": []}
    elapsed = 0.0
    for _ in range(repeats):
        for loop, epoch in loops.items():
            clock, counted = seconds(epoch, device)
            took[loop].append(counted)
            elapsed += clock if loop == "edgefl" else 0.0
    speed = {loop: images / statistics.median(times) for loop, times in took.items()}
    waited = sum(float(facts["wait_seconds"]) for facts in told if "step" in facts)
    return {
        "method": name,
        "network": row.network,
        "image_px": row.image_px,
        "device": device,
        "batch": batch,
        "images_per_second": {loop: round(value, 1) for loop, value in speed.items()},
        "ratio": round(speed["edgefl"] / speed["plain"], 3),
        "waiting_share": round(waited / elapsed, 4),
    }


@click.command()
@click.option("--method", "methods", multiple=True, type=click.Choice(sorted(ROWS)), help="Rows; all by default.")
@click.option("--images", default=256, show_default=True, metavar="N", type=COUNT, help="Images of an epoch.")
@click.option("--batch", default=64, show_default=True, metavar="N", type=COUNT, help="Images of a batch.")
@click.option("--repeats", default=3, show_default=True, metavar="N", type=COUNT, help="Turns of each loop.")
@click.option("--threads", default=1, show_default=True, metavar="N", type=COUNT, help="Threads of PyTorch.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object for each row instead of text.")
def main(methods: tuple[str, ...], images: int, batch: int, repeats: int, threads: int, as_json: bool) -> None:
    """Images per second of a self-supervised step, ours and plain, on the CPU and where there is one on CUDA."""
    import torch

    torch.set_num_threads(threads)
    for name in methods or sorted(ROWS):
        for device in ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",):
            found = measure(name, images, batch, repeats, device)
            speed = found["images_per_second"]
            text = (
                f"{name} ({found['network']}, {found['image_px']} px, {device}): {speed['edgefl']} images/s, plain "
                f"{speed['plain']}: {found['ratio']} times; waiting {found['waiting_share']:.1%}"
            )
            click.echo(json.dumps(found) if as_json else text)


if __name__ == "__main__":
    main()
