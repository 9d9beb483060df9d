"""Who belongs to the federation: invites, enrolment, approval, revocation.

Guarantees: one invite makes at most one enrolment; a key enters once; a member takes part only after an operator
compared the fingerprint of both its keys. The store keeps the SHA-256 of an invite's token, never the token.
A member that changes its keys stays the same member: its first key id names it for good (`MemberRow.skid`), so it
replies once a round whichever key it uses. The key before goes on counting for 7 days (`member_keys`).
States: unproved → pending (nonce returned) → approved (by the operator); any → revoked, which is final: under the same
name a new invite makes a new member, with new keys.
Source: docs/security.md, enrolment and rotation (checks 21, 22, 23, 24).
"""

import hashlib
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from sqlalchemy import ColumnElement, Connection, Row, bindparam, delete, func, insert, select, update

from edgefl_coordinator.errors import NotAllowedError, OperatorError, RefusedError
from edgefl_coordinator.store import audit, revocations
from edgefl_coordinator.store.statements import FACT, KEEP_FACT, Statement, keep_first
from edgefl_coordinator.store.tables import facts, invites, member_keys, members
from edgefl_coordinator.store.tables import revocations as revoked_keys
from edgefl_protocol.envelopes.keys import PublicSealingKey, PublicSigningKey, fingerprint, same_fingerprint
from edgefl_protocol.messages.requests import EnrolRequest
from edgefl_protocol.records.invite import Invite
from edgefl_protocol.records.rotation import OVERLAP_MS, Rotation

_HEARD = "heard_"  # the facts that hold when a member was last heard
CHANGES = "members_changed"  # the fact that counts changes of members: of their states, or a broadcast that is lost

_SELECTED = select(  # in the order of `MemberRow`
    members.c.skid, members.c.name, members.c.role, members.c.state, members.c.signing_public,
    members.c.sealing_suite, members.c.sealing_public, members.c.enrolled_ms, members.c.approved_ms,
)  # fmt: skip
_OF_KEY = select(member_keys.c.member).where(member_keys.c.skid == bindparam("skid")).scalar_subquery()
_OF_MEMBER = members.c.skid == func.coalesce(_OF_KEY, bindparam("skid"))  # a first key is only there after a change
_BY_KEY = Statement(_SELECTED.where(_OF_MEMBER))
_SENDER = Statement(
    _SELECTED.add_columns(member_keys.c.skid, member_keys.c.signing_public, member_keys.c.until_ms)
    .join_from(members, member_keys, member_keys.c.skid == bindparam("skid"), isouter=True)
    .where(_OF_MEMBER)
)
_KEEP_KEY = keep_first(member_keys)


@dataclass(frozen=True)
class MemberRow:
    """A member as stored; `skid` is its first key id, `signing` its current key."""

    skid: str
    name: str
    role: str
    state: str
    signing_public: bytes
    sealing_suite: int
    sealing_public: bytes
    enrolled_ms: int
    approved_ms: int | None

    @cached_property
    def signing(self) -> PublicSigningKey:
        """The key it signs with, checked when it is first asked for: that takes longer than to read the row."""
        return PublicSigningKey(self.signing_public)

    @cached_property
    def sealing(self) -> PublicSealingKey:
        """The key to seal for, which was checked when it came into the store."""
        return PublicSealingKey.checked_before(self.sealing_suite, self.sealing_public)

    def fingerprint(self, federation: str) -> str:
        """Return what the operator compares: 20 Crockford base32 characters."""
        return fingerprint(federation, self.signing_public, self.sealing_public)


def add_invite(connection: Connection, now_ms: int, invite: Invite) -> str | None:
    """Store an invite. An earlier enrolment of that name which was never approved gives way; its older invites expire.

    Returns what counts no more: "enrolment", "invite", or None. An `OperatorError` where an approved member has this
    name.
    """
    name, expires_ms = invite.name, invite.expires_ms
    holder = connection.execute(select(members).where(members.c.name == name, members.c.state != "revoked")).first()
    if holder and holder.state == "approved":
        raise OperatorError(f"{name} is an approved member; choose another name, or revoke it first")
    if holder:
        _set_state(connection, holder.skid, "revoked", revoked_ms=now_ms)
        audit.append(connection, now_ms, "enrolment_superseded", name)
    older = update(invites).where(invites.c.name == name, _is_open(now_ms))
    expired = connection.execute(older.values(expires_ms=now_ms)).rowcount
    row = {"token_sha256": invite.token_sha256, "name": name, "role": invite.role, "expires_ms": expires_ms}
    connection.execute(insert(invites).values(**row, created_ms=now_ms))
    audit.append(connection, now_ms, "invite", name, {"role": invite.role, "expires_ms": expires_ms})
    return "enrolment" if holder else "invite" if expired else None


