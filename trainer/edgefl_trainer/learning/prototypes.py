"""Class prototypes at the inputs of some blocks: where each class lies inside the network.

    site:   class tokens of its training images at each position                     class_tokens
            their mean of each class, or the same under Laplace noise                class_prototypes, LaplaceNoise
    server: mean over all that were sent, moved into the ones it keeps               contributions, moved

Prototypes are (J, K, D): position, class, width. A row of zeros says that there is none. Source: PEP-FedPT (arXiv
2510.25372) eq. 10 to 12, 18 to 21 and appendix A.4.1; docs/methods.md 5.1 and 6.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from edgefl_protocol import Payload
from edgefl_trainer.contract import Site
from edgefl_trainer.learning.training_scores import BATCH
from edgefl_trainer.models.inserts import Insert, Inserter
from edgefl_trainer.models.vit import FrozenViT, ViTOutput

PROTOTYPES = "prototypes"
LEAST_IMAGES = 2  # of a class whose mean goes out under noise: the mean of one image is that image
Tensors = Mapping[str, Tensor]


def class_tokens(
    site: Site, blocks: Sequence[int], insert: Insert | None = None, tensors: Tensors | None = None
) -> NDArray[np.float32]:
    """Read the class token of every training row at the input of some blocks: deterministic view, no gradient.

    Gives (n, J, D), before the tokens that enter at that block. `blocks` rise from 0; `insert` is None for the bare
    network.
    """
    vit, parts = site.backbone, []
    assert isinstance(vit, FrozenViT)
    for images, _ in site.train.in_order(BATCH):
        pixels = vit.normalise(images.to(site.device))
        inserter = None if insert is None else insert.bind(tensors or {}, partial(_bare, vit, pixels))
        recorder, seen = _recording(blocks, inserter)
        with torch.inference_mode():
            vit(pixels, insert=recorder)
        parts.append(torch.stack(seen, dim=1).cpu().numpy())  # (B, J, D)
    return np.concatenate(parts)


def class_prototypes(tokens: NDArray[np.float32], targets: NDArray[np.int64], classes: int) -> NDArray[np.float32]:
    """Average the class tokens (n, J, D) of each class to (J, K, D) (eq. 10); sums in float64, zeros without a row."""
    found = np.zeros((tokens.shape[1], classes, tokens.shape[2]), dtype=np.float32)
    for label in np.unique(targets[targets >= 0]):
        found[:, label] = tokens[targets == label].astype(np.float64).mean(axis=0)
    return found


@dataclass(frozen=True)
class LaplaceNoise:
    """Prototypes under Laplace noise of scale S/epsilon in every coordinate (appendix A.4.1).

    With `clip_l1` = 0, S = 2·max_i ||cls_i − centre||_1/N, the centre being the federation's prototype, or the site's
    own mean while there is none. With `clip_l1` = B > 0 every difference from the centre is shortened to an L1 norm of
    at most B and S = 2·B/N, the centre being the federation's prototype or 0: then S bounds what one image can move.
    """

    epsilon: float
    clip_l1: float  # B; 0: none

    def prototypes(
        self,
        tokens: NDArray[np.float32],
        targets: NDArray[np.int64],
        centres: NDArray[np.float32],
        rng: np.random.Generator,
    ) -> NDArray[np.float32]:
        """Compute prototypes (J, K, D) under noise, which go out instead of `class_prototypes`.

        Zeros for a class of fewer than two rows, and where all its rows are the centre (no noise). `centres` are the
        prototypes of the federation.
        """
        found = np.zeros_like(centres)
        for label in np.unique(targets[targets >= 0]):
            rows = tokens[targets == label].astype(np.float64)  # (N, J, D)
            if len(rows) < LEAST_IMAGES:
                continue
            for position in range(len(centres)):
                centre = self._centre(centres[position, label].astype(np.float64), rows[:, position])
                offsets, radius = self._bounded(rows[:, position] - centre)
                scale = 2 * radius / len(rows) / self.epsilon
                if scale > 0:
                    found[position, label] = centre + offsets.mean(axis=0) + rng.laplace(0.0, scale, centre.shape)
        return found

    def _centre(self, known: NDArray[np.float64], rows: NDArray[np.float64]) -> NDArray[np.float64]:
        return known if known.any() or self.clip_l1 > 0 else rows.mean(axis=0)

    def _bounded(self, offsets: NDArray[np.float64]) -> tuple[NDArray[np.float64], float]:
        """Return offsets (N, D) and a bound on their L1 norms."""
        norms = np.abs(offsets).sum(axis=1)
        if self.clip_l1 == 0:
            return offsets, float(norms.max())
        return offsets * np.minimum(1.0, self.clip_l1 / np.maximum(norms, 1e-300))[:, None], self.clip_l1


def contributions(replies: Mapping[str, Payload]) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Sum what the sites sent: prototypes (J, K, D), and how many there were, (J, K), the D_c of eq. 11."""
    sent = [replies[name].arrays[PROTOTYPES].astype(np.float64) for name in sorted(replies)]
    total, count = np.zeros_like(sent[0]), np.zeros(sent[0].shape[:2], dtype=np.int64)
    for one in sent:
        total += one
        count += one.any(axis=-1)
    return total, count


def moved(old: NDArray[Any], total: NDArray[np.float64], count: NDArray[np.int64], rho: float) -> NDArray[np.float32]:
    """Move prototypes after a period (eq. 12): rho·old + (1 − rho)·mean, all (J, K, D).

    Args:
        old: those the server keeps.
        total: sum over what was sent.
        count: how many were sent, (J, K). None: the old one stays.
        rho: momentum; 0 for a class that had none.
    """
    kept = old.astype(np.float64)
    mean = total.astype(np.float64) / np.maximum(count, 1)[..., None]
    momentum = np.where(kept.any(axis=-1), rho, 0.0)[..., None]
    new = np.where((count > 0)[..., None], momentum * kept + (1 - momentum) * mean, kept)
    return new.astype(np.float32)


def _bare(vit: FrozenViT, pixels: Float[Tensor, "B 3 S S"]) -> Float[Tensor, "B D"]:
    """Compute class tokens of the bare network, for inserts that ask."""
    output: ViTOutput = vit(pixels)
    return output.cls


def _recording(blocks: Sequence[int], inner: Inserter | None) -> tuple[Inserter, list[Tensor]]:
    """Make an inserter that does what `inner` does, and the list of class tokens it will see, (B, D) a block."""
    seen: list[Tensor] = []

    def record(block: int, tokens: Float[Tensor, "B T D"]) -> Float[Tensor, "B I D"]:
        if block in blocks:
            seen.append(tokens[:, 0].float())
        return tokens if inner is None else inner(block, tokens)

    return record, seen
