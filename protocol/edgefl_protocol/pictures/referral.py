"""When the model abstains, and when the picture should be seen by a dermatologist (docs/methods.md, sections 1.3, 1.8).

The rules, in the order in which reasons are listed:

1. `vacuity`: vacuity above the threshold of the card (or of the caller), and always from 0.999, where nothing is
   predicted. A softmax method has no vacuity: the card's threshold is then one of entropy in nats, under the same
   reason.
2. `dissonance`: dissonance above `refer_dissonance_above` of the card's metrics; a card without it never refers for it.
3. `blur`, `exposure`, `size`, `not_skin`: the gate before the model, measured on the picture alone (`quality`). What is
   not skin gets no prediction: a class named for it would only look like an answer.
4. `unseen_class`: a class absent from the site's training rows has the largest alpha.
5. `model_expired`: the bundle is past its expiry date.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

ABSTAIN_FROM = 0.999  # vacuity from which nothing is predicted

REASON_WORDS = {
    "vacuity": "the model has too little evidence for this picture",
    "dissonance": "the evidence is in conflict: it speaks for several classes at once",
    "blur": "the picture is blurred",
    "exposure": "the picture is too dark or too bright",
    "size": "the picture has fewer pixels than the model reads",
    "not_skin": "the colours are not those of skin",
    "unseen_class": "it looks most like a class the model was not trained on",
    "model_expired": "the model is past its expiry date",
}

GATE_REASONS = ("blur", "exposure", "size", "not_skin")


@dataclass(frozen=True, kw_only=True)
class ReferralRules:
    """Thresholds above which a picture is referred; None switches a rule off."""

    uncertain_above: float | None  # vacuity, or entropy in nats for softmax methods
    dissonance_above: float | None  # dissonance


@dataclass(frozen=True, kw_only=True)
class Measures:
    """What one picture scored."""

    probabilities: NDArray[np.float32]  # (K,), proportional to alpha, so that its largest entry is alpha's
    vacuity: float | None  # K/S, or None for softmax methods
    dissonance: float | None  # conflicting evidence, or None for softmax methods
    entropy_nats: float  # entropy of the probabilities


def predicted_class(measures: Measures, seen: Sequence[bool], gate: Sequence[str] = ()) -> int | None:
    """Return the index of the class to name; None where nothing is predicted: too little evidence, or no skin.

    Args:
        seen: per class, whether the site had training rows of it.
    """
    if "not_skin" in gate or not any(seen) or (measures.vacuity is not None and measures.vacuity >= ABSTAIN_FROM):
        return None
    return int(np.argmax(np.where(np.asarray(seen, dtype=bool), measures.probabilities, -np.inf)))


def refer_reasons(
    measures: Measures, seen: Sequence[bool], rules: ReferralRules, *, gate: Sequence[str], expired: bool
) -> tuple[str, ...]:
    """List the reasons to refer; empty where there is none."""
    uncertainty = measures.entropy_nats if measures.vacuity is None else measures.vacuity
    found = {
        "vacuity": _above(uncertainty, rules.uncertain_above) or (measures.vacuity or 0.0) >= ABSTAIN_FROM,
        "dissonance": _above(measures.dissonance, rules.dissonance_above),
        **{reason: reason in gate for reason in GATE_REASONS},
        "unseen_class": not seen[int(np.argmax(measures.probabilities))],
        "model_expired": expired,
    }
    return tuple(reason for reason in REASON_WORDS if found[reason])


def _above(value: float | None, threshold: float | None) -> bool:
    return value is not None and threshold is not None and value > threshold
