"""A FedMAE step against the same step written plainly in PyTorch: images per second, on a CPU or on CUDA.

The plain step is the public recipe of masked autoencoders (arXiv 2111.06377) as a person would write it on timm's
blocks: torchvision's crops image by image in a `DataLoader`, random masking by two argsorts, gather, a decoder over
mask tokens, mean squared error of the hidden patches, `AdamW`. Both start from the same weights; on the same views and
the same noise the losses of the first steps must agree to 1e-4 relative before anything is timed.

Timed, alternating in one process: `step` on views that are ready, and `views` + step from stored images. On a CPU in
processor seconds of one thread, on CUDA in elapsed ones.

    python benchmarks/fedmae_step.py --json
"""

import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click
import numpy as np

if TYPE_CHECKING:
    import torch
    from torch import Tensor

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
    backbone: str
    images: "np.ndarray"  # uint8 (n, px, px, 3)
    device: "torch.device"
    autocast: "torch.dtype | None"

    def network(self) -> "MaskedAutoencoder":
        """An autoencoder with the same weights each time."""
        from edgefl_trainer.models.architectures import parse_architecture
        from edgefl_trainer.models.mae import MaskedAutoencoder

        shape = parse_architecture(self.backbone, self.images.shape[1])
        if shape is None:
            raise click.UsageError(f"{self.backbone} is no architecture: name one such as vit:192x12/12.")
        width, depth = self.method.decoder_width, self.method.decoder_depth
        model = MaskedAutoencoder(shape, decoder_width=width, decoder_depth=depth)
        model.initialise(0)
        return model.to(self.device)


