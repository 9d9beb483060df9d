"""FedAvg over prompts and head. McMahan et al., arXiv 1602.05629, as FedEvPrompt (arXiv 2411.10071) compares with it.

    before round 1: sites send moments of the frozen network's features, and how     local_round, `warm`
                    well each readout probes; the server pools them                  aggregate, `warm`
    server sends prompts and head (`share` of them)                                  broadcast
    site c: E epochs from them                                                       local_round, `train`
    server: theta = sum_c n_c/n theta_c                                              aggregate, `train`

The rows of FedEvPrompt's Table 2: `share=b` (t-prompts and head stay at their site), `share=bt`, `share=g` (one prompt
set), each with or without `kd=on` (the attention buffer of FedEvPrompt beside the weights).

Differs from the paper: the warm phase (an averaged head needs one feature scale for all sites; with `share=b` there is
none, a private head reads what its site finds); optimiser moments start afresh each round; AdamW and softplus evidence
where the paper is silent (docs/methods.md 4.1).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

from edgefl_protocol import Payload
from edgefl_protocol.rules.maps import is_maps, others_maps, replaced
from edgefl_trainer.contract import Arrays, Declaration, Phase, Predictor, Site, State, Task
from edgefl_trainer.errors import SettingError
from edgefl_trainer.learning import evidential, private_prompts
from edgefl_trainer.learning.attention_buffer import MapSharing, chosen_maps, distillation
from edgefl_trainer.learning.averaging import site_weights, weighted_mean
from edgefl_trainer.learning.evidential import STATISTICS, EvidentialRecipe
from edgefl_trainer.learning.features import common_features, feature_reply, features_sent
from edgefl_trainer.learning.loss_terms import Term
from edgefl_trainer.learning.named_arrays import as_arrays
from edgefl_trainer.learning.private_prompts import begun, readout_of
from edgefl_trainer.models.spec import settled_readout


@dataclass(frozen=True, kw_only=True)
class FedAvg:
    """One model for all sites: the mean of what each learned.

    For sites that want one common model and may send weights.
    """

    family: ClassVar[str] = "evidential prompts"
    paper: ClassVar[str] = "arXiv 1602.05629"
    needs_labels: ClassVar[bool] = True
    declares: ClassVar[Declaration] = evidential.DECLARES

    recipe: EvidentialRecipe = field(default_factory=EvidentialRecipe)
    maps: MapSharing = field(default_factory=MapSharing)
    share: Literal["b", "bt", "g"] = "bt"  # prompts that are averaged with the head: b, both, or one set (prompts=g)
    kd: bool = False  # also share maps and learn from them, as FedEvPrompt
    weighting: Literal["samples", "uniform"] = "samples"  # a site counts by its training images, or all alike

    def __post_init__(self) -> None:
        if self.recipe.prompts == "g" and self.share != "g":
            raise SettingError(
                "prompts is 'g', but this method shares one set of prompts with --set share=g: leave prompts out."
            )
        if self.recipe.prompts != "none":
            object.__setattr__(self, "recipe", replace(self.recipe, prompts="g" if self.share == "g" else "bt"))
        elif self.share != "bt" or self.kd:
            raise SettingError("prompts is 'none', so only the head can be shared: leave out share and kd.")

    @property
    def travels(self) -> tuple[str, ...]:
        """See `Method`: what is averaged, moments once where it includes the head, and with `kd` maps."""
        prompts = ("prompts",) if self.recipe.prompt_names else ()
        head = () if self.share == "b" else ("weights", *features_sent(self.recipe.head_norm))
        return (*prompts, *head, *(("maps",) if self.kd else ()))

    @property
    def shared(self) -> tuple[str, ...]:
        """Tensors that are averaged; the others stay at their site."""
        return ("prompts.b",) if self.share == "b" else self.recipe.trained

    def phases(self, rounds: int) -> Sequence[Phase]:
        """Plan one warm exchange of feature moments where the head is averaged, then R rounds."""
        warm = [] if self.share == "b" else [Phase("warm", 0)]
        return [*warm, *(Phase("train", r) for r in range(1, rounds + 1))]

    def start(self, task: Task, sites: Sequence[str]) -> State:
        """Begin with the initial prompts and head."""
        initial = evidential.initial_tensors(self.recipe, task.backbone, len(task.classes), task.seed)
        shared = as_arrays({name: initial[name] for name in self.shared})
        standardise = int(self.recipe.standardises(task.backbone))
        wanted = settled_readout(self.recipe.readout, task.backbone)
        return State(shared, {"wanted": wanted, "standardise": standardise, "classes": len(task.classes)})

    def broadcast(self, state: State, phase: Phase, sites: Sequence[str]) -> Mapping[str, Payload]:
        """Send the averaged tensors, and with `kd` the others' maps; nothing in the warm phase."""
        if phase.kind == "warm":
            return dict.fromkeys(sites, Payload({}, {}))
        averaged = {name: value for name, value in state.arrays.items() if not is_maps(name)}
        maps = others_maps(state.arrays, sites)
        readout = {name: state.values[name] for name in ("readout",) if name in state.values}
        return {name: Payload({**averaged, **maps[name]}, readout) for name in sites}

    def local_round(self, site: Site, state: State, broadcast: Payload) -> tuple[State, Payload]:
        """Compute moments and probes in the warm phase, then E epochs from the averaged tensors."""
        if broadcast.scalars["phase"] == "warm":
            standardise = self.recipe.standardises(site.task.backbone)
            return State(), feature_reply(site, self.recipe.readout, standardise=standardise)
        new = self.learned(site, state, broadcast)
        return new, self.reply(site, new, broadcast)

    def learned(
        self, site: Site, state: State, broadcast: Payload, terms: Sequence[Term] = (), epochs: int | None = None
    ) -> State:
        """Learn E epochs, or as many as named, from the averaged tensors, with a method's own `terms` in the loss."""
        before = self.model(site, state, broadcast)
        tensors = evidential.trainable(self.recipe, before.arrays, site.device)
        evidential.learn(
            self.recipe,
            site,
            tensors,
            readout_of(before),
            int(broadcast.scalars["round"]),
            optimizer=evidential.make_optimizer(self.recipe, tensors, None),
            terms=[*terms, *(distillation(self.maps, site, broadcast.arrays) if self.kd else ())],
            mode=self.maps.rollout,
            epochs=epochs,
        )
        return State(as_arrays(tensors), before.values)

    def reply(self, site: Site, new: State, broadcast: Payload) -> Payload:
        """Make the reply of a site that has learned: the shared tensors, and with `kd` its chosen maps."""
        sent: Arrays = {name: new.arrays[name] for name in self.shared}
        if self.kd:
            maps = chosen_maps(self.maps, site, self.scoring(site, new), int(broadcast.scalars["round"]))
            sent = {**sent, **maps}
        return Payload(sent, {"n_train": len(site.train)})

    def aggregate(self, state: State, phase: Phase, replies: Mapping[str, Payload]) -> State:
        """Pool feature statistics and the readout that probes best; then average the sites' tensors."""
        if phase.kind == "warm":
            found = common_features(replies, str(state.values["wanted"]), standardise=bool(state.values["standardise"]))
            return State({**state.arrays, **found.arrays}, {**state.values, **found.values})
        if phase.kind == "final":
            return state
        weights = site_weights(self.weighting, replies)
        kept = state.arrays
        if self.kd:
            kept = replaced(kept, {name: reply.arrays for name, reply in replies.items()}, int(state.values["classes"]))
        return State({**kept, **weighted_mean(replies, weights, self.shared)}, state.values)

    def predictor(self, site: Site, state: State, broadcast: Payload) -> Predictor | None:
        """Return the averaged model, with what stayed at the site and the site's own prior."""
        return self.scoring(site, self.model(site, state, broadcast))

    def scoring(self, site: Site, model: State) -> Predictor:
        """Make what scores with a site's tensors."""
        return private_prompts.scoring(self.recipe, site, model, self.maps.rollout)

    def model(self, site: Site, state: State, broadcast: Payload) -> State:
        """Return what a site begins a round with: the broadcast's tensors, else its own, else the initial ones."""
        own = begun(self.recipe, site, state, broadcast)
        names = (*self.shared, *STATISTICS)
        received = {name: broadcast.arrays[name] for name in names if name in broadcast.arrays}
        return State({**own.arrays, **received}, own.values)
