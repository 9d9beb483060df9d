"""docs/methods.md, "evaluation": the picture of one figure at each site."""

import numpy as np
import pytest

from edgefl_trainer.evaluate.chance import Chance


def test_a_picture_of_a_figure_marks_sites_of_one_class(drawn_metric):
    axes, _ = drawn_metric({"a": {"balanced_accuracy": 0.8, "accuracy": 0.8, "classes_tested": 1}}, "accuracy")
    assert "a*" in [line.get_label() for line in axes.lines]
    assert "one class only, says nothing; in no mean" in axes.get_xlabel()


def test_sites_that_differ_in_chance_have_a_line_each(drawn_metric):
    """0.50 at a site of two classes was drawn as twice chance."""
    sites = {"a": {"balanced_accuracy": 0.5}, "b": {"balanced_accuracy": 0.7}}
    axes, _ = drawn_metric(sites, "balanced_accuracy", chance=[Chance({"a": 0.5, "b": 0.25}, 0.375)])
    told = {label for label in axes.get_legend_handles_labels()[1] if "chance" in label}
    assert told == {"chance 0.5: a", "chance 0.25: b", "chance 0.375: the mean"}


def test_no_bar_lies_below_0(drawn_metric):
    """An area under a risk curve of 0.02 ± 0.09 is no negative area."""
    axes, ends = drawn_metric({"a": {"aurc": 0.0}, "b": {"aurc": 0.2}, "c": {"aurc": 0.01}}, "aurc")
    assert axes.get_xlim()[0] == 0 and min(ends) == 0
    assert "mean ± std, ended at 0" in axes.get_legend_handles_labels()[1]


def test_a_picture_of_a_figure_has_chance_and_a_mean_without_sites_of_one_class(drawn_metric):
    sites = {
        name: {"balanced_accuracy": figure, "classes_tested": tested}
        for name, figure, tested in (("a", 0.5, 2), ("b", 0.7, 2), ("c", 1.0, 1))
    }
    axes, ends = drawn_metric(sites, "balanced_accuracy", chance=[Chance({"a": 0.5, "b": 0.5}, 0.5)])
    assert np.mean(ends) == pytest.approx(0.6)
    assert "chance 0.5" in axes.get_legend_handles_labels()[1]
    axes, _ = drawn_metric(sites, "balanced_accuracy", chance=[Chance({}, -9.0)])  # too far off
    assert axes.get_xlabel().count("chance is -9") == 1
