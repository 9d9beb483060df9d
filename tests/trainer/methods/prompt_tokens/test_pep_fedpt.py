"""PEP-FedPT against its equations (arXiv 2510.25372; docs/methods.md 5.1) and its noise against A.4.1 (section 9)."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.trainer.methods.conftest import after, examples, play
from tests.trainer.models.test_mixed_and_grouped import mixing, walk

from edgefl_protocol import Payload
from edgefl_trainer.contract import Examples, Phase, Site, State, Task
from edgefl_trainer.engine.hyper_parameters import build
from edgefl_trainer.errors import SettingError
from edgefl_trainer.learning.prototypes import class_tokens, moved
from edgefl_trainer.method_halves import stamped
from edgefl_trainer.methods import METHODS
from edgefl_trainer.methods.pep_fedpt import TRAINED
from edgefl_trainer.models.backbones import load_backbone

PAPER = {"batch": 4, "readout": "cls", "head_norm": "none"}
BLOCKS = (1, 2, 3)  # of four


def make(**hyper):
    return build(METHODS["pep-fedpt"], {**PAPER, **hyper})


def first_broadcast(method, task, sites):
    """What the sites receive in round 1, and the replies of the warm start."""
    server, warm = method.start(task, sorted(sites)), Phase("warm", 0)
    asked = method.broadcast(server, warm, sorted(sites))
    replies = {
        name: method.local_round(site, State(), stamped(asked[name], warm, task.rounds))[1]
        for name, site in sites.items()
    }
    server = method.aggregate(server, warm, replies)
    phase = Phase("train", 1)
    return server, {
        n: stamped(p, phase, task.rounds) for n, p in method.broadcast(server, phase, sorted(sites)).items()
    }


@pytest.mark.slow
def test_a_dense_reply_has_the_size_the_paper_counts():
    """Section 5.2.2: 100·768 head + 768 shared + 100·768 class prompts + 3·100·768 prototypes = 384,768.

    Four blocks instead of twelve: the size does not depend on them.
    """
    vit = load_backbone("vit:768x4/16", image_px=32, seed=0)
    classes = tuple(f"c{k:03}" for k in range(100))
    task = Task(name="all", classes=classes, backbone=vit.spec, rounds=1, epochs=1, seed=0)
    shown = examples(100, 100, 0)
    train = Examples(np.ascontiguousarray(shown.images[:, :32, :32]), shown.labels, shown.rows)
    site = Site(name="a", task=task, backbone=vit, train=train, tune=train, unlabelled=train)
    method = make(batch=50, ccmp_blocks=BLOCKS)
    _, broadcasts = first_broadcast(method, task, {"a": site})
    _, reply = method.local_round(site, State(), broadcasts["a"])
    assert sum(np.asarray(array).size for array in reply.arrays.values()) == 384_768
    assert all(array.dtype == np.float32 for array in reply.arrays.values())


def test_in_the_papers_setting_nothing_but_class_means_goes_out_first(make_task, make_site):
    """docs/methods.md 5.1: no moments, no probes, and never how many images of a class there are."""
    task, method = make_task(), make()
    site = make_site(task)
    server = method.start(task, ["a"])
    asked = stamped(method.broadcast(server, Phase("warm", 0), ["a"])["a"], Phase("warm", 0), 1)
    assert not asked.arrays
    _, reply = method.local_round(site, State(), asked)
    assert set(reply.arrays) == {"prototypes"} and set(reply.scalars) == {"n_train"}
    _, broadcasts = first_broadcast(method, task, {"a": site})
    state, reply = method.local_round(site, State(), broadcasts["a"])
    assert set(reply.arrays) == {*TRAINED, "prototypes"} and set(reply.scalars) == {"n_train"}
    assert set(state.arrays) == set(TRAINED)


def test_class_means_are_those_of_the_received_model(backbone, make_task, make_site):
    """Eq. 18 before any local step, over all training rows as they are; walked over timm's blocks."""
    task = make_task(classes=("x", "y", "z"))
    site = make_site(task, labels=[0] * 5 + [2] * 7)
    method = make()
    _, broadcasts = first_broadcast(method, task, {"a": site})
    model = {name: torch.from_numpy(np.array(value)) for name, value in broadcasts["a"].arrays.items()}
    model["class_shares"] = torch.tensor([5 / 12, 0, 7 / 12])
    seen, before = [], mixing({**model, "prototypes": model["prototypes"] + 1e-12}, BLOCKS, 0.05, "replace")

    def recorded(index, x):
        if index in BLOCKS:
            seen.append(x[:, 0])
        return before(index, x)

    with torch.no_grad():
        walk(backbone.vit, backbone.normalise(torch.from_numpy(site.train.images)), recorded)
    tokens, labels = torch.stack(seen), torch.from_numpy(site.train.targets)
    _, reply = method.local_round(site, State(), broadcasts["a"])
    for k in (0, 2):
        expected = tokens[:, labels == k].mean(dim=1).numpy()
        np.testing.assert_allclose(reply.arrays["prototypes"][:, k], expected, atol=1e-4)
    assert not reply.arrays["prototypes"][:, 1].any()
    assert not np.array_equal(reply.arrays["prompts.c"], broadcasts["a"].arrays["prompts.c"])  # it did learn


