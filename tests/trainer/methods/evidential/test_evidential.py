"""The shared recipe of local learning: clock, rates, moments, readout, distillation, warnings.

Sources: docs/methods.md 1.3 (annealing), 1.5 (distillation) and 1.6 (training, readout).
"""

import dataclasses

import numpy as np
import pytest
import torch
from tests.trainer.methods.conftest import after, play

from edgefl_protocol import Payload
from edgefl_trainer.contract import State
from edgefl_trainer.engine.hyper_parameters import build
from edgefl_trainer.engine.judging.results import calibrate
from edgefl_trainer.engine.models import predict
from edgefl_trainer.errors import TrainingError
from edgefl_trainer.learning import evidential, features
from edgefl_trainer.learning.evidential import EvidentialRecipe, initial_tensors
from edgefl_trainer.learning.maps import sharing
from edgefl_trainer.losses import class_prior, evidential_loss
from edgefl_trainer.methods import METHODS
from edgefl_trainer.models.scoring import ScoreModule

HYPER = {"batch": 4, "readout": "cls"}


def train(round_: int = 1, **maps: np.ndarray) -> Payload:
    return Payload(maps, {"phase": "train", "round": round_, "rounds": 5})


def peer_maps(tokens: int) -> dict[str, np.ndarray]:
    """Three peers hold maps of class 0, one of them also of class 1."""
    rng = np.random.default_rng(0)
    names = ("maps.0.0", "maps.1.0", "maps.2.0", "maps.1.1")
    return {name: rng.random((2, tokens)).astype(np.float16) for name in names}


def listening(site, facts: list):
    return dataclasses.replace(site, report=facts.append)


# annealing clock


@pytest.mark.parametrize(
    ("clock", "expected"),
    [
        ("run", [0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1, 1]),
        ("round", [0, 0.1, 0.2, 0.3, 0, 0.1, 0.2, 0.3, 0, 0.1, 0.2, 0.3]),
    ],
)
def test_the_penalty_grows_by_a_tenth_with_each_epoch_of_the_clock(clock, expected, make_task, make_site, monkeypatch):
    """min(1, t/10), t = (round - 1)·E + e over the run, or e from each round's start: R = 3, E = 4."""
    used = []

    def spy(evidence, target, prior, kl_weight):
        used.append(kl_weight)
        return evidential_loss(evidence, target, prior, kl_weight)

    monkeypatch.setattr(evidential, "evidential_loss", spy)
    task = make_task(rounds=3, epochs=4)
    play(build(METHODS["local"], {**HYPER, "anneal_clock": clock}), task, {"a": make_site(task, count=4)})
    np.testing.assert_allclose(used, expected, atol=1e-12)


@pytest.mark.parametrize("preset", ["bench84", "paper"])
def test_the_penalty_counts_in_full_for_the_papers_share_of_a_run(preset):
    """FedEvPrompt 3.1 and 4.2: min(1, t/10) over 5 rounds of 15 epochs has a mean of 0.93; a shorter run keeps it."""
    given = evidential.PRESETS[preset]
    recipe = EvidentialRecipe(**given["hyper"])
    rounds, epochs = given["rounds"], given["epochs"]
    weights = [recipe.kl_weight(round_, epoch, epochs) for round_ in range(1, rounds + 1) for epoch in range(epochs)]
    assert np.mean(weights) == pytest.approx(np.mean([min(1, t / 10) for t in range(75)]), abs=0.05)


# learning rates and moments


def test_each_tensor_moves_by_its_own_rate(make_task, make_site, backbone):
    """AdamW's first step without decay is lr·sign(g): the largest change of a tensor is the rate of its group."""
    rates = {"lr_b": 1e-3, "lr_t": 2e-3, "lr_head": 4e-3}
    method = build(METHODS["local"], {**HYPER, **rates, "batch": 12, "weight_decay": 0.0})
    task = make_task()
    state, _ = method.local_round(make_site(task, count=12), State(), train())
    before = initial_tensors(method.recipe, backbone.spec, 2, task.seed)
    moved = {name: np.abs(state.arrays[name] - before[name].numpy()).max() for name in EvidentialRecipe().trained}
    expected = {"prompts.b": 1e-3, "prompts.t": 2e-3, "head.weight": 4e-3, "head.bias": 4e-3}
    assert moved == pytest.approx(expected, rel=1e-3)


