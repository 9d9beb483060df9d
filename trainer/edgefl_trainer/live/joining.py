"""From an invite to the last hand-out: enrol, wait for approval, learn every exchange, write the results.

Guarantees: nothing is decided by an answer that anybody could forge, so a coordinator that is gone is waited for, with
doubling waits and one line; what a signed answer refuses ends the command, but for a reply, which is offered again; so
does a coordinator that keeps saying it does not know the site's keys. The same command, given again at any time
and after any kill, goes on where it stopped. Source: docs/design.md 10; docs/security.md, order of checks and 5.
"""

import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from edgefl_exchange.delivery import Delivery
from edgefl_exchange.errors import NotEnrolled, SignedRefusal, Unavailable, UnknownKeys
from edgefl_exchange.membership import Membership, load_membership
from edgefl_protocol import Payload
from edgefl_protocol.errors import EdgeflError
from edgefl_protocol.messages.requests import TaskReply
from edgefl_protocol.rules.maps import travel_alone
from edgefl_protocol.sentences import counted
from edgefl_trainer.contract import Phase, Scalar
from edgefl_trainer.engine.display import RunPace
from edgefl_trainer.engine.folder import (
    MEMBER,
    begun_settings,
    check_claim,
    check_free,
    check_inputs,
    finished_summary,
    working_in,
)
from edgefl_trainer.engine.handout import final_phase
from edgefl_trainer.engine.hyper_parameters import hyper_values
from edgefl_trainer.engine.sites import repeatable
from edgefl_trainer.environment import write_environment
from edgefl_trainer.errors import FederationRefused, TrainingError
from edgefl_trainer.evaluate.metrics import JUDGED_ROWS
from edgefl_trainer.live.exchanges import Exchanges
from edgefl_trainer.live.final_results import write_results
from edgefl_trainer.live.site_membership import Reply, SiteMembership, refusals
from edgefl_trainer.live.site_work import SiteOptions, SiteWork, check_site, prepare
from edgefl_trainer.method_halves import stamped

FIRST_WAIT_S, LONGEST_WAIT_S, LONGEST_GONE_S = 1.0, 15.0, 300.0
AGREED = ("method", "classes", "settings", "train_rounds", "epochs", "seed", "backbone")
COMING = frozenset({"no_round", "round_closed", "not_found"})  # a broadcast that was here, or will be
Say = Callable[[str], None]
Found = TypeVar("Found")


@dataclass(frozen=True, kw_only=True)
class Join:
    """One call of `edgefl-train join`."""

    folder: Path  # the run directory, which holds the membership too
    options: SiteOptions  # what the site decides
    invite: str | None = None  # the operator's, or None to go on with the membership in the folder
    ca: Path | None = None  # PEM file of the coordinator's certificate or authority, or None
    proxy: str | None = None  # to use from now on, "" for none; None leaves it as it is
    passphrase: bytes | None = None  # opens encrypted keys, or None
    once: bool = False  # do what is due and leave
    say: Say  # tells a person what happens
    sleep: Callable[[float], None] = time.sleep  # waits, in seconds; a test passes its own
    rng: random.Random = field(default_factory=random.Random)


def join(call: Join) -> dict[str, Any]:
    """Take part in a federation until it is over, or once.

    Gives federation, name, role, fingerprint and state of the membership; the round; what was learned and sent in this
    call; and the contents of `summary.json` once the federation is over, else None.

    Raises:
        FederationRefused: what is trusted or asked for is refused.
        Unavailable: with `once`, nothing answered; the same command goes on.
        EdgeflError: one sentence about what is wrong and what to do.
    """
    check_free(call.folder, (MEMBER,), "no membership")
    seat = SiteMembership(call.folder, call.passphrase)
    if not seat.joined:
        check_site(call.options)
    membership = _patiently(call, lambda: seat.enrolled(call.invite, call.ca, call.proxy))
    call.say(f"{membership.name} in the federation {membership.federation}, fingerprint {membership.fingerprint}")
    finished = finished_summary(call.folder)
    if finished is not None and not _goes_on(call, seat, finished):
        return _facts(membership, None, finished)
    told = _approved(call, seat, membership)
    if told is None:
        return _facts(membership, None, None)
    membership = load_membership(seat.home)
    work = prepare(told, call.options)
    rounds = _rounds_text(work.method.phases(work.task.rounds))
    call.say(
        f"{told.method}, rounds: {rounds}, epochs of each: {told.epochs}, images of {work.site.name}: "
        f"{len(work.site.train)} labelled, {len(work.site.unlabelled)} in all; what leaves: "
        f"{', '.join(work.method.travels) or 'nothing'}"
    )
    if told.state == "done":
        call.say(f"the federation {membership.federation} is over: what it ended with is fetched")
    elif finished is not None:
        call.say(
            f"the federation {membership.federation} goes on: the results in {call.folder} stay until the coordinator "
            "accepts another reply of this site, and are made anew at the end"
        )
    check_claim(call.folder, work.settings, resume=True)
    with working_in(call.folder, work.settings, resume=True), repeatable(work.site.device):
        begun = work.federation.partition_sha256, work.backbone.spec.sha256, hyper_values(work.method)
        check_inputs(call.folder, *begun)
        began = begun_settings(call.folder) or work.settings
        write_environment(call.folder, work.settings.seed, work.site.device, began_on=began.device)
        return _take_part(call, seat, membership, work, told)


