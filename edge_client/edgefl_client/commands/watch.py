"""`edgefl watch`: scores what a capture device drops into a folder, each picture once, until it is told to stop."""

import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import click

from edgefl_client.commands.options import (
    finite,
    home_of,
    home_option,
    model_option,
    threads_option,
    trust_option,
    weights_option,
)
from edgefl_client.commands.score import formats_option, heatmap_option, log_option, open_log, prepare, refer_option
from edgefl_client.commands.stopping import stop_on_signal
from edgefl_client.scoring.open_scorer import open_scorer
from edgefl_protocol.sentences import counted

if TYPE_CHECKING:
    from edgefl_client.scoring.personal import ValuesInUse
    from edgefl_client.scoring.score_files import Log, Result, ScoringJob
    from edgefl_client.scoring.watched_folder import Notes, Seen
    from edgefl_client.trust.vouched_bundle import VouchedBundle
    from edgefl_protocol.errors import EdgeflError

UNREADABLE = frozenset({"permissions", "storage"})  # codes of what lies with the disk or its rights, not the picture
AGAIN_S = 60.0  # after which such a file is tried again


@click.command()
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path), metavar="DIR")
@click.option(
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Append the lines to this file.  [default: standard output]",
)
@click.option(
    "--once", is_flag=True, help="Score what is new or changed and end, with 1 if any of it failed; for use from cron."
)
@click.option(
    "--again",
    is_flag=True,
    help="Score again what was scored before in DIR, by whichever model: each picture gets another line.",
)
@click.option(
    "--interval",
    "interval_s",
    type=click.FloatRange(0.1, 3600),
    callback=finite,
    default=2.0,
    show_default=True,
    metavar="SECONDS",
    help="Time between two looks at the folder; a file is scored once it has not changed between two looks.",
)
@model_option
@trust_option
@heatmap_option
@refer_option
@weights_option
@log_option
@formats_option
@threads_option
@home_option
@click.pass_context
def watch(
    context: click.Context,
    folder: Path,
    out: Path | None,
    once: bool,
    again: bool,
    interval_s: float,
    model: Path | None,
    trusted: tuple[str, ...],
    heatmaps: Path | None,
    refer_above: float | None,
    weights: str | None,
    log_file: Path | None,
    formats: tuple[str, ...],
    threads: int | None,
    home_dir: str | None,
) -> None:
    """Score every picture that appears in or below DIR, once. Prints the JSON objects of edgefl score, one a line.

    On SIGTERM or Ctrl-C it finishes the picture at hand and ends; the next time it continues from there.
    """
    home = home_of(context, home_dir)
    scorer, vouched = open_scorer(home, model, trusted, threads, refer_above, weights)
    from contextlib import closing

    from edgefl_client.scoring import watched_folder
    from edgefl_client.scoring.folder_files import left_out, other_files
    from edgefl_client.scoring.personal import ValuesInUse
    from edgefl_client.scoring.pictures import PictureReader
    from edgefl_client.scoring.score_files import ScoringJob

    with (
        stop_on_signal("picture") as stop,
        PictureReader(formats) as reader,
        closing(watched_folder.Notes(home, folder)) as notes,  # first: it makes the home folder, where `out` may lie
        watched_folder.open_output(out) as output,
        open_log(log_file, home, scorer) as log,
    ):
        others = set(other_files(folder, reader.suffixes))
        prepare(vouched.bundle, heatmaps, scorer, left_out([str(folder)], reader), refer_above)
        notes.recover(output)
        if again:
            notes.drop()
        lost: dict[str, EdgeflError] = {}
        task = ScoringJob(scorer=scorer, reader=reader, heatmaps=heatmaps, not_drawn=lost.__setitem__)
        needed, sha256 = weights == "personal", scorer.model.state_sha256
        values = None if weights == "bundle" else ValuesInUse(home, vouched.bundle, sha256, required=needed)
        watcher = _Watcher(folder, task, vouched, values, notes, output, log, stop, notes.scored(), others, once, lost)
        failed = watcher.once(interval_s) if once else watcher.until_stopped(interval_s)
    if once:
        failures = [(failed, "picture", "scored"), (watcher.without_map, "heat map", "drawn")]
        for count, what, done in (one for one in failures if one[0]):
            _say(f"{counted(count, what)} could not be {done}, so this ends with 1")
    context.exit(1 if once and (failed or watcher.without_map) else 0)


