"""What is asked about the pictures of a federation, as its rows have it and as a network reads it.

Guarantees: words and answers are those of the training rows of all sites, learned from or tuned on, and no other row
moves a byte of them; a picture is stored once, however many questions show it.
Source: docs/reference/data.md (questions); docs/decisions/0044.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from edgefl_protocol.pictures.answer import read_question
from edgefl_protocol.rules.questions import Questions, token_ids, words_of
from edgefl_protocol.sentences import counted
from edgefl_trainer.data.errors import DataError, TaskError
from edgefl_trainer.data.rows import Question, Row, SourceRows
from edgefl_trainer.data.sources.files import FilePixels, pixels_with_gaps

OTHER_ANSWER = -2
"""Label of a row whose answer no training row has: it counts, and every prediction of it is wrong."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What training questions hold: a network can read and say nothing else."""

    answers: tuple[str, ...]  # the classes of a federation
    questions: Questions


@dataclass(frozen=True, slots=True)
class QuestionRows:
    """The question of each row, in the order of the rows."""

    tokens: NDArray[np.int64]  # (n, length), see `rules.questions.token_ids`
    texts: tuple[str, ...]  # as asked
    closed: NDArray[np.bool_]  # (n,) whether the data calls it closed: the answers to choose from are in the question
    kinds: tuple[str, ...]  # what it asks for, as annotated
    vocabulary: Questions  # of the training rows


def asks(
    tables: Sequence[SourceRows], task: str = "all", classes: object | None = None, partition: object | None = None
) -> bool:
    """Tell whether the rows of a federation are questions, which are learned whole, with all their answers.

    Raises:
        DataError: Some rows are questions and some are not.
        TaskError: A task, classes or a partition is given, which are for pictures alone.
    """
    asking = [table.asks for table in tables]
    if any(asking) and not all(asking):
        one, other = tables[asking.index(True)].name, tables[asking.index(False)].name
        raise DataError(f"{one} holds questions and {other} pictures alone: learn from one kind at a time.")
    given = {"--task": None if task == "all" else task, "--classes": classes, "--partition": partition}
    for name, value in given.items():
        if any(asking) and value is not None:
            raise TaskError(f"{name} is for pictures alone, and the data holds questions: leave {name} out.")
    return any(asking)


def vocabulary_of(rows: Sequence[Row]) -> Vocabulary:
    """List the answers and words of the training rows, each sorted; a `DataError` where no training row has one."""
    learned = [row for row in rows if row.split == "train" and row.label is not None]
    answers = sorted({row.label for row in learned if row.label is not None})
    words = sorted({word for row in learned for word in words_of(question_of(row).text)})
    if not answers:
        raise DataError(
            "The data holds no training question with an answer: name the SPEC of the training questions, before any "
            "that ends in @split=test."
        )
    return Vocabulary(tuple(answers), Questions(tuple(words)))


def answered(
    rows: Sequence[Row], vocabulary: Vocabulary | None = None
) -> tuple[tuple[str, ...], NDArray[np.int64], QuestionRows]:
    """Return the answers that are told apart, which of them each row has, and what the rows ask.

    `vocabulary` is that of a run which the rows are to judge; None: that of these rows.
    """
    known = vocabulary or vocabulary_of(rows)
    return known.answers, answer_labels(rows, known.answers), question_rows(rows, known.questions)


def answer_labels(rows: Sequence[Row], answers: Sequence[str]) -> NDArray[np.int64]:
    """Number the answer of each row, (n,): −1 without one, −2 (`OTHER_ANSWER`) where it is not among `answers`."""
    index = {answer: place for place, answer in enumerate(answers)}
    return np.array([-1 if row.label is None else index.get(row.label, OTHER_ANSWER) for row in rows], dtype=np.int64)


def question_rows(rows: Sequence[Row], questions: Questions) -> QuestionRows:
    """Return what the rows ask, numbered by the words that are known."""
    asked = [question_of(row) for row in rows]
    table = questions.table
    return QuestionRows(
        tokens=np.stack([token_ids(one.text, table, questions.length) for one in asked]),
        texts=tuple(one.text for one in asked),
        closed=np.array([one.closed for one in asked], dtype=np.bool_),
        kinds=tuple(one.kind for one in asked),
        vocabulary=questions,
    )


def question_of(row: Row) -> Question:
    """Return what a row asks, where it is known that it asks."""
    assert row.question is not None
    return row.question


