"""`prompts=none`: the head alone learns, on convolutional networks and on vision transformers (docs/methods.md 1.9)."""

import dataclasses

import numpy as np
import pytest
import torch
from tests.trainer.methods.conftest import play, told

from edgefl_protocol import Payload
from edgefl_trainer.contract import State, Task
from edgefl_trainer.engine.hyper_parameters import build
from edgefl_trainer.errors import SettingError
from edgefl_trainer.learning import features
from edgefl_trainer.learning.features import common_features, feature_reply, own_features
from edgefl_trainer.methods import METHODS
from edgefl_trainer.models.backbones import load_backbone
from edgefl_trainer.models.spec import settled_readout

HEADS_ONLY = ("local", "fedavg", "fedavgpers", "fedprox", "fedproto", "feddistill")
NEED_TOKENS = ("fedevprompt", "fedvpt", "fedvpt-deep", "fedpr", "sgpt", "pfedpg", "p-pt", "pep-fedpt", "fedmae")
TRAIN = {"phase": "train", "round": 1, "rounds": 1}


@pytest.fixture(scope="module")
def cnn():
    return load_backbone("cnn:test_resnet", image_px=36, seed=3)


@pytest.fixture(params=["cnn", "vit"])
def some(request, cnn, backbone):
    return cnn if request.param == "cnn" else backbone


def task_of(backbone, **changes) -> Task:
    plain = {"name": "nevus", "classes": ("nevus", "other"), "rounds": 2, "epochs": 2, "seed": 0}
    return Task(backbone=backbone.spec, **{**plain, **changes})


def sites_of(task, backbone, make_site, names=("a", "b")):
    found = {name: make_site(task, name, seed=number + 1) for number, name in enumerate(names)}
    return {name: dataclasses.replace(site, backbone=backbone) for name, site in found.items()}


@pytest.mark.parametrize("loss", ["evidential", "ce"])
@pytest.mark.parametrize("name", HEADS_ONLY)
def test_only_the_head_learns_and_every_method_scores_with_it(name, loss, some, make_site):
    method = build(METHODS[name], {"prompts": "none", "loss": loss})
    task = task_of(some, rounds=1, epochs=1)
    sites = sites_of(task, some, make_site)
    before = {key: value.clone() for key, value in some.state_dict().items()}
    server, states = play(method, task, sites)
    for key, value in some.state_dict().items():
        assert torch.equal(value, before[key]), key
    for site in sites.values():
        predictor = method.predictor(site, states[site.name], told(method, server, task, site.name))
        assert not [tensor for tensor in predictor.tensors if tensor.startswith("prompts")]
        assert predictor.network == {}
        images, targets = site.train.read(np.arange(len(site.train)))
        tensors = {key: torch.from_numpy(np.array(value)) for key, value in predictor.tensors.items()}
        found = predictor.module(images, tensors)
        assert found.probabilities.shape == (len(targets), 2)
        assert (found.map is None) is (predictor.module.options.readout == "pooled")
        assert (found.vacuity is None) is (loss == "ce")


def test_the_head_learns_what_it_is_shown(cnn, make_site):
    """Brightness is the label; a linear head on standardised features of even a random network separates it."""
    method = build(METHODS["local"], {"prompts": "none", "lr_head": 0.05})
    task = task_of(cnn, epochs=20)
    sites = sites_of(task, cnn, make_site, ("a",))
    _, states = play(method, task, sites)
    predictor = method.predictor(sites["a"], states["a"], Payload({}, TRAIN))
    images, targets = sites["a"].tune.read(np.arange(len(sites["a"].tune)))
    tensors = {key: torch.from_numpy(np.array(value)) for key, value in predictor.tensors.items()}
    assert (predictor.module(images, tensors).probabilities.argmax(dim=1) == targets).all()


@pytest.mark.parametrize("name", NEED_TOKENS)
def test_methods_of_prompts_and_patches_refuse_a_convolutional_network_at_the_start(name, cnn):
    with pytest.raises(
        SettingError, match="needs a vision transformer, but cnn:test_resnet is a convolutional network"
    ):
        METHODS[name]().start(task_of(cnn), ["a"])


