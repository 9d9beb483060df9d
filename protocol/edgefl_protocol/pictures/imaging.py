"""The one image path: bytes of a photograph in, the oriented and resized uint8 array out (`preprocess` says how).

Trainer, exporter and device all use it, so a device scores exactly the picture that was learned. No file is
opened here. The order of checks on a photograph is fixed; the first that fails names the code of the `ImageError`:

    (1) file size <= 20 MB                                               too_large
    (2) content starts like JPEG or PNG; a file's name is never seen     unsupported_format, empty
    (3) PNG chunk walk: whole, checksums right, not animated, bounded    truncated, unreadable, animated, too_large
    (4) header parsed by exactly that format's reader, Pillow's warnings counted as errors   unreadable
    (5) width x height <= 40 megapixels, before any pixel is decoded     too_large
    (6) JPEG ends by its marker; progressive scans x pixels bounded (a scan costs a pass over the whole
        picture)   truncated, too_large
    (7) pixels decoded; every exception of Pillow becomes one ImageError; a JPEG whose rest is the grey of what is
        missing is refused   truncated, unreadable
    (8) EXIF orientation applied; damaged EXIF counts as "upright"
    (9) grey, CMYK, palette and 16-bit pixels become RGB; transparency is laid on white

Sixteen-bit samples keep their high byte, in grey as in colour; a transparent colour is compared in all its bits.
Transparent pixels are laid on white because that is what a person sees in a viewer: colours hidden under alpha 0 must
not be scored. Embedded colour profiles are ignored, as in the training sets. Of a multi-picture JPEG (phones add depth
and gain maps) the main picture is read.

Source: docs/security.md, attack list 6 and 7, checks 34 and 35; docs/methods.md 7.3 (colour constancy, shades of grey).
"""

import logging
import math
import struct
import threading
import warnings
import zlib
from io import BytesIO
from typing import Literal, NamedTuple

import numpy as np
import PIL
from numpy.typing import NDArray
from PIL import Image
from PIL.ImageFile import ImageFile
from PIL.JpegImagePlugin import JpegImageFile

from edgefl_protocol.distribution import require
from edgefl_protocol.errors import ImageError
from edgefl_protocol.pictures.transparent_colour import loaded
from edgefl_protocol.pictures.whole_files import PNG_START, count_scans, has_no_end, rest_is_missing, walk_png

Pixels = NDArray[np.uint8]  # (H, W, 3), RGB

require("pillow", PIL.__version__)
PREPROCESSING = 3  # number of this image path: one more whenever the same file would give other pixels
MAX_FILE_BYTES = 20_000_000
REDUCE = "reduce it in a program for pictures, for example to 4,000 pixels on its longer side"
MAX_PIXELS = 40_000_000
MAX_SCAN_PIXELS = 16 * MAX_PIXELS  # decoded pixels summed over the scans of a progressive JPEG
STRIP_PIXELS = 1 << 18  # turned into an array at a time

Fit = Literal["squash", "crop"]
Colour = Literal["none", "shades_of_grey_6"]

_JPEG_START = b"\xff\xd8\xff"
_WHITE = (255, 255, 255)
_MINKOWSKI_POWER = 6

# Pillow's finest log level tells what stands in EXIF: a person's name would enter the log of whoever switches it on.
logging.getLogger("PIL").setLevel(logging.INFO)

# Everything Pillow's two readers were seen to raise on damaged files (docs/security.md, attack list 7).
_PILLOW_ERRORS = (
    OSError,
    SyntaxError,
    ValueError,
    TypeError,
    LookupError,
    ArithmeticError,
    AttributeError,
    AssertionError,
    EOFError,
    struct.error,
    zlib.error,
    Image.DecompressionBombError,
    Warning,
)

# EXIF 2.32, 4.6.5.1.6: how to turn the stored picture upright.
_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}

# Warning filters are process-wide, so two threads must not change and restore them crosswise.
_filter_lock = threading.Lock()


class DecodedPicture(NamedTuple):
    """A photograph as pixels."""

    pixels: Pixels  # (H, W, 3), upright
    white: float = 0.0  # share of the picture that is the white laid under what was transparent, 0 to 1

    @property
    def transparent(self) -> bool:
        """Whether white was laid under any of them."""
        return self.white > 0


def decode(data: bytes) -> Pixels:
    """Decode a photograph that may come from anyone.

    Returns:
        The upright picture, (H, W, 3) RGB.

    Raises:
        ImageError: the file is refused; `code` says by which check of the module's list.
    """
    return flattened(open_photo(data)).pixels


