"""Experiments whose rows have two stages: pre-training without labels, then fine-tuning. Source:
docs/guides/papers-tables.md.

One drawn federation of two sites, a network of 32 x 2; FedMAE before, both modes of fine-tuning after it.
"""

import json
import re
import shlex
from pathlib import Path

import pytest
from matplotlib.figure import Figure
from tests.trainer.conftest import edgefl_train

from edgefl_trainer.errors import SettingError, TrainingError
from edgefl_trainer.evaluate.plots.bars import Bar, _annotate, _draw, plot_bars
from edgefl_trainer.experiments import crews
from edgefl_trainer.experiments.files import Column, read_experiment
from edgefl_trainer.experiments.measured import Measurement, figure_of
from edgefl_trainer.experiments.planning import Choice, commands, plan_runs, pretraining_of

FILE = """
title = "Two stages"
metric = "macro_recall"
spread = "seeds"
settings = { preset = "bench84", image_px = 84 }

[source]
paper = "P"
place = "T"
caption = "C"

[[commands]]
run = "edgefl-train experiment two.toml --out runs/two"
minutes = 1
machine = "m"
basis = "estimated"

[pretrain]
settings = { rounds = 20 }
hyper = { decoder_width = 64 }

[[parts]]
name = "ten"
federation = "one"
data = ["lesions:sites=2,images=28,px=48"]
partition = { scheme = "iid", sites = 2 }
settings = { labels = 0.1 }
columns = [{ name = "Recall", figure = "mean" }]

[[parts]]
name = "eighty"
federation = "one"
data = ["lesions:sites=2,images=28,px=48"]
partition = { scheme = "iid", sites = 2 }
settings = { labels = 0.8 }
columns = [{ name = "Recall", figure = "mean" }, { name = "F1", figure = "pooled", metric = "macro_f1" }]

[[rows]]
label = "Alone"
method = "finetune"
hyper = { mode = "local" }
pretrain = { method = "fedmae", settings = { backbone = "vit:192x12/12" } }
paper = { ten = ["41.31"], eighty = ["50.00", ""] }

[[rows]]
label = "Together"
method = "finetune"
hyper = { mode = "federated" }
pretrain = { method = "fedmae", settings = { backbone = "vit:192x12/12" } }

[[rows]]
label = "Together, all averaged"
method = "finetune"
parts = ["eighty"]
hyper = { mode = "federated" }
[rows.pretrain]
method = "fedmae"
run = "all"
hyper = { keep_local = "none" }
settings = { backbone = "vit:192x12/12" }

[tiny]
data = ["lesions:sites=2,images=28,px=48"]
settings = { preset = "tiny", image_px = 36 }
backbones = { "vit:192x12/12" = "vit:32x2/12" }
pretrain = { settings = { rounds = 1 }, hyper = { decoder_width = 32 } }
"""


def written(folder: Path, old: str = "", new: str = "") -> Path:
    assert not old or FILE.count(old) >= 1
    path = folder / "two.toml"
    path.write_text(FILE.replace(old, new, 1) if old else FILE, encoding="utf-8")
    return path


def planned(folder: Path, **choice):
    return plan_runs(read_experiment(written(folder)), Choice(out=folder / "o", **choice), {})


# ---------------------------------------------------------------------------------------------------------- planning


def test_rows_and_parts_share_a_pretraining(tmp_path):
    runs = planned(tmp_path, seeds=(0, 1))
    assert len(runs) == 2 * (2 + 3)
    found = [first.folder.relative_to(tmp_path / "o").as_posix() for first in pretraining_of(runs)]
    assert found == [f"pretraining/one/{run}/seed-{seed}" for run in ("fedmae", "all") for seed in (0, 1)]
    for run in runs:
        assert run.settings.backbone == f"run:{run.pretraining.folder}"
        assert run.settings.seed == run.pretraining.settings.seed
        assert run.settings.partition == run.pretraining.settings.partition == str(tmp_path / "o/partitions/one.json")


