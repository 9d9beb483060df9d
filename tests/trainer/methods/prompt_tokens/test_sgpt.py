"""SGPT against the behaviour of its reference code, written out again in numpy (docs/methods.md 5.5)."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.trainer.methods.conftest import after, play
from tests.trainer.models.test_mixed_and_grouped import selecting, walk

from edgefl_protocol import Payload
from edgefl_trainer.contract import Phase, State
from edgefl_trainer.engine.hyper_parameters import build
from edgefl_trainer.errors import SettingError
from edgefl_trainer.learning import softmax
from edgefl_trainer.learning.prompt_groups import least_used_nearest, mean_keys, orthogonal_keys
from edgefl_trainer.method_halves import stamped
from edgefl_trainer.methods import METHODS

PLAIN = {"batch": 4, "head_norm": "none", "groups": 6}
NAMES = {"prompts.s", "prompts.g", "keys", "head.weight"}


def make(**hyper):
    return build(METHODS["sgpt"], {**PLAIN, **hyper})


def received(method, task, used=None, round_=1):
    """What a site gets in a round, with a history of selections."""
    phase, state = Phase("train", round_), method.start(task, ["a"])
    history = np.zeros(method.groups, np.int64) if used is None else np.asarray(used)
    state = State({**state.arrays, "selections": history}, {**state.values, "readout": "cls"})
    return stamped(method.broadcast(state, phase, ["a"])["a"], phase, task.rounds)


@pytest.fixture
def stages(monkeypatch):
    """Every call of local learning: epochs, names, and all tensors before and after."""
    calls, learn = [], softmax.learn

    def watched(recipe, site, module, tensors, names, round_, **options):
        before = {name: value.detach().clone() for name, value in tensors.items()}
        found = learn(recipe, site, module, tensors, names, round_, **options)
        moved = {name for name, value in tensors.items() if not value.detach().equal(before[name])}
        epochs = options.get("epochs")
        calls.append(
            {"names": set(names), "moved": moved, "epochs": list(range(site.task.epochs) if epochs is None else epochs)}
        )
        return found

    monkeypatch.setattr(softmax, "learn", watched)
    return calls


def test_stage_1_leaves_keys_and_groups_and_stage_2_leaves_shared_prompts(make_task, make_site, stages):
    """docs/methods.md 5.5: block coordinate descent; everything that may learn does."""
    task = make_task(epochs=2)
    method = make()
    state, reply = method.local_round(make_site(task), State(), received(method, task))
    first, second, _rest = stages
    assert first["moved"] == {"prompts.s", "head.weight"}
    assert second["moved"] == {"prompts.g", "keys", "head.weight"}
    assert (first["epochs"], second["epochs"]) == ([0, 1], [2, 3])  # other draws in stage 2
    assert set(reply.arrays) == NAMES | {"selections"} and set(state.arrays) == NAMES
    assert reply.scalars["n_train"] == 12


def test_keys_are_drawn_in_the_first_six_epochs_of_stage_2_only(make_task, make_site, stages):
    """The reference adds the key term while `epoch <= 5`, counted from 0; momentum goes on across."""
    task = make_task(epochs=8)
    method = make()
    method.local_round(make_site(task, count=4), State(), received(method, task))
    assert [call["epochs"] for call in stages] == [list(range(8)), list(range(8, 14)), [14, 15]]
    assert "keys" in stages[1]["moved"]
    assert "keys" not in stages[2]["moved"]


@settings(max_examples=60)
@given(seed=st.integers(0, 2**32 - 1), fresh=st.booleans())
def test_training_selects_by_distance_and_frequency(seed, fresh):
    """argmin (1 − cos)·(f_g + 5e-4), f_g the share of past selections; without a past the factor is left out."""
    rng = np.random.default_rng(seed)
    cosine = rng.uniform(-1, 1, (7, 5)).astype(np.float32)
    used = np.zeros(5) if fresh else rng.integers(0, 50, 5).astype(np.float64) + np.eye(5)[0]
    factor = np.ones(5) if fresh else used / used.sum() + 5e-4
    expected = ((1 - cosine.astype(np.float64)) * factor).argmin(axis=1)
    found = least_used_nearest(torch.from_numpy(cosine), torch.from_numpy(used.astype(np.float32)))
    assert found.tolist() == expected.tolist()


def test_a_group_that_had_everything_is_left_for_others():
    """What the factor is for: the nearest group loses once all past selections were its own."""
    cosine = torch.tensor([[0.9, 0.1, 0.0]])
    assert least_used_nearest(cosine, torch.zeros(3)).tolist() == [0]
    assert least_used_nearest(cosine, torch.tensor([100.0, 0.0, 0.0])).tolist() == [1]


def test_selections_of_a_round_are_those_of_the_numpy_rule(backbone, make_task, make_site):
    """One epoch without augmentation and with keys at rest: every training image is counted at its group."""
    task = make_task(epochs=1)
    method = make(augment="none", lr=0.0)
    used = np.array([5, 0, 3, 1, 1, 40])
    broadcast = received(method, task, used)
    site = make_site(task)
    with torch.no_grad():
        pixels = backbone.normalise(torch.from_numpy(site.train.images))
        query = np.maximum(walk(backbone.vit, pixels, lambda index, x: x)[:, 0].numpy(), 0)
    keys = broadcast.arrays["keys"]
    cosine = query @ keys.T / np.linalg.norm(query, axis=1)[:, None] / np.linalg.norm(keys, axis=1)
    expected = np.bincount(((1 - cosine) * (used / used.sum() + 5e-4)).argmin(axis=1), minlength=6)
    _, reply = method.local_round(site, State(), broadcast)
    assert reply.arrays["selections"].tolist() == expected.tolist()
    _, twice = method.local_round(replace(site, task=make_task(epochs=3)), State(), broadcast)
    assert twice.arrays["selections"].tolist() == (3 * expected).tolist()


def test_the_loss_of_stage_2_is_cross_entropy_minus_the_mean_cosine(backbone, make_task, make_site):
    """Classifier on the mean of class token and group tokens; one batch at rest, walked over timm's blocks."""
    task, heard = make_task(epochs=1), []
    method = make(augment="none", lr=0.0, batch=12, group_blocks=(1, 2))
    site = replace(make_site(task), report=heard.append)
    broadcast = received(method, task)
    arrays = {name: torch.from_numpy(np.array(value)) for name, value in broadcast.arrays.items()}
    target = torch.from_numpy(site.train.targets)
    with torch.no_grad():
        pixels = backbone.normalise(torch.from_numpy(site.train.images))
        query = torch.relu(walk(backbone.vit, pixels, lambda index, x: x)[:, 0])
        cosine = torch.nn.functional.cosine_similarity(query[:, None], arrays["keys"], dim=-1)
        chosen = (1 - cosine).argmin(dim=1)
        losses = []
        for selected, tokens in ((None, 1), (chosen.tolist(), 3)):
            out = walk(backbone.vit, pixels, selecting(arrays, (0,), (1, 2), selected))
            logits = out[:, :tokens].mean(dim=1) @ arrays["head.weight"].T
            losses.append(float(torch.nn.functional.cross_entropy(logits, target)))
        losses[1] -= float(cosine.max(dim=1).values.mean())
    method.local_round(site, State(), broadcast)
    assert [fact["loss"] for fact in heard if "summary" in fact] == pytest.approx(losses, abs=1e-4)