def picture_tables(tables: Sequence[SourceRows]) -> tuple[list[SourceRows], NDArray[np.int64]]:
    """List the pictures that questions show, each once, as tables; and for each row which of them it shows, (n,).

    A `DataError` where a picture is missing.
    """
    stores = {table.store.name: table.store for table in map(_files, tables)}
    shown: dict[str, dict[str, Row]] = {name: {} for name in stores}  # store → file → a row that shows it
    for table in tables:
        for row in table.each_picture():
            shown[_files(table).store.name].setdefault(row.source, replace(row, image=row.source))
    found: list[SourceRows] = []
    place: dict[tuple[str, str], int] = {}
    for name, rows in shown.items():
        pixels = pixels_with_gaps(stores[name], list(rows.values()))
        check_pictures(pixels, len(rows))
        found.append(SourceRows(name, tuple(rows.values()), pixels))
        place |= {(name, file): number for number, file in enumerate(rows, len(place))}
    wanted = [place[_files(table).store.name, row.source] for table in tables for row in table.rows]
    return found, np.array(wanted, dtype=np.int64)


def check_pictures(pixels: FilePixels, wanted: int) -> None:
    """Refuse, by a `DataError`, questions of which a picture is missing; a source may hold questions alone."""
    if len(pixels.missing) == wanted:
        raise DataError(no_picture(pixels))
    pixels.check_present(wanted)


def no_picture(pixels: FilePixels) -> str:
    """Say that a source holds questions without a single picture."""
    return (
        f"{pixels.store.name} holds none of the pictures that are asked about, such as {pixels.missing[0]}: name the "
        "folder or zip that has them; a file of test questions comes after it, with @split=test."
    )


def told_of_questions(
    rows: Sequence[Row], labels: NDArray[np.int64], questions: Questions, learning: Sequence[Row]
) -> list[str]:
    """Write what bears on the figures of test questions: pictures that were learned from, unknown answers and words.

    Args:
        learning: the rows that teach words; those that are tuned on do not, where it is known which they are.
    """
    found = []
    taught = _taught(learning, questions.length)
    asking = [(row, label) for row, label in zip(rows, labels, strict=True) if row.site and row.label is not None]
    learned = {row.lesion for row, _ in asking if row.split == "train"}
    for split in ("val", "test"):
        judged = {row.lesion for row, _ in asking if row.split == split}
        if again := len(judged & learned):
            are = "is" if again == 1 else "are"
            found.append(
                f"{again} of the {counted(len(judged), 'picture')} of the {split} questions {are} also shown by "
                "training questions, as the source deals them: the figures hold for new questions, not for new pictures"
            )
        asked = [label for row, label in asking if row.split == split]
        if other := sum(label == OTHER_ANSWER for label in asked):
            have, count = ("has", "it counts") if other == 1 else ("have", "they count")
            found.append(
                f"{other} of the {counted(len(asked), 'question')} of {split} {have} an answer that no training "
                f"question has: {count} as wrong"
            )
        judging = [row for row, _ in asking if row.split == split]
        if refused := sum(_is_refused(row, questions) for row in judging):
            found.append(
                f"a device refuses {refused} of the {counted(len(asked), 'question')} of {split}, for a word that no "
                "training question has, that negates, or that comes too late to be read, or for want of one that names "
                "anything; here they are judged all the same"
            )
        own = sum(_is_refused(row, questions, taught[row.site]) for row in judging if row.site in taught)
        if more := own - sum(_is_refused(row, questions) for row in judging if row.site in taught):
            found.append(
                f"where the weights of a model stay at its site, a device refuses another {more} of the "
                f"{counted(len(asked), 'question')} of {split}, for a word that their own site did not teach"
            )
    return found


def _taught(learning: Sequence[Row], length: int) -> dict[str, set[str]]:
    """List the words that the questions of each site teach: those that a network reads of them."""
    taught: dict[str, set[str]] = {}
    for row in learning:
        if row.site is not None:
            taught.setdefault(row.site, set()).update(words_of(question_of(row).text)[:length])
    return taught


def _is_refused(row: Row, questions: Questions, taught: Collection[str] | None = None) -> bool:
    """Whether a device refuses a question for its words alone."""
    return not read_question(question_of(row).text, questions, taught).whole


def _files(table: SourceRows) -> FilePixels:
    assert isinstance(table.pixels, FilePixels)
    return table.pixels
