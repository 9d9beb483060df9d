"""FedCLF, FedMoCo and local CL: arXiv 2208.11278 section III; MoCo (arXiv 1911.05722); docs/methods.md 2."""

import dataclasses
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from tests.trainer.methods.conftest import Exchange, members, play

from edgefl_protocol import Payload
from edgefl_trainer.contract import Examples, Site, State, declared
from edgefl_trainer.engine.hyper_parameters import build
from edgefl_trainer.engine.local_engine import InProcessSite, LocalEngine
from edgefl_trainer.errors import SettingError
from edgefl_trainer.learning.unlabelled import contrast, self_supervised
from edgefl_trainer.methods import METHODS
from edgefl_trainer.models.backbones import load_backbone, load_weights

HYPER = {"batch": 4, "queue": 6}


def fedclf(**hyper: object):
    return build(METHODS["fedclf"], {**HYPER, **hyper})


class Silent:
    """Watches nothing."""

    def __getattr__(self, name):
        return lambda *_: None


@dataclass(frozen=True)
class Noted:
    """A site of the engine that notes what it was told, what it remembers and what it said."""

    site: InProcessSite
    told: list[Payload]
    said: list[Payload]

    def local_round(self, state, broadcast, report):
        result = self.site.local_round(state, broadcast, report)
        self.told.append(broadcast)
        self.said.append(result.reply)
        return result


def rows_of(values: np.ndarray) -> set[bytes]:
    return {row.tobytes() for row in np.asarray(values)}


def test_a_remote_bank_never_holds_the_sites_own_features(make_task, make_site, tmp_path):
    """FedCLF eq. 2 through the engine, three sites and two rounds: all that the others sent last, and nothing else."""
    task, method = make_task(rounds=2), fedclf()
    sites = {
        name: Noted(InProcessSite(method, site), [], [])
        for name, site in members(task, make_site, a=5, b=8, c=12).items()
    }
    LocalEngine(method=method, task=task, sites=sites, folder=tmp_path, observer=Silent()).run()
    for name, site in sites.items():
        assert "remote" not in site.told[0].arrays  # the warm phase
        for phase in (1, 2):
            received = rows_of(site.told[phase].arrays["remote"])
            before = {other: rows_of(noted.said[phase - 1].arrays["features"]) for other, noted in sites.items()}
            assert received == set().union(*(rows for other, rows in before.items() if other != name))
            assert not received & before[name]
    assert [len(sites[n].said[0].arrays["features"]) for n in "abc"] == [5, 6, 6]  # never padded, at most K
    assert [len(sites[n].said[1].arrays["features"]) for n in "abc"] == [5, 6, 6]  # III-A: those of the round alone


def test_fe_neg_contrasts_with_nothing_but_received_features(make_task, make_site, monkeypatch):
    """The negatives of every step of every round, seen where the loss is taken."""
    seen: list[torch.Tensor] = []
    plain = contrast.contrastive_loss
    monkeypatch.setattr(contrast, "contrastive_loss", lambda q, k, n, tau: seen.append(n) or plain(q, k, n, tau))
    task = make_task(rounds=2)
    exchanges: list[Exchange] = []
    play(fedclf(), task, members(task, make_site, a=8, b=8), watch=exchanges.append)
    expected = [
        torch.nn.functional.normalize(torch.from_numpy(broadcast.arrays["remote"].astype(np.float32)), dim=1)
        for exchange in exchanges[1:]
        for broadcast in exchange.broadcasts.values()
        for _step in range(2)
    ]
    assert len(seen) == len(expected) == 8
    for negatives, remote in zip(seen, expected, strict=True):
        assert rows_of(negatives) <= rows_of(remote)
        assert len(negatives) == len(remote)


def test_without_feature_exchange_it_is_fedmoco_bit_for_bit(cnn_task, make_site):
    """One is played; with the other settings, too, FedMoCo hands each half to the same FedCLF."""
    for more in ({}, {"momentum_encoder": "reset"}, {"bn": "local"}):
        assert build(METHODS["fedmoco"], {**HYPER, **more}).base == fedclf(negatives="local", **more)
    task = cnn_task(rounds=2)
    sites = members(task, make_site, a=6, b=9)
    moco: list[Exchange] = []
    clf: list[Exchange] = []
    one = play(build(METHODS["fedmoco"], HYPER), task, sites, watch=moco.append)
    two = play(fedclf(negatives="local"), task, sites, watch=clf.append)
    assert one[0].digest() == two[0].digest()
    assert {n: s.digest() for n, s in one[1].items()} == {n: s.digest() for n, s in two[1].items()}
    assert [e.replies for e in moco] == [e.replies for e in clf]


