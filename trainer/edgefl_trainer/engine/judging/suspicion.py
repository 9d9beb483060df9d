"""From which probability on a site's suspicious classes refer together: chosen on its `tune` rows, after the run.

The scores of those rows lie beside the site's model (`DIR/tune/NAME.safetensors`), so the threshold is chosen without
the pictures, and anew for other class information. A run from before these files has no threshold. The scores of the
rows that only report lie in `DIR/reported`: what the rule does there is no choice's own praise.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgefl_protocol import Payload
from edgefl_protocol.durable import read_bounded, write_atomic
from edgefl_protocol.errors import EdgeflError
from edgefl_protocol.pictures.class_info import ClassInfo, suspicious_classes
from edgefl_protocol.pictures.suspicious import DEFAULT_SUSPICIOUS_FROM, NO_CLASS, Suspicion, TriedRule, rows_that_ask
from edgefl_trainer.contract import Prediction
from edgefl_trainer.engine.folder import make_folder
from edgefl_trainer.engine.models import FinishedRun
from edgefl_trainer.errors import RunError
from edgefl_trainer.evaluate.calibration import choose_suspicion
from edgefl_trainer.evaluate.intervals import Scored

FOLDER, REPORTED = "tune", "reported"
MAX_BYTES = 1 << 30
NOT_KEPT = (
    "WARNING: no threshold was chosen, for the run kept no scores of this site's tune pictures: it is from before they "
    "were kept, or the site has none, or never trained. A picture asks for a look where the predicted class is not "
    f"known to be benign, or, by default, where such classes have {DEFAULT_SUSPICIOUS_FROM:.0%} or more together."
)


@dataclass(frozen=True)
class KeptScores:
    """What a site's model says of some of its rows, and what they are."""

    probabilities: NDArray[np.float32]  # (n, K)
    predicted: NDArray[np.int64]  # (n,) -1: abstained
    targets: NDArray[np.int64]  # (n,)


def save_tune_scores(folder: Path, site: str, scores: Prediction, targets: NDArray[np.int64]) -> None:
    """Keep what a site's model says of its `tune` rows, and what they are."""
    _save(folder / FOLDER, site, scores.probabilities, scores.predicted, targets)


def save_reported_scores(folder: Path, site: str, scored: Scored) -> None:
    """Keep what a model says of a site's reported rows with a label, and what they are."""
    known = np.flatnonzero((scored.target >= 0) & (scored.target < scored.probabilities.shape[1]))
    _save(folder / REPORTED, site, scored.probabilities[known], scored.predicted[known], scored.target[known])


def _save(
    folder: Path, site: str, probabilities: NDArray[Any], predicted: NDArray[Any], targets: NDArray[np.int64]
) -> None:
    arrays: dict[str, NDArray[Any]] = {
        "probabilities": np.asarray(probabilities, np.float32),
        "predicted": np.asarray(predicted, np.int64),
        "targets": np.asarray(targets, np.int64),
    }
    make_folder(folder)
    write_atomic(folder / f"{site}.safetensors", Payload(arrays, {}).to_bytes())


def site_suspicion(run: FinishedRun, site: str, info: Mapping[str, ClassInfo]) -> Suspicion:
    """Choose a site's threshold; of no pictures, where the run kept no scores of its `tune` rows.

    Raises:
        RunError: the kept scores are damaged.
    """
    suspicious = np.array(suspicious_classes(run.classes, info))
    kept = tune_scores(run, site)
    if kept is None:
        none = np.zeros(0, np.int64)
        found = choose_suspicion(np.zeros((0, len(run.classes)), np.float32), none, none, suspicious)
        return found if suspicious.all() or not suspicious.any() else replace(found, statement=NOT_KEPT)
    return choose_suspicion(kept.probabilities, kept.predicted, kept.targets, suspicious)


def reported_rule(
    run: FinishedRun, site: str, info: Mapping[str, ClassInfo], suspicion: Suspicion | None
) -> TriedRule | None:
    """Count at how many of a site's reported rows the rule asks for no look; None where the run kept no such scores.

    Raises:
        RunError: the kept scores are damaged.
    """
    kept = reported_scores(run, site)
    if kept is None or suspicion is None:
        return None
    return rule_on(kept, suspicious_classes(run.classes, info), suspicion.threshold)


def rule_on(scores: KeptScores, suspicious: Sequence[bool], threshold: float | None) -> TriedRule | None:
    """Count at how many of some rows the rule for suspicious classes asks for no look; None of no suspicious row.

    Args:
        suspicious: of each class, whether it is not known to be benign.
        threshold: as chosen; None: the default is in force.
    """
    asks = np.array(suspicious)
    ill, passed = asks[scores.targets], ~rows_that_ask(scores.probabilities, scores.predicted, asks, threshold)
    if not ill.any():
        return None
    benign = None if ill.all() else int((passed & ~ill).sum())
    return TriedRule(pictures=int(ill.sum()), passed=int((passed & ill).sum()), benign_passed=benign)


def tune_scores(run: FinishedRun, site: str) -> KeptScores | None:
    """Read what a site's model says of its `tune` rows; as `reported_scores`."""
    return _read(run, site, FOLDER)


def reported_scores(run: FinishedRun, site: str) -> KeptScores | None:
    """Read what a site's model says of its reported rows; None where the run kept nothing.

    Raises:
        RunError: the kept scores are damaged.
    """
    return _read(run, site, REPORTED)


def _read(run: FinishedRun, site: str, rows_of: str) -> KeptScores | None:
    path, classes = run.folder / rows_of / f"{site}.safetensors", len(run.classes)
    if not path.exists():
        return None
    try:
        arrays = Payload.from_bytes(read_bounded(path, MAX_BYTES), MAX_BYTES).arrays
        probabilities, predicted, targets = (arrays[name] for name in ("probabilities", "predicted", "targets"))
        rows = len(targets)
        shapes = (probabilities.shape, predicted.shape, targets.shape) == ((rows, classes), (rows,), (rows,))
        outside = (targets < 0) | (targets >= classes) | (predicted < NO_CLASS) | (predicted >= classes)
        if not shapes or outside.any():
            raise ValueError("they do not belong to this run's classes")
    except (EdgeflError, KeyError, TypeError, ValueError) as error:
        raise RunError(
            f"the scores in {path} cannot be read ({error}): remove the run's summary.json and run again with "
            "--resume.",
            "damaged",
        ) from error
    return KeptScores(probabilities, predicted, targets)