def enrol(connection: Connection, now_ms: int, request: EnrolRequest, sealing: PublicSealingKey) -> MemberRow:
    """Use up an invite and store the newcomer's keys; the same newcomer may ask again.

    Raises:
        RefusedError: unknown, used or expired invite, or a key that is already known.
    """
    token_sha256 = hashlib.sha256(request.token).hexdigest()
    invite = connection.execute(select(invites).where(invites.c.token_sha256 == token_sha256)).first()
    if invite is None or invite.name != request.name or invite.role != request.role:
        raise RefusedError(
            "unknown_invite", "there is no such invite for this name and role; ask the operator for a new one"
        )
    signing = PublicSigningKey(request.signing_public)
    known = by_skid(connection, signing.key_id)
    if invite.used_by is not None:
        if known is not None and invite.used_by == known.skid and known.sealing == sealing and known.state != "revoked":
            return known
        raise RefusedError("used_invite", "this invite was used before; ask the operator for a new one")
    if now_ms >= invite.expires_ms:
        newer = (invites.c.name == invite.name) & (
            invites.c.created_ms == invite.expires_ms
        )  # as `add_invite` ended it
        if connection.scalar(select(invites.c.name).where(newer)):
            raise RefusedError("expired_invite", "a newer invite for this name replaced this one; use the newer one")
        raise RefusedError("expired_invite", "this invite has expired; ask the operator for a new one")
    if connection.scalar(select(members.c.skid).where(members.c.name == request.name, members.c.state != "revoked")):
        raise RefusedError(
            "used_invite", "a member of this name is already enrolled; ask the operator for a new invite"
        )
    taken = connection.scalar(select(members.c.skid).where(members.c.sealing_public == sealing.public))
    if known is not None or taken is not None:
        raise RefusedError("known_key", "this key is already enrolled; make new keys")
    row = {"skid": signing.key_id, "name": request.name, "role": request.role, "state": "unproved"}
    keys = {"signing_public": signing.public, **_columns(sealing)}
    connection.execute(insert(members).values(**row, **keys, enrolled_ms=now_ms))
    connection.execute(update(invites).where(invites.c.token_sha256 == token_sha256).values(used_by=signing.key_id))
    audit.append(connection, now_ms, "enrolled", request.name, {"role": request.role, "skid": signing.key_id})
    told = (signing.key_id, request.name, request.role, "unproved", signing.public)
    return MemberRow(*told, sealing.suite, sealing.public, now_ms, None)


def prove(connection: Connection, now_ms: int, member: MemberRow) -> str:
    """Record that the member opened what was sealed to its key; return its state, "pending" or "approved"."""
    if member.state != "unproved":
        return member.state
    _set_state(connection, member.skid, "pending")
    audit.append(connection, now_ms, "proved", member.name, {"skid": member.skid})
    return "pending"


def approve(connection: Connection, now_ms: int, name: str, typed: str, federation: str) -> MemberRow:
    """Let a pending member in, if the typed fingerprint is the one of its keys.

    An `OperatorError` where nobody of that name waits; a `NotAllowedError` where the fingerprint differs.
    """
    if any(one["name"] == name for one in open_invites(connection, now_ms)):
        raise OperatorError(
            f"{name} is invited and has not enrolled: first it uses its invite, and tells a fingerprint"
        )
    member = _by_name(connection, name)
    if member.state not in ("pending", "approved"):
        raise OperatorError(f"{name} has not finished enrolling; it has to run `edgefl enrol` again")
    if not same_fingerprint(typed, member.fingerprint(federation)):
        audit.append(connection, now_ms, "fingerprint_mismatch", name)
        raise NotAllowedError(
            f"the fingerprint does not belong to {name}'s keys; compare it again, and do not "
            f"approve {name} unless it fits"
        )
    if member.state == "approved":
        return member
    _set_state(connection, member.skid, "approved", approved_ms=now_ms)
    audit.append(connection, now_ms, "approved", name, {"skid": member.skid})
    return member


