"""What the self-supervised methods of FedCLF's paper share: a network with a small head that learns, all of it, by SGD.

    build          the network of the task's backbone and its head, the same at every site
    learn          E epochs of local batches: SGD with momentum, one cosine over all R·E epochs
    Split          which tensors travel: all, or all but batch norm's (FedBN)

Guarantees: a batch never holds a single image, for batch norm would divide by its zero spread, and two or three only
where there are no more: what is left over joins the batch before it, and a site with one image only is refused by name.
The next batch is read while one is learned.
Sources: arXiv 2208.11278 section V-A; MoCo v2's optimiser; FedBN (arXiv 2102.07623); docs/methods.md, FedCLF.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from time import perf_counter
from typing import Any, ClassVar

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from edgefl_protocol import Payload
from edgefl_protocol.rules import batches
from edgefl_protocol.rules.bounds import FEDCLF
from edgefl_protocol.rules.defaults import FedCLFDefaults as Default
from edgefl_protocol.rules.defaults import usual_view_side
from edgefl_protocol.rules.rates import falling_rate
from edgefl_protocol.rules.slow_encoder import BUFFER, BatchNorm, OptimizerState
from edgefl_protocol.rules.view_recipes import Recipe
from edgefl_trainer.augment import contrastive_views
from edgefl_trainer.bounds import check_ranges
from edgefl_trainer.contract import Arrays, Declaration, Phase, Presets, Scalar, Site, State, Task
from edgefl_trainer.errors import SettingError, TrainingError
from edgefl_trainer.learning.averaging import sample_weights, weighted_mean
from edgefl_trainer.learning.batches import Images, read_ahead
from edgefl_trainer.learning.epochs import run_epochs
from edgefl_trainer.learning.named_arrays import as_arrays
from edgefl_trainer.models.backbones import build_network, load_weights
from edgefl_trainer.models.spec import BackboneSpec, CNNSpec
from edgefl_trainer.torch_seed import seeded

BACKBONE = "backbone."  # names of the network's tensors begin so
LEAST_IMAGES = 2  # of a site: batch norm and negatives need another
Pixels = Float[Tensor, "B 3 px px"]
Prepare = Callable[[Images, np.random.Generator], tuple[Pixels, ...]]
"""Normalised random views of a batch of images: what the loss is made of."""
Objective = Callable[[tuple[Pixels, ...]], Float[Tensor, ""]]
"""Loss of one batch from its views."""


@dataclass(frozen=True, kw_only=True)
class SgdRecipe:
    """Hyper-parameters of local learning; the defaults are the paper's where it names them."""

    paper: ClassVar[str] = "arXiv 2208.11278"

    lr: float = Default.lr  # peak learning rate, from which a cosine falls to 0 over all rounds
    momentum: float = Default.momentum  # momentum of SGD (arXiv 1911.05722)
    weight_decay: float = Default.weight_decay  # weight decay of every parameter, as MoCo has it (arXiv 1911.05722)
    # SGD's momentum when a round begins: zero (reset), or what the site's last round left (keep) (ours)
    optimizer_state: OptimizerState = Default.optimizer_state
    batch: int = Default.batch  # B, images of a step
    # where batch norm is kept: averaged with the network, or at its site until the end (FedBN) (arXiv 2102.07623;
    # default ours)
    bn: BatchNorm = Default.bn
    # side of a view; 0: 8/9 of the image (64 of 72) for a CNN, the image's for a ViT (ours)
    view_px: int = Default.view_px

    def __post_init__(self) -> None:
        check_ranges(self, FEDCLF)

    def side(self, spec: BackboneSpec) -> int:
        """Return the side of a view in pixels; a `SettingError` where a vision transformer cannot take that size."""
        if isinstance(spec, CNNSpec):
            return self.view_px or usual_view_side(spec.image_px)
        if self.view_px not in (0, spec.image_px):
            raise SettingError(
                f"view_px is {self.view_px}, but {spec.name} takes only {spec.image_px} px: leave view_px out."
            )
        return spec.image_px


