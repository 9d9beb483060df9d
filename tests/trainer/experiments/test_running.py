"""`edgefl-train experiment`, `edgefl-train table --experiment`: rows really run, are kept, and stand beside the paper.

The tiny variant of every file runs one row here; test_files.py checks that the other rows resolve.
"""

import csv
import io
import json
import re
import statistics
from pathlib import Path

import pytest
from tests.trainer.conftest import edgefl_train, make_asked

from edgefl_trainer.engine.settings import RunSettings
from edgefl_trainer.evaluate.one_class import FEWER_SAYS
from edgefl_trainer.evaluate.tables.text import render_table
from edgefl_trainer.experiments.comparison import Found, bars_of
from edgefl_trainer.experiments.comparison_text import caption, render_comparison
from edgefl_trainer.experiments.files import Column, read_experiment
from edgefl_trainer.experiments.measured import Measurement, cell_of, figure_of

ROOT = Path(__file__).parents[3]
FILES = sorted((ROOT / "experiments").glob("*.toml"))
SOON = {"fedevprompt-table-1", "pep-fedpt-table-2"}  # the two that `make test` runs
DEAREST = {"sgpt", "fedevprompt", "fedavgpers", "pep-fedpt"}  # rows that take longest


def cheap_row(path: Path, place: int) -> str:
    """One row of a file; other files take other methods, so that together they try most."""
    rows = read_experiment(path).rows
    cheap = [row for row in rows if row.method not in DEAREST] or rows
    return cheap[place % len(cheap)].folder


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory, cached: None) -> Path:
    return tmp_path_factory.mktemp("experiments")


@pytest.mark.parametrize(
    "place",
    [
        pytest.param(place, id=path.stem, marks=[] if path.stem in SOON else [pytest.mark.slow])
        for place, path in enumerate(FILES)
    ],
)
def test_a_tiny_row_of_every_file_runs(place, out, tmp_path, monkeypatch):
    """Without the papers' data: `--tiny` draws its own. Questions are those of the data, so they are drawn here."""
    monkeypatch.setenv("EDGEFL_DATA", str(tmp_path))
    if FILES[place].stem.startswith("medvqa"):
        make_asked(tmp_path / "vqa_rad.zip", {"HEAD": 12, "CHEST": 12, "ABD": 12})
    path, row = FILES[place], cheap_row(FILES[place], place)
    part = next(part.name for part, one in read_experiment(path).pairs() if one.folder == row)
    found = edgefl_train(
        "experiment", path, "--tiny", "--rows", row, "--parts", part, "--out", out / path.stem, "--device", "cpu",
        "--rounds", 1, "--format", "json",
    )  # fmt: skip
    (table,) = found.json()["tables"]
    assert table["part"] == part
    labels = {one.label for one in read_experiment(path).rows}  # the usual answer is a row of no file
    (ran,) = [line for line in table["rows"] if line["seeds"] and line["label"] in labels]
    assert ran["seeds"] == [0] and ran["bytes_up_per_round"] >= 0
    assert "nothing here can be compared with the paper" in table["caption"]


FILE = ROOT / "experiments/fedevprompt-table-1.toml"
CHOICE = ("--tiny", "--rows", "local-bt,fedavg-bt", "--device", "cpu", "--rounds", "1")


@pytest.fixture(scope="module")
def ran(tmp_path_factory, cached):
    folder = tmp_path_factory.mktemp("again")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EDGEFL_DATA", "/nowhere")
        found = edgefl_train("experiment", FILE, *CHOICE, "--out", folder, "--seeds", "0,1")
    assert found.code == 0, found.err
    return folder, found


def test_a_trial_says_so_before_it_runs(ran):
    """It began with "25 min a run", the time of the full table."""
    head = ran[1].err.splitlines()[0]
    assert "tiny: seconds to minutes a run, nothing here can be compared with the paper" in head
    assert " min a" not in head


