"""How the prompt-token methods learn at a site: plain SGD as PyTorch has it, and what the warm phase sends."""

import numpy as np
import pytest
import torch
from tests.trainer.methods.conftest import after, play

from edgefl_protocol import Payload
from edgefl_trainer.contract import Phase
from edgefl_trainer.engine.hyper_parameters import build
from edgefl_trainer.errors import SettingError
from edgefl_trainer.learning import averaged_prompts, softmax
from edgefl_trainer.learning.features import feature_reply
from edgefl_trainer.learning.named_arrays import as_arrays
from edgefl_trainer.learning.softmax import HEAD_WEIGHT, PROMPTS, SoftmaxRecipe, token_init
from edgefl_trainer.method_halves import stamped
from edgefl_trainer.methods import METHODS
from edgefl_trainer.models.inserts import Tokens

PAPER = {"readout": "cls", "head_norm": "none", "augment": "none"}
AVERAGED = ("head", "fedvpt", "fedvpt-deep", "fedpr", "p-pt")
NAMES = (PROMPTS, HEAD_WEIGHT)


@pytest.fixture
def model(make_task, make_site):
    """Tensors, site and module of a small shallow model."""
    task = make_task(epochs=2)
    site = make_site(task)
    start = build(METHODS["fedvpt"], {**PAPER, "n": 2}).start(task, ["a"])
    return dict(start.arrays), site, SoftmaxRecipe(**PAPER, batch=4).module(site, "cls", Tokens())


def learned(model, recipe, **more):
    arrays, site, module = model
    tensors = softmax.trainable(arrays, NAMES, site.device)
    velocity = softmax.learn(recipe, site, module, tensors, NAMES, 1, **more)
    return as_arrays({name: tensors[name] for name in NAMES}), velocity


def test_velocity_carries_on_where_it_stopped(model):
    """Two epochs in one call equal one epoch after the other, if the velocity goes along; else they do not."""
    recipe = SoftmaxRecipe(**PAPER, batch=4)
    arrays, site, module = model
    whole, last = learned(model, recipe)
    first, velocity = learned(model, recipe, epochs=[0])
    second, end = learned(({**arrays, **first}, site, module), recipe, epochs=[1], velocity=velocity)
    afresh, _ = learned(({**arrays, **first}, site, module), recipe, epochs=[1])
    for name in NAMES:
        np.testing.assert_array_equal(second[name], whole[name])
        np.testing.assert_array_equal(end[name], last[name])
    assert not np.array_equal(afresh[HEAD_WEIGHT], whole[HEAD_WEIGHT])
    assert learned(model, SoftmaxRecipe(**PAPER, momentum=0))[1] == {}


def test_gradients_are_clipped_together(model):
    """One step of rate 1 without momentum moves all learned tensors together by the clip, no further."""
    arrays, *_ = model
    recipe = SoftmaxRecipe(**PAPER, batch=12, lr=1, momentum=0, clip=1e-3)
    found, _ = learned(model, recipe, epochs=[0])
    moved = sum(float(((found[name] - arrays[name]) ** 2).sum()) for name in NAMES) ** 0.5
    assert moved == pytest.approx(1e-3, rel=1e-2)


def test_an_update_is_projected_whatever_made_it(model):
    """Δ·T: with T = 0 the prompts stay where they are, momentum and weight decay included; the head learns."""
    arrays, _, _ = model
    width = arrays[HEAD_WEIGHT].shape[1]
    recipe = SoftmaxRecipe(**PAPER, batch=4, weight_decay=0.1)
    still, _ = learned(model, recipe, project={PROMPTS: torch.zeros((width, width))})
    np.testing.assert_array_equal(still[PROMPTS], arrays[PROMPTS])
    assert not np.array_equal(still[HEAD_WEIGHT], arrays[HEAD_WEIGHT])
    free, _ = learned(model, recipe)
    same, _ = learned(model, recipe, project={PROMPTS: torch.eye(width)})
    np.testing.assert_allclose(same[PROMPTS], free[PROMPTS], atol=1e-5)


def test_the_rate_decays_with_the_rounds(model):
    arrays, site, module = model
    recipe = SoftmaxRecipe(**PAPER, batch=12, momentum=0, lr=0.1, lr_decay=0.5, clip=0)
    moves = []
    for round_ in (1, 3):
        tensors = softmax.trainable(arrays, NAMES, site.device)
        before = softmax.plain_forward(site, module, tensors)
        softmax.learn(recipe, site, module, tensors, NAMES, round_, epochs=[0], forward=before)
        moves.append(tensors[HEAD_WEIGHT].detach().numpy() - arrays[HEAD_WEIGHT])
    np.testing.assert_allclose(moves[1], moves[0] / 4, rtol=1e-3, atol=1e-7)


def test_the_head_may_have_a_rate_of_its_own(model):
    """A tenth of the rate for the head is a tenth of its first step, and the prompts do not notice."""
    arrays, *_ = model
    plain = {**PAPER, "batch": 12, "momentum": 0, "clip": 0}
    same, _ = learned(model, SoftmaxRecipe(**plain, lr=0.1), epochs=[0])
    own, _ = learned(model, SoftmaxRecipe(**plain, lr=0.1, lr_head=0.01), epochs=[0])
    np.testing.assert_array_equal(own[PROMPTS], same[PROMPTS])
    np.testing.assert_allclose(
        own[HEAD_WEIGHT] - arrays[HEAD_WEIGHT], (same[HEAD_WEIGHT] - arrays[HEAD_WEIGHT]) / 10, rtol=1e-2, atol=1e-7
    )