class LearningNetwork(nn.Module):
    """A timm network and what stands on it while it learns; parameters are called `backbone.*` and `head.*`."""

    backbone: Any  # timm carries no types

    def __init__(self, backbone: nn.Module, head: nn.Module, *, tokens: bool) -> None:
        """Join network and head, which takes pooled features (B, D).

        With `tokens`, for a vision transformer, the mean patch token is pooled.
        """
        super().__init__()
        self.backbone = backbone
        self.head = head
        self.tokens = tokens
        self.autocast: torch.dtype | None = None  # of the matrix products in here; losses stay in float32

    def at(self, site: Site) -> "LearningNetwork":
        """Move the network to the site's device and arithmetic."""
        self.autocast = site.autocast
        return self.to(site.device)

    def forward(self, pixels: Float[Tensor, "B 3 px px"]) -> Float[Tensor, "B out"]:
        """Compute what the head says of normalised pixels, in float32."""
        with torch.autocast(pixels.device.type, dtype=self.autocast, enabled=self.autocast is not None):
            if not self.tokens:
                return self.head(self.backbone(pixels)).float()  # type: ignore[no-any-return]
            found = self.backbone.forward_features(pixels)[:, self.backbone.num_prefix_tokens :]  # (B, N, D)
            return self.head(found.mean(dim=1)).float()  # type: ignore[no-any-return]


def build(task: Task, head: Callable[[int], nn.Module]) -> LearningNetwork:
    """Make a network as it begins: from the task's initial weights where there are any, else fresh from its seed."""
    spec = task.backbone
    network = build_network(spec, task.seed)
    if task.initial:
        load_weights(network, task.initial, spec.name)
    with seeded(task.seed):  # torch's layers draw from the global generator
        return LearningNetwork(network, head(spec.width), tokens=not isinstance(spec, CNNSpec))


def start(recipe: SgdRecipe, task: Task, head: Callable[[int], nn.Module]) -> State:
    """Make the server's first state: a fresh network, or the backbone to learn on, and a fresh head.

    A `SettingError` where the network cannot take views of this size.
    """
    model, spec = build(task, head), task.backbone
    side = recipe.side(spec)
    if side != spec.image_px:  # that size was tried when the backbone was named
        try:
            with torch.inference_mode():
                model.eval()(torch.zeros(1, 3, side, side))
        except (RuntimeError, ValueError, AssertionError) as error:
            raise SettingError(
                f"images of {spec.image_px} px give views of {side} px, which backbone {spec.name} cannot take: "
                f"give --set view_px={spec.image_px}, a larger --image-px or another backbone."
            ) from error
    return State(tensors_of(model))


def tensors_of(model: LearningNetwork) -> Arrays:
    """Return all that a network learned: parameters and batch norm's statistics, without a fixed position table."""
    fixed = {name for name, value in model.named_parameters() if not value.requires_grad}
    return as_arrays({name: value for name, value in model.state_dict().items() if name not in fixed})


def fill(model: LearningNetwork, arrays: Arrays) -> None:
    """Put arrays into a network; what they do not name stays.

    A `TrainingError` for one that it does not have, or of another shape.
    """
    own = model.state_dict()
    for name, value in arrays.items():
        if name not in own or own[name].shape != value.shape:
            raise TrainingError(
                f"the broadcast holds {name[:60]} of shape {value.shape}, which this network does not have."
            )
        own[name].copy_(torch.from_numpy(np.array(value)))


def encoder_of(state: State) -> Arrays:
    """Return the network without its head, by timm's names."""
    return {name.removeprefix(BACKBONE): value for name, value in state.arrays.items() if name.startswith(BACKBONE)}


# FedCLF and what it compares with: a ResNet-18 at 72 px; `tiny` learns whatever backbone the run names.
PRESETS: Presets = {
    "tiny": {"rounds": 2, "epochs": 1, "images_per_site": 240, "hyper": {"batch": 32, "queue": 128}},
    "bench84": {
        "rounds": 20,
        "epochs": 1,
        "images_per_site": 600,
        "backbone": "cnn:resnet18",
        "image_px": 72,
        "hyper": {"batch": 64},
    },
    "paper": {"rounds": 100, "epochs": 1, "backbone": "cnn:resnet18", "image_px": 72},
}
DECLARES = Declaration(encoder=encoder_of, least_images=LEAST_IMAGES, presets=lambda backbone, hyper: PRESETS)


@dataclass(frozen=True)
class Split:
    """Which tensors of a network travel each round, and which stay at their site until the end."""

    kept: frozenset[str]

    @classmethod
    def of(cls, model: LearningNetwork, bn: BatchNorm) -> "Split":
        """Split by module: with `local` all tensors of batch norm stay, scale, shift and statistics (FedBN)."""
        layers = [name for name, layer in model.named_modules() if isinstance(layer, _BatchNorm)]
        names = (f"{layer}.{part}" for layer in layers for part in model.get_submodule(layer).state_dict())
        return cls(frozenset(names if bn == "local" else ()))

    def sent(self, arrays: Arrays) -> Arrays:
        """Pick what travels."""
        return {name: value for name, value in arrays.items() if name not in self.kept}

    def own(self, arrays: Arrays) -> Arrays:
        """Pick what stays."""
        return {name: value for name, value in arrays.items() if name in self.kept}


