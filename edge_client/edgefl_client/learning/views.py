"""Random views of pictures for contrastive learning, MoCo v2's recipe, with numpy alone.

Steps, ranges and probabilities are those of `rules.view_recipes`, boxes of crops those of `rules.crops`; the formulas
are kornia's, from which the trainer's views come, too. The draws are this device's own, for kornia draws from PyTorch's
generator. A crop is resized bilinearly, corners on corners. Guarantees: `views` is a function of pictures and draws;
values lie in [0, 1]. Sources: MoCo v2 (arXiv 2003.04297); docs/methods.md, FedCLF.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edgefl_protocol.rules.crops import crop_boxes
from edgefl_protocol.rules.view_recipes import (
    BLURRED,
    COLOURS,
    GREYED,
    JITTERED,
    MIRRORED,
    SIGMA,
    SMALLEST_CROP,
    Recipe,
    blur_kernel,
)

Pictures = NDArray[np.uint8]  # (B, S, S, 3)
Views = NDArray[np.float32]  # (B, 3, px, px), in [0, 1]

RECIPE: Recipe = "moco-v2"
BRIGHTNESS, CONTRAST, SATURATION, HUE = range(4)
LUMINANCE = np.array([0.299, 0.587, 0.114], np.float32)


@dataclass(frozen=True, kw_only=True)
class Draws:
    """Everything random about one view of each picture of a batch."""

    boxes: NDArray[np.int64]  # top, left, height and width in pixels, (B, 4)
    jittered: NDArray[np.bool_]  # whether its colours change, (B,)
    order: tuple[int, ...]  # of the four changes, for the whole batch
    factors: NDArray[np.float32]  # of brightness, contrast and saturation, and the hue's share of a turn, (B, 4)
    greyed: NDArray[np.bool_]  # (B,)
    blurred: NDArray[np.bool_]  # (B,)
    sigma: NDArray[np.float64]  # of the blur in pixels, (B,)
    mirrored: NDArray[np.bool_]  # (B,)


def draw(rng: np.random.Generator, count: int, side: int) -> Draws:
    """Draw what one view of each picture takes; the pictures are squares of `side` pixels."""
    *about_one, turn = COLOURS[RECIPE]
    strength = np.array(about_one)
    boxes = crop_boxes(rng, count, side, SMALLEST_CROP[RECIPE])
    jittered = rng.random(count) < JITTERED
    order = tuple(int(change) for change in rng.permutation(4))
    colours = rng.uniform(1 - strength, 1 + strength, (count, 3))
    hue = rng.uniform(-turn, turn, (count, 1))
    return Draws(
        boxes=boxes,
        jittered=jittered,
        order=order,
        factors=np.concatenate([colours, hue], axis=1).astype(np.float32),
        greyed=rng.random(count) < GREYED,
        blurred=rng.random(count) < BLURRED,
        sigma=rng.uniform(*SIGMA, count),
        mirrored=rng.random(count) < MIRRORED,
    )


def views(images: Pictures, drawn: Draws, view_px: int) -> Views:
    """Draw one view of each square picture (B, S, S, 3): (B, 3, px, px), in [0, 1], in order."""
    pairs = zip(images, drawn.boxes, strict=True)
    found = np.stack([resized_crop(image, box, view_px) for image, box in pairs])  # (B, px, px, 3)
    changed = np.flatnonzero(drawn.jittered)
    if len(changed):
        found[changed] = jittered(found[changed], drawn.factors[changed], drawn.order)
    found[drawn.greyed] = grey(found[drawn.greyed])[..., None]
    soft = np.flatnonzero(drawn.blurred)
    if len(soft):
        found[soft] = blurred(found[soft], drawn.sigma[soft], blur_kernel(view_px))
    found[drawn.mirrored] = found[drawn.mirrored][:, :, ::-1]
    return np.ascontiguousarray(np.clip(found, 0, 1).transpose(0, 3, 1, 2))


def resized_crop(image: NDArray[np.uint8], box: NDArray[np.int64], view_px: int) -> NDArray[np.float32]:
    """Cut a box (top, left, height, width) out and resize it (bilinear, corners on corners): (px, px, 3), in [0, 1]."""
    top, left, height, width = (int(value) for value in box)
    cut = image[top : top + height, left : left + width].astype(np.float32) / np.float32(255)
    for axis, length in enumerate((height, width)):
        place = np.arange(view_px, dtype=np.float32) * np.float32((length - 1) / max(1, view_px - 1))
        before = np.minimum(place.astype(np.int64), length - 1)
        share = (place - before.astype(np.float32)).reshape((-1, 1, 1) if axis == 0 else (1, -1, 1))
        near, far = cut.take(before, axis=axis), cut.take(np.minimum(before + 1, length - 1), axis=axis)
        cut = near + (far - near) * share
    return cut


def jittered(images: NDArray[np.float32], factors: NDArray[np.float32], order: tuple[int, ...]) -> NDArray[np.float32]:
    """Change brightness, contrast, saturation and hue in a given order, each result cut to [0, 1].

    Args:
        images: (B, px, px, 3), in [0, 1].
        factors: (B, 4), see `Draws`.
    """
    for change in order:
        factor = factors[:, change].reshape(-1, 1, 1, 1)
        if change == HUE:
            images = _turned(images, factor[..., 0])
            continue
        if change == BRIGHTNESS:
            images = images * factor
        elif change == CONTRAST:
            images = images * factor + grey(images).mean(axis=(1, 2))[:, None, None, None] * (1 - factor)
        else:
            images = images * factor + grey(images)[..., None] * (1 - factor)
        images = np.clip(images, 0, 1)
    return images


def grey(images: NDArray[np.float32]) -> NDArray[np.float32]:
    """Compute the luminance, (B, px, px)."""
    luminance: NDArray[np.float32] = images @ LUMINANCE
    return luminance


def _turned(images: NDArray[np.float32], turn: NDArray[np.float32]) -> NDArray[np.float32]:
    """Turn the hue: each channel is v − v·s·max(0, min(k, 4 − k, 1)), k = (n + 6·hue) mod 6 and n = 5, 3, 1."""
    largest, spread = images.max(axis=-1), np.ptp(images, axis=-1)
    red, green, blue = np.moveaxis(images, -1, 0)
    safe = np.where(spread > 0, spread, 1)
    sixth = np.where(
        (red >= green) & (red >= blue),
        (green - blue) / safe,
        np.where(green >= blue, 2 + (blue - red) / safe, 4 + (red - green) / safe),
    )
    hue = sixth + 6 * turn
    channels = []
    for start in (5, 3, 1):
        k = np.mod(start + hue, 6)
        channels.append(largest - spread * np.clip(np.minimum(k, 4 - k), 0, 1))
    return np.stack(channels, axis=-1)


def blurred(images: NDArray[np.float32], sigma: NDArray[np.float64], kernel: int) -> NDArray[np.float32]:
    """Blur each picture (B, px, px, 3) by a Gaussian of its own `sigma` in pixels; the border is reflected.

    The kernel has an odd number of pixels.
    """
    reach = kernel // 2
    away = np.arange(kernel) - reach
    weights = np.exp(-(away**2) / (2 * sigma[:, None] ** 2))
    weights = (weights / weights.sum(axis=1, keepdims=True)).astype(np.float32)  # (B, kernel)
    for axis in (1, 2):
        edges = [(0, 0)] * 4
        edges[axis] = (reach, reach)
        wide, length = np.pad(images, edges, mode="reflect"), images.shape[axis]
        images = np.zeros_like(images)
        for place in range(kernel):
            part = wide[:, place : place + length] if axis == 1 else wide[:, :, place : place + length]
            images += part * weights[:, place].reshape(-1, 1, 1, 1)
    return images
