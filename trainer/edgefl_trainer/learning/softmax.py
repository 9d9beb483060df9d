"""How the prompt-tuning methods around PEP-FedPT learn at one site: cross-entropy, SGD, prompt tokens in the sequence.

PEP-FedPT (arXiv 2510.25372) section 5 and appendix A.3 train every method alike: SGD with momentum 0.9, rate 0.1 that
decays with the rounds, gradient norm at most 10, a head without bias on the class token. A method says which prompt
tokens there are (`models.inserts`), which tensors learn, and what travels. docs/methods.md 5.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Literal

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import cross_entropy

from edgefl_protocol.rules.defaults import usual_head_norm
from edgefl_protocol.sentences import counted
from edgefl_trainer.bounds import check_bounds
from edgefl_trainer.contract import Arrays, Declaration, Predictor, Presets, Site, Task
from edgefl_trainer.errors import SettingError
from edgefl_trainer.learning.batches import LabelledBatch, autocast, labelled_batches
from edgefl_trainer.learning.epochs import run_epochs
from edgefl_trainer.learning.named_arrays import as_arrays, as_tensors
from edgefl_trainer.models.inserts import Insert
from edgefl_trainer.models.scoring import ScoreModule, ScoreOptions
from edgefl_trainer.models.spec import BackboneSpec, Readout, require_vit

HEAD_WEIGHT = "head.weight"
PROMPTS = "prompts.s"
STATISTICS = ("features.mean", "features.std")
MAX_COUNT = 10_000  # of prompt tokens
Tensors = Mapping[str, Tensor]
Forward = Callable[[Tensor], tuple[Tensor, Tensor | float]]
"""Images uint8 (B, S, S, 3) to logits (B, K) and what is added to the loss."""


@dataclass(frozen=True, kw_only=True)
class SoftmaxRecipe:
    """Hyper-parameters of local learning."""

    paper: ClassVar[str] = "arXiv 2510.25372"

    lr: float = 0.1  # learning rate in the first round
    # learning rate of the head, where standardised features ask for smaller steps; 0: as lr (ours)
    lr_head: float = 0.0
    lr_decay: float = 0.998  # factor of the learning rate from round to round (default ours)
    momentum: float = 0.9  # momentum of SGD
    weight_decay: float = 0.0  # weight decay of SGD (default ours)
    clip: float = 10.0  # largest gradient norm; 0: none
    batch: int = 50  # images of a step (default ours)
    # what the head reads: the class token (cls), or the mean of the patch tokens; auto: the better by a linear probe on
    # tune rows of all sites (ours)
    readout: Literal["auto", "cls", "mean"] = "auto"
    # scaling of the features that the head reads; auto: standardise on self-supervised backbones (ours)
    head_norm: Literal["auto", "standardise", "none"] = "auto"
    # how training images vary; dihedral: turned by quarters and mirrored (ours)
    augment: Literal["none", "dihedral"] = "dihedral"

    def __post_init__(self) -> None:
        largest = {"lr": 10, "lr_head": 10, "lr_decay": 1, "momentum": 1, "weight_decay": 1, "clip": 1e6}
        in_range = {name: (0 <= getattr(self, name) <= most, f"0 to {most:g}") for name, most in largest.items()}
        check_bounds(self, **in_range, batch=(self.batch >= 1, "1 or more"))

    def rate(self, name: str, round_: int) -> float:
        """Return the learning rate of a tensor in a round, counted from 1."""
        return (self.lr_head or self.lr if name == HEAD_WEIGHT else self.lr) * self.lr_decay ** (round_ - 1)

    @property
    def asks_features(self) -> bool:
        """Whether a warm phase has anything to ask; on a supervised backbone the reply may still hold no array."""
        return self.readout == "auto" or self.head_norm != "none"

    def standardises(self, spec: BackboneSpec) -> bool:
        """Tell whether features are standardised before the head."""
        norm = usual_head_norm(spec.self_supervised) if self.head_norm == "auto" else self.head_norm
        return norm == "standardise"

    def module(self, site: Site, readout: Readout, insert: Insert | None, prompted: int = 0) -> ScoreModule:
        """Make what scores at a site; see `options`."""
        assert site.backbone is not None
        return ScoreModule(site.backbone, self.options(site.task.backbone, readout, insert, prompted))

    def options(self, spec: BackboneSpec, readout: Readout, insert: Insert | None, prompted: int = 0) -> ScoreOptions:
        """Say how a model of this recipe scores."""
        norm: Literal["standardise", "none"] = "standardise" if self.standardises(spec) else "none"
        return ScoreOptions(
            readout=readout, output="softmax", head_norm=norm, prompts=(), insert=insert, prompted=prompted
        )


def check_count(name: str, value: int) -> None:
    """Refuse, by a `SettingError`, a number of tokens below one, or one that no memory holds."""
    if not 1 <= value <= MAX_COUNT:
        raise SettingError(f"{name} is {value}; allowed: 1 to {MAX_COUNT}.")


def rising(blocks: Sequence[int]) -> bool:
    """Tell whether these are block numbers from 0, each above the one before, or none at all."""
    return list(blocks) == sorted({block for block in blocks if block >= 0})


def check_fits(task: Task, insert: Insert | None) -> None:
    """Refuse a task or backbone that cannot take these prompts, before the first step.

    Raises:
        SettingError: fewer than two classes, prompts for a network that has no tokens, or behind its last block.
    """
    if len(task.classes) < 2:
        raise SettingError(
            f"the task has {counted(len(task.classes), 'class', 'classes')}, and a classifier needs "
            "at least two: take data with another class."
        )
    if insert is None:
        return
    depth = require_vit(task.backbone, "a prompt token").depth
    if insert.last_block >= depth:
        raise SettingError(
            f"prompts enter before block {insert.last_block}, but the blocks of this backbone are 0 to {depth - 1}: "
            "choose one of them."
        )


def token_init(spec: BackboneSpec, shape: Sequence[int], generator: torch.Generator) -> Tensor:
    """Draw prompt tokens U(−v, v), v = sqrt(6/(3·patch² + D)) (arXiv 2203.12119, its code); D is the last axis.

    A `SettingError` where the backbone has no tokens.
    """
    bound = (6 / (3 * require_vit(spec, "a prompt token").patch ** 2 + spec.width)) ** 0.5
    return torch.empty(tuple(shape)).uniform_(-bound, bound, generator=generator)


def head_init(spec: BackboneSpec, classes: int, generator: torch.Generator) -> Float[Tensor, "K D"]:
    """Draw a head without bias, N(0, 0.02)."""
    return torch.zeros((classes, spec.width)).normal_(0, 0.02, generator=generator)


def trainable(arrays: Arrays, names: Sequence[str], device: torch.device) -> dict[str, Tensor]:
    """Make tensors to learn with: `names` as leaves with gradients, the others constant, a head's bias of zero."""
    tensors = as_tensors(arrays, device)
    for name in names:
        tensors[name].requires_grad_(True)
    tensors["head.bias"] = torch.zeros(len(arrays[HEAD_WEIGHT]), device=device)
    return tensors


