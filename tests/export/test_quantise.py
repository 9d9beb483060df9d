"""8-bit graphs: what is quantised and how, which layers stay in float, and the gate that refuses."""

import dataclasses

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from edgefl_export.errors import ExportError, GateError
from edgefl_export.graphs.score import export_score_graph
from edgefl_export.int8 import precision
from edgefl_export.int8.precision import agreement, check_agreement, choose_layers, other_referral
from edgefl_export.int8.quantise import CONVOLUTION, LINEAR, Quantiser, layers_of
from edgefl_export.parity.score_parity import graph_scores, open_session, parity_images
from edgefl_protocol.bundle.onnx_rules import check_score_graph
from edgefl_protocol.pictures.referral import ReferralRules
from edgefl_protocol.processor import multiplies_bytes
from edgefl_trainer.models.backbones import load_backbone
from edgefl_trainer.models.scoring import ScoreModule, ScoreOptions

ALL = (True, True, True)  # classes that the site has seen


@pytest.fixture(scope="module")
def quantiser(predictor, graph) -> Quantiser:
    return Quantiser(graph, predictor.tensors, parity_images(36, 16))


@pytest.fixture(scope="module")
def made(quantiser) -> bytes:
    return quantiser.build()


def initializers(data: bytes) -> dict[str, np.ndarray]:
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in onnx.load_from_string(data).graph.initializer}


def test_weights_have_one_scale_per_output_channel(graph, made, quantiser):
    """Oracle: symmetric 8 bits per channel, scale = max|w|/127, each weight within half a step of its float value."""
    before, after = initializers(graph), initializers(made)
    nodes = {node.name: node for node in onnx.load_from_string(graph).graph.node}
    chosen = [nodes[name] for layer in quantiser.layers for name in layer.nodes]
    assert chosen
    for node in chosen:
        weight = before[node.input[1]]
        turned = any(attribute.name == "transB" and attribute.i for attribute in node.attribute)
        axis = 0 if turned else 1  # of the output channels
        codes, scales = after[f"{node.input[1]}_quantized"], after[f"{node.input[1]}_scale"]
        assert codes.dtype == np.int8 and scales.shape == (weight.shape[axis],)
        largest = np.abs(weight).max(axis=1 - axis)
        assert scales == pytest.approx(largest / 127, rel=0.02)
        step = scales[:, None] if axis == 0 else scales[None, :]
        assert (np.abs(codes * step - weight) <= 0.51 * step).all()


def test_every_linear_layer_inside_is_found_and_nothing_else(predictor, graph):
    """Three layers read the norm before attention, then projection and the two of the MLP; never the head or a map."""
    depth = predictor.module.vit.spec.depth
    operators, layers = layers_of(graph)
    assert operators == LINEAR
    parts = ("query, key, value", "proj", "fc1", "fc2")
    expected = {f"block {block} {part}" for block in range(depth) for part in parts}
    expected -= {f"block {depth - 1} query, key, value"}  # there, the class token alone asks
    expected |= {f"block {depth - 1} query", f"block {depth - 1} key, value"}
    assert {layer.name for layer in layers} == expected and len(layers) == len(expected)
    assert sum(len(layer.nodes) for layer in layers) == 6 * depth


def test_the_8_bit_graph_keeps_the_contract(predictor, graph, made, quantiser):
    """docs/design.md, graphs: the same inputs and outputs, standard operators, self-contained, same bytes twice."""
    declared = check_score_graph(made, predictor.tensors, 36, ("MEL", "NV", "BKL"))
    assert list(declared.inputs) == ["image", *predictor.module.options.tensors]
    model = onnx.load_from_string(made)
    assert {entry.domain for entry in model.opset_import} == {""}
    assert not model.graph.value_info and not model.metadata_props
    assert quantiser.build() == made
    assert len(made) < len(graph)
    onnx.checker.check_model(model, full_check=True)


def test_tensors_stay_inputs(predictor, made, images):
    """docs/design.md, graphs: what a device learns can be scored with 8 bits as well."""
    session = open_session(made)
    usual = graph_scores(session, predictor.tensors, images[:4], 4)
    for name in ("prompts.b", "prompts.t", "head.weight"):
        shifted = {**predictor.tensors, name: np.asarray(predictor.tensors[name] + np.float32(0.5))}
        changed = graph_scores(session, shifted, images[:4], 4)
        assert np.abs(changed["evidence"] - usual["evidence"]).max() > 1e-4, name


