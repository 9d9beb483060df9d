"""What tests of the engine look at in a run directory."""

from pathlib import Path


def files_of(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