def revoke(connection: Connection, now_ms: int, name: str) -> MemberRow | None:
    """Shut a member out, from the next request on, or withdraw the open invite for this name: then None.

    Its keys count never again; a new invite for the name makes a new member. An `OperatorError` where there is neither.
    """
    open_invite = delete(invites).where(invites.c.name == name, _is_open(now_ms))
    if connection.execute(open_invite).rowcount:  # there is no member of this name, or it could not have been invited
        audit.append(connection, now_ms, "invite_withdrawn", name)
        return None
    member = _by_name(connection, name)
    _set_state(connection, member.skid, "revoked", revoked_ms=now_ms)
    audit.append(connection, now_ms, "revoked", name, {"skid": member.skid})
    later = connection.scalars(select(member_keys.c.skid).where(member_keys.c.member == member.skid)).all()
    revocations.add(connection, now_ms, "member", name, sorted({member.skid, *later}))
    return member


def open_invites(connection: Connection, now_ms: int) -> list[dict[str, str | int]]:
    """Return name, role and expiry of the invites that may still be used, in name order."""
    found = connection.execute(select(invites).where(_is_open(now_ms)).order_by(invites.c.name))
    return [{"name": row.name, "role": row.role, "expires_ms": row.expires_ms} for row in found]


def shut_out(connection: Connection) -> list[dict[str, str | int]]:
    """Return name, role and time of each member that was shut out and has not joined again, in name order."""
    living = select(members.c.name).where(members.c.state != "revoked")
    found = (
        select(members.c.name, members.c.role, revoked_keys.c.revoked_ms)
        .join(revoked_keys, revoked_keys.c.key_id == members.c.skid)
        .where(members.c.name.not_in(living))
        .order_by(members.c.name, revoked_keys.c.revoked_ms)
    )
    newest = {row.name: row for row in connection.execute(found)}
    return [{"name": row.name, "role": row.role, "revoked_ms": row.revoked_ms} for row in newest.values()]


def by_skid(connection: Connection, skid: str) -> MemberRow | None:
    """Return the member that has or had this signing key, or None."""
    row = _BY_KEY.first(connection, skid=skid)
    return MemberRow(*row) if row else None


def note_heard(connection: Connection, skid: str, now_ms: int) -> None:
    """Remember when a member, by its first key id, last sent something that it had signed."""
    KEEP_FACT.send(connection, key=_HEARD + skid, value=str(now_ms))


def heard_ms(connection: Connection) -> dict[str, int]:
    """Return first key id → when that member was last heard, in Unix milliseconds; only those that were."""
    found = connection.execute(select(facts).where(facts.c.key.startswith(_HEARD, autoescape=True)))
    return {row.key.removeprefix(_HEARD): int(row.value) for row in found}


def sender(connection: Connection, skid: str, at_ms: int) -> tuple[MemberRow, PublicSigningKey] | None:
    """Return the member whose key this was at a time, with that key; None where it counted for nobody."""
    row = _SENDER.first(connection, skid=skid)
    if row is None:
        return None
    *columns, changed, public, until_ms = row
    member = MemberRow(*columns)
    if changed is None:  # this member has never changed its keys
        return member, member.signing
    return None if until_ms is not None and at_ms > until_ms else (member, PublicSigningKey(public))


