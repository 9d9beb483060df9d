"""Progress for people: time left counted in images, and what a line says. Source: docs/reference/runs.md, progress."""

import io
import re

import pytest
from rich.console import Console

from edgefl_protocol.sentences import duration
from edgefl_trainer.contract import Phase
from edgefl_trainer.engine import display
from edgefl_trainer.engine.display import Display, RunPace
from edgefl_trainer.engine.local_engine import Probed
from edgefl_trainer.learning.linear_probe import ProbeReport

ROUNDS = [Phase("train", 1), Phase("train", 2)]
IMAGES = {"large": 300, "small": 100}


class Clock:
    """Seconds that a test sets."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_time_left_counts_images_not_sites(clock):
    """300 of 800 images took 30 s, so the other 500 take 50 s; two of four sites would have said 30 s."""
    pace = RunPace(ROUNDS, IMAGES, clock=clock)
    pace.phase(ROUNDS[0], ["large", "small"])
    assert pace.left_seconds() is None
    pace.within("large", 1.0)
    clock.now += 30
    assert pace.left_seconds() == pytest.approx(50)
    pace.within("small", 0.5)
    clock.now += 5
    assert pace.left_seconds() == pytest.approx(45)
    pace.within("small", 1.0)
    pace.phase(ROUNDS[1], ["large", "small"])
    clock.now += 5
    assert (pace.done, pace.left_seconds()) == (400, None)
    pace.within("small", 1.0)
    assert pace.left_seconds() == pytest.approx(15)  # the first round prepares, too: the second tells the pace


def test_finished_rounds_of_an_earlier_process_do_not_count_as_quick(clock):
    """Taken up at the second of two rounds: half of this round took 20 s, the other half takes as long."""
    pace = RunPace(ROUNDS, {"a": 100, "b": 100}, clock=clock)
    pace.phase(ROUNDS[1], ["a", "b"])
    pace.within("a", 1.0)
    clock.now += 20
    assert pace.done == 300
    assert pace.left_seconds() == pytest.approx(20)


def test_a_share_of_the_sites_is_the_share_of_the_work(clock):
    """One of four equal sites a round: after the first of two rounds as much is left as was done."""
    sites = dict.fromkeys("abcd", 100)
    pace = RunPace(ROUNDS, sites, participation=0.25, clock=clock)
    assert pace.total == 200
    pace.phase(ROUNDS[0], ["c"])
    pace.within("c", 1.0)
    clock.now += 7
    assert pace.left_seconds() == pytest.approx(7)


def test_phases_without_training_are_short(clock):
    """A run of one round and two exchanges is all but done after the round."""
    pace = RunPace([Phase("train", 1), Phase("final", 2), Phase("final", 3)], {"a": 100}, clock=clock)
    pace.phase(Phase("train", 1), ["a"])
    pace.within("a", 1.0)
    clock.now += 100
    assert pace.left_seconds() == pytest.approx(20)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, ""), (0.4, "0 s"), (61, "61 s"), (119, "2 min"), (3480, "58 min"), (7500, "2 h 05 min")],
)
def test_durations(seconds, text):
    assert duration(seconds) == text


def test_a_line_says_round_site_loss_speed_waiting_and_time_left(capsys):
    display = Display(RunPace(ROUNDS, IMAGES), epochs=2)
    with display:
        display.phase_started(ROUNDS[0], 2, ["large", "small"])
        display.site_started("large")
        for step in (1, 2):
            facts = {"epoch": 1, "step": step, "steps": 2, "loss": 0.5, "images": 150, "wait_seconds": 1e-9}
            display.site_reported("large", facts)
        display.site_finished("large", {"phase": "train", "loss": 0.25, "seconds": 12.5})
    line = capsys.readouterr().err
    assert line.startswith("round 1/2 · large: loss 0.25, seconds 12.5, ")
    assert "images/s, waiting for data 0%, " in line
    assert line.rstrip().endswith(" left")


def test_a_terminal_of_80_columns_shows_all_of_it(monkeypatch):
    """Nothing is cut, with the longest name of the centres: 0.99 of round 28 took 12 min, 72.01 rounds are left."""
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=80, color_system=None)
    monkeypatch.setattr(display, "Console", lambda *, stderr: console)
    site, clock = "vidir_molemax", Clock()
    shown = display.Display(RunPace([Phase("train", r) for r in range(1, 101)], {site: 2463}, clock=clock), epochs=10)
    with shown:
        shown.phase_started(Phase("train", 28), 100, [site])
        shown.site_started(site)
        clock.now += 720
        facts = {"epoch": 10, "step": 18, "steps": 20, "loss": 0.612712, "images": 128, "wait_seconds": 1e-9}
        shown.site_reported(site, facts)
    *_, bar, line = (one.strip() for one in re.split(r"\r|\n|\x1b\[\S*?[A-Za-z]", screen.getvalue()) if one.strip())
    assert bar.startswith("round 28/100 · vidir_molemax ━") and bar.endswith("% 14 h 33 min left")
    assert re.fullmatch(r"epoch 10 · loss 0\.6127 · \d+ images/s · waiting for data 0%", line)
    assert "…" not in screen.getvalue()


def test_a_method_that_does_not_tell_its_waiting_has_none_shown(capsys):
    display = Display(RunPace(ROUNDS, IMAGES), epochs=1)
    display.phase_started(ROUNDS[0], 2, ["large"])
    display.site_started("large")
    display.site_reported("large", {"epoch": 1, "step": 1, "steps": 1, "loss": 0.5, "images": 150})
    display.site_finished("large", {"phase": "train", "loss": 0.5, "seconds": 1.0})
    assert "waiting" not in capsys.readouterr().err


def test_a_probe_is_told_with_its_readout(capsys):
    reports = {
        "cls": ProbeReport(sites={"a": 0.5, "b": 0.6, "c": None}, mean=0.55, pooled=0.7),
        "mean": ProbeReport(sites={"a": 0.6, "b": 0.8, "c": None}, mean=0.7, pooled=0.65),
    }
    display = Display(RunPace(ROUNDS, IMAGES), epochs=1)
    display.phase_started(ROUNDS[0], 2, ["large"])
    display.phase_probed(ROUNDS[0], Probed(1, {}, reports))
    told = "round 1/2: linear probe 70.0%, mean of 2 sites; 65.0% pooled (balanced accuracy, readout mean)"
    assert capsys.readouterr().err.strip() == told


def test_the_mean_without_sites_of_one_class_stands_beside(capsys):
    """A site of one class is always right: the mean of 1.0, 0.6 and 0.4 is told beside that of 0.6 and 0.4."""
    shown = Display(RunPace(ROUNDS, IMAGES), 1, one_class=["c"])
    shown.phase_started(ROUNDS[0], 2, ["large"])
    figures = {"a": 0.6, "b": 0.4, "c": 1.0}
    shown.phase_judged(ROUNDS[0], {name: {"tune_balanced_accuracy": found} for name, found in figures.items()})
    apart = "66.7%, mean of 3 sites; mean of the 2 sites with more than one class 50.0%"
    assert capsys.readouterr().err.strip() == f"round 1/2: tune balanced accuracy {apart}"
    report = ProbeReport(sites=figures, mean=2 / 3, pooled=0.7, one_class=("c",))
    shown.phase_probed(ROUNDS[0], Probed(1, {}, {"cls": report}))
    assert apart in capsys.readouterr().err


def test_one_site_is_not_called_sites(capsys):
    display = Display(RunPace(ROUNDS, IMAGES), epochs=1)
    display.phase_started(ROUNDS[0], 2, ["large"])
    display.phase_judged(ROUNDS[0], {"large": {"tune_balanced_accuracy": 0.75}})
    assert capsys.readouterr().err.strip() == "round 1/2: tune balanced accuracy 75.0%, mean of 1 site"


def test_sites_of_an_earlier_process_do_not_count_as_quick(clock, capsys):
    """Five of six equal sites are kept; half of the sixth took 300 s, so its other half takes 300 s: it was told 27."""
    sites, (first, _) = dict.fromkeys("abcdef", 100), ROUNDS
    pace = RunPace([first], sites, clock=clock)
    shown = Display(pace, epochs=1)
    shown.phase_started(first, 1, list(sites))
    for site in "abcde":
        shown.site_started(site)
        shown.site_kept(site)
    assert pace.left_seconds() is None and pace.done == 500
    clock.now += 300
    pace.within("f", 0.5)
    assert pace.left_seconds() == pytest.approx(300)
    assert capsys.readouterr().err.count("taken from the run's checkpoints") == 5


def test_a_round_may_judge_sites_that_took_no_part():
    """`--select pooled`: one of four sites learns from 100 pictures a round, and all four are judged, as 40 more."""
    sites = dict.fromkeys("abcd", 100)
    assert RunPace(ROUNDS, sites, 0.25, judged=40.0).total == 2 * (100 + 10)
    assert RunPace(ROUNDS, sites, 0.25, judged=40.0, judges_all=True).total == 2 * (100 + 40)
