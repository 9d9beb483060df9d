"""Rounds of a live federation on this device: learned once, counted when the coordinator has the reply.

    live.payload         the site after its last reply that was accepted: what the next round begins with
    live-round.payload   how far the round has come that is being learned
    live-next.payload    the site after a round whose reply waits for its answer
    live-over.json       the round whose reply its owner dropped

As in a run of the trainer, a site whose reply did not count in a round stays as it was before it; values that passed
their gate are scored with all the same. Guarantees: killed at any moment, the same round is never learned twice from
its beginning, and what was learned is counted exactly if its reply was accepted: the file is renamed before the outbox
forgets the reply. Source: docs/design.md, sections 4, 9 and 10; docs/decisions/0028.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from numpy.typing import NDArray

from edgefl_client.home import Home, read_json, write_json
from edgefl_client.learning.checkpoint import Standing, begun_with, load_standing, only_one, save_standing
from edgefl_client.learning.errors import LearningError, Paused
from edgefl_client.learning.learner_table import learner_for
from edgefl_client.learning.options import TrainOptions
from edgefl_client.learning.own_pictures import Table, read_dealt
from edgefl_client.learning.round_learner import Circumstances, PointFile
from edgefl_client.learning.round_plan import agreed
from edgefl_client.learning.round_report import Told, keep_judged, round_facts
from edgefl_client.learning.session import plan_of
from edgefl_client.scoring.personal import load_personal
from edgefl_protocol.bundle import Bundle
from edgefl_protocol.durable import flush_to_disk
from edgefl_protocol.errors import StorageError
from edgefl_protocol.messages.requests import TaskReply
from edgefl_protocol.payload import Payload
from edgefl_protocol.rules.maps import MAX_MAPS, numbered_as_model, numbered_as_task, sent_maps_in

_STANDING, _POINT, _NEXT, _OVER = "live.payload", "live-round.payload", "live-next.payload", "live-over.json"


@dataclass(frozen=True, kw_only=True)
class LiveRound:
    """The open round: what the coordinator told and sent."""

    federation: str  # name
    site: str  # this member's name
    task: TaskReply  # as signed
    broadcast: Payload  # as it came
    # asked with what a reply would hold and its bytes, before the work; raises where that may not leave
    permitted: Callable[[Sequence[str], int], None]


def learn_live(
    home: Home, bundle: Bundle, table: Table, options: TrainOptions, live: LiveRound
) -> tuple[dict[str, Any], Payload | None]:
    """Learn the open round, or go on with it where it was stopped.

    Returns:
        What `--json` tells, and the reply; None where a limit stopped it.

    Raises:
        Paused: the battery, or a word from outside, forbids to begin.
        LearningError: it cannot be learned, or another process learns here (`busy`).
        MapsError: the others' maps are of other classes, or those to be sent of a kind that is not known here.
        EdgeflError: a picture or a file cannot be used, or the owner does not allow what would leave.
    """
    bundle, options = _as_agreed(bundle, table, options, live)  # before the work of reading pictures
    task = live.task
    sent_maps = sent_maps_in(task.settings)
    live.permitted(task.travels, 0)
    options.limits.check_begin()
    told = Told(options)
    started = options.limits.clock()
    with only_one(home):
        dealt = read_dealt(home, bundle, table, options.limits, told.report)
        around = Circumstances(
            points=PointFile(home.learning / _POINT), site=live.site, options=options,
            maps_per_class=min(MAX_MAPS, task.maps_per_class), sent_maps=sent_maps, judged=told.hear, started=started,
            in_use=load_personal(home, bundle),
        )  # fmt: skip
        learner = learner_for(bundle, dealt, around)
        _check_travels(task.travels, learner.travels)
        live.permitted(learner.travels, learner.most_reply_bytes(live.broadcast))
        before = begun_with(home.learning / _STANDING, bundle.sha256, live.federation, learner.start())
        theirs, ours = task.classes, bundle.labels.classes
        by_class = "maps" in learner.travels  # what other methods send keeps its order
        if not by_class and plan_of(bundle).needs_labels and theirs != ours:
            raise LearningError(
                f"the model has the classes {', '.join(ours)}, but the federation has {', '.join(theirs)}, in this "
                "order: the operator has to publish a bundle with the federation's classes",
                "other_classes",
            )
        broadcast = live.broadcast
        if by_class:
            broadcast = Payload(numbered_as_model(broadcast.arrays, theirs, ours), broadcast.scalars)
        try:
            after, reply = learner.local_round(before.state, broadcast, told.report)
        except Paused as stop:
            facts = round_facts(home, bundle, dealt, broadcast, told, None, stop.reason)
            return {"round": task.round, **facts}, None
        keep_judged(home, told)
        next_ = Standing(bundle_sha256=bundle.sha256, federation=live.federation, round=task.round, state=after)
        save_standing(home.learning / _NEXT, next_)
        facts = round_facts(home, bundle, dealt, broadcast, told, after, None)
        if by_class:
            reply = Payload(numbered_as_task(reply.arrays, theirs, ours), reply.scalars)
        return {"round": task.round, **facts}, reply


def _as_agreed(bundle: Bundle, table: Table, options: TrainOptions, live: LiveRound) -> tuple[Bundle, TrainOptions]:
    """Return bundle and options under which the federation's round is learned."""
    kind, task = plan_of(bundle).kind, live.task
    if kind != task.method:
        raise LearningError(
            f"the federation learns {task.method}, but this bundle learns {kind}: the operator has to publish a "
            f"bundle that learns {task.method}",
            "other_method",
        )
    options = replace(
        options, formats=table.formats, batch=table.batch, seed=task.seed, epochs=task.epochs or options.epochs
    )
    # An older coordinator does not describe its task: what `settings` lacks is then the bundle's, else the default.
    bundle = agreed(bundle, task.settings, task.backbone, complete=task.train_rounds > 0)
    options.plan(bundle)
    return bundle, options


