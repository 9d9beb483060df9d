"""The owner's pictures: which table or folder was named last, and which pictures judge instead of teaching.

    table.json   what `--labels` or `--pictures` named, and how it is read: every later `edgefl sync` learns from it
    held.json    of each class, the highest group held back (`hold_back`), for the bundle that is learned with

Of each class 15 %, at least 20, are held back for the learning gate. Who is held back is decided by the hash of the
lesion: all pictures of a lesion, and all copies of a picture, stand on one side, whatever their labels. A picture keeps
its side when others are added later, because the limit of each class is kept. Where one of these shows that two groups
are one, or brings a second label, the whole may come to teach; no added line lets what taught judge. A line that is
changed or removed can, until `--restart` deals all anew. Pictures without labels all teach, except those that the
picture gate refers: nobody has said what they show.

Pictures stay where they are: nothing of them is copied. One record of who is held back serves all learning of this
home. Source: docs/design.md, section 7 (gate) and section 5 (rows).
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edgefl_client.home import Home, read_json, write_json
from edgefl_client.learning.errors import LearningError
from edgefl_client.learning.limits import LearningLimits
from edgefl_client.learning.options import Report
from edgefl_client.learning.picture_rows import (
    MAX_ROWS,
    UNLABELLED,
    LabelledImage,
    PreparedRows,
    fit_rows,
    read_images,
    read_labels,
    read_rows,
)
from edgefl_client.learning.session import plan_of
from edgefl_client.scoring.folder_files import pictures_below
from edgefl_client.scoring.learning_verdict import LEAST_HELD
from edgefl_client.scoring.pictures import DEFAULT_FORMATS, PictureReader
from edgefl_protocol.bundle import Bundle
from edgefl_protocol.bundle.model_card import referral_rules
from edgefl_protocol.errors import EdgeflError, StorageError
from edgefl_protocol.rules.batches import LEAST_BATCH
from edgefl_protocol.rules.maps import MAX_MAPS
from edgefl_protocol.sentences import counted

HELD_SHARE = 0.15
LEAST_LEARNED = MAX_MAPS  # of each class: as many pictures as a class shares maps
_TABLE, _HELD = "table.json", "held.json"


@dataclass(frozen=True, kw_only=True)
class Table:
    """Name the owner's pictures and how they are read."""

    # CSV with the columns image and label, and lesion_id where known; for a method that learns without labels the
    # column image is enough, or a folder of pictures. Absolute
    file: Path
    formats: tuple[str, ...] = tuple(DEFAULT_FORMATS)  # kinds of files that are read (`pictures.FORMATS`)
    # pictures in a step, where the owner named a number; it is the device's memory that sets it
    batch: int | None = None


@dataclass(frozen=True)
class Dealt:
    """Hold the owner's pictures in two parts; no lesion stands in both."""

    learn: PreparedRows  # those that teach
    held: PreparedRows  # those that judge; none for a method that learns without labels
    refused: int = 0  # how many more there are, which take no part at all

    @property
    def left_out(self) -> int:
        """Count the pictures of which nothing is shared."""
        return self.refused + len(self.learn.unfit)


def remember_table(home: Home, table: Table) -> None:
    """Keep which pictures this device learns from."""
    record = {"format": 1, "table": str(table.file), "formats": list(table.formats), "batch": table.batch}
    write_json(home.prepare(home.learning) / _TABLE, record)


def name_table(home: Home, file: Path) -> None:
    """Keep another table or folder, to be read as the one before."""
    before = remembered_table(home)
    remember_table(home, Table(file=file) if before is None else replace(before, file=file))


def remembered_table(home: Home) -> Table | None:
    """Return what was named last; None where nothing ever was."""
    path = home.learning / _TABLE
    record = read_json(path, "which pictures to learn from")
    if record is None:
        return None
    file, formats, batch = (record.get(name) for name in ("table", "formats", "batch"))
    sound = isinstance(formats, list) and all(isinstance(one, str) for one in formats)
    if not isinstance(file, str) or not sound or not (batch is None or type(batch) is int):
        raise StorageError(f"{path} is damaged: name the pictures again with edgefl train --labels", "damaged")
    assert isinstance(formats, list)
    return Table(file=Path(file), formats=tuple(formats), batch=batch)


