"""What a run is asked to do: presets, a TOML file, flags and `--set`, each overriding the one before.

Guarantees: the resolved settings are plain values, complete, validated before any work begins, and written to
`config.toml`; a run started from that file is the same run. What is mistyped is refused before PyTorch is imported.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

import msgspec
import tomli_w
from msgspec import Meta

from edgefl_protocol.durable import read_bounded
from edgefl_protocol.pictures.imaging import Colour
from edgefl_protocol.rules import bounds
from edgefl_trainer.data import DataError
from edgefl_trainer.data.partitions.plan import PartitionPlan
from edgefl_trainer.data.specs import asks_questions, parse_spec
from edgefl_trainer.data.tasks import parse_groups
from edgefl_trainer.declared_names import setting_types
from edgefl_trainer.declared_ranges import check_range
from edgefl_trainer.engine.hyper_parameters import assignment, blank, build, check_method, method_class, preset_of
from edgefl_trainer.engine.presets import PresetName
from edgefl_trainer.errors import BackboneError, RunError, SettingError
from edgefl_trainer.models.backbone_names import FORMS
from edgefl_trainer.models.network_kind import names_learned_positions
from edgefl_trainer.models.shipped import usual_backbone
from edgefl_trainer.typed_values import HyperValue, hints, nearest, read_assignment, read_value

if TYPE_CHECKING:
    from edgefl_trainer.contract import Method

MAX_CONFIG_BYTES = 1 << 20
PROBE_EVERY = 5  # rounds, where a backbone is learned
# do not count in digests: runs from before stay repetitions
_ADDED_SINCE: Mapping[str, Any] = {
    "labels": 1.0,
    "probe_every": 0,
    "colour": "none",
    "workers": 1,
    "privacy_budget": 0.0,
}
MAX_IMAGE_PX = 2048  # 64 times the pixels of a usual network's input

Count = Annotated[int, Meta(ge=1, description="at least 1")]
Share = Annotated[float, Meta(gt=0, le=1, description="above 0, at most 1")]
Specs = Annotated[tuple[str, ...], Meta(min_length=1, description="at least one SPEC, given with --data")]
Budget = Annotated[float, Meta(ge=0, description="0 (no bound) or more")]  # of config.toml
GivenBudget = Annotated[float, Meta(gt=0, description="above 0; leave it out to have no bound")]
ImagePx = Annotated[int, Meta(ge=0, le=MAX_IMAGE_PX, description=f"0 (the backbone's own) to {MAX_IMAGE_PX}")]
MostImages = Annotated[int, Meta(ge=0, description="0 (all) or more")]
ProbeEvery = Annotated[int, Meta(ge=0, description="0 (never) or more")]
Epochs = Annotated[int, Meta(ge=1, le=bounds.MOST_EPOCHS, description=str(bounds.EPOCHS))]
Seed = Annotated[int, Meta(ge=0, le=bounds.MOST_SEED, description=str(bounds.SEED))]


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """One run, resolved."""

    method: str
    data: Specs
    partition: str = ""  # file of `edgefl-train partition`; empty: the sites of the data
    task: str = "all"  # all | nevus | NAME=A,B:REST, see `data.tasks`
    classes: tuple[str, ...] = ()  # empty: those of the data
    backbone: str = "tiny"
    image_px: ImagePx = 0  # pixels; 0: the backbone's own
    colour: Colour = "none"  # what becomes of the colour of the light, see `imaging.correct_colour`
    preset: PresetName = "bench84"
    rounds: Count = 5
    epochs: Epochs = 2  # local epochs of a round
    images_per_site: MostImages = 0  # most training images of a site; 0: all
    unlabelled: Literal["none", "site", "spread"] = "none"
    labels: Share = 1.0  # share of each site's training images whose label is used
    balance: Literal["none", "class"] = "none"
    # round whose model a site keeps: the last, its best on tune rows, or the best for all sites on theirs together
    select: Literal["last", "tune", "pooled"] = "last"
    probe_every: ProbeEvery = 0  # rounds between linear probes of an encoder that is being learned; 0: never
    participation: Share = 1.0  # share of the sites in each round
    privacy_budget: Budget = 0.0  # most epsilon that a site may spend on noised releases; 0: no bound
    seed: Seed = 0
    device: Literal["auto", "cpu", "cuda"] = "auto"
    workers: Count = 1  # processes of this machine that work on sites side by side
    autocast: Literal["auto", "none", "bf16"] = "auto"  # auto: bf16 on CUDA
    hyper: Mapping[str, HyperValue] = field(default_factory=dict)  # hyper-parameters of the method

    def __post_init__(self) -> None:
        _check_values(vars(self))

    def build_method(self) -> "Method":
        """Make the method with its hyper-parameters, for the kind of examples that the data has."""
        method: Method = build(lambda: blank(self.method, self.data), self.hyper)
        return method

    def digest_but_seed(self, plan: PartitionPlan | None = None) -> str:
        """Digest of everything but seed, device and workers: runs that share it are repetitions of one another.

        The plan of a partition counts instead of its file: partitions differ by their seed too.
        """
        partition = json.dumps(plan.to_json(), sort_keys=True) if plan else ""
        same = replace(self, seed=0, device="auto", workers=1, partition=partition)
        return hashlib.sha256(same.to_toml(without=_ADDED_SINCE).encode()).hexdigest()

    def to_toml(self, without: Mapping[str, Any] | None = None) -> str:
        """Write the text of `config.toml`, without these settings where they have these values."""
        told = {name: value for name, value in asdict(self).items() if (without or {}).get(name, ...) != value}
        return tomli_w.dumps({name: list(value) if isinstance(value, tuple) else value for name, value in told.items()})


def from_toml(data: bytes, source: str) -> dict[str, Any]:
    """Read the settings a TOML file names; a `SettingError` where it is no TOML or names one that does not exist."""
    try:
        found: dict[str, Any] = msgspec.toml.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise SettingError(f"{source} is not valid TOML: {error}.") from error
    known = {entry.name for entry in fields(RunSettings)}
    for name in found:
        if name not in known:
            raise SettingError(f"{source} has the unknown setting {name!r}; did you mean {nearest(name, known)}?")
    if isinstance(found.get("hyper"), dict):
        found["hyper"] = _with_tuples(found["hyper"])
    return _with_tuples(found)


def read_settings(path: Path) -> RunSettings:
    """Read the settings of a run from its `config.toml`.

    A `RunError` (code `damaged`) where it does not hold them; a `StorageError` where it cannot be read.
    """
    try:
        found = from_toml(read_bounded(path, MAX_CONFIG_BYTES), str(path))
        return RunSettings(**found)
    except (SettingError, TypeError) as error:
        raise RunError(
            f"{path} does not hold the settings of a run ({error}): name another folder.", "damaged"
        ) from error


def resolve(method: str, flags: Mapping[str, Any], config: Path | None, assignments: Sequence[str]) -> RunSettings:
    """Settle a run's settings: preset, then file, then flags that are not None, then `key=value` assignments.

    Raises:
        SettingError: unknown method, setting, hyper-parameter or kind of data, or a value out of range.
        StorageError: the file cannot be read.
    """
    given, named, data = given_settings(method, flags, config, assignments)
    from edgefl_trainer.contract import declared  # with PyTorch: nothing that can be told without it comes after this

    kind = method_class(method)
    preset: PresetName = given.get("preset", "bench84")
    named |= dict(assignment(blank(method, data), text) for text in assignments)
    values: dict[str, Any] = {"data": (), **preset_of(method, preset, given.get("backbone", ""), named, data)}
    hyper = dict(values.pop("hyper", {})) | named
    values |= given | {"method": method, "preset": preset, "hyper": hyper}
    if not kind.needs_labels:
        values.setdefault("unlabelled", "spread")
        values.setdefault("probe_every", PROBE_EVERY)
        for name, neutral in (("balance", "none"), ("labels", 1.0)):
            if values.get(name, neutral) != neutral:
                raise SettingError(f"{method} uses no labels, so --{name} {values[name]} has no effect: leave it out.")
        if values.get("select") == "tune" and not values["probe_every"]:
            raise SettingError("--select tune chooses a round by its probe: give --probe-every 1 or more.")
        if values.get("select") == "pooled":
            raise SettingError(f"{method} learns a backbone, whose round a probe chooses: give --select tune or last.")
        if values.get("select") == "tune" and declared(kind).apart:
            raise SettingError(f"{method} always keeps each site's last network: leave --select tune out.")
    elif values.get("probe_every"):
        raise SettingError(f"{method} learns no backbone, so --probe-every has no effect: leave it out.")
    settings = RunSettings(**values)
    if "backbone" not in values and preset != "tiny" and declared(kind).encoder is None:
        settings = replace(settings, backbone=_usual_backbone(settings.image_px))
    settings.build_method()  # a value out of range shows here, before any data is read
    return settings


def resolve_again(
    before: RunSettings, method: str | None, flags: Mapping[str, Any], config: Path | None, assignments: Sequence[str]
) -> RunSettings:
    """Settle the settings of a run that goes on: its own, under those that are given again.

    Whether they still are the same run's, `engine.folder.check_claim` says. A `SettingError` as in `resolve`.
    """
    method = method or before.method
    given, named, data = given_settings(method, flags, config, assignments, before.data)
    named |= dict(assignment(blank(method, data), text) for text in assignments)
    own = before.hyper if method == before.method else {}
    settings = replace(before, **given | {"method": method, "hyper": {**own, **named}})
    settings.build_method()
    return settings


def given_settings(
    method: str, flags: Mapping[str, Any], config: Path | None, assignments: Sequence[str], usual: Sequence[str] = ()
) -> tuple[dict[str, Any], dict[str, Any], tuple[str, ...]]:
    """Read what file and flags give: the settings, the hyper-parameters of the file, the data.

    A `SettingError` for a method, preset, kind of data or key of `--set` that there is not, and for a value that a
    setting cannot have by its type.
    """
    check_method(method)
    given = from_toml(read_bounded(config, MAX_CONFIG_BYTES), str(config)) if config else {}
    given |= {name: value for name, value in flags.items() if value is not None}
    data: tuple[str, ...] = read_value(given.get("data", usual), tuple[str, ...], "data")
    preset = given.get("preset", "bench84")
    if preset not in get_args(PresetName):
        raise SettingError(f"there is no preset {preset!r}; did you mean {nearest(str(preset), get_args(PresetName))}?")
    named = dict(read_value(given.pop("hyper", {}), Mapping[str, Any], "hyper"))
    _check_values(given)
    _check_specs(data)
    types = None if any(map(asks_questions, data)) else setting_types(method)
    if types is not None:
        for key, value in named.items():
            if types.get(key) is int:
                read_value(value, int, key)
        for key, value in [*named.items(), *(read_assignment(text, types) for text in assignments)]:
            check_range(method, key, value)
    return given, named, data


def _check_values(given: Mapping[str, Any]) -> None:
    """Refuse, by a `SettingError`, a given setting of another type or out of range."""
    for name, wanted in hints(RunSettings).items():
        if name in given:
            read_value(given[name], wanted, name)
    try:
        parse_groups(given.get("task", "all"))
    except DataError as error:
        raise SettingError(str(error)) from error


def _usual_backbone(image_px: int) -> str:
    """The network that comes with EdgeFL; a `SettingError` where none takes images of this size."""
    found = usual_backbone(image_px)
    if found is None:
        raise SettingError(
            f"no network that comes with EdgeFL takes images of {image_px} px: leave --image-px out, or name a network "
            "with --backbone."
        )
    return found


def _check_specs(specs: Sequence[str]) -> None:
    try:
        for text in specs:
            parse_spec(text)
    except DataError as error:
        raise SettingError(str(error)) from error


def _with_tuples(found: Mapping[str, Any]) -> dict[str, Any]:
    """TOML knows lists only; settings are tuples."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in found.items()}


