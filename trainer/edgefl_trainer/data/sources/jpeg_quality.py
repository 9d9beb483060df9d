"""The quality at which a JPEG was saved, read from its quantisation tables.

libjpeg, and most of what saves JPEG, scales the example tables of the standard (ITU-T T.81, annex K) by a quality from
1 to 100. The tables of each quality are those that Pillow writes, so a file saved with others has no quality here.
"""

from collections.abc import Iterable, Mapping
from functools import cache
from io import BytesIO

from PIL import Image
from PIL.JpegImagePlugin import JpegImageFile, get_sampling

_HALVED = 2  # Pillow's number for colour at half the resolution in both directions (4:2:0)

Quantisation = tuple[tuple[int, ...], ...]  # of each table its 64 divisors


def jpeg_quality(image: Image.Image) -> int | None:
    """Tell the quality of a JPEG that was opened; None of another file, of other tables, or of another subsampling."""
    if not isinstance(image, JpegImageFile) or get_sampling(image) != _HALVED:
        return None
    return _qualities().get(_tables(image))


def best_quality(qualities: Iterable[int | None]) -> int | None:
    """Take the best of several, which leaves no picture with more than any had; None where one has none."""
    found = list(qualities)
    return max((one for one in found if one is not None), default=None) if None not in found else None


def _tables(image: JpegImageFile) -> Quantisation:
    return tuple(tuple(image.quantization[number]) for number in sorted(image.quantization))


@cache
def _qualities() -> Mapping[Quantisation, int]:
    found: dict[Quantisation, int] = {}
    for quality in range(1, 101):
        file = BytesIO()
        Image.new("RGB", (16, 16)).save(file, "JPEG", quality=quality)
        found.setdefault(_tables(JpegImageFile(BytesIO(file.getvalue()))), quality)
    return found
