"""Finds the finished runs of an experiment: by where they lie, else by their settings."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from edgefl_protocol.errors import EdgeflError
from edgefl_trainer.engine.first_run import first_run
from edgefl_trainer.engine.folder import CONFIG, begun_hyper, finished_summary, read_metrics, run_folders
from edgefl_trainer.engine.hyper_parameters import hyper_values
from edgefl_trainer.engine.models import FinishedRun, open_run
from edgefl_trainer.engine.settings import RunSettings, read_settings
from edgefl_trainer.environment import environment_of
from edgefl_trainer.errors import RunError
from edgefl_trainer.experiments.comparison import Found
from edgefl_trainer.experiments.files import Experiment, MethodRow, Part
from edgefl_trainer.experiments.measured import Measurement
from edgefl_trainer.experiments.planning import federation_of, place_of


def find_runs(experiment: Experiment, folders: Sequence[Path]) -> list[Found]:
    """Find the runs of an experiment among folders.

    Args:
        folders: runs, or folders of runs; below a folder of runs those of other experiments are passed over.

    Raises:
        RunError: a run that was named is none of this experiment's rows, or stands for a row and seed twice.
    """
    found: list[Found] = []
    for folder in folders:
        for path in run_folders(folder):
            place = _place(experiment, open_run(path), path)
            if place is not None:
                found.append(_found(path, *place))
            elif path == folder:
                rows = ", ".join(row.label for row in experiment.rows)
                raise RunError(f"the run in {folder} is none of the experiment's rows ({rows}): leave it out.")
    names = [f"{one.part}/{one.row} with seed {one.measured.seed}" for one in found]
    for name in names:
        if names.count(name) > 1:
            raise RunError(f"{name} is there twice: leave one run out.")
    return found


def _found(path: Path, part: Part, row: MethodRow) -> Found:
    run = open_run(path)
    measured = Measurement(seed=run.settings.seed, summary=run.summary, lines=read_metrics(path))
    return Found(
        part=part.name,
        row=row.folder,
        measured=measured,
        settings=run.settings,
        environment=environment_of(path),
        hyper=begun_hyper(path),
        first=_first_stage(run.settings),
        first_seconds=_first_seconds(run.settings),
    )


def _first_stage(settings: RunSettings) -> RunSettings | None:
    """The settings of the run that a run starts from, while that is still there."""
    folder = first_run(settings.backbone)
    if folder is None:
        return None
    try:
        return read_settings(folder / CONFIG)
    except EdgeflError:
        return None


def _first_seconds(settings: RunSettings) -> float | None:
    """Return the seconds of the pre-training run, while its folder is there."""
    folder = first_run(settings.backbone)
    summary = None if folder is None else finished_summary(folder)
    return None if summary is None else float(summary["seconds"])


def _place(experiment: Experiment, run: FinishedRun, path: Path) -> tuple[Part, MethodRow] | None:
    """Find a run's row by its folder; of a run made by hand, by method and settings."""
    lies = place_of(path)
    candidates = []
    for part, row in experiment.pairs():
        if row.method != run.settings.method:
            continue
        if lies is not None and lies[:2] == (part.name, row.folder):
            return part, row
        if _has(run.hyper, row.hyper) and _starts(run.settings, part, row) and _labels(run.settings, part, row):
            candidates.append((part, row))
    most = max((_named(row) for _, row in candidates), default=0)
    closest = [(part, row) for part, row in candidates if _named(row) == most]
    return closest[0] if len(closest) == 1 else None


def _named(row: MethodRow) -> int:
    """How many hyper-parameters a row names, of both stages."""
    return len(row.hyper) + (0 if row.pretrain is None else len(row.pretrain.hyper))


def _has(values: Mapping[str, Any], hyper: Mapping[str, Any]) -> bool:
    """Whether a run with these hyper-parameters has every one that a row names."""
    return all(values.get(name) == value for name, value in hyper.items())


def _starts(settings: RunSettings, part: Part, row: MethodRow) -> bool:
    """Whether a run starts from the pre-training, or from the network, that a row names.

    A pre-training that lies where an experiment puts it was made on that experiment's data: it is of that federation.
    """
    if row.pretrain is None:
        return bool(row.settings.get("backbone", settings.backbone) == settings.backbone)
    first = _first_stage(settings)
    if (
        first is None
        or first.method != row.pretrain.method
        or not _has(hyper_values(first.build_method()), row.pretrain.hyper)
    ):
        return False
    return federation_of(Path(settings.backbone.partition(":")[2])) in (None, part.shared)


def _labels(settings: RunSettings, part: Part, row: MethodRow) -> bool:
    """Whether a run uses the share of labels that a row of a part names."""
    wanted = {**part.settings, **row.settings}.get("labels", settings.labels)
    return bool(wanted == settings.labels)
