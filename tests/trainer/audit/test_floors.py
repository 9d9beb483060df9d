"""What who has no payload reaches: the class helps only where the payload names it. Check 53."""

import numpy as np
import pytest

from edgefl_trainer.audit.payload_lines import floor_hits, floor_pictures
from edgefl_trainer.audit.payloads import PicturePayload
from edgefl_trainer.audit.pictures import Public, Queries

RIVALS = 199


def release(kind: str, over: str) -> PicturePayload:
    return PicturePayload(kind, over, np.asarray, np.asarray)


@pytest.fixture
def queries() -> Queries:
    """A picture of class 0, which one rival is of, and one of class 1, which 198 are of."""
    pictures, rivals = np.zeros((2, 4, 4, 3), np.uint8), np.zeros((RIVALS, 4, 4, 3), np.uint8)
    return Queries(pictures, pictures, np.array([0, 1]), ("p", "q"), rivals, np.array([0] + [1] * 198))


@pytest.mark.parametrize("over", ["picture", "site"])
def test_features_name_no_class(over: str, queries: Queries) -> None:
    """A guess among 200 candidates, and the mean of all public pictures: 30 black ones and 10 white ones."""
    assert floor_hits(release("features", over), queries) == pytest.approx([1 / 200, 1 / 200])
    found = floor_pictures(release("features", over), queries, public(), 2)
    assert found.mean(axis=(1, 2, 3)) == pytest.approx([0.25, 0.25])


@pytest.mark.parametrize(("kind", "over"), [("maps", "picture"), ("prototypes", "class"), ("weights", "class")])
def test_others_name_theirs(kind: str, over: str, queries: Queries) -> None:
    """A guess among the candidates of the class, and the mean of its public pictures."""
    assert floor_hits(release(kind, over), queries) == pytest.approx([1 / 2, 1 / 199])
    found = floor_pictures(release(kind, over), queries, public(), 2)
    assert found.mean(axis=(1, 2, 3)) == pytest.approx([0.0, 1.0])


def public() -> Public:
    shades = np.array([0] * 30 + [255] * 10, dtype=np.uint8)
    pictures = np.broadcast_to(shades[:, None, None, None], (40, 4, 4, 3))
    return Public(pictures, (shades > 0).astype(np.int64))
