"""PyTorch's own generators, of which libraries and layers draw: they begin at a seed for a while, or are not asked."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

_DRAWS = {nn.init.uniform_, nn.init.normal_, nn.init.kaiming_uniform_, Tensor.uniform_, Tensor.normal_}


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


class Undrawn(TorchFunctionMode):
    """Let layers begin with whatever their memory holds: for networks that are filled afterwards.

    The draws of a ResNet-18 take longer than all else that building it takes.
    """

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Do what was asked, but a draw."""
        if func in _DRAWS:
            return args[0] if args else (kwargs or {})["tensor"]
        return func(*args, **(kwargs or {}))
