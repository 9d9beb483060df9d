"""What is said about one picture, with the JSON keys other programs rely on (docs/design.md, section 5).

A `Score` is a plain value: it can be printed, drawn and stored without the runtime that made it. The device and
`edgefl-train predict` both make theirs with `make_score`, so the rules of abstention and referral exist once.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgefl_protocol.pictures.class_info import ClassInfo, undescribed
from edgefl_protocol.pictures.referral import (
    UNJUDGED,
    JudgedPicture,
    Measures,
    ReferralRules,
    entropy_nats,
    predicted_class,
    refer_reasons,
    rules_tried,
    suspicious_probability,
    uncertain_in_force,
)
from edgefl_protocol.pictures.suspicious import TriedRule

Outputs = Mapping[str, NDArray[np.float32]]  # of one picture, by the names of the scoring graph
RolloutMap = NDArray[np.float32]  # (N,) rollout over the patch grid, row-major, largest value 1


@dataclass(frozen=True, kw_only=True)
class ModelInfo:
    """Which model spoke, and with which values."""

    id: str  # name of the bundle's line, task and version
    sha256: str  # SHA-256 of the bundle file
    version: int  # version number inside the line
    state_kind: str  # `bundle` for the values the bundle was signed with, `personal` for those learned on this device
    state_sha256: str  # digest of the values used (prompts, head, prior …)
    # whether the card's figures clear chance (`bundle.card_words`); None where nobody can tell
    better_than_chance: bool | None = None
    warnings: tuple[str, ...] = ()  # what its own card says against it, in sentences
    learned_from: tuple[str, ...] = ()  # sites whose pictures it learned from; of an answer they stand beside it
    learned_from_federation: str | None = None  # a live one, whose other sites it learned from, too, and does not name
    site: str | None = None  # whose model it is, on whose pictures its rules were set; None for a shared one

    @property
    def taught_elsewhere(self) -> bool:
        """Whether other sites than its own taught it, too."""
        return self.learned_from_federation is not None or bool(set(self.learned_from) - {self.site})

    def to_json(self) -> dict[str, Any]:
        """Write the `model` object of a score."""
        return {
            "id": self.id,
            "sha256": self.sha256,
            "version": self.version,
            "state": {"kind": self.state_kind, "sha256": self.state_sha256},
            "better_than_chance": self.better_than_chance,
            "warnings": list(self.warnings),
            "site": self.site,
        }


@dataclass(frozen=True, kw_only=True)
class Score:
    """Result for one picture."""

    image: str | None  # name of the picture as the caller gave it, or None
    # class with the largest alpha among the classes seen in training; None where the model abstains and where the
    # picture is not of skin or too small
    predicted: str | None
    probabilities: Mapping[str, float]  # per class, summing to 1
    evidence: Mapping[str, float] | None  # per class, at least 0; None for softmax methods
    vacuity: float | None  # K/S in (0, 1]; None for softmax methods
    dissonance: float | None  # conflicting evidence in [0, 1 - vacuity]; None for softmax methods
    entropy_nats: float  # entropy of the probabilities
    refer: bool  # True when any reason to refer was found
    refer_reasons: tuple[str, ...]  # the reasons, in the order of `referral.REASON_WORDS`
    heatmap: str | None  # path of the drawn heat map, or None
    model: ModelInfo  # which model spoke
    milliseconds: float  # wall time of decoding, preparing and running, per picture
    rules_tried: tuple[str, ...] = ()  # the rules that were asked, in the same order; some have no threshold
    suspicious_probability: float | None = None  # of the classes not known to be benign together; None: nobody says
    suspicious_from: float | None = None  # from where it refers; None where nobody says which classes are benign
    vacuity_from: float | None = None  # above which the rule `vacuity` refers; None for softmax methods
    entropy_from: float | None = None  # the same in nats of entropy; None for methods with vacuity
    dissonance_from: float | None = None  # above which `dissonance` refers; None, as above, where no rule says
    heatmap_fall: float | None = (
        None  # of the answer's probability, by hiding the map's strongest part; None: not hidden
    )
    suspicious_rule: str | None = None  # `chosen` at export on pictures, or the product's `default`; None as above
    suspicious_tried: TriedRule | None = None  # how the rule `suspicious_class` did; None where nobody tried
    exposure: str | None = None  # which side of exposure is wrong: `dark` or `bright`
    # how its light is unlike that of the pictures the model learned from: a word of `light.SIDES`
    light: str | None = None
    transparent: bool = False  # whether parts of the picture were, and were scored on white
    # the most that the suspicious classes have together in a turn, of a picture that is `unsteady`; else None
    turned_suspicious_probability: float | None = None
    # what the classes mean, by name; a class that is not there is unknown. None where the bundle says nothing of any
    info: Mapping[str, ClassInfo] | None = field(default=None, repr=False, compare=False)
    # the rollout map, which may travel; None for networks without one. Not part of the JSON
    map: RolloutMap | None = field(default=None, repr=False, compare=False)
    # the map for a person, of the kind that the card names, where the graph gives one. Not part of the JSON
    shown: RolloutMap | None = field(default=None, repr=False, compare=False)

    @property
    def judged(self) -> bool:
        """Whether the model's figures are a finding; not of a picture that gets no prediction for what it is."""
        return set(UNJUDGED).isdisjoint(self.refer_reasons)

    @property
    def attention(self) -> RolloutMap | None:
        """The rollout map, by the name that it had before; use `map`."""
        return self.map

    def info_of(self, label: str) -> ClassInfo:
        """Say what a class means."""
        return (self.info or {}).get(label) or undescribed(label)

    def to_json(self) -> dict[str, Any]:
        """Write the object that `edgefl score --json` prints."""
        told = None if self.predicted is None else self.info_of(self.predicted)
        return {
            "image": self.image,
            "predicted": self.predicted,
            "probabilities": dict(self.probabilities),
            "evidence": None if self.evidence is None else dict(self.evidence),
            "vacuity": self.vacuity,
            "dissonance": self.dissonance,
            "entropy_nats": self.entropy_nats,
            "refer": self.refer,
            "refer_reasons": list(self.refer_reasons),
            "heatmap": self.heatmap,
            "model": self.model.to_json(),
            "milliseconds": round(self.milliseconds, 3),
            "predicted_name": None if told is None else told.name,
            "malignancy": None if told is None else told.malignancy,
            "suspicious_probability": self.suspicious_probability,
            "suspicious_from": self.suspicious_from,
            "rules_tried": list(self.rules_tried),
            "exposure": self.exposure,
            "suspicious_rule": self.suspicious_rule,
            "vacuity_from": self.vacuity_from,
            "dissonance_from": self.dissonance_from,
            "entropy_from": self.entropy_from,
            "heatmap_fall": self.heatmap_fall,
            "light": self.light,
            "transparent": self.transparent,
            "learned_from": list(self.model.learned_from),
            "suspicious_tried": None if self.suspicious_tried is None else self.suspicious_tried.to_json(),
            "turned_suspicious_probability": self.turned_suspicious_probability,
            "learned_from_federation": self.model.learned_from_federation,
        }


