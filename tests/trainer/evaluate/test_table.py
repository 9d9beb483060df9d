"""docs/methods.md, "evaluation": the table's means, spreads and captions; the picture of the rounds."""

import csv
import io
import itertools
import json
import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from edgefl_trainer.commands.table import SITE_FIGURES
from edgefl_trainer.evaluate import metric_plot, plot
from edgefl_trainer.evaluate.chance import Chance, chance_of
from edgefl_trainer.evaluate.metrics import METRIC_NAMES, federation_summary
from edgefl_trainer.evaluate.plot import bytes_by_round, curves, plot_progress, spread_out
from edgefl_trainer.evaluate.recall_table import render_recall
from edgefl_trainer.evaluate.table import FORMATS, origin, render_table, table_rows


def summary(method, seed, figures, **more):
    sites = {name: {"balanced_accuracy": value} for name, value in figures.items()}
    base = {"method": method, "task": "nevus", "seed": seed, "preset": "bench84", "rounds": 5, "reported_rows": "val"}
    traffic = {"bytes_up_per_round": 1536.0, "bytes_down_per_round": 3 * 2**20}
    return base | traffic | {"sites": sites} | federation_summary(sites) | more


ONE = summary("local", 0, {"b": 0.6, "a": 0.8})


def test_spread_over_sites_for_one_seed():
    (row,) = table_rows([ONE])
    assert (row.mean.mean, row.spread_over, row.worst) == (pytest.approx(0.7), "sites", 0.6)
    assert row.mean.std == pytest.approx(statistics.stdev([0.6, 0.8]))
    assert row.sites["a"].std is None


def test_spread_over_seeds_for_several():
    """Three seeds, mean ± standard deviation over seeds; seed order does not matter."""
    runs = [summary("fedavg", seed, {"a": a, "b": b}) for seed, a, b in ((2, 0.9, 0.7), (0, 0.7, 0.5), (1, 0.8, 0.8))]
    (row,) = table_rows(runs)
    assert row.seeds == (0, 1, 2)
    assert (row.mean.mean, row.mean.std) == pytest.approx((2.2 / 3, statistics.stdev([0.8, 0.6, 0.8])))
    assert (row.sites["a"].mean, row.sites["a"].std) == pytest.approx((0.8, 0.1))
    assert row.worst == pytest.approx((0.7 + 0.5 + 0.8) / 3)
    assert row.spread_over == "seeds"


def test_a_site_of_one_class_is_marked_and_left_out_of_a_mean_beside():
    """A constant answer is always right about one class: 1.000 says nothing. The mean without it is 0.7 by hand."""
    sites = {
        "a": {"balanced_accuracy": 0.8, "classes_tested": 2, "classes_learned": 2},
        "b": {"balanced_accuracy": 0.6, "classes_tested": 2},  # of a run from before that was kept
        "c": {"balanced_accuracy": 1.0, "classes_tested": 1, "classes_learned": 2},
        "d": {"balanced_accuracy": 0.5, "classes_tested": 2, "classes_learned": 1},
        "e": {"balanced_accuracy": None, "classes_tested": 1},
    }
    run = ONE | {"sites": sites}
    (row,) = table_rows([run])
    assert row.one_class == ("c", "d")
    assert row.mean.mean == pytest.approx(2.9 / 4) and row.several.mean == pytest.approx(0.7)
    text = render_table([run])
    assert "| 0.800 | 0.600 | 1.000* | 0.500* | – |" in text and "mean without *" in text
    assert "* one class only in the rows it learned from or is judged on: says nothing; left out of" in text
    line = next(csv.DictReader(io.StringIO(render_table([run], "csv"))))
    assert (line["one_class"], float(line["several"])) == ("c d", pytest.approx(0.7))
    assert "*" not in render_table([ONE])


