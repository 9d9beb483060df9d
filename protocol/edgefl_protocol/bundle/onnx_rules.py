"""Which graphs a device runs: an operator allow-list, and the contract of the scoring graph.

Guarantees of `check_operators`: the file holds no operator and no domain outside the lists below, no model-local
function (a few functions that call each other unfold without bound; the exporter can inline them) and no training
graph. The lists hold what a transformer or convolutional network, its evidence and its training step need. Left out on
purpose: control flow, random numbers, sequences, optionals and text, image decoders, and operators whose output size
depends on values of the picture (NonZero, Unique, Compress, NonMaxSuppression).

Guarantees of `check_score_graph`: inputs are `image` uint8 (B, S, S, 3), where the bundle answers questions `question`
int64 (B, L), and exactly the bundle's tensors with their types and shapes; outputs are one of the documented sequences,
float32, with a free batch axis and otherwise fixed, bounded lengths. So no output can be larger than the batch times a
known row.

Source: docs/security.md, attack list 3, check 30.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

from numpy.typing import NDArray

from edgefl_protocol.bundle.onnx_wire import Graph, TensorType, read_graph
from edgefl_protocol.bundle.question_table import INPUT
from edgefl_protocol.errors import BundleError

MAX_MAP_TOKENS: Final = 65_536

_STANDARD = """
    Abs Acos Acosh Add And ArgMax ArgMin Asin Asinh Atan Atanh Attention AveragePool BatchNormalization BitShift
    BitwiseAnd BitwiseNot BitwiseOr BitwiseXor Cast CastLike Ceil Celu CenterCropPad Clip Col2Im Concat Constant
    ConstantOfShape Conv ConvInteger ConvTranspose Cos Cosh CumSum DepthToSpace DequantizeLinear Div Dropout
    DynamicQuantizeLinear Einsum Elu Equal Erf Exp Expand EyeLike Flatten Floor Gather GatherElements GatherND Gelu
    Gemm GlobalAveragePool GlobalMaxPool Greater GreaterOrEqual GroupNormalization HardSigmoid HardSwish Hardmax
    Identity InstanceNormalization IsInf IsNaN LRN LayerNormalization LeakyRelu Less LessOrEqual Log LogSoftmax
    LpNormalization LpPool MatMul MatMulInteger Max MaxPool Mean MeanVarianceNormalization Min Mish Mod Mul Neg Not
    OneHot Or PRelu Pad Pow QLinearConv QLinearMatMul QuantizeLinear RMSNormalization Range Reciprocal ReduceL1
    ReduceL2 ReduceLogSum ReduceLogSumExp ReduceMax ReduceMean ReduceMin ReduceProd ReduceSum ReduceSumSquare Relu
    Reshape Resize RotaryEmbedding Round ScatterElements ScatterND Selu Shape Sigmoid Sign Sin Sinh Size Slice
    Softmax Softplus Softsign SpaceToDepth Split Sqrt Squeeze Sub Sum Swish Tan Tanh ThresholdedRelu Tile TopK
    Transpose Trilu Unsqueeze Where Xor
"""

_MICROSOFT = """
    Attention BiasGelu BiasSoftmax DequantizeLinear DynamicQuantizeMatMul FastGelu FusedConv FusedGemm FusedMatMul
    Gelu MatMulInteger16 MatMulIntegerToFloat MatMulNBits MultiHeadAttention QAttention QGemm QLinearAdd
    QLinearAveragePool QLinearConcat QLinearGlobalAveragePool QLinearLeakyRelu QLinearMul QLinearSigmoid
    QLinearSoftmax QLinearWhere QOrderedMatMul QuantizeLinear QuickGelu SkipLayerNormalization
