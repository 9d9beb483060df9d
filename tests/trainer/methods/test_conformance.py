"""One suite for every method of the table: a new line there is tested here without new code."""

import dataclasses
import sys
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import pytest
from tests.trainer.methods.conftest import (
    ASKED,
    FORMS,
    IMAGE_PX,
    LATER,
    MADE_FOR_MEMBERS,
    RESTING,
    SIBLINGS,
    Exchange,
    after,
    play,
    tiers,
    told,
)

from edgefl_protocol import Payload
from edgefl_protocol.payload import state_digest
from edgefl_protocol.rules import travels
from edgefl_trainer.contract import State, declared
from edgefl_trainer.engine.checkpoint import Checkpoints, SiteResult
from edgefl_trainer.engine.hyper_parameters import build, hyper_types
from edgefl_trainer.engine.local_engine import InProcessSite, LocalEngine
from edgefl_trainer.engine.models import predict_rows
from edgefl_trainer.models.backbones import load_backbone
from edgefl_trainer.models.cnn import Backbone

SMALL = {
    "fedmae": {"batch": 4, "decoder_width": 32, "decoder_depth": 1, "lr": 1e-3},
    "pfl-vqa": {"batch": 4, "width": 32, "heads": 2},
    "fedclf": {"batch": 4, "queue": 8},  # as many features as the smallest site here has images
}
FRESH = {"batch": 4, "lr_head": 2e-3, "b_blocks": 1}

# What `travels` calls the arrays of a reply, by the first part of their names: by hand, apart from `rules.travels`.
KINDS = {
    "maps": "maps", "prompts": "prompts", "prototypes": "prototypes", "outputs": "logits", "moments": "features",
    "head": "weights", "backbone": "weights", "decoder": "weights", "mask_token": "weights", "momentum": "weights",
    "features": "features",
    "network": "weights",
    "pictures": "weights", "words": "weights", "question": "weights", "fusion": "weights",  # of an answer model
    "keys": "prompts", "selections": "prompts",  # of prompts in groups: what a group answers to, how often it was taken
}  # fmt: skip
GIVEN = KINDS | {"remote": "features"}  # of a broadcast; FedCLF's contrasts are features of other sites
SETTINGS = {
    "head_norm": ("none",),
    "kd": (True,),
    "share": ("b", "g"),
    "predict": ("nearest",),
    "prototypes": ("during",),
    "head": ("local",),
    "mode": ("local",),
    "negatives": ("both", "local"),
    "momentum_encoder": ("averaged", "local"),
}  # what may matter
REFUSED = [("local-cl", {"momentum_encoder": "averaged"})]  # nothing travels
OF_PICTURES = {"share", "kd"}  # an answer model is averaged as a whole: other values are refused
COUNTED = {"selections", "period.sum", "period.count"}  # of all replies together
NOTHING_SHARED = {"local", "local-cl", "feddistill", "fedevprompt"}  # the server holds nothing, or each site's own


@dataclass(frozen=True)
class Played:
    """A finished run, with all that crossed between server and sites."""

    server: State
    states: dict[str, State]
    seen: list[Exchange]
    moved: tuple[str, ...] = ()  # tensors of the frozen network that are no longer what they were


def small(name: str, **more: object):
    known = hyper_types(FORMS[name]())
    usual = SMALL["pfl-vqa"] if name.endswith(ASKED) else SMALL.get(name) or FRESH
    return build(FORMS[name], {**{key: value for key, value in usual.items() if key in known}, **more})


def value_of(settings: object, key: str) -> object:
    """A hyper-parameter of a method or of one of its nested settings."""
    for entry in dataclasses.fields(settings):
        value = getattr(settings, entry.name)
        if entry.name == key:
            return value
        if dataclasses.is_dataclass(value) and key in hyper_types(value):
            return value_of(value, key)
    raise KeyError(key)


@pytest.fixture(scope="module")
def backbone() -> Backbone:
    """Of two blocks: nothing that is promised here depends on their number."""
    return load_backbone("vit:64x2/12", image_px=IMAGE_PX, seed=3)


