"""What the record of every training step tells, whatever the method: `training.json` beside `train_step.onnx`.

A record is a frozen dataclass that meets `LearningPlan`: it names its method (`kind`), says what the bundle's graphs
take and give (`graphs`), and how a federation's settings are followed (`defaults`, `fixed`, `following`). Who loads a
bundle or learns with it asks the record and no method's name. Guarantees: a record that exists satisfies its own form,
so no rate of it can be negative, infinite or of unknown meaning; what is not of the form is refused with a `ValueError`
whose text is one clause for a sentence. Source: docs/design.md, sections 7 and 9.
"""

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, fields, is_dataclass
from typing import Any, ClassVar, Final, Literal, Protocol, Self, get_args, get_origin, get_type_hints

from edgefl_protocol.bundle.onnx_wire import TensorType
from edgefl_protocol.fields import Plain
from edgefl_protocol.rules.bounds import MOST_PICTURES, Range
from edgefl_protocol.strict_json import check_keys, parse_json, write_json

GRAPH: Final = "train_step.onnx"
RECORD: Final = "training.json"
NEXT: Final = "next."  # before the name of what a step changed
NOT_TAKEN: Final = frozenset({"temperature"})  # of a bundle's tensors: fitted after learning
NUMBER: Final = TensorType("float32", ())

# Of every record, whatever the method.
BATCH: Final = Range(least=1, most=MOST_PICTURES, whole=True)
MAX_VALUES: Final = 2**27  # of what a step changes, or of its network

Settings = Mapping[str, Plain]


@dataclass(frozen=True)
class Contract:
    """What a graph takes and gives: every input and output by name."""

    inputs: Mapping[str, TensorType]
    outputs: Mapping[str, TensorType]


@dataclass(frozen=True)
class ScoreFacts:
    """What the graphs of a training step may depend on: the bundle's tensors, the scores, and the input's side."""

    weights: Mapping[str, TensorType]
    outputs: Mapping[str, TensorType]
    size_px: int


class LearningPlan(Protocol):
    """How a bundle's method is learned on a device; a frozen dataclass."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def kind(self) -> str:
        """Name of the method."""

    @property
    def batch(self) -> int:
        """Pictures in a step."""

    @property
    def epochs(self) -> int:
        """E, local epochs of a round."""

    @property
    def balance(self) -> Literal["none", "class"]:
        """Whether classes are drawn equally often."""

    @property
    def seed(self) -> int:
        """Of every draw."""

    @property
    def needs_labels(self) -> bool:
        """Whether it learns from labelled pictures, so that some are held back to judge with."""

    @property
    def defaults(self) -> Settings:
        """Every setting of the method, with what it means that a federation does not name it."""

    @property
    def fixed(self) -> Settings:
        """Settings that no device can change: they stand in the graphs, or in what devices do."""

    @property
    def frozen_sha256(self) -> str | None:
        """SHA-256 of the frozen network's weights; None where the network itself is learned."""

    def stands_for(self, size_px: int, backbone: Settings) -> Mapping[tuple[str, Plain], Plain | None]:
        """Tell what a setting such as `auto` or 0 means with this network; None where each member settles it alone."""

    def unable(self, wanted: Settings) -> str | None:
        """Tell why devices cannot learn with these settings, whatever the bundle, as a clause; None where they can."""

    def following(self, wanted: Settings) -> Self:
        """Return the same record with the federation's values of what a step takes as an input.

        Raises:
            ValueError: a value that the record cannot hold; the text is one clause for a sentence.
        """

    def graphs(self, score: ScoreFacts) -> Mapping[str, Contract]:
        """Return the contract of each graph that comes with the record, by the member's name.

        Raises:
            BundleError: the bundle has no such graph (`wrong_inputs`).
        """

    def to_bytes(self) -> bytes:
        """Write `training.json`; equal records give equal bytes."""


def check_values(record: Any, bounds: Mapping[str, Range]) -> None:
    """Check a record's plain fields: those that `bounds` names, and those that are declared as words.

    Raises:
        ValueError: a field holds something else; the text is one clause for a sentence.
    """
    for name, allowed in _words_of(type(record)).items():
        if getattr(record, name) not in allowed:
            raise ValueError(f"{name} must be {' or '.join(allowed)}")
    for name, bound in bounds.items():
        if hasattr(record, name) and not bound.holds(getattr(record, name)):
            raise ValueError(f"{name} must be a {'whole number' if bound.whole else 'number'}, {bound}")


def _words_of(record: type) -> Mapping[str, tuple[str, ...]]:
    """Return the words that each field of a dataclass is declared to hold."""
    declared = get_type_hints(record)
    found = {entry.name: declared[entry.name] for entry in fields(record)}
    return {name: get_args(kind) for name, kind in found.items() if get_origin(kind) is Literal}


def read_fields(
    data: bytes, record: type, objects: Collection[str], lists: Collection[str], added: Collection[str] = ()
) -> dict[str, Any]:
    """Read `training.json` as the arguments of a dataclass; lists of names become tuples.

    Args:
        record: the dataclass, whose fields are the keys.
        objects: fields that hold JSON objects.
        lists: fields that hold lists of names.
        added: fields that a record from before may lack.

    Raises:
        ValueError: other keys, or a field of another kind.
    """
    found = check_keys(parse_json(data), {entry.name for entry in fields(record)} - set(added), added)
    for name, value in found.items():
        if name in objects and not isinstance(value, dict):
            raise ValueError(f"{name} must be an object")
        if name in lists and not (isinstance(value, list) and all(isinstance(one, str) for one in value)):
            raise ValueError(f"{name} must be a list of names")
        if name not in objects and name not in lists and isinstance(value, list | dict):
            raise ValueError(f"{name} must be a number or a word")
    return {name: tuple(value) if name in lists else value for name, value in found.items()}


def write_fields(record: object) -> bytes:
    """Write a dataclass as `training.json`."""
    return write_json({entry.name: _plain(getattr(record, entry.name)) for entry in fields(record)})  # type: ignore[arg-type]


def _plain(value: object) -> object:
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    if isinstance(value, Mapping):
        return {key: _plain(one) for key, one in value.items()}
    return [_plain(one) for one in value] if isinstance(value, tuple) else value
