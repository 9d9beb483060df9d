"""The page on what a federation gives: paired differences by hand, and what is missing is named and counts nowhere."""

import numpy as np
import pytest
from federation_arms import ARMS, Found, find
from federation_scores import difference, mean_over_centres
from what_federation_gives import BEGIN, END, claims, figures

from edgefl_trainer.evaluate.intervals import RESAMPLES, Scored, lesion_weights


def scored(right: list[int], target: list[int], lesions: list[str]) -> Scored:
    """Rows of two classes, each answered rightly or not."""
    predicted = np.array([k if hit else 1 - k for k, hit in zip(target, right, strict=True)])
    return Scored(np.eye(2)[predicted], np.array(target), predicted, None, tuple(lesions))


TARGET, LESIONS = [0, 0, 0, 0, 1, 1, 1, 1], ["a", "a", "b", "c", "d", "e", "e", "f"]
GOOD, POOR = [1, 1, 1, 0, 1, 1, 1, 0], [1, 1, 0, 0, 0, 1, 1, 0]


def balanced(right: np.ndarray, target: np.ndarray) -> float:
    """Balanced accuracy as the mean of two recalls; NaN where a class is absent."""
    return float(np.mean([right[target == k].mean() if (target == k).any() else np.nan for k in (0, 1)]))


def test_a_difference_is_taken_draw_by_draw_over_the_same_lesions():
    """By hand: rows repeated as the draw's lesions say, both figures, their difference; two centres."""
    one = {"x": scored(GOOD, TARGET, LESIONS), "y": scored(POOR, TARGET, LESIONS)}
    other = {"x": scored(POOR, TARGET, LESIONS), "y": scored(POOR, TARGET, LESIONS)}
    gap = difference([one], [other])
    assert gap.value == pytest.approx(100 * (0.75 - 0.5) / 2)
    weights = np.concatenate(list(lesion_weights(LESIONS, RESAMPLES))).astype(int)
    by_hand = []
    for row in weights:
        again = np.repeat(np.arange(8), row)
        target = np.array(TARGET)[again]
        if len(set(target.tolist())) == 2:  # else a recall is not defined, and the code's mean is over one class
            by_hand.append((balanced(np.array(GOOD)[again], target) - balanced(np.array(POOR)[again], target)) / 2)
    low, high = np.percentile(by_hand, [2.5, 97.5])
    assert (gap.low, gap.high) == (pytest.approx(100 * low, abs=1.0), pytest.approx(100 * high, abs=1.0))
    assert difference([other], [other]).value == difference([other], [other]).high == 0


def test_draws_of_labels_are_averaged_before_they_are_compared():
    one = [{"x": scored(right, TARGET, LESIONS)} for right in (GOOD, POOR)]
    gap = difference(one, [{"x": scored(POOR, TARGET, LESIONS)}])
    assert gap.value == pytest.approx(100 * (0.75 - 0.5) / 2)


def test_other_rows_or_centres_are_no_pair():
    one = {"x": scored(GOOD, TARGET, LESIONS)}
    with pytest.raises(ValueError, match="different rows of x"):
        difference([one], [{"x": scored(GOOD, TARGET, LESIONS[::-1])}])
    with pytest.raises(ValueError, match="different centres"):
        difference([one], [{**one, "y": one["x"]}])


def test_what_is_not_there_is_named_and_counts_nowhere(tmp_path):
    (tmp_path / "alone2000").mkdir()  # begun, not finished
    found = find(tmp_path)
    assert all(f"{arm.label} ({arm.labels})" in found.missing for arm in ARMS) and claims(found) == []
    assert "Not there yet: alone, colours only (up to 2,000 labels), " in figures(found) and "nan" not in figures(found)


def test_joining_is_compared_with_the_best_way_of_going_alone():
    """Three ways alone, of 62.5, 50 and 75 points: the difference is to 75; with a way missing there is no claim."""
    arms = {
        way: [{"vidir_modern": scored(right, TARGET, LESIONS)}] * 3
        for way, right in {"alone-probe": [1, 1, 0, 1, 0, 1, 1, 0], "alone-home": POOR, "alone-whole": GOOD}.items()
    }
    joined = {"federation-statistics": [{"vidir_modern": scored(GOOD, TARGET, LESIONS)}]}
    (claim,) = claims(Found({}, {}, {}, {**arms, **joined}))
    assert difference(claim.one, claim.other).value == 0
    assert mean_over_centres(claim.other[0]).value == pytest.approx(75)
    del arms["alone-home"]
    assert claims(Found({}, {}, {}, {**arms, **joined})) == []


def test_a_federation_is_compared_with_the_best_arm_that_learns_alone():
    """Of 62.5 and 75 points alone, the fine-tuned one is the better: nothing is gained over it."""
    own = {
        "imagenet-60": [{"x": scored([1, 1, 0, 1, 0, 1, 1, 0], TARGET, LESIONS)}],
        "few60-alone": [{"x": scored(GOOD, TARGET, LESIONS)}],
        "few60": [{"x": scored(GOOD, TARGET, LESIONS)}],
    }
    (claim,) = claims(Found({}, own, {}, {}))
    assert claim.names == ("federation", "alone, ImageNet's network fine-tuned")
    assert difference(claim.one, claim.other).value == 0


def test_the_page_has_the_marks():
    from pathlib import Path

    page = (Path(__file__).parents[3] / "docs/results/what_federation_gives.md").read_text(encoding="utf-8")
    assert page.count(BEGIN) == page.count(END) == 1
