"""What every half of every method accepts: one test for each line of the table in docs/design.md 4."""

import dataclasses
import re
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from tests.trainer.methods import test_conformance
from tests.trainer.methods.conftest import MADE_FOR_MEMBERS, RESTING, after, play, told
from tests.trainer.methods.test_conformance import backbone, of_two, small

from edgefl_protocol import Payload
from edgefl_trainer.contract import Method, Phase, Site, State, declared
from edgefl_trainer.engine import run as engine
from edgefl_trainer.engine.models import open_run, predict_rows
from edgefl_trainer.engine.settings import resolve
from edgefl_trainer.method_halves import stamped
from edgefl_trainer.methods import METHODS

__all__ = ["backbone", "of_two"]  # fixtures: two blocks, and a run over them
PAGE = Path(__file__).resolve().parents[3] / "docs/design.md"
SMALL_BATCHES = {"fedclf": ["batch=8"], "fedmae": ["batch=8"]}  # for a site of 40 pictures


def test_the_table_of_the_contract_and_its_tests_are_whole():
    """docs/design.md 4: every line names tests that exist, every test here has a line, and so has every half."""
    lines = re.findall(r"^\| ([^|]+) \| [^|]+ \| `(test_\w+)` \|$", PAGE.read_text(encoding="utf-8"), re.M)
    named = {test for _, test in lines}
    here = {name for name in vars(sys.modules[__name__]) if name.startswith("test_") and name != "test_conformance"}
    whole = "test_the_table_of_the_contract_and_its_tests_are_whole"
    assert named <= here | vars(test_conformance).keys()
    assert here - {whole} <= named
    halves = {half for cell, _ in lines for half in re.findall(r"`(\w+)`", cell)}
    assert halves == {"start", "broadcast", "local_round", "aggregate", "predictor"}


@pytest.fixture
def name(active) -> str:
    """Whose run `of_two` is."""
    return active


def read_only(found: State | Payload) -> State | Payload:
    """The same, with arrays that refuse to be written to, as those are that come from a file or a message."""
    values = found.values if isinstance(found, State) else found.scalars
    sealed = Payload(found.arrays, values)
    assert not any(array.flags.writeable for array in sealed.arrays.values())
    return State(sealed.arrays, sealed.scalars) if isinstance(found, State) else sealed


def as_bytes(found: object) -> object:
    """What two calls have to agree in, bit by bit."""
    if isinstance(found, State):
        return Payload(found.arrays, found.values).to_bytes()
    if isinstance(found, Payload):
        return found.to_bytes()
    if isinstance(found, Mapping):
        return {name: as_bytes(value) for name, value in found.items()}
    return [as_bytes(value) for value in found] if isinstance(found, tuple) else found


def twice(half, *given):
    """The result of a half that was called two times with the same, read-only arguments: it changes none of them."""
    before = as_bytes(tuple(one for one in given if isinstance(one, State | Payload | Mapping)))
    first, second = half(*given), half(*given)
    assert as_bytes(first) == as_bytes(second)
    assert as_bytes(tuple(one for one in given if isinstance(one, State | Payload | Mapping))) == before
    return first


def judged(method: Method, site: Site, state: State, broadcast: Payload) -> np.ndarray | None:
    """The probabilities of a site's model, which are finite and sum to 1; None where it has none."""
    predictor = method.predictor(site, state, broadcast)
    if predictor is None:
        return None
    found = predict_rows(predictor, site.train).probabilities
    assert np.isfinite(found).all()
    np.testing.assert_allclose(found.sum(axis=1), 1, atol=1e-5)
    return found


def test_every_half_can_be_called_again_and_leaves_what_it_is_given(active, make_task, make_site, of_two):
    """A killed run asks again for what was under way; a model is asked for after every round: neither changes a bit.
    Arrays come from files and messages, and cannot be written to."""
    task, method = make_task(rounds=2), small(active)
    sites = {s: make_site(task, s, count=8, seed=i) for i, s in enumerate("ab")}
    assert list(method.phases(2)) == list(method.phases(2))
    server, states = twice(method.start, task, ["a", "b"]), dict.fromkeys("ab", State())
    for phase in method.phases(task.rounds):
        server, replies = read_only(server), {}
        sent = twice(method.broadcast, server, phase, ["a", "b"])
        for name, site in sites.items():
            broadcast = read_only(stamped(sent[name], phase, task.rounds))
            state, reply = twice(method.local_round, site, read_only(states[name]), broadcast)
            states[name], replies[name] = state, read_only(reply)
        server = twice(method.aggregate, server, phase, replies)
        if phase.kind != "warm":
            later = Phase("final", phase.round + 1)
            for name, made in twice(method.broadcast, read_only(server), later, ["a", "b"]).items():
                kept = as_bytes(states[name])
                one, two = (judged(method, sites[name], read_only(states[name]), made) for _ in range(2))
                assert as_bytes(states[name]) == kept
                assert (one is None and two is None) or np.array_equal(one, two)
    assert as_bytes(server) == as_bytes(of_two.server)
    assert as_bytes(states) == as_bytes(of_two.states)


