"""`folder:DIR`: pictures at `site/class/*.jpg`, or at `class/*.jpg` with `@site=NAME`.

A class folder called `unlabelled` holds images for self-supervised learning only. Each picture counts as a lesion of
its own; where several pictures show one lesion, a manifest says so. Source: docs/design.md 5 (Data SPECs).
"""

from collections.abc import Sequence
from pathlib import Path

from edgefl_protocol.sentences import counted, listed
from edgefl_trainer.data.errors import DataError
from edgefl_trainer.data.rows import UNDEALT, Row, SourceRows
from edgefl_trainer.data.sources.files import file_pixels
from edgefl_trainer.data.sources.store import OTHER_SUFFIXES, is_image_name, open_store
from edgefl_trainer.data.tasks import class_name

UNLABELLED = "unlabelled"


def read_folder(path: Path) -> SourceRows:
    """Read one row for each picture of a folder (or zip), in name order; the split is dealt later.

    Pictures in other forms are left out with a warning. Where a folder would lose all its pictures, a run refuses it.

    Raises:
        DataError: There are no pictures, one of the outermost folders has none, or they do not lie two (or all one)
            folders deep.
    """
    store = open_store(path)
    files = store.names()
    names = [name for name in files if is_image_name(name)]
    others = [name for name in files if is_image_name(name, OTHER_SUFFIXES)]
    if not names:
        also = f" Convert its {counted(len(others), 'picture')} of other forms." if others else ""
        raise DataError(f"{path} holds no .jpg, .jpeg or .png files; put them at SITE/CLASS/NAME.jpg.{also}")
    used = {name.partition("/")[0] for name in names}
    empty = [name for name in store.top_folders() if name not in used]
    if empty:
        raise DataError(
            f"The folder {empty[0]} in {path} holds no .jpg, .jpeg or .png file; add its pictures, or remove the "
            "folder."
        )
    depth = 2 if any(name.count("/") == 2 for name in names) else 1
    odd = next((name for name in names if name.count("/") != depth), None)
    if odd is not None:
        raise DataError(
            f"{odd} in {path} is in the wrong place; put all pictures at SITE/CLASS/NAME, or all at CLASS/NAME."
        )
    rows = tuple(_row(name) for name in names)
    warnings, refused = _left_out(names, others, path, depth)
    return SourceRows(f"folder:{path}", rows, file_pixels(store, rows), warnings, refused)


def _left_out(
    names: Sequence[str], others: Sequence[str], path: Path, depth: int
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Write what to warn of and what to refuse where some pictures are in forms that no run reads.

    Only a class folder is refused: a picture that lies elsewhere shows something else, such as an overview.
    """
    if not others:
        return (), ()
    there = {_folder(name) for name in names}
    lost = sorted({_folder(name) for name in others if name.count("/") == depth} - there)
    told = f"{counted(len(others), 'picture is', 'pictures are')} left out of {path}, the first {others[0]}"
    refused = f"{listed(lost)} in {path} would lose all pictures: convert them to .jpg or .png, or remove the folder"
    return (f"{told}: a run reads .jpg, .jpeg and .png; convert the others",), (refused,) if lost else ()


def _folder(name: str) -> str:
    return name.rpartition("/")[0]


def _row(name: str) -> Row:
    *site, label, _ = name.split("/")
    unlabelled = label == UNLABELLED
    return Row(
        image=name,
        source=name,
        label=None if unlabelled else class_name(label),
        site=site[0] if site else None,
        lesion=f"image:{name}",
        split=UNLABELLED if unlabelled else UNDEALT,
    )
