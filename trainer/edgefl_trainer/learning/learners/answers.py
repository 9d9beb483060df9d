"""How a site learns to answer questions about its pictures, as a `SiteLearner`: an answer model, cross-entropy, AdamW.

    L = L_CE + beta R, and what a method adds;  R: squared norm of all tensors that learn

The gradient of beta R, 2 beta theta, is taken beside Adam's steps, as AdamW does (arXiv 1711.05101). Scaled by them it
would move by a whole step whatever has hardly another gradient: rare words.

Sites begin with equal tensors: prompts of models that began apart say nothing to one another. Of a frozen vision
transformer the tokens of a picture never change, so each picture passes it once a round, however many questions are
asked about it. Pictures are not turned or mirrored: left and right are asked for.
Source: Zhu et al., arXiv 2402.09677; docs/methods.md 11.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Literal

import numpy as np
import torch
from jaxtyping import Int
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import cross_entropy

from edgefl_protocol import Payload
from edgefl_protocol.rules.batches import batches_of
from edgefl_protocol.rules.questions import Questions
from edgefl_protocol.sentences import counted
from edgefl_trainer.bounds import check_bounds
from edgefl_trainer.contract import Arrays, Predictor, Presets, Scalar, Site, State, Task
from edgefl_trainer.errors import SettingError
from edgefl_trainer.learning.epochs import run_epochs
from edgefl_trainer.learning.learners.answer_rows import PictureTokens, answer_rows
from edgefl_trainer.learning.loss_terms import Step, Term, TermShares
from edgefl_trainer.learning.named_arrays import as_arrays, as_tensors, moments_of, restore_moments
from edgefl_trainer.models.answers import (
    IMAGE_PROMPTS,
    SHARED,
    TEXT_PROMPTS,
    AnswerModule,
    AnswerOptions,
    fresh_tensors,
)
from edgefl_trainer.models.backbones import frozen_network
from edgefl_trainer.models.spec import require_vit
from edgefl_trainer.torch_seed import seeded

NETWORK = "network."  # begins the names of a vision transformer's weights that learn
_Batch = tuple[Int[Tensor, "B L"], NDArray[np.int64], Int[Tensor, " B"], int]
"""Questions, the positions of their rows, their answers, and dropout's seed."""


@dataclass(frozen=True, kw_only=True)
class AnswerRecipe:
    """Hyper-parameters of an answer model and of local learning."""

    paper: ClassVar[str] = "arXiv 2402.09677"

    lr: float = 1e-3  # learning rate of AdamW (ours)
    lr_prompts: float = 1e-2  # learning rate of prompts and of g (ours)
    batch: int = 32  # questions of a step (ours)
    beta: float = 1e-4  # weight of R, the squared norm of what learns (default ours)
    dropout: float = 0.1  # share of the values of each branch of a block that is dropped while learning (ours)
    width: int = 128  # d, width of words, prompts and fused picture tokens (ours)
    heads: int = 4  # attention heads of each block (ours)
    question_blocks: int = 2  # blocks that read the question alone (ours)
    fusion_blocks: int = 2  # blocks that read picture and question, with prompt-based residual attention (default ours)
    prompt_length: int = 8  # n_p, prompts of a kind (default ours)
    prompt_gate: float = 1.0  # where g, the factor of the prompts' attention in a block, begins (ours)
    # what has prompts: picture tokens, words, or both (default ours)
    prompt_site: Literal["image", "text", "both"] = "both"
    encoder: Literal["frozen", "learned"] = "frozen"  # whether the vision transformer learns, too (ours)
    # whether the model sees the picture; hidden: it answers from the question alone (ours)
    picture: Literal["seen", "hidden"] = "seen"

    def __post_init__(self) -> None:
        check_bounds(
            self,
            lr=(0 < self.lr <= 1, "above 0, at most 1"),
            lr_prompts=(0 < self.lr_prompts <= 1, "above 0, at most 1"),
            batch=(1 <= self.batch <= 65_536, "1 to 65536"),
            beta=(0 <= self.beta <= 1, "0 to 1"),
            dropout=(0 <= self.dropout < 1, "0 to below 1"),
            heads=(1 <= self.heads <= 64, "1 to 64"),
            width=(self.heads <= self.width <= 4096, "the number of heads to 4096"),
            question_blocks=(0 <= self.question_blocks <= 48, "0 to 48"),
            fusion_blocks=(1 <= self.fusion_blocks <= 48, "1 to 48"),
            prompt_gate=(-100 <= self.prompt_gate <= 100, "-100 to 100"),
            prompt_length=(1 <= self.prompt_length <= 1000, "1 to 1000"),
        )
        if self.width % self.heads:
            raise SettingError(f"width is {self.width}, which {self.heads} heads cannot share: choose a multiple.")
        if self.picture == "hidden" and self.encoder == "learned":
            raise SettingError("encoder is 'learned', but with picture=hidden no picture is seen: leave encoder out.")

    @property
    def prompt_names(self) -> tuple[str, ...]:
        """Tensors that hold the prompts."""
        of_image = (IMAGE_PROMPTS,) if self.prompt_site != "text" else ()
        return (*of_image, *((TEXT_PROMPTS,) if self.prompt_site != "image" else ()))

    def rate(self, name: str) -> float:
        """Return the learning rate of a tensor."""
        return self.lr_prompts if name in self.prompt_names or name.endswith(".gate") else self.lr

    def averaged_as(self, share: Literal["b", "bt", "g"], *, maps: bool) -> "AnswerRecipe":
        """Return the recipe of a method that averages the model; a `SettingError` where it asks for more than that."""
        if share != "bt" or maps:
            raise SettingError("an answer model is averaged as a whole, so leave share and kd out.")
        return self

    def options(self, also: Sequence[str] = ()) -> AnswerOptions:
        """Say how a model of this recipe answers; `also` names tensors whose rows are further prompts."""
        names = (*self.prompt_names, *also)
        return AnswerOptions(
            heads=self.heads,
            question_blocks=self.question_blocks,
            fusion_blocks=self.fusion_blocks,
            image_prompts=tuple(name for name in names if name.endswith(".image")),
            text_prompts=tuple(name for name in names if name.endswith(".text")),
            sees_picture=self.picture == "seen",
        )


