"""An experiment file: a table or figure of a paper, what to run for it, and the numbers that were printed.

Guarantees: a file that was read holds only known keys, of the right types; every number of the paper belongs to a row
and a column; what a run is given are plain settings, which `engine.settings` checks in turn. A row may have two stages:
a pre-training run, which several rows can share, and a run that starts from it. See docs/reference/experiment-files.md.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec
from msgspec import Struct

from edgefl_protocol.durable import read_bounded
from edgefl_trainer.data import DataError
from edgefl_trainer.data.partitions.plan import PartitionPlan
from edgefl_trainer.engine.settings import RunSettings
from edgefl_trainer.errors import SettingError
from edgefl_trainer.typed_values import PlainTable, hints, nearest, read_table, read_value

MAX_EXPERIMENT_BYTES = 1 << 20
FOLDER_NAME = re.compile(r"[a-z0-9][a-z0-9.-]*")  # of a folder
PRINTED = re.compile(r"[>~]?\d+(\.\d+)?( ?± ?\d+(\.\d+)?)?( M)?|NA|")  # one cell of a paper's table; empty: no cell
GIVEN_ELSEWHERE = ("method", "data", "hyper", "partition", "seed")  # settings that have a place of their own
# settings that both stages of a row have
SHARED = ("preset", "task", "classes", "image_px", "colour", "images_per_site", "device", "autocast")

MetricName = Literal[
    "balanced_accuracy",
    "macro_precision",
    "macro_recall",
    "macro_f1",
    "specificity",
    "auroc",
    "accuracy",
    "open_accuracy",
    "open_balanced_accuracy",
    "open_macro_precision",
    "open_macro_f1",
    "open_specificity",
    "accuracy_open_questions",
    "accuracy_closed_questions",
]


class Source(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where the numbers stand."""

    paper: str
    place: str  # table or figure, page or section
    caption: str


