"""docs/methods.md 3.4, private parts and the fit at home. FedBN, arXiv 2102.07623, section 3: batch norm stays."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.trainer.methods.conftest import Exchange, examples, play, told
from torch import Tensor, nn

from edgefl_protocol import Payload
from edgefl_trainer.contract import Phase, Site, State, Task
from edgefl_trainer.engine.hyper_parameters import build
from edgefl_trainer.engine.judging.held_out import newcomers, without_model
from edgefl_trainer.errors import SettingError
from edgefl_trainer.learning import whole_network
from edgefl_trainer.learning.whole_network import norm_tensors
from edgefl_trainer.method_halves import stamped
from edgefl_trainer.methods.finetune import FineTune
from edgefl_trainer.models.backbones import build_network, load_backbone, load_weights, weights_of

PX = 36
CNN = {"batch": 4, "lr": 1e-3, "optimizer": "adam", "schedule": "constant", "weight_decay": 0.0}
HEAD = {"head.weight", "head.bias"}


@pytest.fixture(scope="module")
def network():
    return load_backbone("cnn:test_resnet", image_px=PX, seed=3)


@pytest.fixture(scope="module")
def norms(network) -> set[str]:
    """What batch norm holds, by another rule than the code's: every layer with running statistics."""
    names = weights_of(network.network)
    layers = {name.removesuffix("running_mean") for name in names if name.endswith("running_mean")}
    return {f"network.{name}" for name in names if name.rpartition(".")[0] + "." in layers}


def method(**more: object) -> FineTune:
    return build(FineTune, {**CNN, "mode": "federated", **more})


def task_of(network, rounds: int = 1) -> Task:
    initial = weights_of(network.network)
    return Task(name="all", classes=("a", "b"), backbone=network.spec, rounds=rounds, epochs=1, seed=0, initial=initial)


def site_of(network, task: Task, name: str, count: int, seed: int) -> Site:
    train = examples(count, 2, seed)
    return Site(name=name, task=task, backbone=network, train=train, tune=examples(8, 2, seed + 50), unlabelled=train)


def sites_of(network, task: Task) -> dict[str, Site]:
    return {"a": site_of(network, task, "a", 9, 1), "b": site_of(network, task, "b", 4, 2)}


def expected_private(part: str, norms: set[str]) -> set[str]:
    return {"none": set(), "head": HEAD, "head_and_norms": HEAD | norms}[part]


def test_batch_norm_is_what_has_running_statistics(network, norms):
    found = {f"network.{name}" for name in norm_tensors(network.network)}
    assert found == norms and len(norms) == 5 * sum(name.endswith("running_var") for name in norms)


@pytest.mark.parametrize("part", ["head", "head_and_norms"])
def test_what_is_private_crosses_in_neither_direction(network, norms, part):
    """Of two rounds and the fit at home, every payload; everything else of the network crosses in each round."""
    task, seen = task_of(network, rounds=2), list[Exchange]()
    tuning = method(private=part)
    server, _ = play(tuning, task, sites_of(network, task), watch=seen.append)
    private = expected_private(part, norms)
    whole = {f"network.{name}" for name in weights_of(network.network)} | HEAD
    assert [each.phase.kind for each in seen] == ["train", "train", "final"]
    for each in seen:
        for payload in (*each.broadcasts.values(), *each.replies.values()):
            assert not private & set(payload.arrays)
        for payload in each.broadcasts.values():
            assert set(payload.arrays) == whole - private
    assert all(set(reply.arrays) == whole - private for each in seen[:2] for reply in each.replies.values())
    assert not any(reply.arrays for reply in seen[2].replies.values())
    assert set(server.arrays) == whole - private


def test_the_averaged_part_is_the_weighted_mean_and_the_rest_is_each_sites_own(network, norms):
    """By hand: theta = (9 a + 4 b) / 13 of what crosses; norms and heads of the two sites went apart."""
    task, seen = task_of(network), list[Exchange]()
    tuning, sites = method(private="head_and_norms", home="none"), sites_of(network, task)
    server, states = play(tuning, task, sites, watch=seen.append)
    ours = {name: reply.arrays for name, reply in seen[0].replies.items()}
    assert server.arrays
    for name in server.arrays:
        by_hand = (9 * ours["a"][name].astype(np.float64) + 4 * ours["b"][name].astype(np.float64)) / 13
        np.testing.assert_allclose(server.arrays[name], by_hand, rtol=1e-6, atol=1e-9)
    for name, site in sites.items():
        begun = tuning.current(site, states[name], told(tuning, server, task, name))
        for key in HEAD | norms:
            assert np.array_equal(begun[key], states[name].arrays[key])
        for key in set(server.arrays):
            assert np.array_equal(begun[key], server.arrays[key])
    moved = [name for name in norms if not np.array_equal(states["a"].arrays[name], states["b"].arrays[name])]
    assert len(moved) > 0.7 * len(norms)