def _goes_on(call: Join, seat: SiteMembership, finished: Mapping[str, Any]) -> bool:
    """Ask once whether a federation that was over goes on, for its coordinator may have been restored since."""
    try:
        told = seat.task()
    except EdgeflError as error:
        call.say(f"this run is finished; nobody could be asked whether its federation goes on: {error}")
        return False
    return told.state != "done" or (told.state_sha256 or None) != finished["state_sha256"]


def _rounds_text(phases: Sequence[Phase]) -> str:
    """Say how many rounds train, and how many the coordinator counts where it counts more."""
    kinds = [phase.kind for phase in phases]
    trained, others = kinds.count("train"), [kind for kind in ("warm", "final") if kind in kinds]
    return f"{trained} of training, {len(kinds)} with {' and '.join(others)}" if others else str(trained)


def _approved(call: Join, seat: SiteMembership, membership: Membership) -> TaskReply | None:
    """The task, once the operator has approved; None where `once` does not wait for that."""
    wait = _Wait(call, LONGEST_WAIT_S)
    while True:
        try:
            return _patiently(call, seat.task)
        except NotEnrolled:
            if call.once:
                return None
            wait.because(
                f"waiting for the operator: edgefl-coordinator approve {membership.name} "
                f"--fingerprint {membership.fingerprint}"
            )


def _take_part(
    call: Join, seat: SiteMembership, membership: Membership, work: SiteWork, begun: TaskReply
) -> dict[str, Any]:
    """Every exchange that is left."""
    images = {work.site.name: len(work.site.train if work.method.needs_labels else work.site.unlabelled)}
    exchanges = Exchanges(work, call.folder, RunPace(work.method.phases(work.task.rounds), images))
    wait = _Wait(call, LONGEST_WAIT_S)
    # Round → why it was stuck when its broadcast was refused: once that is mended, it is asked for anew.
    skipped: dict[int, str] = {}
    refused: dict[int, int] = {}  # round → its deadline when its reply was refused, 0 where it was not
    sent: list[Delivery] = []
    reply: Reply | None = None
    while True:
        learned = reply
        told, now_sent = _patiently(call, lambda given=learned: seat.meet(given, exchanges.settled, refused))  # type: ignore[misc]
        reply = None
        _check_same(begun, told)
        _tell_sent(call, now_sent)
        refused.update({one.round: told.deadline_ms if one.outcome == "refused" else 0 for one in now_sent})
        if now_sent:  # the sentence came before the reply was sent, and counts without it
            told = replace(told, stuck="")
        if told.refusal:  # of the round before, whatever this site learns now
            wait.tell(told.stuck)
        sent += now_sent
        if told.state == "done":
            try:
                summary = _end(call, seat, exchanges, told, membership.federation)
            except Unavailable as problem:  # only with `once`: what is handed out is being prepared
                if problem.code not in COMING:
                    raise
                call.say(f"{problem}; the same command fetches it")
                return _facts(membership, told, None, sent)
            return _facts(membership, told, summary, sent)
        if skipped.get(told.round) != told.stuck and not refused.get(told.round) and _due(told, now_sent):
            try:
                reply = _learn(call, seat, exchanges, told)
                wait.over()
                continue
            except SignedRefusal as refusal:
                if refusal.code not in COMING:
                    if told.round not in skipped:
                        call.say(f"round {told.round} goes on without this site: {refusal}")
                    skipped[told.round] = told.stuck
        seat.rotate()
        if call.once:
            if told.stuck:
                wait.tell(told.stuck)
            return _facts(membership, told, None, sent)
        where = f"round {told.round} of {told.rounds} is {told.state}" if told.round else "no round is open yet"
        wait.because(told.stuck or f"{where}: waiting for the others")


def _due(told: TaskReply, sent: Sequence[Delivery]) -> bool:
    """Whether the open round waits for this site to learn."""
    offered = any(one.round == told.round for one in sent)  # accepted or too late
    return told.state == "open" and not (told.replied or offered)


def _learn(call: Join, seat: SiteMembership, exchanges: Exchanges, told: TaskReply) -> Reply:
    """Learn the open round, or give what was learned before a kill.

    `SignedRefusal` where its broadcast is not to be had; a `TrainingError` where learning failed, or the reply
    is too large.
    """
    number = told.round
    broadcast = _patiently(call, lambda: _broadcast(seat, number))
    _tell_judged(call.say, f"before exchange {number}", exchanges.judged(broadcast))
    content = exchanges.learned(number, broadcast).reply.to_bytes()
    if len(content) > told.max_reply_bytes:
        raise TrainingError(
            f"the reply of round {number} has {len(content):,} bytes, but the federation takes at most "
            f"{told.max_reply_bytes:,}: ask its operator for a larger limits.reply_bytes."
        )
    return Reply(number, content)


