"""docs/reference/runs.md: sites that took part in no round are named wherever their figures stand."""

import csv
import io
import json

import pytest
from tests.trainer.evaluate.conftest import ONE

from edgefl_trainer.contract import Phase
from edgefl_trainer.engine.judging.held_out import summary_of
from edgefl_trainer.engine.judging.results import parts_taken
from edgefl_trainer.evaluate.no_round import part_lines, trained_sites
from edgefl_trainer.evaluate.tables.text import render_table
from edgefl_trainer.methods import METHODS


def with_parts(**rounds):
    sites = {name: {"balanced_accuracy": 0.5, "took_part": {"rounds": n, "of": 3}} for name, n in rounds.items()}
    return ONE | {"sites": sites}


@pytest.mark.parametrize(
    ("run", "told"),
    [
        (with_parts(a=3, b=1), []),  # a share of the sites was asked for: who trained less is no news
        (with_parts(a=2), ["a took part in 2 of 3 rounds"]),  # a site of a live federation, alone in its folder
        (
            with_parts(a=0),
            [
                "a took part in 0 of 3 rounds: its model has learned nothing from its pictures, so its figures are not "
                "those of a site that learned"
            ],
        ),
        (
            with_parts(a=0, b=3, c=0),
            [
                "a and c took part in 0 of 3 rounds: their models have learned nothing from their pictures, so their "
                "figures are not those of a site that learned; mean and worst count them all the same, the site that "
                "learned has 50.0 %"
            ],
        ),
        (
            with_parts(a=0, b=3, c=2),
            [
                "a took part in 0 of 3 rounds: its model has learned nothing from its pictures, so its figures are not "
                "those of a site that learned; mean and worst count it all the same, the 2 sites that learned have "
                "50.0 % as their mean"
            ],
        ),
        (ONE, []),  # from before that was kept
    ],
)
def test_a_line_names_the_sites_that_took_part_in_no_round(run, told):
    assert part_lines(run) == told


def test_a_caption_names_them_and_the_runs():
    apart = with_parts(a=0, b=3) | {"method": "fedavg", "seed": 4}
    text = render_table([with_parts(a=3, b=2), apart])
    told = "a took part in no round of fedavg, seed 4: its model has learned nothing from its pictures, and mean"
    assert told in text
    assert "a took part in no round: " in render_table([apart])
    assert "no round" not in render_table([with_parts(a=1), ONE | {"sites": {}, "seed": 2}])
    lines = list(csv.DictReader(io.StringIO(render_table([with_parts(a=3, b=2), apart], "csv"))))
    assert [line["no_round"] for line in lines] == ["", "a"]


MIXED = {  # figure, rounds of 3, held out
    "a": (0.2, 0, False), "b": (0.6, 3, False), "c": (0.8, 1, False), "d": (None, 3, False), "e": (0.1, None, True),
}  # fmt: skip


def mixed(seed=0, *, all_trained=False):
    sites = {}
    for name, (figure, rounds, held_out) in MIXED.items():
        part = {} if rounds is None else {"took_part": {"rounds": rounds or int(all_trained), "of": 3}}
        sites[name] = {"balanced_accuracy": figure, **({"held_out": True} if held_out else {}), **part}
    return ONE | {"seed": seed, "sites": sites}


def test_the_summary_tells_the_mean_of_the_others_beside_the_mean():
    """By hand: b and c have 0.6 and 0.8; a learned nothing, d has no figure, e was held out."""
    [(key, found)] = trained_sites(mixed()).items()
    assert (key, found["no_round"], found["sites"]) == ("trained_sites", ["a"], 2)
    assert found["mean_balanced_accuracy"] == pytest.approx(0.7)
    assert trained_sites(mixed(all_trained=True)) == {} == trained_sites(ONE)
    figures = {name: site for name, site in mixed()["sites"].items() if site["balanced_accuracy"] is not None}
    told = summary_of(figures)
    assert told["trained_sites"] == found  # `evaluate` on other data
    assert told["mean_balanced_accuracy"] == pytest.approx((0.2 + 0.6 + 0.8) / 3)  # over all sites, as ever


def test_a_table_marks_them_and_has_both_means():
    """Mean of all 0.533, of those that learned 0.7 ± 0.141; JSON and CSV hold the same, unrounded."""
    table = render_table([mixed()])
    head, _, line = (one.split(" | ") for one in table.splitlines()[:3])
    cells = dict(zip(head, line, strict=True))
    assert cells["a"] == "0.200‡" and cells["b"] == "0.600"
    assert cells["mean ± std"].startswith("0.533 ±") and cells["mean without ‡"] == "0.700 ± 0.141"
    assert "‡ took part in no round; left out of `mean without ‡`." in table
    [row] = json.loads(render_table([mixed()], "json"))["rows"]
    assert row["trained"] == {"mean": pytest.approx(0.7), "std": pytest.approx(0.1 * 2**0.5)}
    [line] = csv.DictReader(io.StringIO(render_table([mixed()], "csv")))
    assert float(line["trained"]) == pytest.approx(0.7)
    assert float(line["trained_std"]) == pytest.approx(0.1 * 2**0.5)
    assert r"0.200\ddag{}" in render_table([mixed()], "latex")


def test_a_table_of_sites_that_all_learned_has_neither():
    assert "‡" not in render_table([mixed(all_trained=True)])
    both = render_table([mixed(), mixed(1, all_trained=True)])  # one row, two seeds: (0.7 + 0.5333) / 2
    assert "| 0.617 ±" in both


def test_such_a_site_is_half_filled_in_the_row_where_it_never_trained(drawn_rows):
    """First-run.md: a site that never trained is half filled; only held-out ones were."""
    axes = drawn_rows([with_parts(a=3, b=2), with_parts(a=0, b=3) | {"method": "fedavg"}])
    half = [
        (list(line.get_xdata()), round(line.get_ydata()[0])) for line in axes.lines if line.get_fillstyle() != "full"
    ]
    assert half == [([0.5], 1)]
    told = "half filled: a site that never trained\ntook part in no round: the mean counts it"
    assert axes.get_xlabel().endswith(told)
    labels = [line.get_label() for line in axes.lines if line.get_label()[0] != "_"]
    assert sorted(labels) == ["a", "b"]


def lines_of(*phases):
    return [{"site": "a", "phase": phase.kind, "round": phase.round} for phase in phases]


def test_rounds_are_counted_by_the_phases_that_train():
    """A warm exchange looks at features alone; FedAvgPers' last phase fine-tunes at home; an encoder's gathers."""
    warm, first, last = Phase("warm", 0), Phase("train", 1), Phase("final", 3)
    counted = {
        "fedavg": ([warm, first], {"rounds": 1, "of": 2}),
        "fedavgpers": ([warm, last], {"rounds": 1, "of": 3}),
        "fedmae": ([last], {"rounds": 0, "of": 2}),
    }
    for method, (phases, part) in counted.items():
        found = parts_taken(METHODS[method](), 2, lines_of(*phases), ["a", "b"])
        assert found == {"a": part, "b": part | {"rounds": 0}}
    assert parts_taken(METHODS["random-init"](), 2, [], ["a"]) == {}
