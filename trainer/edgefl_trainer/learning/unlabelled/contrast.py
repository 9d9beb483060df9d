"""Momentum contrast at one site: an encoder, its slow copy, and first-in-first-out queues of features.

    q = unit(f_q(x1));  theta_k <- m theta_k + (1 - m) theta_q;  k+ = unit(f_k(x2))     MomentumContrast
    loss = -log exp(q.k+/tau) / (exp(q.k+/tau) + sum_{n in Q_CL} exp(q.n/tau))          losses.contrastive_loss
    k+ joins the queue, the oldest leave                                                FeatureRing

Guarantees: features have unit length; a queue never holds a vector that is no feature of an image; only parameters
follow the encoder, batch statistics of the slow copy run by themselves. Sources: MoCo (arXiv 1911.05722) Algorithm 1,
MoCo v2 (arXiv 2003.04297); FedCLF (arXiv 2208.11278) eq. 2 to 6; docs/methods.md, FedCLF.
"""

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from typing import ClassVar, Literal, NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from edgefl_protocol import Payload
from edgefl_protocol.rules import negatives as rules
from edgefl_protocol.rules.bounds import FEDCLF
from edgefl_protocol.rules.defaults import FedCLFDefaults as Default
from edgefl_protocol.rules.draws import bank_rng, remote_rng
from edgefl_protocol.rules.feature_rows import BANK, FEATURES, first_order
from edgefl_protocol.rules.slow_encoder import (
    BUFFER,
    SLOW,
    MomentumEncoder,
    key_momentum,
    leaving,
    local_steps,
    round_begins,
    staying,
)
from edgefl_protocol.sentences import counted
from edgefl_trainer.bounds import check_ranges
from edgefl_trainer.contract import Arrays, Phase, Scalar, Site, State, Task
from edgefl_trainer.learning.batches import read_ahead
from edgefl_trainer.learning.named_arrays import as_arrays
from edgefl_trainer.learning.unlabelled import self_supervised
from edgefl_trainer.learning.unlabelled.self_supervised import LearningNetwork, Pixels, SgdRecipe, Split, cut
from edgefl_trainer.losses import contrastive_loss

NETWORK = ("backbone.", "head.")  # names of the network's tensors begin so
TENSORS = (*NETWORK, SLOW)
START_SHARE = 0.05  # of its start in the slow copy after all steps, above which a person should know


@dataclass(frozen=True, kw_only=True)
class ContrastRecipe:
    """Hyper-parameters; symbols of the papers in the comments."""

    paper: ClassVar[str] = "arXiv 1911.05722"

    sgd: SgdRecipe = field(default_factory=SgdRecipe)
    queue: int = Default.queue  # K, features in the local bank (default ours)
    temperature: float = Default.temperature  # tau, what similarities are divided by (arXiv 2003.04297)
    # m, share of the momentum encoder that a step keeps; 0: 0.99 for runs under 20,000 local steps, 0.999 above
    # (default ours)
    key_momentum: float = Default.key_momentum
    # what a round begins with as momentum encoder: the averaged one, the site's own (local), or a copy of the network
    # (reset), after which banks are of another space (docs/decisions/0035)
    momentum_encoder: MomentumEncoder = Default.momentum_encoder
    # head above the network: two layers (mlp), or one as in MoCo v1, with tau 0.07 (linear) (arXiv 2208.11278)
    projection: Literal["mlp", "linear"] = Default.projection

    def __post_init__(self) -> None:
        check_ranges(self, FEDCLF)

    def build(self, task: Task) -> LearningNetwork:
        """Make the encoder as every site begins with it."""
        return self_supervised.build(task, self.head)

    def head(self, width: int) -> nn.Module:
        """Make the projection of D pooled features to the sphere's space."""
        if self.projection == "linear":
            return nn.Linear(width, FEATURES)
        return nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, FEATURES))


class FeatureRing:
    """The newest features, at most `capacity`, as a ring: a push overwrites the oldest."""

    def __init__(self, capacity: int, device: torch.device) -> None:
        self._rows = torch.zeros(capacity, FEATURES, device=device)
        self._next = 0
        self._held = 0

    @property
    def rows(self) -> Float[Tensor, "held F"]:
        """A copy of all features, in no order that means anything."""
        return self._rows[: self._held].clone()

    def oldest_first(self) -> Float[Tensor, "held F"]:
        """Copy all features in the order in which they came."""
        return torch.cat([self._rows[self._next : self._held], self._rows[: self._next]])

    def push(self, features: Float[Tensor, "n F"]) -> None:
        """Let features in, the last row last, and the oldest out; any number of them."""
        capacity = len(self._rows)
        newest = features[-capacity:]
        places = torch.arange(self._next, self._next + len(newest), device=self._rows.device) % capacity
        self._rows[places] = newest.to(self._rows.dtype)
        self._next = (self._next + len(newest)) % capacity
        self._held = min(capacity, self._held + len(newest))


