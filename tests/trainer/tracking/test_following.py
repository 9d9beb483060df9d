"""Trackers and the run: it never waits long for one, and a tracker has everything once, whatever happens between."""

import json
import threading
import time

import pytest

from edgefl_trainer.engine.settings import RunSettings
from edgefl_trainer.tracking import following
from edgefl_trainer.tracking.figures import summary_figures
from edgefl_trainer.tracking.tracks import NamedTracker

TRACK = NamedTracker("mlflow", "http://localhost:1")
SETTINGS = RunSettings(method="local", data=("lesions:",), preset="tiny")


class Book:
    """A tracker that keeps figures by name and step, as both real ones do; `fails` are its first calls."""

    def __init__(self, fails: int = 0):
        self.begun, self.fails, self.points, self.ended, self.texts = 0, fails, {}, None, {}
        self.changed = threading.Event()

    def begin(self, run):
        if self.fails:
            self.fails -= 1
            raise ConnectionError("nobody\nanswers " + "x" * 1000)
        self.begun += 1

    def figures(self, step, seconds, figures):
        self.points |= {(name, step): (value, seconds) for name, value in figures.items()}
        self.changed.set()

    def end(self, ending, texts):
        self.ended, self.texts = ending, texts


def write_lines(folder, rounds):
    lines = [
        {"phase_index": r - 1, "round": r, "phase": "train", "site": s, "seconds": 2.0, "loss": r + 0.5}
        for r in range(1, rounds + 1)
        for s in ("a", "b")
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def write_summary(folder):
    (folder / "summary.json").write_text(json.dumps({"state_sha256": "ab" * 32, "mean_balanced_accuracy": 0.5}))


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(following, "LOOK_SECONDS", 0.02)
    monkeypatch.setattr(following, "LONGEST_PAUSE", 0.04)


def test_each_round_is_sent_as_it_ends_and_the_summary_last(tmp_path):
    book = Book()
    with following.followed([TRACK], tmp_path, SETTINGS, lambda *_: book):
        for rounds in (1, 2):
            book.changed.clear()
            write_lines(tmp_path, rounds)
            assert book.changed.wait(10)
        write_summary(tmp_path)
    assert book.begun == 1 and book.ended == "FINISHED" and book.texts == {"state_sha256": "ab" * 32}
    wanted = {("loss/a", 1): (1.5, 4.0), ("loss/b", 2): (2.5, 8.0), ("mean_balanced_accuracy", 2): (0.5, 8.0)}
    assert wanted.items() <= book.points.items()


def test_a_run_of_a_study_has_the_name_it_has_there(tmp_path):
    names = []

    class Named(Book):
        def begin(self, run):
            names.append(run.name)

    for name in ("", "centres/local/seed-0"):
        with following.followed([TRACK], tmp_path, SETTINGS, lambda *_: Named(), name=name):
            write_lines(tmp_path, 1)
    assert names == [tmp_path.name, "centres/local/seed-0"]


@pytest.mark.parametrize(("stop", "ending"), [(KeyboardInterrupt, "KILLED"), (ValueError, "FAILED")])
def test_how_a_run_ended_is_told(tmp_path, stop, ending):
    book = Book()
    with pytest.raises(stop), following.followed([TRACK], tmp_path, SETTINGS, lambda *_: book):
        write_lines(tmp_path, 1)
        raise stop
    assert book.ended == ending and ("loss/a", 1) in book.points


def test_a_tracker_that_fails_is_told_once_and_has_everything_in_the_end(tmp_path, capsys):
    book = Book(fails=3)
    with following.followed([TRACK], tmp_path, SETTINGS, lambda *_: book):
        write_lines(tmp_path, 2)
        assert book.changed.wait(10)
        write_summary(tmp_path)
    (line,) = capsys.readouterr().err.splitlines()
    assert (
        line.startswith("warning: MLflow (http://localhost:1) did not take") and "ConnectionError: nobody answ" in line
    )
    assert len(line.replace(str(tmp_path), "")) < 350 and "the run does not need it" in line
    assert ("loss/b", 2) in book.points and book.ended == "FINISHED"


def test_a_tracker_that_hangs_delays_a_run_for_a_bounded_time(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(following, "LAST_SECONDS", 0.3)
    free = threading.Event()

    class Stuck(Book):
        def begin(self, run):
            free.wait()

    started = time.monotonic()
    with following.followed([TRACK, TRACK], tmp_path, SETTINGS, lambda *_: Stuck()):
        write_lines(tmp_path, 1)
    assert 0.2 < time.monotonic() - started < 5
    assert capsys.readouterr().err.count("it took too long") == 2
    free.set()


def test_nothing_is_written_where_nobody_follows(tmp_path):
    with following.followed([], tmp_path, SETTINGS):
        pass
    assert not list(tmp_path.iterdir())


def test_every_number_of_a_summary_is_sent():
    """docs/guides/follow-runs.md, `What is sent`: only `sites` and `pooled` of the tables were."""
    summary = {
        "seconds": 1.5,
        "selected_round": 3,
        "mean_balanced_accuracy": None,
        "sites": {"a": {"n_train": 3, "balanced_accuracy": 0.5}},
        "pooled": {"accuracy": 0.6},
        "probe": {"cls": {"mean": 0.7, "pooled": 0.71, "sites": {"a": 0.72}}},
        "held_out": {"sites": ["c"], "mean_balanced_accuracy": 0.8},
        "further": {"own_round": {"mean_accuracy": 0.81, "sites": {"a": {"accuracy": 0.82}}}},
        "epsilon_spent": {"a": 3.2},
        "several_classes": {"sites": 4},
        "travels": ["weights"],
        "private": True,
    }
    assert summary_figures(summary) == {
        "seconds": 1.5, "selected_round": 3, "reported_n_train/a": 3, "reported_balanced_accuracy/a": 0.5,
        "pooled_accuracy": 0.6, "probe.cls.mean": 0.7, "probe.cls.pooled": 0.71, "probe.cls/a": 0.72,
        "held_out.mean_balanced_accuracy": 0.8, "further.own_round.mean_accuracy": 0.81,
        "further.own_round.accuracy/a": 0.82, "epsilon_spent/a": 3.2, "several_classes.sites": 4,
    }  # fmt: skip
