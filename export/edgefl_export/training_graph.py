"""The training graph of a bundle: one whole step of learning, traced to one self-contained ONNX file.

How: the step with its gradient is traced by `make_fx` under PyTorch's core decompositions and those of
`edgefl_export.special`, batch axis free, and the traced graph is exported like any other. Guarantees: inputs and
outputs are those that `edgefl_protocol.training` names; no tensor lies outside the file; nothing of the machine that
exported it is inside; every runtime that runs the scoring graph runs it.

Source: docs/design.md, section 9.
"""

import contextlib
import io
import warnings
from collections.abc import Mapping, Sequence

import onnx
import onnx_ir as ir
import torch
from jaxtyping import Float, Int, UInt8
from onnx_ir.passes import common
from onnxscript.optimizer import fold_constants
from torch import Tensor, nn
from torch._decomp import core_aten_decompositions
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from edgefl_export.errors import ExportError
from edgefl_export.graph import clean
from edgefl_export.special import DECOMPOSITIONS
from edgefl_export.training_step import FedEvPromptStep
from edgefl_protocol.training import MAX_BATCH, TrainingPlan

OPSET = 20
TRACED_BATCH = 4  # 0 and 1 would be taken for constants


class _Traced(nn.Module):
    """The traced step with its outputs as a plain tuple, which is what the exporter names."""

    def __init__(self, step: GraphModule) -> None:
        super().__init__()
        self.step = step

    def forward(
        self, image: UInt8[Tensor, "B S S 3"], target: Int[Tensor, " B"], tensors: dict[str, Tensor]
    ) -> tuple[Tensor, ...]:
        return tuple(self.step(image, target, tensors).values())


def export_training_graph(step: FedEvPromptStep, plan: TrainingPlan, tensors: Mapping[str, Tensor]) -> bytes:
    """Trace a training step.

    Args:
        step: what learns; on the CPU, float32.
        plan: the record that goes beside the graph.
        tensors: an example of every input but image and target; only names, types and shapes matter.

    Returns:
        The serialised graph.

    Raises:
        ExportError: the exporter could not make the graph.
    """
    side = step.module.vit.spec.image_px
    image = torch.zeros((TRACED_BATCH, side, side, 3), dtype=torch.uint8)
    target = torch.zeros(TRACED_BATCH, dtype=torch.int64)
    given = dict(tensors)
    chatter = io.StringIO()  # the exporter prints its progress, and results are what belongs on stdout
    with warnings.catch_warnings(), contextlib.redirect_stdout(chatter):
        for category in (DeprecationWarning, FutureWarning, UserWarning):
            warnings.simplefilter("ignore", category)  # about the exporter's own insides
        try:
            model = _export(_trace(step, image, target, given), image, target, given, plan.outputs)
        except (torch.onnx.errors.OnnxExporterError, RuntimeError) as error:
            first_line = str(error).strip().partition("\n")[0]
            raise ExportError(
                f"PyTorch {torch.__version__} could not export the training step: {first_line}"
            ) from error
    clean(model, "train_step")
    _check_names(model, ("image", "target", *given), plan.outputs)
    data: bytes = model.SerializeToString(deterministic=True)
    return data


def _trace(
    step: FedEvPromptStep, image: UInt8[Tensor, "B S S 3"], target: Int[Tensor, " B"], tensors: dict[str, Tensor]
) -> GraphModule:
    table = {**core_aten_decompositions(), **DECOMPOSITIONS, torch.ops.aten.split_with_sizes.default: _split}

    def one_step(image: Tensor, target: Tensor, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return step(image, target, tensors)

    traced = make_fx(one_step, decomposition_table=table, tracing_mode="symbolic", _allow_non_fake_inputs=True)(
        image, target, tensors
    )
    # Assertions on the values of a batch have no operator; the device checks its labels before a step.
    for node in list(traced.graph.nodes):
        if node.target is torch.ops.aten._assert_async.msg:
            traced.graph.erase_node(node)
    traced.graph.eliminate_dead_code()
    traced.recompile()
    return traced


def _export(
    traced: GraphModule,
    image: UInt8[Tensor, "B S S 3"],
    target: Int[Tensor, " B"],
    tensors: dict[str, Tensor],
    outputs: Sequence[str],
) -> onnx.ModelProto:
    batch = torch.export.Dim("batch", min=1, max=MAX_BATCH)
    with torch.no_grad():
        program = torch.onnx.export(
            _Traced(traced).eval(),
            (image, target),
            kwargs={"tensors": tensors},
            dynamo=True,
            external_data=False,
            opset_version=OPSET,
            input_names=["image", "target", *tensors],
            output_names=list(outputs),
            dynamic_shapes={"image": {0: batch}, "target": {0: batch}, "tensors": dict.fromkeys(tensors)},
            optimize=False,  # its rewriting is quadratic in nodes; the runtime folds constants when it loads
            verbose=False,
        )
    if program is None:
        raise ExportError(f"PyTorch {torch.__version__} returned no graph; install the versions of constraints.txt")
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
    """Consecutive slices: the exporter would write a sequence, which devices do not run."""
    starts = [sum(sizes[:index]) for index in range(len(sizes))]
    return [
        torch.ops.aten.slice.Tensor(value, axis, start, start + size) for start, size in zip(starts, sizes, strict=True)
    ]


def _check_names(model: onnx.ModelProto, inputs: Sequence[str], outputs: Sequence[str]) -> None:
    found = ([value.name for value in model.graph.input], [value.name for value in model.graph.output])
    if found != (list(inputs), list(outputs)) or len(model.functions):
        raise ExportError("the exporter made a training graph of other inputs and outputs than agreed; report it")
