"""Losses of the federated methods, as pure functions of tensors.

Guarantees: the skewed Dirichlet prior sums to K; the evidential loss keeps the dtype of its input and evaluates lnΓ and
ψ in float64; distillation against a buffer of rollout maps costs the same whatever the number of maps.

Sources: FedEvPrompt (arXiv 2411.10071) section 3.1 and eq. 2 and 7; FedCLF (arXiv 2208.11278) eq. 6; SimCLR (arXiv
2002.05709) eq. 1; docs/methods.md, prior and distillation.
"""

from collections.abc import Hashable, Mapping, Sequence

import numpy as np
import torch
from jaxtyping import Float, Int, Shaped
from numpy.typing import NDArray
from torch import Tensor

from edgefl_protocol.rules import class_prior as prior_rule
from edgefl_protocol.rules import maps as map_rules

Counts = Shaped[Tensor, " K"] | NDArray[np.generic] | Sequence[int] | Sequence[float]
MapStack = Float[Tensor, "M N"] | NDArray[np.floating]


def class_prior(counts: Counts, floor: float = 1e-2) -> Float[Tensor, " K"]:
    """Compute a site's skewed Dirichlet prior W, in float64: frequent classes get little prior mass.

    W_k = K/(K−1)·(1 − N_k/N), raised to `floor`, then rescaled to sum K, so that vacuity is 1 at zero evidence. After
    the rescaling the smallest entry may lie a little below the floor. Source: FedEvPrompt section 3.1.

    Args:
        counts: number of training rows of each class, (K,).
        floor: smallest value before rescaling; a site with one class only would otherwise have W_k = 0.

    Raises:
        ValueError: fewer than two classes, a negative or not finite count, or no rows at all.
    """
    return torch.from_numpy(prior_rule.class_prior(torch.as_tensor(counts).detach().cpu().numpy(), floor))


def dirichlet_kl(alpha: Float[Tensor, "B K"], prior: Float[Tensor, " K"]) -> Float[Tensor, " B"]:
    """Compute KL(Dir(alpha) ‖ Dir(prior)) of each row in nats; all concentrations are above zero."""
    strength = alpha.sum(dim=-1)
    log_norm = torch.lgamma(strength) - torch.lgamma(prior.sum())
    log_norm = log_norm + (torch.lgamma(prior) - torch.lgamma(alpha)).sum(dim=-1)
    mean_log = torch.digamma(alpha) - torch.digamma(strength)[:, None]  # (B, K)
    return log_norm + ((alpha - prior) * mean_log).sum(dim=-1)


def evidential_loss(
    evidence: Float[Tensor, "B K"],
    target: Int[Tensor, " B"],
    prior: Float[Tensor, " K"],
    kl_weight: float | Float[Tensor, ""],
) -> Float[Tensor, ""]:
    """Compute the batch's mean of the expected squared error plus a penalty on evidence for wrong classes.

    L_mse = Σ_k (y_k − p_k)² + α_k(S − α_k)/(S²(S+1)) with α = e + W, p = α/S; the penalty is KL(Dir(α̃)‖Dir(W)) with α̃
    = y·W + (1−y)·α. Source: FedEvPrompt section 3.1; the annealing min(1, t/10) is the caller's `kl_weight`.
    """
    # lnΓ of a large S keeps no digit of a small divergence in float32, and the tensors here are tiny.
    weight = prior.to(device=evidence.device, dtype=torch.float64)
    alpha = evidence.to(torch.float64) + weight
    truth = torch.nn.functional.one_hot(target.long(), alpha.shape[-1]).to(torch.float64)
    strength = alpha.sum(dim=-1, keepdim=True)  # (B, 1)
    bias = (truth - alpha / strength).square()
    variance = alpha * (strength - alpha) / (strength.square() * (strength + 1))
    squared_error = (bias + variance).sum(dim=-1)
    misleading = truth * weight + (1 - truth) * alpha
    loss = squared_error + kl_weight * dirichlet_kl(misleading, weight)
    return loss.mean().to(evidence.dtype)


