"""Pictures of finished runs: progress over rounds, or an experiment's figures as bars or dots beside the paper's."""

from collections.abc import Sequence
from pathlib import Path

from edgefl_trainer.engine.federation import JUDGED, read_metrics
from edgefl_trainer.evaluate.bars import plot_bars
from edgefl_trainer.evaluate.dots import plot_dots
from edgefl_trainer.evaluate.plot import Lines, plot_progress
from edgefl_trainer.experiments.comparison import Found, bars_of
from edgefl_trainer.experiments.files import Experiment
from edgefl_trainer.experiments.measured import tracked


def of_runs(folders: Sequence[Path]) -> bytes:
    """Plot the tune figures of runs over rounds and bytes, as PNG; runs of equal folder names stand under paths.

    A `ValueError` where there is nothing to draw.
    """
    names = [folder.name for folder in folders]
    tracks = {str(f) if names.count(f.name) > 1 else f.name: [read_metrics(f)] for f in folders}
    return plot_progress(tracks, metric=JUDGED, title="")


def of_experiment(experiment: Experiment, found: Sequence[Found]) -> bytes:
    """Plot an experiment as PNG, in the form that its file asks for.

    A `ValueError` where there is nothing to draw, or the runs cannot stand in one picture.
    """
    if experiment.plot == "bars":
        return plot_bars(*bars_of(experiment, found), title=experiment.title)
    if experiment.plot == "dots":
        parts = {part.name: [one for one in found if one.part == part.name] for part in experiment.parts}
        return plot_dots({name: bars_of(experiment, some) for name, some in parts.items()}, title=experiment.title)
    several = len({one.part for one in found}) > 1
    tracks: dict[str, list[Lines]] = {}
    for part, row in experiment.pairs():
        name = row.label + (f", {part.name}" if several else "")
        for one in found:
            if (one.part, one.row) == (part.name, row.folder):
                tracks.setdefault(name, []).append(one.measured.lines)
    return plot_progress(tracks, metric=tracked(experiment.metric), title=experiment.title)
