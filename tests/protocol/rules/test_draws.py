"""Orders and turns of an epoch (docs/methods.md 1.6): one rule for servers and devices."""

import hashlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgefl_protocol.rules.draws import (
    augment_rng,
    bank_rng,
    dihedral,
    epoch_order,
    generator,
    order_rng,
    remote_rng,
    symmetries,
    turned_alike,
)


def test_a_generator_is_pcg64_of_the_hash():
    """docs/reference/device-learning.md: of seed, name, round and epoch alone; here written out by hand."""
    digest = hashlib.sha256(b"11\x1fnorth\x1forder\x1f3\x1f1").digest()
    plain = np.random.Generator(np.random.PCG64(np.random.SeedSequence(list(digest))))
    assert generator(11, "north", "order", 3, 1).random(5).tolist() == plain.random(5).tolist()
    others = [(12, "north", "order", 3, 1), (11, "nort", "order", 3, 1), (11, "north", "augment", 3, 1)]
    others += [(11, "north", "order", 3, 2), (11, "north", "order", 31), (11, "north", "order", 3)]
    assert len({generator(*purpose).random() for purpose in [*others, (11, "north", "order", 3, 1)]}) == 7


def test_every_purpose_has_its_name():
    """The purposes that the module lists; the bank is drawn once, so no round belongs to it."""
    first = {
        "order\x1f3\x1f1": order_rng(11, "north", 3, 1), "augment\x1f3\x1f1": augment_rng(11, "north", 3, 1),
        "bank": bank_rng(11, "north"), "remote\x1f3": remote_rng(11, "north", 3),
    }  # fmt: skip
    for purpose, found in first.items():
        digest = hashlib.sha256(f"11\x1fnorth\x1f{purpose}".encode()).digest()
        assert found.random() == np.random.Generator(np.random.PCG64(list(digest))).random()


@settings(max_examples=40)
@given(st.integers(0, 2**31 - 1), st.integers(1, 50))
def test_an_epoch_without_balance_visits_every_row_once(seed, count):
    order = epoch_order(generator(seed, "x", "order", 1, 0), np.arange(count) % 2, "none")
    assert sorted(order.tolist()) == list(range(count))


def test_balanced_draws_are_equal_in_the_mean():
    """`--balance class`: of 90, 9 and 1 rows every class comes a third of the time, every row of a class alike."""
    labels = np.repeat([0, 1, 3], [90, 9, 1])
    drawn = np.concatenate([epoch_order(generator(0, "x", "order", 1, e), labels, "class") for e in range(200)])
    counts = np.bincount(drawn, minlength=100)
    third, allowed = 20_000 / 3, 5 * np.sqrt(20_000 * 2 / 9)
    assert np.abs(np.bincount(labels[drawn])[[0, 1, 3]] - third).max() < allowed
    assert np.abs(counts[90:99] - third / 9).max() < 5 * np.sqrt(third / 9)


def by_hand(image: np.ndarray, symmetry: int) -> np.ndarray:
    """Pixel by pixel: quarter turns counter-clockwise, then left and right swapped from 4 on."""
    side = len(image)
    for _ in range(symmetry % 4):
        image = np.array([[image[j, side - 1 - i] for j in range(side)] for i in range(side)])
    return np.array([row[::-1] for row in image]) if symmetry >= 4 else image


def test_the_eight_symmetries_are_those_of_the_square():
    """docs/methods.md 1.6: a lesion has no upright position; each picture of a batch is turned by its own draw."""
    images = np.random.default_rng(1).integers(0, 256, (24, 5, 5, 3), np.uint8)
    drawn = np.arange(24) % 8
    views = dihedral(images, drawn)
    assert len({by_hand(images[0], symmetry).tobytes() for symmetry in range(8)}) == 8
    for image, symmetry, view in zip(images, drawn, views, strict=True):
        assert np.array_equal(view, by_hand(image, symmetry))
    groups = list(turned_alike(drawn))
    assert sorted(np.concatenate([positions for positions, _, _ in groups]).tolist()) == list(range(24))


def test_symmetries_are_drawn_equally():
    counts = np.bincount(symmetries(np.random.default_rng(2), 8000), minlength=8)
    assert len(counts) == 8 and counts.min() > 1000 - 5 * np.sqrt(1000)


@pytest.mark.parametrize("count", [0, 1])
def test_no_picture_and_one_picture(count):
    assert dihedral(np.zeros((count, 2, 2, 3), np.uint8), symmetries(np.random.default_rng(0), count)).shape[0] == count
