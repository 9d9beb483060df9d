"""FedEvPrompt's promises: what travels, whose maps are used, which maps are sent (arXiv 2411.10071, section 3.2)."""

import dataclasses

import numpy as np
import pytest
import torch
from tests.trainer.methods.conftest import after, play

from edgefl_protocol import Payload
from edgefl_protocol.errors import MapsError
from edgefl_trainer.contract import Phase, State
from edgefl_trainer.engine.hyper_parameters import build
from edgefl_trainer.engine.models import predict
from edgefl_trainer.learning.evidential import EvidentialRecipe, site_prior
from edgefl_trainer.methods import METHODS

HYPER = {"batch": 4, "lr_head": 2e-3}


def buffer(**maps: np.ndarray) -> State:
    return State({f"maps.{k}.{site}": value for (site, k), value in maps.items()}, {})


def test_only_maps_travel_at_most_five_a_class(make_task, make_site, backbone):
    """Uploaded: at most M rollout maps for each class, float16, max-normalised; nothing else."""
    task = make_task()
    method, site = build(METHODS["fedevprompt"], HYPER), make_site(task, count=16)
    broadcast = Payload({}, {"phase": "train", "round": 1, "rounds": 1})
    _, reply = method.local_round(site, State(), broadcast)
    assert dict(reply.scalars) == {}
    assert set(reply.arrays) == {"maps.0", "maps.1"}
    for maps in reply.arrays.values():
        assert maps.shape == (5, backbone.spec.tokens)
        assert maps.dtype == np.float16
        np.testing.assert_array_equal(maps.max(axis=1), 1.0)
        assert (maps >= 0).all()


def test_the_sent_maps_are_those_of_lowest_vacuity(make_task, make_site):
    """For each class the M training images of lowest u, ties by row; recomputed here through the site's predictor."""
    task = make_task()
    method, site = build(METHODS["fedevprompt"], {**HYPER, "maps_per_class": 2}), make_site(task, count=12)
    state, reply = method.local_round(site, State(), Payload({}, {"phase": "train", "round": 1, "rounds": 1}))
    predictor = method.predictor(site, state, Payload({}, {}))
    tensors = {name: torch.from_numpy(np.array(value)) for name, value in predictor.tensors.items()}
    with torch.inference_mode():
        score = predictor.module(torch.from_numpy(site.train.images), tensors)
    vacuity, maps = score.vacuity.numpy(), score.map.numpy()
    for k in (0, 1):
        rows = sorted(np.flatnonzero(site.train.targets == k), key=lambda row: (vacuity[row], row))[:2]
        np.testing.assert_allclose(reply.arrays[f"maps.{k}"].astype(np.float32), maps[rows], atol=1e-3)


def test_a_site_never_receives_its_own_maps():
    method = build(METHODS["fedevprompt"], {})
    own, other = np.full((1, 9), 0.25, np.float16), np.full((2, 9), 0.5, np.float16)
    state = State({"maps.0.a": own, "maps.0.b": other, "maps.1.c": other}, {})
    sent = method.broadcast(state, Phase("train", 2), ["a", "b", "c", "new"])
    assert all((value == 0.5).all() for value in sent["a"].arrays.values())
    assert len(sent["a"].arrays) == 2
    assert sum((value == 0.25).any() for value in sent["b"].arrays.values()) == 1
    assert len(sent["new"].arrays) == 3


def test_a_new_reply_replaces_the_old_maps_of_its_site():
    method = build(METHODS["fedevprompt"], {})
    old, new = np.zeros((5, 9), np.float16), np.ones((3, 9), np.float16)
    state = State({"maps.0.a": old, "maps.1.a": old, "maps.0.b": old}, {"classes": 2})
    after_ = method.aggregate(state, Phase("train", 1), {"a": Payload({"maps.0": new}, {"site_sha256": "x"})})
    assert set(after_.arrays) == {"maps.0.a", "maps.0.b"}
    assert after_.arrays["maps.0.a"].shape == (3, 9)
    with pytest.raises(MapsError, match=r"maps\.2 names no class"):
        method.aggregate(state, Phase("train", 1), {"a": Payload({"maps.2": new}, {})})


