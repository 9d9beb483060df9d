"""Losses against the numbers of the papers and independent oracles (docs/methods.md, prior and distillation)."""

from itertools import permutations

import jaxtyping
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import digamma, gammaln

from edgefl_trainer.losses import (
    class_prior,
    contrastive_loss,
    dirichlet_kl,
    distillation_targets,
    evidential_loss,
    rollout_distillation,
)
from edgefl_trainer.rollout import bilinear_gram, nearest_gram

COUNTS = st.lists(st.integers(0, 10_000), min_size=2, max_size=8).filter(any)


def numpy_kl(alpha: np.ndarray, prior: np.ndarray) -> float:
    """KL(Dir(alpha)‖Dir(prior)) with scipy, term by term as docs/methods.md writes it."""
    total = gammaln(alpha.sum()) - gammaln(prior.sum()) + (gammaln(prior) - gammaln(alpha)).sum()
    return float(total + ((alpha - prior) * (digamma(alpha) - digamma(alpha.sum()))).sum())


@pytest.mark.parametrize(
    ("counts", "expected"),
    [((2977, 186), (0.118, 1.882)), ((1470, 1221), (0.907, 1.093)), ((5, 0), (0.01, 1.99))],
)
def test_prior_has_the_numbers_of_the_paper_counts(counts, expected):
    """docs/methods.md, prior: the two centres worked out there; one class only is floored, then rescaled."""
    assert class_prior(counts).numpy() == pytest.approx(expected, abs=5e-4)


def test_a_tensor_of_another_shape_is_refused_while_tests_run():
    """pyproject.toml switches the check on, tests/conftest.py leaves it on here."""
    with pytest.raises(jaxtyping.TypeCheckError, match="evidential_loss"):
        evidential_loss(torch.ones(4, 3), torch.zeros(5, dtype=torch.int64), torch.ones(3), 0.5)


def test_prior_of_msk_eight_classes():
    """docs/methods.md, prior: MSK4 counts give 1.143 to each absent class, 0.843 to MEL and 0.564 to NV."""
    prior = class_prior(torch.tensor([215, 415, 0, 0, 189, 0, 0, 0])).numpy()
    assert prior[[0, 1, 2, 3, 5, 6, 7]] == pytest.approx([0.843, 0.564] + [1.143] * 5, abs=5e-4)


@given(COUNTS)
def test_prior_sums_to_the_number_of_classes(counts):
    """FedEvPrompt 3.1: Σ W_k = K, so vacuity K/S is 1 at zero evidence; every entry stays positive."""
    prior = class_prior(counts)
    assert float(prior.sum()) == pytest.approx(len(counts), rel=1e-12)
    assert float(prior.min()) > 0.009


@pytest.mark.parametrize("counts", [[0, 0], [3], [], [1, -1], [1.0, float("nan")], np.ones((1, 2))])
def test_prior_refuses_counts_without_meaning(counts):
    """Contract: all-zero counts, a single class and impossible counts are errors."""
    with pytest.raises(ValueError, match=r"class counts"):
        class_prior(counts)


@pytest.mark.parametrize(("counts", "expected"), [((2977, 186), 0.083), ((1470, 1221), 0.836)])
def test_misleading_evidence_costs_what_the_methods_page_says(counts, expected):
    """docs/methods.md, prior: five units of false evidence for class 2; KL = loss at weight 1 minus loss at 0."""
    prior = class_prior(counts)
    evidence, target = torch.tensor([[0.0, 5.0]], dtype=torch.float64), torch.tensor([0])
    penalty = evidential_loss(evidence, target, prior, 1.0) - evidential_loss(evidence, target, prior, 0.0)
    assert float(penalty) == pytest.approx(expected, abs=5e-4)


@settings(max_examples=30)
@given(COUNTS, st.integers(0, 2**32 - 1))
def test_kl_equals_scipy(counts, seed):
    """KL(Dir‖Dir) against gammaln and digamma of scipy."""
    prior = class_prior(counts)
    alpha = np.random.default_rng(seed).gamma(1, 20, len(counts)) + prior.numpy()
    mine = float(dirichlet_kl(torch.tensor(alpha)[None], prior)[0])
    assert mine == pytest.approx(numpy_kl(alpha, prior.numpy()), rel=1e-9, abs=1e-9)


