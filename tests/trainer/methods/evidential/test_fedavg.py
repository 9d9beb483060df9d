"""FedAvg against its definition (McMahan et al. 2016) and against local training."""

from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.trainer.methods.conftest import play, told

from edgefl_protocol import Payload
from edgefl_protocol.errors import MapsError
from edgefl_trainer.contract import Phase
from edgefl_trainer.engine.hyper_parameters import build
from edgefl_trainer.errors import SettingError, TrainingError
from edgefl_trainer.learning import evidential
from edgefl_trainer.learning.averaging import sample_weights, weighted_mean
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


@settings(max_examples=50)
@given(counts=st.lists(st.integers(1, 10_000), min_size=1, max_size=6), seed=st.integers(0, 2**32 - 1))
def test_weighted_mean_is_numpys(counts, seed):
    rng = np.random.default_rng(seed)
    values = rng.normal(size=(len(counts), 5)).astype(np.float32)
    replies = {f"s{i}": Payload({"w": v}, {"n_train": n}) for i, (v, n) in enumerate(zip(values, counts, strict=True))}
    found = weighted_mean(replies, sample_weights(replies))["w"]
    expected = np.average(values.astype(np.float64), axis=0, weights=counts)
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-7)
    assert found.dtype == np.float32


@pytest.mark.parametrize("order", list(permutations("abc")))
def test_replies_are_added_in_the_order_of_their_names(order):
    """docs/design.md 4, same seed, same digest: (1e16 + 1) − 1e16 is 0 where numbers round, and 1 in another order."""
    values = {"a": 1e16, "b": 1.0, "c": -1e16}
    replies = {name: Payload({"w": np.array([values[name]])}, {}) for name in order}
    assert weighted_mean(replies, dict.fromkeys(replies, 1.0))["w"] == 0


def test_large_sites_pull_harder_and_uniform_weights_do_not():
    replies = {
        "big": Payload({"w": np.ones(1)}, {"n_train": 30}),
        "small": Payload({"w": np.zeros(1)}, {"n_train": 10}),
    }
    assert weighted_mean(replies, sample_weights(replies))["w"] == 0.75
    assert weighted_mean(replies, dict.fromkeys(replies, 1.0))["w"] == 0.5


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


# what is shared: docs/methods.md 4.1, rows of FedEvPrompt's Table 2


def federation(make_task, make_site, rounds: int = 2):
    task = make_task(rounds=rounds)
    return task, {s: make_site(task, s, seed=i, count=12 + 8 * i) for i, s in enumerate("ab")}


def avg(**hyper: object):
    return build(METHODS["fedavg"], {**PLAIN, **hyper})


@pytest.mark.parametrize(
    ("share", "sent", "private"),
    [
        ("b", {"prompts.b"}, {"prompts.t", "head.weight", "head.bias"}),
        ("bt", {"prompts.b", "prompts.t", "head.weight", "head.bias"}, set()),
        ("g", {"prompts.g", "head.weight", "head.bias"}, set()),
    ],
)
def test_what_is_shared_travels_and_the_rest_stays_and_persists(
    share, sent, private, make_task, make_site, monkeypatch
):
    """A round starts from the broadcast for what is shared, from where the site stopped for the rest."""
    starts = []
    plain = evidential.trainable

    def spy(recipe, arrays, device):
        starts.append({name: np.array(value) for name, value in arrays.items()})
        return plain(recipe, arrays, device)

    monkeypatch.setattr(evidential, "trainable", spy)
    task, sites = federation(make_task, make_site)
    method, seen = avg(share=share), []
    server, states = play(method, task, sites, watch=seen.append)
    rounds = [exchange for exchange in seen if exchange.phase.kind == "train"]
    assert all(set(reply.arrays) == sent for exchange in rounds for reply in exchange.replies.values())
    assert all(set(b.arrays) == sent for exchange in rounds for b in exchange.broadcasts.values())
    one_round = make_task(rounds=1)
    _, after_one = play(method, one_round, sites)
    for index, name in enumerate("ab"):
        second = starts[2 + index]  # a and b in round 1, then in round 2
        for tensor in sent:
            np.testing.assert_array_equal(second[tensor], rounds[1].broadcasts[name].arrays[tensor])
        for tensor in private:
            np.testing.assert_array_equal(second[tensor], after_one[name].arrays[tensor])
            assert not np.array_equal(states["a"].arrays[tensor], states["b"].arrays[tensor])
        found = method.predictor(sites[name], states[name], told(method, server, task, name))
        for tensor in sent:
            np.testing.assert_array_equal(found.tensors[tensor], server.arrays[tensor])
        for tensor in private:
            np.testing.assert_array_equal(found.tensors[tensor], states[name].arrays[tensor])


def test_a_private_head_reads_what_its_site_finds(make_task, make_site):
    """docs/methods.md 1.6: with share=b the head is private, so readout and statistics are the site's; nothing is warm.

    A site alone is then `local` with a fresh optimiser each round, bit for bit.
    """
    task, sites = federation(make_task, make_site)
    hyper = {"head_norm": "standardise", "readout": "auto"}
    method = avg(share="b", **hyper)
    assert [phase.kind for phase in method.phases(2)] == ["train", "train"]
    alone = build(METHODS["local"], {**PLAIN, **hyper, "optimizer_state": "reset"})
    _, states = play(method, task, sites)
    _, apart = play(alone, task, sites)
    for name in sites:
        assert states[name].values["readout"] == apart[name].values["readout"]
        for tensor in ("features.mean", "features.std"):
            np.testing.assert_array_equal(states[name].arrays[tensor], apart[name].arrays[tensor])
    assert not np.array_equal(states["a"].arrays["features.mean"], states["b"].arrays["features.mean"])
    _, only = play(method, task, {"a": sites["a"]})
    assert only["a"].digest() == apart["a"].digest()


