"""What a run is asked to do: presets, a TOML file, flags and `--set`, each overriding the one before.

Guarantees: the resolved settings are plain values, complete, validated before any work begins, and written to
`config.toml`; a run started from that file is the same run.
"""

import difflib
import hashlib
import json
import tomllib
import typing
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import tomli_w

from edgefl_protocol.durable import read_bounded
from edgefl_trainer.contract import LearnsApart, Method, Scalar
from edgefl_trainer.data import DataError
from edgefl_trainer.data.plan import Plan
from edgefl_trainer.data.specs import parse_spec
from edgefl_trainer.engine.finetune_presets import FINETUNE_PRESETS
from edgefl_trainer.errors import RunError, SettingError
from edgefl_trainer.methods import METHODS
from edgefl_trainer.methods.finetune import FineTune
from edgefl_trainer.models.kind import network_kind

PresetName = Literal["tiny", "bench84", "paper"]
HyperValue = Scalar | bool | tuple[int, ...]
MAX_CONFIG_BYTES = 1 << 20
PROBE_EVERY = 5  # rounds, where a backbone is learned
# do not count in digests: runs from before stay repetitions
_ADDED_SINCE: Mapping[str, Any] = {"labels": 1.0, "probe_every": 0}
MAX_IMAGE_PX = 2048  # 64 times the pixels of a usual network's input


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """One run, resolved."""

    method: str
    data: tuple[str, ...]
    partition: str = ""  # file of `edgefl-train partition`; empty: the sites of the data
    task: str = "all"  # all | nevus
    classes: tuple[str, ...] = ()  # empty: those of the data
    backbone: str = "tiny"
    image_px: int = 0  # pixels; 0: the backbone's own
    preset: PresetName = "bench84"
    rounds: int = 5
    epochs: int = 2  # local epochs of a round
    images_per_site: int = 0  # most training images of a site; 0: all
    unlabelled: Literal["none", "site", "spread"] = "none"
    labels: float = 1.0  # share of each site's training images whose label is used
    balance: Literal["none", "class"] = "none"
    select: Literal["last", "tune"] = "last"  # round whose model a site keeps: the last, or its best on tune rows
    probe_every: int = 0  # rounds between linear probes of an encoder that is being learned; 0: never
    participation: float = 1.0  # share of the sites in each round
    seed: int = 0
    device: Literal["auto", "cpu", "cuda"] = "auto"
    autocast: Literal["auto", "none", "bf16"] = "auto"  # auto: bf16 on CUDA
    hyper: Mapping[str, HyperValue] = field(default_factory=dict)  # hyper-parameters of the method

    def __post_init__(self) -> None:
        for name, wanted in _types_of(RunSettings).items():
            check_type(name, getattr(self, name), wanted)
        checks: Sequence[tuple[str, bool, str]] = (
            ("rounds", self.rounds >= 1, "at least 1"),
            ("epochs", self.epochs >= 1, "at least 1"),
            ("images_per_site", self.images_per_site >= 0, "0 (all) or more"),
            ("image_px", 0 <= self.image_px <= MAX_IMAGE_PX, f"0 (the backbone's own) to {MAX_IMAGE_PX}"),
            ("probe_every", self.probe_every >= 0, "0 (never) or more"),
            ("participation", 0 < self.participation <= 1, "in (0, 1]"),
            ("labels", 0 < self.labels <= 1, "in (0, 1]"),
            ("seed", 0 <= self.seed < 2**31, "between 0 and 2147483647"),
            ("data", len(self.data) > 0, "at least one SPEC, given with --data"),
        )
        for name, holds, allowed in checks:
            if not holds:
                raise SettingError(f"{name} is {getattr(self, name)!r}; allowed: {allowed}.")

    def build_method(self) -> Method:
        """The method with its hyper-parameters."""
        method: Method = build(METHODS[self.method], self.hyper)
        return method

    def digest_but_seed(self, plan: Plan | None = None) -> str:
        """Digest of everything but seed and device: runs that share it are repetitions of one another.

        Args:
            plan: how the partition was made, which counts instead of its file: partitions differ by their seed too.
        """
        partition = json.dumps(plan.to_json(), sort_keys=True) if plan else ""
        same = replace(self, seed=0, device="auto", partition=partition)
        return hashlib.sha256(same.to_toml(without=_ADDED_SINCE).encode()).hexdigest()

    def to_toml(self, without: Mapping[str, Any] | None = None) -> str:
        """The text of `config.toml`.

        Args:
            without: leave out these settings where they have these values.
        """
        told = {name: value for name, value in asdict(self).items() if (without or {}).get(name, ...) != value}
        return tomli_w.dumps({name: list(value) if isinstance(value, tuple) else value for name, value in told.items()})


