"""What a picture's map becomes where a site sends the mean of M maps of a class: the mean with those of M - 1 others.

A run sends the mean of the maps of lowest vacuity, so of each class M pictures a round. The audit asks what any
training picture would tell in such a mean. The others are drawn from its class at its site, none of its own lesion. A
decoder learns to read means from those of public pictures.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Float, Int

from edgefl_trainer.audit.payloads import PicturePayload
from edgefl_trainer.contract import Method, Site
from edgefl_trainer.data import Federation
from edgefl_trainer.learning.maps.sharing import MapSharing


@dataclass(frozen=True)
class Averaging:
    """Some pictures' maps, and with how many others of its class a map is averaged."""

    others: int
    maps: Float[np.ndarray, "n P"]
    labels: Int[np.ndarray, " n"]
    lesions: np.ndarray  # (n,)
    seed: int

    def averaged(
        self, maps: Float[np.ndarray, "m P"], labels: Int[np.ndarray, " m"], lesions: Sequence[str]
    ) -> Float[np.ndarray, "m P"]:
        """Average each map with others of its class, fewer where the class has no more, as float16 travels."""
        rng, means = np.random.default_rng([self.seed, self.others]), []
        for own, label, lesion in zip(maps, labels, lesions, strict=True):
            possible = np.flatnonzero((self.labels == label) & (self.lesions != lesion))
            drawn = rng.permutation(possible)[: self.others]
            means.append(np.vstack([own[None], self.maps[drawn]]).mean(axis=0))
        return np.asarray(np.stack(means).astype(np.float16), dtype=np.float32)

    def of_others(self, maps: Float[np.ndarray, "n P"], labels: Int[np.ndarray, " n"]) -> Float[np.ndarray, "n P"]:
        """Average the maps of other pictures among themselves, each of a lesion of its own."""
        names = np.array([f"other {row}" for row in range(len(maps))])
        return replace(self, maps=maps, labels=labels, lesions=names).averaged(maps, labels, names.tolist())


def averaging_of(
    method: Method, release: PicturePayload, site: Site, federation: Federation, seed: int
) -> Averaging | None:
    """Compute the maps of a site's training pictures; None where the method sends no mean of a few maps."""
    sharing = getattr(method, "maps", None)
    if release.kind != "maps" or not isinstance(sharing, MapSharing) or sharing.sent_maps == "each":
        return None
    rows = site.train
    lesions = np.array([federation.lesions[row] for row in rows.rows])
    return Averaging(sharing.maps_per_class - 1, release.sent(rows.images[rows.places]), rows.targets, lesions, seed)
