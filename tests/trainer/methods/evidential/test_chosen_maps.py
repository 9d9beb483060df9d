"""Which rollout maps a site sends: by vacuity, among right answers or at random; each, or of every class their mean.

Source: docs/methods.md 1.5 (choice of maps); FedEvPrompt (arXiv 2411.10071) section 3.2.
"""

import itertools

import numpy as np
import pytest
import torch
from tests.trainer.methods.conftest import play

from edgefl_protocol import Payload
from edgefl_trainer.contract import State
from edgefl_trainer.engine.hyper_parameters import build
from edgefl_trainer.engine.settings import resolve
from edgefl_trainer.methods import METHODS

HYPER = {"batch": 4, "readout": "cls"}
STILL = {**HYPER, "lr_b": 0.0, "lr_t": 0.0, "lr_head": 0.0, "weight_decay": 0.0}


def train(round_: int = 1) -> Payload:
    return Payload({}, {"phase": "train", "round": round_, "rounds": 5})


def scored(method, site, state):
    predictor = method.predictor(site, state, Payload({}, {}))
    tensors = {name: torch.from_numpy(np.array(value)) for name, value in predictor.tensors.items()}
    with torch.inference_mode():
        return predictor.module(torch.from_numpy(site.train.images), tensors)


@pytest.mark.parametrize("classes", [("nevus", "other"), ("nevus", "other", "absent")])
def test_correct_offers_the_most_certain_of_the_right_answers(make_task, make_site, classes):
    """select=correct: lowest vacuity among training images that are named right; the filter changes the choice. A class
    that the site lacks has the larger prior, and is never its answer (1.3)."""
    labels = np.random.default_rng(3).integers(0, 2, 24).tolist()
    site = make_site(make_task(classes=classes), count=24, labels=labels)
    choice = {}
    for select in ("vacuity", "correct"):
        method = build(METHODS["fedevprompt"], {**HYPER, "maps_per_class": 3, "select": select, "lr_head": 2e-3})
        state, reply = method.local_round(site, State(), train())
        choice[select] = reply.arrays
    score = scored(method, site, state)
    right = score.probabilities[:, :2].argmax(dim=1).numpy() == site.train.targets
    assert 0 < right.sum() < 24
    assert (score.probabilities.argmax(dim=1) == 2).any() == (len(classes) == 3)
    expected = {}
    for k in (0, 1):
        rows = np.flatnonzero(right & (site.train.targets == k))
        best = sorted(rows, key=lambda row: (float(score.vacuity[row]), row))[:3]
        if best:
            expected[f"maps.{k}"] = score.map[best].numpy()
    assert choice["correct"].keys() == expected.keys()
    for name, maps in expected.items():
        np.testing.assert_allclose(choice["correct"][name].astype(np.float32), maps, atol=1e-3)
    assert any(
        name not in choice["correct"] or not np.array_equal(choice["correct"][name], maps)
        for name, maps in choice["vacuity"].items()
    )


@pytest.mark.parametrize("select", ["vacuity", "correct", "random"])
def test_the_mean_of_the_chosen_maps_stands_for_them(make_task, make_site, select):
    """sent_maps=mean: the same choice, and of every class the mean of what `each` sends, as float16."""
    site = make_site(make_task(), count=24)
    replies = [
        build(METHODS["fedevprompt"], {**STILL, "select": select, "sent_maps": sent}).local_round(
            site, State(), train()
        )[1]
        for sent in ("each", "mean")
    ]
    each, mean = (reply.arrays for reply in replies)
    assert each.keys() == mean.keys() and any(len(maps) > 1 for maps in each.values())
    for name, maps in each.items():
        assert mean[name].shape == (1, maps.shape[1]) and mean[name].dtype == np.float16
        np.testing.assert_allclose(mean[name][0], maps.astype(np.float64).mean(axis=0), atol=2**-10)


def test_others_learn_the_same_from_a_mean(make_task, make_site):
    """Eq. 7: the same gradients, so the same prompts but for what float16 rounds. A lambda of 1e-3 tells the term apart
    from no term by a hundred times as much."""
    task, learned = make_task(rounds=3), {}
    for sent, weight in (("each", 1e-3), ("mean", 1e-3), ("each", 0.0)):
        method = build(METHODS["fedevprompt"], {**HYPER, "sent_maps": sent, "kd_weight": weight})
        sites = {name: make_site(task, name, count=16, seed=seed) for seed, name in enumerate("abc")}
        learned[sent, weight] = play(method, task, sites)[1]

    def apart(one: tuple[str, float], other: tuple[str, float]) -> float:
        return max(
            float(np.abs(learned[one][name].arrays[key] - learned[other][name].arrays[key]).max())
            for name in "abc"
            for key in ("prompts.b", "prompts.t", "head.weight")
        )

    same, without = apart(("each", 1e-3), ("mean", 1e-3)), apart(("each", 1e-3), ("each", 0.0))
    assert 0 < same < without / 100


def test_presets_but_the_papers_send_the_mean():
    for preset, sent in (("tiny", "mean"), ("bench84", "mean"), ("paper", "each")):
        settings = resolve("fedevprompt", {"preset": preset, "data": ("lesions:sites=2",)}, None, ())
        assert settings.build_method().maps.sent_maps == sent
        chosen = resolve("fedevprompt", {"preset": preset, "data": ("lesions:sites=2",)}, None, ("sent_maps=each",))
        assert chosen.build_method().maps.sent_maps == "each"


def test_random_draws_images_of_the_class_anew_each_round(make_task, make_site):
    """select=random: any M of the class. The model stands still, so only the draw can differ between rounds."""
    site = make_site(make_task(), count=24)
    sent = {}
    for select, round_ in itertools.product(("vacuity", "random"), (1, 2)):
        method = build(METHODS["fedevprompt"], {**STILL, "maps_per_class": 2, "select": select})
        state, reply = method.local_round(site, State(), train(round_))
        sent[select, round_] = reply.arrays
    again = method.local_round(site, State(), train(2))[1].arrays
    maps = scored(method, site, state).map.numpy()
    for k in (0, 1):
        name = f"maps.{k}"
        own = maps[site.train.targets == k]
        for found in (sent["random", 1][name], sent["random", 2][name]):
            assert found.shape[0] == 2
            assert all(np.abs(own - one.astype(np.float32)).max(axis=1).min() < 1e-3 for one in found)
        np.testing.assert_array_equal(again[name], sent["random", 2][name])
        np.testing.assert_array_equal(sent["vacuity", 1][name], sent["vacuity", 2][name])
    assert any(not np.array_equal(sent["random", 1][name], sent["random", 2][name]) for name in again)
    assert any(not np.array_equal(sent["random", 1][name], sent["vacuity", 1][name]) for name in again)
