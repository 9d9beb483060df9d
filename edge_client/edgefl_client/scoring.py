"""`edgefl score`: from files to scores, heat maps and lines of output.

Every file gives exactly one result, in the order given: a score, or an error that leaves the others untouched. A heat
map that cannot be written costs no score.
"""

import csv
import dataclasses
import io
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from edgefl_protocol.durable import read_bounded, write_atomic
from edgefl_protocol.errors import EdgeflError, StorageError
from edgefl_protocol.imaging import MAX_FILE_BYTES, decode
from edgefl_protocol.referral import REASON_WORDS
from edgefl_protocol.score import Score

if TYPE_CHECKING:
    from edgefl_client.scorer import Scorer

SUFFIXES = (".jpg", ".jpeg", ".png")


@dataclass(frozen=True, kw_only=True)
class Failure:
    """A picture that gave no score.

    Attributes:
        image: its name as given.
        code: what went wrong, for programs.
        message: one sentence, for people.
    """

    image: str
    code: str
    message: str

    def to_json(self) -> dict[str, Any]:
        """The object `edgefl score --json` prints."""
        return {"image": self.image, "error": {"code": self.code, "message": self.message}}


Result = Score | Failure


def expand(given: Sequence[str]) -> list[str]:
    """Files to score: a folder stands for its pictures in name order, everything else for itself."""
    files: list[str] = []
    for name in given:
        path = Path(name)
        if path.is_dir():
            files += sorted(str(entry) for entry in path.iterdir() if entry.suffix.lower() in SUFFIXES)
        else:
            files.append(name)
    return files


def score_files(
    scorer: "Scorer", files: Sequence[str], heatmaps: Path | None, batch: int, not_drawn: Callable[[str], None]
) -> Iterator[Result]:
    """Score files in batches, yielding results in order.

    Args:
        scorer: the model.
        files: names of JPEG or PNG files.
        heatmaps: folder for heat maps; None for none.
        batch: pictures in one run of the network.
        not_drawn: told, in one sentence, of each heat map that cannot be written; its score comes without one.
    """
    taken: set[str] = set()
    for start in range(0, len(files), batch):
        loaded = [_load(name) for name in files[start : start + batch]]
        photos = [one for one in loaded if isinstance(one, _Photo)]
        scores = iter(_score(scorer, photos))
        for one in loaded:
            result = one if isinstance(one, Failure) else next(scores)
            if heatmaps is not None and isinstance(result, Score) and isinstance(one, _Photo):
                try:
                    result = _drawn(result, one, heatmaps, scorer, taken)
                except StorageError as error:  # the score is made: a full disk must not cost it
                    not_drawn(f"{one.name}: no heat map: {error}")
            yield result


@dataclass(frozen=True)
class _Photo:
    name: str
    pixels: NDArray[np.uint8]  # (H, W, 3)
    milliseconds: float  # reading and decoding


def _load(name: str) -> "_Photo | Failure":
    started = time.perf_counter()
    try:
        pixels = decode(read_bounded(name, MAX_FILE_BYTES))
    except EdgeflError as error:
        return Failure(image=name, code=error.code, message=str(error))
    except ValueError:  # a name with a NUL byte
        return Failure(image=name, code="missing", message="this is no name of a file; check it")
    return _Photo(name, pixels, (time.perf_counter() - started) * 1e3)


def _score(scorer: "Scorer", photos: Sequence[_Photo]) -> list[Result]:
    """Score a batch; where it fails as a whole, score one by one, so that one picture cannot spoil the others."""
    if not photos:
        return []
    try:
        scores = scorer.score_batch([photo.pixels for photo in photos], [photo.name for photo in photos])
    except EdgeflError as error:
        if len(photos) == 1:
            return [Failure(image=photos[0].name, code=error.code, message=str(error))]
        return [result for photo in photos for result in _score(scorer, [photo])]
    return [
        dataclasses.replace(score, milliseconds=score.milliseconds + photo.milliseconds)
        for score, photo in zip(scores, photos, strict=True)
    ]


def _drawn(score: Score, photo: _Photo, folder: Path, scorer: "Scorer", taken: set[str]) -> Score:
    """The score with its heat map on the disk; networks without attention have none.

    Raises:
        StorageError: the heat map cannot be written.
    """
    if score.attention is None:
        return score
    stem = Path(photo.name).stem
    name, number = f"{stem}.heatmap.png", 2
    while name in taken:
        name, number = f"{stem}-{number}.heatmap.png", number + 1
    taken.add(name)
    path = folder / name
    from edgefl_client.heatmap import draw_heatmap, png_bytes  # only those who draw pay for loading fonts

    picture = draw_heatmap(photo.pixels, score, scorer.fit, rule_set=scorer.refers_uncertain)
    write_atomic(path, png_bytes(picture))
    return dataclasses.replace(score, heatmap=str(path))


def human_line(result: Result) -> str:
    """One line for a person."""
    if isinstance(result, Failure):
        return f"{result.image}: not scored: {result.message}"
    if result.predicted is None:
        said = "no prediction"
    else:
        said = f"{result.predicted}, probability {result.probabilities[result.predicted]:.3f}"
    vacuity = "" if result.vacuity is None else f", vacuity {result.vacuity:.3f}"
    why = "; ".join(REASON_WORDS[reason] for reason in result.refer_reasons)
    refer = f"; refer: {why}" if result.refer else ""
    drawn = f" [{result.heatmap}]" if result.heatmap else ""
    return f"{result.image}: {said}{vacuity}{refer}{drawn}"


def json_line(result: Result) -> str:
    """One JSON object on one line."""
    return json.dumps(result.to_json(), ensure_ascii=False, allow_nan=False)


class CsvLines:
    """Rows of a CSV with one column per class and measure.

    Args:
        classes: names of the classes, in index order.
    """

    _PLAIN = ("image", "predicted", "vacuity", "dissonance", "entropy_nats", "refer", "refer_reasons", "heatmap")
    _MODEL = ("model_id", "model_sha256", "model_version", "state_kind", "state_sha256", "milliseconds")

    def __init__(self, classes: Sequence[str]) -> None:
        self._classes = classes

    def head(self) -> str:
        """The first line."""
        per_class = [f"{measure}.{name}" for measure in ("probability", "evidence") for name in self._classes]
        return self._line([*self._PLAIN, *self._MODEL, *per_class, "error_code", "error_message"])

    def row(self, result: Result) -> str:
        """The line of one result; what is undefined stays empty."""
        if isinstance(result, Failure):
            empty = [""] * (len(self._PLAIN) - 1 + len(self._MODEL) + 2 * len(self._classes))
            return self._line([result.image, *empty, result.code, result.message])
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
        return self._line([*plain, *model, *per_class, "", ""])

    def _line(self, values: Sequence[object]) -> str:
        out = io.StringIO()
        csv.writer(out, lineterminator="").writerow(["" if value is None else value for value in values])
        return out.getvalue()
