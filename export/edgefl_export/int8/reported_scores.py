"""What an 8-bit graph says of the rows that figures are reported on: nothing was chosen on them, nor with them."""

from collections.abc import Sequence

import numpy as np

from edgefl_export.int8.calibration import ReportedRows
from edgefl_export.int8.precision import BATCH
from edgefl_export.parity.score_parity import Arrays, graph_scores, open_session
from edgefl_trainer.engine.judging.suspicion import KeptScores
from edgefl_trainer.evaluate.metrics import predicted_classes

ROWS_AT_ONCE = 256  # in memory


def scores_in_8_bits(graph: bytes, tensors: Arrays, rows: ReportedRows, seen: Sequence[bool]) -> KeptScores | None:
    """Score the rows with a label, as a device would; None where there is none."""
    known = np.flatnonzero((rows.targets >= 0) & (rows.targets < len(seen)))
    if len(known) == 0:
        return None
    session, parts = open_session(graph), []
    for start in range(0, len(known), ROWS_AT_ONCE):
        pictures = rows.images[rows.places[known[start : start + ROWS_AT_ONCE]]]
        found = graph_scores(session, tensors, pictures, BATCH)
        named = predicted_classes(found["probabilities"], found.get("vacuity"), seen)
        parts.append((found["probabilities"], named))
    probabilities, predicted = (np.concatenate([part[k] for part in parts]) for k in (0, 1))
    return KeptScores(probabilities, predicted, rows.targets[known])
