"""From one file and one question to an answer, its picture and its row in the log, for `edgefl ask`.

A picture or a question that cannot be used gives one failure. A drawing that cannot be written costs no answer.
"""

import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from edgefl_client.scoring.score_files import (
    Failure,
    drawing_file,
    failure_of,
    known_failure,
    no_map_words,
    read_picture,
)
from edgefl_protocol.durable import write_atomic
from edgefl_protocol.errors import EdgeflError
from edgefl_protocol.pictures.answer import PictureAnswer

if TYPE_CHECKING:
    from edgefl_client.scoring.asker import AskedPicture, Asker
    from edgefl_client.scoring.pictures import PictureReader


@dataclass(frozen=True, kw_only=True)
class AskingJob:
    """What to ask with and where to draw."""

    asker: "Asker"  # the model
    reader: "PictureReader"  # decodes the file
    drawings: Path | None  # folder for the picture of the answer; None for none
    top: int  # answers to tell under it
    not_drawn: Callable[[str], None]  # told, in one sentence, of a picture that cannot be written
    # told of the result, with the SHA-256 of the file's bytes (None where it could not be read), before it is given;
    # None for no log
    log: Callable[[PictureAnswer | Failure, str | None], None] | None = None


def ask_file(job: AskingJob, name: str, question: str) -> PictureAnswer | Failure:
    """Answer a question about a file; a result that cannot be logged is not given."""
    started = time.perf_counter()
    picture, photo, sha256 = read_picture(name, job.reader, job.asker.prepare)
    result = picture if isinstance(picture, Failure) else _answered(job, name, question, picture, started)
    if isinstance(result, PictureAnswer) and not isinstance(picture, Failure) and job.drawings and photo is not None:
        try:
            result = _drawn(job, result, picture, photo.pixels, sha256 or "")
        except (EdgeflError, MemoryError, OSError) as error:
            job.not_drawn(no_map_words(name, known_failure(error)))
    if job.log is not None:
        job.log(result, sha256)
    return result


def _answered(
    job: AskingJob, name: str, question: str, picture: "AskedPicture", started: float
) -> PictureAnswer | Failure:
    whole = dataclasses.replace(picture, milliseconds=(time.perf_counter() - started) * 1e3)
    try:
        return job.asker.ask_prepared(whole, question, name)
    except (EdgeflError, MemoryError) as error:
        return failure_of(name, error)


def _drawn(
    job: AskingJob, answer: PictureAnswer, picture: "AskedPicture", pixels: NDArray[np.uint8], sha256: str
) -> PictureAnswer:
    from edgefl_client.scoring.drawing.answer_picture import draw_answer  # only those who draw pay for loading fonts
    from edgefl_client.scoring.drawing.heatmap import png_bytes

    assert job.drawings is not None
    path, digits = drawing_file(job.drawings, answer.image or "", sha256, answer.question.text, answer.model)
    asker = job.asker
    explanation = asker.explain(picture, answer)
    drawn = draw_answer(pixels, answer, asker.network.fit, explanation, asker.how_right, job.top, digits)
    write_atomic(path, png_bytes(drawn))
    fall = explanation.fall_from(answer.confidence)
    return dataclasses.replace(answer, heatmap=str(path), heatmap_fall=fall)