def test_a_site_that_joins_begins_with_the_norms_of_its_own_encoder(network, norms):
    """docs/methods.md 3.4: after `local-cl` a site's task holds the encoder that it learned; the rest is sent."""
    task = task_of(network)
    own = {name: value + 1 for name, value in task.initial.items()}
    site = site_of(network, replace(task, initial=own), "a", 9, 1)
    tuning = method(private="head_and_norms")
    server = tuning.start(task, ["a"])
    begun = tuning.current(site, State(), told(tuning, server, task, "a"))
    assert all(np.array_equal(begun[name], own[name.removeprefix("network.")]) for name in norms)
    assert all(np.array_equal(begun[name], value) for name, value in server.arrays.items())
    assert begun.keys() == server.arrays.keys() | norms | HEAD


@pytest.mark.parametrize("home", ["head", "head_and_norms", "network"])
def test_the_fit_at_home_moves_its_part_of_the_averaged_network_alone(network, norms, home):
    """Of the whole network every tensor moves, the statistics of batch norm among them; nothing of the fit is sent."""
    task, seen = task_of(network), list[Exchange]()
    tuning, sites = method(home=home), sites_of(network, task)
    server, states = play(tuning, task, sites, watch=seen.append)
    assert seen[-1].phase.kind == "final" and not any(reply.arrays for reply in seen[-1].replies.values())
    fitted = set(server.arrays) if home == "network" else expected_private(home, norms)
    for name, site in sites.items():
        predictor = tuning.predictor(site, states[name], told(tuning, server, task, name))
        assert predictor is not None
        now = {f"network.{key}": value for key, value in predictor.network.items()} | dict(predictor.tensors)
        changed = {key for key, value in server.arrays.items() if not np.array_equal(now[key], value)}
        assert changed <= fitted and changed >= HEAD
        if home == "network":
            assert changed == set(server.arrays)
        if home == "head_and_norms":
            assert {key for key in norms if key.endswith("running_mean")} <= changed


def test_statistics_at_home_are_those_of_the_sites_own_pictures(network, norms):
    """AdaBN, arXiv 1603.04779, 2.2: each layer normalises by mean and variance of what it sees of the new domain.

    By hand: the means and unbiased variances of each norm's input while the pictures pass together. No label is read.
    """
    task = task_of(network)
    tuning, sites = method(home="statistics"), sites_of(network, task)
    server, states = play(tuning, task, sites)
    site = replace(sites["a"], train=replace(sites["a"].train, labels=np.zeros_like(sites["a"].train.labels)))
    state, reply = tuning.local_round(site, State(), stamped(Payload(server.arrays, {}), Phase("final", 2), 1))
    assert not reply.arrays and state.digest() == states["a"].digest()
    seen: dict[str, Tensor] = {}
    model = tuning.model(task)
    load_weights(
        model.network, {n.removeprefix("network."): server.arrays[n] for n in server.arrays if n not in HEAD}, ""
    )
    for name, layer in model.network.named_modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.register_forward_pre_hook(lambda _, given, name=name: seen.update({name: given[0].detach()}))
    model.train().features(network.normalise(torch.from_numpy(site.train.images[site.train.rows])))
    assert len(seen) == len(norms) // 5
    for name, given in seen.items():
        flat = given.transpose(0, 1).flatten(1).double()
        mean, variance = (state.arrays[f"network.{name}.running_{kind}"] for kind in ("mean", "var"))
        np.testing.assert_allclose(mean, flat.mean(dim=1), rtol=1e-3, atol=1e-5)
        np.testing.assert_allclose(variance, flat.var(dim=1), rtol=1e-3, atol=1e-6)
    changed = {key for key, value in server.arrays.items() if not np.array_equal(state.arrays[key], value)}
    assert changed <= {key for key in norms if "running_" in key or key.endswith("num_batches_tracked")}


@pytest.mark.parametrize(("pictures", "batch"), [(9, 4), (9, 8)])
def test_statistics_at_home_weigh_batches_of_nearly_equal_size(network, monkeypatch, pictures, batch):
    """The first norm's mean, by hand: of 9 pictures in parts of 3, 3, 3 and of 5, 4; never a part of one."""
    monkeypatch.setattr(whole_network, "STATISTICS_BATCH", batch)
    task = task_of(network)
    tuning, site = method(home="statistics"), site_of(network, task, "a", pictures, 1)
    model = tuning.model(task, build_network(task.backbone, 1))
    whole_network.count_statistics(site, model)
    first = next(layer for layer in model.network.modules() if isinstance(layer, nn.Conv2d))
    parts = {4: [(0, 3), (3, 6), (6, 9)], 8: [(0, 5), (5, 9)]}[batch]
    seen = [first(network.normalise(torch.from_numpy(site.train.images[site.train.rows[a:b]]))) for a, b in parts]
    by_hand = torch.stack([part.mean(dim=(0, 2, 3)) for part in seen]).mean(dim=0)
    norm = next(layer for layer in model.network.modules() if isinstance(layer, nn.BatchNorm2d))
    np.testing.assert_allclose(norm.running_mean, by_hand.detach(), rtol=1e-3, atol=1e-5)


