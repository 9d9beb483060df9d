"""FedEvPrompt. "FedEvPrompt: federated evidential prompt tuning", arXiv 2411.10071 (ICPR 2024), section 3 and Fig. 1.

    server keeps, for each (site, class), at most M rollout maps                     State of the server
    server sends site c the maps of all others, sites replaced by numbers            broadcast
    site c: E epochs of prompts and head, L_eps + lambda·L_KD (eq. 2, 4, 7)          local_round → private_round
            prompts and head stay; the M maps of lowest vacuity of each class go,    → chosen_maps
            or their mean
    server: the new maps of (c, k) replace the old ones                              aggregate

Differs from the paper: maps travel at patch resolution as float16 and are compared through the Gram matrix of the
upsampling to 224 px (the same distance); a peer with fewer than M maps of a class weighs as one with M; images are
turned and mirrored; AdamW and softplus evidence where the paper is silent. Presets but `paper` send the mean of a
class's maps in their place (`sent_maps`), from which a peer learns the same. docs/methods.md gives each decision.
Devices learn it by `edgefl_client.learning.fedevprompt`, with the graph of `edgefl_export.methods.fedevprompt`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from edgefl_protocol import Payload
from edgefl_protocol.rules.maps import others_maps, replaced, site_in_buffer
from edgefl_trainer.contract import Declaration, Phase, Predictor, Presets, Site, State, Task
from edgefl_trainer.errors import SettingError
from edgefl_trainer.learning import evidential, method_parts
from edgefl_trainer.learning.evidential import EvidentialRecipe, check_fits
from edgefl_trainer.learning.maps.reach import measured_reach
from edgefl_trainer.learning.maps.sharing import MapSharing, chosen_maps, distillation
from edgefl_trainer.learning.private_prompts import begun, private_round, scoring

# What the presets mean: `paper` sends each map, as the paper has it, the others their mean.
PRESETS: Presets = {
    name: {**preset, "hyper": {**preset["hyper"], **({} if name == "paper" else {"sent_maps": "mean"})}}
    for name, preset in evidential.PRESETS.items()
}


@dataclass(frozen=True, kw_only=True)
class FedEvPrompt:
    """Private evidential prompts; the federation shares only where its most certain models look.

    For sites that may send neither weights nor features, and want to know what the model does not know.
    """

    family: ClassVar[str] = "evidential prompts"
    paper: ClassVar[str] = "arXiv 2411.10071"
    travels: ClassVar[tuple[str, ...]] = ("maps",)
    needs_labels: ClassVar[bool] = True
    declares: ClassVar[Declaration] = replace(
        evidential.DECLARES,
        presets=lambda backbone, hyper: PRESETS,
        site_of=site_in_buffer,
        measured_before=lambda method, sites: measured_reach(method.recipe, method.maps, sites),
    )

    recipe: EvidentialRecipe = field(default_factory=EvidentialRecipe)
    maps: MapSharing = field(default_factory=MapSharing)

    def __post_init__(self) -> None:
        if self.recipe.prompts == "none":
            raise SettingError(
                "prompts is 'none'; without prompts no map can be learned: use the method local, or leave prompts out."
            )

    phases = method_parts.train_rounds  # the buffer is empty in the first

    def start(self, task: Task, sites: Sequence[str]) -> State:
        """Begin with an empty buffer."""
        check_fits(self.recipe, task.backbone, len(task.classes))
        self.maps.check_fits(task.backbone)
        return State({}, {"classes": len(task.classes)})

    def broadcast(self, state: State, phase: Phase, sites: Sequence[str]) -> Mapping[str, Payload]:
        """Send each site the others' maps."""
        return {name: Payload(maps, {}) for name, maps in others_maps(state.arrays, sites).items()}

    def local_round(self, site: Site, state: State, broadcast: Payload) -> tuple[State, Payload]:
        """Learn with the others' maps as targets, then offer the own most certain ones."""
        terms = distillation(self.maps, site, broadcast.arrays)
        new = private_round(
            self.recipe, site, state, broadcast, keep_optimizer=True, terms=terms, rollout=self.maps.made
        )
        predictor = scoring(self.recipe, site, new, self.maps.made)
        return new, Payload(chosen_maps(self.maps, site, predictor, int(broadcast.scalars["round"])), {})

    def aggregate(self, state: State, phase: Phase, replies: Mapping[str, Payload]) -> State:
        """Replace all maps of a site by those of its reply."""
        sent = {name: reply.arrays for name, reply in replies.items()}
        return State(replaced(state.arrays, sent, int(state.values["classes"])), state.values)

    def predictor(self, site: Site, state: State, broadcast: Payload) -> Predictor | None:
        """Return the site's own model; the initial one where it took part in no round."""
        own = begun(self.recipe, site, state, broadcast)
        return scoring(self.recipe, site, own, self.maps.made)
