"""Which of the owner's pictures judge instead of teaching."""

import hashlib
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from edgefl_client.learning.errors import LearningError
from edgefl_client.learning.own_pictures import hold_back
from edgefl_client.learning.picture_rows import PreparedRows, joined, read_labels, read_rows
from edgefl_protocol.pictures.preprocess import Preprocess

CLASSES = ("a", "b", "c")


def rows(labels: list[int], groups: list[str] | None = None) -> PreparedRows:
    names = groups or [f"lesion {index}" for index in range(len(labels))]
    images = np.zeros((len(labels), 2, 2, 3), np.uint8)
    return PreparedRows(images, np.array(labels), tuple(hashlib.sha256(name.encode()).hexdigest() for name in names))


@settings(max_examples=60)
@given(st.lists(st.integers(25, 200), min_size=2, max_size=3))
def test_hold_back_takes_its_share_and_keeps_sides(sizes):
    """docs/design.md 7 and 5: 15 % and at least 20 of each class; a picture never changes sides when others come."""
    labels = [label for label, size in enumerate(sizes) for _ in range(size)]
    held, limits = hold_back(rows(labels), CLASSES, {})
    for label, size in enumerate(sizes):
        assert held[np.array(labels) == label].sum() == max(20, round(0.15 * size))
    more = labels + [0] * 40
    later, kept = hold_back(rows(more), CLASSES, limits)
    assert np.array_equal(later[: len(labels)], held) and kept == limits


def test_a_lesion_stands_on_one_side():
    """Pictures of one lesion never teach and judge at once (data/README: splits by lesion)."""
    groups = [f"{label}-{index // 3}" for label in range(2) for index in range(90)]
    held, _ = hold_back(rows([0] * 90 + [1] * 90, groups), CLASSES, {})
    for group in set(groups):
        assert len({bool(held[index]) for index, name in enumerate(groups) if name == group}) == 1


def test_copies_do_not_count_as_many():
    """Thirty copies of a picture are one picture: they cannot both teach and judge."""
    with pytest.raises(LearningError) as caught:
        hold_back(rows([0] * 30 + [1] * 30, ["same"] * 30 + [str(n) for n in range(30)]), CLASSES, {})
    assert caught.value.code == "few_images"


class Row(NamedTuple):
    """A line of a table: what the picture shows, by what name its lesion goes, and its class."""

    picture: int
    lesion: int | None
    label: int


def drawn(rng: np.random.Generator, number: int, clashes: float) -> list[Row]:
    """A table whose pictures stand in it under one lesion and label, but for a share of clashes."""
    found = []
    for picture in range(number):
        lesion, label = picture // 2, picture // 2 % 3
        found.append(Row(picture, lesion if lesion % 4 else None, label if lesion % 4 else picture % 3))
        if rng.random() < clashes:
            other = (None, int(rng.integers(number)), lesion)[rng.integers(3)]
            found.append(Row(picture, other, int(rng.integers(3))))
    return [found[index] for index in rng.permutation(len(found))]


def prepared(table: list[Row]) -> PreparedRows:
    pixels = [hashlib.sha256(f"picture {row.picture}".encode()).hexdigest() for row in table]
    keys = [
        pixels[index] if row.lesion is None else hashlib.sha256(f"lesion {row.lesion}".encode()).hexdigest()
        for index, row in enumerate(table)
    ]
    return PreparedRows(
        np.zeros((len(table), 2, 2, 3), np.uint8), np.array([row.label for row in table]), joined(keys, pixels)
    )


