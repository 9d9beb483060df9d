"""docs/methods.md, "evaluation": the table's means, spreads and captions."""

import csv
import io
import json
import statistics

import pytest
from tests.trainer.evaluate.conftest import ONE, summary

from edgefl_trainer.commands.table import SITE_FIGURES
from edgefl_trainer.evaluate.metrics import METRIC_NAMES
from edgefl_trainer.evaluate.tables.recalls import render_recall
from edgefl_trainer.evaluate.tables.rows import table_rows
from edgefl_trainer.evaluate.tables.text import FORMATS, against, origin, render_table


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
    assert "† judged on fewer classes than the run has: neither this figure nor the mean compares with one over" in text
    assert "where the model can name no other class (b, d)." in text
    assert r"0.500\dag{} &" in render_table([run], "latex")
    assert "†" not in render_table([ONE | {"classes": ["x", "y"]}])
    assert "†" not in render_table([run | {"usual_answer": {}, "sites": sites}])  # most answers stand in no row


def test_csv_has_what_a_page_marks_in_columns_at_its_end():
    """A CSV kept the figures, and neither † nor UNTRAINED NETWORK beside them."""
    tested = {"a": 2, "b": 3, "c": 1, "d": 2}
    sites = {name: {"balanced_accuracy": 0.5, "classes_tested": number} for name, number in tested.items()}
    run = ONE | {"sites": sites, "classes": list("xyz"), "untrained": True}
    runs = [run, run | {"seed": 1, "untrained": False}, summary("fedavg", 0, {"a": 0.5}, classes=["x", "y"])]
    head, *lines = csv.reader(io.StringIO(render_table(runs, "csv")))
    assert head[-2:] == ["fewer_classes", "untrained"]
    assert [line[-2:] for line in lines] == [["a d", "true"], ["", "false"]]  # one run of a mean is enough
    assert head.index("one_class") < head.index("share_of_models") < len(head) - 2


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
    text = render_table([ONE, summary("fedavg", 0, {"a": 0.5})], machine="2 cores, no GPU")
    for part in ("`val` rows", "Task nevus", "Preset bench84", "Seed 0.", "ddof=1) over sites", "2 cores, no GPU."):
        assert part in text


def test_rows_of_other_seeds_are_marked_and_the_spread_of_each_is_told():
    """A row of seed 0 stood beside one of three, under "Seeds 0, 1, 2": ± was over sites here, over seeds there."""
    whole = [summary("local", seed, {"a": 0.8, "b": 0.6 + seed / 10}) for seed in (0, 1, 2)]
    one = summary("fedevprompt", 0, {"a": 0.8, "b": 0.6})
    text = render_table([one, *whole])
    lines = text.splitlines()
    assert lines[0].startswith("| method | seeds | a | b | mean ± std |")
    assert lines[2].startswith("| fedevprompt | 0 | 0.800 | 0.600 | 0.700 ± 0.141 |")
    assert lines[3].startswith("| local | 0, 1, 2 | 0.800 ± 0.000 | 0.700 ± 0.100 | 0.750 ± 0.050 |")
    told = lines[-1]
    assert told.startswith("NOT ALL WITH THE SAME SEEDS: seed 0 of fedevprompt; seeds 0, 1 and 2 of local. ")
    assert "± is the sample standard deviation (ddof=1) over seeds in local, over sites in fedevprompt. " in told
    assert "Seeds 0, 1, 2" not in told and "Seed 0" not in told
    assert against([one, *whole]) == "NOT ALL WITH THE SAME SEEDS"  # the title of a picture
    alike = render_table([*whole, *(summary("fedavg", seed, {"a": 0.7, "b": 0.5}) for seed in (2, 1, 0))])
    assert "| method | a |" in alike and "Seeds 0, 1, 2." in alike and "SAME SEEDS" not in alike
    assert "(ddof=1) over seeds. " in alike and against(whole) == ""


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
    assert "c held out, never trained" in render_table([run])


def test_one_round_is_one_round():
    names = [line.split(" | ")[0] for line in render_table([ONE | {"rounds": 1}, ONE]).splitlines()[2:4]]
    assert names == ["| local (bench84, 1 round)", "| local (bench84, 5 rounds)"]


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


def test_rows_with_the_same_figures_are_told():
    """Prompts of two methods may differ while all figures are the same: that is taken for a mistake, or overlooked."""
    same = summary("fedevprompt", 0, {"a": 0.8, "b": 0.6})
    assert "local and fedevprompt have the same figures" in render_table([ONE, same])
    assert "same figures" not in render_table([ONE, summary("fedevprompt", 0, {"a": 0.8, "b": 0.5})])
    assert "same figures" not in render_table([ONE, same], metric="accuracy")  # neither has one


def test_the_caption_says_what_worst_is_and_which_end_is_good():
    told = "`worst` is the mean over seeds of each seed's worst site"
    assert told in render_table([ONE, ONE | {"seed": 1}]) and told not in render_table([ONE])
    run = ONE | {"sites": {"a": {"aurc": 0.1}}}
    assert "Lower is better. ± is" in render_table([run], metric="aurc") and "ower" not in render_table([ONE])
