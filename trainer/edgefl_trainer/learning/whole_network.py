"""How a site trains a whole network and its linear head on labelled images: rates, regularisers, one round of epochs.

Vision transformers: MAE's fine-tuning recipe (arXiv 2111.06377, FINETUNE.md and util/lr_decay.py of its code): AdamW,
rates that fall from the head down to the patches, drop path, warm-up and cosine. Convolutional networks: Adam with a
rate that falls in steps (arXiv 2208.11278 section V-A). docs/methods.md 3.4.
"""

import math
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from edgefl_protocol.rules.batches import batches_of
from edgefl_protocol.rules.draws import augment_rng
from edgefl_protocol.rules.rates import cosine_rate
from edgefl_trainer.augment import dihedral, random_crops
from edgefl_trainer.bounds import check_bounds
from edgefl_trainer.contract import Presets, Site, State
from edgefl_trainer.errors import SettingError
from edgefl_trainer.learning.batches import Images, autocast, read_ahead
from edgefl_trainer.learning.epochs import run_epochs
from edgefl_trainer.learning.named_arrays import moments_of, restore_moments
from edgefl_trainer.models.network_kind import network_kind
from edgefl_trainer.models.spec import BackboneSpec, CNNSpec, Readout
from edgefl_trainer.torch_seed import seeded

STEP_FACTOR = 0.2  # of the rate at each step of `schedule=steps`
STEP_SHARES = (0.6, 0.8)  # of all epochs: 12 and 16 of the paper's 20
MOST_WARMUP = 0.25  # share of all epochs
STATISTICS_BATCH = 256  # pictures that one estimate of batch norm's statistics is made of
_Batch = tuple[Images, Int[Tensor, " B"], int]
HEAD_DEVIATION = {"vit": 2e-5, "cnn": 0.01}  # of a fresh head: MAE's and MoCo's code


@dataclass(frozen=True, kw_only=True)
class NetworkRecipe:
    """Hyper-parameters; the defaults are FedMAE's for federated fine-tuning."""

    paper: ClassVar[str] = "arXiv 2111.06377"

    optimizer: Literal["adam", "adamw"] = "adamw"  # optimiser of network and head
    lr: float = 5e-4  # peak learning rate of the head (arXiv 2208.11278)
    min_lr: float = 1e-6  # learning rate at which the cosine ends (public code)
    # course of the rate; steps: x 0.2 after 60 % and after 80 % of all epochs (arXiv 2208.11278)
    schedule: Literal["cosine", "steps", "constant"] = "cosine"
    warmup: float = 5.0  # epochs in which the rate rises before the cosine, at most a quarter of all
    layer_decay: float = 0.65  # factor of the rate from block to block towards the patches; vision transformers only
    drop_path: float = 0.1  # share of dropped branches in the last block, less before; vision transformers only
    weight_decay: float = 0.05  # weight decay of the optimiser; none on one-dimensional tensors
    batch: int = 256  # images of a step (arXiv 2208.11278)
    # what the head reads; auto: the mean of the patch tokens, and of a CNN what it pools (public code)
    readout: Literal["auto", "cls", "mean", "pooled"] = "auto"
    # how training images vary: not, turned and mirrored (dihedral), or with random crops, too (crops) (ours)
    augment: Literal["none", "dihedral", "crops"] = "crops"
    smallest_crop: float = 0.2  # smallest share of the area a crop shows (ours)

    def __post_init__(self) -> None:
        check_bounds(
            self,
            lr=(0 < self.lr <= 1, "above 0, at most 1"),
            min_lr=(0 <= self.min_lr <= self.lr, "0 to lr"),
            warmup=(0 <= self.warmup <= 10_000, "0 to 10000 epochs"),
            layer_decay=(0 < self.layer_decay <= 1, "above 0, at most 1"),
            drop_path=(0 <= self.drop_path < 1, "0 to below 1"),
            weight_decay=(0 <= self.weight_decay <= 1, "0 to 1"),
            batch=(self.batch >= 1, "1 or more"),
            smallest_crop=(0.01 <= self.smallest_crop <= 1, "0.01 to 1"),
        )

    def rate(self, done: float, total: int) -> float:
        """Return the head's learning rate after some epochs, with fractions, of `total` in the whole run."""
        if self.schedule == "constant":
            return self.lr
        if self.schedule == "steps":
            return self.lr * STEP_FACTOR ** sum(done >= round(share * total) for share in STEP_SHARES)
        warmup = min(self.warmup, MOST_WARMUP * total)
        share = cosine_rate(done, total, warmup)
        return self.lr * share if done < warmup else self.min_lr + (self.lr - self.min_lr) * share

    def readout_of(self, spec: BackboneSpec) -> Readout:
        """Choose what the head reads of a network; a `SettingError` where it has no such feature."""
        usual: Readout = "pooled" if isinstance(spec, CNNSpec) else "mean"
        found: Readout = usual if self.readout == "auto" else self.readout
        if (found == "pooled") != isinstance(spec, CNNSpec):
            raise SettingError(f"readout is {found!r}, but {spec.name} has only {usual!r}: leave --set readout out.")
        return found


