"""Head tuning is multinomial regression on frozen features, nothing else (docs/methods.md 5.2)."""

import numpy as np
import torch
from tests.trainer.methods.conftest import play

from edgefl_trainer.engine.hyper_parameters import build
from edgefl_trainer.methods import METHODS

HYPER = {"readout": "cls", "head_norm": "none", "augment": "none", "batch": 4, "lr": 0.02, "lr_decay": 0.5}


def test_one_site_is_regression_on_features_that_never_change(make_task, make_site, backbone):
    """R·E epochs of SGD on features computed once, velocity from zero each round, rate halved each round."""
    task = make_task(rounds=2, epochs=2)
    site, method = make_site(task), build(METHODS["head"], HYPER)
    weight = torch.from_numpy(method.start(task, ["a"]).arrays["head.weight"].copy())
    images, target = site.train.read(np.arange(len(site.train)))
    with torch.no_grad():
        features = backbone(backbone.normalise(images)).cls
    for round_ in (1, 2):
        velocity = torch.zeros_like(weight)
        for epoch in range(2):
            order = site.epoch_order(site.train, round_, epoch)
            for start in range(0, len(order), 4):
                rows = torch.from_numpy(order[start : start + 4])
                wrong = (features[rows] @ weight.T).softmax(-1) - torch.eye(2)[target[rows]]
                gradient = wrong.T @ features[rows] / len(rows)
                gradient *= min(1.0, 10 / float(gradient.norm() + 1e-6))
                velocity = 0.9 * velocity + gradient
                weight = weight - 0.02 * 0.5 ** (round_ - 1) * velocity
    assert not np.allclose(weight.numpy(), method.start(task, ["a"]).arrays["head.weight"], atol=1e-2)
    found, _ = play(method, task, {"a": site})
    np.testing.assert_allclose(found.arrays["head.weight"], weight.numpy(), rtol=1e-3, atol=1e-4)
    assert set(found.arrays) == {"head.weight"}