@settings(max_examples=60)
@given(seed=st.integers(0, 2**32 - 1), sites=st.integers(1, 4))
def test_keys_are_averaged_by_selections(seed, sites):
    """Weights: the site's share of the group's selections in this round; 1/C where they are 50 or fewer."""
    rng = np.random.default_rng(seed)
    keys, counts = rng.normal(size=(sites, 3, 4)), rng.integers(0, 60, (sites, 3))
    found = mean_keys(keys, counts)
    for g in range(3):
        few = counts[:, g].sum() <= 50
        expected = keys[:, g].mean(axis=0) if few else np.average(keys[:, g], axis=0, weights=counts[:, g])
        np.testing.assert_allclose(found[g], expected, atol=1e-9)


def test_the_servers_step_is_the_references(make_task):
    """Head and prompts by images; group prompts and keys keep half of what they were; selections add up."""
    task, method, rng = make_task(), make(), np.random.default_rng(0)
    start = method.start(task, ["a", "b"])
    state = State({**start.arrays, "selections": np.arange(6)}, start.values)
    counts = {"a": np.array([60, 0, 10, 0, 51, 25]), "b": np.array([20, 0, 10, 70, 0, 25])}
    replies, sizes = {}, {"a": 30, "b": 10}
    for name in "ab":
        arrays = {k: rng.normal(size=np.shape(v)).astype(np.float32) for k, v in state.arrays.items() if k in NAMES}
        replies[name] = Payload({**arrays, "selections": counts[name]}, {"n_train": sizes[name]})
    new = method.aggregate(state, Phase("train", 1), replies)

    def mean(key):
        return (0.75 * replies["a"].arrays[key] + 0.25 * replies["b"].arrays[key]).astype(np.float64)

    np.testing.assert_allclose(new.arrays["head.weight"], mean("head.weight"), atol=1e-6)
    np.testing.assert_allclose(new.arrays["prompts.s"], mean("prompts.s"), atol=1e-6)
    expected = 0.5 * state.arrays["prompts.g"] + 0.5 * mean("prompts.g")
    np.testing.assert_allclose(new.arrays["prompts.g"], expected, atol=1e-6)
    weights = np.array([0.75, 0.5, 0.5, 0.0, 1.0, 0.5])[:, None]  # of site a
    keys = weights * replies["a"].arrays["keys"] + (1 - weights) * replies["b"].arrays["keys"]
    np.testing.assert_allclose(new.arrays["keys"], 0.5 * state.arrays["keys"] + 0.5 * keys, atol=1e-6)
    assert new.arrays["selections"].tolist() == [80, 1, 22, 73, 55, 55]


