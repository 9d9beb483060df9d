"""Bundles that members can fetch, and the signed index that says which is current.

Guarantees: versions of a (line, task) only rise; a bundle is stored whole before the index names it. The coordinator
does not vouch for a bundle: members verify its own signatures. Source: docs/security.md, model bundles.
"""

from sqlalchemy import Connection, func, insert, select

from edgefl_coordinator import audit
from edgefl_coordinator.errors import OperatorError, RefusedError
from edgefl_coordinator.schema import bundles
from edgefl_coordinator.store import Blob
from edgefl_protocol.messages import MAX_BUNDLE_BYTES
from edgefl_protocol.records import IndexEntry


def publish(
    connection: Connection, now_ms: int, *, line: str, task: str, version: int, bundle_id: str, blob: Blob
) -> None:
    """Make a bundle the current one of its line and task.

    Raises:
        OperatorError: it is too large, or its version is not above the current one.
    """
    if blob.size > MAX_BUNDLE_BYTES:
        raise OperatorError(f"the bundle has {blob.size} bytes; at most {MAX_BUNDLE_BYTES} fit one envelope")
    newest = connection.scalar(
        select(func.max(bundles.c.version)).where(bundles.c.line == line, bundles.c.task == task)
    )
    if newest is not None and version <= newest:
        raise OperatorError(f"version {version} of {line}/{task} is not above {newest}, which is published; raise it")
    connection.execute(
        insert(bundles).values(
            line=line,
            task=task,
            version=version,
            bundle_id=bundle_id,
            sha256=blob.sha256,
            bytes=blob.size,
            blob=blob.name,
            published_ms=now_ms,
        )
    )
    detail = {"version": version, "sha256": blob.sha256, "bytes": blob.size}
    audit.append(connection, now_ms, "published", f"{line}/{task}", detail)


def entries(connection: Connection) -> list[IndexEntry]:
    """Return the current bundle of every line and task."""
    newest = select(bundles.c.line, bundles.c.task, func.max(bundles.c.version).label("version")).group_by(
        bundles.c.line, bundles.c.task
    )
    chosen = newest.subquery()
    rows = connection.execute(
        select(bundles).join(
            chosen,
            (bundles.c.line == chosen.c.line)
            & (bundles.c.task == chosen.c.task)
            & (bundles.c.version == chosen.c.version),
        )
    )
    return [
        IndexEntry(line=row.line, task=row.task, version=row.version, sha256=row.sha256, size=row.bytes) for row in rows
    ]


def bundle_blob(connection: Connection, line: str, task: str, version: int) -> str:
    """Return the blob of a published bundle.

    Raises:
        RefusedError: `not_found`.
    """
    found = select(bundles.c.blob).where(bundles.c.line == line, bundles.c.task == task, bundles.c.version == version)
    blob = connection.scalar(found)
    if blob is None:
        raise RefusedError("not_found", f"no bundle {line}/{task} version {version} is published here")
    return str(blob)