def learn(
    recipe: SoftmaxRecipe,
    site: Site,
    module: ScoreModule,
    tensors: Tensors,
    names: Sequence[str],
    round_: int,
    *,
    epochs: Sequence[int] | None = None,
    forward: Forward | None = None,
    project: Mapping[str, Float[Tensor, "D D"]] | None = None,
    velocity: Arrays | None = None,
) -> dict[str, NDArray[np.generic]]:
    """Learn by SGD: step `tensors` (see `trainable`) in place, report the loss and return the velocity by name.

    Args:
        round_: train round, from 1; for the rates, see `SoftmaxRecipe.rate`.
        epochs: numbers of the epochs, for their draws; 0 to E − 1 by default.
        forward: another way from images to logits, see `Forward`.
        project: for some of `names`, the matrix T that every update Δ is multiplied with: Δ·T.
        velocity: what SGD's momentum starts from; from zero where there is none. Without momentum none is returned.
    """
    learned = [tensors[name] for name in names]
    groups = [{"params": [tensors[name]], "lr": recipe.rate(name, round_)} for name in names]
    optimizer = torch.optim.SGD(groups, momentum=recipe.momentum, weight_decay=recipe.weight_decay)
    for name, begun in (velocity or {}).items():
        optimizer.state[tensors[name]]["momentum_buffer"] = torch.from_numpy(np.array(begun)).to(site.device)
    score = forward or plain_forward(site, module, tensors)
    numbers = range(site.task.epochs) if epochs is None else epochs
    batches = partial(labelled_batches, site, recipe.batch, recipe.augment, round_)

    def loss_of(batch: LabelledBatch) -> Tensor:
        logits, added = score(batch[0])
        return cross_entropy(logits, batch[1]) + added

    def take_step() -> None:
        if recipe.clip > 0:
            torch.nn.utils.clip_grad_norm_(learned, recipe.clip)
        _step(optimizer, tensors, project or {})

    for sums in run_epochs(site, round_, numbers, batches, loss_of, optimizer, take_step=take_step):
        site.report({"summary": 1, "loss": sums.mean_of_images})
    buffers = {name: optimizer.state[tensors[name]].get("momentum_buffer") for name in names}
    return as_arrays({name: buffer for name, buffer in buffers.items() if buffer is not None})


def plain_forward(site: Site, module: ScoreModule, tensors: Tensors) -> Forward:
    """Make the plain forward pass: the module's logits, nothing added; the head computes in float32."""

    def score(images: Tensor) -> tuple[Tensor, float]:
        with autocast(site):
            output = module.output(images, tensors, need_attention=False)
        return module.logits(module.features(output, tensors), tensors), 0.0

    return score


def make_predictor(site: Site, module: ScoreModule, arrays: Arrays) -> Predictor:
    """Make what a site scores with: temperature 1 until calibrated, a head without bias."""
    wanted = module.options.tensors
    given = {name: np.asarray(arrays[name], dtype=np.float32) for name in wanted if name in arrays}
    fixed = {
        "head.bias": np.zeros(len(site.task.classes), dtype=np.float32),
        "temperature": np.asarray(1.0, dtype=np.float32),
    }
    return Predictor(module, {**given, **fixed}, site.seen)


def _step(optimizer: torch.optim.Optimizer, tensors: Tensors, project: Mapping[str, Tensor]) -> None:
    """Take one step; where a matrix is given, project the update, whatever the optimiser made of it."""
    before = {name: tensors[name].detach().clone() for name in project}
    optimizer.step()
    with torch.no_grad():
        for name, matrix in project.items():
            tensors[name].copy_(before[name] + (tensors[name] - before[name]) @ matrix)


# The schedule of PEP-FedPT and of what it compares with (CIFAR-100); which share of the sites takes part is the data's.
PRESETS: Presets = {
    "tiny": {"rounds": 2, "epochs": 1, "images_per_site": 120, "hyper": {"lr_head": 0.03}},
    "bench84": {"rounds": 5, "epochs": 2, "images_per_site": 1200, "hyper": {"lr_head": 0.01}},
    "paper": {
        "rounds": 100,
        "epochs": 5,
        "hyper": {"readout": "cls", "head_norm": "none", "augment": "none", "weighting": "uniform"},
    },
}
DECLARES = Declaration(presets=lambda backbone, hyper: PRESETS)