def test_kl_equals_monte_carlo():
    """KL = E[log density ratio] under the first Dirichlet, 400,000 draws, five standard errors."""
    generator = np.random.default_rng(3)
    alpha, prior = np.array([4.0, 0.6, 2.0]), np.array([1.2, 0.5, 1.3])
    draws = generator.dirichlet(alpha, 400_000)
    constant = gammaln(alpha.sum()) - gammaln(alpha).sum() - gammaln(prior.sum()) + gammaln(prior).sum()
    ratio = constant + (np.log(np.maximum(draws, 1e-300)) @ (alpha - prior))
    mine = float(dirichlet_kl(torch.tensor(alpha)[None], torch.tensor(prior))[0])
    assert mine == pytest.approx(ratio.mean(), abs=5 * ratio.std() / np.sqrt(len(ratio)))


def test_squared_error_equals_monte_carlo():
    """FedEvPrompt 3.1: L_mse is E‖y − p‖² under Dir(e + W); 400,000 draws, five standard errors."""
    generator = np.random.default_rng(4)
    prior, evidence = class_prior([30, 10, 2]), np.array([3.0, 0.5, 1.0])
    draws = generator.dirichlet(evidence + prior.numpy(), 400_000)
    errors = ((draws - np.array([0, 1, 0])) ** 2).sum(axis=1)
    mine = float(evidential_loss(torch.tensor(evidence)[None], torch.tensor([1]), prior, 0.0))
    assert mine == pytest.approx(errors.mean(), abs=5 * errors.std() / np.sqrt(len(errors)))


@given(COUNTS, st.floats(0, 1e4))
def test_kl_vanishes_without_misleading_evidence(counts, true_evidence):
    """docs/methods.md, prior: KL is zero when all wrong-class evidence is zero."""
    evidence = torch.zeros((1, len(counts)), dtype=torch.float64)
    evidence[0, 1] = true_evidence
    prior, target = class_prior(counts), torch.tensor([1])
    penalty = evidential_loss(evidence, target, prior, 1.0) - evidential_loss(evidence, target, prior, 0.0)
    assert float(penalty) == pytest.approx(0, abs=1e-12)


def test_uniform_prior_gives_the_classic_loss():
    """Sensoy et al. 2018 with W = 1: α̃ = (α − 1)(1 − y) + 1, mean over the batch, here in plain numpy."""
    generator = np.random.default_rng(5)
    evidence, target = generator.gamma(1, 5, (6, 4)), generator.integers(0, 4, 6)
    truth, alpha = np.eye(4)[target], evidence + 1
    strength = alpha.sum(1, keepdims=True)
    squared = ((truth - alpha / strength) ** 2 + alpha * (strength - alpha) / (strength**2 * (strength + 1))).sum(1)
    reduced = (alpha - 1) * (1 - truth) + 1
    expected = np.mean([s + 0.3 * numpy_kl(a, np.ones(4)) for s, a in zip(squared, reduced, strict=True)])
    mine = evidential_loss(torch.tensor(evidence), torch.tensor(target), torch.ones(4, dtype=torch.float64), 0.3)
    assert mine.dtype == torch.float64
    assert float(mine) == pytest.approx(expected, rel=1e-10)


@pytest.mark.parametrize("scale", [0.0, 1.0, 1e5])
def test_loss_of_a_one_class_site_is_finite_with_finite_gradient(scale):
    """docs/methods.md, tests: a site with one class keeps a finite loss; float32 in, float32 out."""
    evidence = torch.full((3, 2), scale, requires_grad=True)
    loss = evidential_loss(evidence, torch.tensor([0, 0, 0]), class_prior([9, 0]), 1.0)
    loss.backward()
    assert loss.dtype == torch.float32
    assert torch.isfinite(loss) and torch.isfinite(evidence.grad).all()


