"""What Gaussian noise costs: (epsilon, delta) of releases that follow one another, by Rényi differential privacy.

    release    a Gaussian mechanism: what one picture can move (L2), over the noise's deviation, is 1 / multiplier
    cost       Rényi accountant of dp-accounting (Mironov, arXiv 1702.07476; conversion of Canonne et al., 2004.00010)

Guarantees: the cost bounds that of the releases together, in any order, each chosen after the ones before; one that is
told in a sentence is never below it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from decimal import ROUND_CEILING, Context
from typing import Final

from edgefl_protocol.distribution import needs_extra
from edgefl_trainer.errors import SettingError

PROTECTED: Final = "for one picture (several of one patient cost more)"  # stands beside each epsilon that is promised


@dataclass(frozen=True)
class NoisyRelease:
    """One reply of a site under Gaussian noise."""

    multiplier: float  # deviation of the noise, over the L2 distance that one picture can move what is sent
    delta: float  # of the (epsilon, delta) that is told

    def epsilon(self, releases: int) -> float:
        """Compute epsilon after so many releases; raises as `epsilon_of`."""
        return epsilon_of({self.multiplier: releases}, self.delta)


def told_epsilon(epsilon: float) -> str:
    """Write an epsilon in five digits, rounded up: so it differs from a bound that it passes, and is no promise."""
    exact = Context(prec=12).create_decimal(epsilon)  # without the last bits of sums such as 3 times 0.2
    return f"{float(Context(prec=5, rounding=ROUND_CEILING).plus(exact)):.5g}"


def epsilon_of(releases: Mapping[float, int], delta: float) -> float:
    """Compute epsilon at `delta` of so many releases by each noise multiplier; 0 of none.

    A `SettingError` where the accounting library is missing.
    """
    try:
        from dp_accounting import GaussianDpEvent, SelfComposedDpEvent
        from dp_accounting.rdp import RdpAccountant
    except ImportError as error:
        raise SettingError(f"dp_noise needs dp-accounting, which comes with {needs_extra('privacy')}.") from error
    accountant = RdpAccountant()
    for multiplier, count in sorted(releases.items()):
        if count:
            accountant.compose(SelfComposedDpEvent(GaussianDpEvent(multiplier), count))
    return float(accountant.get_epsilon(delta)) if any(releases.values()) else 0.0
