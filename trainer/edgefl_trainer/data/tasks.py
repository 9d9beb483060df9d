"""What is told apart: the classes of the data, or groups of them, as `--task` writes it.

    all                      every class of the data
    nevus                    nevus against all else: `nevus=NV:other`, whichever way the data writes a nevus
    mal=MEL,BCC:rest         MEL and BCC are one class, mal; every other class is rest
    mal=MEL,BCC:pre=AK:rest  more groups; what follows the last colon names what is left

Guarantees: classes stand in the order written, what is left comes last; no class is in two groups; a name that the
product describes (`pictures.class_info`) stands for nothing but what it describes there, so that no bundle tells a
clinician anything else.
"""

import re
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from edgefl_protocol.pictures.class_info import KNOWN
from edgefl_protocol.sentences import counted
from edgefl_trainer.data.errors import DataError, TaskError
from edgefl_trainer.data.rows import Row
from edgefl_trainer.typed_values import nearest

_NEVI = ("nevus", "naevus", "nevi", "naevi")
NEVUS_NAMES = frozenset({"nv", *_NEVI, *(f"melanocytic {name}" for name in _NEVI)})
NEVUS, OTHER = "nevus", "other"
MAX_WORD = 32  # characters of a word
LONGEST_SHORT_FORM = 3  # characters of a class such as SCC, whose last letter is no plural
MOST_LISTED = 20  # names of a sentence
FORM = "all, nevus, or NAME=A,B:REST such as mal=MEL,BCC:rest"


@dataclass(frozen=True)
class Groups:
    """Classes of the data gathered into fewer."""

    text: str  # as written
    members: Mapping[str, tuple[str, ...]]  # group → classes of the data, in the order written
    rest: str  # what every other class is called

    @property
    def classes(self) -> tuple[str, ...]:
        """What is told apart, in order."""
        return (*self.members, self.rest)

    @property
    def named(self) -> dict[str, int]:
        """Every class that stands in a group, with the place of the group."""
        return {label: place for place, labels in enumerate(self.members.values()) for label in labels}


def parse_groups(task: str) -> Groups | None:
    """Read a task that gathers classes; None for `all` and `nevus`.

    Raises:
        TaskError: it is not of the form, names a class or a group twice, or takes a name that means something else.
    """
    if task in ("all", NEVUS):
        return None
    *groups, rest = (part.strip() for part in class_name(task).split(":"))
    if not groups:
        raise TaskError(f"Task {task!r} is not known; allowed: {FORM}.")
    if not rest or "=" in rest or "," in rest:
        raise TaskError(f"Task {task!r} has no name for every other class after its last colon; allowed: {FORM}.")
    members: dict[str, tuple[str, ...]] = {}
    for part in groups:
        name, _, labels = part.partition("=")
        found = tuple(label.strip() for label in labels.split(","))
        if not name.strip() or "," in name or not all(found):
            raise TaskError(
                f"Task {task!r} has the group {part!r}, which is not of the form NAME=A,B; allowed: {FORM}."
            )
        if name.strip() in members:
            raise TaskError(f"Task {task!r} has two groups called {name.strip()!r}: put their classes into one.")
        members[name.strip()] = found
    made = Groups(task, members, rest)
    _check_names(made)
    return made


def class_name(text: str) -> str:
    """Write the name of a class in the one form in which it is compared: Unicode's NFC.

    Systems write a name in several: macOS calls a folder by letters and marks, a table has both as one sign.
    """
    return unicodedata.normalize("NFC", text)


def _check_names(groups: Groups) -> None:
    labels = [label for found in groups.members.values() for label in found]
    for names, what in ((labels, "class"), (groups.classes, "group")):
        for name in names:
            if names.count(name) > 1:
                raise TaskError(f"Task {groups.text!r} names the {what} {name!r} twice: name it once.")
    nevus_alone = len(groups.members) == 1 and all(label.lower() in NEVUS_NAMES for label in labels)
    fitting = [all(_means(label) is KNOWN.get(name) for label in found) for name, found in groups.members.items()]
    fitting.append(groups.rest == OTHER and nevus_alone)
    for name, fits in zip(groups.classes, fitting, strict=True):
        if name in KNOWN and not fits:
            raise TaskError(
                f"Task {groups.text!r} uses the name {name!r}, which a clinician reads as {KNOWN[name].name!r}, for "
                "other classes: choose another name."
            )


def _means(label: str) -> object:
    return KNOWN[NEVUS] if label.lower() in NEVUS_NAMES else KNOWN.get(label)


def task_word(task: str) -> str:
    """Name a task in a word of a bundle or of a coordinator: `mal-rest` for `mal=MEL,BCC:rest`."""
    groups = parse_groups(task)
    if groups is None:
        return task
    plain = re.sub("[^a-z0-9]+", "-", "-".join(groups.classes).lower())
    return plain[:MAX_WORD].strip("-") or "groups"


def gather(
    task: str, wanted: Sequence[str], present: Sequence[str], *, whole: bool = True
) -> tuple[tuple[str, ...], dict[str, int]]:
    """Return what a task tells apart, and for each class of the data that is used its place there.

    Args:
        task: as `--task` writes it.
        wanted: classes of the data that are used.
        present: all classes of the data.
        whole: every class that the task names has to be there; data to judge on, or of one site, may lack some of them.

    Raises:
        DataError: a class that the task names is not there, none is left, or one stands in two groups under two names.
    """
    groups = parse_groups(task)
    if groups is not None:
        return groups.classes, _grouped(groups, wanted, whole=whole)
    if task == "all":
        return tuple(wanted), {name: place for place, name in enumerate(wanted)}
    index = {name: 0 if name.lower() in NEVUS_NAMES else 1 for name in wanted}
    if 0 not in index.values():
        raise DataError(f"Task nevus needs a class named NV or nevus; the data has {listed(present)}.")
    if whole and 1 not in index.values():
        raise DataError(f"Task nevus needs a class beside the nevi; the data has {listed(present)}.")
    _check_near(task, (NEVUS, OTHER), index)
    return (NEVUS, OTHER), index


