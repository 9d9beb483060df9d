"""`manifest:PATH`: a CSV, or a folder or zip with `index.csv`.

Columns image, file, label, center, lesion_id, split; `image`, `label` at least; further columns are kept with the row.
Guarantees: every file named lies inside the folder or zip; a zip holds no image that its index does not list.
Source: docs/design.md 5 (Data SPECs).
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from edgefl_trainer.data.errors import DataError
from edgefl_trainer.data.rows import SPLITS, UNDEALT, Row, SourceRows
from edgefl_trainer.data.sources.files import file_pixels
from edgefl_trainer.data.sources.store import FileStore, ZipStore, check_relative, is_image_name, open_store
from edgefl_trainer.data.sources.tables import TableFile, read_table

INDEX = "index.csv"
_REQUIRED = ("image", "label")
_KNOWN = ("image", "file", "label", "center", "lesion_id", "split")


def read_manifest(path: Path) -> SourceRows:
    """Read the rows of a CSV, or of the `index.csv` in a folder or zip, in its order.

    Without a `file` column the picture is `<image>.jpg`. A `DataError` is one sentence about the file, column, row or
    value that cannot be used.
    """
    if path.suffix.lower() == ".csv":
        store, index = open_store(path.parent), path.name
        if not path.is_file():
            raise DataError(f"No manifest at {path}; check the path in the data SPEC.")
    else:
        store, index = open_store(path), INDEX
    table = read_table(store, index, _REQUIRED)
    rows = tuple(_row(record, line, table) for line, record in table.records)
    _check_listed(store, rows)
    return SourceRows(f"manifest:{path}", rows, file_pixels(store, rows))


def _row(record: Mapping[str, str], line: int, table: TableFile) -> Row:
    where = f"{table.where} line {line}"
    image = record["image"]
    if not image:
        raise DataError(f"{where} has no image name.")
    split = record.get("split", UNDEALT)
    if split not in SPLITS:
        raise DataError(f"{where} has the split {split!r}; allowed are {', '.join(s for s in SPLITS if s)} or nothing.")
    label = record["label"] or None
    if label is None and split in ("train", "val", "test"):
        raise DataError(f"{where} ({image}) has no label but the split {split}; call it unlabelled or label it.")
    file = record.get("file") or f"{image}.jpg"
    check_relative(file, where)
    return Row(
        image=image,
        source=file,
        label=None if split == "unlabelled" else label,
        site=record.get("center") or None,
        lesion=record.get("lesion_id") or f"image:{image}",
        split=split,
        extra=tuple((name, value) for name, value in record.items() if name not in _KNOWN),
    )


def _check_listed(store: FileStore, rows: Sequence[Row]) -> None:
    if not isinstance(store, ZipStore):
        return
    listed = {row.source for row in rows}
    stray = [name for name in store.names() if is_image_name(name) and name not in listed]
    if stray:
        raise DataError(
            f"{store.name} holds {len(stray)} images that its {INDEX} does not list, the first is {stray[0]}; "
            "list or remove them."
        )
