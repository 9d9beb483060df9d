"""PyTorch's own generators begin at a seed for a while: for libraries and layers that draw from nothing else."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def seeded(seed: int, device: torch.device | None = None) -> Iterator[None]:
    """Seed the CPU's generator, and that of a GPU where `device` is one, and put them back afterwards.

    Generators of other GPUs are left alone, which `torch.manual_seed` would seed, too. A seed is 0 to 2⁶³ − 1.
    """
    gpus = [device] if device is not None and device.type == "cuda" else []
    with torch.random.fork_rng(devices=gpus):
        torch.default_generator.manual_seed(seed)
        for gpu in gpus:
            with torch.cuda.device(gpu):
                torch.cuda.manual_seed(seed)
        yield
