"""The contract between a federated method and everything that runs it.

A method never sees the engine, the network, a file or another site. It is a frozen dataclass of hyper-parameters
with a server half (`start`, `broadcast`, `aggregate`) and a site half (`local_round`, `predictor`). Whatever crosses
between the halves is a `Payload`; whatever a half remembers is a `State`. Both are named arrays plus plain values, so
the engine can count bytes, save, resume and compare digests without knowing the method.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from edgefl_protocol import Payload, digest
from edgefl_protocol.payload import Scalar as Scalar
from edgefl_protocol.rules.batches import batches_of
from edgefl_protocol.rules.draws import Balance, epoch_order, generator, order_rng
from edgefl_protocol.rules.questions import Questions as Questions
from edgefl_trainer.gaussian_noise import NoisyRelease
from edgefl_trainer.models.answers import AnswerModule
from edgefl_trainer.models.cnn import Backbone
from edgefl_trainer.models.scoring import ScoreModule
from edgefl_trainer.models.spec import BackboneSpec

PhaseKind = Literal["warm", "train", "final"]
Arrays = Mapping[str, NDArray[np.generic]]
Progress = Callable[[Mapping[str, Scalar]], None]


def unheard(facts: Mapping[str, Scalar]) -> None:
    """Hear of progress and do nothing."""


@dataclass(frozen=True)
class Phase:
    """One exchange of the federation. `round` counts the `train` phases from 1; `warm` is 0, `final` comes after.

    `train` phases take a share of the sites where a run asks for one; others take all, unless they are `sampled`.
    """

    kind: PhaseKind
    round: int
    sampled: bool = False


@dataclass(frozen=True)
class State:
    """What the server or a site remembers between rounds: named arrays plus plain values."""

    arrays: Arrays = field(default_factory=dict)
    values: Mapping[str, Scalar] = field(default_factory=dict)

    def payload(self) -> Payload:
        """Return arrays and values in the form in which a state is written and sent."""
        return Payload(self.arrays, self.values)

    def digest(self) -> str:
        """Compute SHA-256 over the arrays in name order; the values do not enter (docs/design.md 5)."""
        return digest(self.arrays)


@dataclass(frozen=True, kw_only=True)
class Task:
    """What a federation learns: plain values that server and sites agree on before the first round."""

    name: str  # as `--task` has it, or "pixels" where no label is used
    classes: tuple[str, ...]
    backbone: BackboneSpec
    rounds: int  # train rounds R
    epochs: int  # local epochs E of one round
    seed: int
    initial: Arrays = field(default_factory=dict)  # weights to learn on, by the backbone's own names; empty: fresh
    questions: Questions | None = None  # what is known of questions; None: the pictures are asked nothing


@dataclass(frozen=True)
class Examples:
    """Some rows of the federation, in a fixed order: a picture, perhaps a question, and a target.

    Reading a batch copies only that batch.
    """

    images: NDArray[np.uint8]  # (m, px, px, 3), memory-mapped: all pictures of the federation
    labels: NDArray[np.int64]  # (n,) class indices, -1 without a label, -2 an answer that no training row has
    rows: NDArray[np.int64]  # (len,) which rows are ours
    pictures: NDArray[np.int64] | None = None  # (n,) which picture a row shows; None: row i shows picture i
    tokens: NDArray[np.int64] | None = None  # (n, length) the words of a row's question; None: no row has one

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def targets(self) -> NDArray[np.int64]:
        """(len,) class indices of these rows."""
        return self.labels[self.rows]

    @property
    def places(self) -> NDArray[np.int64]:
        """(len,) which of `images` these rows show: several may ask about one picture."""
        return self.rows if self.pictures is None else self.pictures[self.rows]

    def counts(self, classes: int) -> NDArray[np.int64]:
        """Count the rows of each class, (K,)."""
        return np.bincount(self.targets[self.targets >= 0], minlength=classes)

    def read(self, positions: NDArray[np.int64]) -> tuple[torch.Tensor, torch.Tensor]:
        """Read images uint8 (B, px, px, 3) and targets int64 (B,) at `positions` (0 … len − 1)."""
        shown = self.images[self.places[positions]]
        return torch.from_numpy(shown), torch.from_numpy(self.targets[positions])

    def asked(self, positions: NDArray[np.int64]) -> torch.Tensor:
        """Read the questions at `positions`, int64 (B, length); see `rules.questions.token_ids`."""
        if self.tokens is None:
            raise ValueError("these rows have no questions")
        return torch.from_numpy(self.tokens[self.rows[positions]])

    def in_order(self, batch: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Return every row once, in row order: for evaluation, features and map selection."""
        for start in range(0, len(self), batch):
            yield self.read(np.arange(start, min(start + batch, len(self))))