@pytest.fixture
def of_one(name, make_task, make_site, played, backbone) -> Played:
    """One round of site a alone."""
    if ("one", name) not in played:
        before = {key: value.clone() for key, value in backbone.state_dict().items()}
        task, seen = make_task(), []
        run = play(small(name), task, {"a": make_site(task)}, watch=seen.append)
        moved = tuple(key for key, value in backbone.state_dict().items() if not value.equal(before[key]))
        played["one", name] = Played(*run, seen, moved)
    return played["one", name]


@pytest.fixture
def of_two(name, make_task, make_site, played) -> Played:
    """Two rounds of sites a and b."""
    if ("two", name) not in played:
        task, seen = make_task(rounds=2), []
        sites = {s: make_site(task, s, count=8, seed=i) for i, s in enumerate("ab")}
        played["two", name] = Played(*play(small(name), task, sites, watch=seen.append), seen)
    return played["two", name]


@pytest.fixture
def of_three(name, make_task, make_site, played) -> Played:
    """One round of sites a, b and c with three classes: with three replies the order of a sum shows in its bits."""
    if ("three", name) not in played:
        task, seen = make_task(classes=("x", "y", "z")), []
        sites = {s: make_site(task, s, count=8 + i, seed=i) for i, s in enumerate("abc")}
        played["three", name] = Played(*play(small(name), task, sites, watch=seen.append), seen)
    return played["three", name]


def test_the_file_says_how_it_differs_from_its_paper(name):
    assert "Differs from the paper" in sys.modules[type(FORMS[name]()).__module__].__doc__


def test_a_method_declares_its_presets(name):
    """docs/design.md 5: `tiny`, `bench84` and `paper`; the engine's, rounds alone, are for other methods."""
    presets = declared(FORMS[name]()).presets
    assert presets is not None and presets("tiny", {}).keys() == {"tiny", "bench84", "paper"}


def kinds_sent(sent: Iterable[Exchange]) -> set[str]:
    """The kinds of all arrays in the replies of a run."""
    return {KINDS[array.split(".")[0]] for each in sent for reply in each.replies.values() for array in reply.arrays}


def kinds_given(broadcasts: Iterable[Payload]) -> set[str]:
    """The kinds of all arrays in some broadcasts; the name itself where it stands for none."""
    names = {array for payload in broadcasts for array in payload.arrays}
    return {GIVEN.get(array.partition(".")[0], f"the unknown array {array}") for array in names}


def test_the_rule_of_what_travels_says_the_same() -> None:
    """An owner is asked by a method's word before the work, and by the arrays' names after it: docs/methods.md."""
    assert {word: travels.kind_of(f"{word}.0") for word in KINDS} == KINDS and set(KINDS.values()) == set(travels.KINDS)
    assert [travels.kind_of(name) for name in ("mapsy", "new", "features2", "")] == ["weights"] * 4


def test_what_a_site_sends_is_what_the_method_declares(name, make_task, make_site, of_two):
    """docs/methods.md, what travels: every array of a reply is of a declared kind, and every declared kind is sent."""
    task = make_task(rounds=2)
    sites = {"a": make_site(task, count=8)}
    known = hyper_types(FORMS[name]()).keys() - (OF_PICTURES if name.endswith(ASKED) else set())
    choices = [{key: value} for key, values in SETTINGS.items() if key in known for value in values]
    choices = [choice for choice in choices if (name, choice) not in REFUSED]
    together = [{"share": "b", "kd": True}] if {"share", "kd"} <= known else []
    assert kinds_sent(of_two.seen) == set(small(name).travels)
    for more in (*choices, *together):
        method, seen = small(name, **more), list[Exchange]()
        play(method, task, sites, watch=seen.append)
        assert len(set(method.travels)) == len(method.travels)
        assert kinds_sent(seen) == set(method.travels), more
        assert kinds_given(payload for each in seen for payload in each.broadcasts.values()) <= set(method.travels)


def digests(played: Played) -> tuple[str, str]:
    """Of the server and of site a."""
    return played.server.digest(), played.states["a"].digest()