class Command(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A command that runs the experiment, and how long that takes."""

    run: str
    minutes: float  # of one row and one seed
    machine: str
    basis: Literal["measured", "estimated"]


class Column(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A figure of a run that stands under a heading.

    `mean`, `worst`, `p5`, `p10` and `p15` run over sites, each counting once; `pooled` is over the rows of all sites
    that train, each counting once; `rounds`, `seconds` and `bytes` are what it took until the mean over sites on `tune`
    rows reached `target`; `none` is a column that only the paper has.
    """

    name: str
    figure: Literal["mean", "worst", "p5", "p10", "p15", "pooled", "rounds", "seconds", "bytes", "none"]
    sites: str = "*"  # pattern of the sites that count
    held_out: bool = False  # the sites that never train instead of those that do
    target: float = 0.0  # share, for rounds, seconds and bytes
    metric: MetricName | None = None  # left out: the file's
    further: str = ""  # of a run's further answers, such as own_round, instead of its first ones

    def __post_init__(self) -> None:
        if self.further and self.figure not in ("mean", "worst", "p5", "p10", "p15", "pooled"):
            raise SettingError(f"column {self.name!r}: further answers have figures over sites or pooled.")
        if self.figure == "pooled" and (self.sites != "*" or self.held_out):
            raise SettingError(f"column {self.name!r}: pooled is over the rows of all sites that train.")
        if (self.figure in ("rounds", "seconds", "bytes")) != (self.target > 0):
            raise SettingError(f"column {self.name!r}: rounds, seconds and bytes need a target, other figures none.")


class Part(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One data set with one partition: a group of columns."""

    name: str
    data: tuple[str, ...]
    columns: tuple[Column, ...]
    partition: PlainTable = {}  # numbers of a `PartitionPlan` and seed; empty: the data's sites
    settings: PlainTable = {}
    federation: str = ""  # parts of one name share partition and pre-training runs; empty: the part's own name

    @property
    def shared(self) -> str:
        """Name of its partition and of the folder of its pre-training runs."""
        return self.federation or self.name


class PretrainingStage(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What every pre-training run is given."""

    settings: PlainTable = {}
    hyper: PlainTable = {}  # of those whose method has it


class Pretrain(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A run without labels that a row starts from; rows with the same `run` share it."""

    method: str
    run: str = ""  # folder name; empty: the method's
    hyper: PlainTable = {}
    settings: PlainTable = {}

    @property
    def folder(self) -> str:
        """Name of the folder of its runs."""
        return self.run or self.method


class MethodRow(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A method with its settings: a line of the table."""

    label: str
    method: str
    run: str = ""  # folder name, so that tables share runs; empty: made of the label
    parts: tuple[str, ...] = ()  # empty: all
    hyper: PlainTable = {}
    settings: PlainTable = {}
    paper: Mapping[str, tuple[str, ...]] = {}  # part → cells as printed, column by column
    pretrain: Pretrain | None = None  # left out: a single stage

    @property
    def folder(self) -> str:
        """Name of the folder of its runs."""
        return self.run or re.sub(r"[^a-z0-9]+", "-", self.label.lower()).strip("-")


class Tiny(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The same rows in seconds: other data, other sizes; partitions by scheme."""

    data: tuple[str, ...]
    settings: PlainTable = {}
    partition: Mapping[str, PlainTable] = {}  # scheme → numbers that replace the part's
    backbones: Mapping[str, str] = {}  # the file's → a smaller one
    pretrain: PretrainingStage = PretrainingStage()


class Experiment(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A file, read."""

    title: str
    source: Source
    metric: MetricName
    spread: Literal["sites", "seeds"]  # what the printed ± runs over
    commands: tuple[Command, ...]
    parts: tuple[Part, ...]
    rows: tuple[MethodRow, ...]
    tiny: Tiny
    settings: PlainTable = {}
    hyper: PlainTable = {}  # of every row whose method has it
    notes: tuple[str, ...] = ()
    pretrain: PretrainingStage = PretrainingStage()
    plot: Literal["progress", "bars", "dots"] = "progress"  # what `table --plot` draws: lines over rounds, or figures

    def part(self, name: str) -> Part:
        """Find the part of that name."""
        return next(part for part in self.parts if part.name == name)

    def pairs(self) -> Iterator[tuple[Part, MethodRow]]:
        """List every part with every row that stands in it."""
        for part in self.parts:
            for row in self.rows:
                if not row.parts or part.name in row.parts:
                    yield part, row


def read_experiment(path: Path) -> Experiment:
    """Read and check a file.

    Raises:
        SettingError: it is not TOML, or a key, type, name or number in it is wrong; one sentence that names the place.
        StorageError: it cannot be read.
    """
    try:
        found = msgspec.toml.decode(read_bounded(path, MAX_EXPERIMENT_BYTES))
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise SettingError(f"{path} is not valid TOML: {error}.") from error
    try:
        experiment: Experiment = read_table(found, Experiment, "the file")
        _check(experiment)
    except (SettingError, DataError) as error:
        raise SettingError(f"{path}: {error}") from error
    return experiment


def _check(experiment: Experiment) -> None:
    """What the types cannot say."""
    names = [part.name for part in experiment.parts]
    _check_unique("part", names)
    stages = [row.pretrain for row in experiment.rows if row.pretrain is not None]
    folders = [*names, *(part.shared for part in experiment.parts), *(row.folder for row in experiment.rows)]
    for text in (*folders, *(stage.folder for stage in stages)):
        if not FOLDER_NAME.fullmatch(text):
            raise SettingError(f"{text!r} is to be the name of a folder: use small letters, digits, - and dots.")
    for row in experiment.rows:
        for name in (*row.parts, *row.paper):
            if name not in names:
                raise SettingError(f"row {row.label!r} names the part {name!r}; the parts are {', '.join(names)}.")
        for name, cells in row.paper.items():
            _check_cells(experiment.part(name), row, cells)
    for part in experiment.parts:
        _check_unique(f"row of part {part.name}", [row.folder for where, row in experiment.pairs() if where is part])
        plan_of(part.partition)
    for settings in (experiment.settings, experiment.tiny.settings, *(p.settings for p in experiment.parts)):
        _check_settings(settings)
    for row in experiment.rows:
        _check_settings(row.settings)
        if row.pretrain is not None and "backbone" in row.settings:
            raise SettingError(f"row {row.label!r} starts from its pre-training: give the backbone there.")
    for settings in (experiment.pretrain.settings, experiment.tiny.pretrain.settings, *(s.settings for s in stages)):
        _check_settings(settings)
        if shared := [name for name in settings if name in SHARED]:
            raise SettingError(f"{shared[0]} is the same in both stages: give it to the file, the part or the row.")
    _check_federations(experiment.parts)


def _check_federations(parts: tuple[Part, ...]) -> None:
    """Parts that share pre-training runs have the same data and the same partition."""
    first: dict[str, Part] = {}
    for part in parts:
        known = first.setdefault(part.shared, part)
        if (known.data, known.partition) != (part.data, part.partition):
            raise SettingError(
                f"parts {known.name!r} and {part.name!r} are of one federation, {part.shared!r}, but have other data "
                "or another partition."
            )


def _check_unique(what: str, names: list[str]) -> None:
    for name in names:
        if names.count(name) > 1:
            raise SettingError(f"there is more than one {what} called {name!r}.")


def _check_cells(part: Part, row: MethodRow, cells: tuple[str, ...]) -> None:
    if row.parts and part.name not in row.parts:
        raise SettingError(f"row {row.label!r} has numbers of part {part.name!r}, where it does not stand.")
    if len(cells) != len(part.columns):
        raise SettingError(
            f"row {row.label!r} has {len(cells)} numbers in part {part.name!r}, which has {len(part.columns)} columns."
        )
    for cell in cells:
        if not PRINTED.fullmatch(cell):
            raise SettingError(f"row {row.label!r}: {cell!r} is not a number as a paper prints it.")


def _check_settings(settings: PlainTable) -> None:
    known = hints(RunSettings).keys() - set(GIVEN_ELSEWHERE)
    for name in settings:
        if name not in known:
            raise SettingError(f"there is no setting {name!r} to give here; did you mean {nearest(name, known)}?")


def plan_of(partition: PlainTable) -> tuple[PartitionPlan, int] | None:
    """Return the plan and the seed of a part's partition; None where the data's own sites are taken.

    Raises:
        SettingError: a key that a plan does not have.
        EdgeflError: numbers that do not fit one another.
    """
    if not partition:
        return None
    known = hints(PartitionPlan).keys() | {"seed"}
    for name in partition:
        if name not in known:
            raise SettingError(f"a partition has no {name!r}; did you mean {nearest(name, known)}?")
    numbers: dict[str, Any] = dict(partition)
    seed = read_value(numbers.pop("seed", 0), int, "seed of a partition")
    if "scheme" not in numbers:
        raise SettingError("a partition needs a scheme: add it.")
    return PartitionPlan(**numbers), seed