def times(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


def test_what_is_finished_is_not_run_again(ran, monkeypatch):
    folder, first = ran
    monkeypatch.setenv("EDGEFL_DATA", "/nowhere")
    before = times(folder)
    again = edgefl_train("experiment", FILE, *CHOICE, "--out", folder, "--seeds", "0,1")
    assert again.code == 0 and again.out == first.out
    assert again.err.count("finished before") == 4
    assert times(folder) == before


def test_other_settings_in_the_same_folder_are_refused(ran, monkeypatch):
    folder, _ = ran
    monkeypatch.setenv("EDGEFL_DATA", "/nowhere")
    before = times(folder)
    found = edgefl_train("experiment", FILE, *CHOICE, "--out", folder, "--epochs", "3")
    assert found.code == 2 and "name another --out" in found.sentence()
    assert times(folder) == before


def test_the_table_shows_ours_beside_the_papers_numbers(ran):
    folder, first = ran
    by_folder = edgefl_train("table", folder, "--experiment", FILE)
    assert by_folder.out == first.out
    rows = list(csv.DictReader(io.StringIO(edgefl_train("table", folder, "--experiment", FILE, "--format", "csv").out)))
    (cell,) = [row for row in rows if (row["row"], row["column"]) == ("FedAvg", "Avg")]
    summaries = [json.loads((folder / f"centres/fedavg-bt/seed-{s}/summary.json").read_text()) for s in (0, 1)]
    means = [summary["mean_balanced_accuracy"] for summary in summaries]
    assert (cell["paper"], cell["seeds"]) == ("73.31±3.64", "0 1")
    assert float(cell["ours"]) == pytest.approx(statistics.mean(means))
    assert (cell["paper_value"], cell["paper_std"]) == ("0.7331", "0.0364")  # in the unit of `ours`
    assert {row["note"] for row in rows} == {"nothing here can be compared with the paper"}  # --tiny
    (c5,) = [row for row in rows if (row["row"], row["column"]) == ("FedProto", "C5")]
    assert (c5["paper"], c5["ours"], c5["seeds"]) == ("58.52", "", "")
    lines = first.out.splitlines()
    assert sum(line.startswith("| ") for line in lines) == 2 + 8
    for words in ("Seeds 0, 1", "Preset tiny", "over sites", "commit ", "Table 1, page 7"):
        assert words in first.out.rstrip().splitlines()[-1], words


def test_a_row_that_lacks_a_seed_is_marked(ran):
    """As where a study goes on, or a run of it failed: means over other seeds stood side by side unmarked."""
    folder, first = ran
    assert "| method | seeds |" not in first.out and "SAME SEEDS" not in first.out
    runs = [folder / f"centres/{place}" for place in ("local-bt/seed-0", "fedavg-bt/seed-0", "fedavg-bt/seed-1")]
    text = edgefl_train("table", *runs, "--experiment", FILE).out
    told = {line.split(" | ")[1] for line in text.splitlines() if line.startswith("| ")}
    assert told == {"seeds", "---:", "0", "0, 1", "–"}  # most rows of the paper were not run
    last = text.rstrip().splitlines()[-1]
    assert last.startswith("NOT ALL WITH THE SAME SEEDS: seed 0 of ") and "seeds 0 and 1 of FedAvg. " in last


def test_runs_made_by_hand_find_their_row(ran, tmp_path):
    """A run's method and the hyper-parameters of the row decide where it does not lie in PART/ROW/seed-N."""
    folder, _ = ran
    (tmp_path / "mine").symlink_to(folder / "centres/fedavg-bt/seed-0")
    tables = json.loads(edgefl_train("table", tmp_path / "mine", "--experiment", FILE, "--format", "json").out)
    assert [line["label"] for line in tables["tables"][0]["rows"] if line["seeds"]] == ["FedAvg"]
    stranger = ROOT / "experiments/pep-fedpt-table-1.toml"
    found = edgefl_train("table", tmp_path / "mine", "--experiment", stranger)
    assert found.code == 2 and "none of the experiment's rows" in found.sentence()


def test_a_run_twice_is_told(ran):
    folder, _ = ran
    found = edgefl_train("table", folder, folder, "--experiment", FILE)
    assert found.code == 2 and "is there twice" in found.sentence()


def test_rounds_and_bytes_are_drawn(ran, tmp_path):
    folder, _ = ran
    found = edgefl_train("table", folder, "--experiment", FILE, "--plot", tmp_path / "a.png")
    assert found.code == 0 and (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_a_dry_run_prints_commands_and_leaves_nothing(tmp_path):
    file = ROOT / "experiments/pep-fedpt-table-13.toml"
    found = edgefl_train("experiment", file, "--tiny", "--out", tmp_path / "o", "--dry-run")
    lines = found.out.splitlines()
    assert found.code == 0 and not (tmp_path / "o").exists()
    assert [line.split()[1] for line in lines] == ["-p", "partition", "run", "run", "run"]
    assert re.search(r"--scheme pathological --sites 4 --classes-per-site 2 .*-o ", lines[1])
    assert [re.search(r"--set ccmp_blocks=([\d,]+)", line)[1] for line in lines[2:]] == ["1,2,3", "5,6,7", "8,9,10"]


@pytest.mark.parametrize("known", [True, False])
def test_a_row_that_fails_does_not_stop_the_others(known, tmp_path, monkeypatch):
    """Also by an error that nobody foresaw, as where the memory of a card is full; that one's traceback is shown."""
    monkeypatch.setenv("EDGEFL_DATA", "/nowhere")
    from edgefl_trainer.errors import TrainingError
    from edgefl_trainer.experiments import crews

    plain = crews.make_run

    def diverge(settings, *rest):
        if settings.method == "local":
            raise TrainingError("site a diverged.") if known else RuntimeError("out of memory")
        return plain(settings, *rest)

    monkeypatch.setattr(crews, "make_run", diverge)
    found = edgefl_train("experiment", FILE, *CHOICE, "--out", tmp_path / "o")
    cause = "site a diverged." if known else "RuntimeError: out of memory"
    assert found.code == 1 and f"failed: {cause}" in found.err and "1 run failed" in found.err
    assert ("Traceback" in found.err) != known and "FedAvg |" in found.out


# ---------------------------------------------------------------------------------------------- figures, by hand


SITES = {
    "clipart-1": {"accuracy": 0.8, "balanced_accuracy": 0.7, "held_out": False},
    "clipart-2": {"accuracy": 0.6, "balanced_accuracy": 0.5, "held_out": False},
    "real-1": {"accuracy": 0.1, "balanced_accuracy": None, "held_out": False},
    "real-2": {"accuracy": 0.9, "balanced_accuracy": 0.9, "held_out": True},
}


def measured(sites=SITES, lines=(), seed=0):
    return Measurement(seed=seed, summary={"sites": sites}, lines=lines)


@pytest.mark.parametrize(
    ("column", "wanted"),
    [
        ({"figure": "mean"}, 0.5),
        ({"figure": "worst"}, 0.1),
        ({"figure": "mean", "sites": "clipart*"}, 0.7),
        ({"figure": "mean", "held_out": True}, 0.9),
        ({"figure": "mean", "metric": "balanced_accuracy"}, 0.6),
        ({"figure": "p10"}, 0.1 + 0.2 * (0.6 - 0.1)),  # linear between the ranks: 10 % of 0 … 2 is 0.2
        ({"figure": "none"}, None),
        ({"figure": "mean", "sites": "sketch*"}, None),
    ],
)
def test_figures_over_sites(column, wanted):
    """docs/methods.md 8.4: each site counts once; sites that never trained stand apart; percentiles are linear."""
    found = figure_of(Column(name="x", **column), "accuracy", measured())
    assert found == (None if wanted is None else pytest.approx(wanted))


@pytest.mark.parametrize(("figure", "wanted"), [("worst", 0.4), ("p10", 0.1 + 0.8 * (0.4 - 0.1))])
def test_the_worst_sites_of_an_error_have_the_largest(figure, wanted):
    """docs/methods.md 8.4: of `ece`, `brier` and `aurc` lower is better, so sites that do worst are at the top."""
    sites = {name: {"ece": value, "held_out": False} for name, value in {"a": 0.05, "b": 0.1, "c": 0.4}.items()}
    found = figure_of(Column(name="x", figure=figure, metric="ece"), "accuracy", measured(sites))
    assert found == pytest.approx(wanted)


def test_what_it_took_to_get_there():
    """PEP-FedPT Table 6: rounds, time of all sites, bytes that one site sent, all phases counted."""
    lines = [
        {"phase_index": i, "round": i, "site": site, "seconds": 2.0, "bytes_up": 100 * (i + 1)}
        | ({"tune_balanced_accuracy": 0.6 + 0.1 * i, "tune_open_accuracy": 0.5 + 0.1 * i} if i else {})
        for i in range(4)
        for site in ("a", "b")
    ]
    run = measured(lines=lines)
    took = {
        f: figure_of(Column(name="x", figure=f, target=0.79), "accuracy", run) for f in ("rounds", "seconds", "bytes")
    }
    assert took == {"rounds": 2, "seconds": 12.0, "bytes": 600.0}
    assert figure_of(Column(name="x", figure="rounds", target=0.95), "accuracy", run) is None
    assert figure_of(Column(name="x", figure="rounds", target=0.79), "open_accuracy", run) == 3


def test_spread_runs_over_what_the_paper_says():
    column = Column(name="x", figure="mean")
    runs = [measured({"a": {"accuracy": a}, "b": {"accuracy": b}}) for a, b in ((0.2, 0.4), (0.4, 0.8))]
    over_seeds = cell_of(column, "accuracy", "seeds", runs)
    assert (over_seeds.value, over_seeds.std) == pytest.approx((0.45, statistics.stdev([0.3, 0.6])))
    over_sites = cell_of(column, "accuracy", "sites", runs)
    assert (over_sites.value, over_sites.std) == pytest.approx((0.45, statistics.stdev([0.3, 0.6])))
    assert cell_of(column, "accuracy", "seeds", runs[:1]).std is None
    assert cell_of(column, "accuracy", "sites", runs[:1]).std == pytest.approx(statistics.stdev([0.2, 0.4]))
    for spread, values in (("seeds", [0.3, 0.6]), ("sites", [0.3, 0.6])):
        found = cell_of(column, "accuracy", spread, runs, ddof=0)
        assert found.std == pytest.approx(statistics.pstdev(values))


def test_a_site_of_one_class_is_left_out_of_a_figure_beside():
    """The rule of `table`: a constant answer is always right about one class. 0.5 without it, by hand."""
    sites = {
        "a": {"accuracy": 0.4, "classes_tested": 2}, "b": {"accuracy": 0.6, "classes_tested": 2},
        "c": {"accuracy": 1.0, "classes_tested": 1},
    }  # fmt: skip
    found = cell_of(Column(name="x", figure="mean"), "accuracy", "sites", [measured(sites)])
    assert (found.value, found.several.value) == (pytest.approx(2 / 3), pytest.approx(0.5))
    assert found.several.std == pytest.approx(statistics.stdev([0.4, 0.6]))
    for column in (Column(name="x", figure="mean", sites="a"), Column(name="x", figure="none")):
        assert cell_of(column, "accuracy", "sites", [measured(sites)]).several is None
    experiment = read_experiment(FILE)
    part, settings = experiment.parts[0], RunSettings(method="local", data=("lesions:",), preset="paper")
    figures = ("balanced_accuracy", "open_balanced_accuracy")
    sites = {name: {**dict.fromkeys(figures, one["accuracy"]), **one, "held_out": False} for name, one in sites.items()}
    run = Measurement(seed=0, summary={"reported_rows": "test", "sites": sites, **dict.fromkeys(TRAFFIC, 0)}, lines=())
    row = next(row for row in experiment.rows if row.method == "local")
    one = Found(part=part.name, row=row.folder, measured=run, settings=settings, environment={})
    text = render_comparison(experiment, [one])
    assert "c*: one class only" in text and "Avg, ours without *" in text
    (line,) = [line for line in text.splitlines() if line.startswith(f"| {row.label} |") and "66.67" in line]
    assert "| 50.00 ± 14.14 |" in line
    bars, groups = bars_of(experiment, [one])
    assert bars[row.label][groups.index("Avg")].ours == pytest.approx(50.0)


def test_a_figure_of_sites_without_a_row_of_some_class_is_marked_as_in_table():
    """Only the tables of runs that are named marked it: here a mean over such a site stood as any other."""
    experiment = read_experiment(FILE)
    part, settings = experiment.parts[0], RunSettings(method="local", data=("lesions:",), preset="paper")
    found = []
    for method, tested in (("local", 2), ("fedavg", 3)):
        sites = {
            name: {"balanced_accuracy": figure, "classes_tested": number, "held_out": False}
            for name, figure, number in (("a", 0.4, 3), ("b", 0.6, tested))
        }
        told = {"classes": list("xyz"), "sites": sites, "method": method, "task": "all", **dict.fromkeys(TRAFFIC, 0)}
        row = next(row.folder for row in experiment.rows if row.method == method)
        run = Measurement(seed=0, summary=told, lines=())
        found.append(Found(part=part.name, row=row, measured=run, settings=settings, environment={}))
    text = render_comparison(experiment, found)
    sentence = f"† {FEWER_SAYS} (b)."
    assert sentence in text and sentence in render_table([found[0].measured.summary])
    assert sum("50.00 ± 14.14† |" in line for line in text.splitlines()) == 1 and "50.00 ± 14.14 |" in text
    assert "†" not in render_comparison(experiment, found[1:])
    assert r"\dag{}" in render_comparison(experiment, found, "latex")


TRAFFIC = ("bytes_up_per_round", "bytes_down_per_round", "seconds")


def test_a_column_that_no_row_fills_is_left_out_and_named():
    """A run of two rounds at 30 % never reaches 83 %: `rounds` and `bytes` of it were columns of dashes."""
    experiment = read_experiment(ROOT / "experiments/pep-fedpt-table-6.toml")
    part, settings = experiment.parts[0], RunSettings(method="fedvpt", data=("lesions:",), preset="tiny")
    summary = {"reported_rows": "test", "sites": {}, **dict.fromkeys(TRAFFIC, 0)}

    def table(figure, style="md"):
        lines = [{"phase_index": 0, "seconds": 1.0, "bytes_up": 100, "round": 1, "tune_open_accuracy": figure}]
        run = Measurement(seed=0, summary=summary, lines=lines)
        row = experiment.rows[0].folder
        return render_comparison(
            experiment, [Found(part=part.name, row=row, measured=run, settings=settings, environment={})], style
        )

    def heads(text):
        return text.splitlines()[0].strip("| ").split(" | ")

    full, bare = heads(table(0.9)), heads(table(0.3))
    gone = [head for head in full if head not in bare]
    assert gone and all(head.endswith(", ours") for head in gone)
    assert f"Without a figure in any row, and left out: {', '.join(gone)}." in table(0.3)
    assert "left out" not in table(0.9) and "left out" in table(0.3, "latex")
    columns = list(
        zip(*(line.strip("| ").split(" | ") for line in table(0.3).splitlines()[2:] if "|" in line), strict=True)
    )
    assert not any(set(cells) == {"–"} for cells in columns)
    assert [line for line in table(0.3, "csv").splitlines() if line.split(",")[3] == ""]  # programs find every column


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("pep-fedpt-table-6", "Ours: what it took until open accuracy on tune rows, mean over sites, was 83.0%. Data"),
        ("pep-fedpt-table-4", "Ours: open accuracy in per cent on `test` rows. Data"),
        ("fedevprompt-table-2", "Ours: open balanced accuracy, balanced accuracy in per cent on `test` rows. Data"),
    ],
)
def test_a_caption_says_what_ours_are(name, said):
    """Table 6 of PEP-FedPT counts rounds, bytes and seconds: no figure of it is a per cent of reported rows."""
    experiment = read_experiment(ROOT / f"experiments/{name}.toml")
    run = Measurement(seed=0, summary={"reported_rows": "test", "sites": {}, **dict.fromkeys(TRAFFIC, 0)}, lines=())
    settings = RunSettings(method="fedvpt", data=("lesions:",), preset="paper")
    part = experiment.parts[0]
    found = Found(part=part.name, row="fedvpt", measured=run, settings=settings, environment={})
    assert said in caption(experiment, part, [found])


