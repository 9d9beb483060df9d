"""FedProx against its definition (Li et al., arXiv 1812.06127, Algorithm 2) and against FedAvg."""

import dataclasses

import numpy as np
import pytest
import torch
from tests.trainer.methods.conftest import Exchange, play

from edgefl_trainer.contract import Phase, State
from edgefl_trainer.engine.hyper_parameters import build
from edgefl_trainer.errors import SettingError
from edgefl_trainer.learning import evidential
from edgefl_trainer.learning.evidential import EvidentialRecipe, initial_tensors
from edgefl_trainer.learning.loss_terms import Step
from edgefl_trainer.losses import class_prior, evidential_loss
from edgefl_trainer.method_halves import stamped
from edgefl_trainer.methods import METHODS
from edgefl_trainer.methods.fedprox import Proximal
from edgefl_trainer.models.scoring import ScoreModule

PLAIN = {"batch": 4, "readout": "cls", "head_norm": "none", "lr_head": 2e-3}
ROUND = Phase("train", 1)
SHARED = ("prompts.b", "prompts.t", "head.weight", "head.bias")


def prox(**hyper: object):
    return build(METHODS["fedprox"], {**PLAIN, **hyper})


def step_with(**tensors: torch.Tensor) -> Step:
    nothing = torch.zeros(1, 2)
    return Step(nothing, nothing, None, torch.zeros(1, dtype=torch.long), tensors)


@pytest.mark.parametrize("share", ["b", "bt", "g"])
def test_without_mu_it_is_fedavg_bit_for_bit(share, make_task, make_site):
    task = make_task(rounds=2)
    sites = {s: make_site(task, s, seed=i, count=8 + 4 * i) for i, s in enumerate("ab")}
    averaged, apart = play(build(METHODS["fedavg"], {**PLAIN, "share": share}), task, sites)
    found, states = play(prox(mu=0.0, share=share), task, sites)
    assert found.digest() == averaged.digest()
    assert {s: states[s].digest() for s in sites} == {s: apart[s].digest() for s in sites}
    assert play(prox(mu=0.5, share=share), task, sites)[0].digest() != averaged.digest()


@pytest.mark.parametrize("mu", [0.001, 0.01, 0.5, 1.0])
def test_at_zero_loss_the_gradient_is_mu_times_the_way_gone(mu):
    """docs/methods.md 4.2: d/dw mu/2 ||w - w^r||^2 = mu (w - w^r), value by numpy."""
    rng = np.random.default_rng(0)
    start = {name: torch.from_numpy(rng.normal(size=shape)) for name, shape in (("u", (2, 3)), ("v", (4,)))}
    now = {name: torch.from_numpy(rng.normal(size=value.shape)).requires_grad_() for name, value in start.items()}
    other = torch.ones(3, dtype=torch.float64, requires_grad=True)  # a tensor that is not averaged stays free
    value = Proximal(mu, start)(step_with(**now, other=other))
    value.backward()
    gone = {name: (now[name] - start[name]).detach().numpy() for name in start}
    assert float(value.detach()) == pytest.approx(mu / 2 * sum(np.square(one).sum() for one in gone.values()))
    for name, way in gone.items():
        np.testing.assert_allclose(now[name].grad.numpy(), mu * way, rtol=1e-12)
    assert other.grad is None


