"""What a run is asked to do: presets, a TOML file, flags and `--set`, each overriding the one before.

Guarantees: the resolved settings are plain values, complete, validated before any work begins, and written to
`config.toml`; a run started from that file is the same run.
"""

import difflib
import tomllib
import typing
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import tomli_w

from edgefl_trainer.errors import RunError
from edgefl_trainer.methods import METHODS
from edgefl_trainer.methods.contract import Method, Scalar

PresetName = Literal["tiny", "bench84", "paper"]


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """One run, resolved."""

    method: str
    data: tuple[str, ...]
    task: str = "all"  # all | nevus
    classes: tuple[str, ...] = ()  # empty: those of the data
    backbone: str = "tiny"
    image_px: int = 0  # pixels; 0: the backbone's own
    preset: PresetName = "bench84"
    rounds: int = 5
    epochs: int = 2  # local epochs of a round
    images_per_site: int = 0  # most training images of a site; 0: all
    unlabelled: Literal["none", "site", "spread"] = "none"
    balance: Literal["none", "class"] = "none"
    participation: float = 1.0  # share of the sites in each round
    seed: int = 0
    device: Literal["auto", "cpu", "cuda"] = "auto"
    autocast: Literal["auto", "none", "bf16"] = "auto"  # auto: bf16 on CUDA
    hyper: Mapping[str, Scalar | bool] = field(default_factory=dict)  # hyper-parameters of the method

    def __post_init__(self) -> None:
        checks: Sequence[tuple[str, bool, str]] = (
            ("rounds", self.rounds >= 1, "at least 1"),
            ("epochs", self.epochs >= 1, "at least 1"),
            ("images_per_site", self.images_per_site >= 0, "0 (all) or more"),
            ("image_px", self.image_px >= 0, "0 (the backbone's own) or more"),
            ("participation", 0 < self.participation <= 1, "in (0, 1]"),
            ("seed", 0 <= self.seed < 2**31, "between 0 and 2147483647"),
            ("data", len(self.data) > 0, "at least one data SPEC"),
        )
        for name, holds, allowed in checks:
            if not holds:
                raise RunError(f"{name} is {getattr(self, name)!r}; allowed: {allowed}.")

    def build_method(self) -> Method:
        """The method with its hyper-parameters."""
        return build(METHODS[self.method], self.hyper)

    def to_toml(self) -> str:
        """The text of `config.toml`."""
        values = {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}
        return tomli_w.dumps(values)


def from_toml(text: str, source: str) -> dict[str, Any]:
    """The settings a TOML text names.

    Raises:
        RunError: it is not TOML, or names a setting that does not exist.
    """
    try:
        found = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise RunError(f"{source} is not valid TOML: {error}.") from error
    known = {entry.name for entry in fields(RunSettings)}
    for name in found:
        if name not in known:
            raise RunError(f"{source} names the setting {name!r}; did you mean {nearest(name, known)}?")
    return {name: tuple(value) if isinstance(value, list) else value for name, value in found.items()}


def resolve(method: str, flags: Mapping[str, Any], config: Path | None, assignments: Sequence[str]) -> RunSettings:
    """Preset, then file, then flags, then `--set key=value`.

    Args:
        method: name in `METHODS`.
        flags: settings given on the command line; None means not given.
        config: TOML file, or None.
        assignments: `key=value` texts for hyper-parameters.

    Raises:
        RunError: unknown method, setting or hyper-parameter, or a value out of range.
    """
    kind = method_class(method)
    given = from_toml(config.read_text(), str(config)) if config else {}
    given |= {name: value for name, value in flags.items() if value is not None}
    preset: PresetName = given.get("preset", "bench84")
    if preset not in get_args(PresetName):
        raise RunError(f"there is no preset {preset!r}; choose tiny, bench84 or paper.")
    values: dict[str, Any] = dict(preset_of(method, preset))
    hyper = dict(values.pop("hyper", {})) | dict(given.pop("hyper", {}))
    hyper |= dict(_assignment(kind, text) for text in assignments)
    values |= given | {"method": method, "preset": preset, "hyper": hyper}
    if not kind.needs_labels:
        values.setdefault("unlabelled", "spread")
    settings = RunSettings(**values)
    settings.build_method()  # a value out of range shows here, before any data is read
    return settings


def method_class(name: str) -> type[Method]:
    """A method by name.

    Raises:
        RunError: unknown; the sentence names the nearest one.
    """
    if name not in METHODS:
        raise RunError(
            f"there is no method {name!r}; did you mean {nearest(name, METHODS)}? See `edgefl-train methods`."
        )
    return METHODS[name]


def preset_of(method: str, preset: PresetName) -> Mapping[str, Any]:
    """The settings a preset stands for with one method."""
    learns_backbone = not METHODS[method].needs_labels
    return (_BACKBONE_PRESETS if learns_backbone else _LABELLED_PRESETS)[preset]


def nearest(name: str, known: typing.Iterable[str]) -> str:
    """The known names that look most like `name`."""
    names = sorted(known)
    return ", ".join(difflib.get_close_matches(name, names, n=3, cutoff=0.4) or names)


def hyper_types(kind: type[Any]) -> dict[str, Any]:
    """Every hyper-parameter that `--set` can name, with its type; those of a nested recipe count as the method's own."""
    types = typing.get_type_hints(kind)
    found: dict[str, Any] = {}
    for entry in fields(kind):
        wanted = types[entry.name]
        found.update(hyper_types(wanted) if is_dataclass(wanted) else {entry.name: wanted})
    return found


def build(kind: type[Any], hyper: Mapping[str, Any]) -> Any:
    """An instance from flat hyper-parameters.

    Raises:
        RunError: a name that the method does not have.
    """
    types = typing.get_type_hints(kind)
    known = hyper_types(kind)
    for name in hyper:
        if name not in known:
            raise RunError(f"{kind.__name__} has no hyper-parameter {name!r}; did you mean {nearest(name, known)}?")
    values: dict[str, Any] = {}
    for entry in fields(kind):
        nested = types[entry.name]
        if is_dataclass(nested) and isinstance(nested, type):
            inner = hyper_types(nested)
            values[entry.name] = build(nested, {name: value for name, value in hyper.items() if name in inner})
        elif entry.name in hyper:
            values[entry.name] = hyper[entry.name]
    return kind(**values)


def _assignment(kind: type[Any], text: str) -> tuple[str, Scalar | bool]:
    """`key=value` with the type of the method's field."""
    key, equals, value = text.partition("=")
    known = hyper_types(kind)
    if not equals or key not in known:
        raise RunError(f"--set {text}: use key=value with one of these keys: {nearest(key, known)}.")
    wanted = known[key]
    try:
        if wanted is bool:
            return key, {"on": True, "true": True, "off": False, "false": False}[value.lower()]
        if wanted in (int, float):
            return key, wanted(value)
    except (KeyError, ValueError):
        raise RunError(f"--set {text}: {key} takes {'on or off' if wanted is bool else wanted.__name__}.") from None
    choices = get_args(wanted)
    if choices and value not in choices:
        raise RunError(f"--set {text}: {key} is one of {', '.join(map(str, choices))}.")
    return key, value


# The paper's schedules stand in `paper`; the others shorten them to what a person can wait for.
_LABELLED_PRESETS: Mapping[PresetName, Mapping[str, Any]] = {
    "tiny": {"rounds": 2, "epochs": 1, "images_per_site": 120, "hyper": {"lr_head": 2e-3}},
    "bench84": {"rounds": 5, "epochs": 2, "images_per_site": 1200, "hyper": {"lr_head": 2e-3}},
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