def test_a_site_alone_learns_from_its_own_negatives(make_task, make_site):
    """docs/methods.md 2, one site: no others, so local features serve, and the weights are FedMoCo's."""
    task, told = make_task(rounds=2), list[dict]()
    site = members(task, make_site, a=8)
    alone, _ = play(fedclf(), task, {"a": dataclasses.replace(site["a"], report=told.append)})
    assert [facts["warning"] for facts in told if "warning" in facts] == [
        "site a received no other site's features, so it uses its own as negatives."
    ]
    moco, _ = play(build(METHODS["fedmoco"], HYPER), task, site)
    for name, value in moco.arrays.items():
        np.testing.assert_array_equal(alone.arrays[name], value, err_msg=name)


def test_the_average_of_slow_copies_is_the_slow_copy_of_averages(cnn_task, make_site, monkeypatch):
    """`momentum_encoder=averaged`: with equally many steps at each site, this is exact."""
    m, watched = 0.9, "head.0.weight"
    steps: list[np.ndarray] = []
    plain = contrast.follow

    def noting(slow, encoder, momentum):
        assert momentum == m
        steps.append(encoder.get_parameter(watched).detach().numpy().astype(np.float64))
        plain(slow, encoder, momentum)

    monkeypatch.setattr(contrast, "follow", noting)
    task = cnn_task(rounds=2)
    method = fedclf(momentum_encoder="averaged", key_momentum=m)
    sites = members(task, make_site, a=8, b=8)
    expected = method.start(task, ["a", "b"]).arrays[watched].astype(np.float64)
    exchanges: list[Exchange] = []
    server, _ = play(method, task, sites, watch=exchanges.append)
    for round_ in range(2):
        a, b = (steps[round_ * 4 : round_ * 4 + 2], steps[round_ * 4 + 2 : round_ * 4 + 4])
        for one, two in zip(a, b, strict=True):
            expected = m * expected + (1 - m) * (one + two) / 2
    np.testing.assert_allclose(server.arrays[f"momentum.{watched}"], expected, rtol=1e-4, atol=1e-7)
    reset: list[Exchange] = []
    play(fedclf(momentum_encoder="reset", key_momentum=m), task, sites, watch=reset.append)
    sizes = [len(e[-1].replies["a"].to_bytes()) for e in (exchanges, reset)]
    assert sizes[0] > 1.9 * sizes[1]  # twice the weights travel
    begun, bank = method.start(task, ["a", "b"]), exchanges[-1].replies["a"].arrays["features"]
    assert sizes[0] < 2 * len(Payload(begun.arrays, {}).to_bytes()) + bank.nbytes + 2**14  # a coordinator's cap


def test_keys_do_not_jump_between_rounds(cnn_task, make_site):
    """arXiv 1911.05722, 3.2: a dictionary must change slowly; docs/decisions/0035.

    The next round's momentum encoder is the mean of those that filled the banks, moved by m only; never a copy of the
    network that learned.
    """
    task = cnn_task(rounds=1)
    sites = members(task, make_site, a=8, b=8)
    method = fedclf(key_momentum=0.99)
    server, _ = play(method, task, sites)
    start = method.start(task, ["a", "b"]).arrays
    learned = {name: np.abs(server.arrays[name] - start[name]).max() for name in start if name.startswith("head.")}
    for name, moved in learned.items():
        slow = np.abs(server.arrays[f"momentum.{name}"] - start[name]).max()
        assert 0 < slow < 0.05 * moved


def batch_norm(arrays) -> set[str]:
    return {name for name in arrays if ".running_" in name or "num_batches" in name}


def test_batch_norm_is_averaged_or_stays_until_the_end(cnn_task, make_site):
    """docs/methods.md 2.5, FedBN: scale, shift and statistics of batch norm; the last exchange averages them once."""
    task = cnn_task(rounds=2)
    sites = members(task, make_site, a=4, b=12)
    averaged: list[Exchange] = []
    server, states = play(fedclf(), task, sites, watch=averaged.append)
    name = min(n for n in batch_norm(server.arrays) if n.endswith("running_mean"))
    sent = averaged[-1].replies
    np.testing.assert_allclose(
        server.arrays[name], 0.25 * sent["a"].arrays[name] + 0.75 * sent["b"].arrays[name], rtol=1e-6
    )
    counter = name.replace("running_mean", "num_batches_tracked")
    assert server.arrays[counter].dtype == np.int64
    assert not batch_norm(states["a"].arrays)

    local: list[Exchange] = []
    server, states = play(fedclf(bn="local"), task, sites, watch=local.append)
    scale = name.replace("running_mean", "weight")
    for exchange in local[:-1]:
        assert all(not batch_norm(reply.arrays) and scale not in reply.arrays for reply in exchange.replies.values())
    assert local[-1].phase.kind == "final"
    for one in (name, scale):
        assert not np.array_equal(states["a"].arrays[one], states["b"].arrays[one])
        np.testing.assert_allclose(
            server.arrays[one], 0.25 * states["a"].arrays[one] + 0.75 * states["b"].arrays[one], rtol=1e-6
        )


