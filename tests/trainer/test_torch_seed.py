"""Draws from PyTorch's own generators. Source: PyTorch's notes on randomness ("Reproducibility")."""

from contextlib import nullcontext

import pytest
import torch

from edgefl_trainer.torch_seed import seeded


@pytest.mark.parametrize("seed", [0, 3, 2**63 - 1])
def test_draws_are_those_of_the_seed_and_are_put_back(seed):
    """As after `torch.manual_seed`; the next draw of anybody else is what it would have been."""
    torch.manual_seed(11)
    undisturbed = torch.rand(2)
    torch.manual_seed(seed)
    due = torch.rand(3)
    torch.manual_seed(11)
    with seeded(seed):
        assert torch.equal(torch.rand(3), due)
    assert torch.equal(torch.rand(2), undisturbed)


def test_generators_of_gpus_are_left_alone(monkeypatch):
    """`torch.manual_seed` seeds every device, and a fork of the CPU's generator puts back no other."""
    told: list[int] = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", told.append)
    torch.manual_seed(1)
    assert told == [1]  # a seed of all devices would be seen here
    with seeded(2):
        torch.rand(1)
    assert told == [1]


def test_the_gpu_that_is_named_is_seeded_too(monkeypatch):
    """No GPU is needed: what would be asked of the one named is written down."""
    told: list[object] = []
    monkeypatch.setattr(torch.random, "fork_rng", lambda devices: told.append(devices) or nullcontext())
    monkeypatch.setattr(torch.cuda, "device", lambda gpu: told.append(gpu) or nullcontext())
    monkeypatch.setattr(torch.cuda, "manual_seed", told.append)
    gpu = torch.device("cuda", 1)
    with seeded(5, gpu):
        pass
    assert told == [[gpu], gpu, 5]