def test_a_site_without_a_row_of_some_class_is_marked():
    """Figures over two or three of four classes stood as if they were of all; the one-class mark stays apart."""
    tested = {"a": 4, "b": 3, "c": 1, "d": 2}
    sites = {name: {"balanced_accuracy": 0.5, "classes_tested": number} for name, number in tested.items()}
    run = ONE | {"sites": sites | {"e": {"balanced_accuracy": None, "classes_tested": 2}}, "classes": list("wxyz")}
    text = render_table([run])
    assert "| 0.500 | 0.500† | 0.500* | 0.500† | – |" in text
    assert "† judged on fewer classes than the run has: comes out too high, and the mean with it (b, d)." in text
    assert r"0.500\dag{} &" in render_table([run], "latex")
    assert "†" not in render_table([ONE | {"classes": ["x", "y"]}])
    assert "†" not in render_table([run | {"usual_answer": {}, "sites": sites}])  # most answers stand in no row


def test_a_picture_of_a_figure_marks_sites_of_one_class(monkeypatch):
    drawn = []
    monkeypatch.setattr(metric_plot, "png", lambda figure, metadata: drawn.append(figure) or b"")
    metric_plot.plot_metric(table_rows([ONE | {"sites": {"a": ONE["sites"]["a"] | {"classes_tested": 1}}}]), "accuracy")
    (axes,) = drawn[0].axes
    assert "a*" in [line.get_label() for line in axes.lines]
    assert "one class only, says nothing; in no mean" in axes.get_xlabel()


def test_the_spread_of_a_population_can_be_asked_for():
    """docs/methods.md 10, spread: divided by n instead of n - 1; the caption says which."""
    (row,) = table_rows([ONE], ddof=0)
    assert row.mean.std == pytest.approx(statistics.pstdev([0.6, 0.8]))
    seeds = [ONE, summary("local", 1, {"a": 0.5, "b": 0.5})]
    (row,) = table_rows(seeds, ddof=0)
    assert row.mean.std == pytest.approx(statistics.pstdev([0.7, 0.5]))
    assert row.sites["a"].std == pytest.approx(statistics.pstdev([0.8, 0.5]))
    assert "population standard deviation (ddof=0) over sites" in render_table([ONE], ddof=0)
    assert "sample standard deviation (ddof=1) over sites" in render_table([ONE])


@pytest.mark.parametrize(("metric", "worst"), [("brier", 0.9), ("ece", 0.9), ("aurc", 0.9), ("open_accuracy", 0.2)])
def test_the_worst_site_has_the_largest_error(metric, worst):
    run = ONE | {"sites": {"a": {metric: 0.9}, "b": {metric: 0.2}}}
    (row,) = table_rows([run], metric)
    assert row.worst == worst


def test_runs_that_saw_other_rows_are_told():
    """docs/design.md 5: `partition_sha256` says whether two runs compare like with like; seeds draw other tune rows."""
    first, second = ONE | {"partition_sha256": "a" * 64}, summary("fedavg", 0, {"a": 0.5}, partition_sha256="b" * 64)
    told = "NOT ALL ON THE SAME ROWS: 2 different partition_sha256"
    assert told in render_table([first, second])
    assert told not in render_table([first, second | {"seed": 1}])
    assert told not in render_table([first, second | {"partition_sha256": "a" * 64}])


def test_every_figure_of_a_site_can_be_asked_for():
    assert SITE_FIGURES == METRIC_NAMES


@pytest.mark.parametrize(
    ("seconds", "shown"), [((30.0, 40.0), "35 s"), ((600.0, 660.0), "10.5 min"), ((7200.0, 3600.0), "1.5 h")]
)
def test_time_stands_beside_bytes(seconds, shown):
    """A method is picked with bytes and time beside accuracy: the mean over seeds."""
    runs = [ONE | {"seed": seed, "seconds": took} for seed, took in enumerate(seconds)]
    assert f"| 1.5 KiB | 3.0 MiB | {shown} |" in render_table(runs)
    line = next(csv.DictReader(io.StringIO(render_table(runs, "csv"))))
    assert float(line["seconds"]) == statistics.mean(seconds)


