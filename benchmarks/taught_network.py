"""Teach a vision transformer the features of a network with ImageNet's weights, as a federation, and probe the result.

Each centre: one epoch a round of its own pictures, no label; the transformer's patches predict the teacher's map of
7 × 7 and their mean its pooled feature (smooth L1 on features normed over channels, as FitNets' hints, arXiv
1412.6550). Server: the mean by number of pictures. The teacher is public and never changes. A round that is kept in
STATE is not done again. The network is written as a backbone file, float16, that `--backbone file:FILE` takes.

    python benchmarks/taught_network.py --data manifest:fed_isic2019_84.zip --rounds 10 --out taught.safetensors
"""

import json
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from backbone_probes import compare
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import interpolate, layer_norm, smooth_l1_loss

from edgefl_protocol import Payload
from edgefl_protocol.durable import read_bounded, write_atomic
from edgefl_protocol.errors import EdgeflError
from edgefl_protocol.rules.batches import batches_of
from edgefl_protocol.rules.draws import generator
from edgefl_protocol.rules.rates import cosine_rate
from edgefl_protocol.tensors import read_tensors, write_tensors
from edgefl_trainer.augment import random_crops, to_float
from edgefl_trainer.data import Federation, load_federation
from edgefl_trainer.learning.averaging import weighted_mean
from edgefl_trainer.models.backbones import backbone_bytes, build_network, load_backbone, load_weights, weights_of
from edgefl_trainer.models.cnn import FrozenCNN
from edgefl_trainer.models.spec import ViTSpec, require_vit

TEACHER, TEACHER_PX = "package:efficientnet_lite0", 112  # a map of 7 × 7 at stride 16
MAP_BLOCK, MAP_WIDTH = 4, 112  # of the teacher: the last stage of stride 16, and its channels
BATCH, RATE, DECAY, SMALLEST_CROP = 64, 1e-3, 0.05, 0.3
MOST_STATE_BYTES = 128 * 1024**2


class Teacher(nn.Module):
    """A frozen network that gives its map at stride 16 and its pooled feature."""

    def __init__(self) -> None:
        super().__init__()
        backbone = load_backbone(TEACHER, image_px=TEACHER_PX)
        assert isinstance(backbone, FrozenCNN)
        self.backbone, self.width = backbone, backbone.spec.width
        self.map: Tensor | None = None
        backbone.network.blocks[MAP_BLOCK].register_forward_hook(self._keep)

    def _keep(self, module: nn.Module, inputs: Any, output: Tensor) -> None:
        self.map = output

    @torch.no_grad()
    def forward(self, views: Tensor) -> tuple[Tensor, Tensor]:
        """Give targets of 8-bit views (B, S, S, 3): (B, 49, 112) and (B, 1280), each normed over its channels."""
        spec = self.backbone.spec
        enlarged = interpolate(to_float(views, spec.mean, spec.std), size=TEACHER_PX, mode="bicubic", antialias=True)
        pooled = self.backbone(enlarged.contiguous(memory_format=torch.channels_last)).pooled
        assert self.map is not None
        return normed(self.map.flatten(2).transpose(1, 2)), normed(pooled)


def normed(values: Tensor) -> Tensor:
    """Norm over the last axis, without learned scale."""
    return layer_norm(values, values.shape[-1:])


class Student(nn.Module):
    """A vision transformer with one linear layer for each target."""

    def __init__(self, spec: ViTSpec, pooled_width: int) -> None:
        super().__init__()
        self.backbone: Any = build_network(spec, 0)
        self.patches, self.pooled = nn.Linear(spec.width, MAP_WIDTH), nn.Linear(spec.width, pooled_width)

    def forward(self, images: Tensor, targets: tuple[Tensor, Tensor]) -> Tensor:
        """Compute the loss of a batch: the map's term plus the pooled feature's."""
        tokens = self.backbone.forward_features(images)[:, 1:]
        map_loss = smooth_l1_loss(self.patches(tokens), targets[0])
        return map_loss + smooth_l1_loss(self.pooled(tokens.mean(dim=1)), targets[1])