def open_photo(data: bytes) -> Image.Image:
    """Open a photograph that may come from anyone, by checks 1 to 6; no pixel is decoded yet.

    Raises:
        ImageError: the file is refused.
    """
    # (1)
    if len(data) > MAX_FILE_BYTES:
        raise _too_large(f"the file has {len(data):,} bytes; at most {MAX_FILE_BYTES:,} are allowed: {REDUCE}")
    # (2)
    if not data:
        raise ImageError("the file is empty; copy it again", code="empty")
    reader: type[ImageFile]
    if data.startswith(_JPEG_START):
        reader = JpegImageFile
    elif data.startswith(PNG_START):
        from PIL.PngImagePlugin import PngImageFile  # rarer than JPEG; the time it takes to load is seen at start

        reader = PngImageFile
        walk_png(data)  # (3)
    else:
        raise ImageError("the file is neither JPEG nor PNG; convert it to one of them", code="unsupported_format")
    # (4)
    try:
        with _filter_lock, warnings.catch_warnings():
            warnings.filterwarnings("error", module=r"PIL\.")
            image = reader(BytesIO(data))
    except _PILLOW_ERRORS as error:
        raise _mapped(error) from error
    _check_pixels(image)  # (5)
    # (6)
    if reader is JpegImageFile:
        if has_no_end(image, data):
            raise ImageError("the JPEG has no end; copy the file again", code="truncated")
        scans = count_scans(data)
        if scans * image.width * image.height > MAX_SCAN_PIXELS:
            raise _too_large(f"{scans} scans of {image.width} x {image.height} pixels; save it as a baseline JPEG")
    return image


def flattened(image: Image.Image) -> DecodedPicture:
    """Turn a Pillow image into upright pixels, and tell how much of them was transparent.

    Raises:
        ImageError: too many pixels, an unknown pixel mode, or the pixels cannot be decoded.
    """
    _check_pixels(image)
    try:
        image = loaded(image)  # (7)
        if image.format == "JPEG" and rest_is_missing(image):
            raise ImageError(
                "the end of the JPEG is empty, as if a part of the file were missing: copy the file again; if the "
                "picture has a grey margin, crop it",
                code="truncated",
            )
        orientation = _orientation(image.info.get("exif"))  # (8)
        if orientation in _UPRIGHT:
            info = image.info
            image = image.transpose(_UPRIGHT[orientation])
            image.info = info
        return _to_rgb(image)  # (9)
    except MemoryError as error:
        raise _too_large(
            f"there is not enough memory for {image.width} x {image.height} pixels; make the image smaller"
        ) from error
    except _PILLOW_ERRORS as error:
        raise _mapped(error) from error


def resize(image: Pixels, size_px: int, fit: Fit = "squash") -> Pixels:
    """Resize a picture to the square a network wants: bicubic (a = -0.5), widened when shrinking (antialias).

    Args:
        fit: `squash` ignores the aspect ratio; `crop` resizes the shorter side, then takes the centre, in one
            resampling of the largest centred square: its place is exact and a 1 x 40,000,000 image costs nothing.

    Returns:
        (size_px, size_px, 3).

    Raises:
        ImageError: not a uint8 array of (H, W, 3) with at least one pixel (`unreadable`).
    """
    check_array(image)
    height, width = image.shape[:2]
    box = (0.0, 0.0, float(width), float(height))
    if fit == "crop":
        side = min(height, width)
        left, top = (width - side) / 2, (height - side) / 2
        box = (left, top, left + side, top + side)
    resized = Image.fromarray(image).resize((size_px, size_px), Image.Resampling.BICUBIC, box=box)
    return np.asarray(resized)


def shades_of_grey(image: Pixels) -> Pixels:
    """Remove the colour of the light: Finlayson and Trezzi's shades of grey, Minkowski power 6.

    Per channel e = mean(I^6)^(1/6), e scaled to unit length, channel divided by e * sqrt(3), truncated to whole
    numbers and clipped at 255 (the reference of Fed-ISIC2019 lets values above 255 wrap; docs/methods.md 7.3).
    A channel that is black everywhere stays black.

    Raises:
        ImageError: not a uint8 array of (H, W, 3) with at least one pixel (`unreadable`).
    """
    check_array(image)
    light = light_of(image)
    length = float(np.linalg.norm(light))
    if length == 0.0:
        return image.copy()
    gain = np.divide(length, light * math.sqrt(3.0), out=np.ones(3), where=light > 0.0)
    corrected: Pixels = np.clip(image.astype(np.float64) * gain, 0.0, 255.0).astype(np.uint8)
    return corrected