def test_all_rows_together_stand_beside_the_mean_over_sites():
    """docs/methods.md 3.4: local fine-tuning is averaged over sites, federated over classes of the pooled rows."""
    runs = [ONE | {"pooled": {"balanced_accuracy": 0.64}, "seed": seed} for seed in (0, 1)]
    runs[1]["pooled"] = {"balanced_accuracy": 0.66}
    (row,) = table_rows(runs)
    assert (row.pooled.mean, row.pooled.std) == pytest.approx((0.65, statistics.stdev([0.64, 0.66])))
    lines = render_table([*runs, summary("fedavg", 0, {"a": 0.5})]).splitlines()
    assert "| worst | all rows | up / round |" in lines[0]
    assert "| 0.600 | 0.650 ± 0.014 |" in lines[2] and "| 0.500 | – |" in lines[3]
    head, first, _ = list(csv.reader(io.StringIO(render_table([*runs, ONE | {"seed": 5, "preset": "x"}], "csv"))))
    assert float(first[head.index("pooled")]) == pytest.approx(0.65)


def test_shares_of_labels_and_modes_name_their_rows():
    runs = [
        ONE | {"method": "finetune", "mode": mode, "labels": share}
        for mode, share in (("local", 0.1), ("federated", 1.0))
    ]
    assert [row.method for row in table_rows(runs)] == ["finetune, local, 0.1 of labels", "finetune, federated"]
    runs = [one | {"pretraining": "fedmae"} for one in runs]
    assert [row.method for row in table_rows(runs)][1] == "finetune of fedmae, federated"
    assert [row.method for row in table_rows([ONE | {"pretraining": "fedmae"}])] == ["local"]  # the network is frozen


def test_two_runs_of_one_seed_are_not_averaged():
    rows = table_rows([ONE, summary("local", 0, {"a": 0.5, "b": 0.5})])
    assert [(row.method, row.mean.mean) for row in rows] == [("local", pytest.approx(0.7)), ("local #2", 0.5)]


def test_other_settings_open_rows_and_are_named():
    text = render_table([ONE, ONE | {"preset": "tiny", "seed": 1}, ONE | {"label": "local, balanced", "seed": 1}])
    assert text.count("\n| local") == 3
    assert "| local (tiny, 5 rounds) |" in text
    assert "| local, balanced (bench84, 5 rounds) |" in text


def test_sites_are_the_union_in_name_order_and_gaps_are_shown():
    text = render_table([ONE, summary("fedavg", 0, {"c": 0.9, "a": None})])
    lines = text.splitlines()
    assert lines[0].startswith("| method | a | b | c | mean ± std | worst | up / round | down / round | time |")
    assert lines[2] == "| local | 0.800 | 0.600 | – | 0.700 ± 0.141 | 0.600 | 1.5 KiB | 3.0 MiB | – |"
    assert lines[3] == "| fedavg | – | – | 0.900 | 0.900 | 0.900 | 1.5 KiB | 3.0 MiB | – |"


def test_caption_names_what_a_reader_needs():
    text = render_table([ONE, summary("fedavg", 3, {"a": 0.5})], machine="2 cores, no GPU")
    for part in ("`val` rows", "task nevus", "preset bench84", "seeds 0, 3", "ddof=1) over sites", "2 cores, no GPU."):
        assert part in text


def test_csv_and_json_carry_unrounded_numbers():
    third = summary("fedavg", 0, {"a": 1 / 3, "b": None})
    line = next(csv.DictReader(io.StringIO(render_table([third], "csv"))))
    assert (float(line["a"]), line["b"], line["seeds"], line["std"]) == (1 / 3, "", "0", "")
    (row,) = json.loads(render_table([third], "json"))["rows"]
    assert (row["sites"]["a"]["mean"], row["sites"]["b"]["mean"]) == (1 / 3, None)


def test_latex_escapes_what_latex_reads():
    text = render_table([summary("fed_avg", 0, {"vienna_dias": 0.5}, label="50 % & #1 {x}")], "latex")
    assert r"vienna\_dias" in text
    assert r"50 \% \& \#1 \{x\}" in text
    assert "±" not in text.replace(r"$\pm$", "")
    rows = [line for line in text.splitlines() if line.endswith(r"\\")]
    assert {line.replace(r"\&", "").count("&") for line in rows} == {6}


@pytest.mark.parametrize("style", FORMATS)
def test_same_runs_same_text(style):
    assert render_table([ONE], style) == render_table([dict(reversed(ONE.items()))], style)


