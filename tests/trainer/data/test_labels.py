"""docs/methods.md 3.4: a share of the labels of each site and class, by lesion, 10 % inside 20 %."""

import math
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgefl_trainer.data import Federation, SiteRows
from edgefl_trainer.data.labels import keep_labels, labelled

SHARES = (0.1, 0.2, 0.4, 0.8)

whole = st.lists(st.integers(0, 3), min_size=1, max_size=80)  # the class of each lesion
shares = st.integers(1, 1000).map(lambda permille: permille / 1000)


@st.composite
def images(draw: st.DrawFn) -> tuple[list[str], np.ndarray]:
    """Lesions of one class each, with one to three pictures."""
    classes = draw(whole)
    views = draw(st.lists(st.integers(1, 3), min_size=len(classes), max_size=len(classes)))
    lesions = [f"L{i}" for i, n in enumerate(views) for _ in range(n)]
    targets = [label for label, n in zip(classes, views, strict=True) for _ in range(n)]
    return lesions, np.array(targets, dtype=np.int64)


@st.composite
def mixed(draw: st.DrawFn) -> tuple[list[str], np.ndarray]:
    """Any lesion of any class, lesions of several classes among them."""
    rows = draw(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 3)), min_size=1, max_size=80))
    return [f"L{lesion}" for lesion, _ in rows], np.array([label for _, label in rows], dtype=np.int64)


@given(mixed(), shares, shares, st.integers(0, 3))
def test_a_smaller_share_lies_inside_a_larger(rows: tuple, one: float, other: float, seed: int) -> None:
    small, large = (labelled(*rows, share, "p", seed) for share in sorted((one, other)))
    assert not (small & ~large).any()


@given(images(), shares, st.integers(0, 3))
def test_every_class_has_its_share_within_one_lesion(rows: tuple, share: float, seed: int) -> None:
    lesions, targets = rows
    kept = labelled(lesions, targets, share, "p", seed)
    largest = max(Counter(lesions).values())
    for label, n in Counter(targets.tolist()).items():
        due = math.ceil(Fraction(str(share)) * n)
        assert due <= int((kept & (targets == label)).sum()) < due + largest


@given(mixed(), shares)
def test_every_class_present_keeps_one_and_lesions_stay_whole(rows: tuple, share: float) -> None:
    lesions, targets = rows
    kept = labelled(lesions, targets, share, "p", 0)
    assert set(targets[kept].tolist()) == set(targets.tolist())
    assert len(set(zip(lesions, kept.tolist(), strict=True))) == len(set(lesions))


@given(mixed(), shares, st.randoms(use_true_random=False))
def test_the_order_of_rows_does_not_matter(rows: tuple, share: float, random) -> None:
    lesions, targets = rows
    shuffled = list(range(len(lesions)))
    random.shuffle(shuffled)
    kept = labelled(lesions, targets, share, "p", 0)
    again = labelled([lesions[i] for i in shuffled], targets[shuffled], share, "p", 0)
    assert again.tolist() == kept[shuffled].tolist()


@pytest.mark.parametrize(("share", "images_"), [(0.1, 3), (0.7, 21), (1.0, 30)])
def test_a_decimal_share_is_exact(share: float, images_: int) -> None:
    """In binary 0.7 · 30 is 21.000000000000004 or less: the decimal that is written counts."""
    kept = labelled([f"L{i}" for i in range(30)], np.zeros(30, dtype=np.int64), share, "p", 0)
    assert kept.sum() == images_


def test_other_seeds_choose_others() -> None:
    lesions, targets = [f"L{i}" for i in range(100)], np.zeros(100, dtype=np.int64)
    assert labelled(lesions, targets, 0.2, "p", 0).tolist() != labelled(lesions, targets, 0.2, "p", 1).tolist()
    assert labelled(lesions, targets, 0.2, "p", 0).tolist() != labelled(lesions, targets, 0.2, "q", 0).tolist()


def federation(sites: tuple[str, ...], held_out: tuple[str, ...] = ()) -> Federation:
    """Forty training rows a site of four classes, and ten of every other kind."""
    width, made = 80, {}
    for i, name in enumerate(sites):
        rows = np.arange(i * width, (i + 1) * width, dtype=np.int64)
        made[name] = SiteRows(name, *np.split(rows, [40, 50, 60, 70]))
    n = width * len(sites)
    return Federation(
        classes=("a", "b", "c", "d"),
        images=np.zeros((n, 1, 1, 3), dtype=np.uint8),
        labels=np.arange(n, dtype=np.int64) % 4,
        lesions=tuple(f"{name}-{i // 2}" for name in sites for i in range(width)),
        names=tuple(f"{name}-{i}" for name in sites for i in range(width)),
        sites=made,
        partition_sha256="0" * 64,
        held_out=held_out,
    )


@pytest.mark.parametrize("share", SHARES)
def test_only_training_rows_lose_labels(share: float) -> None:
    before = federation(("east", "west"))
    after = keep_labels(before, share, 0)
    for name, rows in after.sites.items():
        own = before.sites[name]
        assert set(rows.train) < set(own.train)
        assert set(after.labels[np.setdiff1d(own.train, rows.train)].tolist()) == {-1}
        for kind in ("tune", "val", "test", "unlabelled"):
            assert rows.rows(kind).tolist() == own.rows(kind).tolist()
            assert after.labels[rows.rows(kind)].tolist() == before.labels[rows.rows(kind)].tolist()


def test_images_without_a_label_stay_where_they_are_wanted() -> None:
    before = federation(("east",))
    rows = keep_labels(before, 0.2, 0, keep_images=True).sites["east"]
    own = before.sites["east"]
    assert sorted([*rows.train, *rows.unlabelled]) == sorted([*own.train, *own.unlabelled])
    assert rows.train.tolist() == keep_labels(before, 0.2, 0).sites["east"].train.tolist()


def test_a_site_chooses_alone() -> None:
    alone, beside = keep_labels(federation(("east",)), 0.2, 0), keep_labels(federation(("east", "west")), 0.2, 0)
    assert alone.sites["east"].train.tolist() == beside.sites["east"].train.tolist()


def test_a_site_that_never_trains_keeps_its_rows() -> None:
    before = federation(("east", "west"), held_out=("west",))
    assert keep_labels(before, 0.1, 0).sites["west"] is before.sites["west"]


@pytest.mark.parametrize("share", [0.0, -0.1, 1.0001, float("nan")])
def test_a_share_out_of_range_is_refused(share: float) -> None:
    with pytest.raises(ValueError, match="share of labels"):
        keep_labels(federation(("east",)), share, 0)