def one_loop(site, recipe: EvidentialRecipe, rounds: int) -> dict[str, np.ndarray]:
    """The whole run as one AdamW loop that knows no rounds but for the order of the images."""
    spec = site.task.backbone
    module = ScoreModule(site.backbone, recipe.options(spec, "cls"))
    tensors = {k: v.clone().requires_grad_() for k, v in initial_tensors(recipe, spec, 2, site.task.seed).items()}
    rates = {"prompts.b": recipe.lr_b, "prompts.t": recipe.lr_t}
    groups = [{"params": [v], "lr": rates.get(k, recipe.lr_head)} for k, v in tensors.items()]
    optimizer = torch.optim.AdamW(groups, weight_decay=recipe.weight_decay)
    prior = class_prior(site.train.counts(2)).float()
    for t in range(rounds):
        for images, target in site.batches(site.train, recipe.batch, t + 1, 0):
            output = module.output(images, tensors, need_attention=False)
            evidence = torch.nn.functional.softplus(output.cls @ tensors["head.weight"].T + tensors["head.bias"])
            optimizer.zero_grad()
            evidential_loss(evidence, target, prior, t / 10).backward()
            optimizer.step()
    return {name: value.detach().numpy() for name, value in tensors.items()}


@pytest.mark.parametrize("kind", ["adamw", "adam", "sgd"])
def test_a_first_step_is_the_optimisers_own(kind, backbone):
    """Closed forms of one step at rate r with decay d: AdamW w(1 - rd) - r·sign(g), Adam w - r·sign(g + dw),
    SGD w - r(g + dw); Loshchilov and Hutter (arXiv 1711.05101)."""
    recipe = EvidentialRecipe(optimizer=kind, weight_decay=0.25, lr_b=0.1, lr_t=0.2, lr_head=0.3)
    start = initial_tensors(recipe, backbone.spec, 2, 0)
    tensors = {name: value.clone().requires_grad_() for name, value in start.items()}
    optimizer = evidential.make_optimizer(recipe, tensors, None)
    generator = torch.Generator().manual_seed(0)
    for value in tensors.values():
        value.grad = torch.randn(value.shape, generator=generator)
    optimizer.step()
    for name, rate in (("prompts.b", 0.1), ("prompts.t", 0.2), ("head.weight", 0.3), ("head.bias", 0.3)):
        w, g = start[name], tensors[name].grad
        decayed = g + 0.25 * w
        expected = {
            "adamw": w * (1 - rate * 0.25) - rate * g.sign(), "adam": w - rate * decayed.sign(),
            "sgd": w - rate * decayed,
        }[kind]  # fmt: skip
        steady = decayed.abs() > 1e-3  # where Adam's epsilon does not show
        torch.testing.assert_close(tensors[name].detach()[steady], expected[steady], atol=2e-5, rtol=2e-5)
    kept = evidential.optimizer_state(recipe, optimizer, tensors)
    assert bool(kept.arrays) == (kind != "sgd")


@pytest.mark.parametrize("kind", ["adam", "sgd"])
def test_other_optimisers_go_on_across_rounds_too(kind, make_task, make_site):
    """Kept moments: two rounds of one epoch are one round of two, but for the draws; sgd has none to keep."""
    task = make_task(rounds=2)
    states = {
        keep: play(build(METHODS["local"], {**HYPER, "optimizer": kind, "optimizer_state": keep}), task,
                   {"a": make_site(task)})[1]["a"]
        for keep in ("keep", "reset")
    }  # fmt: skip
    learned = [{name: value for name, value in state.arrays.items() if "optimizer" not in name}
               for state in states.values()]  # fmt: skip
    assert (State(learned[0]).digest() == State(learned[1]).digest()) == (kind == "sgd")


def test_a_prior_of_zero_is_told_before_it_becomes_a_loss_without_value(make_task, make_site):
    """docs/methods.md 1.3: a site of one class without a floor has W = 0 there, and lnGamma(0) is infinite."""
    task = make_task()
    method = build(METHODS["local"], {**HYPER, "prior_floor": 0.0})
    play(method, task, {"a": make_site(task)})  # both classes: no floor is needed
    with pytest.raises(TrainingError, match=r"site a has images of one class only.*raise prior_floor"):
        play(method, task, {"a": make_site(task, labels=[0] * 12)})


