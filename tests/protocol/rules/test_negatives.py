"""Negatives of momentum contrast: FedCLF (arXiv 2208.11278) section III, eq. 2 to 5; MoCo (arXiv 1911.05722)."""

from collections import deque

import numpy as np
import pytest

from edgefl_protocol.rules.negatives import (
    collapse_warning,
    draw_others,
    entering,
    first_negatives,
    keeps_local,
    mean_similarity,
    most_negatives,
    shares,
)


def test_what_the_words_say() -> None:
    """FedCLF section III: FE keeps local negatives beside the others', FE+Neg does not; else nothing travels."""
    assert [shares(word) for word in ("remote", "both", "local")] == [True, True, False]
    assert [keeps_local(word) for word in ("remote", "both", "local")] == [False, True, False]


@pytest.mark.parametrize("local", [True, False])
def test_the_queue_is_the_papers_over_five_steps(local: bool) -> None:
    """Against the paper's sentences: FE begins with Q_l and takes q_l,B and q_r,B (eq. 4); FE+Neg begins with Q_r and
    takes q_r,B alone (eq. 5), so no local feature is ever among its negatives."""
    queue, bank, others = 6, [1, 2, 3, 4, 5, 6], [101, 102, 103, 104]
    ours = deque(
        first_negatives(bank, others, keeps_local=local),
        maxlen=most_negatives(queue, len(others), keeps_local=local),
    )
    theirs = list(bank) if local else list(others)
    for step in range(5):
        keys, drawn = [10 + step, 20 + step], [others[step % 4], others[(step + 1) % 4]]
        for rows in entering(keys, drawn, keeps_local=local):
            ours.extend(rows)
        theirs = (theirs + (keys + drawn if local else drawn))[-len(theirs) :]
        assert list(ours) == theirs
    assert local or min(ours) > 100


def test_draws_are_uniform_and_repeat_only_where_there_are_too_few() -> None:
    """FedCLF eq. 3: j ~ U(|Q_r|, B). 1,000 draws of 4 of 10: each 400 times, five standard deviations allowed."""
    rng, counts = np.random.default_rng(0), np.zeros(10)
    for _ in range(1000):
        drawn = draw_others(rng, 10, 4)
        assert len(set(drawn.tolist())) == 4
        counts += np.bincount(drawn, minlength=10)
    assert counts.sum() == 4000 and np.abs(counts - 400).max() < 5 * np.sqrt(1000 * 0.4 * 0.6)
    assert sorted(draw_others(rng, 5, 5).tolist()) == [0, 1, 2, 3, 4]
    assert len(draw_others(rng, 5, 9)) == 9


def test_similarity_is_the_mean_over_all_pairs() -> None:
    """Against every pair of different rows."""
    rows = np.random.default_rng(3).normal(size=(7, 128))
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    pairs = [rows[i] @ rows[j] for i in range(7) for j in range(7) if i != j]
    assert mean_similarity(rows.sum(axis=0), 7) == pytest.approx(np.mean(pairs), abs=1e-12)
    assert mean_similarity(rows.astype(np.float32).sum(axis=0), 7) == pytest.approx(np.mean(pairs), abs=1e-6)
    assert mean_similarity(5 * rows[0], 5) == pytest.approx(1)


@pytest.mark.parametrize(
    ("similarity", "round_", "rounds", "told"),
    [(0.96, 2, 4, True), (0.96, 4, 4, True), (0.96, 1, 4, False), (0.96, 3, 4, False), (0.95, 4, 4, False),
     (0.96, 1, 1, True), (0.96, 2, 5, True)],
)  # fmt: skip
def test_a_collapse_is_told_half_way_and_at_the_end(similarity: float, round_: int, rounds: int, told: bool) -> None:
    """docs/methods.md 2, collapse."""
    warning = collapse_warning(similarity, round_, rounds)
    assert (warning is not None) == told
    assert warning is None or f"nearly the same in round {round_} (mean similarity 0.96)" in warning
