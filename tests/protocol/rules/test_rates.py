"""Rates over a run: SGDR (arXiv 1608.03983) eq. 5 without restarts; FedEvPrompt's annealing, docs/methods.md 1.3."""

from math import cos, pi

import pytest

from edgefl_protocol.rules.rates import cosine_rate, epochs_done, falling_rate, kl_weight, rate_setting


def test_one_cosine_spans_a_run() -> None:
    """From the peak to zero over R·E epochs of three steps each, by the formula."""
    rounds, epochs, steps = 3, 2, 3
    moments = [(r, e, s) for r in (1, 2, 3) for e in range(epochs) for s in range(steps)]
    for behind, (round_, epoch, step) in enumerate(moments):
        done = epochs_done(round_, epochs, epoch, step, steps)
        assert done == pytest.approx(behind / steps)
        share = (1 + cos(pi * behind / len(moments))) / 2
        assert cosine_rate(done, rounds * epochs) == pytest.approx(share)
        assert falling_rate(0.25, done, rounds, epochs) == pytest.approx(0.25 * share)
    assert cosine_rate(6, 6) == cosine_rate(7, 6) == pytest.approx(0)


@pytest.mark.parametrize(("done", "share"), [(0, 0), (5, 0.5), (10, 1), (55, 0.5), (100, 0)])
def test_the_warm_up_rises_to_the_peak(done: float, share: float) -> None:
    """Ten of a hundred steps."""
    assert cosine_rate(done, 100, 10) == pytest.approx(share, abs=1e-12)


def test_the_kl_term_comes_in_over_ten_epochs() -> None:
    """docs/methods.md 1.3: lambda_t = min(1, t / 10); by hand for rounds of two epochs, on both clocks."""
    run = [kl_weight(epoch, 2 * (round_ - 1), 10, "run") for round_ in (1, 2, 6, 9) for epoch in (0, 1)]
    assert run == [0, 0.1, 0.2, 0.3, 1, 1, 1, 1]
    assert [kl_weight(epoch, 2 * (round_ - 1), 10, "round") for round_ in (1, 9) for epoch in (0, 1)] == [0, 0.1] * 2


def test_each_tensor_has_the_papers_rate() -> None:
    """FedEvPrompt (arXiv 2411.10071) section 3: b-prompts learn at mu1, t-prompts at mu2, the head beside them."""
    names = ("prompts.b", "prompts.g", "prompts.t", "head.weight", "head.bias")
    assert [rate_setting(name) for name in names] == ["lr_b", "lr_b", "lr_t", "lr_head", "lr_head"]
