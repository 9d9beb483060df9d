"""Pictures as files, whole and in pieces."""

import io
import struct
import zlib

import numpy as np
from PIL import Image


def photograph(height: int = 48, width: int = 64, seed: int = 0) -> np.ndarray:
    """A smooth picture with noise: like skin, and with every quadrant different."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[0:height, 0:width]
    base = np.stack([120 + 2 * x, 60 + 3 * y, 200 - x - y], axis=-1)
    return np.clip(base + rng.normal(0, 4, base.shape), 0, 255).astype(np.uint8)


def encoded(image: Image.Image | np.ndarray, kind: str = "PNG", **options: object) -> bytes:
    stream = io.BytesIO()
    (image if isinstance(image, Image.Image) else Image.fromarray(image)).save(stream, kind, **options)
    return stream.getvalue()


def exif(orientation: int, order: str = "<", kind: int = 3) -> bytes:
    start = b"II*\x00" if order == "<" else b"MM\x00*"
    entry = struct.pack(order + "HHIHH", 0x0112, kind, 1, orientation, 0)
    return b"Exif\x00\x00" + start + struct.pack(order + "IH", 8, 1) + entry + bytes(4)


def chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def png(header: bytes, *chunks: bytes) -> bytes:
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + b"".join(chunks) + chunk(b"IEND", b"")
