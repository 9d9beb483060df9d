"""pFL-VQA against its definition (Zhu et al., arXiv 2402.09677, abstract; docs/methods.md 11)."""

import dataclasses
import re

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from tests.trainer.methods.conftest import QUESTIONS, play, told

from edgefl_protocol import Payload
from edgefl_trainer.contract import Phase, State, Task
from edgefl_trainer.engine.hyper_parameters import blank, build
from edgefl_trainer.engine.models import predict_rows
from edgefl_trainer.errors import SettingError, TrainingError
from edgefl_trainer.learning.loss_terms import Step
from edgefl_trainer.methods import METHODS
from edgefl_trainer.methods.pfl_vqa import PromptDistance, exchange_weights

SMALL = {"batch": 4, "width": 32, "heads": 2}
ASKING = ("vqa-rad:somewhere",)

shares = st.floats(0, 1)
vectors = arrays(np.float32, 6, elements=st.floats(-(2.0**100), 2.0**100, width=32))
sites = st.dictionaries(st.sampled_from("abcde"), st.tuples(shares, vectors), min_size=1)


@pytest.fixture
def make_task(make_task):
    """Tasks whose pictures are asked questions."""
    return lambda **given: dataclasses.replace(make_task(**given), questions=QUESTIONS)


def vqa(**hyper):
    return build(METHODS["pfl-vqa"], {**SMALL, **hyper})


def of(method: str, **hyper):
    return build(lambda: blank(method, ASKING), {**SMALL, **hyper})


@given(sites, st.sampled_from(["reliability", "accuracy", "similarity", "uniform"]))
def test_the_weights_are_shares_of_the_others(known, rule):
    accuracies = {name: accuracy for name, (accuracy, _) in known.items()}
    prompts = {name: prompt for name, (_, prompt) in known.items()}
    for receiver in known:
        found = exchange_weights(accuracies, prompts, receiver, rule)
        assert found.keys() == known.keys() - {receiver}
        assert all(weight >= 0 for weight in found.values())
        assert not found or sum(found.values()) == pytest.approx(1)


def test_the_weights_are_accuracy_times_similarity():
    """By hand: cosines of 60 and of 0 degrees are 1/2 and 1."""
    prompts = {"me": np.array([2.0, 0.0]), "b": np.array([1.0, 3**0.5]), "c": np.array([5.0, 0.0])}
    accuracies = {"me": 0.9, "b": 0.8, "c": 0.2}
    found = exchange_weights(accuracies, prompts, "me")
    assert found == pytest.approx({"b": 0.4 / 0.6, "c": 0.2 / 0.6})
    assert exchange_weights(accuracies, prompts, "me", "accuracy") == pytest.approx({"b": 0.8, "c": 0.2})
    assert exchange_weights(accuracies, prompts, "me", "similarity") == pytest.approx({"b": 1 / 3, "c": 2 / 3})
    assert exchange_weights(accuracies, prompts, "me", "uniform") == {"b": 0.5, "c": 0.5}


@given(vectors.filter(lambda prompt: bool(np.abs(prompt).max() > 1e-30)), st.floats(0.01, 1))
def test_a_site_that_answers_nothing_or_points_away_is_ignored(prompt, accuracy):
    prompts = {"me": prompt, "good": prompt * np.float32(0.5), "bad": prompt, "opposite": -prompt}
    accuracies = {"me": 1.0, "good": accuracy, "bad": 0.0, "opposite": 1.0}
    assert exchange_weights(accuracies, prompts, "me") == {"bad": 0.0, "good": 1.0, "opposite": 0.0}


