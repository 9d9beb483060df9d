"""`edgefl-train` as a person meets it: help, exit status, and one sentence for everything that can be wrong.

docs/design.md 5: 0 done; 1 failed; 2 usage or missing extra; 3 refused. A known failure is one sentence, no traceback.
"""

import csv
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import click
import numpy as np
import pytest
import torch
from PIL import Image
from tests.trainer.conftest import MAE, TINY, edgefl_train, make_ward, write_index, write_picture
from tests.trainer.engine.conftest import files_of

from edgefl_protocol.errors import BundleError, EdgeflError, SignatureError, StorageError
from edgefl_trainer import cli
from edgefl_trainer.data import DataError
from edgefl_trainer.errors import BackboneError, RunError, SettingError, TrainingError
from edgefl_trainer.methods import METHODS

COMMANDS = ("methods", "run", "evaluate", "predict", "table", "experiment")


def records(**changes: str) -> list[dict[str, str]]:
    """Twelve rows at two sites; `changes` replaces values of row 5."""
    rows = [
        {
            "image": f"i{i}",
            "file": f"pictures/i{i}.png",
            "label": ("NV", "MEL")[i % 2],
            "center": ("east", "west")[i // 6],
            "split": "train" if i % 6 < 4 else "test",
        }
        for i in range(12)
    ]
    rows[5] = {**rows[5], **changes}
    return rows


def run(method: str, data: str, out: Path, backbone: str, *more: object):
    return edgefl_train("run", method, "--data", data, "--out", out, "--backbone", backbone, *TINY, *more)


# ---------------------------------------------------------------------------------------------- help and listing


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_explains_every_option(command):
    outcome = edgefl_train(*command.split(), "--help")
    assert outcome.code == 0 and outcome.err == ""
    found = cli.cli if not command else cli.cli.commands[command]
    for option in found.params:
        if isinstance(option, click.Option):
            assert option.help, option.name
            assert option.opts[0] in outcome.out or option.name in ("version", "help")


def test_help_needs_nothing_of_the_trainer():
    """docs/design.md 2: every console command answers --help in the base install."""
    probe = (
        "import sys; from edgefl_trainer.cli import cli\n"
        "cli.main(['run', '--help'], standalone_mode=False)\n"
        "heavy = {'torch', 'timm', 'sklearn', 'scipy', 'rich', 'tomli_w', 'jaxtyping'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    found = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr


@pytest.mark.parametrize("command", COMMANDS)
def test_without_the_extra_every_command_is_one_sentence(command, monkeypatch, tmp_path):
    monkeypatch.setattr(cli, "find_spec", lambda name: None)
    arguments = {
        "methods": [],
        "run": ["local", "--out", tmp_path / "run"],
        "evaluate": [tmp_path, "--data", "folder:x"],
        "predict": [tmp_path, tmp_path / "x.png", "--site", "a"],
        "table": [tmp_path],
        "experiment": [__file__, "--out", tmp_path / "run"],
    }[command]
    outcome = edgefl_train(command, *arguments)
    assert outcome.code == 2
    assert "needs edgefl[trainer]" in outcome.sentence()
    assert outcome.err.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_methods_lists_what_travels():
    found = json.loads(edgefl_train("methods", "--json").out)
    assert {entry["name"] for entry in found} == set(METHODS)
    for entry in found:
        assert entry.keys() >= {"name", "family", "paper", "travels", "needs_labels"}
    by_name = {entry["name"]: entry for entry in found}
    assert by_name["fedevprompt"]["travels"] == ["maps"]
    assert by_name["local"]["travels"] == []
    assert [name for name, entry in by_name.items() if not entry["needs_labels"]] == ["fedmae"]
    assert all(name in edgefl_train("methods").out for name in METHODS)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (SettingError("x"), 2),
        (RunError("x"), 2),
        (RunError("x", "damaged"), 1),
        (BackboneError("x"), 2),
        (BackboneError("x", "backbone_unreadable"), 1),
        (TrainingError("x"), 1),
        (DataError("x"), 1),
        (StorageError("x"), 1),
        (EdgeflError("x"), 1),
        (BundleError("x"), 3),
        (SignatureError("x"), 3),
    ],
)
def test_exit_status_of_every_kind_of_failure(error, code):
    assert cli.exit_code(error) == code


def test_interrupted_says_how_to_go_on(ward, mae, tmp_path, monkeypatch):
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("edgefl_trainer.engine.run.run_phases", interrupt)
    outcome = run("local", ward, tmp_path / "run", f"run:{mae}")
    assert outcome.code == 1 and "--resume" in outcome.err and "Traceback" not in outcome.err