@dataclass(frozen=True, kw_only=True)
class Site:
    """A member with private data, as a method sees it."""

    name: str
    task: Task
    backbone: Backbone | None  # None while a backbone is being learned
    train: Examples
    tune: Examples
    unlabelled: Examples
    balance: Balance = "none"
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    autocast: torch.dtype | None = None
    noise: Literal["seeded", "secret"] = "seeded"  # of privacy noise; whatever sends replies asks for secret
    report: Progress = unheard

    @property
    def seen(self) -> tuple[bool, ...]:
        """Which classes its training rows show; where it has no labelled row, all of them."""
        counts = self.train.counts(len(self.task.classes))
        return tuple(bool(count) or not counts.any() for count in counts)

    def rng(self, *purpose: str | int) -> np.random.Generator:
        """Return a generator that depends on seed, site and purpose only, so a resumed run draws the same numbers."""
        return generator(self.task.seed, self.name, *purpose)

    def noise_rng(self, *purpose: str | int) -> np.random.Generator:
        """Return randomness for privacy noise: the operating system's; in a simulation the seed's, so that runs repeat.

        The server knows the seed and can take seeded noise off again; docs/methods.md, noise.
        """
        return np.random.default_rng() if self.noise == "secret" else self.rng("noise", *purpose)

    @property
    def noise_warning(self) -> str:
        """What a warning about privacy noise ends with: seeded noise hides nothing from whoever knows the seed."""
        return "" if self.noise == "secret" else " The noise comes from the seed: whoever knows that can take it off."

    def epoch_order(self, examples: Examples, round_: int, epoch: int) -> NDArray[np.int64]:
        """Draw the positions one epoch visits: a permutation, or as many draws with every class equally likely."""
        rng = order_rng(self.task.seed, self.name, round_, epoch)
        return epoch_order(rng, examples.targets, self.balance)

    def batches(self, examples: Examples, batch: int, round_: int, epoch: int) -> Iterator[tuple[torch.Tensor, ...]]:
        """Yield one epoch's shuffled (images uint8 (B, px, px, 3), targets (B,)), on the site's device."""
        for part in batches_of(self.epoch_order(examples, round_, epoch), batch):
            images, targets = examples.read(part)
            yield images.to(self.device, non_blocking=True), targets.to(self.device, non_blocking=True)


@dataclass(frozen=True)
class Prediction:
    """Scores of a batch of images. Fields are None where the method has no such quantity."""

    probabilities: NDArray[np.float32]  # (B, K)
    predicted: NDArray[np.int64]  # (B,) -1 where the model knows nothing (vacuity >= 0.999)
    evidence: NDArray[np.float32] | None  # (B, K)
    vacuity: NDArray[np.float32] | None  # (B,)
    dissonance: NDArray[np.float32] | None  # (B,)
    maps: NDArray[np.float32] | None  # (B, N) max-normalised


@dataclass(frozen=True)
class Predictor:
    """A scoring module with the tensors of one site: what is evaluated, exported and shown.

    A site that learned its own network gives those weights as `network`; they are what `module` holds, see
    `models.backbones.frozen_network`. Without them the module holds the frozen backbone of the run.
    """

    module: ScoreModule | AnswerModule
    tensors: Mapping[str, NDArray[np.float32]]
    seen: tuple[bool, ...]  # see `Site.seen`; the others are never predicted
    network: Arrays = field(default_factory=dict)  # the site's own backbone weights by timm's names; empty: the run's

    @property
    def score_module(self) -> ScoreModule:
        """The module of a model that scores pictures; a `TypeError` where it answers questions."""
        if not isinstance(self.module, ScoreModule):
            raise TypeError("this model answers questions about pictures: it does not score a picture alone")
        return self.module


Presets = Mapping[str, Mapping[str, Any]]  # name (tiny, bench84, paper) → settings, hyper-parameters under `hyper`


@dataclass(frozen=True, kw_only=True)
class Asked:
    """How a method learns where the pictures are asked questions."""

    make: "Callable[[], Method]"  # the method with the defaults that it then has
    presets: Presets


class MeasuredBefore(NamedTuple):
    """What was measured before a run: plain figures for `summary.json` under `name`, and a warning where one is due."""

    name: str
    figures: Mapping[str, float]
    warning: str | None = None


@dataclass(frozen=True, kw_only=True)
class NoiseTerms:
    """What privacy noise promises: `summary.json` keeps it, because epsilon alone would promise more."""

    kind: str  # what carries the noise, of `rules.travels.KINDS`: the other kinds that travel carry none
    on: str  # the same in words
    given: str  # what epsilon takes as known
    delta: float = 0.0
    no_guarantee: str | None = None  # why its epsilon bounds nothing, and what to do; None: it does

    def without(self, travels: Sequence[str]) -> list[str]:
        """Name the kinds that leave without noise."""
        return [kind for kind in travels if kind != self.kind]


