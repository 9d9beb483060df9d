"""Features of this device's pictures, by the encoder of a round: `encode.onnx` with the values of its broadcast.

    order     drawn from the federation's seed, this member's name and the round; at most K pictures that pass the gate
    views     one random view of each (`learning.views`), a batch at a time, so that no more than a batch lies in memory
    features  128 numbers of length 1 a picture, with the statistics of the batch, as the slow encoder makes them
    rows      float16, in an order that depends on nothing but the features themselves

Guarantees: the same pictures, broadcast and number of threads give the same rows, bit for bit; a row that is not
finite or not of unit length never leaves. Source: FedCLF (arXiv 2208.11278) section III; docs/methods.md, FedCLF;
docs/decisions/0033.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgefl_client.learning.contrast_session import FeatureEncoder
from edgefl_client.learning.feature_queue import Features
from edgefl_client.learning.views import draw, views
from edgefl_client.scoring.pictures import PictureReader
from edgefl_protocol.durable import read_bounded
from edgefl_protocol.errors import EdgeflError, ImageError
from edgefl_protocol.pictures.imaging import MAX_FILE_BYTES, REDUCE
from edgefl_protocol.pictures.preprocess import Preprocess, prepare
from edgefl_protocol.pictures.quality import MOST_UNLIT, measure_quality
from edgefl_protocol.rules.batches import LEAST_BATCH, in_batches
from edgefl_protocol.rules.draws import generator
from edgefl_protocol.rules.feature_rows import FEATURES, first_order, have_unit_length, order_by_content

Rows = NDArray[np.float16]  # (n, 128), rows of length 1
Pixels = NDArray[np.uint8]  # (S, S, 3)


class FeaturesError(EdgeflError):
    """No features can be contributed."""

    code = "no_features"


@dataclass(frozen=True)
class Encoded:
    """What was made of a device's pictures."""

    rows: Rows  # the features
    paths: tuple[Path, ...]  # the picture of each row; none of it leaves
    looked_at: int  # pictures that were read
    left_out: Mapping[str, int]  # reason → pictures that give no feature: of the gate, or the code of an error


@dataclass(frozen=True, kw_only=True)
class RandomSource:
    """Where the random numbers of a contribution come from."""

    seed: int  # of the federation's task
    site: str  # this member's name
    round: int  # the round

    def rng(self, purpose: str) -> np.random.Generator:
        """Make the generator of one purpose, `order` or `views`."""
        return generator(self.seed, self.site, "contribution", purpose, self.round)


def encode_pictures(
    encoder: FeatureEncoder,
    network: Mapping[str, NDArray[Any]],
    preprocess: Preprocess,
    files: Sequence[Path],
    reader: PictureReader,
    draws: RandomSource,
    unlit_above: float = MOST_UNLIT,
) -> Encoded:
    """Make features of at most K pictures; one that cannot be read, or that the gate refers, gives none.

    Args:
        network: parameters of the round's slow encoder (`FeatureEncoder.slow`).
        unlit_above: of the model's rules, see `Quality.reasons`.

    Raises:
        FeaturesError: fewer pictures are left than a batch needs (`few_images`).
    """
    order = first_order(draws.rng("order"), len(files))
    fit = _FitPictures([files[position] for position in order], preprocess, reader, encoder.most, unlit_above)
    rng, found, paths = draws.rng("views"), list[Rows](), list[Path]()
    for part in in_batches(fit, encoder.batch):
        if len(part) < LEAST_BATCH:  # these are all there are
            break
        images = np.stack([pixels for _, pixels in part])
        drawn = views(images, draw(rng, len(images), images.shape[1]), encoder.view_px)
        found.append(_checked(encoder(network, drawn)))
        paths += [path for path, _ in part]
    left_out = {name: fit.left_out[name] for name in sorted(fit.left_out)}
    if not found:
        why = "; ".join(f"{name}: {number}" for name, number in left_out.items())
        raise FeaturesError(
            f"at least {LEAST_BATCH} pictures must be good enough to give features, and of these {len(files)} fewer "
            "are" + (f" ({why})" if why else "") + ": name more",
            "few_images",
        )
    rows = np.concatenate(found)
    by_content = order_by_content(rows)
    return Encoded(rows[by_content], tuple(paths[index] for index in by_content), fit.looked_at, left_out)


def _checked(features: Features) -> Rows:
    """Return features as they leave; a `FeaturesError` where one is not of length 1 (`bad_feature`)."""
    rows: Rows = features.astype(np.float16)
    if rows.shape != (len(features), FEATURES) or not have_unit_length(rows):
        raise FeaturesError(
            "the encoder gives a feature that is not of length 1; tell the federation's operator", "bad_feature"
        )
    return rows


class _FitPictures:
    """At most K pictures that pass the gate, each read when it is asked for."""

    def __init__(
        self, files: Sequence[Path], preprocess: Preprocess, reader: PictureReader, most: int, unlit_above: float
    ) -> None:
        self._files, self._preprocess, self._reader, self._most = files, preprocess, reader, most
        self._unlit_above = unlit_above
        self.looked_at = 0  # pictures that were read so far
        self.left_out = Counter[str]()  # reason → pictures that give no feature, so far

    def __iter__(self) -> Iterator[tuple[Path, Pixels]]:
        found = 0
        for path in self._files:
            if found == self._most:
                return
            self.looked_at += 1
            try:
                pixels, gate = _prepared(path, self._preprocess, self._reader, self._unlit_above)
            except ImageError as error:
                self.left_out[error.code] += 1
                continue
            self.left_out.update(gate)
            if not gate:
                found += 1
                yield path, pixels


def _prepared(
    path: Path, preprocess: Preprocess, reader: PictureReader, unlit_above: float
) -> tuple[Pixels, tuple[str, ...]]:
    """Read a picture as the network takes it, and the gate's reasons to refer it."""
    photo = reader.decode(read_bounded(path, MAX_FILE_BYTES, REDUCE))
    gate = measure_quality(photo.pixels).reasons(preprocess.least_px, unlit_above, photo.white)
    return prepare(photo.pixels, preprocess), gate


def picture_of(path: Path, preprocess: Preprocess, reader: PictureReader) -> Pixels:
    """Read a picture as the network takes it, to show it to its owner."""
    return _prepared(path, preprocess, reader, MOST_UNLIT)[0]