def phases(recipe: SgdRecipe, rounds: int) -> list[Phase]:
    """Plan R rounds, and with `bn=local` one exchange that averages batch norm once, so that there is one encoder."""
    last = [Phase("final", rounds + 1)] if recipe.bn == "local" else []
    return [*(Phase("train", r) for r in range(1, rounds + 1)), *last]


def average(state: State, replies: Mapping[str, Payload], names: Callable[[str], bool] = lambda name: True) -> State:
    """Replace the tensors that sites sent by their mean, weighted by numbers of images.

    Replies without arrays (a site that has not learned yet) do not count.
    """
    learned = {site: reply for site, reply in replies.items() if any(map(names, reply.arrays))}
    if not learned:
        return state
    sent = filter(names, learned[min(learned)].arrays)
    return State({**state.arrays, **weighted_mean(learned, sample_weights(learned), sent)}, state.values)


def views(site: Site, recipe: SgdRecipe, kind: Recipe, count: int) -> Prepare:
    """Make a function that draws `count` normalised random views of each image of a batch."""
    spec, side = site.task.backbone, recipe.side(site.task.backbone)
    mean, std = (torch.tensor(values, device=site.device).view(1, 3, 1, 1) for values in (spec.mean, spec.std))

    def prepare(images: Images, rng: np.random.Generator) -> tuple[Pixels, ...]:
        return tuple((contrastive_views(images, rng, kind, side) - mean) / std for _ in range(count))

    return prepare


def learn(
    recipe: SgdRecipe,
    site: Site,
    model: LearningNetwork,
    prepare: Prepare,
    objective: Objective,
    round_: int,
    facts: Callable[[], Mapping[str, Scalar]] = dict,
    before: Arrays | None = None,
) -> Arrays:
    """Learn E epochs on all of a site's images, in place; `model` is on the site's device.

    SGD's momentum goes on from `before`, a site's state, where that holds it. Returned is what is left of it, by the
    names of `rules.slow_encoder`; nothing with `optimizer_state=reset`.

    The site is told of each epoch the mean loss, the images, the seconds it took, and those among them in which there
    was nothing to learn from yet (images read, views made); and `facts`, which are asked after each epoch. A
    `TrainingError` for a loss that is not finite, or a site with a single image.
    """
    learned = list(learned_of(model).values())
    optimizer = torch.optim.SGD(learned, recipe.lr, recipe.momentum, weight_decay=recipe.weight_decay)
    named = learned_of(model) if recipe.optimizer_state == "keep" else {}
    for name, value in named.items():
        if (kept := (before or {}).get(BUFFER + name)) is not None:
            optimizer.state[value]["momentum_buffer"] = torch.from_numpy(np.array(kept)).to(value)
    model.train()
    epochs = site.task.epochs

    def batches(epoch: int) -> tuple[int, Iterator[tuple[Pixels, ...]]]:
        rng = site.rng("views", round_, epoch)
        parts = cut(site.epoch_order(site.unlabelled, round_, epoch), recipe.batch, site.name)
        return len(parts), (prepare(images, rng) for images in read_ahead(site, site.unlabelled, parts))

    def rate(done: float) -> float:
        return falling_rate(recipe.lr, done, site.task.rounds, epochs)

    begun = perf_counter()
    for sums in run_epochs(site, round_, range(epochs), batches, objective, optimizer, rate=rate, tells_wait=True):
        told = {"summary": 1, "loss": sums.mean_of_steps, **facts(), "images": sum(sums.images)}
        site.report({**told, "wait_seconds": sum(sums.waits), "learn_seconds": perf_counter() - begun})
        begun = perf_counter()
    buffers = {BUFFER + name: optimizer.state[value].get("momentum_buffer") for name, value in named.items()}
    return as_arrays({name: buffer for name, buffer in buffers.items() if buffer is not None})


def learned_of(model: LearningNetwork) -> dict[str, nn.Parameter]:
    """Return the parameters that learn, by name."""
    return {name: value for name, value in model.named_parameters() if value.requires_grad}


def cut(order: NDArray[np.int64], batch: int, site: str) -> list[NDArray[np.int64]]:
    """Cut the positions of an epoch into batches, as `rules.batches` does; a `TrainingError` for a single image."""
    if len(order) < LEAST_IMAGES:
        raise TrainingError(
            f"site {site} has one image, and batch norm and negatives need two: add images, or leave the site out."
        )
    return batches.cut(order, batch)