@given(vectors, st.floats(0, 1e-9))
def test_where_nothing_is_known_all_others_count_alike(prompt, accuracy):
    """Accuracies of 0, opposite prompts, prompts without a direction: a sum below 1e-8 says nothing."""
    third = {"a": 1 / 3, "b": 1 / 3, "c": 1 / 3}
    names = ("me", *third)
    assert exchange_weights(dict.fromkeys(names, accuracy), dict.fromkeys(names, prompt), "me") == third
    away = {"me": prompt, **dict.fromkeys(third, -prompt)}
    assert exchange_weights(dict.fromkeys(names, 1.0), away, "me") == third
    zero = {"me": np.zeros(6), **dict.fromkeys(third, prompt)}
    assert exchange_weights(dict.fromkeys(names, 1.0), zero, "me") == third


def test_a_site_alone_has_no_weights():
    assert exchange_weights({"me": 1.0}, {"me": np.ones(3)}, "me") == {}


def step(own: torch.Tensor) -> Step:
    return Step(torch.zeros(1, 2), torch.zeros(1, 2), None, torch.zeros(1, dtype=torch.int64), {"prompts.image": own})


def test_the_distance_draws_the_own_prompt_and_leaves_the_shared_one():
    """L_d = 1 - cos(p, p^s): a step against its gradient turns p towards p^s, and p^s is a constant."""
    own = torch.tensor([[1.0, 0.0], [0.0, 1.0]], requires_grad=True)
    shared = torch.tensor([[0.0, 1.0], [0.0, 3.0]], requires_grad=True)
    value = PromptDistance(0.1, {"prompts.image": shared})(step(own))
    expected = 0.1 * (1 - 3 / (2**0.5 * 10**0.5))
    assert value.item() == pytest.approx(expected)
    value.backward()
    assert shared.grad is None
    moved = own.detach() - 0.5 * own.grad
    assert PromptDistance(0.1, {"prompts.image": shared})(step(moved)).item() < value.item()


def test_the_distance_in_training_moves_the_prompts_together(make_task, make_site):
    """A large alpha leaves the prompts of two sites more alike than none does."""

    def likeness(alpha: float) -> float:
        task = make_task(rounds=3, epochs=2)
        members = {s: make_site(task, s, seed=i) for i, s in enumerate("ab")}
        _, states = play(vqa(alpha=alpha, lr=0.01), task, members)
        one, other = (np.concatenate([states[s].arrays[n].ravel() for n in sorted(PROMPTS)]) for s in "ab")
        return float(one @ other / np.linalg.norm(one) / np.linalg.norm(other))

    assert likeness(10.0) > likeness(0.0) + 0.01


PROMPTS = {"prompts.image", "prompts.text"}


def test_one_site_alone_learns_as_local(make_task, make_site):
    """Without others there is no shared prompt and no L_d: the same tensors, bit for bit."""
    task = make_task(rounds=3)
    _, alone = play(of("local"), task, {"a": make_site(task)})
    _, found = play(vqa(), task, {"a": make_site(task)})
    assert found["a"].digest() == alone["a"].digest()


def test_without_the_distance_every_site_learns_as_local(make_task, make_site):
    """alpha = 0 with use_shared=loss: the exchange reaches no model."""
    task = make_task(rounds=2)
    members = {s: make_site(task, s, seed=i) for i, s in enumerate("ab")}
    _, alone = play(of("local"), task, members)
    _, found = play(vqa(alpha=0.0), task, members)
    assert {s: state.digest() for s, state in found.items()} == {s: state.digest() for s, state in alone.items()}


@pytest.mark.parametrize(
    ("place", "names"), [("image", {"prompts.image"}), ("text", {"prompts.text"}), ("both", PROMPTS)]
)
def test_a_round_moves_a_prompt_and_nothing_else(place, names, make_task, make_site):
    """Array bytes of each reply and of each broadcast are the prompt's: n_p x d values a kind, float32.

    Before the first reply there is nothing to broadcast.
    """
    task, seen = make_task(rounds=2), []
    members = {s: make_site(task, s, seed=i) for i, s in enumerate("abc")}
    play(vqa(prompt_site=place, prompt_length=5), task, members, watch=seen.append)
    for exchange in seen:
        sent = exchange.broadcasts.values()
        assert exchange.phase.round > 1 or not any(payload.arrays for payload in sent)
        for payload in (*exchange.replies.values(), *(sent if exchange.phase.round > 1 else ())):
            assert payload.arrays.keys() == names
            assert sum(value.nbytes for value in payload.arrays.values()) == len(names) * 5 * 32 * 4
        for reply in exchange.replies.values():
            assert reply.scalars.keys() == {"accuracy"} and 0 <= reply.scalars["accuracy"] <= 1


