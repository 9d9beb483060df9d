"""When the model abstains, and when the picture should be seen by a dermatologist (docs/methods.md, sections 1.3, 1.8).

The rules, in the order in which reasons are listed:

1. `suspicious_class`: the predicted class is not known to be benign, or the classes that are not known to be benign
   have together at least the probability that was chosen at export (`Suspicion`), or `DEFAULT_SUSPICIOUS_FROM` where
   none could be chosen, and in any case `MOST_SUSPICIOUS_FROM`. A bundle without class information asks for every
   picture: nothing says which of its classes are harmless. Where every class is known to be benign there is nothing to
   ask.
2. `vacuity`: vacuity above the threshold of the card (or of the caller), and always from 0.999, where nothing is
   predicted. A softmax method has no vacuity: the card's threshold is then one of entropy in nats, under the same
   reason.
3. `dissonance`: dissonance above `refer_dissonance_above` of the card's metrics; a card without it never refers for it.
4. `blur`, `exposure`, `size`, `shape`, `not_skin`, `dark_corners`, `transparent`: the picture gate, measured
   on the picture alone (`quality`). What is too small or not skin gets no prediction: a class named for it would only
   look like an answer.
5. `light`: brightness, colour or corners of the picture lie outside the range of nearly all pictures that the model
   learned from (`light.LightRange` of the card). A card without a range never refers for it.
6. `unseen_class`: a class absent from the site's training rows has the largest alpha.
7. `untested_class`: the predicted class had hardly a picture among those that the card's figures were told from
   (`bundle.tested_classes`). A card that does not tell never refers for it.
8. `model_expired`: the bundle is past its expiry date.
9. `unsteady`: nothing above asks for a look, but something does where the picture is turned by a quarter, a half or
   three quarters. A photograph of skin has no top, so a recommendation may not hang on how the camera was held.

That no rule fires never means that nothing needs a look: `rules_tried` tells which were asked. A threshold that no
picture can exceed (`in_force`) is none: its rule is not said to be tried.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edgefl_protocol.pictures.light import Light, LightRange
from edgefl_protocol.pictures.quality import MOST_UNLIT, Quality
from edgefl_protocol.pictures.suspicious import NO_CLASS, TriedRule, rows_that_ask, threshold_in_force

ABSTAIN_FROM = 0.999  # vacuity from which nothing is predicted
MOST_DISSONANCE = 1.0  # it is at most 1 - vacuity
ROUNDING = 1e-6  # of an entropy: one that is this near to its largest possible value counts as that

REASON_WORDS = {
    "suspicious_class": "it may belong to a class that is not known to be benign",
    "vacuity": "the model has less evidence for this picture than its rule asks for",
    "dissonance": "the evidence is in conflict: it supports several classes at once",
    "blur": "the picture is blurred",
    "exposure": "the picture is too dark or too bright",
    "size": "the picture has fewer pixels than the model reads",
    "shape": "the picture is much longer one way than the other, and the model reads a square",
    "not_skin": "the colours are not those of skin",
    "dark_corners": "the picture has a frame, an even side or dark corners, by which a model can answer",
    "transparent": "more than a tenth of the picture is transparent",
    "light": "the picture is in other light than the pictures that the model learned from",
    "unseen_class": "it looks most like a class that the model was not trained on",
    "untested_class": "too few test pictures tell how well the model knows the predicted class",
    "model_expired": "the model is past its expiry date",
    "unsteady": "turned, the same picture asks for a look",
}

PICTURE_FAULTS = ("blur", "exposure", "size", "shape", "not_skin", "dark_corners", "transparent")
UNJUDGED = ("size", "not_skin")  # of these, those with which no class is predicted


@dataclass(frozen=True, kw_only=True)
class ReferralRules:
    """Thresholds above which a picture is referred; None switches a rule off."""

    uncertain_above: float | None  # vacuity, or entropy in nats for softmax methods
    dissonance_above: float | None  # dissonance
    # per class, whether it is not known to be benign; None where the bundle does not say: every picture is referred
    suspicious: tuple[bool, ...] | None
    # summed probability of the suspicious classes, at or above which is referred, as it was chosen at export; None
    # where it was not: then the default is in force
    suspicious_from: float | None
    unlit_above: float = MOST_UNLIT  # share of unlit pixels above which the gate refers
    light: LightRange | None = None  # of the pictures that the model learned from; None where nobody says
    own_light: LightRange | None = None  # of those that personal values learned from, which is usual, too
    untested: tuple[bool, ...] | None = None  # per class, whether hardly a test picture showed it; None: nobody says
    suspicious_tried: TriedRule | None = None  # how the rule `suspicious_class` did; None where nobody tried

    @property
    def suspicious_in_force(self) -> float | None:
        """From which sum suspicious classes refer, chosen or by default; None where the model knows no such class."""
        if self.suspicious is None or not any(self.suspicious):
            return None
        return threshold_in_force(self.suspicious_from)

    @property
    def dissonance_in_force(self) -> float | None:
        """Above which dissonance refers; None where the card does not say, or no picture can exceed what it says."""
        return in_force(self.dissonance_above, MOST_DISSONANCE)


@dataclass(frozen=True, kw_only=True)
class Measures:
    """What one picture scored."""

    probabilities: NDArray[np.float32]  # (K,), proportional to alpha, so that its largest entry is alpha's
    vacuity: float | None  # K/S, or None for softmax methods
    dissonance: float | None  # conflicting evidence, or None for softmax methods
    entropy_nats: float  # entropy of the probabilities


@dataclass(frozen=True, kw_only=True)
class JudgedPicture:
    """What is found about one picture before a model runs."""

    faults: tuple[str, ...] = ()  # what the picture gate found (`PICTURE_FAULTS`)
    exposure: str | None = None  # which side of exposure is wrong: `dark` or `bright`
    # how its light is unlike that of the pictures the model learned from: a word of `light.SIDES`
    light: str | None = None
    transparent: bool = False  # whether parts of the picture were, and were read as white


def judge_picture(quality: Quality, least_px: int, rules: ReferralRules, *, white: float = 0.0) -> JudgedPicture:
    """Judge what was measured on a picture, by the rules of the model that will see it (`Preprocess.least_px`).

    Args:
        white: share of the picture that is the white laid under what was transparent.
    """
    return JudgedPicture(
        faults=quality.reasons(least_px, rules.unlit_above, white),
        exposure=quality.exposure,
        light=None if quality.exposure else unlike_learned(quality.light, rules),  # one cause, one word
        transparent=white > 0,
    )


def unlike_learned(light: Light, rules: ReferralRules) -> str | None:
    """Say how a picture's light differs from that of all that was learned from; None where it does not.

    Personal values are compared in what the model's range compares; older ones hold ratios that it leaves out.
    """
    model, own = rules.light, rules.own_light
    if model is None or (own is not None and own.as_compared_by(model).unlike(light) is None):
        return None
    return model.unlike(light)


def entropy_nats(probabilities: NDArray[np.float32]) -> float:
    """Entropy of the probabilities (K,) of one picture."""
    positive = probabilities[probabilities > 0].astype(np.float64)
    return float(-(positive * np.log(positive)).sum()) + 0.0  # no minus zero


def predicted_class(measures: Measures, seen: Sequence[bool], faults: Sequence[str] = ()) -> int | None:
    """Return the index of the class to name; None where nothing is predicted: too little evidence, or no such picture.

    Args:
        seen: per class, whether the site had training rows of it.
    """
    abstains = measures.vacuity is not None and measures.vacuity >= ABSTAIN_FROM
    if abstains or not any(seen) or not set(UNJUDGED).isdisjoint(faults):
        return None
    return int(np.argmax(np.where(np.asarray(seen, dtype=bool), measures.probabilities, -np.inf)))


def suspicious_probability(measures: Measures, rules: ReferralRules) -> float | None:
    """Sum the probabilities of the suspicious classes; None where nobody says which they are."""
    if rules.suspicious is None:
        return None
    return float(measures.probabilities[np.asarray(rules.suspicious, dtype=bool)].sum(dtype=np.float64))


def asks_for_a_look(measures: Measures, predicted: int | None, rules: ReferralRules) -> bool:
    """Tell whether the rule `suspicious_class` refers the picture.

    Args:
        predicted: what `predicted_class` gives.
    """
    if rules.suspicious is None:
        return True
    named = np.array([NO_CLASS if predicted is None else predicted])
    return bool(rows_that_ask(measures.probabilities[None], named, rules.suspicious, rules.suspicious_from)[0])


def in_force(threshold: float | None, most: float) -> float | None:
    """Give a threshold that some picture can exceed; None for any other, whose rule could never fire.

    Args:
        most: largest value of what is compared.
    """
    return None if threshold is None or threshold >= most - ROUNDING else threshold


def most_uncertain(classes: int, *, has_vacuity: bool) -> float:
    """Give the uncertainty from which a threshold is none.

    From `ABSTAIN_FROM` of vacuity nothing is predicted whatever the threshold; entropy is ln K at most.
    """
    return ABSTAIN_FROM if has_vacuity else math.log(classes)


def uncertain_in_force(measures: Measures, rules: ReferralRules) -> float | None:
    """Give above which uncertainty refers; None where nothing does."""
    most = most_uncertain(len(measures.probabilities), has_vacuity=measures.vacuity is not None)
    return in_force(rules.uncertain_above, most)


def refer_reasons(
    measures: Measures,
    seen: Sequence[bool],
    rules: ReferralRules,
    *,
    picture: JudgedPicture,
    expired: bool | None,
    turned: Sequence[Measures] = (),
) -> tuple[str, ...]:
    """List the reasons to refer; empty when no rule asks for a look.

    Args:
        expired: whether the model is past its date; None for a model without one.
        turned: what the same picture scored when it was turned; they count where the picture as it is gives no reason.
    """
    uncertainty = measures.entropy_nats if measures.vacuity is None else measures.vacuity
    predicted = predicted_class(measures, seen, picture.faults)
    found = {
        "suspicious_class": asks_for_a_look(measures, predicted, rules),
        "vacuity": _above(uncertainty, uncertain_in_force(measures, rules))
        or (measures.vacuity or 0.0) >= ABSTAIN_FROM,
        "dissonance": _above(measures.dissonance, rules.dissonance_in_force),
        **{reason: reason in picture.faults for reason in PICTURE_FAULTS},
        "light": picture.light is not None,
        "unseen_class": not seen[int(np.argmax(measures.probabilities))],
        "untested_class": rules.untested is not None and predicted is not None and rules.untested[predicted],
        "model_expired": expired is True,
    }
    found["unsteady"] = not any(found.values()) and any(
        refer_reasons(one, seen, rules, picture=picture, expired=expired) for one in turned
    )
    return tuple(reason for reason in REASON_WORDS if found[reason])


def rules_tried(
    measures: Measures, rules: ReferralRules, *, expired: bool | None, turned: bool = False
) -> tuple[str, ...]:
    """Rules that were asked about a picture, in the order of `REASON_WORDS`: without those that have no threshold.

    Args:
        turned: whether the picture was also scored turned.
    """
    without = {
        "unsteady": not turned,
        "suspicious_class": rules.suspicious is not None and rules.suspicious_in_force is None,
        "vacuity": uncertain_in_force(measures, rules) is None,
        "dissonance": measures.dissonance is None or rules.dissonance_in_force is None,
        "light": rules.light is None,
        "untested_class": rules.untested is None,
        "model_expired": expired is None,
    }
    return tuple(rule for rule in REASON_WORDS if not without.get(rule, False))


def _above(value: float | None, threshold: float | None) -> bool:
    return value is not None and threshold is not None and value > threshold
