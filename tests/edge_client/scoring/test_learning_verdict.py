"""The rule of the gate, over drawn answers. Source: docs/decisions/0042, docs/reference/device-learning.md."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from numpy.typing import NDArray

from edgefl_client.learning.learning_gate import class_weighted_accuracy
from edgefl_client.scoring.learning_verdict import Answers, LearningVerdict
from edgefl_client.scoring.learning_verdict_words import verdict_line, verdict_table

GOOD = Answers(balanced_accuracy=0.7, referred=60, balanced_accuracy_not_referred=0.87, wrong_not_referred=4, missed=1)
EQUAL = LearningVerdict(bundle=GOOD, personal=GOOD, held=90, least_of_a_class=45, class_rule=True)


@dataclass(frozen=True)
class Drawn:
    """What both sides answered, picture by picture."""

    labels: NDArray[np.int64]  # (n,)
    right: NDArray[np.bool_]  # (2, n): bundle, personal
    told: NDArray[np.bool_]  # (2, n): not referred

    @property
    def suspicious(self) -> NDArray[np.bool_]:
        return self.labels > 0  # class 0 is known to be benign, the others are not

    @property
    def verdict(self) -> LearningVerdict:
        bundle, personal = (self._answers(*both) for both in zip(self.right, self.told, strict=True))
        return LearningVerdict(
            bundle=bundle, personal=personal, held=len(self.labels),
            least_of_a_class=int(np.bincount(self.labels).min()), class_rule=True,
        )  # fmt: skip

    def _answers(self, right: NDArray[np.bool_], told: NDArray[np.bool_]) -> Answers:
        recalls = [right[self.labels == label].mean() for label in np.unique(self.labels)]
        return Answers(
            balanced_accuracy=float(np.mean(recalls)),
            referred=int((~told).sum()),
            balanced_accuracy_not_referred=class_weighted_accuracy(right, told, self.labels),
            wrong_not_referred=int((told & ~right).sum()),
            missed=int((told & ~right & self.suspicious).sum()),
        )


@st.composite
def answers(draw: st.DrawFn) -> Drawn:
    """Two to four classes of 20 to 60 pictures, and each side's chances of being right and of referring."""
    labels = np.repeat(np.arange(4), draw(st.lists(st.integers(20, 60), min_size=2, max_size=4).map(_padded)))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    shares = [draw(st.tuples(st.floats(0, 1), st.floats(0, 1))) for _ in range(2)]
    right, told = (np.array([rng.random(len(labels)) < share[at] for share in shares]) for at in range(2))
    if draw(st.booleans()):  # near each other, as a round leaves them
        keep = rng.random(len(labels)) < draw(st.floats(0.5, 1))
        right[1], told[1] = (np.where(keep, both[0], both[1]) for both in (right, told))
    return Drawn(labels, right, told)


def _padded(counts: list[int]) -> list[int]:
    return counts + [0] * (4 - len(counts))


def with_personal(drawn: Drawn, right: NDArray[np.bool_], told: NDArray[np.bool_]) -> Drawn:
    return Drawn(drawn.labels, np.array([drawn.right[0], right]), np.array([drawn.told[0], told]))


@given(answers())
def test_who_refers_everything_passes_only_where_the_bundle_does(drawn: Drawn) -> None:
    """However right the answers behind the referrals are."""
    none = np.zeros(len(drawn.labels), np.bool_)
    found = with_personal(drawn, np.ones_like(none), none).verdict
    assert found.passed == (not drawn.told[0].any())


@given(answers())
def test_values_equal_to_the_bundles_pass(drawn: Drawn) -> None:
    """No figure is so low that the same figure would be refused."""
    assert with_personal(drawn, drawn.right[0], drawn.told[0]).verdict.passed