def test_loss_gradient_equals_finite_differences():
    """The analytic gradient is that of the stated function (torch's own double-precision check)."""
    evidence = torch.tensor([[0.5, 2.0, 3.0], [4.0, 0.1, 0.7]], dtype=torch.float64, requires_grad=True)
    prior = class_prior([4, 3, 9])
    assert torch.autograd.gradcheck(lambda e: evidential_loss(e, torch.tensor([0, 2]), prior, 0.7), (evidence,))


def buffer_of(generator: torch.Generator, grid: int) -> dict[str, dict[int, torch.Tensor]]:
    """Peers with unequal numbers of maps and one that lacks a class."""
    sizes = {"a": {0: 5, 1: 2}, "b": {0: 1}, "c": {0: 3, 1: 5, 2: 0}}
    return {
        peer: {k: torch.rand((m, grid * grid), generator=generator, dtype=torch.float64) for k, m in per_class.items()}
        for peer, per_class in sizes.items()
    }


def equation_7(maps, target, buffer, upsample):
    """FedEvPrompt eq. 7 written out: Σ_i (1/m_i) Σ_m ‖a − a_im‖² at the upsampled size, mean over the batch."""
    total = 0.0
    for row, k in zip(maps, target.tolist(), strict=True):
        for per_class in buffer.values():
            peer = per_class.get(k)
            if peer is not None and len(peer):
                total = total + sum(((upsample(row) - upsample(m)) ** 2).sum() for m in peer) / len(peer)
    return total / len(maps)


def bilinear_224(row):
    grid = int(row.shape[0] ** 0.5)
    return torch.nn.functional.interpolate(row.view(1, 1, grid, grid), size=(224, 224), mode="bilinear")