"""

OPERATORS: Final[Mapping[str, frozenset[str]]] = {
    "": frozenset(_STANDARD.split()),
    "com.microsoft": frozenset(_MICROSOFT.split()),
}

EVIDENTIAL_OUTPUTS: Final = ("probabilities", "evidence", "vacuity", "dissonance")
OUTPUTS: Final = (
    (*EVIDENTIAL_OUTPUTS, "map", "shown"),
    (*EVIDENTIAL_OUTPUTS, "map"),
    EVIDENTIAL_OUTPUTS,
    ("probabilities", "map", "shown"),
    ("probabilities", "map"),
    ("probabilities",),
)
ANSWER_OUTPUTS: Final = (("probabilities", "map"), ("probabilities",))  # of a model that answers questions
MAPS: Final = ("map", "shown")


def check_operators(data: bytes) -> Graph:
    """Read any graph of a bundle and refuse what no device may run."""
    graph = read_graph(data)
    if graph.functions:
        raise _forbidden(f"{graph.functions} local functions, which must be inlined")
    if graph.training_graphs:
        raise _forbidden("a training graph, but a training step must be an ordinary graph")
    for domain, operator in sorted(graph.operators):
        if operator not in OPERATORS.get(domain, ()):
            raise _forbidden(f"the operator {operator[:80]!r} of domain {domain[:80]!r}, which a device does not run")
    return graph


def check_score_graph(
    data: bytes,
    weights: Mapping[str, NDArray[Any]],
    size_px: int,
    classes: Sequence[str],
    question_words: int | None = None,
) -> Graph:
    """Check that `score.onnx` takes the bundle's own tensors and gives the documented outputs.

    Args:
        question_words: words of a question that the network reads; None for a network that is asked none.
    """
    graph = check_operators(data)
    given = {"image": TensorType("uint8", (None, size_px, size_px, 3))}
    if question_words is not None:
        given[INPUT] = TensorType("int64", (None, question_words))
    expected = {name: TensorType(array.dtype.name, tuple(array.shape)) for name, array in weights.items()}
    both = set(given) & set(expected)
    if set(graph.inputs) != {*given, *expected} or both:
        odd = sorted(set(graph.inputs) ^ {*given, *expected} | both)
        raise BundleError(
            f"score.onnx must take {' and '.join(f'`{name}`' for name in given)} and the bundle's tensors; they differ "
            f"in {', '.join(odd)[:300]}",
            "wrong_inputs",
        )
    for name, kind in given.items():
        if graph.inputs[name] != kind:
            raise BundleError(
                f"input {name} is {_spoken(graph.inputs[name])}; it must be {_spoken(kind)}", "wrong_inputs"
            )
    for name, kind in expected.items():
        if graph.inputs[name] != kind:
            raise BundleError(
                f"input {name} is {_spoken(graph.inputs[name])}, but weights.safetensors holds {_spoken(kind)}",
                "wrong_inputs",
            )
    _check_outputs(graph.outputs, len(classes), OUTPUTS if question_words is None else ANSWER_OUTPUTS)
    return graph


def _check_outputs(outputs: Mapping[str, TensorType], class_count: int, sequences: Sequence[Sequence[str]]) -> None:
    names = tuple(outputs)
    if names not in sequences:
        allowed = "; ".join(", ".join(sequence) for sequence in sequences)
        raise BundleError(f"score.onnx gives {', '.join(names)[:300]}; allowed: {allowed}", "wrong_outputs")
    for name, kind in outputs.items():
        per_class = name in ("probabilities", "evidence")
        tokens = kind.dims[-1] if name in MAPS and len(kind.dims) == 2 else 0
        if name in MAPS and (not tokens or tokens > MAX_MAP_TOKENS or math.isqrt(tokens) ** 2 != tokens):
            raise BundleError(
                f"output {name} is {_spoken(kind)}; it must be (free, N), with N a square number up to "
                f"{MAX_MAP_TOKENS}",
                "wrong_outputs",
            )
        row = (class_count,) if per_class else (tokens,) if name in MAPS else ()
        if kind != TensorType("float32", (None, *row)):
            wanted = _spoken(TensorType("float32", (None, *row)))
            raise BundleError(f"output {name} is {_spoken(kind)}; it must be {wanted}", "wrong_outputs")


def _spoken(kind: TensorType) -> str:
    lengths = ", ".join("free" if length is None else str(length) for length in kind.dims)
    return f"{kind.dtype} ({lengths})"


def _forbidden(found: str) -> BundleError:
    return BundleError(f"the graph is refused: it holds {found}", "forbidden_operator")