def _check_travels(told: Sequence[str], ours: Sequence[str]) -> None:
    if told and set(told) != set(ours):
        raise LearningError(
            f"the federation says that {', '.join(sorted(told))} leave a site, but the method on this device sends "
            f"{', '.join(sorted(ours))}: tell the operator",
            "other_travels",
        )


def count_reply(home: Home, federation: str, number: int) -> None:
    """Count the reply of a round: the site is now as after it. Doing it twice changes nothing."""
    if not _waits(home, federation, number):
        return
    try:
        (home.learning / _NEXT).replace(home.learning / _STANDING)
        flush_to_disk(home.learning)
    except OSError as error:
        raise StorageError(f"cannot keep what was learned in {home.learning}: {error.strerror}", "storage") from error


def drop_reply(home: Home, federation: str, number: int, refused: str | None = None) -> None:
    """Drop the reply of a round: the site stays as before it. Doing it twice changes nothing.

    Args:
        refused: why it never leaves, so that the round is not learned again; None where the round is over.
    """
    if refused is not None:
        record = {"format": 1, "federation": federation, "round": number, "message": refused}
        write_json(home.prepare(home.learning) / _OVER, record)
    if _waits(home, federation, number):
        (home.learning / _NEXT).unlink(missing_ok=True)


def dropped_reply(home: Home, federation: str, number: int) -> str | None:
    """Return why the reply of a round never leaves; None where it may."""
    record = read_json(home.learning / _OVER, "which reply was dropped") or {}
    if (record.get("federation"), record.get("round")) != (federation, number):
        return None
    return str(record.get("message"))


def counted_round(home: Home, federation: str) -> int:
    """Return the last round whose reply was accepted; 0 for none."""
    found = load_standing(home.learning / _STANDING)
    return found.round if found is not None and found.federation == federation else 0


def counted_state(home: Home, bundle_sha256: str, federation: str) -> Mapping[str, NDArray[Any]]:
    """Read what this device keeps of the last round that counted; empty before the first, and of another bundle."""
    return begun_with(home.learning / _STANDING, bundle_sha256, federation, {}).state


def forget_live(home: Home) -> None:
    """Forget what was learned in federations; the next round begins with the bundle's values."""
    for name in (_STANDING, _POINT, _NEXT):
        (home.learning / name).unlink(missing_ok=True)


def forget_federation(home: Home) -> None:
    """Forget all that belongs to rounds of a membership that is over: a new one may be of the same name."""
    forget_live(home)
    (home.learning / _OVER).unlink(missing_ok=True)


def _waits(home: Home, federation: str, number: int) -> bool:
    found = load_standing(home.learning / _NEXT)
    return found is not None and (found.federation, found.round) == (federation, number)
