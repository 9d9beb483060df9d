"""What is asked about the pictures of a federation, as its rows have it and as a network reads it."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edgefl_protocol.rules.questions import Questions

OTHER_ANSWER = -2
"""Label of a row whose answer no training row has: it counts, and every prediction of it is wrong."""


@dataclass(frozen=True, slots=True)
class QuestionRows:
    """The question of each row, in the order of the rows."""

    tokens: NDArray[np.int64]  # (n, length), see `rules.questions.token_ids`
    texts: tuple[str, ...]  # as asked
    closed: NDArray[np.bool_]  # (n,) whether the data calls it closed: the answers to choose from are in the question
    kinds: tuple[str, ...]  # what it asks for, as annotated
    vocabulary: Questions  # of the training rows