def _broadcast(seat: SiteMembership, number: int) -> Payload:
    with seat.member() as member:
        return member.broadcast(number)


def _tell_judged(say: Say, when: str, figures: Mapping[str, Scalar]) -> None:
    for name, figure in figures.items():
        if name != JUDGED_ROWS:
            say(
                f"{when}: {name.replace('_', ' ')} {float(figure):.1%} (of {counted(int(figures[JUDGED_ROWS]), 'row')})"
            )


def _tell_sent(call: Join, sent: Sequence[Delivery]) -> None:
    """Say what became of replies; with `once`, a `TrainingError` where one was refused."""
    for one in sent:
        if one.outcome == "refused":
            why = f"the coordinator refused the reply of round {one.round}: {one.message}; "
            if call.once:
                raise TrainingError(f"{why}while the round is open, the same command sends it again.")
            call.say(f"{why}it is sent again once the round's deadline is extended, or when join is started anew")
        else:
            word = "is there" if one.outcome == "accepted" else f"does not count: {one.message}"
            call.say(f"the reply of round {one.round}, {one.bytes:,} bytes, {word}")


def _end(call: Join, seat: SiteMembership, exchanges: Exchanges, told: TaskReply, federation: str) -> dict[str, Any]:
    """Fetch what is handed out at the end and write the results."""
    work = exchanges.work
    last = _patiently(call, lambda: _handed_out(seat, work, told))
    _tell_judged(call.say, "at the end", exchanges.judged(last))
    return write_results(work, exchanges.folder, told, federation, exchanges.state, last)


def _handed_out(seat: SiteMembership, work: SiteWork, told: TaskReply) -> Payload:
    """The last hand-out; where only maps travel a site's model is its own, and it can do without."""
    try:
        return _broadcast(seat, told.rounds + 1)
    except SignedRefusal as refusal:
        if refusal.code in COMING:  # it is being prepared
            raise Unavailable(str(refusal), refusal.code) from refusal
        if refusal.code != "small_cohort" or not travel_alone(work.method.travels):
            raise FederationRefused(str(refusal), refusal.code) from refusal
        return stamped(Payload({}, {}), final_phase(work.task), work.task.rounds)


def _check_same(begun: TaskReply, told: TaskReply) -> None:
    """Refuse, by `FederationRefused`, a coordinator that changes what was agreed on while it runs."""
    for name in AGREED:
        if getattr(begun, name) != getattr(told, name):
            raise FederationRefused(
                f"the coordinator changed {name} of its task after the federation began: ask its operator, and join "
                "again with another --out."
            )


def _patiently(call: Join, ask: Callable[[], Found]) -> Found:
    """Ask until there is an answer; with `once`, once.

    A `FederationRefused` (`shut_out`) where the coordinator goes on answering that it does not know these keys.
    """
    wait, unknown = _Wait(call, LONGEST_GONE_S), UnknownKeys("site", "the same command")
    while True:
        try:
            with refusals():
                return ask()
        except Unavailable as problem:
            if call.once:
                raise
            if why := unknown.heard(problem):
                raise FederationRefused(why, "shut_out") from problem
            wait.because(f"{problem}; trying again", at_least_s=problem.retry_after_s or 0.0)


class _Wait:
    """Waits that double, with jitter, so that sites do not come back together; says why once."""

    def __init__(self, call: Join, longest_s: float) -> None:
        self._call, self._longest_s = call, longest_s
        self.over()

    def over(self) -> None:
        """Begin with short waits again: something happened."""
        self._next_s, self._said = FIRST_WAIT_S, ""

    def tell(self, why: str) -> None:
        """Say it, where it was not said last."""
        if why != self._said:
            self._next_s, self._said = FIRST_WAIT_S, why
            self._call.say(why)

    def because(self, why: str, at_least_s: float = 0.0) -> None:
        """Wait, longer than the last time."""
        self.tell(why)
        self._call.sleep(max(at_least_s, self._next_s * self._call.rng.uniform(0.75, 1.0)))
        self._next_s = min(self._longest_s, 2 * self._next_s)


def _facts(
    membership: Membership, told: TaskReply | None, summary: dict[str, Any] | None, sent: list[Delivery] | None = None
) -> dict[str, Any]:
    return {
        "federation": membership.federation,
        "name": membership.name,
        "role": membership.role,
        "fingerprint": membership.fingerprint,
        "state": membership.state,
        "round": None if told is None else _round_facts(told),
        "sent": [{"round": one.round, "outcome": one.outcome, "bytes": one.bytes} for one in sent or ()],
        "summary": summary,
    }


def _round_facts(told: TaskReply) -> dict[str, Any]:
    return {"number": told.round, "rounds": told.rounds, "state": told.state, "stuck": told.stuck or None}
