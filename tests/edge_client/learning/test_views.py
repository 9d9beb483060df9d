"""Views of pictures against kornia, which the trainer's views come from, and against the recipe's ranges (MoCo v2)."""

import kornia
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from edgefl_client.learning import views as ours
from edgefl_protocol.rules.view_recipes import blur_kernel


def coloured(count: int, side: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).random((count, side, side, 3)).astype(np.float32)


def theirs(images: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(images).permute(0, 3, 1, 2)


def back(images: torch.Tensor) -> np.ndarray:
    return images.permute(0, 2, 3, 1).numpy()


CHANGES = {
    0: lambda x, factor: (x * factor.view(-1, 1, 1, 1)).clamp(0, 1),
    1: lambda x, factor: kornia.enhance.adjust_contrast_with_mean_subtraction(x, factor),
    2: lambda x, factor: kornia.enhance.adjust_saturation_with_gray_subtraction(x, factor),
    3: lambda x, factor: kornia.enhance.adjust_hue(x, factor * 2 * torch.pi),
}


@pytest.mark.parametrize("box", [(0, 0, 20, 20), (3, 5, 11, 9), (19, 0, 1, 20), (2, 2, 16, 16)])
def test_crops_are_torchs(box):
    """Bilinear, corners on corners: torch's interpolate, as kornia calls it; a single row is repeated."""
    image = np.random.default_rng(1).integers(0, 256, (20, 20, 3)).astype(np.uint8)
    top, left, height, width = box
    cut = torch.from_numpy(image[top : top + height, left : left + width]).permute(2, 0, 1)[None].float() / 255
    expected = torch.nn.functional.interpolate(cut, (16, 16), mode="bilinear", align_corners=True)
    found = ours.resized_crop(image, np.array(box), 16)
    np.testing.assert_allclose(found, expected[0].permute(1, 2, 0), atol=1e-5)


@pytest.mark.parametrize("change", [0, 1, 2, 3])
def test_each_change_of_colour_is_kornias(change):
    """The trainer's jitter: brightness, contrast about mean luminance, saturation about luminance, hue by a turn."""
    images = coloured(6, 12)
    images[0] = 0.5  # no hue
    drawn = np.array([[0.6, 1.4, 0.7, -0.1], [1.4, 0.6, 1.3, 0.1]] * 3, np.float32)
    found = ours.jittered(images, drawn, (change,))
    np.testing.assert_allclose(
        found, back(CHANGES[change](theirs(images), torch.from_numpy(drawn[:, change]))), atol=2e-5
    )


def test_the_order_of_changes_counts():
    """Brightness before contrast is not contrast before brightness."""
    images, factors = coloured(2, 8), np.array([[1.4, 0.6, 1, 0]] * 2, np.float32)
    one, other = (ours.jittered(images, factors, order) for order in ((0, 1, 2, 3), (1, 0, 2, 3)))
    assert np.abs(one - other).max() > 0.01


def test_grey_and_blur_are_kornias():
    """Luminance of BT.601; a Gaussian whose border is reflected, each picture with its own width."""
    images, sigma = coloured(4, 24), np.array([0.1, 0.7, 1.3, 2.0])
    np.testing.assert_allclose(ours.grey(images), kornia.color.rgb_to_grayscale(theirs(images))[:, 0], atol=1e-6)
    pairs = torch.from_numpy(np.stack([sigma, sigma], axis=1)).float()
    expected = kornia.filters.gaussian_blur2d(theirs(images), (7, 7), pairs, border_type="reflect")
    np.testing.assert_allclose(ours.blurred(images, sigma, 7), back(expected), atol=1e-5)


@settings(max_examples=40)
@given(seed=st.integers(0, 2**32 - 1), side=st.integers(4, 40))
def test_draws_keep_the_recipe(seed, side):
    """Every box lies in the picture, every factor in its range."""
    drawn = ours.draw(np.random.default_rng(seed), 20, side)
    top, left, height, width = drawn.boxes.T
    assert (drawn.boxes[:, :2] >= 0).all() and (drawn.boxes[:, 2:] >= 1).all()
    assert (top + height <= side).all() and (left + width <= side).all()
    assert ((drawn.factors[:, :3] >= 0.6 - 1e-6) & (drawn.factors[:, :3] <= 1.4 + 1e-6)).all()
    assert (np.abs(drawn.factors[:, 3]) <= 0.1 + 1e-6).all() and sorted(drawn.order) == [0, 1, 2, 3]
    assert ((drawn.sigma >= 0.1) & (drawn.sigma <= 2.0)).all()


def test_draws_are_as_frequent_as_the_recipe_says():
    """Of 20,000 pictures: jitter 0.8, grey 0.2, blur 0.5, mirror 0.5, within five standard deviations."""
    drawn = ours.draw(np.random.default_rng(0), 20_000, 72)
    for found, share in ((drawn.jittered, 0.8), (drawn.greyed, 0.2), (drawn.blurred, 0.5), (drawn.mirrored, 0.5)):
        assert abs(found.mean() - share) < 5 * np.sqrt(share * (1 - share) / 20_000)
    area = drawn.boxes[:, 2] * drawn.boxes[:, 3] / 72**2
    assert 0.18 < area.min() < 0.22 and area.max() > 0.95


@settings(max_examples=20)
@given(seed=st.integers(0, 2**32 - 1))
def test_views_are_a_function_of_pictures_and_draws(seed):
    """The same draws give the same view; values stay in [0, 1]; a picture's view does not depend on its neighbours'."""
    rng = np.random.default_rng(seed)
    images, drawn = rng.integers(0, 256, (5, 20, 20, 3)).astype(np.uint8), ours.draw(rng, 5, 20)
    found = ours.views(images, drawn, 16)
    assert found.shape == (5, 3, 16, 16) and found.dtype == np.float32
    assert (found >= 0).all() and (found <= 1).all() and (found == ours.views(images, drawn, 16)).all()
    changed = images.copy()
    changed[1:] = 255 - changed[1:]
    assert (ours.views(changed, drawn, 16)[0] == found[0]).all()


def test_a_view_is_the_steps_in_the_trainers_order():
    """Crop, colours, grey, blur, mirror (left and right), each where it was drawn: kornia's functions one by one."""
    images = np.random.default_rng(2).integers(0, 256, (3, 20, 20, 3)).astype(np.uint8)
    drawn = ours.Draws(
        boxes=np.array([[0, 3, 12, 15], [5, 0, 14, 10], [2, 2, 16, 18]]),
        jittered=np.array([True, True, False]),
        order=(2, 0, 3, 1),
        factors=np.array([[0.7, 1.3, 1.2, 0.08], [1.3, 0.8, 0.6, -0.1], [1.4, 1.4, 1.4, 0.1]], np.float32),
        greyed=np.array([False, True, False]),
        blurred=np.array([True, True, False]),
        sigma=np.array([1.0, 0.5, 2.0]),
        mirrored=np.array([True, False, True]),
    )
    found = ours.views(images, drawn, 16)
    for row, (top, left, height, width) in enumerate(drawn.boxes):
        x = theirs(images[row : row + 1, top : top + height, left : left + width].astype(np.float32) / 255)
        x = torch.nn.functional.interpolate(x, (16, 16), mode="bilinear", align_corners=True)
        for change in drawn.order if drawn.jittered[row] else ():
            x = CHANGES[change](x, torch.tensor(drawn.factors[row, change])[None])
        if drawn.greyed[row]:
            x = kornia.color.rgb_to_grayscale(x).repeat(1, 3, 1, 1)
        if drawn.blurred[row]:
            pair = torch.full((1, 2), float(drawn.sigma[row]))
            x = kornia.filters.gaussian_blur2d(x, (blur_kernel(16),) * 2, pair, border_type="reflect")
        x = torch.flip(x, [3]) if drawn.mirrored[row] else x
        np.testing.assert_allclose(found[row], x[0], atol=5e-5)
