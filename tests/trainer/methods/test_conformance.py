"""One suite for every method of the table: a new line there is tested here without new code."""

import dataclasses

import numpy as np
import pytest
from tests.trainer.methods.conftest import after, play

from edgefl_protocol import Payload, digest
from edgefl_trainer.contract import LearnsBackbone, State
from edgefl_trainer.engine.checkpoint import Checkpoints, SiteResult
from edgefl_trainer.engine.settings import build, hyper_types
from edgefl_trainer.methods import METHODS

SMALL = {"fedmae": {"batch": 4, "decoder_width": 32, "decoder_depth": 1, "lr": 1e-3}}
FRESH = {"batch": 4, "lr_head": 2e-3}


def small(name: str, **more: object):
    known = hyper_types(METHODS[name])
    hyper = {key: value for key, value in (SMALL.get(name) or FRESH).items() if key in known}
    return build(METHODS[name], {**hyper, **more})


def value_of(settings: object, key: str) -> object:
    """A hyper-parameter of a method or of one of its nested settings."""
    for entry in dataclasses.fields(settings):
        value = getattr(settings, entry.name)
        if entry.name == key:
            return value
        if dataclasses.is_dataclass(value) and key in hyper_types(type(value)):
            return value_of(value, key)
    raise KeyError(key)


@pytest.fixture(params=sorted(METHODS))
def name(request) -> str:
    return request.param


def test_travels_is_declared_and_known(name):
    known = {"maps", "features", "prompts", "prototypes", "logits", "weights"}
    assert set(METHODS[name].travels) <= known
    assert (
        METHODS[name].__module__
        and "Differs from the paper" in __import__(METHODS[name].__module__, fromlist=["x"]).__doc__
    )


def test_same_seed_gives_the_same_bits_and_another_seed_does_not(name, make_task, make_site):
    task = make_task(rounds=2)
    first = play(small(name), task, {s: make_site(task, s, seed=i) for i, s in enumerate("ab")})
    second = play(small(name), task, {s: make_site(task, s, seed=i) for i, s in enumerate("ab")})
    other_task = make_task(rounds=2, seed=1)
    other = play(small(name), other_task, {s: make_site(other_task, s, seed=i) for i, s in enumerate("ab")})
    assert digest(first[1]["a"].arrays) == digest(second[1]["a"].arrays)
    assert first[0].digest() == second[0].digest()
    assert digest(first[1]["a"].arrays) != digest(other[1]["a"].arrays)


def test_the_order_of_replies_does_not_change_a_bit(name, make_task, make_site):
    task = make_task(rounds=1)
    sites = {s: make_site(task, s, count=8 + 4 * i, seed=i) for i, s in enumerate("abc")}
    forward, _ = play(small(name), task, sites)
    backward, _ = play(small(name), task, dict(reversed(sites.items())))
    assert forward.digest() == backward.digest()


def test_the_frozen_network_stays_as_it_was(name, make_task, make_site, backbone):
    before = {key: value.clone() for key, value in backbone.state_dict().items()}
    task = make_task()
    play(small(name), task, {"a": make_site(task)})
    for key, value in backbone.state_dict().items():
        assert value.equal(before[key]), key


def test_states_survive_the_disk(name, make_task, make_site, tmp_path):
    task = make_task()
    server, states = play(small(name), task, {"a": make_site(task)})
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save_site(0, "a", SiteResult(states["a"], Payload({}, {}), {}))
    checkpoints.finish_phase(0, server, {"a": SiteResult(states["a"], Payload({}, {}), {})})
    progress = checkpoints.progress()
    assert progress.phases == 1
    assert checkpoints.load_state(progress.server).digest() == server.digest()
    again = checkpoints.load_state(progress.sites["a"])
    assert again.digest() == states["a"].digest()
    assert dict(again.values) == dict(states["a"].values)


def test_a_site_of_one_class_stays_finite(name, make_task, make_site):
    """A site with one class only has prior W = (floor, 2 − floor): finite, never an error (docs/methods.md, prior)."""
    task = make_task(rounds=2)
    sites = {"a": make_site(task, "a", labels=[0] * 12), "b": make_site(task, "b")}
    server, states = play(small(name), task, sites)
    for state in (server, *states.values()):
        assert all(np.isfinite(value).all() for value in state.arrays.values())


def test_a_method_makes_a_predictor_or_a_backbone(name, make_task, make_site):
    task = make_task()
    method, site = small(name), make_site(task)
    server, states = play(method, task, {"a": site})
    broadcast = method.broadcast(server, after(task), ["a"])["a"]
    predictor = method.predictor(site, states["a"], broadcast)
    assert (predictor is None) == isinstance(method, LearnsBackbone)
    if predictor is not None:
        assert set(predictor.module.options.tensors) == set(predictor.tensors)


def test_every_hyper_parameter_has_a_default_and_can_be_set_by_name(name):
    method = build(METHODS[name], {})
    for key in hyper_types(METHODS[name]):
        assert build(METHODS[name], {key: value_of(method, key)}) == method


def test_state_holds_plain_values_only(name, make_task, make_site):
    task = make_task()
    _, states = play(small(name), task, {"a": make_site(task)})
    assert isinstance(states["a"], State)
    for value in states["a"].values.values():
        assert isinstance(value, int | float | str)
