"""What makes a bundle one that a device can learn with: the training graphs and `training.json` of a finished run.

Guarantees: the graphs passed their gate with the values that the bundle carries; settings are those of the run, so a
device learns as the site did. Source: docs/design.md, sections 7 and 9.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from edgefl_export.errors import ExportError
from edgefl_export.graphs.training import export_training_graph
from edgefl_export.methods.learned_method import LearnedMethod, PreparedStep, Weights
from edgefl_export.methods.table import GRAPHS
from edgefl_export.parity.step_parity import StepParity
from edgefl_protocol.bundle.learning_plan import RECORD
from edgefl_trainer.contract import Predictor
from edgefl_trainer.engine.models import FinishedRun


@dataclass(frozen=True)
class TrainingMembers:
    """Files of a bundle by name, and the figures of the gate."""

    files: Mapping[str, bytes]
    parity: tuple[StepParity, ...]


def learned_method(run: FinishedRun, predictor: Predictor) -> LearnedMethod:
    """Return what devices learn of a run: its own method where the table has it, else one that fits its model.

    Raises:
        ExportError: no method of the table fits.
    """
    if run.questions is not None:
        raise ExportError("no device learns a model that answers questions: leave --with-training out")
    named = [GRAPHS[run.settings.method]] if run.settings.method in GRAPHS else []
    for method in (*named, *GRAPHS.values()):
        if method.fits(run, predictor):
            return method
    raise ExportError(
        f"the run's method is {run.settings.method}; a device can learn "
        f"{', or '.join(method.offers for method in GRAPHS.values())}: leave --with-training out, or export a run "
        "of such a method"
    )


def build_training(run: FinishedRun, site: str, weights: Weights) -> TrainingMembers:
    """Trace, check and pack the training step of a site.

    Raises:
        ExportError: the method has no such step, or a graph cannot be made or fails its gate.
    """
    predictor = run.predictor(site)
    prepared = learned_method(run, predictor).prepare(run, predictor, weights)
    graphs = traced(prepared)
    figures = prepared.check(graphs)
    return TrainingMembers({**graphs, RECORD: prepared.plan.to_bytes()}, tuple(figures))


def traced(prepared: PreparedStep) -> dict[str, bytes]:
    """Return the serialised graphs of a training step by the members' names."""
    return {
        member: export_training_graph(one.step, one.example, one.outputs, one.free, one.name)
        for member, one in prepared.graphs.items()
    }
