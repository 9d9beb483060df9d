"""From an experiment file to runs: settings, seeds, folders, partitions, and the commands that do the same by hand.

Settings come from the preset, the file, the part, the row, `[tiny]` where it was asked for, then the command line, each
overriding the one before. A run lies in OUT/PART/ROW/seed-N, the run it starts from in
OUT/pretraining/FEDERATION/RUN/seed-N, a partition in OUT/partitions/FEDERATION.json (a part that names no federation is
one), so experiments that share an OUT share the runs that they have in common.
"""

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from edgefl_trainer.data.partitions.plan import PartitionPlan
from edgefl_trainer.engine.hyper_parameters import blank, hyper_types, preset_of
from edgefl_trainer.engine.settings import RunSettings, resolve
from edgefl_trainer.errors import SettingError
from edgefl_trainer.experiments.files import SHARED, Experiment, MethodRow, Part, Pretrain, plan_of
from edgefl_trainer.typed_values import nearest

VARIABLE = re.compile(r"\$([A-Za-z_][A-Za-z0-9_]*)")
SEED = re.compile(r"seed-(\d+)")
PRETRAINING = "pretraining"  # folder of the pre-training runs
# what lies in an OUT: a run of a part, one that runs start from, a partition
OWN = ("*/*/seed-*/config.toml", f"{PRETRAINING}/*/*/seed-*/config.toml", "partitions/*.json")
PRETRAIN = "pretrain."  # before a key of --set: of the pre-training runs
PRETRAIN_FLAGS = {
    "backbone": "backbone",
    "pretrain_rounds": "rounds",
    "pretrain_epochs": "epochs",
    "workers": "workers",
}  # flag → setting


@dataclass(frozen=True, kw_only=True)
class PlannedPartition:
    """A partition file that runs read."""

    path: Path
    data: tuple[str, ...]
    plan: PartitionPlan
    seed: int


@dataclass(frozen=True, kw_only=True)
class PlannedPretraining:
    """The first stage of rows that have two: a run without labels."""

    settings: RunSettings
    folder: Path
    name: str  # how a person is told of it


@dataclass(frozen=True, kw_only=True)
class PlannedRun:
    """One row of one part with one seed."""

    part: Part
    row: MethodRow
    settings: RunSettings
    folder: Path
    partition: PlannedPartition | None
    pretraining: PlannedPretraining | None = None

    @property
    def name(self) -> str:
        """How a person is told of it."""
        return f"{self.part.name}/{self.row.folder}/seed-{self.settings.seed}"

    def with_seed(self, seed: int) -> RunSettings:
        """Return the settings of this row's run with another seed."""
        settings = replace(self.settings, seed=seed)
        if self.pretraining is None:
            return settings
        return replace(settings, backbone=f"run:{self.pretraining.folder.with_name(f'seed-{seed}')}")


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
    """Resolve every chosen run; nothing is read but the environment, for `$NAME` in data and backbones.

    Raises:
        SettingError: a row, part, setting or hyper-parameter that is not there, or a variable that is not set.
    """
    _check_chosen(choice.parts, {part.name: part.name for part in experiment.parts}, "part")
    known_rows = {name: row.folder for row in experiment.rows for name in (row.label, row.folder)}
    _check_chosen(choice.rows, known_rows, "row")
    _check_given(experiment, choice)
    chosen = [
        (part, row)
        for part, row in experiment.pairs()
        if (not choice.parts or part.name in choice.parts)
        and (not choice.rows or {row.label, row.folder} & set(choice.rows))
    ]
    if not chosen:
        raise SettingError("no row is both in these --rows and in these --parts: name others.")
    planned = []
    for part, row in chosen:
        try:
            planned += [_planned(experiment, choice, part, row, seed, environment) for seed in choice.seeds]
        except SettingError as error:
            raise SettingError(f"row {row.label!r}: {error}") from error
    pretraining_of(planned)
    return planned


def _check_chosen(names: Sequence[str], known: Mapping[str, str], what: str) -> None:
    for name in names:
        if name not in known:
            raise SettingError(f"the experiment has no {what} {name!r}; did you mean {nearest(name, known)}?")


