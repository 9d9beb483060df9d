"""Pictures of a run that an 8-bit graph is made and judged with.

Guarantees: ranges and choice of layers see `tune` rows alone, those that calibrate everything else of a run
(docs/design.md, section 5, rows); the gate sees the rows that results are reported on, topped up with `tune` rows that
were left over; no picture is in two of these three sets, none was trained on; the same run gives the same pictures. A
site's own pictures come first, those of the run's other sites fill up. Beside them lie all `tune` rows of the site, on
which the threshold of its suspicious classes is chosen, and answers are counted. A picture brings all its questions.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edgefl_export.errors import ExportError, GateError
from edgefl_export.parity.score_parity import MIN_IMAGES, AskedWords, Pictures
from edgefl_trainer.data import DataError, Federation
from edgefl_trainer.engine.judging.own_data import own_data
from edgefl_trainer.engine.models import FinishedRun
from edgefl_trainer.engine.sites import report_rows

RANGES = 128
CHOICE = 256
GATE = 512
LEAST = 16  # of `tune` pictures


@dataclass(frozen=True)
class AskedSets:
    """Questions to the pictures of `Calibration`, (n, L) numbers of words each; None where nothing is asked."""

    ranges: AskedWords | None = None
    choice: AskedWords | None = None
    gate: AskedWords | None = None
    tune: AskedWords | None = None


@dataclass(frozen=True)
class ReportedRows:
    """The rows of a site that figures are reported on."""

    images: Pictures  # of the whole run, (n, S, S, 3), memory-mapped
    places: NDArray[np.int64]  # which of them the rows show, (m,)
    targets: NDArray[np.int64]  # their classes, (m,)


@dataclass(frozen=True)
class Calibration:
    """Three sets of pictures, (n, S, S, 3) each: for ranges, for the choice of layers, for the gate; and `tune`."""

    ranges: Pictures
    choice: Pictures
    gate: Pictures
    tune: Pictures  # all of the site that have a label, (n, S, S, 3)
    targets: NDArray[np.int64]  # their classes, (n,)
    questions: AskedSets = AskedSets()  # what is asked about each picture of the four sets
    reported: ReportedRows | None = None  # None where nothing is said of them
    float_layers: int | None = None  # how many stay in float; None: as few as it takes


def calibration_of(run: FinishedRun, site: str) -> Calibration:
    """Return the pictures for one site of a run.

    Raises:
        ExportError: the data is gone or has changed, or has too few `tune` rows, or too few for the gate.
    """
    try:
        federation = federation_of(run)
    except ExportError as error:
        raise ExportError(f"int8 needs the images of the run: {error}; use --precision fp32") from error
    found = split_pictures(federation, site, run.settings.seed)
    check_gate(found.gate)
    return found


def check_gate(pictures: Pictures) -> None:
    """Refuse, by a `GateError`, too few pictures for the gate of 8 bits."""
    if len(pictures) < MIN_IMAGES:
        raise GateError(
            f"the int8 gate needs {MIN_IMAGES} images, but {len(pictures)} were found; use --precision fp32"
        )


def federation_of(run: FinishedRun) -> Federation:
    """Return the very rows of a run, each in the split it had, numbered as the run numbered it (`own_data`).

    Raises:
        ExportError: the data is gone or has changed.
    """
    try:
        return own_data(run)
    except DataError as error:
        raise ExportError(f"the images of the run cannot be read: {error}") from error


def split_pictures(federation: Federation, site: str, seed: int) -> Calibration:
    """Deal the pictures of a federation.

    Raises:
        ExportError: too few `tune` rows.
    """
    order = [site, *(name for name in federation.sites if name != site)]
    draw = np.random.default_rng(seed)
    known = [federation.sites[name] for name in order if name in federation.sites]
    tune, begins = _by_picture(federation, _drawn((one.tune for one in known), draw))
    if len(begins) < LEAST:
        raise ExportError(
            f"int8 needs at least {LEAST} tune images for its ranges, but the run's data has {len(begins)}; use "
            "--precision fp32"
        )
    ranges = next((at for at in begins if at >= min(RANGES, len(tune) // 2)), begins[-1])
    ends = (at for at in (*begins, len(tune)) if at >= min(ranges + CHOICE, len(tune)))
    choice = next(ends) - ranges
    reported = _drawn((one.rows(federation.report_split) for one in known), draw)
    gate = np.concatenate([reported, tune[ranges + choice :]])[:GATE]

    def shown(rows: NDArray[np.int64]) -> NDArray[np.uint8]:
        return federation.images[federation.places(rows)]

    own = federation.sites[site].tune.astype(np.int64) if site in federation.sites else np.zeros(0, np.int64)
    own = own[federation.labels[own] >= 0]
    judged = report_rows(federation, site) if site in federation.sites else None
    sets = (tune[:ranges], tune[ranges : ranges + choice], gate)
    of_ranges, of_choice, of_gate = map(shown, sets)
    tokens = None if federation.questions is None else federation.questions.tokens
    questions = AskedSets() if tokens is None else AskedSets(*(tokens[rows] for rows in (*sets, own)))
    return Calibration(
        ranges=of_ranges,
        choice=of_choice,
        gate=of_gate,
        questions=questions,
        tune=shown(own),
        targets=federation.labels[own],
        reported=None if judged is None else ReportedRows(judged.images, judged.places, judged.targets),
    )


def _by_picture(federation: Federation, rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], list[int]]:
    """Put rows that show one picture next to one another, where the first of them stands; and where each begins."""
    _, first, index = np.unique(federation.places(rows), return_index=True, return_inverse=True)
    ordered = rows[np.argsort(first[index], kind="stable")]
    shown = federation.places(ordered)
    return ordered, [at for at in range(len(shown)) if at == 0 or shown[at] != shown[at - 1]]


def _drawn(groups: Iterable[NDArray[np.integer]], draw: np.random.Generator) -> NDArray[np.int64]:
    """Return row numbers, each group in drawn order, one group after the other."""
    return np.concatenate([draw.permutation(group.astype(np.int64)) for group in groups])
