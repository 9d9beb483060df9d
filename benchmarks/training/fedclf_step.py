"""A FedCLF step against the same step written plainly in PyTorch: images per second, on a CPU or on CUDA.

The plain step is momentum contrast as its public code reads (arXiv 1911.05722, algorithm 1), with the others' features
as negatives (arXiv 2208.11278, section III) and torchvision's views of one image at a time. Both start from the same
weights; on the same views and the same drawn features the losses of the first steps must agree to 1e-4 relative before
anything is timed: the third depends on two updates of the encoder, its slow copy and the negatives.

Timed, alternating in one process: an epoch as a run makes it (reading, views, loss, optimiser, reports) and the plain
one. On a CPU in processor seconds of the process, on CUDA in elapsed ones.

    python -m benchmarks.training.fedclf_step --images 256 --batch 64 --json
"""

import copy
import json
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import click
import numpy as np

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from edgefl_trainer.contract import Site
    from edgefl_trainer.learning.unlabelled.contrast import MomentumContrast, Remote
    from edgefl_trainer.learning.unlabelled.self_supervised import LearningNetwork

COUNT = click.IntRange(min=1)
TOLERANCE = 1e-4  # relative, of the losses
CHECKED_STEPS = 3
TEMPERATURE, MOMENTUM, LR, WEIGHT_DECAY = 0.2, 0.99, 0.03, 1e-4
REMOTE = 2048  # features of the others: two full banks
LOOPS = ("edgefl", "plain")


@dataclass(frozen=True)
class Case:
    """What both loops learn, and on what."""

    site: "Site"
    batch: int
    told: list[Mapping[str, Any]] = field(default_factory=list)  # what our loop reports

    @property
    def remote(self) -> "Tensor":
        """Unit vectors (REMOTE, 128), the same each time."""
        import torch

        drawn = torch.randn(REMOTE, 128, generator=torch.Generator().manual_seed(1))
        return torch.nn.functional.normalize(drawn, dim=1).to(self.site.device)

    def network(self) -> "LearningNetwork":
        """Encoder and projection with the same weights each time."""
        from edgefl_trainer.learning.unlabelled.contrast import ContrastRecipe

        return ContrastRecipe().build(self.site.task).at(self.site).train()


@dataclass
class PlainContrast:
    """Momentum contrast as a script has it; a call is the loss of one batch, before the optimiser's step."""

    model: "LearningNetwork"
    remote: "Tensor"
    autocast: "torch.dtype | None"

    def __post_init__(self) -> None:
        self.slow, self.negatives, self.place = copy.deepcopy(self.model), self.remote.clone(), 0

    def __call__(self, first: "Tensor", second: "Tensor", drawn: "Tensor") -> "Tensor":
        """Loss of two views (B, 3, px, px); B others' features enter the negatives."""
        import torch
        from torch.nn.functional import cross_entropy, normalize

        with torch.autocast(first.device.type, dtype=self.autocast, enabled=self.autocast is not None):
            queries = normalize(self.model(first).float(), dim=1)
            with torch.no_grad():
                for theirs, ours in zip(self.slow.parameters(), self.model.parameters(), strict=True):
                    theirs.mul_(MOMENTUM).add_(ours, alpha=1 - MOMENTUM)
                keys = normalize(self.slow(second).float(), dim=1)
        similar = torch.cat([(queries * keys).sum(1, keepdim=True), queries @ self.negatives.T], dim=1) / TEMPERATURE
        loss = cross_entropy(similar, torch.zeros(len(similar), dtype=torch.long, device=similar.device))
        self.negatives = self.negatives.clone()
        self.negatives[torch.arange(self.place, self.place + len(keys)) % len(self.negatives)] = drawn
        self.place = (self.place + len(keys)) % len(self.negatives)
        return loss


def optimizer_of(model: "LearningNetwork") -> "torch.optim.SGD":
    """The paper's: SGD with momentum 0.9."""
    import torch

    return torch.optim.SGD(model.parameters(), LR, momentum=0.9, weight_decay=WEIGHT_DECAY)


def learn_from(loss: "Tensor", optimizer: "torch.optim.Optimizer") -> float:
    """One step; the loss as a number."""
    optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    return loss.item()


