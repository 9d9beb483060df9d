"""How a device learns a live round: the task's settings in the bundle's step (docs/decisions/0028)."""

from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tests.edge_client.learning.contrast_lab import contrast_bundle, contrast_plan
from tests.told import told_task

from edgefl_client.home import Home
from edgefl_client.learning.errors import LearningError
from edgefl_client.learning.limits import LearningLimits
from edgefl_client.learning.live_round import LiveRound, learn_live
from edgefl_client.learning.options import TrainOptions
from edgefl_client.learning.own_pictures import Table
from edgefl_client.learning.round_plan import agreed
from edgefl_protocol import Payload
from edgefl_protocol.bundle import Bundle
from edgefl_protocol.bundle.fedclf_plan import FedCLFPlan
from edgefl_protocol.bundle.fedevprompt_plan import FedEvPromptPlan, PromptForm

SAME = {"projection": "linear", "view_px": 16}  # what stands in the graph of the lab's bundle
OPTIONS = TrainOptions(threads=1, limits=LearningLimits(battery=lambda: None))


@pytest.fixture(scope="module")
def encoder(lab: SimpleNamespace) -> Bundle:
    return contrast_bundle(lab, contrast_plan())


def fedclf(bundle: Bundle, *, complete: bool = True, **settings: Any) -> FedCLFPlan:
    plan = agreed(bundle, {**SAME, **settings}, {}, complete=complete).training
    assert isinstance(plan, FedCLFPlan)
    return plan


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("lr", 0.01), ("momentum", 0.5), ("weight_decay", 0.2), ("batch", 16), ("bn", "local"), ("queue", 33),
        ("key_momentum", 0.7), ("momentum_encoder", "local"), ("negatives", "both"),
    ],
)  # fmt: skip
def test_what_a_step_takes_as_an_input_is_the_federations(encoder: Bundle, name: str, value: Any) -> None:
    """Each setting that a FedCLF device can follow: told, it holds; not told, the method's default does."""
    told, silent = fedclf(encoder, **{name: value}), fedclf(encoder)
    assert getattr(told, name) == value != getattr(silent, name) == FedCLFPlan.defaults[name]
    assert replace(told, **{name: getattr(silent, name)}) == silent
    untold = fedclf(encoder, complete=False)  # a coordinator that does not describe its task
    assert getattr(untold, name) == getattr(encoder.training, name)


@pytest.mark.parametrize(
    ("settings", "backbone", "sentence"),
    [
        ({"temperature": 0.07}, {}, r"temperature is 0\.07, but the training step of this bundle has 0\.2"),
        ({"view_px": 0}, {}, r"view_px is 0, but the training step of this bundle has 16"),
        ({"projection": "mlp"}, {}, r"projection is mlp, but the training step of this bundle has linear"),
        ({"dp_noise": 0.5}, {}, r"adds noise to features \(dp_noise 0\.5\), and devices cannot"),
        ({"warmth": 3}, {}, r"sets warmth, which this version does not know"),
        ({}, {"image_px": 72}, r"image_px of the network is 72, but the training step of this bundle has 24"),
        ({}, {"mean": (0.1, 0.2, 0.3)}, r"mean of the network is \(0\.1, 0\.2, 0\.3\)"),
    ],
)
@pytest.mark.parametrize("complete", [True, False])
def test_what_stands_in_the_graph_must_be_the_same(
    encoder: Bundle, settings: dict[str, Any], backbone: dict[str, Any], sentence: str, complete: bool
) -> None:
    """Another temperature, view, projection, network, or noise that a device does not add: refused in a sentence."""
    with pytest.raises(LearningError, match=sentence) as refused:
        agreed(encoder, {**SAME, **settings}, backbone, complete=complete)
    assert refused.value.code == "other_settings" and "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("name", "value"), [("lr", "fast"), ("lr", 11.0), ("queue", 1), ("queue", 20.5), ("bn", (1, 2)), ("batch", True)]
)
def test_values_that_mean_nothing_are_refused(encoder: Bundle, name: str, value: Any) -> None:
    """A coordinator that errs, or lies: one sentence, no traceback."""
    with pytest.raises(LearningError, match=f"cannot learn with these settings: {name} must be") as refused:
        fedclf(encoder, **{name: value})
    assert refused.value.code == "bad_settings"


