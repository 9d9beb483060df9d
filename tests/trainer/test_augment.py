"""Views of training images. Sources: docs/methods.md 1.6 (eight symmetries) and 2 (contrastive views); MAE's random
resized crop; MoCo v2 (arXiv 2003.04297) and SimCLR (arXiv 2002.05709, appendix A)."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from edgefl_protocol.rules.crops import crop_boxes
from edgefl_trainer import augment
from edgefl_trainer.augment import (
    contrastive_views,
    dihedral,
    random_crops,
    resized_one_by_one,
    resized_together,
    to_float,
)

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def pictures(count: int, side: int, seed: int = 0) -> torch.Tensor:
    draw = np.random.default_rng(seed)
    return torch.from_numpy(draw.integers(0, 256, (count, side, side, 3), dtype=np.uint8))


def symmetries(image: np.ndarray) -> list[bytes]:
    """The eight symmetries of the square, by numpy."""
    turned = [np.rot90(image, k) for k in range(4)]
    return [view.tobytes() for view in [*turned, *(np.flip(view, axis=1) for view in turned)]]


@settings(max_examples=40)
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


@pytest.mark.parametrize("resized", [resized_one_by_one, resized_together])
def test_crops_are_enlarged_as_pillow_does(resized):
    """MAE's public code resizes with Pillow's bicubic; our way on a CPU and that on a GPU agree with it."""
    images = pictures(6, 36)
    boxes = crop_boxes(np.random.default_rng(3), 6, 36, 0.2)
    views = resized(images, boxes)
    for image, view, (top, left, height, width) in zip(images.numpy(), views.numpy(), boxes, strict=True):
        part = Image.fromarray(image[top : top + height, left : left + width])
        wanted = np.asarray(part.resize((36, 36), Image.Resampling.BICUBIC)).astype(int)
        difference = np.abs(view.astype(int) - wanted)
        assert difference.max() <= 2
        assert difference.mean() < 0.05


def test_boxes_are_drawn_as_torchvision_draws_them():
    """2,000 boxes of each: the same distribution of areas and ratios (Kolmogorov and Smirnov), all inside the image."""
    from scipy.stats import ks_2samp
    from torchvision.transforms.v2 import RandomResizedCrop

    ours = crop_boxes(np.random.default_rng(0), 2000, 84, 0.2)
    torch.manual_seed(0)
    draw = RandomResizedCrop(84, scale=(0.2, 1.0), antialias=True)
    made = [draw.make_params([torch.zeros(3, 84, 84)]) for _ in range(2000)]
    theirs = np.array([[one[key] for key in ("top", "left", "height", "width")] for one in made])
    for measure in (lambda b: b[:, 2] * b[:, 3], lambda b: b[:, 2] / b[:, 3], lambda b: b[:, 0], lambda b: b[:, 1]):
        assert ks_2samp(measure(ours), measure(theirs)).pvalue > 1e-3
    assert (ours[:, :2] >= 0).all() and (ours[:, 2:] >= 1).all()
    assert (ours[:, 0] + ours[:, 2] <= 84).all() and (ours[:, 1] + ours[:, 3] <= 84).all()


@pytest.mark.parametrize("recipe", ["moco-v2", "simclr", "rotation"])
def test_contrastive_views_depend_on_their_generator_alone(recipe):
    images = pictures(4, 36)
    before = images.clone()
    torch.manual_seed(1)
    first = contrastive_views(images, np.random.default_rng(3), recipe, 32)
    torch.manual_seed(2)
    state = torch.get_rng_state()
    second = contrastive_views(images, np.random.default_rng(3), recipe, 32)
    assert torch.get_rng_state().equal(state)  # the draws of others are not disturbed
    assert first.equal(second) and images.equal(before)
    assert first.shape == (4, 3, 32, 32) and first.dtype == torch.float32
    assert first.min() >= 0 and first.max() <= 1
    assert not first.equal(contrastive_views(images, np.random.default_rng(4), recipe, 32))


def test_contrastive_views_leave_the_generators_of_gpus_alone(monkeypatch):
    """PyTorch's notes on randomness: `torch.manual_seed` seeds every device, and a fork of the CPU restores no other.

    Learning on a GPU beside the views draws from that GPU's generator.
    """
    seeded: list[int] = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeded.append)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
    assert seeded == [1]  # a seed of all devices would be seen here
    contrastive_views(pictures(2, 36), np.random.default_rng(3), "moco-v2", 32)
    assert seeded == [1]


@pytest.mark.parametrize("recipe", ["moco-v2", "simclr", "rotation"])
def test_every_image_of_a_batch_has_its_own_draws(recipe):
    """One picture sixteen times: sixteen different views."""
    images = pictures(1, 36).expand(16, -1, -1, -1).contiguous()
    views = contrastive_views(images, np.random.default_rng(0), recipe, 32)
    assert len({view.numpy().tobytes() for view in views}) == 16


def test_the_shares_of_moco_v2():
    """A coloured picture of one shade: 20 % of the views are grey, about a fifth keep their colours (.2 x .8)."""
    image = torch.tensor([200, 90, 40], dtype=torch.uint8).expand(600, 36, 36, 3).contiguous()
    views = contrastive_views(image, np.random.default_rng(0), "moco-v2", 32)
    shades = views.mean(dim=(2, 3))  # (600, 3)
    grey = (shades.amax(1) - shades.amin(1)) < 1e-4
    kept = (shades - torch.tensor([200, 90, 40]) / 255).abs().amax(1) < 1e-3
    assert abs(grey.float().mean() - 0.2) < 5 * np.sqrt(0.2 * 0.8 / 600)
    assert abs(kept.float().mean() - 0.16) < 5 * np.sqrt(0.16 * 0.84 / 600)


def test_rotation_views_keep_their_colours():
    """No jitter, no grey: a picture of one shade stays as it is."""
    image = torch.tensor([200, 90, 40], dtype=torch.uint8).expand(8, 36, 36, 3).contiguous()
    views = contrastive_views(image, np.random.default_rng(0), "rotation", 32)
    torch.testing.assert_close(views, (torch.tensor([200, 90, 40]) / 255).view(1, 3, 1, 1).expand_as(views))


@pytest.mark.parametrize(("recipe", "least"), [("moco-v2", 0.2), ("simclr", 0.08), ("rotation", 0.2)])
def test_contrastive_crops_show_from_the_stated_share(recipe, least, monkeypatch):
    """On a ramp a view's span of values is its part of the width; sides between 3:4 and 4:3. Colours are left alone."""
    monkeypatch.setattr(augment, "COLOURS", dict.fromkeys(augment.COLOURS, (0.0, 0.0, 0.0, 0.0)))
    side = 100
    ramp = torch.arange(side, dtype=torch.uint8).view(1, 1, side, 1).expand(300, side, side, 3).contiguous()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        views = augment._pipeline.__wrapped__(recipe, 96)(ramp.permute(0, 3, 1, 2).float() / 255) * 255
    spans = (views.amax(dim=(1, 2, 3)) - views.amin(dim=(1, 2, 3)) + 1) / side
    narrowest = np.sqrt(least * 3 / 4)
    assert narrowest - 0.03 < spans.min() < narrowest + 0.1