@pytest.mark.parametrize("name", tiers(FORMS, LATER))
def test_another_seed_gives_other_bits(name, make_task, make_site, of_one):
    """That the same seed gives the same ones, `test_contract.py` asks of every half."""
    task = make_task(seed=1)
    other = Played(*play(small(name), task, {"a": make_site(task)}), [])
    for one, changed in zip(digests(of_one), digests(other), strict=True):
        assert one != changed or one == State().digest()  # a half that remembers nothing
    assert digests(of_one) != digests(other)


def test_the_order_of_replies_does_not_change_a_bit(name, make_task, of_three):
    method = small(name)
    forward = backward = method.start(make_task(classes=("x", "y", "z")), ["a", "b", "c"])
    for exchange in of_three.seen:
        forward = method.aggregate(forward, exchange.phase, exchange.replies)
        backward = method.aggregate(backward, exchange.phase, dict(reversed(exchange.replies.items())))
    assert forward.digest() == backward.digest() == of_three.server.digest()


@pytest.mark.parametrize("name", tiers(FORMS.keys() - RESTING - MADE_FOR_MEMBERS, SIBLINGS))
def test_equal_replies_are_as_one(name, make_task, of_one):
    """Identical sites are one: the server takes means of what it shares, never sums. What it keeps of each site, and
    what it counts, stand apart."""
    task, method = make_task(rounds=1), small(name)
    one = two = method.start(task, ["a", "b"])
    for exchange in of_one.seen:
        one = method.aggregate(one, exchange.phase, exchange.replies)
        two = method.aggregate(two, exchange.phase, dict.fromkeys("ab", exchange.replies["a"]))
    shared = {name for name in one.arrays if not name.endswith((".a", ".b")) and name not in COUNTED}
    assert shared <= two.arrays.keys()
    assert shared or name.removesuffix(ASKED) in NOTHING_SHARED
    for array in shared:
        np.testing.assert_allclose(two.arrays[array], one.arrays[array], rtol=1e-5, atol=1e-6, err_msg=array)


def test_the_frozen_network_stays_as_it_was(of_one):
    assert of_one.moved == ()


def over_the_wire(payload: Payload) -> Payload:
    """The payload that its bytes make, which is the same one: a half that is given either cannot tell."""
    again = Payload.from_bytes(payload.to_bytes())
    assert content(again) == content(payload)
    return again


def content(payload: Payload) -> tuple[object, ...]:
    arrays = [(name, value.dtype, value.shape, value.tobytes()) for name, value in payload.arrays.items()]
    return arrays, [(name, type(value), value) for name, value in payload.scalars.items()]


def test_sites_may_miss_rounds_and_bytes_are_all_that_crosses(active, make_task, make_site):
    """Site c joins in round 2, a stays away from it: c is sent what it needs, and payloads lose nothing as bytes."""
    task = make_task(rounds=2)
    sites = {s: make_site(task, s, count=8, seed=i) for i, s in enumerate("abc")}
    seen: list[Exchange] = []
    absent = {1: "c", 2: "a"}
    server, states = play(small(active), task, sites, absent=absent, carry=over_the_wire, watch=seen.append)
    assert [sorted(e.replies) for e in seen if e.phase.kind == "train"] == [["a", "b"], ["b", "c"]]
    for state in (server, *states.values()):
        again = over_the_wire(Payload(state.arrays, state.values))
        assert State(again.arrays).digest() == state.digest()
        assert dict(again.scalars) == dict(state.values)


def form(payload: Payload) -> tuple[object, ...]:
    arrays = sorted((name, value.dtype.name, value.shape) for name, value in payload.arrays.items())
    return (*arrays, *sorted(payload.scalars))


