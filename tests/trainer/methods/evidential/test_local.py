"""Local training: one prompt set (arXiv 2411.10071, Table 1) and plain cross-entropy (docs/methods.md 1.6)."""

import numpy as np
import pytest
import torch
from tests.trainer.methods.conftest import play, told

from edgefl_protocol import Payload
from edgefl_trainer.contract import State
from edgefl_trainer.engine.hyper_parameters import build
from edgefl_trainer.engine.models import predict
from edgefl_trainer.learning.evidential import EvidentialRecipe, initial_tensors
from edgefl_trainer.methods import METHODS
from edgefl_trainer.models.scoring import ScoreModule

HYPER = {"batch": 4, "readout": "cls", "head_norm": "none", "augment": "none"}
FIRST = Payload({}, {"phase": "train", "round": 1, "rounds": 1})


def test_one_prompt_set_learns_at_the_slow_rate(make_task, make_site, backbone):
    """Section 4 of the paper: g-prompts = [b-prompts, t-prompts], all at mu1. AdamW's first step is lr·sign(g)."""
    rates = {"lr_b": 1e-3, "lr_t": 2e-3, "lr_head": 4e-3}
    method = build(METHODS["local"], {**HYPER, **rates, "prompts": "g", "batch": 12, "weight_decay": 0.0})
    task, spec = make_task(), backbone.spec
    state, reply = method.local_round(make_site(task, count=12), State(), FIRST)
    assert not reply.arrays
    before = initial_tensors(method.recipe, spec, 2, task.seed)
    assert [name for name in state.arrays if name.startswith("prompts.")] == ["prompts.g"]
    assert state.arrays["prompts.g"].shape[:2] == (spec.depth, 2)
    moved = np.abs(state.arrays["prompts.g"] - before["prompts.g"].numpy()).max(axis=(1, 2, 3, 4))
    np.testing.assert_allclose(moved, 1e-3, rtol=1e-3)  # in every block, first and last alike
    assert np.abs(state.arrays["head.bias"] - before["head.bias"].numpy()).max() == pytest.approx(4e-3, rel=1e-3)


def test_one_prompt_set_reaches_every_block_of_the_model(make_task, make_site):
    """The predictor's graph takes `prompts.g` alone, and a change of any block's prompts changes what it says."""
    task = make_task()
    method, site = build(METHODS["local"], {**HYPER, "prompts": "g"}), make_site(task)
    _, states = play(method, task, {"a": site})
    found = method.predictor(site, states["a"], Payload({}, {}))
    assert "prompts.g" in found.tensors and not {"prompts.b", "prompts.t"} & set(found.tensors)
    reference = predict(found, site.tune.images).probabilities
    for block in range(len(found.tensors["prompts.g"])):
        found.tensors["prompts.g"][block] += 1.0
        assert not np.array_equal(predict(found, site.tune.images).probabilities, reference)
        found.tensors["prompts.g"][block] -= 1.0


def test_cross_entropy_is_torchs(make_task, make_site):
    """loss=ce: two epochs equal a plain loop around torch's cross-entropy, and no class is weighed by a prior."""
    task = make_task(epochs=2)
    site = make_site(task, count=12, labels=[0] * 9 + [1] * 3)
    method = build(METHODS["local"], {**HYPER, "loss": "ce", "lr_head": 2e-3})
    recipe, spec = method.recipe, task.backbone
    found, _ = method.local_round(site, State(), FIRST)
    module = ScoreModule(site.backbone, recipe.options(spec, "cls"))
    tensors = {name: value.requires_grad_() for name, value in initial_tensors(recipe, spec, 2, task.seed).items()}
    rates = {"prompts.b": recipe.lr_b, "prompts.t": recipe.lr_t}
    groups = [{"params": [value], "lr": rates.get(name, recipe.lr_head)} for name, value in tensors.items()]
    optimizer = torch.optim.AdamW(groups, weight_decay=recipe.weight_decay)
    for epoch in range(2):
        for images, target in site.batches(site.train, recipe.batch, 1, epoch):
            logits = module.output(images, tensors, need_attention=False).cls @ tensors["head.weight"].T
            optimizer.zero_grad()
            torch.nn.CrossEntropyLoss()(logits + tensors["head.bias"], target).backward()
            optimizer.step()
    for name in EvidentialRecipe().trained:
        np.testing.assert_allclose(found.arrays[name], tensors[name].detach().numpy(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["local", "fedavg", "fedavgpers", "fedprox", "fedproto", "feddistill", "fedevprompt"])
def test_with_cross_entropy_a_model_answers_by_softmax(name, make_task, make_site):
    """Probabilities are the softmax of the head's logits, without evidence, vacuity or prior; a map is still shown."""
    task = make_task()
    method = build(METHODS[name], {**HYPER, "loss": "ce"})
    sites = {s: make_site(task, s, seed=i) for i, s in enumerate("ab")}
    server, states = play(method, task, sites)
    found = method.predictor(sites["a"], states["a"], told(method, server, task, "a"))
    assert found.module.options.output == "softmax" and "prior" not in found.tensors
    scores = predict(found, sites["a"].tune.images)
    assert scores.vacuity is None and scores.evidence is None and scores.dissonance is None
    assert scores.maps.shape == (8, task.backbone.tokens)
    tensors = {key: torch.from_numpy(np.array(value)) for key, value in found.tensors.items()}
    with torch.inference_mode():
        output = found.module.output(torch.from_numpy(sites["a"].tune.images), tensors, need_attention=False)
    logits = output.cls.double().numpy() @ found.tensors["head.weight"].T.astype(np.float64)
    powers = np.exp(logits + found.tensors["head.bias"])
    np.testing.assert_allclose(scores.probabilities, powers / powers.sum(axis=1, keepdims=True), atol=1e-5)