@given(answers(), st.data())
def test_more_wrong_never_turns_a_refusal_into_a_pass(drawn: Drawn, data: st.DataObject) -> None:
    """Referred or not: one right answer less, of any class, mends no reason."""
    rights = np.flatnonzero(drawn.right[1])
    assume(len(rights))
    worse = drawn.right[1].copy()
    worse[data.draw(st.lists(st.sampled_from(rights.tolist()), min_size=1))] = False
    before, after = drawn.verdict, with_personal(drawn, worse, drawn.told[1]).verdict
    assert set(before.refused_for) <= set(after.refused_for)


@given(answers(), st.data())
def test_more_referred_never_mends_the_referrals(drawn: Drawn, data: st.DataObject) -> None:
    """Referring more pictures only takes the values further from a pass for referrals."""
    told = drawn.told[1].copy()
    told[data.draw(st.lists(st.integers(0, len(told) - 1)))] = False
    before, after = drawn.verdict, with_personal(drawn, drawn.right[1], told).verdict
    assert ("referrals" in before.refused_for) <= ("referrals" in after.refused_for)


@given(answers(), st.data())
def test_one_more_missed_never_turns_a_refusal_into_a_pass(drawn: Drawn, data: st.DataObject) -> None:
    """A suspicious picture answered rightly without a referral, now called benign; and a referred one let through."""
    told = np.flatnonzero(drawn.suspicious & drawn.told[1] & drawn.right[1])
    if len(told):
        wrong = drawn.right[1].copy()
        wrong[data.draw(st.sampled_from(told.tolist()))] = False
        after = with_personal(drawn, wrong, drawn.told[1]).verdict
        assert set(drawn.verdict.refused_for) <= set(after.refused_for)
    referred = np.flatnonzero(drawn.suspicious & ~drawn.told[1])
    if len(referred):
        wrong, let_through = drawn.right[1].copy(), drawn.told[1].copy()
        at = data.draw(st.sampled_from(referred.tolist()))
        wrong[at], let_through[at] = False, True
        after = with_personal(drawn, wrong, let_through).verdict
        assert ("missed" in drawn.verdict.refused_for) <= ("missed" in after.refused_for)


@given(answers())
def test_who_misses_more_than_the_bundle_never_passes(drawn: Drawn) -> None:
    """No figure makes up for one suspicious picture more that is wrong without a referral."""
    bundle, personal = (
        int((told & ~right & drawn.suspicious).sum()) for told, right in zip(drawn.told, drawn.right, strict=True)
    )
    assert ("missed" in drawn.verdict.refused_for) == (personal > bundle)
    assert drawn.verdict.passed <= (personal <= bundle)


@pytest.mark.parametrize(
    ("personal", "held", "least", "refused_for"),
    [
        (GOOD, 90, 45, ()),
        (GOOD, 90, 19, ("few_pictures",)),
        (replace(GOOD, balanced_accuracy=0.699), 90, 45, ("balanced_accuracy",)),
        (replace(GOOD, referred=64), 90, 45, ()),  # 5 % of 90 are 4
        (replace(GOOD, referred=65), 90, 45, ("referrals",)),
        (replace(GOOD, balanced_accuracy_not_referred=0.82), 90, 45, ()),
        (replace(GOOD, balanced_accuracy_not_referred=0.819), 90, 45, ("not_referred",)),
        (
            replace(GOOD, balanced_accuracy_not_referred=0.1),
            79,
            39,
            (),
        ),  # 19 are not referred: their accuracy says nothing …
        (replace(GOOD, referred=61), 79, 39, ("referrals",)),  # … and not one picture more may be referred
        (replace(GOOD, wrong_not_referred=5), 79, 39, ("not_referred",)),  # … or be wrong
        (replace(GOOD, wrong_not_referred=5), 80, 40, ()),
        (replace(GOOD, missed=2), 90, 45, ("missed",)),  # without a tolerance, however many pictures judge
        (replace(GOOD, missed=0), 90, 45, ()),
    ],
)
def test_each_condition_at_its_bound(personal: Answers, held: int, least: int, refused_for: tuple[str, ...]) -> None:
    """The conditions with their figures, as decision 0042 states them."""
    verdict = replace(EQUAL, personal=personal, held=held, least_of_a_class=least)
    assert (verdict.refused_for, verdict.passed) == (refused_for, not refused_for)


