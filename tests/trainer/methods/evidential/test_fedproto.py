"""FedProto against numpy: pull, means on the server, nearest prototype (Tan et al., arXiv 2105.00243)."""

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.trainer.methods.conftest import Exchange, play, told

from edgefl_protocol import Payload
from edgefl_trainer.contract import Phase, State
from edgefl_trainer.engine.hyper_parameters import build
from edgefl_trainer.engine.models import predict
from edgefl_trainer.errors import SettingError, TrainingError
from edgefl_trainer.learning.evidential import EvidentialRecipe
from edgefl_trainer.learning.loss_terms import Step
from edgefl_trainer.methods import METHODS
from edgefl_trainer.methods.fedproto import ToPrototype

HYPER = {"batch": 4, "readout": "cls", "lr_head": 2e-3}
ROUND = Phase("train", 1)


def proto(**hyper: object):
    return build(METHODS["fedproto"], {**HYPER, **hyper})


def knows(classes: int, **arrays: np.ndarray) -> State:
    return State(arrays, {"standardise": 0, "classes": classes, "readout": "cls"})


def features_of(predictor, images: np.ndarray) -> np.ndarray:
    """What the head reads, through the network alone; standardised here."""
    tensors = {name: torch.from_numpy(np.array(value)) for name, value in predictor.tensors.items()}
    with torch.inference_mode():
        cls = predictor.module.output(torch.from_numpy(images), tensors, need_attention=False).cls.double().numpy()
    if "features.mean" not in predictor.tensors:
        return cls
    return (cls - predictor.tensors["features.mean"]) / np.maximum(predictor.tensors["features.std"], 1e-6)


@settings(max_examples=50)
@given(
    known=st.lists(st.booleans(), min_size=2, max_size=4),
    weight=st.floats(0.0, 100.0),
    seed=st.integers(0, 2**32 - 1),
)
def test_the_pull_is_the_mean_squared_difference(known, weight, seed):
    """docs/methods.md 4.3: lambda times the mean over batch and width; a class without prototype adds nothing."""
    rng = np.random.default_rng(seed)
    classes, width = len(known), 3
    prototypes, features = rng.normal(size=(classes, width)), rng.normal(size=(5, width))
    target = rng.integers(0, classes, 5)
    leaf = torch.from_numpy(features).requires_grad_()
    value = ToPrototype(weight, torch.from_numpy(prototypes), torch.tensor(known))(
        Step(leaf, torch.zeros(5, classes), None, torch.from_numpy(target), {})
    )
    value.backward()
    total, gradient = 0.0, np.zeros_like(features)
    for i, k in enumerate(target):
        if known[k]:
            total += np.square(features[i] - prototypes[k]).sum() / width / 5
            gradient[i] = 2 * (features[i] - prototypes[k]) / width / 5
    assert float(value.detach()) == pytest.approx(weight * total)
    np.testing.assert_allclose(leaf.grad.numpy(), weight * gradient, rtol=1e-9, atol=1e-12)


