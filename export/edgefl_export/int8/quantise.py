"""An 8-bit form of a scoring graph: linear layers or convolutions in whole numbers, everything else in float.

Guarantees: weights have one scale per output channel; activations have one fixed range each, found on calibration
images, so that a picture's score does not depend on the pictures beside it in a batch; the graph stays in the standard
operator domain (QuantizeLinear and DequantizeLinear around each layer, which onnxruntime turns into integer products
where the processor multiplies 8-bit numbers exactly), self-contained, with the inputs and outputs of the float graph.
A layer whose weight is an input (the head) is never quantised, nor is a product of two activations (attention,
rollout). Convolutions are quantised where no linear layer can be: in a convolutional network, but not the patches of a
vision transformer.

Differs from `onnxruntime.quantization.quantize_static`, whose quantiser and calibrator it uses: the ranges are found
once for many choices of layers, and intermediate shapes are cleared first, which the quantiser needs (docs/design.md,
section 8). Source: docs/decisions/0026.
"""

import contextlib
import copy
import logging
import re
import tempfile
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx
from numpy.typing import NDArray
from onnxruntime.quantization import QDQQuantizer, QuantType, create_calibrator
from onnxruntime.quantization.calibrate import CalibrationDataReader, TensorsData

from edgefl_export.errors import ExportError
from edgefl_export.graphs.score import clean
from edgefl_export.parity.score_parity import Arrays, AskedWords, Pictures, network_inputs

MIN_RUNTIME = "1.24"  # the oldest with QuantizeLinear of opset 23
LINEAR = ("Gemm", "MatMul")
CONVOLUTION = ("Conv",)
CALIBRATION_BATCH = 8
_PLACE = re.compile(r"(?:blocks|attentions)\.(\d+)\.(?:.*\.)?(\w+)\.(?:weight|bias)$")


@dataclass(frozen=True)
class Layer:
    """Layers that read the same input, and are quantised together."""

    name: str  # such as `block 3 fc1`, counted from 0; of a convolution its number
    nodes: tuple[str, ...]  # names of their nodes


def layers_of(graph: bytes) -> tuple[tuple[str, ...], tuple[Layer, ...]]:
    """Return the operators of a graph that can be quantised, and its layers of these, in its order."""
    model = onnx.load_from_string(graph)
    fixed = {tensor.name: tuple(tensor.dims) for tensor in model.graph.initializer}
    matrices = {name for name, shape in fixed.items() if len(shape) == 2 and min(shape) > 1}
    linear = [node for node in model.graph.node if node.op_type in LINEAR and node.input[1] in matrices]
    if linear:
        return LINEAR, _grouped(linear, model)
    convolutions = [node for node in model.graph.node if node.op_type in CONVOLUTION and node.input[1] in fixed]
    return CONVOLUTION, tuple(Layer(f"layer {index}", (node.name,)) for index, node in enumerate(convolutions))


def _grouped(linear: Sequence[onnx.NodeProto], model: onnx.ModelProto) -> tuple[Layer, ...]:
    groups: dict[str, list[onnx.NodeProto]] = defaultdict(list)
    for node in linear:
        groups[node.input[0]].append(node)
    added = {name: other for node in model.graph.node if node.op_type == "Add" for name, other in _both(node.input)}
    return tuple(
        Layer(_name(index, nodes, added), tuple(node.name for node in nodes))
        for index, nodes in enumerate(groups.values())
    )


def _both(inputs: Sequence[str]) -> tuple[tuple[str, str], tuple[str, str]]:
    return (inputs[0], inputs[1]), (inputs[1], inputs[0])


def _name(index: int, nodes: Sequence[onnx.NodeProto], added: Mapping[str, str]) -> str:
    """From the name of each weight, or where the exporter has turned and renamed it, of the bias that is added."""
    told = [_PLACE.search(node.input[1]) or _PLACE.search(added.get(node.output[0], "")) for node in nodes]
    places = [place for place in told if place is not None]
    if len(places) < len(nodes):
        return f"layer {index}"
    return f"block {places[0][1]} " + ", ".join(place[2] for place in places)


