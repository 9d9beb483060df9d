"""The page on what a federation gives: paired differences by hand, and what is missing is named and counts nowhere."""

from types import SimpleNamespace

import numpy as np
import pytest
from benchmarks.federation import federation_scores
from benchmarks.federation.federation_arms import ARMS, JOINING, Found, every, find, handed_on
from benchmarks.federation.federation_scores import average, difference
from benchmarks.federation.what_federation_gives import BEGIN, END, arm_table, asides, claim_table, claims, figures

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


def test_seeds_are_averaged_row_by_row_and_interval_by_interval():
    """Two seeds of one arm: the mean of their figures, and in each draw of lesions the mean of both."""
    seeds = [{"x": scored(right, TARGET, LESIONS)} for right in (GOOD, POOR)]
    alike = average([seeds[0], seeds[0]])
    assert alike == average(seeds[:1]) and average(seeds).value == pytest.approx(100 * (0.75 + 0.5) / 2)
    assert average(seeds).low == pytest.approx(difference(seeds, [{"x": scored([0] * 8, TARGET, LESIONS)}]).low)
    with pytest.raises(ValueError, match="the same rows of x"):
        average([seeds[0], {"x": scored(GOOD, TARGET, LESIONS[::-1])}])


def test_other_rows_or_centres_are_no_pair():
    one = {"x": scored(GOOD, TARGET, LESIONS)}
    with pytest.raises(ValueError, match="the same rows of x"):
        difference([one], [{"x": scored(GOOD, TARGET, LESIONS[::-1])}])
    with pytest.raises(ValueError, match="the same centres"):
        difference([one], [{**one, "y": one["x"]}])


def test_what_is_not_there_is_named_and_counts_nowhere(tmp_path):
    (tmp_path / "alone2000-s0").mkdir()  # begun, not finished
    found = find(tmp_path)
    whole = ["every way with up to 2,000 labels", "every way with 60 labels", "a centre that joins"]
    assert found.missing == whole and claims(found) == []
    assert "Not there yet:\n\n* " + "\n* ".join(whole) in figures(found) and "nan" not in figures(found)
    one = Found({}, {"few60": {0: [{"x": scored(GOOD, TARGET, LESIONS)}]}}, {}, {})
    few = [f"{arm.label} (60 labels)" for arm in ARMS if arm.labels == "60 labels"]
    lacking = ", seed 1 and 2"
    told = [name + (lacking if name.startswith("federation, statistics") else "") for name in few]
    assert one.missing == [whole[0], *told, whole[2]]


def test_joining_is_compared_with_the_best_way_of_going_alone():
    """Ways alone of 62.5, 50, 50 and 75 points: the difference is to 75; with a way missing there is no claim."""
    ways = {"alone-probe": [1, 1, 0, 1, 0, 1, 1, 0], "alone-home": POOR, "alone-whole": POOR, "alone-longer": GOOD}
    arms = {way: {0: [{"vidir_modern": scored(right, TARGET, LESIONS)}] * 3} for way, right in ways.items()}
    joined = {"federation-statistics": {0: [{"vidir_modern": scored(GOOD, TARGET, LESIONS)}]}}
    (claim,) = claims(Found({}, {}, {}, {**arms, **joined}))
    assert claim.gap.value == 0
    assert average(every(claim.other)).value == pytest.approx(75)
    del arms["alone-home"]
    assert claims(Found({}, {}, {}, {**arms, **joined})) == []


def test_a_federation_is_compared_with_the_best_arm_that_learns_alone():
    """Of 62.5 and 75 points alone, the fine-tuned one is the better: nothing is gained over it."""
    own = {
        "imagenet-60": {0: [{"x": scored([1, 1, 0, 1, 0, 1, 1, 0], TARGET, LESIONS)}]},
        "few60-alone": {0: [{"x": scored(GOOD, TARGET, LESIONS)}]},
        "few60": {0: [{"x": scored(GOOD, TARGET, LESIONS)}]},
    }
    (claim,) = claims(Found({}, own, {}, {}))
    assert claim.names == ("federation", "alone, ImageNet's network fine-tuned")
    assert claim.gap.value == 0


