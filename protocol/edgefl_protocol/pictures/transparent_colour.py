"""The transparent colour of a PNG, in all bits of its samples.

The chunk tRNS names one colour, and a pixel is transparent where all 16 bits of each sample are those of the colour
(W3C PNG 3rd edition, 11.3.1.1). Pillow keeps the high byte of such samples and compares it with the colour's low byte:
a colour that no pixel has would whiten a lesion. So the low bytes are decoded here as well, in the rare file that has
such a colour. Grey pictures keep their 16 bits in Pillow (`imaging`). Grey samples of 2 or 4 bits it spreads over 0 to
255, and leaves their colour as it is in the file: so the colour is spread alike.
"""

from io import BytesIO

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from PIL.ImageFile import ImageFile

_HIGH_BYTES, _LOW_BYTES = "RGB;16B", "RGB;16L"  # what Pillow keeps of each pair of bytes, by its names of raw modes
_FEW_BITS = {"L;2": 2, "L;4": 4}
_MOST = 255


def loaded(image: Image.Image) -> Image.Image:
    """Decode the pixels of a picture that was opened.

    Returns:
        The picture itself; where 16-bit samples have a transparent colour, a copy with an alpha channel in its place.
        Of a picture that others have decoded, nobody knows the low bytes any more. It counts as opaque where its colour
        shows that it had 16 bits, by a value above 255.
    """
    colour = image.info.get("transparency")
    kept = [one.args for one in image.tile] if isinstance(image, ImageFile) else []
    deep = kept == [_HIGH_BYTES]
    low = _low_bytes(image) if deep and isinstance(image, ImageFile) and colour is not None else None
    image.load()
    if len(kept) == 1 and (bits := _FEW_BITS.get(str(kept[0]))) and isinstance(image.info.get("transparency"), int):
        most = 2**bits - 1
        image.info["transparency"] = (image.info["transparency"] & most) * _MOST // most  # its higher bits say nothing
    lost = not kept and image.mode == "RGB" and isinstance(colour, tuple) and max(colour) > _MOST
    # A colour that is told only after the pixels is against the standard, and counts for nothing.
    if not lost and not (deep and "transparency" in image.info):
        return image
    exact = image.copy()
    del exact.info["transparency"]
    if low is not None and isinstance(colour, tuple):
        exact.putalpha(Image.fromarray(np.where(_has_colour(image, low, colour), 0, _MOST).astype(np.uint8)))
    return exact


def _low_bytes(image: ImageFile) -> Image.Image | None:
    """Decode the low byte of each sample, and leave the file where it stood."""
    if image.fp is None:
        return None
    at = image.fp.tell()
    image.fp.seek(0)
    other = type(image)(BytesIO(image.fp.read()))
    image.fp.seek(at)
    other.tile = [one._replace(args=_LOW_BYTES) for one in other.tile]
    other.load()
    return other


def _has_colour(high: Image.Image, low: Image.Image, colour: tuple[int, ...]) -> NDArray[np.bool_]:
    """Tell for each pixel whether its samples are those of the colour, (H, W); one channel at a time, for memory."""
    found = np.ones((high.height, high.width), np.bool_)
    for channel, value in enumerate(colour):
        for part, byte in ((high, value >> 8), (low, value & _MOST)):
            found &= np.asarray(part.getchannel(channel)) == byte
    return found
