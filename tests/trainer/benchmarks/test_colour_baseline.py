"""benchmarks/federation/colour_baseline.py on a drawn manifest: the results page's command, and its keys."""

import json

import pytest
from benchmarks.federation import colour_baseline
from click.testing import CliRunner
from tests.trainer.benchmarks.two_sites import write_two_sites


@pytest.fixture
def manifest(tmp_path):
    """Two sites of 60 images whose classes differ in colour, the opposite way round at the second."""
    return write_two_sites(
        tmp_path,
        lambda rng, site, nevus: rng.integers(0, 80, (8, 8, 3)) + (120 if nevus == (site == "a") else 30),
    )


def command(*arguments):
    return CliRunner().invoke(colour_baseline.main, arguments)


def test_json_has_the_keys_of_a_summary(manifest, tmp_path):
    data = ("--data", f"manifest:{manifest}", "--task", "nevus", "--image-px", "8", "--cache-dir", str(tmp_path / "c"))
    run = command(*data, "--json")
    assert run.exit_code == 0, run.output
    result = json.loads(run.stdout)
    assert list(result["sites"]) == ["a", "b"]
    assert [site["n_train"] for site in result["sites"].values()] == [40, 40]
    assert [site["n_test"] for site in result["sites"].values()] == [20, 20]
    assert result["mean_balanced_accuracy"] > 0.9
    assert result["pooled"]["mean_balanced_accuracy"] < 0.8  # one model cannot follow both
    assert result["reported_rows"] == "val"
    assert "mean of sites" in command(*data).stdout


def test_missing_data_is_one_sentence(tmp_path):
    run = command("--data", f"manifest:{tmp_path / 'nothing.zip'}")
    assert run.exit_code == 1
    assert run.stdout == ""
    assert "nothing.zip" in run.stderr
    assert "Traceback" not in run.stderr
