"""Re-identification from first principles: docs/security.md check 53."""

from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgefl_trainer.audit.identification import (
    MEASURES,
    Game,
    Whitening,
    best_hits,
    fit_of,
    games,
    guessed_hits,
    knowing_classes,
    together,
)
from edgefl_trainer.audit.pictures import VIEWS, Queries, View, queries_of
from edgefl_trainer.data import Federation, SiteRows
from edgefl_trainer.engine.sites import examples_of
from edgefl_trainer.evaluate.intervals import share_bounds

QUERIES, RIVALS, WIDTH = 300, 199, 24


def drawn(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape)


def top_1(payloads: np.ndarray, own: np.ndarray, rivals: np.ndarray) -> float:
    found = games(payloads, own[:, None], rivals[:, None], Whitening.of(drawn(9, 500, WIDTH)))
    return float(best_hits(found)[0].mean())


def test_a_payload_that_is_the_picture_is_always_found() -> None:
    """Check 53's control: with nothing hidden every measure succeeds, also where the candidate is noisy."""
    pictures = drawn(0, QUERIES, WIDTH)
    noisy = pictures + 0.05 * drawn(1, QUERIES, WIDTH)
    assert top_1(pictures, noisy, drawn(2, RIVALS, WIDTH)) == 1.0
    whitening = Whitening.of(drawn(9, 500, WIDTH))
    for game in games(pictures, noisy[:, None], drawn(2, RIVALS, WIDTH)[:, None], whitening).values():
        assert game.hits().mean() > 0.99


def test_a_payload_that_does_not_depend_on_the_picture_is_found_by_chance() -> None:
    """1 in 200, within the exact interval of 2,000 payloads, although the best of four measures is taken."""
    count = 2000
    found = top_1(drawn(3, count, WIDTH), drawn(4, count, WIDTH), drawn(5, RIVALS, WIDTH))
    low, high = share_bounds(found * count, count)
    assert low <= 1 / 200 <= high


def test_a_constant_payload_is_found_by_chance() -> None:
    """All candidates fit alike, so a hit is shared out among them."""
    ones = np.ones((QUERIES, WIDTH))
    assert top_1(ones, ones, np.ones((RIVALS, WIDTH))) == pytest.approx(1 / 200)


def test_the_best_view_of_a_candidate_counts() -> None:
    """A candidate that is turned is found once its turned view is among those that are compared."""
    pictures = drawn(0, QUERIES, WIDTH)
    views = np.stack([drawn(6, QUERIES, WIDTH), pictures], axis=1)
    rivals = drawn(7, RIVALS, 2, WIDTH)
    whitening = Whitening.of(drawn(9, 500, WIDTH))
    assert best_hits(games(pictures, views, rivals, whitening))[0].mean() == 1.0
    assert best_hits(games(pictures, views[:, :1], rivals, whitening))[0].mean() < 0.05


def test_the_mean_of_many_pictures_hides_each() -> None:
    """Dwork et al. 2015: the trace of one picture in a mean of n fades with n."""
    members, rivals = drawn(0, 400, WIDTH), drawn(8, RIVALS, WIDTH)

    def traced(together_: int) -> float:
        means = members.reshape(-1, together_, WIDTH).mean(axis=1).repeat(together_, axis=0)
        return top_1(means, members, rivals)

    assert traced(1) == 1.0 > traced(4) > traced(100)
    assert traced(100) < 0.1


@pytest.mark.parametrize("measure", MEASURES)
def test_pairs_are_the_diagonal_of_all(measure: str) -> None:
    """Each measure, written out for one payload and one candidate."""
    payloads, views, usual = drawn(0, 5, 3), drawn(1, 5, 2, 3), drawn(2, 50, 3)
    whitening = Whitening.of(usual)
    whole = fit_of(measure, payloads, views, whitening)
    assert fit_of(measure, payloads, views, whitening, paired=True) == pytest.approx(np.diagonal(whole))
    left, right = payloads[0] - usual.mean(axis=0), views[3] - usual.mean(axis=0)
    if measure.startswith("whitened"):
        left, right = left @ whitening.matrix, right @ whitening.matrix
    if measure.endswith("correlation"):
        values = [left @ one / np.linalg.norm(left) / np.linalg.norm(one) for one in right]
    else:
        values = [-np.square(left - one).sum() for one in right]
    assert whole[0, 3] == pytest.approx(max(values))