def test_fresh_tensors_are_the_references(make_task):
    """Shared prompts zero, group prompts U(−v, v), keys at right angles, all of unit norm but the first."""
    task = make_task()
    arrays = make(groups=12).start(task, ["a"]).arrays
    bound = (6 / (3 * 12**2 + task.backbone.width)) ** 0.5
    assert arrays["prompts.s"].shape == (1, 1, 64) and not arrays["prompts.s"].any()
    assert arrays["prompts.g"].shape == (1, 12, 64)
    assert 0.95 * bound < np.abs(arrays["prompts.g"]).max() <= bound
    keys = arrays["keys"].astype(np.float64)
    products = keys @ keys.T
    np.testing.assert_allclose(products - np.diag(np.diag(products)), 0, atol=1e-6)
    np.testing.assert_allclose(np.diag(products)[1:], 1, atol=1e-6)
    assert np.abs(keys[0]).max() <= (6 / (12 + 64)) ** 0.5 and np.linalg.norm(keys[0]) > 1.1
    assert not arrays["selections"].any()


@given(groups=st.integers(1, 16), seed=st.integers(0, 1000))
@settings(max_examples=20)
def test_keys_are_orthogonal_up_to_the_width(groups, seed):
    keys = orthogonal_keys(groups, 16, torch.Generator().manual_seed(seed)).double()
    unit = keys / keys.norm(dim=1, keepdim=True)
    assert torch.allclose(unit @ unit.T, torch.eye(groups, dtype=torch.float64), atol=1e-4)


def test_a_predictor_reads_the_mean_and_takes_the_nearest_group_whatever_was_used(make_task, make_site):
    """At test there is no factor; a site that never took part scores with the same model."""
    task, method = make_task(), make(group_blocks=(1, 2, 3))
    server, _ = play(method, task, {"a": make_site(task, "a")})
    broadcast = stamped(method.broadcast(server, after(task), ["new"])["new"], after(task), 1)
    predictor = method.predictor(make_site(task, "new", seed=5), State(), broadcast)
    assert (predictor.module.options.readout, predictor.module.options.prompted) == ("prompted", 3)
    assert set(predictor.tensors) == {"prompts.s", "prompts.g", "keys", "head.weight", "head.bias", "temperature"}


def test_without_standardised_features_there_is_no_warm_phase(make_task, make_site):
    """docs/methods.md 5: nothing to ask, nothing sent; otherwise moments of the class token only."""
    assert [phase.kind for phase in make().phases(2)] == ["train", "train"]
    task, method = make_task(), make(head_norm="standardise")
    warm = method.phases(1)[0]
    asked = method.broadcast(method.start(task, ["a"]), warm, ["a"])["a"]
    _, reply = method.local_round(make_site(task), State(), stamped(asked, warm, 1))
    assert warm.kind == "warm" and set(reply.arrays) == {"moments.cls"} and set(reply.scalars) == {"n_train"}


@pytest.mark.parametrize(
    ("depth", "shared", "group"),
    [(12, (0, 1, 2, 3), (4, 5, 6)), (4, (0,), (1,)), (24, tuple(range(8)), tuple(range(8, 14)))],
)
def test_blocks_follow_the_depth_unless_they_are_named(depth, shared, group):
    """docs/methods.md 5.5: shared 0 to 3 and group 4 to 6 of 12."""
    insert = make().insert(depth)
    assert (insert.shared_blocks, insert.group_blocks) == (shared, group)


@pytest.mark.parametrize(
    ("hyper", "words"),
    [
        ({"groups": 65}, "groups is 65, but this network has room for only 64"),
        ({"group_blocks": (4, 5)}, "prompts enter before block 5, but the blocks of this backbone are 0 to 3"),
        ({"shared_blocks": (0, 2), "group_blocks": (1,)}, "allowed: after the last of shared_blocks, so 3 or more"),
        ({"shared_blocks": (1, 0)}, "shared_blocks is (1, 0); allowed: rising, from 0"),
        ({"groups": 0}, "groups is 0; allowed: 1 to 10000"),
        ({"key_momentum": 1.5}, "key_momentum is 1.5; allowed: 0 to 1"),
        ({"readout": "mean"}, "sgpt reads the class token"),
    ],
)
def test_what_does_not_fit_is_told(hyper, words, make_task):
    with pytest.raises(SettingError) as caught:
        make(**hyper).start(make_task(), ["a"])
    assert words in str(caught.value)