@dataclass(frozen=True)
class AnswerLearner:
    """See `SiteLearner`; nothing has to be settled before round 1."""

    recipe: AnswerRecipe
    settled: ClassVar[tuple[str, ...]] = ()
    tells_first: ClassVar[None] = None

    @property
    def learns_network(self) -> bool:
        """Whether the vision transformer learns, too."""
        return self.recipe.encoder == "learned"

    def trained(self, task: Task) -> tuple[str, ...]:
        """Name the tensors of an answer but its temperature; then the vision transformer's, where it learns."""
        own = tuple(name for name in self.recipe.options().tensors if name != "temperature")
        return (*own, *(f"{NETWORK}{name}" for name in sorted(task.initial) if self.recipe.encoder == "learned"))

    def initial(self, task: Task) -> dict[str, Tensor]:
        """Draw the model by the task's seed; a `SettingError` where the task asks nothing, or does not fit."""
        recipe, questions = self.recipe, asked_by(task)
        spec = require_vit(task.backbone, "an answer model")
        if len(task.classes) < 2:
            raise SettingError(
                f"the questions have {counted(len(task.classes), 'answer')}, and a model needs at least two to choose "
                "from: use other data."
            )
        sizes = (spec.width, recipe.width, recipe.prompt_length)
        generator = torch.Generator().manual_seed(task.seed)
        made = fresh_tensors(recipe.options(), questions, len(task.classes), sizes, generator, recipe.prompt_gate)
        if recipe.encoder == "learned":
            if not task.initial:
                raise SettingError(
                    "encoder is 'learned', but the task carries no weights to learn on, as in a live federation: leave "
                    "encoder out."
                )
            made |= as_tensors({f"{NETWORK}{name}": value for name, value in task.initial.items()}, torch.device("cpu"))
        return {name: made[name] for name in self.trained(task)}

    def first_values(self, task: Task) -> Mapping[str, Scalar]:
        """Remember nothing."""
        return {}

    def first_reply(self, site: Site) -> Payload:
        """Tell nothing."""
        return Payload({}, {})

    def settle(self, values: Mapping[str, Scalar], replies: Mapping[str, Payload]) -> State:
        """Settle nothing."""
        return State()

    def begun(self, site: Site, state: State, broadcast: Payload) -> State:
        """Return the state, or the initial model where it is still empty."""
        return state if state.arrays else State(as_arrays(self.initial(site.task)))

    def learned(
        self,
        site: Site,
        before: State,
        broadcast: Payload,
        *,
        keep_optimizer: bool,
        terms: Sequence[Term] = (),
        epochs: int | None = None,
    ) -> State:
        """Learn E epochs, or as many as named; see `SiteLearner`. Shared prompts of the state stay as they are.

        A `TrainingError` where the loss is not finite.
        """
        recipe, round_, names = self.recipe, int(broadcast.scalars["round"]), self.trained(site.task)
        tensors = as_tensors({**_of_model(before.arrays)}, site.device)
        learned = {name: tensors[name].requires_grad_(True) for name in names}
        groups = [{"params": [value], "lr": recipe.rate(name)} for name, value in learned.items()]
        optimizer = torch.optim.AdamW(groups, weight_decay=2 * recipe.beta)
        restore_moments(optimizer, learned, before if keep_optimizer else None)
        module = self._module(site, before.arrays).train()
        pictures = PictureTokens(module, site.train, site.device, site.autocast, _network(learned))
        shares = TermShares(terms)

        def loss_of(batch: _Batch) -> Tensor:
            question, positions, target, draw = batch
            with seeded(draw, site.device):  # dropout draws from torch's own generators
                features, maps = module.fused(pictures.of(positions), question, tensors)
            logits = module.logits(features, tensors)
            loss = cross_entropy(logits, target)
            return loss + shares.added(Step(features, logits.softmax(dim=-1), maps, target, tensors), loss)

        batches = partial(_batches, recipe, site, round_)
        numbers = range(site.task.epochs if epochs is None else epochs)
        for sums in run_epochs(site, round_, numbers, batches, loss_of, optimizer):
            told = shares.of_epoch(len(site.train))
            site.report({"summary": 1, "loss": sums.mean_of_images, **told})
        for line in shares.warnings(site.name):
            site.report({"warning": line})
        kept = moments_of(optimizer, learned) if keep_optimizer else State()
        return State({**as_arrays(learned), **kept.arrays}, kept.values)

    def predictor(self, site: Site, model: State) -> Predictor:
        """Make what a site answers with: temperature 1 until calibrated, and its own network where that learned."""
        network = {name.removeprefix(NETWORK): value for name, value in model.arrays.items() if _learns_network(name)}
        module = self._module(site, model.arrays, network)
        given = {name: np.asarray(value, np.float32) for name, value in _of_model(model.arrays).items()}
        wanted = {name: given[name] for name in module.options.tensors if name in given}
        return Predictor(module, {**wanted, "temperature": np.asarray(1.0, np.float32)}, site.seen, network)

    def accuracy(self, site: Site, model: State) -> float:
        """Measure the share of the site's tune questions that its model answers rightly; 0 where it has none."""
        if len(site.tune) == 0:
            return 0.0
        found = answer_rows(self.predictor(site, model), site.tune, site.device)
        named = np.where(site.seen, found["probabilities"], -1.0).argmax(axis=1)
        return float(np.mean(named == site.tune.targets))

    def _module(self, site: Site, arrays: Arrays, network: Arrays | None = None) -> AnswerModule:
        """The module of a site's tensors, over the run's vision transformer or the site's own."""
        assert site.backbone is not None
        also = [name for name in sorted(arrays) if name.startswith(SHARED)]
        backbone = frozen_network(site.task.backbone, network).to(site.device) if network else site.backbone
        return AnswerModule(backbone, self.recipe.options(also), self.recipe.dropout)