def test_what_it_delivers_is_a_network_of_that_architecture(cnn_task, make_site, convolutional):
    from edgefl_trainer.models.backbones import build_network

    task = cnn_task()
    for hyper in ({}, {"bn": "local"}):
        method = fedclf(**hyper)
        server, _ = play(method, task, members(task, make_site, a=6, b=6))
        network = build_network(task.backbone, 0)
        load_weights(network, declared(method).encoder(server), "learned")  # refuses what is missing or too much
        assert np.isfinite(network.eval()(torch.zeros(1, 3, 36, 36)).detach().numpy()).all()


def test_learning_goes_on_from_a_given_backbone(cnn_task, convolutional):
    from edgefl_trainer.models.backbones import weights_of

    other = weights_of(load_backbone("cnn:test_resnet", image_px=36, seed=11).network)
    task = dataclasses.replace(cnn_task(), initial=other)
    found = declared(METHODS["fedclf"]).encoder(METHODS["fedclf"]().start(task, ["a"]))
    for name, value in other.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)


class Stopped(Exception):
    """The run ends here."""


@dataclass(frozen=True)
class Stopping:
    """A site whose run ends when its turn comes in one phase."""

    site: InProcessSite
    kind: str
    round: int

    def local_round(self, state, broadcast, report):
        if (broadcast.scalars["phase"], broadcast.scalars["round"]) == (self.kind, self.round):
            raise Stopped
        return self.site.local_round(state, broadcast, report)


@pytest.mark.slow
def test_a_run_stopped_in_any_phase_goes_on_to_the_same_digest(cnn_task, make_site, tmp_path):
    """docs/design.md 4: warm, train and final phases, each stopped after its first site."""
    task, method = cnn_task(rounds=2), fedclf(bn="local", momentum_encoder="local", dp_noise=0.5)
    sites = {name: InProcessSite(method, site) for name, site in members(task, make_site, a=6, b=9).items()}

    def played(folder: str, **others) -> str:
        (tmp_path / folder).mkdir(exist_ok=True)
        engine = LocalEngine(
            method=method, task=task, sites={**sites, **others}, folder=tmp_path / folder, observer=Silent()
        )
        return engine.run().digest()

    undisturbed = played("one")
    for kind, round_ in (("warm", 0), ("train", 1), ("train", 2), ("final", 3)):
        with pytest.raises(Stopped):
            played("two", b=Stopping(sites["b"], kind, round_))
    assert played("two") == undisturbed


def test_local_cl_sends_nothing_and_keeps_a_network_at_each_site(cnn_task, make_site):
    task = cnn_task(rounds=2)
    method = build(METHODS["local-cl"], HYPER)
    seen: list[Exchange] = []
    server, states = play(method, task, members(task, make_site, a=6, b=9), watch=seen.append)
    assert all(not payload.arrays for e in seen for payload in (*e.broadcasts.values(), *e.replies.values()))
    start = method.start(task, ["a", "b"])
    assert server.digest() == start.digest()
    own = {name: declared(method).encoder(state) for name, state in states.items()}
    assert set(own["a"]) == set(declared(method).encoder(start))
    name = next(n for n in own["a"] if n.endswith("weight"))
    assert not np.array_equal(own["a"][name], own["b"][name])
    alone, _ = play(method, task, members(task, make_site, a=6)), None
    assert alone[1]["a"].digest() == states["a"].digest()  # what the others do changes nothing


def test_local_cl_keeps_its_momentum_encoder_or_copies_it_each_round(cnn_task, make_site):
    """docs/methods.md 2.4: it lives on; `reset` begins a round with a copy of the encoder; nothing can be averaged."""
    task = cnn_task(rounds=2)
    site = members(task, make_site, a=6)
    kept, copied = (
        play(build(METHODS["local-cl"], {**HYPER, **more}), task, site)[1]["a"].arrays
        for more in ({}, {"momentum_encoder": "reset"})
    )
    assert any(name.startswith("momentum.") for name in kept) and "bank" in kept
    assert not any(name.startswith("momentum.") for name in copied)
    assert not np.array_equal(kept["head.0.weight"], copied["head.0.weight"])
    with pytest.raises(SettingError, match="local-cl sends nothing; allowed: local, reset"):
        build(METHODS["local-cl"], {"momentum_encoder": "averaged"})