def test_all_sites_begin_with_the_same_model(make_task, make_site):
    """Prompts of models that began apart say nothing to one another: same weights, same prompt."""
    task, method = make_task(), vqa()
    server = method.start(task, ["a", "b"])
    models = [
        method.predictor(make_site(task, s, seed=i), State(), told(method, server, task, s)) for i, s in enumerate("ab")
    ]
    for name, value in models[0].tensors.items():
        np.testing.assert_array_equal(value, models[1].tensors[name])
    for name in PROMPTS:
        np.testing.assert_array_equal(server.arrays[name], models[0].tensors[name])


def prompts_of(*rows: list[float]) -> dict[str, np.ndarray]:
    return {name: np.array([row], np.float32) for name, row in zip(sorted(PROMPTS), rows, strict=True)}


@pytest.mark.parametrize(
    ("rule", "weight"),  # of b: accuracy 1.0, cosine 1/2; of c: 0.25 and 1
    [("reliability", 0.5 / 0.75), ("accuracy", 1 / 1.25), ("similarity", 0.5 / 1.5), ("uniform", 0.5)],
)
def test_the_shared_prompt_is_the_weighted_sum_of_the_others(make_task, rule, weight):
    """p_a^s = sum over b and c; the whole prompt, both kinds together, says how alike two sites are."""
    task: Task = make_task()
    method = vqa(prompt_length=1, width=2, heads=1, exchange=rule)
    state = method.start(task, ["a", "b", "c"])
    sent = {
        "a": prompts_of([1, 0], [0, 0]),
        "b": prompts_of([1, 0], [3**0.5, 0]),
        "c": prompts_of([4, 0], [0, 0]),
    }
    accuracies = {"a": 0.5, "b": 1.0, "c": 0.25}
    replies = {name: Payload(arrays, {"accuracy": accuracies[name]}) for name, arrays in sent.items()}
    state = method.aggregate(state, Phase("train", 1), replies)
    found = method.broadcast(state, Phase("train", 2), ["a", "b", "c"])["a"].arrays
    np.testing.assert_allclose(found["prompts.image"], [[weight * 1 + (1 - weight) * 4, 0]], rtol=1e-6)
    np.testing.assert_allclose(found["prompts.text"], [[weight * 3**0.5, 0]], rtol=1e-6)
    assert found["prompts.image"].dtype == np.float32


def test_a_first_prompt_that_all_share_draws_nobody(make_task, make_site):
    """Without L_d in the first round sites leave the prompt they all began with, and have something to say."""
    task, method = make_task(rounds=1, epochs=6), vqa(lr=0.01)
    members = {s: make_site(task, s, seed=i, labels=[i % 2] * 12) for i, s in enumerate("ab")}
    server, states = play(method, task, members)
    _, alone = play(of("local", lr=0.01), task, members)
    assert {s: state.digest() for s, state in states.items()} == {s: state.digest() for s, state in alone.items()}
    vectors = [np.concatenate([states[s].arrays[name].ravel() for name in sorted(PROMPTS)]) for s in "ab"]
    one, other = (vector / np.linalg.norm(vector) for vector in vectors)
    assert one @ other < 0.99
    received = told(method, server, task, "b").arrays
    for name in PROMPTS:
        np.testing.assert_array_equal(received[name], states["a"].arrays[name])  # two sites: the other's prompt


