"""Follows a run for a tracker: in a thread, from what the run leaves on the disk.

Guarantees: whatever a tracker does or its library raises, the run goes on; a run that ends waits for its trackers for
at most `LAST_SECONDS` altogether, and is told of each that lacks something in one sentence. A tracker that failed is
begun again from the first line, with growing pauses; trackers take what they have a second time without doubling it.
"""

import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from time import monotonic
from typing import Any

from edgefl_trainer.engine.display import warn
from edgefl_trainer.engine.folder import METRICS, finished_summary
from edgefl_trainer.engine.settings import RunSettings
from edgefl_trainer.tracking.figures import phase_figures, settings_told, summary_figures, summary_texts
from edgefl_trainer.tracking.tracker import Ending, FollowedRun, Tracker
from edgefl_trainer.tracking.tracks import NamedTracker, identify

LOOK_SECONDS = 1.0  # between two looks at the disk
LONGEST_PAUSE = 60.0  # seconds between two tries of a tracker that failed
LAST_SECONDS = 15.0  # that a run which ends waits for all its trackers
CAUSE_LENGTH = 160  # characters of what a library says


class Follower:
    """Follows one run for one tracker."""

    def __init__(self, name: str, tracker: Tracker, run: FollowedRun, folder: Path) -> None:
        """Nothing is sent before `start`; `name` is the tracker's, for a person."""
        self.name, self._tracker, self._run, self._folder = name, tracker, run, folder
        self._ends = threading.Event()
        self._ending: Ending = "FINISHED"
        self._told = False
        self._forget()
        self._thread = threading.Thread(target=self._follow, name=f"edgefl {name}", daemon=True)
        self.start = self._thread.start

    def stop(self, ending: Ending) -> None:
        """Say that the run has ended."""
        self._ending = ending
        self._ends.set()

    def wait(self, seconds: float) -> None:
        """Wait for what is still to be sent, no longer than that; say where not all of it was."""
        self._thread.join(max(0.0, seconds))
        if self._thread.is_alive():
            self._tell("it took too long")

    def _forget(self) -> None:
        self._begun, self._lines, self._seconds, self._round = False, 0, 0.0, 0

    def _follow(self) -> None:
        pause = LOOK_SECONDS
        while True:
            last = self._ends.wait(pause)
            try:
                self._send(last)
                pause = LOOK_SECONDS
            except Exception as error:  # noqa: BLE001 - whatever a library raises, the run goes on
                self._tell(f"{type(error).__name__}: {error}")
                self._forget()
                pause = min(2 * pause, LONGEST_PAUSE)
            if last:
                return

    def _send(self, last: bool) -> None:
        if not self._begun:
            self._tracker.begin(self._run)
            self._begun = True
        for lines in _phases(self._folder, self._lines):
            self._round = int(lines[0]["round"])
            self._seconds += sum(float(line["seconds"]) for line in lines)
            self._tracker.figures(self._round, self._seconds, phase_figures(lines))
            self._lines += len(lines)
        if last:
            summary = finished_summary(self._folder) if self._ending == "FINISHED" else None
            if summary is not None:
                self._tracker.figures(self._round, self._seconds, summary_figures(summary))
            self._tracker.end(self._ending, summary_texts(summary or {}))

    def _tell(self, cause: str) -> None:
        """Say once that something is missing, why, and that the run does not need it."""
        if not self._told:
            self._told = True
            shown = " ".join(cause.split())
            shown = shown if len(shown) <= CAUSE_LENGTH else f"{shown[:CAUSE_LENGTH]}…"
            warn(
                f"{self.name} did not take what it was sent ({shown}); the run does not need it, and `edgefl-train run "
                f"--resume --out {self._folder} --track …` sends what is missing."
            )


def _phases(folder: Path, known: int) -> Iterator[Sequence[Mapping[str, Any]]]:
    """The lines of `metrics.jsonl` after the first `known`, phase by phase: a phase's lines are written at once."""
    try:
        texts = (folder / METRICS).read_text().splitlines()[known:]
    except FileNotFoundError:
        return
    for _, lines in groupby(map(json.loads, texts), key=lambda line: line["phase_index"]):
        yield list(lines)


def open_tracker(track: NamedTracker, folder: Path) -> Tracker:
    """Make what follows the run in a folder; it loads its library when it begins."""
    if track.kind == "tensorboard":
        from edgefl_trainer.tracking.tensorboard import EventFiles

        return EventFiles(track.folder(folder))
    from edgefl_trainer.tracking.mlflow import MlflowServer

    return MlflowServer(track.place)


@contextmanager
def followed(
    tracks: Sequence[NamedTracker],
    folder: Path,
    settings: RunSettings,
    make: Callable[[NamedTracker, Path], Tracker] = open_tracker,
    name: str = "",
) -> Iterator[None]:
    """Let trackers follow the run in a folder, or of that name, while it goes on; the folder is this process's."""
    if not tracks:
        yield
        return
    run = FollowedRun(name or folder.resolve().name, identify(folder), settings_told(settings))
    followers = [Follower(track.name, make(track, folder), run, folder) for track in tracks]
    for one in followers:
        one.start()
    ending: Ending = "FINISHED"
    try:
        yield
    except BaseException as error:
        ending = "FAILED" if isinstance(error, Exception) else "KILLED"
        raise
    finally:
        for one in followers:
            one.stop(ending)
        until = monotonic() + LAST_SECONDS
        for one in followers:
            one.wait(until - monotonic())
