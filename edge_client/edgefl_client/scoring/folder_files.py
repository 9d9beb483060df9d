"""Which files of a folder are pictures to score, and which are left out.

No picture is left out unnoticed: one of a kind that is not read is told, and so is one whose name does not end like a
picture's, found by how its content starts. So is a folder behind a link, which is not followed: it may lead back. A
folder that cannot be looked into stands among the pictures, as one that cannot be read.
"""

import glob
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from edgefl_protocol.sentences import counted, listed

if TYPE_CHECKING:
    from edgefl_client.scoring.pictures import PictureReader

MODEL_SUFFIX = ".edgefl"
DRAWN = ".heatmap.png"  # how our own drawings end: no pictures to score
_START_BYTES = 132  # of a file, which tell every kind of picture: of DICOM the four after the first 128


def expand(given: Sequence[str], suffixes: Sequence[str]) -> list[str]:
    """List files to score: a folder stands for its pictures, a pattern for what it matches, anything else for itself.

    Args:
        given: files, folders, patterns such as `day/**/*.jpg`, or `-` for a picture on standard input.
        suffixes: how the names of a folder's pictures end, in lower case.
    """
    files: list[str] = []
    for name in given:
        if not name:  # an empty variable of a shell: for a path it would be this folder
            files.append(name)
        elif _is_folder(name):
            files += pictures_below(Path(name), suffixes)
        elif glob.has_magic(name) and not os.path.lexists(name):
            files += _matches(name) or [name]  # a pattern that matches nothing is a file that is missing
        else:
            files.append(name)
    return files


def left_out(given: Sequence[str], reader: "PictureReader") -> str | None:
    """Say what in the given folders is not read, so that no picture is missed unnoticed; None for nothing."""
    said = []
    others = [name for place in _folders(given) for name in other_files(place, reader.suffixes)]
    if unnamed := [name for name in others if _is_unnamed_picture(name, reader)]:
        whose = "its name does" if len(unnamed) == 1 else "their names do"
        them = "it" if len(unnamed) == 1 else "them"
        said.append(
            f"Left out, because {whose} not end like a picture's: {listed(unnamed)}. Rename {them}, or give {them} by "
            "name."
        )
    if endings := [_ending(name) for name in others if _ending(name) in reader.other_suffixes]:
        said.append(reader.told_of_others(endings))
    if linked := sorted(name for place in _folders(given) for name in _linked_folders(place)):
        said.append(
            f"Left out: {counted(len(linked), 'folder behind a link', 'folders behind links')}: {listed(linked)}. "
            "What such a folder holds is scored where you give it by name."
        )
    return " ".join(said) or None


def why_left_out(name: str, reader: "PictureReader") -> str | None:
    """Say why a picture of a folder is not scored, and what to do; None for a file that is no picture."""
    if _ending(name) in reader.other_suffixes:
        return f"{name} is not scored. {reader.told_of_others([_ending(name)])}"
    if _is_unnamed_picture(name, reader):
        return f"{name} is not scored, because its name does not end like a picture's: rename it."
    return None


def other_files(folder: Path, suffixes: Sequence[str]) -> list[str]:
    """List by name the files below a folder that are neither read, hidden, a drawing nor a model."""
    ours = (*suffixes, DRAWN, MODEL_SUFFIX)
    return sorted(name for name in _files_below(folder) if not name.lower().endswith(ours))


def _ending(name: str) -> str:
    return Path(name).suffix.lower()


def _is_unnamed_picture(name: str, reader: "PictureReader") -> bool:
    """Tell whether a file holds a picture by its content, though its name does not say so."""
    from edgefl_client.scoring.pictures import name_of

    if _ending(name) in reader.other_suffixes:
        return False
    try:
        if not stat.S_ISREG(os.stat(name).st_mode):  # noqa: PTH116 - a pipe would wait for its writer
            return False
        with Path(name).open("rb") as file:
            return name_of(file.read(_START_BYTES)) is not None
    except OSError:  # gone, or not ours to read
        return False


def without_pictures(given: Sequence[str], suffixes: Sequence[str]) -> dict[str, int]:
    """Name the given folders in which there is nothing to score, and count our own heat maps in each."""
    empty = [place for place in _folders(given) if not pictures_below(place, suffixes)]
    return {str(place): sum(name.endswith(DRAWN) for name in _files_below(place)) for place in empty}


def _folders(given: Sequence[str]) -> list[Path]:
    return [Path(name) for name in given if name and _is_folder(name)]


def _is_folder(path: str | Path) -> bool:
    """Tell whether there is such a folder; not where the system does not say, as below a closed one."""
    return os.path.isdir(path)  # noqa: PTH112 - that of pathlib raises there


def _matches(pattern: str) -> list[str]:
    """Match as a shell does: hidden files only where the pattern names them. Our own heat maps are no pictures."""
    path = Path(pattern)
    try:
        found = sorted(Path(path.anchor or ".").glob(str(path.relative_to(path.anchor))))
    except ValueError:  # no valid pattern
        return []
    named = _hidden_parts(path)
    files = [one for one in found if not _is_folder(one) and not one.name.endswith(DRAWN)]
    return [str(one) for one in sorted({*files, *_closed_folders(path)}) if _hidden_parts(one) <= named]


def _closed_folders(pattern: Path) -> set[Path]:
    """The folders that a pattern leads through and this user may not look into."""
    parts = pattern.relative_to(pattern.anchor).parts
    first = next(place for place, part in enumerate(parts) if glob.has_magic(part))
    closed = set()
    for end in range(max(first, 1), len(parts)):
        needed = os.R_OK | os.X_OK if glob.has_magic(parts[end]) else os.X_OK  # a name is found without a list
        before = Path(pattern.anchor or ".").glob("/".join(parts[:end]))
        closed |= {folder for folder in before if _is_folder(folder) and not os.access(folder, needed)}
    return closed


def _hidden_parts(path: Path) -> int:
    return sum(part.startswith(".") for part in path.parts)


def pictures_below(folder: Path, suffixes: Sequence[str]) -> list[str]:
    """List the pictures below a folder by name, without hidden ones, heat maps and folders behind links.

    With them stand the folders that cannot be looked into: whoever reads the list is told of each.
    """
    ends, closed = tuple(suffixes), list[str]()
    names = list(_files_below(folder, closed))
    return sorted([*closed, *(name for name in names if name.lower().endswith(ends) and not name.endswith(DRAWN))])


def _files_below(folder: Path, closed: list[str] | None = None) -> Iterator[str]:
    """Name the files below a folder that are not hidden; `closed` takes the folders that cannot be looked into."""

    def note(error: OSError) -> None:
        if closed is not None and not isinstance(error, FileNotFoundError):  # that one is gone since it was listed
            closed.append(str(error.filename))

    for place, _, names in _walked(folder, note):
        yield from (str(place / name) for name in names if not name.startswith("."))


def _linked_folders(folder: Path) -> Iterator[str]:
    """Name the folders behind links below a folder that are not hidden."""
    for place, folders, _ in _walked(folder):
        yield from (str(place / name) for name in folders if (place / name).is_symlink())


def _walked(
    folder: Path, onerror: Callable[[OSError], None] | None = None
) -> Iterator[tuple[Path, list[str], list[str]]]:
    """Walk down a folder: each folder that is neither hidden nor behind a link, its folders and its files."""
    for place, folders, names in os.walk(folder, onerror=onerror):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        yield Path(place), folders, names
