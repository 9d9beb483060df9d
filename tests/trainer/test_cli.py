"""`edgefl-train` as a person meets it: exit status, one sentence for everything that can be wrong with a run.

docs/design.md 5: 0 done; 1 failed; 2 usage or missing extra; 3 refused. A known failure is one sentence, no traceback.
"""

import importlib.util
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tests.trainer.conftest import MAE, edgefl_train, records, run, write_index

from edgefl_protocol.errors import BundleError, EdgeflError, SignatureError, StorageError
from edgefl_trainer import cli
from edgefl_trainer.commands import extra
from edgefl_trainer.data import DataError
from edgefl_trainer.data.errors import SpecError
from edgefl_trainer.engine.hyper_parameters import hyper_types
from edgefl_trainer.errors import BackboneError, RunError, SettingError, TrainingError
from edgefl_trainer.methods import METHODS

COMMANDS = tuple(cli.cli.commands)


@pytest.mark.parametrize("command", COMMANDS)
def test_without_the_extra_every_command_is_one_sentence(command, monkeypatch, tmp_path):
    monkeypatch.setattr(extra, "find_spec", lambda name: None)
    arguments = {
        "data": ["folder:x"],
        "methods": [],
        "run": ["local", "--out", tmp_path / "run"],
        "evaluate": [tmp_path, "--data", "folder:x"],
        "predict": [tmp_path, tmp_path / "x.png", "--site", "a"],
        "table": [tmp_path],
        "experiment": [__file__, "--out", tmp_path / "run"],
        "finetune": [tmp_path, "--mode", "local", "--labels", "0.1", "--out", tmp_path / "run"],
        "join": ["-", "--data", "folder:x", "--out", tmp_path / "run"],
        "partition": ["--data", "folder:x", "--scheme", "iid", "--sites", "2", "-o", tmp_path / "run"],
        "audit": [tmp_path],
        "report": [tmp_path, "-o", tmp_path / "run.html"],
    }[command]
    outcome = edgefl_train(command, *arguments)
    assert outcome.code == 2
    assert "needs edgefl-derm[trainer]" in outcome.sentence() and f"environment {sys.prefix}" in outcome.sentence()
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
    assert [name for name, entry in by_name.items() if not entry["needs_labels"]] == [
        "fedclf", "fedmae", "fedmoco", "fedrotation", "fedsimclr", "local-cl", "random-init",
    ]  # fmt: skip
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
        (SpecError("x"), 2),
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
        ("local", "", "give --data SPEC"),
        ("local", "--data {ward} --participation 2", "participation is 2.0; allowed: above 0, at most 1"),
        ("fedmae", "--data {ward} --balance class", "uses no labels"),
        ("local", "--data {ward} --backbone tiny", "is untrained"),
        ("local", "--data {ward} --backbone vit:64x4/12 --preset paper", "is untrained"),
        ("local", "--data {ward} --backbone run:{mae} --image-px 84", "cannot take images of 84 px: use --image-px 36"),
        ("fedmae", "--data {ward} --backbone tiny --image-px 40", "use --image-px 36 or 48"),
        ("fedmae", "--data {ward} --backbone timm:vit_tiny_patch16_224", "fixed position embeddings"),
        ("fedclf", "--data {ward} --backbone timm:no_such_net", "timm could not give 'no_such_net'"),
        (  # as a default of 3 with two blocks
            "local",
            "--data {ward} --backbone vit:64x2/12 --preset tiny --image-px 36",
            "b_blocks is 3; allowed: 1 to 1 with this backbone: give --set b_blocks=1, or a backbone with more blocks.",
        ),
        ("local", "--data {ward} --backbone run:{mae} --set b_blocks=4", "b_blocks is 4; allowed: 1 to 3"),
        (
            "local",
            "--data {ward} --backbone vit:64x1/12 --preset tiny",
            "this backbone has one block, and prompts=bt needs two",
        ),
        ("local", "--data {ward} --backbone run:{mae} --classes nevus", "needs at least two"),
    ],
)
def test_what_cannot_be_had_ends_with_2_and_leaves_nothing(method, options, words, ward, mae, tmp_path):
    """What is refused before PyTorch is imported stands in `test_quick_refusals`."""
    out = tmp_path / "run"
    outcome = edgefl_train("run", method, "--out", out, *options.format(ward=ward, mae=mae).split())
    assert outcome.code == 2
    assert words in outcome.sentence()
    assert outcome.err.count("\n") == 1
    assert not out.exists()


def test_options_of_a_run_say_what_they_mean_and_what_holds_without_them():
    text = " ".join(edgefl_train("run", "--help").out.split())
    assert "none leaves them out; with site each site has its own; with spread also those of no site" in text
    assert "[default: none; for methods without labels spread]" in text
    assert "0 uses all. Its other rows are judged all the same. [default: the preset's]" in text
    assert "--engine [local|flower]" in text
    assert "allowed values, source" in " ".join(edgefl_train("methods", "--help").out.split())


