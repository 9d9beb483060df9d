"""TIFF, HEIC and DICOM into upright RGB pixels: the code that runs in a process of its own (`pictures` starts it).

The readers behind these formats are large and written in C; here a crash, a memory bomb or an endless loop ends one
small process and costs one picture. JPEG and PNG take the short way (`edgefl_protocol.pictures.imaging.decode`). The
same limits hold: 20 MB, 40 megapixels before any pixel is decoded, one picture a file. Pixels alone leave this process:
no tag, name, date or place of the file does.

    TIFF    one page; grey (zero black or white), RGB, palette, CMYK, unsigned samples of 1, 2, 4, 8 or 16 bits; a
            camera's raw file (DNG, NEF, CR2) is refused, because its first page is only a thumbnail
    HEIC    the primary picture, turned as the file says; 10 and 12 bits become 8
    DICOM   one frame, RGB, YBR_FULL or MONOCHROME, 8 to 16 bits, uncompressed or JPEG baseline, whose own markers
            say how its colours are stored; one without them is refused where DICOM says RGB, for then nobody knows.
            Grey is shown through the file's first window

Source: docs/security.md, attack list 6 and 8; DICOM PS3.3 C.7.6.3 (photometric interpretation), C.11.1 and C.11.2 (how
grey is shown), PS3.5 annex A.
"""

import os
import resource
import signal
import struct
import sys
import warnings
import zlib
from collections.abc import Callable, Sequence
from io import BytesIO
from typing import Any, BinaryIO, Final

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from edgefl_protocol.errors import ImageError
from edgefl_protocol.pictures.imaging import MAX_FILE_BYTES, MAX_PIXELS, REDUCE, DecodedPicture, decode, flattened

Pixels = NDArray[np.uint8]  # (H, W, 3), RGB

REQUEST: Final = struct.Struct(">8sI")  # name of the format, bytes that follow
# PIXELS, height, width, share of white laid under, then the pixels; or REFUSED, bytes of the code, of the sentence, 0
ANSWER: Final = struct.Struct(">BIId")
REFUSED, PIXELS = range(2)
MOST_SECONDS: Final = 45  # of one picture; who asked gives up before
MAX_ADDRESS_BYTES: Final = 3 * 2**30  # of this process; 40 megapixels need about a sixth of it

_READER_ERRORS = (
    OSError, SyntaxError, ValueError, TypeError, LookupError, ArithmeticError, AttributeError, AssertionError, EOFError,
    NotImplementedError, RuntimeError, MemoryError, struct.error, zlib.error, Image.DecompressionBombError, Warning,
)  # fmt: skip

_REDUCED, _SUB_PAGES, _DNG = 254, 330, 50706  # tags of TIFF 6.0, TIFF supplement 1 and DNG 1.4
_PHOTOMETRIC, _WHITE_IS_ZERO = 262, 0  # TIFF 6.0, section 3: how grey is stored
_BITS, _SAMPLES, _UNSIGNED = 258, 339, 1  # TIFF 6.0, sections 3 and 19: what a sample is; without the tags 1 bit
_TIFF_BITS = frozenset({1, 2, 4, 8, 16})  # Pillow reads 12 and 32 as if they were 16, and signed 8 as unsigned
_TAGS = [
    "SOPClassUID", "NumberOfFrames", "Rows", "Columns", "SamplesPerPixel", "PhotometricInterpretation", "BitsAllocated",
    "BitsStored", "HighBit", "PixelRepresentation", "PlanarConfiguration", "PixelData", "RescaleSlope",
    "RescaleIntercept", "WindowCenter", "WindowWidth", "VOILUTFunction", "PresentationLUTShape", "VOILUTSequence",
    "ModalityLUTSequence", "SharedFunctionalGroupsSequence", "PerFrameFunctionalGroupsSequence",
]  # fmt: skip
_PLAIN = ("1.2.840.10008.1.2", "1.2.840.10008.1.2.1")  # implicit and explicit little endian
_GREY = ("MONOCHROME1", "MONOCHROME2")
_JPEG_BASELINE = "1.2.840.10008.1.2.4.50"
_JPEG_KINDS = ("RGB", "YBR_FULL", "YBR_FULL_422", *_GREY)
_JPEG_HEAD_BYTES = 4096  # within these stand the markers that tell its colours
_WHITE = np.uint8(255)  # less a value: grey whose smallest value is white