def one_epoch(
    student: Student, teacher: Teacher, images: NDArray[np.uint8], rng: np.random.Generator, begun: float, rounds: int
) -> float:
    """Learn one epoch of a centre's pictures; return the mean loss. `begun` rounds of all `rounds` are behind."""
    spec = load_spec(student)
    optimiser = torch.optim.AdamW(student.parameters(), lr=RATE, weight_decay=DECAY, fused=True)
    parts = batches_of(rng.permutation(len(images)), BATCH)
    losses = []
    for index, part in enumerate(parts):
        for group in optimiser.param_groups:
            group["lr"] = RATE * cosine_rate(begun + index / len(parts), rounds, 1.0)
        views = random_crops(torch.from_numpy(images[np.sort(part)]), rng, SMALLEST_CROP)
        loss = student(to_float(views, spec.mean, spec.std), teacher(views))
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(student.parameters(), 1.0)
        optimiser.step()
        losses.append(float(loss.detach()))
    return float(np.mean(losses))


def load_spec(student: Student) -> ViTSpec:
    """Return the description of the student's network."""
    return student.spec  # type: ignore[return-value]


def rounds_of(
    student: Student, teacher: Teacher, pictures: Mapping[str, NDArray[np.uint8]], rounds: int, state: Path, seed: int
) -> Iterator[str]:
    """Average the centres' students round by round; each round is on the disk before the next begins."""
    done, arrays = begun_state(state, student)
    for round_ in range(done, rounds):
        start, replies, told = time.perf_counter(), {}, []
        for site in sorted(pictures):
            student.load_state_dict({name: torch.from_numpy(value.copy()) for name, value in arrays.items()})
            rng = generator(seed, site, "taught", round_)
            told.append(f"{site} {one_epoch(student, teacher, pictures[site], rng, round_, rounds):.4f}")
            learned = {name: value.detach().numpy().copy() for name, value in student.state_dict().items()}
            replies[site] = Payload(learned, {"n_train": len(pictures[site])})
        arrays = weighted_mean(replies, {site: float(len(rows)) for site, rows in pictures.items()})
        write_atomic(state, write_tensors(arrays, {"rounds": str(round_ + 1)}))
        yield f"round {round_ + 1}/{rounds}, {time.perf_counter() - start:.0f} s: {', '.join(told)}"
    student.load_state_dict({name: torch.from_numpy(np.array(value)) for name, value in arrays.items()})


def begun_state(state: Path, student: Student) -> tuple[int, dict[str, NDArray[np.generic]]]:
    """Return the rounds behind and the arrays they left; the student as it is where none is."""
    if not state.exists():
        return 0, {name: value.detach().numpy().copy() for name, value in student.state_dict().items()}
    arrays, facts = read_tensors(read_bounded(state, MOST_STATE_BYTES), max_bytes=MOST_STATE_BYTES)
    return int(facts["rounds"]), dict(arrays)


@click.command()
@click.option("--data", required=True, metavar="SPEC", help="The federation.")
@click.option("--from", "start", default="derm-vit-tiny-84", show_default=True, help="The network to begin with.")
@click.option("--rounds", default=10, show_default=True, help="Rounds of one epoch.")
@click.option("--seed", default=0, show_default=True)
@click.option("--out", required=True, type=click.Path(path_type=Path, dir_okay=False), help="The backbone file.")
def main(data: str, start: str, rounds: int, seed: int, out: Path) -> None:
    """Teach, write the network to OUT, and print probes of it, of the network it began with, and of the teacher."""
    try:
        before = load_backbone(start)
        spec = require_vit(before.spec, "teaching")
        federation = load_federation([data], image_px=spec.image_px, unlabelled="spread", seed=seed)
        torch.manual_seed(seed)
        teacher = Teacher()
        student = Student(spec, teacher.width)
        student.spec = spec  # type: ignore[assignment]
        load_weights(student.backbone, weights_of(before.network), start)
        for line in rounds_of(student, teacher, pictures_of(federation), rounds, out.with_suffix(".state"), seed):
            click.echo(line)
        write_atomic(out, backbone_bytes(spec, weights_of(student.backbone), self_supervised=True, half=True))
        networks = {name: load_backbone(name) for name in (f"file:{out}", start)}
        tasks = ("nevus", "all")
        named = {task: load_federation([data], image_px=spec.image_px, task=task, seed=seed) for task in tasks}
        click.echo(json.dumps(compare(networks, named, torch.device("cpu")), indent=1))
    except (EdgeflError, ValueError) as error:
        raise click.ClickException(str(error)) from error


def pictures_of(federation: Federation) -> dict[str, NDArray[np.uint8]]:
    """Return the pictures that each centre learns from: its train rows and its part of those of no centre."""
    rows = {n: np.union1d(site.train, site.unlabelled) for n, site in federation.sites.items()}
    return {name: np.asarray(federation.images[federation.places(found)]) for name, found in rows.items()}


if __name__ == "__main__":
    main()