@pytest.mark.parametrize(
    ("runs", "style", "message"),
    [
        ([], "md", "at least one run"),
        ([ONE], "xml", "md, csv, json, latex"),
        ([ONE, ONE | {"task": "all"}], "md", "2 tasks"),
    ],
)
def test_bad_input_is_named(runs, style, message):
    with pytest.raises(ValueError, match=message):
        render_table(runs, style)


LINES = [{"round": r, "site": s, "balanced_accuracy": 0.5 + 0.1 * r} for r in (2, 1) for s in ("b", "a")]


def test_curves_are_picked_by_site_and_round():
    extra = [{"round": 1, "site": "a", "balanced_accuracy": 0.9}, {"round": 3, "site": "a", "balanced_accuracy": None}]
    found = curves([*LINES, *extra, {"phase": "warm"}])
    assert found == {"a": {2: 0.7, 1: 0.9}, "b": {2: 0.7, 1: 0.6}}


ABOVE = [{"round": r, "site": "b", "balanced_accuracy": 0.7 + 0.1 * r} for r in (1, 2)]


@pytest.mark.parametrize("runs", [{"one": [[*LINES, *ABOVE]]}, {"one": [LINES, ABOVE], "two": [ABOVE], "empty": [[]]}])
def test_the_picture_is_a_drawn_png(runs):
    """Over rounds on the left, over bytes on the right: the first colour's line runs across both halves."""
    data = plot_progress(runs, title="rounds")
    picture = np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))
    assert min(picture.shape[:2]) > 400
    _, columns = np.nonzero(np.abs(picture.astype(int) - [0x00, 0x72, 0xB2]).sum(axis=2) < 60)
    half = picture.shape[1] // 2
    assert np.ptp(columns[columns < half]) > 300  # px
    assert (columns > half).any()
    assert data == plot_progress(runs, title="rounds")


@pytest.fixture
def progress(monkeypatch):
    """Draw, and give the axes over rounds."""
    drawn = []
    monkeypatch.setattr(plot, "png", lambda figure, **_: drawn.append(figure) or b"")

    def draw(runs, **more):
        plot_progress(runs, **more)
        return drawn[-1].axes[0]

    return draw


def data_lines(axes):
    return {
        line.get_label(): line
        for line in axes.lines
        if line.get_transform() == axes.transData and line.get_label()[0] != "_"
    }


def test_of_lines_that_are_the_same_each_is_seen(progress):
    lines = data_lines(progress({"a": [LINES], "b": [LINES], "c": [ABOVE]}))
    widths = {name: line.get_linewidth() for name, line in lines.items()}
    assert widths["a"] - widths["b"] >= 2 and widths["b"] == widths["c"]
    assert lines["a"].get_markersize() - lines["b"].get_markersize() >= 2


def test_beside_the_axes_nothing_looks_like_data(progress):
    """Threads were as bold as lines and ended in a marker, as a line does."""
    axes = progress({"a": [LINES], "b": [ABOVE]})
    threads = [text.arrow_patch for text in axes.texts if getattr(text, "arrow_patch", None)]
    assert len(threads) == 2 and all(len(set(thread.get_edgecolor()[:3])) == 1 for thread in threads)  # grey
    assert axes.spines["right"].get_visible()
    outside = [line for line in axes.lines if line.get_transform() == axes.transAxes]
    assert len(outside) == 2 and min(np.min(line.get_xdata()) for line in outside) > plot.LEADS_TO


def test_chance_is_drawn(progress):
    """Runs that learned nothing looked like any other."""
    axes = progress({"a": [LINES], "b": [ABOVE]}, chance=dict.fromkeys("ab", Chance({}, 0.5)))
    assert any(set(line.get_ydata()) == {0.5} for line in axes.lines)
    assert "chance 0.5" in [text.get_text() for text in axes.texts]
    assert axes.get_ylim()[0] < 0.5
    runs = [{"classes": ["x", "y", "z", "w"], "sites": {"a": {}}}] * 2  # from before a site's classes were kept
    assert chance_of(runs, "tune_balanced_accuracy").mean == 0.25 and chance_of(runs, "auroc").mean == 0.5
    assert chance_of(runs, "accuracy") == Chance({}, None) == chance_of([{"sites": {"a": {}}}], "macro_recall")


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