def test_one_prompt_set_is_averaged_and_learns_at_the_slow_rate(make_task, make_site, backbone):
    """share=g: a single tensor over all blocks, moved by lr_b in AdamW's first step."""
    rates = {"lr_b": 1e-3, "lr_t": 2e-3, "lr_head": 4e-3}
    method = avg(share="g", **rates, batch=12, weight_decay=0.0)
    task = make_task()
    server, _ = play(method, task, {"a": make_site(task, count=12)})
    begun = method.start(task, ["a"])
    assert set(begun.arrays) == {"prompts.g", "head.weight", "head.bias"}
    assert begun.arrays["prompts.g"].shape[0] == backbone.spec.depth
    moved = np.abs(server.arrays["prompts.g"] - begun.arrays["prompts.g"]).max(axis=(1, 2, 3, 4))
    np.testing.assert_allclose(moved, 1e-3, rtol=1e-3)


def test_one_prompt_set_is_asked_for_by_what_is_shared():
    with pytest.raises(SettingError, match="--set share=g"):
        avg(prompts="g")
    assert avg(prompts="g", share="g") == avg(share="g")


@pytest.mark.parametrize("share", ["b", "bt", "g"])
def test_with_an_empty_buffer_distillation_is_off(share, make_task, make_site):
    """Round 1 has no maps, and lambda = 0 never uses them: the averaged tensors equal kd=off bit for bit."""
    task, sites = federation(make_task, make_site)
    once = make_task(rounds=1)
    for short, weight, equal in ((once, 1e-3, True), (task, 0.0, True), (task, 1e-3, False)):
        off, _ = play(avg(share=share), short, sites)
        on, _ = play(avg(share=share, kd=True, kd_weight=weight), short, sites)
        same = [np.array_equal(on.arrays[name], off.arrays[name]) for name in avg(share=share).shared(task)]
        assert all(same) if equal else not same[0]  # prompts: the term has no gradient in the head


def test_maps_travel_beside_the_weights_and_only_those_of_others_come_back(make_task, make_site):
    """kd=on: a reply holds weights and at most M maps a class; a broadcast the mean weights and the others' maps."""
    task = make_task(rounds=3)
    sites = {s: make_site(task, s, seed=i, labels=[i % 2] * 12) for i, s in enumerate("abc")}  # one class each
    method, seen = avg(kd=True, maps_per_class=2), []
    server, _ = play(method, task, sites, absent={2: "c"}, watch=seen.append)
    rounds = [exchange for exchange in seen if exchange.phase.kind == "train"]
    weights = set(method.shared(task))
    own = {"a": {"maps.0"}, "b": {"maps.1"}, "c": {"maps.0"}}
    for exchange in rounds:
        for name, reply in exchange.replies.items():
            assert set(reply.arrays) == weights | own[name]
            [maps] = own[name]
            assert reply.arrays[maps].shape == (2, task.backbone.tokens)
    assert all(set(b.arrays) == weights for b in rounds[0].broadcasts.values())
    last = rounds[2].broadcasts  # a and b replied in rounds 1 and 2, c in round 1 only: its maps stay
    latest = {"a": rounds[1].replies["a"], "b": rounds[1].replies["b"], "c": rounds[0].replies["c"]}
    for name, broadcast in last.items():
        found = sorted(value.tobytes() for key, value in broadcast.arrays.items() if key.startswith("maps."))
        others = [reply.arrays[key] for s, reply in latest.items() if s != name for key in own[s]]
        assert found == sorted(value.tobytes() for value in others)
    assert {key for key in server.arrays if key.startswith("maps.")} == {"maps.0.a", "maps.1.b", "maps.0.c"}
    for key in weights:  # the mean runs over weights, untouched by what lies beside them
        expected = np.average([rounds[2].replies[s].arrays[key] for s in "abc"], axis=0, weights=[12, 12, 12])
        np.testing.assert_allclose(server.arrays[key], expected, rtol=1e-5, atol=1e-7)


def test_maps_are_taken_only_where_they_are_asked_for(make_task):
    """kd=off: a reply that brings maps leaves none at the server. kd=on: maps of no class are refused."""
    task = make_task()
    for kd, k, refused in ((False, 0, False), (True, 0, False), (True, 2, True)):
        method = avg(kd=kd)
        state = method.start(task, ["a"])
        maps = np.zeros((1, task.backbone.tokens), np.float16)
        reply = Payload({**state.arrays, f"maps.{k}": maps}, {"n_train": 3})
        if refused:
            with pytest.raises(MapsError, match=r"maps\.2 names no class"):
                method.aggregate(state, Phase("train", 1), {"a": reply})
            continue
        after = method.aggregate(state, Phase("train", 1), {"a": reply})
        assert ("maps.0.a" in after.arrays) == kd


@pytest.mark.parametrize(("counts", "said"), [((-1, 5), "n_train = -1"), ((0, 0), "has a training image")])
def test_a_mean_needs_honest_counts(counts, said, make_task):
    task = make_task()
    method = avg()
    state = method.start(task, ["a", "b"])
    replies = {name: Payload(state.arrays, {"n_train": n}) for name, n in zip("ab", counts, strict=True)}
    with pytest.raises(TrainingError, match=said):
        method.aggregate(state, Phase("train", 1), replies)
