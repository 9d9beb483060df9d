"""`--track`: what is refused before a run begins, and what of a run is sent. Source: docs/guides/follow-runs.md."""

import json
import math
from dataclasses import replace

import pytest
from tests.trainer.conftest import TINY, edgefl_train

from edgefl_trainer.engine.settings import RunSettings
from edgefl_trainer.errors import RunError
from edgefl_trainer.tracking import tracks
from edgefl_trainer.tracking.figures import phase_figures, settings_told, summary_figures
from edgefl_trainer.tracking.mlflow import metric_name

SECRET = "hunter2"
DATA = "lesions:sites=2,images=40,px=36"


@pytest.fixture
def installed(monkeypatch):
    """As if both extras were there: nothing here loads them."""
    monkeypatch.setattr(tracks, "find_spec", lambda name: object())


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("tensorbord", "names no tracker"),
        ("tensorboard:", "names no tracker"),
        ("mlflow", "names no tracker"),
        ("mlflow:sqlite:///runs.db", "the address of a server"),
        ("mlflow:localhost:5000", "the address of a server"),
        ("mlflow:http://", "the address of a server"),
        ("mlflow:http://host:port", "the address of a server"),
        (f"mlflow:https://ann:{SECRET}@host", "MLFLOW_TRACKING_PASSWORD"),
        (f"mlflow:https://{SECRET}@host", "MLFLOW_TRACKING_PASSWORD"),
        (f"mlflow:https://host/?token={SECRET}", "MLFLOW_TRACKING_TOKEN"),
    ],
)
def test_what_is_no_tracker_is_refused_and_no_secret_repeated(text, told, tmp_path, installed):
    found = edgefl_train("run", "local", "--data", DATA, "--out", tmp_path / "r", *TINY, "--track", text)
    assert found.code == 2 and told in found.sentence()
    assert SECRET not in found.err + found.out and not (tmp_path / "r").exists()


def test_a_missing_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(tracks, "find_spec", lambda name: None)
    words = ("run", "local", "--data", DATA, "--out", tmp_path / "r", *TINY, "--track", "mlflow:http://localhost:1")
    found = edgefl_train(*words)
    assert found.code == 2 and "needs edgefl-derm[mlflow]: pip install " in found.sentence()


def test_a_folder_of_other_event_files_is_refused(tmp_path, installed):
    run, other = tmp_path / "run", tmp_path / "board"
    other.mkdir()
    (other / "events.out.tfevents.1").write_bytes(b"")
    words = ("run", "local", "--data", DATA, "--out", run, *TINY, "--track", f"tensorboard:{other}")
    assert "name a new or empty folder" in edgefl_train(*words).sentence()
    (other / tracks.OWNER).write_text("of another run")
    assert "event files of another run" in edgefl_train(*words).sentence()
    (other / tracks.OWNER).write_text(tracks.identify(run))  # this run's own: it goes on there
    assert tracks.read_tracks([f"tensorboard:{other}"], run) == [tracks.NamedTracker("tensorboard", str(other))]


@pytest.mark.parametrize("track", ["tensorboard", "mlflow:http://localhost:1"])
def test_a_damaged_name_of_the_run_is_told(tmp_path, installed, track):
    """With a new name the tracker would have the run twice."""
    (tmp_path / tracks.IDENTITY).write_text("{")
    with pytest.raises(RunError, match=r"tracking\.json is damaged: remove it and what trackers have of this run"):
        tracks.read_tracks([track], tmp_path)


def test_settings_are_told_without_folders():
    settings = RunSettings(method="fedavg", data=("folder:/srv/ann/pictures",), preset="tiny", partition="/srv/ann/p")
    told = settings_told(replace(settings, backbone="run:/srv/ann/runs/mae"))
    assert (told["data"], told["backbone"], told["partition"]) == ("folder:pictures", "run:mae", "p")
    assert told["lr_head"] and told["rounds"] == "5" and "/srv" not in json.dumps(told)


def test_only_finite_numbers_are_figures():
    """Figures by hand. A text, a truth value and a list are none, whatever they hold."""
    lines = [
        {"phase_index": 1, "round": 1, "phase": "train", "site": "a", "loss": 0.5, "bytes_up": 8, "warning": "lesion 7",
         "epochs": [{"loss": 1}], "tune_balanced_accuracy": 0.25, "probe": {"cls": 0.5, "mean": None}},
        {"phase_index": 1, "round": 1, "phase": "train", "site": "b", "loss": math.nan, "done": True,
         "tune_balanced_accuracy": 0.75},
    ]  # fmt: skip
    assert phase_figures(lines) == {
        "loss/a": 0.5, "bytes_up/a": 8, "tune_balanced_accuracy/a": 0.25, "probe.cls/a": 0.5,
        "tune_balanced_accuracy/b": 0.75, "mean_tune": 0.5,
    }  # fmt: skip
    summary = {
        "method": "fedavg", "seconds": 3.0, "classes": ["x"], "sites": {"a": {"accuracy": 0.5, "held_out": False}},
        "pooled": {"accuracy": 1.0, "accuracy_interval": [0, 1]},
    }  # fmt: skip
    assert summary_figures(summary) == {"seconds": 3.0, "pooled_accuracy": 1.0, "reported_accuracy/a": 0.5}


def test_names_that_mlflow_refuses_stay_apart():
    """MLflow takes letters, digits and `_-. :/`, at most 250, and no name that is another path."""
    assert metric_name("loss/St. Anna-1") == "loss/St. Anna-1"
    changed = {metric_name(f"loss/{site}") for site in ("a(1)", "a[1]", "a_1_", "..", ".", "x" * 300, "x" * 299)}
    assert len(changed) == 7 and all(len(name) <= 250 and ".." not in name for name in changed)
