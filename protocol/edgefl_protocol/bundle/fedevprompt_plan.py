"""How a device learns FedEvPrompt: the record beside its training graph, and the names they share.

    training.json  {"kind": "fedevprompt", "trained": [name], "rates": {name: rate}, "weight_decay", "batch", "epochs",
                    "epochs_before", "anneal_epochs", "anneal_clock": "run"|"round", "kd_weight",
                    "kd_peers": "sum"|"mean5", "prior_floor", "balance": "none"|"class",
                    "augment": "none"|"dihedral", "seed", "form": {what stands in the graph, see `PromptForm`}}

The graph `train_step.onnx` takes `image`, `target`, every trained tensor with its two moments, the step count, the
settings that may change from step to step, and the constants of the bundle; it gives the loss and, as `next.NAME`,
everything that the step changed. Source: docs/design.md, sections 7 and 9; docs/decisions/0028.
"""

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from types import MappingProxyType
from typing import Any, ClassVar, Final, Literal

import numpy as np
from numpy.typing import NDArray

from edgefl_protocol.bundle.learning_plan import (
    GRAPH,
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
from edgefl_protocol.rules import bounds, defaults
from edgefl_protocol.rules.bounds import EPOCHS, SEED, Range
from edgefl_protocol.rules.draws import Augment, Balance
from edgefl_protocol.rules.maps import PeerWeight
from edgefl_protocol.rules.rates import AnnealClock, kl_weight, rate_setting
from edgefl_protocol.strict_json import MAX_INT

FIRST_MOMENT: Final = "optimizer.exp_avg."
SECOND_MOMENT: Final = "optimizer.exp_avg_sq."
STEP: Final = "optimizer.step"
RATE: Final = "rate."
MEANS, COUNTS = "peers.means", "peers.counts"
SETTINGS: Final = ("weight_decay", "kl_weight", "kd_weight")
FIGURES: Final = ("loss", "kd", "dead")
NOT_LEARNED: Final = frozenset({"prior"})  # counted from the device's own pictures

MAX_TRAINED: Final = 64

_FOLLOWED: Final = (
    "weight_decay", "batch", "anneal_epochs", "anneal_clock", "prior_floor", "augment", "kd_weight", "kd_peers",
)  # fmt: skip
_OF_DEVICES: Final[Settings] = {
    "loss": "evidential", "select": "vacuity", "optimizer": "adamw", "rollout_from": 0, "kd_batch": "mean",
}  # fmt: skip
_BOUNDS: Final = {
    **bounds.FEDEVPROMPT,
    "epochs": EPOCHS,
    "epochs_before": Range(least=0, most=MAX_INT, whole=True),
    "seed": SEED,
}
_FORM_BOUNDS: Final = {
    "b_blocks": replace(bounds.FEDEVPROMPT["b_blocks"], least=0),  # 0: one set of prompts
    "prompt_length": bounds.FEDEVPROMPT["prompt_length"].settled,
}
_SHA256: Final = re.compile("[0-9a-f]{64}")


@dataclass(frozen=True, kw_only=True)
class PromptForm:
    """What stands in FedEvPrompt's training graph and no device can change, under the names of the method's settings.

    Where a setting may be left to each run (`auto`, a length of 0), this is what came of it.
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
        check_values(self, _FORM_BOUNDS)


@dataclass(frozen=True, kw_only=True)
class FedEvPromptPlan:
    """How FedEvPrompt learns on a device; symbols of the paper (arXiv 2411.10071) in the comments."""

    trained: tuple[str, ...]  # tensors of weights.safetensors that learn
    rates: Mapping[str, float]  # learning rate of each: mu1 of b-prompts, mu2 of t-prompts and head
    weight_decay: float
    batch: int
    epochs: int  # E, local epochs of a round
    epochs_before: int  # epochs that the bundle's values have seen, from which the annealing goes on
    anneal_epochs: int  # the KL weight is min(1, t / anneal_epochs)
    anneal_clock: AnnealClock  # t counts epochs over all rounds, or from each round's start
    kd_weight: float  # lambda
    kd_peers: PeerWeight
    prior_floor: float
    balance: Balance
    augment: Augment
    seed: int
    form: PromptForm
    kind: Literal["fedevprompt"] = "fedevprompt"
    needs_labels: ClassVar[bool] = True
    defaults: ClassVar[Settings] = defaults.by_name(defaults.FedEvPromptDefaults)

    def __post_init__(self) -> None:
        names = self.trained
        if not 1 <= len(names) <= MAX_TRAINED or len(set(names)) != len(names):
            raise ValueError(f"trained must be 1 to {MAX_TRAINED} distinct names")
        if not all(isinstance(name, str) and name for name in names) or set(self.rates) != set(names):
            raise ValueError("rates must name exactly the trained tensors")
        for name, rate in self.rates.items():
            if not (bound := bounds.FEDEVPROMPT[rate_setting(name)]).holds(rate):
                raise ValueError(f"a learning rate must be a number, {bound}")
        check_values(self, _BOUNDS)
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
        """Return the weight of the KL term in an epoch, see `rules.rates.kl_weight`.

        Args:
            round_: train round, from 1; a device that learns alone counts its own.
            epoch: of the round, from 0.
        """
        behind = self.epochs_before + (round_ - 1) * self.epochs
        return kl_weight(epoch, behind, self.anneal_epochs, self.anneal_clock)

    @property
    def fixed(self) -> Settings:
        """See `LearningPlan`; without the network, and without b-blocks where no block has prompts of its own."""
        form: dict[str, Plain] = asdict(self.form)
        unused = {"network"} if self.form.prompts == "bt" else {"network", "b_blocks"}
        return {**_OF_DEVICES, **{name: value for name, value in form.items() if name not in unused}}

    @property
    def frozen_sha256(self) -> str:
        """See `LearningPlan`: maps of two networks cannot be compared."""
        return self.form.network

    def stands_for(self, size_px: int, backbone: Settings) -> Mapping[tuple[str, Plain], Plain | None]:
        """See `LearningPlan`; a readout that each site settles by its own rows is compared with nobody's."""
        patch, learned_alone = backbone.get("patch"), backbone.get("self_supervised")
        tokens = (size_px // patch) ** 2 if isinstance(patch, int) and patch > 0 else None
        length = None if tokens is None else defaults.usual_prompt_length(tokens)
        norm = defaults.usual_head_norm(learned_alone) if type(learned_alone) is bool else None
        return {("prompt_length", 0): length, ("head_norm", "auto"): norm, ("readout", "auto"): None}

    def unable(self, wanted: Settings) -> None:
        """See `LearningPlan`."""

    def following(self, wanted: Settings) -> "FedEvPromptPlan":
        """See `LearningPlan`; rates go by the names of their tensors."""
        told = {name: wanted.get(rate_setting(name)) for name in self.trained}
        changes: dict[str, Any] = {name: wanted[name] for name in _FOLLOWED if name in wanted}
        changes["rates"] = {name: self.rates[name] if rate is None else rate for name, rate in told.items()}
        return replace(self, **changes)

    def graphs(self, score: ScoreFacts) -> Mapping[str, Contract]:
        """See `LearningPlan`."""
        learnable = {n for n, kind in score.weights.items() if kind.dtype == "float32"} - NOT_TAKEN - NOT_LEARNED
        missing = [name for name in self.trained if name not in learnable]
        if missing:
            raise BundleError(
                f"the bundle lacks these float32 tensors, which {GRAPH} trains: {', '.join(missing)[:300]}; build "
                "it again",
                "wrong_inputs",
            )
        if "map" not in score.outputs or "evidence" not in score.outputs:
            raise BundleError(
                "a training step of evidential prompts needs a scoring graph that gives evidence and a map; build "
                "the bundle without training",
                "wrong_inputs",
            )
        tokens, classes = score.outputs["map"].dims[-1], score.outputs["evidence"].dims[-1]
        taken = {name: kind for name, kind in score.weights.items() if name not in NOT_TAKEN}
        state = {STEP: TensorType("int64", ())}
        for name in self.trained:
            state[name] = state[FIRST_MOMENT + name] = state[SECOND_MOMENT + name] = taken[name]
        given = {
            "image": TensorType("uint8", (None, score.size_px, score.size_px, 3)),
            "target": TensorType("int64", (None,)),
            MEANS: TensorType("float32", (classes, tokens)),
            COUNTS: TensorType("float32", (classes,)),
            **dict.fromkeys((*SETTINGS, *(RATE + name for name in self.trained)), NUMBER),
        }
        changed = {NEXT + name: kind for name, kind in state.items()}
        return {GRAPH: Contract({**taken, **given, **state}, {**dict.fromkeys(FIGURES, NUMBER), **changed})}

    def to_bytes(self) -> bytes:
        """See `LearningPlan`."""
        return write_fields(self)

    @classmethod
    def from_bytes(cls, data: bytes) -> "FedEvPromptPlan":
        """Read `training.json`."""
        record = read_fields(data, cls, {"rates", "form"}, {"trained"})
        form = record["form"]
        if set(form) != {entry.name for entry in fields(PromptForm)}:
            raise ValueError("form must name exactly what stands in the graph")
        return cls(**{**record, "form": PromptForm(**form)})


def fresh_state(plan: FedEvPromptPlan, weights: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """Return the state before the first step, as `FedEvPromptPlan.state` orders it: bundle's values, zero moments."""
    state: dict[str, NDArray[Any]] = {}
    for name in plan.trained:
        state[name] = weights[name].copy()
        state[FIRST_MOMENT + name], state[SECOND_MOMENT + name] = (np.zeros_like(weights[name]) for _ in range(2))
    return {**state, STEP: np.zeros((), np.int64)}


def constants(plan: FedEvPromptPlan, weights: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """Return the tensors of a bundle that a step reads and never changes."""
    return {name: value for name, value in weights.items() if name not in plan.trained and name not in NOT_TAKEN}
