"""What a class means for whoever reads a score: its full name, one plain line, and whether it asks for a look.

Guarantees: only a class that is known to be `benign` does not ask for a look. A class that nobody described is
`unknown`, which asks.

`KNOWN` holds the labels of ISIC 2019 (Combalia et al. 2019, arXiv 1908.02288), of HAM10000 (Tschandl et al. 2018, doi
10.1038/sdata.2018.161) and of the task `nevus`. HAM10000's `akiec` holds Bowen's disease beside actinic keratosis:
squamous cell carcinoma in situ, so it asks for a look as the cancer does.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

MALIGNANCIES: Final = ("malignant", "premalignant", "benign", "unknown")
MAX_NAME: Final = 200  # characters, as many as a label may have
MAX_MEANING: Final = 300


@dataclass(frozen=True)
class ClassInfo:
    """What one class means."""

    name: str  # full name, such as `Melanoma`
    meaning: str  # one plain line
    malignancy: str  # one of `MALIGNANCIES`

    def __post_init__(self) -> None:
        for what, text, most in (("name", self.name, MAX_NAME), ("meaning", self.meaning, MAX_MEANING)):
            if not (isinstance(text, str) and 1 <= len(text) <= most and text.isprintable() and text.strip() == text):
                raise ValueError(f"{what} must be one printable line of 1 to {most} characters")
        if self.malignancy not in MALIGNANCIES:
            raise ValueError(f"malignancy must be one of {', '.join(MALIGNANCIES)}")

    @property
    def suspicious(self) -> bool:
        """Whether the class asks for a look."""
        return self.malignancy != "benign"


_MELANOMA = ClassInfo("Melanoma", "A cancer of the pigment cells of the skin, which can spread early.", "malignant")
_NEVUS = ClassInfo("Melanocytic nevus", "A mole: a benign growth of pigment cells.", "benign")
_BASAL = ClassInfo(
    "Basal cell carcinoma", "A skin cancer that grows into what lies around it and rarely spreads.", "malignant"
)
_KERATOSIS = ClassInfo(
    "Benign keratosis",
    "A benign thickening or spot: seborrhoeic keratosis, solar lentigo or lichen planus-like keratosis.",
    "benign",
)
_FIBROMA = ClassInfo("Dermatofibroma", "A benign firm nodule of connective tissue in the skin.", "benign")
_VASCULAR = ClassInfo(
    "Vascular lesion", "A benign growth of small blood vessels, such as an angioma, or a bleeding.", "benign"
)

KNOWN: Final[Mapping[str, ClassInfo]] = {
    "MEL": _MELANOMA,
    "NV": _NEVUS,
    "BCC": _BASAL,
    "AK": ClassInfo(
        "Actinic keratosis",
        "A rough patch from sun damage, which may become squamous cell carcinoma.",
        "premalignant",
    ),
    "BKL": _KERATOSIS,
    "DF": _FIBROMA,
    "VASC": _VASCULAR,
    "SCC": ClassInfo(
        "Squamous cell carcinoma", "A cancer of the horn-forming cells of the skin, which can spread.", "malignant"
    ),
    "akiec": ClassInfo(
        "Actinic keratosis or Bowen's disease",
        "Sun damage that may become squamous cell carcinoma, or such a cancer within the top layer of the skin.",
        "premalignant",
    ),
    "bcc": _BASAL,
    "bkl": _KERATOSIS,
    "df": _FIBROMA,
    "mel": _MELANOMA,
    "nv": _NEVUS,
    "vasc": _VASCULAR,
    "nevus": _NEVUS,
    "other": ClassInfo(
        "Other than a nevus", "Anything that is no mole: benign lesions and cancers are mixed here.", "unknown"
    ),
}


def known_among(classes: Sequence[str], given: Mapping[str, ClassInfo] | None = None) -> dict[str, ClassInfo]:
    """Describe those of these classes that are known; what is `given` goes before the table."""
    both = {**KNOWN, **(given or {})}
    return {name: both[name] for name in classes if name in both}


def suspicious_classes(classes: Sequence[str], info: Mapping[str, ClassInfo]) -> tuple[bool, ...]:
    """For each class, whether it asks for a look: all but those that are known to be benign."""
    return tuple(name not in info or info[name].suspicious for name in classes)


def undescribed(label: str) -> ClassInfo:
    """Describe a class of which nothing is known: it asks for a look."""
    return ClassInfo(label, "Nobody has described this class.", "unknown")
