"""Names of runs that stand in one table or picture: the method, and the settings in which its runs there differ.

Of runs that stand in one row all the same, as those of an experiment do, `unlike_settings` says so.

    fedavg, lr_head=0.01                 fedavg, balance=class                 local, picture=hidden

Guarantees: a name depends on the runs, not on their order or folders; runs that differ in their seed alone share one.
What `evaluate.tables` names by itself (preset and rounds, mode, share of labels) stands in no setting here.
"""

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields
from typing import Any, Protocol

from edgefl_protocol.sentences import joined_by_and
from edgefl_trainer.engine.hyper_parameters import hyper_values
from edgefl_trainer.engine.models import FinishedRun
from edgefl_trainer.engine.settings import RunSettings
from edgefl_trainer.errors import SettingError
from edgefl_trainer.evaluate.tables.rows import run_name
from edgefl_trainer.evaluate.tables.seeds import named_seeds
from edgefl_trainer.experiments.run_words import made_of

NAMED_ELSEWHERE = ("method", "preset", "rounds", "seed", "device", "hyper")
NO_VARIANT = ("seed", "device", "workers", "hyper")  # the same run otherwise; hyper-parameters count one by one
TOLD_UNLESS = {"picture": "seen"}  # a model that sees no picture is never just its method
USUALLY_NAMED = 3  # settings; more where fewer do not tell the runs apart

Values = Mapping[str, str]
"""Setting → its value, as a command line has it."""


class Made(Protocol):
    """A finished run, as far as its settings go."""

    @property
    def settings(self) -> RunSettings:
        """Of `config.toml`."""

    @property
    def hyper(self) -> Mapping[str, Any]:
        """As it began; today's defaults where one is not named."""

    @property
    def summary(self) -> Mapping[str, Any]:
        """Of `summary.json`."""


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


def unlike_settings(rows: Mapping[str, Sequence[Made]]) -> list[str]:
    """Return a clause where a row, by its name, averages runs with different settings: seed by seed what they had."""
    told = [_unlike(name, runs) for name, runs in rows.items() if len(_known_variants(runs)) > 1]
    return [f"NOT ALL WITH THE SAME SETTINGS: {'; '.join(told)}"] if told else []


def _unlike(name: str, runs: Sequence[Made]) -> str:
    own = [_values(run, NO_VARIANT) for run in runs]
    keys = dict.fromkeys(key for values in own for key in values)  # one run may have a key that others' versions lack
    told = [{key: values.get(key, "unset") for key in keys} for values in own]
    words = _differences(runs, told, ())
    if len(set(words)) < len(_known_variants(runs)):  # they differ in the run that they start from
        digests = [f"settings_sha256={str(run.summary.get('settings_sha256'))[:12]}" for run in runs]
        words = [", ".join(filter(None, pair)) for pair in zip(words, digests, strict=True)]
    having: dict[str, list[int]] = {}
    for run, had in sorted(zip(runs, words, strict=True), key=lambda pair: pair[0].settings.seed):
        having.setdefault(had, []).append(run.settings.seed)
    clauses = [f"{named_seeds(seeds)} had {had}" for had, seeds in having.items()]
    return f"of {name}, {joined_by_and(clauses)}"


def _known_variants(runs: Sequence[Made]) -> set[object]:
    return {_variant(run) for run in runs if "settings_sha256" in run.summary}


def _suffixes(runs: Sequence[FinishedRun]) -> list[str]:
    """The settings in which these runs differ, for each of them, and those that are always told; else empty."""
    told = [_values(run, NAMED_ELSEWHERE) for run in runs]
    unusual = [key for key, usual in TOLD_UNLESS.items() if any(values.get(key, usual) != usual for values in told)]
    return _differences(runs, told, unusual)


def _differences(runs: Sequence[Made], told: Sequence[Values], always: Sequence[str]) -> list[str]:
    """Of each run as few of the settings in which these differ as tell them apart, and those of `always`."""
    variants: dict[object, list[Values]] = defaultdict(list)
    for run, values in zip(runs, told, strict=True):
        variants[_variant(run)].append(values)
    differing = _differing(list(variants.values()))
    needed: list[str] = []
    for key in differing:
        if len({_of(values, [*needed, key]) for values in told}) > len({_of(values, needed) for values in told}):
            needed.append(key)
    needed += [key for key in always if key not in needed]
    shown = (needed + [key for key in differing if key not in needed])[: max(USUALLY_NAMED, len(needed))]
    rest = len([key for key in differing if key not in shown])
    texts = {key: _short([values.get(key, "") for values in told]) for key in shown}
    more = [f"and {rest} more"] if rest else []
    return [
        ", ".join([*(f"{key}={texts[key][values[key]]}" for key in shown if key in values), *more]) for values in told
    ]


def _variant(run: Made) -> object:
    """What runs share that are repetitions of one another; of one from before it was kept, the run itself."""
    digest = run.summary.get("settings_sha256")
    return id(run) if digest is None else (digest, *sorted(_text(pair) for pair in _hyper(run).items()))


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


def _values(run: Made, without: Collection[str]) -> Values:
    """Every setting of a run but those of `without`, and every hyper-parameter; of an unknown method those given."""
    own = {one.name: getattr(run.settings, one.name) for one in fields(RunSettings) if one.name not in without}
    return {name: _text(value) for name, value in {**_hyper(run), **own}.items()}


def _hyper(run: Made) -> Mapping[str, Any]:
    try:
        return {**hyper_values(run.settings.build_method()), **run.hyper}
    except SettingError:
        return run.settings.hyper


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
