"""Drawn pictures to try a device with: no picture of a patient is needed, and none is read."""

import io
from typing import Final

import numpy as np
from numpy.typing import NDArray

CAMERA_PX: Final = (3000, 4000)  # 12 megapixels


def drawn_picture(height_px: int, width_px: int) -> NDArray[np.uint8]:
    """Draw a dark lesion on skin, (H, W, 3), that passes the picture gate."""
    rows = np.linspace(-1, 1, height_px, dtype=np.float32)[:, None]
    columns = np.linspace(-1, 1, width_px, dtype=np.float32)[None, :]
    lesion = np.clip(6 * (0.45 - np.hypot(rows * 1.2, columns + 0.2 * rows)), 0, 1)[..., None]  # (H, W, 1)
    skin, mole = np.array((205, 155, 130), np.float32), np.array((95, 60, 45), np.float32)
    grain = np.random.default_rng(0).integers(-8, 9, (84, 84, 1)).astype(np.float32)
    tiled = grain[np.arange(height_px)[:, None] * 84 // height_px, np.arange(width_px)[None, :] * 84 // width_px]
    picture: NDArray[np.uint8] = np.clip(skin * (1 - lesion) + mole * lesion + tiled, 0, 255).astype(np.uint8)
    return picture


def camera_photo() -> bytes:
    """Draw a lesion as a JPEG of 12 megapixels; drawing takes less memory than scoring it will."""
    from PIL import Image

    drawn = Image.fromarray(drawn_picture(CAMERA_PX[0] // 10, CAMERA_PX[1] // 10))
    encoded = io.BytesIO()
    drawn.resize(CAMERA_PX[::-1], Image.Resampling.NEAREST).save(encoded, "JPEG", quality=90)
    return encoded.getvalue()
