"""FedEvPrompt's round on the device (docs/methods.md 1; docs/design.md 9): what each step is given, and the reply.

A step is replaced by one that records; what it must be given is written down here a second time, in plain numpy.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import numpy as np
import onnx
import pytest

from edgefl_client.learning import fedevprompt
from edgefl_client.learning.fedevprompt import FedEvPromptLearner
from edgefl_client.learning.own_pictures import Dealt
from edgefl_client.learning.picture_rows import PreparedRows
from edgefl_client.learning.round_learner import Circumstances, PointFile
from edgefl_client.learning.session import TrainingSession
from edgefl_client.scoring.learning_verdict import LearningVerdict
from edgefl_client.scoring.personal import PersonalState
from edgefl_protocol import Payload, digest
from edgefl_protocol.bundle import Bundle
from edgefl_protocol.pictures.imaging import Colour
from edgefl_protocol.pictures.light import Light
from edgefl_protocol.rules.maps import SentMaps

SITE, SEED, BATCH, ROUND = "ward-3", 3, 4, 2
LABELS = np.array([0, 1, 0, 0, 0, 1, 0, 0, 1, 0, 0])  # eight and three: batches of four, four and three
PRIOR = 3 * np.array([3, 8, 11]) / 22  # docs/methods.md 1.3: K times the share of all others, over the sum of these
UNFIT, M = frozenset({0, 10}), 2  # whose maps would leave otherwise
RNG = np.random.default_rng(8)
MAPS = {  # of two peers: the first has both classes, the second one; nobody has the third
    name: RNG.random((count, 36)).astype(np.float16)
    for name, count in {"maps.0.0": 2, "maps.0.1": 1, "maps.1.0": 3}.items()
}
START = {"head.weight": (8 * np.eye(3)).astype(np.float32), "head.bias": np.array([-3, -3.5, -4], np.float32)}
START |= {
    f"optimizer.{moment}.{name}": RNG.random(START[name].shape).astype(np.float32)
    for name in tuple(START)
    for moment in ("exp_avg", "exp_avg_sq")
}
BEGUN = {**START, "optimizer.step": np.asarray(6, np.int64)}  # after a first round of six steps


def pictures(labels: np.ndarray) -> PreparedRows:
    """Noise, red where the class is 0 and green where it is 1, each of another brightness."""
    rng = np.random.default_rng(4)
    images = rng.integers(0, 60, (len(labels), 24, 24, 3))
    images[np.arange(len(labels)), :, :, labels] += np.linspace(60, 190, len(labels)).astype(int)[:, None, None]
    groups = tuple(f"{index:064x}" for index in range(len(labels)))
    return PreparedRows(images.astype(np.uint8), labels.astype(np.int64), groups, UNFIT)


@dataclass
class Recorder:
    """Takes the place of a step: adds one to bias, moments and count, and `change` (K, D) to the head's weight."""

    change: np.ndarray
    steps: list[tuple[dict[str, Any], dict[str, Any]]]

    def step(
        self, session: TrainingSession, state: Mapping[str, Any], given: Mapping[str, Any]
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        self.steps.append((dict(state), {**session._fixed, **given}))
        new = {name: value + value.dtype.type(1) for name, value in state.items()}
        new["head.weight"] = state["head.weight"] + self.change
        return new, dict.fromkeys(("loss", "kd", "dead"), np.float32(0.25))


@dataclass
class Round:
    """What one round was given and gave."""

    steps: list[tuple[dict[str, Any], dict[str, Any]]]
    state: Mapping[str, Any]
    reply: Payload
    judged: PersonalState


BRIGHT_IS_LESS, WRONG = np.full((3, 3), -1, np.float32), (-4 * np.eye(3)).astype(np.float32)


def a_round(
    school: SimpleNamespace,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    change: np.ndarray = BRIGHT_IS_LESS,
    sent_maps: SentMaps = "each",
    learn: PreparedRows | None = None,
    colour: Colour = "none",
    in_use: PersonalState | None = None,
    fitted: Callable[[Bundle], Bundle] = lambda bundle: bundle,
    **plan: Any,
) -> Round:
    """Round 2 of two epochs, from `BEGUN`."""
    weights: dict[str, Any] = {"refer_above": None}
    bundle = fitted(school.learning_bundle(weights=weights, epochs_before=1, batch=BATCH, seed=SEED, **plan))
    bundle = replace(bundle, preprocess=replace(bundle.preprocess, colour=colour))
    recorder, judged = Recorder(change, []), list[PersonalState]()
    monkeypatch.setattr(TrainingSession, "step", lambda session, *given: recorder.step(session, *given))
    around = Circumstances(
        points=PointFile(folder / "point.payload"),
        site=SITE,
        maps_per_class=M,
        sent_maps=sent_maps,
        judged=judged.append,
        in_use=in_use,
    )
    rows = Dealt(learn=pictures(LABELS) if learn is None else learn, held=pictures(np.arange(42) % 2))
    learner = FedEvPromptLearner(bundle, rows, around)
    broadcast = Payload(MAPS, {"phase": "train", "round": ROUND, "rounds": 5})
    state, reply = learner.local_round(BEGUN, broadcast, lambda facts: None)
    return Round(recorder.steps, state, reply, judged[0])


def drawn(purpose: str, epoch: int) -> np.random.Generator:
    """docs/methods.md 1.6: SHA-256 of seed, site, purpose, round and epoch, joined by 0x1F, seeds PCG64."""
    text = f"{SEED}\x1f{SITE}\x1f{purpose}\x1f{ROUND}\x1f{epoch}"
    return np.random.Generator(np.random.PCG64(list(hashlib.sha256(text.encode()).digest())))


def turned(image: np.ndarray, symmetry: int) -> np.ndarray:
    """So many quarter turns counter-clockwise; from 4 on left and right are swapped afterwards."""
    view = np.rot90(image, symmetry % 4)
    return view[:, ::-1] if symmetry >= 4 else view


def expected_batches(balance: str, augment: str) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Pictures and labels of the six steps."""
    images = pictures(LABELS).images
    for epoch in (0, 1):
        chances = np.where(LABELS == 0, 1 / 16, 1 / 6)  # eight and three pictures: half the draws to each class
        rng, turns = drawn("order", epoch), drawn("augment", epoch)
        order = rng.permutation(11) if balance == "none" else rng.choice(11, size=11, p=chances)
        for chosen in (order[:4], order[4:8], order[8:]):
            views = images[chosen]
            if augment == "dihedral":
                symmetries = turns.integers(8, size=len(chosen))
                views = np.stack([turned(image, s) for image, s in zip(views, symmetries, strict=True)])
            yield views, LABELS[chosen]


@pytest.mark.parametrize(("balance", "augment"), [("none", "dihedral"), ("class", "dihedral"), ("class", "none")])
def test_every_step_is_given_the_pictures_drawn_for_it(
    school: SimpleNamespace,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    balance: str,
    augment: str,
) -> None:
    """docs/methods.md 1.6: order and symmetries are draws of seed, site, round and epoch."""
    found = a_round(school, tmp_path, monkeypatch, balance=balance, augment=augment)
    expected = list(expected_batches(balance, augment))
    assert len(found.steps) == len(expected) == 6
    for (_, given), (views, labels) in zip(found.steps, expected, strict=True):
        np.testing.assert_array_equal(given["target"], labels)
        np.testing.assert_array_equal(given["image"], views)
        assert given["image"].dtype == np.uint8 and given["target"].dtype == np.int64


@pytest.mark.parametrize(("clock", "epochs"), [("run", (0.3, 0.4)), ("round", (0.0, 0.1))])
def test_the_kl_term_is_let_in_epoch_by_epoch(
    school: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: str, epochs: tuple[float, float]
) -> None:
    """docs/methods.md 1.3: t / 10, where one epoch is behind the bundle and two behind this round."""
    found = a_round(school, tmp_path, monkeypatch, anneal_clock=clock)
    weights = [float(given["kl_weight"]) for _, given in found.steps]
    np.testing.assert_allclose(weights, [epochs[0]] * 3 + [epochs[1]] * 3, rtol=1e-6)


@pytest.mark.parametrize(("weight", "counts"), [("sum", [2, 1, 0]), ("mean5", [5, 5, 0])])
def test_every_step_is_given_the_others_maps(
    school: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, weight: str, counts: list[int]
) -> None:
    """docs/methods.md 1.5, eq. 7: the mean over two peers of each one's mean, however many maps each has."""
    found = a_round(school, tmp_path, monkeypatch, kd_peers=weight, kd_weight=0.125)
    first, second = (MAPS[name].astype(np.float64).mean(axis=0) for name in ("maps.0.0", "maps.1.0"))
    means = np.stack([(first + second) / 2, MAPS["maps.0.1"][0].astype(np.float64), np.zeros(36)])
    for _, given in found.steps:
        np.testing.assert_allclose(given["peers.means"], means, rtol=1e-6)
        assert given["peers.counts"].tolist() == counts and given["kd_weight"] == np.float32(0.125)


def test_a_step_goes_on_where_the_one_before_stopped(
    school: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """AdamW's moments and count outlive the round (docs/methods.md 1.6); prior and rates are this device's own."""
    found = a_round(school, tmp_path, monkeypatch)
    states = [state for state, _ in found.steps] + [found.state]
    for taken, state in enumerate(states):
        assert set(state) == set(BEGUN) and int(state["optimizer.step"]) == 6 + taken
        for name in BEGUN.keys() - {"optimizer.step", "head.weight"}:
            np.testing.assert_allclose(state[name], BEGUN[name] + taken, rtol=1e-6)
        np.testing.assert_array_equal(state["head.weight"], BEGUN["head.weight"] - taken)
    for _, given in found.steps:
        np.testing.assert_allclose(given["prior"], PRIOR, rtol=1e-6)
        assert (given["rate.head.weight"], given["rate.head.bias"]) == (np.float32(0.5), np.float32(0.1))


@pytest.mark.parametrize("passes", [True, False])
def test_the_most_certain_maps_leave(
    school: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, passes: bool
) -> None:
    """docs/methods.md 1.5: of each class the M maps of lowest vacuity K / sum(evidence + prior), as the learned values
    see it where they passed the gate, else as the bundle's do; none of a picture that the picture gate refers.
    """
    found = a_round(school, tmp_path, monkeypatch, BRIGHT_IS_LESS if passes else WRONG)
    assert found.judged.verdict.passed is passes
    rows = pictures(LABELS)
    colours = rows.images.astype(np.float64).mean(axis=(1, 2)) / 255

    def choice(weight: np.ndarray, bias: np.ndarray, prior: np.ndarray) -> dict[int, list[int]]:
        evidence = np.log1p(np.exp(colours @ weight.T + bias))
        vacuity = 3 / (evidence + prior).sum(axis=1)
        ranked = [row for row in np.argsort(vacuity).tolist() if row not in UNFIT]
        return {label: [row for row in ranked if LABELS[row] == label][:M] for label in (0, 1)}

    learned = choice(found.state["head.weight"], found.state["head.bias"], PRIOR)
    before = choice(START["head.weight"], START["head.bias"], np.array([0.5, 0.7, 1.8]))
    assert learned != before
    assert set(found.reply.arrays) == {"maps.0", "maps.1"}
    for label, chosen in (learned if passes else before).items():
        patches = rows.images[chosen].astype(np.float64).mean(axis=3).reshape(M, 6, 4, 6, 4).mean(axis=(2, 4))
        maps = patches.reshape(M, 36) / patches.max(axis=(1, 2))[:, None]
        sent = found.reply.arrays[f"maps.{label}"]
        assert sent.dtype == np.float16
        np.testing.assert_allclose(sent, maps, atol=1e-3)
    assert dict(found.reply.scalars) == {"site_sha256": digest(dict(found.state))}


def cold(bundle: Bundle) -> Bundle:
    """Of another temperature."""
    return replace(bundle, weights={**bundle.weights, "temperature": np.array(0.2, np.float32)})


def discounting(bundle: Bundle) -> Bundle:
    """One that takes the evidence of bright pictures away, as of features that are unusual: e / max(1, ‖A·f‖²)."""
    model, node = onnx.load_model_from_string(bundle.score_onnx), onnx.helper.make_node
    nodes = list(model.graph.node)
    [place] = [index for index, one in enumerate(nodes) if one.op_type == "Softplus"]
    nodes[place].output[0] = "whole"
    nodes[place + 1 : place + 1] = [
        node("Transpose", ["usual.whitening"], ["usual.t"], perm=[1, 0]),
        node("MatMul", ["features", "usual.t"], ["white"]),
        node("ReduceSumSquare", ["white", "last"], ["unusual"], keepdims=1),
        node("Max", ["unusual", "one"], ["divisor"]),
        node("Div", ["whole", "divisor"], ["evidence"]),
    ]
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    model.graph.input.append(onnx.helper.make_tensor_value_info("usual.whitening", onnx.TensorProto.FLOAT, [3, 3]))
    weights = {**bundle.weights, "usual.whitening": (1.5 * np.eye(3)).astype(np.float32)}
    return replace(bundle, score_onnx=model.SerializeToString(), weights=weights)


@pytest.mark.parametrize("fitted", [cold, discounting])
def test_what_was_fitted_after_learning_chooses_no_map(
    school: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fitted: Callable[[Bundle], Bundle]
) -> None:
    """docs/methods.md 1.5 and 1.8: temperature and discount are of a finished model, and a GPU site that chooses while
    it learns has neither. The same pictures would not be chosen with them."""
    for name in ("plain", "fitted", "shown"):
        (tmp_path / name).mkdir()
    plain = a_round(school, tmp_path / "plain", monkeypatch)
    found = a_round(school, tmp_path / "fitted", monkeypatch, fitted=fitted)
    assert found.judged.verdict.no_worse_than_bundle is plain.judged.verdict.no_worse_than_bundle is True
    assert found.reply.to_bytes() == plain.reply.to_bytes()
    monkeypatch.setattr(fedevprompt, "as_learned", dict)
    shown = a_round(school, tmp_path / "shown", monkeypatch, fitted=fitted)
    assert shown.reply.to_bytes() != plain.reply.to_bytes()


def test_what_is_in_use_decides_nothing_of_a_reply(
    school: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """docs/reference/device-learning.md: what is no worse than the bundle is shared, though better values score."""
    alone = a_round(school, tmp_path, monkeypatch)
    assert alone.judged.verdict.passed
    real = fedevprompt.judge

    def beside_better(*given: Any, in_use: PersonalState | None, **named: Any) -> LearningVerdict:
        verdict = real(*given, in_use=in_use, **named)
        assert in_use is alone.judged and verdict.before == verdict.personal
        return replace(verdict, before=replace(verdict.personal, balanced_accuracy=2.0))  # no values are so good

    monkeypatch.setattr(fedevprompt, "judge", beside_better)
    found = a_round(school, tmp_path, monkeypatch, in_use=alone.judged)
    assert found.judged.verdict.refused_for == ("before",) and not found.judged.passed
    assert found.reply.to_bytes() == alone.reply.to_bytes()


def test_the_mean_of_these_maps_leaves_where_the_federation_asks_for_it(
    school: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """docs/methods.md 1.5: one map a class, the mean of what would have been sent; what is learned stays the same."""
    for sent in get_args(SentMaps):
        (tmp_path / sent).mkdir()
    each, mean = (a_round(school, tmp_path / sent, monkeypatch, sent_maps=sent) for sent in ("each", "mean"))
    assert each.reply.arrays.keys() == mean.reply.arrays.keys() and each.reply.scalars == mean.reply.scalars
    for name, maps in each.reply.arrays.items():
        assert mean.reply.arrays[name].shape == (1, 36) and len(maps) == M
        np.testing.assert_allclose(mean.reply.arrays[name][0], maps.astype(np.float64).mean(axis=0), atol=2**-10)


@pytest.mark.parametrize(
    ("colour", "compared"),
    [
        ("none", {"brightness", "red_by_green", "blue_by_green", "corners"}),
        ("shades_of_grey_6", {"brightness", "corners"}),
    ],
)
def test_the_light_that_is_kept_is_what_the_model_compares(
    school: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, colour: Colour, compared: set[str]
) -> None:
    """docs/reference/picture-gate.md, light: a model that removes colour compares brightness and corners alone."""
    lights = tuple(Light(brightness=100.0 + n, red_by_green=1.0, blue_by_green=1.0, corners=0.9) for n in range(30))
    learn = replace(pictures(np.arange(30) % 2), lights=lights)
    light = a_round(school, tmp_path, monkeypatch, learn=learn, colour=colour).judged.light
    assert light is not None and set(light.to_json()) == compared
