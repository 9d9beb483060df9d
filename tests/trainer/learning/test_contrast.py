"""Momentum contrast: MoCo (arXiv 1911.05722) Algorithm 1; FedCLF (arXiv 2208.11278) section III; docs/methods.md 2."""

import copy
import math
from collections import deque

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import cross_entropy, normalize

from edgefl_trainer.contract import Examples, Site, State, Task
from edgefl_trainer.engine.hyper_parameters import build
from edgefl_trainer.errors import SettingError, TrainingError
from edgefl_trainer.learning.unlabelled import contrast, self_supervised
from edgefl_trainer.learning.unlabelled.contrast import ContrastRecipe, FeatureRing, MomentumContrast, Remote
from edgefl_trainer.learning.unlabelled.self_supervised import SgdRecipe
from edgefl_trainer.methods import METHODS
from edgefl_trainer.models.backbones import load_backbone

CPU = torch.device("cpu")
PX = 36
pytestmark = pytest.mark.usefixtures("one_thread")


def make_site(
    count: int = 12, name: str = "a", rounds: int = 1, network: str = "cnn:test_resnet", seed: int = 1
) -> Site:
    images = np.random.default_rng(seed).integers(0, 256, (count, PX, PX, 3), dtype=np.uint8)
    rows = Examples(images, np.zeros(count, dtype=np.int64), np.arange(count, dtype=np.int64))
    spec = load_backbone(network, image_px=PX, seed=3).spec
    task = Task(name="pixels", classes=("x", "y"), backbone=spec, rounds=rounds, epochs=1, seed=0)
    return Site(name=name, task=task, backbone=None, train=rows, tune=rows, unlabelled=rows)


def features(count: int, seed: int) -> torch.Tensor:
    drawn = torch.randn(count, contrast.FEATURES, generator=torch.Generator().manual_seed(seed))
    return normalize(drawn, dim=1)


def rows_of(values: torch.Tensor) -> set[bytes]:
    return {row.numpy().tobytes() for row in values}


@settings(max_examples=60)
@given(capacity=st.integers(2, 9), pushes=st.lists(st.integers(1, 14), max_size=8))
def test_a_queue_is_first_in_first_out_for_any_sizes(capacity, pushes):
    """Against collections.deque: sizes need not divide one another, one push may be longer than the queue."""
    queue, oracle = FeatureRing(capacity, CPU), deque(maxlen=capacity)
    for seed, count in enumerate(pushes):
        rows = features(count, seed)
        queue.push(rows)
        oracle.extend(rows)
    assert len(queue.rows) == len(oracle)  # never a row that nobody pushed
    if oracle:
        assert queue.oldest_first().equal(torch.stack(list(oracle)))
        assert rows_of(queue.rows) == rows_of(torch.stack(list(oracle)))


class Fixed(torch.nn.Module):
    """An encoder whose output is its input: views are features."""

    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(()))

    def forward(self, views):
        return self.scale * views.flatten(1)[:, : contrast.FEATURES]


def steps_of(objective: MomentumContrast, batches: int, batch: int) -> list[torch.Tensor]:
    keys = []
    for seed in range(batches):
        views = torch.randn(2, batch, 3, 8, 8, generator=torch.Generator().manual_seed(100 + seed))
        keys.append(normalize(views[1].flatten(1)[:, : contrast.FEATURES], dim=1))
        objective(tuple(views))
    return keys


def objective_of(bank: FeatureRing, negatives: FeatureRing, others: torch.Tensor | None, keeps_local: bool):
    model = Fixed()
    remote = None if others is None else Remote(others, np.random.default_rng(0))
    return MomentumContrast(model, copy.deepcopy(model), 0.9, 0.2, bank, negatives, remote, keeps_local)


def filled(capacity: int, rows: torch.Tensor) -> FeatureRing:
    queue = FeatureRing(capacity, CPU)
    queue.push(rows)
    return queue


