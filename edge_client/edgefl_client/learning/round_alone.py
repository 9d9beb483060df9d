"""`edgefl train`: one round of learning alone, from the owner's labelled pictures to personal values.

    read    prepare the pictures, hold 15 % of each class back (at least 20)
    go on   from the point of this very round, or from the values of the round before, or from the bundle's
    learn   a round of the bundle's method (`learner_table`); every now and then, and before any stop, a point is kept
    judge   new values against the bundle's, and against personal ones in use, on the pictures held back; only what
            passes is kept for scoring

Rounds of a live federation are counted and kept apart (`live_round`): what an owner tries here changes none of them.
Guarantees: killed at any moment and started again, the round ends with the same values, bit for bit (same number of
threads); the pictures never leave the process; a limit stops it between two steps and loses none.
"""

from pathlib import Path
from typing import Any

from edgefl_client.home import Home
from edgefl_client.learning.checkpoint import Standing, begun_with, only_one, save_standing
from edgefl_client.learning.errors import LearningError, Paused
from edgefl_client.learning.learner_table import learner_of
from edgefl_client.learning.live_round import forget_live
from edgefl_client.learning.options import TrainOptions
from edgefl_client.learning.own_pictures import Table, read_dealt, remember_table
from edgefl_client.learning.round_learner import ALONE, Circumstances, PointFile
from edgefl_client.learning.round_report import Told, keep_judged, round_facts
from edgefl_client.scoring.personal import kept_personal, load_personal
from edgefl_client.trust.models import current_sha256
from edgefl_protocol.bundle import Bundle
from edgefl_protocol.payload import Payload

STANDING, POINT = "alone.payload", "alone-round.payload"


def run_train(
    home: Home,
    bundle: Bundle,
    pictures: Path,
    options: TrainOptions,
    *,
    site: str = ALONE,
    others: Payload | None = None,
) -> dict[str, Any]:
    """Learn one round, or go on with one that was stopped.

    Args:
        pictures: CSV with the columns image and label, and lesion_id where known, or a folder of pictures; remembered
            for `edgefl sync`.
        site: this member's name, which enters the draws.
        others: the newest broadcast of the others' maps; None for none.

    Raises:
        Paused: the battery, or a word from outside, forbids to begin.
        LearningError: too few pictures or too little memory, no training step, another process, a loss that is not
            finite, a method that learns in a federation only (`alone`), or personal values of another bundle that a
            bundle not in use would replace (`other_bundle`).
    """
    options.plan(bundle)  # before the work of reading
    learn, started = learner_of(bundle), options.limits.clock()
    named, told = Table(file=pictures.absolute(), formats=tuple(options.formats), batch=options.batch), Told(options)
    with only_one(home):
        _refuse_to_replace(home, bundle)
        if learn.only_in_federations is not None:
            remember_table(home, named)
            _restart(home, options)
            raise LearningError(learn.only_in_federations, "alone")
        options.limits.check_begin()
        dealt = read_dealt(home, bundle, named, options.limits, told.report, afresh=options.restart)
        remember_table(home, named)
        _restart(home, options)
        around = Circumstances(
            points=PointFile(home.learning / POINT), site=site, options=options, maps_per_class=0, judged=told.hear,
            started=started,
            in_use=load_personal(home, bundle),
        )  # fmt: skip
        learner = learn(bundle, dealt, around)
        before = begun_with(home.learning / STANDING, bundle.sha256, "", learner.start())
        number = before.round + 1
        broadcast = Payload({} if others is None else others.arrays, {"phase": "train", "round": number, "rounds": 1})
        after, reason = None, None
        try:
            after, _ = learner.local_round(before.state, broadcast, told.report)
        except Paused as stop:
            reason = stop.reason
        else:
            keep_judged(home, told)
            save_standing(
                home.learning / STANDING,
                Standing(bundle_sha256=bundle.sha256, federation="", round=number, state=after),
            )
        return {"round": number, **round_facts(home, bundle, dealt, broadcast, told, after, reason)}


def _refuse_to_replace(home: Home, bundle: Bundle) -> None:
    """Refuse to replace another bundle's personal values, unless `bundle` is the one in use: its owner moved on."""
    kept = kept_personal(home)
    if kept is not None and kept.passed and bundle.sha256 not in (kept.bundle_sha256, current_sha256(home)):
        raise LearningError(
            "this home keeps personal values of another bundle, and a round with this one would replace them; learn in "
            "another home folder with --home, put this bundle into use first with edgefl use, or remove these values "
            "with edgefl advanced personal remove",
            "other_bundle",
        )


def _restart(home: Home, options: TrainOptions) -> None:
    """Forget where learning stands, alone and in federations, where the owner asks for it."""
    if options.restart:
        for name in (STANDING, POINT):
            (home.learning / name).unlink(missing_ok=True)
        forget_live(home)
