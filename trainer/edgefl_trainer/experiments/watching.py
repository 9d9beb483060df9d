"""What runs where in a study, how far, and how long yet: for a person a table, for a program JSON.

Guarantees: only files below the study's folder are read, so that any terminal sees what the leading command sees. How
long yet is told from this process's own pace; a waiting run is taken to need as long as those that are known.
"""

import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import takewhile
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.live import Live
from rich.table import Table

from edgefl_protocol.sentences import counted, duration
from edgefl_trainer.contract import Phase
from edgefl_trainer.engine.checkpoint import Checkpoints
from edgefl_trainer.engine.folder import CONFIG, METRICS, finished_summary
from edgefl_trainer.experiments.crews import RunJob
from edgefl_trainer.experiments.study_book import StudyBook, phases_done

LOOK_SECONDS = 1.0
NOT_A_CHANGE = ("seconds_left",)  # moves all the time

WORKING = ("running", "judging")
COUNTED = {"finished": ("finished",), "running": WORKING, "failed": ("failed",)}

StudyState = dict[str, Any]


class StudyWatch:
    """Reads how a study stands."""

    def __init__(self, jobs: Sequence[RunJob], out: Path) -> None:
        """Read nothing yet."""
        self._jobs, self._book = jobs, StudyBook(out)
        self._phases: dict[Path, Sequence[Phase]] = {}
        self._finished: dict[Path, StudyState] = {}

    def state(self, now: float | None = None) -> StudyState:
        """Return how every run stands, and the study: `docs/guides/papers-tables.md` lists the keys."""
        led = self._book.is_led()
        runs = [self._run(job, led, time.time() if now is None else now) for job in self._jobs]
        counts = {kind: sum(run["state"] in named for run in runs) for kind, named in COUNTED.items()}
        return {"led": led, "runs": runs, "of": len(runs), **counts, "seconds_left": _study_left(runs)}

    def _run(self, job: RunJob, led: bool, now: float) -> StudyState:
        if job.folder in self._finished:
            return self._finished[job.folder]
        phases = self._phases.setdefault(job.folder, list(job.settings.build_method().phases(job.settings.rounds)))
        empty = {"worker": None, "process": None, "sites_done": None, "sites": None, "seconds_left": None, "why": None}
        told = {
            "run": job.name,
            "state": "waiting",
            "round": 0,
            "rounds": job.settings.rounds,
            **empty,
            "seconds": None,
        }
        summary = finished_summary(job.folder)
        if summary is not None:
            whole = {"state": "finished", "round": job.settings.rounds, "seconds": summary["seconds"]}
            self._finished[job.folder] = {**told, **whole}
            return self._finished[job.folder]
        note = self._book.note_of(job.name)
        done = min(phases_done(job.folder), len(phases))
        told["round"] = max((phase.round for phase in phases[:done] if phase.kind == "train"), default=0)
        if "failed" in note:
            return {**told, "state": "failed", "why": note["failed"]}
        if not note or not led:
            return {**told, "state": "stopped" if (job.folder / CONFIG).exists() else "waiting"}
        here, sites = _sites(job.folder, done)
        there = done + (here / sites if sites else 0)
        elapsed = max(0.0, now - float(note["began"]))
        since = done - int(note["phases"]) + ((here - int(note.get("sites_done", 0))) / sites if sites else 0)
        judging = done == len(phases)
        left = elapsed * (len(phases) - there) / since if since > 0 and not judging else None
        working = {"worker": note["worker"], "process": note["process"], "sites_done": here, "sites": sites}
        state = "judging" if judging else "running"
        return {**told, "state": state, **working, "seconds_left": left, "seconds": elapsed}


def _sites(run: Path, phase: int) -> tuple[int, int | None]:
    """How many sites of the phase under way are done, and of how many: as in the phase before, where there was one."""
    here = Checkpoints.sites_done(run / "checkpoints", phase)
    try:
        lines = (run / METRICS).read_text().splitlines()
    except OSError:
        return here, None
    before = takewhile(lambda line: json.loads(line)["phase_index"] == phase - 1, reversed(lines))  # few of many
    return here, max(sum(1 for _ in before), here) or None


