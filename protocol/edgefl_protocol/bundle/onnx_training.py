"""The contract of a training graph: it takes what the record names and gives back the same tensors, changed.

Guarantees of `check_training_graph`: inputs are `image` uint8 (B, S, S, 3), `target` int64 (B,), the state, settings
and constants that the record and the bundle's tensors name, with their types and shapes, and no others; outputs are the
figures and exactly the state under `next.`, of the same types and shapes. So what a step learned can be put where it
came from, no output is larger than what went in, and the memory of the state is known before the graph runs. Those of
`check_contrast_graphs` are the same for FedCLF: views, negatives, settings and the network that the record describes.

Source: docs/design.md, sections 7 and 9; docs/security.md, attack list 3, check 30.
"""

from collections.abc import Mapping
from typing import Any, Final

from numpy.typing import NDArray

from edgefl_protocol.bundle.contrast_plan import ENCODED, ENCODER, FIRST, NEGATIVES, SECOND, VIEW, FedCLFPlan
from edgefl_protocol.bundle.contrast_plan import SETTINGS as PACE
from edgefl_protocol.bundle.onnx_rules import check_operators
from edgefl_protocol.bundle.onnx_wire import Graph, TensorType
from edgefl_protocol.bundle.training_plan import (
    COUNTS,
    FIGURES,
    FIRST_MOMENT,
    GRAPH,
    MEANS,
    NEXT,
    NOT_LEARNED,
    NOT_TAKEN,
    RATE,
    SECOND_MOMENT,
    SETTINGS,
    STEP,
    TrainingPlan,
)
from edgefl_protocol.errors import BundleError
from edgefl_protocol.rules.feature_rows import FEATURES
from edgefl_protocol.rules.slow_encoder import SLOW

_NUMBER: Final = TensorType("float32", ())


def check_training_graph(
    data: bytes, plan: TrainingPlan, weights: Mapping[str, NDArray[Any]], score: Graph, size_px: int
) -> Graph:
    """Check that `train_step.onnx` is a step of the bundle's own tensors.

    Args:
        data: a serialised ModelProto.
        plan: the record beside it.
        weights: the bundle's tensors by name.
        score: what the scoring graph declares: it tells classes and patches.
        size_px: side of the network's input.

    Returns:
        What the graph declares.

    Raises:
        BundleError: those of `check_operators`, `wrong_inputs` or `wrong_outputs`.
    """
    graph = check_operators(data)
    learnable = {name for name, value in weights.items() if value.dtype.name == "float32"} - NOT_TAKEN - NOT_LEARNED
    missing = [name for name in plan.trained if name not in learnable]
    if missing:
        raise BundleError(
            f"the bundle has no tensor {', '.join(missing)[:300]} of float32 that {GRAPH} could train; build it again",
            "wrong_inputs",
        )
    expected = _inputs(plan, weights, score, size_px)
    _compare("takes", graph.inputs, expected, "wrong_inputs")
    kinds = {NEXT + name: expected[name] for name in plan.state}
    _compare("gives", graph.outputs, {**dict.fromkeys(FIGURES, _NUMBER), **kinds}, "wrong_outputs")
    return graph


def check_contrast_graphs(step: bytes, encoder: bytes, plan: FedCLFPlan) -> None:
    """Check that `train_step.onnx` and `encode.onnx` are those of the network that the record describes.

    Args:
        step: a serialised ModelProto.
        encoder: another.
        plan: the record beside them.

    Raises:
        BundleError: those of `check_operators`, `wrong_inputs` or `wrong_outputs`.
    """
    views = TensorType("float32", (None, 3, plan.view_px, plan.view_px))
    features = TensorType("float32", (None, FEATURES))
    learned = {name: TensorType("float32", plan.shape(name)) for name in plan.parameters}
    state = {
        name: TensorType("int64" if name.removeprefix(SLOW) in plan.counters else "float32", plan.shape(name))
        for name in plan.state
    }
    graph = check_operators(step)
    given = {FIRST: views, SECOND: views, NEGATIVES: features, **state, **dict.fromkeys(PACE, _NUMBER)}
    _compare("takes", graph.inputs, given, "wrong_inputs")
    changed = {NEXT + name: kind for name, kind in state.items()}
    _compare("gives", graph.outputs, {"loss": _NUMBER, "keys": features, **changed}, "wrong_outputs")
    graph = check_operators(encoder)
    _compare("takes", graph.inputs, {VIEW: views, **learned}, "wrong_inputs", ENCODER)
    _compare("gives", graph.outputs, {ENCODED: features}, "wrong_outputs", ENCODER)


def _inputs(
    plan: TrainingPlan, weights: Mapping[str, NDArray[Any]], score: Graph, size_px: int
) -> dict[str, TensorType]:
    if "map" not in score.outputs or "evidence" not in score.outputs:
        raise BundleError(
            "a training step of evidential prompts needs a scoring graph with evidence and map; leave training out",
            "wrong_inputs",
        )
    tokens, classes = score.outputs["map"].dims[-1], score.outputs["evidence"].dims[-1]
    expected = {"image": TensorType("uint8", (None, size_px, size_px, 3)), "target": TensorType("int64", (None,))}
    for name, array in weights.items():
        if name not in NOT_TAKEN:
            expected[name] = TensorType(array.dtype.name, tuple(array.shape))
    for name in plan.trained:
        expected[FIRST_MOMENT + name] = expected[SECOND_MOMENT + name] = expected[name]
        expected[RATE + name] = _NUMBER
    expected[STEP] = TensorType("int64", ())
    expected.update(dict.fromkeys(SETTINGS, _NUMBER))
    expected[MEANS] = TensorType("float32", (classes, tokens))
    expected[COUNTS] = TensorType("float32", (classes,))
    return expected


def _compare(
    verb: str, found: Mapping[str, TensorType], expected: Mapping[str, TensorType], code: str, graph: str = GRAPH
) -> None:
    odd = sorted(set(found) ^ set(expected)) or [name for name in expected if found[name] != expected[name]]
    if odd:
        raise BundleError(
            f"{graph} {verb} other tensors than {len(expected)} that the bundle implies; they differ in "
            f"{', '.join(odd)[:300]}: export it again",
            code,
        )
