"""FedDistill against scipy and numpy: what is shared, the divergence, whose outputs are meant (arXiv 2011.02367)."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import rel_entr
from tests.trainer.methods.conftest import Exchange, play, told

from edgefl_protocol import Payload
from edgefl_trainer.contract import Phase, State
from edgefl_trainer.engine.hyper_parameters import build
from edgefl_trainer.engine.models import predict
from edgefl_trainer.errors import SettingError, TrainingError
from edgefl_trainer.learning.evidential import EvidentialRecipe
from edgefl_trainer.learning.loss_terms import Step
from edgefl_trainer.methods import METHODS
from edgefl_trainer.methods.feddistill import ToMeanOutput

HYPER = {"batch": 4, "readout": "cls", "lr_head": 2e-3}
ROUND = Phase("train", 2)


def distill(**hyper: object):
    return build(METHODS["feddistill"], {**HYPER, **hyper})


@pytest.mark.parametrize("loss", ["evidential", "ce"])
def test_what_is_shared_are_mean_outputs_and_distributions(loss, make_task, make_site):
    """docs/methods.md 4.4: for each class of the site the mean answer to its images, recomputed; each sums to 1."""
    task = make_task(rounds=2, classes=("x", "y", "z"))
    sites = {"a": make_site(task, "a", labels=[0] * 7 + [2] * 5), "b": make_site(task, "b", seed=2)}
    method, seen = distill(loss=loss), []
    server, states = play(method, task, sites, watch=seen.append)
    reply = seen[-1].replies["a"]
    assert set(reply.arrays) == {"outputs.0", "outputs.2"} and not reply.scalars
    predictor = method.predictor(sites["a"], states["a"], told(method, server, task, "a"))
    probabilities = predict(predictor, sites["a"].train.images).probabilities.astype(np.float64)
    for k in (0, 2):
        expected = probabilities[sites["a"].train.targets == k].mean(axis=0)
        np.testing.assert_allclose(reply.arrays[f"outputs.{k}"], expected, rtol=1e-5, atol=1e-6)
    for payload in (*seen[-1].replies.values(), *seen[-1].broadcasts.values(), told(method, server, task, "a")):
        for output in payload.arrays.values():
            assert output.shape == (3,) and (output >= 0).all()
            assert output.sum() == pytest.approx(1.0, abs=1e-6)


distributions = st.lists(st.floats(0.0, 1.0), min_size=3, max_size=3).filter(lambda row: sum(row) > 0.01)


@settings(max_examples=50)
@given(
    outputs=st.lists(distributions, min_size=3, max_size=3),
    answers=st.lists(distributions, min_size=4, max_size=4),
    known=st.lists(st.booleans(), min_size=3, max_size=3),
    target=st.lists(st.integers(0, 2), min_size=4, max_size=4),
    weight=st.floats(0.0, 10.0),
)
def test_the_pull_is_the_divergence_from_the_classs_output(outputs, answers, known, target, weight):
    """lambda·mean_b KL(p_y || p(x_b)) by scipy, in that direction; an unknown class adds nothing, nor a gradient."""
    p = np.array(outputs) / np.sum(outputs, axis=1, keepdims=True)
    q = np.array(answers) + 1e-3
    q /= q.sum(axis=1, keepdims=True)
    leaf = torch.from_numpy(q).requires_grad_()
    term = ToMeanOutput(weight, torch.from_numpy(p), torch.tensor(known))
    value = term(Step(torch.zeros(4, 1), leaf, None, torch.tensor(target), {}))
    value.backward()
    each = [rel_entr(p[k], row).sum() if known[k] else 0.0 for k, row in zip(target, q, strict=True)]
    assert float(value.detach()) == pytest.approx(weight * np.mean(each), abs=1e-9)
    gradient = np.stack([-p[k] / row * known[k] for k, row in zip(target, q, strict=True)]) / 4
    np.testing.assert_allclose(leaf.grad.numpy(), weight * gradient, rtol=1e-9, atol=1e-12)


def test_an_answer_of_zero_stays_finite():
    leaf = torch.tensor([[1.0, 0.0]], requires_grad=True)
    term = ToMeanOutput(1.0, torch.tensor([[0.5, 0.5], [0.0, 1.0]]), torch.tensor([True, True]))
    value = term(Step(torch.zeros(1, 1), leaf, None, torch.tensor([1]), {}))
    value.backward()
    assert torch.isfinite(value) and torch.isfinite(leaf.grad).all()


@settings(max_examples=50)
@given(holders=st.lists(st.integers(0, 7), min_size=1, max_size=5), seed=st.integers(0, 2**32 - 1))
def test_a_site_receives_the_mean_of_the_others_where_its_own_is_excluded(holders, seed):
    """(sum − own)/(count − 1) by numpy, each class on its own; without the switch the mean over all that have it."""
    rng = np.random.default_rng(seed)
    arrays = {  # site c has class k where bit k of its number is set
        f"outputs.{k}.s{c}": rng.dirichlet(np.ones(3)).astype(np.float32)
        for c, bits in enumerate(holders)
        for k in range(3)
        if bits >> k & 1
    }
    state = State(arrays, {"classes": 3})
    names = [*(f"s{c}" for c in range(len(holders))), "new"]
    every = distill().broadcast(state, ROUND, names)
    others = distill(exclude_own=True).broadcast(state, ROUND, names)
    for name in names:
        for k in range(3):
            held = {key: value.astype(np.float64) for key, value in arrays.items() if key.startswith(f"outputs.{k}.")}
            total, count = np.sum(list(held.values()), axis=0), len(held)
            for found, own in ((every, None), (others, held.get(f"outputs.{k}.{name}"))):
                rest = count - (own is not None)
                assert (f"outputs.{k}" in found[name].arrays) == (rest > 0)
                if rest:
                    expected = (total - (0 if own is None else own)) / rest
                    np.testing.assert_allclose(found[name].arrays[f"outputs.{k}"], expected, rtol=1e-5, atol=1e-6)


def test_a_reply_replaces_the_outputs_of_its_site_and_no_others():
    """The tracker starts afresh each round: a class that a site no longer sends is gone; who stays away keeps his."""
    one, two = np.array([0.9, 0.1], np.float32), np.array([0.2, 0.8], np.float32)
    state = State({"outputs.0.a": one, "outputs.1.a": one, "outputs.0.b.c": one}, {"classes": 2})
    after = distill().aggregate(state, ROUND, {"a": Payload({"outputs.1": two}, {})})
    assert set(after.arrays) == {"outputs.1.a", "outputs.0.b.c"}
    np.testing.assert_array_equal(after.arrays["outputs.1.a"], two)
    assert dict(after.values) == dict(state.values)


def test_the_first_round_and_no_weight_are_local_training(make_task, make_site):
    task = make_task(rounds=2)
    sites = {s: make_site(task, s, seed=i) for i, s in enumerate("ab")}
    _, alone = play(build(METHODS["local"], HYPER), task, sites)
    _, free = play(distill(distill_weight=0.0), task, sites)
    _, drawn = play(distill(), task, sites)
    for name in EvidentialRecipe().trained:
        np.testing.assert_array_equal(free["a"].arrays[name], alone["a"].arrays[name])
    assert not np.array_equal(drawn["a"].arrays["head.weight"], alone["a"].arrays["head.weight"])
    once = make_task(rounds=1)
    both = [play(distill(distill_weight=w), once, {"a": make_site(once)})[1]["a"].digest() for w in (0.0, 1.0)]
    assert both[0] == both[1]


def test_a_class_that_no_site_has_adds_no_term(make_task, make_site):
    """Only the receiver has images of class 0, and its own outputs are excluded: training is as if none were sent."""
    task = make_task()
    site = make_site(task, labels=[0] * 12)
    scalars = {"phase": "train", "round": 2, "rounds": 2}
    outputs = {"outputs.1": np.array([0.1, 0.9], np.float32)}
    silent, _ = distill().local_round(site, State(), Payload({}, scalars))
    told_other, _ = distill().local_round(site, State(), Payload(outputs, scalars))
    assert silent.digest() == told_other.digest()
    told_own, _ = distill().local_round(site, State(), Payload({"outputs.0": outputs["outputs.1"]}, scalars))
    assert told_own.digest() != silent.digest()


def test_answers_come_nearer_to_the_federations(make_task, make_site):
    task = make_task(epochs=6)
    site = make_site(task, count=16)
    target = np.array([[0.6, 0.4], [0.4, 0.6]], np.float32)
    sent = Payload({f"outputs.{k}": target[k] for k in (0, 1)}, {"phase": "train", "round": 1, "rounds": 1})
    distance = {}
    for weight in (0.0, 10.0):
        method = distill(distill_weight=weight, lr_head=2e-2)
        state, _ = method.local_round(site, State(), sent)
        answers = predict(method.predictor(site, state, sent), site.train.images).probabilities
        distance[weight] = rel_entr(target[site.train.targets], answers).sum(axis=1).mean()
    assert distance[10.0] < 0.5 * distance[0.0], distance


def test_a_reply_holds_k_times_k_numbers_at_most(make_task, make_site):
    task = make_task()
    seen: list[Exchange] = []
    play(distill(), task, {"a": make_site(task)}, watch=seen.append)
    assert len(seen[-1].replies["a"].to_bytes()) <= 2 * 2 * 4 + 1024


def test_an_output_of_no_class_is_refused():
    with pytest.raises(TrainingError, match=r"outputs\.7 belongs to no class"):
        distill().aggregate(State({}, {"classes": 2}), ROUND, {"a": Payload({"outputs.7": np.ones(2)}, {})})


def test_lambda_has_a_range():
    with pytest.raises(SettingError, match="allowed: 0 to 1000"):
        distill(distill_weight=1001.0)