def test_one_picture_leaves_the_averaged_statistics_as_they_are(network):
    task = task_of(network)
    tuning, site = method(home="statistics"), site_of(network, task, "a", 1, 1)
    model = tuning.model(task, build_network(task.backbone, 1))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    whole_network.count_statistics(site, model)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_one_step_at_home_is_adams_first_step_on_the_averaged_features(network):
    """By hand: g = (softmax - onehot)ᵀ f / n on the frozen network's features; Adam's first step is lr·g/(|g| + ε)."""
    task, rate = task_of(network), 0.01
    tuning = method(home="head", home_lr=rate, home_epochs=1, batch=64, augment="none")
    site = {"a": site_of(network, task, "a", 9, 1)}
    server, states = play(tuning, task, site)
    images, targets = site["a"].train.read(np.arange(9))
    before = tuning.predictor(site["a"], State(), told(tuning, server, task, "a"))
    frozen = before.score_module.backbone
    with torch.inference_mode():
        features = frozen(frozen.normalise(images)).pooled.numpy().astype(np.float64)
    weight, bias = (server.arrays[name].astype(np.float64) for name in ("head.weight", "head.bias"))
    logits = features @ weight.T + bias
    shares = np.exp(logits - logits.max(axis=1, keepdims=True))
    shares /= shares.sum(axis=1, keepdims=True)
    error = (shares - np.eye(2)[targets.numpy()]) / 9
    for name, start, slope in (
        ("head.weight", weight, error.T @ features),
        ("head.bias", bias, error.sum(axis=0)),
    ):
        wanted = start - rate * slope / (np.abs(slope) + 1e-8)
        np.testing.assert_allclose(states["a"].arrays[name], wanted, atol=2e-5)


def test_a_held_out_site_scores_with_the_averaged_network_and_head(network):
    """It is fitted nowhere: what the others fit at home stays there."""
    task = task_of(network)
    tuning, sites = method(home="head_and_norms"), sites_of(network, task)
    server, _ = play(tuning, task, sites)
    newcomer = replace(sites["a"], name="c")
    found = newcomers(tuning, task, server, {"c": newcomer})["c"]
    now = {f"network.{key}": value for key, value in found.network.items()} | dict(found.tensors)
    assert all(np.array_equal(now[key], value) for key, value in server.arrays.items())


def test_without_a_shared_head_a_held_out_site_has_no_model_and_the_run_says_so(network):
    task = task_of(network)
    tuning, sites = method(private="head"), sites_of(network, task)
    assert "c will have no figures" in str(without_model("finetune", tuning.start(task, ["a"]), ["c"]))
    server, _ = play(tuning, task, sites)
    assert newcomers(tuning, task, server, {"c": replace(sites["a"], name="c")}) == {}


def test_a_site_that_joins_later_begins_with_the_private_parts_of_the_beginning(network, norms):
    task = task_of(network, rounds=2)
    tuning, sites = method(private="head_and_norms"), sites_of(network, task)
    server, _ = play(tuning, task, {"a": sites["a"]})
    begun = tuning.current(sites["b"], State(), told(tuning, server, task, "b"))
    start = tuning.beginning(task)
    assert begun.keys() == start.keys()
    assert all(np.array_equal(begun[key], start[key]) for key in HEAD | norms)
    assert all(np.array_equal(begun[key], value) for key, value in server.arrays.items())


def test_a_plan_has_the_fit_at_home_only_where_something_is_fitted():
    assert [phase.kind for phase in method().phases(2)] == ["train", "train"]
    assert method(private="head").phases(2)[-1] == Phase("final", 3)
    assert method(private="head", home="none").fitted_at_home == "none"
    assert method(home="head").fitted_at_home == "head" and method(home="head").private == "none"


@pytest.mark.parametrize("more", [{"private": "head"}, {"home": "head"}, {"home": "network"}])
def test_a_site_alone_has_nothing_private(more):
    with pytest.raises(SettingError, match="with mode=local every site keeps its whole network"):
        method(mode="local", **more)


@pytest.mark.parametrize("more", [{"private": "head_and_norms"}, {"home": "head_and_norms"}, {"home": "statistics"}])
def test_a_network_without_batch_norm_is_refused(more):
    tiny = load_backbone("tiny", image_px=PX, seed=3)
    with pytest.raises(SettingError, match="is about batch norm, and tiny has none: set head"):
        method(**more).start(replace(task_of(tiny), initial={}), ["a"])
    method(home="network").start(replace(task_of(tiny), initial={}), ["a"])  # is about all that there is