def distillation_targets(
    maps_by_peer: Mapping[Hashable, Mapping[int, MapStack]], classes: int | None = None, tokens: int | None = None
) -> tuple[Float[Tensor, "K _"], Float[Tensor, " K"]]:
    """Fold the peers' buffered rollout maps into one mean map and one peer count per class.

    Averaging each peer first gives every peer the weight 1/m_i of its own number of maps, as FedEvPrompt eq. 7 with M =
    m_i asks. A peer without maps of a class does not count for it. Peers are summed in the order of their means' bytes,
    so that the result is the same bit for bit whatever the peers are called: a coordinator numbers them anew for every
    receiver. A class that no peer holds has a mean of zeros.

    Args:
        maps_by_peer: {peer: {class index: (m, N) max-normalised maps}}; if any is float64, so is the result.
        classes: K; by default one more than the highest class index found.
        tokens: N; by default that of the maps, and 0 when there are none.

    Raises:
        ValueError: maps of different lengths, or a class index outside `classes`.
    """
    stacks = [
        (int(index), torch.as_tensor(stack).detach().cpu().numpy())
        for by_class in maps_by_peer.values()
        for index, stack in by_class.items()
    ]
    wide = any(maps.dtype == np.float64 for _, maps in stacks if len(maps))
    dtype = torch.float64 if wide else torch.float32
    means, counts = map_rules.peer_means(stacks, classes, tokens)
    return torch.from_numpy(means).to(dtype), torch.from_numpy(counts).to(dtype)


def rollout_distillation(
    maps: Float[Tensor, "B N"],
    target: Int[Tensor, " B"],
    peer_means: Float[Tensor, "K _"],
    peer_counts: Shaped[Tensor, " K"],
    gram: Float[Tensor, "N N"],
) -> Float[Tensor, ""]:
    """Compute the squared distance of each image's rollout map to the peers' maps of its class, at the upsampled size.

    The value is mean_b n·(a−ā)ᵀG(a−ā), n = `peer_counts[y_b]`, ā = `peer_means[y_b]`: FedEvPrompt eq. 7 without the
    spread of the buffer around ā, which has no gradient. A class that no peer holds contributes 0. The weight λ is the
    caller's.

    Args:
        maps: max-normalised rollout maps, (B, N).
        peer_means: see `distillation_targets`; rows above the highest class any peer holds may be missing.
        peer_counts: number of peers holding each class (or the weight in its place), (K,).
        gram: UᵀU of the upsampling U; see `edgefl_trainer.rollout.bilinear_gram`.
    """
    rows = peer_counts.shape[0]
    if rows == 0:
        return maps.sum() * 0
    held = target < rows
    index = torch.where(held, target, torch.zeros_like(target))
    counts = peer_counts.to(maps)[index] * held  # (B,)
    difference = maps - peer_means.to(maps)[index]  # (B, N)
    distance = ((difference @ gram.to(maps)) * difference).sum(dim=-1)  # (B,)
    return (counts * distance).mean()


def contrastive_loss(
    q: Float[Tensor, "B D"], k: Float[Tensor, "B D"], negatives: Float[Tensor, "Q D"], temperature: float
) -> Float[Tensor, ""]:
    """Contrast each query with its own key against a bank of negatives; in nats.

    −log( exp(q·k/τ) / (exp(q·k/τ) + Σ_n exp(q·n/τ)) ), mean over the batch. Source: FedCLF eq. 6. The vectors are used
    as given: the caller normalises them and stops the gradient of keys and negatives.
    """
    positive = (q * k).sum(dim=-1, keepdim=True)  # (B, 1)
    logits = torch.cat([positive, q @ negatives.T], dim=-1) / temperature  # (B, 1+Q)
    return (torch.logsumexp(logits, dim=-1) - logits[:, 0]).mean()


def paired_loss(first: Float[Tensor, "B D"], second: Float[Tensor, "B D"], temperature: float) -> Float[Tensor, ""]:
    """Compute SimCLR's loss in nats: each of the 2B views has to find the other of its image among the 2B − 1 others.

    The mean over the 2B views, as the paper's Algorithm 1 has it; its public code adds the two directions, which is
    twice this. The vectors are used as given: the caller normalises them.
    """
    both = torch.cat([first, second])  # (2B, D)
    similar = (both @ both.T / temperature).fill_diagonal_(-torch.inf)  # a view is not its own negative
    partner = torch.arange(len(both), device=both.device).roll(len(first))
    return torch.nn.functional.cross_entropy(similar, partner)
