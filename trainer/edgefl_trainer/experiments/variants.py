"""Names of runs that stand in one table or picture: the method, and the settings in which its runs there differ.

    fedavg, lr_head=0.01                 fedavg, balance=class                 local, picture=hidden

Guarantees: a name depends on the runs, not on their order or folders; runs that differ in their seed alone share one.
What `evaluate.tables` names by itself (preset and rounds, mode, share of labels) stands in no setting here.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from edgefl_trainer.engine.hyper_parameters import hyper_values
from edgefl_trainer.engine.models import FinishedRun
from edgefl_trainer.engine.settings import RunSettings
from edgefl_trainer.errors import SettingError
from edgefl_trainer.evaluate.tables.rows import run_name
from edgefl_trainer.experiments.run_words import made_of

NAMED_ELSEWHERE = ("method", "preset", "rounds", "seed", "device", "hyper")
TOLD_UNLESS = {"picture": "seen"}  # a model that sees no picture is never just its method
USUALLY_NAMED = 3  # settings; more where fewer do not tell the runs apart

Values = Mapping[str, str]
"""Setting → its value, as a command line has it."""


def told_apart(runs: Sequence[FinishedRun]) -> list[Mapping[str, Any]]:
    """Return the summaries of runs, with how they were made, and the `label` that tells apart those of one method."""
    alike: dict[tuple[object, ...], list[FinishedRun]] = defaultdict(list)
    for run in runs:
        alike[_begins(run)].append(run)
    suffixes = {id(run): suffix for some in alike.values() for run, suffix in zip(some, _suffixes(some), strict=True)}
    return [
        {
            **run.summary,
            **made_of(run),
            **({"label": f"{run_name(run.summary)}, {suffix}"} if (suffix := suffixes[id(run)]) else {}),
        }
        for run in runs
    ]


def _begins(run: FinishedRun) -> tuple[object, ...]:
    """What the table names a run by without its further settings."""
    return run_name(run.summary), run.summary.get("preset"), run.summary.get("rounds")


def _suffixes(runs: Sequence[FinishedRun]) -> list[str]:
    """The settings in which these runs differ, for each of them, and those that are always told; else empty."""
    told = [_values(run) for run in runs]
    variants: dict[object, list[Values]] = defaultdict(list)
    for number, (run, values) in enumerate(zip(runs, told, strict=True)):
        variants[run.summary.get("settings_sha256", number)].append(values)
    differing = _differing(list(variants.values()))
    needed: list[str] = []
    for key in differing:
        if len({_of(values, [*needed, key]) for values in told}) > len({_of(values, needed) for values in told}):
            needed.append(key)
    unusual = [key for key, usual in TOLD_UNLESS.items() if any(values.get(key, usual) != usual for values in told)]
    needed += [key for key in unusual if key not in needed]
    shown = (needed + [key for key in differing if key not in needed])[: max(USUALLY_NAMED, len(needed))]
    rest = len([key for key in differing if key not in shown])
    texts = {key: _short([values.get(key, "") for values in told]) for key in shown}
    more = [f"and {rest} more"] if rest else []
    return [
        ", ".join([*(f"{key}={texts[key][values[key]]}" for key in shown if key in values), *more]) for values in told
    ]


def _differing(variants: Sequence[Sequence[Values]]) -> list[str]:
    """Settings that differ between variants and not among the repetitions of one, as the files of its seeds may."""
    keys = dict.fromkeys(key for repetitions in variants for values in repetitions for key in values)
    return [
        key
        for key in keys
        if all(len({values.get(key) for values in repetitions}) == 1 for repetitions in variants)
        and len({repetitions[0].get(key) for repetitions in variants}) > 1
    ]


def _of(values: Values, keys: Sequence[str]) -> tuple[str | None, ...]:
    return tuple(values.get(key) for key in keys)


def _values(run: FinishedRun) -> Values:
    """Every setting of a run, and every hyper-parameter of its method; of an unknown one those that it was given."""
    settings = run.settings
    try:
        hyper = hyper_values(settings.build_method())
    except SettingError:
        hyper = dict(settings.hyper)
    own = {one.name: getattr(settings, one.name) for one in fields(RunSettings) if one.name not in NAMED_ELSEWHERE}
    return {name: _text(value) for name, value in {**hyper, **own}.items()}


def _text(value: object) -> str:
    if isinstance(value, tuple):
        return ",".join(map(str, value)) or "auto"
    return str(value).lower() if isinstance(value, bool) else str(value) or "none"


def _short(texts: Sequence[str]) -> dict[str, str]:
    """Texts without the folders of their paths, where that leaves them different."""
    short = {text: _without_folders(text) for text in texts}
    return short if len(set(short.values())) == len(short) else dict(zip(texts, texts, strict=True))


def _without_folders(text: str) -> str:
    """A path or SPEC without the folders before its last name; other texts as they are."""
    kind, colon, where = text.rpartition(":")
    return text if kind in ("timm", "vit", "cnn") or "," in text else f"{kind}{colon}{where.rpartition('/')[2]}"
