"""FedAvg over prompts and head. McMahan et al., arXiv 1602.05629, as FedEvPrompt (arXiv 2411.10071) compares with it.

    before round 1: sites send moments of the frozen network's features, and how     local_round, `warm`
                    well each readout probes; the server pools them                  aggregate, `warm`
    server sends prompts and head (`share` of them)                                  broadcast
    site c: E epochs from them                                                       local_round, `train`
    server: theta = sum_c n_c/n theta_c                                              aggregate, `train`

The rows of FedEvPrompt's Table 2: `share=b` (t-prompts and head stay local), `share=bt`, `share=g` (one prompt set),
each with or without `kd=on` (the attention buffer of FedEvPrompt beside the weights).

Differs from the paper: the warm phase (standardised features need one scale for all sites); optimiser moments start
afresh each round; AdamW and softplus evidence where the paper is silent (docs/methods.md).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

from torch import Tensor

from edgefl_protocol import Payload
from edgefl_trainer.contract import Arrays, Phase, Predictor, Site, State, Task
from edgefl_trainer.errors import SettingError
from edgefl_trainer.learning import evidential, steps
from edgefl_trainer.learning.attention_buffer import (
    MapSharing,
    distillation,
    most_certain_maps,
    others_maps,
    replaced,
)
from edgefl_trainer.learning.evidential import STATISTICS, EvidentialRecipe
from edgefl_trainer.learning.features import common_features, feature_reply, readout_named
from edgefl_trainer.learning.terms import Term


@dataclass(frozen=True, kw_only=True)
class FedAvg:
    """One model for all sites: the mean of what each learned."""

    family: ClassVar[str] = "evidential prompts"
    paper: ClassVar[str] = "arXiv 1602.05629"
    travels: ClassVar[tuple[str, ...]] = ("prompts", "weights", "features", "maps")  # moments once; maps with kd=on
    needs_labels: ClassVar[bool] = True

    recipe: EvidentialRecipe = field(default_factory=EvidentialRecipe)
    maps: MapSharing = field(default_factory=MapSharing)
    share: Literal["b", "bt", "g"] = "bt"
    kd: bool = False
    weighting: Literal["samples", "uniform"] = "samples"

    def __post_init__(self) -> None:
        if self.recipe.prompts == "g" and self.share != "g":
            raise SettingError("prompts is 'g'; with this method one prompt set is asked for with --set share=g.")
        object.__setattr__(self, "recipe", replace(self.recipe, prompts="g" if self.share == "g" else "bt"))

    @property
    def shared(self) -> tuple[str, ...]:
        """Tensors that are averaged; the others stay at their site."""
        return ("prompts.b",) if self.share == "b" else self.recipe.trained

    def phases(self, rounds: int) -> Sequence[Phase]:
        """One warm exchange of feature moments, then R rounds."""
        return [Phase("warm", 0), *(Phase("train", r) for r in range(1, rounds + 1))]

    def start(self, task: Task, sites: Sequence[str]) -> State:
        """Initial prompts and head."""
        initial = steps.as_arrays(self._initial(task))
        shared = {name: initial[name] for name in self.shared}
        return State(shared, {"standardise": int(self.recipe.standardises(task.backbone)), "seed": task.seed})

    def broadcast(self, state: State, phase: Phase, sites: Sequence[str]) -> Mapping[str, Payload]:
        """The averaged tensors, and with `kd` the others' maps; nothing in the warm phase."""
        if phase.kind == "warm":
            return dict.fromkeys(sites, Payload({}, {}))
        averaged = {name: value for name, value in state.arrays.items() if not name.startswith("maps.")}
        maps = others_maps(state.arrays, int(state.values["seed"]), phase.round, sites)
        readout = {"readout": state.values["readout"]}
        return {name: Payload({**averaged, **maps[name]}, readout) for name in sites}

    def local_round(self, site: Site, state: State, broadcast: Payload) -> tuple[State, Payload]:
        """Moments and probes in the warm phase, then E epochs from the averaged tensors."""
        if broadcast.scalars["phase"] == "warm":
            return State(), feature_reply(site)
        return self.train_round(site, state, broadcast)

    def train_round(
        self, site: Site, state: State, broadcast: Payload, terms: Sequence[Term] = ()
    ) -> tuple[State, Payload]:
        """E epochs from the averaged tensors, with a method's own `terms` in the loss."""
        readout = readout_named(broadcast.scalars["readout"])
        round_ = int(broadcast.scalars["round"])
        arrays = self.model(site, state, broadcast)
        tensors = evidential.trainable(self.recipe, arrays, site.device)
        optimizer = evidential.make_optimizer(self.recipe, tensors, None)
        kd = distillation(self.maps, site, broadcast.arrays) if self.kd else []
        mode = self.maps.rollout
        evidential.learn(
            self.recipe, site, tensors, readout, round_, optimizer=optimizer, terms=[*terms, *kd], mode=mode
        )
        learned = steps.as_arrays({name: tensors[name] for name in self.recipe.trained})
        reply: Arrays = {name: learned[name] for name in self.shared}
        if self.kd:
            local = evidential.make_predictor(self.recipe, site, {**arrays, **learned}, readout, mode)
            reply = {**reply, **most_certain_maps(self.maps, site, local, round_)}
        return State(learned), Payload(reply, {"n_train": len(site.train)})

    def aggregate(self, state: State, phase: Phase, replies: Mapping[str, Payload]) -> State:
        """Pooled feature statistics and the readout that probes best; then the mean of the sites' tensors."""
        if phase.kind == "warm":
            found = common_features(replies, self.recipe.readout, standardise=bool(state.values["standardise"]))
            return State({**state.arrays, **found.arrays}, {**state.values, **found.values})
        if phase.kind == "final":
            return state
        shared = {
            name: Payload({key: reply.arrays[key] for key in self.shared}, reply.scalars)
            for name, reply in replies.items()
        }
        weights = dict.fromkeys(replies, 1.0) if self.weighting == "uniform" else steps.sample_weights(replies)
        maps = replaced(state.arrays, replies)
        return State({**maps, **steps.weighted_mean(shared, weights)}, state.values)

    def predictor(self, site: Site, state: State, broadcast: Payload) -> Predictor | None:
        """The averaged model, with what stayed at the site and the site's own prior."""
        arrays = self.model(site, state, broadcast)
        readout = readout_named(broadcast.scalars["readout"])
        return evidential.make_predictor(self.recipe, site, arrays, readout, self.maps.rollout)

    def model(self, site: Site, state: State, broadcast: Payload) -> Arrays:
        """Averaged tensors and statistics of the broadcast, the site's own for the rest, initial where it has none."""
        private = state.arrays or steps.as_arrays(self._initial(site.task))
        names = (*self.shared, *STATISTICS)
        averaged = {name: broadcast.arrays[name] for name in names if name in broadcast.arrays}
        return {**{name: private[name] for name in self.recipe.trained}, **averaged}

    def _initial(self, task: Task) -> dict[str, Tensor]:
        return evidential.initial_tensors(self.recipe, task.backbone, len(task.classes), task.seed)
