"""The scoring graph of a bundle: `ScoreModule`, or `AnswerModule`, traced to one self-contained ONNX file.

Guarantees: inputs are `image` uint8 (B, S, S, 3), every trainable tensor by its payload name, and of an `AnswerModule`
`question` int64 (B, L); outputs those of the module by name; the batch axis alone is free; no tensor lies outside the
file; nothing of the machine that exported it (paths, stack traces, versions of its libraries) is inside; the same
module gives the same bytes.

Two forms, both of the standard operator domain. `fused` (opset 23) is `FusedScore`, with the operator
`Attention`: for vision transformers, and the default. `plain` (opset 20) has attention decomposed into MatMul, Softmax
and Concat, which every onnxruntime since 1.18 runs: for convolutional networks, prompt tokens in the sequence, answers
to questions, and runtimes without that operator. Source: docs/design.md, sections 7 (graphs) and 8 (device);
docs/decisions/0026; the exporter's default `external_data=True` is a trap named in docs/security.md 2.8.
"""

import contextlib
import io
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import onnx
import torch
from jaxtyping import Int, UInt8
from numpy.typing import NDArray
from torch import Tensor, nn

from edgefl_export.errors import ExportError
from edgefl_export.graphs.fused import FusedScore, can_fuse
from edgefl_protocol.bundle.question_table import INPUT
from edgefl_trainer.models.answers import AnswerModule
from edgefl_trainer.models.scoring import ScoreModule

GraphForm = Literal["fused", "plain"]
OPSET = 20
IR_VERSION = 9  # the oldest that holds opset 20
FUSED_OPSET = 23  # the first with Attention
FUSED_IR_VERSION = 11
MIN_RUNTIME = "1.23"  # oldest onnxruntime of the parity tests, and of the device's dependencies
PRODUCER = "edgefl-export"
MAX_BATCH = 1024


@dataclass(frozen=True)
class ScoreGraph:
    """A scoring graph and what it needs."""

    onnx: bytes  # the serialised model
    min_runtime: str  # oldest onnxruntime that is known to run it
    form: GraphForm = "plain"  # how it is written


class _Traced(nn.Module):
    """The module with its outputs as a plain tuple, which is what the exporter names."""

    def __init__(self, module: ScoreModule | FusedScore) -> None:
        super().__init__()
        self.module = module

    def forward(self, image: UInt8[Tensor, "B S S 3"], tensors: dict[str, Tensor]) -> tuple[Tensor, ...]:
        return tuple(self.module(image, tensors).named().values())


class _TracedAnswer(nn.Module):
    """The same of a module that answers questions."""

    def __init__(self, module: AnswerModule) -> None:
        super().__init__()
        self.module = module

    def forward(
        self, image: UInt8[Tensor, "B S S 3"], tensors: dict[str, Tensor], question: Int[Tensor, "B L"]
    ) -> tuple[Tensor, ...]:
        return tuple(self.module(image, question, tensors).named().values())


def export_answer_graph(
    module: AnswerModule, tensors: Mapping[str, NDArray[np.float32]], question_words: int
) -> ScoreGraph:
    """Trace a module that answers questions; its form is always plain.

    Args:
        module: on the CPU, float32.
        tensors: a value for each of its tensors; only their shapes matter.
        question_words: words of a question that it reads.

    Raises:
        ExportError: a tensor is missing, or the exporter could not make the graph.
    """
    image, values = _example(module, tensors)
    question = torch.ones((2, question_words), dtype=torch.int64)
    model = _trace(_TracedAnswer(module).eval(), image, values, module.outputs, OPSET, question)
    clean(model, "score", IR_VERSION)
    _check_signature(model, ("image", *values, INPUT), module.outputs)
    return ScoreGraph(model.SerializeToString(deterministic=True), MIN_RUNTIME)


def export_score_graph(
    module: ScoreModule, tensors: Mapping[str, NDArray[np.float32]], form: GraphForm = "fused"
) -> ScoreGraph:
    """Trace a scoring module.

    Args:
        module: what scores; on the CPU, float32.
        tensors: a value for each of its tensors; only their shapes matter.
        form: the one wanted; a module that has no fused form gives a plain graph.

    Raises:
        ExportError: a tensor is missing, or the exporter could not make the graph.
    """
    image, values = _example(module, tensors)
    fused = form == "fused" and can_fuse(module)
    traced = _Traced(FusedScore(module) if fused else module).eval()
    model = _trace(traced, image, values, module.outputs, FUSED_OPSET if fused else OPSET)
    clean(model, "score", FUSED_IR_VERSION if fused else IR_VERSION)
    _check_signature(model, ("image", *values), module.outputs)
    return ScoreGraph(model.SerializeToString(deterministic=True), MIN_RUNTIME, "fused" if fused else "plain")


