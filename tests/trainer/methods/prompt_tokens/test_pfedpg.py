"""pFedPG: the generator learns to make the prompts that its sites arrive at (docs/methods.md 5.6, tests 9)."""

import numpy as np
import pytest
from tests.trainer.methods.conftest import after, play

from edgefl_protocol import Payload
from edgefl_trainer.contract import Phase, State
from edgefl_trainer.engine.hyper_parameters import build
from edgefl_trainer.method_halves import stamped
from edgefl_trainer.methods import METHODS

HYPER = {"readout": "cls", "head_norm": "none", "batch": 4, "n": 3}
TRAIN = Phase("train", 1)


def made(method, state, *sites, phase=TRAIN):
    """The prompts (n, D) that each site would be sent."""
    return {name: found.arrays["prompts.s"][0] for name, found in method.broadcast(state, phase, sites).items()}


def reply(change):
    return Payload({"prompts.change": change[None].astype(np.float32)}, {"n_train": 3})


@pytest.mark.parametrize("residual", [True, False])
@pytest.mark.parametrize("seed", range(5))
def test_a_server_step_moves_prompts_towards_the_sites(residual, seed, make_task):
    """Sign test: ΔP = P~ − P points downhill, so G's next output has moved along it and is nearer to P~."""
    method = build(METHODS["pfedpg"], {**HYPER, "residual": residual, "server_weight_decay": 0.0})
    state = method.start(make_task(seed=seed), ["a"])
    before = made(method, state, "a")["a"]
    change = np.random.default_rng(seed).normal(size=before.shape)
    new = made(method, method.aggregate(state, TRAIN, {"a": reply(change)}), "a")["a"]
    assert ((new - before) * change).sum() > 0
    assert np.linalg.norm(new - before - change) < np.linalg.norm(change)


def test_steps_arrive_at_prompts_that_differ_from_site_to_site(make_task):
    """Two sites get what each asks for, far nearer than one prompt for both could be: the descriptors part them.

    Attention over n tokens parts two sites by a matrix of rank n − 1 at most, so what they ask for differs by less.
    """
    task = make_task()
    method = build(METHODS["pfedpg"], {**HYPER, "server_lr": 1e-2})
    state = method.start(task, ["a", "b"])
    rng, width = np.random.default_rng(0), task.backbone.width
    middle, apart = rng.normal(0, 0.1, size=(3, width)), np.outer(rng.normal(size=3), rng.normal(0, 0.1, size=width))
    wanted = {"a": middle + apart, "b": middle - apart}

    def distance(state):
        found = made(method, state, "a", "b")
        return sum(np.linalg.norm(found[name] - wanted[name]) for name in "ab")

    for _ in range(300):
        found = made(method, state, "a", "b")
        state = method.aggregate(state, TRAIN, {name: reply(wanted[name] - found[name]) for name in "ab"})
    one_for_both = np.linalg.norm(wanted["a"] - wanted["b"])  # the least sum of distances from one point
    assert distance(state) < 0.3 * one_for_both


def test_a_site_that_does_not_reply_keeps_its_descriptor(make_task):
    method = build(METHODS["pfedpg"], HYPER)
    state = method.start(make_task(), ["a", "b"])
    change = np.ones_like(made(method, state, "a")["a"])
    for _ in range(2):
        new = method.aggregate(state, TRAIN, {"a": reply(change)})
        np.testing.assert_array_equal(new.arrays["descriptor.b"], state.arrays["descriptor.b"])
        assert not np.array_equal(new.arrays["descriptor.a"], state.arrays["descriptor.a"])
        assert not [name for name in new.arrays if name.startswith("adamw.") and name.endswith("descriptor.b")]
        state = new


def test_the_mean_over_replies_is_stepped(make_task):
    """Two sites with one descriptor and one change are as one site."""
    method = build(METHODS["pfedpg"], HYPER)
    state = method.start(make_task(), ["a", "b"])
    state = State({**state.arrays, "descriptor.b": state.arrays["descriptor.a"]}, state.values)
    change = np.random.default_rng(0).normal(size=made(method, state, "a")["a"].shape)
    one = method.aggregate(state, TRAIN, {"a": reply(change)})
    two = method.aggregate(state, TRAIN, {"a": reply(change), "b": reply(change)})
    for name in ("generator.basis", "generator.query", "generator.out", "adamw.first.generator.basis"):
        np.testing.assert_allclose(two.arrays[name], one.arrays[name], rtol=1e-9, atol=1e-15)


def test_heads_stay_and_only_the_change_goes(make_task, make_site):
    task = make_task()
    method, site = build(METHODS["pfedpg"], HYPER), make_site(task)
    state = method.start(task, ["a"])
    sent = stamped(method.broadcast(state, TRAIN, ["a"])["a"], TRAIN, 1)
    new, answer = method.local_round(site, State(), sent)
    assert set(sent.arrays) == {"prompts.s"} and set(answer.arrays) == {"prompts.change"}
    adapted = sent.arrays["prompts.s"] + answer.arrays["prompts.change"]
    np.testing.assert_allclose(new.arrays["prompts.s"], adapted, atol=1e-6)
    server, states = play(method, task, {"a": site, "b": make_site(task, "b", seed=5)})
    assert not [name for name in server.arrays if "head" in name]
    assert not np.array_equal(states["a"].arrays["head.weight"], states["b"].arrays["head.weight"])


def test_a_site_scores_with_what_it_adapted(make_task, make_site):
    """Evaluation after local adaptation, with the site's own head; the new broadcast does not replace the prompts."""
    task = make_task()
    method, site = build(METHODS["pfedpg"], HYPER), make_site(task)
    server, states = play(method, task, {"a": site})
    broadcast = stamped(method.broadcast(server, after(task), ["a"])["a"], after(task), 1)
    assert not np.array_equal(broadcast.arrays["prompts.s"], states["a"].arrays["prompts.s"])
    tensors = method.predictor(site, states["a"], broadcast).tensors
    for name in ("prompts.s", "head.weight"):
        np.testing.assert_array_equal(tensors[name], states["a"].arrays[name])


def test_a_member_that_was_not_drawn_has_a_model_and_a_newcomer_has_none(make_task, make_site):
    """Held-out sites: not applicable, as in the paper. A member without a round gets made prompts, initial head."""
    task = make_task()
    method = build(METHODS["pfedpg"], HYPER)
    state = method.start(task, ["a", "b"])
    found = method.broadcast(state, after(task), ["b", "z"])
    member = method.predictor(make_site(task, "b"), State(), stamped(found["b"], after(task), 1))
    np.testing.assert_array_equal(member.tensors["prompts.s"], found["b"].arrays["prompts.s"])
    assert method.predictor(make_site(task, "z"), State(), stamped(found["z"], after(task), 1)) is None


def test_a_member_that_joins_later_is_taught_too(make_task):
    """Between two rounds a new member gets a descriptor of its own, the same however often it is asked for."""
    method = build(METHODS["pfedpg"], HYPER)
    state = method.start(make_task(), ["a"])
    first = made(method, state, "a", "z")
    np.testing.assert_array_equal(first["z"], made(method, state, "z")["z"])
    assert not np.array_equal(first["a"], first["z"])
    new = method.aggregate(state, TRAIN, {"z": reply(np.ones_like(first["z"]))})
    assert "descriptor.z" in new.arrays
    assert made(method, new, "z", phase=Phase("final", 2)).keys() == {"z"}