def test_whitened_rows_are_white() -> None:
    rows = drawn(0, 4000, 4) @ drawn(1, 4, 4)
    assert np.cov(Whitening.of(rows).apply(rows).T) == pytest.approx(np.eye(4), abs=0.05)


@given(st.lists(st.integers(0, 3), min_size=1, max_size=8), st.integers(0, 3))
def test_ties_are_shared_out(rivals: list[int], own: int) -> None:
    """Top-1 of a guess among those that fit best."""
    found = Game(np.array([float(own)]), np.array([rivals], dtype=float)).hits()[0]
    best = max([own, *rivals])
    assert found == (1 / [own, *rivals].count(best) if own == best else 0)


@given(st.lists(st.integers(0, 2), min_size=1, max_size=20), st.integers(0, 2))
def test_the_class_alone_is_one_in_its_candidates(rivals: list[int], label: int) -> None:
    """Guessing is what a payload without information gives once other classes are ruled out."""
    labels, others = np.array([label]), np.array(rivals)
    blind = Game(np.zeros(1), np.zeros((1, len(rivals))))
    assert knowing_classes(blind, labels, others).hits() == pytest.approx(guessed_hits(labels, others))


def test_choosing_a_measure_does_not_help_the_figure() -> None:
    """Of measures that all guess, the best one would look better than chance; the other half judges it."""
    rng = np.random.default_rng(0)
    blind = {measure: Game(rng.random(4000), rng.random((4000, 9))) for measure in map(str, range(30))}
    best = max(game.hits().mean() for game in blind.values())
    assert abs(best_hits(blind)[0].mean() - 0.1) < 0.012 < best - 0.1 + 0.005


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("others", [9, 8])
def test_a_rival_shows_no_lesion_that_was_learned(view: View, others: int) -> None:
    """A source's own split may put photos of one lesion on both sides: naming one of them is no mistake."""
    lesions = [f"known {row // 2}" for row in range(20)]  # learned, two photos of each
    lesions += [f"known {row}" for row in range(10)] + [f"new {row}" for row in range(others)]  # reported
    reported = np.arange(20, len(lesions))
    none = np.zeros(0, dtype=np.int64)
    rows = SiteRows("a", train=np.arange(20), tune=none, val=none, test=reported, unlabelled=none)
    federation = Federation(
        classes=("known", "new"),
        images=np.zeros((len(lesions), 8, 8, 3), dtype=np.uint8),
        labels=np.array([int(name.startswith("new")) for name in lesions]),
        lesions=tuple(lesions),
        names=tuple(lesions),
        sites={"a": rows},
        partition_sha256="",
    )
    site = mock.Mock(train=examples_of(federation, rows.train), tune=examples_of(federation, none))
    site.name = "a"
    with mock.patch.multiple("edgefl_trainer.audit.pictures", CANDIDATES=10, LEAST_QUERIES=5):
        found = queries_of(federation, site, site.train, view, 20, 0)
    if others == 9:
        assert isinstance(found, Queries) and found.rival_labels.tolist() == [1] * 9
    else:
        assert isinstance(found, str) and found.startswith("a has 8 lesions that it did not learn from")


def test_sites_are_judged_together() -> None:
    one = {"distance": Game(np.array([1.0]), np.array([[0.0]]))}
    two = {"distance": Game(np.array([0.0, 0.0]), np.array([[1.0], [1.0]]))}
    assert together([one, two])["distance"].hits().tolist() == [1.0, 0.0, 0.0]