def test_views_of_the_usual_size_need_no_word(lab: SimpleNamespace) -> None:
    """docs/methods.md, FedCLF: view_px 0 is 8/9 of the image, 21 of 24."""
    bundle = contrast_bundle(lab, contrast_plan(view_px=21))
    assert agreed(bundle, {"projection": "linear"}, {}, complete=True).training.view_px == 21  # type: ignore[union-attr]
    assert agreed(bundle, {**SAME, "view_px": 21}, {}, complete=True).training.view_px == 21  # type: ignore[union-attr]


def test_prompts_follow_the_task_too(school: SimpleNamespace) -> None:
    """FedEvPrompt: rates by the names of their tensors, and every number of the loss."""
    bundle = school.learning_bundle()
    told = {"lr_head": 0.2, "kd_weight": 0.3, "kd_peers": "mean5", "anneal_clock": "round", "augment": "none"}
    plan = agreed(bundle, told, {}, complete=True).training
    assert isinstance(plan, FedEvPromptPlan)
    assert dict(plan.rates) == {"head.weight": 0.2, "head.bias": 0.2}
    assert (plan.kd_weight, plan.kd_peers, plan.anneal_clock, plan.augment) == (0.3, "mean5", "round", "none")
    assert (plan.batch, plan.weight_decay, plan.prior_floor) == (32, 1e-2, 1e-2)  # docs/methods.md, 1.6
    assert agreed(bundle, {}, {}, complete=False).training == bundle.training
    for settings in ({"loss": "ce"}, {"select": "random"}):
        with pytest.raises(LearningError, match="the training step of this bundle has"):
            agreed(bundle, settings, {}, complete=True)


ANOTHER = {
    "prompts": "g", "b_blocks": 4, "prompt_length": 10, "prefix": "before", "evidence": "relu", "readout": "mean",
    "head_norm": "standardise", "rollout": "sink", "kd_metric": "nearest",
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(ANOTHER))
@pytest.mark.parametrize("complete", [True, False])
def test_prompts_of_another_form_are_refused(school: SimpleNamespace, name: str, complete: bool) -> None:
    """Decision 0028: evidence, readout, rollout and the like stand in FedEvPrompt's graphs; another federation's value
    would mix maps that mean something else, so the round is refused in a sentence that names both."""
    bundle = school.learning_bundle()
    ours, theirs = getattr(bundle.training.form, name), ANOTHER[name]
    assert agreed(bundle, {name: ours}, {}, complete=complete).training.form == bundle.training.form  # type: ignore[union-attr]
    with pytest.raises(
        LearningError, match=f"{name} is {theirs}, but the training step of this bundle has {ours}:"
    ) as no:
        agreed(bundle, {name: theirs}, {}, complete=complete)
    assert no.value.code == "other_settings" and "\n" not in str(no.value)


def test_every_part_of_the_form_is_a_setting() -> None:
    """A part that no setting is named like would never be compared."""
    parts = {entry.name for entry in fields(PromptForm)} - {"network"}
    assert parts == ANOTHER.keys() and parts <= FedEvPromptPlan.defaults.keys()


@pytest.mark.parametrize("name", sorted(FedEvPromptPlan.defaults))
def test_no_setting_of_the_federation_is_passed_over(school: SimpleNamespace, name: str) -> None:
    """Decision 0028: another value than the default's is learned with or refused. Not so how fresh prompts are drawn,
    for they come with the bundle, what leaves of the maps, which is asked of the task itself, and what becomes of
    evidence once a run is finished."""
    others = {
        **ANOTHER, "lr_b": 0.1, "lr_t": 0.2, "lr_head": 0.3, "weight_decay": 0.2, "batch": 8, "anneal_epochs": 3,
        "anneal_clock": "round", "prior_floor": 0.2, "augment": "none", "kd_weight": 0.5, "kd_peers": "mean5",
        "loss": "ce", "select": "random", "optimizer": "sgd", "rollout_from": 1, "kd_batch": "sum",
    }  # fmt: skip
    assert FedEvPromptPlan.defaults.keys() - others.keys() == {"prompt_init", "maps_per_class", "sent_maps", "discount"}
    if name not in others:
        return
    bundle, parts = school.learning_bundle(), ("prompts.b", "prompts.t", "head.bias")
    plan = replace(bundle.training, trained=parts, rates=dict.fromkeys(parts, 0.5))
    bundle = replace(bundle, training=plan)
    usual = agreed(bundle, {}, {}, complete=True).training
    try:
        changed = agreed(bundle, {name: others[name]}, {}, complete=True).training
    except LearningError as refused:
        assert refused.code == "other_settings" and name in str(refused)
    else:
        assert changed != usual


