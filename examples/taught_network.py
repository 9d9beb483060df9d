"""Teach a vision transformer the features of an ImageNet network, site by site.

The teacher is `package:efficientnet_lite0` at 112 px, whose stage of stride 16 has one cell for each of the 49
patches of 84 px. In a round every site learns one epoch of its pictures, with or without label, and the students are
averaged:

    loss = mean over patches  |W_m z_patch − teacher's cell|²  +  |W_p mean(z_patch) − teacher's pooled feature|²

both standardised over the pictures of `MOMENTS` batches. No label is read. After each round the averaged student lies
in a folder as `state-NN.safetensors`; teaching goes on from the last that is there.

Sources: "FitNets", arXiv 1412.6550 (a student learns a teacher's features); FedAvg, arXiv 1602.05629.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate, mse_loss

from edgefl_protocol import Payload
from edgefl_protocol.durable import write_atomic
from edgefl_protocol.rules.batches import batches_of
from edgefl_protocol.rules.rates import cosine_rate
from edgefl_protocol.tensors import read_tensors, write_tensors
from edgefl_trainer.augment import random_crops, to_float
from edgefl_trainer.contract import Examples
from edgefl_trainer.data import Federation
from edgefl_trainer.errors import BackboneError
from edgefl_trainer.learning.averaging import sample_weights, weighted_mean
from edgefl_trainer.learning.features import LEAST_SHARE
from edgefl_trainer.learning.named_arrays import as_arrays
from edgefl_trainer.models.backbones import backbone_bytes, build_network, load_backbone, load_weights, weights_of
from edgefl_trainer.models.cnn import Backbone
from edgefl_trainer.models.vit import FrozenViT

TEACHER, TEACHER_PX, STAGE = "package:efficientnet_lite0", 112, 4  # the last stage of stride 16
BATCH, LR, DECAY, SMALLEST_CROP = 32, 1e-3, 0.05, 0.5
MOMENTS = 8  # batches that tell mean and deviation of the teacher's features
MAX_STATE_BYTES = 2**28


@dataclass(frozen=True)
class Targets:
    """What the teacher says of a batch: a feature for each patch (B, N, C) and the pooled one (B, D)."""

    cells: Tensor
    pooled: Tensor


class Teacher:
    """The ImageNet network, its features standardised."""

    def __init__(self, pictures: Tensor) -> None:
        """Measure mean and deviation over some pictures, uint8 (n, px, px, 3)."""
        backbone = load_backbone(TEACHER, image_px=TEACHER_PX)
        self.network: Any = backbone.network
        self.spec = backbone.spec
        self.scale = (Targets(torch.zeros(1), torch.zeros(1)), Targets(torch.ones(1), torch.ones(1)))
        found = [self(part) for part in torch.split(pictures, BATCH)]
        cells, pooled = torch.cat([one.cells for one in found]), torch.cat([one.pooled for one in found])
        self.scale = (
            Targets(cells.mean((0, 1)), pooled.mean(0)),
            Targets(floored(cells.std((0, 1))), floored(pooled.std(0))),
        )

    @torch.no_grad()
    def __call__(self, pictures: Tensor) -> Targets:
        """The features of pictures, uint8 (B, px, px, 3)."""
        pixels = to_float(pictures, self.spec.mean, self.spec.std)
        found = interpolate(pixels, size=(TEACHER_PX, TEACHER_PX), mode="bilinear", antialias=True, align_corners=False)
        network = self.network
        found = network.bn1(network.conv_stem(found))
        cells = found
        for number, stage in enumerate(network.blocks):
            found = stage(found)
            cells = found if number == STAGE else cells
        pooled = network.forward_head(network.bn2(network.conv_head(found)))
        mean, deviation = self.scale
        flat = cells.flatten(2).transpose(1, 2)  # (B, N, C), row by row as patches are
        return Targets((flat - mean.cells) / deviation.cells, (pooled - mean.pooled) / deviation.pooled)


def floored(deviation: Tensor) -> Tensor:
    """A deviation, at least a tenth of the median: a channel that is hardly ever on must not outweigh the others."""
    return deviation.clamp_min(LEAST_SHARE * deviation.median().item())


class Student(nn.Module):
    """The vision transformer that learns, and the two maps from its patches to the teacher's features."""

    backbone: Any

    def __init__(self, start: str, image_px: int, widths: tuple[int, int], seed: int) -> None:
        """Begin with the weights of `start`."""
        super().__init__()
        found = load_backbone(start, image_px=image_px, seed=seed)
        self.spec = found.spec
        self.backbone = build_network(found.spec, seed)
        load_weights(self.backbone, weights_of(encoder(found)), start)
        torch.manual_seed(seed)
        self.cells, self.pooled = (nn.Linear(found.spec.width, width) for width in widths)

    def forward(self, pictures: Tensor, targets: Targets) -> Tensor:
        """The loss of a batch."""
        tokens = self.backbone.forward_features(to_float(pictures, self.spec.mean, self.spec.std))[:, 1:]
        return mse_loss(self.cells(tokens), targets.cells) + mse_loss(self.pooled(tokens.mean(1)), targets.pooled)