def test_a_caption_gives_a_random_start_no_rounds():
    """The settings of `random-init` name rounds as those of its neighbours do; it learns in none of them."""
    experiment = read_experiment(ROOT / "experiments/fedclf-fedmae-table-1.toml")
    part, run = (
        experiment.parts[0],
        Measurement(seed=0, summary={"reported_rows": "test", "sites": {}, **dict.fromkeys(TRAFFIC, 0)}, lines=()),
    )
    second = RunSettings(method="finetune", data=("lesions:",), preset="paper", backbone="run:there")
    found = [
        Found(part=part.name, row=row, measured=run, settings=second, environment={}, first=first)
        for row, first in (
            ("random-local", RunSettings(method="random-init", data=("lesions:",), backbone="cnn:resnet18", rounds=20)),
            ("fedclf-local", RunSettings(method="fedclf", data=("lesions:",), backbone="cnn:resnet18", rounds=20)),
        )
    ]
    told = caption(experiment, part, found)
    assert "Network cnn:resnet18 after random-init, cnn:resnet18 after fedclf (bench84, 20 rounds of 2 epochs)" in told


@pytest.mark.parametrize("style", ["md", "csv", "json", "latex"])
def test_a_file_without_runs_still_shows_the_paper(style):
    text = render_comparison(read_experiment(FILE), [], style)
    assert "77.26" in text and "68.34" in text