@dataclass(frozen=True, kw_only=True)
class Declaration:
    """What a method needs or does beyond `Method`: the engine reads this and never asks for a method's type.

    A method states it as its attribute `declares`; one that does not learns on a frozen network.
    """

    trains_network: bool = False  # each site trains the whole network, from `Task.initial` or a fresh one
    encoder: Callable[[State], Arrays] | None = None  # reads the encoder learned without labels from the server's state
    apart: bool = False  # each site learns an encoder of its own and keeps it: `encoder` reads a site's state
    least_images: int = 1  # of a site; with fewer it cannot learn
    further_predictors: Callable[[Any, Site, State, Payload], Mapping[str, Predictor]] | None = None
    """Models beside `Method.predictor`, by names that are the same at every site and can name a folder."""
    presets: Callable[[str, Mapping[str, Any]], Presets] | None = None
    """Presets for a backbone's name and the hyper-parameters that are given; None: a schedule without settings."""
    asked: Asked | None = None  # where pictures are asked questions; None: it learns from pictures alone
    questions_only: bool = False  # it learns nothing from pictures that are asked nothing
    learns_network: Callable[[Any], bool] | None = None  # of a method as it is set: whether it `trains_network`
    summary: tuple[str, ...] = ()  # hyper-parameters that `summary.json` tells
    told_before: Callable[[Mapping[str, Any], int, int], str] | None = None
    """Says of hyper-parameters, rounds and epochs what to expect of the loss, in a line without a full stop; or "". """
    measured_before: Callable[[Any, Mapping[str, Site]], "MeasuredBefore | None"] | None = None
    """Measures in seconds, before a run's first round, what speaks for or against it; None: there is nothing to."""
    release: Callable[[Any, Phase], NoisyRelease | None] | None = None
    """Gaussian noise on what sites send in a phase, of a method as it is set; None: what is sent carries none.

    A method with it has `noise`, too, and counts what it spent as `epsilon_spent` in the state of a site: the site's
    ledger is held against that.
    """
    noise: Callable[[Any], NoiseTerms | None] | None = None
    """What the privacy noise of a method as it is set promises; None: what it sends carries none."""
    site_of: Callable[[str], str | None] | None = None
    """Whose an entry of the server's state is, by its name: it goes when that site is shut out. None: it is all's."""

    @property
    def freezes(self) -> bool:
        """Whether the network of a run stays as it is."""
        return not self.trains_network and self.encoder is None


class Method(Protocol):
    """One federated method; see `METHODS` for the table and docs/methods.md for formulas and decisions.

    Every half is a function of its arguments: the same ones give the same bits, and none of them is changed. A run that
    resumes calls again what was under way, and arrays that come from a file or a message are read-only. What each half
    has to accept stands below; docs/design.md 4 names the test of each case.
    """

    family: ClassVar[str]
    paper: ClassVar[str]
    needs_labels: ClassVar[bool]

    @property
    def travels(self) -> tuple[str, ...]:
        """What sites send with these hyper-parameters, of `rules.travels.KINDS`; the server sends of no other kind."""

    def phases(self, rounds: int) -> Sequence[Phase]:
        """List every exchange of a run, in order."""

    def start(self, task: Task, sites: Sequence[str]) -> State:
        """Make the server's state before the first exchange.

        Also called, and its result dropped, to see whether the method fits a task: a `SettingError` where it does not.

        Args:
            sites: one or more that are known by then. Some may never take part, others may join later.
        """

    def broadcast(self, state: State, phase: Phase, sites: Sequence[str]) -> Mapping[str, Payload]:
        """Make what each of `sites` receives at the start of `phase`; it may differ from site to site.

        Args:
            state: after the phase before.
            phase: the next of `phases`; or, after any phase but `warm`, `Phase("final", round + 1)` even where `phases`
                has none: what the sites make their models of.
            sites: any members, also those that `start` was not told of or that never replied.
        """

    def local_round(self, site: Site, state: State, broadcast: Payload) -> tuple[State, Payload]:
        """Do one site's work in one phase; return its new state and its reply.

        Args:
            site: it may lack classes and tune rows, and have fewer images than a batch.
            state: what the last phase left in which the site took part, however many it missed since; empty before its
                first, which may be any.
            broadcast: with the scalars `phase`, `round` and `rounds`.
        """

    def aggregate(self, state: State, phase: Phase, replies: Mapping[str, Payload]) -> State:
        """Make the server's state after `phase`: numpy only, in site-name order, sums in float64.

        Args:
            replies: of one site or more, in any order, also of those that `start` was not told of.
        """

    def predictor(self, site: Site, state: State, broadcast: Payload) -> Predictor | None:
        """Return the model this site would score with now, after any phase but `warm` or at the end.

        None where the method makes no models (`Declaration.encoder`) or has none for a site that the server never met.

        Args:
            site: it may have no labelled image, if it never trains.
            state: as in `local_round`; empty for a site that took part in no round, whose model the broadcast makes.
            broadcast: of `Phase("final", round + 1)`.
        """


def declared(method: Method | type[Method]) -> Declaration:
    """Return what a method declares; the defaults where it says nothing."""
    found: Declaration = getattr(method, "declares", Declaration())
    if found.learns_network is None or isinstance(method, type):
        return found
    return replace(found, trains_network=found.learns_network(method))
