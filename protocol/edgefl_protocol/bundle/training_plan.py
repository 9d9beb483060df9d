"""What a device needs to know to learn with a bundle: the record beside its training graph, and the names they share.

`kind` of `training.json` names the method: `fedevprompt`, described here, or `fedclf` (`contrast_training`).
`read_plan` reads either.

    training.json  {"kind": "fedevprompt", "trained": [name], "rates": {name: rate}, "weight_decay", "batch", "epochs",
                    "epochs_before", "anneal_epochs", "anneal_clock": "run"|"round", "kd_weight",
                    "kd_peers": "sum"|"mean5", "prior_floor", "balance": "none"|"class",
                    "augment": "none"|"dihedral", "seed", "form": {what stands in the graph, see `PromptForm`}}

The graph `train_step.onnx` takes `image`, `target`, every trained tensor with its two moments, the step count, the
settings that may change from step to step, and the constants of the bundle; it gives the loss and, as `next.NAME`,
everything that the step changed. Guarantees: a `TrainingPlan` that exists satisfies the forms below, so no rate or
weight of it can be negative, infinite or of unknown meaning. Source: docs/design.md, sections 7 and 9.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from types import MappingProxyType
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from edgefl_protocol.bundle.contrast_plan import FedCLFPlan
from edgefl_protocol.strict_json import MAX_INT, parse_json, write_json

GRAPH: Final = "train_step.onnx"
RECORD: Final = "training.json"

FIRST_MOMENT: Final = "optimizer.exp_avg."
SECOND_MOMENT: Final = "optimizer.exp_avg_sq."
STEP: Final = "optimizer.step"
RATE: Final = "rate."
NEXT: Final = "next."
MEANS, COUNTS = "peers.means", "peers.counts"
SETTINGS: Final = ("weight_decay", "kl_weight", "kd_weight")
FIGURES: Final = ("loss", "kd", "dead")

NOT_TAKEN: Final = frozenset({"temperature"})  # of a bundle's tensors: fitted after learning
NOT_LEARNED: Final = frozenset({"prior"})  # counted from the device's own pictures

MAX_TRAINED: Final = 64
MAX_BATCH: Final = 1024
MAX_EPOCHS: Final = 10_000
MAX_BLOCKS: Final = 1000
MAX_PREFIX: Final = 10_000

_CHOICES: Final[Mapping[str, tuple[str, ...]]] = {
    "kind": ("fedevprompt",),
    "anneal_clock": ("run", "round"),
    "kd_peers": ("sum", "mean5"),
    "balance": ("none", "class"),
    "augment": ("none", "dihedral"),
}
_WHOLE: Final = {
    "batch": (1, MAX_BATCH),
    "epochs": (1, MAX_EPOCHS),
    "epochs_before": (0, MAX_INT),
    "anneal_epochs": (1, MAX_EPOCHS),
    "seed": (0, 2**31 - 1),
}
_SHARES: Final = ("weight_decay", "kd_weight", "prior_floor")
_FORMS: Final[Mapping[str, tuple[str, ...]]] = {
    "prompts": ("bt", "g"),
    "prefix": ("after", "before"),
    "evidence": ("softplus", "relu", "exp"),
    "readout": ("cls", "mean"),
    "head_norm": ("standardise", "none"),
    "rollout": ("renormalise", "sink"),
    "kd_metric": ("bilinear", "nearest"),
}
_SHA256: Final = re.compile("[0-9a-f]{64}")


@dataclass(frozen=True, kw_only=True)
class PromptForm:
    """What stands in FedEvPrompt's training graph and no device can change, under the names of the method's settings.

    Where a setting may be left to each run (`auto`, a length of 0), this is what came of it.

    Raises:
        ValueError: a value is not of its form; the text is one clause for a sentence.
    """

    network: str  # SHA-256 of the frozen network's weights, as the federation's task names it
    prompts: Literal["bt", "g"]
    b_blocks: int  # l, blocks with b-prompts; 0 with one set of prompts
    prompt_length: int  # P
    prefix: Literal["after", "before"]
    evidence: Literal["softplus", "relu", "exp"]
    readout: Literal["cls", "mean"]
    head_norm: Literal["standardise", "none"]
    rollout: Literal["renormalise", "sink"]
    kd_metric: Literal["bilinear", "nearest"]

    def __post_init__(self) -> None:
        if not isinstance(self.network, str) or not _SHA256.fullmatch(self.network):
            raise ValueError("network must be a SHA-256 of 64 hex digits")
        for name, allowed in _FORMS.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} must be {' or '.join(allowed)}")
        for name, (low, high) in {"b_blocks": (0, MAX_BLOCKS), "prompt_length": (1, MAX_PREFIX)}.items():
            value = getattr(self, name)
            if type(value) is not int or not low <= value <= high:
                raise ValueError(f"{name} must be a whole number from {low} to {high}")


@dataclass(frozen=True, kw_only=True)
class TrainingPlan:
    """How FedEvPrompt learns on a device; symbols of the paper (arXiv 2411.10071) in the comments.

    Raises:
        ValueError: a value is not of its form; the text is one clause for a sentence.
    """

    trained: tuple[str, ...]  # tensors of weights.safetensors that learn
    rates: Mapping[str, float]  # learning rate of each: mu1 of b-prompts, mu2 of t-prompts and head
    weight_decay: float
    batch: int
    epochs: int  # E, local epochs of a round
    epochs_before: int  # epochs that the bundle's values have seen, from which the annealing goes on
    anneal_epochs: int  # the KL weight is min(1, t / anneal_epochs)
    anneal_clock: Literal["run", "round"]  # t counts epochs over all rounds, or from each round's start
    kd_weight: float  # lambda
    kd_peers: Literal["sum", "mean5"]
    prior_floor: float
    balance: Literal["none", "class"]
    augment: Literal["none", "dihedral"]
    seed: int
    form: PromptForm
    kind: Literal["fedevprompt"] = "fedevprompt"

    def __post_init__(self) -> None:
        names = self.trained
        if not 1 <= len(names) <= MAX_TRAINED or len(set(names)) != len(names):
            raise ValueError(f"trained must be 1 to {MAX_TRAINED} distinct names")
        if not all(isinstance(name, str) and name for name in names) or set(self.rates) != set(names):
            raise ValueError("rates must name exactly the trained tensors")
        if not all(_is_share(rate) for rate in self.rates.values()):
            raise ValueError("a learning rate must be a number from 0 to 1")
        for name, allowed in _CHOICES.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} must be {' or '.join(allowed)}")
        for name, (low, high) in _WHOLE.items():
            value = getattr(self, name)
            if type(value) is not int or not low <= value <= high:
                raise ValueError(f"{name} must be a whole number from {low} to {high}")
        for name in _SHARES:
            if not _is_share(getattr(self, name)):
                raise ValueError(f"{name} must be a number from 0 to 1")
        object.__setattr__(self, "rates", MappingProxyType(dict(self.rates)))

    @property
    def state(self) -> tuple[str, ...]:
        """Names of everything a step changes, in the order of the graph."""
        moments = [(name, FIRST_MOMENT + name, SECOND_MOMENT + name) for name in self.trained]
        return (*(name for three in moments for name in three), STEP)

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the graph's inputs but the bundle's constants."""
        rates = (RATE + name for name in self.trained)
        return ("image", "target", *self.state, *rates, *SETTINGS, MEANS, COUNTS)

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names of the graph's outputs, in order."""
        return (*FIGURES, *(NEXT + name for name in self.state))

    def kl_weight(self, round_: int, epoch: int) -> float:
        """Weight of the KL term: lambda_t = min(1, t / anneal_epochs).

        Args:
            round_: train round, from 1; a device that learns alone counts its own.
            epoch: of the round, from 0.
        """
        t = epoch if self.anneal_clock == "round" else self.epochs_before + (round_ - 1) * self.epochs + epoch
        return min(1.0, t / self.anneal_epochs)

    def to_bytes(self) -> bytes:
        """Write `training.json`; equal plans give equal bytes."""
        record = {entry.name: getattr(self, entry.name) for entry in fields(self)}
        return write_json(
            {**record, "trained": list(self.trained), "rates": dict(self.rates), "form": asdict(self.form)}
        )

    @classmethod
    def from_bytes(cls, data: bytes) -> "TrainingPlan":
        """Read `training.json`.

        Raises:
            ValueError: not the documented record.
        """
        record = parse_json(data)
        wanted = {entry.name for entry in fields(cls)}
        if not isinstance(record, dict) or set(record) != wanted:
            raise ValueError(f"the keys must be exactly {', '.join(sorted(wanted))}")
        if not isinstance(record["trained"], list) or not isinstance(record["rates"], dict):
            raise ValueError("trained must be a list and rates an object")
        if not all(isinstance(name, str) for name in record["trained"]):
            raise ValueError("trained must hold names")
        form = record["form"]
        if not isinstance(form, dict) or set(form) != {entry.name for entry in fields(PromptForm)}:
            raise ValueError("form must name exactly what stands in the graph")
        if any(isinstance(value, list | dict) for value in form.values()) or any(
            isinstance(record[name], list | dict) for name in wanted - {"trained", "rates", "form"}
        ):
            raise ValueError("a setting must be a number or a word")
        return cls(**{**record, "trained": tuple(record["trained"]), "form": PromptForm(**form)})


