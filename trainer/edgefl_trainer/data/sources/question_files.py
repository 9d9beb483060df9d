"""Lists of questions in JSON, as VQA-RAD and SLAKE publish them, and the rows that they make.

Guarantees: a file is read whole and bounded; a value is text or a number, at most `MAX_CHARACTERS` long, without
spaces at its ends; an answer is written by one rule (`rules.questions.normalised_answer`); pictures that several rows
show are located once. What cannot be used is named with its file and question.
Source: docs/reference/data.md (questions).
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from edgefl_protocol.errors import QuestionError
from edgefl_protocol.rules.questions import MAX_CHARACTERS, check_question, normalised_answer
from edgefl_protocol.sentences import counted
from edgefl_trainer.data.errors import DataError
from edgefl_trainer.data.rows import UNDEALT, Question, Row, SourceRows
from edgefl_trainer.data.sources.files import pixels_with_gaps
from edgefl_trainer.data.sources.store import MAX_TABLE_BYTES, FileStore, is_image_name, pictures_by_name

_CLOSED = {"OPEN": False, "CLOSED": True}


@dataclass(frozen=True, slots=True)
class ListedQuestion:
    """One question of a list."""

    values: Mapping[str, Any]
    name: str  # of the row: the file's name and the question's number
    where: str  # for messages

    def text(self, key: str) -> str:
        """Return a value as text, spaces put right: some answers are numbers, and some types end in a space."""
        value = self.values.get(key)
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            raise DataError(f"{self.where} has no text as {key}; every question needs one.")
        text = str(value)
        if len(text) > MAX_CHARACTERS:
            raise DataError(
                f"{self.where} has {len(text):,} characters as {key}, at most {MAX_CHARACTERS:,} are allowed; shorten "
                "it, or leave the question out."
            )
        return " ".join(text.split())

    def one_of(self, key: str, allowed: Mapping[str, Any]) -> Any:
        """Return what a value stands for, whatever its case; a `DataError` names those that are allowed."""
        given = self.text(key)
        meant = {name.casefold(): value for name, value in allowed.items()}
        if given.casefold() not in meant:
            raise DataError(f"{self.where} has the {key} {given!r}; allowed: {', '.join(allowed)}.")
        return meant[given.casefold()]


@dataclass(frozen=True)
class Layout:
    """How one data set names its files and what its rows are."""

    files: Mapping[str, str]  # split → file; `train` first
    depth: int  # parts of a picture's path that its name in the list has
    folder: str  # where the pictures lie if they are not found


def read_layout(layout: Layout, store: FileStore, *, test_only: bool) -> list[tuple[str, list[ListedQuestion]]]:
    """Read the lists that are there, as (split, questions); training rows of a set without another list are undealt.

    A `DataError` where the list of the training questions (with `test_only`, of the test questions) is missing.
    """
    names = store.names()
    found = {split: _find(names, file) for split, file in layout.files.items() if not test_only or split == "test"}
    needed = "test" if test_only else "train"
    if found[needed] is None:
        hint = "" if test_only else " A file of test questions alone is named with @split=test, after their pictures."
        raise DataError(f"{store.name} lacks {layout.files[needed]}; put the official file there.{hint}")
    lists = [(split, _entries(store, name)) for split, name in found.items() if name is not None]
    return [(UNDEALT, entries) for _, entries in lists] if [split for split, _ in lists] == ["train"] else lists


def make_row(entry: ListedQuestion, split: str, *, site: str, picture: tuple[str, str], kind: str) -> Row:
    """Make the row of one question.

    Args:
        picture: its name in the list, and its file.
        kind: what the question asks for, as annotated.
    """
    text = entry.text("question")
    try:
        check_question(text)
    except QuestionError as error:
        raise DataError(f"{entry.where}: {error}") from error
    closed = entry.one_of("answer_type", _CLOSED)
    return Row(
        image=entry.name,
        source=picture[1],
        label=normalised_answer(entry.text("answer")) or None,
        site=site,
        lesion=f"image:{picture[0]}",
        split=split,
        question=Question(text, closed, kind),
    )


def question_rows(name: str, store: FileStore, rows: Sequence[Row]) -> SourceRows:
    """Put rows and their pictures together; those of questions without an answer are told and not learned from."""
    blank = [row.image for row in rows if row.label is None]
    told = f"{name} has {counted(len(blank), 'question')} without an answer, such as {''.join(blank[:1])}"
    warnings = (f"{told}: neither learned from nor judged on",) if blank else ()
    return SourceRows(name, tuple(rows), pixels_with_gaps(store, rows), warnings)


class PictureFiles:
    """Where the pictures of a set lie, by the name that a list gives them."""

    def __init__(self, store: FileStore, layout: Layout) -> None:
        self._layout = layout
        self._find = pictures_by_name(store, lambda name: _tail(name, layout.depth), layout.folder)

    def locate(self, entry: ListedQuestion, key: str) -> tuple[str, str]:
        """Return the name of a question's picture, and its file: where it should lie if it is not there."""
        given = entry.text(key)
        parts = PurePosixPath(given).parts
        if len(parts) != self._layout.depth or not is_image_name(given) or {"..", "/"} & {*parts} or "\\" in given:
            raise DataError(f"{entry.where} names the picture {given!r}; write it as the official files do.")
        return given, self._find(given) or f"{self._layout.folder}/{given}"


def _tail(name: str, parts: int) -> str:
    return "/".join(PurePosixPath(name).parts[-parts:])


def _find(names: Sequence[str], file: str) -> str | None:
    """The file of this name that lies least deep."""
    found = [name for name in names if PurePosixPath(name).name == file and not name.startswith("__MACOSX")]
    return min(found, key=lambda name: (name.count("/"), name), default=None)


def _entries(store: FileStore, name: str) -> list[ListedQuestion]:
    where = f"{name} in {store.name}"
    try:
        found = json.loads(store.read(name, MAX_TABLE_BYTES))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where} is not JSON ({error}); take the official file.") from error
    if not isinstance(found, list) or not all(isinstance(one, dict) for one in found):
        raise DataError(f"{where} is not a list of questions; take the official file.")
    stem = PurePosixPath(name).stem
    numbers = [one.get("qid", place) for place, one in enumerate(found)]
    return [
        ListedQuestion(one, f"{stem}/{number}", f"Question {number} of {where}")
        for number, one in zip(numbers, found, strict=True)
    ]
