"""Why the federation does not go on: one pure rule over the facts of its round, without store, clock or network.

Guarantees: an open round either closes at a time that is told, if those who may reply do, or is named stuck with its
cause and what mends it. A round is stuck by its members' silence only once a deadline has passed without enough
replies. Members read the same cause, and what members can do. `why` names no member and no file. Source:
docs/decisions/0041.

    kind    meaning
    moves   closes at `until_ms` or before, whoever still replies
    waits   needs something that may still come: replies until `until_ms`, members, the operator's `start`
    stuck   goes on only once somebody does what `mend` says
    over    all rounds are done
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from edgefl_coordinator.rounds.quorum import ALLOW, SettingChanges, fitting, for_so_many, is_risky, set_command
from edgefl_coordinator.rounds.states import Round
from edgefl_coordinator.settings import LEAST_COHORT, RoundSettings
from edgefl_coordinator.store.moments import moment
from edgefl_protocol.sentences import counted

Kind = Literal["moves", "waits", "stuck", "over"]
_INVITE = "edgefl-coordinator invite NAME --role device"
_REVOKE = "edgefl-coordinator revoke NAME"
_SERVE = "edgefl-coordinator serve"
_APPROVE = "edgefl-coordinator approve NAME --fingerprint FINGERPRINT"  # who was invited, and where members read it
_GRANT = "edgefl-coordinator approve {} --fingerprint FINGERPRINT --images {}"
PUBLISH = "edgefl-coordinator publish FILE.edgefl --trust PUB"
_REPLY = (
    "each member that has not replied runs edgefl sync (edgefl contribute, where its model only scores), a server "
    "edgefl-train join"
)
# what a smaller cohort gives up
_APART, _FEWER = ", if a single contribution may be told apart", ", if fewer others are enough"
# cause → what members can do; of any other they can only tell
_MEMBERS_DO = {
    "no_reply": _REPLY,
    "no_bundle": f"tell the operator to publish one; then {_REPLY}",
}
_TELL = "members cannot mend this: tell the operator, who reads in edgefl-coordinator status what to do"


@dataclass(frozen=True, kw_only=True)
class RoundFacts:
    """What the rule looks at; members are the approved ones."""

    current: Round | None = None  # None before the first
    over: bool = False  # all rounds are done
    started: bool = True  # the first round opens as soon as it can
    members: int  # approved
    pending: tuple[str, ...] = ()  # names of those that enrolled and are not approved
    invited: int = 0  # invites that may still be used
    able: int = 0  # have not replied, and may
    withheld: tuple[int, ...] = ()  # others in the broadcast of each member that has not replied and may not have it
    newcomer: int = 0  # others in the broadcast of a member that joins now, at least
    refused: int = 0  # whose reply of this round was refused: they may not send another
    grants: tuple[tuple[str, int], ...] = ()  # of those the name, and the images whose grant would let the reply count
    beside: int = 0  # who sent a contribution beside the average, which counts for no quorum
    opened_ms: int = 0  # Unix milliseconds; when it opened again, where its replies could not be aggregated
    losses_ms: tuple[int, ...] = ()  # when since then a reply fell away: a member shut out, or a reply refused
    raised_ms: int = 0  # when since then the least number of replies or others changed
    overdue_ms: int | None = None  # the first deadline of the round that passed without enough replies
    unpublished: str = ""  # line/task of the model that devices wait for, where it is overdue
    failing_ms: int | None = None  # since when the round's job fails
    served: bool = True  # a process runs the rounds
    stopped_ms: int | None = None  # where none does: when the last one stopped
    restored_ms: int | None = None  # when the folder was restored, where none has run since
    sign_ms: int | None = None  # when one that was killed last did something: it may have run much longer
    full: str = ""  # the folder of the store, where its disk can keep no more
    disowned_ms: int | None = None  # since when the published root set lists another signing key than the one in use


@dataclass(frozen=True, kw_only=True)
class FederationStanding:
    """How the federation stands."""

    kind: Kind
    cause: str = ""  # a word for programs; "" where nothing is missing
    why: str = ""  # a sentence without its full stop
    mend: str = ""  # what to do, with the command
    commands: tuple[str, ...] = ()  # the commands in it, in the order to be run
    since_ms: int | None = None
    until_ms: int | None = None


def standing(facts: RoundFacts, rules: RoundSettings) -> FederationStanding:
    """Say whether the federation goes on, until when it waits, or why it is stuck."""
    if facts.full and not facts.over:
        return _full(facts)  # first: on a full disk no command that mends something else can be carried out
    if facts.disowned_ms is not None:
        why = (
            "the published root set lists the next signing key, which is not in use yet, so members refuse this server"
        )
        return _stuck("key_not_changed", why, "edgefl-coordinator rotate --signing", facts.disowned_ms)
    found = _standing(facts, rules)
    if facts.served or found.kind == "over":
        return found
    return _not_served(facts)


def stuck_sentence(found: FederationStanding, number: int, *, to_member: bool = False) -> str:
    """Say in one sentence that round `number` is stuck: since when, why, and what mends it; "" where it is not.

    A member reads what members can do, and no command of the operator.
    """
    if found.kind != "stuck":
        return ""
    since = ""
    if found.since_ms is not None:
        since = f" since {moment(found.since_ms)}"
    what = f"round {number}" if number else "the federation"
    mend = _MEMBERS_DO.get(found.cause, _TELL) if to_member else found.mend
    return f"{what} is stuck{since}: {found.why}; {mend}"


def lacks_bundle(name: str) -> str:
    """Say that no bundle of line/task `name` is published."""
    return f"no bundle of {name} is published, so devices have no model to learn with"


def _full(facts: RoundFacts) -> FederationStanding:
    """Say whose disk is full; since when, nothing could be written that tells it."""
    why = "the coordinator's disk is full, so it can keep nothing that members send"
    mend = f"make room on the disk of {facts.full}"
    found = FederationStanding(kind="stuck", cause="disk_full", why=why, mend=mend)
    return found if facts.served else replace(found, mend=f"{mend}, then run: {_SERVE}", commands=(_SERVE,))


def _not_served(facts: RoundFacts) -> FederationStanding:
    """Say that no server runs: since when, where that is known; of one that was killed its last sign."""
    kind: Kind = "waits" if facts.current is None else "stuck"
    what = "the server is not running"
    if facts.restored_ms is not None:
        what = "the server has not run since this folder was restored"
    elif facts.sign_ms is not None:
        what += f" (it last did something at {moment(facts.sign_ms)})"
    since_ms = facts.restored_ms if facts.stopped_ms is None else facts.stopped_ms
    return FederationStanding(
        kind=kind, cause="not_served", why=f"{what}, so members cannot reach it", mend=f"run: {_SERVE}",
        commands=(_SERVE,), since_ms=since_ms if kind == "stuck" else None,
    )  # fmt: skip


def _standing(facts: RoundFacts, rules: RoundSettings) -> FederationStanding:
    if facts.over:
        return _over(facts, rules)
    if facts.failing_ms is not None:
        return FederationStanding(
            kind="stuck", cause="job_failed", since_ms=facts.failing_ms,
            why="the coordinator could not do the round's job and tries it again",
            mend="the operator resolves what edgefl-coordinator status names",
        )  # fmt: skip
    if facts.current is None:
        return _before_the_first(facts, rules)
    if facts.current.state != "open":
        return FederationStanding(kind="moves", cause="aggregating", why="the replies are being aggregated")
    return _open(facts, facts.current, rules)


def _before_the_first(facts: RoundFacts, rules: RoundSettings) -> FederationStanding:
    if facts.started and facts.members:
        return FederationStanding(kind="moves", cause="aggregating", why="the first round is being prepared")
    missing = max(1, rules.quorum_target - facts.members if rules.start == "automatic" else 1)
    if rules.start == "automatic" or not facts.members:
        there = f"and there {'is' if facts.members == 1 else 'are'} {facts.members}"
        mend, commands = _admit(facts.pending[:missing], max(0, missing - len(facts.pending)), facts.invited)
        return FederationStanding(
            kind="waits", cause="too_few_members", mend=mend, commands=commands,
            why=f"the first round opens with {counted(facts.members + missing, 'approved member')}, {there}",
        )  # fmt: skip
    command = "edgefl-coordinator start"
    why = "the first round opens when the operator starts it"
    return FederationStanding(kind="waits", cause="not_started", why=why, mend=f"run: {command}", commands=(command,))


def _admit(pending: Sequence[str], more: int, invited: int) -> tuple[str, tuple[str, ...]]:
    """Say whom to approve, and how many to invite beyond the open invites, with the commands in it."""
    approve = tuple(map(_approving, pending))
    parts = [f"approve {name}: {command}" for name, command in zip(pending, approve, strict=True)]
    commands = [*approve]
    if used := min(more, invited):
        some = "" if used == invited else f"{used} of "
        parts.append(f"approve who uses {some}the {counted(invited, 'open invite')}: {_APPROVE}")
        commands.append(_APPROVE)
    if more > used:
        parts.append(f"invite and approve {more - used} more: {_INVITE} (or --role site, for a server)")
        commands.append(_INVITE)
    return ", then ".join(parts), tuple(commands)


def _approving(name: str) -> str:
    return _APPROVE.replace("NAME", name)


def _open(facts: RoundFacts, current: Round, rules: RoundSettings) -> FederationStanding:
    needed = max(rules.quorum_min, current.tried + 1)
    possible = current.replies + facts.able
    if current.replies >= needed:
        return _enough(current, possible, rules)
    if possible < needed:
        return _beyond_reach(facts, current, rules, needed)
    have = f"has {counted(current.replies, 'reply', 'replies')} and needs {needed}"
    if facts.overdue_ms is None:
        return FederationStanding(kind="waits", cause="no_reply", why=f"the round {have}", until_ms=current.deadline_ms)
    late = f"it {have}, and its deadline passed without the others"
    if facts.unpublished:
        return FederationStanding(
            kind="stuck", cause="no_bundle", why=f"{lacks_bundle(facts.unpublished)}; {late}",
            mend=f"the operator runs: {PUBLISH}; then {_REPLY}", commands=(PUBLISH,), since_ms=facts.overdue_ms,
        )  # fmt: skip
    if rules.min_cohort < current.replies < rules.quorum_min:
        return _stuck("no_reply", late, set_command({"rounds.quorum_min": current.replies}), facts.overdue_ms)
    commands = ["edgefl sync", "edgefl contribute", "edgefl-train join", _REVOKE, _INVITE]
    mend = f"{_REPLY}; or, if one never comes back: {_REVOKE} (its keys never count again), then {_INVITE}"
    if for_so_many(rules, current.replies):
        fewer = fitting(rules, facts.members, current.replies)
        given_up = _APART if is_risky(fewer) else _FEWER
        commands.append(set_command(fewer))
        mend = f"{mend}; or, to go on while it is away{given_up}: {commands[-1]}"
    return FederationStanding(
        kind="stuck", cause="no_reply", why=late, mend=mend, commands=tuple(commands), since_ms=facts.overdue_ms
    )  # fmt: skip


def _enough(current: Round, possible: int, rules: RoundSettings) -> FederationStanding:
    """Say when a round with enough replies goes on, and how at once where it cannot close early."""
    found = FederationStanding(kind="moves", until_ms=current.deadline_ms)
    if current.replies >= rules.quorum_target:
        return found
    found = replace(found, why=f"the round has enough replies and goes on at {moment(current.deadline_ms)}")
    if possible >= rules.quorum_target:
        return found
    command = set_command({"rounds.quorum_target": current.replies})
    why = f"{found.why}, for no more than {counted(possible, 'reply', 'replies')} can come"
    return replace(found, why=why, mend=f"to go on at once, run: {command}", commands=(command,))


def _beyond_reach(facts: RoundFacts, current: Round, rules: RoundSettings, needed: int) -> FederationStanding:
    """Say why even all replies that may still come are too few."""
    possible = current.replies + facts.able
    if facts.withheld and (freed := _freeing(facts, current, rules)):
        why = (
            f"its broadcast is withheld from {counted(len(facts.withheld), 'member')}, because it holds contributions "
            f"of only {counted(max(facts.withheld), 'other', 'others')}, and at least {rules.min_cohort} are required"
        )
        return _more_or_freed(why, facts, freed, needed - possible, rules)
    left = f"with those that may still come the round has {possible} and needs {needed}"
    if facts.refused and possible < rules.quorum_min:
        why = f"{counted(facts.refused, 'reply was', 'replies were')} refused, and {left}"
        return _fewer_or_more("replies_refused", why, facts, needed, rules)
    if possible >= rules.quorum_min:  # enough, had the same replies not been tried
        why = "its replies could not be aggregated together, and no member is left to send another"
        return _stuck("cannot_aggregate", why, _INVITE, facts.opened_ms)
    there = "is" if facts.members == 1 else "are"
    why = f"it needs {counted(needed, 'reply', 'replies')}, and there {there} {counted(facts.members, 'member')}"
    if facts.beside:
        why += f", of which {facts.beside} sent contributions, which are not averaged"
    return _fewer_or_more("too_few_members", why, facts, needed, rules)


def _more_or_freed(
    why: str, facts: RoundFacts, freed: SettingChanges, missing: int, rules: RoundSettings
) -> FederationStanding:
    """Name other members before fewer others in a broadcast, where they may have this one."""
    lower = set_command(freed)
    if facts.newcomer < rules.min_cohort:
        found = _stuck("small_cohort", why, lower, facts.opened_ms)
        apart = " (with so few, a single contribution can be told apart)" if ALLOW in freed else ""
        return replace(found, mend=found.mend + apart)
    commands = _admitting(facts, missing)
    found = _stuck("small_cohort", why, ", and ".join(commands), facts.opened_ms)
    apart = _APART if ALLOW in freed else _FEWER
    more = counted(missing, "more member is", "more members are")
    return replace(found, mend=f"{found.mend} ({more} needed); or{apart}: {lower}", commands=(*commands, lower))


def _admitting(facts: RoundFacts, missing: int) -> list[str]:
    """The commands that bring so many more members: approve who waits or was invited, then invite."""
    waiting = [_approving(name) for name in facts.pending[:missing]]
    if facts.invited and missing > len(waiting):
        waiting.append(_APPROVE)
    return list(dict.fromkeys(waiting)) + [_INVITE] * (missing > len(facts.pending) + facts.invited)


def _out_of_reach_ms(facts: RoundFacts, needed: int) -> int:
    """Return since when too few replies can come: when the round opened, or the last one needed fell away."""
    possible = facts.current.replies + facts.able if facts.current else 0
    fallen = sorted(facts.losses_ms, reverse=True)
    lost_ms = fallen[needed - possible - 1] if 0 < needed - possible <= len(fallen) else facts.opened_ms
    return max(lost_ms, facts.raised_ms)


def _fewer_or_more(cause: str, why: str, facts: RoundFacts, needed: int, rules: RoundSettings) -> FederationStanding:
    """Name another member before a smaller quorum, where one waits or the quorum would be a risk.

    Before both: granting a refused member the images that it claims.
    """
    possible = facts.current.replies + facts.able if facts.current else 0
    fewer = fitting(rules, facts.members, possible) if for_so_many(rules, possible) else {}
    missing = needed - possible
    since_ms = _out_of_reach_ms(facts, needed)
    risky = is_risky(fewer)
    if fewer and not risky and not (facts.pending or facts.invited or facts.grants):
        return _stuck(cause, why, set_command(fewer), since_ms)
    granting = [_GRANT.format(name, images) for name, images in facts.grants]
    commands = granting + (_admitting(facts, missing - len(granting)) if missing > len(granting) else [])
    found = _stuck(cause, why, ", and ".join(commands), since_ms)
    if granting:
        found = replace(found, mend=f"{found.mend} (if the member has so many)")
    if fewer:
        commands.append(set_command(fewer))
        given_up = _APART if risky else ""
        found = replace(found, mend=f"{found.mend}; or{given_up}: {commands[-1]}")
    return replace(found, commands=tuple(commands))


def _freeing(facts: RoundFacts, current: Round, rules: RoundSettings) -> SettingChanges:
    """Return the settings with the largest cohort under which enough members get their broadcast; {} for none."""
    for others in range(min(max(facts.withheld), rules.min_cohort - 1), -1, -1):
        quorum = max(rules.quorum_min, others + 1)
        freed = sum(one >= others for one in facts.withheld)
        if current.replies + facts.able + freed >= max(quorum, current.tried + 1):
            changes: SettingChanges = {"rounds.min_cohort": others}
            changes |= {"rounds.quorum_min": quorum} if quorum > rules.quorum_min else {}
            changes |= {"rounds.quorum_target": quorum} if quorum > rules.quorum_target else {}
            allowed = others >= LEAST_COHORT or rules.allow_small_cohort
            return changes if allowed else {**changes, ALLOW: "true"}
    return {}


def _over(facts: RoundFacts, rules: RoundSettings) -> FederationStanding:
    """Say that all is done, and whether somebody cannot have the last broadcast."""
    barred = sum(others < rules.min_cohort for others in facts.withheld)
    if not barred:
        return FederationStanding(kind="over")
    why = (
        f"the last broadcast is withheld from {counted(barred, 'member')}, because it holds contributions of only "
        f"{counted(max(facts.withheld), 'other', 'others')}, and at least {rules.min_cohort} are required"
    )
    return FederationStanding(kind="over", cause="small_cohort", why=why)


def _stuck(cause: str, why: str, command: str, since_ms: int) -> FederationStanding:
    mend = f"the operator runs: {command}"
    return FederationStanding(kind="stuck", cause=cause, why=why, mend=mend, commands=(command,), since_ms=since_ms)