def test_kept_moments_make_two_rounds_one_run(make_task, make_site):
    """Moments go on where they are private (1.6): R = 2 rounds of E = 1 are one loop of two epochs."""
    hyper = {**HYPER, "augment": "none", "head_norm": "none", "lr_head": 2e-3}
    task = make_task(rounds=2)
    found = {}
    for choice in ("keep", "reset"):
        method = build(METHODS["local"], {**hyper, "optimizer_state": choice})
        found[choice] = play(method, task, {"a": make_site(task, count=12)})[1]["a"]
    expected = one_loop(make_site(task, count=12), method.recipe, rounds=2)
    for name in EvidentialRecipe().trained:
        np.testing.assert_allclose(found["keep"].arrays[name], expected[name], rtol=1e-4, atol=1e-6, err_msg=name)
        assert np.abs(found["reset"].arrays[name] - expected[name]).max() > 1e-4, name
    assert found["keep"].values["optimizer.step"] == 2 * 3  # R rounds of three batches
    assert not any(name.startswith("optimizer.") for name in found["reset"].arrays)


# readout


@pytest.mark.parametrize("informative", ["cls", "mean"])
def test_auto_takes_the_readout_that_holds_the_answer(informative, make_task, make_site, monkeypatch):
    """One readout spells the class, the other is noise; the probe on tune rows sees the difference (1.6, readout)."""

    def drawn(backbone, rows, device):
        rng = np.random.default_rng(len(rows))
        noise = {name: rng.normal(size=(len(rows), 8)).astype(np.float32) for name in ("cls", "mean")}
        noise[informative][:, 0] += 20 * rows.targets
        return noise

    monkeypatch.setattr(features, "frozen_features", drawn)
    site = make_site(make_task(), count=24)
    method = build(METHODS["local"], {"batch": 24, "head_norm": "none"})
    state, _ = method.local_round(site, State(), train())
    assert state.values["readout"] == informative
    assert method.predictor(site, state, Payload({}, {})).module.options.readout == informative


@pytest.mark.parametrize(("probes", "expected"), [((0.9, 0.8), "cls"), ((0.8, 0.9), "mean"), ((0.8, 0.8), "cls")])
def test_where_the_head_is_averaged_the_mean_over_sites_decides(probes, expected, make_task, make_site, monkeypatch):
    """Site a finds the class token better, site b the mean: the larger mean wins, a tie is the class token's."""
    figures = {"a": {"cls": probes[0], "mean": 0.5}, "b": {"cls": 0.5, "mean": probes[1]}}
    monkeypatch.setattr(features, "probe_readouts", lambda site, found: figures[site.name])
    task = make_task()
    method = build(METHODS["fedavg"], {"batch": 12})
    server, _ = play(method, task, {"a": make_site(task, "a"), "b": make_site(task, "b", count=20, seed=2)})
    assert method.broadcast(server, after(task), ["a"])["a"].scalars["readout"] == expected


@pytest.mark.parametrize("figure", [1.001, -0.001, 1e6, "nan"])
def test_a_site_that_tells_no_share_decides_no_readout(figure):
    """1.6: a probe tells a balanced accuracy, a share; the reply that tells another number is named."""
    replies = {
        name: Payload({}, {"n_train": 9, "probe.cls": 0.8, "probe.mean": mean})
        for name, mean in (("a", 0.0), ("b", figure), ("c", 1.0))
    }
    with pytest.raises(TrainingError, match=r"the reply of b says probe\.mean = .*; a balanced accuracy must be from"):
        features.common_features(replies, "auto", standardise=False)
    del replies["b"]
    assert features.common_features(replies, "auto", standardise=False).values == {"readout": "cls"}


# distillation


