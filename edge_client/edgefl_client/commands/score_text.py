"""A score as a line for a person, as JSON or as a row of CSV; an answer as lines or JSON.

The columns and keys are docs/design.md, section 5.

Every line is UTF-8, also where the name of a file is not: its odd bytes become `\\udcXX`, which in JSON is the escape
that gives Python the file's name back. What a person reads holds no line break and no control character: the name of a
file must not look like the line of another, nor steer the terminal.
"""

import csv
import io
import json
from collections.abc import Sequence
from typing import Any

from edgefl_client.scoring.score_files import Failure, Result
from edgefl_protocol.pictures.answer import PictureAnswer
from edgefl_protocol.pictures.answer_words import (
    headline,
    learned_from,
    next_answers,
    not_read,
    what_it_is,
)
from edgefl_protocol.pictures.wording import (
    ON_WHITE,
    class_title,
    in_brief,
    likely,
    on_white,
    second_words,
    suspicious_words,
    uncertainty_words,
)
from edgefl_protocol.sentences import capital, of_file


def human_line(result: Result) -> str:
    """Write one line for a person."""
    if isinstance(result, Failure):
        return printable(f"not scored: {of_file(result.image, result.message)}")
    if result.predicted is None:
        said = "no prediction"
    else:
        first = f"{class_title(result, result.predicted)}, probability {likely(result, result.predicted)}"
        said = ", ".join(filter(None, [first, second_words(result)]))
    sure = f", {uncertainty_words(result)}" if result.judged else ""  # else it is no finding
    values = ", with the values learned here" if result.model.state_kind == "personal" else ""
    beside = suspicious_words(result)
    suspicious = "" if beside is None else f"; {beside}"
    drawn = f" [{result.heatmap}]" if result.heatmap else ""
    note = f"{white}; " if (white := on_white(result)) is not None else ""
    return printable(f"{result.image}: {note}{said}{sure}{values}{suspicious}; {in_brief(result)}{drawn}")


def printable(line: str) -> str:
    """Escape every character of a line that is not printable, as in Python."""
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode("ascii") for one in line)


def json_line(result: Result) -> str:
    """Write one JSON object on one line."""
    return utf8(json.dumps(result.to_json(), ensure_ascii=False, allow_nan=False))


class CsvLines:
    """Rows of a CSV with one column per class and measure."""

    _PLAIN = ("image", "predicted", "vacuity", "dissonance", "entropy_nats", "refer", "refer_reasons", "heatmap")
    _LAST = (
        "error_code", "error_message", "predicted_name", "malignancy", "suspicious_probability", "suspicious_from",
        "rules_tried", "exposure", "suspicious_rule", "vacuity_from", "dissonance_from",
        "entropy_from", "heatmap_fall", "better_than_chance", "warnings", "light", "transparent",
        "learned_from", "suspicious_pictures_tried", "suspicious_pictures_passed", "benign_pictures_passed",
        "turned_suspicious_probability", "site", "learned_from_federation",
    )  # fmt: skip
    _MODEL = ("model_id", "model_sha256", "model_version", "state_kind", "state_sha256", "milliseconds")

    def __init__(self, classes: Sequence[str]) -> None:
        self._classes = classes

    def head(self) -> str:
        """Write the first line."""
        per_class = [f"{measure}.{name}" for measure in ("probability", "evidence") for name in self._classes]
        return self._line([*self._PLAIN, *self._MODEL, *per_class, *self._LAST])

    def row(self, result: Result) -> str:
        """Write the line of one result; what is undefined stays empty."""
        if isinstance(result, Failure):
            empty = [""] * (len(self._PLAIN) - 1 + len(self._MODEL) + 2 * len(self._classes))
            return self._line([result.image, *empty, result.code, result.message, *[""] * (len(self._LAST) - 2)])
        plain = [
            result.image, result.predicted, result.vacuity, result.dissonance, result.entropy_nats,
            str(result.refer).lower(), " ".join(result.refer_reasons), result.heatmap,
        ]  # fmt: skip
        model = [
            result.model.id, result.model.sha256, result.model.version, result.model.state_kind,
            result.model.state_sha256, round(result.milliseconds, 3),
        ]  # fmt: skip
        evidence = result.evidence or {}
        per_class = [result.probabilities[name] for name in self._classes] + [
            evidence.get(name) for name in self._classes
        ]
        told = None if result.predicted is None else result.info_of(result.predicted)
        better, tried = result.model.better_than_chance, result.suspicious_tried
        last = [
            "", "", told and told.name, told and told.malignancy, result.suspicious_probability, result.suspicious_from,
            " ".join(result.rules_tried), result.exposure, result.suspicious_rule, result.vacuity_from,
            result.dissonance_from, result.entropy_from, result.heatmap_fall,
            None if better is None else str(better).lower(), " ".join(result.model.warnings), result.light,
            str(result.transparent).lower(), "; ".join(result.model.learned_from),
            tried and tried.pictures, tried and tried.passed, tried and tried.benign_passed,
            result.turned_suspicious_probability, result.model.site, result.model.learned_from_federation,
        ]  # fmt: skip
        return self._line([*plain, *model, *per_class, *last])

    def _line(self, values: Sequence[object]) -> str:
        out = io.StringIO()
        # Only characters of the line's end make the writer quote a value that holds one.
        csv.writer(out, lineterminator="\r\n").writerow(["" if value is None else value for value in values])
        return utf8(out.getvalue().removesuffix("\r\n"))


def answer_lines(result: PictureAnswer | Failure, how_right: str, top: int) -> list[str]:
    """Write the answer, the next ones, what was not read of the question, what it learned from and what that is worth.

    Args:
        how_right: how the model did on questions kept from learning, in a sentence.
        top: how many answers are told.
    """
    if isinstance(result, Failure):
        return [printable(f"edgefl: {of_file(result.image, result.message)}")]
    drawn = f" [{result.heatmap}]" if result.heatmap else ""
    lines = [f"{result.image}: {headline(result)}{drawn}"]
    others = next_answers(result, top)
    lines += [] if others is None else [f"{others}."]
    lines += not_read(result)
    lines += [f"{capital(ON_WHITE)}."] if result.transparent else []
    lines += [] if result.refused else [how_right, learned_from(result), what_it_is(result)]
    return [printable(line) for line in lines]


def answer_json(result: PictureAnswer | Failure, question: str, top: int) -> str:
    """Write one JSON object on one line; a failure tells the question that was asked, too."""
    found: dict[str, Any]
    if isinstance(result, Failure):
        told = result.to_json()
        found = {"image": told["image"], "question": question, "error": told["error"]}
    else:
        found = result.to_json(top)
    return utf8(json.dumps(found, ensure_ascii=False, allow_nan=False))


def utf8(line: str) -> str:
    """Escape what UTF-8 cannot write: odd bytes of a file's name."""
    return line.encode("utf-8", "backslashreplace").decode()