def edgefl_epoch(case: Case) -> Callable[[], None]:
    """An epoch of FedCLF, as `local_round` makes it."""
    from edgefl_protocol.rules.feature_rows import BANK
    from edgefl_trainer.contract import State
    from edgefl_trainer.learning.unlabelled import contrast
    from edgefl_trainer.learning.unlabelled.contrast import ContrastRecipe
    from edgefl_trainer.learning.unlabelled.self_supervised import SgdRecipe

    recipe = ContrastRecipe(sgd=SgdRecipe(batch=case.batch), key_momentum=MOMENTUM)
    start, others = contrast.start(recipe, case.site.task).arrays, case.remote
    state = State({BANK: others[:1024].cpu().numpy()})

    def epoch() -> None:
        contrast.contrast_round(recipe, case.site, state, start, 1, others=others, keeps_local=False)

    return epoch


def plain_epoch(case: Case) -> Callable[[], None]:
    """The same epoch as a script has it."""
    import torch

    store, view, device = case.site.unlabelled, torchvision_view(case.site), case.site.device

    def epoch() -> None:
        contrast = PlainContrast(case.network(), case.remote, case.site.autocast)
        optimizer = optimizer_of(contrast.model)
        order = torch.randperm(len(store)).numpy()
        for begun in range(0, len(order), case.batch):
            images = torch.from_numpy(store.images[store.rows[order[begun : begun + case.batch]]]).permute(0, 3, 1, 2)
            first = torch.stack([view(image) for image in images]).to(device)
            second = torch.stack([view(image) for image in images]).to(device)
            drawn = contrast.remote[torch.randint(REMOTE, (len(images),), device=device)]
            learn_from(contrast(first, second, drawn), optimizer)

    return epoch


