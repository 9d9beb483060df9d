"""The feature exchange: what leaves a site's bank, what the server makes of it, what another site receives.

    site    `features` (n, 128) float16, n at most K; with `dp_noise` sigma: fresh features of evaluation mode, plus
            N(0, sigma²) in every coordinate, brought back to unit length                            added
    server  refuses what cannot be such a bank, by the site's name; a new bank replaces the old      accepted
            to a site: the union of all others' banks, never its own; no site's name, and in an
            order that depends on nothing but the features themselves (by a hash of each row)        others_features
    site    `remote` (M, 128) float16 as unit vectors in float32                                     incoming

Forms and checks of the rows are those of `rules.feature_rows`. Privacy: a feature has unit length,
which is the clipping; given the encoder, replacing one image moves one row by at most 2, so a release is a Gaussian
mechanism of noise multiplier sigma/2, composed over releases by dp-accounting's Rényi accountant. The encoder and the
weights that travel learned from the same images and carry no noise, so epsilon bounds what the features add, no more.
Source: FedCLF (arXiv 2208.11278) section III; docs/methods.md, feature exchange.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from edgefl_protocol import Payload
from edgefl_protocol.rules import feature_rows
from edgefl_protocol.rules.bounds import FEDCLF
from edgefl_protocol.rules.defaults import FedCLFDefaults as Default
from edgefl_protocol.rules.feature_rows import MOST_ROWS, RECEIVED, SENT, check_bank, order_by_content
from edgefl_trainer.bounds import check_ranges
from edgefl_trainer.contract import Arrays, NoiseTerms
from edgefl_trainer.errors import TrainingError
from edgefl_trainer.gaussian_noise import PROTECTED, NoisyRelease, told_epsilon

STORED = "features."  # and, with the site's name behind it, in the server's state
SENSITIVITY = 2.0  # L2 distance of two unit vectors


@dataclass(frozen=True, kw_only=True)
class FeatureNoise:
    """Gaussian noise on what leaves a site."""

    dp_noise: float = Default.dp_noise  # sigma, noise in every coordinate of a unit vector that is sent; 0: none (ours)
    dp_delta: float = Default.dp_delta  # delta of the (epsilon, delta) that a run tells (ours)

    def __post_init__(self) -> None:
        check_ranges(self, FEDCLF)

    def check_accountant(self) -> None:
        """Raise `SettingError` where noise is asked for and the accounting library is missing."""
        if self.dp_noise:
            self.epsilon(1)

    def epsilon(self, releases: int) -> float:
        """Compute epsilon at `dp_delta` after so many releases of a bank, for replacing one image.

        A `SettingError` where the library is missing.
        """
        return NoisyRelease(self.dp_noise / SENSITIVITY, self.dp_delta).epsilon(releases)

    @property
    def release(self) -> NoisyRelease | None:
        """What a bank that is sent counts as; None without noise."""
        return NoisyRelease(self.dp_noise / SENSITIVITY, self.dp_delta) if self.dp_noise else None

    @property
    def terms(self) -> NoiseTerms | None:
        """What the noise promises; None without noise."""
        told = NoiseTerms(kind="features", on="features", given="the encoders", delta=self.dp_delta)
        return told if self.dp_noise else None

    def sentence(self, site: str, releases: int) -> str:
        """Return what a person should know before the first release."""
        one, all_ = told_epsilon(self.epsilon(1)), told_epsilon(self.epsilon(releases))
        return (
            f"shared features of site {site} cost epsilon {one} a round and {all_} in all, at delta "
            f"{self.dp_delta:g}, {PROTECTED}, given the encoders; the weights that travel with them carry no noise."
        )

    def added(self, features: NDArray[np.float32], rng: np.random.Generator) -> NDArray[np.float32]:
        """Add noise to features and bring them back to unit length (which costs no privacy)."""
        noised = features + rng.normal(0.0, self.dp_noise, features.shape)
        length = np.linalg.norm(noised, axis=1, keepdims=True)
        return np.asarray(noised / length, dtype=np.float32)


def accepted(state: Arrays, replies: Mapping[str, Payload], most: int) -> Arrays:
    """Put the banks of those who sent one among the server's arrays, as `features.<site>`.

    A `TrainingError` where what a site sent is no bank of this federation.
    """
    found = {f"{STORED}{site}": _checked(site, replies[site].arrays, most) for site in sorted(replies)}
    return {**state, **found}


def site_of(name: str) -> str | None:
    """Return whose bank an array of the server's state is; None where it is no bank."""
    return name.removeprefix(STORED) if name.startswith(STORED) else None


def others_features(state: Arrays, sites: Sequence[str]) -> dict[str, Arrays]:
    """Give each of `sites` all the others' banks, in the order of a hash of each row.

    The order is a function of the set of features, so that it cannot tell where a row came from, and the same in every
    run and after every resume.
    """
    banks = {name.removeprefix(STORED): rows for name, rows in sorted(state.items()) if name.startswith(STORED)}
    if not banks:
        return {site: {} for site in sites}
    pooled = np.concatenate(list(banks.values()))
    origin = np.repeat(np.array(list(banks), dtype=object), [len(rows) for rows in banks.values()])
    order = order_by_content(pooled)
    found: dict[str, Arrays] = {}
    for site in sites:
        others = order[origin[order] != site][:MOST_ROWS]  # the first in the order stay
        found[site] = {RECEIVED: pooled[others]} if len(others) else {}
    return found


def incoming(received: Arrays, device: torch.device) -> Float[Tensor, "M F"] | None:
    """Read Q_r as unit vectors; None where there is nobody else, a `TrainingError` where these are no features."""
    try:
        rows = feature_rows.received(received)
    except ValueError as error:
        raise TrainingError(f"the others' features {error}.") from error
    if rows is None:
        return None
    return torch.nn.functional.normalize(torch.from_numpy(rows.astype(np.float32)).to(device), dim=1)


def _checked(site: str, arrays: Arrays, most: int) -> NDArray[np.generic]:
    """The bank of one reply; raises as `accepted`."""
    rows = arrays.get(SENT)
    if rows is None:
        raise TrainingError(f"site {site} sent no features: it runs another method or other settings.")
    try:
        check_bank(rows, most)
    except ValueError as error:
        raise TrainingError(f"site {site} sent {error}.") from error
    return rows
