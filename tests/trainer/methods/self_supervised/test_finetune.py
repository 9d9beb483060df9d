"""docs/methods.md 3.4: fine-tuning of a whole network, alone or averaged. arXiv 2208.11278 section V."""

from dataclasses import replace

import numpy as np
import pytest
from tests.trainer.methods.conftest import Exchange, examples, play, told

from edgefl_protocol import digest
from edgefl_trainer.contract import Site, State, Task
from edgefl_trainer.engine.hyper_parameters import build
from edgefl_trainer.engine.models import predict
from edgefl_trainer.errors import SettingError
from edgefl_trainer.methods.finetune import FineTune
from edgefl_trainer.models.backbones import frozen_network, load_backbone, weights_of
from edgefl_trainer.models.scoring import ScoreModule

PX = 36
SMALL_CNN = "cnn:mobilenetv3_small_050"
VIT = {"batch": 4, "lr": 1e-3, "warmup": 0.0}
CNN = {"batch": 4, "lr": 1e-3, "optimizer": "adam", "schedule": "steps", "weight_decay": 0.0}


@pytest.fixture(scope="module")
def networks():
    return {name: load_backbone(name, image_px=PX, seed=3) for name in ("tiny", SMALL_CNN, "cnn:resnet18")}


@pytest.fixture(params=["tiny", pytest.param(SMALL_CNN, marks=pytest.mark.slow)])
def network(request, networks):
    return networks[request.param]


def method(network, mode: str, **more: object) -> FineTune:
    return build(FineTune, {**(VIT if network.spec.name == "tiny" else CNN), "mode": mode, **more})


def task_of(network, rounds: int = 2, epochs: int = 1, seed: int = 0) -> Task:
    return Task(
        name="all",
        classes=("a", "b"),
        backbone=network.spec,
        rounds=rounds,
        epochs=epochs,
        seed=seed,
        initial=weights_of(network.network),
    )


def site_of(network, task: Task, name: str = "a", count: int = 8, seed: int = 1) -> Site:
    train = examples(count, 2, seed)
    return Site(name=name, task=task, backbone=network, train=train, tune=examples(8, 2, seed + 50), unlabelled=train)


def sites_of(network, task: Task) -> dict[str, Site]:
    return {"a": site_of(network, task, "a", 8, 1), "b": site_of(network, task, "b", 5, 2)}


@pytest.mark.parametrize("mode", ["local", "federated"])
def test_the_network_learns_and_scores(network, mode):
    """The network differs from the one it began as, and the score comes from it: with its weights zeroed it changes."""
    task = task_of(network)
    tuning, sites = method(network, mode), sites_of(network, task)
    server, states = play(tuning, task, sites)
    predictor = tuning.predictor(sites["a"], states["a"], told(tuning, server, task, "a"))
    start = weights_of(network.network)
    assert predictor.network.keys() == start.keys()
    moved = [name for name, value in predictor.network.items() if not np.array_equal(value, start[name])]
    assert len(moved) > 0.9 * len(start)
    images = sites["a"].tune.images[:4]
    scores = predict(predictor, images).probabilities
    zeroed = {name: np.zeros_like(value) for name, value in predictor.network.items()}
    empty = replace(predictor, module=ScoreModule(frozen_network(network.spec, zeroed), predictor.module.options))
    assert not np.allclose(scores, predict(empty, images).probabilities)
    begun = replace(predictor, module=ScoreModule(network, predictor.module.options))
    assert not np.allclose(scores, predict(begun, images).probabilities)


def test_local_mode_sends_no_array_and_receives_none(network):
    task, seen = task_of(network), []
    server, _ = play(method(network, "local"), task, sites_of(network, task), watch=seen.append)
    exchanged: list[Exchange] = seen
    for each in exchanged:
        assert not any(payload.arrays for payload in (*each.replies.values(), *each.broadcasts.values()))
    assert not server.arrays
    assert method(network, "local").travels == () and method(network, "federated").travels == ("weights",)


def test_a_federation_of_one_site_learns_what_the_site_learns_alone(network):
    """Same schedule, moments afresh in both: the mean over one site is that site."""
    task = task_of(network, rounds=2)
    alone, joined = (method(network, mode, optimizer_state="reset") for mode in ("local", "federated"))
    site = {"a": site_of(network, task)}
    _, states = play(alone, task, site)
    server, _ = play(joined, task, site)
    assert digest(states["a"].arrays) == server.digest()


def test_two_rounds_of_one_epoch_are_one_round_of_two_when_moments_stay(network, monkeypatch):
    """In local mode a round is only where the model is judged: moments and schedule run through."""
    monkeypatch.setattr(Site, "epoch_order", lambda self, rows, round_, epoch: np.arange(len(rows)))
    tuning = method(network, "local", augment="none", drop_path=0.0)
    parted, whole = task_of(network, rounds=2, epochs=1), task_of(network, rounds=1, epochs=2)
    _, first = play(tuning, parted, {"a": site_of(network, parted)})
    _, second = play(tuning, whole, {"a": site_of(network, whole)})
    assert first["a"].digest() == second["a"].digest()
    reset = method(network, "local", augment="none", drop_path=0.0, optimizer_state="reset")
    _, third = play(reset, parted, {"a": site_of(network, parted)})
    assert tuning.predictor(site_of(network, parted), third["a"], told(reset, State(), parted, "a")) is not None
    assert not np.array_equal(third["a"].arrays["head.weight"], first["a"].arrays["head.weight"])