def test_what_each_stage_is_given(tmp_path):
    """Data, sizes and preset are shared; rounds, hyper-parameters and the share of labels are each stage's own."""
    run = planned(tmp_path)[0]
    first = run.pretraining.settings
    assert (first.method, first.rounds, first.backbone, first.labels) == ("fedmae", 20, "vit:192x12/12", 1.0)
    assert (first.preset, first.image_px, first.unlabelled) == ("bench84", 84, "spread")
    assert first.hyper["decoder_width"] == 64
    assert (run.settings.labels, run.settings.image_px, run.settings.unlabelled) == (0.1, 84, "none")
    assert run.settings.hyper["mode"] == "local" and run.settings.rounds != 20


def test_the_tiny_variant_replaces_networks_by_name(tmp_path):
    run = planned(tmp_path, tiny=True)[0]
    first = run.pretraining.settings
    assert (first.backbone, first.rounds, first.preset, first.image_px) == ("vit:32x2/12", 1, "tiny", 36)
    assert first.hyper["decoder_width"] == 32


def test_flags_say_which_stage_they_are_for(tmp_path):
    flags = {"rounds": 3, "pretrain_rounds": 4, "pretrain_epochs": 2, "images_per_site": 9, "backbone": "vit:64x2/12"}
    run = planned(tmp_path, flags=flags, assignments=("batch=7", "pretrain.batch=5"))[0]
    first = run.pretraining.settings
    assert (run.settings.rounds, first.rounds, first.epochs) == (3, 4, 2)
    assert run.settings.images_per_site == first.images_per_site == 9
    assert first.backbone == "vit:64x2/12" and run.settings.backbone.startswith("run:")
    assert (run.settings.hyper["batch"], first.hyper["batch"]) == (7, 5)


def test_a_row_without_a_first_run_keeps_the_network_it_names(tmp_path):
    """`--backbone` is of the first runs: a row that says what it starts from would else be shown under a wrong name."""
    old = 'pretrain = { method = "fedmae", settings = { backbone = "vit:192x12/12" } }\npaper'
    file = written(tmp_path, old, 'settings = { backbone = "derm-vit-tiny-84" }\npaper')
    choice = Choice(out=tmp_path / "o", flags={"backbone": "vit:32x2/12"})
    alone, together, *_ = plan_runs(read_experiment(file), choice, {})
    assert alone.settings.backbone == "derm-vit-tiny-84" and alone.pretraining is None
    assert together.pretraining.settings.backbone == "vit:32x2/12"


def test_presets_ask_for_the_network_before_it_is_there(tmp_path):
    """Fine-tuning has other rates for a convolutional network (arXiv 2208.11278, V-A and V-B)."""
    path = written(tmp_path)
    path.write_text(
        FILE.replace('"vit:192x12/12" }', '"cnn:resnet18" }').replace('preset = "bench84"', 'preset = "paper"')
    )
    row = plan_runs(read_experiment(path), Choice(out=tmp_path, rows=("alone",)), {})[0]
    assert (row.settings.rounds * row.settings.epochs, row.settings.hyper["lr"]) == (20, 1e-4)
    plain = planned(tmp_path, flags={"preset": "paper"})[0]
    assert (plain.settings.rounds * plain.settings.epochs, plain.settings.hyper["lr"]) == (200, 1e-3)


def test_commands_make_the_same_runs_in_an_order_that_works(tmp_path):
    lines = [shlex.split(line) for line in commands(planned(tmp_path, tiny=True))]
    assert [words[1] for words in lines] == ["-p", "partition", *["run"] * 7]
    outs = [words[words.index("--out") + 1] for words in lines[2:]]
    for words, out in zip(lines[2:], outs, strict=True):
        backbone = words[words.index("--backbone") + 1]
        assert backbone == "vit:32x2/12" or backbone.removeprefix("run:") in outs[: outs.index(out)]
    labels = [words[words.index("--labels") + 1] for words in lines[2:] if "--labels" in words]
    assert labels == ["0.1", "0.1", "0.8", "0.8", "0.8"]


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("[pretrain]\nsettings = { rounds = 20 }", "[pretrain]\nsettings = { image_px = 84 }", "same in both stages"),
        ("[pretrain]\nsettings = { rounds = 20 }", "[pretrain]\nsettings = { round = 20 }", "did you mean rounds"),
        ('method = "finetune"', 'method = "finetune"\nsettings = { backbone = "tiny" }', "give the backbone there"),
        ('{ method = "fedmae", settings', '{ methods = "fedmae", settings', "did you mean method"),
        ("sites=2,images=28,px=48\"]\npartition", "sites=3,images=28,px=48\"]\npartition", "of one federation, 'one'"),
        ('federation = "one"', 'federation = "One/.."', "'One/..' is to be the name of a folder"),
        ('run = "all"', 'run = "ALL"', "'ALL' is to be the name of a folder"),
        ('{ name = "Recall", figure = "mean" }', '{ name = "R", figure = "pooled", sites = "a" }', "of all sites"),
    ],
)  # fmt: skip
def test_what_is_wrong_in_a_file_is_one_sentence(old, new, words, tmp_path):
    with pytest.raises(SettingError, match=re.escape(words)):
        read_experiment(written(tmp_path, old, new))