# ---------------------------------------------------------------------------------------------- options and settings


@pytest.mark.parametrize(
    ("method", "options", "words"),
    [
        ("fedavgg", "--data {ward}", "did you mean fedavg"),
        ("local", "", "at least one SPEC, given with --data"),
        ("local", "--data lesion:", "is not a data SPEC"),
        ("local", "--data {ward} --rounds 0", "rounds is 0; allowed: at least 1"),
        ("local", "--data {ward} --participation 2", "participation is 2.0; allowed: in (0, 1]"),
        ("local", "--data {ward} --set lr_haed=1", "lr_head"),
        ("local", "--data {ward} --set lr_head=7", "lr_head is 7.0; allowed: 0 to 1"),
        ("fedmae", "--data {ward} --balance class", "uses no labels"),
        ("local", "--data {ward} --backbone tinny", "no backbone is called 'tinny'"),
        ("local", "--data {ward} --backbone tiny", "is untrained"),
        ("local", "--data {ward} --backbone vit:64x4/12 --preset paper", "is untrained"),
        ("local", "--data {ward} --backbone run:{mae} --image-px 84", "cannot take 84 px: use --image-px 36"),
        ("local", "--data {ward} --backbone tiny --image-px 40", "use --image-px 36 or 48"),
        ("local", "--data {ward} --backbone run:{out}", "there is no backbone at"),
        ("fedmae", "--data {ward} --backbone timm:vit_tiny_patch16_224", "fixed positions"),
        ("local", "--data {ward} --backbone run:{mae} --set b_blocks=4", "b_blocks is 4; allowed: 1 to 3"),
        ("local", "--data {ward} --backbone run:{mae} --classes nevus", "needs at least two"),
    ],
)
def test_what_cannot_be_had_ends_with_2_and_leaves_nothing(method, options, words, ward, mae, tmp_path):
    out = tmp_path / "run"
    outcome = edgefl_train("run", method, "--out", out, *options.format(out=out, ward=ward, mae=mae).split())
    assert outcome.code == 2
    assert words in outcome.sentence()
    assert outcome.err.count("\n") == 1
    assert not out.exists()


@pytest.mark.parametrize(
    "arguments", [["run", "local"], ["run", "local", "--out", "x", "--task", "moles"], ["train"], ["table"]]
)
def test_usage_errors_of_the_command_line_end_with_2(arguments):
    outcome = edgefl_train(*arguments)
    assert outcome.code == 2 and "Error: " in outcome.err and "Traceback" not in outcome.err and outcome.out == ""


def test_cuda_that_is_not_there_is_told(ward, mae, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    outcome = run("local", ward, tmp_path / "run", f"run:{mae}", "--device", "cuda")
    assert outcome.code == 2 and "no CUDA device" in outcome.sentence()
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("text", "words"), [("rounds = = 3", "is not valid TOML"), ("ronds = 3", "did you mean rounds")]
)
def test_a_wrong_settings_file_is_told(text, words, ward, tmp_path):
    (tmp_path / "c.toml").write_text(text)
    outcome = edgefl_train("run", "local", "--data", ward, "--out", tmp_path / "run", "--config", tmp_path / "c.toml")
    assert outcome.code == 2 and words in outcome.sentence()
    assert str(tmp_path / "c.toml") in outcome.sentence()


def test_tiny_allows_an_untrained_backbone_and_says_so(ward, tmp_path):
    outcome = run("local", ward, tmp_path / "run", "tiny", "--rounds", "1")
    assert outcome.code == 0
    warnings = [line for line in outcome.err.splitlines() if line.startswith("warning: ")]
    assert any("backbone tiny is untrained" in line for line in warnings)
    assert "untrained" not in outcome.out


def test_a_learned_backbone_and_fedmae_itself_get_no_such_warning(ward, mae, tmp_path):
    for outcome in (
        run("local", ward, tmp_path / "a", f"run:{mae}", "--rounds", "1"),
        run("fedmae", ward, tmp_path / "b", "tiny", "--rounds", "1", *MAE),
    ):
        assert outcome.code == 0 and "untrained" not in outcome.err


# ---------------------------------------------------------------------------------------------- data