def torchvision_view(site: "Site") -> "Callable[[Tensor], Tensor]":
    """MoCo v2's view of one image, as its public code composes it."""
    import torch
    from torchvision.transforms import v2

    from edgefl_protocol.rules.view_recipes import blur_kernel
    from edgefl_trainer.learning.unlabelled.self_supervised import SgdRecipe

    spec = site.task.backbone
    side = SgdRecipe().side(spec)
    view: Callable[[Tensor], Tensor] = v2.Compose(
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
    return view


def compare_losses(case: Case) -> dict[str, Any]:
    """The losses of the first steps on the same views and the same drawn features, in float32.

    Raises:
        click.ClickException: they differ by more than `TOLERANCE`.
    """
    from edgefl_trainer.learning.unlabelled import self_supervised
    from edgefl_trainer.learning.unlabelled.self_supervised import SgdRecipe

    prepare, rng = self_supervised.views(case.site, SgdRecipe(), "moco-v2", 2), np.random.default_rng(0)
    parts = [np.arange(start, start + case.batch) for start in range(0, CHECKED_STEPS * case.batch, case.batch)]
    images = (case.site.unlabelled.read(part % len(case.site.unlabelled))[0] for part in parts)
    pairs = [prepare(batch.to(case.site.device), rng) for batch in images]
    ours, plain = objective(case), PlainContrast(case.network(), case.remote, None)
    optimizers, draws = (optimizer_of(ours.encoder), optimizer_of(plain.model)), draws_of(case)
    found: dict[str, list[float]] = {name: [] for name in LOOPS}
    for first, second in pairs:
        found["edgefl"].append(learn_from(ours((first, second)), optimizers[0]))
        found["plain"].append(learn_from(plain(first, second, draws.draw(len(first))), optimizers[1]))
    worst = max(abs(a - b) / abs(b) for a, b in zip(found["edgefl"], found["plain"], strict=True))
    if not worst <= TOLERANCE:
        raise click.ClickException(f"the two loops do not compute the same loss: {found}.")
    return {"losses": found, "loss_difference": worst}


def objective(case: Case) -> "MomentumContrast":
    """What our loop minimises, as `contrast_round` puts it together for FedCLF."""
    from edgefl_trainer.learning.unlabelled import contrast

    model, remote = case.network(), case.remote
    bank, negatives = (contrast.FeatureRing(size, case.site.device) for size in (1024, REMOTE))
    negatives.push(remote)
    return contrast.MomentumContrast(
        model, contrast.slow_copy(model, {}), MOMENTUM, TEMPERATURE, bank, negatives, draws_of(case), keeps_local=False
    )


def draws_of(case: Case) -> "Remote":
    """Draws from the others' features, the same each time."""
    from edgefl_trainer.learning.unlabelled.contrast import Remote

    return Remote(case.remote, np.random.default_rng(2))


def make_case(network: str, image_px: int, images: int, batch: int, device: str) -> Case:
    """A site with random pictures, whose reports end up in the case."""
    import torch

    from edgefl_trainer.contract import Examples, Site, Task
    from edgefl_trainer.models.backbones import load_backbone

    pictures = np.random.default_rng(0).integers(0, 256, (images, image_px, image_px, 3), dtype=np.uint8)
    rows = Examples(pictures, np.full(images, -1, dtype=np.int64), np.arange(images, dtype=np.int64))
    spec = load_backbone(network, image_px=image_px).spec
    task = Task(name="pixels", classes=("a", "b"), backbone=spec, rounds=1, epochs=1, seed=0)
    told: list[Mapping[str, Any]] = []
    site = Site(
        name="bench", task=task, backbone=None, train=rows, tune=rows, unlabelled=rows, device=torch.device(device),
        autocast=torch.bfloat16 if device == "cuda" else None, report=told.append,
    )  # fmt: skip
    return Case(site, batch, told)


def measure(case: Case, repeats: int) -> dict[str, Any]:
    """Images per second of both loops in alternating turns, and our share of time without anything to learn from.

    Raises:
        click.ClickException: the losses of the first steps differ.
    """
    losses = compare_losses(case)
    count, device = len(case.site.unlabelled), case.site.device.type
    loops = {"edgefl": edgefl_epoch(case), "plain": plain_epoch(case)}
    took: dict[str, list[tuple[float, float]]] = {name: [] for name in LOOPS}
    for turn in range(repeats + 1):
        if turn == 1:  # the first warms up
            case.told.clear()
        for name in LOOPS if turn % 2 else reversed(LOOPS):
            spent = seconds(loops[name], device)
            took[name] += [spent] if turn else []
    speed = {name: count / statistics.median(counted for _, counted in took[name]) for name in LOOPS}
    waited = sum(float(facts["wait_seconds"]) for facts in case.told if "step" in facts)
    return {
        "device": device,
        "network": case.site.task.backbone.name,
        "image_px": case.site.task.backbone.image_px,
        "images": count,
        "batch": case.batch,
        **losses,
        "images_per_second": {name: round(value, 1) for name, value in speed.items()},
        "ratio": round(speed["edgefl"] / speed["plain"], 3),
        "wait_share": round(waited / sum(clock for clock, _ in took["edgefl"]), 4),
    }


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


@click.command()
@click.option("--network", default="cnn:resnet18", show_default=True, metavar="NAME", help="Architecture.")
@click.option("--image-px", default=72, show_default=True, metavar="PX", type=COUNT, help="Side of the images.")
@click.option("--images", default=256, show_default=True, metavar="N", type=COUNT, help="Images of an epoch.")
@click.option("--batch", default=64, show_default=True, metavar="N", type=COUNT, help="Images of a step.")
@click.option("--repeats", default=3, show_default=True, metavar="N", type=COUNT, help="Turns of each loop.")
@click.option("--threads", default=1, show_default=True, metavar="N", type=COUNT, help="Threads of PyTorch.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object for each device on stdout.")
def main(network: str, image_px: int, images: int, batch: int, repeats: int, threads: int, as_json: bool) -> None:
    """Measure a FedCLF step against the plain one, on the CPU and where there is one on CUDA."""
    import torch

    torch.set_num_threads(threads)
    torch.manual_seed(0)
    for device in ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",):
        found = measure(make_case(network, image_px, images, batch, device), repeats)
        click.echo(json.dumps(found) if as_json else "\n".join(f"{name:<20}{value}" for name, value in found.items()))


if __name__ == "__main__":
    main()
