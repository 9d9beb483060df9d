"""What methods without labels share: rows, views, recipes. arXiv 2208.11278 section V; docs/methods.md 2.1 and 3.3."""

import dataclasses

import numpy as np
import pytest
import torch
from tests.trainer.methods.conftest import play

from edgefl_trainer.contract import Examples, Site, Task
from edgefl_trainer.engine.hyper_parameters import build, hyper_types
from edgefl_trainer.learning.unlabelled import self_supervised
from edgefl_trainer.learning.unlabelled.self_supervised import SgdRecipe
from edgefl_trainer.methods import METHODS
from edgefl_trainer.models.backbones import load_backbone

PX = 36
pytestmark = pytest.mark.usefixtures("one_thread")
HYPER = {"batch": 4, "queue": 6, "decoder_width": 32, "decoder_depth": 1}
LEARNING = sorted(name for name, kind in METHODS.items() if not kind.needs_labels and kind().phases(1))
RECIPES = {
    "fedclf": {"moco-v2"},
    "fedmoco": {"moco-v2"},
    "local-cl": {"moco-v2"},
    "fedsimclr": {"simclr"},
    "fedrotation": {"rotation"},
    "fedmae": set(),  # crops, see test_fedmae
}


def make_site(network: str = "tiny", name: str = "a") -> Site:
    """Labelled rows 0 to 5, all that it may learn from 0 to 9, tune rows 10 and 11; 12 to 15 are somebody else's."""
    images = np.random.default_rng(1).integers(0, 256, (16, PX, PX, 3), dtype=np.uint8)
    labels = np.arange(16) % 2
    rows = {kind: Examples(images, labels, np.arange(*span)) for kind, span in {"l": (6,), "u": (10,)}.items()}
    spec = load_backbone(network, image_px=PX, seed=3).spec
    task = Task(name="pixels", classes=("x", "y"), backbone=spec, rounds=1, epochs=1, seed=0)
    tune = Examples(images, labels, np.arange(10, 12))
    return Site(name=name, task=task, backbone=None, train=rows["l"], tune=tune, unlabelled=rows["u"])


@pytest.mark.parametrize("name", LEARNING)
def test_rows_and_views_are_those_it_may_learn_from(name, monkeypatch):
    """Every training and unlabelled row and no other, by the augmentations of its paper.

    What selects and what judges a network is never seen by it.
    """
    rows, recipes = set[int](), set[str]()
    read, views = Examples.read, self_supervised.contrastive_views

    def noting_rows(self, positions):
        rows.update(self.rows[positions].tolist())
        return read(self, positions)

    def noting_recipes(images, rng, recipe, view_px):
        recipes.add(recipe)
        return views(images, rng, recipe, view_px)

    monkeypatch.setattr(Examples, "read", noting_rows)
    monkeypatch.setattr(self_supervised, "contrastive_views", noting_recipes)
    known = hyper_types(METHODS[name])
    method = build(METHODS[name], {key: value for key, value in HYPER.items() if key in known})
    sites = {site: make_site(name=site) for site in "ab"}
    play(method, sites["a"].task, sites)
    assert rows == set(range(10))
    assert recipes == RECIPES[name]


@pytest.mark.parametrize("kind", ["moco-v2", "simclr"])
def test_two_views_of_an_image_are_drawn_apart(kind):
    """Two equal views would leave nothing to learn, and every loss would still fall."""
    site = make_site()
    images = site.unlabelled.read(np.arange(4))[0]
    first, second = self_supervised.views(site, SgdRecipe(), kind, 2)(images, np.random.default_rng(0))
    assert all(not one.equal(two) for one, two in zip(first, second, strict=True))


@pytest.mark.parametrize("network", ["tiny", "cnn:test_resnet"])
def test_views_are_normalised_as_the_frozen_network_sees_pictures(network):
    """A picture of one shade stays one under crop and mirror: what remains is mean and deviation of the backbone."""
    frozen, site = load_backbone(network, image_px=PX, seed=3), make_site(network)
    shade = torch.tensor([200, 90, 40], dtype=torch.uint8).expand(2, PX, PX, 3).contiguous()
    [views] = self_supervised.views(site, SgdRecipe(), "rotation", 1)(shade, np.random.default_rng(0))
    seen = frozen.normalise(shade)[:, :, :1, :1]
    torch.testing.assert_close(views, seen.expand_as(views), atol=1e-5, rtol=1e-5)


def test_every_epoch_visits_each_image_once(monkeypatch):
    """E epochs are E passes over all images, each in an order of its own, whatever the batch."""
    orders: list[list[int]] = []
    images: list[int] = []
    plain = self_supervised.cut

    def noting(order, batch, name):
        orders.append(order.tolist())
        return plain(order, batch, name)

    monkeypatch.setattr(self_supervised, "cut", noting)
    site = make_site("cnn:test_resnet")
    task = dataclasses.replace(site.task, rounds=2, epochs=3)
    site = dataclasses.replace(
        site, task=task, report=lambda facts: images.append(int(facts["images"])) if "step" in facts else None
    )
    play(build(METHODS["fedsimclr"], {"batch": 4}), task, {"a": site})
    assert all(sorted(order) == list(range(10)) for order in orders)
    assert len(orders) == 6 and len({tuple(order) for order in orders}) == 6
    assert sum(images) == 60
