"""What a bundle says about its model: the classes it knows, and the card that travels with it.

Guarantees: a `Labels` or `Card` that exists satisfies the forms below; readers take exactly the documented keys.
Anything else is a `ValueError`.

    labels.json  {"classes": [name, ...], "seen": [bool, ...]}    seen: the class stood in the training rows
    card.json    {"intended_use", "research_use_only": bool, "method", "site": name|null, "sites": {name: n_train},
                  "metrics": {...}, "temperature": > 0, "refer_above": number|null, "backbone", "licence_note"}

Source: docs/methods.md 1.3 (unseen classes) and docs/security.md 8.11 to 8.13 (what a user is shown).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from edgefl_protocol.fields import MAX_CLASS_NAME, MAX_CLASSES
from edgefl_protocol.strict_json import MAX_INT, parse_json, write_json

MAX_TEXT = 10_000
MAX_SITES = 10_000

_TEXTS = ("intended_use", "method", "backbone", "licence_note")
_CARD_KEYS = {*_TEXTS, "research_use_only", "site", "sites", "metrics", "temperature", "refer_above"}


@dataclass(frozen=True)
class Labels:
    """The classes in the order of the model's outputs."""

    classes: tuple[str, ...]  # distinct names, 2 to 10,000
    # for each class, whether the training rows held it; at least one did. Only seen classes are predicted
    seen: tuple[bool, ...]

    def __post_init__(self) -> None:
        if not 2 <= len(self.classes) <= MAX_CLASSES or len(set(self.classes)) != len(self.classes):
            raise ValueError(f"classes must be 2 to {MAX_CLASSES} distinct names")
        if not all(
            _is_text(name, MAX_CLASS_NAME) and name.isprintable() and name.strip() == name for name in self.classes
        ):
            raise ValueError(f"a class must be a printable name of 1 to {MAX_CLASS_NAME} characters")
        if len(self.seen) != len(self.classes) or not all(type(s) is bool for s in self.seen) or not any(self.seen):
            raise ValueError("seen must hold one truth value for each class, at least one of them true")

    def to_bytes(self) -> bytes:
        """Write `labels.json`."""
        return write_json({"classes": list(self.classes), "seen": list(self.seen)})

    @classmethod
    def from_bytes(cls, data: bytes) -> "Labels":
        """Read `labels.json`."""
        record = parse_json(data)
        if not isinstance(record, dict) or set(record) != {"classes", "seen"}:
            raise ValueError("the keys must be exactly classes and seen")
        classes, seen = record["classes"], record["seen"]
        if not isinstance(classes, list) or not isinstance(seen, list):
            raise ValueError("classes and seen must be lists")
        if not all(isinstance(name, str) for name in classes):
            raise ValueError("a class must be text")
        return cls(tuple(classes), tuple(seen))


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

    def to_bytes(self) -> bytes:
        """Write `card.json`."""
        return write_json(
            {
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
        )

    @classmethod
    def from_bytes(cls, data: bytes) -> "Card":
        """Read `card.json`."""
        record = parse_json(data)
        if not isinstance(record, dict) or set(record) != _CARD_KEYS:
            raise ValueError(f"the keys must be exactly {', '.join(sorted(_CARD_KEYS))}")
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
        )


def _is_text(value: object, longest: int) -> bool:
    return isinstance(value, str) and 1 <= len(value) <= longest


def _is_number(value: object) -> bool:
    return type(value) in (int, float) and math.isfinite(value)  # type: ignore[arg-type]  # the type was just looked at
