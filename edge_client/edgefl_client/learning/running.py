"""`edgefl train`: one round of learning alone, from the owner's table of labelled pictures to personal values.

    read    prepare the pictures, hold 15 % of each class back (at least 20)
    go on   from the point of this very round, or from the values of the round before, or from the bundle's
    learn   a round of the bundle's method (`rounds`); every now and then, and before any stop, a point is kept
    judge   bundle against personal values on the pictures held back; only what passes is kept for scoring

Rounds of a live federation are counted and kept apart (`live`): what an owner tries here changes none of them.
Guarantees: killed at any moment and started again, the round ends with the same values, bit for bit (same number of
threads); the pictures never leave the process; a limit stops it between two steps and loses none.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from edgefl_client.home import Home
from edgefl_client.learning.checkpoint import Standing, damaged, load_standing, only_one, same_form, save_standing
from edgefl_client.learning.errors import Paused
from edgefl_client.learning.options import TrainOptions
from edgefl_client.learning.owned import Table, read_dealt, remember_table
from edgefl_client.learning.personal import PersonalState, load_personal, save_personal
from edgefl_client.learning.rounds import ALONE, Arrays, Circumstances, PointFile, RoundLearner, learner_for
from edgefl_client.learning.rows import Dealt
from edgefl_protocol.bundle import Bundle
from edgefl_protocol.payload import Payload, digest

STANDING, POINT = "alone.payload", "alone-round.payload"
LIVE_FILES = ("live.payload", "live-round.payload", "live-next.payload")


@dataclass
class Told:
    """What a learner tells while it works, kept for the report.

    Attributes:
        options: whose `report` hears it too.
        progress: the last epoch and step.
        judged: what the gate found; None before it.
    """

    options: TrainOptions
    progress: dict[str, float | int | str] = field(default_factory=dict)
    judged: PersonalState | None = None

    def report(self, facts: Mapping[str, float | int | str]) -> None:
        """Hear what happens."""
        if "step" in facts:
            self.progress = dict(facts)
        self.options.report(facts)

    def hear(self, found: PersonalState) -> None:
        """Hear what the gate found."""
        self.judged = found


def run_train(
    home: Home, bundle: Bundle, table: Path, options: TrainOptions, *, site: str = ALONE, others: Payload | None = None
) -> dict[str, Any]:
    """Learn one round, or go on with one that was stopped.

    Args:
        home: the device's home.
        bundle: the verified bundle to learn with.
        table: CSV with the columns image and label, and lesion_id where known; remembered for `edgefl sync`.
        options: what the caller changes.
        site: this member's name, which enters the draws.
        others: the newest broadcast of the others' maps; None for none.

    Returns:
        What `edgefl train --json` prints.

    Raises:
        LearningError: too few pictures or too little memory, no training step, another process, or a loss that is
            not finite.
        EdgeflError: a picture or a file cannot be used.
    """
    options.plan(bundle)  # before the work of reading
    named, told = Table(file=table.absolute(), formats=tuple(options.formats), batch=options.batch), Told(options)
    with only_one(home):
        dealt = read_dealt(home, bundle, named, options.limits, told.report, afresh=options.restart)
        remember_table(home, named)
        if options.restart:
            for name in (STANDING, POINT, *LIVE_FILES):
                (home.learning / name).unlink(missing_ok=True)
        around = Circumstances(
            points=PointFile(home.learning / POINT), site=site, options=options, maps_per_class=0, judged=told.hear
        )
        learner = learner_for(bundle, dealt, around)
        round_, state = _standing(home, bundle, learner)
        broadcast = Payload(
            {} if others is None else others.arrays, {"phase": "train", "round": round_ + 1, "rounds": 1}
        )
        after, reason = None, None
        try:
            after, _ = learner.local_round(state, broadcast, told.report)
        except Paused as stop:
            reason = stop.reason
        else:
            keep_judged(home, told)
            save_standing(
                home.learning / STANDING,
                Standing(bundle_sha256=bundle.sha256, federation="", round=round_ + 1, state=after),
            )
        return {"round": round_ + 1, **round_facts(home, bundle, dealt, broadcast, told, after, reason)}


def keep_judged(home: Home, told: Told) -> None:
    """Keep what passed its gate, for scoring.

    Raises:
        StorageError: the disk is full; the values before are still in use.
    """
    if told.judged is not None and told.judged.verdict.passed:
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
    """What `--json` tells of a round.

    Args:
        home: the device's home.
        bundle: that was learned with.
        dealt: the pictures.
        broadcast: what came from the others.
        told: what the learner told.
        after: the new state; None where a limit stopped it.
        reason: that limit.
    """
    epochs, judged, kept = told.options.plan(bundle).epochs, told.judged, load_personal(home, bundle)
    labels = bundle.labels
    unnamed = [] if kept is None else zip(labels.classes, labels.seen, kept.seen, strict=True)
    shared = {
        name.rpartition(".")[2] for name, maps in broadcast.arrays.items() if name.startswith("maps.") and len(maps)
    }
    return {
        "state": "paused" if reason else "done",
        "reason": reason,
        "epoch": int(told.progress.get("epoch", 1)) - 1 if reason else epochs,
        "epochs": epochs,
        "step": int(told.progress.get("step", 0)) if reason else 0,
        "learned_from": len(dealt.learn),
        "held_back": len(dealt.held),
        "classes_with_others_maps": len(shared),
        "peak_memory_mib": round(told.options.limits.memory(), 1),
        "weights_sha256": None if judged is None else digest(judged.weights),
        "state_sha256": None if after is None else digest(dict(after)),
        "gate": None if judged is None else judged.verdict.to_json(),
        "in_use": {
            "kind": "bundle" if kept is None else "personal",
            "round": None if kept is None else kept.round,
            "never_named": [name for name, theirs, ours in unnamed if theirs and not ours],
        },
    }


def _standing(home: Home, bundle: Bundle, learner: RoundLearner) -> tuple[int, Arrays]:
    """The last round of its own and the state after it; 0 and the start where there was none."""
    found, start = load_standing(home.learning / STANDING, bundle.sha256), learner.start()
    if found is None:
        return 0, start
    if not same_form(found.state, start):
        raise damaged(home.learning / STANDING)
    return found.round, found.state
