"""One photograph: skin, a lesion placed on it, hair, gel, light, lens and sensor.

The lesion, hair, gel and ruler are drawn at `OVERSAMPLE` times the size and shrunk by averaging, so edges are soft. The
mask is the lesion's cover at least one half, at the final size.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFilter

from edgefl_trainer.data.lesions.canvas import EXTENT, Field, Rng, canvas, noise
from edgefl_trainer.data.lesions.paint import MAX_RATIO, mean_tone, set_mean
from edgefl_trainer.data.lesions.shape import cover_field, depth_field, radius_table
from edgefl_trainer.data.lesions.signs import SIGNS
from edgefl_trainer.data.lesions.site import SiteStyle

OVERSAMPLE = 2
AREA_RANGE = (0.11, 0.33)  # share of the picture a lesion covers

Photo = NDArray[np.uint8]  # (px, px, 3)
Mask = NDArray[np.uint8]  # (px, px), 0 = skin, 255 = lesion
Planes = NDArray[np.float32]  # (3, px, px), RGB 0..1


@dataclass(frozen=True)
class PaintedLesion:
    """A painted lesion in its own frame."""

    layers: Image.Image  # ratio to the skin (3 channels, 255 = `MAX_RATIO`) and cover, uint8 RGBA
    skin: NDArray[np.float32]  # colour of the patient's skin, RGB 0..1, (3,)
    area: float  # share of the picture it covers, before the variation between views
    turn: float  # its direction in the picture, radians


def paint_lesion(label: str, style: SiteStyle, px: int, rng: Rng) -> PaintedLesion:
    """Paint one lesion of a class for pictures of `px` pixels."""
    skin = style.skin(rng)
    area = float(np.clip(rng.normal(style.area, 0.045), *AREA_RANGE))
    tone, turn = mean_tone(rng), float(rng.uniform(0, 2 * np.pi))
    sign = SIGNS[label]
    frame = canvas(3 * px // 2)  # the largest lesion is 1.1 times as wide as its canvas would need at the final size
    depth = depth_field(frame, radius_table(sign.outline, rng), sign.outline, rng)
    paint, cover = sign.paint(frame, depth, cover_field(frame, depth, sign.outline, rng), rng)
    layers = np.empty((frame.side, frame.side, 4), np.uint8)
    ratio = set_mean(paint.ratio(), cover, tone)
    layers[..., :3] = np.moveaxis(ratio * np.float32(255 / MAX_RATIO) + np.float32(0.5), 0, 2)
    layers[..., 3] = cover * np.float32(255) + np.float32(0.5)
    return PaintedLesion(Image.fromarray(layers, "RGBA"), skin, area, turn)


def photograph(lesion: PaintedLesion, style: SiteStyle, px: int, rng: Rng) -> tuple[Photo, Mask]:
    """Draw picture and mask of one view of a lesion that `paint_lesion` made at the same `px`."""
    placed = np.asarray(_place(lesion, px, rng))  # (px, px, 4)
    cover = placed[..., 3] * np.float32(1 / 255)
    planes = _skin(lesion.skin, px, rng)
    for channel in range(3):
        ratio = placed[..., channel] * np.float32(MAX_RATIO / 255)
        planes[channel] *= 1 + cover * (ratio - 1)
    mask = np.where(placed[..., 3] >= 128, 255, 0).astype(np.uint8)
    return _expose(planes, style, rng), mask


def healthy_skin(style: SiteStyle, px: int, rng: Rng) -> Photo:
    """Draw a photograph of skin without a lesion."""
    return _expose(_skin(style.skin(rng), px, rng), style, rng)


def _place(lesion: PaintedLesion, px: int, rng: Rng) -> Image.Image:
    """Turn, scale and shift the lesion's canvas into the picture."""
    area = float(np.clip(lesion.area * rng.uniform(0.85, 1.18), *AREA_RANGE))
    radius = np.sqrt(area / np.pi)  # share of the picture's side
    room = max(0.5 - 1.08 * radius, 0.02)
    x, y = (float(v) for v in np.clip(rng.normal(0, 0.13, 2), -room, room) + 0.5)
    turn = lesion.turn + rng.normal(0, 0.35)
    side, canvas_side = OVERSAMPLE * px, lesion.layers.width
    scale = canvas_side / (2 * EXTENT) / (radius * side)  # canvas pixels for one pixel of the picture
    c, s = float(np.cos(turn) * scale), float(np.sin(turn) * scale)
    shift = (canvas_side / 2 - (c * x + s * y) * side, canvas_side / 2 - (c * y - s * x) * side)
    matrix = (c, s, shift[0], -s, c, shift[1])
    large = lesion.layers.transform((side, side), Image.Transform.AFFINE, matrix, Image.Resampling.BILINEAR)
    return large.reduce(OVERSAMPLE)


def _skin(tone: NDArray[np.float32], px: int, rng: Rng) -> Planes:
    """Bare skin: mottling, furrows and pores."""
    bank = noise(px)
    furrow = bank.cut("fine", rng)
    light = 1 + np.float32(0.020) * bank.cut("broad", rng) + np.float32(0.012) * bank.cut("grain", rng)
    light -= np.float32(0.05) * np.exp(furrow * furrow * np.float32(-9))
    flush = np.float32(0.022) * bank.cut("broad", rng) + np.float32(0.008) * bank.cut("middle", rng)
    planes: Planes = np.multiply.outer(tone, light)
    planes[1] *= 1 - flush
    planes[2] *= 1 - np.float32(0.9) * flush
    return planes


