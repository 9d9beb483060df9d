"""Which maps travel, and whether prompts reach them: docs/methods.md 1.4 and 1.5."""

import copy
import dataclasses
import re

import numpy as np
import pytest
import torch
from benchmarks.causes import map_reach
from click.testing import CliRunner

from edgefl_protocol import Payload
from edgefl_trainer.contract import MeasuredBefore, State, declared
from edgefl_trainer.engine.hyper_parameters import build
from edgefl_trainer.engine.models import predict
from edgefl_trainer.errors import SettingError
from edgefl_trainer.learning import evidential
from edgefl_trainer.learning.loss_terms import Step
from edgefl_trainer.learning.maps import reach as maps_reach
from edgefl_trainer.learning.maps.reach import IMAGES, NAME, STEPS, measured_reach
from edgefl_trainer.learning.maps.sharing import distillation
from edgefl_trainer.methods import METHODS

HYPER = {"batch": 4, "readout": "cls"}


def reach(sites, **hyper):
    method = build(METHODS["fedevprompt"], {**HYPER, **hyper})
    return measured_reach(method.recipe, method.maps, sites)


@pytest.fixture
def sites(make_task, make_site):
    task = make_task()
    return {name: make_site(task, name, count=20, seed=seed) for seed, name in enumerate("ab")}


def deaf(sites):
    """The same sites on a network whose blocks but the first attend to all tokens alike, whatever the tokens are.

    A block's own keys have no part in its factor, and no prompt comes before the first block: no prompt is in a map.
    """
    found = {}
    for name, site in sites.items():
        backbone = copy.deepcopy(site.backbone)
        for block in backbone.vit.blocks[1:]:
            torch.nn.init.zeros_(block.attn.qkv.weight)
            torch.nn.init.zeros_(block.attn.qkv.bias)
        found[name] = dataclasses.replace(site, backbone=backbone)
    return found


def test_maps_that_prompts_cannot_reach_are_found_and_warned_of(sites):
    found = reach(deaf(sites), lr_b=0.1, lr_t=0.1)
    assert found.figures == pytest.approx({"variance": 0, "moved": 0, "steps": STEPS}, abs=1e-9)
    assert "hardly follow the prompts" in found.warning
    assert "--set rollout_from=3" in found.warning


def test_maps_that_follow_the_prompts_warn_of_nothing(sites):
    found = reach(sites, lr_b=0.1, lr_t=0.1)
    assert found.figures["moved"] > 0.01
    assert 0 < found.figures["variance"] < 1
    assert found.warning is None


def shown(method, site, state):
    return predict(method.predictor(site, state, Payload({}, {})), site.train.images).maps


def distance(maps, labels, means):
    """Eq. 7 in pixels: squared difference of the maps at 224 px, summed; mean over images."""
    grids = torch.from_numpy(maps - np.stack([means[label] for label in labels])).double().reshape(-1, 1, 3, 3)
    pixels = torch.nn.functional.interpolate(grids, size=(224, 224), mode="bilinear")
    return float(pixels.square().sum() / len(maps))


def test_what_is_moved_is_what_rounds_of_distillation_alone_move(make_task, make_site, monkeypatch):
    """FedEvPrompt's own round with L_eps = 0 and every image in each step, judged by PyTorch's interpolation."""
    rates = {"lr_b": 0.05, "lr_t": 0.05, "lr_head": 0.0, "weight_decay": 0.0, "augment": "none", "kd_weight": 1.0}
    method = build(METHODS["fedevprompt"], {**HYPER, **rates, "batch": IMAGES})
    task = make_task(epochs=STEPS)
    site, peer = (make_site(task, name, count=IMAGES, seed=seed) for seed, name in enumerate("ab"))
    theirs, labels = shown(method, peer, State()), peer.train.targets
    sent = {f"maps.0.{k}": theirs[labels == k].astype(np.float16) for k in (0, 1)}
    means = {k: sent[f"maps.0.{k}"].astype(np.float64).mean(axis=0) for k in (0, 1)}
    monkeypatch.setattr(evidential, "evidential_loss", lambda evidence, *_: evidence.sum() * 0)
    state, _ = method.local_round(site, State(), Payload(sent, {"phase": "train", "round": 1, "rounds": 1}))
    before, after = (distance(shown(method, site, at), site.train.targets, means) for at in (State(), state))
    found = measured_reach(method.recipe, method.maps, {"a": site, "b": peer}).figures["moved"]
    assert found == pytest.approx(1 - after / before, rel=1e-3)
    assert found > 0.01


def test_one_site_no_weight_or_no_common_class_has_nothing_to_measure(sites, make_task, make_site):
    assert reach({"a": sites["a"]}) is None
    assert reach(sites, kd_weight=0.0) is None
    task = make_task()
    apart = {name: make_site(task, name, labels=[k] * 12) for k, name in enumerate("ab")}
    assert "moved" not in reach(apart).figures
    assert reach(apart).warning is None


