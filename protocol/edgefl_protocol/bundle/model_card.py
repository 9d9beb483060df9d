"""What a bundle says about its model: the classes it knows, and the card that travels with it.

Guarantees: a `Labels` or `Card` that exists satisfies the forms below; readers take exactly the documented keys.
Anything else is a `ValueError`.

    labels.json  {"classes": [name, ...], "seen": [bool, ...]}    seen: the class stood in the training rows
                 and, in bundles with class information, "info": {class: {"name", "meaning", "malignancy"}}; a class
                 that is not there is `unknown`
    card.json    {"intended_use", "research_use_only": bool, "method", "site": name|null, "sites": {name: n_train},
                  "metrics": {...}, "temperature": > 0, "refer_above": number|null, "backbone", "licence_note"}
                 and, where it was chosen, "suspicion": {"threshold": 0 to 1|null, "sensitivity", "specificity":
                 0 to 1|null, "suspicious", "benign": pictures, "statement"}
                 and, in bundles whose map was measured, "map": see `shown_map`
                 and, where nothing was ever learned in the frozen network, "untrained": true

The optional keys may be missing, as they are in every bundle from before them. One without `info` is read, and asks for
a look at every picture (`referral_rules`).

Source: docs/methods.md 1.3 (unseen classes) and docs/security.md 8.11 to 8.13 (what a user is shown).
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from edgefl_protocol.bundle.shown_map import ShownMap
from edgefl_protocol.bundle.tested_classes import untested_classes
from edgefl_protocol.fields import MAX_CLASS_NAME, MAX_CLASSES
from edgefl_protocol.pictures.class_info import ClassInfo, suspicious_classes
from edgefl_protocol.pictures.light import LightRange
from edgefl_protocol.pictures.quality import MOST_UNLIT
from edgefl_protocol.pictures.referral import ReferralRules
from edgefl_protocol.pictures.suspicious import Suspicion, TriedRule
from edgefl_protocol.strict_json import MAX_INT, check_keys, parse_json, write_json

MAX_TEXT = 10_000
MAX_SITES = 10_000
MAX_NAMES_BYTES = 1 << 20  # of labels.json and questions.json, which name thousands
REPORTED_RULE = "suspicious_reported"  # metric: how the rule for suspicious classes did on rows that only report

_TEXTS = ("intended_use", "method", "backbone", "licence_note")
_CARD_KEYS = {*_TEXTS, "research_use_only", "site", "sites", "metrics", "temperature", "refer_above"}
_OPTIONAL_KEYS = {"suspicion", "map", "untrained"}
_INFO_KEYS = {"name", "meaning", "malignancy"}
_SUSPICION_KEYS = {"threshold", "sensitivity", "specificity", "suspicious", "benign", "statement"}


@dataclass(frozen=True)
class Labels:
    """The classes in the order of the model's outputs."""

    classes: tuple[str, ...]  # distinct names, 2 to 10,000
    # for each class, whether the training rows held it; at least one did. Only seen classes are predicted
    seen: tuple[bool, ...]
    # what classes mean, by name; a class that is not there is unknown. None for a bundle from before class information
    info: Mapping[str, ClassInfo] | None = None

    def __post_init__(self) -> None:
        if not 2 <= len(self.classes) <= MAX_CLASSES or len(set(self.classes)) != len(self.classes):
            raise ValueError(f"classes must be 2 to {MAX_CLASSES} distinct names")
        for name in self.classes:
            if not (_is_text(name, MAX_CLASS_NAME) and name.isprintable() and name.strip() == name):
                raise ValueError(
                    f"a class must be a printable name of 1 to {MAX_CLASS_NAME} characters, and {str(name)[:40]!r} is "
                    f"not, with {len(str(name))}"
                )
        if len(self.seen) != len(self.classes) or not all(type(s) is bool for s in self.seen) or not any(self.seen):
            raise ValueError("seen must hold true or false for each class, at least one of them true")
        if self.info is not None and not set(self.info) <= set(self.classes):
            raise ValueError("info must describe only classes of the model")

    @property
    def suspicious(self) -> tuple[bool, ...] | None:
        """For each class, whether it is not known to be benign; None where the bundle says nothing of its classes."""
        return None if self.info is None else suspicious_classes(self.classes, self.info)

    def to_bytes(self) -> bytes:
        """Write `labels.json`."""
        record: dict[str, object] = {"classes": list(self.classes), "seen": list(self.seen)}
        if self.info is not None:
            record["info"] = {
                name: {"name": one.name, "meaning": one.meaning, "malignancy": one.malignancy}
                for name, one in self.info.items()
            }
        return write_json(record)

    @classmethod
    def from_bytes(cls, data: bytes) -> "Labels":
        """Read `labels.json`."""
        record = check_keys(parse_json(data, max_bytes=MAX_NAMES_BYTES), {"classes", "seen"}, {"info"})
        classes, seen = record["classes"], record["seen"]
        if not isinstance(classes, list) or not isinstance(seen, list):
            raise ValueError("classes and seen must be lists")
        if not all(isinstance(name, str) for name in classes):
            raise ValueError("a class must be text")
        return cls(tuple(classes), tuple(seen), _info(record["info"]) if "info" in record else None)


