"""`experiment --workers N`: the same table, runs that fail or are killed, Ctrl-C, and what `--watch` shows."""

import json
import os
import select
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
from tests.trainer.conftest import edgefl_train

from edgefl_trainer.engine.folder import working_in
from edgefl_trainer.engine.settings import RunSettings, from_toml
from edgefl_trainer.errors import BusyRunError
from edgefl_trainer.experiments import crews, watching
from edgefl_trainer.experiments.crews import RunJob, environment_of, visible_cards
from edgefl_trainer.experiments.files import read_experiment
from edgefl_trainer.experiments.planning import Choice, plan_runs
from edgefl_trainer.experiments.running import jobs_of, run_planned
from edgefl_trainer.experiments.study_book import StudyBook

FILE = Path(__file__).parents[3] / "experiments/fedevprompt-table-1.toml"
CHOICE = (FILE, "--tiny", "--rows", "local-bt,fedavg-bt", "--device", "cpu", "--seeds", "0,1")
LONG = ("--rounds", "400")  # more than any machine does while a test looks
# A shell has its jobs in the background ignore Ctrl-C.
PROGRAM = "import signal as s; s.signal(s.SIGINT, s.default_int_handler); from edgefl_trainer.cli import main; main()"
FIRST = "centres/fedavg-bt/seed-0"


@pytest.fixture(autouse=True)
def nowhere(monkeypatch, cached):
    monkeypatch.setenv("EDGEFL_DATA", "/nowhere")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def table_rows(folder: Path) -> list[str]:
    found = edgefl_train("table", folder, "--experiment", FILE, "--format", "json").json()["tables"][0]["rows"]
    return [json.dumps({k: v for k, v in row.items() if not k.startswith("seconds")}) for row in found]


def digests(folder: Path) -> dict[str, str]:
    paths = sorted(folder.glob("*/*/seed-*/summary.json"))
    return {str(path.parent.relative_to(folder)): json.loads(path.read_text())["state_sha256"] for path in paths}


def watched(out: Path, *more: object) -> list[dict]:
    """What a second terminal is told."""
    found = edgefl_train("experiment", *CHOICE, *more, "--out", out, "--watch", "--json")
    assert found.code == 0, found.err
    return [json.loads(line) for line in found.out.splitlines()]


@pytest.fixture
def study(forks, tmp_path):
    """The command in a process of its own, as at a terminal; so is each of its runs. It says things in `said`."""
    (tmp_path / "said").mkdir()

    def begun(out: Path, *more: object):
        words = ["edgefl-train", "experiment", *map(str, CHOICE), *map(str, more), "--workers", "2", "--out", str(out)]
        return forks.begun(words, Path.cwd(), os.environ, tmp_path / "said")

    return begun


def until(true, seconds: float = 120.0):
    end = time.monotonic() + seconds
    while not (found := true()):
        assert time.monotonic() < end
        time.sleep(0.1)
    return found


def notes(out: Path, *, learning: bool = False) -> list[dict]:
    """The notes of two runs under way; of such as have finished a round."""
    found = [(name, StudyBook(out).note_of(name)) for name in (FIRST, FIRST.replace("fedavg", "local"))]
    found += [(name, StudyBook(out).note_of(name)) for name in ("centres/local-bt/seed-1", "centres/fedavg-bt/seed-1")]
    working = [{"run": name, **note} for name, note in found if "process" in note]
    if learning:
        working = [note for note in working if (out / note["run"] / "checkpoints/latest.json").exists()]
    return working if len(working) == 2 else []


