"""Which classes a model's values never predict: their site, or this device, had no training picture of them.

Guarantees: the sentence names every suspicious one of these classes, and after them the benign ones, of many the
first: by the full name, and with whether it is benign. So whoever reads a benign prediction learns which cancers it
cannot be told apart from, however many they are. Source: docs/methods.md 1.3.
"""

from dataclasses import dataclass

from edgefl_protocol.bundle.model_card import Labels
from edgefl_protocol.pictures.class_info import ClassInfo, undescribed
from edgefl_protocol.sentences import joined_by_and, listed


@dataclass(frozen=True, kw_only=True)
class NeverPredicted:
    """The classes that some values never predict."""

    suspicious: tuple[str, ...]  # labels of those that are not known to be benign
    sentence: str | None  # names all of these, and benign ones too; None where every class can be predicted

    @property
    def warning(self) -> str | None:
        """The sentence where a suspicious class is among them: it goes with every result."""
        return self.sentence if self.suspicious else None


def never_predicted(labels: Labels, *, learned_here: bool = False, site: str | None = None) -> NeverPredicted:
    """Find the classes that values never predict, and say so in a sentence.

    Args:
        labels: the classes; `seen` is that of the values.
        learned_here: whether a device learned the values; else they are the bundle's.
        site: whose training pictures decide, of bundle values that other sites taught, too; None where none did.
    """
    told = {name: (labels.info or {}).get(name) or undescribed(name) for name in labels.classes}
    names = [name for name, seen in zip(labels.classes, labels.seen, strict=True) if not seen]
    suspicious = [name for name in names if told[name].suspicious]
    if not names:
        return NeverPredicted(suspicious=(), sentence=None)
    titles = {name: _titled(name, told[name]) for name in names}
    benign = listed([titles[name] for name in names if not told[name].suspicious])
    which = ", nor ".join(filter(None, [joined_by_and([titles[name] for name in suspicious]), benign]))
    whose, they = (
        ("The values learned on this device never predict", "they")
        if learned_here
        else ("This model never predicts", "it")
    )
    taught = (
        f"no picture that {they} learned from showed one"
        if site is None or learned_here
        else f"no training picture of the site {site} showed one"
    )
    said = f"{whose} {which}, whatever a picture shows: {taught}."
    return NeverPredicted(suspicious=tuple(suspicious), sentence=said)


def _titled(name: str, info: ClassInfo) -> str:
    """Full name of a class, its label where that differs, and whether it is benign."""
    benign = "not known to be benign" if info.malignancy == "unknown" else info.malignancy
    label = "" if info.name.casefold() == name.casefold() else f"{name}, "
    return f"{info.name} ({label}{benign})"