def asked_by(task: Task) -> Questions:
    """Return what is known of a task's questions; a `SettingError` where its pictures are asked nothing."""
    if task.questions is None:
        raise SettingError(
            "this method answers questions, and the pictures of this task are asked none: use data with questions, "
            "such as --data vqa-rad:PATH, or a method that learns from pictures."
        )
    return task.questions


def _of_model(arrays: Arrays) -> Arrays:
    return {name: value for name, value in arrays.items() if not name.startswith("optimizer.")}


def _learns_network(name: str) -> bool:
    return name.startswith(NETWORK)


def _network(learned: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The vision transformer's weights among them, by timm's names."""
    return {name.removeprefix(NETWORK): value for name, value in learned.items() if _learns_network(name)}


def _batches(recipe: AnswerRecipe, site: Site, round_: int, epoch: int) -> tuple[int, Iterator[_Batch]]:
    """Count and read the batches of one epoch, each with the seed of its dropout."""
    parts = batches_of(site.epoch_order(site.train, round_, epoch), recipe.batch)

    def drawn(step: int, part: NDArray[np.int64]) -> _Batch:
        seed = int(site.rng("dropout", round_, epoch, step).integers(2**63))
        target = torch.from_numpy(site.train.targets[part]).to(site.device)
        return site.train.asked(part).to(site.device), part, target, seed

    return len(parts), (drawn(*each) for each in enumerate(parts))


# Every method that learns an answer model shortens the schedule in the same way.
PRESETS: Presets = {
    "tiny": {"rounds": 2, "epochs": 1, "images_per_site": 120, "hyper": {"width": 64, "heads": 2}},
    "bench84": {"rounds": 10, "epochs": 4, "hyper": {}},
    "paper": {"rounds": 20, "epochs": 5, "hyper": {}},
}
