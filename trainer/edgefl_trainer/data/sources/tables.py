"""Read text files that list images: CSV with a header, or plain lines; with bounds and clear sentences.

Guarantees: the columns asked for are there, every line has as many fields as the header, values are stripped strings.
"""

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass

from edgefl_protocol.sentences import counted
from edgefl_trainer.data.errors import DataError
from edgefl_trainer.data.sources.columns import KNOWN, OPTIONAL, column_meant
from edgefl_trainer.data.sources.store import MAX_TABLE_BYTES, FileStore


@dataclass(frozen=True, slots=True)
class TableFile:
    """A CSV as read."""

    where: str  # "NAME in STORE", for messages
    records: tuple[tuple[int, dict[str, str]], ...]  # (line number in the file, column → value)


@dataclass(frozen=True, slots=True)
class TextFile:
    """Lines as read."""

    where: str  # "NAME in STORE", for messages
    lines: tuple[tuple[int, str], ...]  # (line number in the file, line)


def read_table(store: FileStore, name: str, required: Sequence[str]) -> TableFile:
    """Read a CSV whose header must hold the columns `required`.

    Raises:
        DataError: The file is missing, not UTF-8, lacks a column, or has a line of another length than the header.
    """
    where = f"{name} in {store.name}"
    text = _read_text(store, name, where, "CSV")
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    try:
        header = [column.strip() for column in next(reader, [])]
        _check_header(header, required, where)
        records = []
        for fields in reader:
            if not fields:
                continue
            if len(fields) != len(header):
                raise DataError(
                    f"{where} line {reader.line_num} has {counted(len(fields), 'field')}, but its "
                    f"header has {len(header)}."
                )
            records.append((reader.line_num, dict(zip(header, (f.strip() for f in fields), strict=True))))
    except csv.Error as error:
        raise DataError(f"{where} cannot be read as CSV (line {reader.line_num}: {error}).") from error
    return TableFile(where, tuple(records))


def read_lines(store: FileStore, name: str) -> TextFile:
    """Read the lines of a text file that are not empty, stripped of white space at both ends.

    A `DataError` where the file is missing or not UTF-8.
    """
    where = f"{name} in {store.name}"
    lines = _read_text(store, name, where, "text").splitlines()
    return TextFile(where, tuple((number, line.strip()) for number, line in enumerate(lines, 1) if line.strip()))


def _read_text(store: FileStore, name: str, where: str, form: str) -> str:
    try:
        return store.read(name, MAX_TABLE_BYTES).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{where} is not UTF-8 text (byte {error.start}); save it as UTF-8 {form}.") from error


def _check_header(header: Sequence[str], required: Sequence[str], where: str) -> None:
    missing = [column for column in required if column not in header]
    if missing:
        lacks = f"no column {' and no column '.join(missing)}"
        if not any(header):
            raise DataError(
                f"{where} is empty, or begins with an empty line; its first line has to name the columns, at least "
                f"{' and '.join(required)}."
            )
        raise DataError(
            f"{where} has {lacks}; its columns are {', '.join(header)}{_remedy(header, missing, required)}."
        )
    if len(set(header)) != len(header):
        raise DataError(f"{where} names a column twice; column names must be unique.")


def _remedy(header: Sequence[str], missing: Sequence[str], required: Sequence[str]) -> str:
    """What to change where the header is another program's, or another person's, way to write it.

    Of a table of images the columns that it may do without are named with them, so that one change is enough.
    """
    if len(header) == 1 and any(sign in header[0] for sign in ";\t"):
        return ": save it as CSV UTF-8 with commas; fields that hold a comma in quotes"
    if set(missing) <= {column.casefold() for column in header}:
        told = [f"write {', '.join(missing)} in small letters"]
    else:
        meant = _renamed(header, [column for column in missing if column in KNOWN])
        told = [f"rename {meant}"] if meant else []
    beside = [column for column in OPTIONAL if column not in header] if set(required) <= set(KNOWN) else []
    if may_be := _renamed(header, beside):
        told.append(f"rename {may_be} where that is meant")
    return f": {', and '.join(told)}" if told else ""


def _renamed(header: Sequence[str], columns: Sequence[str]) -> str:
    """Write which column of the header to rename to each of these, where one looks like it."""
    meant = {column: found for column in columns if (found := column_meant(column, header))}
    return " and ".join(f"{found} to {column}" for column, found in meant.items())
