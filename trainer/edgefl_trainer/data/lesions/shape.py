"""The outline of a lesion: a closed curve around the centre with the area of the unit circle.

Source of the vocabulary: the ABCD rule of dermoscopy (asymmetry, border, colour, structures; Stolz et al. 1994).
"""

from dataclasses import dataclass

import numpy as np

from edgefl_trainer.data.lesions.canvas import Canvas, Field, Rng, noise, smoothstep, turn_table


@dataclass(frozen=True, kw_only=True)
class Outline:
    """How irregular an outline is and how sharp its edge."""

    stretch: float  # most elongation, share of the radius
    waves: float  # amplitude of the irregular waves, share of the radius
    notches: float  # amplitude of small notches, share of the radius
    wobble: float  # displacement of the edge by noise, units
    edge: tuple[float, float]  # width over which the pigment fades, units: least and most over the turn


def radius_table(outline: Outline, rng: Rng) -> Field:
    """Compute the outline's radius over the turn, in units; its area is that of the unit circle."""
    turn = turn_table().astype(np.float64)
    wave = outline.stretch * rng.uniform(0.4, 1) * np.cos(2 * turn + rng.uniform(0, 2 * np.pi))
    for k in (1, 3, 4, 5, 6):
        wave += outline.waves * rng.normal(0, 1.1 / k**0.5) * np.cos(k * turn + rng.uniform(0, 2 * np.pi))
    for k in range(7, 17):
        wave += outline.notches * rng.normal(0, 0.5) * np.cos(k * turn + rng.uniform(0, 2 * np.pi))
    radius = np.clip(1 + wave, 0.55, 1.5)
    table: Field = (radius / np.sqrt(np.mean(radius**2))).astype(np.float32)
    return table


def depth_field(frame: Canvas, table: Field, outline: Outline, rng: Rng) -> Field:
    """Tell how far inside the outline a place lies along its ray, units; negative outside."""
    wobble = noise(frame.side).cut("middle", rng)
    return frame.by_angle(table) - frame.radius + np.float32(outline.wobble) * wobble


def cover_field(frame: Canvas, depth: Field, outline: Outline, rng: Rng) -> Field:
    """Share of lesion at each place, 0..1, one half on the outline."""
    low, high = outline.edge
    turn = turn_table()
    mix = 0.5 + 0.5 * np.cos(turn + np.float32(rng.uniform(0, 2 * np.pi)))
    width = frame.by_angle((low + (high - low) * mix).astype(np.float32))
    return smoothstep(-0.5, 0.5, depth / width)
