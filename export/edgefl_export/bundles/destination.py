"""Where a bundle is written: never over a file, nor beside one that devices could not tell from it.

A device takes a bundle by its federation, line, task and version. Two that share all four hide one another, so the
folder of the new one is looked through for such a bundle. What lies elsewhere is not known here.
"""

import os
from pathlib import Path

from edgefl_export.errors import ExportError
from edgefl_protocol.bundle import unverified_manifest
from edgefl_protocol.bundle.archive import MAX_ARCHIVE_BYTES
from edgefl_protocol.durable import read_bounded
from edgefl_protocol.errors import EdgeflError

SUFFIX = ".edgefl"


def check_folder(output: Path) -> None:
    """Refuse, by an `ExportError`, a folder that is not there, or that nothing can be written into."""
    folder = output.parent
    if not folder.is_dir():
        raise ExportError(f"{folder} is no folder, so {output.name} cannot be written there: make it, or name another")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ExportError(f"this user cannot write into {folder}: allow it, or name another folder")


def check_new(output: Path) -> None:
    """Refuse, by an `ExportError`, a file that exists."""
    if output.exists():
        raise ExportError(f"{output} exists already: name another file, or overwrite it with --force")


def check_alone(output: Path, federation: str | None, line: str, task: str, version: int) -> None:
    """Refuse, by an `ExportError`, a version of which the folder holds a bundle already."""
    for path in sorted(output.parent.glob(f"*{SUFFIX}")):
        if path.name == output.name:
            continue
        try:
            found, _ = unverified_manifest(read_bounded(path, MAX_ARCHIVE_BYTES))
        except EdgeflError:
            continue  # no bundle
        if (found.federation, found.line, found.task, found.version) == (federation, line, task, version):
            raise ExportError(
                f"{path} already is version {version} of line {line}, task {task}: give --version {version + 1} or "
                "another --line, or make a second bundle of this version with --force"
            )