def decode_tiff(data: bytes) -> DecodedPicture:
    """Decode a TIFF with one page.

    Raises:
        ImageError: it is damaged, too large, has several pages or other samples, or is a camera's raw file.
    """
    from PIL.TiffImagePlugin import TiffImageFile

    with TiffImageFile(BytesIO(data)) as image:
        _check_pixels(image.width, image.height)
        if image.n_frames != 1:
            raise ImageError("the TIFF has several pages; save it as a single picture", code="animated")
        tags = image.tag_v2
        if _SUB_PAGES in tags or _DNG in tags or int(tags.get(_REDUCED, 0)) & 1 or data[8:10] == b"CR":
            raise ImageError("the TIFF is a camera's raw file; convert it to JPEG first", code="unsupported_format")
        bits, samples = set(tags.get(_BITS, (1,))), set(tags.get(_SAMPLES, (_UNSIGNED,)))
        if not bits <= _TIFF_BITS or samples != {_UNSIGNED}:
            raise ImageError(
                "the samples of the TIFF are not unsigned whole numbers of 1, 2, 4, 8 or 16 bits; save it with 8 bits",
                code="unsupported_format",
            )
        found = flattened(image)  # Pillow turns a TIFF upright by itself
        # Where zero is white, it turns 8 bits and fewer into black is zero, but not 16.
        inverted = image.mode.startswith("I;16") and tags.get(_PHOTOMETRIC) == _WHITE_IS_ZERO
        return DecodedPicture(_WHITE - found.pixels, found.white) if inverted else found


def decode_heic(data: bytes) -> DecodedPicture:
    """Decode the primary picture of a HEIC.

    Raises:
        ImageError: it is damaged or too large.
    """
    import pillow_heif

    heif = pillow_heif.open_heif(data)
    _check_pixels(*heif.size)
    image = heif.to_pillow()
    image.info.clear()  # libheif has turned it; the EXIF tag beside it must not turn it again
    return flattened(image)


def decode_dicom(data: bytes) -> DecodedPicture:
    """Decode a DICOM file with one frame.

    Raises:
        ImageError: it is damaged, too large, has several frames, or is stored in a way that is not read here.
    """
    import pydicom

    file = pydicom.dcmread(BytesIO(data), specific_tags=list(_TAGS))
    if int(file.get("NumberOfFrames") or 1) != 1:
        raise ImageError("the DICOM file has several frames; save it with a single frame", code="animated")
    _check_pixels(int(file.Columns), int(file.Rows))
    kind, syntax = str(file.PhotometricInterpretation), str(file.file_meta.TransferSyntaxUID)
    if syntax == _JPEG_BASELINE and kind in _JPEG_KINDS:
        return DecodedPicture(_jpeg_dicom(file, kind))
    if syntax not in _PLAIN or kind not in ("RGB", "YBR_FULL", *_GREY):
        raise ImageError(
            f"the DICOM pixels are {kind} in transfer syntax {syntax}; allowed: RGB, YBR_FULL and MONOCHROME, "
            "uncompressed or JPEG baseline",
            code="unsupported_format",
        )
    return DecodedPicture(_plain_dicom(file, kind))


def _jpeg_dicom(file: Any, kind: str) -> Pixels:
    from pydicom.encaps import get_frame

    frame = get_frame(file.PixelData, 0, number_of_frames=1)
    head = frame[:_JPEG_HEAD_BYTES]
    if kind == "RGB" and b"JFIF\x00" not in head and b"Adobe" not in head:  # a decoder would take it for YCbCr
        raise ImageError(
            "the JPEG inside the DICOM file does not say how its colours are stored; convert it", "unsupported_format"
        )
    pixels = decode(frame)
    return _shown_grey(file, kind, 8)[pixels] if kind in _GREY else pixels


def _plain_dicom(file: Any, kind: str) -> Pixels:
    from pydicom.pixels.processing import convert_color_space
    from pydicom.pixels.utils import pixel_array

    bits = int(file.BitsStored)
    if not 8 <= bits <= 16 or int(file.HighBit) != bits - 1:  # PS3.5 8.1.1; the shift below would give other pixels
        raise ImageError(
            f"the DICOM pixels have {bits} bits that end at bit {file.HighBit}; allowed: 8 to 16 bits that begin at "
            "bit 0",
            code="unsupported_format",
        )
    stored: NDArray[Any] = pixel_array(file, raw=True)
    if stored.dtype not in (np.uint8, np.uint16):
        raise ImageError(f"the DICOM pixels are {stored.dtype}; they must be unsigned", code="unsupported_format")
    if kind in _GREY:
        pixels = _shown_grey(file, kind, bits)[stored & (2**bits - 1)]
    else:
        pixels = (stored >> (bits - 8)).astype(np.uint8)
    if kind == "YBR_FULL":
        pixels = convert_color_space(pixels, "YBR_FULL", "RGB")
    if pixels.ndim == 2:
        pixels = np.repeat(pixels[:, :, None], 3, axis=2)
    return np.ascontiguousarray(pixels)


