"""Attention rollout against the full-matrix definition (docs/methods.md, rollout)."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from edgefl_trainer.rollout import attention_rollout, bilinear_gram, max_normalise, nearest_gram


def attention_of(seed: int, blocks: int, heads: int, tokens: int, prefix: int) -> list[torch.Tensor]:
    """Softmax attention of every block, (2, h, 1+N, P+1+N), float64."""
    generator = torch.Generator().manual_seed(seed)
    shape = (2, heads, 1 + tokens, prefix + 1 + tokens)
    return [(3 * torch.randn(shape, generator=generator, dtype=torch.float64)).softmax(-1) for _ in range(blocks)]


def full_matrix(attentions: list[torch.Tensor], prefix: int, renormalise: bool) -> np.ndarray:
    """Abnar and Zuidema: R = Ā_L … Ā_1 with whole matrices in numpy, the class-token row read at the end."""
    result = None
    for attention in attentions:
        image = attention.numpy()[..., prefix:]
        if renormalise:
            image = image / image.sum(-1, keepdims=True)
        mixed = (image.mean(1) + np.eye(image.shape[-1])) / 2
        result = mixed if result is None else mixed @ result
    return result[:, 0, 1:]


@settings(max_examples=25)
@given(
    st.integers(0, 99), st.integers(1, 5), st.integers(1, 3), st.sampled_from([4, 9]), st.integers(0, 4), st.booleans()
)
def test_class_token_row_equals_the_full_matrix_product(seed, blocks, heads, tokens, prefix, renormalise):
    """docs/methods.md, tests: the row form and the matrix form are the same map, with and without renormalising."""
    attentions = attention_of(seed, blocks, heads, tokens, prefix)
    mine = attention_rollout(attentions, prefix, "renormalise" if renormalise else "sink").numpy()
    assert mine == pytest.approx(full_matrix(attentions, prefix, renormalise), rel=1e-10, abs=1e-15)


def test_renormalised_rows_keep_the_mass_that_the_sink_loses():
    """docs/methods.md, tests: from renormalised rows the class token's whole row sums to 1; the sink's is smaller."""
    attentions = attention_of(1, 3, 2, 9, 4)
    product = np.eye(10)
    for attention in attentions:
        image = attention.numpy()[..., 4:]
        product = (((image / image.sum(-1, keepdims=True)).mean(1) + np.eye(10)) / 2) @ product
    kept, lost = attention_rollout(attentions, 4), attention_rollout(attentions, 4, "sink")
    assert kept.sum(-1).numpy() + product[:, 0, 0] == pytest.approx([1, 1])
    assert bool((lost.sum(-1) < kept.sum(-1)).all())


def test_identity_attention_gives_an_empty_map():
    """When every token attends to itself only, nothing reaches the class token, and max-normalising keeps zeros."""
    attention = torch.eye(10).expand(1, 2, 10, 10)
    maps = attention_rollout([attention] * 3, 0)
    assert not maps.any() and not max_normalise(maps).any()


def test_max_normalised_maps_peak_at_one():
    """docs/methods.md, rollout: the map is divided by its largest value."""
    maps = max_normalise(torch.rand((5, 16)) * 1e-6)
    assert torch.allclose(maps.amax(-1), torch.ones(5))


def test_wrong_prefix_length_is_refused():
    """The columns have to be P + 1 + N."""
    with pytest.raises(ValueError, match="prefix of 3"):
        attention_rollout([torch.rand((1, 1, 5, 7))], 3)
    with pytest.raises(ValueError, match="at least one block"):
        attention_rollout([], 0)


@pytest.mark.parametrize(("grid", "out_px"), [(2, 224), (7, 84), (12, 224), (14, 224), (16, 224)])
def test_grams_equal_those_of_torch_interpolate(grid, out_px):
    """docs/methods.md, distillation: U is torch's own interpolate with align_corners off, applied to unit maps."""
    units = torch.eye(grid * grid, dtype=torch.float64).view(-1, 1, grid, grid)
    for gram, mode in ((bilinear_gram, "bilinear"), (nearest_gram, "nearest")):
        columns = torch.nn.functional.interpolate(units, size=(out_px, out_px), mode=mode).flatten(1)  # (N, pixels)
        assert torch.allclose(gram(grid, out_px), columns @ columns.T, rtol=1e-9, atol=1e-9)
