"""FedSimCLR: SimCLR (arXiv 2002.05709) eq. 1 and Algorithm 1, averaged as arXiv 2208.11278 section V-A does."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.trainer.methods.conftest import Exchange, play

from edgefl_trainer.contract import Task
from edgefl_trainer.engine.hyper_parameters import build
from edgefl_trainer.learning.unlabelled import self_supervised
from edgefl_trainer.losses import paired_loss
from edgefl_trainer.methods import METHODS
from edgefl_trainer.models.backbones import load_backbone


def numpy_loss(first: np.ndarray, second: np.ndarray, temperature: float) -> float:
    """SimCLR's Algorithm 1 in ten lines: l(i, j) of both orders, mean over the 2B views."""
    both = np.concatenate([first, second])
    similar = both @ both.T / temperature
    total = 0.0
    for i in range(len(both)):
        j = (i + len(first)) % len(both)
        others = [similar[i, k] for k in range(len(both)) if k != i]
        total += -similar[i, j] + np.log(np.exp(others).sum())
    return total / len(both)


def unit(count: int, seed: int) -> np.ndarray:
    drawn = np.random.default_rng(seed).normal(size=(count, 8))
    return drawn / np.linalg.norm(drawn, axis=1, keepdims=True)


@settings(max_examples=30)
@given(count=st.integers(2, 7), seed=st.integers(0, 99), temperature=st.sampled_from([0.1, 0.2, 1.0]))
def test_the_loss_of_a_batch_is_simclrs(count, seed, temperature):
    first, second = unit(count, seed), unit(count, seed + 1000)
    found = paired_loss(torch.from_numpy(first), torch.from_numpy(second), temperature).item()
    np.testing.assert_allclose(found, numpy_loss(first, second, temperature), rtol=1e-10)


def test_the_first_loss_of_a_round_is_that_of_its_views(make_site, monkeypatch):
    """Through the method: two views of each image, the network and projection as the server sent them.

    Batch norm sees the B first and the B second views apart (docs/methods.md 2.4).
    """
    spec = load_backbone("cnn:test_resnet", image_px=36, seed=3).spec
    task = Task(name="pixels", classes=("x", "y"), backbone=spec, rounds=1, epochs=1, seed=0)
    method = build(METHODS["fedsimclr"], {"batch": 6})
    losses: list[float] = []
    drawn: list[tuple[torch.Tensor, ...]] = []
    plain = self_supervised.views

    def watched(*arguments):
        prepare = plain(*arguments)
        return lambda images, rng: drawn.append(prepare(images, rng)) or drawn[-1]

    monkeypatch.setattr(self_supervised, "views", watched)
    site = make_site(task, count=6)
    object.__setattr__(site, "report", lambda facts: losses.append(facts["loss"]) if "step" in facts else None)
    play(method, task, {"a": site})
    from edgefl_trainer.methods.fedsimclr import projection

    model = self_supervised.build(task, projection).train()
    with torch.no_grad():
        first, second = (torch.nn.functional.normalize(model(view), dim=1).numpy() for view in drawn[0])
    assert first.shape == (6, 128)
    np.testing.assert_allclose(losses[0], numpy_loss(first.astype(float), second.astype(float), 0.2), rtol=1e-4)


def test_sites_are_averaged_by_their_numbers_of_images(make_task, make_site):
    task, seen = make_task(), list[Exchange]()
    sites = {"a": make_site(task, "a", count=4), "b": make_site(task, "b", count=12, seed=2)}
    server, _ = play(build(METHODS["fedsimclr"], {"batch": 4}), task, sites, watch=seen.append)
    sent = seen[0].replies
    name = "head.0.weight"
    wanted = 0.25 * sent["a"].arrays[name].astype(float) + 0.75 * sent["b"].arrays[name]
    np.testing.assert_allclose(server.arrays[name], wanted, rtol=1e-5, atol=1e-9)
