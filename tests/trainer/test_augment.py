"""Views of training images. Sources: docs/methods.md 1.6 (eight symmetries), MAE's random resized crop."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from edgefl_trainer.augment import dihedral, random_crops, to_float

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def pictures(count: int, side: int, seed: int = 0) -> torch.Tensor:
    draw = np.random.default_rng(seed)
    return torch.from_numpy(draw.integers(0, 256, (count, side, side, 3), dtype=np.uint8))


def symmetries(image: np.ndarray) -> list[bytes]:
    """The eight symmetries of the square, by numpy."""
    turned = [np.rot90(image, k) for k in range(4)]
    return [view.tobytes() for view in [*turned, *(np.flip(view, axis=1) for view in turned)]]


@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 2**32 - 1), count=st.integers(1, 6), side=st.integers(1, 9))
def test_dihedral_views_are_symmetries_of_their_own_image(seed, count, side):
    images = pictures(count, side, seed)
    before = images.clone()
    views = dihedral(images, np.random.default_rng(seed))
    assert views.dtype == torch.uint8 and views.shape == images.shape
    assert images.equal(before)
    for image, view in zip(images.numpy(), views.numpy(), strict=True):
        assert view.tobytes() in symmetries(image)


def test_dihedral_draws_all_eight_equally():
    """4,000 draws: each symmetry 500 times, five standard deviations (21) allowed."""
    image = pictures(1, 3)
    views = dihedral(image.expand(4000, -1, -1, -1).contiguous(), np.random.default_rng(1))
    known = symmetries(image[0].numpy())
    counts = np.bincount([known.index(view.tobytes()) for view in views.numpy()], minlength=8)
    assert np.abs(counts - 500).max() < 5 * np.sqrt(4000 * 1 / 8 * 7 / 8)


def test_crops_depend_on_their_generator_alone():
    images = pictures(6, 36)
    torch.manual_seed(1)
    first = random_crops(images, np.random.default_rng(3), 0.2)
    torch.manual_seed(2)
    state = torch.get_rng_state()
    second = random_crops(images, np.random.default_rng(3), 0.2)
    assert torch.get_rng_state().equal(state)  # the draws of others are not disturbed
    assert first.equal(second)
    assert not first.equal(random_crops(images, np.random.default_rng(4), 0.2))


def test_crops_keep_shape_and_type():
    images = pictures(3, 36)
    views = random_crops(images, np.random.default_rng(0), 0.2)
    assert views.dtype == torch.uint8 and views.shape == images.shape


def test_crops_keep_at_least_the_stated_share_of_the_area():
    """On a ramp of one grey level a column, a view's range of values is the part of the width or height it shows.

    A part of 80 % of the area with sides between 3:4 and 4:3 is at least √(0.8·3/4) = 0.77 of the side long.
    """
    side = 100
    ramp = torch.arange(side, dtype=torch.uint8).view(1, 1, side, 1).expand(64, side, side, 3).contiguous()
    views = random_crops(ramp, np.random.default_rng(0), 0.8).float()
    spans = (views.amax(dim=(1, 2, 3)) - views.amin(dim=(1, 2, 3)) + 1) / side
    assert spans.min() > 0.74 and spans.max() <= 1.01
    small = random_crops(ramp, np.random.default_rng(0), 0.05).float()
    assert ((small.amax(dim=(1, 2, 3)) - small.amin(dim=(1, 2, 3)) + 1) / side).min() < 0.5


def test_to_float_is_numpys():
    images = pictures(2, 5)
    wanted = (images.numpy().astype(np.float64) / 255 - np.array(MEAN)) / np.array(STD)
    found = to_float(images, MEAN, STD)
    assert found.dtype == torch.float32
    np.testing.assert_allclose(found.numpy(), wanted.transpose(0, 3, 1, 2), atol=1e-6)


def test_to_float_agrees_with_the_frozen_networks_input():
    """What the autoencoder learned on is what the frozen network sees."""
    from edgefl_trainer.models.backbones import load_backbone

    vit = load_backbone("tiny", image_px=36)
    images = pictures(2, 36)
    torch.testing.assert_close(
        to_float(images, vit.spec.mean, vit.spec.std), vit.normalise(images), atol=1e-5, rtol=1e-5
    )