def alive(process: int) -> bool:
    """Whether a process is there and no zombie."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def job(folder: Path) -> RunJob:
    settings = RunSettings(method="local", data=("lesions:sites=2,images=40,px=36",), preset="tiny", rounds=400)
    return RunJob(name="part/row/seed-0", head="1/1", settings=settings, folder=folder / "run")


@pytest.mark.slow
def test_a_process_that_is_killed_is_an_outcome_and_one_that_is_stopped_ends(tmp_path, monkeypatch):
    monkeypatch.setattr(crews, "LOOK_SECONDS", 0.02)
    looks = []
    crew = crews.Processes(2, tmp_path / ".study", lambda: looks.append(1))
    killed, stopped = crew.begin(job(tmp_path)), crew.begin(job(tmp_path / "other"))
    assert crew.free is None
    os.kill(killed, signal.SIGKILL)
    outcome = crew.ended()
    assert "ended by SIGKILL, as the system does where memory runs out" in outcome.cause and crew.free == 1
    assert alive(stopped)
    crew.stop()
    assert not alive(stopped)


@pytest.mark.parametrize(
    ("status", "written", "cause"),
    [
        (0, "warning: late", ""),
        (-9, "", "its process was ended by SIGKILL, as the system does where memory runs out"),
        (-15, "", "its process was ended by SIGTERM; what"),
        (2, "one\nrow x cannot be made\n", "row x cannot be made"),
        (2, "", "its process ended with status 2"),
    ],
)
def test_the_cause_is_a_signal_or_the_last_line_of_the_log(tmp_path, status, written, cause):
    (log := tmp_path / "log").write_text(written)
    assert crews._cause(status, log).startswith(cause) and bool(crews._cause(status, log)) == bool(cause)


@pytest.mark.slow
def test_the_table_is_the_same_whatever_the_number(study, tmp_path):
    one = edgefl_train("experiment", *CHOICE, "--rounds", "1", "--out", tmp_path / "one")
    with study(tmp_path / "two", "--rounds", "1") as two:
        assert one.code == two.wait() == 0, (tmp_path / "said/err").read_text()
    assert digests(tmp_path / "one") == digests(tmp_path / "two") and len(digests(tmp_path / "two")) == 4
    assert table_rows(tmp_path / "one") == table_rows(tmp_path / "two")
    (state,) = watched(tmp_path / "two", "--rounds", "1")
    assert (state["led"], state["finished"], state["of"]) == (False, 4, 4)


@pytest.mark.slow
def test_a_second_terminal_sees_what_runs_where_and_a_killed_process_is_told(study, forks, tmp_path):
    """kill −9 of one run's process: its cause is told, the others go on, and its worker takes the next run."""
    out = tmp_path / "out"
    with study(out, *LONG) as leading:
        hit, other = until(lambda: notes(out, learning=True))
        words = ["edgefl-train", "experiment", *map(str, CHOICE), *LONG, "--out", str(out), "--watch", "--json"]
        (streams := tmp_path / "second").mkdir()
        with forks.begun(words, Path.cwd(), os.environ, streams):
            lines = until(lambda: (found := (streams / "out").read_text().splitlines(keepends=True))[2:] and found[:2])
        states = [json.loads(line) for line in lines]  # it changes: rounds go on
        table = edgefl_train("experiment", *CHOICE, *LONG, "--out", out, "--watch").out  # once: no terminal
        os.kill(hit["process"], signal.SIGKILL)
        until(lambda: "failed" in StudyBook(out).note_of(hit["run"]))
        assert "SIGKILL" in StudyBook(out).note_of(hit["run"])["failed"]
        assert alive(other["process"]) and leading.poll() is None
        until(lambda: len(notes(out)) == 2)  # the worker has taken the next run
    said = (tmp_path / "said/err").read_text()
    assert f"{hit['run']}: " in said and "failed: its process was" in said
    running = [run for run in states[-1]["runs"] if run["state"] == "running"]
    assert states[-1]["led"] and states[-1]["running"] == 2 and {run["worker"] for run in running} == {1, 2}
    assert all(run["seconds_left"] > 0 and 1 <= run["round"] < 400 and run["rounds"] == 400 for run in running)
    assert states[0] != states[1] and states[-1]["seconds_left"] > max(run["seconds_left"] for run in running)
    assert "worker 1, process" in table and "0 of 4 runs finished" in table