@pytest.mark.parametrize(
    ("old", "new", "choice", "words"),
    [
        ('run = "all"', 'run = "fedmae"', {}, "'Together, all averaged' starts from pretraining/one/fedmae/seed-0"),
        ("decoder_width = 64", "decoder_with = 64", {}, "did you mean decoder_width"),
        ("", "", {"assignments": ("pretrain.mode=local",)}, "no method here has a hyper-parameter 'mode'"),
        ("", "", {"assignments": ("decoder_width=8",)}, "no method here has a hyper-parameter 'decoder_width'"),
        ('method = "fedmae", settings', 'method = "fedmea", settings', {}, "did you mean fedmae"),
    ],
)
def test_what_cannot_be_planned_is_one_sentence(old, new, choice, words, tmp_path):
    experiment = read_experiment(written(tmp_path, old, new))
    with pytest.raises(SettingError, match=re.escape(words)):
        plan_runs(experiment, Choice(out=tmp_path, **choice), {})


def test_a_file_of_one_stage_takes_no_flag_of_the_other(tmp_path):
    path = Path(__file__).parents[3] / "experiments/fedevprompt-table-1.toml"
    found = edgefl_train("experiment", path, "--tiny", "--out", tmp_path / "o", "--pretrain-rounds", 3)
    assert found.code == 2 and "no pre-training runs: leave --pretrain-rounds out" in found.sentence()


# ----------------------------------------------------------------------------------------------------------- running


@pytest.fixture(scope="module")
def ran(tmp_path_factory, cached):
    folder = tmp_path_factory.mktemp("two")
    found = edgefl_train("experiment", written(folder), "--tiny", "--device", "cpu", "--rounds", 1, "--rows",
                         "alone,together", "--out", folder / "o")  # fmt: skip
    assert found.code == 0, found.err
    return folder, found


def again(folder: Path, *more: object):
    return edgefl_train("experiment", folder / "two.toml", "--tiny", "--device", "cpu", "--rounds", 1, *more)


def test_a_pretraining_is_made_once_and_before_its_rows(ran):
    folder, found = ran
    told = [line for line in found.err.splitlines() if "seed-0" in line and not line.startswith("edgefl")]
    assert [
        line for line in told if line == "pretraining/one/fedmae/seed-0"
    ] and "4 runs that start from 1" in found.err
    assert told[0] == "pretraining/one/fedmae/seed-0"
    summaries = sorted(
        path.parent.relative_to(folder / "o").as_posix() for path in (folder / "o").rglob("summary.json")
    )
    rows = [f"{part}/{row}/seed-0" for part in ("eighty", "ten") for row in ("alone", "together")]
    assert summaries == sorted([*rows, "pretraining/one/fedmae/seed-0"])
    ours = json.loads((folder / "o/ten/alone/seed-0/summary.json").read_text())
    first = json.loads((folder / "o/pretraining/one/fedmae/seed-0/summary.json").read_text())
    assert ours["backbone_sha256"] == first["backbone_sha256"]


def test_what_is_finished_is_not_made_again(ran):
    folder, first = ran
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}
    found = again(folder, "--rows", "alone,together", "--out", folder / "o")
    assert found.code == 0 and found.out == first.out and found.err.count("finished before") == 4
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()} == before


