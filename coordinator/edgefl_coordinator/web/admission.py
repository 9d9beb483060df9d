"""An authenticated request on its way through the store: admitted once, then read, then carried out.

Guarantees: the replay row of a member's message is committed before a byte of its payload is looked at, so a message
that was refused for whatever reason, or that stopped the process, is a replay when it comes again. A member whose state
bars it from the route is refused there too, unread. The effect has a transaction of its own and happens only after
admission: a crash between the two loses nothing that was acknowledged, and the retry is a new envelope around the same
work item. Every refusal after the signature leaves one audit row. A transaction that the database undid because it met
another one is done again, a few times. Source: docs/security.md, order of checks, and check 66.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NoReturn, TypeVar

from sqlalchemy import Connection

from edgefl_coordinator.commits.shared_commit import done_again
from edgefl_coordinator.errors import RefusedError
from edgefl_coordinator.members import membership
from edgefl_coordinator.members.membership import MemberRow
from edgefl_coordinator.store import audit, inbox
from edgefl_coordinator.store.coordinator import Coordinator
from edgefl_protocol import Opened, Payload, PayloadError, PublicSealingKey
from edgefl_protocol.messages.requests import Route

Value = TypeVar("Value")
Effect = Callable[[Connection, MemberRow], Value]


@dataclass(frozen=True)
class Call:
    """An authenticated request."""

    coordinator: Coordinator  # whose store
    route: Route  # the route
    opened: Opened  # the verified envelope
    sealing: PublicSealingKey  # the key to seal the answer to
    now_ms: int  # one reading of the clock for the whole request


def admit(call: Call) -> None:
    """Judge and keep the message's number and id, durably; what comes after may read the payload.

    Raises:
        RefusedError: replayed, out of the window, or this member may not use the route now.
        StorageError: what it kept nobody may count on.
    """

    def admitted() -> None:
        with _refusals_written(call) as (connection, member):
            keep_window(connection, call)
            if member is not None:
                membership.note_heard(connection, member.skid, call.now_ms)
            check_round(call)
            _entitled(member, call.route)

    done_again(admitted)


def read(call: Call, parse: Callable[[Payload], Value]) -> Value:
    """Decode the payload of an admitted message; `bad_message` where it breaks its format."""
    try:
        return parse(Payload.from_bytes(call.opened.payload))
    except PayloadError as error:
        refuse(call, RefusedError("bad_message", str(error)[:500]), error)


def transact(call: Call, effect: Effect[Value]) -> Value:
    """Carry out the effect of an admitted message in one transaction.

    A `RefusedError` where it did not happen, with an audit row; a `StorageError` where nobody may count on it.
    """

    def carried_out() -> Value:
        with call.coordinator.store.transaction() as connection:
            member = membership.by_skid(connection, call.opened.header.skid)
            return effect(connection, _entitled(member, call.route))

    try:
        return done_again(carried_out)
    except RefusedError as refused:
        refuse(call, refused, refused.__cause__)


def refuse(call: Call, refused: RefusedError, cause: BaseException | None = None) -> NoReturn:
    """Refuse an admitted message outside a transaction: write the audit row and raise `RefusedError`."""

    def written() -> NoReturn:
        with _refusals_written(call):
            raise refused from cause

    done_again(written)


def keep_window(connection: Connection, call: Call) -> None:
    """Judge the message's number and id within the caller's transaction, and keep them.

    `replayed`, `seq_behind` or `seq_jump` where nothing was kept.
    """
    header = call.opened.header
    inbox.admit(connection, header, call.now_ms, header.exp + call.coordinator.settings.limits.skew_ms)


def check_round(call: Call) -> None:
    """Refuse, as `bad_message`, a round on a route that knows none: it would be signed and mean nothing."""
    if call.opened.header.rnd != 0 and not call.route.in_round:
        raise RefusedError("bad_message", f"the header's rnd is 0 on the route {call.route.cty}")


def _entitled(member: MemberRow | None, route: Route) -> MemberRow:
    """Return the member if its state lets it use the route, or refuse it as `pending` or `not_approved`."""
    if member is None or member.state == "revoked":
        raise RefusedError("not_approved", "this key was revoked")
    if not route.roles or member.state == "approved":
        return member
    if member.state == "pending":
        raise RefusedError("pending", "the operator has not approved this enrolment yet; compare the fingerprint")
    raise RefusedError("not_approved", "this enrolment is not finished; run `edgefl enrol` again")


@contextmanager
def _refusals_written(call: Call) -> Iterator[tuple[Connection, MemberRow | None]]:
    """Give a transaction and the sender; a refusal in it leaves an audit row beside what was kept, and goes on."""
    header, refused = call.opened.header, None
    with call.coordinator.store.transaction() as connection:
        member = membership.by_skid(connection, header.skid)
        try:
            yield connection, member
        except RefusedError as error:
            refused = error
            detail = {"route": call.route.cty, "code": error.code, "round": header.rnd}
            audit.append(connection, call.now_ms, "refused", member.name if member else header.skid, detail)
    if refused is not None:
        raise refused