@settings(max_examples=50)
@given(
    counts=st.lists(st.lists(st.integers(0, 500), min_size=3, max_size=3), min_size=1, max_size=5),
    uniform=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_a_prototype_is_the_weighted_mean_of_the_sites_that_have_the_class(counts, uniform, seed):
    """proto_k = sum_c n_{c,k}/n_k proto_{c,k} by numpy; a class that nobody sent stays as it was."""
    rng = np.random.default_rng(seed)
    means = rng.normal(size=(len(counts), 3, 4)).astype(np.float32)
    old = np.full(4, 9.0, np.float32)
    replies = {
        f"s{c}": Payload(
            {f"prototypes.{k}": means[c, k] for k in range(3) if row[k]}, {f"n.{k}": row[k] for k in range(3) if row[k]}
        )
        for c, row in enumerate(counts)
    }
    method = proto(weighting="uniform" if uniform else "samples")
    found = method.aggregate(knows(3, **{"prototypes.0": old}), ROUND, replies).arrays
    weights = np.minimum(counts, 1) if uniform else np.array(counts)
    for k in range(3):
        if weights[:, k].sum():
            expected = np.average(means[:, k].astype(np.float64), axis=0, weights=weights[:, k])
            np.testing.assert_allclose(found[f"prototypes.{k}"], expected, rtol=1e-5, atol=1e-6)
            assert found[f"prototypes.{k}"].dtype == np.float32
        else:
            assert (k == 0) == (f"prototypes.{k}" in found)
    if not weights[:, 0].sum():
        np.testing.assert_array_equal(found["prototypes.0"], old)


def test_a_site_sends_one_mean_feature_and_a_count_for_each_of_its_classes(make_task, make_site):
    """Of the model after local training, without augmentation: recomputed through its predictor. Nothing else goes."""
    task = make_task(classes=("x", "y", "z"))
    sites = {"a": make_site(task, "a", labels=[0] * 7 + [2] * 5), "b": make_site(task, "b", seed=2)}
    method, seen = proto(), []
    server, states = play(method, task, sites, watch=seen.append)
    reply = seen[-1].replies["a"]
    assert set(reply.arrays) == {"prototypes.0", "prototypes.2"}
    assert dict(reply.scalars) == {"n.0": 7, "n.2": 5}
    predictor = method.predictor(sites["a"], states["a"], told(method, server, task, "a"))
    features = features_of(predictor, sites["a"].train.images)
    for k in (0, 2):
        expected = features[sites["a"].train.targets == k].mean(axis=0)
        np.testing.assert_allclose(reply.arrays[f"prototypes.{k}"], expected, rtol=1e-4, atol=1e-5)
        assert reply.arrays[f"prototypes.{k}"].shape == (task.backbone.width,)


def test_a_reply_is_as_large_as_its_prototypes(make_task, make_site):
    """K·D float32 numbers and at most a kilobyte of names around them: no prompt, no head, no map."""
    task = make_task()
    seen: list[Exchange] = []
    play(proto(), task, {"a": make_site(task, count=24)}, watch=seen.append)
    numbers = 2 * task.backbone.width * 4
    assert numbers <= len(seen[-1].replies["a"].to_bytes()) <= numbers + 1024


def test_prototypes_of_the_last_epoch_are_of_the_moving_weights(make_task, make_site):
    """`prototypes=during`, the authors' code: with one batch an epoch, the second of two epochs reads the features that
    one epoch left behind, which are those that `after` sends where there is one epoch."""
    sent = {}
    for prototypes, epochs in (("during", 2), ("after", 1), ("after", 2)):
        task = make_task(epochs=epochs)
        method = proto(prototypes=prototypes, batch=12, augment="none", head_norm="none", lr_t=0.05)
        seen: list[Exchange] = []
        play(method, task, {"a": make_site(task)}, watch=seen.append)
        sent[prototypes, epochs] = seen[-1].replies["a"]
    during, before, end = (sent[key] for key in (("during", 2), ("after", 1), ("after", 2)))
    assert dict(during.scalars) == dict(end.scalars)
    for name in ("prototypes.0", "prototypes.1"):
        np.testing.assert_allclose(during.arrays[name], before.arrays[name], atol=1e-5)
        assert np.abs(during.arrays[name] - end.arrays[name]).max() > 1e-3


def test_all_sites_read_features_on_one_scale(make_task, make_site):
    """Prototypes of different sites can be averaged: statistics and readout are the federation's, at every site."""
    task = make_task()
    sites = {s: make_site(task, s, seed=i, count=12 + 8 * i) for i, s in enumerate("ab")}
    method = proto(readout="auto", head_norm="standardise")
    server, states = play(method, task, sites)
    for state in states.values():
        np.testing.assert_array_equal(state.arrays["features.mean"], server.arrays["features.mean"])
        np.testing.assert_array_equal(state.arrays["features.std"], server.arrays["features.std"])
        assert state.values["readout"] == server.values["readout"]


def test_without_pull_a_site_alone_is_local_training(make_task, make_site):
    """lambda = 0: bit for bit what `local` learns; with lambda the second round differs, the first does not."""
    task = make_task(rounds=2)
    site = make_site(task)
    alone = play(build(METHODS["local"], HYPER), task, {"a": site})[1]["a"]
    free = play(proto(proto_weight=0.0), task, {"a": site})[1]["a"]
    drawn = play(proto(proto_weight=1.0), task, {"a": site})[1]["a"]
    for name in EvidentialRecipe().trained:
        np.testing.assert_array_equal(free.arrays[name], alone.arrays[name])
    assert not np.array_equal(drawn.arrays["prompts.t"], alone.arrays["prompts.t"])
    once = make_task(rounds=1)
    first = play(proto(proto_weight=1.0), once, {"a": make_site(once)})[1]["a"]
    assert first.digest() == play(proto(proto_weight=0.0), once, {"a": make_site(once)})[1]["a"].digest()


def test_features_come_nearer_to_the_prototypes(make_task, make_site):
    task = make_task(epochs=8)
    site = make_site(task, count=16)
    width = task.backbone.width
    target = np.random.default_rng(0).normal(size=(2, width)).astype(np.float32)
    arrays = {f"prototypes.{k}": target[k] for k in range(2)}
    broadcast = Payload(arrays, {"phase": "train", "round": 1, "rounds": 1, "readout": "cls"})
    distance = {}
    for weight in (0.0, 100.0):
        method = proto(proto_weight=weight, head_norm="none", lr_t=5e-2, lr_b=5e-2)
        state, _ = method.local_round(site, State(), broadcast)
        features = features_of(method.predictor(site, state, broadcast), site.train.images)
        distance[weight] = np.square(features - target[site.train.targets]).mean()
    assert distance[100.0] < 0.95 * distance[0.0], distance


@pytest.mark.parametrize("head_norm", ["none", "standardise"])
def test_nearest_is_the_class_of_the_nearest_prototype(head_norm, make_task, make_site):
    """predict=nearest by explicit distances: argmin_k ||f − p_k||², probabilities softmax(−||f − p_k||²/D)."""
    task = make_task(rounds=2, classes=("x", "y", "z"))
    sites = {s: make_site(task, s, seed=i) for i, s in enumerate("ab")}
    method = proto(predict="nearest", head_norm=head_norm)
    server, states = play(method, task, sites)
    found = method.predictor(sites["a"], states["a"], told(method, server, task, "a"))
    assert set(found.tensors) == set(found.module.options.tensors)
    images = sites["a"].tune.images
    prototypes = np.stack([server.arrays[f"prototypes.{k}"] for k in range(3)]).astype(np.float64)
    distance = np.square(features_of(found, images)[:, None] - prototypes).sum(axis=2)
    scores = predict(found, images)
    np.testing.assert_array_equal(scores.predicted, distance.argmin(axis=1))
    powers = np.exp(-(distance - distance.min(axis=1, keepdims=True)) / prototypes.shape[1])
    np.testing.assert_allclose(scores.probabilities, powers / powers.sum(axis=1, keepdims=True), atol=1e-4)
    head = build(METHODS["fedproto"], {**HYPER, "head_norm": head_norm}).predictor(
        sites["a"], states["a"], told(method, server, task, "a")
    )
    np.testing.assert_array_equal(head.tensors["head.weight"], states["a"].arrays["head.weight"])


def test_a_class_without_prototype_is_never_nearest(make_task, make_site):
    """docs/methods.md 4.3: a missing class is infinitely far, whatever the features and the temperature."""
    task = make_task(classes=("x", "y", "z"))
    method, site = proto(predict="nearest", head_norm="none"), make_site(task)
    width = task.backbone.width
    sent = {"prototypes.0": np.full(width, 50.0, np.float32), "prototypes.1": np.full(width, -50.0, np.float32)}
    broadcast = Payload(sent, {"phase": "final", "round": 2, "rounds": 1, "readout": "cls"})
    found = method.predictor(site, State(), broadcast)
    for temperature in (0.1, 1.0, 10.0):
        tensors = {**found.tensors, "temperature": np.float32(temperature)}
        scores = predict(dataclasses.replace(found, tensors=tensors), site.train.images)
        np.testing.assert_array_equal(scores.probabilities[:, 2], 0.0)
        assert set(scores.predicted) <= {0, 1}
        assert np.isfinite(scores.probabilities).all()


@pytest.mark.parametrize(
    ("arrays", "scalars", "said"),
    [
        ({"prototypes.2": np.ones(4, np.float32)}, {"n.2": 1}, "prototypes.2 belongs to no class"),
        ({"prototypes.-1": np.ones(4, np.float32)}, {"n.-1": 1}, "prototypes.-1 belongs to no class"),
        ({"prototypes.01": np.ones(4, np.float32)}, {"n.01": 1}, "prototypes.01 belongs to no class"),
        ({"prototypes.1": np.ones(4, np.float32)}, {}, "n.1 = None"),
        ({"prototypes.1": np.ones(4, np.float32)}, {"n.1": -3}, "n.1 = -3"),
        ({"prototypes.1": np.ones(4, np.float32)}, {"n.1": "many"}, "n.1 = 'many'"),
    ],
)
def test_a_reply_of_no_class_or_no_count_is_refused(arrays, scalars, said):
    with pytest.raises(TrainingError, match=said.replace(".", r"\.")):
        proto().aggregate(knows(2), ROUND, {"a": Payload(arrays, scalars)})


def test_lambda_has_a_range():
    with pytest.raises(SettingError, match="allowed: 0 to 1000"):
        proto(proto_weight=-1.0)


def test_a_mean_of_no_image_says_nothing():
    sent = {"prototypes.0": np.ones(4, np.float32), "prototypes.1": np.ones(4, np.float32)}
    after = proto().aggregate(knows(2), ROUND, {"a": Payload(sent, {"n.0": 0, "n.1": 2})})
    assert set(after.arrays) == {"prototypes.1"}