def read_dealt(
    home: Home, bundle: Bundle, table: Table, limits: LearningLimits, report: Report, *, afresh: bool = False
) -> Dealt:
    """Read the owner's pictures and part them into those that teach and those that judge.

    Args:
        limits: only the memory that is allowed is looked at.
        report: told `reading` and `pictures`, and a `warning` for each picture of a folder that cannot be used.
        afresh: forget who was held back before.

    Raises:
        LearningError: too few pictures or no labels, or they take more memory than is allowed.
    """
    if not plan_of(bundle).needs_labels:
        return _read_unlabelled(bundle, table, limits, report)
    if table.file.is_dir():
        raise LearningError(
            f"{table.file} is a folder, but this model learns from labelled pictures: name a table of them with "
            "--labels",
            "no_labels",
        )
    listed = read_labels(table.file, bundle.labels.classes)
    rows = _read(bundle, table, listed, limits, report)
    before = {} if afresh else _held_before(home, bundle)
    held, kept = hold_back(rows, bundle.labels.classes, before)
    if kept != before:
        write_json(
            home.prepare(home.learning) / _HELD, {"format": 1, "bundle_sha256": bundle.sha256, "groups": dict(kept)}
        )
    return Dealt(learn=rows.take(~held), held=rows.take(held))


def _read_unlabelled(bundle: Bundle, table: Table, limits: LearningLimits, report: Report) -> Dealt:
    """Read pictures for a method that learns without labels: there is nothing to judge, so none is held back."""
    folder = table.file.is_dir()
    listed = _pictures_of(table) if folder else read_images(table.file)

    def tell(error: EdgeflError) -> None:
        report({"warning": f"{error}; the picture is left out"})

    # Nobody named the pictures of a folder one by one, so a broken one must not stop the others.
    rows = fit_rows(_read(bundle, table, listed, limits, report, tell if folder else None))
    if rows.different < LEAST_BATCH:
        raise LearningError(
            f"of the {counted(len(listed), 'picture')} in {table.file} only {rows.different} can be used, and a "
            f"step of learning needs {LEAST_BATCH} different ones: name more pictures of skin that are sharp and "
            "well lit",
            "few_images",
        )
    return Dealt(learn=rows, held=rows.take(np.zeros(len(rows), np.bool_)), refused=len(listed) - len(rows))


def _pictures_of(table: Table) -> list[LabelledImage]:
    """List the pictures in a folder and below, by name."""
    with PictureReader(table.formats) as reader:
        found = pictures_below(table.file, reader.suffixes)
    if not 1 <= len(found) <= MAX_ROWS:
        raise LearningError(
            f"{table.file} holds {counted(len(found), 'picture')} of the formats {', '.join(table.formats)}; "
            f"allowed: 1 to {MAX_ROWS}",
            "few_images",
        )
    return [LabelledImage(path=Path(name), label=UNLABELLED) for name in found]


def _read(
    bundle: Bundle,
    table: Table,
    listed: Sequence[LabelledImage],
    limits: LearningLimits,
    report: Report,
    refused: Callable[[EdgeflError], None] | None = None,
) -> PreparedRows:
    # They are there twice while they are dealt into those that teach and those that judge.
    allowed, needed = limits.memory_mib, 2 * len(listed) * bundle.preprocess.size**2 * 3 / 2**20
    if allowed is not None and needed > allowed:
        raise LearningError(
            f"{counted(len(listed), 'picture')} would take {needed:.0f} MiB of memory, and {allowed} are allowed: "
            "allow more, or name fewer pictures",
            "memory",
        )
    return read_rows(
        listed,
        bundle.preprocess,
        table.formats,
        lambda done: report({"reading": done, "pictures": len(listed)}),
        refused,
        referral_rules(bundle.labels, bundle.card).unlit_above,
    )


