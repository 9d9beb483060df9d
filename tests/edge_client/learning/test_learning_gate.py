"""The gate: bundle against personal values on the pictures held back."""

import numpy as np
import pytest

from edgefl_client.learning.learning_gate import judge
from edgefl_client.learning.picture_rows import PreparedRows
from edgefl_client.runtime import load_graph
from edgefl_client.scoring.personal import PersonalState
from edgefl_protocol.pictures.class_info import KNOWN, ClassInfo
from edgefl_protocol.pictures.suspicious import Suspicion


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
    assert (verdict.bundle.balanced_accuracy, verdict.personal.balanced_accuracy) == (1.0, 1.0)
    wide_question = judge(graph, bundle, bundle.weights, (True, True, True), held)
    assert wide_question.bundle.balanced_accuracy == 0.5  # it does prefer BCC
    # What a score would say: the bundle calls all moles BCC, the values that never saw BCC refer them.
    assert (verdict.bundle.referred, verdict.bundle.wrong_not_referred) == (0, 20)
    assert (verdict.personal.referred, verdict.personal.wrong_not_referred) == (20, 0)


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
    assert (verdict.bundle.balanced_accuracy, verdict.personal.balanced_accuracy) == (0.5, 0.5)
    assert (verdict.bundle.wrong_not_referred, verdict.personal.wrong_not_referred) == (0, 20)
    assert (verdict.bundle.referred, verdict.personal.referred) == (40, 0)
    wild = judge(graph, bundle, values(3e38) | {"prior": np.full(3, 3e38, np.float32)}, (True, True, True), held)
    found = wild.personal
    assert (found.balanced_accuracy, found.referred, found.wrong_not_referred, wild.passed) == (0, 40, 0, False)


def reds(each=45):
    """Pictures of melanomas, black, and of moles, red."""
    images = np.zeros((2 * each, 24, 24, 3), np.uint8)
    images[each:, :, :, 0] = 255
    return PreparedRows(images, np.repeat([0, 1], each), ("",) * (2 * each))


def by_red(slope: float, edge: float) -> dict[str, np.ndarray]:
    """Values that call a picture a mole where its red is above `edge`, the surer the further from it."""
    weight = np.array([[-slope, 0, 0], [slope, 0, 0], [0, 0, 0]], np.float32)
    bias = np.array([slope * edge, -slope * edge, -50], np.float32)
    values = {"head.weight": weight, "head.bias": bias, "prior": np.full(3, 0.1, np.float32)}
    return values | {"temperature": np.asarray(1, np.float32)}


def described(make_bundle, info=KNOWN, **changes):
    """A bundle that tells moles from melanomas at half red, with class information of its classes."""
    names = ("MEL", "NV", "BCC")
    weights = {name.replace(".", "__"): value for name, value in by_red(40, 0.25).items()}
    return make_bundle(info=None if info is None else {name: info[name] for name in names}, **weights, **changes)


def test_values_that_refer_88_of_90_are_refused(make_bundle):
    """Every class is recognised and none is wrong without a referral, yet only two moles of 45 get an answer."""
    bundle, held = described(make_bundle, suspicion=suspicion(0.3)), reds()
    held.images[-2:, :, :, 1] = 255  # two moles that even these values are sure of, by their green
    weight = np.array([[0, -9, 0], [2, 9, 0], [0, 0, 0]], np.float32)  # red alone: a mole, melanoma above 0.3
    timid = by_red(0, 0) | {"head.weight": weight, "head.bias": np.array([8, 7, -50], np.float32)}
    verdict = judge(load_graph(bundle.score_onnx, 1), bundle, timid, (True, True, False), held)
    assert (verdict.held, verdict.personal.referred, verdict.bundle.referred) == (90, 88, 45)
    assert verdict.personal.wrong_not_referred == verdict.bundle.wrong_not_referred == 0
    assert verdict.personal.balanced_accuracy == verdict.bundle.balanced_accuracy == 1.0
    assert verdict.refused_for == ("referrals",)


def test_the_values_in_use_answer_the_same_pictures(make_bundle):
    """They choose among the classes that both know, and name their own in a score; a bundle of chance hides nothing."""
    nothing = by_red(0, 0) | {"head.bias": np.array([20, 20, -50], np.float32)}
    bundle = make_bundle(**{name.replace(".", "__"): value for name, value in nothing.items()})
    held, graph = reds(), load_graph(bundle.score_onnx, 1)
    in_use = PersonalState(
        bundle_sha256=bundle.sha256, weights=by_red(40, 0.25), seen=(True, True, False), verdict=None, images=9, round=1
    )
    told = []
    found = judge(graph, bundle, nothing, (True, True, False), held, told.append, in_use=in_use)
    assert (found.bundle.balanced_accuracy, found.before.balanced_accuracy, found.chance) == (0.5, 1.0, 0.5)
    assert found.refused_for == ("before",) and found.no_worse_than_bundle
    assert told == sorted(told) and told[-1] == 3 * len(held)
    better = judge(graph, bundle, by_red(40, 0.25), (True, True, True), held, in_use=in_use)
    assert better.passed and better.personal == better.before


