"""From files to scores and heat maps, for `edgefl score` and `edgefl watch`.

Every file gives exactly one result, in the order given: a score, or an error that leaves the others untouched; so does
one for which the memory does not suffice. A heat map that cannot be written costs no score. What is too small or not
skin gets no heat map, as it gets no prediction. A heat map is named after its picture's content and the model's too,
and after the rules where these are not the bundle's own. So it never takes the place of another picture's, nor of
another model's, nor of one that the same version of EdgeFL drew to say something else.
"""

import dataclasses
import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from edgefl_client.scoring.folder_files import DRAWN, MODEL_SUFFIX
from edgefl_protocol.durable import read_bounded, write_atomic
from edgefl_protocol.errors import EdgeflError, ImageError, StorageError
from edgefl_protocol.pictures.imaging import MAX_FILE_BYTES, REDUCE, DecodedPicture
from edgefl_protocol.pictures.score import ModelInfo, Score
from edgefl_protocol.sentences import out_of_use

if TYPE_CHECKING:
    from edgefl_client.scoring.pictures import PictureReader
    from edgefl_client.scoring.scorer import PreparedPicture, Scorer

STANDARD_INPUT = "-"
_DIGITS = 16  # of the SHA-256 of a picture, in the name and the last line of its heat map
_QUESTION_DIGITS = 8  # of the SHA-256 of a question, in the name of its picture
_MODEL_DIGITS = 8  # of the SHA-256 of a bundle, and of personal values, in the name of a heat map
_RULE_DIGITS = 8  # of the SHA-256 of reasons and thresholds, in the name of a heat map by other rules
_STEM_BYTES = 150  # of a picture's name, in that of its heat map: file systems allow 255 bytes in all


@dataclass(frozen=True, kw_only=True)
class Failure:
    """A picture that gave no score."""

    image: str  # its name as given
    code: str  # what went wrong, for programs
    message: str  # one sentence, for people

    def to_json(self) -> dict[str, Any]:
        """Give the object that `edgefl score --json` prints."""
        return {"image": self.image, "error": {"code": self.code, "message": self.message}}


Result = Score | Failure
# takes a result, with the SHA-256 of the file's bytes; None where it could not be read
Log = Callable[[Result, str | None], None]
Ready = TypeVar("Ready")  # what a scorer or an asker makes of a picture


@dataclass(frozen=True, kw_only=True)
class ScoringJob:
    """What to score with and where to draw."""

    scorer: "Scorer"  # the model
    reader: "PictureReader"  # decodes the files
    heatmaps: Path | None  # folder for heat maps; None for none
    # told of each picture whose heat map fails or cannot be written, and why; its score comes without one
    not_drawn: Callable[[str, EdgeflError], None]
    batch: int = 1  # pictures in one run of the network; one where heat maps are drawn or scores are logged
    log: Log | None = None  # told by `score_files` of each result before it is given; None for no log


def score_files(task: ScoringJob, files: Iterable[str]) -> Iterator[Result]:
    """Score files in batches, yielding results in order; a result that cannot be logged is not given."""
    for result, sha256 in score_with_sha256(task, files):
        if task.log is not None:
            task.log(result, sha256)
        yield result


def score_with_sha256(task: ScoringJob, files: Iterable[str]) -> Iterator[tuple[Result, str | None]]:
    """Score files as `score_files`, and log nothing; with each result comes the SHA-256 that its row would hold."""
    for names in _batches(files, 1 if task.heatmaps or task.log else task.batch):
        loaded = [_load(name, task) for name in names]
        scores = iter(
            _score(task.scorer, [(one.name, one.found) for one in loaded if not isinstance(one.found, Failure)])
        )
        for one in loaded:
            result = one.found if isinstance(one.found, Failure) else next(scores)
            if task.heatmaps is not None and isinstance(result, Score):
                try:
                    result = _drawn(result, one, task.heatmaps, task)
                except (EdgeflError, MemoryError, OSError) as error:  # the score is made: no map that fails may cost it
                    task.not_drawn(one.name, known_failure(error))
            yield result, one.sha256


def known_failure(error: EdgeflError | MemoryError | OSError) -> EdgeflError:
    """Give a failure of ours in place of one of the system: a sentence and a code."""
    if isinstance(error, MemoryError):
        return ImageError(f"there is not enough memory for this picture: {REDUCE}", code="too_large")
    return StorageError(out_of_use(error), "storage") if isinstance(error, OSError) else error


def failure_of(name: str, error: EdgeflError | MemoryError) -> Failure:
    """Say of a picture why it gave no score."""
    known = known_failure(error)
    return Failure(image=name, code=known.code, message=str(known))


def no_map_words(name: str, error: EdgeflError) -> str:
    """Say that a picture has no heat map, and why."""
    return f"{name}: no heat map: {error}"


def _batches(names: Iterable[str], size: int) -> Iterator[list[str]]:
    ahead = iter(names)
    while batch := list(islice(ahead, size)):
        yield batch


@dataclass(frozen=True)
class _Loaded:
    name: str
    found: "PreparedPicture | Failure"
    sha256: str | None = None  # of the file's bytes, where they could be read
    pixels: NDArray[np.uint8] | None = None  # (H, W, 3), where a heat map needs them again