def test_the_warm_start_is_the_bare_networks_class_means(backbone, make_task, make_site):
    """Eq. 19 without prompts; divided by the sites that have the class, not by all that were asked."""
    task = make_task(classes=("x", "y"))
    sites = {"a": make_site(task, "a", labels=[0] * 12), "b": make_site(task, "b", seed=2)}
    method, sums = make(), []
    for site in sites.values():
        seen = []
        with torch.no_grad():
            pixels = backbone.normalise(torch.from_numpy(site.train.images))
            walk(backbone.vit, pixels, lambda i, x, seen=seen: (seen.append(x[:, 0]), x)[1])
        tokens, labels = torch.stack([seen[i] for i in BLOCKS]).numpy(), site.train.targets
        sums.append({k: tokens[:, labels == k].mean(axis=1) for k in np.unique(labels)})
    server, _ = first_broadcast(method, task, sites)
    np.testing.assert_allclose(server.arrays["prototypes"][:, 0], (sums[0][0] + sums[1][0]) / 2, atol=1e-4)
    np.testing.assert_allclose(server.arrays["prototypes"][:, 1], sums[1][1], atol=1e-4)


def served(method, old, rounds_of_means, weights=None):
    """The server over some rounds; a round is a list of sites' prototypes (J, K, D)."""
    zeros = {"prompts.s": np.zeros((1, 1, 4), np.float32)}
    state = State(
        {
            **zeros,
            "prototypes": old,
            "period.sum": np.zeros(old.shape),
            "period.count": np.zeros(old.shape[:2], np.int64),
        },
        {"readout": "cls", "standardise": 0},
    )
    kept = []
    for number, sites in enumerate(rounds_of_means, start=1):
        replies = {f"s{i}": Payload({**zeros, "prototypes": sent}, {"n_train": 1 + i}) for i, sent in enumerate(sites)}
        state = method.aggregate(state, Phase("train", number), replies)
        kept.append(np.asarray(state.arrays["prototypes"]))
    return kept


@settings(max_examples=30)
@given(seed=st.integers(0, 2**32 - 1), rho=st.floats(0, 1), period=st.integers(1, 4))
def test_the_server_keeps_prototypes_as_equations_20_and_21(seed, rho, period):
    """Mean over all contributions of a period, D_c = 0 keeps the prototype, a class first seen takes its mean."""
    rng = np.random.default_rng(seed)

    def means():
        return (rng.normal(size=(2, 3, 4)) * (rng.random((1, 3, 1)) < 0.6)).astype(np.float32)

    old, rounds = means(), [[means() for _ in range(rng.integers(1, 4))] for _ in range(7)]
    found = served(make(rho=rho, period=period), old, rounds)
    mu, pool = old.astype(np.float64), []
    for number, sites in enumerate(rounds, start=1):
        pool += sites
        if number % period == 0:
            for j in range(2):
                for c in range(3):
                    sent = [one[j, c].astype(np.float64) for one in pool if one[j, c].any()]
                    if sent:
                        weight = rho if mu[j, c].any() else 0.0
                        mu[j, c] = weight * mu[j, c] + (1 - weight) * np.mean(sent, axis=0)
            pool = []
        np.testing.assert_allclose(found[number - 1], mu, atol=1e-5)


def test_a_class_nobody_sends_keeps_its_prototype_bit_for_bit():
    """Eq. 21: D_c = 0 sets rho = 1."""
    old = np.random.default_rng(0).normal(size=(2, 3, 4)).astype(np.float32)
    sent = np.zeros_like(old)
    sent[:, 1] = 5
    [new] = served(make(period=1), old, [[sent]])
    np.testing.assert_array_equal(new[:, [0, 2]], old[:, [0, 2]])
    np.testing.assert_allclose(new[:, 1], (old[:, 1] + 5) / 2, rtol=1e-6)


@pytest.mark.parametrize("weighting", ["samples", "uniform"])
def test_theta_is_averaged_and_prototypes_are_not_weighed_by_images(weighting, make_task):
    task, method = make_task(), make(weighting=weighting, period=1)
    state = method.start(task, ["a", "b"])
    model = {name: np.asarray(state.arrays[name]) for name in TRAINED}
    one = np.ones_like(state.arrays["prototypes"])
    replies = {
        "a": Payload({**model, "prototypes": one}, {"n_train": 30}),
        "b": Payload({**{name: value + 4 for name, value in model.items()}, "prototypes": 3 * one}, {"n_train": 10}),
    }
    new = method.aggregate(state, Phase("train", 1), replies)
    for name in TRAINED:
        np.testing.assert_allclose(new.arrays[name] - model[name], 1 if weighting == "samples" else 2, atol=1e-5)
    np.testing.assert_array_equal(new.arrays["prototypes"], 2 * one)


