"""What a device gives to a FedEvPrompt round: a few rollout maps per class, and nothing else.

Selection: for each class, the device's own labelled pictures are ranked by vacuity, smallest first; the maps of the
first M travel. Equal vacuity is ordered by the picture's place in the list. No filter for correctness (arXiv
2411.10071, section 3.2; docs/methods.md, section 1.5). Maps travel at patch resolution, float16, divided by their
largest value.
"""

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edgefl_protocol.durable import read_bounded
from edgefl_protocol.errors import EdgeflError
from edgefl_protocol.payload import Payload

MAX_MAPS = 5  # M of the paper
MAX_LABELS_BYTES = 16 * 2**20
MAX_ROWS = 100_000
UNLABELLED = -1


class LabelsError(EdgeflError):
    """The table of labels cannot be used."""

    code = "bad_labels"


@dataclass(frozen=True, kw_only=True)
class LabelledImage:
    """A row of the table.

    Attributes:
        path: the picture's file.
        label: index of its class, or `UNLABELLED`.
        lesion: what the column `lesion_id` calls the lesion, or None.
    """

    path: Path
    label: int
    lesion: str | None = None


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A scored picture that may be chosen.

    Attributes:
        label: index of its class, from the table.
        vacuity: the model's.
        attention: (N,) rollout map.
    """

    label: int
    vacuity: float
    attention: NDArray[np.float32]


def read_labels(path: Path, classes: Sequence[str]) -> list[LabelledImage]:
    """Read a CSV with the columns `image` and `label`, and `lesion_id` where it is there; others are ignored.

    Args:
        path: the table; relative pictures are looked up beside it.
        classes: names of the classes, in index order.

    Raises:
        LabelsError: a column is missing, a label is no class of the model, or the table is empty or no text.
        StorageError: the table cannot be read.
    """
    rows = _rows(path, {"image", "label"})
    index = {name: position for position, name in enumerate(classes)}
    found = []
    for number, row in enumerate(rows, start=2):
        image, label = _image(path, number, row), row["label"]
        if label not in index:
            raise LabelsError(
                f"{path}, line {number}: the label {str(label)[:60]!r} is no class of this model; "
                f"its classes are {', '.join(classes)}",
                code="unknown_class",
            )
        lesion = row.get("lesion_id") or None
        found.append(LabelledImage(path=image, label=index[label], lesion=lesion))
    return found


def read_images(path: Path) -> list[LabelledImage]:
    """Read the column `image` of a CSV, for learning that looks at no label.

    Args:
        path: the table; relative pictures are looked up beside it.

    Raises:
        LabelsError: the column is missing, or the table is empty or no text.
        StorageError: the table cannot be read.
    """
    rows = _rows(path, {"image"})
    return [LabelledImage(path=_image(path, number, row), label=UNLABELLED) for number, row in enumerate(rows, start=2)]


def _rows(path: Path, columns: set[str]) -> list[dict[str, str]]:
    try:
        text = read_bounded(path, MAX_LABELS_BYTES).decode("utf-8-sig")
        rows = list(csv.DictReader(io.StringIO(text, newline=""), strict=True))
    except (UnicodeDecodeError, csv.Error) as error:
        named = f"columns {' and '.join(sorted(columns))}" if len(columns) > 1 else f"column {min(columns)}"
        raise LabelsError(f"{path} is no CSV in UTF-8; save it as one with the {named}") from error
    if not rows or len(rows) > MAX_ROWS:
        raise LabelsError(f"{path} has {len(rows)} rows of data; allowed are 1 to {MAX_ROWS}")
    missing = columns - set(rows[0])
    if missing:
        raise LabelsError(f"{path} has no column {' and no column '.join(sorted(missing))}; add it to the first line")
    return rows


def _image(path: Path, number: int, row: Mapping[str, str]) -> Path:
    if not row["image"]:
        raise LabelsError(f"{path}, line {number}: no image is named; fill it in or remove the line")
    return path.parent / row["image"]


def select_maps(candidates: Sequence[Candidate], most: int = MAX_MAPS) -> dict[int, list[int]]:
    """Choose which pictures' maps travel.

    Args:
        candidates: scored pictures, in the order of the table.
        most: maps per class.

    Returns:
        Class index → positions in `candidates`, lowest vacuity first.
    """
    chosen: dict[int, list[int]] = {}
    for label in sorted({candidate.label for candidate in candidates}):
        members = [position for position, candidate in enumerate(candidates) if candidate.label == label]
        members.sort(key=lambda position: (candidates[position].vacuity, position))
        chosen[label] = members[:most]
    return chosen


def reply_payload(candidates: Sequence[Candidate], chosen: Mapping[int, Sequence[int]], state_sha256: str) -> Payload:
    """The method's reply: `maps.<k>` (m, N) float16, and the digest of the values that made them.

    Args:
        candidates: scored pictures.
        chosen: result of `select_maps`.
        state_sha256: digest of the tensors the pictures were scored with.

    Raises:
        LabelsError: a map holds nothing to share.
    """
    arrays = {}
    for label, positions in chosen.items():
        maps = np.stack([candidates[position].attention for position in positions]).astype(np.float64)  # (m, N)
        largest = maps.max(axis=1, keepdims=True)
        if not (np.isfinite(maps).all() and (maps >= 0).all() and (largest > 0).all()):
            raise LabelsError("a rollout map is empty or not finite; report it to the signer of the model", "bad_map")
        arrays[f"maps.{label}"] = (maps / largest).astype(np.float16)
    return Payload(arrays, {"site_sha256": state_sha256})