def read_picture(
    name: str, reader: "PictureReader", use: Callable[[DecodedPicture], Ready]
) -> tuple[Ready | Failure, DecodedPicture | None, str | None]:
    """Read and decode a file, and make something of the picture.

    Returns:
        What `use` made of it, or why nothing could be made; the picture; the SHA-256 of the file's bytes.
    """
    if not name:
        return Failure(image=name, code="missing", message="the file name is empty; check the command"), None, None
    if name.lower().endswith(MODEL_SUFFIX):
        model = "this is a model, not a picture: name it with --model, and a picture to score"
        return Failure(image=name, code="unsupported_format", message=model), None, None
    sha256 = None
    try:
        data = (
            sys.stdin.buffer.read(MAX_FILE_BYTES + 1)
            if name == STANDARD_INPUT
            else read_bounded(name, MAX_FILE_BYTES, REDUCE)
        )
        if name == STANDARD_INPUT and not data:
            raise ImageError("standard input held no picture; send it one, such as with < photo.jpg", code="empty")
        if len(data) <= MAX_FILE_BYTES:
            sha256 = hashlib.sha256(data).hexdigest()
        picture = reader.decode(data)
        return use(picture), picture, sha256
    except (EdgeflError, MemoryError) as error:
        return failure_of(name, error), None, sha256
    except ValueError:  # a name with a NUL byte
        return Failure(image=name, code="missing", message="this is not a valid file name; check it"), None, None


def drawing_file(
    folder: Path,
    name: str,
    sha256: str,
    question: str | None = None,
    model: ModelInfo | None = None,
    rules: str | None = None,
) -> tuple[Path, str]:
    """Name the drawing of a picture in this folder, and give the digits that its last line tells.

    Args:
        question: what was asked, of which the name has the first digits of the SHA-256: the text may name a patient.
        model: what scored the picture, of which the name has digits, too: each model's drawing stays.
        rules: what `rule_digits` gives.
    """
    stem = "standard-input" if name == STANDARD_INPUT else Path(name).stem
    if len(long := os.fsencode(stem)) > _STEM_BYTES:
        stem = long[:_STEM_BYTES].decode(errors="ignore")
    digits = sha256[:_DIGITS]
    asked = "" if question is None else f"-{text_sha256(question)[:_QUESTION_DIGITS]}"
    scored = "" if model is None else f"-{model_digits(model)}"
    judged = "" if rules is None else f"-{rules}"
    return folder / f"{stem}-{digits}{asked}{scored}{judged}{DRAWN}", digits


def text_sha256(question: str) -> str:
    """Give the SHA-256 by which a question is known: its text may name a patient."""
    return hashlib.sha256(question.encode("utf-8", "surrogatepass")).hexdigest()


def model_digits(model: ModelInfo) -> str:
    """Give the digits that tell apart drawings of several models, and of a bundle's values and personal ones."""
    personal = [model.state_sha256] if model.state_kind == "personal" else []
    return "-".join(sha256[:_MODEL_DIGITS] for sha256 in (model.sha256, *personal))


def rule_digits(score: Score, *, own_rules: bool) -> str | None:
    """Give the digits that tell apart drawings by other rules than the bundle's own, as it was signed; None by these.

    Args:
        own_rules: whether the thresholds are the bundle's. Its date may have passed all the same.
    """
    if own_rules and "model_expired" not in score.refer_reasons:
        return None
    thresholds = (score.suspicious_from, score.vacuity_from, score.entropy_from, score.dissonance_from)
    judged = json.dumps([score.refer_reasons, thresholds])
    return hashlib.sha256(judged.encode()).hexdigest()[:_RULE_DIGITS]


def _load(name: str, task: ScoringJob) -> _Loaded:
    started = time.perf_counter()
    prepared, picture, sha256 = read_picture(name, task.reader, task.scorer.prepare)
    if isinstance(prepared, Failure) or picture is None:
        return _Loaded(name, prepared, sha256)
    # Only a heat map needs the photograph again: a batch of large ones must not lie in memory.
    prepared = dataclasses.replace(prepared, milliseconds=(time.perf_counter() - started) * 1e3)
    return _Loaded(name, prepared, sha256, None if task.heatmaps is None else picture.pixels)


def _score(scorer: "Scorer", photos: Sequence[tuple[str, "PreparedPicture"]]) -> list[Result]:
    """Score a batch; where it fails as a whole, score one by one, so that one picture cannot spoil the others."""
    if not photos:
        return []
    try:
        return list(scorer.score_batch([prepared for _, prepared in photos], [name for name, _ in photos]))
    except (EdgeflError, MemoryError) as error:
        if len(photos) == 1:
            return [failure_of(photos[0][0], error)]
    return [result for photo in photos for result in _score(scorer, [photo])]


def _drawn(score: Score, photo: _Loaded, folder: Path, task: ScoringJob) -> Score:
    """Draw the picture of a score, with its map where it has a true one; nothing for what is not judged."""
    if isinstance(photo.found, Failure) or photo.pixels is None or photo.sha256 is None or not score.judged:
        return score
    rules = rule_digits(score, own_rules=task.scorer.own_rules)
    path, digits = drawing_file(folder, photo.name, photo.sha256, model=score.model, rules=rules)
    from edgefl_client.scoring.drawing.heatmap import png_bytes  # only those who draw pay for loading fonts
    from edgefl_client.scoring.drawing.score_picture import draw_heatmap

    explanation = task.scorer.explain(photo.found, score)
    write_atomic(path, png_bytes(draw_heatmap(photo.pixels, score, task.scorer.network.fit, explanation, digits)))
    return dataclasses.replace(score, heatmap=str(path), heatmap_fall=explanation.fall_of(score))