def light_of(image: Pixels) -> NDArray[np.float64]:
    """Estimate the light of a picture (H, W, 3): of each channel the mean of Minkowski power 6, (3,), 0 to 255.

    Source: Finlayson and Trezzi 2004, "Shades of gray and colour constancy".
    """
    sixth = np.mean(image.astype(np.float64) ** _MINKOWSKI_POWER, axis=(0, 1))
    return np.asarray(sixth ** (1 / _MINKOWSKI_POWER))


def correct_colour(image: Pixels, colour: Colour) -> Pixels:
    """Remove the colour of the light as a model asks for it; with `none` the picture stays as it is."""
    return shades_of_grey(image) if colour == "shades_of_grey_6" else image


def _check_pixels(image: Image.Image) -> None:
    if image.width * image.height > MAX_PIXELS:
        raise _too_large(
            f"the image is {image.width} x {image.height} pixels; at most {MAX_PIXELS:,} in all are allowed: {REDUCE}"
        )


def check_array(image: Pixels) -> None:
    """Refuse, by an `ImageError` (`unreadable`), what is no uint8 picture (H, W, 3) with at least one pixel."""
    if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3 or image.size == 0:
        raise ImageError(
            f"the picture is {image.dtype} of shape {image.shape}; it must be uint8 of shape (height, width, 3)",
            code="unreadable",
        )


def _orientation(exif: object) -> int:
    """Read tag 0x0112 of the first image file directory (TIFF 6.0, section 2); 1 where there is none to read.

    Done here and not by Pillow: its answer to damaged EXIF is a warning, and must not depend on its version.
    """
    if not isinstance(exif, bytes):
        return 1
    tiff = exif.removeprefix(b"Exif\x00\x00")
    order = {b"II*\x00": "<", b"MM\x00*": ">"}.get(tiff[:4])
    if order is None:
        return 1
    try:
        (start,) = struct.unpack_from(order + "I", tiff, 4)
        (count,) = struct.unpack_from(order + "H", tiff, start)
        for entry in range(count):
            tag, kind, values, value = struct.unpack_from(order + "HHIH", tiff, start + 2 + 12 * entry)
            if tag == 0x0112:
                return int(value) if kind == 3 and values == 1 else 1
    except struct.error:
        return 1
    return 1


def _to_rgb(image: Image.Image) -> DecodedPicture:
    """Bring every pixel mode of JPEG and PNG to (H, W, 3) RGB, transparency laid on white."""
    if image.mode.startswith("I;16") or image.mode == "I":
        raw = np.asarray(image)
        grey = (np.clip(raw, 0, 65_535) >> 8).astype(np.uint8)
        value = image.info.get("transparency")
        clear = raw == (value if isinstance(value, int) else -1)
        grey[clear] = 255
        return DecodedPicture(np.repeat(grey[:, :, None], 3, axis=2), float(clear.mean()))
    if "A" in image.getbands() or "a" in image.getbands() or "transparency" in image.info:
        layered = image.convert("RGBA")
        flat, opacity = Image.new("RGB", image.size, _WHITE), layered.getchannel("A")
        flat.paste(layered, mask=opacity)
        return DecodedPicture(np.ascontiguousarray(flat), 1 - float(np.asarray(opacity).mean()) / 255)
    if image.mode not in ("1", "L", "P", "RGB", "CMYK", "YCbCr", "RGBX"):
        raise ImageError(f"the pixel mode is {image.mode}; convert the image to RGB", code="unsupported_format")
    return DecodedPicture(_in_strips(image if image.mode == "RGB" else image.convert("RGB")))


def _in_strips(image: Image.Image) -> Pixels:
    """As `np.asarray`, without its two further copies of the whole picture: 72 MB for 12 megapixels."""
    pixels = np.empty((image.height, image.width, 3), np.uint8)
    rows = max(1, STRIP_PIXELS // image.width)
    for top in range(0, image.height, rows):
        bottom = min(top + rows, image.height)
        pixels[top:bottom] = np.asarray(image.crop((0, top, image.width, bottom)))
    return pixels


def _too_large(sentence: str) -> ImageError:
    return ImageError(sentence, code="too_large")


def _mapped(error: BaseException) -> ImageError:
    """Give Pillow's exception its code; Pillow has no types for these, so its words decide."""
    words = str(error).lower()
    if "truncated" in words or "unexpected end" in words:
        return ImageError("the image ends before its last pixel; copy the file again", code="truncated")
    if "too large" in words or isinstance(error, Image.DecompressionBombError):
        return _too_large("the image unpacks to more bytes than are allowed; save it without text and profiles")
    return ImageError(f"the image cannot be decoded ({type(error).__name__}); it may be damaged", code="unreadable")