def _study_left(runs: Sequence[Mapping[str, Any]]) -> float | None:
    """Seconds to the end: what runs have left, and the usual length of each that waits, shared by the workers."""
    running = [run for run in runs if run["state"] in WORKING]
    known = [run["seconds"] for run in runs if run["state"] == "finished"]
    known += [run["seconds"] + run["seconds_left"] for run in running if run["seconds_left"] is not None]
    if not running or not known:
        return None
    usual = sum(known) / len(known)
    waiting = sum(run["state"] in ("waiting", "stopped") for run in runs)
    lefts = [_left(run, usual) for run in running]
    return float(max(max(lefts), (sum(lefts) + usual * waiting) / len(running)))


def _left(run: Mapping[str, Any], usual: float) -> float:
    """What a run has left, where its own pace does not tell it: the rest of the usual length."""
    known = run["seconds_left"]
    return float(max(0.0, usual - run["seconds"]) if known is None else known)


def table_of(state: StudyState) -> Table:
    """Draw how a study stands."""
    left = duration(state["seconds_left"])
    failed = f", {state['failed']} failed" if state["failed"] else ""
    title = f"{state['finished']} of {counted(state['of'], 'run')} finished{failed}" + (
        f", {left} left" if left else ""
    )
    table = Table(title=title, title_justify="left")
    for name in ("run", "where", "how far", "left"):
        table.add_column(name, overflow="fold")
    for run in state["runs"]:
        table.add_row(run["run"], _where(run), _how_far(run), duration(run["seconds_left"]))
    return table


def _where(run: Mapping[str, Any]) -> str:
    return f"worker {run['worker']}, process {run['process']}" if run["state"] in WORKING else ""


def _how_far(run: Mapping[str, Any]) -> str:
    if run["state"] == "failed":
        return f"failed: {run['why']}"
    if run["state"] in ("finished", "judging", "waiting"):
        return str(run["state"])
    rounds = f"round {run['round']}/{run['rounds']} done"
    if run["state"] == "stopped":
        return f"stopped, {rounds}"
    of = f" of {run['sites']}" if run["sites"] else ""
    return f"{rounds}, then {counted(run['sites_done'], 'site')}{of}" if run["sites_done"] else rounds


@contextmanager
def following(jobs: Sequence[RunJob], out: Path, *, shown: bool, as_json: bool) -> Iterator[Callable[[], None]]:
    """Give what shows the study on standard error, called again and again by the command that leads it."""
    console = Console(stderr=True)
    if not shown or not (as_json or console.is_terminal):
        yield lambda: None
        return
    watch = StudyWatch(jobs, out)
    if as_json:
        changes = _changes(lambda line: click.echo(line, err=True))
        yield lambda: changes(watch.state())
        return
    with Live(console=console, auto_refresh=False) as live:
        yield lambda: live.update(table_of(watch.state()), refresh=True)


def watch_study(jobs: Sequence[RunJob], out: Path, *, as_json: bool) -> None:
    """Show on standard output how a study stands, until no command leads it; once where nobody can see it change."""
    watch, console = StudyWatch(jobs, out), Console()
    if as_json:
        changes = _changes(click.echo)
        while True:
            state = watch.state()
            changes(state)
            if not state["led"]:
                return
            time.sleep(LOOK_SECONDS)
    if not sys.stdout.isatty():
        console.print(table_of(watch.state()))
        return
    with Live(console=console, auto_refresh=False) as live:
        while True:
            state = watch.state()
            live.update(table_of(state), refresh=True)
            if not state["led"]:
                break
            time.sleep(LOOK_SECONDS)
    if state["finished"] < state["of"]:
        click.echo("nobody works on this study; the same command without --watch goes on", err=True)


def _changes(say: Callable[[str], None]) -> Callable[[StudyState], None]:
    """Write a state as one line of JSON where something but the time left has changed."""
    last: list[object] = [None]

    def hear(state: StudyState) -> None:
        told = {**state, "runs": [{k: v for k, v in run.items() if k not in (*NOT_A_CHANGE, "seconds")}
                                  for run in state["runs"]], **dict.fromkeys(NOT_A_CHANGE)}  # fmt: skip
        if told != last[0]:
            last[0] = told
            say(json.dumps(state))

    return hear