@dataclass(frozen=True)
class Remote:
    """Others' features Q_r, and where draws from them come from."""

    features: Float[Tensor, "M F"]
    rng: np.random.Generator

    def draw(self, count: int) -> Float[Tensor, "count F"]:
        """Draw B of them, see `rules.negatives.draw_others`."""
        chosen = rules.draw_others(self.rng, len(self.features), count)
        return self.features[torch.from_numpy(chosen).to(self.features.device)]


@dataclass(frozen=True)
class MomentumContrast:
    """Loss of one batch from two views of each image; moves the slow copy and the queues.

    `bank` is Q_l; `negatives` is Q_CL, the same queue where only local features are negatives. What enters it besides:
    local features with `keeps_local`, others' with `remote`.
    """

    encoder: LearningNetwork
    slow: LearningNetwork
    momentum: float  # m
    temperature: float  # tau
    bank: FeatureRing
    negatives: FeatureRing
    remote: Remote | None = None
    keeps_local: bool = True
    sums: list[tuple[Tensor, int]] = field(default_factory=list)  # of each step's keys since `similarity` was asked

    def similarity(self) -> float:
        """Compute the mean similarity of different images' keys since this was last asked: near 1, all are one."""
        found = [rules.mean_similarity(total.cpu().numpy(), count) for total, count in self.sums]
        self.sums.clear()
        return float(np.mean(found))

    def __call__(self, views: tuple[Pixels, ...]) -> Float[Tensor, ""]:
        """See the module's docstring."""
        first, second = views
        queries = unit(self.encoder(first))
        with torch.no_grad():
            follow(self.slow, self.encoder, self.momentum)
            keys = unit(self.slow(second))
        loss = contrastive_loss(queries, keys, self.negatives.rows, self.temperature)
        self.sums.append((keys.sum(dim=0), len(keys)))
        self.bank.push(keys)
        if self.remote is not None:
            for rows in rules.entering(keys, self.remote.draw(len(keys)), keeps_local=self.keeps_local):
                self.negatives.push(rows)
        return loss


def unit(features: Float[Tensor, "B F"]) -> Float[Tensor, "B F"]:
    """Scale rows to length 1."""
    return nn.functional.normalize(features, dim=1)


def follow(slow: nn.Module, encoder: nn.Module, momentum: float) -> None:
    """Update theta_k <- m theta_k + (1 - m) theta_q for every parameter that learns, in place."""
    pairs = [pair for pair in zip(slow.parameters(), encoder.parameters(), strict=True) if pair[1].requires_grad]
    theirs: list[Tensor] = [pair[0] for pair in pairs]
    ours: list[Tensor] = [pair[1] for pair in pairs]
    with torch.no_grad():
        torch._foreach_mul_(theirs, momentum)
        torch._foreach_add_(theirs, ours, alpha=1 - momentum)


def slow_copy(model: LearningNetwork, arrays: Arrays) -> LearningNetwork:
    """Make the momentum encoder of a round's start: a copy, with the tensors that came or stayed as `momentum.*`."""
    slow = deepcopy(model)
    self_supervised.fill(
        slow, {name.removeprefix(SLOW): value for name, value in arrays.items() if name.startswith(SLOW)}
    )
    return slow.train()


def momentum_arrays(slow: LearningNetwork) -> Arrays:
    """Return the slow copy's tensors by the names under which they travel or stay."""
    return {f"{SLOW}{name}": value for name, value in self_supervised.tensors_of(slow).items()}


def local_features(
    recipe: ContrastRecipe, site: Site, encoder: LearningNetwork, rng: np.random.Generator, *, training: bool = True
) -> Float[Tensor, "n F"]:
    """Compute unit vectors of at most K of a site's images, one random view of each; the encoder stays as it was.

    Args:
        rng: draws order and views.
        training: with the statistics of each batch, as the slow copy has them while it learns; else with the running
            ones, so that each feature depends on its own image only.
    """
    order = first_order(rng, len(site.unlabelled))[: recipe.queue]
    prepare = self_supervised.views(site, recipe.sgd, "moco-v2", 1)
    model = deepcopy(encoder).train(training)
    found = []
    with torch.no_grad():
        for images in read_ahead(site, site.unlabelled, cut(order, recipe.sgd.batch, site.name)):
            pixels = prepare(images, rng)[0]
            found.append(unit(model(pixels)))
    return torch.cat(found)


def begun_bank(recipe: ContrastRecipe, site: Site, state: State, encoder: LearningNetwork) -> FeatureRing:
    """Return Q_l as the site left it, else its images' features of today, never random vectors."""
    bank = FeatureRing(recipe.queue, site.device)
    if BANK in state.arrays:
        bank.push(torch.from_numpy(np.array(state.arrays[BANK])).to(site.device))
    else:
        bank.push(local_features(recipe, site, encoder, bank_rng(site.task.seed, site.name)))
    return bank


def kept(bank: FeatureRing) -> Arrays:
    """Return Q_l for a site's state."""
    return as_arrays({BANK: bank.oldest_first()})


class Learned(NamedTuple):
    """What a round leaves at a site: the encoder, its slow copy, Q_l, and SGD's momentum where that stays."""

    encoder: LearningNetwork
    slow: LearningNetwork
    bank: FeatureRing
    momentum: Arrays


