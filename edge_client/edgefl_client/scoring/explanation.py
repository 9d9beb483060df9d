"""What an answer rests on, for whoever reads a picture: a map that was found true, or a sentence why there is none."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edgefl_protocol.pictures.score import Score


@dataclass(frozen=True)
class Explanation:
    """The map shown beside a picture."""

    values: NDArray[np.float32] | None  # (N,), row by row, at most 1; never level; None where none is shown
    sentence: str  # how true it is, or why none is shown
    # the answer's probability where the strongest part is hidden; None where the map is not made by hiding parts
    without: float | None = None

    def fall_of(self, score: Score) -> float | None:
        """Subtract: how much hiding the strongest part lowers the probability of the predicted class."""
        return self.fall_from(None if score.predicted is None else score.probabilities[score.predicted])

    def fall_from(self, likely: float | None) -> float | None:
        """Do as `fall_of` for an answer of this probability; None without an answer."""
        return None if likely is None or self.without is None else likely - self.without
