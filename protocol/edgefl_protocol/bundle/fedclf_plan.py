"""How a device learns FedCLF: the record beside its training graphs, and the names they share.

    training.json  {"kind": "fedclf", "parameters": {name: shape}, "statistics": {name: shape}, "counters": [name],
                    "norm": [name], "view_px", "lr", "momentum", "weight_decay", "batch", "bn": "averaged"|"local",
                    "queue", "temperature", "key_momentum", "momentum_encoder": "reset"|"averaged"|"local",
                    "negatives": "remote"|"both"|"local", "epochs", "balance": "none"|"class", "seed",
                    "optimizer_state": "reset"|"keep"}

The graph `train_step.onnx` takes two views of each picture, `first` and `second` (B, 3, px, px) in [0, 1], the
`negatives` (Q, 128), the settings that may change from step to step, and the state: each parameter and its momentum
buffer, the running statistics and counters of batch norm, and under `momentum.` the same of the slow encoder. It gives
`loss`, `keys` (B, 128), the features of the second views, and everything that the step changed as `next.NAME`. The
graph `encode.onnx` takes `views` and the parameters, and gives `features` (B, 128): what the slow encoder says with
the statistics of the batch. Values are in neither: they come with the federation's broadcast. The temperature stands in
the graph. Source: FedCLF (arXiv 2208.11278) section III; docs/design.md, sections 7 and 9; docs/decisions/0027.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, ClassVar, Final, Literal

import numpy as np
from numpy.typing import NDArray

from edgefl_protocol.bundle.learning_plan import (
    GRAPH,
    MAX_VALUES,
    NEXT,
    NUMBER,
    Contract,
    ScoreFacts,
    Settings,
    check_values,
    read_fields,
    write_fields,
)
from edgefl_protocol.bundle.onnx_wire import TensorType
from edgefl_protocol.fields import Plain
from edgefl_protocol.rules import bounds, defaults
from edgefl_protocol.rules.draws import Balance
from edgefl_protocol.rules.feature_rows import FEATURES
from edgefl_protocol.rules.negatives import Negatives, keeps_local, shares
from edgefl_protocol.rules.slow_encoder import (
    BUFFER,
    SLOW,
    BatchNorm,
    MomentumEncoder,
    OptimizerState,
    leaving,
    staying,
)

ENCODER: Final = "encode.onnx"
FIRST, SECOND, NEGATIVES = "first", "second", "negatives"
VIEW, ENCODED = "views", "features"
SETTINGS: Final = ("rate", "momentum", "weight_decay", "key_momentum")
FIGURES: Final = ("loss", "keys")

MAX_TENSORS: Final = 1000  # of one network
MAX_NAME: Final = 200

_BOUNDS: Final = {
    **bounds.FEDCLF,
    "view_px": bounds.FEDCLF["view_px"].settled,
    "epochs": bounds.EPOCHS,
    "seed": bounds.SEED,
}
_FOLLOWED: Final = (
    "lr", "momentum", "weight_decay", "batch", "bn", "queue", "key_momentum", "momentum_encoder", "negatives",
    "optimizer_state",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class FedCLFPlan:
    """How FedCLF learns on a device; symbols of the papers in the comments."""

    parameters: Mapping[str, tuple[int, ...]]  # theta: tensors that learn, with their shapes
    statistics: Mapping[str, tuple[int, ...]]  # running means and variances of batch norm
    counters: tuple[str, ...]  # batches that these have seen
    norm: tuple[str, ...]  # of all these, batch norm's own: with `bn=local` they stay on the device
    view_px: int
    lr: float  # peak rate; cosine to 0 over all rounds
    momentum: float
    weight_decay: float
    batch: int  # B
    bn: BatchNorm
    queue: int  # K
    temperature: float  # tau
    key_momentum: float  # m; 0: by the length of the run (`rules.slow_encoder`)
    momentum_encoder: MomentumEncoder
    negatives: Negatives
    epochs: int  # E, local epochs of a round
    balance: Balance
    seed: int
    optimizer_state: OptimizerState = "reset"  # of SGD, between rounds
    kind: Literal["fedclf"] = "fedclf"
    needs_labels: ClassVar[bool] = False
    frozen_sha256: ClassVar[None] = None
    defaults: ClassVar[Settings] = defaults.by_name(defaults.FedCLFDefaults)

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
        check_values(self, _BOUNDS)
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
        return shares(self.negatives)

    @property
    def keeps_local(self) -> bool:
        """Whether local features are negatives beside the others'."""
        return keeps_local(self.negatives)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor of the state."""
        own = name.removeprefix(BUFFER).removeprefix(SLOW)
        return () if own in self.counters else self.parameters[own] if own in self.parameters else self.statistics[own]

    @property
    def leaves(self) -> tuple[str, ...]:
        """Names of the tensors that leave the device after a train round."""
        return leaving(self.network, self._kept, self.momentum_encoder)

    @property
    def stays(self) -> tuple[str, ...]:
        """Names of the tensors that the device remembers until its next round."""
        learned = tuple(self.parameters) if self.optimizer_state == "keep" else ()
        return staying(self.network, self._kept, self.momentum_encoder, learned)

    @property
    def _kept(self) -> tuple[str, ...]:
        return self.norm if self.bn == "local" else ()

    @property
    def fixed(self) -> Settings:
        """See `LearningPlan`."""
        projection = "linear" if "head.weight" in self.parameters else "mlp"
        return {"temperature": self.temperature, "view_px": self.view_px, "projection": projection}

    def stands_for(self, size_px: int, backbone: Settings) -> Mapping[tuple[str, Plain], Plain | None]:
        """See `LearningPlan`."""
        return {("view_px", 0): defaults.usual_view_side(size_px)}

    def unable(self, wanted: Settings) -> str | None:
        """See `LearningPlan`: devices add no noise to features."""
        noise = wanted.get("dp_noise")
        return f"the federation adds noise to features (dp_noise {noise}), and devices cannot" if noise else None

    def following(self, wanted: Settings) -> "FedCLFPlan":
        """See `LearningPlan`."""
        changes: dict[str, Any] = {name: wanted[name] for name in _FOLLOWED if name in wanted}
        return replace(self, **changes)

    def graphs(self, score: ScoreFacts) -> Mapping[str, Contract]:
        """See `LearningPlan`: graphs of the network that the record describes, whatever the bundle scores with."""
        views = TensorType("float32", (None, 3, self.view_px, self.view_px))
        features = TensorType("float32", (None, FEATURES))
        learned = {name: TensorType("float32", self.shape(name)) for name in self.parameters}
        state = {
            name: TensorType("int64" if name.removeprefix(SLOW) in self.counters else "float32", self.shape(name))
            for name in self.state
        }
        given = {FIRST: views, SECOND: views, NEGATIVES: features, **dict.fromkeys(SETTINGS, NUMBER)}
        changed = {NEXT + name: kind for name, kind in state.items()}
        return {
            GRAPH: Contract({**given, **state}, {"loss": NUMBER, "keys": features, **changed}),
            ENCODER: Contract({VIEW: views, **learned}, {ENCODED: features}),
        }

    def to_bytes(self) -> bytes:
        """See `LearningPlan`."""
        return write_fields(self)

    @classmethod
    def from_bytes(cls, data: bytes) -> "FedCLFPlan":
        """Read `training.json`."""
        objects = ("parameters", "statistics")
        record = read_fields(data, cls, objects, ("counters", "norm"), ("optimizer_state",))
        if not all(isinstance(shape, list) for name in objects for shape in record[name].values()):
            raise ValueError("a shape must be a list")
        shapes = {name: {key: tuple(shape) for key, shape in record[name].items()} for name in objects}
        return cls(**{**record, **shapes})


_GIVEN: Final = (FIRST, SECOND, NEGATIVES, VIEW, ENCODED, *FIGURES)


def begun(plan: FedCLFPlan, network: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """Return the state before a round's first step: the slow encoder is a copy and the buffers are zero, else as given.

    Args:
        network: its tensors by name, under `momentum.` those of the slow encoder that are no copy, and buffers that
            stayed.

    Returns:
        Arrays under `FedCLFPlan.state`, in that order.
    """
    own = {name: network[name].copy() for name in plan.network}
    buffers = {
        BUFFER + name: network.get(BUFFER + name, np.zeros(shape, np.float32)).copy()
        for name, shape in plan.parameters.items()
    }
    slow = {SLOW + name: network.get(SLOW + name, own[name]).copy() for name in plan.network}
    return {**own, **buffers, **slow}


def _is_shape(shape: object) -> bool:
    return isinstance(shape, tuple) and len(shape) <= 8 and all(type(side) is int and side > 0 for side in shape)
