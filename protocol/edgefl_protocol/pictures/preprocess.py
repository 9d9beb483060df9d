"""How a photograph becomes a network's input: size, colour, and what the pictures were like that it learned from.

A network that learned from small pictures learned their blur and, where they are JPEG, the blocks of their
compression. A camera's photograph has neither, and the network answers otherwise: of a photograph of 200 x 150 it
passed three times as many melanomas as of the same at 84 x 84, which it had learned (docs/decisions/0073). So a bundle
says what its pictures were like where the network reads no less than they had, and `prepare` makes a photograph so.

Guarantee: a picture that is no larger than the taught ones is left as it is, so a taught picture gives the input that
was learned.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from io import BytesIO
from typing import Any, Literal, get_args

import numpy as np
from PIL import Image
from PIL.JpegImagePlugin import JpegImageFile

from edgefl_protocol.pictures.imaging import Colour, Fit, Pixels, correct_colour, decode, resize
from edgefl_protocol.strict_json import check_keys

MAX_SIZE_PX = 4_096  # of the network's input


@dataclass(frozen=True, kw_only=True)
class TaughtPictures:
    """What the pictures were like that a network learned from, where it reads no less than they had."""

    side: int  # px, the longest of any of them
    # 1 to 100, of libjpeg's tables with colour at half the resolution; None: not all were JPEG of one quality
    jpeg_quality: int | None = None

    def __post_init__(self) -> None:
        if type(self.side) is not int or not 1 <= self.side <= MAX_SIZE_PX:
            raise ValueError(f"side is {self.side!r}; allowed: a whole number of pixels from 1 to {MAX_SIZE_PX}")
        quality = self.jpeg_quality
        if quality is not None and (type(quality) is not int or not 1 <= quality <= 100):
            raise ValueError(f"jpeg_quality is {quality!r}; allowed: a whole number from 1 to 100, or null")

    @classmethod
    def from_json(cls, record: object) -> "TaughtPictures":
        """Read what `preprocess.json` says of them; a `ValueError` where it is something else."""
        return cls(**check_keys(record, {field.name for field in fields(cls)}, what="taught"))

    def made_like(self, image: Pixels, fit: Fit) -> Pixels:
        """Make a picture (H, W, 3) like them; one that is no larger in either direction stays as it is."""
        return image if self.are_as_small(image) else self.compressed(resize(image, self.side, fit))

    def are_as_small(self, image: Pixels) -> bool:
        """Tell whether a picture (H, W, 3) is no larger than they in either direction."""
        return bool(max(image.shape[:2]) <= self.side)

    def compressed(self, small: Pixels) -> Pixels:
        """Compress a picture of their size as they were; where they were not all alike, it stays as it is."""
        if self.jpeg_quality is None:
            return small
        file = BytesIO()
        Image.fromarray(small).save(file, "JPEG", quality=self.jpeg_quality)
        return np.asarray(JpegImageFile(BytesIO(file.getvalue())))


@dataclass(frozen=True, kw_only=True)
class Preprocess:
    """How a photograph becomes the network's input; the content of a bundle's `preprocess.json`.

    `mean` and `std` apply to pixels divided by 255 and live inside the graph; they stand here to be read.
    """

    size: int  # px, both sides of the network's input
    fit: Fit = "squash"
    resample: Literal["bicubic"] = "bicubic"
    antialias: bool = True
    colour: Colour = "none"
    mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    std: tuple[float, float, float] = (0.5, 0.5, 0.5)
    taught: TaughtPictures | None = None  # None: the pictures had more pixels than the network reads, or nobody tells

    @property
    def least_px(self) -> int:
        """Side from which a picture has as much detail as the network reads, or as the taught pictures had."""
        return self.size if self.taught is None else min(self.size, self.taught.side)

    def __post_init__(self) -> None:
        if type(self.size) is not int or not 1 <= self.size <= MAX_SIZE_PX:
            raise ValueError(f"size is {self.size!r}; allowed: a whole number of pixels from 1 to {MAX_SIZE_PX}")
        for name, value, allowed in (
            ("fit", self.fit, get_args(Fit)),
            ("resample", self.resample, ("bicubic",)),
            ("antialias", self.antialias, (True,)),
            ("colour", self.colour, get_args(Colour)),
        ):
            if type(value) is not type(allowed[0]) or value not in allowed:
                raise ValueError(f"{name} is {value!r}; this version knows {', '.join(map(repr, allowed))}")
        for name, values in (("mean", self.mean), ("std", self.std)):
            if len(values) != 3 or not all(type(v) is float and math.isfinite(v) for v in values):
                raise ValueError(f"{name} is {values!r}; it must be three finite numbers, for red, green and blue")
        if min(self.std) <= 0.0:
            raise ValueError(f"std is {self.std!r}; every entry must be above 0")

    def to_json(self) -> dict[str, object]:
        """Give the record as JSON values, `Preprocess.from_json`'s inverse."""
        record = {**asdict(self), "mean": list(self.mean), "std": list(self.std)}
        if self.taught is None:  # older devices read such a bundle, and refuse one that says more
            del record["taught"]
        return record

    @classmethod
    def from_json(cls, record: Mapping[str, object]) -> "Preprocess":
        """Read the record of a `preprocess.json`.

        Raises:
            ValueError: a key is missing or unknown, or a value is outside what this version can do.
        """
        values: dict[str, Any] = dict(
            check_keys(record, {field.name for field in fields(cls)} - {"taught"}, {"taught"})
        )
        if "taught" in values:
            values["taught"] = TaughtPictures.from_json(values["taught"])
        for name in ("mean", "std"):
            value = values[name]
            if not isinstance(value, list) or not all(type(v) in (int, float) for v in value):
                raise ValueError(f"{name} is {value!r}; it must be a list of three numbers")
            values[name] = tuple(float(v) for v in value)
        return cls(**values)  # __post_init__ checks every value


