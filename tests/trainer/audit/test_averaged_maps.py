"""A map in the mean that travels: who stands beside it, by hand. docs/reference/runs.md, what leaves, attacked."""

from types import SimpleNamespace

import numpy as np
import pytest

from edgefl_trainer.audit.averaged_maps import Averaging, averaging_of
from edgefl_trainer.audit.payloads import PicturePayload
from edgefl_trainer.contract import Examples
from edgefl_trainer.engine.hyper_parameters import build
from edgefl_trainer.methods import METHODS

OWN = np.array([[1.0, 0.0], [0.0, 1.0]], np.float32)


def test_a_map_is_averaged_with_others_of_its_class_and_of_other_lesions() -> None:
    """Class 0 has three maps of 0.25 of other lesions and one of the picture's own lesion; class 1 has a single one."""
    maps = np.array([[0.25, 0.25]] * 3 + [[9.0, 9.0], [0.5, 0.0]], np.float32)
    averaging = Averaging(2, maps, np.array([0, 0, 0, 0, 1]), np.array(["a", "b", "c", "own", "d"]), 0)
    found = averaging.averaged(OWN, np.array([0, 1]), ["own", "e"])
    np.testing.assert_allclose(found, [[1.5 / 3, 0.5 / 3], [0.25, 0.5]], atol=2**-11)
    np.testing.assert_array_equal(found, averaging.averaged(OWN, np.array([0, 1]), ["own", "e"]))
    np.testing.assert_array_equal(averaging.averaged(OWN, np.array([1, 1]), ["d", "d"]), OWN)  # none beside it


def test_who_reads_means_learns_from_means_of_public_pictures() -> None:
    """Three public maps of a class: each becomes the mean of all three, and is never counted twice."""
    averaging = Averaging(2, OWN, np.array([0, 1]), np.array(["a", "b"]), 0)
    public = np.array([[0.75, 0.0], [0.0, 0.75], [0.75, 0.75], [0.25, 0.5]], np.float32)
    found = averaging.of_others(public, np.array([0, 0, 0, 1]))
    np.testing.assert_allclose(found, [[0.5, 0.5]] * 3 + [[0.25, 0.5]], atol=2**-11)


@pytest.mark.parametrize(
    ("method", "given", "others"),
    [
        ("fedevprompt", {"sent_maps": "mean"}, 4),
        ("fedevprompt", {"sent_maps": "mean", "maps_per_class": 2}, 1),
        ("fedevprompt", {"sent_maps": "each"}, None),
        ("fedavg", {"kd": True, "sent_maps": "mean"}, 4),
        ("feddistill", {}, None),
    ],
)
def test_as_many_others_as_the_method_averages(method: str, given: dict[str, object], others: int | None) -> None:
    images = np.arange(3, dtype=np.uint8)[:, None, None, None] * np.ones((1, 2, 2, 3), np.uint8)
    train = Examples(images, np.array([0, 1, 0]), np.array([2, 0, 1]))
    release = PicturePayload("maps", "picture", lambda pictures: pictures[:, 0, 0, :2], np.asarray)
    federation = SimpleNamespace(lesions=("p", "q", "r"))
    site = SimpleNamespace(train=train)
    found = averaging_of(build(METHODS[method], given), release, site, federation, 0)
    assert (None if found is None else found.others) == others
    if found is not None:
        assert found.lesions.tolist() == ["r", "p", "q"]
        np.testing.assert_array_equal(found.maps[:, 0], images[train.places][:, 0, 0, 0])
        np.testing.assert_array_equal(found.labels, train.targets)
