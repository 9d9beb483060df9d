"""The lesion's own canvas and the noise it is painted with.

A lesion is painted once on a square canvas in its own frame and then placed into each photograph of it. Lengths are in
units: 1 unit is the radius of the circle with the lesion's area; the canvas spans ±`EXTENT` units.
"""

from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFilter

Field = NDArray[np.float32]  # (n, n)
Rng = np.random.Generator

EXTENT = 1.7  # units from the centre to the edge of the canvas
_ANGLES = 1024  # entries of a table over the full turn
_BANK_SIDE = 3  # noise is tiled this many canvas sides wide


def stream(*path: int) -> Rng:
    """Return an independent random generator for one place in the tree seed → site → lesion → view."""
    return np.random.default_rng(path)


@dataclass(frozen=True)
class Canvas:
    """Coordinates of a canvas of `side` pixels."""

    side: int

    @cached_property
    def axis(self) -> Field:
        """Coordinate of each column or row, units, (n,)."""
        step = 2 * EXTENT / self.side
        return ((np.arange(self.side) + 0.5) * step - EXTENT).astype(np.float32)

    @cached_property
    def radius(self) -> Field:
        """Distance from the centre, units."""
        return np.hypot(self.axis[None, :], self.axis[:, None])

    @cached_property
    def angle_index(self) -> NDArray[np.int16]:
        """Direction from the centre as an index into a table of `_ANGLES` entries."""
        turn = np.arctan2(self.axis[:, None], self.axis[None, :]) / (2 * np.pi)
        return (np.round(turn * _ANGLES) % _ANGLES).astype(np.int16)

    def by_angle(self, table: Field) -> Field:
        """Spread a table over the full turn, (`_ANGLES`,), to the canvas."""
        return np.take(table, self.angle_index)

    def px(self, units: float) -> float:
        """Convert a length in units to canvas pixels."""
        return units * self.side / (2 * EXTENT)

    def point(self, x: float, y: float) -> tuple[float, float]:
        """Convert a place in units to its canvas pixel."""
        return self.px(x + EXTENT), self.px(y + EXTENT)

    def distance(self, x: float, y: float) -> Field:
        """Compute the distance from a place, in units."""
        across, down = np.square(self.axis - np.float32(x)), np.square(self.axis - np.float32(y))
        found: Field = np.sqrt(across[None, :] + down[:, None])
        return found


@lru_cache(maxsize=4)
def canvas(side: int) -> Canvas:
    """Return the canvas of one size; its coordinates are computed once."""
    return Canvas(side)


def turn_table() -> Field:
    """Return the angles, radians, that a table for `Canvas.by_angle` stands for."""
    return np.arange(_ANGLES, dtype=np.float32) * np.float32(2 * np.pi / _ANGLES)


class Pen:
    """Draw small objects in units on an empty layer, then soften it.

    Pillow draws without anti-aliasing; the layer is softened by at least half a pixel and shrunk once more in the
    photograph, so no hard step remains.
    """

    def __init__(self, frame: Canvas) -> None:
        self._frame = frame
        self._image = Image.new("L", (frame.side, frame.side), 0)
        self._draw = ImageDraw.Draw(self._image)

    def dot(self, x: float, y: float, radius: float, value: float = 1.0) -> None:
        """Draw a filled circle."""
        cx, cy = self._frame.point(x, y)
        r = max(self._frame.px(radius), 0.5)
        self._draw.ellipse((cx - r, cy - r, cx + r, cy + r), fill=round(255 * value))

    def oval(self, x: float, y: float, axes: tuple[float, float], turn: float, value: float = 1.0) -> None:
        """Draw a filled ellipse with half axes in units, turned by `turn` radians."""
        t = np.linspace(0, 2 * np.pi, 24, endpoint=False)
        u, v = axes[0] * np.cos(t), axes[1] * np.sin(t)
        xs, ys = x + u * np.cos(turn) - v * np.sin(turn), y + u * np.sin(turn) + v * np.cos(turn)
        points = [self._frame.point(float(a), float(b)) for a, b in zip(xs, ys, strict=True)]
        self._draw.polygon(points, fill=round(255 * value))

    def line(self, places: NDArray[np.float64], width: float, value: float = 1.0) -> None:
        """Draw a line through places (m, 2)."""
        points = [self._frame.point(float(x), float(y)) for x, y in places]
        self._draw.line(points, fill=round(255 * value), width=max(1, round(self._frame.px(width))), joint="curve")

    def layer(self, soft: float) -> Field:
        """Return what was drawn, 0..1, softened by `soft` units."""
        softened = self._image.filter(ImageFilter.GaussianBlur(max(self._frame.px(soft), 0.5)))
        return np.asarray(softened, dtype=np.float32) / np.float32(255)


class Noise:
    """Smooth random textures of mean 0 and deviation 1, cut from tiles made once for each size.

    The tiles are the same for every seed; where a cut is taken is random.
    """

    def __init__(self, side: int) -> None:
        self._side = side
        self._tiles = {
            name: _tile(_BANK_SIDE * side, wavelength * side, i)
            for i, (name, wavelength) in enumerate(
                {"broad": 0.55, "middle": 0.16, "fine": 0.05, "grain": 0.018}.items()
            )
        }

    def cut(self, name: str, rng: Rng) -> Field:
        """Cut (n, n) out of one texture: `broad` varies over half the canvas, `middle`, `fine`, `grain` over less."""
        tile = self._tiles[name]
        room = tile.shape[0] - self._side
        y, x = (int(v) for v in rng.integers(0, room, 2))
        cut = tile[y : y + self._side, x : x + self._side]
        return cut.T if rng.random() < 0.5 else cut


@lru_cache(maxsize=4)
def noise(side: int) -> Noise:
    """Return the textures of one canvas size."""
    return Noise(side)


def _tile(side: int, wavelength: float, index: int) -> Field:
    """Gaussian noise with a band of waves around one length, by Fourier filtering."""
    white = stream(20_26, index).standard_normal((side, side))
    frequency = np.hypot(np.fft.fftfreq(side)[:, None], np.fft.rfftfreq(side)[None, :]) * wavelength
    band = np.exp(-((frequency - 0.7) ** 2) / 0.18) + 0.35 * np.exp(-(frequency**2) / 4.0)
    band[0, 0] = 0.0
    field = np.fft.irfft2(np.fft.rfft2(white) * band, s=(side, side))
    tile: Field = (field / field.std()).astype(np.float32)
    return tile


def smoothstep(low: float, high: float, field: Field) -> Field:
    """Return 0 below `low`, 1 above `high`, smooth between."""
    t: Field = np.clip((field - np.float32(low)) * np.float32(1 / (high - low)), 0, 1)
    return t * t * (3 - 2 * t)