@contextlib.contextmanager
def _without_advice() -> Iterator[None]:
    """Keep the quantiser's advice on how to call it out of the log."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)


class _Reader(CalibrationDataReader):  # type: ignore[misc]  # the runtime carries no types
    """Calibration pictures in batches, with the bundle's tensors."""

    def __init__(self, fixed: Arrays, pictures: Pictures, questions: AskedWords | None) -> None:
        given = network_inputs(pictures, questions)
        self._feeds: Iterator[dict[str, NDArray[Any]]] = (
            {**{name: one[start : start + CALIBRATION_BATCH] for name, one in given.items()}, **fixed}
            for start in range(0, len(pictures), CALIBRATION_BATCH)
        )

    def get_next(self) -> dict[str, NDArray[Any]] | None:
        return next(self._feeds, None)


class Quantiser:
    """Makes 8-bit forms of one graph that differ in which layers stay in float.

    Args:
        pictures: calibration images (n, S, S, 3), at least one.
        questions: what is asked about each, of a model that answers questions.

    Raises:
        ExportError: the graph has no layer that could be quantised.
    """

    def __init__(self, graph: bytes, tensors: Arrays, pictures: Pictures, questions: AskedWords | None = None) -> None:
        self.operators, self.layers = layers_of(graph)
        if not self.layers:
            raise ExportError("the network has no layer that 8 bits speed up; use --precision fp32")
        self._float = onnx.shape_inference.infer_shapes(onnx.load_from_string(graph))
        self._ranges = _ranges(graph, self.operators, tensors, pictures, questions)

    def build(self, kept: Collection[str] = ()) -> bytes:
        """Return the graph with 8-bit layers.

        Raises:
            ExportError: the quantiser left the standard operator domain.
        """
        model = copy.deepcopy(self._float)
        name, version = model.graph.name, model.ir_version
        chosen = [node for layer in self.layers if layer.name not in kept for node in layer.nodes]
        if not chosen:
            raise ExportError("every layer would stay in float; use --precision fp32")
        with _without_advice():
            quantizer = QDQQuantizer(
                model,
                per_channel=True,
                reduce_range=False,
                weight_qType=QuantType.QInt8,
                activation_qType=QuantType.QUInt8,
                tensors_range=self._ranges,
                nodes_to_quantize=chosen,
                nodes_to_exclude=[],
                op_types_to_quantize=list(self.operators),
                extra_options={"MatMulConstBOnly": True, "OpTypesToExcludeOutputQuantization": list(self.operators)},
            )
            quantizer.quantize_model()
            quantizer.model.topological_sort()  # ONNX asks for it; the quantiser appends what it adds
        made = quantizer.model.model
        clean(made, name, version)
        if {entry.domain for entry in made.opset_import} - {""}:
            raise ExportError(
                "onnxruntime's quantiser used operators that only onnxruntime knows; install the "
                "versions in constraints.txt"
            )
        data: bytes = made.SerializeToString(deterministic=True)
        return data


def _ranges(
    graph: bytes, operators: Sequence[str], tensors: Arrays, pictures: Pictures, questions: AskedWords | None
) -> TensorsData:
    """Return the smallest and largest value of each such layer's input and output over the calibration images."""
    model = onnx.load_from_string(graph)
    given = network_inputs(pictures, questions)
    fixed = {value.name: tensors[value.name] for value in model.graph.input if value.name not in given}
    with tempfile.TemporaryDirectory(prefix="edgefl-int8-") as folder:
        path = Path(folder) / "score.onnx"
        path.write_bytes(graph)
        calibrator = create_calibrator(path, list(operators), augmented_model_path=str(Path(folder) / "ranges.onnx"))
        with _without_advice():
            calibrator.collect_data(_Reader(fixed, pictures, questions))
            return calibrator.compute_data()
