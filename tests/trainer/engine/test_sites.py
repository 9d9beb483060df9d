"""What a site draws: orders of an epoch, class balance, and numbers that depend on seed, site and purpose only."""

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from edgefl_trainer.contract import Examples, Site, Task
from edgefl_trainer.engine.sites import autocast_dtype, choose_device, slow_bf16_line
from edgefl_trainer.errors import SettingError
from edgefl_trainer.models.spec import ViTSpec

SPEC = ViTSpec(
    name="none", image_px=4, patch=2, depth=1, heads=1, width=4, mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0),
    self_supervised=True, sha256="",
)  # fmt: skip


def rows_of(labels: list[int]) -> Examples:
    """A picture for each label; its first pixel is its number."""
    count = len(labels)
    images = np.zeros((count + 3, 4, 4, 3), np.uint8)
    images[:, 0, 0, 0] = np.arange(count + 3)
    every = np.concatenate([np.array(labels, np.int64), np.full(3, -1)])
    return Examples(images, every, np.arange(count, dtype=np.int64))


def site(labels: list[int], balance: str = "none", name: str = "east", seed: int = 0) -> Site:
    task = Task(name="all", classes=("a", "b", "c"), backbone=SPEC, rounds=2, epochs=2, seed=seed)
    rows = rows_of(labels)
    return Site(name=name, task=task, backbone=None, train=rows, tune=rows, unlabelled=rows, balance=balance)


@settings(max_examples=40)
@given(count=st.integers(1, 40), batch=st.integers(1, 50), round_=st.integers(1, 9), epoch=st.integers(0, 9))
def test_an_epoch_visits_every_row_once(count, batch, round_, epoch):
    here = site([0] * count)
    batches = list(here.batches(here.train, batch, round_, epoch))
    seen = torch.cat([images[:, 0, 0, 0] for images, _ in batches]).tolist()
    assert sorted(seen) == list(range(count))
    assert [len(images) for images, _ in batches] == [batch] * (count // batch) + [count % batch] * (count % batch > 0)
    assert all(images.dtype == torch.uint8 for images, _ in batches)


def test_privacy_noise_repeats_in_a_simulation_only():
    """docs/methods.md, noise: seeded draws repeat and depend on the purpose; secret ones nobody can draw again."""
    seeded = site([0])
    draws = [seeded.noise_rng("laplace", round_).laplace(size=4).tolist() for round_ in (1, 1, 2)]
    assert draws[0] == draws[1] != draws[2]
    secret = dataclasses.replace(seeded, noise="secret")
    drawn = {tuple(secret.noise_rng("laplace", 1).laplace(size=4)) for _ in range(3)}
    assert len(drawn) == 3
    assert secret.rng("order", 1).random() == seeded.rng("order", 1).random()  # all else repeats


def test_orders_differ_between_epochs_rounds_sites_and_seeds_and_repeat():
    orders = {
        tuple(site([0] * 30, name=name, seed=seed).epoch_order(rows_of([0] * 30), round_, epoch).tolist())
        for name in ("east", "west")
        for seed in (0, 1)
        for round_ in (1, 2)
        for epoch in (0, 1)
    }
    assert len(orders) == 16
    again = [site([0] * 30).epoch_order(rows_of([0] * 30), 1, 0).tolist() for _ in range(2)]
    assert again[0] == again[1]


def test_targets_stay_with_their_images():
    labels = [i % 3 for i in range(20)]
    here = site(labels)
    for images, targets in here.batches(here.train, 7, 1, 0):
        assert [labels[i] for i in images[:, 0, 0, 0].tolist()] == targets.tolist()


def test_balance_draws_every_class_equally():
    """90 rows of one class, 9 and 1 of the others: 100 epochs of 100 draws give a third each; 5 deviations allowed."""
    labels = [0] * 90 + [1] * 9 + [2]
    here = site(labels, "class")
    drawn = np.concatenate([here.epoch_order(here.train, 1, epoch) for epoch in range(100)])
    assert len(drawn) == 100 * 100
    counts = np.bincount(np.array(labels)[drawn], minlength=3)
    assert np.abs(counts - 10_000 / 3).max() < 5 * np.sqrt(10_000 * 2 / 9)


def test_balance_within_a_class_is_even_and_absent_classes_are_no_trouble():
    here = site([0] * 4 + [2] * 12, "class")
    drawn = np.concatenate([here.epoch_order(here.train, 1, epoch) for epoch in range(400)])
    counts = np.bincount(drawn, minlength=16)
    np.testing.assert_allclose(counts[:4], 400 * 16 / 8, rtol=0.15)
    np.testing.assert_allclose(counts[4:], 400 * 16 / 24, rtol=0.25)


def test_numbers_depend_on_seed_site_and_purpose():
    draws = {
        float(site([0], name=name, seed=seed).rng(*purpose).random())
        for name in ("east", "west", "eas")
        for seed in (0, 1)
        for purpose in (("a", 1), ("a", 2), ("b", 1), ("a", 1, 0))
    }
    assert len(draws) == 24


def test_without_cuda_it_cannot_be_asked_for(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device("auto").type == "cpu"
    with pytest.raises(SettingError, match="no CUDA device: use --device cpu or auto"):
        choose_device("cuda")


def test_autocast_is_for_cuda_unless_asked():
    assert autocast_dtype("auto", torch.device("cpu")) is None
    assert autocast_dtype("auto", torch.device("cuda")) is torch.bfloat16
    assert autocast_dtype("bf16", torch.device("cpu")) is torch.bfloat16
    assert autocast_dtype("none", torch.device("cuda")) is None


def test_examples_read_only_their_rows():
    rows = dataclasses.replace(rows_of([0, 1, 2, 0]), rows=np.array([3, 1]))
    images, targets = rows.read(np.array([1, 0]))
    assert images[:, 0, 0, 0].tolist() == [1, 3]
    assert targets.tolist() == [1, 0]
    assert rows.counts(3).tolist() == [1, 1, 0]
    assert [len(batch) for batch, _ in rows.in_order(1)] == [1, 1]


@pytest.mark.parametrize(("bf16_s", "told"), [(4.6, "4.6 times as long in bfloat16"), (1.4, ""), (0.5, "")])
def test_a_processor_that_is_slower_with_bf16_is_told(bf16_s, told):
    """By the quickest of three products each: others may have waited for the machine."""
    times = iter(np.cumsum([0, 1, 0, 9, 0, 1, 0, bf16_s, 0, bf16_s, 0, 30]).tolist())
    line = slow_bf16_line(torch.bfloat16, torch.device("cpu"), lambda: next(times))
    assert (told in line) if told else line == ""


@pytest.mark.parametrize(("dtype", "device"), [(None, "cpu"), (torch.bfloat16, "cuda")])
def test_nothing_is_timed_without_bf16_or_on_a_card(dtype, device):
    assert slow_bf16_line(dtype, torch.device(device), lambda: pytest.fail("timed")) == ""