def _example(
    module: ScoreModule | AnswerModule, tensors: Mapping[str, NDArray[np.float32]]
) -> tuple[UInt8[Tensor, "B S S 3"], dict[str, Tensor]]:
    """What a module is traced with: black pictures, and its tensors in order."""
    names = module.options.tensors
    missing = [name for name in names if name not in tensors]
    if missing:
        raise ExportError(f"the model lacks the tensors {', '.join(missing)}; run `edgefl-train run` again")
    side = module.backbone.spec.image_px
    image = torch.zeros((2, side, side, 3), dtype=torch.uint8)  # a batch of 1 would be taken for a constant
    return image, {name: torch.from_numpy(np.array(tensors[name], dtype=np.float32)) for name in names}


def _trace(
    module: nn.Module,
    image: UInt8[Tensor, "B S S 3"],
    tensors: dict[str, Tensor],
    outputs: tuple[str, ...],
    opset: int,
    question: Int[Tensor, "B L"] | None = None,
) -> onnx.ModelProto:
    batch = torch.export.Dim("batch", min=1, max=MAX_BATCH)
    given: dict[str, Any] = {"tensors": tensors}
    shapes: dict[str, Any] = {"image": {0: batch}, "tensors": dict.fromkeys(tensors)}
    names = ["image", *tensors]
    if question is not None:
        given, shapes, names = {**given, INPUT: question}, {**shapes, INPUT: {0: batch}}, [*names, INPUT]
    with exporting("the model"), torch.no_grad():
        program = torch.onnx.export(
            module,
            (image,),
            kwargs=given,
            dynamo=True,
            external_data=False,
            opset_version=opset,
            input_names=names,
            output_names=list(outputs),
            dynamic_shapes=shapes,
            verbose=False,
        )
        assert program is not None  # it has a graph, or it raises
        return program.model_proto


@contextlib.contextmanager
def exporting(what: str) -> Iterator[None]:
    """Keep PyTorch's exporter quiet while it works, and turn its failure into a sentence.

    Raises:
        ExportError: it could not export `what`.
    """
    chatter = io.StringIO()  # it prints its progress, and results are what belongs on stdout
    with warnings.catch_warnings(), contextlib.redirect_stdout(chatter):
        for category in (DeprecationWarning, FutureWarning, UserWarning):
            warnings.simplefilter("ignore", category)  # about the exporter's own insides
        try:
            yield
        except (torch.onnx.errors.OnnxExporterError, RuntimeError) as error:
            first_line = str(error).strip().partition("\n")[0]
            raise ExportError(f"PyTorch {torch.__version__} could not export {what}: {first_line}") from error


def clean(model: onnx.ModelProto, name: str, ir_version: int = IR_VERSION) -> None:
    """Remove, in place, what describes the exporting machine, and shapes that runtimes infer themselves."""
    model.producer_name, model.producer_version, model.domain, model.doc_string = PRODUCER, "", "", ""
    model.ir_version = ir_version
    del model.metadata_props[:]
    graph = model.graph
    graph.name, graph.doc_string = name, ""
    del graph.metadata_props[:]
    del graph.value_info[:]
    for part in (*graph.node, *graph.initializer, *graph.input, *graph.output):
        part.doc_string = ""
        del part.metadata_props[:]


def _is_free(value: onnx.ValueInfoProto) -> bool:
    return bool(value.type.tensor_type.shape.dim[0].HasField("dim_param"))


def _check_signature(model: onnx.ModelProto, inputs: tuple[str, ...], outputs: tuple[str, ...]) -> None:
    """Refuse a graph whose inputs or outputs are not the agreed ones, in their order."""
    fixed = [value.name for value in model.graph.input if value.name in ("image", INPUT) and not _is_free(value)]
    if fixed:
        raise ExportError(f"the exporter made a graph that takes {' and '.join(fixed)} in batches of one size alone")
    found = ([value.name for value in model.graph.input], [value.name for value in model.graph.output])
    agreed = (list(inputs), list(outputs))
    if found != agreed or len(model.functions) or {entry.domain for entry in model.opset_import} - {""}:
        raise ExportError(
            f"the exporter made a graph of {found}, but it must be of {agreed} in the standard operator domain"
        )