def hold_back(
    rows: PreparedRows, classes: Sequence[str], limits: Mapping[str, str]
) -> tuple[NDArray[np.bool_], dict[str, str]]:
    """Choose the groups of rows that are held back for the gate: enough of each class.

    A group is held back where it lies within the limits of all classes that its rows have.

    Args:
        classes: names, in index order.
        limits: class name to the highest group held back, from an earlier deal; empty at first.

    Returns:
        Which rows are held back, (n,), and the limits to keep.

    Raises:
        LearningError: fewer than two classes, or a class with too few pictures for both sides (`few_images`).
    """
    found = np.unique(rows.labels)
    if len(found) < 2:
        raise LearningError(
            f"the table has pictures of one class only, {classes[found[0]]}; learning to tell classes apart needs two",
            "few_images",
        )
    counts = {classes[label]: Counter[str]() for label in found}
    for group, label in zip(rows.groups, rows.labels, strict=True):
        counts[classes[label]][group] += 1
    kept = _with_new_limits(counts, limits)
    teaching = {group for name, groups in counts.items() for group in groups if group > kept[name]}
    for name, groups in counts.items():
        learning = sum(count for group, count in groups.items() if group in teaching)
        judging = groups.total() - learning
        if judging < LEAST_HELD or learning < LEAST_LEARNED:
            anew = ", or deal all of them anew with edgefl train --restart" if name in limits else ""
            raise LearningError(
                f"the class {name} has {counted(judging, 'picture')} to judge with and {learning} to learn from; it "
                f"needs {LEAST_HELD} and {LEAST_LEARNED}, of different lesions: label more, or leave the class "
                f"out{anew}",
                "few_images",
            )
    return np.array([group not in teaching for group in rows.groups], np.bool_), kept


def _with_new_limits(counts: Mapping[str, Counter[str]], before: Mapping[str, str]) -> dict[str, str]:
    """Add the limits of classes that have none yet; those from before stay.

    Args:
        counts: class name to its groups, with how many pictures of the class each has.
    """
    wanted = {
        name: max(LEAST_HELD, round(HELD_SHARE * groups.total()))
        for name, groups in counts.items()
        if name not in before
    }
    alone = {name: sorted(counts[name].elements())[:least][-1] for name, least in wanted.items()}
    limits = {**before, **alone}
    for name, least in wanted.items():
        _raise_limits(limits, name, least, counts, before)
    return limits


def _raise_limits(
    limits: dict[str, str], name: str, least: int, counts: Mapping[str, Counter[str]], fixed: Mapping[str, str]
) -> None:
    """Raise limits until a class has enough held back, where groups of several classes need the limits of all.

    Groups that the other classes' limits let through come first. Only then do these rise, too, but for fixed ones.
    """
    others = {group: [one for one in counts if one != name and group in counts[one]] for group in counts[name]}
    stopped = {group: [one for one in others[group] if group > limits[one]] for group in others}
    held = 0
    for group in sorted(counts[name], key=lambda group: (bool(stopped[group]), group)):
        if held >= least:
            return
        if fixed.keys().isdisjoint(stopped[group]):
            limits.update({one: max(limits[one], group) for one in (name, *others[group])})
            held += counts[name][group]


def _held_before(home: Home, bundle: Bundle) -> dict[str, str]:
    path = home.learning / _HELD
    record = read_json(path, "which pictures are held back")
    if record is None or record.get("bundle_sha256") != bundle.sha256:
        return {}
    groups = record.get("groups")
    if not isinstance(groups, dict) or not all(isinstance(one, str) for one in groups.values()):
        raise StorageError(
            f"{path} is damaged: it does not say which pictures are held back; begin again with edgefl train --restart",
            "damaged",
        )
    return groups
