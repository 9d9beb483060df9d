"""The exported graph against PyTorch, and against the contract of docs/design.md, section 7."""

from collections.abc import Iterator

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from tests.shared import Shared

from edgefl_export.errors import ExportError, GateError
from edgefl_export.graphs.fused import FusedScore, _rollout, can_fuse
from edgefl_export.graphs.score import export_score_graph
from edgefl_export.parity.score_parity import check_parity, compare, graph_scores, parity_images
from edgefl_protocol.bundle.onnx_rules import check_score_graph
from edgefl_protocol.errors import BundleError
from edgefl_trainer.engine.models import predict
from edgefl_trainer.models.backbones import load_backbone
from edgefl_trainer.models.scoring import ScoreModule, ScoreOptions
from edgefl_trainer.rollout import attention_rollout


@pytest.fixture(scope="module", autouse=True)
def _traced_once(shared: Shared) -> Iterator[None]:
    """Two tests that look at one model's graph have it traced once."""
    with shared.traces():
        yield


OPTIONS = [
    {},
    {"readout": "mean", "evidence": "relu", "head_norm": "none", "prefix": "before"},
    {"evidence": "exp", "prefix_mode": "sink", "rollout_from": 1, "discount": "unusual"},
    {"output": "softmax", "prompts": ()},
]


@pytest.mark.parametrize(
    "options", [OPTIONS[0], *(pytest.param(options, marks=pytest.mark.slow) for options in OPTIONS[1:])], ids=str
)
def test_graph_scores_as_pytorch_does(make, graph, images, options):
    """Export gates: every choice of a method passes on 64 random images; inputs are the contract's."""
    predictor = make(**options)
    if options:
        graph = export_score_graph(predictor.module, predictor.tensors).onnx
    figures = check_parity(graph, predictor.module, predictor.tensors, images)
    assert [figure.quantity for figure in figures] == list(predictor.module.options.outputs)
    declared = check_score_graph(graph, predictor.tensors, 36, ("MEL", "NV", "BKL"))
    assert list(declared.inputs) == ["image", *predictor.module.options.tensors]
    assert tuple(declared.outputs) == predictor.module.options.outputs


@pytest.mark.slow
def test_real_size_passes_the_gates_and_the_official_checker(make):
    """Export gates: a ViT of 192 × 4 at 84 px, compared with the trainer's own predict() at another batch size."""
    predictor = make("vit:192x4/12", image_px=84)
    graph = export_score_graph(predictor.module, predictor.tensors).onnx
    pictures = parity_images(84)
    expected = predict(predictor, pictures)
    session = onnxruntime.InferenceSession(graph, providers=["CPUExecutionProvider"])
    found = graph_scores(session, predictor.tensors, pictures, 3)
    assert found["probabilities"] == pytest.approx(expected.probabilities, abs=1e-4)
    assert found["evidence"] == pytest.approx(expected.evidence, rel=1e-4, abs=1e-4)
    assert found["vacuity"] == pytest.approx(expected.vacuity, abs=1e-4)
    assert found["dissonance"] == pytest.approx(expected.dissonance, abs=1e-4)
    assert found["map"] == pytest.approx(expected.maps, abs=1e-3)
    assert found["map"].max(axis=1) == pytest.approx(1)
    assert np.ptp(found["vacuity"]) > 1e-3  # a flat output would agree with anything
    onnx.checker.check_model(onnx.load_from_string(graph), full_check=True)


def test_tensors_are_inputs_not_constants(predictor, graph, images):
    """docs/design.md, graphs: whoever changes a tensor changes the score, so a device can score what it learned."""
    session = onnxruntime.InferenceSession(graph, providers=["CPUExecutionProvider"])
    usual = graph_scores(session, predictor.tensors, images[:4], 4)
    for name, value in predictor.tensors.items():
        shifted = {**predictor.tensors, name: np.asarray(value + np.float32(0.5))}
        changed = graph_scores(session, shifted, images[:4], 4)
        assert name == "prior" or np.abs(changed["evidence"] - usual["evidence"]).max() > 1e-6, name
        assert np.abs(changed["probabilities"] - usual["probabilities"]).max() > 1e-7, name


def test_graph_is_self_contained_and_tells_nothing_of_this_machine(graph):
    """docs/security.md check 29: no external data, although the exporter's default writes it; no paths, no traces."""
    model = onnx.load_from_string(graph)
    assert all(tensor.data_location == onnx.TensorProto.DEFAULT for tensor in model.graph.initializer)
    telling = (b".py", b"/home", b"stack_trace", b"site-packages", b"edgefl_trainer")
    assert not any(text in graph for text in telling)
    assert {entry.domain for entry in model.opset_import} == {""}


def test_missing_tensor_is_named(make):
    """A predictor without one of its tensors is refused by name."""
    predictor = make()
    rest = {name: value for name, value in predictor.tensors.items() if name != "prior"}
    with pytest.raises(ExportError, match="lacks the tensors prior"):
        export_score_graph(predictor.module, rest)


