"""docs/methods.md, "evaluation": the table's means, spreads and captions; the picture of the rounds."""

import csv
import io
import json
import statistics

import numpy as np
import pytest
from PIL import Image

from edgefl_trainer.evaluate.metrics import federation_summary
from edgefl_trainer.evaluate.plot import curves, plot_rounds
from edgefl_trainer.evaluate.table import FORMATS, render_table, table_rows


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
    assert lines[0].startswith("| method | a | b | c | mean ± std | worst | up / round | down / round |")
    assert lines[2] == "| local | 0.800 | 0.600 | – | 0.700 ± 0.141 | 0.600 | 1.5 KiB | 3.0 MiB |"
    assert lines[3] == "| fedavg | – | – | 0.900 | 0.900 | 0.900 | 1.5 KiB | 3.0 MiB |"


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
    assert {line.replace(r"\&", "").count("&") for line in rows} == {5}


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


@pytest.mark.parametrize("runs", [{"one": [*LINES, *ABOVE]}, {"one": LINES, "two": ABOVE, "empty": []}])
def test_the_picture_is_a_drawn_png(runs):
    data = plot_rounds(runs, title="rounds")
    picture = np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))
    assert picture.shape == (540, 900, 3)
    _, columns = np.nonzero(np.abs(picture.astype(int) - [0x00, 0x72, 0xB2]).sum(axis=2) < 60)
    assert np.ptp(columns) > 300  # px: a line in the first colour runs across the picture
    assert data == plot_rounds(runs, title="rounds")


def test_nothing_to_draw_is_an_error():
    with pytest.raises(ValueError, match="nothing to draw"):
        plot_rounds({"one": [{"round": 1, "site": "a"}]})