@pytest.mark.slow
def test_at_a_terminal_the_table_changes_until_nobody_leads(tmp_path):
    """A terminal of its own (pty); elsewhere it is printed once."""
    out, run = tmp_path, tmp_path / FIRST
    (run / "checkpoints").mkdir(parents=True)
    (run / "config.toml").write_text(settings_of(tmp_path))
    mine, its = os.openpty()
    words = [sys.executable, "-c", PROGRAM, "experiment", *map(str, CHOICE), *LONG, "--out", str(out), "--watch"]
    book, seen = StudyBook(out), ""

    def read_until(text: str) -> None:
        nonlocal seen
        while text not in seen:
            assert select.select([mine], [], [], 120)[0], seen
            seen += os.read(mine, 1 << 16).decode(errors="replace")

    with book.led():
        book.began(FIRST, run, 1, 4711)
        environment = {**os.environ, "COLUMNS": "120", "TERM": "xterm"}
        looking = subprocess.Popen(words, stdout=its, stderr=its, env=environment)
        os.close(its)
        read_until("worker 1, process 4711")
        (run / "checkpoints/latest.json").write_text(json.dumps({"phases": 8}))
        read_until("round 7/400 done")
    read_until("nobody works on this study; the same command without --watch goes on")
    os.close(mine)
    assert looking.wait(60) == 0 and "0 of 4 runs finished" in seen and "Traceback" not in seen


@pytest.mark.slow
def test_ctrl_c_stops_all_and_the_same_command_goes_on_until_it_is_killed(study, tmp_path):
    """No process outlives the command, however it ends."""
    out = tmp_path / "out"
    with study(out, *LONG) as leading:
        working = until(lambda: notes(out, learning=True))
        leading.send_signal(signal.SIGINT)
        assert leading.wait(60) == 1
    assert not any(alive(note["process"]) for note in working)
    line = (tmp_path / "said/err").read_text().splitlines()[-1]
    assert line.startswith("stopped; continue with: ") and "Traceback" not in (tmp_path / "said/err").read_text()
    states = {run["run"]: run for run in watched(out, *LONG)[-1]["runs"]}
    before = {note["run"]: states[note["run"]]["round"] for note in working}
    assert all(states[name]["state"] == "stopped" and done >= 1 for name, done in before.items())
    with study(out, *LONG) as leading:
        until(lambda: [note for note in notes(out) if note["phases"] >= before.get(note["run"], 1)])
        working = until(lambda: notes(out))
        leading.send_signal(signal.SIGKILL)
        leading.wait(60)
        until(lambda: not any(alive(note["process"]) for note in working), 60)
    assert not StudyBook(out).is_led()


@pytest.fixture
def one_planned(tmp_path):
    """A study of one run, and how a watcher sees it."""
    choice = Choice(out=tmp_path, rows=("local-bt",), tiny=True, flags={"device": "cpu", "rounds": 1})
    planned = plan_runs(read_experiment(FILE), choice, os.environ)
    (job,) = jobs_of(planned)
    return planned, job, lambda: watching.StudyWatch([job], tmp_path).state()["runs"][0]


def finish(folder: Path) -> None:
    """What another command leaves at the end of a run."""
    summary = {"state_sha256": "ab", "seconds": 1.0, "mean_balanced_accuracy": 0.5}
    (folder / "summary.json").write_text(json.dumps(summary))