@dataclass(frozen=True, kw_only=True)
class Card:
    """The model card."""

    intended_use: str  # for whom and what, one paragraph
    method: str  # federated method that made the model
    site: str | None  # site whose personal model this is; None for a shared one
    sites: Mapping[str, int]  # training sites and their numbers of training images
    metrics: Mapping[str, object]  # figures with intervals, as JSON values
    temperature: float  # T of e = f(logits/T), above 0
    refer_above: float | None  # vacuity (softmax methods: entropy in nats) above which a person decides; None for never
    backbone: str  # name of the frozen network
    licence_note: str  # what the training data's licences allow
    research_use_only: bool = True  # shown to everyone who scores
    suspicion: Suspicion | None = None  # from where suspicious classes refer; None in bundles from before it
    map: ShownMap | None = None  # the map that a device shows; None in bundles from before it was measured
    untrained: bool = False  # nothing was ever learned in the frozen network; False in bundles from before it was told

    def __post_init__(self) -> None:
        for name, text in zip(_TEXTS, (self.intended_use, self.method, self.backbone, self.licence_note), strict=True):
            if not _is_text(text, MAX_TEXT):
                raise ValueError(f"{name} must be text of 1 to {MAX_TEXT} characters")
        if self.site is not None and not _is_text(self.site, MAX_CLASS_NAME):
            raise ValueError("site must be a name or null")
        if len(self.sites) > MAX_SITES or not all(
            _is_text(name, MAX_CLASS_NAME) and type(count) is int and 0 <= count <= MAX_INT
            for name, count in self.sites.items()
        ):
            raise ValueError("sites must map names to numbers of training images")
        if not isinstance(self.metrics, Mapping):
            raise ValueError("metrics must be an object")
        if not _is_number(self.temperature) or self.temperature <= 0:
            raise ValueError("temperature must be a number above 0")
        if self.refer_above is not None and (not _is_number(self.refer_above) or self.refer_above < 0):
            raise ValueError("refer_above must be a number from 0, or null")
        if type(self.research_use_only) is not bool:
            raise ValueError("research_use_only must be true or false")
        if type(self.untrained) is not bool:
            raise ValueError("untrained must be true or false")

    def to_bytes(self) -> bytes:
        """Write `card.json`."""
        record: dict[str, object] = {
            "intended_use": self.intended_use,
            "research_use_only": self.research_use_only,
            "method": self.method,
            "site": self.site,
            "sites": dict(self.sites),
            "metrics": dict(self.metrics),
            "temperature": self.temperature,
            "refer_above": self.refer_above,
            "backbone": self.backbone,
            "licence_note": self.licence_note,
        }
        if self.suspicion is not None:
            record["suspicion"] = asdict(self.suspicion)
        if self.map is not None:
            record["map"] = self.map.to_json()
        if self.untrained:
            record["untrained"] = True
        return write_json(record)

    @classmethod
    def from_bytes(cls, data: bytes) -> "Card":
        """Read `card.json`."""
        record = check_keys(parse_json(data), _CARD_KEYS, _OPTIONAL_KEYS)
        if not isinstance(record["sites"], dict):
            raise ValueError("sites must map names to numbers of training images")
        return cls(
            intended_use=record["intended_use"],
            method=record["method"],
            site=record["site"],
            sites=record["sites"],
            metrics=record["metrics"],
            temperature=record["temperature"],
            refer_above=record["refer_above"],
            backbone=record["backbone"],
            licence_note=record["licence_note"],
            research_use_only=record["research_use_only"],
            suspicion=_suspicion(record["suspicion"]) if "suspicion" in record else None,
            map=ShownMap.from_json(record["map"]) if "map" in record else None,
            untrained=record.get("untrained", False),
        )


def referral_rules(labels: Labels, card: Card, refer_above: float | None = None) -> ReferralRules:
    """Return the rules by which a bundle's pictures are referred.

    Args:
        refer_above: vacuity, or entropy in nats, in place of the card's.

    Raises:
        ValueError: one of the card's thresholds is no number.
    """
    stated, unlit = (card.metrics.get(name) for name in ("refer_dissonance_above", "refer_unlit_above"))
    if stated is not None and not _is_number(stated):
        raise ValueError("the card's metric refer_dissonance_above is not a number")
    if unlit is not None and not (_is_number(unlit) and 0 <= float(unlit) <= 1):  # type: ignore[arg-type]
        raise ValueError("the card's metric refer_unlit_above is not a number from 0 to 1")
    light, figures = card.metrics.get("refer_light_outside"), card.metrics.get("site")
    return ReferralRules(
        uncertain_above=card.refer_above if refer_above is None else refer_above,
        dissonance_above=None if stated is None else float(stated),  # type: ignore[arg-type]  # just looked at
        suspicious=labels.suspicious,
        suspicious_from=None if card.suspicion is None else card.suspicion.threshold,
        unlit_above=MOST_UNLIT if unlit is None else float(unlit),  # type: ignore[arg-type]
        light=None if light is None else LightRange.from_json(light),
        untested=untested_classes(figures, len(labels.classes)) if isinstance(figures, dict) else None,
        suspicious_tried=rule_tried(card),
    )


def rule_tried(card: Card) -> TriedRule | None:
    """Say how the rule for suspicious classes did: on the rows that only report, else on those that chose it.

    None where nobody tried. A `ValueError` where the card's metric is no such count.
    """
    told = card.metrics.get(REPORTED_RULE)
    if told is None or card.suspicion is None:
        return None if card.suspicion is None else card.suspicion.tried
    return TriedRule.from_json(told)


def _info(record: object) -> dict[str, ClassInfo]:
    if not isinstance(record, dict):
        raise ValueError("info must map classes to what they mean")
    found: dict[str, ClassInfo] = {}
    for name, one in record.items():
        found[name] = ClassInfo(**check_keys(one, _INFO_KEYS, what="info of a class"))
    return found


def _suspicion(record: object) -> Suspicion:
    return Suspicion(**check_keys(record, _SUSPICION_KEYS, what="suspicion"))


def _is_text(value: object, longest: int) -> bool:
    return isinstance(value, str) and 1 <= len(value) <= longest


def _is_number(value: object) -> bool:
    return type(value) in (int, float) and math.isfinite(value)  # type: ignore[arg-type]  # the type was just looked at