def test_running_statistics_are_the_weighted_mean(networks):
    """docs/methods.md 2.5: FedAvg of batch norm's running statistics by n_c, by hand; counters stay whole numbers."""
    network = networks["cnn:resnet18"]
    task, seen = task_of(network, rounds=1), []
    sites = {"a": site_of(network, task, "a", 9, 1), "b": site_of(network, task, "b", 4, 2)}
    server, _ = play(method(network, "federated"), task, sites, watch=seen.append)
    replies = seen[0].replies
    assert {name: reply.scalars["n_train"] for name, reply in replies.items()} == {"a": 9, "b": 4}
    for name in ("network.bn1.running_mean", "network.layer4.1.bn2.running_var", "network.conv1.weight", "head.bias"):
        ours = {site: reply.arrays[name].astype(np.float64) for site, reply in replies.items()}
        assert not np.array_equal(ours["a"], ours["b"])
        by_hand = (9 * ours["a"] + 4 * ours["b"]) / 13
        np.testing.assert_allclose(server.arrays[name], by_hand, rtol=1e-6, atol=1e-8)
    counter = server.arrays["network.bn1.num_batches_tracked"]
    assert counter.dtype == np.int64 and counter.shape == ()
    assert int(counter) == round((9 * 2 + 4 * 1) / 13)  # steps of batches larger than one image


def test_a_step_tells_its_images_and_the_time_spent_waiting_for_them(networks):
    task, told = task_of(networks["tiny"], rounds=1), list[dict]()
    site = replace(site_of(networks["tiny"], task, count=9), report=told.append)
    play(method(networks["tiny"], "local"), task, {"a": site})
    found = [facts for facts in told if "step" in facts]
    assert [facts["images"] for facts in found] == [4, 4, 1]
    assert all(0 <= facts["wait_seconds"] < 60 for facts in found)


def test_a_batch_of_one_image_leaves_batch_statistics_alone(networks):
    """One value a channel has no variance: torch would refuse it; five images in batches of four end with one."""
    network = networks["cnn:resnet18"]
    task = task_of(network, rounds=1)
    site = {"a": site_of(network, task, count=1)}
    _, states = play(method(network, "local"), task, site)
    start = weights_of(network.network)
    assert np.array_equal(states["a"].arrays["network.bn1.running_mean"], start["bn1.running_mean"])
    assert not np.array_equal(states["a"].arrays["network.conv1.weight"], start["conv1.weight"])


def test_the_next_round_starts_from_the_mean_and_nothing_of_the_site(network):
    """Without `keep`, what a site learned reaches the next round only through the average."""
    task = task_of(network, rounds=2)
    tuning, sites = method(network, "federated"), sites_of(network, task)
    server, states = play(tuning, task, sites)
    broadcast = told(tuning, server, task, "a")
    once, _ = tuning.local_round(sites["a"], states["a"], broadcast)
    again, _ = tuning.local_round(sites["a"], State(), broadcast)
    assert once.digest() == again.digest()


def test_without_a_network_to_start_from_it_is_fresh_by_seed(networks):
    task = replace(task_of(networks["tiny"]), initial={})
    tuning = method(networks["tiny"], "federated")
    first, same = tuning.start(task, ["a"]), tuning.start(task, ["a"])
    other = tuning.start(replace(task, seed=1), ["a"])
    assert first.digest() == same.digest() != other.digest()
    given = tuning.start(task_of(networks["tiny"]), ["a"])
    assert np.array_equal(given.arrays["network.norm.weight"], networks["tiny"].network.norm.weight.numpy())


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "beit3_base_patch16_224"])
def test_a_network_of_timms_hub_is_learned_on_from_all_its_weights(name, hub):
    """docs/methods.md 3.4: from the pre-trained weights, learned positions too. The second norms behind the mean."""
    network = load_backbone(f"timm:{name}", image_px=PX)
    pretrained = {f"network.{key}": value.numpy() for key, value in network.network.state_dict().items()}
    task = task_of(network, rounds=1)
    tuning = build(FineTune, {**VIT, "mode": "federated", "optimizer_state": "keep"})
    begun = tuning.start(task, ["a"]).arrays
    assert pretrained.keys() == begun.keys() - {"head.weight", "head.bias"}
    assert all(np.array_equal(begun[key], value) for key, value in pretrained.items())
    _, states = play(tuning, task, {"a": site_of(network, task)})
    assert not any(np.array_equal(states["a"].arrays[key], value) for key, value in pretrained.items())


def test_a_trained_network_is_never_silently_left_out(networks):
    """A task without weights, as a coordinator makes it, must not begin afresh where it names a trained network."""
    spec = replace(networks["tiny"].spec, name="run:somewhere")
    task = replace(task_of(networks["tiny"]), backbone=spec, initial={})
    for mode in ("local", "federated"):
        with pytest.raises(SettingError, match="carries no weights to start from"):
            method(networks["tiny"], mode).start(task, ["a"])


def test_a_site_that_took_no_part_scores_with_the_beginning(network):
    task = task_of(network)
    tuning, site = method(network, "local"), site_of(network, task)
    predictor = tuning.predictor(site, State(), told(tuning, State(), task, "a"))
    start = weights_of(network.network)
    assert all(np.array_equal(predictor.network[name], value) for name, value in start.items())
    assert np.abs(predictor.tensors["head.bias"]).max() == 0
