"""What a method gives so that devices can learn it: which runs it fits, the graphs to trace, the record, the gate.

A method's file here holds its step as a pure function of named tensors, and one `LearnedMethod` for the table
`edgefl_export.methods.table`. `bundles.training` does the rest: it traces each graph, asks the gate, packs the members.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray
from torch import Tensor

from edgefl_export.graphs.training import PureStep
from edgefl_export.parity.step_parity import StepParity
from edgefl_protocol.bundle.learning_plan import LearningPlan
from edgefl_trainer.contract import Predictor
from edgefl_trainer.engine.models import FinishedRun

Weights = Mapping[str, NDArray[Any]]


@dataclass(frozen=True, kw_only=True)
class Traceable:
    """A graph before it is traced."""

    step: PureStep  # named tensors in, named tensors out; nothing drawn at random, nothing remembered
    example: Mapping[str, Tensor]  # a value of every input, in the graph's order; only types and shapes matter
    outputs: Sequence[str]  # names, in the graph's order
    free: Mapping[str, str]  # inputs whose first axis is free, each with the name of that axis
    name: str = "train_step"  # of the graph


@dataclass(frozen=True, kw_only=True)
class PreparedStep:
    """A run's training step, ready to be traced."""

    plan: LearningPlan
    graphs: Mapping[str, Traceable]  # by the member's name
    # the gate: serialised graphs by name to its figures; raises `GateError`
    check: Callable[[Mapping[str, bytes]], Sequence[StepParity]]


@dataclass(frozen=True, kw_only=True)
class LearnedMethod:
    """The line of a method in the table."""

    offers: str  # which runs it fits, as a clause for the sentence that refuses others
    fits: Callable[[FinishedRun, Predictor], bool]  # whether it is learned from a run's model
    # the step of a run, of its model, with the bundle's weights; raises `ExportError`
    prepare: Callable[[FinishedRun, Predictor, Weights], PreparedStep]