def rotate(connection: Connection, now_ms: int, member: MemberRow, rotation: Rotation, record: bytes) -> int:
    """Take a member's new keys; asking again with the same ones changes nothing.

    The `record` is kept as received, as proof. Returns Unix milliseconds until which the old signing key goes on
    counting.

    Raises:
        RefusedError: `replaced_key`, the old key is not the member's current one; `known_key`, a new key is in use.
    """
    if (rotation.new, rotation.sealing) == (member.signing, member.sealing):
        old = select(member_keys.c.until_ms).where(member_keys.c.skid == rotation.old.key_id)
        return int(connection.scalar(old) or 0)
    if rotation.old != member.signing:
        raise RefusedError("replaced_key", "this key was replaced by a newer one; use that, or ask the operator")
    taken = connection.scalar(select(members.c.skid).where(members.c.sealing_public == rotation.sealing.public))
    if by_skid(connection, rotation.new.key_id) is not None or taken not in (None, member.skid):
        raise RefusedError("known_key", "this key is in use already; make new keys")
    until_ms = now_ms + OVERLAP_MS
    old_row = {"skid": rotation.old.key_id, "member": member.skid, "signing_public": rotation.old.public}
    _KEEP_KEY.run(connection, **old_row, added_ms=member.enrolled_ms, until_ms=None, record=None)
    ended = update(member_keys).where(member_keys.c.skid == rotation.old.key_id)
    connection.execute(ended.values(until_ms=until_ms))
    new_row = {"skid": rotation.new.key_id, "member": member.skid, "signing_public": rotation.new.public}
    connection.execute(insert(member_keys).values(**new_row, added_ms=now_ms, record=record))
    here = update(members).where(members.c.skid == member.skid)
    connection.execute(here.values(signing_public=rotation.new.public, **_columns(rotation.sealing)))
    detail = {"old": rotation.old.key_id, "new": rotation.new.key_id, "old_until_ms": until_ms}
    audit.append(connection, now_ms, "keys_rotated", member.name, detail)
    return until_ms


def listed(connection: Connection) -> list[MemberRow]:
    """Return all members but the revoked, in name order."""
    rows = connection.execute(select(members).where(members.c.state != "revoked").order_by(members.c.name))
    return [_member(row) for row in rows]


def approved(connection: Connection) -> list[MemberRow]:
    """Return the approved members in name order."""
    rows = connection.execute(select(members).where(members.c.state == "approved").order_by(members.c.name))
    return [_member(row) for row in rows]


def names(connection: Connection, state: str) -> list[str]:
    """Return the names of the members in a state, in order: no key of theirs is read."""
    return list(connection.scalars(select(members.c.name).where(members.c.state == state).order_by(members.c.name)))


def approved_roles(connection: Connection) -> dict[str, str]:
    """Return key id → role of the approved members, in name order: no key of theirs is read."""
    found = select(members.c.skid, members.c.role).where(members.c.state == "approved").order_by(members.c.name)
    return {row.skid: row.role for row in connection.execute(found)}


def count_approved(connection: Connection) -> int:
    """Count the approved members."""
    return connection.scalar(select(func.count()).select_from(members).where(members.c.state == "approved")) or 0


def changes(connection: Connection) -> int:
    """Return how often a member has changed: while it is the same, the same are approved, and have their broadcast."""
    return int(FACT.value(connection, key=CHANGES) or 0)


def note_change(connection: Connection) -> None:
    """Note that a member's state has changed, or its broadcast is lost: whichever process leads looks again."""
    KEEP_FACT.run(connection, key=CHANGES, value=str(changes(connection) + 1))


def _by_name(connection: Connection, name: str) -> MemberRow:
    if not name.isprintable():
        raise OperatorError("a member's name is one printable word; `edgefl-coordinator status` lists them")
    row = connection.execute(select(members).where(members.c.name == name, members.c.state != "revoked")).first()
    if row is None and any(one["name"] == name for one in shut_out(connection)):
        raise OperatorError(f"{name} is shut out already; a new invite for that name makes a new member")
    if row is None:
        raise OperatorError(f"no member is named {name}; `edgefl-coordinator status` lists them")
    return _member(row)


def _is_open(now_ms: int) -> ColumnElement[bool]:
    return invites.c.used_by.is_(None) & (invites.c.expires_ms > now_ms)


def _set_state(connection: Connection, skid: str, state: str, **times: int) -> None:
    connection.execute(update(members).where(members.c.skid == skid).values(state=state, **times))
    note_change(connection)


def _columns(sealing: PublicSealingKey) -> dict[str, Any]:
    return {"sealing_suite": sealing.suite, "sealing_public": sealing.public}


def _member(row: Row[Any]) -> MemberRow:
    keys = row.signing_public, row.sealing_suite, row.sealing_public
    return MemberRow(row.skid, row.name, row.role, row.state, *keys, row.enrolled_ms, row.approved_ms)