def test_a_run_that_another_command_makes_is_waited_for(one_planned, tmp_path):
    """It was begun all the same, refused, and shown as failed to every watcher while it went on."""
    planned, job, watched_run = one_planned
    book, said, seen, other = StudyBook(tmp_path), [], [], ExitStack()

    class Waiting(crews.ThisProcess):
        def begin(self, job):
            pytest.fail("another command makes it")

        def pause(self):
            seen.append(watched_run())
            finish(job.folder)
            other.close()

    with book.led():  # the other command
        other.enter_context(working_in(job.folder, job.settings, resume=True))
        book.began(job.name, job.folder, 3, 4711)
        assert run_planned(planned, said.append, Waiting(), StudyBook(tmp_path)) == []
        assert watched_run()["state"] == "finished"
    assert [(run["state"], run["worker"], run["process"], run["why"]) for run in seen] == [("running", 3, 4711, None)]
    assert [line.partition(": ")[2].partition(": ")[2] for line in said[-2:]] == [
        "another command makes it, and this one waits for it", "finished before"
    ]  # fmt: skip


def test_two_commands_that_begin_a_run_at_once_both_have_it(one_planned, tmp_path, monkeypatch):
    """Both read data before one of them has the folder; the one that has it not tries again."""
    planned, job, watched_run = one_planned
    states = []

    def made(settings, folder, *_):
        states.append(watched_run()["state"])
        if len(states) == 1:
            raise BusyRunError("another process works on the run")
        finish(folder)

    monkeypatch.setattr(crews, "make_run", made)
    job.folder.mkdir(parents=True)
    assert run_planned(planned, lambda _: None, crews.ThisProcess(), StudyBook(tmp_path)) == []
    assert states == ["running", "running"] and "failed" not in StudyBook(tmp_path).note_of(job.name)


@pytest.mark.slow
def test_a_process_whose_run_another_one_makes_is_told_apart(one_planned, tmp_path):
    _, job, _ = one_planned
    crew = crews.Processes(1, tmp_path / ".study")
    with working_in(job.folder, job.settings, resume=True):
        crew.begin(job)
        outcome = crew.ended()
    assert outcome.busy and "another process works on the run" in outcome.cause


@pytest.mark.slow
def test_a_row_that_cannot_be_made_is_told_with_its_cause(tmp_path, monkeypatch):
    """The sentence of the run itself, from its own process."""
    monkeypatch.setattr(crews, "LOOK_SECONDS", 0.05)
    (tmp_path / "centres/local-bt/seed-0/checkpoints").mkdir(parents=True)
    (tmp_path / "centres/local-bt/seed-0/config.toml").write_text(settings_of(tmp_path))
    (tmp_path / "centres/local-bt/seed-0/checkpoints/latest.json").write_text("{")
    words = ("experiment", *CHOICE[:-1], "0", "--rounds", "1", "--out", tmp_path, "--workers", "2")
    found = edgefl_train(*words)
    assert found.code == 1 and "1 run failed" in found.err and "FedAvg |" in found.out
    (line,) = [line for line in found.err.splitlines() if "failed: " in line]
    assert "centres/local-bt/seed-0" in line and "latest.json is damaged" in line


def settings_of(out: Path) -> str:
    choice = Choice(out=out, rows=("local-bt",), tiny=True, flags={"device": "cpu", "rounds": 1})
    (planned,) = plan_runs(read_experiment(FILE), choice, os.environ)
    return planned.settings.to_toml()


def test_the_settings_a_process_is_given_are_the_planned_ones(tmp_path):

    for path in sorted(FILE.parent.glob("*.toml")):
        for planned in plan_runs(read_experiment(path), Choice(out=tmp_path, tiny=True), {"EDGEFL_DATA": "/nowhere"}):
            assert RunSettings(**from_toml(planned.settings.to_toml().encode(), "")) == planned.settings


def test_a_study_on_flower_makes_one_run_at_a_time_whose_sites_share_the_workers(tmp_path):
    """By hand the same: `run --engine flower --workers 3`, for the runs that rows start from, too."""
    file, more = (
        FILE.with_name("fedclf-fedmae-table-5.toml"),
        ("--parts", "isic-labels-80", "--rows", "fedmae-federated"),
    )
    words = ("experiment", file, "--tiny", *more, "--engine", "flower", "--workers", "3", "--out", tmp_path)
    lines = edgefl_train(*words, "--dry-run").out.splitlines()
    assert len(lines) == 2 and all("--workers 3" in line and line.endswith(" --engine flower") for line in lines)


