"""The evidential head: standardised features → logits → evidence → Dirichlet, and what is shown of it.

Guarantees: evidence is never negative; belief and vacuity sum to 1; every function works row by row, in the dtype of
its input, without randomness, and traces to plain ONNX operators.

Sources: FedEvPrompt (arXiv 2411.10071) section 3.1; Jøsang, Cho and Chen, "Uncertainty characteristics of subjective
opinions" (FUSION 2018) for dissonance; docs/methods.md, prior and shown quantities.
"""

from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

EvidenceKind = Literal["softplus", "relu", "exp"]
"""How logits become evidence; `exp` clips the logits to [−10, 10] first."""

STD_FLOOR = 1e-6  # a feature that never varies must not be blown up


def init_head(classes: int, width: int, generator: torch.Generator) -> tuple[Float[Tensor, "K D"], Float[Tensor, " K"]]:
    """Make a fresh head: weights N(0, 0.02) and bias +1 for every class, so that ReLU evidence starts alive."""
    return torch.zeros((classes, width)).normal_(0, 0.02, generator=generator), torch.ones(classes)


def standardise(
    features: Float[Tensor, "*rows D"], mean: Float[Tensor, " D"], std: Float[Tensor, " D"]
) -> Float[Tensor, "*rows D"]:
    """Scale features to units of their spread over the training rows; a std below `STD_FLOOR` counts as that."""
    return (features - mean) / std.clamp(min=STD_FLOOR)


def evidence_of(logits: Float[Tensor, "B K"], kind: EvidenceKind) -> Float[Tensor, "B K"]:
    """Compute the evidence of each class, not negative, from logits already divided by the temperature."""
    if kind == "softplus":
        return functional.softplus(logits)
    if kind == "relu":
        return functional.relu(logits)
    return logits.clamp(min=-10, max=10).exp()


def dirichlet_summary(
    evidence: Float[Tensor, "B K"], prior: Float[Tensor, " K"]
) -> tuple[Float[Tensor, "B K"], Float[Tensor, " B"]]:
    """Compute class probabilities p = (e + W)/S and vacuity u = K/S of Dir(e + W); u = 1 at zero evidence, ΣW = K."""
    alpha = evidence + prior
    strength = alpha.sum(dim=-1, keepdim=True)  # (B, 1)
    return alpha / strength, evidence.shape[-1] / strength[:, 0]


def unusualness(
    features: Float[Tensor, "B D"], mean: Float[Tensor, " D"], whitening: Float[Tensor, "D D"]
) -> Float[Tensor, " B"]:
    """Compute d² = ‖A(f − m)‖²: above 1 for features farther out than nearly all of the site's (`unusual_features`)."""
    return ((features - mean) @ whitening.T).square().sum(dim=-1)


def discounted(evidence: Float[Tensor, "B K"], unusual: Float[Tensor, " B"]) -> Float[Tensor, "B K"]:
    """Discount evidence by the trust t = min(1, 1/d²): the belief e/S becomes t·e/S, the rest is vacuity.

    Solved for evidence, never above `evidence`: t·e·K/(K + (1 − t)·Σe); the classes keep their proportions. `unusual`
    is d² of `unusualness`. Source: Jøsang, "Subjective logic" (2016), trust discounting; docs/decisions/0023.
    """
    trust = (1 / unusual.clamp(min=1))[:, None]  # (B, 1)
    classes = evidence.shape[-1]
    return evidence * (trust * classes / (classes + (1 - trust) * evidence.sum(dim=-1, keepdim=True)))


def dissonance(evidence: Float[Tensor, "B K"], vacuity: Float[Tensor, " B"]) -> Float[Tensor, " B"]:
    """Compute the conflict between the beliefs in different classes, in [0, 1 − u].

    Σ_k b_k · [Σ_{j≠k} b_j Bal(b_j, b_k)] / [Σ_{j≠k} b_j], Bal(x, y) = 1 − |x − y|/(x + y), 0 where a denominator is 0.
    Source: Jøsang et al. 2018, eq. 10 and 11.
    """
    belief = evidence * (vacuity / evidence.shape[-1])[:, None]  # b = e/S, (B, K)
    row, column = belief[:, :, None], belief[:, None, :]
    total = row + column  # (B, K, K)
    balance = torch.where(total > 0, 1 - (row - column).abs() / torch.where(total > 0, total, 1), 0)
    others = 1 - torch.eye(evidence.shape[-1], dtype=evidence.dtype, device=evidence.device)
    mass = (others * column).sum(dim=-1)  # Σ_{j≠k} b_j, (B, K)
    weighted = (others * column * balance).sum(dim=-1)
    return (belief * torch.where(mass > 0, weighted / torch.where(mass > 0, mass, 1), 0)).sum(dim=-1)
