"""Answers for the questions of some rows: each picture passes the vision transformer once, whatever is asked about it.

Guarantees: rows come out in the order they went in; an answer is that of `AnswerModule.forward`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from edgefl_trainer.contract import Examples, Predictor
from edgefl_trainer.learning.named_arrays import as_tensors
from edgefl_trainer.models.answers import AnswerModule

BATCH = 64
MOST_KEPT = 1 << 28  # values of picture tokens that are kept: 1 GiB


@dataclass
class PictureTokens:
    """The picture tokens of some rows: of a frozen network computed at first use and kept, while they are few."""

    module: AnswerModule
    rows: Examples
    device: torch.device
    autocast: torch.dtype | None = None  # of the vision transformer
    network: Mapping[str, Tensor] = field(default_factory=dict)  # its weights, by timm's names, while they learn
    _kept: Tensor | None = field(default=None, init=False)  # of each distinct picture (M, N, D)
    _index: NDArray[np.int64] | None = field(default=None, init=False)  # which of them a row shows

    def of(self, positions: NDArray[np.int64]) -> Float[Tensor, "B N D"]:
        """Return the tokens of the pictures that the rows at `positions` show; none where the picture is hidden."""
        if not self.module.options.sees_picture:
            return torch.zeros((len(positions), 0, 1), device=self.device)
        if self.network:
            return self._tokens(self.rows.places[positions])
        if self._index is None:
            places, index = np.unique(self.rows.places, return_inverse=True)
            self._index = index
            spec = self.module.spec
            if len(places) * spec.tokens * spec.width <= MOST_KEPT:
                self._kept = torch.cat([self._tokens(places[at : at + BATCH]) for at in range(0, len(places), BATCH)])
        return self._tokens(self.rows.places[positions]) if self._kept is None else self._kept[self._index[positions]]

    def _tokens(self, places: NDArray[np.int64]) -> Float[Tensor, "B N D"]:
        images = torch.from_numpy(self.rows.images[places]).to(self.device)
        with torch.autocast(self.device.type, dtype=self.autocast, enabled=self.autocast is not None):
            if self.network:
                return self.module.picture_tokens(images, self.network)
            with torch.no_grad():
                return self.module.picture_tokens(images)


def answer_rows(predictor: Predictor, rows: Examples, device: torch.device) -> dict[str, NDArray[np.float32]]:
    """Answer the questions of at least one row: `logits` before the temperature (B, K), and an answer's outputs."""
    module = predictor.module
    assert isinstance(module, AnswerModule)
    module = module.to(device).eval()
    tensors = as_tensors(predictor.tensors, device)
    pictures = PictureTokens(module, rows, device)
    parts: list[dict[str, NDArray[np.float32]]] = []
    with torch.inference_mode():
        for start in range(0, len(rows), BATCH):
            part = np.arange(start, min(start + BATCH, len(rows)))
            features, maps = module.fused(pictures.of(part), rows.asked(part).to(device), tensors)
            logits = module.logits(features, tensors)
            named = {"logits": logits, **module.judge(logits, maps, tensors).named()}
            parts.append({name: value.cpu().numpy() for name, value in named.items()})
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