def test_a_process_that_is_alone_has_all_gpus(tmp_path, monkeypatch):
    """Flower deals them to its workers."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    assert crews.Processes(1, tmp_path)._cards == [] and crews.Processes(2, tmp_path)._cards == ["3", "5"]


def test_each_process_has_one_gpu_in_turn():
    assert (
        visible_cards({"CUDA_VISIBLE_DEVICES": "3, 5"}) == ["3", "5"]
        and visible_cards({"CUDA_VISIBLE_DEVICES": ""}) == []
    )
    found = [environment_of(worker, ["3", "5"], {"A": "b"}) for worker in (1, 2, 3)]
    assert [one["CUDA_VISIBLE_DEVICES"] for one in found] == ["3", "5", "3"] and found[0]["A"] == "b"
    assert environment_of(2, ["3"], {}) == {}


def test_how_long_yet_is_told_from_this_process_own_pace(tmp_path):
    """By hand: taken over after 2 of 10 rounds, 5 done in 30 s: 10 s a round, 50 s left; one more run waits."""
    settings = RunSettings(method="local", data=("lesions:",), preset="tiny", rounds=10)
    jobs = [RunJob(name=name, head=name, settings=settings, folder=tmp_path / name) for name in ("a", "b")]
    book, latest = StudyBook(tmp_path), tmp_path / "a/checkpoints/latest.json"
    latest.parent.mkdir(parents=True)
    latest.write_text(json.dumps({"phases": 2}))
    with book.led():
        book.began("a", tmp_path / "a", 1, 4711)
        latest.write_text(json.dumps({"phases": 5}))
        began = book.note_of("a")["began"]
        found = watching.StudyWatch(jobs, tmp_path).state(now=began + 30)
        first, second = found["runs"]
        assert (first["state"], first["round"], first["seconds_left"]) == ("running", 5, pytest.approx(50))
        assert second["state"] == "waiting" and found["seconds_left"] == pytest.approx(50 + (30 + 50))
        latest.write_text(json.dumps({"phases": 10}))  # what is left is not known of judging
        found = watching.StudyWatch(jobs, tmp_path).state(now=began + 90)
        assert (found["runs"][0]["state"], found["runs"][0]["seconds_left"], found["running"]) == ("judging", None, 1)
    assert watching.StudyWatch(jobs, tmp_path).state()["runs"][0]["state"] == "waiting"  # nobody leads any more


def test_sites_that_an_earlier_process_left_do_not_count_as_quick(tmp_path):
    """Round 2 of 3 was killed after 5 of 6 sites. A sixth of a round took 20 s, so a round and no more is 120 s."""
    settings = RunSettings(method="local", data=("lesions:",), preset="tiny", rounds=3)
    folder, book = tmp_path / "a", StudyBook(tmp_path)
    (phase := folder / "checkpoints/phase-0001").mkdir(parents=True)
    (folder / "checkpoints/latest.json").write_text(json.dumps({"phases": 1}))
    lines = [json.dumps({"phase_index": 0, "site": site}) for site in "abcdef"]
    (folder / "metrics.jsonl").write_text("\n".join(lines))
    for site in "abcde":
        (phase / f"{site}.metrics.json").write_text("{}")
    watch = watching.StudyWatch([RunJob(name="a", head="a", settings=settings, folder=folder)], tmp_path)
    with book.led():
        book.began("a", folder, 1, 4711)
        began = book.note_of("a")["began"]
        assert watch.state(now=began + 10)["runs"][0]["seconds_left"] is None  # it was told 15 s
        (phase / "f.metrics.json").write_text("{}")
        assert watch.state(now=began + 20)["runs"][0]["seconds_left"] == pytest.approx(120)
