"""A row of an experiment is a mean over seeds: it says where its runs are not alike, or some have no figure.

Source: docs/reference/experiment-files.md and docs/methods.md 8.4.
"""

import csv
import io
import json
from pathlib import Path

import pytest
from tests.trainer.conftest import edgefl_train

from edgefl_trainer.engine.settings import RunSettings
from edgefl_trainer.experiments.comparison import Found
from edgefl_trainer.experiments.comparison_text import render_comparison
from edgefl_trainer.experiments.files import Experiment, read_experiment
from edgefl_trainer.experiments.measured import Measurement

FILES = Path(__file__).parents[3] / "experiments"
FILE = FILES / "fedevprompt-table-1.toml"  # its columns: the mean over sites, and single sites
TARGETS = FILES / "pep-fedpt-table-6.toml"  # its columns: what it took to reach 83 %
CHOICE = ("--tiny", "--rows", "local-bt", "--device", "cpu", "--rounds", "1")
TRAFFIC = ("bytes_up_per_round", "bytes_down_per_round", "seconds")
FIGURES = ("balanced_accuracy", "open_balanced_accuracy")


def site(figure: float | None, **more: object) -> dict[str, object]:
    return {**dict.fromkeys(FIGURES, figure), "held_out": False, **more}


def one(experiment: Experiment, seed: int = 0, *, sites=(), lines=(), sha: str = "a", **settings: object) -> Found:
    """A finished run of the file's first row."""
    row = experiment.rows[0]
    given = RunSettings(**{"method": row.method, "data": ("lesions:",), "preset": "paper", "seed": seed, **settings})
    told = {"reported_rows": "test", "sites": dict(sites), "seed": seed, "settings_sha256": sha, "method": row.method}
    run = Measurement(seed=seed, summary={**told, **dict.fromkeys(TRAFFIC, 0)}, lines=lines)
    return Found(part=experiment.parts[0].name, row=row.folder, measured=run, settings=given, environment={})


def rows(experiment: Experiment, found: list[Found]) -> list[dict[str, str]]:
    """The csv's lines of the first row."""
    lines = csv.DictReader(io.StringIO(render_comparison(experiment, found, "csv")))
    return [line for line in lines if line["row"] == experiment.rows[0].label]


# ------------------------------------------------------------------------------------------- other settings


def test_a_row_whose_runs_had_other_settings_says_which():
    experiment = read_experiment(FILE)
    label, sites = experiment.rows[0].label, {"a": site(0.5)}
    found = [
        one(experiment, 0, sites=sites),
        one(experiment, 1, sites=sites, sha="b", balance="class"),
        one(experiment, 2, sites=sites, device="cpu", workers=2),
    ]
    told = f"NOT ALL WITH THE SAME SETTINGS: of {label}, seeds 0 and 2 had balance=none and seed 1 had balance=class"
    assert told in render_comparison(experiment, found).splitlines()[-1].split(". ")
    assert {line["note"] for line in rows(experiment, found)} == {told}
    assert "SAME SETTINGS" not in render_comparison(experiment, [found[0], found[2]])
    rounds = [found[0], one(experiment, 1, sites=sites, sha="b", rounds=9)]
    assert f"of {label}, seed 0 had rounds=5 and seed 1 had rounds=9." in render_comparison(experiment, rounds)
    before = [found[0], one(experiment, 1, sites=sites, sha="b")]  # other only in the run that they start from
    assert "seed 0 had settings_sha256=a and seed 1 had settings_sha256=b" in render_comparison(experiment, before)


def test_a_seed_whose_rows_other_runs_had_other_settings_is_refused(tmp_path, monkeypatch, cached):
    """docs/guides/papers-tables.md: it was accepted, and the table averaged both."""
    monkeypatch.setenv("EDGEFL_DATA", "/nowhere")
    assert edgefl_train("experiment", FILE, *CHOICE, "--out", tmp_path / "o").code == 0
    found = edgefl_train("experiment", FILE, *CHOICE, "--out", tmp_path / "o", "--seeds", "1", "--balance", "class")
    assert found.code == 2 and not (tmp_path / "o/centres/local-bt/seed-1").exists()
    assert "local-bt/seed-0 has balance = 'none', but this command has 'class'" in found.err.splitlines()[-1]
    assert edgefl_train("experiment", FILE, *CHOICE, "--out", tmp_path / "o", "--seeds", "1").code == 0


# ------------------------------------------------------------------------------------ figures that seeds lack