def make_score(
    outputs: Outputs,
    *,
    name: str | None,
    classes: Sequence[str],
    seen: Sequence[bool],
    rules: ReferralRules,
    picture: JudgedPicture,
    expired: bool | None,
    model: ModelInfo,
    milliseconds: float,
    info: Mapping[str, ClassInfo] | None,
    turned: Sequence[Outputs] = (),
) -> Score:
    """Judge one picture from what the scoring graph gave for it.

    Args:
        outputs: one row of each output: `probabilities` (K,) and, where the method has them, `evidence` (K,),
            `vacuity` (), `dissonance` (), `map` (N,) and `shown` (N,).
        classes: class names, (K,).
        picture: what was found before the model ran.
        expired: whether the model is past its date; None for a model without one.
        info: what the classes mean; None where the bundle does not say.
        turned: the same outputs of the picture turned by a quarter, a half and three quarters; wanted for each picture
            that is not referred without them.
    """
    measures = _measures(outputs)
    index = predicted_class(measures, seen, picture.faults)
    uncertain_from = uncertain_in_force(measures, rules)
    turns = [_measures(one) for one in turned]
    reasons = refer_reasons(measures, seen, rules, picture=picture, expired=expired, turned=turns)
    return Score(
        image=name,
        predicted=None if index is None else classes[index],
        probabilities=_by_class(classes, measures.probabilities),
        evidence=_by_class(classes, outputs["evidence"]) if "evidence" in outputs else None,
        vacuity=measures.vacuity,
        dissonance=measures.dissonance,
        entropy_nats=measures.entropy_nats,
        refer=bool(reasons),
        refer_reasons=reasons,
        heatmap=None,
        model=model,
        milliseconds=milliseconds,
        rules_tried=rules_tried(measures, rules, expired=expired, turned=bool(turned)),
        suspicious_probability=suspicious_probability(measures, rules),
        suspicious_from=rules.suspicious_in_force,
        suspicious_rule=_suspicious_rule(rules),
        suspicious_tried=rules.suspicious_tried,
        vacuity_from=None if measures.vacuity is None else uncertain_from,
        entropy_from=uncertain_from if measures.vacuity is None else None,
        dissonance_from=None if measures.dissonance is None else rules.dissonance_in_force,
        exposure=picture.exposure,
        light=picture.light,
        transparent=picture.transparent,
        turned_suspicious_probability=_most_suspicious(turns, rules) if "unsteady" in reasons else None,
        info=info,
        map=outputs["map"].copy() if "map" in outputs else None,
        shown=outputs["shown"].copy() if "shown" in outputs else None,
    )


def _measures(outputs: Outputs) -> Measures:
    probabilities = outputs["probabilities"]
    return Measures(
        probabilities=probabilities,
        vacuity=float(outputs["vacuity"]) if "vacuity" in outputs else None,
        dissonance=float(outputs["dissonance"]) if "dissonance" in outputs else None,
        entropy_nats=entropy_nats(probabilities),
    )


def _most_suspicious(turns: Sequence[Measures], rules: ReferralRules) -> float | None:
    found = [suspicious_probability(one, rules) for one in turns]
    return max((one for one in found if one is not None), default=None)


def _suspicious_rule(rules: ReferralRules) -> str | None:
    if rules.suspicious_in_force is None:
        return None
    return "default" if rules.suspicious_from is None else "chosen"


def _by_class(classes: Sequence[str], values: NDArray[np.float32]) -> dict[str, float]:
    return {name: float(value) for name, value in zip(classes, values, strict=True)}