@pytest.mark.parametrize(
    "arguments",
    [
        ["run", "local"],
        ["run", "local", "--out", "x", "--engine", "cluster"],
        ["run", "local", "--out", "x", "--data", "lesions:", "--image-px", "0"],
        ["train"],
        ["table"],
    ],
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
    outcome = run("local", ward, tmp_path / "run", "tiny", "--rounds", "1", "--engine", "local")
    assert outcome.code == 0, outcome.err
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
    assert "site west" in outcome.sentence() and "leave the site out" in outcome.sentence()
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("method", sorted(name for name, kind in METHODS.items() if "bn" in hyper_types(kind)))
def test_every_site_with_one_image_is_named_before_anything_is_learned(method, tmp_path, cached):
    """docs/methods.md 2.3: what learns with batch norm or negatives (SgdRecipe) needs two images; east has enough."""
    rows = [{**row, "center": center} for center in ("east", "north", "west") for row in records()[:6]]
    rows = [{**row, "image": f"{i}", "file": f"{i}.png"} for i, row in enumerate(rows)]
    few = [row for i, row in enumerate(rows) if row["center"] == "east" or i % 6 == 0]
    data = f"manifest:{write_index(tmp_path / 'data', few)}"
    outcome = run(method, data, tmp_path / "run", "cnn:mobilenetv3_small_050")
    assert outcome.code == 1
    for words in ("site north has 1 image", "site west has 1 image", f"{method} needs 2", "@site=NAME"):
        assert words in outcome.sentence()
    assert "east" not in outcome.sentence() and not (tmp_path / "run").exists()


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
    assert "is not a backbone that this program wrote" in outcome.sentence()
    assert not (tmp_path / "run").exists()


def test_a_place_that_cannot_be_written_is_told(ward, mae, tmp_path):
    (tmp_path / "file").write_text("")
    outcome = run("local", ward, tmp_path / "file" / "run", f"run:{mae}")
    assert outcome.code == 1 and str(tmp_path / "file") in outcome.sentence()


def test_any_other_fault_of_the_disk_is_a_sentence(ward, mae, tmp_path, monkeypatch):
    def broken(*_: object) -> None:
        raise OSError(5, os.strerror(5), "/somewhere/backbone")

    monkeypatch.setattr("edgefl_trainer.engine.sites.load_data", broken)
    outcome = run("local", ward, tmp_path / "run", f"run:{mae}")
    assert outcome.code == 1 and outcome.sentence() == f"/somewhere/backbone cannot be used: {os.strerror(5)}."


def test_an_engine_whose_extra_is_missing_says_so(tmp_path: Path, monkeypatch) -> None:
    """docs/design.md 2: without its extra a command ends with status 2 and one sentence."""
    whole = importlib.util.find_spec
    monkeypatch.setattr("edgefl_trainer.commands.extra.find_spec", lambda name: None if name == "flwr" else whole(name))
    words = ("run", "fedavg", "--data", "lesions:sites=2,images=40,px=36", "--preset", "tiny", "--engine", "flower")
    done = edgefl_train(*words, "--out", tmp_path / "run")
    assert (done.code, done.out) == (2, "") and not (tmp_path / "run").exists()
    assert "--engine flower needs edgefl-derm[flower]: pip install " in done.err
    table = Path(__file__).parents[2] / "experiments/fedevprompt-table-1.toml"
    study = edgefl_train("experiment", table, "--tiny", "--engine", "flower", "--out", tmp_path / "study")
    assert study.code == 2 and not (tmp_path / "study").exists() and study.err == done.err


@pytest.mark.parametrize("dev_mode", [False, True])
def test_a_mistake_of_a_method_ends_with_a_sentence_and_with_a_traceback_only_where_python_was_asked(
    monkeypatch, tmp_path, ward, mae, dev_mode
):
    """CONTRIBUTING.md, "Add a method": PYTHONDEVMODE=1 is Python's own way to ask for more."""
    monkeypatch.setattr("edgefl_trainer.methods.local.Local.start", lambda *_: nowhere)  # noqa: F821
    monkeypatch.setattr("edgefl_trainer.cli.sys.flags", SimpleNamespace(dev_mode=dev_mode))
    outcome = edgefl_train("run", "local", "--data", ward, "--backbone", f"run:{mae}", "--out", tmp_path / "run")
    assert outcome.code == 1 and ("Traceback" in outcome.err) == dev_mode
    last = outcome.err.splitlines()[-1]
    assert last.startswith("edgefl-train: start of local failed for 2 sites: NameError name 'nowhere' is not defined")
    assert "test_cli.py, line " in last and "PYTHONDEVMODE=1" in last