def edgefl_steps(case: Case) -> "Callable[[Tensor, Tensor], Tensor]":
    """One optimiser step of FedMAE on uint8 views (B, px, px, 3) and noise (B, N)."""
    import torch

    from edgefl_trainer.augment import to_float
    from edgefl_trainer.models.architectures import IMAGENET_MEAN, IMAGENET_STD

    model = case.network()
    optimizer = case.method._optimizer(model)

    def step(views: "Tensor", noise: "Tensor") -> "Tensor":
        with torch.autocast(case.device.type, dtype=case.autocast, enabled=case.autocast is not None):
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

    model = case.network()  # for its layers and their first values; the forward below is the public one
    learned = [value for value in model.parameters() if value.requires_grad]
    groups = [
        {"params": [value for value in learned if value.ndim > 1], "weight_decay": case.method.weight_decay},
        {"params": [value for value in learned if value.ndim <= 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=case.method.lr, betas=(0.9, 0.95))

    def step(views: "Tensor", noise: "Tensor") -> "Tensor":
        pixels = normalize(views.permute(0, 3, 1, 2).float() / 255, list(IMAGENET_MEAN), list(IMAGENET_STD))
        with torch.autocast(case.device.type, dtype=case.autocast, enabled=case.autocast is not None):
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


def edgefl_views(case: Case) -> "Iterator[Tensor]":
    """Batches as FedMAE reads and crops them."""
    from edgefl_trainer.augment import random_crops
    from edgefl_trainer.contract import Examples, Site, Task
    from edgefl_trainer.learning.self_supervised import ahead
    from edgefl_trainer.models.backbones import load_backbone

    count = len(case.images)
    spec = load_backbone(case.backbone, image_px=case.images.shape[1]).spec
    task = Task(name="pixels", classes=("a", "b"), backbone=spec, rounds=1, epochs=1, seed=0)
    rows = Examples(case.images, np.zeros(count, np.int64), np.arange(count))
    site = Site(name="a", task=task, backbone=None, train=rows, tune=rows, unlabelled=rows, device=case.device)
    order, rng = site.epoch_order(rows, 1, 0), np.random.default_rng(0)
    parts = [order[start : start + case.method.batch] for start in range(0, count, case.method.batch)]
    for images in ahead(site, rows, parts):
        yield random_crops(images, rng, case.method.smallest_crop)


def plain_views(case: Case) -> "Iterator[Tensor]":
    """Batches as a `DataLoader` with torchvision's crops gives them."""
    import torch
    from torch.utils.data import DataLoader
    from torchvision.transforms import InterpolationMode, v2

    side = case.images.shape[1]
    crop = v2.RandomResizedCrop(side, scale=(case.method.smallest_crop, 1.0), interpolation=InterpolationMode.BICUBIC)
    change = v2.Compose([crop, v2.RandomHorizontalFlip()])

    class Pictures(torch.utils.data.Dataset[torch.Tensor]):
        def __len__(self) -> int:
            return len(case.images)

        def __getitem__(self, index: int) -> "Tensor":
            changed: torch.Tensor = change(torch.from_numpy(case.images[index]).permute(2, 0, 1))
            return changed

    for batch in DataLoader(Pictures(), batch_size=case.method.batch, shuffle=True):
        yield batch.permute(0, 2, 3, 1).to(case.device)


def measure(case: Case, repeats: int) -> dict[str, Any]:
    """Images per second of both loops, and what each part takes.

    Raises:
        click.ClickException: the losses of the first steps differ.
    """
    import torch

    tokens, clock = case.network().tokens, _clock(case.device)
    makers = {"edgefl": (edgefl_steps, edgefl_views), "plain": (plain_steps, plain_views)}
    losses = compare_losses(case, tokens)
    steps = {name: make(case) for name, (make, _) in makers.items()}
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in LOOPS}
    for turn in range(repeats + 1):
        for name in LOOPS if turn % 2 else reversed(LOOPS):  # whoever comes later finds a warmer machine
            begun = clock()
            batches = list(makers[name][1](case))
            middle = clock()
            for views in batches:
                steps[name](views, torch.rand(len(views), tokens, device=case.device))
            if turn:  # the first warms up
                taken[name].append((middle - begun, clock() - middle))
    count = len(case.images)
    read, step = ({name: statistics.median(pair[i] for pair in taken[name]) for name in LOOPS} for i in (0, 1))
    return {
        "device": torch.cuda.get_device_name() if case.device.type == "cuda" else "cpu",
        "autocast": str(case.autocast).removeprefix("torch.") if case.autocast else "none",
        "backbone": case.backbone,
        "image_px": int(case.images.shape[1]),
        "images": count,
        "batch": case.method.batch,
        **losses,
        "images_per_second": {name: round(count / (read[name] + step[name]), 1) for name in LOOPS},
        "images_per_second_of_a_step": {name: round(count / step[name], 1) for name in LOOPS},
        "share_of_views": {name: round(read[name] / (read[name] + step[name]), 4) for name in LOOPS},
        "ratio": round((read["plain"] + step["plain"]) / (read["edgefl"] + step["edgefl"]), 3),
        "ratio_of_a_step": round(step["plain"] / step["edgefl"], 3),
    }


def compare_losses(case: Case, tokens: int) -> dict[str, Any]:
    """The losses of the first steps on the same views and noise, in float32.

    Raises:
        click.ClickException: they differ by more than `TOLERANCE`.
    """
    import torch

    exact = Case(case.method, case.backbone, case.images, case.device, None)
    batches = [views for _, views in zip(range(CHECKED_STEPS), edgefl_views(exact), strict=False)]
    noise = [torch.rand(len(views), tokens, generator=torch.Generator().manual_seed(7)) for views in batches]
    found = {}
    for name, make in (("edgefl", edgefl_steps), ("plain", plain_steps)):
        step = make(exact)
        found[name] = [float(step(views, one.to(case.device))) for views, one in zip(batches, noise, strict=True)]
    worst = max(abs(a - b) / abs(b) for a, b in zip(found["edgefl"], found["plain"], strict=True))
    if not worst <= TOLERANCE:
        raise click.ClickException(f"the two loops do not compute the same loss: {found}.")
    return {"losses": found, "loss_difference": worst}


def _clock(device: "torch.device") -> Callable[[], float]:
    import torch

    def elapsed() -> float:
        torch.cuda.synchronize(device)
        return time.perf_counter()

    return elapsed if device.type == "cuda" else time.process_time


@click.command()
@click.option("--backbone", default="vit:192x12/12", show_default=True, metavar="NAME", help="Architecture.")
@click.option("--image-px", default=84, show_default=True, metavar="PX", help="Side of the images.")
@click.option("--images", "count", default=512, show_default=True, metavar="N", help="Images of a turn.")
@click.option("--batch", default=64, show_default=True, metavar="N", help="Images of a step.")
@click.option("--decoder", default="128x4", show_default=True, metavar="WIDTHxDEPTH", help="Shape of the decoder.")
@click.option("--repeats", default=5, show_default=True, metavar="N", help="Turns of each loop.")
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True, help="Where.")
@click.option("--autocast", type=click.Choice(["none", "bf16"]), default="none", show_default=True, help="Precision.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
def main(
    backbone: str, image_px: int, count: int, batch: int, decoder: str, repeats: int, device: str, autocast: str,
    as_json: bool,
) -> None:  # fmt: skip
    """Measure a FedMAE step against the plain one."""
    import torch

    from edgefl_trainer.engine.sites import choose_device
    from edgefl_trainer.methods.fedmae import FedMAE

    torch.set_num_threads(1)
    torch.manual_seed(0)
    width, depth = map(int, decoder.split("x"))
    method = FedMAE(batch=batch, lr=1e-3, decoder_width=width, decoder_depth=depth)
    images = np.random.default_rng(0).integers(0, 256, (count, image_px, image_px, 3), dtype=np.uint8)
    where = choose_device(device)
    result = measure(Case(method, backbone, images, where, torch.bfloat16 if autocast == "bf16" else None), repeats)
    click.echo(json.dumps(result) if as_json else "\n".join(f"{name:<28}{value}" for name, value in result.items()))


if __name__ == "__main__":
    main()