def damaged_manifest(root: Path, kind: str) -> str:
    rows = records(label="") if kind == "label" else records()
    write_index(root, rows)
    file = root / "pictures" / "i5.png"
    if kind == "missing":
        file.unlink()
    elif kind == "cut":
        file.write_bytes(file.read_bytes()[:200])
    elif kind == "text":
        file.write_text("not a picture")
    elif kind == "column":
        index = root / "index.csv"
        index.write_text(index.read_text().replace("label", "diagnosis"))
    elif kind == "fields":
        with (root / "index.csv").open("a") as index:
            index.write("i12,pictures/i12.png\n")
    return f"manifest:{root}"


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("missing", ["pictures/i5.png"]),
        ("cut", ["i5", "pictures/i5.png"]),
        ("text", ["i5", "pictures/i5.png"]),
        ("column", ["no column label", "diagnosis"]),
        ("fields", ["line 14", "2 fields"]),
        ("label", ["line 7", "i5", "no label"]),
    ],
)
def test_damaged_data_names_file_and_row(kind, words, mae, tmp_path):
    """The sixth image stands in line 7 of the index."""
    outcome = run("local", damaged_manifest(tmp_path / "data", kind), tmp_path / "run", f"run:{mae}")
    assert outcome.code == 1
    for word in words:
        assert word in outcome.sentence()
    assert not (tmp_path / "run").exists()


def test_an_unknown_class_lists_the_known_ones(ward, mae, tmp_path):
    outcome = run("local", ward, tmp_path / "run", f"run:{mae}", "--classes", "nevus,melanom")
    assert outcome.code == 1
    assert "'melanom'" in outcome.sentence() and "nevus, other" in outcome.sentence()


def test_classes_may_stand_with_spaces(ward, mae, tmp_path):
    outcome = run("local", ward, tmp_path / "run", f"run:{mae}", "--classes", "other, nevus", "--rounds", "1", "--json")
    assert outcome.json()["classes"] == ["other", "nevus"]


def test_an_unknown_site_lists_the_known_ones(ward, mae, tmp_path):
    outcome = run("local", f"{ward}@site=north", tmp_path / "run", f"run:{mae}")
    assert outcome.code == 1 and "east, west" in outcome.sentence()


@pytest.mark.parametrize("method", ["local", "fedmae"])
def test_an_empty_site_is_named(method, mae, tmp_path):
    """A site with test rows only has nothing to learn from."""
    rows = [{**row, "split": "test"} if row["center"] == "west" else row for row in records()]
    data = f"manifest:{write_index(tmp_path / 'data', rows)}"
    backbone = "tiny" if method == "fedmae" else f"run:{mae}"
    outcome = run(method, data, tmp_path / "run", backbone)
    assert outcome.code == 1
    assert "site west" in outcome.sentence() and "leave it out" in outcome.sentence()
    assert not (tmp_path / "run").exists()


def test_a_folder_without_pictures_is_told(mae, tmp_path):
    (tmp_path / "data").mkdir()
    outcome = run("local", f"folder:{tmp_path / 'data'}", tmp_path / "run", f"run:{mae}")
    assert outcome.code == 1 and "SITE/CLASS/NAME.jpg" in outcome.sentence()


# ---------------------------------------------------------------------------------------------- while it runs


def test_a_loss_that_is_not_a_number_names_site_round_and_step(ward, mae, tmp_path, monkeypatch):
    """The third batch that west sees in its second round; what was finished before stays and can be looked at."""
    from edgefl_trainer.learning import evidential

    plain, calls = evidential.evidential_loss, []

    def loss(*arguments: object) -> torch.Tensor:
        calls.append(1)
        value = plain(*arguments)
        return value * float("nan") if len(calls) == 4 + 4 + 4 + 3 else value

    monkeypatch.setattr(evidential, "evidential_loss", loss)
    outcome = run("fedevprompt", ward, tmp_path / "run", f"run:{mae}", "--set", "batch=4")  # 13 images: 4 steps
    assert outcome.code == 1
    assert "site west" in outcome.sentence() and "round 2, step 3" in outcome.sentence()
    latest = json.loads((tmp_path / "run" / "checkpoints" / "latest.json").read_text())
    assert latest["phases"] == 1
    assert (tmp_path / "run" / "checkpoints" / "phase-0001" / "east.metrics.json").exists()


@pytest.mark.parametrize("damage", ["empty", "cut", "text"])
def test_a_backbone_that_cannot_be_read_is_told(damage, ward, mae, tmp_path):
    whole = (mae / "backbone.safetensors").read_bytes()
    content = {"empty": b"", "cut": whole[:-1000], "text": b"weights"}[damage]
    (tmp_path / "backbone.safetensors").write_bytes(content)
    outcome = run("local", ward, tmp_path / "run", f"file:{tmp_path / 'backbone.safetensors'}")
    assert outcome.code == 1
    assert "is not a backbone this program wrote" in outcome.sentence()
    assert not (tmp_path / "run").exists()