def test_two_arms_are_compared_over_the_seeds_that_both_have():
    """The federation lacks seed 1, in which alone is poor: no figure of the difference has it, and it is named."""
    good, poor = ([{"x": scored(right, TARGET, LESIONS)}] for right in (GOOD, POOR))
    own = {"few60-alone": {0: good, 1: poor, 2: good}, "few60": {0: good, 2: good}}
    found = Found({}, own, {}, {})
    (claim,) = claims(found)
    assert (claim.seeds, claim.gap.value, claim.each) == ([0, 2], 0, [0, 0])
    assert "| +0.0, +0.0 (seed 0 and 2) |" in claim_table(found)
    assert "| federation, statistics of home (seed 0 and 2) | 75.0 |" in arm_table(found, "60 labels")
    assert "| alone, ImageNet's network fine-tuned | 66.7 |" in arm_table(found, "60 labels")
    assert "federation, statistics of home (60 labels), seed 1" in found.missing
    assert not any("fine-tuned (60 labels)" in name for name in found.missing)
    assert claims(Found({}, {"few60-alone": {1: poor}, "few60": {0: good}}, {}, {})) == []


def test_the_best_arm_alone_is_chosen_over_seeds_that_every_such_arm_has():
    """The network alone has seed 0 alone, where it is the best: seed 1 counts for no arm. By all seeds of each the head
    on ImageNet's network, 62.5 with seed 0 and 100 with seed 1, would be."""
    good, fair, poor, best = ([{"x": scored(right, TARGET, LESIONS)}] for right in (
        GOOD, [1, 1, 0, 1, 0, 1, 1, 0], POOR, [1] * 8))  # fmt: skip
    own = {"imagenet-60": {0: fair, 1: best}, "few60-alone": {0: good}, "few60": {0: poor, 1: poor}}
    (claim,) = claims(Found({}, own, {}, {}))
    assert claim.names[1] == "alone, ImageNet's network fine-tuned" and claim.seeds == [0]
    assert claim.gap.value == pytest.approx(-25)


def test_an_aside_stands_below_the_claims_and_in_no_picture():
    """Alone from ImageNet's weights all rows are right, from random ones as many as GOOD has."""
    own = {
        "alone2000": {0: [{"x": scored([1] * 8, TARGET, LESIONS)}]},
        "nothing2000": {0: [{"x": scored(GOOD, TARGET, LESIONS)}]},
    }
    found = Found({}, own, {}, {})
    assert claims(found) == [] and [claim.gap.value for claim in asides(found)] == [pytest.approx(25)]
    assert "from ImageNet's weights minus from random ones | +25.0 [" in claim_table(found)


def test_the_centre_that_joins_stands_beside_its_network_alone_of_the_table_of_60_labels():
    """It has all rows right without a label, and alone as many as GOOD has: 25 points. Another centre counts for
    nothing, and a seed that one of the two lacks neither."""
    good, all_right = scored(GOOD, TARGET, LESIONS), scored([1] * 8, TARGET, LESIONS)
    alone = {seed: [{JOINING: good, "x": scored(POOR, TARGET, LESIONS)}] for seed in (0, 1)}
    joining = {"federation-statistics": {seed: [{JOINING: all_right}] for seed in (1, 2)}}
    (claim,) = asides(Found({}, {"few60-alone": alone}, {}, joining))
    assert (claim.seeds, claim.gap.value, claim.each) == ([1], pytest.approx(25), [pytest.approx(25)])
    assert asides(Found({}, {"few60-alone": {0: [{"x": good}]}}, {}, {"federation-statistics": {0: [{}]}})) == []


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("fedevprompt2000", "colours-2000"),
        ("together2000", "together2000s"),
        ("few60", "few60-alone"),
        ("few60-fit", "few60-alone"),
    ],
)
def test_an_aside_tells_the_first_arm_minus_the_second(one, other):
    """All rows right against GOOD's 75 points."""
    own = {
        one: {0: [{"x": scored([1] * 8, TARGET, LESIONS)}]},
        other: {0: [{"x": scored(GOOD, TARGET, LESIONS)}]},
    }
    assert [claim.gap.value for claim in asides(Found({}, own, {}, {}))] == [pytest.approx(25)]