def test_a_site_that_took_no_part_gets_a_model_or_none(name, make_task, make_site, of_three):
    """A member that joined after the last round: its predictor works on an empty state, or the method has none."""
    task = make_task(classes=("x", "y", "z"))
    method, server = small(name), of_three.server
    unlabelled = make_site(task, "new", seed=9)
    unlabelled = dataclasses.replace(unlabelled, train=dataclasses.replace(unlabelled.train, rows=np.zeros(0, int)))
    for site in (make_site(task, "new", seed=9), unlabelled):
        predictor = method.predictor(site, State(), told(method, server, task, "new"))
        if predictor is None:
            assert declared(method).encoder or name in MADE_FOR_MEMBERS
            continue
        scores = predict_rows(predictor, site.tune)
        assert np.isfinite(scores.probabilities).all()
        np.testing.assert_allclose(scores.probabilities.sum(axis=1), 1, atol=1e-5)
        assert predictor.seen == (True, True, True)
        if "prior" in predictor.tensors:  # docs/methods.md 1.3: without labels W = 1; here the classes are equally many
            np.testing.assert_allclose(predictor.tensors["prior"], 1.0, rtol=1e-6)


class Stopped(Exception):
    """The run ends here."""


@dataclass(frozen=True)
class Stopping:
    """A site whose run ends when its turn comes in one round."""

    site: InProcessSite
    round: int

    def local_round(self, state, broadcast, report):
        if broadcast.scalars["round"] == self.round:
            raise Stopped
        return self.site.local_round(state, broadcast, report)


class Silent:
    """Watches nothing."""

    def __getattr__(self, name):
        return lambda *_: None


@pytest.mark.parametrize("name", tiers(FORMS.keys() - RESTING, LATER))
def test_a_stopped_run_goes_on_to_the_same_digest(name, make_task, make_site, of_two, tmp_path):
    """docs/design.md 4: stopped in round 2 after its first site and resumed, it ends as the undisturbed loop."""
    task = make_task(rounds=2)
    method = small(name)
    sites = {s: InProcessSite(method, make_site(task, s, count=8, seed=i)) for i, s in enumerate("ab")}

    def run(**others) -> str:
        engine = LocalEngine(method=method, task=task, sites={**sites, **others}, folder=tmp_path, observer=Silent())
        return engine.run().digest()

    undisturbed = state_digest(of_two.server.digest(), {s: state.digest() for s, state in of_two.states.items()})
    with pytest.raises(Stopped):
        run(b=Stopping(sites["b"], 2))
    assert run() == undisturbed


def test_states_survive_the_disk(of_one, tmp_path):
    server, states = of_one.server, of_one.states
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save_site(0, "a", SiteResult(states["a"], Payload({}, {}), {}))
    checkpoints.finish_phase(0, server, {"a": SiteResult(states["a"], Payload({}, {}), {})})
    progress = checkpoints.progress()
    assert progress.phases == 1
    assert checkpoints.load_state(progress.server).digest() == server.digest()
    again = checkpoints.load_state(progress.sites["a"])
    assert again.digest() == states["a"].digest()
    assert dict(again.values) == dict(states["a"].values)


@pytest.mark.parametrize("name", tiers(FORMS, LATER))
def test_a_site_of_one_class_stays_finite(name, make_task, make_site):
    """A site with one class only has prior W = (floor, 2 − floor): finite, never an error (docs/methods.md, prior)."""
    task = make_task(rounds=2)
    sites = {"a": make_site(task, "a", count=8, labels=[0] * 8), "b": make_site(task, "b", count=8)}
    server, states = play(small(name), task, sites)
    for state in (server, *states.values()):
        assert all(np.isfinite(value).all() for value in state.arrays.values())


def test_a_method_makes_a_predictor_or_a_backbone(name, make_task, make_site, of_one):
    task = make_task()
    method, site = small(name), make_site(task)
    broadcast = method.broadcast(of_one.server, after(task), ["a"])["a"]
    predictor = method.predictor(site, of_one.states["a"], broadcast)
    assert (predictor is None) == (declared(method).encoder is not None)
    if predictor is not None:
        assert set(predictor.module.options.tensors) == set(predictor.tensors)


def test_every_hyper_parameter_has_a_default_and_can_be_set_by_name(name):
    method = build(FORMS[name], {})
    for key in hyper_types(method):
        assert build(FORMS[name], {key: value_of(method, key)}) == method


def test_state_holds_plain_values_only(of_one):
    assert isinstance(of_one.states["a"], State)
    for value in of_one.states["a"].values.values():
        assert isinstance(value, int | float | str)