@dataclass
class _Watcher:
    """One run of the command."""

    folder: Path  # what is watched
    task: "ScoringJob"  # how its pictures are scored
    vouched: "VouchedBundle"  # the bundle that scores them, asked before each whether it still counts
    values: "ValuesInUse | None"  # asked likewise; None where the bundle's are to score, whatever is learned
    notes: "Notes"  # which were scored
    output: BinaryIO | None  # takes the lines; None for standard output
    log: "Log | None"  # told of each result that gets a line, and of no other; None for no log
    stop: threading.Event  # set when the run is to end
    scored: "dict[str, Seen]"  # what `notes` holds, kept here so that a look costs no query
    others: set[str]  # files that are no pictures, or were told to be left out
    ends: bool  # after one look: `--once`
    lost: "dict[str, EdgeflError]"  # filled by `task` with pictures whose heat map failed, and why
    # files that could not be read, and when they are tried again, monotonic seconds
    again_s: dict[str, float] = field(default_factory=dict)
    arrived: set[str] = field(default_factory=set)  # other files that the last look found for the first time
    looked: bool = False  # whether a look succeeded
    without_map: int = 0  # heat maps that this run could not draw
    # scored by an earlier process that could not write their heat maps, and not tried yet
    undrawn: set[str] = field(init=False)

    def __post_init__(self) -> None:
        """Ask which heat maps are missing, where some are to be drawn."""
        self.undrawn = set() if self.task.heatmaps is None else self.notes.without_map()

    @property
    def model(self) -> str:
        """What scores, in words."""
        manifest, personal = self.vouched.bundle.manifest, self.task.scorer.model.state_kind == "personal"
        return f"{manifest.name} version {manifest.version}{' with values learned here' if personal else ''}"

    def once(self, interval_s: float) -> int:
        """Look twice, and score the pictures that were the same in both; gives the number that could not be scored."""
        before = self._look()
        nothing_new = all(self.scored.get(name) == seen for name, seen in before.items())
        if (nothing_new and self.undrawn.isdisjoint(before)) or self.stop.wait(interval_s):
            return 0
        now = self._look()
        for name in (name for name, seen in now.items() if before.get(name) != seen):
            _say(f"{name} appeared or changed between two looks; it is scored at the next start")
        return self._score(before, now)

    def until_stopped(self, interval_s: float) -> int:
        """Look, score and wait in turn; gives the number that could not be scored.

        It ends by an error once bundle or values count no more, also with nothing to score: somebody is at hand.
        """
        from edgefl_protocol.errors import StorageError

        before: dict[str, Seen] = {}
        failed, lost = 0, False
        while not self.stop.is_set():
            self._check()
            try:
                now = self._look()
                lost = False
            except StorageError as error:  # a share that went away may come back
                now = {}
                if not lost:
                    _say(f"{error}; still watching")
                lost = True
            failed += self._score(before, now)
            before = now
            self._tell_left_out()
            self.stop.wait(interval_s)
        return failed

    def _check(self) -> None:
        self.vouched.check()
        if self.values is not None:
            self.values.check()

    def _before_each(self, names: Iterable[str]) -> Iterator[str]:
        for name in names:
            self._check()
            yield name

    def _look(self) -> "dict[str, Seen]":
        from edgefl_client.scoring.watched_folder import look

        found = look(self.folder, self.task.reader.suffixes)
        if not self.looked:
            self._tell_scored(found)
        self.looked = True
        return found

    def _tell_scored(self, found: "dict[str, Seen]") -> None:
        """Say how many of the pictures there are left out, and which models scored them."""
        from edgefl_client.scoring.watched_folder import left_out_words

        models = self.notes.models()
        found = {name: seen for name, seen in found.items() if name not in self.undrawn}
        before = [models.get(name) for name, seen in found.items() if self.scored.get(name) == seen]
        if before:
            _say(left_out_words(before))

    def _tell_left_out(self) -> None:
        """Name once each picture that is left out, when two looks in a row found it: it may be a copy at work."""
        from edgefl_client.scoring.folder_files import other_files, why_left_out

        now = set(other_files(self.folder, self.task.reader.suffixes))
        staying = now & self.arrived
        for why in filter(None, (why_left_out(name, self.task.reader) for name in sorted(staying))):
            _say(why)
        self.others = (self.others & now) | staying
        self.arrived = now - self.others

    def _score(self, before: "dict[str, Seen]", now: "dict[str, Seen]") -> int:
        from edgefl_client.scoring.score_files import Failure, score_with_sha256

        self.again_s = {name: at for name, at in self.again_s.items() if name in now}
        ready = (name for name in now if time.monotonic() >= self.again_s.get(name, 0.0))
        new = [name for name in ready if before.get(name) == now[name] != self.scored.get(name)]
        failed = 0
        results = score_with_sha256(self.task, self._before_each(new))
        for name, (result, sha256) in zip(new, results, strict=True):
            gone = isinstance(result, Failure) and result.code == "missing"  # since the look
            if isinstance(result, Failure) and result.code in UNREADABLE:
                self._put_off(name, result.message)
            elif not gone:
                self._write(name, now[name], result, sha256)
            failed += isinstance(result, Failure) and not gone
            if self.stop.is_set():
                break
        self._draw_missing(before, now)
        if new:
            self.notes.forget(now)
        return failed

    def _draw_missing(self, before: "dict[str, Seen]", now: "dict[str, Seen]") -> None:
        """Score again what has a line and no heat map, until one cannot be written again: the others could not be."""
        from edgefl_client.scoring.score_files import Failure, no_map_words, score_with_sha256
        from edgefl_protocol.errors import StorageError

        same = (name for name, seen in now.items() if before.get(name) == seen == self.scored.get(name))
        names = [name for name in same if name in self.undrawn]
        self.undrawn.difference_update(names)
        if self.stop.is_set():
            return
        results = zip(names, score_with_sha256(self.task, self._before_each(names)), strict=True)
        for number, (name, (result, sha256)) in enumerate(results):
            error = self.lost.get(name)
            if isinstance(error, StorageError):
                del self.lost[name]  # told here: a line that the picture gets later is not of this failure
                self.without_map += len(names) - number
                _say(f"{no_map_words(name, error)}; {counted(len(names) - number, 'heat map')} missing as before")
                return
            if isinstance(result, Failure):
                self.without_map += 1
                _say(f"{name}: no heat map: {result.message}")
            else:
                self._write(name, now[name], result, sha256)
            if self.stop.is_set():
                return

    def _put_off(self, name: str, why: str) -> None:
        """No line and no note: the picture is whole, and is scored when it can be read."""
        if name not in self.again_s:
            again = "" if self.ends else f"every {AGAIN_S:.0f} s, and "
            _say(f"{why}; it is tried again {again}at the next start")
        self.again_s[name] = time.monotonic() + AGAIN_S

    def _write(self, name: str, seen: "Seen", result: "Result", sha256: str | None) -> None:
        """Note a picture as begun, log its result and write its line: what is not logged is not told."""
        import os

        from edgefl_client.commands.score_text import json_line
        from edgefl_client.scoring.watched_folder import write_line

        line, position = json_line(result), 0 if self.output is None else self.output.seek(0, os.SEEK_END)
        self.notes.begin(name, seen, line, position, self.model, without_map=self._lost_map(name))
        if self.log is not None:  # right before the line: a crash between the two gives the picture a second row
            self.log(result, sha256)
        if self.output is None:
            click.echo(line)
        else:
            write_line(self.output, line)
        self.notes.finish(name)
        self.scored[name] = seen

    def _lost_map(self, name: str) -> bool:
        """Tell of the heat map of this picture, where it failed; whether the next start may be able to write it."""
        from edgefl_client.scoring.score_files import no_map_words
        from edgefl_protocol.errors import StorageError

        error = self.lost.pop(name, None)
        if error is None:
            return False
        self.without_map += 1
        may_come = isinstance(error, StorageError)
        again = "; the next start with --heatmap draws it, and writes the line again" if may_come else ""
        _say(f"{no_map_words(name, error)}{again}")
        return may_come


def _say(sentence: str) -> None:
    from edgefl_client.commands.score_text import printable

    click.echo(printable(sentence), err=True)
