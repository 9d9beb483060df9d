"""What a device needs to know to learn FedCLF: the record beside its training graph, and the names they share.

    training.json  {"kind": "fedclf", "parameters": {name: shape}, "statistics": {name: shape}, "counters": [name],
                    "norm": [name], "view_px", "lr", "momentum", "weight_decay", "batch", "bn": "averaged"|"local",
                    "queue", "temperature", "key_momentum", "momentum_encoder": "reset"|"averaged"|"local",
                    "negatives": "remote"|"both"|"local", "epochs", "balance": "none"|"class", "seed"}

The graph `train_step.onnx` takes two views of each picture, `first` and `second` (B, 3, px, px) in [0, 1], the
`negatives` (Q, 128), the settings that may change from step to step, and the state: each parameter and its momentum
buffer, the running statistics and counters of batch norm, and under `momentum.` the same of the slow encoder. It gives
`loss`, `keys` (B, 128), the features of the second views, and everything that the step changed as `next.NAME`. The
graph `encode.onnx` takes `views` and the parameters, and gives `features` (B, 128): what the slow encoder says with
the statistics of the batch. Values are in neither: they come with the federation's broadcast. The temperature stands in
the graph. Guarantees: a `FedCLFPlan` that exists satisfies the forms below. Source: FedCLF (arXiv 2208.11278) section
III; docs/design.md, sections 7 and 9.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from edgefl_protocol.rules.batches import LEAST_BATCH
from edgefl_protocol.rules.slow_encoder import SLOW, MomentumEncoder, leaving, staying
from edgefl_protocol.strict_json import parse_json, write_json

ENCODER: Final = "encode.onnx"
FIRST, SECOND, NEGATIVES = "first", "second", "negatives"
VIEW, ENCODED = "views", "features"
BUFFER: Final = "optimizer.momentum_buffer."
NEXT: Final = "next."
SETTINGS: Final = ("rate", "momentum", "weight_decay", "key_momentum")
FIGURES: Final = ("loss", "keys")

MAX_TENSORS: Final = 1000  # of one network
MAX_VALUES: Final = 2**27
MAX_NAME: Final = 200

_CHOICES: Final[Mapping[str, tuple[str, ...]]] = {
    "kind": ("fedclf",),
    "bn": ("averaged", "local"),
    "momentum_encoder": ("reset", "averaged", "local"),
    "negatives": ("remote", "both", "local"),
    "balance": ("none", "class"),
}
_WHOLE: Final = {
    "view_px": (1, 4096),
    "batch": (LEAST_BATCH, 1024),
    "queue": (2, 65_536),
    "epochs": (1, 10_000),
    "seed": (0, 2**31 - 1),
}
_NUMBERS: Final = {
    "lr": (0.0, 10.0),
    "momentum": (0.0, 1.0),
    "weight_decay": (0.0, 1.0),
    "temperature": (0.001, 10.0),
    "key_momentum": (0.0, 1.0),
}


@dataclass(frozen=True, kw_only=True)
class FedCLFPlan:
    """How FedCLF learns on a device; symbols of the papers in the comments.

    Raises:
        ValueError: a value is not of its form; the text is one clause for a sentence.
    """

    parameters: Mapping[str, tuple[int, ...]]  # theta: tensors that learn, with their shapes
    statistics: Mapping[str, tuple[int, ...]]  # running means and variances of batch norm
    counters: tuple[str, ...]  # batches that these have seen
    norm: tuple[str, ...]  # of all these, batch norm's own: with `bn=local` they stay on the device
    view_px: int
    lr: float  # peak rate; cosine to 0 over all rounds
    momentum: float
    weight_decay: float
    batch: int  # B
    bn: Literal["averaged", "local"]
    queue: int  # K
    temperature: float  # tau
    key_momentum: float  # m; 0: by the length of the run (`rules.slow_encoder`)
    momentum_encoder: MomentumEncoder
    negatives: Literal["remote", "both", "local"]
    epochs: int  # E, local epochs of a round
    balance: Literal["none", "class"]
    seed: int
    kind: Literal["fedclf"] = "fedclf"

    def __post_init__(self) -> None:
        names = (*self.parameters, *self.statistics, *self.counters)
        if not 1 <= len(names) <= MAX_TENSORS or len(set(names)) != len(names) or not self.parameters:
            raise ValueError(f"the network must have 1 to {MAX_TENSORS} tensors of different names")
        if not all(isinstance(name, str) and 1 <= len(name) <= MAX_NAME for name in names):
            raise ValueError(f"a tensor's name must be a word of at most {MAX_NAME} letters")
        if any(name.startswith((BUFFER, SLOW, NEXT)) or name in (*SETTINGS, *_GIVEN) for name in names):
            raise ValueError("a tensor has the name of something else that a step takes")
        if not set(self.norm) <= set(names):
            raise ValueError("norm must name tensors of the network")
        shapes = (*self.parameters.values(), *self.statistics.values())
        if not all(_is_shape(shape) for shape in shapes) or sum(map(math.prod, shapes)) > MAX_VALUES:
            raise ValueError(f"shapes must be whole numbers above 0, of at most {MAX_VALUES} values in all")
        for name, allowed in _CHOICES.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} must be {' or '.join(allowed)}")
        for name, (low, high) in _WHOLE.items():
            value = getattr(self, name)
            if type(value) is not int or not low <= value <= high:
                raise ValueError(f"{name} must be a whole number from {low} to {high}")
        for name, (least, most) in _NUMBERS.items():
            value = getattr(self, name)
            if type(value) not in (int, float) or not least <= value <= most:
                raise ValueError(f"{name} must be a number from {least:g} to {most:g}")
        for name in ("parameters", "statistics"):  # in one order, however they came
            object.__setattr__(self, name, MappingProxyType(dict(sorted(getattr(self, name).items()))))

    @property
    def network(self) -> tuple[str, ...]:
        """Names of the network's tensors, as they travel."""
        return (*self.parameters, *self.statistics, *self.counters)

    @property
    def state(self) -> tuple[str, ...]:
        """Names of everything a step changes, in the order of the graph."""
        buffers = (BUFFER + name for name in self.parameters)
        return (*self.network, *buffers, *(SLOW + name for name in self.network))

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the graph's inputs, in order."""
        return (FIRST, SECOND, NEGATIVES, *self.state, *SETTINGS)

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names of the graph's outputs, in order."""
        return (*FIGURES, *(NEXT + name for name in self.state))

    @property
    def shares(self) -> bool:
        """Whether features travel."""
        return self.negatives != "local"

    @property
    def keeps_local(self) -> bool:
        """Whether local features are negatives beside the others'."""
        return self.negatives == "both"

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor of the state."""
        own = name.removeprefix(BUFFER).removeprefix(SLOW)
        return () if own in self.counters else self.parameters[own] if own in self.parameters else self.statistics[own]

    @property
    def leaves(self) -> tuple[str, ...]:
        """Names of the tensors that leave the device after a train round."""
        return leaving(self.network, self._kept, self.momentum_encoder)

    @property
    def stays(self) -> tuple[str, ...]:
        """Names of the tensors that the device remembers until its next round."""
        return staying(self.network, self._kept, self.momentum_encoder)

    @property
    def _kept(self) -> tuple[str, ...]:
        return self.norm if self.bn == "local" else ()

    def to_bytes(self) -> bytes:
        """Write `training.json`; equal plans give equal bytes."""
        record = {entry.name: getattr(self, entry.name) for entry in fields(self)}
        for name in ("parameters", "statistics"):
            record[name] = {key: list(shape) for key, shape in record[name].items()}
        return write_json({**record, "counters": list(self.counters), "norm": list(self.norm)})

    @classmethod
    def from_bytes(cls, data: bytes) -> "FedCLFPlan":
        """Read `training.json`.

        Raises:
            ValueError: not the documented record.
        """
        record = parse_json(data)
        wanted = {entry.name for entry in fields(cls)}
        if not isinstance(record, dict) or set(record) != wanted:
            raise ValueError(f"the keys must be exactly {', '.join(sorted(wanted))}")
        objects, lists = {"parameters", "statistics"}, {"counters", "norm"}
        if not all(isinstance(record[name], dict) for name in objects):
            raise ValueError("parameters and statistics must be objects")
        if not all(isinstance(shape, list) for name in objects for shape in record[name].values()):
            raise ValueError("a shape must be a list")
        if not all(isinstance(record[name], list) for name in lists):
            raise ValueError("counters and norm must be lists")
        if not all(isinstance(name, str) for key in lists for name in record[key]):
            raise ValueError("counters and norm must hold names")
        if any(isinstance(record[name], list | dict) for name in wanted - objects - lists):
            raise ValueError("a setting must be a number or a word")
        shapes = {name: {key: tuple(shape) for key, shape in record[name].items()} for name in objects}
        return cls(**{**record, **shapes, **{name: tuple(record[name]) for name in lists}})


_GIVEN: Final = (FIRST, SECOND, NEGATIVES, VIEW, ENCODED, *FIGURES)


def begun(plan: FedCLFPlan, network: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """Everything a step changes, before the first of a round: the slow encoder is a copy, the buffers are zero.

    Args:
        plan: of the bundle.
        network: its tensors by name, and under `momentum.` those of the slow encoder that are no copy.

    Returns:
        Arrays under `FedCLFPlan.state`, in that order.
    """
    own = {name: network[name].copy() for name in plan.network}
    buffers = {BUFFER + name: np.zeros(shape, np.float32) for name, shape in plan.parameters.items()}
    slow = {SLOW + name: network.get(SLOW + name, own[name]).copy() for name in plan.network}
    return {**own, **buffers, **slow}


def _is_shape(shape: object) -> bool:
    return isinstance(shape, tuple) and len(shape) <= 8 and all(type(side) is int and side > 0 for side in shape)