def figures(views: torch.Tensor) -> dict[str, np.ndarray]:
    """What each augmentation changes, of each view (B, 3, px, px)."""
    shades, grey, most = views.mean(dim=(2, 3)), views.mean(dim=1), views.amax(dim=1)
    half, spread = grey.shape[-1] // 2, grey.std(dim=(1, 2))
    found = {
        "brightness": shades.mean(dim=1),
        "green": shades[:, 1],
        "hue": shades[:, 0] - shades[:, 2],
        "saturation": ((most - views.amin(dim=1)) / most.clamp(min=1e-3)).mean(dim=(1, 2)),
        "contrast": spread / shades.mean(dim=1),
        "sharpness": (grey[:, 1:] - grey[:, :-1]).abs().mean(dim=(1, 2)) / spread.clamp(min=1e-3),
        "side": (grey[:, :, :half].mean(dim=(1, 2)) - grey[:, :, half:].mean(dim=(1, 2))) / spread.clamp(min=1e-3),
    }
    return {name: value.numpy() for name, value in found.items()}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "smallest", "colours"),
    [("moco-v2", 0.2, (0.4, 0.4, 0.4, 0.1)), ("simclr", 0.08, (0.8, 0.8, 0.8, 0.2))],
)
def test_views_are_distributed_as_the_public_recipes_ones(recipe, smallest, colours):
    """MoCo v2's and SimCLR's composition in torchvision, 1,200 views of each of one picture (Kolmogorov and Smirnov).

    The picture is brighter on the left, coloured and rough, so that each augmentation shows in one of the figures.
    """
    from scipy.stats import ks_2samp
    from torchvision.transforms import v2

    ramp = np.linspace(1.0, 0.5, 72)[None, :, None] * np.array([200.0, 120.0, 90.0])
    picture = (ramp + np.random.default_rng(5).normal(0, 25, (72, 72, 1))).clip(0, 255).astype(np.uint8)
    planes = torch.from_numpy(picture).permute(2, 0, 1).float() / 255
    rng, many = np.random.default_rng(0), torch.from_numpy(picture).expand(20, -1, -1, -1).contiguous()
    ours = torch.cat([contrastive_views(many, rng, recipe, 64) for _ in range(60)])
    public = v2.Compose(
        [
            v2.RandomResizedCrop(64, scale=(smallest, 1.0), antialias=False),
            v2.RandomApply([v2.ColorJitter(*colours)], p=0.8),
            v2.RandomGrayscale(p=0.2),
            v2.RandomApply([v2.GaussianBlur(7, (0.1, 2.0))], p=0.5),
            v2.RandomHorizontalFlip(),
        ]
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        theirs = torch.stack([public(planes) for _ in range(1200)])
    wanted = figures(theirs)
    for name, found in figures(ours).items():
        assert ks_2samp(found, wanted[name]).pvalue > 1e-3, name


@pytest.mark.parametrize(("recipe", "strength"), [("moco-v2", 0.4), ("simclr", 0.8)])
def test_brightness_is_as_strong_as_the_recipe_says(recipe, strength):
    """A grey picture of one shade: contrast, saturation and hue cannot change it, brightness by 1 ± strength."""
    image = torch.full((400, 36, 36, 3), 128, dtype=torch.uint8)
    factors = contrastive_views(image, np.random.default_rng(0), recipe, 32).mean(dim=(1, 2, 3)) * 255 / 128
    assert 1 - strength - 0.01 < factors.min() < 1 - 0.9 * strength
    assert 1 + 0.9 * strength < factors.max() < 1 + strength + 0.01
