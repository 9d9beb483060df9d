"""Which graphs a device runs: graphs that the onnx package made, each with a correctly signed bundle around it."""

from collections.abc import Callable
from typing import Any

import pytest

from edgefl_protocol.bundle.onnx_rules import OPERATORS, check_operators
from edgefl_protocol.errors import BundleError

onnx = pytest.importorskip("onnx", reason="onnx not installed: needs edgefl-derm[export]")
FLOAT, UINT8 = 1, 2


def operator(domain: str, name: str) -> Callable[[Any], None]:
    def change(model: Any) -> None:
        model.graph.node.append(onnx.helper.make_node(name, ["pixels"], ["odd"], domain=domain))

    return change


def in_subgraph(model: Any) -> None:
    inner = onnx.helper.make_graph([onnx.helper.make_node("RandomNormal", [], ["y"])], "inner", [], [])
    node = onnx.helper.make_node("Identity", ["pixels"], ["odd"])
    node.attribute.append(onnx.helper.make_attribute("body", inner))
    model.graph.node.append(node)


def local_function(model: Any) -> None:
    body = [onnx.helper.make_node("Relu", ["x"], ["y"])]
    opsets = [onnx.helper.make_opsetid("", 18)]
    model.functions.append(onnx.helper.make_function("mine", "Relu2", ["x"], ["y"], body, opsets))


FORBIDDEN: dict[str, Callable[[Any], None]] = {
    "If": operator("", "If"),
    "Loop": operator("", "Loop"),
    "Scan": operator("", "Scan"),
    "RandomNormal": operator("", "RandomNormal"),
    "NonZero": operator("", "NonZero"),
    "ImageDecoder": operator("", "ImageDecoder"),
    "StringNormalizer": operator("", "StringNormalizer"),
    "lower case": operator("", "relu"),
    "ai.onnx named": operator("ai.onnx", "Loop"),
    "machine-learning domain": operator("ai.onnx.ml", "TreeEnsemble"),
    "own domain": operator("evil.corp", "Relu"),
    "Python operator": operator("ai.onnx.contrib", "PyCustomOpDef"),
    "other operator of Microsoft": operator("com.microsoft", "BeamSearch"),
    "standard operator in Microsoft's domain": operator("com.microsoft", "Relu"),
    "domain with a space": operator(" ", "Relu"),
    "in a subgraph": in_subgraph,
    "local function": local_function,
    "training graph": lambda model: model.training_info.add(),
}


@pytest.mark.parametrize("name", sorted(FORBIDDEN))
def test_forbidden_operator(good: Any, name: str) -> None:
    """docs/security.md check 30: outside the allow-list, in the scoring graph or an optional one, signed or not."""
    model = onnx.load_from_string(good.members["score.onnx"])
    FORBIDDEN[name](model)
    for member in ("score.onnx", "train_step.onnx"):
        with pytest.raises(BundleError) as caught:
            good.load(good.resign({member: model.SerializeToString()}))
        assert caught.value.code == "forbidden_operator"


def test_allowed_names_exist() -> None:
    """Every standard name on the list is an operator of the ONNX specification, so none is misspelt."""
    known = {schema.name for schema in onnx.defs.get_all_schemas() if schema.domain == ""}
    assert OPERATORS[""] - known == set()
    assert {"If", "Loop", "Scan", "RandomNormal", "NonZero", "ImageDecoder"} <= known - OPERATORS[""]


def test_explicit_standard_domain(good: Any) -> None:
    """`ai.onnx` is another spelling of the standard domain."""
    model = onnx.load_from_string(good.members["score.onnx"])
    for node in model.graph.node:
        node.domain = "ai.onnx"
    assert ("", "Gemm") in check_operators(model.SerializeToString()).operators


def shaped(which: str, name: str, dtype: int, dims: list[int | str | None] | None) -> Callable[[Any], None]:
    def change(model: Any) -> None:
        for value in getattr(model.graph, which):
            if value.name == name:
                value.CopyFrom(onnx.helper.make_tensor_value_info(name, dtype, dims))

    return change


def added(which: str, name: str) -> Callable[[Any], None]:
    return lambda model: getattr(model.graph, which).append(onnx.helper.make_tensor_value_info(name, FLOAT, ["b"]))


def dropped(which: str, name: str) -> Callable[[Any], None]:
    def change(model: Any) -> None:
        values = getattr(model.graph, which)
        kept = [value for value in values if value.name != name]
        del values[:]
        values.extend(kept)

    return change


def swapped(model: Any) -> None:
    first, second = (onnx.ValueInfoProto.FromString(model.graph.output[i].SerializeToString()) for i in (0, 1))
    model.graph.output[0].CopyFrom(second)
    model.graph.output[1].CopyFrom(first)