def test_only_methods_that_share_maps_measure(sites):
    averaging = [(name, hyper) for name in ("fedavg", "fedprox", "fedavgpers") for hyper in ({"kd": True}, {})]
    for name, hyper, measures in (
        ("fedevprompt", {}, True),
        *((name, hyper, bool(hyper)) for name, hyper in averaging),
    ):
        method = build(METHODS[name], {**HYPER, **hyper})
        assert (declared(method).measured_before(method, sites) is not None) == measures


def test_what_is_moved_grows_with_the_rate(sites):
    """docs/methods.md 1.5, the table's first column."""
    moved = [reach(sites, lr_b=lr_b, lr_t=lr_t).figures["moved"] for lr_b, lr_t in map_reach.RATES.values()]
    assert moved == sorted(set(moved)) and len(moved) == 3


def test_the_benchmark_prints_the_pages_table(monkeypatch):
    """docs/methods.md 1.5: twelve rows, each of its own rates, blocks and steps; a wrong site is one sentence.

    What is measured is pretended: the rate of the b-prompts, and of the four blocks the first that is rolled out.
    """
    asked = []

    def pretended(recipe, sharing, sites, steps):
        asked.append((recipe.lr_b, recipe.lr_t, sharing.rollout_from, steps))
        return MeasuredBefore(NAME, {"moved": recipe.lr_b, "variance": sharing.rollout_from / 100})

    monkeypatch.setattr(maps_reach, "measured_reach", pretended)
    main = map_reach.main
    given = ["--data", "lesions:sites=2,images=12,px=36", "--backbone", "tiny"]
    printed = CliRunner().invoke(main, given).output.splitlines()
    assert printed[2].startswith("| prompt rates | blocks | steps | moved | variance |")
    paper = {"all": 0, "all but the first three": 3, "last three": 1, "last": 3}
    assert printed[4:] == [
        *(f"| the paper's | {blocks} | 12 | 0.025 % | {first} % |" for blocks, first in paper.items()),
        *(
            f"| {rate} | {blocks} | {steps} | {moved} % | {first} % |"
            for rate, moved in (("`bench84`", "0.25"), ("0.1", "10"))
            for blocks, first in (("all", 0), ("last", 3))
            for steps in (12, 48)
        ),
    ]
    assert asked == [
        *((2.5e-4, 5e-4, first, 12) for first in paper.values()),
        *((*rates, first, steps) for rates in ((2.5e-3, 5e-3), (0.1, 0.1)) for first in (0, 3) for steps in (12, 48)),
    ]
    wrong = CliRunner().invoke(main, [*given, "--sites", "nowhere,else"])
    assert wrong.exit_code == 1 and "the data has no site nowhere; it has" in wrong.output


# what is rolled out


@pytest.mark.parametrize("start", [1, 3])
def test_blocks_at_the_input_are_left_out(start, sites):
    """Abnar and Zuidema's product of (A + I)/2, of the later blocks alone; of the last one it is its attention."""
    method = build(METHODS["fedevprompt"], {**HYPER, "rollout_from": start})
    made = method.predictor(sites["a"], State(), Payload({}, {}))
    images = torch.from_numpy(sites["a"].train.images)
    tensors = {name: torch.from_numpy(value) for name, value in made.tensors.items()}
    factors = made.score_module.output(images, tensors, need_attention=True).factors
    product = torch.eye(10)
    for factor in factors[start:]:
        product = (factor + torch.eye(10)) / 2 @ product
    rows = product[:, 0, 1:] if start < 3 else factors[3][:, 0, 1:]
    np.testing.assert_allclose(shown(method, sites["a"], State()), rows / rows.amax(1, keepdim=True), atol=1e-5)


def test_a_network_without_a_later_block_is_refused(make_task):
    for name, hyper in (("fedevprompt", {}), ("fedavg", {"kd": True})):
        method = build(METHODS[name], {**HYPER, **hyper, "rollout_from": 4})
        told = (
            "rollout_from is 4; allowed: 0 to 3 with this backbone: give --set rollout_from=3, or a backbone with more "
            "blocks."
        )
        with pytest.raises(SettingError, match=f"^{re.escape(told)}$"):
            method.start(make_task(), ["a"])


def test_a_sum_over_the_batch_is_the_mean_times_its_images(sites):
    sent = {"maps.0.0": np.eye(9, dtype=np.float16)[:2]}
    maps, target = torch.rand(6, 9), torch.tensor([0, 0, 1, 0, 1, 0])
    step = Step(maps, maps, maps, target, {})
    values = {}
    for kind in ("mean", "sum"):
        method = build(METHODS["fedevprompt"], {**HYPER, "kd_batch": kind})
        [term] = distillation(method.maps, sites["a"], sent)
        values[kind] = float(term(step))
    assert values["sum"] == pytest.approx(6 * values["mean"])
