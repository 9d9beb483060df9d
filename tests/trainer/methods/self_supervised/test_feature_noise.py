"""Gaussian noise on the features that leave: dp-accounting's epsilon; docs/methods.md 2.2."""

import dataclasses
import json
import math
from copy import deepcopy

import numpy as np
import pytest
import torch
from tests.trainer.conftest import run
from tests.trainer.methods.conftest import Exchange, members, play

from edgefl_trainer.engine.hyper_parameters import build
from edgefl_trainer.errors import SettingError
from edgefl_trainer.learning.unlabelled import contrast
from edgefl_trainer.methods import METHODS


def fedclf(**hyper: object):
    return build(METHODS["fedclf"], {"batch": 4, "queue": 6, **hyper})


def test_noise_is_on_what_leaves_and_what_it_costs_is_told(cnn_task, make_site):
    """Q_l stays as it is; the others get one noised unit vector of each image, and epsilon grows with each release."""
    told: list[dict] = []
    task = cnn_task(rounds=2)
    sites = members(task, make_site, a=5, b=5)
    sites["a"] = dataclasses.replace(sites["a"], report=told.append)
    seen: list[Exchange] = []
    _, states = play(fedclf(dp_noise=4.0), task, sites, watch=seen.append)
    for exchange in seen:
        rows = exchange.replies["a"].arrays["features"].astype(np.float64)
        assert rows.shape == (5, 128)
        np.testing.assert_allclose(np.linalg.norm(rows, axis=1), 1, atol=2e-3)
    kept = states["a"].arrays["bank"]
    assert kept.shape == (6, 128)
    assert np.abs(kept @ rows.T.astype(np.float32)).max() < 0.6  # nothing of them is left at sigma = 4
    spent = [float(e.replies["a"].scalars.get("dp_noise", 0)) for e in seen]
    assert spent == [4.0, 4.0, 4.0]
    method = fedclf(dp_noise=4.0)
    assert states["a"].values["releases"] == 3
    assert states["a"].values["epsilon_spent"] == pytest.approx(method.noise.epsilon(3))
    assert "carry no noise" in next(facts["warning"] for facts in told if "warning" in facts)


def test_noise_on_what_does_not_travel_is_refused():
    with pytest.raises(SettingError, match=r"dp_noise is 4\.0, but with negatives=local no feature travels"):
        fedclf(negatives="local", dp_noise=4.0)


def test_a_run_says_what_its_noise_has_cost(ward, tmp_path):
    """dp-accounting's epsilon of two releases, the warm one and that of the round, in summary.json and on screen."""
    given = ("--set", "dp_noise=4", "--set", "batch=8", "--rounds", 1, "--probe-every", 0)
    outcome = run("fedclf", ward, tmp_path / "run", "cnn:test_resnet", *given)
    cost = fedclf(dp_noise=4.0).noise.epsilon(2)
    told = f"privacy noise: epsilon {math.ceil(cost * 1e4) / 1e4:.5g} at delta 1e-05 in all, at the site that sent"
    assert told in outcome.out and "cost more), given the encoders\n" in outcome.out  # 4.…: four places, rounded up
    assert "on features only; weights left the sites without noise. It came from the seed" in outcome.out
    assert "carry no noise. The noise comes from the seed: whoever knows that can take it off." in outcome.err
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["epsilon_spent"] == {"east": pytest.approx(cost), "west": pytest.approx(cost)}
    assert summary["privacy_noise"]["delta"] == 1e-5 and summary["privacy_noise"]["without_noise"] == ["weights"]


def test_released_features_depend_on_their_own_image_only(cnn_task, make_site):
    """What the epsilon rests on: with another image in its place one row changes and no other (no batch statistics)."""
    task, recipe = cnn_task(), fedclf(dp_noise=1.0).contrast
    site = make_site(task, count=6)
    images = site.unlabelled.images.copy()
    images[2] = 255 - images[2]
    other = dataclasses.replace(site, unlabelled=dataclasses.replace(site.unlabelled, images=images))
    model = recipe.build(task)
    one, two = (contrast.local_features(recipe, s, model, s.rng("release", 1), training=False) for s in (site, other))
    assert sum(not torch.allclose(a, b, atol=1e-5) for a, b in zip(one, two, strict=True)) == 1
    one, two = (contrast.local_features(recipe, s, model, s.rng("release", 1), training=True) for s in (site, other))
    assert sum(not torch.allclose(a, b, atol=1e-5) for a, b in zip(one, two, strict=True)) > 1  # the test can fail


def test_what_is_released_are_those_features(cnn_task, make_site, monkeypatch):
    """Through the method, in the warm phase and in a round: fresh features of each image alone, and noise on them."""
    task, seen = cnn_task(), list[Exchange]()
    method, site = fedclf(dp_noise=1e-3), make_site(task, count=6)
    plain, wanted = contrast.local_features, list[np.ndarray]()

    def noting(recipe, site, encoder, rng, *, training=True):
        if rng.bit_generator.state != site.rng("bank").bit_generator.state:  # for a release
            alone = plain(recipe, site, encoder, deepcopy(rng), training=False)
            wanted.append(alone.numpy())
        return plain(recipe, site, encoder, rng, training=training)

    monkeypatch.setattr(contrast, "local_features", noting)
    play(method, task, {"a": site}, watch=seen.append)
    assert len(wanted) == 2
    for exchange, alone in zip(seen, wanted, strict=True):
        np.testing.assert_allclose(exchange.replies["a"].arrays["features"], alone, atol=6e-3)