@pytest.mark.slow
def test_an_experiment_that_is_killed_again_and_again_ends_with_the_same_states(ran, tmp_path, kill_after):
    """docs/guides/papers-tables.md: the same command continues a table, wherever it was stopped, by kill -9 too."""
    command = ("experiment", written(tmp_path), "--tiny", "--device", "cpu", "--rounds", 1, "--parts", "ten",
               "--rows", "alone", "--out", tmp_path / "o")  # fmt: skip
    for moment in (
        "partitions/one.json",  # nothing but the partition
        "fedmae/seed-0/backbone.safetensors",  # the first stage has learned, but has no summary
        "fedmae/seed-0/summary.json",  # the first stage is finished, the second has not begun
        "ten/alone/seed-0/checkpoints/latest.json",
        "ten/alone/seed-0/calibration.json",
    ):
        kill_after(moment, *command)
    assert edgefl_train(*command).code == 0
    for run in ("pretraining/one/fedmae/seed-0", "ten/alone/seed-0"):
        found, whole = (json.loads((where / "o" / run / "summary.json").read_text()) for where in (tmp_path, ran[0]))
        assert (found["state_sha256"], found["sites"]) == (whole["state_sha256"], whole["sites"])


def test_the_table_shows_figures_of_the_second_stage(ran):
    folder, _ = ran
    found = edgefl_train("table", folder / "o", "--experiment", folder / "two.toml", "--format", "json")
    tables = {table["part"]: table for table in found.json()["tables"]}
    line = next(row for row in tables["eighty"]["rows"] if row["label"] == "Together")
    summary = json.loads((folder / "o/eighty/together/seed-0/summary.json").read_text())
    sites = [site["macro_recall"] for site in summary["sites"].values()]
    assert line["ours"][0]["value"] == pytest.approx(sum(sites) / 2)
    assert line["ours"][1]["value"] == pytest.approx(summary["pooled"]["macro_f1"])
    first = json.loads((folder / "o/pretraining/one/fedmae/seed-0/summary.json").read_text())
    assert (line["seconds"], line["seconds_before"]) == (summary["seconds"], first["seconds"])
    alone = next(row for row in tables["ten"]["rows"] if row["label"] == "Alone")
    assert alone["paper"] == ["41.31"] and len(alone["seeds"]) == 1
    assert "vit:32x2/12 after fedmae (tiny, 1 round of 1 epoch, at most " in tables["ten"]["caption"]
    assert (
        "10% of the labels" in tables["ten"]["caption"]
        and "macro F1 of all rows together" in tables["eighty"]["caption"]
    )


def test_runs_made_by_hand_find_part_and_row(ran, tmp_path):
    """Method, mode, share of labels and the first stage say which row a run is."""
    folder, _ = ran
    (tmp_path / "mine").symlink_to(folder / "o/ten/together/seed-0")
    found = edgefl_train("table", tmp_path / "mine", "--experiment", folder / "two.toml", "--format", "json").json()
    assert [(t["part"], r["label"]) for t in found["tables"] for r in t["rows"] if r["seeds"]] == [("ten", "Together")]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('{ mode = "federated" }\npretrain = { method = "fedmae", settings = { backbone = "vit:192x12/12" } }',
         '{ mode = "federated" }\nsettings = { backbone = "derm-vit-tiny-84" }'),
        ('federation = "one"', 'federation = "elsewhere"'),
    ],
    ids=["a row that starts from a network it names", "the same row on other data"],
)  # fmt: skip
def test_a_run_that_started_otherwise_is_not_shown_as_a_row(old, new, ran, tmp_path):
    """Method, mode and labels agree, but not the network it started from, or whose images that had seen."""
    folder, _ = ran
    (tmp_path / "mine").symlink_to(folder / "o/ten/together/seed-0")
    other = tmp_path / "other.toml"
    other.write_text(FILE.replace(old, new), encoding="utf-8")
    found = edgefl_train("table", tmp_path / "mine", "--experiment", other)
    assert found.code == 2 and "none of the experiment's rows" in found.sentence()


