"""From an experiment file to runs: settings, seeds, folders, partitions, and the commands that do the same by hand.

Settings come from the preset, the file, the part, the row, `[tiny]` where it was asked for, then the command line, each
overriding the one before. A run lies in OUT/PART/ROW/seed-N, a partition in OUT/partitions/PART.json, so experiments
that share an OUT share the runs that they have in common.
"""

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from edgefl_trainer.data.plan import Plan
from edgefl_trainer.engine.settings import RunSettings, hyper_types, method_class, nearest, preset_of, resolve
from edgefl_trainer.errors import SettingError
from edgefl_trainer.experiments.files import Experiment, Part, Row, plan_of

VARIABLE = re.compile(r"\$([A-Za-z_][A-Za-z0-9_]*)")
SEED = re.compile(r"seed-(\d+)")


@dataclass(frozen=True, kw_only=True)
class PlannedPartition:
    """A partition file that runs read."""

    path: Path
    data: tuple[str, ...]
    plan: Plan
    seed: int


@dataclass(frozen=True, kw_only=True)
class PlannedRun:
    """One row of one part with one seed."""

    part: Part
    row: Row
    settings: RunSettings
    folder: Path
    partition: PlannedPartition | None

    @property
    def name(self) -> str:
        """How a person is told of it."""
        return f"{self.part.name}/{self.row.folder}/seed-{self.settings.seed}"


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What of an experiment is to be run, and how."""

    out: Path
    seeds: tuple[int, ...] = (0,)
    rows: tuple[str, ...] = ()  # labels or folder names; empty: all
    parts: tuple[str, ...] = ()  # empty: all
    tiny: bool = False
    flags: Mapping[str, Any] = field(default_factory=dict)  # run settings of the command line; None: not given
    assignments: tuple[str, ...] = ()  # key=value for the methods that have the key


def plan_runs(experiment: Experiment, choice: Choice, environment: Mapping[str, str]) -> list[PlannedRun]:
    """Every chosen run, resolved; nothing is read but the environment.

    Args:
        experiment: the file.
        choice: rows, parts, seeds and settings.
        environment: where `$NAME` in data and backbones is looked up.

    Raises:
        SettingError: a row, part, setting or hyper-parameter that is not there, or a variable that is not set.
    """
    _check_chosen(choice.parts, {part.name: part.name for part in experiment.parts}, "part")
    known_rows = {name: row.folder for row in experiment.rows for name in (row.label, row.folder)}
    _check_chosen(choice.rows, known_rows, "row")
    _check_hyper(experiment, choice)
    chosen = [
        (part, row)
        for part, row in experiment.pairs()
        if (not choice.parts or part.name in choice.parts)
        and (not choice.rows or {row.label, row.folder} & set(choice.rows))
    ]
    if not chosen:
        raise SettingError("no row is both in these --rows and in these --parts: name others.")
    return [_planned(experiment, choice, part, row, seed, environment) for part, row in chosen for seed in choice.seeds]


def _check_chosen(names: Sequence[str], known: Mapping[str, str], what: str) -> None:
    for name in names:
        if name not in known:
            raise SettingError(f"the experiment has no {what} {name!r}; did you mean {nearest(name, known)}?")


def _check_hyper(experiment: Experiment, choice: Choice) -> None:
    """What is given to every row has to be known to one of them at least."""
    known = {name for row in experiment.rows for name in hyper_types(method_class(row.method))}
    for name in (*experiment.hyper, *(text.partition("=")[0] for text in choice.assignments)):
        if name not in known:
            raise SettingError(f"no method here has a hyper-parameter {name!r}; did you mean {nearest(name, known)}?")


def _planned(
    experiment: Experiment, choice: Choice, part: Part, row: Row, seed: int, environment: Mapping[str, str]
) -> PlannedRun:
    given: dict[str, Any] = {**experiment.settings, **part.settings, **row.settings}
    data, numbers = part.data, dict(part.partition)
    if choice.tiny:
        given |= experiment.tiny.settings
        data = experiment.tiny.data
        numbers |= experiment.tiny.partition.get(str(numbers.get("scheme")), {})
    given |= {name: value for name, value in choice.flags.items() if value is not None}
    data = tuple(expanded(text, environment) for text in given.pop("data", data))
    if "backbone" in given:
        given["backbone"] = expanded(given["backbone"], environment)
    partition = None
    if (found := plan_of(numbers)) is not None:
        plan, partition_seed = found
        path = choice.out / "partitions" / f"{part.name}.json"
        partition = PlannedPartition(path=path, data=data, plan=plan, seed=partition_seed)
        given["partition"] = str(path)
    known = hyper_types(method_class(row.method))
    given["hyper"] = {name: value for name, value in experiment.hyper.items() if name in known} | dict(row.hyper)
    assignments = [text for text in choice.assignments if text.partition("=")[0] in known]
    settings = resolve(row.method, {**given, "data": data, "seed": seed}, None, assignments)
    folder = choice.out / part.name / row.folder / f"seed-{seed}"
    return PlannedRun(part=part, row=row, settings=settings, folder=folder, partition=partition)


def expanded(text: str, environment: Mapping[str, str]) -> str:
    """A text with `$NAME` replaced from the environment.

    Raises:
        SettingError: the variable is not set.
    """

    def value(found: re.Match[str]) -> str:
        if found[1] not in environment:
            raise SettingError(
                f"{text} needs the environment variable {found[1]}: set it, or give --data or --backbone."
            )
        return environment[found[1]]

    return VARIABLE.sub(value, text)


def place_of(folder: Path) -> tuple[str, str, int] | None:
    """Part, row folder and seed of a run that lies where `plan_runs` puts one."""
    seed = SEED.fullmatch(folder.name)
    if seed is None or len(folder.absolute().parts) < 4:
        return None
    return folder.absolute().parts[-3], folder.absolute().parts[-2], int(seed[1])


def partitions_of(runs: Sequence[PlannedRun]) -> list[PlannedPartition]:
    """The partitions that runs need, each once."""
    found = {run.partition.path: run.partition for run in runs if run.partition is not None}
    return list(found.values())


def commands(runs: Sequence[PlannedRun]) -> Iterator[str]:
    """The command lines that make the same folders, partitions and runs."""
    partitions = partitions_of(runs)
    if partitions:
        yield shlex.join(["mkdir", "-p", str(partitions[0].path.parent)])
    for partition in partitions:
        numbers = {"dirichlet_by" if n == "by" else n: v for n, v in partition.plan.to_json().items()}
        words = ["edgefl-train", "partition", *_options({"data": partition.data, **numbers, "seed": partition.seed})]
        yield shlex.join([*words, "-o", str(partition.path)])
    for run in runs:
        words = ["edgefl-train", "run", run.settings.method, *_options(_told(run.settings))]
        for name, value in _told_hyper(run.settings).items():
            words += ["--set", f"{name}={_text(value)}"]
        yield shlex.join([*words, "--out", str(run.folder)])


def _told(settings: RunSettings) -> dict[str, Any]:
    """The settings that differ from what the method and preset give by themselves."""
    plain = resolve(settings.method, {"preset": settings.preset, "data": settings.data}, None, [])
    told = {name: value for name, value in vars(settings).items() if value != getattr(plain, name)}
    return {"data": settings.data, "preset": settings.preset} | {n: v for n, v in told.items() if n != "hyper"}


def _told_hyper(settings: RunSettings) -> dict[str, Any]:
    preset = preset_of(settings.method, settings.preset).get("hyper", {})
    return {name: value for name, value in settings.hyper.items() if name not in preset or preset[name] != value}


def _options(values: Mapping[str, Any]) -> Iterator[str]:
    for name, value in values.items():
        flag = "--" + name.replace("_", "-")
        if name == "data":
            for text in value:
                yield from (flag, text)
        elif value not in ((), "", None):
            yield from (flag, _text(value))


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
