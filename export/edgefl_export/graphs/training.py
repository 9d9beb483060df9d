"""The training graphs of a bundle: a whole step of learning, traced to one self-contained ONNX file.

How: the step with its gradient is traced by `make_fx` under PyTorch's core decompositions and those of `special` and
`convolutions`, batch axis free, and the traced graph is exported like any other. Guarantees: inputs and outputs are
those that were asked for, in their order; no tensor lies outside the file; nothing of the machine that exported it is
inside; every runtime that runs the scoring graph runs it.

Source: docs/design.md, section 9.
"""

from collections.abc import Callable, Mapping, Sequence

import onnx
import onnx_ir as ir
import torch
from jaxtyping import Float
from onnx_ir.passes import common
from onnxscript.optimizer import fold_constants
from torch import Tensor, nn
from torch._decomp import core_aten_decompositions
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from edgefl_export.errors import ExportError
from edgefl_export.graphs import convolutions, special
from edgefl_export.graphs.score import clean, exporting

OPSET = 20
TRACED_BATCH = 4  # 0 and 1 would be taken for constants
MAX_FREE = 65_536

PureStep = Callable[[dict[str, Tensor]], dict[str, Tensor]]


class _Traced(nn.Module):
    """The traced step with its outputs as a plain tuple, which is what the exporter names."""

    def __init__(self, step: GraphModule) -> None:
        super().__init__()
        self.step = step

    def forward(self, tensors: dict[str, Tensor]) -> tuple[Tensor, ...]:
        return tuple(self.step(tensors).values())


def export_training_graph(
    step: PureStep,
    tensors: Mapping[str, Tensor],
    outputs: Sequence[str],
    free: Mapping[str, str],
    name: str = "train_step",
) -> bytes:
    """Trace a step.

    Args:
        step: named tensors in, named tensors out; on the CPU, float32.
        tensors: an example of every input, in the graph's order; only types and shapes matter.
        free: inputs whose first axis is free, each with the name of that axis; equal names are equal lengths, and an
            example's free axis is longer than 1.

    Raises:
        ExportError: the exporter could not make the graph.
    """
    given = {tensor: value.clone() for tensor, value in tensors.items()}
    with exporting("the training step"):
        model = _export(_trace(step, given, free), given, outputs, free)
    clean(model, name)
    _check_names(model, list(given), outputs)
    data: bytes = model.SerializeToString(deterministic=True)
    return data


def _trace(step: PureStep, tensors: dict[str, Tensor], free: Mapping[str, str]) -> GraphModule:
    """Trace with only the free axes as symbols: with every length one, a network takes many minutes."""
    table = {
        **core_aten_decompositions(),
        **special.DECOMPOSITIONS,
        **convolutions.DECOMPOSITIONS,
        torch.ops.aten.split_with_sizes.default: _split,
    }

    def one_step(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return step(tensors)

    shapes = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    symbols = {}
    for name, value in tensors.items():
        axes = [DimDynamic.STATIC] * value.ndim
        if name in free:
            axes[0] = DimDynamic.DYNAMIC
        # A clone, because a tensor that is given twice would be one input.
        symbols[name] = shapes.from_tensor(value.clone(), symbolic_context=StatelessSymbolicContext(dynamic_sizes=axes))
    with shapes:
        traced = make_fx(one_step, decomposition_table=table, _allow_non_fake_inputs=True)(symbols)
    # Assertions on the values of a batch have no operator; the device checks its labels before a step.
    for node in list(traced.graph.nodes):
        if node.target is torch.ops.aten._assert_async.msg:
            traced.graph.erase_node(node)
    traced.graph.eliminate_dead_code()
    traced.recompile()
    return traced


def _export(
    traced: GraphModule, tensors: dict[str, Tensor], outputs: Sequence[str], free: Mapping[str, str]
) -> onnx.ModelProto:
    axes = {name: torch.export.Dim(name, min=1, max=MAX_FREE) for name in free.values()}
    with torch.no_grad():
        program = torch.onnx.export(
            _Traced(traced).eval(),
            (),
            kwargs={"tensors": tensors},
            dynamo=True,
            external_data=False,
            opset_version=OPSET,
            input_names=list(tensors),
            output_names=list(outputs),
            dynamic_shapes={"tensors": {name: {0: axes[free[name]]} if name in free else None for name in tensors}},
            optimize=False,  # its rewriting is quadratic in nodes; the runtime folds constants when it loads
            verbose=False,
        )
    assert program is not None  # it has a graph, or it raises
    _simplify(program.model)
    model: onnx.ModelProto = program.model_proto
    return model


def _simplify(model: ir.Model) -> None:
    """Fold what does not depend on the inputs and drop what nothing reads; weights stay as they are, once."""
    fold_constants(model)
    ir.passes.Sequential(
        common.RemoveUnusedNodesPass(),
        common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0),
        common.DeduplicateInitializersPass(),
        common.CommonSubexpressionEliminationPass(),
        common.RemoveUnusedNodesPass(),
        common.NameFixPass(),
    )(model)


def _split(value: Float[Tensor, "*axes"], sizes: Sequence[int], axis: int = 0) -> list[Float[Tensor, "*parts"]]:
    """Cut consecutive slices: the exporter would write a sequence, which devices do not run."""
    starts = [sum(sizes[:index]) for index in range(len(sizes))]
    return [
        torch.ops.aten.slice.Tensor(value, axis, start, start + size) for start, size in zip(starts, sizes, strict=True)
    ]


def _check_names(model: onnx.ModelProto, inputs: Sequence[str], outputs: Sequence[str]) -> None:
    found = ([value.name for value in model.graph.input], [value.name for value in model.graph.output])
    if found != (list(inputs), list(outputs)) or len(model.functions):
        raise ExportError("the exporter made a training graph with unexpected inputs or outputs; please report it")