class Classifier(nn.Module):
    """A network that learns and its linear head; parameters are called `network.*` and `head.*`."""

    network: Any  # timm carries no types

    def __init__(self, network: nn.Module, width: int, classes: int, readout: Readout) -> None:
        """Join network and head."""
        super().__init__()
        self.network = network
        self.head = nn.Linear(width, classes)
        self.readout = readout

    def features(self, pixels: Float[Tensor, "B 3 S S"]) -> Float[Tensor, "B D"]:
        """Compute what the head reads, (B, D) in float32; as the frozen network's readout in evaluation mode."""
        if self.readout == "pooled":
            return self.network(pixels).float()  # type: ignore[no-any-return]
        tokens = self.network.forward_features(pixels)  # (B, 1+N, D)
        found = tokens[:, 0] if self.readout == "cls" else tokens[:, 1:].mean(dim=1)
        return self.network.fc_norm(found).float()  # type: ignore[no-any-return]


def fresh_head(model: Classifier, seed: int) -> None:
    """Draw a head near zero without bias, so that the first steps do not pull the network apart."""
    kind = "cnn" if model.readout == "pooled" else "vit"
    generator = torch.Generator().manual_seed(seed)
    nn.init.trunc_normal_(model.head.weight, std=HEAD_DEVIATION[kind], generator=generator)
    nn.init.zeros_(model.head.bias)


def learned_tensors(model: Classifier) -> dict[str, Tensor]:
    """Return the parameters that learn, in name order; fixed position tables do not."""
    return {name: value for name, value in sorted(model.named_parameters()) if value.requires_grad}


def rate_share(name: str, depth: int, layer_decay: float) -> float:
    """Compute the factor of a parameter's rate: layer_decay^(L + 1 − i), with i the layer it belongs to.

    `name` is like `network.blocks.3.attn.qkv.weight`; depth L is 0 for a convolutional network, which learns at one
    rate.
    """
    if depth == 0:
        return 1.0
    part = name.removeprefix("network.").split(".")
    if part[0] in ("cls_token", "pos_embed", "patch_embed"):
        layer = 0
    else:
        layer = int(part[1]) + 1 if part[0] == "blocks" else depth + 1
    return layer_decay ** (depth + 1 - layer)


def make_optimizer(recipe: NetworkRecipe, model: Classifier, depth: int, state: State | None) -> torch.optim.Optimizer:
    """Make the optimiser, one group for each parameter, with the factor of its rate (see `rate_share`).

    The moments go on from `state`, see `moments_of`; None begins afresh.
    """
    learned = learned_tensors(model)
    undecayed = ("network.cls_token", "network.pos_embed")
    groups = [
        {
            "params": [value],
            "weight_decay": 0.0 if value.ndim <= 1 or name in undecayed else recipe.weight_decay,
            "rate_share": rate_share(name, depth, recipe.layer_decay),
        }
        for name, value in learned.items()
    ]
    kind = torch.optim.AdamW if recipe.optimizer == "adamw" else torch.optim.Adam
    optimizer = kind(groups, lr=recipe.lr)
    restore_moments(optimizer, learned, state)
    return optimizer


def with_drop_path(model: Classifier, share: float) -> None:
    """Give a network stochastic depth as in MAE's recipe: 0 in the first block to `share` in the last."""
    from timm.layers.drop import DropPath

    blocks = list(model.network.blocks)
    for i, block in enumerate(blocks):
        dropped = share * i / max(1, len(blocks) - 1)
        block.drop_path1, block.drop_path2 = DropPath(dropped), DropPath(dropped)


