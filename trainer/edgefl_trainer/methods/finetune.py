"""Fine-tuning with few labels. The second stage of FedCLF and FedMAE, arXiv 2208.11278, sections III-A and V.

    all start from the pre-trained network and the same fresh linear head          beginning
    mode=local      site c: all epochs of network and head on its own labels       local_round
                    nothing is sent, nothing is averaged
    mode=federated  server sends network and head                                  broadcast
                    site c: E epochs of both                                       local_round
                    server: theta = sum_c n_c/n theta_c, running statistics of     aggregate
                    batch norm like weights; n_c counts labelled images

    after the last round, with `home`:
    site c: epochs of its head, of head and batch norm, or of everything on the    local_round, `final`
            averaged network, or batch norm's statistics of its own pictures
            alone (AdaBN)
    `private` keeps head, or head and batch norm, from the mean (FedBN)

With `mode=federated` all sites keep the round that is best on the tune rows of all together, as FedMAE takes the best
global model on validation data; what each site's own best round gives stands beside it (`own_round`).

Differs from the paper: of MAE's recipe mixup, cutmix, label smoothing and random augmentation are left out, the mean
of the patch tokens is taken after the network's own last norm, and fixed positions stay fixed; moments start afresh
each round of `federated` while the schedule goes on; crops are also turned and mirrored (docs/methods.md 3.4).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import numpy as np
from torch import nn

from edgefl_protocol import Payload
from edgefl_protocol.sentences import counted
from edgefl_trainer.bounds import check_bounds
from edgefl_trainer.contract import Arrays, Declaration, Phase, Predictor, Site, State, Task
from edgefl_trainer.errors import SettingError
from edgefl_trainer.learning import method_parts, whole_network
from edgefl_trainer.learning.averaged_prompts import Weighting
from edgefl_trainer.learning.averaging import site_weights, weighted_mean
from edgefl_trainer.learning.named_arrays import as_arrays, as_tensors
from edgefl_trainer.learning.whole_network import Classifier, NetworkRecipe, norm_tensors, presets_of
from edgefl_trainer.models.backbone_names import has_own_weights
from edgefl_trainer.models.backbones import build_network, empty_network, frozen_network, load_weights, weights_of
from edgefl_trainer.models.scoring import ScoreModule, ScoreOptions

NETWORK = "network."
HOME_RATES = {"network": 1e-4}  # of what is fitted at home; 1e-3 of a part of the network
AT_HOME = "at_home"  # a value in the state of a site that has fitted the averaged network
NetworkPart = Literal["none", "head", "head_and_norms"]
AtHome = Literal["none", "statistics", "head", "head_and_norms", "network"]


@dataclass(frozen=True, kw_only=True)
class FineTune:
    """Sites learn a whole network and its head from labelled images, each alone or with one averaged model.

    For sites with few labels, which begin with the network that a run without labels learned.
    """

    family: ClassVar[str] = "fine-tuning"
    paper: ClassVar[str] = "arXiv 2208.11278"
    needs_labels: ClassVar[bool] = True
    declares: ClassVar[Declaration] = Declaration(trains_network=True, summary=("mode",), presets=presets_of)

    # who learns together: each site for itself (local), or all one averaged model (federated)
    mode: Literal["local", "federated"] = "federated"
    recipe: NetworkRecipe = field(default_factory=NetworkRecipe)
    weighting: Weighting = "samples"  # what a site counts by in the mean: its training images, or all sites alike
    # what stays at its site, neither sent nor averaged: nothing, the head, or also batch norm (arXiv 2102.07623)
    private: NetworkPart = "none"
    # what each site fits of the averaged model after the last round, the rest staying as it is; statistics: those of
    # batch norm, without labels; network: all of it, head included; auto: as private (ours)
    home: Literal["auto", "none", "statistics", "head", "head_and_norms", "network"] = "auto"
    home_epochs: int = 0  # epochs of that fit; 0: as many as a round has (ours)
    # learning rate at its beginning, which falls to 0; 0: 1e-3, or 1e-4 where the whole network is fitted (ours)
    home_lr: float = 0.0
    # what a site's optimiser does between rounds: keep its moments, or begin afresh (reset); auto: keep in local mode
    # (ours)
    optimizer_state: Literal["auto", "keep", "reset"] = "auto"

    def __post_init__(self) -> None:
        check_bounds(
            self,
            home_epochs=(0 <= self.home_epochs <= 10_000, "0 (as many as a round has) to 10000"),
            home_lr=(0 <= self.home_lr <= 1, "0 (by what is fitted) to 1"),
        )
        if self.mode == "local" and (self.private, self.fitted_at_home) != ("none", "none"):
            raise SettingError(
                "with mode=local every site keeps its whole network, so private and home have no effect: leave them "
                "out, or set mode=federated."
            )

    @property
    def travels(self) -> tuple[str, ...]:
        """Network and head, where they are averaged."""
        return () if self.mode == "local" else ("weights",)

    @property
    def keeps_moments(self) -> bool:
        """Whether the optimiser goes on where the round before stopped."""
        return self.mode == "local" if self.optimizer_state == "auto" else self.optimizer_state == "keep"

    @property
    def fitted_at_home(self) -> AtHome:
        """What each site fits to the averaged network after the last round."""
        return self.private if self.home == "auto" else self.home

    def phases(self, rounds: int) -> Sequence[Phase]:
        """Plan R rounds, in local mode of E epochs after which the model is judged; then the fit at home, if any."""
        home = [] if self.fitted_at_home == "none" else [Phase("final", rounds + 1)]
        return [*method_parts.train_rounds(self, rounds), *home]

    def start(self, task: Task, sites: Sequence[str]) -> State:
        """Begin with the pre-trained network and a fresh head; with nothing in local mode."""
        if len(task.classes) < 2:
            raise SettingError(
                f"the task has {counted(len(task.classes), 'class', 'classes')}, and a classifier needs at least "
                "two: add classes with --classes, or use other data."
            )
        if not task.initial and has_own_weights(task.backbone.name):
            raise SettingError(
                f"the task names the trained backbone {task.backbone.name} but carries no weights to start from, as in "
                "a live federation: fine-tune with `edgefl-train finetune` on one machine."
            )
        self.recipe.readout_of(task.backbone)
        of_norms = {self.private, self.fitted_at_home} & {"head_and_norms", "statistics"}
        if of_norms and not norm_tensors(empty_network(task.backbone)):
            raise SettingError(
                f"{min(of_norms)} is about batch norm, and {task.backbone.name} has none: set head, or leave it out."
            )
        return State() if self.mode == "local" else State(self._shared(self.beginning(task), task))

    def broadcast(self, state: State, phase: Phase, sites: Sequence[str]) -> Mapping[str, Payload]:
        """Send network and head, without what is private; nothing in local mode."""
        return dict.fromkeys(sites, Payload(state.arrays, {}))

    def local_round(self, site: Site, state: State, broadcast: Payload) -> tuple[State, Payload]:
        """Learn E epochs from the averaged model, or from where the site stopped; in the final phase fit it at home."""
        model = self.model(site.task)
        _load(model, self.current(site, state, broadcast), site)
        if self.fitted_at_home != "none" and broadcast.scalars["phase"] == "final":
            return self._at_home(site, model.to(site.device), int(broadcast.scalars["round"])), Payload({}, {})
        before = state if self.keeps_moments else None
        moments = whole_network.learn(self.recipe, site, model.to(site.device), int(broadcast.scalars["round"]), before)
        learned = _arrays(model)
        kept = moments if self.keeps_moments else State()
        new = State({**learned, **kept.arrays}, kept.values)
        if self.mode == "local":
            return new, Payload({}, {})
        return new, Payload(self._shared(learned, site.task), {"n_train": len(site.train)})

    def aggregate(self, state: State, phase: Phase, replies: Mapping[str, Payload]) -> State:
        """Average networks and heads, running statistics included; nothing in local mode."""
        if self.mode == "local" or phase.kind != "train":
            return state
        return State(weighted_mean(replies, site_weights(self.weighting, replies)))

    def predictor(self, site: Site, state: State, broadcast: Payload) -> Predictor | None:
        """Return the averaged model, or the site's own; the initial one where it took part in no round."""
        arrays, spec = self.current(site, state, broadcast), site.task.backbone
        network = _network(arrays)
        options = ScoreOptions(readout=self.recipe.readout_of(spec), output="softmax", head_norm="none", prompts=())
        module = ScoreModule(frozen_network(spec, network).to(site.device), options)
        head = {name: np.asarray(arrays[name], dtype=np.float32) for name in ("head.weight", "head.bias")}
        return Predictor(module, {**head, "temperature": np.asarray(1.0, dtype=np.float32)}, site.seen, network)

    def current(self, site: Site, state: State, broadcast: Payload) -> Arrays:
        """Return network and head as a site has them: at the start of a round, or of its own model after the last."""
        own = {name: value for name, value in state.arrays.items() if not name.startswith("optimizer.")}
        if self.mode == "local" or AT_HOME in state.values:
            return own or self.beginning(site.task)
        if self.private == "none":
            return broadcast.arrays or self.beginning(site.task)
        return {**(own or self.beginning(site.task)), **broadcast.arrays}

    def model(self, task: Task, network: nn.Module | None = None) -> Classifier:
        """Make a model of the right shape around a network, or around one whose weights are still to be set."""
        around = empty_network(task.backbone) if network is None else network
        return Classifier(around, task.backbone.width, len(task.classes), self.recipe.readout_of(task.backbone))

    def beginning(self, task: Task) -> Arrays:
        """Return the pre-trained network, or a fresh one where the task has none, and a fresh head."""
        model = self.model(task, build_network(task.backbone, task.seed))
        whole_network.fresh_head(model, task.seed)
        initial = {NETWORK + name: value for name, value in task.initial.items()}
        return {**_arrays(model), **initial}

    def _at_home(self, site: Site, model: Classifier, round_: int) -> State:
        """Fit the averaged model, or a part of it, to the site's pictures: what it scores with from then on."""
        part = self.fitted_at_home
        if part == "statistics":
            whole_network.count_statistics(site, model)
            return State(_arrays(model), {AT_HOME: 1})
        fitted = frozenset(_arrays(model)) if part == "network" else tensors_of(part, model)
        epochs, rate = self.home_epochs or site.task.epochs, self.home_lr or HOME_RATES.get(part, 1e-3)
        whole_network.fit_part(self.recipe, site, model, round_, fitted, epochs, rate)
        return State(_arrays(model), {AT_HOME: 1})

    def _shared(self, arrays: Arrays, task: Task) -> Arrays:
        """Leave out what never leaves a site."""
        if self.private == "none":
            return arrays
        private = tensors_of(self.private, self.model(task))
        return {name: value for name, value in arrays.items() if name not in private}


def tensors_of(part: NetworkPart, model: Classifier) -> frozenset[str]:
    """Name the tensors of a part of a model, as they travel."""
    head = frozenset() if part == "none" else frozenset(f"head.{name}" for name in model.head.state_dict())
    return head | (norm_tensors(model) if part == "head_and_norms" else frozenset())


def _arrays(model: Classifier) -> Arrays:
    """Everything of a model that learns or is averaged, by the names that travel."""
    network = {NETWORK + name: value for name, value in weights_of(model.network).items()}
    return {**network, **as_arrays({f"head.{name}": value for name, value in model.head.state_dict().items()})}


def _network(arrays: Arrays) -> Arrays:
    """The network's tensors by timm's names."""
    return {name.removeprefix(NETWORK): value for name, value in arrays.items() if name.startswith(NETWORK)}


def _load(model: Classifier, arrays: Arrays, site: Site) -> None:
    load_weights(model.network, _network(arrays), site.task.backbone.name)
    head = {name: arrays[f"head.{name}"] for name in ("weight", "bias")}
    model.head.load_state_dict(as_tensors(head, model.head.weight.device))