def test_reports_name_images_and_waiting(cnn_task, make_site):
    told: list[dict] = []
    task = cnn_task()
    site = dataclasses.replace(make_site(task, count=9), report=told.append)
    play(fedclf(), task, {"a": site})
    steps = [facts for facts in told if "step" in facts]
    assert [facts["images"] for facts in steps] == [4, 5]
    assert all(facts["wait_seconds"] >= 0 and np.isfinite(facts["loss"]) for facts in steps)
    summary = next(facts for facts in told if "summary" in facts)
    assert summary["images"] == 9
    assert summary["wait_seconds"] <= summary["learn_seconds"]


def test_losses_are_in_single_precision_under_autocast(cnn_task, make_site, monkeypatch):
    """docs/design.md 8: bf16 in the network, float32 in the loss."""
    seen: list[tuple[bool, torch.dtype]] = []
    plain = contrast.contrastive_loss

    def watched(queries, keys, negatives, temperature):
        seen.append((torch.is_autocast_enabled("cpu"), queries.dtype))
        return plain(queries, keys, negatives, temperature)

    monkeypatch.setattr(contrast, "contrastive_loss", watched)
    task = cnn_task()
    servers = []
    for dtype in (torch.bfloat16, None):
        site = dataclasses.replace(make_site(task, count=4), autocast=dtype)
        servers.append(play(fedclf(), task, {"a": site})[0])
    assert seen == [(False, torch.float32)] * 2
    assert servers[0].digest() != servers[1].digest()  # the network did run in bf16


def test_a_member_that_joins_late_begins_with_features_of_today(make_task, make_site):
    """Without a bank of the warm phase a site fills it in its first round; nobody waits for it."""
    task = make_task(rounds=2)
    sites = members(task, make_site, a=8, b=8)
    method = fedclf()
    server, states = method.start(task, ["a", "b"]), {name: State() for name in sites}
    from edgefl_trainer.method_halves import stamped

    for phase, present in zip(method.phases(2), ("a", "ab", "ab"), strict=True):
        told = method.broadcast(server, phase, list(present))
        replies = {}
        for name in present:
            states[name], replies[name] = method.local_round(sites[name], states[name], stamped(told[name], phase, 2))
        server = method.aggregate(server, phase, replies)
    assert len(server.arrays["features.b"]) == 6


def fields(count: int, seed: int) -> Examples:
    """Images of a few soft colours each, no two alike."""
    corners = torch.from_numpy(np.random.default_rng(seed).random((count, 3, 4, 4), dtype=np.float32))
    pictures = torch.nn.functional.interpolate(corners, 36, mode="bicubic").clamp(0, 1).mul(255).to(torch.uint8)
    rows = np.arange(count, dtype=np.int64)
    return Examples(pictures.permute(0, 2, 3, 1).numpy(), rows % 2, rows)


def told_apart(method, arrays, site: Site) -> tuple[float, float]:
    """Mean similarity of two views of an image, less that of views of two images; and the latter."""
    model = method.contrast.build(site.task)
    self_supervised.fill(model, {n: v for n, v in arrays.items() if n.startswith(contrast.NETWORK)})
    prepare = self_supervised.views(site, method.contrast.sgd, "moco-v2", 2)
    with torch.no_grad():
        images = torch.from_numpy(site.unlabelled.images)
        first, second = (contrast.unit(model(view)) for view in prepare(images, np.random.default_rng(1)))
    similar = (first @ second.T).numpy()
    other = similar[~np.eye(len(similar), dtype=bool)].mean()
    return float(similar.diagonal().mean() - other), float(other)


@pytest.mark.slow
def test_views_of_an_image_come_together_and_images_stay_apart(cnn_task):
    """What contrast is for; a falling loss does not show it. At a rate of 0.1 the images fall together: 0.99 alike."""
    task, method = cnn_task(rounds=10), fedclf(batch=16, queue=64, lr=0.005)
    sites = {}
    for seed, name in enumerate("ab"):
        pictures = fields(64, seed)
        sites[name] = Site(name=name, task=task, backbone=None, train=pictures, tune=pictures, unlabelled=pictures)
    before, _ = told_apart(method, method.start(task, ["a", "b"]).arrays, sites["a"])
    server, _ = play(method, task, sites)
    after, other = told_apart(method, server.arrays, sites["a"])
    assert after > 1.1 * before
    assert other < 0.8