def test_a_member_may_join_after_the_start(active, make_task, make_site):
    """A live federation admits members at any time: `start` was not told of c, whose first round is the second."""
    task, method = make_task(rounds=2), small(active)
    sites = {s: make_site(task, s, count=8, seed=i) for i, s in enumerate("abc")}
    server, states = method.start(task, ["a", "b"]), dict.fromkeys("abc", State())
    for phase in method.phases(task.rounds):
        present = ["a", "b"] if phase.kind == "warm" or phase.round == 1 else ["a", "b", "c"]
        sent = method.broadcast(server, phase, present)
        assert sorted(sent) == present
        replies = {}
        for name in present:
            broadcast = stamped(sent[name], phase, task.rounds)
            states[name], replies[name] = method.local_round(sites[name], states[name], broadcast)
        server = method.aggregate(server, phase, replies)
    models = [judged(method, sites[name], states[name], told(method, server, task, name)) for name in "abc"]
    assert all((model is None) == (declared(method).encoder is not None) for model in models)


def test_a_single_reply_can_be_aggregated(active, make_task, make_site):
    """A quorum of one, and `--participation` of a few sites: b and c miss every round."""
    task, method = make_task(rounds=2), small(active)
    sites = {s: make_site(task, s, count=8, seed=i) for i, s in enumerate("abc")}
    server, states = play(method, task, sites, absent={1: "bc", 2: "bc"})
    assert all(np.isfinite(value).all() for value in server.arrays.values())
    for name in "abc":
        found = judged(method, sites[name], states[name], told(method, server, task, name))
        assert (found is None) == (declared(method).encoder is not None) or active in MADE_FOR_MEMBERS


@pytest.mark.parametrize("everywhere", [False, True], ids=["at one site", "at all sites"])
def test_a_class_may_be_missing(active, everywhere, make_task, make_site):
    """Site b has no picture of class z, or no site has: a site names no class that it never saw (methods.md 1.3)."""
    task, method = make_task(rounds=2, classes=("x", "y", "z")), small(active)
    labels = [0, 1] * 4
    both = {"a": labels if everywhere else None, "b": labels}
    sites = {name: make_site(task, name, count=8, labels=given) for name, given in both.items()}
    server, states = play(method, task, sites)
    for name, site in sites.items():
        for found in (server, states[name]):
            assert all(np.isfinite(value).all() for value in found.arrays.values())
        broadcast = told(method, server, task, name)
        if judged(method, site, states[name], broadcast) is not None:
            seen = method.predictor(site, states[name], broadcast).seen
            assert seen == (True, True, name == "a" and not everywhere)


def test_a_site_may_have_no_tune_rows(active, make_task, make_site):
    """A small site keeps all its lesions for learning: nothing to choose a readout by, and nothing to judge on."""
    task, method = make_task(), small(active)
    sites = {}
    for seed, name in enumerate("ab"):
        site = make_site(task, name, seed=seed)
        none = dataclasses.replace(site.tune, rows=site.tune.rows[:0])
        sites[name] = dataclasses.replace(site, tune=none)
    server, states = play(method, task, sites)
    found = judged(method, sites["a"], states["a"], told(method, server, task, "a"))
    assert (found is None) == (declared(method).encoder is not None)


def test_a_site_may_have_fewer_pictures_than_a_batch(active, make_task, make_site):
    """As few as the method declares; the last batch of an epoch is as short as it comes."""
    task, method = make_task(), small(active)
    count = max(3, declared(method).least_images)
    sites = {"a": make_site(task, "a", count=count, seed=1), "b": make_site(task, "b", count=9, seed=2)}
    server, states = play(method, task, sites)
    for state in (server, *states.values()):
        assert all(np.isfinite(value).all() for value in state.arrays.values())
    after_all = told(method, server, task, "a")
    assert after_all.scalars["phase"] == after(task).kind
    judged(method, sites["a"], states["a"], after_all)


@pytest.mark.slow
@pytest.mark.parametrize("method", sorted(METHODS.keys() - RESTING))
def test_a_run_in_which_two_of_three_sites_never_take_part_is_finished(method, tmp_path, asked):
    """`run --participation 0.34` for one round: every site of a method that makes models has one and its figures."""
    questions = declared(METHODS[method]).questions_only
    data = asked if questions else "lesions:sites=3,images=40,px=36"
    given = {"data": (data,), "preset": "tiny", "rounds": 1, "epochs": 1, "device": "cpu"}
    more = {"backbone": "tiny", "image_px": 36, "participation": 0.34}
    settings = resolve(method, {**given, **more}, None, SMALL_BATCHES.get(method, []))
    summary = engine.run(settings, tmp_path / "run", resume=False)
    models = open_run(tmp_path / "run").sites
    if declared(METHODS[method]).encoder:
        assert models == ()
        return
    assert models == (("rad-abdomen", "rad-chest", "rad-head") if questions else ("site-1", "site-2", "site-3"))
    assert all(site["balanced_accuracy"] is not None for site in summary["sites"].values())
