"""Bundles that members can fetch, and the signed index that says which is current.

Guarantees: versions of a (line, task) only rise; a bundle is stored whole before the index names it. A bundle that only
revoked keys have signed counts no more, neither as the current one nor as a number to stay above. The coordinator does
not vouch for a bundle: members verify its own signatures. Source: docs/security.md, model bundles.
"""

import json
from collections.abc import Iterable, Sequence
from typing import Any

from sqlalchemy import Connection, Row, insert, select

from edgefl_coordinator.errors import OperatorError, RefusedError
from edgefl_coordinator.store import audit, revocations
from edgefl_coordinator.store.store import Blob
from edgefl_coordinator.store.tables import bundles
from edgefl_protocol.bundle.archive import MAX_ARCHIVE_BYTES
from edgefl_protocol.records.coordinator_records import IndexEntry


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


def entries(connection: Connection) -> list[IndexEntry]:
    """Return the current bundle of every line and task."""
    rows = connection.execute(select(bundles).order_by(bundles.c.line, bundles.c.task, bundles.c.version))
    newest = {(row.line, row.task): row for row in _standing(connection, rows)}  # the last of each is the highest
    return [
        IndexEntry(line=row.line, task=row.task, version=row.version, sha256=row.sha256, size=row.bytes)
        for row in newest.values()
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