def distilled_with(site, monkeypatch, **hyper):
    """Peer means, peer counts and Gram matrix as the loss receives them in one round."""
    seen = []
    real = sharing.rollout_distillation

    def spy(maps, target, means, counts, gram):
        seen.append((means.double(), counts.double(), gram.double()))
        return real(maps, target, means, counts, gram)

    monkeypatch.setattr(sharing, "rollout_distillation", spy)
    method = build(METHODS["fedevprompt"], {**HYPER, **hyper})
    method.local_round(site, State(), train(2, **peer_maps(site.task.backbone.tokens)))
    assert len(seen) == 1
    return seen[0]


@pytest.mark.parametrize(("kd_peers", "expected"), [("sum", [3, 1]), ("mean5", [5, 5])])
def test_peers_are_summed_or_weigh_five_together(kd_peers, expected, make_task, make_site, backbone, monkeypatch):
    """1.5: the sum over peers that hold the class, or five times their mean; the mean map is the same."""
    means, counts, _ = distilled_with(make_site(make_task(), count=4), monkeypatch, kd_peers=kd_peers)
    maps = {name: value.astype(np.float64).mean(axis=0) for name, value in peer_maps(backbone.spec.tokens).items()}
    assert counts.tolist() == expected
    np.testing.assert_allclose(means[0], np.mean([maps[f"maps.{i}.0"] for i in range(3)], axis=0), rtol=1e-5)
    np.testing.assert_allclose(means[1], maps["maps.1.1"], rtol=1e-5)


def test_a_class_that_no_peer_holds_stays_out(make_task, make_site, backbone, monkeypatch):
    counts = distilled_with(make_site(make_task(classes=("x", "y", "z")), count=4), monkeypatch, kd_peers="mean5")[1]
    assert counts.tolist() == [5, 5, 0]


@pytest.mark.parametrize("metric", ["bilinear", "nearest"])
def test_distances_are_those_of_the_map_at_224_px(metric, make_task, make_site, backbone, monkeypatch):
    """1.5: dᵀGd is the squared distance after torch's own upsampling, bilinear or nearest."""
    gram = distilled_with(make_site(make_task(), count=4), monkeypatch, kd_metric=metric)[2]
    grid = backbone.spec.grid
    for seed in range(3):
        d = torch.from_numpy(np.random.default_rng(seed).normal(size=grid * grid))
        square = d.reshape(1, 1, grid, grid)
        large = torch.nn.functional.interpolate(square, size=(224, 224), mode=metric)
        assert float(d @ gram @ d) == pytest.approx(float(large.square().sum()), rel=1e-4)


# warnings


def warnings_of(facts: list) -> list[str]:
    return [str(one["warning"]) for one in facts if "warning" in one]


@pytest.mark.parametrize(("dead", "warned"), [(0, False), (6, False), (7, True), (12, True)])
def test_a_head_without_evidence_is_reported(dead, warned, make_task, make_site, backbone, monkeypatch):
    """1.3: the share of images with zero evidence is logged, and a person is warned above one half."""
    facts: list = []
    site = listening(make_site(make_task(), count=12), facts)

    def evidence(logits, kind):
        silent = (torch.arange(len(logits)) < dead).float()[:, None]
        return torch.nn.functional.softplus(logits) * (1 - silent)

    monkeypatch.setattr(evidential, "evidence_of", evidence)
    method = build(METHODS["local"], {**HYPER, "batch": 12})
    method.local_round(site, State(), train(2))
    assert [one["zero_evidence_share"] for one in facts if "summary" in one] == pytest.approx([dead / 12])
    assert [("no evidence" in text, site.name in text) for text in warnings_of(facts)] == [(True, True)] * warned


@pytest.mark.parametrize(
    ("each", "round_", "balance", "told"),
    [
        (0.12, 2, "none", ""),
        (0.11, 1, "none", ""),
        (0.11, 2, "none", "the prior decides"),
        (0.11, 2, "class", "all classes are nearly as probable"),
    ],
)
def test_a_head_with_hardly_any_evidence_is_reported(
    each, round_, balance, told, make_task, make_site, backbone, monkeypatch
):
    """1.3: K classes with evidence e each have a vacuity of 1/(1 + e), and a person is told from 0.9 on, after the
    last epoch of the last round."""
    facts: list = []
    made = make_site(make_task(epochs=2, rounds=2), labels=[0] * 9 + [1] * 3)
    site = listening(dataclasses.replace(made, balance=balance), facts)
    monkeypatch.setattr(evidential, "evidence_of", lambda logits, kind: 0 * logits + each)
    method = build(METHODS["local"], {**HYPER, "batch": 12})
    method.local_round(site, State(), train(round_))
    assert [one["vacuity"] for one in facts if "summary" in one] == pytest.approx([1 / (1 + each)] * 2)
    assert [(told in text, site.name in text) for text in warnings_of(facts)] == [(True, True)] * bool(told)