def test_a_place_that_cannot_be_written_is_told(ward, mae, tmp_path):
    (tmp_path / "file").write_text("")
    outcome = run("local", ward, tmp_path / "file" / "run", f"run:{mae}")
    assert outcome.code == 1 and str(tmp_path / "file") in outcome.sentence()


def test_any_other_fault_of_the_disk_is_a_sentence(ward, mae, tmp_path, monkeypatch):
    def broken(*_: object) -> None:
        raise OSError(5, os.strerror(5), "/somewhere/backbone")

    monkeypatch.setattr("edgefl_trainer.engine.run.load_data", broken)
    outcome = run("local", ward, tmp_path / "run", f"run:{mae}")
    assert outcome.code == 1 and outcome.sentence() == f"/somewhere/backbone cannot be used: {os.strerror(5)}."


# ---------------------------------------------------------------------------------------------- evaluate


@pytest.mark.parametrize("method", ["local", "fedavg", "fedevprompt"])
def test_evaluate_on_the_same_data_gives_the_summarys_figures(method, ward, finished):
    """docs/design.md 5: the keys of summary.json less bytes and seconds."""
    summary = json.loads((finished[method] / "summary.json").read_text())
    found = edgefl_train("evaluate", finished[method], "--data", ward, "--device", "cpu", "--json").json()
    assert found["reported_rows"] == "test"
    wanted = {name: value for name, value in summary.items() if not name.startswith("bytes_") and name != "seconds"}
    assert {name: found[name] for name in wanted} == wanted


def test_evaluate_takes_val_rows_where_there_is_no_test_row(finished, tmp_path):
    counts = [{**row, "label": ("nevus", "other")[i % 2]} for i, row in enumerate(records())]
    rows = [{**row, "split": "val" if row["split"] == "test" else "train"} for row in counts]
    outcome = edgefl_train("evaluate", finished["local"], "--data", f"manifest:{write_index(tmp_path, rows)}", "--json")
    assert outcome.json()["reported_rows"] == "val"
    assert {name: site["n_test"] for name, site in outcome.json()["sites"].items()} == {"east": 2, "west": 2}
    assert "val rows" in outcome.err


def test_evaluate_judges_only_sites_that_have_a_model(finished, tmp_path, cached):
    counts = {"east": {"nevus": 4, "other": 4}, "north": {"nevus": 4, "other": 4}}
    data = f"folder:{make_ward(tmp_path / 'ward', counts)}"
    assert set(edgefl_train("evaluate", finished["local"], "--data", data, "--json").json()["sites"]) == {"east"}
    outcome = edgefl_train("evaluate", finished["local"], "--data", f"{data}@site=north")
    assert outcome.code == 2 and "it has east, west" in outcome.sentence()


def test_evaluate_refuses_classes_the_run_has_not_learned(finished, tmp_path, cached):
    data = f"folder:{make_ward(tmp_path / 'ward', {'east': {'nevus': 4, 'mole': 4}})}"
    outcome = edgefl_train("evaluate", finished["local"], "--data", data)
    assert outcome.code == 1
    assert "'mole'" in outcome.sentence() and "nevus, other" in outcome.sentence()


def test_evaluate_says_what_is_no_run_with_models(mae, ward, tmp_path, finished):
    for folder, words in ((tmp_path, "is not a run directory"), (mae, "learned a backbone and has no model")):
        outcome = edgefl_train("evaluate", folder, "--data", ward)
        assert outcome.code == 2 and words in outcome.sentence()
    (tmp_path / "config.toml").write_bytes((finished["local"] / "config.toml").read_bytes())
    outcome = edgefl_train("evaluate", tmp_path, "--data", ward)
    assert outcome.code == 2 and "is not finished: go on with it with --resume" in outcome.sentence()


@pytest.mark.parametrize(
    "name", ["config.toml", "summary.json", "calibration.json", "models/east.safetensors", "backbone.safetensors"]
)
def test_evaluate_names_the_damaged_file(name, ward, finished, tmp_path):
    import shutil

    folder = tmp_path / "run"
    shutil.copytree(finished["local"], folder, ignore=shutil.ignore_patterns("checkpoints"))
    (folder / name).write_bytes(b"{")
    outcome = edgefl_train("evaluate", folder, "--data", ward)
    assert outcome.code == 1
    assert str(folder) in outcome.sentence()


# ---------------------------------------------------------------------------------------------- predict


