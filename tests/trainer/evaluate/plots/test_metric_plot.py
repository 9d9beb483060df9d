"""docs/methods.md, "evaluation": the picture of one figure at each site."""

import numpy as np
import pytest
from tests.trainer.evaluate.conftest import ONE

from edgefl_trainer.evaluate.chance import Chance
from edgefl_trainer.evaluate.plots import metric_plot
from edgefl_trainer.evaluate.tables.rows import table_rows
from edgefl_trainer.evaluate.tables.text import render_table


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
    assert "mean ± std over 3 sites, ended at 0" in axes.get_legend_handles_labels()[1]


@pytest.mark.parametrize(("metric", "most"), [("aurc", 1), ("brier", 2)])
def test_no_bar_lies_above_what_a_figure_can_be(drawn_metric, metric, most):
    """An area under a risk curve lies within [0, 1], a Brier score within [0, 2] (docs/methods.md 8.4)."""
    axes, ends = drawn_metric({"a": {metric: most}, "b": {metric: most}, "c": {metric: 0.5 * most}}, metric)
    assert max(ends) == most > min(ends) > 0
    assert f"mean ± std over 3 sites, ended at {most}" in axes.get_legend_handles_labels()[1]


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


def test_a_figure_has_its_name(drawn_metric):
    """An axis said "aurc" and a caption "Aurc"."""
    named = {"aurc": "AURC (area under the risk-coverage curve)", "auroc": "AUROC", "macro_f1": "macro F1"}
    for metric, name in named.items():
        axes, _ = drawn_metric({site: {metric: 0.5} for site in "ab"}, metric)
        assert axes.get_xlabel().startswith(f"{name} of each site; ")
        assert f"{name[0].upper()}{name[1:]} per site" in render_table([ONE], metric=metric)


def test_a_long_name_of_a_row_leaves_room_for_the_axes(drawn_rows):
    """A name with settings, preset and rounds took two thirds of the picture, and the axis lost its label."""
    name = "fedavg, lambda_kd=0.1, prompt_init=uniform, temperature=4"
    axes = drawn_rows([ONE | {"label": name}, ONE | {"label": "b", "preset": "tiny"}])
    shown = [label.get_text() for label in axes.get_yticklabels()]
    assert shown[0].replace("\n", " ") == f"{name} (bench84, 5 rounds)" and shown[1] == "b (tiny, 5 rounds)"
    assert all(len(line) <= 36 for label in shown for line in label.splitlines())


HELD = {name: {"balanced_accuracy": value} for name, value in (("a", 0.6), ("b", 0.7), ("c", 0.9))}
HELD["c"]["held_out"] = True


def test_a_held_out_site_is_drawn_apart(drawn_metric):
    axes, ends = drawn_metric(HELD, "balanced_accuracy")
    styles = {line.get_label(): line.get_fillstyle() for line in axes.lines if line.get_label()[0] != "_"}
    assert styles == {"a": "full", "b": "full", "c (held out)": "left"}
    assert axes.get_xlabel().endswith("half filled: a site that never trained\nheld out: no mean counts it")
    assert np.mean(ends) == pytest.approx(0.65)
    axes, _ = drawn_metric({name: HELD[name] for name in "ab"}, "balanced_accuracy")
    assert "held out" not in axes.get_xlabel()


def test_the_legend_says_what_the_spread_is_over_and_of_how_many(drawn_metric, drawn_rows):
    """It said mean and std, not of what. c is held out and does not count."""
    axes, _ = drawn_metric(HELD, "balanced_accuracy")
    assert "mean ± std over 2 sites" in axes.get_legend_handles_labels()[1]
    seeds = [ONE | {"seed": seed, "sites": HELD} for seed in range(3)]
    axes = drawn_rows(seeds)
    assert "mean ± std over 3 seeds" in axes.get_legend_handles_labels()[1]
    axes = drawn_rows([*seeds, ONE | {"method": "fedavg", "sites": HELD}])
    assert "mean ± std over what its row says" in axes.get_legend_handles_labels()[1]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["local\n± over 3 seeds", "fedavg\n± over 2 sites"]


@pytest.mark.parametrize("letters", [1, 25, 60, 200])
def test_the_legend_stays_within_the_picture(drawn_metric, letters):
    """Five names of hospitals in a line ran over both edges."""
    sites = {f"{'hospital ' * 30}"[:letters].strip() + str(n): {"balanced_accuracy": 0.5 + n / 20} for n in range(6)}
    chance = Chance({name: 0.25 if place % 2 else 0.5 for place, name in enumerate(sites)}, 0.3)
    axes, _ = drawn_metric(sites, "balanced_accuracy", chance=[chance])
    (legend,) = axes.figure.legends
    axes.figure.canvas.draw()
    shown, room = legend.get_window_extent(), axes.figure.bbox
    assert shown.x0 >= 0 and shown.x1 <= room.width and shown.y0 >= 0 and shown.y1 <= room.height
    assert axes.get_window_extent().height > 40  # pixels: the rows keep theirs
    assert len(legend.get_texts()) == len(axes.get_legend_handles_labels()[1])


def test_sites_of_one_figure_do_not_hide_one_another(drawn_metric):
    axes, _ = drawn_metric({name: {"accuracy": 0.5} for name in "abc"}, "accuracy")
    heights = [line.get_ydata()[0] for line in axes.lines if line.get_label() in "abc"]
    assert len(heights) == 3 == len(set(heights)) and all(-0.5 < height < 0.3 for height in heights)


@pytest.mark.parametrize(("metric", "better"), [("ece", "lower"), ("auroc", "higher")])
def test_a_figures_axis_fits_it(metric, better, monkeypatch):
    """The data's span with some room, not 0 to 1; the label says which end is good."""
    drawn = []
    monkeypatch.setattr(metric_plot, "png", lambda figure, **_: drawn.append(figure.axes[0]) or b"")
    sites = {"a": {metric: 0.031}, "b": {metric: 0.054}}
    run = {"method": "local", "task": "all", "seed": 0, "sites": sites, "pooled": {}}
    metric_plot.plot_metric(table_rows([run], metric), metric)
    low, high = drawn[0].get_xlim()
    assert 0 < low < 0.031 and 0.054 < high < 0.08
    assert f"{better} is better" in drawn[0].get_xlabel() and metric.upper() in drawn[0].get_xlabel()