def wholes(table: list[Row]) -> list[set[int]]:
    """Oracle: rows that share a picture or a lesion, merged until nothing more is shared."""
    found: list[tuple[set[int], set[object]]] = []
    for index, row in enumerate(table):
        rows, marks = {index}, {("picture", row.picture), ("lesion", row.lesion)} - {("lesion", None)}
        for other in [one for one in found if one[1] & marks]:
            found.remove(other)
            rows, marks = rows | other[0], marks | other[1]
        found.append((rows, marks))
    return [rows for rows, _ in found]


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from((0.0, 0.02, 0.1)), st.integers(200, 400))
def test_whatever_a_table_lists_twice_stands_on_one_side(seed, clashes, number):
    """The module's promise: all pictures of a lesion, and all copies of a picture, stand on one side, and of each class
    15 %, at least 20, judge. Rows that come later bring nothing that taught among those that judge."""
    rng = np.random.default_rng(seed)
    table = drawn(rng, number, clashes)
    held, limits = hold_back(prepared(table), CLASSES, {})
    for rows_of_one in wholes(table):
        assert len({bool(held[index]) for index in rows_of_one}) == 1
    labels = np.array([row.label for row in table])
    for label in range(3):
        assert held[labels == label].sum() >= max(20, round(0.15 * (labels == label).sum()))
    more = table + drawn(rng, number // 4, 0.5)
    try:
        later, kept = hold_back(prepared(more), CLASSES, limits)
    except LearningError:  # so many came to teach that too few judge
        return
    assert not (later[: len(table)] & ~held).any() and kept == limits
    for rows_of_one in wholes(more):
        assert len({bool(later[index]) for index in rows_of_one}) == 1


def test_a_file_that_is_listed_with_and_without_its_lesion_stands_on_one_side(tmp_path: Path):
    """docs/reference/device-learning.md, the learning gate: all copies of a picture stand on one side."""
    rng, lines = np.random.default_rng(0), ["image,label,lesion_id"]
    for label in ("a", "b"):
        for number in range(60):
            name = f"{label}{number}.png"
            Image.fromarray(rng.integers(0, 256, (12, 12, 3), np.uint8)).save(tmp_path / name)
            lines += [f"{name},{label},lesion {label}{number}", f"{name},{label},"]
    (tmp_path / "table.csv").write_text("\n".join(lines))
    found = read_rows(read_labels(tmp_path / "table.csv", CLASSES), Preprocess(size=12))
    held, _ = hold_back(found, CLASSES, {})
    assert np.array_equal(held[::2], held[1::2])
    assert found.different == 120 and [held[:120].sum(), held[120:].sum()] == [20, 20]


def test_a_lesion_under_two_labels_stands_on_one_side():
    """It may have been diagnosed twice; the class of fewer pictures is held back up to another limit."""
    labels, names = [0] * 80 + [1] * 400, [f"{index}" for index in range(480)]
    labels, names = labels + [0, 1] * 40, names + [f"both {index // 2}" for index in range(80)]
    held, _ = hold_back(rows(labels, names), CLASSES, {})
    assert np.array_equal(held[480::2], held[481::2]) and 0 < held[480:].sum() < 80
    assert held[np.array(labels) == 0].sum() >= 20 and held[np.array(labels) == 1].sum() >= 66


def test_one_lesion_under_two_labels_holds_no_more_of_a_large_class_back():
    """A small class holds back most of its pictures; a single lesion of both must not bring the large one along."""
    labels, names = [0] * 26 + [1] * 400, [f"{index}" for index in range(425)] + ["0"]
    held, _ = hold_back(rows(labels, names), CLASSES, {})
    assert held[0] == held[-1] and held[26:].sum() <= 61 and held[:26].sum() in (20, 21)


def test_classes_whose_every_lesion_has_both_labels_are_dealt_all_the_same():
    """Where a patient's number stands for the lesion: pictures of each patient are on one side, enough on both."""
    labels, names = [0, 1, 1, 1] * 60, [f"patient {index // 4}" for index in range(240)]
    held, _ = hold_back(rows(labels, names), CLASSES, {})
    assert (held.reshape(60, 4).all(axis=1) | ~held.reshape(60, 4).any(axis=1)).all()
    assert held[np.array(labels) == 0].sum() in range(20, 28) and held[np.array(labels) == 1].sum() >= 27


def test_where_later_rows_leave_too_few_to_judge_the_deal_may_begin_anew():
    """Copies of most pictures that judge, under other lesions: what was kept is not dealt anew unasked."""
    before = rows([0] * 100 + [1] * 100)
    _, limits = hold_back(before, CLASSES, {})
    label_of = ["f" * 64 if group <= limits["a"] else group for group in before.groups[:100]]
    shifted = PreparedRows(before.images, before.labels, (*label_of, *before.groups[100:]))
    with pytest.raises(
        LearningError, match=r"the class a has 0 pictures to judge with .* anew with edgefl train --rest"
    ):
        hold_back(shifted, CLASSES, limits)
    assert hold_back(shifted, CLASSES, {})[0][:100].sum() >= 20
