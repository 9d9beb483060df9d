"""Drawn textures: pictures that are no skin, for asking a model what it says about things it has never seen.

Guarantees: a texture depends on its number, seed and size alone; numbers go round the kinds in `TEXTURES`, each with
colours, scale and direction of its own.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Field = NDArray[np.float64]  # (px, px), 0..1
Rng = np.random.Generator
NOISE = 0.02  # of the sensor, share of full scale


def draw_texture(number: int, *, px: int, seed: int = 0) -> NDArray[np.uint8]:
    """Draw one texture, uint8 (px, px, 3); `number` is any from 0, `seed` that of the whole set."""
    rng = np.random.default_rng([seed, number])
    field = tuple(TEXTURES.values())[number % len(TEXTURES)](px, rng)
    low, high = rng.uniform(0, 1, (2, 3))
    planes = low + field[..., None] * (high - low) + rng.normal(0, NOISE, (px, px, 3))
    return np.asarray(np.clip(planes * 255 + 0.5, 0, 255).astype(np.uint8))


def _plane(px: int, rng: Rng) -> tuple[Field, Field]:
    """Coordinates over the picture, 0..1, turned by a random angle."""
    axis = (np.arange(px) + 0.5) / px
    turn = rng.uniform(0, np.pi)
    x, y = axis[None, :] - 0.5, axis[:, None] - 0.5
    return np.cos(turn) * x + np.sin(turn) * y, np.cos(turn) * y - np.sin(turn) * x


def _stripes(px: int, rng: Rng) -> Field:
    along, _ = _plane(px, rng)
    return np.asarray(0.5 + 0.5 * np.sin(2 * np.pi * (rng.uniform(3, 12) * along + rng.uniform())))


def _checks(px: int, rng: Rng) -> Field:
    x, y = _plane(px, rng)
    count = rng.uniform(3, 10)
    return np.asarray((np.floor(count * x) + np.floor(count * y)) % 2)


def _rings(px: int, rng: Rng) -> Field:
    x, y = _plane(px, rng)
    distance = np.hypot(x - rng.uniform(-0.4, 0.4), y - rng.uniform(-0.4, 0.4))
    return np.asarray(0.5 + 0.5 * np.sin(2 * np.pi * rng.uniform(4, 14) * distance))


def _dots(px: int, rng: Rng) -> Field:
    x, y = _plane(px, rng)
    count = rng.uniform(4, 10)
    return np.asarray((np.hypot(count * x % 1 - 0.5, count * y % 1 - 0.5) < rng.uniform(0.2, 0.4)).astype(np.float64))


def _cells(px: int, rng: Rng) -> Field:
    """Each point has the shade of the nearest of some random centres."""
    x, y = _plane(px, rng)
    centres = rng.uniform(-0.7, 0.7, (int(rng.integers(8, 40)), 2))
    nearest = np.hypot(x[..., None] - centres[:, 0], y[..., None] - centres[:, 1]).argmin(axis=2)
    return np.asarray(rng.uniform(0, 1, len(centres))[nearest])


def _clouds(px: int, rng: Rng) -> Field:
    """Smooth noise: a sum of waves whose size falls with their frequency."""
    x, y = _plane(px, rng)
    field = np.zeros((px, px))
    for _ in range(24):
        wave = rng.normal(0, 1, 2) * 2 ** rng.uniform(0, 4)
        field += np.sin(2 * np.pi * (wave[0] * x + wave[1] * y + rng.uniform())) / (1 + np.hypot(*wave))
    return np.asarray((field - field.min()) / np.ptp(field))


TEXTURES: dict[str, Callable[[int, Rng], Field]] = {
    "stripes": _stripes,
    "checks": _checks,
    "rings": _rings,
    "dots": _dots,
    "cells": _cells,
    "clouds": _clouds,
}