WRONG: dict[str, tuple[str, Callable[[Any], None]]] = {
    "extra input": ("wrong_inputs", added("input", "key")),
    "missing image": ("wrong_inputs", dropped("input", "image")),
    "missing tensor": ("wrong_inputs", dropped("input", "prior")),
    "image as float": ("wrong_inputs", shaped("input", "image", FLOAT, ["b", 8, 8, 3])),
    "image of any size": ("wrong_inputs", shaped("input", "image", UINT8, ["b", "h", "w", 3])),
    "image channels first": ("wrong_inputs", shaped("input", "image", UINT8, ["b", 3, 8, 8])),
    "fixed batch": ("wrong_inputs", shaped("input", "image", UINT8, [1, 8, 8, 3])),
    "tensor of free shape": ("wrong_inputs", shaped("input", "prior", FLOAT, ["k"])),
    "tensor as float64": ("wrong_inputs", shaped("input", "prior", 11, [3])),
    "tensor transposed": ("wrong_inputs", shaped("input", "head.weight", FLOAT, [3, 3, 1])),
    "image without a shape": ("bad_graph", shaped("input", "image", UINT8, None)),
    "extra output": ("wrong_outputs", added("output", "features")),
    "missing output": ("wrong_outputs", dropped("output", "vacuity")),
    "outputs swapped": ("wrong_outputs", swapped),
    "free classes": ("wrong_outputs", shaped("output", "probabilities", FLOAT, ["b", "k"])),
    "probabilities as float16": ("wrong_outputs", shaped("output", "probabilities", 10, ["b", 3])),
    "another class count": ("wrong_outputs", shaped("output", "evidence", FLOAT, ["b", 4])),
    "vacuity as a column": ("wrong_outputs", shaped("output", "vacuity", FLOAT, ["b", 1])),
    "fixed output batch": ("wrong_outputs", shaped("output", "vacuity", FLOAT, [8])),
    "free map": ("wrong_outputs", shaped("output", "map", FLOAT, ["b", "n"])),
    "map not square": ("wrong_outputs", shaped("output", "map", FLOAT, ["b", 5])),
    "map above the cap": ("wrong_outputs", shaped("output", "map", FLOAT, ["b", 300 * 300])),
    "map as an image": ("wrong_outputs", shaped("output", "map", FLOAT, ["b", 2, 2])),
    "map without a row": ("wrong_outputs", shaped("output", "map", FLOAT, ["b"])),
}


@pytest.mark.parametrize("name", sorted(WRONG))
def test_wrong_inputs_and_outputs(good: Any, name: str) -> None:
    """docs/security.md check 30: missing or extra inputs, wrong type, dynamic output above its cap."""
    code, change = WRONG[name]
    model = onnx.load_from_string(good.members["score.onnx"])
    change(model)
    with pytest.raises(BundleError) as caught:
        good.load(good.resign({"score.onnx": model.SerializeToString()}))
    assert caught.value.code == code


@pytest.mark.parametrize(
    "names", [["evidence", "vacuity", "dissonance", "map"], ["evidence", "vacuity", "dissonance"], ["map"], []]
)
def test_softmax_and_mapless_methods(good: Any, names: list[str]) -> None:
    """The bundle format: softmax methods give probabilities only, networks without attention no map."""
    model = onnx.load_from_string(good.members["score.onnx"])
    if "evidence" in names:
        unwanted = {"map"} - set(names)
    else:
        unwanted = {"evidence", "vacuity", "dissonance", "map"} - set(names)
    for name in unwanted:
        dropped("output", name)(model)
    bundle = good.load(good.resign({"score.onnx": model.SerializeToString()}))
    assert bundle.outputs == ("probabilities", *names)


def test_committed_graph_runs(good: Any) -> None:
    """What `load_bundle` lets through runs on the device's runtime, and its probabilities are those of the formula."""
    import numpy as np
    import onnxruntime

    bundle = good.load()
    image = np.random.default_rng(0).integers(0, 256, (2, 8, 8, 3), np.uint8)
    session = onnxruntime.InferenceSession(bundle.score_onnx, providers=["CPUExecutionProvider"])
    got = dict(zip(bundle.outputs, session.run(None, {"image": image, **bundle.weights}), strict=True))
    w = bundle.weights
    evidence = np.maximum((image.mean((1, 2)) @ w["head.weight"].T + w["head.bias"]) / w["temperature"], 0)
    alpha = evidence + w["prior"]
    np.testing.assert_allclose(got["probabilities"], alpha / alpha.sum(1, keepdims=True), rtol=1e-5)
    np.testing.assert_allclose(got["vacuity"], 3 / alpha.sum(1), rtol=1e-5)