def test_a_round_is_the_plain_loop_with_the_squared_distance(make_task, make_site):
    """Two epochs of AdamW in a loop that knows neither terms nor payloads: the same tensors."""
    mu = 2.0
    task = make_task(epochs=2)
    site = make_site(task, count=8)
    method = prox(mu=mu, augment="none")
    start = method.broadcast(State({**method.start(task, ["a"]).arrays}, {"readout": "cls", "seed": 0}), ROUND, ["a"])
    found, _ = method.local_round(site, State(), stamped(start["a"], ROUND, 1))
    recipe, spec = method.base.recipe, task.backbone
    module = ScoreModule(site.backbone, recipe.options(spec, "cls"))
    before = initial_tensors(recipe, spec, 2, task.seed)
    tensors = {name: value.clone().requires_grad_() for name, value in before.items()}
    rates = {"prompts.b": recipe.lr_b, "prompts.t": recipe.lr_t}
    groups = [{"params": [value], "lr": rates.get(name, recipe.lr_head)} for name, value in tensors.items()]
    optimizer = torch.optim.AdamW(groups, weight_decay=recipe.weight_decay)
    prior = class_prior(site.train.counts(2)).float()
    for epoch in range(2):
        for images, target in site.batches(site.train, recipe.batch, 1, epoch):
            cls = module.output(images, tensors, need_attention=False).cls
            evidence = torch.nn.functional.softplus(cls @ tensors["head.weight"].T + tensors["head.bias"])
            distance = sum(((tensors[name] - before[name]) ** 2).sum() for name in tensors)
            optimizer.zero_grad()
            (evidential_loss(evidence, target, prior, epoch / 10) + mu / 2 * distance).backward()
            optimizer.step()
    for name, value in tensors.items():
        np.testing.assert_allclose(found.arrays[name], value.detach().numpy(), rtol=1e-4, atol=1e-6, err_msg=name)


def test_a_large_mu_keeps_the_model_at_the_broadcast(make_task, make_site):
    """mu → ∞ pins what is averaged; here mu = 10 leaves it within a fraction of where mu = 0 goes."""
    task = make_task(epochs=8)
    gone = {}
    for mu in (0.0, 10.0):
        method = prox(mu=mu, weight_decay=0.0)
        _, states = play(method, task, {"a": make_site(task, count=16)})
        begun = initial_tensors(method.base.recipe, task.backbone, 2, task.seed)
        gone[mu] = sum(np.square(states["a"].arrays[name] - begun[name].numpy()).sum() for name in SHARED) ** 0.5
    assert gone[10.0] < 0.4 * gone[0.0], gone


@pytest.mark.parametrize(("share", "held"), [("bt", SHARED), ("b", ("prompts.b",))])
def test_what_is_held_back_is_what_is_averaged(share, held, make_task, make_site, monkeypatch):
    """The sum runs over averaged tensors, from where the server sent them, not from where the site had left them."""
    anchors = []
    plain = evidential.learn

    def spy(*args, terms, **named):
        [term] = terms
        anchors.append({name: value.clone() for name, value in term.anchor.items()})
        return plain(*args, terms=terms, **named)

    monkeypatch.setattr(evidential, "learn", spy)
    task = make_task(rounds=2)
    sent: list[Exchange] = []
    play(prox(share=share), task, {s: make_site(task, s, seed=i) for i, s in enumerate("ab")}, watch=sent.append)
    broadcasts = [one.broadcasts[s] for one in sent if one.phase.kind == "train" for s in "ab"]
    assert len(anchors) == len(broadcasts) == 4
    for anchor, broadcast in zip(anchors, broadcasts, strict=True):
        assert set(anchor) == set(held)
        for name, value in anchor.items():
            np.testing.assert_array_equal(value.numpy(), broadcast.arrays[name])


def test_its_share_of_the_loss_is_reported(make_task, make_site):
    facts: list = []
    task = make_task(epochs=2)
    site = dataclasses.replace(make_site(task, count=12), report=facts.append)
    play(prox(mu=1.0), task, {"a": site})
    shares = [one["proximal_share"] for one in facts if "summary" in one]
    assert len(shares) == 2 and 0 < shares[0] < shares[1]


@pytest.mark.parametrize("mu", [-0.1, 11.0])
def test_mu_has_a_range(mu):
    with pytest.raises(SettingError, match="allowed: 0 to 10"):
        prox(mu=mu)


def test_the_default_is_the_documented_one():
    assert build(METHODS["fedprox"], {}).mu == 0.01
    assert build(METHODS["fedprox"], {}).base.recipe == EvidentialRecipe()
