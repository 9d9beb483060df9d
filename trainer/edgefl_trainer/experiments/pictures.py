"""Pictures of finished runs: progress over rounds, or an experiment's figures as bars or dots beside the paper's."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from edgefl_trainer.engine.folder import read_metrics
from edgefl_trainer.evaluate.chance import chance_of
from edgefl_trainer.evaluate.one_class import one_class_of
from edgefl_trainer.evaluate.plots.bars import plot_bars
from edgefl_trainer.evaluate.plots.dots import plot_dots
from edgefl_trainer.evaluate.plots.progress import plot_progress
from edgefl_trainer.evaluate.plots.tracks import Lines
from edgefl_trainer.evaluate.tables.rows import row_names, usual_metric
from edgefl_trainer.evaluate.tables.text import against, unlike
from edgefl_trainer.experiments.comparison import TRIAL, Found, bars_of, rows_of
from edgefl_trainer.experiments.comparison_text import is_trial, one_class_sites
from edgefl_trainer.experiments.files import Experiment
from edgefl_trainer.experiments.measured import tracked
from edgefl_trainer.experiments.variants import unlike_settings


def of_runs(folders: Sequence[Path], summaries: Sequence[Mapping[str, Any]]) -> bytes:
    """Plot the tune figures of runs over rounds and bytes, as PNG, under the names of their rows in the table.

    Runs that share a row, seeds of one setting, share a name. A `ValueError` where there is nothing to draw.
    """
    rows: dict[str, list[int]] = {}
    for place, name in enumerate(row_names(summaries)):
        rows.setdefault(name, []).append(place)
    runs = {name: [summaries[i] for i in row] for name, row in rows.items()}
    metric = tracked(usual_metric(summaries), summaries[0])
    return plot_progress(
        {name: [read_metrics(folders[i]) for i in row] for name, row in rows.items()},
        metric=metric,
        title=against(summaries),
        one_class={name: set().union(*(one_class_of(run, tuned=True) for run in some)) for name, some in runs.items()},
        chance={name: chance_of(some, metric) for name, some in runs.items()},
    )


def of_experiment(experiment: Experiment, found: Sequence[Found]) -> bytes:
    """Plot an experiment as PNG, in the form that its file asks for.

    A `ValueError` where there is nothing to draw, or the runs cannot stand in one picture.
    """
    of_parts = [[one.summary for one in found if one.part == part.name] for part in experiment.parts]
    trial = [f"small data, untrained network (--tiny): {TRIAL}"] if is_trial(found) else []
    against = dict.fromkeys(clause for runs in of_parts for clause in unlike(runs))
    for part in experiment.parts:
        unlike_ones = unlike_settings({row.label: runs for row, runs in rows_of(experiment, part, found)})
        against |= dict.fromkeys(clause.partition(":")[0] for clause in unlike_ones)
    plain = "\n".join([experiment.title, *trial, *against])
    marked = sorted({name for part in experiment.parts for name in one_class_sites(experiment, part, found)})
    title = plain + (f"\nwithout {', '.join(marked)}: one class only" if marked else "") + _spread(experiment, found)
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
                runs.setdefault(name, []).append(one.summary)
                one_class.setdefault(name, set()).update(one_class_of(one.summary, tuned=True))
    metric = tracked(experiment.metric, found[0].measured.summary)
    chance = {name: chance_of(some, metric) for name, some in runs.items()}
    return plot_progress(tracks, metric=metric, title=plain, one_class=one_class, chance=chance)


def _spread(experiment: Experiment, found: Sequence[Found]) -> str:
    """Say what the error bars of a picture are over, and of how many; nothing where it has none."""
    if experiment.spread == "seeds":
        runs = Counter((one.part, one.row) for one in found)
        numbers = sorted(set(runs.values()) - {1})
    else:
        of_runs = [one.summary["sites"].values() for one in found]
        numbers = sorted({sum(not site.get("held_out") for site in sites) for sites in of_runs} - {1})
    if not numbers:
        return ""
    many = f"{numbers[0]} to {numbers[-1]}" if len(numbers) > 1 else f"{numbers[0]}"
    return f"\nerror bars: ± standard deviation over {many} {experiment.spread}"