def test_cross_entropy_has_no_vacuity_to_report(make_task, make_site, backbone):
    facts: list = []
    site = listening(make_site(make_task(), count=12), facts)
    build(METHODS["local"], {**HYPER, "batch": 12, "loss": "ce"}).local_round(site, State(), train(1))
    assert [set(one) & {"vacuity"} for one in facts if "summary" in one] == [set()] and not warnings_of(facts)


@pytest.mark.parametrize(("weight", "warned"), [(1e-2, False), (1e-12, True)])
def test_a_distillation_term_that_does_nothing_is_reported(weight, warned, make_task, make_site, backbone):
    """1.5: lambda·L_KD/L_eps is logged, and a warning is given below 1e-4."""
    facts: list = []
    site = listening(make_site(make_task(), count=12), facts)
    method = build(METHODS["fedevprompt"], {**HYPER, "kd_weight": weight})
    method.local_round(site, State(), train(2, **peer_maps(backbone.spec.tokens)))
    [share] = [one["kd_share"] for one in facts if "summary" in one]
    assert (0 < share < 1e-4) == warned
    assert ["the term kd" in text and site.name in text for text in warnings_of(facts)] == [True] * warned


@pytest.mark.parametrize(("weights", "said"), [((1e-12, 1e-12, 1e-12), 1), ((1e-12, 1e-2, 1e-12), 0)])
def test_a_term_is_reported_once_when_it_stays_small(weights, said, make_task, make_site, backbone, monkeypatch):
    """1.5: the warning is for a term that *stays* below 1e-4: one for a round of three epochs, none if one is above."""
    facts: list = []
    site = listening(make_site(make_task(epochs=3), count=12), facts)
    epochs, plain = iter(weights), sharing.rollout_distillation
    monkeypatch.setattr(sharing, "rollout_distillation", lambda *args: plain(*args) * next(epochs))
    method = build(METHODS["fedevprompt"], {**HYPER, "batch": 12, "kd_weight": 1.0})
    method.local_round(site, State(), train(2, **peer_maps(backbone.spec.tokens)))
    assert len([one for one in facts if "summary" in one]) == 3
    assert sum("the term kd" in text for text in warnings_of(facts)) == said


def test_without_peers_nothing_is_said_about_distillation(make_task, make_site):
    """Round 1 has no maps: a share of zero is no news there."""
    facts: list = []
    method = build(METHODS["fedevprompt"], HYPER)
    method.local_round(listening(make_site(make_task(), count=12), facts), State(), train())
    assert warnings_of(facts) == []


def test_discounted_evidence_changes_no_training_and_only_lowers_what_is_known(make_task, make_site):
    """docs/methods.md, discounted evidence: vacuity rises for pictures unlike the site's, and falls for none."""
    task = make_task()
    site, broadcast = make_site(task, count=120), Payload({}, {"phase": "train", "round": 1, "rounds": 1})
    noise = np.random.default_rng(0).integers(0, 2, (40, 36, 36, 1)).repeat(3, axis=3).astype(np.uint8) * 255
    found = {}
    for discount in ("none", "unusual"):
        method = build(METHODS["local"], {**HYPER, "discount": discount})
        state, _ = method.local_round(site, State(), broadcast)
        model = calibrate(method.predictor(site, state, broadcast), site).predictor
        assert set(model.tensors) == set(model.module.options.tensors)
        found[discount] = state.digest(), predict(model, noise), predict(model, site.tune.images)
    (before, *plain), (after, *lowered) = found["none"], found["unusual"]
    assert before == after
    assert (lowered[0].vacuity > plain[0].vacuity).all()
    assert (lowered[1].vacuity >= plain[1].vacuity - 1e-6).all()
    assert (lowered[1].vacuity < plain[1].vacuity + 1e-6).sum() >= 6  # of eight pictures like the site's