def test_a_score_does_not_depend_on_the_batch(predictor, made, images):
    """Ranges are fixed: whoever else is in the batch, a score is the same to 1e-6. Dynamic ranges fail this."""
    session = open_session(made)
    alone = graph_scores(session, predictor.tensors, images[:8], 1)
    extremes = np.concatenate([images[:8], np.full((4, 36, 36, 3), 255, np.uint8), np.zeros((4, 36, 36, 3), np.uint8)])
    together = graph_scores(session, predictor.tensors, extremes, 16)
    assert together["probabilities"][:8] == pytest.approx(alone["probabilities"], abs=1e-6)
    assert together["vacuity"][:8] == pytest.approx(alone["vacuity"], abs=1e-6)


def test_the_runtime_multiplies_whole_numbers(made, quantiser, tmp_path):
    """Speed comes from integer products: after the runtime's own rewriting every chosen layer is one."""
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "optimised.onnx")
    options.log_severity_level = 3
    onnxruntime.InferenceSession(made, options, providers=["CPUExecutionProvider"])
    found = [node.op_type for node in onnx.load(tmp_path / "optimised.onnx").graph.node]
    integer = sum(found.count(name) for name in ("QGemm", "MatMulIntegerToFloat", "QLinearMatMul"))
    assert integer == sum(len(layer.nodes) for layer in quantiser.layers)