def encoder(backbone: Backbone) -> nn.Module:
    """The network inside; a `BackboneError` where it is not a vision transformer."""
    if not isinstance(backbone, FrozenViT):
        raise BackboneError("only a vision transformer can be taught: its patches are the teacher's cells.")
    network: nn.Module = backbone.vit
    return network


def learned(student: Student) -> dict[str, nn.Parameter]:
    """The parameters that learn."""
    return {name: value for name, value in student.named_parameters() if value.requires_grad}


def epoch(
    student: Student, teacher: Teacher, rows: Examples, done: int, rounds: int, rng: np.random.Generator
) -> float:
    """One epoch of a site in place; its mean loss."""
    named = learned(student)
    decayed = [value for value in named.values() if value.ndim > 1]
    plain = [value for value in named.values() if value.ndim <= 1]
    groups = [{"params": decayed, "weight_decay": DECAY}, {"params": plain, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LR, fused=True)
    losses = []
    for step, (pictures, count) in enumerate(drawn(rows, rng)):
        for group in optimizer.param_groups:
            group["lr"] = LR * cosine_rate(done + step / count, rounds, 0.1 * rounds)
        loss = student(pictures, teacher(pictures))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return float(np.mean(losses))


def drawn(rows: Examples, rng: np.random.Generator) -> Iterator[tuple[Tensor, int]]:
    """Random views of a site's pictures in random order, and the number of batches."""
    parts = batches_of(rng.permutation(len(rows)), BATCH)
    for part in parts:
        pictures = torch.from_numpy(rows.images[rows.places[part]])
        yield random_crops(pictures, rng, SMALLEST_CROP), len(parts)


def pictures_of(federation: Federation) -> dict[str, Examples]:
    """What each site learns from: its `train` rows and those without label."""
    return {
        name: Examples(federation.images, federation.labels, np.sort(np.concatenate([site.train, site.unlabelled])))
        for name, site in federation.sites.items()
    }


def teach(federation: Federation, start: str, rounds: int, seed: int, out: Path) -> None:
    """All rounds that are not there yet."""
    sites = pictures_of(federation)
    places = np.concatenate([rows.places for rows in sites.values()])
    shown = np.random.default_rng(seed).choice(places, min(MOMENTS * BATCH, len(places)), replace=False)
    teacher = Teacher(torch.from_numpy(federation.images[np.sort(shown)]))
    sample = teacher(torch.from_numpy(federation.images[np.sort(shown)[:1]]))
    student = Student(start, federation.images.shape[1], (sample.cells.shape[-1], sample.pooled.shape[-1]), seed)
    shared = as_arrays(learned(student))
    for done in range(rounds):
        kept = out / f"state-{done + 1:02}.safetensors"
        if kept.exists():
            shared = dict(read_tensors(kept.read_bytes(), max_bytes=MAX_STATE_BYTES)[0])
            continue
        begun, replies = time.monotonic(), {}
        for number, (name, rows) in enumerate(sites.items()):
            student.load_state_dict(
                {key: torch.from_numpy(np.array(value)) for key, value in shared.items()}, strict=False
            )
            rng = np.random.default_rng([seed, done, number])
            loss = epoch(student, teacher, rows, done, rounds, rng)
            replies[name] = Payload(as_arrays(learned(student)), {"n_train": len(rows)})
            click.echo(
                f"round {done + 1}/{rounds} · {name}: loss {loss:.3f}, {time.monotonic() - begun:.0f} s", err=True
            )
        shared = weighted_mean(replies, sample_weights(replies))
        student.load_state_dict({key: torch.from_numpy(np.array(value)) for key, value in shared.items()}, strict=False)
        file = backbone_bytes(student.spec, weights_of(student.backbone), self_supervised=True, half=True)
        write_atomic(out / f"round-{done + 1:02}.safetensors", file)
        write_atomic(kept, write_tensors(shared, {}))