def from_toml(data: bytes, source: str) -> dict[str, Any]:
    """The settings a TOML file names.

    Raises:
        SettingError: it is not TOML, or names a setting that does not exist.
    """
    try:
        found = tomllib.loads(data.decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingError(f"{source} is not valid TOML: {error}.") from error
    known = {entry.name for entry in fields(RunSettings)}
    for name in found:
        if name not in known:
            raise SettingError(f"{source} names the setting {name!r}; did you mean {nearest(name, known)}?")
    if isinstance(found.get("hyper"), dict):
        found["hyper"] = _with_tuples(found["hyper"])
    return _with_tuples(found)


def read_settings(path: Path) -> RunSettings:
    """The settings of a run from its `config.toml`.

    Raises:
        RunError: the file does not hold the settings of a run (code `damaged`).
        StorageError: it cannot be read.
    """
    try:
        found = from_toml(read_bounded(path, MAX_CONFIG_BYTES), str(path))
        return RunSettings(**found)
    except (SettingError, TypeError) as error:
        raise RunError(
            f"{path} does not hold the settings of a run ({error}): name another folder.", "damaged"
        ) from error


def resolve(method: str, flags: Mapping[str, Any], config: Path | None, assignments: Sequence[str]) -> RunSettings:
    """Preset, then file, then flags, then `--set key=value`.

    Args:
        method: name in `METHODS`.
        flags: settings given on the command line; None means not given.
        config: TOML file, or None.
        assignments: `key=value` texts for hyper-parameters.

    Raises:
        SettingError: unknown method, setting, hyper-parameter or kind of data, or a value out of range.
        StorageError: the file cannot be read.
    """
    kind = method_class(method)
    given = from_toml(read_bounded(config, MAX_CONFIG_BYTES), str(config)) if config else {}
    given |= {name: value for name, value in flags.items() if value is not None}
    preset: PresetName = given.get("preset", "bench84")
    if preset not in get_args(PresetName):
        raise SettingError(f"there is no preset {preset!r}; choose tiny, bench84 or paper.")
    named = dict(check_type("hyper", given.pop("hyper", {}), Mapping))
    named |= dict(assignment(kind, text) for text in assignments)
    values: dict[str, Any] = {"data": (), **preset_of(method, preset, given.get("backbone", ""), named)}
    hyper = dict(values.pop("hyper", {})) | named
    values |= given | {"method": method, "preset": preset, "hyper": hyper}
    if not kind.needs_labels:
        values.setdefault("unlabelled", "spread")
        values.setdefault("probe_every", PROBE_EVERY)
        for name, neutral in (("balance", "none"), ("labels", 1.0)):
            if values.get(name, neutral) != neutral:
                raise SettingError(f"{method} uses no labels, so --{name} {values[name]} has no meaning: leave it out.")
        if values.get("select") == "tune" and not values["probe_every"]:
            raise SettingError("--select tune chooses a round by its probe: give --probe-every 1 or more.")
        if values.get("select") == "tune" and issubclass(kind, LearnsApart):
            raise SettingError(f"{method} keeps each site's last network: leave --select tune out.")
    elif values.get("probe_every"):
        raise SettingError(f"{method} learns no backbone, so --probe-every has no meaning: leave it out.")
    settings = RunSettings(**values)
    settings.build_method()  # a value out of range shows here, before any data is read
    _check_specs(settings.data)
    return settings


def _check_specs(specs: Sequence[str]) -> None:
    try:
        for text in specs:
            parse_spec(text)
    except DataError as error:
        raise SettingError(str(error)) from error


def method_class(name: str) -> type[Method]:
    """A method by name.

    Raises:
        SettingError: unknown; the sentence names the nearest one.
    """
    if name not in METHODS:
        raise SettingError(
            f"there is no method {name!r}; did you mean {nearest(name, METHODS)}? See `edgefl-train methods`."
        )
    return METHODS[name]


def preset_of(
    method: str, preset: PresetName, backbone: str = "", hyper: Mapping[str, Any] | None = None
) -> Mapping[str, Any]:
    """The settings a preset stands for with one method.

    Args:
        method: its name.
        preset: its name.
        backbone: of the run, where it is named: fine-tuning depends on its kind.
        hyper: hyper-parameters that are given: fine-tuning depends on its mode.
    """
    kind = METHODS[method]
    usual = _LABELLED_PRESETS if kind.needs_labels else _UNLABELLED_PRESETS.get(method, _CONTRAST_PRESETS)
    found = _FAMILY_PRESETS.get(kind.family, usual)[preset]
    if kind is FineTune:
        mode = (hyper or {}).get("mode", FineTune().mode)
        found = FINETUNE_PRESETS[network_kind(backbone), "local" if mode == "local" else "federated"][preset]
    known = hyper_types(kind)
    return {**found, "hyper": {name: value for name, value in found.get("hyper", {}).items() if name in known}}


def nearest(name: str, known: typing.Iterable[str]) -> str:
    """The known names that look most like `name`."""
    names = sorted(known)
    return ", ".join(difflib.get_close_matches(name, names, n=3, cutoff=0.4) or names)


def hyper_types(kind: type[Any]) -> dict[str, Any]:
    """Every hyper-parameter that `--set` can name, with its type; those of a nested recipe count as its own."""
    types = typing.get_type_hints(kind)
    found: dict[str, Any] = {}
    for entry in fields(kind):
        wanted = types[entry.name]
        found.update(hyper_types(wanted) if isinstance(wanted, type) and is_dataclass(wanted) else {entry.name: wanted})
    return found


def build(kind: type[Any], hyper: Mapping[str, Any]) -> Any:
    """An instance from flat hyper-parameters; what is not named keeps the default of `kind`, in its recipe too.

    Raises:
        SettingError: a name that the method does not have, or a value of another type or out of range.
    """
    return _adjusted(kind(), hyper)


def _adjusted(instance: Any, hyper: Mapping[str, Any]) -> Any:
    kind = type(instance)
    types = typing.get_type_hints(kind)
    known = hyper_types(kind)
    for name in hyper:
        if name not in known:
            raise SettingError(f"{kind.__name__} has no hyper-parameter {name!r}; did you mean {nearest(name, known)}?")
    values: dict[str, Any] = {}
    for entry in fields(kind):
        nested = types[entry.name]
        if is_dataclass(nested) and isinstance(nested, type):
            inner = {name: value for name, value in hyper.items() if name in hyper_types(nested)}
            values[entry.name] = _adjusted(getattr(instance, entry.name), inner)
        elif entry.name in hyper:
            values[entry.name] = check_type(entry.name, hyper[entry.name], nested)
    return replace(instance, **values)


def check_type(name: str, value: Any, wanted: Any) -> Any:
    """The value, if it is of the type that a setting or hyper-parameter has; a whole number passes for a number.

    Raises:
        SettingError: it is not; the sentence says what is allowed.
    """
    origin, choices = get_origin(wanted) or wanted, get_args(wanted)
    if origin is Literal:
        holds, allowed = value in choices, ", ".join(map(str, choices))
    elif origin is tuple:
        part_type, allowed = (int, _WHOLE_NUMBERS) if choices[0] is int else (str, "a list of texts")
        value = tuple(value) if part_type is int and isinstance(value, list) else value  # as JSON and TOML have it
        holds = isinstance(value, tuple) and all(type(part) is part_type for part in value)
    elif origin is float:
        holds, allowed = type(value) in (int, float), _TYPE_WORDS[float]
        value = float(value) if holds else value
    elif origin in _TYPE_WORDS:
        holds, allowed = type(value) is origin, _TYPE_WORDS[origin]
    else:
        holds, allowed = isinstance(value, Mapping), "a table of key = value"
    if not holds:
        raise SettingError(f"{name} is {value!r}; allowed: {allowed}.")
    return value


def assignment(kind: type[Any], text: str) -> tuple[str, HyperValue]:
    """`key=value` with the type of the method's field; a `SettingError` where there is no such key or value."""
    key, equals, value = text.partition("=")
    known = hyper_types(kind)
    if not known:
        raise SettingError(f"--set {text}: this method has no hyper-parameter: leave it out.")
    if not equals:
        raise SettingError(f"--set {text}: write KEY=VALUE, with one of these keys: {', '.join(sorted(known))}.")
    if key not in known:
        alike = difflib.get_close_matches(key, sorted(known), n=3)
        meant = f" Did you mean {' or '.join(alike)}?" if alike else ""
        raise SettingError(f"--set {text}: there is no key {key!r}; the keys are {', '.join(sorted(known))}.{meant}")
    wanted = known[key]
    try:
        if wanted is bool:
            return key, {"on": True, "true": True, "off": False, "false": False}[value.lower()]
        if wanted in (int, float):
            return key, wanted(value)
        if get_origin(wanted) is tuple:
            return key, () if value == "auto" else tuple(int(part) for part in value.split(","))
    except (KeyError, ValueError):
        raise SettingError(f"--set {text}: {key} takes {_TYPE_WORDS.get(wanted, _WHOLE_NUMBERS)}.") from None
    choices = get_args(wanted)
    if choices and value not in choices:
        raise SettingError(f"--set {text}: {key} is one of {', '.join(map(str, choices))}.")
    return key, value


@cache
def _types_of(kind: type[Any]) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def _with_tuples(found: Mapping[str, Any]) -> dict[str, Any]:
    """TOML knows lists only; settings are tuples."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in found.items()}


_TYPE_WORDS: Mapping[Any, str] = {bool: "on or off", int: "a whole number", float: "a number", str: "text"}
_WHOLE_NUMBERS = "whole numbers with commas between, such as 5,6,7, or auto"

# The paper's schedules stand in `paper`; the others shorten them to what a person can wait for.
_LABELLED_PRESETS: Mapping[PresetName, Mapping[str, Any]] = {
    "tiny": {
        "rounds": 2,
        "epochs": 1,
        "images_per_site": 120,
        "hyper": {"lr_head": 2e-3, "discount": "unusual"},
    },
    "bench84": {  # 10 epochs where the paper has 75: ten times its rates for the prompts, chosen on tune rows
        "rounds": 5,
        "epochs": 2,
        "images_per_site": 1200,
        "hyper": {"lr_b": 2.5e-3, "lr_t": 5e-3, "lr_head": 5e-3, "discount": "unusual"},
    },
    "paper": {
        "rounds": 5,
        "epochs": 15,
        "hyper": {"evidence": "relu", "prompt_init": "uniform", "head_norm": "none", "augment": "none"},
    },
}
_BACKBONE_PRESETS: Mapping[PresetName, Mapping[str, Any]] = {
    "tiny": {
        "rounds": 2,
        "epochs": 1,
        "images_per_site": 240,
        "hyper": {"batch": 64, "lr": 1e-3, "decoder_width": 64, "decoder_depth": 1},
    },
    "bench84": {
        "rounds": 20,
        "epochs": 1,
        "images_per_site": 600,
        "backbone": "vit:192x12/12",
        "hyper": {"batch": 64, "lr": 1e-3, "decoder_width": 128, "decoder_depth": 4},
    },
    "paper": {"rounds": 100, "epochs": 10, "backbone": "vit:768x12/16", "image_px": 224},
}
# The schedule of PEP-FedPT and of what it compares with (CIFAR-100); which share of the sites takes part is the data's.
_TOKEN_PRESETS: Mapping[PresetName, Mapping[str, Any]] = {
    "tiny": {"rounds": 2, "epochs": 1, "images_per_site": 120, "hyper": {"lr_head": 0.03}},
    "bench84": {"rounds": 5, "epochs": 2, "images_per_site": 1200, "hyper": {"lr_head": 0.01}},
    "paper": {
        "rounds": 100,
        "epochs": 5,
        "hyper": {"readout": "cls", "head_norm": "none", "augment": "none", "weighting": "uniform"},
    },
}
# FedCLF and what it compares with: a ResNet-18 at 72 px; `tiny` learns whatever backbone the run names.
_CONTRAST_PRESETS: Mapping[PresetName, Mapping[str, Any]] = {
    "tiny": {"rounds": 2, "epochs": 1, "images_per_site": 240, "hyper": {"batch": 32, "queue": 128}},
    "bench84": {
        "rounds": 20,
        "epochs": 1,
        "images_per_site": 600,
        "backbone": "cnn:resnet18",
        "image_px": 72,
        "hyper": {"batch": 64},
    },
    "paper": {"rounds": 100, "epochs": 1, "backbone": "cnn:resnet18", "image_px": 72},
}
_UNLABELLED_PRESETS: Mapping[str, Mapping[PresetName, Mapping[str, Any]]] = {"fedmae": _BACKBONE_PRESETS}
_FAMILY_PRESETS: Mapping[str, Mapping[PresetName, Mapping[str, Any]]] = {"prompt tokens": _TOKEN_PRESETS}
