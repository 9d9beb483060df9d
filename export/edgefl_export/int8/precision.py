"""Which layers an 8-bit graph keeps in float, and the gate it has to pass.

    (1) every layer is quantised alone, and the mean change of vacuity measured: its sensitivity
    (2) of the most sensitive layers, as few as it takes (0, 1, 2, 4, 8 …, at most a third, of convolutions half) stay
        in float, until the graph is within half of the gate on pictures that neither learned nor gave ranges; or a
        number that is given
    (3) on further pictures, the graph and the float graph name the same class for 99 % and differ in vacuity by 0.01 on
        average at most; else there is no bundle

The class is the one that a device names: the most probable of those that the site has seen, or none. How many pictures
the bundle refers with one graph and not with the other is told beside it, and decides nothing. For softmax methods,
which have no vacuity, the largest probability takes its place. Source: docs/design.md, section 7, export gates (int8);
docs/decisions/0026.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edgefl_export.errors import ExportError, GateError
from edgefl_export.int8.calibration import check_gate
from edgefl_export.int8.quantise import CONVOLUTION, LINEAR, Quantiser
from edgefl_export.parity.score_parity import Arrays, AskedWords, Pictures, graph_scores, open_session
from edgefl_protocol.pictures.referral import JudgedPicture, Measures, ReferralRules, entropy_nats, refer_reasons
from edgefl_protocol.sentences import counted
from edgefl_trainer.evaluate.metrics import predicted_classes

MIN_SAME_CLASS = 0.99
MAX_MEAN_CHANGE = 0.01
PROBES = 32  # images that a layer alone is measured on
MOST_KEPT = {LINEAR: 1 / 3, CONVOLUTION: 1 / 2}  # of the layers; of convolutions the first few hold few weights
BATCH = 8
_UNCERTAINTIES = ("vacuity", "dissonance")

Report = Callable[[str], None]
BothScores = tuple[Arrays, Arrays]


@dataclass(frozen=True)
class Agreement:
    """How alike two graphs score."""

    images: int  # on how many pictures
    same_class: float  # share of them for which a device names the same class
    change: float  # mean |Δvacuity|; of softmax methods, mean change of the largest probability
    map_change: float | None  # mean change of the max-normalised map over patches and pictures; None without maps
    # share of them that a device refers with one graph and not with the other; None where nobody told or of answers
    other_referral: float | None = None

    def within(self, share: float = 1.0) -> bool:
        """Return whether this lies within a share of the gate; never for a value that is not a number."""
        return 1 - self.same_class <= (1 - MIN_SAME_CLASS) * share + 1e-9 and self.change <= MAX_MEAN_CHANGE * share


@dataclass(frozen=True)
class FloatLayers:
    """Which layers stay in float, and why."""

    kept: tuple[str, ...]  # their names, the most sensitive first
    sensitivity: Mapping[str, float]  # layer → mean |Δvacuity| where it alone has 8 bits, in the order of the graph
    found: Agreement  # of the graph with this choice, on the pictures it was made with


def agreement(expected: Arrays, found: Arrays, seen: Sequence[bool] | None) -> Agreement:
    """Compare two graphs' scores of the same pictures.

    Args:
        expected: outputs of the float graph by name, n rows each.
        seen: per class, whether the site has training rows of it; None of answers, of which a device takes the most
            probable.

    Returns:
        The figures; a value that is not finite makes `change` infinite.
    """
    wanted, got = expected["probabilities"].astype(np.float64), found["probabilities"].astype(np.float64)
    if "vacuity" in expected:
        change = np.abs(expected["vacuity"].astype(np.float64) - found["vacuity"])
    else:
        change = np.abs(wanted.max(axis=1) - got.max(axis=1))
    maps = float(np.abs(expected["map"].astype(np.float64) - found["map"]).mean()) if "map" in expected else None
    finite = all(np.isfinite(found[name]).all() for name in expected)
    named = (True,) * wanted.shape[1] if seen is None else seen
    classes = (predicted_classes(one["probabilities"], one.get("vacuity"), named) for one in (expected, found))
    same = float(np.equal(*classes).mean())
    return Agreement(len(wanted), same, float(change.mean()) if finite else float("inf"), maps)


def other_referral(scores: BothScores, seen: Sequence[bool], rules: tuple[ReferralRules, ReferralRules]) -> float:
    """Return the share of pictures that a device refers with one graph and not with the other.

    Args:
        scores: of both graphs, of the same pictures.
        rules: of the bundle with the first graph, and with the second. What is found in the picture itself is the same.
    """
    first, second = (_referred(one, seen, by) for one, by in zip(scores, rules, strict=True))
    return float((first != second).mean())


def _referred(scores: Arrays, seen: Sequence[bool], rules: ReferralRules) -> NDArray[np.bool_]:
    """Tell which pictures a device refers for their scores, (n,)."""
    found = []
    for row, probabilities in enumerate(scores["probabilities"]):
        vacuity, dissonance = (float(scores[name][row]) if name in scores else None for name in _UNCERTAINTIES)
        measures = Measures(
            probabilities=probabilities,
            vacuity=vacuity,
            dissonance=dissonance,
            entropy_nats=entropy_nats(probabilities),
        )
        found.append(bool(refer_reasons(measures, seen, rules, picture=JudgedPicture(), expired=None)))
    return np.array(found, np.bool_)


def choose_layers(
    quantiser: Quantiser,
    graph: bytes,
    tensors: Arrays,
    pictures: Pictures,
    seen: Sequence[bool] | None,
    report: Report,
    count: int | None = None,
    questions: AskedWords | None = None,
) -> FloatLayers:
    """Measure every layer, and find how many have to stay in float: (1) and (2).

    Args:
        pictures: (n, S, S, 3), at least one; none of those that gave the ranges.
        seen: per class, whether a device may name it; None of answers.
        count: how many stay in float, in place of (2).
        questions: what is asked about each picture, of a model that answers questions.

    Returns:
        The choice; where even the most layers that may stay are not enough, these.

    Raises:
        ExportError: the graph has fewer layers than `count`.
    """
    expected = graph_scores(open_session(graph), tensors, pictures, BATCH, questions)
    few = None if questions is None else questions[:PROBES]
    names = [layer.name for layer in quantiser.layers]
    if count is not None and count > len(names):
        raise ExportError(f"--float-layers is {count}, but the graph has {len(names)} layers")
    probes = {name: value[:PROBES] for name, value in expected.items()}
    sensitivity = {}
    for index, name in enumerate(names):  # (1)
        alone = quantiser.build([other for other in names if other != name])
        found = graph_scores(open_session(alone), tensors, pictures[:PROBES], BATCH, few)
        sensitivity[name] = agreement(probes, found, seen).change
        report(f"layer {index + 1} of {len(names)}, {name}: {sensitivity[name]:.1e}")
    ranked = sorted(names, key=lambda name: -sensitivity[name])
    allowed = int(len(names) * MOST_KEPT[quantiser.operators])
    for most in _counts(allowed) if count is None else [count]:  # (2)
        kept = tuple(ranked[:most])
        made = open_session(quantiser.build(kept))
        judged = agreement(expected, graph_scores(made, tensors, pictures, BATCH, questions), seen)
        gets = "pictures get the same class" if questions is None else "questions get the same answer"
        report(
            f"{counted(len(kept), 'layer')} in float: {judged.same_class:.2%} of the {gets}, and "
            f"their uncertainty changes by {judged.change:.1e}"
        )
        if judged.within(0.5):
            break
    return FloatLayers(kept, sensitivity, judged)


def _counts(most: int) -> list[int]:
    """0, 1, 2, 4, 8 … and `most`."""
    return [0, *(2**power for power in range(most.bit_length()) if 2**power < most), *([most] if most else [])]


def check_agreement(
    made: bytes,
    graph: bytes,
    tensors: Arrays,
    pictures: Pictures,
    seen: Sequence[bool] | None,
    questions: AskedWords | None = None,
) -> tuple[Agreement, BothScores]:
    """Run the gate: (3).

    Args:
        pictures: (n, S, S, 3), at least 64 that had no part in making it.
        seen: per class, whether a device may name it; None of answers.

    Returns:
        The figures, and the scores they are of: of the float graph, and of the one with 8 bits.

    Raises:
        GateError: too few pictures, or a figure beyond the gate.
    """
    check_gate(pictures)
    scores = (
        graph_scores(open_session(graph), tensors, pictures, BATCH, questions),
        graph_scores(open_session(made), tensors, pictures, BATCH, questions),
    )
    found = agreement(*scores, seen)
    if not found.within():
        raise GateError(
            f"with 8 bits the model names the same class for {found.same_class:.2%} of {found.images} images and "
            f"its uncertainty changes by {found.change:.4f} on average; at least {MIN_SAME_CLASS:.0%} and at most "
            f"{MAX_MEAN_CHANGE} are allowed; no bundle is made: use --precision fp32"
        )
    return found, scores
