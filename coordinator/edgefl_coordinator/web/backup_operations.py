"""What an operator's `backup` asks of the coordinator: hold a moment still, and let go of it.

Guarantees: the snapshot is taken by whoever has the store open; the command reads it and writes the file, so a large
backup keeps no member waiting. The audit log says when. Source: docs/security.md check 67.
"""

from collections.abc import Mapping
from typing import Any

from edgefl_coordinator.rounds.operator_gate import command_of
from edgefl_coordinator.store import audit
from edgefl_coordinator.store.backups import snapshot
from edgefl_coordinator.store.coordinator import Coordinator

Arguments = Mapping[str, Any]
Facts = dict[str, Any]


def begin_backup(coordinator: Coordinator, arguments: Arguments) -> Facts:
    """Take a snapshot: {snapshot?} → {snapshot, federation, made_ms, outside}.

    Whoever names it can let go of it before it is there. `outside` are files that the settings name and that are not in
    it: the gate's program, and what lies elsewhere. A `StorageError` where the disk is full, a payload is missing, or
    the database goes away.
    """
    settings, now_ms, home = coordinator.settings, coordinator.clock(), coordinator.store.home
    with coordinator.store.transaction() as connection:
        audit.append(connection, now_ms, "backup", settings.federation)
    name = str(arguments.get("snapshot") or snapshot.fresh_name())
    snapshot.take(coordinator, name)
    told = {"snapshot": name, "federation": settings.federation, "made_ms": now_ms}
    outside = [str(path) for path in snapshot.outside(home, settings)]
    return told | {"outside": outside + list(command_of(settings.protection.gate, home.root)[:1])}


def end_backup(coordinator: Coordinator, arguments: Arguments) -> Facts:
    """Remove a snapshot: {snapshot} → {}."""
    snapshot.drop(coordinator.store.home, str(arguments["snapshot"]))
    return {}