def start(recipe: ContrastRecipe, task: Task) -> State:
    """Make the server's first state: a fresh network, or the backbone to learn on, and a fresh projection."""
    return self_supervised.start(recipe.sgd, task, recipe.head)


def weights_to_send(state: State, phase: Phase) -> Arrays:
    """Return all tensors of the network, and of its slow copy where it is averaged; nothing in the last exchange."""
    return {} if phase.kind == "final" else {name: v for name, v in state.arrays.items() if name.startswith(TENSORS)}


def received(recipe: ContrastRecipe, site: Site, state: State, arrays: Arrays) -> LearningNetwork:
    """Build the network a site begins a round with: tensors of a broadcast, its own batch norm where that stays."""
    model = recipe.build(site.task)
    mine = round_begins(arrays, state.arrays, recipe.momentum_encoder)
    self_supervised.fill(model, {name: value for name, value in mine.items() if name.startswith(NETWORK)})
    return model.at(site)


def contrast_round(
    recipe: ContrastRecipe,
    site: Site,
    state: State,
    arrays: Arrays,
    round_: int,
    *,
    others: Float[Tensor, "M F"] | None = None,
    keeps_local: bool = True,
) -> Learned:
    """Learn E epochs at one site.

    Args:
        arrays: tensors of the network, from the server or from the site itself.
        round_: train round, from 1.
        others: Q_r; None where there is nobody else or nothing is shared, and local features serve.
        keeps_local: whether local features are negatives beside the others'.
    """
    model = received(recipe, site, state, arrays)
    slow = slow_copy(model, round_begins(arrays, state.arrays, recipe.momentum_encoder))
    bank = begun_bank(recipe, site, state, slow)
    remote, negatives = None, bank
    if others is not None:
        remote = Remote(others, remote_rng(site.task.seed, site.name, round_))
        most = rules.most_negatives(recipe.queue, len(others), keeps_local=keeps_local)
        negatives = FeatureRing(most, site.device)
        negatives.push(rules.first_negatives(bank.oldest_first(), others, keeps_local=keeps_local))
    momentum, share = pace(recipe, site, round_)
    objective = MomentumContrast(model, slow, momentum, recipe.temperature, bank, negatives, remote, keeps_local)
    prepare = self_supervised.views(site, recipe.sgd, "moco-v2", 2)

    def facts() -> Mapping[str, Scalar]:
        similarity = objective.similarity()
        warn_of_collapse(site, round_, similarity)
        return {"key_start_share": share, "key_similarity": similarity}

    left = self_supervised.learn(recipe.sgd, site, model, prepare, objective, round_, facts, state.arrays)
    return Learned(model, slow, bank, left)


def divided(recipe: ContrastRecipe, learned: Learned, state: State) -> tuple[State, Arrays]:
    """Divide what a site keeps after a round from the weights it sends."""
    network = self_supervised.tensors_of(learned.encoder)
    found = {**network, **momentum_arrays(learned.slow), **learned.momentum}
    rule = (tuple(network), Split.of(learned.encoder, recipe.sgd.bn).kept, recipe.momentum_encoder)
    stays = {name: found[name] for name in staying(*rule, [name.removeprefix(BUFFER) for name in learned.momentum])}
    return State({**stays, **kept(learned.bank)}, state.values), {name: found[name] for name in leaving(*rule)}


def last_exchange(site: Site, state: State) -> tuple[State, Payload]:
    """Send batch norm once, with `bn=local`; nothing where the site has not learned."""
    own = {name: value for name, value in state.arrays.items() if name.startswith(NETWORK)}
    return state, Payload(own, {"n_train": len(site.unlabelled)})


def average(state: State, phase: Phase, replies: Mapping[str, Payload]) -> State:
    """Average the tensors that sites sent; after the warm phase nothing has changed."""
    if phase.kind == "warm":
        return state
    return self_supervised.average(state, replies, lambda name: name.startswith(TENSORS))


def pace(recipe: ContrastRecipe, site: Site, round_: int) -> tuple[float, float]:
    """Compute m, and m^steps: how much of its start a slow copy that stays at its site holds after the whole run.

    Warns in the first round where it is, and that is much.
    """
    per_epoch = len(cut(np.arange(len(site.unlabelled)), recipe.sgd.batch, site.name))
    total = local_steps(site.task.rounds, site.task.epochs, per_epoch)
    momentum = key_momentum(recipe.key_momentum, total)
    share = float(momentum**total)
    if recipe.momentum_encoder == "local" and round_ == 1 and share > START_SHARE:
        text = (
            f"the momentum encoder of {site.name} keeps {share:.0%} of its random start after all "
            f"{counted(total, 'step')}: lower --set key_momentum, or learn longer."
        )
        site.report({"warning": text})
    return momentum, share


def warn_of_collapse(site: Site, round_: int, similarity: float) -> None:
    """Say so where features of different images are nearly the same, see `rules.negatives.collapse_warning`."""
    if (warning := rules.collapse_warning(similarity, round_, site.task.rounds)) is not None:
        site.report({"warning": f"{site.name}: {warning}; lower --set lr, or learn longer on more images."})