def norm_tensors(network: nn.Module) -> frozenset[str]:
    """Name what the batch norm of a network holds, running statistics and counters included."""
    return frozenset(
        f"{name}.{part}"
        for name, layer in network.named_modules()
        if isinstance(layer, nn.modules.batchnorm._BatchNorm)
        for part in (*dict(layer.named_parameters(recurse=False)), *dict(layer.named_buffers(recurse=False)))
    )


def count_statistics(site: Site, model: Classifier) -> None:
    """Take the running statistics of batch norm anew from a site's training pictures, in place; no label is read.

    They become the mean over batches of nearly equal size, of the pictures as they are (AdaBN, arXiv 1603.04779). One
    picture has no spread: below two nothing changes.
    """
    assert site.backbone is not None
    pictures = len(site.train)
    if pictures < 2:
        return
    norms = [layer for layer in model.modules() if isinstance(layer, nn.modules.batchnorm._BatchNorm)]
    usual = [layer.momentum for layer in norms]
    for layer in norms:
        layer.reset_running_stats()
        layer.momentum = None  # the plain mean
    model.train()
    with torch.no_grad(), autocast(site):
        for part in np.array_split(np.arange(pictures), math.ceil(pictures / STATISTICS_BATCH)):
            images, _ = site.train.read(part)
            model.features(site.backbone.normalise(images.to(site.device)))
    for layer, momentum in zip(norms, usual, strict=True):
        layer.momentum = momentum


def fit_part(
    recipe: NetworkRecipe, site: Site, model: Classifier, round_: int, fitted: Container[str], epochs: int, lr: float
) -> None:
    """Fit some tensors of a model to the site's images and leave the others as they are, in place.

    The rate falls from `lr` to 0 by a cosine. Batch norm whose statistics are not among the `fitted` stays in
    evaluation mode, as the model will be judged.
    """
    for name, value in model.named_parameters():
        value.requires_grad_(value.requires_grad and name in fitted)
    moving = any(name in fitted for name in norm_tensors(model))
    optimizer = make_optimizer(recipe, model, 0, None)
    before = (round_ - 1) * site.task.epochs

    def loss_of(batch: _Batch) -> Tensor:
        images, target, _ = batch
        model.train(moving and len(images) > 1)
        return _loss(model, site, images, target)

    def rate(done: float) -> float:
        return lr * cosine_rate(done - before, epochs, 0)

    batches = partial(_batches, recipe, site, round_)
    for sums in run_epochs(site, round_, range(epochs), batches, loss_of, optimizer, rate=rate, tells_wait=True):
        site.report({"summary": 1, "loss": sums.mean_of_images})


def learn(recipe: NetworkRecipe, site: Site, model: Classifier, round_: int, before: State | None) -> State:
    """Learn the epochs of one round: step the model in place and report loss, images and time without data.

    The schedule runs over all epochs of all rounds. A batch of one image has no spread to normalise by: it learns with
    the running statistics and leaves them alone. The optimiser goes on from `before` (None begins afresh); its state
    after the last step is returned.
    """
    blocks = 0 if model.readout == "pooled" else len(model.network.blocks)
    if blocks:
        with_drop_path(model, recipe.drop_path)
    optimizer = make_optimizer(recipe, model, blocks, before)
    epochs, total = site.task.epochs, site.task.rounds * site.task.epochs
    batches = partial(_batches, recipe, site, round_)

    def loss_of(batch: _Batch) -> Tensor:
        images, target, draw = batch
        model.train(len(images) > 1)
        with seeded(draw, site.device):  # drop path draws from torch's own generators
            return _loss(model, site, images, target)

    rate = partial(recipe.rate, total=total)
    for sums in run_epochs(site, round_, range(epochs), batches, loss_of, optimizer, rate=rate, tells_wait=True):
        site.report({"summary": 1, "loss": sums.mean_of_images})
    return moments_of(optimizer, learned_tensors(model))


def _batches(recipe: NetworkRecipe, site: Site, round_: int, epoch: int) -> tuple[int, Iterator[_Batch]]:
    """Make views of one epoch, with their classes and drop path's seed; the next is read while one is learned."""
    rng = augment_rng(site.task.seed, site.name, round_, epoch)
    parts = batches_of(site.epoch_order(site.train, round_, epoch), recipe.batch)

    def drawn(step: int, images: Images) -> _Batch:
        target = torch.from_numpy(site.train.targets[parts[step]]).to(site.device)
        return _view(recipe, images, rng), target, int(site.rng("drop path", round_, epoch, step).integers(2**63))

    return len(parts), (drawn(*each) for each in enumerate(read_ahead(site, site.train, parts)))


