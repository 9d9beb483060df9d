"""Which figures of a run are sent to a tracker, and under which names: `FIGURE/SITE`, and `FIGURE` of the whole run.

Guarantees: only finite numbers, and of texts only the summary's digests and words such as the method; settings are
told without the folders of their paths.
"""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from edgefl_trainer.engine.hyper_parameters import hyper_values
from edgefl_trainer.engine.selection import judged_figure
from edgefl_trainer.engine.settings import RunSettings, without_folders

PLACE = {"phase_index", "round"}  # where in the run a line stands: the step of its figures


def settings_told(settings: RunSettings) -> dict[str, str]:
    """Return every setting and hyper-parameter of a run as a text."""
    values = {**vars(settings), **hyper_values(settings.build_method())}
    del values["hyper"]
    values["data"] = [without_folders(text) for text in settings.data]
    values["backbone"] = without_folders(settings.backbone)
    values["partition"] = Path(settings.partition).name
    return {name: _text(value) for name, value in sorted(values.items())}


def phase_figures(lines: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the figures of one phase, site by site, and the mean over sites of the one that rounds are compared by.

    `lines` are those of `metrics.jsonl`, one for each site.
    """
    found = {f"{name}/{line['site']}": value for line in lines for name, value in _numbers(line) if name not in PLACE}
    judged = [figure for line in lines if (figure := judged_figure(line)) is not None]
    return {**found, **({"mean_tune": sum(judged) / len(judged)} if judged else {})}


def summary_figures(summary: Mapping[str, Any]) -> dict[str, float]:
    """Return the figures of a finished run: `FIGURE` of the whole run, `reported_FIGURE/SITE` of each site.

    Other tables are `TABLE.FIGURE`, with `/SITE` where a figure is a site's.
    """
    sites = summary.get("sites", {})
    others = {name: value for name, value in summary.items() if name not in ("sites", "pooled")}
    return {
        **{_with_site_last(path, sites): value for path, value in _paths(others)},
        **{f"pooled_{name}": value for name, value in _numbers(summary.get("pooled", {}))},
        **{f"reported_{name}/{site}": value for site, figures in sites.items() for name, value in _numbers(figures)},
    }


def _with_site_last(path: Sequence[str], sites: Collection[str]) -> str:
    """`probe.cls/a` of probe, cls, sites, a."""
    place = next((i for i, part in enumerate(path) if i and part in sites), None)
    if place is None:
        return ".".join(path)
    before = path[: place - 1] if path[place - 1] == "sites" else path[:place]
    return f"{'.'.join([*before, *path[place + 1 :]])}/{path[place]}"


def summary_texts(summary: Mapping[str, Any]) -> dict[str, str]:
    """Return what a summary says in words: digests, method, task, preset."""
    return {name: value for name, value in summary.items() if isinstance(value, str)}


def _numbers(values: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """The finite numbers; those of a table by `name.key`, so that the probe of each readout has its own name."""
    return ((".".join(path), number) for path, number in _paths(values))


def _paths(values: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], float]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from (((name, *path), number) for path, number in _paths(value))
        elif isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            yield (name,), float(value)


def _text(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
