"""lnΓ, ψ and ψ′ out of elementary operators, for graphs: ONNX has none of the three.

Six steps of the recurrence lift the argument to 6 or more, where Stirling's asymptotic series holds (DLMF 5.5.1,
5.11.1, 5.11.2, 5.15.8). In float64 the error is below 1e-12 relative for arguments from 1e-3 to 1e5, next to the zeros
of lnΓ (1 and 2) and of ψ (1.4616…) below 1e-13 absolute. `DECOMPOSITIONS` puts them in the place of PyTorch's own while
a graph is traced, so that the loss itself needs no second form. Source: docs/design.md, section 9.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

STEPS = 6
# B_2n/(2n(2n−1)), B_2n/(2n) and B_2n for n = 1 … 9, B the Bernoulli numbers.
_BERNOULLI = (1 / 6, -1 / 30, 1 / 42, -1 / 30, 5 / 66, -691 / 2730, 7 / 6, -3617 / 510, 43867 / 798)
_LGAMMA = tuple(value / (2 * n * (2 * n - 1)) for n, value in enumerate(_BERNOULLI, start=1))
_DIGAMMA = tuple(value / (2 * n) for n, value in enumerate(_BERNOULLI, start=1))


def lgamma(x: Float[Tensor, "*axes"]) -> Float[Tensor, "*axes"]:
    """Return lnΓ(x), the logarithm of the gamma function, for x above zero, in the type of `x`."""
    product = x
    for step in range(1, STEPS):
        product = product * (x + step)
    high = x + STEPS
    inverse = 1 / high
    series = _series(_LGAMMA, inverse * inverse) * inverse
    return (high - 0.5) * torch.log(high) - high + 0.5 * math.log(2 * math.pi) + series - torch.log(product)


def digamma(x: Float[Tensor, "*axes"]) -> Float[Tensor, "*axes"]:
    """Return ψ(x), the first derivative of lnΓ, for x above zero, in the type of `x`."""
    lifted = 1 / x
    for step in range(1, STEPS):
        lifted = lifted + 1 / (x + step)
    high = x + STEPS
    inverse = 1 / high
    square = inverse * inverse
    return torch.log(high) - 0.5 * inverse - _series(_DIGAMMA, square) * square - lifted


def trigamma(x: Float[Tensor, "*axes"]) -> Float[Tensor, "*axes"]:
    """Return ψ′(x), the second derivative of lnΓ, for x above zero, in the type of `x`."""
    lifted = 1 / (x * x)
    for step in range(1, STEPS):
        lifted = lifted + 1 / ((x + step) * (x + step))
    inverse = 1 / (x + STEPS)
    square = inverse * inverse
    return inverse + 0.5 * square + _series(_BERNOULLI, square) * square * inverse + lifted


def _series(coefficients: tuple[float, ...], square: Tensor) -> Tensor:
    """Σ c_n·square^(n−1), Horner's way."""
    total = torch.full_like(square, coefficients[-1])
    for value in reversed(coefficients[:-1]):
        total = total * square + value
    return total


def _polygamma(order: int, x: Tensor) -> Tensor:
    if order != 1:
        raise ValueError(f"polygamma of order {order}; a training step differentiates digamma once, order 1")
    return trigamma(x)


DECOMPOSITIONS: Mapping[Any, Callable[..., Tensor]] = {
    torch.ops.aten.lgamma.default: lgamma,
    torch.ops.aten.digamma.default: digamma,
    torch.ops.aten.polygamma.default: _polygamma,
}
