"""Runs what was planned, in this process or in several, and goes on where a run was stopped.

Guarantees: nothing is computed twice: a partition that is there is used if it is the same one, a finished run is
skipped, a stopped one resumed. A run that others start from is made before the first of them; if it fails, so do
they. A run that fails does not keep the others from being tried. A run that another command makes is waited for.
Runs of one row with other seeds, which a table averages with these, have the same settings.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from edgefl_protocol.durable import write_atomic
from edgefl_protocol.sentences import counted
from edgefl_trainer.data.partitions.make import make_partition
from edgefl_trainer.data.partitions.partition import read_partition
from edgefl_trainer.engine.folder import check_claim, finished_summary, is_worked_on, make_folder
from edgefl_trainer.engine.run import check_backbone
from edgefl_trainer.errors import RunError
from edgefl_trainer.evaluate.tables.rows import usual_metric
from edgefl_trainer.experiments.crews import Crew, RunJob
from edgefl_trainer.experiments.planning import (
    SEED,
    PlannedPartition,
    PlannedRun,
    partitions_of,
    pretraining_of,
)
from edgefl_trainer.experiments.study_book import StudyBook

Say = Callable[[str], None]


def run_planned(runs: Sequence[PlannedRun], say: Say, crew: Crew, book: StudyBook) -> list[str]:
    """Make what is not there yet, tell `say` of each run and failure, and return the names of the runs that failed.

    `crew` makes the runs; `book` is told who makes which, for those who watch.

    Raises:
        EdgeflError: nothing can be begun: a partition cannot be made, or a run's folder or backbone cannot be used.
    """
    begins = [(first.folder, first.settings) for first in pretraining_of(runs)]
    begins += [(planned.folder, planned.settings) for planned in runs if planned.pretraining is None]
    starts = [(planned.folder, planned.settings) for planned in runs if planned.pretraining is not None]
    for folder, settings in (*begins, *starts):
        check_claim(folder, settings, resume=True)
    _check_other_seeds(runs)
    for _, settings in begins:
        check_backbone(settings, settings.build_method())
    for partition in partitions_of(runs):
        _ensure_partition(partition, say)
    with book.led():
        try:
            return _made(jobs_of(runs), say, crew, book)
        finally:
            crew.stop()


def _check_other_seeds(runs: Sequence[PlannedRun]) -> None:
    """Refuse, by a `RunError`, a row of which a run with another seed lies there that had other settings."""
    for row in {planned.folder.parent: planned for planned in runs}.values():
        for folder in sorted(row.folder.parent.glob("seed-*")):
            if (found := SEED.fullmatch(folder.name)) is not None:
                check_claim(folder, row.with_seed(int(found[1])), resume=True)


def jobs_of(runs: Sequence[PlannedRun]) -> list[RunJob]:
    """List every run to be made, in order, each pre-training before the first run that starts from it."""
    jobs: dict[Path, RunJob] = {}
    for number, planned in enumerate(runs, 1):
        before = planned.pretraining
        if before is not None and before.folder not in jobs:
            jobs[before.folder] = RunJob(
                name=before.name, head=before.name, settings=before.settings, folder=before.folder
            )
        head = f"{number}/{len(runs)} {planned.name}: {planned.row.label}"
        after = None if before is None else before.folder
        jobs[planned.folder] = RunJob(
            name=planned.name, head=head, settings=planned.settings, folder=planned.folder, after=after
        )
    return list(jobs.values())


def _made(jobs: Sequence[RunJob], say: Say, crew: Crew, book: StudyBook) -> list[str]:
    """Give jobs to the crew as its workers become free; the names of those that failed."""
    needed = {job.after for job in jobs if finished_summary(job.folder) is None}
    begun_from = {job.after for job in jobs}
    waiting, under_way = [job for job in jobs if job.folder in needed or job.folder not in begun_from], 0
    causes: dict[Path, str] = {}
    elsewhere: set[Path] = set()  # of what other commands make, what was told
    while waiting or under_way:
        for job in list(waiting):
            if finished_summary(job.folder) is not None:
                say(f"{job.head}: finished before")
            elif job.after in causes:
                causes[job.folder] = f"it starts from {next(one.name for one in jobs if one.folder == job.after)}"
                _fail(job, causes[job.folder], say, book)
            elif is_worked_on(job.folder):
                if job.folder not in elsewhere:
                    say(f"{job.head}: another command makes it, and this one waits for it")
                elsewhere.add(job.folder)
                continue
            elif crew.free is None or (job.after is not None and finished_summary(job.after) is None):
                continue
            else:
                say(job.head)
                worker = crew.free
                book.began(job.name, job.folder, worker, crew.begin(job))
                under_way += 1
            waiting.remove(job)
        if under_way:
            under_way -= 1
            outcome = crew.ended()
            summary = finished_summary(outcome.job.folder)
            if outcome.busy:  # another command was quicker
                waiting.append(outcome.job)
            elif outcome.cause or summary is None:
                causes[outcome.job.folder] = outcome.cause or "it left no summary"
                _fail(outcome.job, causes[outcome.job.folder], say, book)
            else:
                say(f"{outcome.job.head}: {_result(summary)}")
        elif waiting:
            crew.pause()
    return [job.name for job in jobs if job.folder in causes]


def _fail(job: RunJob, cause: str, say: Say, book: StudyBook) -> None:
    say(f"{job.head}: failed: {cause}")
    book.failed(job.name, cause)


def _result(summary: Mapping[str, Any]) -> str:
    """The figure and the seconds of a finished run; of one without labels the seconds."""
    seconds = f"{summary['seconds']:.0f} s"
    metric = usual_metric([summary])
    if f"mean_{metric}" not in summary:
        return seconds
    mean = summary[f"mean_{metric}"]
    shown = "no figure" if mean is None else f"mean {metric.replace('_', ' ')} {mean:.1%}"
    return f"{shown}, {seconds}"


def _ensure_partition(wanted: PlannedPartition, say: Say) -> None:
    if wanted.path.exists():
        found = read_partition(wanted.path)
        if (found.plan, found.seed) != (wanted.plan, wanted.seed):
            raise RunError(f"{wanted.path} is another partition than this experiment's: name another --out.")
        return
    made = make_partition(wanted.data, wanted.plan, wanted.seed)
    make_folder(wanted.path.parent)
    write_atomic(wanted.path, made.to_bytes())
    say(f"made {wanted.path}: {counted(len(made.sites), 'site')}")
