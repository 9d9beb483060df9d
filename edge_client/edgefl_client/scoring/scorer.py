"""Scores pictures with a verified bundle (`network`).

Each is judged by `edgefl_protocol.pictures.quality` before the network sees it.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from edgefl_client.scoring.explanation import Explanation
from edgefl_client.scoring.network import Floats, Network, Photo, decoded
from edgefl_protocol.bundle import Bundle
from edgefl_protocol.bundle.card_words import better_than_chance, shown_weaknesses
from edgefl_protocol.bundle.figures import learned_from, learned_from_federation, site_figures
from edgefl_protocol.bundle.model_card import referral_rules
from edgefl_protocol.bundle.shown_map import ShownMap, how_true, level_words
from edgefl_protocol.errors import BundleError
from edgefl_protocol.payload import digest
from edgefl_protocol.pictures.preprocess import prepare, prepare_turned
from edgefl_protocol.pictures.quality import measure_quality
from edgefl_protocol.pictures.referral import JudgedPicture, in_force, judge_picture, most_uncertain
from edgefl_protocol.pictures.score import ModelInfo, Outputs, Score, make_score
from edgefl_protocol.rules.hidden_regions import marks_nothing

if TYPE_CHECKING:
    from edgefl_client.scoring.personal import PersonalState


@dataclass(frozen=True)
class PreparedPicture:
    """A picture that is ready for the network, and judged; the photograph itself is no longer needed."""

    pixels: NDArray[np.uint8]  # (S, S, 3), the network's input
    # the same of the picture turned by a quarter, a half and three quarters; none where it is referred for itself
    turned: tuple[NDArray[np.uint8], ...]
    judged: JudgedPicture  # what was found before the model runs
    milliseconds: float  # what this took


class Scorer:
    """Scores pictures with one bundle.

    Args:
        threads: threads of one run; None for the processors this process may use.
        refer_above: vacuity (softmax methods: entropy in nats) above which a picture is referred; None for the card's.
        clock: gives Unix milliseconds; a scorer that outlives its bundle refers everything.
        personal: values learned here that passed their gate, to score with in place of the bundle's.

    Raises:
        BundleError: it answers questions (`other_kind`), or the runtime cannot run it.
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
        refuse_questions(bundle)
        if (unfit := unfit_threshold(bundle, refer_above)) is not None:
            raise ValueError(f"refer_above {unfit}")
        self._classes = bundle.labels.classes
        # the classes, with what taught the values in use
        self.labels = bundle.labels if personal is None else replace(bundle.labels, seen=personal.seen)
        self.own_rules = refer_above in (None, bundle.card.refer_above)  # whether the thresholds are the bundle's
        self._rules = referral_rules(bundle.labels, bundle.card, refer_above)
        if personal is not None:
            self._rules = replace(self._rules, own_light=personal.light)
        self.network = Network(bundle, threads, None if personal is None else personal.weights, clock)
        self.model = ModelInfo(
            id=bundle.id,
            sha256=bundle.sha256,
            version=bundle.manifest.version,
            state_kind="bundle" if personal is None else "personal",
            state_sha256=digest(self.network.weights),
            better_than_chance=better_than_chance(site_figures(bundle.card)),
            warnings=shown_weaknesses(bundle.card, self.labels, learned_here=personal is not None),
            learned_from=learned_from(bundle.card),
            learned_from_federation=learned_from_federation(bundle.card),
            site=bundle.card.site,
        )

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
        self,
        images: Sequence[Photo | PreparedPicture],
        names: Sequence[str | None] | None = None,
        *,
        as_it_is: bool = False,
    ) -> list[Score]:
        """Score several pictures together: as for `score`, or what `prepare` made of them.

        The network runs once for all of them, and three times more for those that no rule refers, turned.

        Args:
            as_it_is: not to turn any: for who wants the network's figures and no recommendation.
        """
        called = list(names) if names is not None else [None] * len(images)
        if len(called) != len(images):
            raise ValueError(f"{len(images)} pictures but {len(called)} names")
        if not images:
            return []
        prepared = [
            image if isinstance(image, PreparedPicture) else self.prepare(image, as_it_is=as_it_is) for image in images
        ]
        started = time.perf_counter()
        found = self.network.run(np.stack([one.pixels for one in prepared]))
        share_ms = (time.perf_counter() - started) * 1e3 / len(prepared)
        scores = [self._judge(_of(found, row), called[row], one, share_ms) for row, one in enumerate(prepared)]
        passing = [row for row, score in enumerate(scores) if not (score.refer or as_it_is)]
        if passing:
            started = time.perf_counter()
            turns = zip(*(prepared[row].turned for row in passing), strict=True)
            turned = [self.network.run(np.stack(inputs), what="this picture, turned") for inputs in turns]
            share_ms += (time.perf_counter() - started) * 1e3 / len(passing)
            for place, row in enumerate(passing):
                again = [_of(one, place) for one in turned]
                scores[row] = self._judge(_of(found, row), called[row], prepared[row], share_ms, again)
        return scores

    def prepare(self, image: Photo, *, as_it_is: bool = False) -> PreparedPicture:
        """Judge a picture, and make the network's inputs of it.

        Args:
            as_it_is: not to turn it: for `score_batch` with the same.
        """
        started = time.perf_counter()
        photo, preprocess = decoded(image), self.network.bundle.preprocess
        quality = measure_quality(photo.pixels, preprocess.colour)
        judged = judge_picture(quality, self.network.least_px, self._rules, white=photo.white)
        referred_anyway = bool(judged.faults) or judged.light is not None
        if as_it_is or referred_anyway:
            inputs: tuple[NDArray[np.uint8], ...] = (prepare(photo.pixels, preprocess),)
        else:
            inputs = prepare_turned(photo.pixels, preprocess)
        return PreparedPicture(inputs[0], inputs[1:], judged, (time.perf_counter() - started) * 1e3)

    @property
    def shown_map(self) -> ShownMap | None:
        """What the bundle says of the map to show; None for a bundle from before maps were measured."""
        return self.network.bundle.card.map

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
            values, without = self.network.occlusion(prepared.pixels, label, float(likely[label]), said.passes - 1)
        elif said.kind == "share" and label != int(likely.argmax()):
            return Explanation(
                None, "No map is drawn: this model's map belongs to another class than the predicted one."
            )
        else:
            values = score.map if score.shown is None else score.shown
        fall = None if without is None else float(likely[label]) - without
        if values is not None and marks_nothing(values, fall):
            return Explanation(None, level_words(said))
        own = "" if self.model.state_kind == "bundle" else " That was measured before this device learned."
        return Explanation(values, how_true(said) + own, without)

    def _judge(
        self,
        outputs: Outputs,
        name: str | None,
        prepared: PreparedPicture,
        share_ms: float,
        turned: Sequence[Outputs] = (),
    ) -> Score:
        return make_score(
            outputs,
            name=name,
            classes=self._classes,
            seen=self.labels.seen,
            rules=self._rules,
            picture=prepared.judged,
            expired=self.network.expired,
            model=self.model,
            milliseconds=prepared.milliseconds + share_ms,
            info=self.network.bundle.labels.info,
            turned=turned,
        )


def _of(found: Mapping[str, Floats], row: int) -> Outputs:
    """What the network gave for one picture of several."""
    return {key: values[row] for key, values in found.items()}


def refuse_questions(bundle: Bundle) -> None:
    """Refuse, by a `BundleError`, a bundle that answers questions."""
    if bundle.questions is not None:
        raise BundleError(
            'this bundle answers questions about pictures: ask it one with edgefl ask IMAGE "QUESTION"', "other_kind"
        )


def unfit_threshold(bundle: Bundle, refer_above: float | None) -> str | None:
    """Say why a threshold of uncertainty cannot be used, after its name; None where it can, and for none at all.

    One that no picture can exceed would be none (`in_force`): the rule would be off unnoticed.
    """
    most = most_uncertain(len(bundle.labels.classes), has_vacuity="vacuity" in bundle.outputs)
    if refer_above is None or (refer_above >= 0.0 and in_force(refer_above, most) is not None):
        return None
    return (
        f"is {refer_above}; allowed for this model: 0 to below {most:g}, from where on the rule would be off; leave "
        "it out for the model's own threshold"
    )