def test_class_shares_come_from_training_labels_only(make_task, make_site):
    """Eq. 22; `prior=off` and a site without labels use equal shares; a site that never took part has its own."""
    task = make_task(classes=("x", "y", "z"))
    sites = {"a": make_site(task, "a")}
    new = make_site(task, "new", labels=[0] * 9 + [2] * 3)
    for hyper, expected in (({}, [0.75, 0, 0.25]), ({"prior": False}, [1 / 3] * 3)):
        method = make(**hyper)
        server, _ = play(method, task, sites)
        broadcast = stamped(method.broadcast(server, after(task), ["new"])["new"], after(task), 1)
        found = method.predictor(new, State(), broadcast).tensors["class_shares"]
        np.testing.assert_allclose(found, expected, atol=1e-7)
    empty = replace(new, train=replace(new.train, rows=new.train.rows[:0]))
    np.testing.assert_allclose(make().class_shares(empty), [1 / 3] * 3, atol=1e-7)


def test_prior_off_changes_what_is_learned(make_task, make_site):
    task = make_task(classes=("x", "y", "z"))
    learned = [
        play(make(prior=prior), task, {"a": make_site(task, "a", labels=[0] * 9 + [2] * 3)})[0].arrays["prompts.c"]
        for prior in (True, False)
    ]
    start = make().start(task, ["a"]).arrays["prompts.c"]
    np.testing.assert_array_equal(learned[0][1], start[1])  # share 0: never mixed in, no gradient
    assert not np.array_equal(learned[1][1], start[1])


@pytest.mark.parametrize(("depth", "blocks"), [(12, (5, 6, 7)), (24, (10, 11, 12)), (4, (1, 2, 3)), (1, (0,))])
def test_blocks_follow_the_depth_unless_they_are_named(depth, blocks):
    """docs/methods.md 5.1: 5, 6, 7 of 12, counted from 0."""
    assert make().insert(depth).blocks == blocks
    assert make(ccmp_blocks=(0, 2)).insert(depth).blocks == (0, 2)


def test_blocks_that_a_network_does_not_have_are_told(make_task):
    with pytest.raises(SettingError, match="prompts enter before block 7, but the blocks of this backbone are 0 to 3"):
        make(ccmp_blocks=(5, 6, 7)).start(make_task(), ["a"])


@pytest.mark.parametrize(
    ("hyper", "words"),
    [
        ({"ccmp_blocks": (7, 5)}, "rising, from 0"),
        ({"ccmp_blocks": (-1, 2)}, "rising, from 0"),
        ({"ccmp_blocks": (1, 1)}, "rising, from 0"),
        ({"tau": 0.0}, "tau is 0.0; allowed: 0.000001 to"),
        ({"rho": 1.5}, "rho is 1.5; allowed: 0 to 1"),
        ({"period": 0}, "period is 0; allowed: 1 or more"),
        ({"n_s": 0}, "n_s is 0; allowed: 1 to 1000"),
        ({"dp_epsilon": -0.2}, "dp_epsilon is -0.2; allowed: 0"),
        ({"dp_clip_l1": float("nan")}, "dp_clip_l1 is nan; allowed: 0"),
    ],
)
def test_a_hyper_parameter_out_of_range_names_its_range(hyper, words):
    with pytest.raises(SettingError) as caught:
        make(**hyper)
    assert words in str(caught.value)


def test_tokens_are_read_without_gradient_in_row_order(make_task, make_site):
    """(n, J, D), the class token of the bare network at block 0 being the same for every image."""
    task = make_task()
    site = make_site(task, count=70)  # more than one batch
    tokens = class_tokens(site, (0, 2))
    assert tokens.shape == (70, 2, task.backbone.width)
    np.testing.assert_array_equal(tokens[:, 0], np.broadcast_to(tokens[0, 0], tokens[:, 0].shape))
    half = replace(site, train=replace(site.train, rows=site.train.rows[30:]))
    np.testing.assert_allclose(class_tokens(half, (0, 2)), tokens[30:], atol=1e-5)


def test_momentum_of_one_never_leaves_the_first_mean():
    old, total, count = np.ones((1, 1, 2), np.float32), np.full((1, 1, 2), 6.0), np.array([[2]])
    np.testing.assert_array_equal(moved(old, total, count, 1.0), old)
    np.testing.assert_array_equal(moved(0 * old, total, count, 1.0), 3 * old)