@pytest.mark.parametrize("remotes", [3, 20])  # fewer and more than a batch
def test_fe_neg_leaves_no_local_feature_among_the_negatives(remotes):
    """FedCLF eq. 5: Q_CL holds nothing but others' features, always as many; local ones are written to Q_l."""
    others, start = features(remotes, 1), features(10, 2)
    bank, negatives = filled(10, start), filled(remotes, others)
    keys = steps_of(objective_of(bank, negatives, others, keeps_local=False), batches=4, batch=7)
    assert rows_of(negatives.rows) <= rows_of(others)
    assert len(negatives.rows) == remotes
    np.testing.assert_allclose(bank.oldest_first(), torch.cat([start, *keys])[-10:], atol=1e-6)


def test_fe_mixes_local_and_remote_features_and_keeps_its_size():
    """FedCLF eq. 4: B local and B remote features enter each step, the oldest leave."""
    others, start = features(20, 1), features(10, 2)
    bank, negatives = filled(10, start), filled(10, start)
    keys = steps_of(objective_of(bank, negatives, others, keeps_local=True), batches=1, batch=4)
    held = negatives.oldest_first()
    np.testing.assert_array_equal(held[:2], start[8:])  # 8 of 10 have left
    np.testing.assert_allclose(held[2:6], keys[0], atol=1e-6)
    assert rows_of(held[6:]) <= rows_of(others)
    assert len(rows_of(held[6:])) == 4  # without replacement where there are enough


def test_the_loss_is_taken_before_the_batch_enters_the_queue():
    """MoCo Algorithm 1: enqueue comes last. With one negative at right angles to everything the loss is known."""
    bank = FeatureRing(8, CPU)
    aside = torch.zeros(1, contrast.FEATURES)
    aside[0, -1] = 1.0
    bank.push(aside)
    views = torch.zeros(2, 3, 8, 8)
    views[:, 0, 0, 0] = 1.0  # every feature is the first axis
    loss = objective_of(bank, bank, None, True)((views, views))
    assert loss.item() == pytest.approx(math.log(1 + math.exp(-1 / 0.2)), rel=1e-4)
    assert len(bank.rows) == 3


def plain_moco(model, views, before, total, bank, decay, momentum=0.99, temperature=0.2, lr=0.03):
    """MoCo's published steps, written plainly: `before` of all `total` steps are behind.

    Returns the losses, the encoder and its slow copy.
    """
    slow, losses, queue = copy.deepcopy(model), [], bank.clone()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr, 0.9, weight_decay=decay)
    for t, (first, second) in enumerate(views):
        optimizer.param_groups[0]["lr"] = lr * 0.5 * (1 + math.cos(math.pi * (before + t) / total))
        q = normalize(model(first), dim=1)
        with torch.no_grad():
            for k_value, q_value in zip(slow.parameters(), model.parameters(), strict=True):
                k_value.copy_(momentum * k_value + (1 - momentum) * q_value)
            k = normalize(slow(second), dim=1)
        logits = torch.cat([(q * k).sum(1, keepdim=True), q @ queue.T], dim=1) / temperature
        loss = cross_entropy(logits, torch.zeros(len(q), dtype=torch.long))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        queue = torch.cat([queue, k])[-len(bank) :]
        losses.append(loss.item())
    return losses, model, slow


@pytest.mark.parametrize(("rounds", "round_", "decay"), [(1, 1, 1e-4), (3, 2, 1e-4), (1, 1, 0.5)])
def test_steps_equal_mocos_published_formulas(rounds, round_, decay, monkeypatch):
    """Same start, same views: the same losses, parameters and slow copy after three steps of a residual network.

    The cosine spans all rounds: the second of three begins where the first has left it. Weight decay is on every
    parameter, batch norm's too; three steps show it where it is strong.
    """
    recipe = ContrastRecipe(sgd=SgdRecipe(batch=4, weight_decay=decay), queue=10)
    told: list[float] = []
    site = make_site(rounds=rounds)
    object.__setattr__(site, "report", lambda facts: told.append(facts["loss"]) if "step" in facts else None)
    start = contrast.start(recipe, site.task).arrays
    drawn: list[tuple[torch.Tensor, ...]] = []
    plain_views = self_supervised.views

    def watched(*arguments):
        prepare = plain_views(*arguments)

        def keep(images, rng):
            drawn.append(prepare(images, rng))
            return drawn[-1]

        return keep

    monkeypatch.setattr(self_supervised, "views", watched)
    state = State({contrast.BANK: features(10, 5).numpy()})
    learned = contrast.contrast_round(recipe, site, state, start, round_)
    reference = recipe.build(site.task).train()
    losses, encoder, slow = plain_moco(reference, drawn, 3 * (round_ - 1), 3 * rounds, features(10, 5), decay)
    np.testing.assert_allclose(told, losses, rtol=1e-5)
    for found, wanted in ((learned.encoder, encoder), (learned.slow, slow)):
        for name, value in wanted.state_dict().items():
            torch.testing.assert_close(found.state_dict()[name], value, rtol=1e-4, atol=1e-6, msg=name)


