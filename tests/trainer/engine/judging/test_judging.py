"""What a run says while it judges, and the time left before. Source: docs/reference/runs.md, progress."""

import pytest
from tests.trainer.conftest import edgefl_train, make_ward

from edgefl_trainer.contract import Phase
from edgefl_trainer.engine.display import JudgedSite, Judging, RunPace, epochs_of_work


class Clock:
    """Seconds that a test sets."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_the_time_left_of_learning_counts_judging():
    """100 pictures learned from in 2 epochs took 60 s; 600 passes of a third each are as much work: 60 s are left."""
    clock = Clock()
    after = epochs_of_work({"a": JudgedSite(tune=100, reported=400)}, epochs=2)
    pace = RunPace([Phase("train", 1)], {"a": 100}, clock=clock, after=after)
    pace.phase(Phase("train", 1), ["a"])
    clock.now = 60.0
    pace.within("a", 1.0)
    assert pace.left_seconds() == pytest.approx(60)


def test_the_time_left_counts_that_each_round_is_judged():
    """100 pictures learned from took 60 s, and each of two rounds is judged in 30 s; then follow 30 s of judging."""
    clock, rounds = Clock(), [Phase("warm", 0), Phase("train", 1), Phase("train", 2)]
    pace = RunPace(rounds, {"a": 100}, clock=clock, after=50, judged=epochs_of_work({"a": JudgedSite(0, 150)}, 1))
    pace.phase(rounds[1], ["a"])
    clock.now = 60.0
    pace.within("a", 1.0)
    assert pace.left_seconds() == pytest.approx(30 + 60 + 30 + 30)
    clock.now = 90.0
    pace.judged()
    assert pace.left_seconds() == pytest.approx(120) and pace.done == 10 + 150  # the warm phase is not judged


def test_each_site_is_told_with_the_time_left():
    """`a` has 2 x 100 + 400 passes, of 1,200 in all: its 30 s are half."""
    lines, clock = [], Clock()
    sites = {"a": JudgedSite(100, 400), "b": JudgedSite(0, 600)}
    judging = Judging(sites, "val", say=lines.append, clock=clock)
    judging.site("a")
    clock.now = 30.0
    judging.site("b")
    assert lines == ["judging a: 400 val and 100 tune pictures", "judging b: 600 val pictures, 30 s left"]


def test_a_run_says_what_it_judges_and_what_a_bound_bounds(tmp_path):
    """20 pictures a site: 5 are tested and 2 tune, however few are learned from."""
    make_ward(tmp_path / "ward", {"east": {"a": 10, "b": 10}, "west": {"a": 10, "b": 10}})
    done = edgefl_train(
        "run", "local", "--data", f"folder:{tmp_path / 'ward'}", "--preset", "tiny", "--images-per-site", "4",
        "--out", tmp_path / "out",
    )  # fmt: skip
    assert done.code == 0, done.err
    assert "(--images-per-site 4 bounds the train rows; all tune and test rows are judged, as without it)" in done.err
    assert "judging east: 5 test and 2 tune pictures\njudging west: 5 test and 2 tune pictures, " in done.err
