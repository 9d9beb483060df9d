"""Which records of a training step there are, and whether a bundle's graphs are what its record says.

Guarantees of `check_graphs`: every graph that the record names takes exactly the tensors that the record and the
bundle imply, with their types and shapes, and gives exactly the figures and the changed state. So what a step learned
can be put where it came from, no output is larger than what went in, and the memory of the state is known before the
graph runs. Source: docs/design.md, sections 7 and 9; docs/security.md, attack list 3, check 30.
"""

from collections.abc import Callable, Mapping
from typing import Final

from edgefl_protocol.bundle.fedclf_plan import FedCLFPlan
from edgefl_protocol.bundle.fedevprompt_plan import FedEvPromptPlan
from edgefl_protocol.bundle.learning_plan import GRAPH, Contract, LearningPlan, ScoreFacts
from edgefl_protocol.bundle.onnx_wire import Graph, TensorType
from edgefl_protocol.bundle.step_plan import StepPlan
from edgefl_protocol.errors import BundleError
from edgefl_protocol.strict_json import parse_json

# Methods whose records are older than `StepPlan`, which every other method has.
RECORDS: Final[Mapping[object, Callable[[bytes], LearningPlan]]] = {
    record.kind: record.from_bytes for record in (FedEvPromptPlan, FedCLFPlan)
}


def read_plan(data: bytes) -> LearningPlan:
    """Read `training.json` of any method."""
    record = parse_json(data)
    kind = record.get("kind") if isinstance(record, dict) else None
    return RECORDS.get(kind if isinstance(kind, str) else None, StepPlan.from_bytes)(data)


def check_graphs(graphs: Mapping[str, Graph], plan: LearningPlan, score: ScoreFacts) -> None:
    """Check a bundle's graphs against its record.

    Args:
        graphs: what each optional graph of the bundle declares, by the member's name.
        score: what the bundle scores with.
    """
    for name, contract in plan.graphs(score).items():
        if name not in graphs:
            raise BundleError(
                f"the bundle has {GRAPH} but lacks {name}, which belongs to it; build the bundle again", "wrong_members"
            )
        _check_graph(name, graphs[name], contract)


def _check_graph(name: str, found: Graph, contract: Contract) -> None:
    _compare(f"{name} takes", found.inputs, contract.inputs, "wrong_inputs")
    _compare(f"{name} gives", found.outputs, contract.outputs, "wrong_outputs")


def _compare(what: str, found: Mapping[str, TensorType], expected: Mapping[str, TensorType], code: str) -> None:
    odd = sorted(set(found) ^ set(expected)) or [name for name in expected if found[name] != expected[name]]
    if odd:
        raise BundleError(
            f"{what} other tensors than the {len(expected)} that the bundle describes; they differ in "
            f"{', '.join(odd)[:300]}: export it again",
            code,
        )