def test_the_similarity_of_keys_is_told_each_epoch():
    """Against numpy: the mean inner product of two different rows, of the steps since it was last asked."""
    bank = filled(10, features(10, 2))
    objective = objective_of(bank, bank, None, True)
    keys = [key.numpy().astype(np.float64) for key in steps_of(objective, batches=3, batch=7)]
    expected = np.mean([(key @ key.T)[~np.eye(7, dtype=bool)].mean() for key in keys])
    assert objective.similarity() == pytest.approx(expected, abs=1e-6)
    assert objective.sums == []


@pytest.mark.parametrize(
    ("round_", "images", "warned"), [(1, "same", 0), (2, "same", 1), (4, "same", 1), (4, "other", 0)]
)
def test_features_that_fall_together_are_told_half_way_and_at_the_end(round_, images, warned):
    """docs/methods.md 2, collapse: a site whose images all look the same can only have one feature."""
    site, told = make_site(rounds=4), []
    if images == "same":
        site.unlabelled.images[:] = 0
    object.__setattr__(site, "report", told.append)
    recipe = ContrastRecipe(sgd=SgdRecipe(batch=4), queue=10)
    contrast.contrast_round(recipe, site, State(), contrast.start(recipe, site.task).arrays, round_)
    (epoch,) = [facts for facts in told if "summary" in facts]
    assert (epoch["key_similarity"] > 0.999) == (images == "same")
    texts = [facts["warning"] for facts in told if "warning" in facts]
    assert len(texts) == warned and all(text.startswith("a: ") and "nearly the same" in text for text in texts)


def test_the_slow_copy_follows_the_ema_exactly_and_only_its_parameters():
    """theta_k <- m theta_k + (1 - m) theta_q over several steps, against numpy; buffers are left alone."""
    torch.manual_seed(0)
    encoder = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.BatchNorm1d(5))
    slow = copy.deepcopy(encoder)
    expected = slow[0].weight.detach().numpy().copy()
    for _ in range(5):
        with torch.no_grad():
            encoder[0].weight.add_(torch.randn(5, 4))
            encoder[1].running_mean.add_(1.0)
        contrast.follow(slow, encoder, 0.99)
        expected = np.float32(0.99) * expected + np.float32(0.01) * encoder[0].weight.detach().numpy()
    np.testing.assert_allclose(slow[0].weight.detach(), expected, rtol=1e-6)
    assert (slow[1].running_mean == 0).all()


def test_features_are_unit_vectors_of_at_most_k_images():
    site = make_site(count=12)
    for queue, count in ((5, 5), (50, 12)):
        recipe = ContrastRecipe(sgd=SgdRecipe(batch=5), queue=queue)
        found = contrast.local_features(recipe, site, recipe.build(site.task), site.rng("bank"))
        assert found.shape == (count, 128)
        np.testing.assert_allclose(found.norm(dim=1), 1.0, atol=1e-6)


def test_any_image_can_be_among_the_k_in_any_place(monkeypatch):
    """docs/methods.md 2.2, 2.5: one view of each of at most K images; which and in what order is drawn each time.

    40 draws of 6 of 12 images: each 20 times, five standard deviations (15.8) allowed; each of the 12 comes first in
    about 3 of them, none in half of them. The places of a bank say which image leaves first.
    """
    site, drawn = make_site(count=12), list[np.ndarray]()
    recipe = ContrastRecipe(sgd=SgdRecipe(batch=6), queue=6)
    plain = contrast.read_ahead

    def noting(site, examples, parts):
        drawn.append(np.concatenate(parts))
        return plain(site, examples, parts)

    monkeypatch.setattr(contrast, "read_ahead", noting)
    for round_ in range(40):
        contrast.local_features(recipe, site, Fixed(), site.rng("release", round_))
    assert all(len(set(one.tolist())) == 6 for one in drawn)  # no image twice
    assert np.abs(np.bincount(np.concatenate(drawn), minlength=12) - 20).max() < 5 * np.sqrt(40 / 4)
    assert np.bincount([one[0] for one in drawn]).max() < 20


