"""A FedMAE epoch against the same epoch written plainly in PyTorch: images per second, on a CPU or on CUDA.

The plain loop is the public recipe of masked autoencoders (arXiv 2111.06377) as a person would write it on timm's
blocks: torchvision's crops image by image in a `DataLoader`, random masking by two argsorts, gather, a decoder over
mask tokens, mean squared error of the hidden patches, `AdamW`. Ours is `local_round`, as a run calls it. Both start
from the same weights; on the same views and the same noise the losses of the first steps must agree to 1e-4 relative
before anything is timed.

Whole epochs are timed in alternating turns of one process: on a CPU in processor seconds of one thread, on CUDA in
elapsed ones.

    python -m benchmarks.training.fedmae_step --json
"""

import json
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import click
import numpy as np

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from edgefl_trainer.contract import Site
    from edgefl_trainer.methods.fedmae import FedMAE
    from edgefl_trainer.models.mae import MaskedAutoencoder

TOLERANCE = 1e-4  # relative, of the losses
CHECKED_STEPS = 3
RATIO = 0.75  # of the patches are hidden
LOOPS = ("edgefl", "plain")


@dataclass(frozen=True)
class Case:
    """What both loops learn, and on what."""

    method: "FedMAE"
    site: "Site"
    told: list[Mapping[str, Any]] = field(default_factory=list)  # what our loop reports

    @property
    def tokens(self) -> int:
        """Patches of an image."""
        return int(self.site.task.backbone.tokens)  # type: ignore[union-attr]

    def network(self) -> "MaskedAutoencoder":
        """An autoencoder with the same weights each time."""
        model = self.method._model(self.site.task)
        model.initialise(0)
        return model.to(self.site.device)


def edgefl_epoch(case: Case) -> Callable[[], None]:
    """An epoch of FedMAE, as a site makes it: weights in, weights out."""
    from edgefl_protocol import Payload
    from edgefl_trainer.contract import Phase, State

    method, site = case.method, case.site
    start = method.start(site.task, [site.name])
    shared = method.broadcast(start, Phase("train", 1), [site.name])[site.name]
    broadcast = Payload(shared.arrays, {"phase": "train", "round": 1, "rounds": 1})

    def epoch() -> None:
        method.local_round(site, State({}), broadcast)

    return epoch


def plain_epoch(case: Case) -> Callable[[], None]:
    """The same epoch as a script has it."""
    import torch

    def epoch() -> None:
        step = plain_steps(case)
        for views in plain_views(case):
            float(step(views, torch.rand(len(views), case.tokens, device=views.device)))

    return epoch


def edgefl_steps(case: Case) -> "Callable[[Tensor, Tensor], Tensor]":
    """One optimiser step of FedMAE on uint8 views (B, px, px, 3) and noise (B, N)."""
    import torch

    from edgefl_trainer.augment import to_float
    from edgefl_trainer.models.architectures import IMAGENET_MEAN, IMAGENET_STD

    model, where = case.network(), case.site
    optimizer = case.method._optimizer(model)

    def step(views: "Tensor", noise: "Tensor") -> "Tensor":
        with torch.autocast(where.device.type, dtype=where.autocast, enabled=where.autocast is not None):
            loss: Tensor = model(to_float(views, IMAGENET_MEAN, IMAGENET_STD), noise, RATIO, True)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return loss.detach()

    return step


