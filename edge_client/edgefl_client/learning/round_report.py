"""What a round of learning told on its way, and the report that `--json` makes of it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from numpy.typing import NDArray

from edgefl_client.home import Home
from edgefl_client.learning.options import TrainOptions
from edgefl_client.learning.own_pictures import Dealt
from edgefl_client.scoring.personal import PersonalState, kept_personal, load_personal, save_personal
from edgefl_client.scoring.untaught import untaught_facts
from edgefl_protocol.bundle import Bundle
from edgefl_protocol.bundle.figures import taught_elsewhere
from edgefl_protocol.payload import Payload, digest
from edgefl_protocol.rules.maps import maps_in_broadcast

# What a round tells beside its number, `state` and `reason`.
_FACTS: Final = (
    "epoch", "epochs", "step", "learned_from", "left_out", "held_back", "classes_with_others_maps", "peak_memory_mib",
    "weights_sha256", "state_sha256", "gate", "in_use",
)  # fmt: skip


@dataclass
class Told:
    """Keep what a learner tells while it works, for the report."""

    options: TrainOptions  # whose `report` hears it too
    progress: dict[str, float | int | str] = field(default_factory=dict)  # the last epoch and step
    judged: PersonalState | None = None  # what the gate found; None before it

    def report(self, facts: Mapping[str, float | int | str]) -> None:
        """Hear what happens."""
        if "step" in facts:
            self.progress = dict(facts)
        self.options.report(facts)

    def hear(self, found: PersonalState) -> None:
        """Hear what the gate found."""
        self.judged = found


def keep_judged(home: Home, told: Told) -> None:
    """Keep what passed its gate, for scoring; say so where another bundle's values end with that."""
    if told.judged is None or not told.judged.passed:
        return
    before = kept_personal(home)
    if before is not None and before.passed and before.bundle_sha256 != told.judged.bundle_sha256:
        whose = before.bundle_sha256[:12]
        told.report({"warning": f"the new personal values replace those learned with the bundle {whose}"})
    save_personal(home, told.judged)


def round_facts(
    home: Home,
    bundle: Bundle,
    dealt: Dealt,
    broadcast: Payload,
    told: Told,
    after: Mapping[str, NDArray[Any]] | None,
    reason: str | None,
) -> dict[str, Any]:
    """Make what `--json` tells of a round.

    Args:
        after: the new state; None where a limit stopped it.
        reason: that limit, as a clause of a sentence.
    """
    epochs, judged, kept = told.options.plan(bundle).epochs, told.judged, load_personal(home, bundle)
    shared = {label for (_, label), maps in maps_in_broadcast(broadcast.arrays).items() if len(maps)}
    return {
        "state": "paused" if reason else "done",
        "reason": reason,
        "epoch": int(told.progress.get("epoch", 1)) - 1 if reason else epochs,
        "epochs": epochs,
        "step": int(told.progress.get("step", 0)) if reason else 0,
        "learned_from": len(dealt.learn),
        "left_out": dealt.left_out,
        "held_back": len(dealt.held),
        "classes_with_others_maps": len(shared),
        "peak_memory_mib": round(told.options.limits.memory(), 1),
        "weights_sha256": None if judged is None else digest(judged.weights),
        "state_sha256": None if after is None else digest(dict(after)),
        "gate": None if judged is None or judged.verdict is None else judged.verdict.to_json(),
        "in_use": {
            "kind": "bundle" if kept is None else "personal",
            "round": None if kept is None else kept.round,
            **untaught_facts(bundle.labels, None if kept is None else kept.seen, taught_elsewhere(bundle.card)),
        },
    }


def not_begun(reason: str) -> dict[str, Any]:
    """Make what `--json` tells where a limit forbade to begin: the keys of a round, null but for state and reason."""
    return {"state": "paused", "reason": reason, "round": None, **dict.fromkeys(_FACTS)}
