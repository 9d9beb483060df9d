"""The network of a verified bundle on onnxruntime, and what it is given: a picture, and perhaps a question.

* The graph is loaded from the bytes that `load_bundle` verified, never from a path, and with an empty folder as the
  only place external data could come from (docs/security.md, attack list 1 and 2).
* Inputs and outputs are those that `load_bundle` checked; numbers that are not finite never become a result.
* Threads are pinned in number and do not spin while waiting, so a device can do other things.
* A photo is prepared by `edgefl_protocol.pictures.imaging` alone, the code that prepared the training pictures.
"""

import contextlib
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from edgefl_client.runtime import check_runtime, load_graph, processors, run_graph
from edgefl_protocol.bundle import Bundle
from edgefl_protocol.bundle.question_table import INPUT
from edgefl_protocol.errors import EdgeflError
from edgefl_protocol.pictures.imaging import DecodedPicture, check_array, flattened, open_photo
from edgefl_protocol.pictures.preprocess import prepare
from edgefl_protocol.rules.hidden_regions import each_cell_hidden, occlusion_map

OCCLUSION_BATCH = 8  # as in the export gates

Photo = bytes | Image.Image | NDArray[np.uint8] | DecodedPicture
Pixels = NDArray[np.uint8]
Floats = NDArray[np.float32]


class ScoreError(EdgeflError):
    """The network gave no usable numbers for a picture."""

    code = "not_finite"


class Network:
    """Runs the network of one bundle.

    Args:
        threads: threads of one run; None for the processors this process may use.
        weights: values to run with; None for the bundle's own.
        clock: gives Unix milliseconds; None for this machine's.

    Raises:
        ValueError: `threads` is out of range.
    """

    def __init__(
        self,
        bundle: Bundle,
        threads: int | None = None,
        weights: Mapping[str, NDArray[Any]] | None = None,
        clock: Callable[[], int] | None = None,
    ) -> None:
        if threads is not None and not 1 <= threads <= 1024:
            raise ValueError(f"threads is {threads}; allowed: 1 to 1024")
        check_runtime(bundle.manifest.min_runtime)
        self.bundle = without_graphs(bundle)
        self.weights = bundle.weights if weights is None else weights
        self.threads = threads or processors()
        self._clock = clock or _wall_clock_ms
        self._graph = load_graph(bundle.score_onnx, self.threads)

    @property
    def fit(self) -> str:
        """How photos are brought to the network's square: `squash` or `crop`."""
        return self.bundle.preprocess.fit

    @property
    def side_px(self) -> int:
        """Side of the network's input in pixels."""
        return self.bundle.preprocess.size

    @property
    def least_px(self) -> int:
        """Side from which a picture has as much detail as the model learned from."""
        return self.bundle.preprocess.least_px

    @property
    def precision(self) -> str:
        """`int8` where the card says that layers have 8 bits, else `fp32`."""
        return "int8" if "int8" in self.bundle.card.metrics else "fp32"

    @property
    def left_ms(self) -> int | None:
        """Milliseconds until the bundle expires; None where it never does."""
        expires_ms = self.bundle.manifest.expires_ms
        return None if expires_ms is None else expires_ms - self._clock()

    @property
    def expired(self) -> bool | None:
        """Whether the bundle is past its date; None where it has none."""
        expires_ms = self.bundle.manifest.expires_ms
        return None if expires_ms is None else self._clock() >= expires_ms

    @property
    def temperature(self) -> float | None:
        """What logits are divided by, so that probabilities are calibrated; None where the model has none."""
        return float(self.weights["temperature"]) if "temperature" in self.weights else None

    def prepared(self, image: Photo) -> tuple[DecodedPicture, Pixels]:
        """Decode a picture, and make the network's input of it (S, S, 3).

        Args:
            image: bytes of a JPEG or PNG, a Pillow image, or upright uint8 pixels (H, W, 3).

        Raises:
            ImageError: the picture cannot be used; `code` says why.
        """
        photo = decoded(image)
        return photo, prepare(photo.pixels, self.bundle.preprocess)

    def run(
        self, pixels: Pixels, question: NDArray[np.int64] | None = None, *, what: str = "this picture"
    ) -> dict[str, Floats]:
        """Run the network once: every output by name, a row for each picture.

        Args:
            pixels: (B, S, S, 3).
            question: (L,), asked of every one of them; None for a network that is asked none.
            what: what an error calls the picture.

        Raises:
            ScoreError: it gave no finite numbers.
        """
        given: dict[str, NDArray[Any]] = {"image": pixels, **self.weights}
        if question is not None:
            given[INPUT] = np.repeat(question[None], len(pixels), axis=0)
        found = run_graph(self._graph, self.bundle.outputs, given, "the model")
        for name, value in found.items():
            if not np.isfinite(value).all():
                raise ScoreError(f"the model's output {name} is not finite for {what}; report it to the signer")
        return found

    def try_once(self) -> None:
        """Run on a black picture: a graph that cannot run, or asks for too much memory, shows before it is needed."""
        table = self.bundle.questions
        question = None if table is None else np.zeros(table.vocabulary.length, np.int64)
        with contextlib.suppress(ScoreError):  # of what it would say of a photograph this tells nothing
            self.run(np.zeros((1, self.side_px, self.side_px, 3), np.uint8), question)

    def occlusion(
        self, pixels: Pixels, label: int, probability: float, cells: int, question: NDArray[np.int64] | None = None
    ) -> tuple[Floats, float]:
        """Hide one cell of a picture (S, S, 3) after the other: the map, and the least probability that was left.

        Args:
            label: index of the class whose probability counts.
            probability: of it, where nothing is hidden.
        """
        hidden = each_cell_hidden(pixels, cells)
        starts = range(0, cells, OCCLUSION_BATCH)
        runs = [self.run(hidden[start : start + OCCLUSION_BATCH], question) for start in starts]
        without = np.concatenate([found["probabilities"][:, label] for found in runs])
        return occlusion_map(probability, without), float(without.min())


def decoded(image: Photo) -> DecodedPicture:
    """Decode a picture, as for `Network.prepared`; an `ImageError` where it cannot be used."""
    if isinstance(image, bytes):
        image = open_photo(image)
    if isinstance(image, Image.Image):
        image = flattened(image)
    photo = image if isinstance(image, DecodedPicture) else DecodedPicture(image)
    check_array(photo.pixels)
    return photo


def without_graphs(bundle: Bundle) -> Bundle:
    """Drop the bytes of a bundle's graphs, most of the file, once a process has loaded them."""
    return replace(bundle, score_onnx=b"", extras=MappingProxyType({}))


def _wall_clock_ms() -> int:
    return time.time_ns() // 1_000_000
