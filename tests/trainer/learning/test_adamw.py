"""The server's AdamW against torch.optim.AdamW (arXiv 1711.05101, Algorithm 2)."""

import numpy as np
import torch

from edgefl_trainer.learning.adamw import adamw_step


def test_steps_are_pytorchs():
    rng = np.random.default_rng(0)
    arrays = {"w": rng.normal(size=(3, 4)), "d": rng.normal(size=4)}
    leaves = {name: torch.from_numpy(value.copy()).requires_grad_(True) for name, value in arrays.items()}
    optimizer = torch.optim.AdamW(leaves.values(), lr=0.1, weight_decay=0.3)
    for step in range(5):
        gradients = {name: rng.normal(size=value.shape) * 10.0**step for name, value in leaves.items()}
        if step in (1, 2):  # this one rests: neither value nor moments nor count may move
            del gradients["d"]
        for name, leaf in leaves.items():
            leaf.grad = torch.from_numpy(gradients[name]) if name in gradients else None
        optimizer.step()
        arrays = adamw_step(arrays, gradients, 0.1, 0.3)
        for name, leaf in leaves.items():
            np.testing.assert_allclose(arrays[name], leaf.detach().numpy(), rtol=1e-12)