@pytest.mark.parametrize("grid", [7, 12, 14])
def test_distillation_has_the_gradient_of_equation_7(grid):
    """docs/methods.md, distillation: unequal m_i, a missing class: the gradient of the explicit 224 × 224 sum."""
    generator = torch.Generator().manual_seed(grid)
    buffer = buffer_of(generator, grid)
    maps = torch.rand((4, grid * grid), generator=generator, dtype=torch.float64, requires_grad=True)
    target = torch.tensor([0, 1, 2, 0])
    (explicit,) = torch.autograd.grad(equation_7(maps, target, buffer, bilinear_224), maps)
    means, counts = distillation_targets(buffer, classes=3)
    (folded,) = torch.autograd.grad(rollout_distillation(maps, target, means, counts, bilinear_gram(grid)), maps)
    assert counts.tolist() == [3, 2, 0]
    assert torch.allclose(folded, explicit, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("order", list(permutations(range(4))))
def test_what_the_peers_are_called_changes_no_bit(order):
    """docs/methods.md, distillation: peers are numbered anew for every receiver; the mean keeps its bits.

    Means of 1/6, 5/6, 2^-24 and 1/2: their exact mean lies half-way between two float32 numbers, so that plain sums in
    two orders end on different ones.
    """
    columns = [[1.0] + [0.0] * 5, [1.0] * 5 + [0.0], [2.0**-24], [0.5]]
    stacks = [torch.tensor(column, dtype=torch.float16)[:, None] for column in columns]
    plain, _ = distillation_targets({peer: {0: stacks[peer]} for peer in range(4)})
    found, _ = distillation_targets({number: {0: stacks[peer]} for number, peer in enumerate(order)})
    assert torch.equal(found, plain)


@pytest.mark.slow
def test_ten_thousand_maps_have_the_gradient_of_the_explicit_sum():
    """docs/methods.md, distillation: 10,000 float16 maps of 1,300 peers with 1 to 15 maps each, summed one by one."""
    generator, grid, maps_left, buffer = torch.Generator().manual_seed(8), 7, 10_000, {}
    while maps_left:
        size = min(maps_left, 1 + len(buffer) % 15)
        buffer[len(buffer)] = {0: torch.rand((size, grid * grid), generator=generator).to(torch.float16)}
        maps_left -= size
    row = torch.rand((1, grid * grid), generator=generator, dtype=torch.float64, requires_grad=True)
    means, counts = distillation_targets(buffer, classes=1)
    loss = rollout_distillation(row, torch.tensor([0]), means.double(), counts.double(), bilinear_gram(grid))
    (folded,) = torch.autograd.grad(loss, row)
    upsampled, explicit = bilinear_224(row.detach()[0]).double(), torch.zeros((1, 1, 224, 224), dtype=torch.float64)
    for stack in buffer.values():  # the derivative of ‖U(a − a_m)‖² is 2 Uᵀ(U a − U a_m)
        for one in stack[0]:
            explicit += 2 * (upsampled - bilinear_224(one.double())) / len(stack[0])
    (pulled,) = torch.autograd.grad(bilinear_224(row[0]), row, explicit)
    assert torch.allclose(folded, pulled, rtol=1e-6, atol=1e-6 * float(pulled.abs().max()))


@pytest.mark.parametrize(("kind", "mode"), [(bilinear_gram, "bilinear"), (nearest_gram, "nearest")])
@pytest.mark.parametrize("grid", [7, 12, 14])
def test_one_map_per_peer_gives_the_explicit_distance(kind, mode, grid):
    """docs/methods.md, tests: with one map no constant is dropped: the value is the explicit distance."""
    generator = torch.Generator().manual_seed(1)
    a, b = torch.rand((2, grid * grid), generator=generator, dtype=torch.float64)
    up = torch.nn.functional.interpolate((a - b).view(1, 1, grid, grid), size=(224, 224), mode=mode)
    means, counts = distillation_targets({0: {0: b[None]}})
    mine = rollout_distillation(a[None], torch.tensor([0]), means, counts, kind(grid))
    assert float(mine) == pytest.approx(float(up.square().sum()), rel=1e-6)


def test_nearest_metric_is_256_times_the_grid_distance():
    """docs/methods.md, tests: nearest upsampling 14 → 224 repeats each patch 256 times."""
    assert torch.equal(nearest_gram(14), 256 * torch.eye(196, dtype=torch.float64))


def test_empty_buffer_gives_zero_and_no_gradient():
    """docs/methods.md, distillation: L_KD = 0 in round 0, and for a class no peer holds."""
    maps = torch.rand((2, 49), requires_grad=True)
    gram, target = bilinear_gram(7), torch.tensor([0, 1])
    for buffer in ({}, {"a": {}}, {"a": {0: np.zeros((0, 49), np.float16)}}):
        loss = rollout_distillation(maps, target, *distillation_targets(buffer), gram)
        (gradient,) = torch.autograd.grad(loss, maps)
        assert loss.item() == 0 and not gradient.any()
    only_zero = distillation_targets({"a": {0: np.ones((1, 49), np.float16)}})
    (gradient,) = torch.autograd.grad(rollout_distillation(maps, target, *only_zero, gram), maps)
    assert gradient[0].any() and not gradient[1].any()


def test_buffer_of_mixed_grids_is_refused():
    """All peers share one token grid."""
    with pytest.raises(ValueError, match=r"\[49, 144\] tokens"):
        distillation_targets({"a": {0: np.ones((1, 49))}, "b": {0: np.ones((1, 144))}})
    with pytest.raises(ValueError, match="allowed: 0 to 0"):
        distillation_targets({"a": {1: np.ones((1, 49))}}, classes=1)


def test_contrastive_loss_is_equation_6():
    """FedCLF eq. 6 written out in numpy."""
    generator = np.random.default_rng(6)
    q, k, bank = (generator.normal(size=(n, 8)) for n in (5, 5, 11))
    q, k, bank = (v / np.linalg.norm(v, axis=1, keepdims=True) for v in (q, k, bank))
    terms = [
        -np.log(np.exp(a @ b / 0.2) / (np.exp(a @ b / 0.2) + sum(np.exp(a @ n / 0.2) for n in bank)))
        for a, b in zip(q, k, strict=True)
    ]
    mine = contrastive_loss(torch.tensor(q), torch.tensor(k), torch.tensor(bank), 0.2)
    assert float(mine) == pytest.approx(np.mean(terms), rel=1e-12)