@pytest.mark.skipif(not multiplies_bytes(), reason="this processor has no exact 8-bit products to compare with")
def test_whole_numbers_and_their_simulation_agree(predictor, made, images):
    """A processor without exact 8-bit products runs the same graph in float: the scores stay, to a few roundings."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.add_session_config_entry("session.disable_quant_qdq", "1")
    simulated = onnxruntime.InferenceSession(made, options, providers=["CPUExecutionProvider"])
    expected = graph_scores(simulated, predictor.tensors, images, 8)
    found = graph_scores(open_session(made), predictor.tensors, images, 8)
    assert np.abs(expected["probabilities"] - found["probabilities"]).mean() < 2e-3


def test_kept_layers_keep_their_weights(graph, quantiser):
    """A layer that is kept in float has the very weights of the float graph, and no codes."""
    kept = quantiser.layers[0]
    data = quantiser.build([kept.name])
    weights = [node.input[1] for node in onnx.load_from_string(graph).graph.node if node.name in kept.nodes]
    before, after = initializers(graph), initializers(data)
    for name in weights:
        assert (after[name] == before[name]).all() and f"{name}_quantized" not in after
    with pytest.raises(ExportError, match="use --precision fp32"):
        quantiser.build([layer.name for layer in quantiser.layers])


def spoiled_graph() -> bytes:
    """Four layers on 48 numbers; the input of the third holds one value a thousand times the others."""
    draw = np.random.default_rng(0)
    big = np.ones(8, np.float32)
    big[0] = 1000
    tensors = {
        "shape": np.array([-1, 48]),
        "blocks.0.a.weight": draw.normal(0, 0.02, (48, 8)).astype(np.float32),
        "blocks.1.a.weight": draw.normal(0, 0.5, (8, 8)).astype(np.float32),
        "big": big,
        "blocks.2.a.weight": (draw.normal(0, 0.5, (8, 8)) / big[:, None]).astype(np.float32),
        "blocks.3.a.weight": draw.normal(0, 2, (8, 3)).astype(np.float32),
    }
    nodes = [
        helper.make_node("Cast", ["image"], ["float"], to=TensorProto.FLOAT),
        helper.make_node("Reshape", ["float", "shape"], ["x"]),
        helper.make_node("Gemm", ["x", "blocks.0.a.weight"], ["y0"], name="n0"),
        helper.make_node("Gemm", ["y0", "blocks.1.a.weight"], ["y1"], name="n1"),
        helper.make_node("Mul", ["y1", "big"], ["spoiled"]),
        helper.make_node("Gemm", ["spoiled", "blocks.2.a.weight"], ["y2"], name="n2"),
        helper.make_node("Gemm", ["y2", "blocks.3.a.weight"], ["logits"], name="n3"),
        helper.make_node("Softmax", ["logits"], ["probabilities"]),
    ]
    graph = helper.make_graph(
        nodes,
        "score",
        [helper.make_tensor_value_info("image", TensorProto.UINT8, ["n", 4, 4, 3])],
        [helper.make_tensor_value_info("probabilities", TensorProto.FLOAT, ["n", 3])],
        [numpy_helper.from_array(value, name) for name, value in tensors.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10).SerializeToString()


def test_the_sensitive_layer_is_found_by_measurement_and_kept():
    """A layer whose input has one giant value loses all others in 8 bits: it is ranked first and stays in float."""
    graph, pictures = spoiled_graph(), np.random.default_rng(1).integers(0, 256, (96, 4, 4, 3), np.uint8)
    quantiser = Quantiser(graph, {}, pictures[:32])
    said = []
    choice = choose_layers(quantiser, graph, {}, pictures[32:], ALL, said.append)
    assert list(choice.sensitivity) == [f"block {index} a" for index in range(4)]
    assert max(choice.sensitivity, key=choice.sensitivity.__getitem__) == "block 2 a"
    assert choice.kept == ("block 2 a",)
    assert len(said) == 4 + 2  # each layer, then none and one in float
    all_of_it = agreement(
        graph_scores(open_session(graph), {}, pictures[32:], 8),
        graph_scores(open_session(quantiser.build()), {}, pictures[32:], 8),
        ALL,
    )
    assert all_of_it.change > choice.found.change


def test_a_number_of_float_layers_that_is_given_takes_the_place_of_the_choice():
    """The most sensitive ones stay; more than the graph has are refused."""
    graph, pictures = spoiled_graph(), np.random.default_rng(1).integers(0, 256, (96, 4, 4, 3), np.uint8)
    quantiser = Quantiser(graph, {}, pictures[:32])
    kept = {
        count: choose_layers(quantiser, graph, {}, pictures[32:], ALL, lambda line: None, count).kept
        for count in (0, 1, 2)
    }
    assert kept[0] == () and kept[1] == ("block 2 a",) and kept[2][0] == "block 2 a" and len(kept[2]) == 2
    with pytest.raises(ExportError, match="the graph has 4 layers"):
        choose_layers(quantiser, graph, {}, pictures[32:], ALL, lambda line: None, 5)


@pytest.mark.parametrize(
    ("wrong", "change", "passes"),
    [(0, 0.0, True), (1, 0.0, True), (2, 0.0, False), (0, 0.0099, True), (0, 0.0101, False), (0, np.nan, False)],
)
def test_the_gate_has_the_stated_limits(wrong, change, passes):
    """docs/design.md, export gates, int8: the same class for 99 % and a mean change of vacuity of 0.01 at most."""
    probabilities = np.tile(np.float32([0.6, 0.3, 0.1]), (100, 1))
    expected = {"probabilities": probabilities, "vacuity": np.full(100, 0.5, np.float32)}
    found = {name: value.copy() for name, value in expected.items()}
    found["probabilities"][:wrong] = [0.3, 0.6, 0.1]
    found["vacuity"] += np.float32(change) * np.where(np.arange(100) % 2, 1, -1).astype(
        np.float32
    )  # signs do not cancel
    figures = agreement(expected, found, ALL)
    assert figures.within() == passes
    assert figures.same_class == pytest.approx(1 - wrong / 100)


def test_the_same_class_is_that_which_a_device_names():
    """docs/methods.md 1.3: a class that the site has not seen is never predicted, however probable. Where it leads in
    both graphs and the classes below it change places, a device names another class for every picture."""
    expected, found = (
        {"probabilities": np.tile(np.float32(one), (64, 1)), "vacuity": np.full(64, 0.3, np.float32)}
        for one in ([0.2, 0.1, 0.7], [0.1, 0.2, 0.7])
    )
    figures = agreement(expected, found, (True, True, False))
    assert figures.same_class == 0 and not figures.within()
    assert agreement(expected, found, ALL).same_class == agreement(expected, found, None).same_class == 1
    nothing = {**found, "vacuity": np.full(64, 0.9995, np.float32)}  # docs/methods.md 1.8: nothing is predicted
    assert agreement(nothing, nothing, ALL).same_class == 1 and agreement(found, nothing, ALL).same_class == 0


def test_pictures_that_one_bundle_alone_refers_are_counted():
    """docs/methods.md 1.8, by hand: the first is suspicious by its class, the second by its probability in float alone,
    the third uncertain with 8 bits alone, the fourth nothing."""
    expected = {"probabilities": np.float32([[0.6, 0.4], [0.21, 0.79], [0.1, 0.9], [0.05, 0.95]])}
    found = {"probabilities": np.float32([[0.58, 0.42], [0.23, 0.77], [0.1, 0.9], [0.06, 0.94]])}
    expected["vacuity"], found["vacuity"] = np.float32([[0.3, 0.3, 0.39, 0.3], [0.3, 0.3, 0.41, 0.3]])
    before, after = (
        ReferralRules(uncertain_above=0.4, dissonance_above=None, suspicious=(True, False), suspicious_from=threshold)
        for threshold in (0.2, 0.25)
    )
    assert other_referral((expected, found), (True, True), (before, after)) == 0.5
    assert other_referral((expected, expected), (True, True), (before, before)) == 0
    softmax = tuple({"probabilities": one["probabilities"]} for one in (expected, found))  # entropy of the third: 0.33
    unsure = tuple(
        ReferralRules(uncertain_above=nats, dissonance_above=None, suspicious=(False, False), suspicious_from=None)
        for nats in (0.3, 0.35)
    )
    assert other_referral(softmax, (True, True), unsure) == 0.25


def test_without_vacuity_the_largest_probability_is_compared():
    """Softmax methods: mean change of the largest probability, by hand."""
    expected = {"probabilities": np.float32([[0.7, 0.3], [0.4, 0.6]])}
    found = {"probabilities": np.float32([[0.69, 0.31], [0.37, 0.63]])}
    figures = agreement(expected, found, None)
    assert figures.change == pytest.approx(0.02, abs=1e-6) and figures.map_change is None and figures.same_class == 1


def test_a_graph_that_answers_otherwise_is_refused(predictor, graph, quantiser, images):
    """Export gates, int8: beyond the gate there is no bundle, and the sentence holds both figures."""
    other = {**predictor.tensors, "head.weight": -predictor.tensors["head.weight"]}
    expected = graph_scores(open_session(graph), predictor.tensors, images, 8)
    assert not agreement(expected, graph_scores(open_session(graph), other, images, 8), ALL).within()
    coarse = onnx.load_from_string(quantiser.build())
    for tensor in coarse.graph.initializer:  # ranges a hundred times too narrow
        if tensor.name.endswith("_scale") and not tensor.dims:
            tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor) / np.float32(100), tensor.name))
    with pytest.raises(GateError, match=r"with 8 bits .* no bundle is made: use --precision fp32"):
        check_agreement(coarse.SerializeToString(), graph, predictor.tensors, images, ALL)
    with pytest.raises(GateError, match="needs 64 images, but 63 were found"):
        check_agreement(b"", graph, predictor.tensors, images[:63], ALL)


def test_convolutions_of_a_convolutional_network_get_8_bits(images):
    """docs/reference/scores.md, 8 bits: one scale per output channel (the first axis), and scores stay near."""
    backbone = load_backbone("cnn:test_resnet", image_px=36, seed=1)
    draw = np.random.default_rng(3)
    tensors = {"head.weight": draw.normal(size=(3, backbone.spec.width)), "head.bias": np.zeros(3)}
    tensors = {name: value.astype(np.float32) for name, value in tensors.items()} | {
        "temperature": np.array(1, np.float32)
    }
    module = ScoreModule(backbone, ScoreOptions(readout="pooled", output="softmax", prompts=())).eval()
    graph = export_score_graph(module, {name: tensors[name] for name in module.options.tensors}).onnx
    operators, layers = layers_of(graph)
    quantiser = Quantiser(graph, tensors, images)
    made = quantiser.build()
    nodes = {node.name: node for node in onnx.load_from_string(graph).graph.node}
    assert operators == CONVOLUTION
    assert len(layers) == sum(node.op_type == "Conv" for node in nodes.values()) > 5
    before, after = initializers(graph), initializers(made)
    for layer in layers:
        name = nodes[layer.nodes[0]].input[1]
        codes, scales = after[f"{name}_quantized"], after[f"{name}_scale"]
        step = scales.reshape(-1, 1, 1, 1)
        assert codes.dtype == np.int8 and scales.shape == (len(codes),)
        assert (np.abs(codes * step - before[name]) <= 0.51 * step).all()
    scores = [graph_scores(open_session(data), tensors, images, 8) for data in (graph, made)]
    assert agreement(*scores, ALL).change < 0.02


def test_a_graph_without_a_layer_to_quantise_is_refused(quantiser, graph):
    """Weights that are no constants cannot get 8 bits, and the sentence says what to do."""
    model = onnx.load_from_string(graph)
    del model.graph.initializer[:]
    with pytest.raises(ExportError, match="use --precision fp32"):
        Quantiser(model.SerializeToString(), {}, np.zeros((1, 36, 36, 3), np.uint8))


def test_agreement_is_frozen():
    """Figures of a gate are not changed afterwards."""
    with pytest.raises(dataclasses.FrozenInstanceError):
        precision.Agreement(1, 1.0, 0.0, None).change = 1.0


def test_as_few_layers_as_it_takes_are_tried_and_never_more_than_allowed():
    """docs/decisions/0026: doubling numbers, then the most that may stay."""
    assert precision._counts(16) == [0, 1, 2, 4, 8, 16]
    assert precision._counts(24) == [0, 1, 2, 4, 8, 16, 24]
    assert precision._counts(0) == [0]