def prepare(source: bytes | Pixels, preprocess: Preprocess) -> Pixels:
    """Make the network's input of a photograph: decode, make it like the taught ones, resize, correct the colour.

    Args:
        source: the bytes of a JPEG or PNG file, or an upright picture (H, W, 3).

    Returns:
        (size, size, 3), the same bytes on every machine of one Pillow version.
    """
    image = decode(source) if isinstance(source, bytes) else source
    if preprocess.taught is not None:
        image = preprocess.taught.made_like(image, preprocess.fit)
    return _input(image, preprocess)


def prepare_turned(image: Pixels, preprocess: Preprocess) -> tuple[Pixels, Pixels, Pixels, Pixels]:
    """Make the inputs of a picture (H, W, 3) as it is, and turned by a quarter, a half and three quarters.

    Each is the very input that `prepare` makes of the turned picture. To turn an input would not do: the blocks of a
    JPEG do not turn with a picture, and a network may tell.
    """
    taught = preprocess.taught
    if taught is None or taught.are_as_small(image):
        upright, quarter, half, three = (
            correct_colour(one, preprocess.colour) for one in _resized_turns(image, preprocess.size, preprocess.fit)
        )
    else:
        upright, quarter, half, three = (
            _input(taught.compressed(one), preprocess) for one in _resized_turns(image, taught.side, preprocess.fit)
        )
    return upright, quarter, half, three


def _resized_turns(image: Pixels, size: int, fit: Fit) -> tuple[Pixels, ...]:
    """Resize a picture turned by no quarter, one, two and three; a filter that is symmetric needs two resizes."""
    upright, quarter = resize(image, size, fit), resize(_turned(image, 1), size, fit)
    return upright, quarter, _turned(upright, 2), _turned(quarter, 2)


def _input(image: Pixels, preprocess: Preprocess) -> Pixels:
    return correct_colour(resize(image, preprocess.size, preprocess.fit), preprocess.colour)


def _turned(image: Pixels, quarters: int) -> Pixels:
    return np.ascontiguousarray(np.rot90(image, quarters))
