"""Bundles that members can fetch, and the signed index that says which is current.

Guarantees: versions of a (line, task) only rise; a bundle is stored whole before the index names it. A bundle that only
revoked keys have signed counts no more, neither as the current one nor as a number to stay above. The coordinator does
not vouch for a bundle: members verify its own signatures, by the signers of the root set. Source: docs/security.md,
model bundles.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Row, insert, select

from edgefl_coordinator.errors import OperatorError, RefusedError
from edgefl_coordinator.store import audit, revocations
from edgefl_coordinator.store.store import Blob
from edgefl_coordinator.store.tables import bundles
from edgefl_protocol.bundle.archive import MAX_ARCHIVE_BYTES
from edgefl_protocol.records.coordinator_records import IndexEntry


@dataclass(frozen=True)
class Published:
    """A bundle that members can fetch."""

    line: str
    task: str
    version: int
    sha256: str
    size: int  # bytes
    signers: tuple[str, ...]  # key ids


def publish(
    connection: Connection,
    now_ms: int,
    *,
    line: str,
    task: str,
    version: int,
    bundle_id: str,
    blob: Blob,
    signers: Sequence[str] = (),
) -> None:
    """Make a bundle the current one of its line and task.

    Raises:
        OperatorError: it is too large, only revoked keys signed it, or its version is not above the current one.
    """
    if revocations.is_revoked(connection, signers):
        raise OperatorError("all keys that signed the bundle are revoked, so no device would accept it")
    if blob.size > MAX_ARCHIVE_BYTES:
        raise OperatorError(f"the bundle has {blob.size} bytes; at most {MAX_ARCHIVE_BYTES} are allowed")
    here = select(bundles).where(bundles.c.line == line, bundles.c.task == task)
    if known := connection.execute(here.where(bundles.c.sha256 == blob.sha256)).first():
        raise OperatorError(f"this very bundle is published already, as version {known.version} of {line}/{task}")
    newest = max((row.version for row in _standing(connection, connection.execute(here))), default=0)
    if version <= newest:
        raise OperatorError(
            f"version {version} of {line}/{task} is not above version {newest}, which is published already; raise it"
        )
    if connection.scalar(here.with_only_columns(bundles.c.version).where(bundles.c.version == version)) is not None:
        raise OperatorError(
            f"version {version} of {line}/{task} was published by a signer that is now revoked; use another number"
        )
    row = {"line": line, "task": task, "version": version, "bundle_id": bundle_id, "published_ms": now_ms}
    stored = {"sha256": blob.sha256, "bytes": blob.size, "blob": blob.name}
    connection.execute(insert(bundles).values(**row, **stored, signers=json.dumps(list(signers))))
    detail = {"version": version, "sha256": blob.sha256, "bytes": blob.size}
    audit.append(connection, now_ms, "published", f"{line}/{task}", detail)


def current(connection: Connection) -> list[Published]:
    """Return the current bundle of every line and task: the standing one of the highest version."""
    return list({(one.line, one.task): one for one in _all_standing(connection)}.values())  # the last of each


def entries(connection: Connection) -> list[IndexEntry]:
    """Return what the signed index says of the current bundles."""
    return [
        IndexEntry(line=one.line, task=one.task, version=one.version, sha256=one.sha256, size=one.size)
        for one in current(connection)
    ]


def not_taken(connection: Connection, signers: Sequence[str]) -> str:
    """Say why members do not take a bundle of these signers by themselves; "" where the root set vouches for it."""
    root = revocations.newest(connection)
    if root is None:
        return "no root set is published"
    listed = {key.key_id for key in root.signers} & set(signers)
    count = sum(not revocations.is_revoked(connection, [key_id]) for key_id in listed)
    if count >= root.signer_threshold:
        return ""
    return f"root set {root.version} lists {count} of its signers, and {root.signer_threshold} must have signed"


def taken(connection: Connection) -> dict[tuple[str, str], int]:
    """Return line and task → the highest version that members take; without a root set that is their owners' choice."""
    rooted = revocations.newest(connection) is not None
    return {
        (one.line, one.task): one.version
        for one in _all_standing(connection)
        if not rooted or not not_taken(connection, one.signers)
    }


def all_signers(connection: Connection) -> set[str]:
    """Return the key ids that published bundles name."""
    return {key_id for text in connection.scalars(select(bundles.c.signers)) for key_id in json.loads(text)}


def _all_standing(connection: Connection) -> list[Published]:
    """Return the bundles that count, a line and task after the other, by version."""
    rows = connection.execute(select(bundles).order_by(bundles.c.line, bundles.c.task, bundles.c.version))
    return [
        Published(row.line, row.task, row.version, row.sha256, row.bytes, tuple(json.loads(row.signers)))
        for row in _standing(connection, rows)
    ]


def _standing(connection: Connection, rows: Iterable[Row[Any]]) -> list[Row[Any]]:
    """Leave out the bundles that only revoked keys have signed."""
    return [row for row in list(rows) if not revocations.is_revoked(connection, json.loads(row.signers))]


def bundle_blob(connection: Connection, line: str, task: str, version: int) -> str:
    """Return the blob of a published bundle; `not_found` where there is none."""
    found = select(bundles.c.blob).where(bundles.c.line == line, bundles.c.task == task, bundles.c.version == version)
    blob = connection.scalar(found)
    if blob is None:
        raise RefusedError("not_found", f"no bundle {line}/{task} version {version} is published here")
    return str(blob)
