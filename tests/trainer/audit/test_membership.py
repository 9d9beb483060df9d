"""Membership inference from first principles: docs/security.md check 54."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgefl_trainer.audit.audited import open_audit
from edgefl_trainer.audit.line import AuditLine, NotAttacked
from edgefl_trainer.audit.member_lines import membership_lines
from edgefl_trainer.audit.membership import confidences, lira_scores, loss_scores, memorised, roc
from edgefl_trainer.engine.models import open_run

ROWS, CLASSES = 400, 4


def once(scores: np.ndarray, member: np.ndarray) -> tuple[float, float]:
    found = roc(scores, member, np.ones((1, len(scores))))
    return float(found.area[0]), float(found.tpr[0])


def halves(count: int = ROWS) -> np.ndarray:
    return np.arange(count) < count // 2


def test_a_model_that_memorises_is_attacked() -> None:
    """Labels that nothing explains can only be learned by heart: the loss then tells members from the others."""
    rng = np.random.default_rng(0)
    inputs, targets = rng.normal(size=(ROWS, 500)), rng.integers(0, CLASSES, ROWS)
    area, tpr = once(loss_scores(memorised(inputs, targets, halves(), CLASSES), targets), halves())
    assert area > 0.97 and tpr > 0.5


def test_an_independent_model_tells_nothing() -> None:
    """Its loss is drawn alike for both; 0.5 within three standard errors (Hanley and McNeil 1982)."""
    rng = np.random.default_rng(1)
    answers = rng.dirichlet(np.ones(CLASSES), 4000)
    area, tpr = once(loss_scores(answers, rng.integers(0, CLASSES, 4000)), halves(4000))
    assert abs(area - 0.5) < 3 * math.sqrt(1 / 12 * (1 / 2000 + 1 / 2000))
    assert tpr < 0.03


@given(st.lists(st.tuples(st.integers(0, 4), st.booleans()), min_size=2, max_size=30))
def test_the_area_is_the_share_of_pairs_in_the_right_order(rows: list[tuple[int, bool]]) -> None:
    """Mann and Whitney 1947, ties half; and the highest true rate at a threshold with at most 1 % false."""
    scores, member = np.array([float(s) for s, _ in rows]), np.array([m for _, m in rows])
    if member.all() or not member.any():
        return
    pairs = [(a > b) + (a == b) / 2 for a in scores[member] for b in scores[~member]]
    area, tpr = once(scores, member)
    assert area == pytest.approx(np.mean(pairs))
    allowed = [t for t in [*scores, math.inf] if (scores[~member] >= t).mean() <= 0.01]
    assert tpr == pytest.approx(max((scores[member] >= t).mean() for t in allowed))


def test_weights_are_repeated_rows() -> None:
    """A draw of the bootstrap is the rows repeated as often as it says."""
    rng = np.random.default_rng(2)
    scores, member, times = rng.normal(size=30), rng.random(30) < 0.5, rng.integers(0, 4, 30)
    found = roc(scores, member, times[None].astype(float))
    assert (found.area[0], found.tpr[0]) == pytest.approx(once(scores.repeat(times), member.repeat(times)))


def test_a_draw_without_members_has_no_figure() -> None:
    found = roc(np.arange(4.0), halves(4), np.array([[0.0, 0.0, 1.0, 1.0]]))
    assert math.isnan(found.area[0]) and math.isnan(found.tpr[0])


def test_lira_finds_members_that_the_loss_hides() -> None:
    """Carlini et al. 2022, section IV: hard rows hide membership in the loss; shadows take their hardness away."""
    rng = np.random.default_rng(3)
    hardness = rng.normal(0, 4, ROWS)
    shadows = hardness + rng.normal(0, 0.3, (5, ROWS))
    own = hardness + rng.normal(0, 0.3, ROWS) + np.where(halves(), 1.0, 0.0)
    assert once(own, halves())[0] < 0.65
    assert once(lira_scores(own, shadows), halves())[0] > 0.9


def test_scores_are_the_papers() -> None:
    """Yeom et al.: the loss, with its sign; Carlini et al. eq. 3: log p/(1 - p)."""
    answers, targets = np.array([[0.8, 0.2], [0.5, 0.5], [0.0, 1.0]]), np.array([0, 1, 0])
    assert loss_scores(answers, targets)[:2] == pytest.approx(np.log([0.8, 0.5]))
    assert confidences(answers, targets)[:2] == pytest.approx([math.log(4), 0.0])
    assert np.isfinite(loss_scores(answers, targets)).all() and np.isfinite(confidences(answers, targets)).all()


def test_a_model_that_cannot_answer_is_named(run_of: Callable[[str], Path], small: None) -> None:
    """It ends no audit: what was attacked before it stays, and the other sites are attacked."""
    run = open_run(run_of("fedevprompt"))
    audited = open_audit(run, (), 20, lambda line: None)
    models = {name: run.predictor(name) for name in run.sites}
    broken, *whole = models
    lame = {**models, broken: replace(models[broken], tensors={})}
    [left_out] = membership_lines(replace(audited, attacked=(broken,)), "model", lame, {})
    assert isinstance(left_out, NotAttacked) and "cannot answer" in left_out.why
    named, line = membership_lines(replace(audited, attacked=tuple(whole)), "model", {whole[0]: models[whole[0]]}, {})
    assert isinstance(named, NotAttacked) and isinstance(line, AuditLine) and line.sites == (whole[0],)