def _check_given(experiment: Experiment, choice: Choice) -> None:
    """What is given to every row, or every pre-training, has to be known to one of them at least."""
    first = [row.pretrain.method for row in experiment.rows if row.pretrain is not None]
    assigned = [text.partition("=")[0] for text in choice.assignments]
    tuned = [name for name in assigned if not name.startswith(PRETRAIN)]
    learned = [name.removeprefix(PRETRAIN) for name in assigned if name.startswith(PRETRAIN)]
    given = [name for name in ("pretrain_rounds", "pretrain_epochs") if choice.flags.get(name) is not None]
    flags = [f"--{name.replace('_', '-')}" for name in given] + [f"--set {PRETRAIN}{name}" for name in learned]
    if flags and not first:
        raise SettingError(f"the experiment has no pre-training runs: leave {flags[0]} out.")
    data = [text for part in experiment.parts for text in part.data]
    _check_hyper([*experiment.hyper, *tuned], [row.method for row in experiment.rows], data)
    _check_hyper([*experiment.pretrain.hyper, *experiment.tiny.pretrain.hyper, *learned], first, data)


def _check_hyper(names: Sequence[str], methods: Sequence[str], data: Sequence[str]) -> None:
    known = {name for method in methods for name in hyper_types(blank(method, data))}
    for name in names:
        if name not in known:
            raise SettingError(f"no method here has a hyper-parameter {name!r}; did you mean {nearest(name, known)}?")


def _planned(
    experiment: Experiment, choice: Choice, part: Part, row: MethodRow, seed: int, environment: Mapping[str, str]
) -> PlannedRun:
    given: dict[str, Any] = {**experiment.settings, **part.settings, **row.settings}
    data, numbers = part.data, dict(part.partition)
    if choice.tiny:
        given |= experiment.tiny.settings
        data = experiment.tiny.data
        numbers |= experiment.tiny.partition.get(str(numbers.get("scheme")), {})
    flags = {name: value for name, value in choice.flags.items() if value is not None}
    if row.pretrain is None and any(one.pretrain is not None for one in experiment.rows):
        flags.pop("backbone", None)  # of the first runs; this row starts from what it names
    given |= {name: value for name, value in flags.items() if name not in ("pretrain_rounds", "pretrain_epochs")}
    data = tuple(expanded(text, environment) for text in given.pop("data", data))
    if "backbone" in given:
        given["backbone"] = expanded(given["backbone"], environment)
    given |= {"data": data, "seed": seed}
    partition = None
    if (found := plan_of(numbers)) is not None:
        plan, partition_seed = found
        path = choice.out / "partitions" / f"{part.shared}.json"
        partition = PlannedPartition(path=path, data=data, plan=plan, seed=partition_seed)
        given["partition"] = str(path)
    first = None if row.pretrain is None else _pretraining(experiment, choice, part, row.pretrain, given, environment)
    if first is not None:
        given["backbone"] = first.settings.backbone  # which presets ask for; the run itself is not there yet
    given["hyper"] = _known_hyper(row.method, experiment.hyper, data) | dict(row.hyper)
    settings = resolve(row.method, given, None, _known_assignments(row.method, choice.assignments, data))
    if first is not None:
        settings = replace(settings, backbone=f"run:{first.folder}")
    folder = choice.out / part.name / row.folder / f"seed-{seed}"
    return PlannedRun(part=part, row=row, settings=settings, folder=folder, partition=partition, pretraining=first)


def _pretraining(
    experiment: Experiment,
    choice: Choice,
    part: Part,
    stage: Pretrain,
    second: Mapping[str, Any],
    environment: Mapping[str, str],
) -> PlannedPretraining:
    """The run that a row starts from, with what both stages share from `second`, the settings of the row's own run."""
    shared = {name: second[name] for name in (*SHARED, "data", "partition", "seed") if name in second}
    given: dict[str, Any] = {**experiment.pretrain.settings, **stage.settings}
    hyper = {**experiment.pretrain.hyper}
    if choice.tiny:
        given |= experiment.tiny.pretrain.settings
        hyper |= experiment.tiny.pretrain.hyper
        if given.get("backbone") in experiment.tiny.backbones:
            given["backbone"] = experiment.tiny.backbones[given["backbone"]]
    given |= {name: choice.flags[flag] for flag, name in PRETRAIN_FLAGS.items() if choice.flags.get(flag) is not None}
    if "backbone" in given:
        given["backbone"] = expanded(given["backbone"], environment)
    data = second["data"]
    given["hyper"] = _known_hyper(stage.method, hyper, data) | dict(stage.hyper)
    assigned = [text.removeprefix(PRETRAIN) for text in choice.assignments if text.startswith(PRETRAIN)]
    settings = resolve(stage.method, {**given, **shared}, None, _known_assignments(stage.method, assigned, data))
    place = Path(PRETRAINING) / part.shared / stage.folder / f"seed-{settings.seed}"
    return PlannedPretraining(settings=settings, folder=choice.out / place, name=str(place))


