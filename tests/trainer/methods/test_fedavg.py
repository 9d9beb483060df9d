"""FedAvg against its definition (McMahan et al. 2016) and against local training."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.trainer.methods.conftest import play

from edgefl_protocol import Payload
from edgefl_trainer.engine.settings import build
from edgefl_trainer.learning import steps
from edgefl_trainer.learning.evidential import EvidentialRecipe
from edgefl_trainer.methods import METHODS

PLAIN = {"batch": 4, "readout": "cls", "head_norm": "none", "lr_head": 2e-3}


def test_one_site_is_local_training(make_task, make_site):
    """FedAvg over a single site equals that site training alone with a fresh optimiser each round, bit for bit."""
    task = make_task(rounds=3)
    averaged, _ = play(build(METHODS["fedavg"], PLAIN), task, {"a": make_site(task)})
    _, alone = play(build(METHODS["local"], {**PLAIN, "optimizer_state": "reset"}), task, {"a": make_site(task)})
    for name in EvidentialRecipe().trained:
        np.testing.assert_array_equal(averaged.arrays[name], alone["a"].arrays[name])


def test_standardised_features_of_one_site_are_its_own(make_task, make_site):
    """The pooled feature statistics of a federation of one equal those the site computes for itself."""
    task = make_task()
    hyper = {**PLAIN, "head_norm": "standardise"}
    averaged, _ = play(build(METHODS["fedavg"], hyper), task, {"a": make_site(task)})
    _, alone = play(build(METHODS["local"], hyper), task, {"a": make_site(task)})
    for name in ("features.mean", "features.std"):
        np.testing.assert_array_equal(averaged.arrays[name], alone["a"].arrays[name])


def test_identical_sites_are_one_site(make_task, make_site):
    """Sites with the same images and the same draws leave the mean where one of them alone would put it."""
    task = make_task(rounds=2)
    method = build(METHODS["fedavg"], {**PLAIN, "augment": "none", "batch": 12})  # one batch: the order does not matter
    one, _ = play(method, task, {"a": make_site(task, "a")})
    same = make_site(task, "a")
    three, _ = play(method, task, {"a": same, "b": same, "c": same})
    for name in EvidentialRecipe().trained:
        np.testing.assert_array_equal(one.arrays[name], three.arrays[name])


@settings(deadline=None, max_examples=50)
@given(counts=st.lists(st.integers(1, 10_000), min_size=1, max_size=6), seed=st.integers(0, 2**32 - 1))
def test_weighted_mean_is_numpys(counts, seed):
    rng = np.random.default_rng(seed)
    values = rng.normal(size=(len(counts), 5)).astype(np.float32)
    replies = {f"s{i}": Payload({"w": v}, {"n_train": n}) for i, (v, n) in enumerate(zip(values, counts, strict=True))}
    found = steps.weighted_mean(replies, steps.sample_weights(replies))["w"]
    expected = np.average(values.astype(np.float64), axis=0, weights=counts)
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-7)
    assert found.dtype == np.float32


def test_large_sites_pull_harder_and_uniform_weights_do_not():
    replies = {
        "big": Payload({"w": np.ones(1)}, {"n_train": 30}),
        "small": Payload({"w": np.zeros(1)}, {"n_train": 10}),
    }
    assert steps.weighted_mean(replies, steps.sample_weights(replies))["w"] == 0.75
    assert steps.weighted_mean(replies, dict.fromkeys(replies, 1.0))["w"] == 0.5


@pytest.mark.parametrize("weighting", ["samples", "uniform"])
def test_the_server_applies_the_chosen_weights(weighting, make_task, make_site):
    task = make_task()
    method = build(METHODS["fedavg"], {**PLAIN, "weighting": weighting})
    state = method.start(task, ["a", "b"])
    arrays = {name: np.asarray(state.arrays[name]) for name in EvidentialRecipe().trained}
    shifted = {name: value + 4 for name, value in arrays.items()}
    replies = {"a": Payload(arrays, {"n_train": 30}), "b": Payload(shifted, {"n_train": 10})}
    moved = method.aggregate(state, method.phases(1)[1], replies).arrays["head.bias"] - arrays["head.bias"]
    np.testing.assert_allclose(moved, 1.0 if weighting == "samples" else 2.0, rtol=1e-6)
