"""benchmarks/federation/head_baseline.py on a drawn manifest, and the help of every script a reader may start."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks.federation import head_baseline
from click.testing import CliRunner
from tests.trainer.benchmarks.two_sites import write_two_sites

ROOT = Path(__file__).parents[3]
STARTED = (
    ("-m", "benchmarks.federation.head_baseline"),
    ("-m", "benchmarks.training.buffer_size"),
    ("-m", "benchmarks.federation.colour_baseline"),
    ("-m", "benchmarks.causes.distillation_gradient"),
    ("-m", "benchmarks.device.score_startup"),
    ("-m", "benchmarks.training.training_epoch"),
    (str(ROOT / "examples/demo.py"),),
    (str(ROOT / "examples/learn_demo_backbone.py"),),
)


@pytest.fixture(scope="module")
def manifest(tmp_path_factory):
    """Two sites of 60 pictures in which a nevus is bright and a melanoma dark."""
    return write_two_sites(
        tmp_path_factory.mktemp("heads"),
        lambda rng, site, nevus: rng.normal(150 if nevus else 90, 20, (36, 36, 3)).clip(0, 255),
    )


def command(*arguments):
    return CliRunner().invoke(head_baseline.main, arguments)


def test_json_has_the_keys_of_a_summary(manifest, tmp_path):
    """Brightness survives any network, so a head must tell bright from dark; 60 rows a site: 40 fit, 20 report."""
    words = ("--data", f"manifest:{manifest}", "--task", "nevus", "--image-px", "36", "--backbone", "tiny",
             "--device", "cpu", "--cache-dir", str(tmp_path / "c"))  # fmt: skip
    run = command(*words, "--json")
    assert run.exit_code == 0, run.output
    result = json.loads(run.stdout)
    assert list(result["sites"]) == ["a", "b"]
    assert [site["n_train"] for site in result["sites"].values()] == [40, 40]
    assert [site["n_test"] for site in result["sites"].values()] == [20, 20]
    assert result["reported_rows"] == "val"
    assert result["readout"] in ("cls", "mean")
    assert result["mean_balanced_accuracy"] > 0.9
    assert result["unbalanced"]["mean_balanced_accuracy"] > 0.9
    shown = command(*words)
    assert shown.exit_code == 0, shown.output
    assert f"{result['mean_balanced_accuracy']:.3f}" in shown.stdout.split("mean of sites")[1]


def test_missing_data_is_one_sentence(tmp_path):
    run = command("--data", f"manifest:{tmp_path / 'nothing.zip'}", "--backbone", "tiny")
    assert run.exit_code == 1
    assert run.stdout == ""
    assert "nothing.zip" in run.stderr
    assert "Traceback" not in run.stderr


@pytest.mark.parametrize("script", STARTED)
def test_every_script_explains_itself(script, tmp_path):
    """Started as a reader starts it: help at once on stdout, exit status 0, nothing written where it was started."""
    done = subprocess.run(
        [sys.executable, "-X", "importtime", *script, "--help"],
        cwd=tmp_path, env=os.environ | {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Usage:")
    loaded = {line.rpartition("|")[2].strip().partition(".")[0] for line in done.stderr.splitlines()}
    assert "click" in loaded and not loaded & {"numpy", "torch", "timm", "PIL", "onnx", "sklearn"}
    assert "--" in done.stdout.partition("Options:")[2].replace("--help", "")
    assert list(tmp_path.iterdir()) == []