def test_prompts_are_refused_where_the_network_takes_none(cnn):
    with pytest.raises(SettingError, match="prompts=bt needs a vision transformer"):
        METHODS["local"]().start(task_of(cnn), ["a"])


@pytest.mark.parametrize(("name", "readout"), [("head", "cls"), ("local", "mean"), ("head", "mean")])
def test_a_readout_of_tokens_is_refused_at_the_start(name, readout, cnn):
    prompts = {} if name == "head" else {"prompts": "none"}
    with pytest.raises(SettingError, match=f"readout is '{readout}', but cnn:test_resnet offers pooled"):
        build(METHODS[name], {"readout": readout, **prompts}).start(task_of(cnn), ["a"])


@pytest.mark.parametrize(
    ("name", "hyper"),
    [
        ("fedevprompt", {"prompts": "none"}),
        ("fedavg", {"prompts": "none", "share": "g"}),
        ("fedavg", {"prompts": "none", "share": "b"}),
        ("fedavg", {"prompts": "none", "kd": True}),
    ],
)
def test_what_would_share_prompts_cannot_be_without(name, hyper):
    with pytest.raises(SettingError, match="prompts is 'none'"):
        build(METHODS[name], hyper)


def test_one_readout_needs_no_probe(cnn, make_site, monkeypatch):
    task = task_of(cnn)
    [site] = sites_of(task, cnn, make_site, ("a",)).values()
    monkeypatch.setattr(features, "linear_probe", pytest.fail)
    own = own_features(site, "auto", standardise=True)
    assert own.values["readout"] == "pooled"
    reply = feature_reply(site, "auto", standardise=True)
    assert set(reply.scalars) == {"n_train"}
    assert set(reply.arrays) == {"moments.pooled"}
    common = common_features({"a": reply}, settled_readout("auto", cnn.spec), standardise=True)
    assert common.values["readout"] == "pooled"
    with torch.inference_mode():
        plain = cnn(cnn.normalise(site.train.read(np.arange(len(site.train)))[0])).pooled.double().numpy()
    for found in (own, common):
        np.testing.assert_allclose(found.arrays["features.mean"], plain.mean(axis=0), atol=1e-5)
    bare = common_features({"a": feature_reply(site, "auto", standardise=False)}, "pooled", standardise=False)
    assert bare == State({}, {"readout": "pooled"})


def test_a_bare_head_is_the_same_on_either_side_of_none(backbone, make_site):
    """Without prompts FedAvg of one site is that site learning alone, when no moments are carried over."""
    task = task_of(backbone, rounds=1)
    [site] = sites_of(task, backbone, make_site, ("a",)).values()
    alone = build(METHODS["local"], {"prompts": "none", "readout": "cls", "optimizer_state": "reset"})
    state, _ = alone.local_round(site, State(), Payload({}, TRAIN))
    together = build(METHODS["fedavg"], {"prompts": "none", "readout": "cls"})
    server = together.start(task, ["a"])
    for phase in together.phases(1):
        sent = together.broadcast(server, phase, ["a"])["a"]
        facts = {"phase": phase.kind, "round": phase.round, "rounds": 1}
        _, reply = together.local_round(site, State(), Payload(sent.arrays, {**sent.scalars, **facts}))
        server = together.aggregate(server, phase, {"a": reply})
    for name in ("head.weight", "head.bias"):
        np.testing.assert_array_equal(server.arrays[name], state.arrays[name])


def test_prototypes_move_no_head_where_no_feature_can_move(some, make_site):
    """docs/methods.md 1.9: without prompts FedProto's term has no gradient, its heads are those of `local`."""
    task = task_of(some)
    sites = sites_of(task, some, make_site)
    found = []
    for weight in (0.0, 1000.0):
        _, states = play(build(METHODS["fedproto"], {"prompts": "none", "proto_weight": weight}), task, sites)
        found.append({name: state.digest() for name, state in states.items()})
    assert found[0] == found[1]
