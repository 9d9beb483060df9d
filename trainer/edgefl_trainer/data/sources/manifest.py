"""`manifest:PATH`: a CSV, or a folder or zip with `index.csv`.

Columns image, file, label, center, lesion_id, split; `image`, `label` at least; further columns are kept with the row.
Guarantees: every file named lies inside the folder or zip; a zip holds no image that its index does not list.
Source: docs/design.md 5 (Data SPECs).
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from edgefl_protocol.sentences import counted
from edgefl_trainer.data.errors import DataError
from edgefl_trainer.data.rows import SPLITS, UNDEALT, Row, SourceRows
from edgefl_trainer.data.sources.columns import KNOWN, column_meant
from edgefl_trainer.data.sources.files import pixels_with_gaps
from edgefl_trainer.data.sources.store import (
    IMAGE_SUFFIXES,
    FileStore,
    ZipStore,
    check_relative,
    is_image_name,
    open_store,
)
from edgefl_trainer.data.sources.tables import TableFile, read_table
from edgefl_trainer.data.tasks import class_name, listed

INDEX = "index.csv"
_ASKING = {"vqa-rad": "trainset.json", "slake": "train.json"}  # kind of SPEC → the list that its data have
_REQUIRED = ("image", "label")
_WITHOUT = {  # what a column that is absent means
    "center": "its pictures belong to no site",
    "lesion_id": (
        "each picture counts as a lesion of its own, so the model may be judged on a lesion that it learned from"
    ),
    "split": "train and test rows are dealt here, by lesion",
}
_NO_VALUE = ("na", "n/a", "nan", "null")  # how R, pandas and databases write a cell without a value
_READ_AS = {  # what such a cell is then
    "label": "as the name of a class",
    "center": "as the name of a site",
    "lesion_id": "as one lesion that all these pictures show",
}


def read_manifest(path: Path) -> SourceRows:
    """Read the rows of a CSV, or of the `index.csv` in a folder or zip, in its order.

    Without a `file` column the picture is `<image>.jpg`, or `<image>` where that ends like a picture. A `DataError` is
    one sentence about the file, column, row or value that cannot be used.
    """
    if path.suffix.lower() == ".csv":
        store, index = open_store(path.parent), path.name
        if not path.is_file():
            raise DataError(f"No manifest at {path}; check the path in the data SPEC.")
    else:
        store, index = open_store(path), INDEX
        if not store.has(INDEX):
            raise DataError(_without_index(path, store))
    table = read_table(store, index, _REQUIRED)
    rows = tuple(_row(record, line, table) for line, record in table.records)
    _check_listed(store, rows)
    has_file = bool(table.records) and "file" in table.records[0][1]
    note = "" if has_file else f"{table.where} has no column file, so IMAGE.jpg was looked for."
    warnings = (
        *absent_columns(table),
        *_without_lesion(rows, table),
        *_without_label(rows, table),
        *_without_value(table),
        *_of_two_labels(rows, table),
    )
    return SourceRows(f"manifest:{path}", rows, pixels_with_gaps(store, rows, note), warnings, _named_twice(table))


def _without_index(path: Path, store: FileStore) -> str:
    """Say that the list of pictures is missing, and how what lies there is read, where that can be seen."""
    names = sorted(one.name for one in path.iterdir()) if path.is_dir() else store.names()
    found = next((kind for kind, file in _ASKING.items() if any(name.rpartition("/")[2] == file for name in names)), "")
    archives = [f"manifest:{path / name}" for name in names if name.lower().endswith(".zip")] if path.is_dir() else []
    tables = [name for name in names if name.lower().endswith(".csv")]
    told = f"{path} holds no {INDEX}, which lists the pictures and their labels"
    if found:
        return f"{told}; it holds {_ASKING[found]}, a list of questions: name it {found}:{path}."
    if archives:
        return f"{told}; it holds zip files: name one, such as {archives[0]}."
    if tables:
        return f"{told}; it holds {listed(tables)}: call the list {INDEX}."
    return f"{told}; write it (docs/reference/data.md), or name another data SPEC."


def _named_twice(table: TableFile) -> tuple[str, ...]:
    """Write a sentence on images that several rows name, with their lines."""
    lines: dict[str, list[int]] = {}
    for line, record in table.records:
        lines.setdefault(record["image"], []).append(line)
    several = [(image, found) for image, found in lines.items() if len(found) > 1]
    if not several:
        return ()
    told = listed([f"{image!r} in lines {', '.join(map(str, found[:-1]))} and {found[-1]}" for image, found in several])
    return (
        f"{table.where} names {counted(len(several), 'image')} more than once: {told}; image names must be unique.",
    )


def _without_label(rows: Sequence[Row], table: TableFile) -> tuple[str, ...]:
    """Write a sentence on rows whose label is empty beside rows with one, unless their split says so."""
    empty = [
        f"{record['image']} in line {line}"
        for line, record in table.records
        if not record["label"] and record.get("split") != "unlabelled"
    ]
    if not empty or all(row.label is None for row in rows):
        return ()
    has = "has" if len(empty) == 1 else "have"
    return (
        f"{len(empty)} of {counted(len(rows), 'row')} of {table.where} {has} an empty label, so only methods without "
        f"labels learn from {'it' if len(empty) == 1 else 'them'}; where that is meant, write the split unlabelled: "
        f"{listed(empty)}",
    )


def _without_lesion(rows: Sequence[Row], table: TableFile) -> tuple[str, ...]:
    """Write a sentence where the column of lesions is empty, or empty in some rows with a label."""
    labelled = [
        (line, record) for (line, record), row in zip(table.records, rows, strict=True) if row.label is not None
    ]
    empty = [f"{record['image']} in line {line}" for line, record in labelled if record.get("lesion_id") == ""]
    if not empty:
        return ()
    if len(empty) == len(labelled):
        return (f"{table.where} has an empty column lesion_id: {_WITHOUT['lesion_id']}",)
    return (
        f"{len(empty)} of {counted(len(labelled), 'labelled row')} of {table.where} "
        f"{'has' if len(empty) == 1 else 'have'} no lesion_id, and each counts as a lesion of its own: {listed(empty)}",
    )


def _without_value(table: TableFile) -> Iterator[str]:
    """Write a sentence for each column with cells that another program wrote for want of a value."""
    for column, read_as in _READ_AS.items():
        found = [
            (record[column], f"{record['image']} in line {line}")
            for line, record in table.records
            if record.get(column, "").casefold() in _NO_VALUE
        ]
        if found:
            yield (
                f"{counted(len(found), 'row')} of {table.where} {'has' if len(found) == 1 else 'have'} {found[0][0]!r} "
                f"as {column}, which is read {read_as}; where no value is known, leave the cell empty: "
                f"{listed([row for _, row in found])}"
            )


def _of_two_labels(rows: Sequence[Row], table: TableFile) -> Iterator[str]:
    """Write a sentence on lesions whose rows have several labels: two may have one number."""
    labels: dict[str, dict[str, None]] = {}
    for row in rows:
        if row.label is not None:
            labels.setdefault(row.lesion, {})[row.label] = None
    several = [f"{lesion} ({', '.join(found)})" for lesion, found in labels.items() if len(found) > 1]
    if several:
        yield (
            f"{counted(len(several), 'lesion')} of {table.where} {'has' if len(several) == 1 else 'have'} rows of "
            f"several labels, and a lesion has one; give each lesion a lesion_id of its own: {listed(several)}"
        )


def absent_columns(table: TableFile) -> tuple[str, ...]:
    """Write a sentence for each absent column that bears on who learns from what, and name one that looks like it."""
    columns = table.records[0][1].keys() if table.records else ()
    found = []
    for name, means in _WITHOUT.items():
        if name in columns:
            continue
        meant = column_meant(name, tuple(columns))
        if meant is not None:
            told = f"{table.where} has no column {name}: {means}"
            found.append(f"{told}; its column {meant} is not read as {name}; rename it if it is meant")
        elif name == "lesion_id":
            found.append(f"{table.where} has no column {name}: {means}")
    return tuple(found)


def _row(record: Mapping[str, str], line: int, table: TableFile) -> Row:
    where = f"{table.where} line {line}"
    image = record["image"]
    if not image:
        raise DataError(f"{where} has no image name.")
    split = record.get("split", UNDEALT)
    if split not in SPLITS:
        raise DataError(f"{where} has the split {split!r}; allowed: {', '.join(s for s in SPLITS if s)}, or nothing.")
    label = class_name(record["label"]) or None
    if label is None and split in ("train", "val", "test"):
        raise DataError(
            f"{where} ({image}) has the split {split} but no label; give it a label, or the split unlabelled."
        )
    file = record.get("file") or (image if image.lower().endswith(IMAGE_SUFFIXES) else f"{image}.jpg")
    check_relative(file, where)
    return Row(
        image=image,
        source=file,
        label=None if split == "unlabelled" else label,
        site=record.get("center") or None,
        lesion=record.get("lesion_id") or f"image:{image}",
        split=split,
        extra=tuple((name, value) for name, value in record.items() if name not in KNOWN),
    )


def _check_listed(store: FileStore, rows: Sequence[Row]) -> None:
    if not isinstance(store, ZipStore):
        return
    listed = {row.source for row in rows}
    stray = [name for name in store.names() if is_image_name(name) and name not in listed]
    if stray:
        raise DataError(
            f"{store.name} holds {counted(len(stray), 'image')} that its {INDEX} does not list, such as {stray[0]}; "
            "list or remove them."
        )
