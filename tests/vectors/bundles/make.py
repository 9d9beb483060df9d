"""Make `format1.edgefl`, the smallest bundle a device scores with. Run by hand: `python tests/vectors/bundles/make.py`.

The graph takes the mean colour of an 8 x 8 picture, a linear head on it, and gives evidence f(x) = max(x, 0) with the
Dirichlet quantities of docs/methods.md 1; its map is the brightness of the four quarters. Nothing of it is learned.
"""

import sys
from pathlib import Path

import numpy as np
from onnx import TensorProto, checker, helper, numpy_helper

from edgefl_protocol.bundle import BundleFields, Card, Labels, build_bundle
from edgefl_protocol.envelopes.keys import SigningKey
from edgefl_protocol.pictures.preprocess import Preprocess
from edgefl_protocol.strict_json import write_json
from edgefl_protocol.tensors import write_tensors

SIZE, CLASSES = 8, 3
KEY = SigningKey(bytes(range(32)))  # public on purpose: it signs test vectors only
FIELDS = BundleFields(
    federation="demo",
    line="skin",
    task="all",
    version=3,
    created_ms=1_790_000_000_000,
    expires_ms=1_800_000_000_000,
)
CLASS_NAMES = ("MEL", "NV", "BCC")


def weights() -> dict[str, np.ndarray]:
    """The head, prior and temperature, by payload name."""
    return {
        "head.weight": np.linspace(-1, 1, CLASSES * 3, dtype=np.float32).reshape(CLASSES, 3),
        "head.bias": np.array([0.1, 0.2, 0.3], np.float32),
        "prior": np.ones(CLASSES, np.float32),
        "temperature": np.array(1.5, np.float32),
    }


def score_graph() -> bytes:
    """The scoring graph, opset 18."""

    def constant(name: str, *values: int) -> object:
        return numpy_helper.from_array(np.array(values, np.int64), name)

    nodes = [
        helper.make_node("Cast", ["image"], ["pixels"], to=TensorProto.FLOAT),
        helper.make_node("ReduceMean", ["pixels", "plane"], ["colour"], keepdims=0),
        helper.make_node("Gemm", ["colour", "head.weight", "head.bias"], ["logits"], transB=1),
        helper.make_node("Div", ["logits", "temperature"], ["cooled"]),
        helper.make_node("Relu", ["cooled"], ["evidence"]),
        helper.make_node("Add", ["evidence", "prior"], ["alpha"]),
        helper.make_node("ReduceSum", ["alpha", "last"], ["strength"], keepdims=1),
        helper.make_node("Div", ["alpha", "strength"], ["probabilities"]),
        helper.make_node("ReduceSum", ["prior"], ["mass"], keepdims=0),
        helper.make_node("Squeeze", ["strength", "last"], ["total"]),
        helper.make_node("Div", ["mass", "total"], ["vacuity"]),
        helper.make_node("Sub", ["vacuity", "vacuity"], ["dissonance"]),
        helper.make_node("Transpose", ["pixels"], ["planes"], perm=[0, 3, 1, 2]),
        helper.make_node("AveragePool", ["planes"], ["pooled"], kernel_shape=[SIZE // 2] * 2, strides=[SIZE // 2] * 2),
        helper.make_node("ReduceMean", ["pooled", "channel"], ["grey"], keepdims=0),
        helper.make_node("Reshape", ["grey", "rows"], ["flat"]),
        helper.make_node("ReduceMax", ["flat", "last"], ["peak"], keepdims=1),
        helper.make_node("Div", ["flat", "peak"], ["map"]),
    ]
    constants = [constant("plane", 1, 2), constant("last", 1), constant("channel", 1), constant("rows", 0, 4)]
    inputs = [helper.make_tensor_value_info("image", TensorProto.UINT8, ["batch", SIZE, SIZE, 3])]
    inputs += [helper.make_tensor_value_info(n, TensorProto.FLOAT, list(a.shape)) for n, a in weights().items()]
    rows = {"probabilities": [CLASSES], "evidence": [CLASSES], "vacuity": [], "dissonance": [], "map": [4]}
    outputs = [helper.make_tensor_value_info(n, TensorProto.FLOAT, ["batch", *row]) for n, row in rows.items()]
    graph = helper.make_graph(nodes, "score", inputs, outputs, constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
    checker.check_model(model, full_check=True)
    return model.SerializeToString(deterministic=True)


def members() -> dict[str, bytes]:
    """All required members."""
    card = Card(
        intended_use="A test vector; scores nothing real.",
        method="fedevprompt",
        site="alpha",
        sites={"alpha": 40, "beta": 60},
        metrics={"balanced_accuracy": {"value": 0.5, "interval": [0.4, 0.6]}, "auroc": None},
        temperature=1.5,
        refer_above=0.6,
        backbone="mean-colour",
        licence_note="none",
    )
    return {
        "score.onnx": score_graph(),
        "weights.safetensors": write_tensors(weights(), {}),
        "preprocess.json": write_json(Preprocess(size=SIZE).to_json()),
        "labels.json": Labels(CLASS_NAMES, (True, True, False)).to_bytes(),
        "card.json": card.to_bytes(),
    }


if __name__ == "__main__":
    target = Path(__file__).parent / "format1.edgefl"
    target.write_bytes(build_bundle(members(), FIELDS, [KEY]))
    sys.stderr.write(f"{target.stat().st_size} bytes\n")
