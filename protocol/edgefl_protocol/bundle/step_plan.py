"""How a device learns a method that has no record of its own: everything that its graph and its settings are, by name.

    training.json  {"kind": the method's name, "settings": {name: value}, "fixed": {name: value},
                    "defaults": {name: value}, "state": {name: [dtype, [length]]},
                    "given": {name: [dtype, [length, null for a free first axis]]}, "figures": [name],
                    "needs_labels", "frozen_sha256", "batch", "epochs", "balance": "none"|"class", "seed"}

The graph `train_step.onnx` takes `given` (a batch, and whatever else the device's learner gives a step), the numbers
among `settings` that `given` names, the `state`, and every other tensor of the bundle but its temperature. It gives the
`figures`, one number each, and every tensor of the state as `next.NAME`. A tensor of the state that the bundle's
weights hold begins with that value, others with zeros. `settings` are those a federation may change, `fixed` those it
may not. Guarantees: names are distinct words, lengths known, the state bounded, so its memory is known before the graph
runs. Source: docs/design.md, sections 7 and 9.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from edgefl_protocol.bundle.learning_plan import (
    BATCH,
    GRAPH,
    MAX_VALUES,
    NEXT,
    NOT_TAKEN,
    NUMBER,
    Contract,
    ScoreFacts,
    Settings,
    check_values,
    read_fields,
    write_fields,
)
from edgefl_protocol.bundle.onnx_wire import TensorType
from edgefl_protocol.errors import BundleError
from edgefl_protocol.fields import Plain
from edgefl_protocol.rules.bounds import EPOCHS, SEED
from edgefl_protocol.rules.draws import Balance

Form = tuple[str, tuple[int | None, ...]]  # dtype, and lengths of the axes

MAX_NAMES: Final = 1000
MAX_LENGTH: Final = 2**24
MAX_TEXT: Final = 200

_METHOD: Final = re.compile("[a-z][a-z0-9-]{0,63}")
_NAME: Final = re.compile("[A-Za-z0-9_.]{1,200}")
_SHA256: Final = re.compile("[0-9a-f]{64}")
_TYPES: Final = ("float32", "int64", "uint8")
_TABLES: Final = ("settings", "fixed", "defaults", "state", "given")


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """How a method learns on a device."""

    kind: str
    settings: Settings
    fixed: Settings
    defaults: Settings
    state: Mapping[str, Form]
    given: Mapping[str, Form]
    figures: tuple[str, ...]
    needs_labels: bool
    frozen_sha256: str
    batch: int
    epochs: int
    balance: Balance
    seed: int

    def __post_init__(self) -> None:
        if not isinstance(self.kind, str) or not _METHOD.fullmatch(self.kind):
            raise ValueError("kind must be the name of a method")
        if not isinstance(self.frozen_sha256, str) or not _SHA256.fullmatch(self.frozen_sha256):
            raise ValueError("frozen_sha256 must be a SHA-256 of 64 hex digits")
        if type(self.needs_labels) is not bool:
            raise ValueError("needs_labels must be true or false")
        names = (*self.state, *self.given, *self.figures)
        if len(names) > MAX_NAMES or len(set(names)) != len(names) or not self.state:
            raise ValueError(f"state, given and figures must be 1 to {MAX_NAMES} distinct names")
        settings = (*self.settings, *self.fixed, *self.defaults)
        if not all(_NAME.fullmatch(name) and not name.startswith(NEXT) for name in (*names, *settings)):
            raise ValueError("a name must be a word of letters, digits, points and underscores")
        tables = (self.settings, self.fixed, self.defaults)
        if not all(_is_plain(value) for table in tables for value in table.values()):
            raise ValueError("a setting must be a number or a word")
        if not all(_is_form(form, free=0) for form in self.state.values()):
            raise ValueError("a tensor of the state must have a type and lengths")
        if not all(_is_form(form, free=1) for form in self.given.values()):
            raise ValueError("each input of a step must have a type, and lengths for all axes but the first")
        if sum(math.prod(self.shape(name)) for name in self.state) > MAX_VALUES:
            raise ValueError(f"the state must hold at most {MAX_VALUES} values")
        check_values(self, {"batch": BATCH, "epochs": EPOCHS, "seed": SEED})
        for name in _TABLES:
            object.__setattr__(self, name, MappingProxyType(dict(getattr(self, name))))

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor of the state."""
        return tuple(length for length in self.state[name][1] if length is not None)

    def started(self, weights: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        """Return the state before the first step: the bundle's values, and zeros for what it does not hold."""
        zeros = {name: np.zeros(self.shape(name), kind) for name, (kind, _) in self.state.items()}
        return {name: weights[name].copy() if name in weights else value for name, value in zeros.items()}

    def constants(self, weights: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        """Return the tensors of a bundle that a step reads and never changes."""
        taken = {name: value for name, value in weights.items() if name not in self.given and name not in NOT_TAKEN}
        return {name: value for name, value in taken.items() if name not in self.state}

    def numbers(self) -> dict[str, NDArray[Any]]:
        """Return the settings that a step takes as inputs."""
        return {name: np.asarray(self.settings[name], np.float32) for name in self.given if name in self.settings}

    def stands_for(self, size_px: int, backbone: Settings) -> Mapping[tuple[str, Plain], Plain | None]:
        """See `LearningPlan`."""
        return {}

    def unable(self, wanted: Settings) -> None:
        """See `LearningPlan`."""

    def following(self, wanted: Settings) -> "StepPlan":
        """See `LearningPlan`; a value must be of the kind that the record has."""
        told = {name: wanted[name] for name in self.settings if name in wanted}
        for name, value in told.items():
            mine = self.settings[name]
            if isinstance(mine, str) != isinstance(value, str) or isinstance(mine, bool) != isinstance(value, bool):
                raise ValueError(f"{name} must be a value such as {mine}")
        batch: Any = wanted.get("batch", self.batch)
        return replace(self, settings={**self.settings, **told}, batch=batch)

    def graphs(self, score: ScoreFacts) -> Mapping[str, Contract]:
        """See `LearningPlan`."""
        state = {name: TensorType(*form) for name, form in self.state.items()}
        other = [name for name, kind in state.items() if score.weights.get(name, kind) != kind]
        if other:
            raise BundleError(
                f"the training step and the bundle differ in {', '.join(other)[:300]}; build the bundle again",
                "wrong_inputs",
            )
        given = {name: TensorType(*form) for name, form in self.given.items()}
        fixed = {name: kind for name, kind in score.weights.items() if name not in NOT_TAKEN}
        changed = {NEXT + name: kind for name, kind in state.items()}
        return {GRAPH: Contract({**fixed, **state, **given}, {**dict.fromkeys(self.figures, NUMBER), **changed})}

    def to_bytes(self) -> bytes:
        """See `LearningPlan`."""
        return write_fields(self)

    @classmethod
    def from_bytes(cls, data: bytes) -> "StepPlan":
        """Read `training.json`."""
        record = read_fields(data, cls, _TABLES, ("figures",))
        forms = {name: {key: _read_form(form) for key, form in record[name].items()} for name in ("state", "given")}
        return cls(**{**record, **forms})


def _read_form(form: object) -> Form:
    if not isinstance(form, list) or len(form) != 2 or not isinstance(form[1], list):
        raise ValueError("a tensor must have a type and lengths")
    return form[0], tuple(form[1])


def _is_form(form: Form, free: int) -> bool:
    """Return whether this is a type and lengths, of which the first `free` may be open."""
    kind, dims = form
    known = all(type(length) is int and 1 <= length <= MAX_LENGTH for length in dims[free:])
    first = all(length is None or (type(length) is int and 1 <= length <= MAX_LENGTH) for length in dims[:free])
    return kind in _TYPES and len(dims) <= 8 and known and first


def _is_plain(value: object) -> bool:
    if isinstance(value, str):
        return len(value) <= MAX_TEXT
    return isinstance(value, bool) or (isinstance(value, int | float) and math.isfinite(value))