def test_what_auto_stands_for_is_compared(school: SimpleNamespace) -> None:
    """docs/methods.md 1.2 and 1.6: P = round(50·N/196), 9 of 6 × 6 patches; standardised on a self-supervised network;
    a readout that each site settles by its own rows is compared with nobody's."""
    bundle = school.learning_bundle()
    side = bundle.preprocess.size
    facts = {"image_px": side, "patch": side // 6, "self_supervised": False, "sha256": "0" * 64}
    agreed(bundle, {"prompt_length": 0, "head_norm": "auto", "readout": "auto"}, facts, complete=True)
    for changed, sentence in (
        ({"patch": side // 2}, "prompt_length is 0, but the training step of this bundle has 9"),
        ({"self_supervised": True}, "head_norm is auto, but the training step of this bundle has none"),
        ({"sha256": "1" * 64}, r"frozen network \(SHA-256\) is 1{60}, but the training step of this bundle has 0{60}"),
        ({"image_px": side + 1}, f"image_px of the network is {side + 1}"),
    ):
        with pytest.raises(LearningError, match=sentence):
            agreed(bundle, {}, {**facts, **changed}, complete=True)
    odd = {"patch": "six", "self_supervised": 3, "sha256": "0" * 64}  # a coordinator that errs or lies
    agreed(bundle, {}, odd, complete=True)


def test_one_set_of_prompts_has_no_b_blocks(school: SimpleNamespace) -> None:
    """docs/methods.md 1.6, `g`: the number of b-blocks, which the federation's task still has, means nothing."""
    bundle = school.learning_bundle()
    single = replace(bundle, training=replace(bundle.training, form=replace(bundle.training.form, prompts="g")))
    assert agreed(single, {"prompts": "g", "b_blocks": 7}, {}, complete=True).training is not None


def test_a_live_round_is_learned_with_the_federations_rate(encoder: Bundle, labels: Path, tmp_path: Path) -> None:
    """At a rate next to nothing a round gives the encoder back that came; at the bundle's it would not."""
    weight = np.random.default_rng(4).normal(size=(128, 3)).astype(np.float32)
    arrays = {
        "head.weight": weight, "backbone.mean": np.full(3, 0.5, np.float32), "backbone.seen": np.asarray(3, np.int64)
    }  # fmt: skip

    def reply(name: str, **settings: Any) -> Payload:
        live = LiveRound(
            federation="skin", site="ward-3", task=told_task(epochs=1, seed=5, settings={**SAME, **settings}),
            permitted=lambda kinds, size: None, broadcast=Payload(arrays, {"phase": "train", "round": 1, "rounds": 2}),
        )  # fmt: skip
        _, found = learn_live(Home(tmp_path / name), encoder, Table(file=labels), OPTIONS, live)
        assert found is not None
        return found

    np.testing.assert_allclose(reply("still", lr=1e-9).arrays["head.weight"], weight, rtol=0, atol=1e-6)
    assert abs(reply("moving").arrays["head.weight"] - weight).max() > 1e-3


def test_what_the_task_says_of_what_leaves_must_be_so(encoder: Bundle, home: Home, labels: Path) -> None:
    """A task that says weights alone, of a method that sends features too: nothing is learned."""
    live = LiveRound(
        federation="skin", site="ward-3", task=told_task(epochs=1, seed=5, travels=("weights",)),
        permitted=lambda kinds, size: None,
        broadcast=Payload({}, {"phase": "train", "round": 1, "rounds": 2}),
    )  # fmt: skip
    with pytest.raises(LearningError, match="says that weights leave a site") as refused:
        learn_live(home, encoder, Table(file=labels), OPTIONS, live)
    assert refused.value.code == "other_travels"