@pytest.mark.parametrize(
    ("personal", "worse_in"),
    [
        (GOOD, ()),
        (replace(GOOD, balanced_accuracy=0.699), ("balanced_accuracy",)),
        (replace(GOOD, referred=65), ("referrals",)),
        (replace(GOOD, balanced_accuracy_not_referred=0.819), ("not_referred",)),
        (replace(GOOD, missed=2), ("missed",)),
    ],
)
def test_the_values_in_use_are_held_to_the_same_bounds(personal: Answers, worse_in: tuple[str, ...]) -> None:
    """device-learning.md, `before`: beside a bundle that is much worse, values in use keep their place."""
    poor = Answers(
        balanced_accuracy=0.5, referred=62, balanced_accuracy_not_referred=0.5, wrong_not_referred=9, missed=5
    )
    verdict = replace(EQUAL, bundle=poor, personal=personal, before=GOOD)
    assert verdict.beside_before is not None and verdict.beside_before.worse_in == worse_in
    assert verdict.refused_for == (("before",) if worse_in else ()) and verdict.no_worse_than_bundle
    lines = verdict_table(verdict.to_json()).splitlines()
    assert lines[0].split()[-6:] == ["learned", "here", "in", "use", "before", "bundle"]
    assert lines[2].split()[1:] == [
        *(str(personal.referred), f"({100 * personal.referred / 90:.0f}", "%)"), "60", "(67", "%)", "62", "(69", "%)",
    ]  # fmt: skip
    assert [("those in use" in line) for line in lines[7:]] == [True] * len(worse_in)


@given(answers(), answers())
def test_a_third_set_of_values_only_ever_refuses(drawn: Drawn, other: Drawn) -> None:
    """Values in use add a reason to the others and take none away; the new ones in their own place pass as before."""
    verdict = drawn.verdict
    found = replace(verdict, before=other.verdict.bundle)
    assert tuple(name for name in found.refused_for if name != "before") == verdict.refused_for
    assert replace(verdict, before=verdict.personal).refused_for == verdict.refused_for


def test_the_table_tells_chance_and_who_is_no_better() -> None:
    """device-learning.md: 0.500 of two classes is what a guess gets, and stood there as a success."""
    every = replace(GOOD, balanced_accuracy=0.5)
    found = replace(EQUAL, bundle=every, personal=every, classes=2)
    said = verdict_table(found.to_json())
    assert said.splitlines()[1].split() == ["balanced", "accuracy", "(chance:", "0.500)", "0.500", "0.500"]
    assert said.endswith("A guess has a balanced accuracy of 0.500; the new values are no better.")
    assert "(chance: 0.500) 0.500 (0.500)" in verdict_line(found.to_json())
    assert "A guess" not in verdict_table(replace(found, personal=GOOD).to_json())
    assert "chance" not in verdict_table(replace(found, classes=None).to_json())  # values from before it was kept


def test_values_that_no_suspicious_picture_judged_are_refused_and_the_text_says_why() -> None:
    """Decision 0042: not one suspicious picture more is missed; where none is held back, nothing shows that."""
    verdict = replace(EQUAL, suspicious_judged=False)
    assert verdict.refused_for == ("no_suspicious",) and not verdict.passed
    assert (
        verdict_table(verdict.to_json()).splitlines()[-1].startswith("No picture held back is of a class that is not")
    )


