"""Bounds of every setting whose default stands in `defaults`: what a run, a task and a bundle may hold alike.

The trainer's recipes check themselves by these, and so do the records of training steps. What a run may be given, its
bundle can therefore hold and a device can follow. Source: docs/methods.md, 1 (FedEvPrompt) and 2.3 (FedCLF);
docs/decisions/0037.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final

from edgefl_protocol.rules.batches import LEAST_BATCH
from edgefl_protocol.rules.feature_rows import MOST_ROWS

TEMPERATURE_BOUNDS: Final = (0.1, 10.0)  # of T in e = f(logits/T), docs/methods.md 1.8


@dataclass(frozen=True, kw_only=True)
class Range:
    """Which numbers a setting may hold, from `least` to `most`."""

    least: float
    most: float
    whole: bool = False  # no fractions
    above: bool = False  # `least` itself is not allowed
    below: bool = False  # `most` itself is not allowed
    zero: str | None = None  # what 0 stands for, which is then allowed, too; None where it stands for nothing

    def holds(self, value: object) -> bool:
        """Tell whether a value is such a number; a truth value is none, nor is NaN."""
        if type(value) is not int and (self.whole or type(value) is not float):
            return False
        if value == 0 and self.zero is not None:
            return True
        least = value > self.least if self.above else value >= self.least
        return least and (value < self.most if self.below else value <= self.most)

    @property
    def settled(self) -> "Range":
        """The same where 0 no longer stands for something else."""
        return replace(self, zero=None)

    def __str__(self) -> str:
        """Return what is allowed, as a clause: `0 to 1`, or `above 0, at most 10`."""
        least, most = (f"{bound:g}" if isinstance(bound, float) else str(bound) for bound in (self.least, self.most))
        end = f"below {most}" if self.below else most
        if self.above:
            return f"above {least}, {end if self.below else f'at most {most}'}"
        if self.zero is None:
            return f"{least} to {end}"
        near = self.least == 0 or (self.whole and self.least == 1)
        return f"0 ({self.zero})" + (f" to {end}" if near else f", {least} to {end}")


MOST_PICTURES: Final = 65_536  # of a batch: what a training graph is traced for
MOST_EPOCHS: Final = 10_000
MOST_SEED: Final = 2**31 - 1

# Of every run, task and record, whatever the method.
EPOCHS: Final = Range(least=1, most=MOST_EPOCHS, whole=True)  # E, local epochs of a round
SEED: Final = Range(least=0, most=MOST_SEED, whole=True)

_SHARE: Final = Range(least=0, most=1)
_BATCH: Final = Range(least=1, most=MOST_PICTURES, whole=True)

FEDEVPROMPT: Final[Mapping[str, Range]] = MappingProxyType(
    {
        "lr_b": _SHARE,
        "lr_t": _SHARE,
        "lr_head": _SHARE,
        "weight_decay": _SHARE,
        "batch": _BATCH,
        "b_blocks": Range(least=1, most=1000, whole=True),
        "prompt_length": Range(least=1, most=10_000, whole=True, zero="by the patches"),
        "anneal_epochs": Range(least=1, most=MOST_EPOCHS, whole=True),
        "prior_floor": _SHARE,
        "kd_weight": _SHARE,
        "maps_per_class": Range(least=1, most=100, whole=True),
        "rollout_from": Range(least=0, most=999, whole=True),
    }
)

FEDCLF: Final[Mapping[str, Range]] = MappingProxyType(
    {
        "lr": Range(least=0, most=10, above=True),
        "momentum": Range(least=0, most=1, below=True),
        "weight_decay": _SHARE,
        "batch": replace(_BATCH, least=LEAST_BATCH),  # batch norm learns from it
        "view_px": Range(least=2, most=4096, whole=True, zero="from the image"),  # 2: what a blur mirrors at the edges
        "queue": Range(least=2, most=MOST_ROWS, whole=True),
        "temperature": Range(least=0.001, most=10),
        "key_momentum": Range(least=0, most=1, below=True, zero="by the length of the run"),
        "dp_noise": Range(least=1e-3, most=1e3, zero="no noise"),
        "dp_delta": Range(least=1e-12, most=0.1),
    }
)