def test_a_site_that_never_replied_is_not_listened_to(make_task, make_site):
    task, method = make_task(), vqa()
    server, states = play(method, task, {s: make_site(task, s, seed=i) for i, s in enumerate("abc")}, absent={1: "c"})
    received = told(method, server, task, "a").arrays
    for name in PROMPTS:
        np.testing.assert_allclose(received[name], states["b"].arrays[name], rtol=1e-6)
    assert told(method, server, task, "c").arrays.keys() == PROMPTS


def test_a_site_without_tune_questions_tells_accuracy_0_and_is_not_listened_to(make_task, make_site):
    """docs/methods.md 11.2: as a site with one question, which learns from it. Site b answers some rightly."""
    task, method, seen = make_task(epochs=4), vqa(lr=0.01), []
    members = {s: make_site(task, s, seed=i) for i, s in enumerate("abc")}
    lone = members["c"]
    one, none = (dataclasses.replace(lone.train, rows=lone.train.rows[:n]) for n in (1, 0))
    members["c"] = dataclasses.replace(lone, train=one, unlabelled=one, tune=none)
    server, states = play(method, task, members, watch=seen.append)
    told_of = {name: reply.scalars["accuracy"] for name, reply in seen[-1].replies.items()}
    assert told_of["c"] == 0 and told_of["b"] > 0
    received = told(method, server, task, "a").arrays
    for name in PROMPTS:
        np.testing.assert_allclose(received[name], states["b"].arrays[name], rtol=1e-6)
    assert told(method, server, task, "c").arrays.keys() == PROMPTS


@pytest.mark.parametrize("said", [None, "good", -0.1, 1.1])
def test_an_accuracy_that_is_none_is_refused(said, make_task):
    task, method = make_task(), vqa()
    state = method.start(task, ["a"])
    first = {name: state.arrays[name] for name in PROMPTS}
    scalars = {} if said is None else {"accuracy": said}
    with pytest.raises(TrainingError, match=re.escape(f"accuracy = {said!r}; it must be a number from 0 to 1")):
        method.aggregate(state, Phase("train", 1), {"a": Payload(first, scalars)})


def test_the_accuracy_that_is_sent_is_that_of_the_tune_rows(make_task, make_site):
    """Their answers are turned round, so that who learns the training rows by heart has none of them right."""
    task, method, seen = make_task(epochs=3), vqa(lr=0.01), []
    site = make_site(task, "a")
    site = dataclasses.replace(site, tune=dataclasses.replace(site.tune, labels=1 - site.tune.labels))
    server, states = play(method, task, {"a": site}, watch=seen.append)
    predictor = method.predictor(site, states["a"], told(method, server, task, "a"))
    shares = [np.mean(predict_rows(predictor, rows).predicted == rows.targets) for rows in (site.train, site.tune)]
    assert shares == [1.0, 0.0]
    assert seen[-1].replies["a"].scalars["accuracy"] == 0.0


@pytest.mark.parametrize("use", ["loss", "concat"])
def test_a_shared_prompt_is_read_where_it_is_asked_for(use, make_task, make_site):
    """With `concat` the attention reads p^s beside p; with `loss` it meets the model in L_d alone."""
    task, method = make_task(rounds=2), vqa(use_shared=use, lr=0.01)
    members = {s: make_site(task, s, seed=i) for i, s in enumerate("ab")}
    server, states = play(method, task, members)
    broadcast = told(method, server, task, "a")
    other = Payload({name: value + 1 for name, value in broadcast.arrays.items()}, broadcast.scalars)
    found = [
        predict_rows(method.predictor(members["a"], states["a"], one), members["a"].tune).probabilities
        for one in (broadcast, other)
    ]
    assert np.array_equal(*found) == (use == "loss")
    assert not any(name.startswith("shared.") for name in states["a"].arrays)


def test_pictures_that_are_asked_nothing_are_refused(make_task):
    task = dataclasses.replace(make_task(), questions=None)
    with pytest.raises(SettingError, match="answers questions, and the pictures of this task are asked none"):
        vqa().start(task, ["a"])