def _shown_grey(file: Any, kind: str, bits: int) -> NDArray[np.uint8]:
    """Make the table from stored grey to shown grey, (2 ** bits,): through the first window, or the high byte.

    Raises:
        ImageError: the file asks to be shown in another way (`unsupported_format`).
    """
    center, width = _first_number(file, "WindowCenter"), _first_number(file, "WindowWidth")
    slope, intercept = _first_number(file, "RescaleSlope", 1.0), _first_number(file, "RescaleIntercept", 0.0)
    function = str(file.get("VOILUTFunction") or "LINEAR")
    windowed = center is not None and width is not None
    other = function not in ("LINEAR", "LINEAR_EXACT") if windowed else bool(file.get("VOILUTSequence"))
    # C.8.11.3: INVERSE goes with MONOCHROME1, whose zero is white anyway, and IDENTITY with MONOCHROME2.
    own = "INVERSE" if kind == "MONOCHROME1" else "IDENTITY"
    contrary = (file.get("PresentationLUTShape") or own) != own
    # An "enhanced" object keeps window and rescale in these (C.7.6.16).
    grouped = file.get("SharedFunctionalGroupsSequence") or file.get("PerFrameFunctionalGroupsSequence")
    half, one = (0.0, 0.0) if function == "LINEAR_EXACT" else (0.5, 1.0)
    stored = np.arange(2**bits)
    unread = other or contrary or grouped or file.get("ModalityLUTSequence")
    if unread or slope <= 0 or (windowed and width <= one):
        raise ImageError(
            "the DICOM file asks for its grey to be shown in a way that is not read here; export the picture as the "
            "viewer shows it",
            code="unsupported_format",
        )
    shown = (stored >> (bits - 8)).astype(np.uint8)
    if windowed:
        share = (slope * stored + intercept - center + half) / (width - one) + 0.5
        shown = np.round(255 * share.clip(0, 1)).astype(np.uint8)
    return _WHITE - shown if kind == "MONOCHROME1" else shown


def _first_number(file: Any, name: str, default: float | None = None) -> Any:
    """Return the first value of an attribute: of several windows a viewer shows the first."""
    value = file.get(name)
    if isinstance(value, Sequence) and not isinstance(value, str):
        value = next(iter(value), None)
    return default if value is None else float(value)


DECODERS: dict[str, Callable[[bytes], DecodedPicture]] = {
    "tiff": decode_tiff,
    "heic": decode_heic,
    "dicom": decode_dicom,
}


def decode_safely(name: str, data: bytes) -> DecodedPicture:
    """Decode with one of `DECODERS`; whatever its library raises becomes one ImageError."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            warnings.filterwarnings("ignore", category=DeprecationWarning)
            return DECODERS[name](data)
    except _READER_ERRORS as error:
        words = str(error).lower()
        if "truncated" in words or "end of" in words or isinstance(error, EOFError):
            code, why = "truncated", "ends before its last pixel; copy the file again"
        else:
            code, why = "unreadable", f"cannot be decoded ({type(error).__name__}); it may be damaged"
        raise ImageError(f"the {name.upper()} {why}", code=code) from error


def serve(source: BinaryIO, sink: BinaryIO) -> None:
    """Answer requests until the other side closes.

    Args:
        source: requests, each `REQUEST` and the bytes of a file.
        sink: takes for each an `ANSWER` and what it announces.
    """
    while len(head := source.read(REQUEST.size)) == REQUEST.size:
        name, length = REQUEST.unpack(head)
        if length > MAX_FILE_BYTES:
            return
        signal.alarm(MOST_SECONDS)  # where nobody is left to kill it, an endless loop still ends
        try:
            found = decode_safely(name.rstrip(b"\x00").decode("ascii"), source.read(length))
            sink.write(ANSWER.pack(PIXELS, *found.pixels.shape[:2], found.white))
            sink.write(found.pixels.tobytes())
        except ImageError as error:
            code, sentence = error.code.encode(), str(error).encode()
            sink.write(ANSWER.pack(REFUSED, len(code), len(sentence), 0.0) + code + sentence)
        sink.flush()
        signal.alarm(0)


def _check_pixels(width: int, height: int) -> None:
    if width * height > MAX_PIXELS:
        raise ImageError(
            f"the image is {width} x {height} pixels; at most {MAX_PIXELS:,} in all are allowed: {REDUCE}",
            code="too_large",
        )


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_AS, (MAX_ADDRESS_BYTES, MAX_ADDRESS_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a dump of memory would hold the picture
    with os.fdopen(os.dup(1), "wb") as answers:
        os.dup2(2, 1)  # what a library prints must not stand among the answers
        serve(sys.stdin.buffer, answers)
