"""Runs what was planned, one after the other, and goes on where a run was stopped.

Guarantees: nothing is computed twice: a partition that is there is used if it is the same one, a finished run is
skipped, a stopped one resumed. A run that others start from is made before the first of them; if it fails, so do
they. A run that fails does not keep the others from being tried.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from edgefl_protocol.durable import write_atomic
from edgefl_protocol.errors import EdgeflError
from edgefl_protocol.sentences import counted
from edgefl_trainer.data.partition import make_partition, read_partition
from edgefl_trainer.engine.folder import check_claim, finished_summary, make_folder
from edgefl_trainer.engine.run import check_backbone, run
from edgefl_trainer.engine.settings import RunSettings
from edgefl_trainer.errors import RunError
from edgefl_trainer.evaluate.tables.rows import usual_metric
from edgefl_trainer.experiments.planning import (
    PlannedPartition,
    PlannedPretraining,
    PlannedRun,
    partitions_of,
    pretraining_of,
)

Say = Callable[[str], None]


def run_planned(runs: Sequence[PlannedRun], say: Say) -> list[str]:
    """Make what is not there yet, tell `say` of each run and failure, and return the names of the runs that failed.

    Raises:
        EdgeflError: nothing can be begun: a partition cannot be made, or a run's folder or backbone cannot be used.
    """
    begins = [(first.folder, first.settings) for first in pretraining_of(runs)]
    begins += [(planned.folder, planned.settings) for planned in runs if planned.pretraining is None]
    starts = [(planned.folder, planned.settings) for planned in runs if planned.pretraining is not None]
    for folder, settings in (*begins, *starts):
        check_claim(folder, settings, resume=True)
    for _, settings in begins:
        check_backbone(settings, settings.build_method())
    for partition in partitions_of(runs):
        _ensure_partition(partition, say)
    pretrained: dict[Path, bool] = {}
    failed = []
    for number, planned in enumerate(runs, 1):
        head = f"{number}/{len(runs)} {planned.name}: {planned.row.label}"
        before = planned.pretraining
        if finished_summary(planned.folder) is not None:
            say(f"{head}: finished before")
            continue
        if before is not None and before.folder not in pretrained:
            pretrained[before.folder] = _pretrain(before, say)
        if before is not None and not pretrained[before.folder]:
            say(f"{head}: failed: it starts from {before.name}")
            failed.append(planned.name)
            continue
        say(head)
        summary = _tried(planned.settings, planned.folder, head, say)
        if summary is None:
            failed.append(planned.name)
            continue
        metric = usual_metric([summary])
        mean = summary[f"mean_{metric}"]
        shown = "no figure" if mean is None else f"mean {metric.replace('_', ' ')} {mean:.1%}"
        say(f"{head}: {shown}, {summary['seconds']:.0f} s")
    return failed


def _pretrain(planned: PlannedPretraining, say: Say) -> bool:
    """Make a run that others start from, unless it is there; whether it is there then."""
    if finished_summary(planned.folder) is not None:
        say(f"{planned.name}: finished before")
        return True
    say(planned.name)
    summary = _tried(planned.settings, planned.folder, planned.name, say)
    if summary is None:
        return False
    say(f"{planned.name}: {summary['seconds']:.0f} s")
    return True


def _tried(settings: RunSettings, folder: Path, head: str, say: Say) -> dict[str, Any] | None:
    """The summary of a run, or None where it failed, which is told."""
    try:
        return run(settings, folder, resume=True)
    except EdgeflError as error:
        say(f"{head}: failed: {error}")
        return None


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