def test_minutes_are_those_of_the_fastest_and_the_slowest_seed():
    """They tell how much other work there was. A regression on frozen features has no run."""
    good = [{"x": scored(GOOD, TARGET, LESIONS)}]
    runs = {seed: SimpleNamespace(summary={"seconds": 60 * took, "travels": []}) for seed, took in enumerate((9, 4, 7))}
    own = {"few60-alone": dict.fromkeys(runs, good), "imagenet-60": {0: good}}
    table = arm_table(Found({"few60-alone": runs}, own, {}, {}), "60 labels")
    ends = {row.split("|")[1].strip(): row.split("|")[-2].strip() for row in table.splitlines()[2:]}
    assert ends == {"alone, head on ImageNet's network (seed 0)": "–", "alone, ImageNet's network fine-tuned": "4 to 9"}


def test_a_network_of_one_place_counts_where_every_centre_has_fitted_it(tmp_path):
    """Seed 0 has both centres. Seed 1 has one: another way of learning is no fit of head and batch norm. Seed 2 has one
    twice, with other numbers of labels."""
    held = {"probabilities": np.eye(2)[[0, 1]], "target": np.array([0, 0]), "lesions": np.array(["a", "b"])}
    made = (
        "0 x home-2000",
        "0 y home-2000",
        "1 x home-2000",
        "1 y none-0",
        "2 x home-60",
        "2 x home-2000",
        "2 y home-60",
    )
    for seed, centre, way in map(str.split, made):
        folder = tmp_path / f"pooled2000-home-s{seed}" / centre
        folder.mkdir(parents=True, exist_ok=True)
        np.savez(folder / f"federation-{way}-{seed}.npz", **held)
    found = handed_on(tmp_path, ["x", "y"])
    assert list(found) == ["pooled2000-home"] and list(found["pooled2000-home"]) == [0]
    assert average(found["pooled2000-home"][0]).value == pytest.approx(50)


def test_a_run_lies_under_its_seed(tmp_path, monkeypatch):
    """A folder that is named for another seed than its run's would count a seed twice."""
    (tmp_path / "alone2000-s1").mkdir()
    (tmp_path / "alone2000-s1" / "summary.json").write_text("{}")
    run = SimpleNamespace(folder=tmp_path / "alone2000-s1", settings=SimpleNamespace(seed=0))
    monkeypatch.setattr(federation_scores, "open_run", lambda folder: run)
    with pytest.raises(ValueError, match="alone2000-s1 has the seed 0: its name says 1"):
        find(tmp_path)


def test_a_seed_of_the_centre_that_joins_counts_with_all_its_draws(tmp_path):
    """Three draws of 60 labels make a seed; with two of them it is missing."""
    truth = {"probabilities": np.eye(2), "target": np.array([0, 1]), "lesions": np.array(["a", "b"])}
    for seed, draws in ((0, 3), (1, 2)):
        folder = tmp_path / f"joining-s{seed}" / "vidir_modern"
        folder.mkdir(parents=True)
        for draw in range(draws):
            np.savez(folder / f"alone-home-60-{draw}.npz", **truth)
    found = find(tmp_path)
    assert {name: sorted(seeds) for name, seeds in found.joining.items()} == {"alone-home": [0]}
    assert len(found.joining["alone-home"][0]) == 3 and "joining, alone-home, seed 1 and 2" in found.missing


def test_the_page_has_the_marks():
    from pathlib import Path

    page = (Path(__file__).parents[3] / "docs/results/what_federation_gives.md").read_text(encoding="utf-8")
    assert page.count(BEGIN) == page.count(END) == 1