def _grouped(groups: Groups, wanted: Sequence[str], *, whole: bool) -> dict[str, int]:
    named, rest = groups.named, len(groups.members)
    by_fold = {label.casefold(): label for label in named}
    for label in wanted:
        if label not in named and label.casefold() in by_fold:
            raise DataError(
                f"Task {groups.text} names {by_fold[label.casefold()]!r} and the data has {label!r}: write it as the "
                "data does, or name both."
            )
    _check_near(groups.text, groups.classes, named | {label: named.get(label, rest) for label in wanted})
    missing = [label for label in named if label not in wanted]
    if missing and (whole or len(missing) == len(named)):
        raise DataError(
            f"Task {groups.text} names the class {missing[0]!r}, which the data does not have; did you mean "
            f"{nearest(missing[0], wanted)}?"
        )
    index = {label: named.get(label, rest) for label in wanted}
    left = [label for label, place in index.items() if place == rest]
    if not left and whole:
        raise DataError(f"Task {groups.text} leaves no class of the data for {groups.rest!r}: name fewer classes.")
    for label, place in index.items():
        if label in groups.classes and (groups.classes[place] != label or (place == rest and len(left) > 1)):
            raise DataError(
                f"Task {groups.text} uses the name {label!r} for a group, but in the data it is a class of another "
                "group: choose another name."
            )
    return index


def _check_near(task: str, classes: Sequence[str], index: Mapping[str, int]) -> None:
    """Refuse, by a `DataError`, two classes that may be one (`near_classes`) in two groups: a melanoma among the rest.

    `index`: class of the task or of the data → place of its group.
    """
    first: dict[str, str] = {}  # what it may be → the class that was there first
    for label, place in index.items():
        twin = first.setdefault(_class_meant(label), label)
        if index[twin] != place:
            raise DataError(
                f"Task {task} counts {twin!r} to {classes[index[twin]]!r} and {label!r} to {classes[place]!r}, but "
                "they look like one class: write it alike in the task and in all rows, or name both in one group."
            )


def check_alike(rows: Sequence[Row], wanted: Sequence[str]) -> None:
    """Refuse, by a `DataError`, classes that differ in case alone: a class would be two, or lost at some sites."""
    for told in alike_classes(rows, wanted):
        raise DataError(told)


def alike_classes(rows: Sequence[Row], wanted: Sequence[str]) -> Iterator[str]:
    """Write one sentence on the classes of the rows that differ in case alone from one of `wanted`, with an image."""
    by_fold: dict[str, str] = {}
    for name in wanted:
        by_fold.setdefault(name.casefold(), name)
    first = {row.label: row.image for row in reversed(rows) if row.label is not None}
    found = [
        f"both the class {label!r} (image {first[label]}) and the class {meant!r}"
        for label in dict.fromkeys(row.label for row in rows if row.label is not None)
        if (meant := by_fold.get(label.casefold(), label)) != label
    ]
    if found:
        yield f"The data has {listed(found)}; spell a class the same way in every row."


def near_classes(pictures: Mapping[str, int]) -> Iterator[str]:
    """Write a sentence for each group of classes that may be one, with their numbers of pictures.

    They differ in spaces, signs or a plural alone, or the product knows them as names of one class. Those that differ
    in case alone a run refuses (`alike_classes`), and those that a task puts into two groups.
    """
    groups: dict[str, list[str]] = {}  # what it may be → classes
    for label in pictures:
        groups.setdefault(_class_meant(label), []).append(label)
    for found in groups.values():
        if len({label.casefold() for label in found}) > 1:
            told = ", ".join(f"{label} ({counted(pictures[label], 'picture')})" for label in found)
            yield f"classes {told} look like one: a class has one name in all rows, so give it one where it is meant"


def _class_meant(label: str) -> str:
    """A word that labels of one class share."""
    return next((_SYNONYMS[form] for form in _forms(label) if form in _SYNONYMS), _forms(label)[-1])


def _forms(label: str) -> tuple[str, str]:
    """A label without case, signs and marks on letters, and that without the ending of its plural, too."""
    plain = "".join(letter for letter in unicodedata.normalize("NFKD", label).casefold() if letter.isalnum())
    return plain, re.sub("(es|is|s)$", "", plain) if len(plain) > LONGEST_SHORT_FORM else plain


_LONG_NAMES = {  # of HAM10000's paper and of ICD-10, beside those that the product gives
    "MEL": ("malignant melanoma", "malignant melanoma of skin"),
    "AK": ("solar keratosis",),
    "BKL": ("benign keratosis-like lesion",),
    "akiec": ("actinic keratoses and intraepithelial carcinoma",),
    NEVUS: tuple(NEVUS_NAMES),
}
_SYNONYMS = {
    form: KNOWN[label].name
    for label in KNOWN
    for text in (label, KNOWN[label].name, *_LONG_NAMES.get(label, ()))
    for form in _forms(text)
}  # how a class is written → its full name


def listed(names: Sequence[str]) -> str:
    """Join names with commas, at most twenty of them."""
    shown = ", ".join(names[:MOST_LISTED]) or "none"
    return shown if len(names) <= MOST_LISTED else f"{shown} and {len(names) - MOST_LISTED} more"