def test_sites_that_differ_in_chance_have_a_line_each(progress, monkeypatch):
    """0.50 at a site of two classes was drawn as twice chance."""
    chance = Chance({"a": 0.5, "b": 0.25}, 0.375)
    axes = progress({"one": [LINES]}, chance={"one": chance})

    def drawn(axes):
        lines = [line for line in axes.lines if line.get_transform() != axes.transAxes]  # without samples of lines
        return {line.get_label(): line.get_ydata()[0] for line in lines if line.get_label().startswith("chance")}

    told = drawn(axes)
    assert told == {"chance 0.5: a": 0.5, "chance 0.25: b": 0.25, "chance 0.375: the mean": 0.375}
    axes = progress({"one": [LINES], "two": [LINES]}, chance={"one": chance, "two": chance})
    assert drawn(axes) == {"chance 0.375": 0.375}
    sites = {"a": {"balanced_accuracy": 0.5}, "b": {"balanced_accuracy": 0.7}}
    axes, _ = drawn_metric(monkeypatch, sites, "balanced_accuracy", chance=[chance])
    assert {label for label in axes.get_legend_handles_labels()[1] if "chance" in label} == set(told)


def test_a_method_that_sends_nothing_stands_at_no_bytes(progress):
    """The axis is logarithmic: it had no place for 0, and said 1 B."""
    axes = progress({"a": [LINES]}).figure.axes[1]
    assert set(data_lines(axes)["a"].get_xdata()) == {plot.FEW_BYTES}
    assert [axes.xaxis.get_major_formatter()(value, 0) for value in (0.5, 1.0, 16.0, 2048.0)] == [
        "",
        "0 B",
        "16 B",
        "2 KiB",
    ]


def test_a_mean_that_is_drawn_is_without_sites_of_one_class(progress):
    """LINES: a and b at 0.6, 0.7; a third site of one class at 1."""
    alone = [{"round": r, "site": "c", "balanced_accuracy": 1.0} for r in (1, 2)]
    axes = progress({"one": [[*LINES, *alone]]}, one_class={"one": {"c"}})
    lines = data_lines(axes)
    assert list(lines) == ["a", "b", "c*", "mean of 2 sites without *"]
    assert list(lines["mean of 2 sites without *"].get_ydata()) == pytest.approx([0.6, 0.7])
    axes = progress({"one": [[*LINES, *alone]], "two": [LINES]}, one_class={"one": {"c"}})
    assert list(data_lines(axes)["one"].get_ydata()) == pytest.approx([0.6, 0.7])
    assert "without sites of one class" in axes.get_ylabel()
    with pytest.raises(ValueError, match="no mean to draw"):
        progress({"one": [alone], "two": [LINES]}, one_class={"one": {"c"}})


def drawn_metric(monkeypatch, sites, metric, **more):
    drawn = []
    monkeypatch.setattr(metric_plot, "png", lambda figure, **_: drawn.append(figure.axes[0]) or b"")
    metric_plot.plot_metric(table_rows([ONE | {"sites": sites}], metric), metric, **more)
    (bar,) = [one for one in drawn[0].containers if one.has_xerr]
    return drawn[0], bar.lines[2][0].get_segments()[0][:, 0]


def test_no_bar_lies_below_0(monkeypatch):
    """An area under a risk curve of 0.02 ± 0.09 is no negative area."""
    axes, ends = drawn_metric(monkeypatch, {"a": {"aurc": 0.0}, "b": {"aurc": 0.2}, "c": {"aurc": 0.01}}, "aurc")
    assert axes.get_xlim()[0] == 0 and min(ends) == 0
    assert "mean ± std, ended at 0" in axes.get_legend_handles_labels()[1]


def test_a_picture_of_a_figure_has_chance_and_a_mean_without_sites_of_one_class(monkeypatch):
    sites = {
        name: {"balanced_accuracy": figure, "classes_tested": tested}
        for name, figure, tested in (("a", 0.5, 2), ("b", 0.7, 2), ("c", 1.0, 1))
    }
    axes, ends = drawn_metric(monkeypatch, sites, "balanced_accuracy", chance=[Chance({"a": 0.5, "b": 0.5}, 0.5)])
    assert np.mean(ends) == pytest.approx(0.6)
    assert "chance 0.5" in axes.get_legend_handles_labels()[1]
    axes, _ = drawn_metric(monkeypatch, sites, "balanced_accuracy", chance=[Chance({}, -9.0)])  # too far off
    assert axes.get_xlabel().count("chance is -9") == 1


