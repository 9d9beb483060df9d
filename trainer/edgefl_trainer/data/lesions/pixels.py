"""Pixels of drawn lesions, and the same drawings one by one for examples and tests.

Guarantees: a picture depends on its seed, site, lesion, view and size alone, never on which other pictures are drawn.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from edgefl_protocol.pictures.imaging import Fit, resize
from edgefl_protocol.pictures.preprocess import TaughtPictures
from edgefl_trainer.data.lesions.canvas import stream
from edgefl_trainer.data.lesions.plan import LesionSettings, plan_rows
from edgefl_trainer.data.lesions.site import SiteStyle, site_styles
from edgefl_trainer.data.lesions.view import Mask, PaintedLesion, Photo, healthy_skin, paint_lesion, photograph
from edgefl_trainer.data.rows import Row, SourceRows

_LESION_STREAM, _VIEW_STREAM, _SKIN_STREAM = 2, 3, 5


@dataclass(frozen=True, slots=True)
class DrawnPixels:
    """Pictures that are drawn when they are asked for."""

    settings: LesionSettings  # of the federation they belong to

    @property
    def identity(self) -> str:
        """Digest of the settings and of the code that draws."""
        s = self.settings
        return hashlib.sha256(f"{_code_digest()}\0{s.seed}\0{s.sites}\0{s.px}".encode()).hexdigest()

    @property
    def has_masks(self) -> bool:
        """Every drawn lesion has a mask."""
        return True

    def load(self, rows: Sequence[Row], image_px: int, fit: Fit) -> Iterator[tuple[Photo, Mask]]:
        """Draw the rows in order; see `PixelSource.load`."""
        s = self.settings
        styles = site_styles(s.sites, s.seed)
        last: tuple[int, int] | None = None
        lesion: PaintedLesion | None = None
        for row in rows:
            site, number, view, label = row.source.split("/")
            if lesion is None or last != (int(site), int(number)):
                last = int(site), int(number)
                lesion = paint_lesion(label, styles[last[0]], s.px, stream(s.seed, _LESION_STREAM, *last))
            image, mask = photograph(lesion, styles[last[0]], s.px, stream(s.seed, _VIEW_STREAM, *last, int(view)))
            yield _fitted(image, mask, image_px, fit)

    def likeness(self, rows: Sequence[Row], most_px: int) -> TaughtPictures | None:
        """See `PixelSource.likeness`."""
        return TaughtPictures(side=self.settings.px) if most_px >= self.settings.px else None

    def made_like(self, taught: TaughtPictures) -> "DrawnPixels":
        """See `PixelSource.made_like`."""
        return self


def read_lesions(settings: LesionSettings) -> SourceRows:
    """Read the rows of `lesions:`."""
    name = f"lesions:sites={settings.sites},images={settings.images},seed={settings.seed}"
    return SourceRows(name, plan_rows(settings), DrawnPixels(settings))


def draw_lesion(label: str, *, site: int, number: int, px: int, sites: int = 6, seed: int = 0) -> tuple[Photo, Mask]:
    """Draw one photograph of one lesion, as site `site` of `sites` (counted from 0) takes it.

    `label` is a key of `SIGNS`, `number` any from 0. Gives the picture, uint8 (px, px, 3), and its mask, uint8 (px,
    px): 0 = skin, 255 = lesion.
    """
    style = _style(site, sites, seed)
    lesion = paint_lesion(label, style, px, stream(seed, _LESION_STREAM, site, number))
    return photograph(lesion, style, px, stream(seed, _VIEW_STREAM, site, number, 0))


def draw_skin(*, site: int, number: int, px: int, sites: int = 6, seed: int = 0) -> Photo:
    """Draw healthy skin, uint8 (px, px, 3), for tests of what a model says about pictures without a lesion."""
    return healthy_skin(_style(site, sites, seed), px, stream(seed, _SKIN_STREAM, site, number))


def _style(site: int, sites: int, seed: int) -> SiteStyle:
    return site_styles(sites, seed)[site]


def _fitted(image: Photo, mask: Mask, image_px: int, fit: Fit) -> tuple[Photo, Mask]:
    if image.shape[0] == image_px:
        return image, mask
    small = resize(np.repeat(mask[..., None], 3, axis=2), image_px, fit)[..., 0]
    return resize(image, image_px, fit), np.where(small >= 128, 255, 0).astype(np.uint8)


@lru_cache(maxsize=1)
def _code_digest() -> str:
    """SHA-256 over the modules of this package: a changed drawing must not find old pictures in the cache."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()