Plan = TrainingPlan | FedCLFPlan


def read_plan(data: bytes) -> Plan:
    """Read `training.json` of any kind.

    Args:
        data: the member of a bundle.

    Raises:
        ValueError: not the documented record of its kind.
    """
    record = parse_json(data)
    kind = record.get("kind") if isinstance(record, dict) else None
    return FedCLFPlan.from_bytes(data) if kind == "fedclf" else TrainingPlan.from_bytes(data)


def fresh_state(plan: TrainingPlan, weights: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """Everything a step changes, before the first: the bundle's values, moments of zero, no step taken.

    Args:
        plan: of the bundle.
        weights: the bundle's tensors by name.

    Returns:
        Arrays under `TrainingPlan.state`, in that order.
    """
    state: dict[str, NDArray[Any]] = {}
    for name in plan.trained:
        state[name] = weights[name].copy()
        state[FIRST_MOMENT + name], state[SECOND_MOMENT + name] = (np.zeros_like(weights[name]) for _ in range(2))
    return {**state, STEP: np.zeros((), np.int64)}


def constants(plan: TrainingPlan, weights: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """The tensors of a bundle that a step reads and never changes.

    Args:
        plan: of the bundle.
        weights: the bundle's tensors by name.
    """
    return {name: value for name, value in weights.items() if name not in plan.trained and name not in NOT_TAKEN}


def _is_share(value: object) -> bool:
    return type(value) in (int, float) and math.isfinite(value) and 0 <= value <= 1  # type: ignore[operator, arg-type]
