"""The gate: bundle against personal values on the pictures held back."""

from dataclasses import replace

import numpy as np

from edgefl_client.learning.gate import judge
from edgefl_client.learning.picture_rows import PreparedRows
from edgefl_client.runtime import load_graph
from edgefl_client.scoring.gate_verdict import GateVerdict


def test_equal_is_enough_and_too_few_pictures_are_not():
    """docs/design.md 7: not below the bundle's balanced accuracy, on at least 20 pictures of each class."""
    verdict = GateVerdict(
        bundle=0.7, personal=0.7, held=40, least_of_a_class=20, bundle_unnoticed=0, personal_unnoticed=0
    )  # fmt: skip
    assert verdict.passed and not replace(verdict, personal=0.699).passed
    assert not replace(verdict, least_of_a_class=19).passed


def test_gate_asks_both_the_same_question(make_bundle):
    """The bundle must not lose for naming a class that the table does not hold: equal values are judged equal."""
    wide = np.array([[0, 0, 0], [9, 0, 0], [9.5, 0, 0]], np.float32)  # BCC a little above NV wherever there is red
    bias, prior = np.array([3, -2, -2], np.float32), np.ones(3, np.float32)
    bundle = make_bundle(head__weight=wide, head__bias=bias, prior=prior)
    images = np.zeros((40, 24, 24, 3), np.uint8)
    images[20:, :, :, 0] = 255  # NV
    held = PreparedRows(images, np.repeat([0, 1], 20), ("",) * 40)
    graph = load_graph(bundle.score_onnx, 1)
    verdict = judge(graph, bundle, bundle.weights, (True, True, False), held)
    assert (verdict.bundle, verdict.personal) == (1.0, 1.0)
    assert judge(graph, bundle, bundle.weights, (True, True, True), held).bundle == 0.5  # it does prefer BCC


def test_gate_tells_what_would_be_wrong_without_a_word(make_bundle):
    """Wrong with much evidence is counted, with little it is referred; numbers that are not finite recognise none."""
    held = PreparedRows(np.zeros((40, 24, 24, 3), np.uint8), np.repeat([0, 1], 20), ("",) * 40)

    def values(evidence_for_mel: float) -> dict[str, np.ndarray]:
        bias = np.array([evidence_for_mel, -50, -50], np.float32)
        own = {"head.weight": np.zeros((3, 3), np.float32), "head.bias": bias, "prior": np.ones(3, np.float32)}
        return own | {"temperature": np.asarray(1, np.float32)}

    sure, unsure = values(50), values(1)  # vacuity 3/53 and 3/4.3
    bundle = make_bundle(refer_above=0.5, **{name.replace(".", "__"): value for name, value in unsure.items()})
    graph = load_graph(bundle.score_onnx, 1)
    verdict = judge(graph, bundle, sure, (True, True, True), held)
    assert (verdict.bundle, verdict.personal) == (0.5, 0.5)
    assert (verdict.bundle_unnoticed, verdict.personal_unnoticed) == (0, 20)
    wild = judge(graph, bundle, values(3e38) | {"prior": np.full(3, 3e38, np.float32)}, (True, True, True), held)
    assert (wild.personal, wild.personal_unnoticed, wild.passed) == (0, 0, False)