def test_rows_whose_pretraining_fails_are_told_and_others_go_on(tmp_path, cached, monkeypatch):
    plain = crews.make_run

    def diverge(settings, *rest):
        if settings.method == "fedmae" and settings.hyper.get("keep_local") == "none":
            raise TrainingError("site a diverged.")
        return plain(settings, *rest)

    monkeypatch.setattr(crews, "make_run", diverge)
    written(tmp_path)
    found = again(tmp_path, "--parts", "eighty", "--rows", "together-all-averaged,together", "--out", tmp_path / "o")
    assert "| time | time before |" in found.out and "time before is of the one that it starts from" in found.out
    assert found.code == 1 and "failed: it starts from pretraining/one/all/seed-0" in found.err
    assert "Traceback" not in found.err and "Together |" in found.out


# ------------------------------------------------------------------------------------------------------------ figures


def test_pooled_figures_are_those_of_all_rows():
    """docs/methods.md 8.4: in `pooled` each row counts once, over sites each site does."""
    summary = {"sites": {"a": {"macro_f1": 0.2}, "b": {"macro_f1": 0.4}}, "pooled": {"macro_f1": 0.37, "auroc": None}}
    run = Measurement(seed=0, summary=summary, lines=())
    assert figure_of(Column(name="x", figure="mean"), "macro_f1", run) == pytest.approx(0.3)
    assert figure_of(Column(name="x", figure="pooled"), "macro_f1", run) == 0.37
    assert figure_of(Column(name="x", figure="pooled", metric="auroc"), "macro_f1", run) is None


def test_bars_are_drawn_for_rows_with_figures():
    rows = {
        "W/o FE": [Bar(ours=41.0, std=1.0, paper=44.72), Bar(ours=38.0)],
        "FE": [Bar(ours=42.0, paper=47.45), Bar()],
    }
    assert plot_bars(rows, ["Recall", "Prec."], title="x").startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="nothing to draw"):
        plot_bars({"FE": [Bar(paper=1.0)]}, ["Recall"])
    with pytest.raises(ValueError, match="9 bars, and at most 8"):
        plot_bars({str(i): [Bar(ours=1.0)] for i in range(9)}, ["Recall"])


@pytest.mark.parametrize(
    ("ours", "sides"),
    [(33.0, "bottom bottom"), (44.0, "top bottom"), (45.0, "top bottom"), (46.0, "bottom top"), (60.0, "bottom top")],
)
def test_a_figure_stands_at_its_bar_and_the_papers_at_its_line(ours, sides):
    """Ours above the paper's line would read as the paper's number; where the two are near, their texts part."""
    axes = Figure().add_subplot()
    _annotate(axes, 0.0, Bar(ours=ours, paper=45.0), 0.0, 4.0)
    mine, printed = axes.texts
    assert (mine.get_text(), mine.xy[1]) == (f"{ours:.2f}", ours)
    assert (printed.get_text(), printed.xy[1]) == ("45.00", 45.0)
    assert f"{mine.get_va()} {printed.get_va()}" == sides


def test_the_papers_line_is_named_once_whichever_row_has_the_first():
    axes = Figure().add_subplot()
    for place, line in enumerate([[Bar(ours=41.0)], [Bar(ours=42.0, paper=47.45)], [Bar(ours=43.0, paper=48.0)]]):
        _draw(axes, [0.0], line, f"row {place}", place, 0.2)
    assert axes.get_legend_handles_labels()[1].count("the paper, in italics") == 1


@pytest.mark.parametrize("kind", ["bars", "dots", ""])
def test_a_file_may_ask_for_figures_in_place_of_lines(ran, tmp_path, kind, monkeypatch):
    """A trial's picture must not pass for the paper's."""
    folder, _ = ran
    file = tmp_path / "a.toml"
    file.write_text((f'plot = "{kind}"\n' if kind else "") + FILE, encoding="utf-8")
    titles: list[str] = []
    monkeypatch.setattr(Figure, "suptitle", lambda self, title, **_: titles.append(title))
    found = edgefl_train("table", folder / "o", "--experiment", file, "--plot", tmp_path / "a.png")
    assert found.code == 0 and (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert "nothing here can be compared with the paper" in titles[0]
