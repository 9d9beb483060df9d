"""Pictures for the demo: test lesions as JPEG files with known masks, and where a model looks on them."""

import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from edgefl_client import Scorer
from edgefl_client.trust.trusted_keys import read_public_key
from edgefl_protocol.bundle import load_bundle
from edgefl_trainer.data import load_federation

PHOTO_PX = 128


@dataclass(frozen=True)
class TestImage:
    """One drawn lesion that no model was trained on."""

    site: str
    path: Path
    label: str
    mask: NDArray[np.uint8]  # (px, px), 255 = lesion


@dataclass(frozen=True)
class TestImages:
    """The test rows of every site."""

    images: tuple[TestImage, ...]

    def of_site(self, site: str) -> list[TestImage]:
        """One site's images."""
        return [image for image in self.images if image.site == site]


def draw_test_images(data: str, folder: Path) -> TestImages:
    """Write the test rows of drawn data as JPEG files of 128 px, larger than the network reads; at most 40 a site."""
    federation = load_federation([data], image_px=PHOTO_PX, task="nevus")
    images = []
    for name, site in federation.sites.items():
        (folder / name).mkdir(parents=True)
        for row in site.test[:40]:
            path = folder / name / f"{federation.names[row].replace('/', '-')}.jpg"
            Image.fromarray(federation.images[row]).save(path, quality=95)
            mask = federation.masks[row] if federation.masks is not None else np.zeros((PHOTO_PX,) * 2, np.uint8)
            images.append(TestImage(name, path, federation.classes[federation.labels[row]], mask))
    return TestImages(tuple(images))


def attention_in_lesion(bundle: Path, trust: Path, images: list[TestImage]) -> tuple[float, float]:
    """Mean share of the rollout map inside the lesion, and the lesion's mean share of the picture.

    The map is stretched over the picture as the device draws it: bilinear, half-pixel centres.
    """
    key = read_public_key(str(trust))
    scorer = Scorer(load_bundle(bundle.read_bytes(), [key.public], int(time.time() * 1000)))
    shares, areas = [], []
    for image in images:
        attention = scorer.score(image.path.read_bytes()).map
        assert attention is not None
        grid = int(len(attention) ** 0.5)
        size = image.mask.shape[::-1]
        stretched = Image.fromarray(attention.reshape(grid, grid)).resize(size, Image.Resampling.BILINEAR)
        heat, lesion = np.asarray(stretched, dtype=np.float64), image.mask > 127
        shares.append(heat[lesion].sum() / heat.sum())
        areas.append(lesion.mean())
    return float(np.mean(shares)), float(np.mean(areas))