def _known_hyper(method: str, hyper: Mapping[str, Any], data: Sequence[str]) -> dict[str, Any]:
    """Of hyper-parameters for every row those that a method has with this data."""
    known = hyper_types(blank(method, data))
    return {name: value for name, value in hyper.items() if name in known}


def _known_assignments(method: str, assignments: Sequence[str], data: Sequence[str]) -> list[str]:
    """Of `key=value` texts for every row those of a method with this data."""
    known = hyper_types(blank(method, data))
    return [text for text in assignments if text.partition("=")[0] in known]


def pretraining_of(runs: Sequence[PlannedRun]) -> list[PlannedPretraining]:
    """List the pre-training runs that runs start from, each once, in the order of their first use.

    A `SettingError` where two rows name one with different settings.
    """
    found: dict[Path, PlannedPretraining] = {}
    for run in runs:
        if run.pretraining is not None:
            known = found.setdefault(run.pretraining.folder, run.pretraining)
            if known.settings != run.pretraining.settings:
                raise SettingError(
                    f"row {run.row.label!r} starts from {known.name}, to which another row gives other settings: name "
                    "another run."
                )
    return list(found.values())


def expanded(text: str, environment: Mapping[str, str]) -> str:
    """Replace `$NAME` in a text from the environment; a `SettingError` where it is not set."""

    def value(found: re.Match[str]) -> str:
        if found[1] not in environment:
            raise SettingError(
                f"{text} needs the environment variable {found[1]}: set it, or give --data or --backbone."
            )
        return environment[found[1]]

    return VARIABLE.sub(value, text)


def place_of(folder: Path) -> tuple[str, str, int] | None:
    """Return part, row folder and seed of a run that lies where `plan_runs` puts one."""
    seed = SEED.fullmatch(folder.name)
    if seed is None or len(folder.absolute().parts) < 4:
        return None
    return folder.absolute().parts[-3], folder.absolute().parts[-2], int(seed[1])


def federation_of(folder: Path) -> str | None:
    """Return the federation of a pre-training run that lies where `plan_runs` puts one."""
    parts = folder.absolute().parts
    lies = len(parts) >= 4 and parts[-4] == PRETRAINING and SEED.fullmatch(parts[-1])
    return parts[-3] if lies else None


def partitions_of(runs: Sequence[PlannedRun]) -> list[PlannedPartition]:
    """List the partitions that runs need, each once."""
    found = {run.partition.path: run.partition for run in runs if run.partition is not None}
    return list(found.values())


def commands(runs: Sequence[PlannedRun], engine: str = "local") -> Iterator[str]:
    """Write the command lines that make the same folders, partitions and runs; `engine` as `run --engine` has it."""
    more = "" if engine == "local" else f" --engine {engine}"
    partitions = partitions_of(runs)
    if partitions:
        yield shlex.join(["mkdir", "-p", str(partitions[0].path.parent)])
    for partition in partitions:
        numbers = {"dirichlet_by" if n == "by" else n: v for n, v in partition.plan.to_json().items()}
        words = ["edgefl-train", "partition", *_options({"data": partition.data, **numbers, "seed": partition.seed})]
        yield shlex.join([*words, "-o", str(partition.path)])
    begun: set[Path] = set()
    for run in runs:
        architecture = ""
        if run.pretraining is not None:
            architecture = run.pretraining.settings.backbone
            if run.pretraining.folder not in begun:
                begun.add(run.pretraining.folder)
                yield _run_line(run.pretraining.settings, run.pretraining.folder) + more
        yield _run_line(run.settings, run.folder, architecture) + more


def _run_line(settings: RunSettings, folder: Path, architecture: str = "") -> str:
    """The command of one run; `architecture` is that of a pre-training which is still to come."""
    preset = preset_of(
        settings.method, settings.preset, architecture or settings.backbone, settings.hyper, settings.data
    )
    words = ["edgefl-train", "run", settings.method, *_options(_told(settings, preset))]
    for name, value in settings.hyper.items():
        if preset.get("hyper", {}).get(name) != value:
            words += ["--set", f"{name}={_text(value)}"]
    return shlex.join([*words, "--out", str(folder)])


def _told(settings: RunSettings, preset: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that differ from what the method and preset give by themselves."""
    plain = resolve(settings.method, {**preset, "preset": settings.preset, "data": settings.data}, None, [])
    told = {name: value for name, value in vars(settings).items() if value != getattr(plain, name)}
    return {"data": settings.data, "preset": settings.preset} | {n: v for n, v in told.items() if n != "hyper"}


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