def _expose(planes: Planes, style: SiteStyle, rng: Rng) -> Photo:
    """Hair on the skin, then light, gel and ruler, lens, sensor."""
    px = planes.shape[1]
    _add_hair(planes, style, rng)
    planes *= _light(style, px, rng) * style.cast[:, None, None]
    _add_bubbles(planes, style, rng)
    _add_ruler(planes, style, rng)
    np.clip(planes, 0, 1, out=planes)
    if abs(style.contrast - 1) > 0.01:
        planes **= np.float32(style.contrast)
    pixels = np.ascontiguousarray(np.moveaxis(planes * np.float32(255) + np.float32(0.5), 0, 2)).astype(np.uint8)
    image = Image.fromarray(pixels, "RGB").filter(ImageFilter.GaussianBlur(style.blur_px * px / 128))
    grain = rng.standard_normal((px, px, 3), dtype=np.float32) * np.float32(style.noise)
    photo: Photo = np.clip(np.asarray(image) + grain + np.float32(0.5), 0, 255).astype(np.uint8)
    return photo


def _light(style: SiteStyle, px: int, rng: Rng) -> Field:
    """Gain over the picture: a gradient, darker corners, and the exposure of this view."""
    axis = ((np.arange(px) + 0.5) / px * 2 - 1).astype(np.float32)  # −1..1
    turn = style.gradient_turn + rng.normal(0, 0.3)
    slope = axis[None, :] * np.float32(np.cos(turn)) + axis[:, None] * np.float32(np.sin(turn))
    gain: Field = np.float32(rng.normal(0.97, 0.03)) * (1 + np.float32(0.5 * style.gradient) * slope)
    reach = axis[None, :] ** 2 + axis[:, None] ** 2
    if style.vignette > 0.5:  # the tube of the instrument
        edge = np.clip((np.float32(1.62) - reach) * np.float32(3.2), 0, 1)
        gain *= np.float32(1 - style.vignette) + np.float32(style.vignette) * edge * edge * (3 - 2 * edge)
    return gain * (1 - np.float32(0.16 * style.vignette) * reach)


def _shrunk(layer: Image.Image, soft: float) -> Field:
    """A layer drawn at `OVERSAMPLE` times the size, softened by `soft` of its pixels, at the final size, 0..1."""
    small = layer.filter(ImageFilter.GaussianBlur(soft)).reduce(OVERSAMPLE)
    return np.asarray(small) * np.float32(1 / 255)


def _add_hair(planes: Planes, style: SiteStyle, rng: Rng) -> None:
    count = int(rng.poisson(style.hairs * rng.gamma(2.0, 0.5)))
    if not count:
        return
    side = OVERSAMPLE * planes.shape[1]
    layer = Image.new("L", (side, side), 0)
    draw = ImageDraw.Draw(layer)
    t = np.linspace(0, 1, 12)[:, None]
    lie = rng.uniform(0, np.pi)
    for _ in range(count):
        middle, turn = rng.uniform(0, side, 2), lie + rng.normal(0, 0.5)
        way = np.array([np.cos(turn), np.sin(turn)]) * side * rng.uniform(0.25, 0.65)
        bow = np.array([-way[1], way[0]]) * rng.normal(0, 0.25)
        curve = (1 - t) ** 2 * (middle - way) + 2 * t * (1 - t) * (middle + bow) + t**2 * (middle + way)
        width = max(1, round(side / 128 * rng.uniform(0.45, 0.95)))
        draw.line(curve.ravel().tolist(), fill=int(rng.integers(150, 255)), width=width)
    colour = np.array([0.62, 0.48, 0.36]) * (1 - style.hair_tone) + np.array([0.10, 0.07, 0.06])
    share = np.float32(0.9) * _shrunk(layer, side / 400)
    for plane, value in zip(planes, colour, strict=True):
        plane += share * (np.float32(value) - plane)


def _add_bubbles(planes: Planes, style: SiteStyle, rng: Rng) -> None:
    count = int(rng.poisson(style.bubbles))
    if not count:
        return
    side = OVERSAMPLE * planes.shape[1]
    layer = Image.new("L", (side, side), 0)
    draw = ImageDraw.Draw(layer)
    for _ in range(count):
        x, y = rng.uniform(0, side, 2)
        r = side * rng.uniform(0.015, 0.055)
        draw.ellipse((x - r, y - r, x + r, y + r), outline=150, width=max(1, round(side / 110)))
        gleam = r * 0.28
        draw.ellipse((x - r / 2 - gleam, y - r / 2 - gleam, x - r / 2 + gleam, y - r / 2 + gleam), fill=255)
    planes += np.float32(0.75) * _shrunk(layer, side / 260) * (1 - planes)


def _add_ruler(planes: Planes, style: SiteStyle, rng: Rng) -> None:
    if rng.random() >= style.ruler:
        return
    side = OVERSAMPLE * planes.shape[1]
    layer = Image.new("L", (side, side), 0)
    draw = ImageDraw.Draw(layer)
    step = side * 0.045
    for i in range(int(side / step) + 1):
        length = side * (0.075 if i % 5 == 0 else 0.04)
        draw.line((i * step, side, i * step, side - length), fill=255, width=max(1, round(side / 128)))
    planes *= 1 - np.float32(0.8) * np.rot90(_shrunk(layer, 0.5), int(rng.integers(0, 4)))
