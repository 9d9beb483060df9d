"""How a masked autoencoder begins. Source: arXiv 2111.06377 and its public code, models_mae.py `initialize_weights`."""

import numpy as np
import pytest
import torch
from torch import nn

from edgefl_trainer.models.architectures import Architecture
from edgefl_trainer.models.backbones import load_backbone
from edgefl_trainer.models.mae import MaskedAutoencoder

WIDE = Architecture(width=768, depth=1, heads=12, patch=12, image_px=24)


@pytest.fixture(scope="module")
def begun() -> MaskedAutoencoder:
    model = MaskedAutoencoder(WIDE, decoder_width=512, decoder_depth=2)
    model.initialise(3)
    return model


def assert_begins_small(token: torch.Tensor) -> None:
    """`normal_(std=.02)`: over D numbers the deviation is right to 1/sqrt(2 D), here within five of that."""
    values = token.detach().numpy().ravel()
    np.testing.assert_allclose(values.std(), 0.02, rtol=5 / np.sqrt(2 * values.size))
    assert abs(values.mean()) < 5 * 0.02 / np.sqrt(values.size)
    assert np.abs(values).max() > 0.04  # no uniform draw of that deviation goes so far


def test_class_and_mask_token_begin_as_maes_do(begun):
    assert begun.backbone.cls_token.shape == (1, 1, 768) and begun.mask_token.shape == (1, 1, 512)
    assert_begins_small(begun.backbone.cls_token)
    assert_begins_small(begun.mask_token)
    assert not begun.backbone.cls_token[0, 0, :512].equal(begun.mask_token[0, 0])


def test_the_class_token_of_a_fresh_backbone_begins_as_maes_does():
    assert_begins_small(load_backbone("vit:768x1/12", image_px=24, seed=3).vit.cls_token)


def test_every_linear_of_encoder_and_decoder_begins_as_maes_do(begun):
    """`xavier_uniform_`: U(-a, a), a² = 6 / (in + out), the patch convolution seen as one linear; biases 0, norms 1."""
    linears = {name: layer for name, layer in begun.named_modules() if isinstance(layer, nn.Linear | nn.Conv2d)}
    assert len(linears) == 1 + 4 + 1 + 2 * 4 + 1  # patches, a block; projection, two blocks, prediction
    for name, layer in linears.items():
        weight = layer.weight.detach().flatten(1)
        bound = np.sqrt(6 / sum(weight.shape))
        assert 0.99 * bound < weight.abs().max().item() <= bound * 1.000001, name
        np.testing.assert_allclose(weight.std().item(), bound / np.sqrt(3), rtol=0.01, err_msg=name)
        assert not layer.bias.any(), name
    norms = [layer for layer in begun.modules() if isinstance(layer, nn.LayerNorm)]
    assert len(norms) == 2 + 1 + 2 * 2 + 1
    assert all((layer.weight == 1).all() and not layer.bias.any() for layer in norms)


def test_the_decoder_has_maes_shape():
    """`mae_vit_base_patch16_dec512d8b`: 512 wide, 8 blocks of 16 heads, four times as wide inside, norms of 1e-6."""
    model = MaskedAutoencoder(WIDE, decoder_width=512, decoder_depth=8)
    blocks = model.decoder["blocks"]
    assert len(blocks) == 8
    for block in blocks:
        assert (block.attn.num_heads, block.attn.qkv.out_features, block.mlp.fc1.out_features) == (16, 3 * 512, 4 * 512)
        assert block.attn.qkv.bias is not None and block.norm1.eps == block.norm2.eps == 1e-6
    assert model.decoder["norm"].eps == model.backbone.norm.eps == 1e-6
    assert model.decoder["prediction"].out_features == 3 * 12 * 12