def test_features_leave_the_encoder_as_it_was():
    site, recipe = make_site(), ContrastRecipe(sgd=SgdRecipe(batch=5))
    model = recipe.build(site.task)
    before = copy.deepcopy(model.state_dict())
    contrast.local_features(recipe, site, model, site.rng("bank"))
    assert all(value.equal(before[name]) for name, value in model.state_dict().items())


def test_a_site_with_one_image_is_refused_by_name():
    recipe, site = ContrastRecipe(), make_site(count=1, name="lonely")
    with pytest.raises(TrainingError, match=r"site lonely has one image.*add images, or leave the site out"):
        contrast.contrast_round(recipe, site, State(), contrast.start(recipe, site.task).arrays, 1)


def test_the_projection_is_mocos():
    """MoCo v2: linear, ReLU, linear to 128 (as FedCLF section V-A); v1: one linear layer."""
    two, one = ContrastRecipe().head(16), ContrastRecipe(projection="linear").head(16)
    assert [tuple(value.shape) for value in two.parameters()] == [(16, 16), (16,), (128, 16), (128,)]
    assert [type(layer) for layer in two] == [torch.nn.Linear, torch.nn.ReLU, torch.nn.Linear]
    assert [tuple(value.shape) for value in one.parameters()] == [(128, 16), (128,)]


@pytest.mark.parametrize(("rounds", "momentum"), [(1, 0.99), (19_999, 0.99), (20_000, 0.999)])
def test_m_follows_the_length_of_the_run(rounds, momentum):
    """docs/methods.md 2.5: 0.99 under 20,000 local steps, 0.999 from there on; one step a round here."""
    told: list[dict] = []
    site = make_site(rounds=rounds)
    object.__setattr__(site, "report", told.append)
    found, share = contrast.pace(ContrastRecipe(momentum_encoder="local"), site, 1)
    assert found == momentum
    assert share == pytest.approx(momentum**rounds)
    assert any("random start" in str(facts.get("warning")) for facts in told) == (share > 0.05)
    told.clear()
    contrast.pace(ContrastRecipe(), site, 1)
    assert not told  # what is averaged keeps no site's start


def test_a_view_follows_the_size_of_the_image():
    """docs/methods.md 2.5: 64 of 72 px; a vision transformer takes one size only."""
    spec = load_backbone("cnn:test_resnet", image_px=72, seed=0).spec
    assert SgdRecipe().side(spec) == 64
    assert SgdRecipe(view_px=48).side(spec) == 48
    vit = load_backbone("tiny", image_px=36, seed=0).spec
    assert SgdRecipe().side(vit) == 36
    with pytest.raises(SettingError, match="view_px is 32, but tiny takes only 36 px"):
        SgdRecipe(view_px=32).side(vit)


def test_a_view_that_a_network_cannot_take_is_refused_before_anything_begins():
    """timm's inception_v3 takes 75 px and no less; its views would have 66."""
    spec = load_backbone("cnn:inception_v3", image_px=75, seed=0).spec
    task = Task(name="pixels", classes=("x", "y"), backbone=spec, rounds=1, epochs=1, seed=0)
    for method in ("fedclf", "fedsimclr"):
        with pytest.raises(SettingError, match=r"views of 66 px, which .* cannot take: give --set view_px=75, a"):
            build(METHODS[method], {}).start(task, ["a"])
    assert build(METHODS["fedrotation"], {"view_px": 75}).start(task, ["a"]).arrays
    with pytest.raises(SettingError, match="view_px is 1; allowed: 0"):
        SgdRecipe(view_px=1)


@pytest.mark.parametrize("wrong", [{"queue": 1}, {"temperature": 0.0}, {"key_momentum": 1.0}])
def test_values_out_of_range_are_refused(wrong):
    with pytest.raises(SettingError, match=rf"{next(iter(wrong))} is .*; allowed: "):
        ContrastRecipe(**wrong)
