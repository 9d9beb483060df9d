"""Pictures of finished runs: progress over rounds, or an experiment's figures as bars or dots beside the paper's."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from edgefl_trainer.engine.federation import JUDGED, read_metrics
from edgefl_trainer.evaluate.bars import plot_bars
from edgefl_trainer.evaluate.chance import chance_of
from edgefl_trainer.evaluate.dots import plot_dots
from edgefl_trainer.evaluate.one_class import one_class_of
from edgefl_trainer.evaluate.plot import Lines, plot_progress
from edgefl_trainer.evaluate.table import row_names, unlike
from edgefl_trainer.experiments.comparison import TRIAL, Found, bars_of, is_trial, one_class_sites
from edgefl_trainer.experiments.files import Experiment
from edgefl_trainer.experiments.measured import tracked


def of_runs(folders: Sequence[Path], summaries: Sequence[Mapping[str, Any]]) -> bytes:
    """Plot the tune figures of runs over rounds and bytes, as PNG, under the names of their rows in the table.

    Where a row has several runs, their seeds follow. A `ValueError` where there is nothing to draw.
    """
    rows = row_names(summaries)
    names = [
        f"{name}, seed {run.get('seed')}" if rows.count(name) > 1 else name
        for name, run in zip(rows, summaries, strict=True)
    ]
    return plot_progress(
        {name: [read_metrics(folder)] for name, folder in zip(names, folders, strict=True)},
        metric=JUDGED,
        title="; ".join(unlike(summaries)),
        one_class={name: one_class_of(run, tuned=True) for name, run in zip(names, summaries, strict=True)},
        chance={name: chance_of([run], JUDGED) for name, run in zip(names, summaries, strict=True)},
    )


def of_experiment(experiment: Experiment, found: Sequence[Found]) -> bytes:
    """Plot an experiment as PNG, in the form that its file asks for.

    A `ValueError` where there is nothing to draw, or the runs cannot stand in one picture.
    """
    of_parts = [[one.measured.summary for one in found if one.part == part.name] for part in experiment.parts]
    trial = [f"small data, untrained network (--tiny): {TRIAL}"] if is_trial(found) else []
    plain = "\n".join(
        [experiment.title, *trial, *dict.fromkeys(clause for runs in of_parts for clause in unlike(runs))]
    )
    marked = sorted({name for part in experiment.parts for name in one_class_sites(experiment, part, found)})
    title = plain + (f"\nwithout {', '.join(marked)}: one class only" if marked else "")
    if experiment.plot == "bars":
        return plot_bars(*bars_of(experiment, found), title=title)
    if experiment.plot == "dots":
        parts = {part.name: [one for one in found if one.part == part.name] for part in experiment.parts}
        return plot_dots({name: bars_of(experiment, some) for name, some in parts.items()}, title=title)
    several = len({one.part for one in found}) > 1
    tracks: dict[str, list[Lines]] = {}
    one_class: dict[str, set[str]] = {}
    runs: dict[str, list[Mapping[str, Any]]] = {}
    for part, row in experiment.pairs():
        name = row.label + (f", {part.name}" if several else "")
        for one in found:
            if (one.part, one.row) == (part.name, row.folder):
                tracks.setdefault(name, []).append(one.measured.lines)
                runs.setdefault(name, []).append(one.measured.summary)
                one_class.setdefault(name, set()).update(one_class_of(one.measured.summary, tuned=True))
    metric = tracked(experiment.metric)
    chance = {name: chance_of(some, metric) for name, some in runs.items()}
    return plot_progress(tracks, metric=metric, title=plain, one_class=one_class, chance=chance)
