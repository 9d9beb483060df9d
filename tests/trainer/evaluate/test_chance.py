"""What an answer that never changes gets, by the classes that a site is judged on."""

import pytest

from edgefl_trainer.evaluate.chance import Chance, chance_of
from edgefl_trainer.evaluate.one_class import one_class_of

KINDS = {
    "a": {"classes_learned": 4, "classes_tested": 2},
    "b": {"classes_learned": 2, "classes_tested": 4},
    "c": {"classes_learned": 4, "classes_tested": 1},
    "d": {"classes_learned": 4, "classes_tested": 4, "held_out": True},
    "e": {"classes_learned": 4, "classes_tested": 4} | dict.fromkeys(("balanced_accuracy", "tune_macro_recall")),
}


@pytest.mark.parametrize(
    ("metric", "a", "b"), [("balanced_accuracy", 1 / 2, 1 / 4), ("tune_macro_recall", 1 / 4, 1 / 2)]
)
def test_a_site_of_two_classes_is_at_chance_at_one_half(metric, a, b):
    """A constant answer is right about one of the classes judged on; c and e have no chance, d is in no mean."""
    found = chance_of([{"classes": list("xyzw"), "sites": KINDS}], metric)
    assert found == Chance({"a": a, "b": b, "d": 1 / 4}, pytest.approx(3 / 8))


def test_on_tune_rows_too_chance_counts_the_classes_judged_on():
    """A site that learned four classes and is judged on tune rows of two is right half the time by chance."""
    site = {"classes_learned": 4, "classes_tested": 4}
    run = {"classes": list("wxyz"), "sites": {"a": site | {"classes_tuned": 2}, "b": site | {"classes_tuned": 1}}}
    assert chance_of([run], "tune_balanced_accuracy") == Chance({"a": 1 / 2}, 1 / 2)
    assert chance_of([run], "balanced_accuracy") == Chance({"a": 1 / 4, "b": 1 / 4}, 1 / 4)
    assert (one_class_of(run, tuned=True), one_class_of(run)) == ({"b"}, set())


def test_runs_from_before_a_sites_classes_were_kept_have_the_chance_of_all_classes():
    runs = [{"classes": ["x", "y", "z", "w"], "sites": {"a": {}}}] * 2
    assert chance_of(runs, "tune_balanced_accuracy").mean == 0.25 and chance_of(runs, "auroc").mean == 0.5
    assert chance_of(runs, "accuracy") == Chance({}, None) == chance_of([{"sites": {"a": {}}}], "macro_recall")