def test_nothing_to_draw_is_an_error():
    with pytest.raises(ValueError, match="nothing to draw"):
        plot_progress({"one": [[{"round": 1, "site": "a"}]]})


def test_more_lines_than_names_fit_is_an_error():
    with pytest.raises(ValueError, match="there are 21 lines"):
        plot_progress({f"run {i}": [ABOVE] for i in range(21)})


def test_bytes_add_up_over_sites_ways_and_rounds():
    """A warm phase (round 0) counts, so a method that asks first is not drawn as free."""
    lines = [{"round": r, "site": s, "bytes_up": 10 * r + 1, "bytes_down": 100} for r in (0, 1, 2) for s in "ab"]
    assert bytes_by_round(lines) == {0: 202, 1: 202 + 222, 2: 202 + 222 + 242}


@given(st.lists(st.floats(0, 1), min_size=1, max_size=20))
def test_names_keep_their_order_and_distance(wanted):
    placed = spread_out(wanted, 0.05)
    assert [placed[i] for i in np.argsort(wanted, kind="stable")] == sorted(placed)
    assert all(b - a >= 0.05 - 1e-9 for a, b in itertools.pairwise(sorted(placed)))
    assert min(placed) >= -1e-9 and max(placed) <= 1 + 1e-9


def test_a_name_with_room_stays_where_its_line_ends():
    assert spread_out([0.9, 0.1, 0.5], 0.05) == pytest.approx([0.9, 0.1, 0.5])
    assert spread_out([0.5, 0.5], 0.1) == pytest.approx([0.45, 0.55])


def test_another_figure_of_a_site():
    run = ONE | {"sites": {"a": {"accuracy": 0.9}, "b": {"accuracy": 0.6}}}
    (row,) = table_rows([run], "accuracy")
    assert (row.mean.mean, row.mean.std, row.worst) == pytest.approx((0.75, statistics.stdev([0.9, 0.6]), 0.6))
    assert render_table([run], metric="accuracy").count("Accuracy per site") == 1


def test_sites_that_never_trained_have_a_column_but_no_part_in_the_mean():
    """docs/methods.md 8.4: both groups are reported, apart."""
    run = ONE | {"sites": ONE["sites"] | {"c": {"balanced_accuracy": 0.1, "held_out": True}}}
    (row,) = table_rows([run])
    assert (row.mean.mean, row.worst, row.sites["c"].mean) == (pytest.approx(0.7), 0.6, 0.1)
    assert "c never trained" in render_table([run])


def test_too_many_sites_for_a_page_are_left_to_csv():
    many = summary("local", 0, {f"s{i:02d}": 0.5 for i in range(13)})
    assert "s00" not in render_table([many]) and "0.500 ± 0.000" in render_table([many])
    assert "s00" in render_table([many], "csv")


def test_machine_and_commit_are_said_once():
    here = {"commit": "a" * 40, "machine": {"processor": "CPU, 2 cores", "cuda": None}}
    there = {"commit": None, "machine": {"processor": "CPU, 2 cores", "cuda": "GPU"}}
    assert origin([here, here, there]) == f"CPU, 2 cores, GPU; commit {'a' * 12}, not recorded"
    assert origin([{}]) == "machine not recorded; commit not recorded"


def test_the_recall_table_names_a_run_as_the_first_table_does():
    more = {"classes": ["a", "b"], "confusion": {"a": [[3, 1, 0], [0, 4, 0]]}, "pooled": {}}
    runs = [ONE | more, ONE | more, ONE | more | {"rounds": 9, "label": "mine"}]
    names = [line.split(" | ")[0] for line in render_recall(runs).splitlines()[2:5]]
    assert names == ["| local (bench84, 5 rounds)", "| local #2 (bench84, 5 rounds)", "| mine (bench84, 9 rounds)"]
    assert names == [line.split(" | ")[0] for line in render_table(runs).splitlines()[2:5]]
