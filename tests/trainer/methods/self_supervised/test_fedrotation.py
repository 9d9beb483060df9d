"""FedRotation: RotNet (arXiv 1803.07728) section 2, averaged as arXiv 2208.11278 section V-A does."""

import numpy as np
import pytest
import torch
from tests.trainer.methods.conftest import play

from edgefl_trainer.augment import quarter_turns
from edgefl_trainer.contract import Task
from edgefl_trainer.engine.hyper_parameters import build
from edgefl_trainer.learning.unlabelled import self_supervised
from edgefl_trainer.methods import METHODS
from edgefl_trainer.methods.fedrotation import four_ways
from edgefl_trainer.models.backbones import load_backbone


def test_every_image_comes_in_all_four_quarter_turns_with_its_label():
    """Against numpy: label r is r quarter turns counter-clockwise."""
    images = torch.rand(3, 3, 5, 5)
    turned, labels = quarter_turns(images)
    assert labels.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]
    for place, (view, label) in enumerate(zip(turned.numpy(), labels.tolist(), strict=True)):
        original = images[place % 3].numpy().transpose(1, 2, 0)
        np.testing.assert_array_equal(view.transpose(1, 2, 0), np.rot90(original, label))


def test_the_first_loss_is_the_cross_entropy_over_four_turns(make_site, monkeypatch):
    spec = load_backbone("cnn:test_resnet", image_px=36, seed=3).spec
    task = Task(name="pixels", classes=("x", "y"), backbone=spec, rounds=1, epochs=1, seed=0)
    losses: list[float] = []
    drawn: list[tuple[torch.Tensor, ...]] = []
    plain = self_supervised.views

    def watched(*arguments):
        prepare = plain(*arguments)
        return lambda images, rng: drawn.append(prepare(images, rng)) or drawn[-1]

    monkeypatch.setattr(self_supervised, "views", watched)
    site = make_site(task, count=6)
    object.__setattr__(site, "report", lambda facts: losses.append(facts["loss"]) if "step" in facts else None)
    play(build(METHODS["fedrotation"], {"batch": 6}), task, {"a": site})
    model = self_supervised.build(task, four_ways).train()
    [views] = drawn[0]
    every = np.concatenate([np.rot90(views.numpy(), turns, axes=(2, 3)) for turns in range(4)]).copy()
    with torch.no_grad():
        logits = model(torch.from_numpy(every)).numpy().astype(float)
    logits -= np.log(np.exp(logits).sum(axis=1, keepdims=True))
    np.testing.assert_allclose(losses[0], -np.mean([logits[i, i // 6] for i in range(24)]), rtol=1e-4)


@pytest.mark.slow
def test_the_loss_falls_where_images_have_an_upright_position(make_site):
    """Pictures that are dark on the left: after a few rounds the turns are told apart much better than by chance."""
    spec = load_backbone("cnn:test_resnet", image_px=36, seed=3).spec
    task = Task(name="pixels", classes=("x", "y"), backbone=spec, rounds=6, epochs=2, seed=0)
    losses: list[float] = []
    site = make_site(task, count=16)
    site.unlabelled.images[:, :12] = 0  # dark above: a mirror image keeps it there
    site.unlabelled.images[:, 24:] = 255
    object.__setattr__(site, "report", lambda facts: losses.append(facts["loss"]) if "summary" in facts else None)
    play(build(METHODS["fedrotation"], {"batch": 8, "lr": 0.05}), task, {"a": site})
    assert losses[0] > 1.0
    assert losses[-1] < 0.7 * losses[0]