def missing_two(make_bundle, info=KNOWN):
    """Ten moles less referred, and two melanomas that were referred are called moles."""
    bundle, held = described(make_bundle, info), reds()
    held.images[43:55, :, :, 0] = 40  # 0.16: below the edge of the bundle, above that of the others
    judged = judge(load_graph(bundle.score_onnx, 1), bundle, by_red(80, 0.06), (True, True, True), held)
    assert (judged.bundle.balanced_accuracy, judged.personal.balanced_accuracy) == (
        pytest.approx((1 + 35 / 45) / 2),
        pytest.approx((43 / 45 + 1) / 2),
    )
    return judged


def test_two_more_melanomas_missed_are_refused_at_better_figures(make_bundle):
    """The values are better by every figure, and two melanomas cross the line to a benign answer."""
    judged = missing_two(make_bundle)
    assert (judged.bundle.missed, judged.personal.missed) == (0, 2)
    assert judged.refused_for == ("missed",)


def test_where_nothing_is_known_to_be_benign_every_wrong_answer_is_missed(make_bundle):
    """Ten moles wrongly called melanomas without a referral weigh as two melanomas called moles."""
    judged = missing_two(make_bundle, info=None)
    assert (judged.bundle.missed, judged.personal.missed) == (10, 2) and judged.passed


def test_a_mole_called_melanoma_is_not_missed(make_bundle):
    """A wrong answer about a benign class costs accuracy; nobody overlooks a cancer for it."""
    benign = dict.fromkeys(("MEL", "NV", "BCC"), KNOWN["NV"])
    judged = missing_two(make_bundle, info=benign)
    assert (judged.bundle.missed, judged.personal.missed) == (0, 0) and judged.passed


def test_a_table_of_benign_classes_alone_judges_nothing_that_could_be_missed(make_bundle):
    """Values learned from moles and keratoses never name the melanoma that the bundle knows, and miss none of none."""
    held = PreparedRows(np.zeros((40, 24, 24, 3), np.uint8), np.repeat([1, 2], 20), ("",) * 40)
    info = {**KNOWN, "BCC": KNOWN["NV"]}
    bundle = described(make_bundle, info)
    graph = load_graph(bundle.score_onnx, 1)
    found = judge(graph, bundle, bundle.weights, (False, True, True), held)
    assert (found.personal.missed, found.bundle.missed) == (0, 0) and "no_suspicious" in found.refused_for
    assert "no_suspicious" not in judge(graph, bundle, bundle.weights, (True, True, False), reds()).refused_for


def suspicion(threshold):
    return Suspicion(
        threshold=threshold, sensitivity=0.95, specificity=0.5, suspicious=20, benign=20, statement="chosen by a test"
    )


@pytest.mark.parametrize("info", [None, dict.fromkeys(KNOWN, ClassInfo("It", "Nobody knows.", "unknown"))])
def test_where_every_picture_is_referred_the_other_rules_judge(make_bundle, info):
    """Without a class known to be benign `suspicious_class` always refers; it would make all values alike."""
    bundle, held = described(make_bundle, info, refer_above=0.5), reds()
    graph = load_graph(bundle.score_onnx, 1)
    same = judge(graph, bundle, bundle.weights, (True, True, True), held)
    assert same.passed and not same.class_rule and same.bundle.referred == 0
    unsure = judge(graph, bundle, by_red(0.1, 0.25), (True, True, True), held)
    assert unsure.personal.referred == 90 and "referrals" in unsure.refused_for
    known = described(make_bundle)
    assert judge(graph, known, known.weights, (True, True, True), held).class_rule


def test_a_threshold_of_the_suspicious_classes_counts(make_bundle):
    """A mole is predicted, and its probability of melanoma is above the threshold that the card states."""
    held, values = reds(), by_red(4, 0.25)
    referred = {}
    for threshold in (None, 0.01):
        bundle = described(make_bundle, suspicion=suspicion(threshold))
        graph = load_graph(bundle.score_onnx, 1)
        referred[threshold] = judge(graph, bundle, values, (True, True, True), held).personal.referred
    assert referred == {None: 45, 0.01: 90}


def test_dissonance_and_the_gate_before_the_model_count(make_bundle):
    """All referral rules: conflicting evidence above the card's threshold; what is referred before the model."""
    held = reds()
    torn = by_red(0, 0)
    # Much evidence for two classes: called moles, and MEL stays below a third.
    torn["head.bias"] = np.array([20, 51, -50], np.float32)
    plain, strict = (
        described(make_bundle, metrics=given, suspicion=suspicion(1.0))
        for given in ({}, {"refer_dissonance_above": 0.5})
    )
    graph = load_graph(plain.score_onnx, 1)
    assert judge(graph, plain, torn, (True, True, True), held).personal.referred == 0
    assert judge(graph, strict, torn, (True, True, True), held).personal.referred == 90
    blurred = PreparedRows(held.images, held.labels, held.groups, frozenset(range(45, 55)))
    found = judge(graph, plain, plain.weights, (True, True, True), blurred)
    assert (found.personal.referred, found.bundle.referred) == (55, 55)