def test_what_a_method_adds_to_the_loss_counts(model):
    """A penalty on the prompts alone reaches the prompts."""
    arrays, site, module = model
    recipe = SoftmaxRecipe(**PAPER, batch=12, momentum=0, clip=0, lr=0.1)
    tensors = softmax.trainable(arrays, NAMES, site.device)
    plain = softmax.plain_forward(site, module, tensors)
    without, _ = learned(model, recipe, epochs=[0])
    softmax.learn(
        recipe, site, module, tensors, NAMES, 1, epochs=[0],
        forward=lambda images: (plain(images)[0], tensors[PROMPTS].sum()),
    )  # fmt: skip
    np.testing.assert_allclose(tensors[PROMPTS].detach().numpy(), without[PROMPTS] - 0.1, atol=1e-6)
    np.testing.assert_array_equal(tensors[HEAD_WEIGHT].detach().numpy(), without[HEAD_WEIGHT])


def test_tokens_begin_as_vpts_do(make_task):
    """VPT's code: U(−v, v), v = sqrt(6/(3·patch² + D))."""
    spec = make_task().backbone
    values = token_init(spec, (500, spec.width), torch.Generator().manual_seed(0))
    bound = (6 / (3 * spec.patch**2 + spec.width)) ** 0.5
    assert 0.99 * bound < values.max() <= bound and -bound <= values.min() < -0.99 * bound


@pytest.mark.parametrize("name", AVERAGED)
def test_the_papers_setting_has_no_warm_phase(name, make_task, make_site):
    """Where the readout is named and features are taken as they are, there is nothing to ask before round 1."""
    assert build(METHODS[name], PAPER).phases(2) == [Phase("train", 1), Phase("train", 2)]
    assert build(METHODS[name], {}).phases(1) == [Phase("warm", 0), Phase("train", 1)]
    task = make_task()
    server, _ = play(build(METHODS[name], {**PAPER, "batch": 4}), task, {"a": make_site(task)})
    assert not [key for key in server.arrays if key.startswith("features.")]


def test_a_warm_reply_holds_no_more_than_is_read(make_task, make_site):
    site = make_site(make_task())
    nothing = feature_reply(site, "cls", standardise=False)
    assert not nothing.arrays and set(nothing.scalars) == {"n_train"}
    assert set(feature_reply(site, "mean", standardise=True).arrays) == {"moments.mean"}
    probed = feature_reply(site, "auto", standardise=False)
    assert not probed.arrays and {"probe.cls", "probe.mean"} < set(probed.scalars)


@pytest.mark.parametrize("standardise", [True, False])
def test_the_warm_phase_pools_what_all_images_together_have(standardise, make_task, make_site):
    """Pooled statistics of two sites equal those of one site with all their images."""
    task = make_task()
    method = build(METHODS["head"], {"readout": "mean", "head_norm": "standardise" if standardise else "none"})
    sites = {"a": make_site(task, "a", count=12, seed=1), "b": make_site(task, "b", count=20, seed=2)}
    state = method.start(task, ["a", "b"])
    replies = {name: averaged_prompts.warm_reply(method.recipe, site) for name, site in sites.items()}
    state = method.aggregate(state, Phase("warm", 0), replies)
    assert state.values["readout"] == "mean"
    assert ("features.mean" in state.arrays) == standardise
    if standardise:
        module = method.recipe.module(sites["a"], "mean", None)
        rows = [module.vit(module.vit.normalise(site.train.read(site.train.rows)[0])) for site in sites.values()]
        features = torch.cat([output.patch_mean for output in rows]).double().numpy()
        np.testing.assert_allclose(state.arrays["features.mean"], features.mean(0), rtol=1e-4, atol=1e-5)
        deviation = features.std(0)
        floor = np.maximum(deviation, 0.1 * np.median(deviation))
        np.testing.assert_allclose(state.arrays["features.std"], floor, rtol=1e-3)


@pytest.mark.parametrize("name", AVERAGED)
@pytest.mark.parametrize("weighting", ["samples", "uniform"])
def test_the_server_applies_the_chosen_weights(name, weighting, make_task):
    """theta = sum_c n_c/n theta_c, or the plain mean (PEP-FedPT section 3.2)."""
    method = build(METHODS[name], {**PAPER, "weighting": weighting})
    state = method.start(make_task(), ["a", "b"])
    shifted = {key: value + 4 for key, value in state.arrays.items()}
    replies = {"a": Payload(state.arrays, {"n_train": 30}), "b": Payload(shifted, {"n_train": 10})}
    found = method.aggregate(state, Phase("train", 1), replies)
    for key, value in state.arrays.items():
        np.testing.assert_allclose(found.arrays[key] - value, 1.0 if weighting == "samples" else 2.0, rtol=1e-5)


@pytest.mark.parametrize("name", [*AVERAGED, "pfedpg"])
def test_the_head_has_no_bias(name, make_task, make_site):
    """PEP-FedPT's parameter counts leave room for none; the score's bias is zero."""
    task = make_task()
    method, site = build(METHODS[name], {"batch": 4}), make_site(task)
    server, states = play(method, task, {"a": site})
    assert "head.bias" not in {*server.arrays, *states["a"].arrays}
    broadcast = stamped(method.broadcast(server, after(task), ["a"])["a"], after(task), 1)
    assert not method.predictor(site, states["a"], broadcast).tensors["head.bias"].any()


@pytest.mark.parametrize(
    ("hyper", "allowed"),
    [({"lr": 11.0}, "0 to 10"), ({"batch": 0}, "1 or more"), ({"clip": -1.0}, "0 to"), ({"n": 0}, "1 to 10000")],
)
def test_values_out_of_range_name_it(hyper, allowed):
    with pytest.raises(SettingError, match=f"{next(iter(hyper))} is .*allowed: {allowed}"):
        build(METHODS["fedvpt"], hyper)