@pytest.mark.parametrize(
    ("name", "change", "passes"),
    [
        ("probabilities", 0.9e-4, True),
        ("probabilities", 1.1e-4, False),
        ("vacuity", 1.1e-4, False),
        ("dissonance", 1.1e-4, False),
        ("evidence", 0.9e-2, True),  # evidence is 100: the gate is 1e-4·(1 + 100)
        ("evidence", 1.1e-2, False),
        ("map", 0.9e-3, True),
        ("map", 1.1e-3, False),
        ("map", np.nan, False),
        ("vacuity", np.inf, False),
    ],
)
def test_gates_have_the_stated_tolerances(name, change, passes):
    """docs/design.md, export gates: the tolerance of each quantity; a value that is not finite never passes."""
    shapes = {"probabilities": (8, 3), "evidence": (8, 3), "vacuity": (8,), "dissonance": (8,), "map": (8, 9)}
    expected = {key: np.full(shape, 100.0 if key == "evidence" else 0.5, np.float32) for key, shape in shapes.items()}
    found = {key: value.copy() for key, value in expected.items()}
    found[name].flat[-1] += change
    figures = {figure.quantity: figure for figure in compare(expected, found, 1)}
    assert figures[name].passed == passes
    assert all(figure.passed for key, figure in figures.items() if key != name)


def test_a_graph_that_scores_otherwise_is_refused(make, graph, images):
    """Export gates: a graph of another model fails, names the worst quantity, and makes no bundle."""
    predictor = make(evidence="relu")
    with pytest.raises(GateError, match="of the graph differs from the trainer"):
        check_parity(graph, predictor.module, predictor.tensors, images)


def test_gates_need_64_images(make, images):
    """Export gates: on 64 images or more."""
    predictor = make()
    with pytest.raises(GateError, match="need 64 images, but 63 were given"):
        check_parity(b"", predictor.module, predictor.tensors, images[:63])


def test_external_data_would_be_refused_by_the_device(predictor, graph):
    """docs/security.md check 29: the walker the device uses refuses this very graph with one tensor moved outside."""
    model = onnx.load_from_string(graph)
    tensor = model.graph.initializer[0]
    tensor.data_location = onnx.TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="/etc/passwd")
    with pytest.raises(BundleError) as refusal:
        check_score_graph(model.SerializeToString(), predictor.tensors, 36, ("MEL", "NV", "BKL"))
    assert refusal.value.code == "external_data"


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_the_fused_module_is_the_module(make, images, options):
    """docs/decisions/0026: biases that moved and a last block cut short change nothing; to rounding, in PyTorch."""
    predictor = make(**{name: value for name, value in options.items() if name != "prefix"})  # before: the plain form
    module, tensors = predictor.module.eval(), predictor.tensors
    values = {name: torch.from_numpy(np.array(value)) for name, value in tensors.items()}
    pixels = torch.from_numpy(images[:5])
    with torch.inference_mode():
        expected, found = module(pixels, values).named(), FusedScore(module)(pixels, values).named()
    assert list(expected) == list(found)
    for name, wanted in expected.items():
        assert found[name].numpy() == pytest.approx(wanted.numpy(), rel=2e-5, abs=2e-6), name


def test_the_fused_rollout_is_the_rollout():
    """docs/methods.md, rollout: against `attention_rollout` on random probabilities, with and without a prefix."""
    draw = torch.Generator().manual_seed(0)
    for prefix, mode in ((0, "renormalise"), (3, "renormalise"), (3, "sink")):
        attentions = [torch.rand((2, 4, 10, prefix + 10), generator=draw).softmax(dim=-1) for _ in range(3)]
        expected = attention_rollout(attentions, prefix, mode)
        assert _rollout(attentions, prefix, mode).numpy() == pytest.approx(expected.numpy(), rel=1e-5)
        last = attentions[-1][:, :, :1]  # where the class token alone asks
        assert _rollout([*attentions[:-1], last], prefix, mode).numpy() == pytest.approx(expected.numpy(), rel=1e-5)


def test_a_prefix_that_takes_all_attention_leaves_finite_maps():
    """A row of which nothing is left over the image counts nothing, instead of dividing by zero."""
    attention = torch.zeros((1, 1, 5, 7))
    attention[..., 0] = 1
    assert torch.isfinite(_rollout([attention, attention], 2, "renormalise")).all()


@pytest.mark.slow
def test_plain_and_fused_forms(make, graph, images):
    """docs/design.md 8: a decomposed form stays for runtimes without Attention, and scores alike."""
    predictor = make()
    plain = export_score_graph(predictor.module, predictor.tensors, "plain")
    assert plain.form == "plain"
    check_parity(plain.onnx, predictor.module, predictor.tensors, images)
    models = {"plain": onnx.load_from_string(plain.onnx), "fused": onnx.load_from_string(graph)}
    assert {name: model.opset_import[0].version for name, model in models.items()} == {"plain": 20, "fused": 23}
    uses = {name: any(node.op_type == "Attention" for node in model.graph.node) for name, model in models.items()}
    assert uses == {"plain": False, "fused": True}


def test_convolutional_networks_have_the_plain_form(make):
    """No attention, no fused form: the default gives what there is, and the fused module refuses."""
    backbone = load_backbone("cnn:test_resnet", image_px=36, seed=1)
    module = ScoreModule(backbone, ScoreOptions(readout="pooled", output="softmax", prompts=()))
    assert not can_fuse(module)
    with pytest.raises(ValueError, match="no fused form"):
        FusedScore(module)


@pytest.mark.slow
def test_prompts_before_the_projection_have_the_plain_form(make):
    """The fused form joins prompts to projected keys and values; where they are projected themselves there is none."""
    predictor = make(prefix="before")
    assert not can_fuse(predictor.module)
    assert export_score_graph(predictor.module, predictor.tensors).form == "plain"
