"""A picture to store in any format, and the one sentence of a refusal."""

import io

import numpy as np
import pytest
from PIL import Image

from edgefl_client.scoring.pictures import PictureReader
from edgefl_protocol.errors import ImageError

SHAPE = (48, 64)


def scene(seed: int = 0) -> np.ndarray:
    """Every quadrant different, some noise."""
    y, x = np.mgrid[0 : SHAPE[0], 0 : SHAPE[1]]
    base = np.stack([120 + 2 * x, 60 + 3 * y, 200 - x - y], axis=-1)
    return np.clip(base + np.random.default_rng(seed).normal(0, 4, base.shape), 0, 255).astype(np.uint8)


def saved(image: np.ndarray | Image.Image, kind: str = "TIFF", **options: object) -> bytes:
    out = io.BytesIO()
    (image if isinstance(image, Image.Image) else Image.fromarray(image)).save(out, kind, **options)
    return out.getvalue()


def code_of(reader: PictureReader, data: bytes) -> str:
    with pytest.raises(ImageError) as refused:
        reader.decode(data)
    assert len(str(refused.value).splitlines()) == 1
    return refused.value.code
