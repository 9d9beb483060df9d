"""A backup, made as the command makes it, of a coordinator that the test has open."""

from pathlib import Path

from edgefl_coordinator.store.backups import snapshot
from edgefl_coordinator.store.backups.backup_file import About, BackedUp, write_backup
from edgefl_coordinator.store.coordinator import Coordinator
from edgefl_coordinator.web.operations import OPERATIONS


def backup_of(coordinator: Coordinator, path: Path) -> Path:
    """Write a backup; what it was written from is gone afterwards."""
    facts = OPERATIONS["begin_backup"](coordinator, {})
    folder = snapshot.folder_of(coordinator.store.home, facts["snapshot"])
    version, rows, begun = snapshot.what_it_holds(folder)
    about = About(federation="skin", made_ms=facts["made_ms"], program="0.1.0", store=version, rows=rows)
    sources = [BackedUp(path=str(one.relative_to(folder)), file=one, most=begun.get(one.name))
               for one in snapshot.files_of(folder)]  # fmt: skip
    write_backup(path, about, sources)
    OPERATIONS["end_backup"](coordinator, {"snapshot": facts["snapshot"]})
    assert not list(coordinator.store.home.jobs.iterdir())
    return path