def test_safe_only_by_referring_nearly_all_is_refused_and_the_text_says_why() -> None:
    """88 of 90 pictures referred and none wrong without a referral: once in use, now refused, with the numbers."""
    timid = replace(
        GOOD, balanced_accuracy=0.72, referred=88, balanced_accuracy_not_referred=1.0, wrong_not_referred=0, missed=0
    )
    verdict = replace(EQUAL, personal=timid)
    assert verdict.refused_for == ("referrals",)
    lines = verdict_table(verdict.to_json()).splitlines()
    assert [line.split() for line in lines[2:5]] == [
        ["referred", "88", "(98", "%)", "60", "(67", "%)"],
        ["not", "referred", "2", "30"],
        ["balanced", "accuracy", "of", "those", "too", "few:", "2", "0.870"],
    ]
    assert "The new values refer 28 pictures more than the bundle's; allowed: 0." in lines
    assert "fewer than 20 pictures are not referred" in lines[-1]
    assert "referred 88 (60), balanced accuracy of those not referred too few: 2 (0.870 on 30)" in verdict_line(
        verdict.to_json()
    )


def test_seven_more_missed_are_told_with_both_numbers() -> None:
    """8 suspicious pictures without a referral where the bundle left 1, at better figures otherwise: once in use."""
    careless = replace(GOOD, balanced_accuracy=0.75, referred=50, wrong_not_referred=8, missed=8)
    found = replace(EQUAL, personal=careless).to_json()
    assert (found["passed"], found["refused_for"]) == (False, ["missed"])
    assert (found["bundle_missed"], found["personal_missed"]) == (1, 8)
    lines = verdict_table(found).splitlines()
    assert lines[6].split()[-2:] == ["8", "1"]
    assert lines[-1] == "The new values miss 8 pictures of suspicious classes, the bundle's 1; no more are allowed."
    assert verdict_line(found).endswith("of these of a suspicious class 8 (1)")


def test_a_missed_melanoma_weighs_as_its_share_of_the_melanomas() -> None:
    """15 of 20 moles told rightly, 1 of 20 melanomas told wrongly: 0.75 / (0.75 + 0.05), with 8 of them 0.75 / 1.15."""
    labels = np.repeat([0, 1], 20)
    told, right = np.zeros(40, np.bool_), np.repeat([True, False], 20)
    told[:15] = told[20] = True
    assert class_weighted_accuracy(right, told, labels) == pytest.approx(0.75 / 0.80)
    told[20:28] = True
    assert class_weighted_accuracy(right, told, labels) == pytest.approx(0.75 / 1.15)
    assert class_weighted_accuracy(right, np.zeros(40, np.bool_), labels) is None


@given(answers())
def test_where_nothing_is_referred_it_is_balanced_accuracy(drawn: Drawn) -> None:
    """The mean recall over classes (scikit-learn's definition: accuracy with class-balanced weights)."""
    everything = np.ones(len(drawn.labels), np.bool_)
    recalls = [drawn.right[0][drawn.labels == label].mean() for label in np.unique(drawn.labels)]
    assert class_weighted_accuracy(drawn.right[0], everything, drawn.labels) == pytest.approx(np.mean(recalls))


@pytest.mark.parametrize(("accuracy", "passed"), [(0.7, True), (0.69, False)])
def test_where_all_is_referred_the_table_says_what_decided(accuracy, passed):
    """device-learning.md: rows of nothing decided nothing, and the new values came into use without a word."""
    every = replace(GOOD, referred=90, balanced_accuracy_not_referred=None, wrong_not_referred=0, missed=0)
    found = replace(EQUAL, bundle=every, personal=replace(every, balanced_accuracy=accuracy))
    said = verdict_table(found.to_json())
    assert found.passed is passed
    assert "Both refer every picture held back, so there is no answer without a referral to judge." in said
    assert "about referrals, answers without one and missed pictures compared nothing." in said
    assert ("are used because their balanced accuracy of all pictures" in said) is passed
    assert "Where fewer than" not in said
    again = verdict_table(replace(found, before=every).to_json())
    assert "All refer every picture held back" in again and ("nor below that of the values in use" in again) is passed
