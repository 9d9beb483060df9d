"""Scores pictures with a verified bundle on onnxruntime.

* The graph is loaded from the bytes that `load_bundle` verified, never from a path, and with an empty folder as the
  only place external data could come from (docs/security.md, attack list 1 and 2).
* Inputs and outputs are those that `load_bundle` checked; numbers that are not finite never become a score.
* Threads are pinned in number and do not spin while waiting, so a device can do other things.
* A photo is prepared by `edgefl_protocol.pictures.imaging` alone, the code that prepared the training pictures, and
  judged by `edgefl_protocol.pictures.quality` before the network sees it.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from edgefl_client.runtime import check_runtime, load_graph, processors, run_graph
from edgefl_client.scoring.explanation import Explanation
from edgefl_protocol.bundle import Bundle
from edgefl_protocol.bundle.card_words import at_chance_sentence, better_than_chance, site_figures
from edgefl_protocol.bundle.model_card import referral_rules
from edgefl_protocol.bundle.shown_map import ShownMap, how_true, level_words
from edgefl_protocol.errors import BundleError, EdgeflError
from edgefl_protocol.payload import digest
from edgefl_protocol.pictures.imaging import decode, from_pillow, prepare
from edgefl_protocol.pictures.quality import measure_quality
from edgefl_protocol.pictures.score import ModelInfo, Score, make_score
from edgefl_protocol.rules.hidden_regions import each_cell_hidden, is_level, occlusion_map

if TYPE_CHECKING:
    from edgefl_client.scoring.personal import PersonalState

OCCLUSION_BATCH = 8  # as in the export gates

Photo = bytes | Image.Image | NDArray[np.uint8]
Floats = NDArray[np.float32]


class ScoreError(EdgeflError):
    """The network gave no usable numbers for a picture."""

    code = "not_finite"


@dataclass(frozen=True)
class PreparedPicture:
    """A picture that is ready for the network, and judged; the photograph itself is no longer needed."""

    pixels: NDArray[np.uint8]  # (S, S, 3), the network's input
    gate: tuple[str, ...]  # reasons to refer, found before the model runs
    exposure: str | None  # which side of exposure is wrong: `dark` or `bright`
    milliseconds: float  # what this took


class Scorer:
    """Scores pictures with one bundle.

    Args:
        threads: threads of one run; None for the processors this process may use.
        refer_above: vacuity (softmax methods: entropy in nats) above which a picture is referred; None for the card's.
        clock: gives Unix milliseconds; a scorer that outlives its bundle refers everything.
        personal: values learned here that passed their gate, to score with in place of the bundle's.

    Raises:
        ValueError: `threads` or `refer_above` is out of range.
    """

    def __init__(
        self,
        bundle: Bundle,
        threads: int | None = None,
        refer_above: float | None = None,
        clock: Callable[[], int] | None = None,
        personal: "PersonalState | None" = None,
    ) -> None:
        if threads is not None and not 1 <= threads <= 1024:
            raise ValueError(f"threads is {threads}; allowed: 1 to 1024")
        most = largest_uncertainty(bundle)
        if refer_above is not None and not 0.0 <= refer_above <= most:  # above it, the rule would be off unnoticed
            raise ValueError(f"refer_above is {refer_above}; allowed for this model: 0 to {most:g}")
        check_runtime(bundle.manifest.min_runtime)
        self._bundle = without_graphs(bundle)
        self._weights = bundle.weights if personal is None else personal.weights
        self._classes = bundle.labels.classes
        self._seen = bundle.labels.seen if personal is None else personal.seen
        try:
            self._rules = referral_rules(bundle.labels, bundle.card, refer_above)
        except ValueError as error:
            raise BundleError(f"{error}; ask the signer", "bad_card") from error
        self._clock = clock or _wall_clock_ms
        self.threads = threads or processors()
        self._graph = load_graph(bundle.score_onnx, self.threads)
        self.model = ModelInfo(
            id=bundle.id,
            sha256=bundle.sha256,
            version=bundle.manifest.version,
            state_kind="bundle" if personal is None else "personal",
            state_sha256=digest(self._weights),
            better_than_chance=better_than_chance(site_figures(bundle.card)),
            at_chance=at_chance_sentence(site_figures(bundle.card), bundle.card.site),
        )

    @property
    def fit(self) -> str:
        """How photos are brought to the network's square: `squash` or `crop`."""
        return self._bundle.preprocess.fit

    @property
    def network_px(self) -> int:
        """Side of the network's input in pixels."""
        return self._bundle.preprocess.size

    @property
    def precision(self) -> str:
        """`int8` where the card says that layers have 8 bits, else `fp32`."""
        return "int8" if "int8" in self._bundle.card.metrics else "fp32"

    @property
    def days_left(self) -> int | None:
        """Whole days until the bundle expires; None where it never does."""
        expires_ms = self._bundle.manifest.expires_ms
        return None if expires_ms is None else (expires_ms - self._clock()) // 86_400_000

    @property
    def temperature(self) -> float | None:
        """What logits are divided by, so that probabilities are calibrated; None where the model has none."""
        return float(self._weights["temperature"]) if "temperature" in self._weights else None

    @property
    def never_named(self) -> tuple[str, ...]:
        """Classes that the bundle predicts and these values never do: no picture of this device taught them."""
        labels = self._bundle.labels
        both = zip(labels.classes, labels.seen, self._seen, strict=True)
        return tuple(name for name, theirs, ours in both if theirs and not ours)

    def score(self, image: Photo, name: str | None = None) -> Score:
        """Score one picture.

        Args:
            image: bytes of a JPEG or PNG, a Pillow image, or upright uint8 pixels (H, W, 3).

        Raises:
            ImageError: the picture cannot be used; `code` says why.
            ScoreError: the network gave no finite numbers.
        """
        return self.score_batch([image], [name])[0]

    def score_batch(
        self, images: Sequence[Photo | PreparedPicture], names: Sequence[str | None] | None = None
    ) -> list[Score]:
        """Score several pictures in one run of the network: as for `score`, or what `prepare` made of them."""
        called = list(names) if names is not None else [None] * len(images)
        if len(called) != len(images):
            raise ValueError(f"{len(images)} pictures but {len(called)} names")
        if not images:
            return []
        prepared = [image if isinstance(image, PreparedPicture) else self.prepare(image) for image in images]
        started = time.perf_counter()
        found = self._run(np.stack([one.pixels for one in prepared]))
        share_ms = (time.perf_counter() - started) * 1e3 / len(prepared)
        return [self._judge(found, row, called[row], one, share_ms) for row, one in enumerate(prepared)]

    def prepare(self, image: Photo) -> PreparedPicture:
        """Make the network's input of a picture, and judge the picture."""
        started = time.perf_counter()
        if isinstance(image, bytes):
            photo = decode(image)
        elif isinstance(image, Image.Image):
            photo = from_pillow(image)
        else:
            photo = image
        pixels = prepare(photo, self._bundle.preprocess)
        quality = measure_quality(photo)
        gate = quality.reasons(self._bundle.preprocess.size)
        return PreparedPicture(pixels, gate, quality.exposure, (time.perf_counter() - started) * 1e3)

    @property
    def shown_map(self) -> ShownMap | None:
        """What the bundle says of the map to show; None for a bundle from before maps were measured."""
        return self._bundle.card.map

    def explain(self, prepared: PreparedPicture, score: Score) -> Explanation:
        """Make the map that is shown beside a picture, where the bundle found it true, and say how true it is."""
        said = self.shown_map
        if said is None or not said.shown:
            return Explanation(None, how_true(said))
        if score.predicted is None:
            return Explanation(None, "No map is drawn: there is no prediction that it could explain.")
        label = self._classes.index(score.predicted)
        likely = np.array([score.probabilities[name] for name in self._classes])
        values: Floats | None
        without: float | None = None
        if said.kind == "occlusion":
            values, without = self._occlusion(prepared.pixels, label, float(likely[label]), said.passes - 1)
        elif said.kind == "share" and label != int(likely.argmax()):
            return Explanation(
                None, "No map is drawn: this model's map belongs to another class than the predicted one."
            )
        else:
            values = score.map if score.shown is None else score.shown
        if values is not None and is_level(values):
            return Explanation(None, level_words(said))
        own = "" if self.model.state_kind == "bundle" else " That was measured before this device learned."
        return Explanation(values, how_true(said) + own, without)

    def _occlusion(self, pixels: NDArray[np.uint8], label: int, probability: float, cells: int) -> tuple[Floats, float]:
        hidden = each_cell_hidden(pixels, cells)
        runs = [self._run(hidden[start : start + OCCLUSION_BATCH]) for start in range(0, cells, OCCLUSION_BATCH)]
        without = np.concatenate([found["probabilities"][:, label] for found in runs])
        return occlusion_map(probability, without), float(without.min())

    def _run(self, pixels: NDArray[np.uint8]) -> dict[str, Floats]:
        found = run_graph(self._graph, self._bundle.outputs, {"image": pixels, **self._weights}, "the model")
        for name, value in found.items():
            if not np.isfinite(value).all():
                raise ScoreError(f"the model's output {name} is not finite for this picture; report it to the signer")
        return found

    def _judge(
        self, found: Mapping[str, Floats], row: int, name: str | None, prepared: PreparedPicture, share_ms: float
    ) -> Score:
        expires_ms = self._bundle.manifest.expires_ms
        return make_score(
            {key: values[row] for key, values in found.items()},
            name=name,
            classes=self._classes,
            seen=self._seen,
            rules=self._rules,
            gate=prepared.gate,
            exposure=prepared.exposure,
            expired=None if expires_ms is None else self._clock() >= expires_ms,
            model=self.model,
            milliseconds=prepared.milliseconds + share_ms,
            info=self._bundle.labels.info,
        )


def without_graphs(bundle: Bundle) -> Bundle:
    """Drop the bytes of a bundle's graphs, most of the file, once a process has loaded them."""
    return replace(bundle, score_onnx=b"", extras=MappingProxyType({}))


def largest_uncertainty(bundle: Bundle) -> float:
    """Give the largest uncertainty of a bundle's measure: 1 for vacuity, ln K for the entropy of K classes in nats."""
    return 1.0 if "vacuity" in bundle.outputs else math.log(len(bundle.labels.classes))


def _wall_clock_ms() -> int:
    return time.time_ns() // 1_000_000
