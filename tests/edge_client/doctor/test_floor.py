"""The linear-layer floor of `edgefl doctor` (docs/design.md 8): layers read off a graph, and a graph of them alone."""

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from edgefl_client.doctor.linear_floor import MOST_VALUES, LinearLayers, floor_graph, floor_run, linear_layers
from edgefl_client.doctor.measure import measure, scoring, table
from edgefl_client.scoring.scorer import Scorer

LAYERS = LinearLayers(5, ((16, 24), (24, 8), (16, 32)))


def score_like(tokens):
    """A graph with every kind of product that an exported vision transformer has, and some that are no layer."""
    node, drawn = helper.make_node, np.random.default_rng(0)
    stored = {
        "patches": drawn.random((16, 3, 4, 4), np.float32), "plain": drawn.random((16, 48), np.float32),
        "turned": drawn.random((20, 48), np.float32), "narrow": drawn.random((20, 1), np.float32),
        "bytes": drawn.integers(-9, 9, (20, 16)).astype(np.int8), "scale": np.float32(0.1),
    }  # fmt: skip
    nodes = [
        node("Conv", ["image", "patches"], ["grid"], kernel_shape=[4, 4], strides=[4, 4]),
        node("MatMul", ["tokens", "plain"], ["a"]),
        node("Transpose", ["turned"], ["turned.t"], perm=[1, 0]),
        node("Gemm", ["a", "turned.t"], ["b"]),
        node("DequantizeLinear", ["bytes", "scale"], ["floats"]),
        node("MatMul", ["b", "floats"], ["c"]),
        node("MatMul", ["b", "narrow"], ["d"]),
        node("MatMul", ["c", "value"], ["e"]),
        node("Softmax", ["e"], ["map"]),
    ]
    graph = helper.make_graph(
        nodes, "score", [], [helper.make_tensor_value_info("map", TensorProto.FLOAT, ["B", tokens])],
        [numpy_helper.from_array(np.asarray(value), name) for name, value in stored.items()],
    )  # fmt: skip
    return helper.make_model(graph)


def test_layers_are_read_off_the_graph():
    """Oracle: the shapes that the graph was made of; a product with a value, or too narrow to matter, is no layer."""
    found = linear_layers(score_like(36).SerializeToString())
    assert found == LinearLayers(37, ((48, 16), (16, 48), (48, 20), (20, 16)))
    assert found.share == 1 and found.measured == found.shapes


def test_a_network_without_tokens_has_no_floor(lab, plain_bundle):
    assert linear_layers(score_like(0).SerializeToString()) is None
    assert linear_layers(plain_bundle.score_onnx) is None


@pytest.mark.parametrize(("precision", "operator"), [("fp32", "Gemm"), ("int8", "MatMulInteger")])
def test_the_graph_is_one_that_onnx_accepts_and_multiplies(precision, operator):
    """Oracles: onnx's own checker, and numpy's product with the weights as onnx reads them back."""
    data = floor_graph(LAYERS, precision)
    model = onnx.load_from_string(data)
    onnx.checker.check_model(model)
    assert [node.op_type for node in model.graph.node].count(operator) == 3
    stored = {one.name: numpy_helper.to_array(one) for one in model.graph.initializer}
    session = onnxruntime.InferenceSession(data, providers=["CPUExecutionProvider"])
    kind = np.float32 if precision == "fp32" else np.uint8
    feeds = {f"x{width}": np.random.default_rng(2).integers(0, 9, (5, width)).astype(kind) for width in (16, 24)}
    for number, (rows, _) in enumerate(LAYERS.shapes):
        wanted = feeds[f"x{rows}"][0].astype(np.float64) @ stored[f"w{number}"].astype(np.float64)
        np.testing.assert_allclose(session.run([f"z{number}"], feeds)[0], wanted, rtol=1e-4)
    assert floor_run(LAYERS, precision, 1)() is not None


def test_large_networks_are_reckoned_from_a_part():
    """Of 16 million weights at most; the rest counts by its multiplications."""
    whole = LinearLayers(5, ((1024, 4096),) * 10)
    assert len(whole.measured) * 1024 * 4096 <= MOST_VALUES and whole.share == pytest.approx(0.4)
    assert LinearLayers(5, ((8192, 8192),) * 2).share == 0.5  # at least one layer


def test_the_table_holds_both_floors(plain_bundle):
    """Floor and network are timed with the same threads, in turn; the table shows the figures of the JSON."""
    scorer = Scorer(plain_bundle, threads=1)
    found = measure(scoring(scorer), lambda: scoring(scorer), lambda: LinearLayers(197, ((256, 512),) * 4)).to_json()
    assert [(one["precision"], one["threads"], one["share"]) for one in found["floors"]] == [
        ("fp32", 1, 1.0), ("int8", 1, 1.0),
    ]  # fmt: skip
    assert all(one["milliseconds"] > 0 and one["times"] > 0 for one in found["floors"])
    lines = table({**found, "load_average": None})
    heads = [number for number, line in enumerate(lines) if line.startswith(("measured here", "floor: "))]
    assert heads == [0, 5] and len(lines) == 8
    for line, one in zip(lines[6:], found["floors"], strict=True):
        assert f"{one['milliseconds']:.2f} ms; the fp32 network takes {one['times']:.2f} times as long" in line
