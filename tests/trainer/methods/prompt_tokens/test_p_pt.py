"""P-PT: prompts never leave their site, the head is one for all (docs/methods.md 5.7)."""

import numpy as np
from tests.trainer.methods.conftest import after, play

from edgefl_trainer.contract import State
from edgefl_trainer.engine.hyper_parameters import build
from edgefl_trainer.method_halves import stamped
from edgefl_trainer.methods import METHODS

HYPER = {"readout": "cls", "head_norm": "none", "batch": 4, "n": 2}


def test_prompts_never_leave(make_task, make_site):
    task = make_task(rounds=2)
    method = build(METHODS["p-pt"], HYPER)
    sites = {name: make_site(task, name, seed=seed) for seed, name in enumerate("ab")}
    server, states = method.start(task, ["a", "b"]), {name: State() for name in sites}
    for phase in method.phases(2):
        broadcasts = method.broadcast(server, phase, ["a", "b"])
        replies = {}
        for name, site in sites.items():
            assert set(broadcasts[name].arrays) == {"head.weight"}
            sent = stamped(broadcasts[name], phase, 2)
            states[name], replies[name] = method.local_round(site, states[name], sent)
            assert set(replies[name].arrays) == {"head.weight"}
        server = method.aggregate(server, phase, replies)
    assert set(server.arrays) == {"head.weight"}
    assert not np.array_equal(*(states[name].arrays["prompts.s"] for name in "ab"))


def test_a_round_goes_on_from_the_sites_prompts_and_the_averaged_head(make_task, make_site):
    """What is scored with is what the next round starts from: own prompts, the federation's head."""
    task = make_task(rounds=1)
    method = build(METHODS["p-pt"], HYPER)
    sites = {name: make_site(task, name, seed=seed) for seed, name in enumerate("ab")}
    server, states = play(method, task, sites)
    broadcast = stamped(method.broadcast(server, after(task), ["a"])["a"], after(task), 1)
    tensors = method.predictor(sites["a"], states["a"], broadcast).tensors
    np.testing.assert_array_equal(tensors["prompts.s"], states["a"].arrays["prompts.s"])
    np.testing.assert_array_equal(tensors["head.weight"], server.arrays["head.weight"])
    assert not np.array_equal(states["a"].arrays["head.weight"], server.arrays["head.weight"])


def test_with_a_local_head_nothing_that_learns_leaves(make_task, make_site):
    """docs/methods.md 5.7, `head=local`: each site goes on from its own prompts and its own head."""
    task = make_task(rounds=2)
    method = build(METHODS["p-pt"], {**HYPER, "head": "local"})
    sites = {name: make_site(task, name, seed=seed) for seed, name in enumerate("ab")}
    server, states = play(method, task, sites)
    assert not server.arrays and method.travels == ()
    alone, own = play(method, task, {"a": sites["a"]})
    assert own["a"].digest() == states["a"].digest()
    broadcast = stamped(method.broadcast(server, after(task), ["a"])["a"], after(task), 2)
    tensors = method.predictor(sites["a"], states["a"], broadcast).tensors
    for name in ("prompts.s", "head.weight"):
        np.testing.assert_array_equal(tensors[name], states["a"].arrays[name])
    first, _ = play(method, make_task(rounds=1), {"a": sites["a"]})
    assert first.digest() == alone.digest()  # the server holds nothing, ever


def test_a_newcomer_has_the_initial_prompts_and_the_averaged_head(make_task, make_site):
    task = make_task()
    method = build(METHODS["p-pt"], HYPER)
    server, _ = play(method, task, {"a": make_site(task, "a")})
    newcomer = make_site(task, "z", seed=9)
    broadcast = stamped(method.broadcast(server, after(task), ["z"])["z"], after(task), 1)
    tensors = method.predictor(newcomer, State(), broadcast).tensors
    initial = build(METHODS["fedvpt"], {"n": 2}).start(task, []).arrays["prompts.s"]
    np.testing.assert_array_equal(tensors["prompts.s"], initial)
    np.testing.assert_array_equal(tensors["head.weight"], server.arrays["head.weight"])
