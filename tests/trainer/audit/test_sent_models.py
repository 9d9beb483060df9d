"""The model that is attacked as sent is the one that was sent, of every method that sends weights or prompts."""

from collections.abc import Mapping

import numpy as np
import pytest
import torch
from tests.trainer.methods.conftest import Exchange, examples, play

from edgefl_protocol import Payload
from edgefl_trainer.audit.sent_models import CARRIERS, sent_model, tensors_of
from edgefl_trainer.contract import Method, Predictor, Site, State, Task
from edgefl_trainer.engine.hyper_parameters import build, hyper_types
from edgefl_trainer.engine.models import predict
from edgefl_trainer.methods import METHODS
from edgefl_trainer.models.backbones import load_backbone

PX = 36
WHOLE = {"fedavg", "fedprox", "fedvpt", "fedvpt-deep", "head", "sgpt", "pep-fedpt", "fedpr", "finetune"}
PARTS = {
    "fedavg share=b": "never left the site",  # prompts alone travel, and the head is the site's own
    "p-pt": "never left the site",
    "pfedpg": "never left the site",
    "fedavgpers": "went on after the last round",
    "finetune home=head": "went on after the last round",
    "finetune private=head home=none": "never left the site",
}

Played = tuple[State, dict[str, State], Mapping[str, Payload]]


@pytest.fixture(scope="module")
def task() -> Task:
    backbone = load_backbone("vit:64x2/12", image_px=PX, seed=3)
    return Task(name="all", classes=("a", "b"), backbone=backbone.spec, rounds=1, epochs=2, seed=0)


@pytest.fixture(scope="module")
def sites(task: Task) -> dict[str, Site]:
    backbone = load_backbone("vit:64x2/12", image_px=PX, seed=3)

    def made(name: str, seed: int) -> Site:
        rows = examples(8, 2, seed)
        return Site(name=name, task=task, backbone=backbone, train=rows, tune=rows, unlabelled=rows)

    return {"a": made("a", 1), "b": made("b", 2)}


def method_of(words: str) -> Method:
    name, *given = words.split()
    known = hyper_types(METHODS[name]())
    usual = {"batch": 4, "groups": 6, "b_blocks": 1}
    set_ = dict(word.split("=") for word in given)
    return build(METHODS[name], {**{key: value for key, value in usual.items() if key in known}, **set_})


def played(method: Method, task: Task, sites: Mapping[str, Site]) -> Played:
    seen: list[Exchange] = []
    server, states = play(method, task, sites, watch=seen.append)
    return server, states, next(one.replies for one in reversed(seen) if one.phase.kind == "train")


def test_the_list_is_complete() -> None:
    """Each method of labelled pictures that sends weights or prompts."""
    kinds = {name: METHODS[name]() for name in METHODS if name != "pfl-vqa"}
    sending = {name for name, one in kinds.items() if one.needs_labels and {*CARRIERS} & {*one.travels}}
    assert sending == WHOLE | {words.split()[0] for words in PARTS}


@pytest.mark.parametrize("words", sorted(WHOLE))
def test_its_tensors_are_those_of_the_last_reply(words: str, task: Task, sites: dict[str, Site]) -> None:
    """And it answers, though the server has averaged since and a predictor could fall back to a beginning."""
    method = method_of(words)
    server, states, replies = played(method, task, sites)
    model = sent_model(method, server, sites["a"], states["a"])
    assert isinstance(model, Predictor), model
    read, sent = tensors_of(model), replies["a"].arrays
    assert "head.weight" in read.keys() & sent.keys()
    for name in read.keys() & sent.keys() - {"prototypes"}:  # pep-fedpt: no part of what is attacked
        assert np.array_equal(read[name], sent[name]), name
    assert not np.array_equal(read["head.weight"], server.arrays["head.weight"])
    answers = predict(model, sites["a"].train.images, torch.device("cpu")).probabilities
    assert np.isfinite(answers).all()


@pytest.mark.parametrize("words", sorted(PARTS))
def test_a_model_that_was_not_sent_is_refused(words: str, task: Task, sites: dict[str, Site]) -> None:
    method = method_of(words)
    server, states, _ = played(method, task, sites)
    found = sent_model(method, server, sites["a"], states["a"])
    assert isinstance(found, str) and PARTS[words] in found


def test_a_site_that_kept_nothing_is_refused(task: Task, sites: dict[str, Site]) -> None:
    """Its predictor would answer with the beginning."""
    method = method_of("finetune")
    server, _, _ = played(method, task, sites)
    found = sent_model(method, server, sites["a"], State())
    assert isinstance(found, str) and "not what the site sent last" in found
