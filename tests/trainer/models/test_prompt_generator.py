"""pFedPG's generator and its chain rule against PyTorch's automatic differentiation (docs/methods.md 5.6)."""

import math

import numpy as np
import pytest
import torch

from edgefl_trainer.models.prompt_generator import (
    BASIS,
    KEY,
    OUT,
    QUERY,
    VALUE,
    generate,
    initial_weights,
    pull_back,
    uniform_tokens,
)

N, WIDTH, ATTENTION = 5, 12, 3


@pytest.fixture
def rng():
    return np.random.default_rng(4)


def reference(w, d, residual):
    """Scaled dot-product attention of q_j = (P_base_j + d) W_Q over P_base, from PyTorch."""
    query, key, value = (w[BASIS] + d) @ w[QUERY], w[BASIS] @ w[KEY], w[BASIS] @ w[VALUE]
    mixed = torch.nn.functional.scaled_dot_product_attention(query[None], key[None], value[None])[0] @ w[OUT]
    return w[BASIS] + mixed if residual else mixed


@pytest.mark.parametrize("residual", [True, False])
def test_generator_and_chain_rule_are_pytorchs(rng, residual):
    weights = {name: 5 * value for name, value in initial_weights(8, WIDTH, N, ATTENTION, rng).items()}
    descriptor, vector = rng.normal(size=WIDTH), rng.normal(size=(N, WIDTH))
    leaves = {name: torch.from_numpy(value).requires_grad_(True) for name, value in weights.items()}
    d = torch.from_numpy(descriptor).requires_grad_(True)
    prompts = reference(leaves, d, residual)
    prompts.backward(torch.from_numpy(vector))
    np.testing.assert_allclose(generate(weights, descriptor, residual), prompts.detach(), rtol=1e-10)
    gradients, of_descriptor = pull_back(weights, descriptor, vector, residual)
    assert gradients.keys() == weights.keys()
    for name in weights:
        np.testing.assert_allclose(gradients[name], leaves[name].grad, rtol=1e-8, atol=1e-12, err_msg=name)
    np.testing.assert_allclose(of_descriptor, d.grad, rtol=1e-8, atol=1e-12)


def test_another_descriptor_gives_other_prompts(rng):
    weights = initial_weights(8, WIDTH, N, ATTENTION, rng)
    first, second = (generate(weights, rng.normal(size=WIDTH)) for _ in range(2))
    assert np.abs(first - second).max() > 1e-4


def test_tokens_begin_as_vpts_do(rng):
    """VPT's code: U(-v, v) with v = sqrt(6/(3·patch² + D)), which is 0.0625 for ViT-B/16."""
    values = uniform_tokens(16, (400, 768), rng)
    assert math.sqrt(6 / (3 * 16**2 + 768)) == 0.0625
    assert 0.0624 < values.max() <= 0.0625 and -0.0625 <= values.min() < -0.0624
    assert abs(values.mean()) < 1e-3
