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
from edgefl_protocol.rules.maps import is_maps, others_maps, replaced, site_in_buffer
from edgefl_trainer.contract import Arrays, Declaration, Phase, Predictor, Site, State, Task
from edgefl_trainer.learning.averaging import site_weights, weighted_mean
from edgefl_trainer.learning.evidential import EvidentialRecipe
from edgefl_trainer.learning.learners.answers import AnswerRecipe
from edgefl_trainer.learning.learners.learner import Recipe, SiteLearner, declares_both, learner_of
from edgefl_trainer.learning.loss_terms import Term
from edgefl_trainer.learning.maps.reach import measured_reach
from edgefl_trainer.learning.maps.sharing import MapSharing, chosen_maps, distillation
from edgefl_trainer.learning.named_arrays import as_arrays


@dataclass(frozen=True, kw_only=True)
class FedAvg:
    """One model for all sites: the mean of what each learned.

    For sites that want one common model and may send weights.
    """

    family: ClassVar[str] = "evidential prompts"
    paper: ClassVar[str] = "arXiv 1602.05629"
    needs_labels: ClassVar[bool] = True
    declares: ClassVar[Declaration] = replace(
        declares_both(lambda: FedAvg(recipe=AnswerRecipe())),
        site_of=site_in_buffer,
        measured_before=lambda method, sites: measured_reach(method.recipe, method.maps, sites) if method.kd else None,
    )

    recipe: Recipe = field(default_factory=EvidentialRecipe)
    maps: MapSharing = field(default_factory=MapSharing)
    # prompts that are averaged with the head: b, both, or one set (prompts=g) (arXiv 2411.10071)
    share: Literal["b", "bt", "g"] = "bt"
    kd: bool = False  # whether sites also share maps and learn from them, as FedEvPrompt does (arXiv 2411.10071)
    # what a site counts by in the mean: its training images, or all sites alike
    weighting: Literal["samples", "uniform"] = "samples"

    def __post_init__(self) -> None:
        object.__setattr__(self, "recipe", self.recipe.averaged_as(self.share, maps=self.kd))

    @property
    def learner(self) -> SiteLearner:
        """What learns at a site."""
        return learner_of(self.recipe, self.maps.made)

    @property
    def travels(self) -> tuple[str, ...]:
        """See `Method`: what is averaged, moments once where it includes the head, and with `kd` maps."""
        prompts = ("prompts",) if self.recipe.prompt_names else ()
        head = () if self.share == "b" else ("weights", *(self.learner.tells_first or ()))
        return (*prompts, *head, *(("maps",) if self.kd else ()))

    def shared(self, task: Task) -> tuple[str, ...]:
        """Return the names of the tensors that are averaged; the others stay at their site."""
        return ("prompts.b",) if self.share == "b" else self.learner.trained(task)

    def phases(self, rounds: int) -> Sequence[Phase]:
        """Plan one warm exchange where the head is averaged and sites have something to settle, then R rounds."""
        settles = self.share != "b" and self.learner.tells_first is not None
        warm = [Phase("warm", 0)] if settles else []
        return [*warm, *(Phase("train", r) for r in range(1, rounds + 1))]

    def start(self, task: Task, sites: Sequence[str]) -> State:
        """Begin with the initial model, or the part of it that is averaged."""
        if self.kd:
            self.maps.check_fits(task.backbone)
        initial = self.learner.initial(task)
        shared = as_arrays({name: initial[name] for name in self.shared(task)})
        return State(shared, {**self.learner.first_values(task), "classes": len(task.classes)})

    def broadcast(self, state: State, phase: Phase, sites: Sequence[str]) -> Mapping[str, Payload]:
        """Send the averaged tensors, and with `kd` the others' maps; nothing in the warm phase."""
        if phase.kind == "warm":
            return dict.fromkeys(sites, Payload({}, {}))
        averaged = {name: value for name, value in state.arrays.items() if not is_maps(name)}
        maps = others_maps(state.arrays, sites)
        readout = {name: state.values[name] for name in ("readout",) if name in state.values}
        return {name: Payload({**averaged, **maps[name]}, readout) for name in sites}

    def local_round(self, site: Site, state: State, broadcast: Payload) -> tuple[State, Payload]:
        """Tell what is to be settled in the warm phase, then learn E epochs from the averaged tensors."""
        if broadcast.scalars["phase"] == "warm":
            return State(), self.learner.first_reply(site)
        new = self.learned(site, state, broadcast)
        return new, self.reply(site, new, broadcast)

    def learned(
        self, site: Site, state: State, broadcast: Payload, terms: Sequence[Term] = (), epochs: int | None = None
    ) -> State:
        """Learn E epochs, or as many as named, from the averaged tensors, with a method's own `terms` in the loss."""
        before = self.model(site, state, broadcast)
        terms = [*terms, *(distillation(self.maps, site, broadcast.arrays) if self.kd else ())]
        return self.learner.learned(site, before, broadcast, keep_optimizer=False, terms=terms, epochs=epochs)

    def reply(self, site: Site, new: State, broadcast: Payload) -> Payload:
        """Make the reply of a site that has learned: the shared tensors, and with `kd` its chosen maps."""
        sent: Arrays = {name: new.arrays[name] for name in self.shared(site.task)}
        if self.kd:
            maps = chosen_maps(self.maps, site, self.scoring(site, new), int(broadcast.scalars["round"]))
            sent = {**sent, **maps}
        return Payload(sent, {"n_train": len(site.train)})

    def aggregate(self, state: State, phase: Phase, replies: Mapping[str, Payload]) -> State:
        """Settle what sites told in the warm phase; then average the sites' tensors."""
        if phase.kind == "warm":
            found = self.learner.settle(state.values, replies)
            return State({**state.arrays, **found.arrays}, {**state.values, **found.values})
        if phase.kind == "final":
            return state
        weights = site_weights(self.weighting, replies)
        shared = [name for name in state.arrays if not is_maps(name) and name not in self.learner.settled]
        kept = state.arrays
        if self.kd:
            kept = replaced(kept, {name: reply.arrays for name, reply in replies.items()}, int(state.values["classes"]))
        return State({**kept, **weighted_mean(replies, weights, shared)}, state.values)

    def predictor(self, site: Site, state: State, broadcast: Payload) -> Predictor | None:
        """Return the averaged model, with what stayed at the site and the site's own prior."""
        return self.scoring(site, self.model(site, state, broadcast))

    def scoring(self, site: Site, model: State) -> Predictor:
        """Make what scores with a site's tensors."""
        return self.learner.predictor(site, model)

    def model(self, site: Site, state: State, broadcast: Payload) -> State:
        """Return what a site begins a round with: the broadcast's tensors, else its own, else the initial ones."""
        own = self.learner.begun(site, state, broadcast)
        names = (*self.shared(site.task), *self.learner.settled)
        received = {name: broadcast.arrays[name] for name in names if name in broadcast.arrays}
        return State({**own.arrays, **received}, own.values)