def reaching(figure: float) -> list[dict[str, object]]:
    return [{"phase_index": 0, "round": 4, "seconds": 60.0, "bytes_up": 100, "tune_open_accuracy": figure}]


def test_what_it_took_is_told_of_the_seeds_that_reached_the_target():
    """Seed 0 is there in round 4, the others never: the mean of those that reached it was shown as that of all."""
    experiment = read_experiment(TARGETS)
    label = experiment.rows[0].label
    found = [one(experiment, seed, lines=reaching(figure)) for seed, figure in ((0, 0.9), (1, 0.7), (2, 0.7))]
    text = render_comparison(experiment, found)
    (line,) = [line for line in text.splitlines() if line.startswith(f"| {label} |")]
    assert "| 1 of 3 seeds: 4 |" in line and "| 1 of 3 seeds: 60 |" in line and "| 1 of 3 seeds: 100 B |" in line
    told = (
        f"NOT EVERY SEED HAS A FIGURE: seeds 1 and 2 of {label} never reached the target under Training Time (sec), "
        "Params Communicated and Rounds Required; means there are over the other seeds. "
    )
    assert told in text
    assert {line["seeds_without"] for line in rows(experiment, found)} == {"1 2"}
    none = render_comparison(experiment, found[1:])
    assert "NOT EVERY SEED" not in none and "of 2 seeds" not in none
    assert "of 2 seeds" not in render_comparison(experiment, [found[0], one(experiment, 1, lines=reaching(0.9))])


def test_a_figure_that_a_seed_lacks_is_told():
    experiment = read_experiment(FILE)
    label = experiment.rows[0].label
    found = [one(experiment, 0, sites={"a": site(0.5)}), one(experiment, 1, sites={"a": site(None)})]
    text = render_comparison(experiment, found)
    assert f"seed 1 of {label} without one under Avg" in text and "| 1 of 2 seeds: 50.00 |" in text
    (cell,) = [line for line in rows(experiment, found) if line["column"] == "Avg"]
    assert (cell["ours"], cell["seeds"], cell["seeds_without"]) == ("0.5", "0 1", "1")


# ------------------------------------------------------------------------------------------ sites of no round


@pytest.fixture
def absent() -> tuple[Experiment, list[Found]]:
    """Of three sites one was never drawn, and another is judged on two of three classes."""
    experiment = read_experiment(FILE)
    sites = {
        "a": site(0.4, took_part={"rounds": 2, "of": 2}, classes_tested=3),
        "b": site(0.6, took_part={"rounds": 1, "of": 2}, classes_tested=2),
        "c": site(0.2, took_part={"rounds": 0, "of": 2}, classes_tested=3),
    }
    found = one(experiment, sites=sites)
    found.measured.summary["classes"] = list("xyz")
    return experiment, [found]


def test_a_site_of_no_round_is_marked_named_and_left_out_of_a_figure_beside(absent):
    """docs/reference/runs.md, as `table RUN…` does it. By hand: 0.4 with it, 0.5 without."""
    experiment, found = absent
    text, label = render_comparison(*absent), experiment.rows[0].label
    assert "c took part in no round: its model has learned nothing from its pictures" in text
    assert "‡ took part in no round; left out of `ours without ‡`" in text and "| Avg, ours without ‡ |" in text
    (line,) = [line for line in text.splitlines() if line.startswith(f"| {label} |")]
    assert "40.00 ± 20.00†‡ |" in line and "| 50.00 ± 14.14† |" in line
    assert r"\ddag{}" in render_comparison(experiment, found, "latex")


def test_the_csv_has_what_a_page_marks(absent):
    (cell,) = [line for line in rows(*absent) if line["column"] == "Avg"]
    assert (cell["fewer_classes"], cell["no_round"]) == ("b", "c")
    assert float(cell["trained"]) == pytest.approx(0.5)
    assert float(cell["trained_std"]) == pytest.approx(0.02**0.5)
    (table,) = json.loads(render_comparison(*absent, "json"))["tables"]
    (line,) = [line for line in table["rows"] if line["seeds"]]
    assert line["ours"][table["columns"].index("Avg")]["no_round"] == ["c"]


def test_a_table_whose_sites_all_took_part_says_nothing_of_it():
    experiment = read_experiment(FILE)
    sites = {"a": site(0.4, took_part={"rounds": 2, "of": 2}), "d": site(0.1, held_out=True)}
    text = render_comparison(experiment, [one(experiment, sites=sites)])
    assert "‡" not in text and "no round" not in text