def plain_steps(case: Case) -> "Callable[[Tensor, Tensor], Tensor]":
    """The same step as a plain loop has it."""
    import torch
    from torchvision.transforms.v2.functional import normalize

    from edgefl_trainer.models.architectures import IMAGENET_MEAN, IMAGENET_STD

    # for its layers and their first values; the forward below is the public one
    model, where = case.network(), case.site
    learned = [value for value in model.parameters() if value.requires_grad]
    groups = [
        {"params": [value for value in learned if value.ndim > 1], "weight_decay": case.method.weight_decay},
        {"params": [value for value in learned if value.ndim <= 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=case.method.lr, betas=(0.9, 0.95))

    def step(views: "Tensor", noise: "Tensor") -> "Tensor":
        pixels = normalize(views.permute(0, 3, 1, 2).float() / 255, list(IMAGENET_MEAN), list(IMAGENET_STD))
        with torch.autocast(where.device.type, dtype=where.autocast, enabled=where.autocast is not None):
            loss = plain_loss(model, pixels, noise)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return loss.detach()

    return step


def plain_loss(model: "MaskedAutoencoder", images: "Tensor", noise: "Tensor") -> "Tensor":
    """MAE's forward pass as its public code reads: random masking, decoder over mask tokens, loss of hidden patches."""
    import torch

    vit, decoder = model.backbone, model.decoder
    x = vit.patch_embed(images) + vit.pos_embed[:, 1:, :]
    batch, length, width = x.shape
    keep = int(length * (1 - RATIO))
    shuffle = torch.argsort(noise, dim=1)
    restore = torch.argsort(shuffle, dim=1)
    x = torch.gather(x, 1, shuffle[:, :keep].unsqueeze(-1).repeat(1, 1, width))
    mask = torch.ones(batch, length, device=x.device)
    mask[:, :keep] = 0
    mask = torch.gather(mask, 1, restore)  # 0 kept, 1 hidden
    token = vit.cls_token + vit.pos_embed[:, :1, :]
    x = torch.cat((token.expand(batch, -1, -1), x), dim=1)
    for block in vit.blocks:
        x = block(x)
    x = decoder["embed"](vit.norm(x))
    hidden = model.mask_token.repeat(batch, length + 1 - x.shape[1], 1)
    y = torch.cat([x[:, 1:, :], hidden], dim=1)
    y = torch.gather(y, 1, restore.unsqueeze(-1).repeat(1, 1, y.shape[2]))
    x = torch.cat([x[:, :1, :], y], dim=1) + model.decoder_positions
    for block in decoder["blocks"]:
        x = block(x)
    predicted = decoder["prediction"](decoder["norm"](x))[:, 1:, :]
    side, patch = images.shape[-1] // model.patch, model.patch
    target = images.reshape(batch, 3, side, patch, side, patch)
    target = torch.einsum("nchpwq->nhwpqc", target).reshape(batch, side * side, patch**2 * 3)
    target = (target - target.mean(dim=-1, keepdim=True)) / (target.var(dim=-1, keepdim=True) + 1e-6) ** 0.5
    error = ((predicted - target) ** 2).mean(dim=-1)
    loss: Tensor = (error * mask).sum() / mask.sum()
    return loss


def checked_views(case: Case) -> "Iterator[Tensor]":
    """A few batches of crops."""
    from edgefl_trainer.augment import random_crops
    from edgefl_trainer.learning.batches import read_ahead

    rows, batch = case.site.unlabelled, case.method.batch
    order, rng = case.site.epoch_order(rows, 1, 0), np.random.default_rng(0)
    parts = [order[start : start + batch] for start in range(0, len(rows), batch)][:CHECKED_STEPS]
    for images in read_ahead(case.site, rows, parts):
        yield random_crops(images, rng, case.method.smallest_crop)


def plain_views(case: Case) -> "Iterator[Tensor]":
    """Batches as a `DataLoader` with torchvision's crops gives them."""
    import torch
    from torch.utils.data import DataLoader
    from torchvision.transforms import InterpolationMode, v2

    images = case.site.unlabelled.images
    side = images.shape[1]
    crop = v2.RandomResizedCrop(side, scale=(case.method.smallest_crop, 1.0), interpolation=InterpolationMode.BICUBIC)
    change = v2.Compose([crop, v2.RandomHorizontalFlip()])

    class Pictures(torch.utils.data.Dataset[torch.Tensor]):
        def __len__(self) -> int:
            return len(images)

        def __getitem__(self, index: int) -> "Tensor":
            changed: torch.Tensor = change(torch.from_numpy(images[index]).permute(2, 0, 1))
            return changed

    for batch in DataLoader(Pictures(), batch_size=case.method.batch, shuffle=True):
        yield batch.permute(0, 2, 3, 1).to(case.site.device)


def measure(case: Case, repeats: int) -> dict[str, Any]:
    """Images per second of both loops in alternating turns, and our share of time without anything to learn from.

    Raises:
        click.ClickException: the losses of the first steps differ.
    """
    import torch

    losses = compare_losses(case)
    count, device = len(case.site.unlabelled), case.site.device
    loops = {"edgefl": edgefl_epoch(case), "plain": plain_epoch(case)}
    took: dict[str, list[tuple[float, float]]] = {name: [] for name in LOOPS}
    for turn in range(repeats + 1):
        if turn == 1:  # the first warms up
            case.told.clear()
        for name in LOOPS if turn % 2 else reversed(LOOPS):  # whoever comes later finds a warmer machine
            spent = seconds(loops[name], device)
            took[name] += [spent] if turn else []
    speed = {name: count / statistics.median(counted for _, counted in took[name]) for name in LOOPS}
    waited = sum(float(facts["wait_seconds"]) for facts in case.told if "step" in facts)
    return {
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "autocast": str(case.site.autocast).removeprefix("torch.") if case.site.autocast else "none",
        "backbone": case.site.task.backbone.name,
        "image_px": case.site.task.backbone.image_px,
        "images": count,
        "batch": case.method.batch,
        **losses,
        "images_per_second": {name: round(value, 1) for name, value in speed.items()},
        "ratio": round(speed["edgefl"] / speed["plain"], 3),
        "wait_share": round(waited / sum(clock for clock, _ in took["edgefl"]), 4),
    }


def compare_losses(case: Case) -> dict[str, Any]:
    """The losses of the first steps on the same views and noise, in float32.

    Raises:
        click.ClickException: they differ by more than `TOLERANCE`.
    """
    import torch

    exact = replace(case, site=replace(case.site, autocast=None))
    batches, drawn = list(checked_views(exact)), torch.Generator().manual_seed(7)
    noise = [torch.rand(len(views), case.tokens, generator=drawn) for views in batches]
    found = {}
    for name, make in (("edgefl", edgefl_steps), ("plain", plain_steps)):
        step = make(exact)
        found[name] = [float(step(views, one.to(views.device))) for views, one in zip(batches, noise, strict=True)]
    worst = max(abs(a - b) / abs(b) for a, b in zip(found["edgefl"], found["plain"], strict=True))
    if not worst <= TOLERANCE:
        raise click.ClickException(f"the two loops do not compute the same loss: {found}.")
    return {"losses": found, "loss_difference": worst}


def seconds(epoch: Callable[[], None], device: "torch.device") -> tuple[float, float]:
    """What one epoch takes by the clock, and what counts: processor seconds on a CPU, the clock on CUDA."""
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)
    begun, worked = time.perf_counter(), time.process_time()
    epoch()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elapsed = time.perf_counter() - begun
    return elapsed, elapsed if device.type == "cuda" else time.process_time() - worked


def make_site(backbone: str, images: "np.ndarray", device: str, autocast: str, told: list[Mapping[str, Any]]) -> "Site":
    """A site with those pictures.

    Raises:
        click.UsageError: the name is no architecture that learns from nothing.
    """
    import torch

    from edgefl_trainer.contract import Examples, Site, Task
    from edgefl_trainer.engine.sites import choose_device
    from edgefl_trainer.models.architectures import parse_architecture
    from edgefl_trainer.models.backbones import load_backbone

    if parse_architecture(backbone, images.shape[1]) is None:
        raise click.UsageError(f"{backbone} is no architecture: name one such as vit:192x12/12.")
    count = len(images)
    rows = Examples(images, np.full(count, -1, dtype=np.int64), np.arange(count, dtype=np.int64))
    spec = load_backbone(backbone, image_px=images.shape[1]).spec
    task = Task(name="pixels", classes=("a", "b"), backbone=spec, rounds=1, epochs=1, seed=0)
    return Site(
        name="bench", task=task, backbone=None, train=rows, tune=rows, unlabelled=rows, device=choose_device(device),
        autocast=torch.bfloat16 if autocast == "bf16" else None, report=told.append,
    )  # fmt: skip


@click.command()
@click.option("--backbone", default="vit:192x12/12", show_default=True, metavar="NAME", help="Architecture.")
@click.option("--image-px", default=84, show_default=True, metavar="PX", help="Side of the images.")
@click.option("--images", "count", default=512, show_default=True, metavar="N", help="Images of a turn.")
@click.option("--batch", default=64, show_default=True, metavar="N", help="Images of a step.")
@click.option("--decoder", default="128x4", show_default=True, metavar="WIDTHxDEPTH", help="Shape of the decoder.")
@click.option("--repeats", default=5, show_default=True, metavar="N", help="Turns of each loop.")
@click.option(
    "--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True, help="Where to compute."
)
@click.option("--autocast", type=click.Choice(["none", "bf16"]), default="none", show_default=True, help="Precision.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
def main(
    backbone: str, image_px: int, count: int, batch: int, decoder: str, repeats: int, device: str, autocast: str,
    as_json: bool,
) -> None:  # fmt: skip
    """Measure a FedMAE epoch against the plain one."""
    import torch

    from edgefl_trainer.methods.fedmae import FedMAE

    torch.set_num_threads(1)
    torch.manual_seed(0)
    width, depth = map(int, decoder.split("x"))
    method = FedMAE(batch=batch, lr=1e-3, decoder_width=width, decoder_depth=depth)
    images = np.random.default_rng(0).integers(0, 256, (count, image_px, image_px, 3), dtype=np.uint8)
    told: list[Mapping[str, Any]] = []
    result = measure(Case(method, make_site(backbone, images, device, autocast, told), told), repeats)
    click.echo(json.dumps(result) if as_json else "\n".join(f"{name:<28}{value}" for name, value in result.items()))


if __name__ == "__main__":
    main()
