"""pFedPG's prompt generator and its chain rule, in numpy and float64, so that a server needs no network to step it.

    q = (P_base + d) W_Q,  k = P_base W_K,  v = P_base W_V        (n, l_k), (n, l_k), (n, l_v)
    P = P_base + softmax(q k' / sqrt(l_k)) v W_O                  (n, D); without the residual: the second term alone

Guarantees: `pull_back` is the exact transposed derivative of `generate` (tested against automatic differentiation).
Source: arXiv 2308.15367 section 3.3; docs/methods.md 5.6 for what the paper leaves open.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Weights = Mapping[str, NDArray[Any]]
BASIS = "generator.basis"  # P_base (n, D)
QUERY, KEY, VALUE, OUT = (f"generator.{name}" for name in ("query", "key", "value", "out"))  # W_Q, W_K, W_V, W_O


class _Forward(NamedTuple):
    tokens: Floats  # P_base + d, (n, D)
    query: Floats
    key: Floats
    value: Floats
    attention: Floats  # (n, n), rows sum to 1


def uniform_tokens(patch: int, shape: tuple[int, ...], rng: np.random.Generator) -> Floats:
    """Draw prompt tokens U(-v, v), v = sqrt(6/(3·patch² + D)); D is the last axis, `patch` in pixels."""
    bound = (6 / (3 * patch**2 + shape[-1])) ** 0.5
    return rng.uniform(-bound, bound, size=shape)


def initial_weights(patch: int, width: int, n: int, attention: int, rng: np.random.Generator) -> dict[str, Floats]:
    """Make `generator.*` by name: P_base as prompt tokens begin, four Xavier-uniform maps; `attention`: l_k = l_v."""
    bound = (6 / (width + attention)) ** 0.5
    projections = {name: rng.uniform(-bound, bound, size=(width, attention)) for name in (QUERY, KEY, VALUE)}
    out = rng.uniform(-bound, bound, size=(attention, width))
    return {BASIS: uniform_tokens(patch, (n, width), rng), **projections, OUT: out}


def generate(weights: Weights, descriptor: Floats, residual: bool = True) -> Floats:
    """Generate the prompts P (n, D) of the site with this descriptor d (D,); `residual` adds P_base."""
    w = _wide(weights)
    found = _forward(w, descriptor)
    attended: Floats = found.attention @ found.value @ w[OUT]
    return w[BASIS] + attended if residual else attended


def pull_back(
    weights: Weights, descriptor: Floats, vector: Floats, residual: bool = True
) -> tuple[dict[str, Floats], Floats]:
    """Compute (dP/dphi)' g for every weight, by name, and the descriptor; `vector` is g, the rest as in `generate`."""
    w = _wide(weights)
    tokens, query, key, value, attention = _forward(w, descriptor)
    of_mixed = vector @ w[OUT].T  # (n, l_v)
    of_attention = of_mixed @ value.T  # (n, n)
    of_value = attention.T @ of_mixed
    of_logits = attention * (of_attention - (of_attention * attention).sum(axis=1, keepdims=True))
    of_logits /= np.sqrt(key.shape[1])
    of_query, of_key = of_logits @ key, of_logits.T @ query
    of_tokens = of_query @ w[QUERY].T  # (n, D)
    of_basis = of_tokens + of_key @ w[KEY].T + of_value @ w[VALUE].T
    gradients = {
        BASIS: of_basis + vector if residual else of_basis,
        QUERY: tokens.T @ of_query,
        KEY: w[BASIS].T @ of_key,
        VALUE: w[BASIS].T @ of_value,
        OUT: (attention @ value).T @ vector,
    }
    return gradients, of_tokens.sum(axis=0)


def _wide(weights: Weights) -> Mapping[str, Floats]:
    return {name: weights[name].astype(np.float64) for name in (BASIS, QUERY, KEY, VALUE, OUT)}


def _forward(w: Mapping[str, Floats], descriptor: Floats) -> _Forward:
    tokens = w[BASIS] + descriptor
    query, key, value = tokens @ w[QUERY], w[BASIS] @ w[KEY], w[BASIS] @ w[VALUE]
    logits = query @ key.T / np.sqrt(key.shape[1])
    powers = np.exp(logits - logits.max(axis=1, keepdims=True))
    return _Forward(tokens, query, key, value, powers / powers.sum(axis=1, keepdims=True))