def _view(recipe: NetworkRecipe, images: Images, rng: np.random.Generator) -> Images:
    """Draw one view of each image."""
    if recipe.augment == "crops":
        return random_crops(images, rng, recipe.smallest_crop)
    return dihedral(images, rng) if recipe.augment == "dihedral" else images


def _loss(model: Classifier, site: Site, images: Tensor, target: Tensor) -> Float[Tensor, ""]:
    """Compute cross-entropy; the network runs under autocast, the head in float32."""
    assert site.backbone is not None
    with autocast(site):
        features = model.features(site.backbone.normalise(images))
    return cross_entropy(model.head(features), target)


# What the presets mean, by kind of network and mode. `paper` is arXiv 2208.11278 section V-A (CNN) and V-B (ViT): in
# local mode a site judges its model after each round, and the schedule spans rounds times epochs. The others shorten
# it (docs/methods.md 3.4).
Preset = Mapping[str, Any]

_VIT: Preset = {
    "optimizer": "adamw",
    "schedule": "cosine",
    "warmup": 5.0,
    "layer_decay": 0.65,
    "drop_path": 0.1,
    "weight_decay": 0.05,
}
_SHORT: Preset = {"lr": 1e-3, "batch": 16, "warmup": 2.0, "layer_decay": 0.75}  # 10 % of 600 images: 80 steps in all
_CNN: Preset = {"optimizer": "adam", "weight_decay": 0.0, "lr": 1e-4}
_FEW: Preset = {"images_per_site": 600, "select": "tune"}
_FEWEST: Preset = {"rounds": 2, "epochs": 1, "images_per_site": 120, "select": "tune"}
_ONE_ROUND: Preset = {"select": "pooled"}  # of one averaged model, section V-B: the best global one on validation data

_VIT_LOCAL: Presets = {
    "tiny": {**_FEWEST, "hyper": {**_VIT, "lr": 1e-3, "batch": 16, "warmup": 0.0}},
    "bench84": {"rounds": 10, "epochs": 2, **_FEW, "hyper": {**_VIT, **_SHORT}},
    "paper": {"rounds": 40, "epochs": 5, "select": "tune", "hyper": {**_VIT, "lr": 1e-3, "batch": 512}},
}
_VIT_FEDERATED: Presets = {
    "tiny": {**_FEWEST, **_ONE_ROUND, "hyper": {**_VIT, "lr": 1e-3, "batch": 16, "warmup": 0.0}},
    "bench84": {"rounds": 20, "epochs": 1, **_FEW, **_ONE_ROUND, "hyper": {**_VIT, **_SHORT}},
    "paper": {"rounds": 50, "epochs": 1, **_ONE_ROUND, "hyper": {**_VIT, "lr": 5e-4, "batch": 256}},
}
_CNN_LOCAL: Presets = {
    "tiny": {**_FEWEST, "hyper": {**_CNN, "lr": 1e-3, "batch": 16, "schedule": "steps"}},
    "bench84": {"rounds": 10, "epochs": 2, **_FEW, "hyper": {**_CNN, "lr": 3e-4, "batch": 16, "schedule": "steps"}},
    "paper": {"rounds": 20, "epochs": 1, "select": "tune", "hyper": {**_CNN, "batch": 256, "schedule": "steps"}},
}
_CNN_FEDERATED: Presets = {
    "tiny": {**_FEWEST, **_ONE_ROUND, "hyper": {**_CNN, "lr": 1e-3, "batch": 16, "schedule": "constant"}},
    "bench84": {
        "rounds": 20,
        "epochs": 1,
        **_FEW,
        **_ONE_ROUND,
        "hyper": {**_CNN, "lr": 3e-4, "batch": 16, "schedule": "constant"},
    },
    "paper": {"rounds": 100, "epochs": 1, **_ONE_ROUND, "hyper": {**_CNN, "batch": 128, "schedule": "constant"}},
}


def presets_of(backbone: str, hyper: Mapping[str, Any]) -> Presets:
    """Return the presets of a backbone's kind of network and of `mode`, federated unless given."""
    local = hyper.get("mode") == "local"
    if network_kind(backbone) == "vit":
        return _VIT_LOCAL if local else _VIT_FEDERATED
    return _CNN_LOCAL if local else _CNN_FEDERATED