def test_predict_scores_what_it_can_and_counts_the_rest(finished, tmp_path):
    write_picture(tmp_path / "a.png", 80, 1, px=50)
    (tmp_path / "b.png").write_text("no picture")
    outcome = edgefl_train(
        "predict", finished["local"], tmp_path / "a.png", tmp_path / "b.png", "--site", "east", "--json"
    )
    assert outcome.code == 1
    scored, failed = (json.loads(line) for line in outcome.out.splitlines())
    assert scored["probabilities"].keys() == {"nevus", "other"}
    np.testing.assert_allclose(sum(scored["probabilities"].values()), 1, atol=1e-6)
    assert failed["image"].endswith("b.png") and failed["error"].keys() == {"code", "message"}
    assert "1 of 2 images" in outcome.err


def test_predict_knows_its_sites(finished, tmp_path):
    write_picture(tmp_path / "a.png", 80, 1)
    outcome = edgefl_train("predict", finished["local"], tmp_path / "a.png", "--site", "north")
    assert outcome.code == 2 and "it has east, west" in outcome.sentence()


# ---------------------------------------------------------------------------------------------- table


@pytest.fixture
def summaries(finished):
    return {name: json.loads((folder / "summary.json").read_text()) for name, folder in finished.items()}


def test_table_as_csv_and_json_holds_the_summaries_figures(finished, summaries):
    rows = list(csv.DictReader(io.StringIO(edgefl_train("table", *finished.values(), "--format", "csv").out)))
    objects = json.loads(edgefl_train("table", *finished.values(), "--format", "json").out)["rows"]
    assert [row["method"] for row in rows] == list(finished) == [row["method"] for row in objects]
    for row, entry, found in zip(rows, objects, summaries.values(), strict=True):
        assert float(row["east"]) == found["sites"]["east"]["balanced_accuracy"] == entry["sites"]["east"]["mean"]
        assert float(row["mean"]) == found["mean_balanced_accuracy"]
        assert float(row["std"]) == found["std_balanced_accuracy"]
        assert float(row["bytes_up_per_round"]) == found["bytes_up_per_round"]


def test_table_as_markdown_and_latex_has_a_line_for_each_run(finished, summaries):
    text = edgefl_train("table", *finished.values()).out
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    assert [line.split("|")[1].strip() for line in lines if "---" not in line] == ["method", *finished]
    latex = edgefl_train("table", *finished.values(), "--format", "latex").out
    assert latex.startswith("\\begin{table}") and "\\end{table}" in latex
    for name, found in summaries.items():
        mean = f"{found['mean_balanced_accuracy']:.3f}"
        assert any(line.startswith(f"{name} &") and mean in line for line in latex.splitlines())
        assert any(f" {name} " in line and mean in line for line in lines)


def test_table_draws_accuracy_over_rounds(finished, tmp_path):
    outcome = edgefl_train("table", *finished.values(), "--plot", tmp_path / "a.png")
    assert outcome.code == 0, outcome.err
    with Image.open(tmp_path / "a.png") as picture:
        assert picture.format == "PNG" and min(picture.size) > 300
        assert (
            len(np.unique(np.asarray(picture.convert("RGB")).reshape(-1, 3), axis=0)) > 20
        )  # lines in several colours


def test_table_keeps_runs_apart_that_share_a_folders_name(finished, tmp_path, monkeypatch):
    import shutil

    from edgefl_trainer import experiment_command

    for place in ("a", "b"):
        shutil.copytree(finished["local"], tmp_path / place / "run")
    drawn = []
    plain = experiment_command.plot_progress

    def draw(runs, **more):
        drawn.append(set(runs))
        return plain(runs, **more)

    monkeypatch.setattr(experiment_command, "plot_progress", draw)
    assert edgefl_train("table", tmp_path / "a/run", tmp_path / "b/run", "--plot", tmp_path / "a.png").code == 0
    assert drawn == [{str(tmp_path / "a/run"), str(tmp_path / "b/run")}]


def test_table_refuses_what_cannot_be_compared(finished, mae, tmp_path, ward):
    nothing = edgefl_train("table", mae, "--plot", tmp_path / "a.png")
    assert nothing.code == 2 and "nothing to draw" in nothing.err and "Traceback" not in nothing.err
    outcome = run("local", ward, tmp_path / "nevus", f"run:{mae}", "--task", "nevus", "--rounds", "1")
    assert outcome.code == 0, outcome.err
    mixed = edgefl_train("table", finished["local"], tmp_path / "nevus")
    assert mixed.code == 2 and "task" in mixed.sentence()
    missing = edgefl_train("table", tmp_path / "nowhere")
    assert missing.code == 2 and "is not a run directory" in missing.sentence()


def test_what_table_reads_it_does_not_change(finished):
    before = files_of(finished["local"])
    edgefl_train("table", finished["local"])
    assert files_of(finished["local"]) == before
