"""First in, first out, unit length (MoCo, arXiv 1911.05722, Algorithm 1): against a deque of the standard library."""

from collections import deque

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgefl_client.learning.errors import LearningError
from edgefl_client.learning.feature_queue import FeatureQueue, received
from edgefl_protocol.payload import Payload
from edgefl_protocol.rules.feature_rows import unit


def features(rng: np.random.Generator, count: int) -> np.ndarray:
    return unit(rng.normal(size=(count, 128)))


@given(capacity=st.integers(1, 12), pushes=st.lists(st.integers(0, 15), max_size=12))
def test_the_newest_stay_in_the_order_in_which_they_came(capacity: int, pushes: list[int]) -> None:
    """A push of any length, longer than the queue too."""
    queue, expected = FeatureQueue.empty(capacity), deque[float](maxlen=capacity)
    rng = np.random.default_rng(0)
    for size in pushes:
        new, before = features(rng, size), queue.rows.copy()
        kept, queue = queue, queue.pushed(new)
        expected.extend(float(row[0]) for row in new)
        assert queue.rows[:, 0].tolist() == list(expected)
        assert (kept.rows == before).all()  # a queue is a value
    assert len(queue.rows) == min(capacity, sum(pushes))


@given(seed=st.integers(0, 2**32 - 1), scale=st.floats(1e-6, 1e6), half=st.booleans())
def test_features_have_unit_length(seed: int, scale: float, half: bool) -> None:
    """Whatever came, of any scale; what travelled in float16 too."""
    rows = np.random.default_rng(seed).normal(size=(6, 128)) * scale
    rows = unit(rows).astype(np.float16) if half else rows
    found = received(Payload({"remote": rows}, {}))
    assert found is not None and found.dtype == np.float32
    np.testing.assert_allclose(np.linalg.norm(found.astype(np.float64), axis=1), 1, atol=1e-6)


def test_nobody_else_is_no_array() -> None:
    """A site that is alone receives no features; an empty or misshapen array is refused."""
    assert received(Payload({}, {})) is None
    with pytest.raises(LearningError, match="the others' features are of type float16 and shape") as no:
        received(Payload({"remote": np.zeros((3, 64), np.float16)}, {}))
    assert no.value.code == "other_features"