def check_start(
    name: str, method: "Method | type[Method]", backbone: str, preset: str | None, *, learned: bool | None
) -> None:
    """Refuse a backbone that the method called `name` cannot start from, before anything is read or fetched.

    Args:
        learned: what `first_run.has_learned` says of the backbone.

    Raises:
        BackboneError: a random network would be frozen outside the `tiny` preset, or learned positions would be lost.
    """
    from edgefl_trainer.contract import declared

    if declared(method).encoder and names_learned_positions(backbone):
        raise BackboneError(
            f"{name} needs a network with fixed position embeddings, but those of {backbone} are learned: start "
            f"from {FORMS.removesuffix(' or timm:NAME')}, or from a convolutional network of timm."
        )
    if declared(method).freezes and learned is False and preset != "tiny":
        raise BackboneError(
            f"backbone {backbone} is untrained, and nothing is learned on a frozen random network: give --backbone "
            f"{usual_backbone(0)}, which learned from photographs of skin lesions, run:DIR of a finished run without "
            "labels, or timm:NAME; for a trial give --preset tiny."
        )


def without_folders(name: str) -> str:
    """Write a SPEC or backbone without the folders before it: those are of one machine."""
    kind, colon, where = name.partition(":")
    return name if kind in ("timm", "vit", "cnn") else f"{kind}{colon}{where.rpartition('/')[2]}"
