"""Keys that count no more, and the root sets that were published: what members fetch to judge bundles.

Guarantees: a revocation is final and its row stays; the list's number rises with each, so a member never takes an
older list for a newer one. Where a backup took revocations back, `number_anew` lifts the number above all that were
lost. Root sets form TUF's chain: each is signed by the one before and by itself. Source: docs/security.md 2.6.5 and
2.6.6, checks 24 and 26.
"""

import json
from collections.abc import Iterable, Sequence

from sqlalchemy import Connection, func, insert, select

from edgefl_coordinator.errors import OperatorError
from edgefl_coordinator.store import audit
from edgefl_coordinator.store.statements import KEEP_FACT, keep_first
from edgefl_coordinator.store.tables import facts, revocations, roots
from edgefl_protocol.records.revocation import MAX_REVOKED
from edgefl_protocol.records.root import MAX_CHAIN_BYTES, MAX_VERSIONS, Root, newest_root, unverified_root

MAX_SIGNERS = MAX_REVOKED // 2  # revoked signers always stand in the list; of members the newest that fit
_ADD = keep_first(revocations)
_FLOOR = "revoked_floor"  # the fact that holds what the list's number counts from


def add(connection: Connection, now_ms: int, kind: str, name: str, key_ids: Iterable[str]) -> None:
    """Revoke keys of a kind, "member" or "signer"; one that is revoked stays as it is. `name` is for the audit log."""
    for key_id in key_ids:
        row = {"key_id": key_id, "kind": kind, "name": name, "revoked_ms": now_ms}
        if _ADD.run(connection, **row).rowcount == 1:
            audit.append(connection, now_ms, "key_revoked", name, {"kind": kind, "key_id": key_id})


def revoke_signer(connection: Connection, now_ms: int, key_id: str) -> None:
    """Revoke a signer of bundles; an `OperatorError` where the list has no room for another one."""
    count = connection.scalar(select(func.count()).select_from(revocations).where(revocations.c.kind == "signer")) or 0
    if count >= MAX_SIGNERS:
        raise OperatorError(
            f"{MAX_SIGNERS} signers are revoked, and no more fit into the list; leave further ones out of the root set"
        )
    add(connection, now_ms, "signer", "a signer", [key_id])


def listed(connection: Connection) -> tuple[int, list[str]]:
    """Return the list's number, and the key ids that stand in it."""
    rows = connection.execute(select(revocations).order_by(revocations.c.revoked_ms.desc(), revocations.c.key_id)).all()
    signers = [row.key_id for row in rows if row.kind == "signer"]
    others = [row.key_id for row in rows if row.kind != "signer"]
    return _floor(connection) + len(rows) + 1, [*signers, *others[: MAX_REVOKED - len(signers)]]


def number_anew(connection: Connection, now_ms: int) -> None:
    """Count the list's number from the time on.

    A list that was lost counted from an earlier time, and nobody revokes a key each millisecond: its number was lower.
    """
    KEEP_FACT.run(connection, key=_FLOOR, value=json.dumps(max(now_ms, _floor(connection))))


def _floor(connection: Connection) -> int:
    text = connection.scalar(select(facts.c.value).where(facts.c.key == _FLOOR))
    return 0 if text is None else int(json.loads(text))


def is_revoked(connection: Connection, key_ids: Sequence[str]) -> bool:
    """Tell whether all of these keys are revoked."""
    found = select(func.count()).select_from(revocations).where(revocations.c.key_id.in_(key_ids))
    return bool(key_ids) and connection.scalar(found) == len(set(key_ids))


def chain(connection: Connection) -> list[bytes]:
    """Return the published root sets in the order of their numbers."""
    return [bytes(record) for record in connection.scalars(select(roots.c.record).order_by(roots.c.version))]


def newest(connection: Connection) -> Root | None:
    """Return the newest published root set, or None."""
    record = connection.scalar(select(roots.c.record).order_by(roots.c.version.desc()).limit(1))
    return None if record is None else unverified_root(bytes(record))


def disowned_ms(connection: Connection, key_id: str) -> int | None:
    """Return since when the published root set leaves this signing key of the coordinator out; None where it counts."""
    root = newest(connection)
    if root is None or root.coordinator(key_id) is not None:
        return None
    return int(connection.scalar(select(func.max(roots.c.published_ms))) or 0)


def publish_root(connection: Connection, now_ms: int, federation: str, pinned_key_id: str, record: bytes) -> Root:
    """Publish the next root set; the one that is published already may come again.

    Args:
        pinned_key_id: of the root key that invites pin.

    Raises:
        RecordError: too few root keys signed it, or it is not the next one.
        OperatorError: it is not newer, or members could not walk through so many.
    """
    published = chain(connection)
    if published and published[-1] == record:
        return unverified_root(record)
    size = sum(len(one) + 1 for one in (*published, record))
    if len(published) >= MAX_VERSIONS or size > MAX_CHAIN_BYTES:
        raise OperatorError(
            f"with this one there would be {len(published) + 1} root sets of {size} bytes; members accept at most "
            f"{MAX_VERSIONS} of {MAX_CHAIN_BYTES} bytes together and could not follow: begin a new federation with "
            "a new root key and new invites"
        )
    found = newest_root([record], federation, pinned_key_id, newest(connection))
    if found is None:
        raise OperatorError(f"root set {unverified_root(record).version} is not above the one that is published")
    root = found[0]
    connection.execute(insert(roots).values(version=root.version, record=record, published_ms=now_ms))
    detail = {"version": root.version, "signers": len(root.signers), "expires_ms": root.expires_ms}
    audit.append(connection, now_ms, "root_published", federation, detail)
    return root
