"""lnΓ, ψ and ψ′ against scipy."""

import numpy as np
import pytest
import torch
from scipy import special as oracle

from edgefl_export.graphs.special import DECOMPOSITIONS, digamma, lgamma, trigamma

WIDE = np.concatenate([np.geomspace(1e-3, 1e5, 20_001), np.linspace(0.5, 3, 5_001)])
CASES = [(lgamma, oracle.gammaln), (digamma, oracle.digamma), (trigamma, lambda x: oracle.polygamma(1, x))]


@pytest.mark.parametrize(("series", "exact"), CASES, ids=["lgamma", "digamma", "trigamma"])
def test_series_against_scipy(series, exact):
    """docs/design.md 9: 1e-6 relative for 1e-3 … 1e5; next to the zeros of lnΓ and ψ the absolute error counts."""
    found, wanted = series(torch.from_numpy(WIDE)).numpy(), exact(WIDE)
    assert np.abs(found - wanted).max() / np.abs(wanted).max() < 1e-6
    assert (np.abs(found - wanted) <= 1e-6 * np.abs(wanted) + 1e-13).all()
    assert (np.abs(found - wanted) <= 1e-13 * np.maximum(np.abs(wanted), 1)).all()


def test_derivatives_are_those_of_each_other():
    """ψ = (lnΓ)′ and ψ′: what PyTorch's chain rule asks for is what takes their place."""
    x = torch.linspace(0.01, 50, 200, dtype=torch.float64, requires_grad=True)
    for series, derivative in ((lgamma, digamma), (digamma, trigamma)):
        (slope,) = torch.autograd.grad(series(x).sum(), x)
        assert torch.allclose(slope, derivative(x.detach()), rtol=1e-9)
    with pytest.raises(ValueError, match="order 2"):
        DECOMPOSITIONS[torch.ops.aten.polygamma.default](2, x)