def test_an_empty_buffer_or_zero_lambda_is_local_training(make_task, make_site):
    """Round 1 has no distillation term; with lambda = 0 no round has one, and every site equals `local`."""
    task = make_task(rounds=2)
    sites = {s: make_site(task, s, seed=i) for i, s in enumerate("ab")}
    _, alone = play(build(METHODS["local"], HYPER), task, sites)
    _, silent = play(build(METHODS["fedevprompt"], {**HYPER, "kd_weight": 0.0}), task, sites)
    _, distilled = play(build(METHODS["fedevprompt"], {**HYPER, "kd_weight": 1e-3}), task, sites)
    for name in EvidentialRecipe().trained:
        np.testing.assert_array_equal(alone["a"].arrays[name], silent["a"].arrays[name])
    assert not np.array_equal(alone["a"].arrays["prompts.t"], distilled["a"].arrays["prompts.t"])


def test_distillation_pulls_the_maps_towards_the_peers(make_task, make_site, backbone):
    """Minimising L_KD (eq. 7) brings a site's maps nearer to the buffer than the evidential loss alone leaves them."""
    task = make_task(rounds=1, epochs=8)
    site = make_site(task, count=16)
    target = np.zeros((1, backbone.spec.tokens), np.float16)
    target[0, 4] = 1.0  # a peer that looks at the centre only
    broadcast = Payload({"maps.0.0": target, "maps.0.1": target}, {"phase": "train", "round": 1, "rounds": 1})
    distance = {}
    for weight in (0.0, 1e-4):
        method = build(METHODS["fedevprompt"], {**HYPER, "kd_weight": weight, "lr_t": 5e-2, "lr_b": 5e-2})
        _, reply = method.local_round(site, State(), broadcast)
        maps = np.concatenate(list(reply.arrays.values())).astype(np.float64)
        distance[weight] = np.square(maps - target).sum(axis=1).mean()
    assert distance[1e-4] < 0.98 * distance[0.0], distance


def test_prompts_and_head_never_leave(make_task, make_site):
    task = make_task(rounds=2)
    method = build(METHODS["fedevprompt"], HYPER)
    server, _ = play(method, task, {"a": make_site(task, "a"), "b": make_site(task, "b", seed=5)})
    assert all(name.startswith("maps.") for name in server.arrays)
    for payload in method.broadcast(server, after(task), ["a", "b"]).values():
        assert all(name.startswith("maps.") for name in payload.arrays)


MSK = (215, 415, 0, 0, 189, 0, 0, 0)  # training rows of MEL, NV, BCC, AK, BKL, DF, VASC, SCC at MSK4
MSK_PRIOR = {0: 0.843, 1: 0.564, 4: 0.879}  # 8/7·(1 - N_k/819); every absent class 8/7


@pytest.mark.parametrize(("evidence", "named"), [(0.0, -1), (0.01, 4)])
def test_msk_counts_never_predict_an_absent_class(evidence, named, make_task, make_site):
    """docs/methods.md 1.3: without evidence the largest alpha is an absent class's prior, and it is never predicted.

    No evidence at all names nothing; the same little evidence for every class names BKL, the rarest that is there.
    """
    task = make_task(classes=("MEL", "NV", "BCC", "AK", "BKL", "DF", "VASC", "SCC"))
    site = make_site(task, count=sum(MSK), labels=np.repeat(np.arange(8), MSK).tolist())
    method = build(METHODS["fedevprompt"], {"evidence": "relu", "readout": "cls", "head_norm": "none"})
    made = method.predictor(site, State(), Payload({}, {}))
    prior = made.tensors["prior"]
    np.testing.assert_allclose(prior, [MSK_PRIOR.get(k, 8 / 7) for k in range(8)], atol=6e-4)
    head = {
        "head.weight": np.zeros_like(made.tensors["head.weight"]),
        "head.bias": np.full(8, evidence, np.float32),
    }
    scores = predict(dataclasses.replace(made, tensors={**made.tensors, **head}), site.train.images[::100])
    np.testing.assert_allclose(scores.evidence, evidence, atol=1e-6)
    alpha = scores.evidence + prior
    absent = [k for k in range(8) if MSK[k] == 0]
    assert np.isin(alpha.argmax(axis=1), absent).all()
    assert np.isin(scores.probabilities.argmax(axis=1), absent).all()
    assert scores.predicted.tolist() == [named] * 9


def test_balanced_draws_are_not_corrected_a_second_time(make_task, make_site):
    """W comes from what training shows: counts (9, 3) give (1/2, 3/2), drawn equally they give (1, 1)."""
    site = make_site(make_task(), count=12, labels=[0] * 9 + [1] * 3)
    np.testing.assert_allclose(site_prior(EvidentialRecipe(), site), [0.5, 1.5])
    np.testing.assert_allclose(site_prior(EvidentialRecipe(), dataclasses.replace(site, balance="class")), [1.0, 1.0])
