"""Class signs, as a dermatologist names them, painted in the lesion's frame.

    NV    melanocytic nevus: symmetric, even border; regular pigment network, or globules of one size
    MEL   melanoma: asymmetric, irregular border; several colours, blue-white veil, regression, irregular dots and
          globules, streaks at one side
    BKL   benign keratosis: sharp stuck-on border with small notches; milia-like cysts, comedo-like openings, fissures
    BCC   basal cell carcinoma: ill-defined; arborising vessels, blue-grey ovoid nests
    VASC  vascular lesion: red-purple lacunae between pale septa

Vocabulary: Kittler et al., "Standardization of terminology in dermoscopy", J Am Acad Dermatol 2016.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edgefl_trainer.data.lesions.canvas import Canvas, Field, Pen, Rng, noise, smoothstep
from edgefl_trainer.data.lesions.paint import BLUE_GREY, KERATIN, PLUG, SCAR, VEIL, Paint
from edgefl_trainer.data.lesions.shape import Outline


@dataclass(frozen=True)
class Sign:
    """One class: its outline and what is painted inside.

    Attributes:
        outline: See `Outline`.
        paint: From canvas, depth inside the outline, cover and generator to paint and the cover with anything that
            reaches beyond the outline.
    """

    outline: Outline
    paint: Callable[[Canvas, Field, Field, Rng], tuple[Paint, Field]]


def _lattice(frame: Canvas, pitch: float, rng: Rng) -> Field:
    """Three plane waves at 120°: 1 at the points of a hexagonal lattice, −0.5 on the lines between, slightly bent."""
    bank = noise(frame.side)
    bends = [bank.cut("middle", rng) * np.float32(0.11 * pitch) for _ in range(2)]
    turn, wave = rng.uniform(0, 2 * np.pi / 3), 4 * np.pi / (np.sqrt(3) * pitch)
    phases = rng.uniform(0, 2 * np.pi, 2)
    total = np.zeros((frame.side, frame.side), np.float32)
    for k, phase in enumerate((*phases, -phases.sum())):  # phases that sum to 0 give round holes
        c, s = (np.float32(wave * f(turn + 2 * k * np.pi / 3)) for f in (np.cos, np.sin))
        along = (frame.axis * c)[None, :] + (frame.axis * s + np.float32(phase))[:, None]
        total += np.cos(along + (c * bends[0] + s * bends[1]))
    return total / np.float32(3)


def _nevus(frame: Canvas, depth: Field, cover: Field, rng: Rng) -> tuple[Paint, Field]:
    bank = noise(frame.side)
    centre = smoothstep(-0.1, 0.85, depth)  # symmetric: darker, or at times paler, towards the middle
    pigment = 0.42 + np.float32(rng.uniform(-0.08, 0.4)) * centre + np.float32(0.05) * bank.cut("broad", rng)
    lattice = _lattice(frame, rng.uniform(0.22, 0.29), rng)
    strength = (0.25 + 0.75 * smoothstep(0.0, 0.4, depth)) * (1 + np.float32(0.22) * bank.cut("middle", rng))
    if rng.random() < 0.65:
        pigment += np.float32(rng.uniform(0.55, 0.85)) * strength * (0.55 - smoothstep(-0.5, 0.75, lattice))
    else:
        pigment += np.float32(rng.uniform(0.75, 1.05)) * strength * (smoothstep(0.05, 0.8, lattice) - 0.3)
    return Paint(np.maximum(pigment, 0.03)), cover


def _zone(frame: Canvas, rng: Rng, side: float, size: tuple[float, float]) -> Field:
    """An irregular patch off the centre, in the direction `side` (radians) give or take."""
    turn, away = side + rng.normal(0, 0.7), rng.uniform(0.25, 0.75)
    radius = rng.uniform(*size)
    distance = frame.distance(float(away * np.cos(turn)), float(away * np.sin(turn)))
    ragged = np.float32(0.16) * noise(frame.side).cut("middle", rng)
    return smoothstep(-0.12, 0.12, np.float32(radius) - distance + ragged)


def _irregular_dots(frame: Canvas, rng: Rng, side: float) -> Field:
    pen = Pen(frame)
    for _ in range(int(rng.integers(8, 18))):
        turn, away = side + rng.normal(0, 0.6), rng.uniform(0.25, 0.95)
        size, dark = 0.03 + 0.08 * rng.random() ** 2, rng.uniform(0.6, 1)
        pen.dot(float(away * np.cos(turn)), float(away * np.sin(turn)), float(size), float(dark))
    return pen.layer(0.02)


def _streaks(frame: Canvas, depth: Field, rng: Rng, side: float) -> Field:
    """Radial lines, some with knobs, that leave the border along a third of the turn."""
    pen = Pen(frame)
    row = frame.side // 2
    for _ in range(int(rng.integers(7, 13))):
        turn = side + rng.uniform(-0.9, 0.9)
        way = np.array([np.cos(turn), np.sin(turn)])
        edge = _edge_radius(frame, depth, way, row)
        start, stop = edge * rng.uniform(0.65, 0.8), edge * rng.uniform(1.0, 1.14)
        dark = float(rng.uniform(0.65, 1))
        for share, width in ((1.0, 0.035), (0.6, 0.06), (0.3, 0.085)):  # thin at the tip
            pen.line(np.stack([way * start, way * (start + share * (stop - start))]), width, dark)
        if rng.random() < 0.3:
            pen.dot(float(way[0] * stop), float(way[1] * stop), 0.04, dark)
    return pen.layer(0.025)


def _edge_radius(frame: Canvas, depth: Field, way: NDArray[np.float64], centre: int) -> float:
    """Where the ray from the centre leaves the lesion, units."""
    steps = np.linspace(0.3, 1.5, 60)
    columns = np.clip(centre + np.round(frame.px(1.0) * steps * way[0]).astype(int), 0, frame.side - 1)
    rows = np.clip(centre + np.round(frame.px(1.0) * steps * way[1]).astype(int), 0, frame.side - 1)
    outside = depth[rows, columns] < 0
    return float(steps[int(np.argmax(outside))] if outside.any() else 1.5)


def _melanoma(frame: Canvas, depth: Field, cover: Field, rng: Rng) -> tuple[Paint, Field]:
    side = rng.uniform(0, 2 * np.pi)
    pigment = 0.45 + np.float32(0.16) * noise(frame.side).cut("middle", rng)
    pigment += np.float32(rng.uniform(1.0, 1.5)) * _zone(frame, rng, side, (0.30, 0.55))
    pigment += np.float32(rng.uniform(0.4, 0.8)) * _zone(frame, rng, side + 2.2, (0.2, 0.4))
    paint = Paint(np.maximum(pigment, 0.03))
    paint.blood = np.float32(rng.uniform(0.4, 0.8)) * _zone(frame, rng, side - 2.2, (0.25, 0.45))
    paint.coat(VEIL, np.float32(rng.uniform(0.75, 0.95)) * _zone(frame, rng, side + rng.normal(0, 0.6), (0.28, 0.5)))
    if rng.random() < 0.6:
        paint.coat(SCAR, np.float32(0.7) * _zone(frame, rng, side + np.pi, (0.2, 0.4)))
    dark = (0.19, 0.13, 0.11)
    paint.coat(dark, np.float32(0.9) * _irregular_dots(frame, rng, side + rng.normal(0, 1.0)))
    if rng.random() < 0.75:
        streaks = _streaks(frame, depth, rng, side + rng.normal(0, 0.5))
        paint.coat(dark, np.float32(0.85) * streaks)
        cover = np.maximum(cover, streaks)
    return paint, cover


def _keratosis(frame: Canvas, depth: Field, cover: Field, rng: Rng) -> tuple[Paint, Field]:
    bank = noise(frame.side)
    pigment = np.full((frame.side, frame.side), 0.75, np.float32) + np.float32(0.1) * bank.cut("middle", rng)
    if rng.random() < 0.7:
        ridge = smoothstep(0.0, 0.28, np.abs(bank.cut("middle", rng)))
        pigment += np.float32(rng.uniform(0.5, 0.8)) * (1 - ridge)
    paint = Paint(np.maximum(pigment, 0.05))
    plugs, cysts = Pen(frame), Pen(frame)
    for pen, count, size in ((plugs, rng.integers(5, 12), (0.06, 0.12)), (cysts, rng.integers(8, 18), (0.05, 0.10))):
        for _ in range(int(count)):
            turn, away = rng.uniform(0, 2 * np.pi), 0.85 * np.sqrt(rng.random())
            axes = (float(rng.uniform(*size)), float(rng.uniform(*size)))
            pen.oval(float(away * np.cos(turn)), float(away * np.sin(turn)), axes, float(rng.uniform(0, np.pi)))
    inside = smoothstep(0.03, 0.12, depth)
    paint.coat(PLUG, np.float32(0.9) * plugs.layer(0.018) * inside)
    paint.coat(KERATIN, np.float32(0.95) * cysts.layer(0.02) * inside)
    return paint, cover


def _branch(pen: Pen, place: NDArray[np.float64], turn: float, width: float, reach: float, rng: Rng) -> None:
    """A vessel that winds, thins and forks."""
    steps = 6
    turns = turn + np.cumsum(rng.normal(0, 0.22, steps))
    places = place + np.concatenate(
        [np.zeros((1, 2)), np.cumsum(np.stack([np.cos(turns), np.sin(turns)], axis=1), axis=0) * reach / steps]
    )
    pen.line(places, width)
    if width > 0.028:
        for sign in (-1, 1):
            angle = float(turns[-1]) + sign * rng.uniform(0.35, 0.8)
            _branch(pen, places[-1], angle, width * 0.66, reach * rng.uniform(0.55, 0.75), rng)


def _carcinoma(frame: Canvas, depth: Field, cover: Field, rng: Rng) -> tuple[Paint, Field]:
    bank = noise(frame.side)
    paint = Paint(np.maximum(0.16 + np.float32(0.05) * bank.cut("middle", rng), 0.02))
    paint.blood = np.maximum(0.22 + np.float32(0.07) * bank.cut("broad", rng), 0.0)
    nests = Pen(frame)
    side = rng.uniform(0, 2 * np.pi)
    for _ in range(int(rng.integers(3, 7))):
        turn, away = side + rng.normal(0, 1.0), rng.uniform(0.2, 0.8)
        axes = (float(rng.uniform(0.14, 0.30)), float(rng.uniform(0.10, 0.18)))
        nests.oval(float(away * np.cos(turn)), float(away * np.sin(turn)), axes, float(rng.uniform(0, np.pi)))
    paint.coat(BLUE_GREY, np.float32(0.88) * nests.layer(0.045))
    vessels = Pen(frame)
    for _ in range(int(rng.integers(2, 4))):
        turn = rng.uniform(0, 2 * np.pi)
        start = 1.02 * np.array([np.cos(turn), np.sin(turn)])
        _branch(vessels, start, turn + np.pi + rng.normal(0, 0.35), float(rng.uniform(0.07, 0.09)), 0.75, rng)
    paint.coat((0.62, 0.20, 0.22), np.float32(0.9) * vessels.layer(0.012))
    return paint, cover


def _vascular(frame: Canvas, depth: Field, cover: Field, rng: Rng) -> tuple[Paint, Field]:
    paint = Paint(np.full((frame.side, frame.side), 0.08, np.float32))
    paint.blood = np.maximum(0.15 + np.float32(0.06) * noise(frame.side).cut("middle", rng), 0.0)
    pen = Pen(frame)
    placed: list[tuple[float, float, float]] = []
    for _ in range(90):
        turn, away, radius = rng.uniform(0, 2 * np.pi), 0.86 * np.sqrt(rng.random()), rng.uniform(0.13, 0.27)
        x, y = float(away * np.cos(turn)), float(away * np.sin(turn))
        if all(np.hypot(x - a, y - b) > radius + r + 0.025 for a, b, r in placed):
            placed.append((x, y, float(radius)))
            pen.dot(x, y, float(radius), float(rng.uniform(0.7, 1.0)))
    purple = (0.40, 0.14, 0.24) if rng.random() < 0.6 else (0.55, 0.12, 0.16)
    paint.coat(purple, pen.layer(0.025))
    return paint, cover


SIGNS: Mapping[str, Sign] = {
    "NV": Sign(Outline(stretch=0.14, waves=0.015, notches=0.0, wobble=0.012, edge=(0.16, 0.26)), _nevus),
    "MEL": Sign(Outline(stretch=0.20, waves=0.16, notches=0.035, wobble=0.06, edge=(0.05, 0.22)), _melanoma),
    "BKL": Sign(Outline(stretch=0.20, waves=0.05, notches=0.026, wobble=0.02, edge=(0.035, 0.06)), _keratosis),
    "BCC": Sign(Outline(stretch=0.20, waves=0.07, notches=0.01, wobble=0.05, edge=(0.16, 0.30)), _carcinoma),
    "VASC": Sign(Outline(stretch=0.14, waves=0.05, notches=0.006, wobble=0.03, edge=(0.06, 0.12)), _vascular),
}
