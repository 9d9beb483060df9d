"""Where our vision transformers say a patch lies: MAE's fixed table (facebookresearch/mae, util/pos_embed.py).

No file and no digest holds the table, so it is written here once more, as that page has it (docs/methods.md 3.1).
Positions of timm's networks are learned, and weights like all others.
"""

from math import cos, sin

import numpy as np
import pytest
import torch

from edgefl_trainer.errors import BackboneError
from edgefl_trainer.models.architectures import Architecture, sincos_positions
from edgefl_trainer.models.backbones import frozen_network, load_backbone, weights_of
from edgefl_trainer.models.mae import MaskedAutoencoder
from edgefl_trainer.models.shipped import shipped_backbones
from edgefl_trainer.models.spec import ViTSpec

SHAPES = [(192, 12), (192, 7), (16, 12), (16, 7)]  # width and patch at 84 px: 7 x 7 and 12 x 12 patches


def maes_table(width: int, side: int) -> np.ndarray:
    """`get_2d_sincos_pos_embed(width, side, cls_token=True)`, row by row.

    Patches row by row. "Here w goes first": the first half of the width is the column, the second half is the row.
    Each half is sin of all frequencies, then cos of them; frequency k of K is 10000^(-k/K), K a quarter of the width.
    """
    rates = [10000 ** (-k / (width // 4)) for k in range(width // 4)]
    rows = [[0.0] * width]  # of the class token
    for row in range(side):
        for column in range(side):
            rows.append([f(place * rate) for place in (column, row) for f in (sin, cos) for rate in rates])
    return np.array(rows)


def small(width: int, patch: int) -> Architecture:
    return Architecture(width=width, depth=1, heads=1, patch=patch, image_px=84)


def assert_same(found: torch.Tensor, width: int, side: int) -> None:
    assert found.shape == (1, 1 + side**2, width)
    np.testing.assert_allclose(found[0].numpy(), maes_table(width, side), atol=1e-6)


def test_positions_are_maes_table():
    """Eight numbers by hand: row 2, column 1 of 3 x 3 at width 8, frequencies 1 and 1/100."""
    table = sincos_positions(8, 3)[0].numpy()
    np.testing.assert_array_equal(table[0], 0)
    expected = [sin(1), sin(0.01), cos(1), cos(0.01), sin(2), sin(0.02), cos(2), cos(0.02)]
    np.testing.assert_allclose(table[1 + 2 * 3 + 1], expected, atol=1e-6)
    np.testing.assert_allclose(maes_table(8, 3)[8], expected, atol=1e-6)


@pytest.mark.parametrize(("width", "patch"), SHAPES)
def test_a_network_by_its_shape_has_the_table(width, patch):
    """Fresh, and with other weights given to it, as a site's own network is."""
    backbone = load_backbone(f"vit:{width}x1/{patch}")
    assert_same(backbone.vit.pos_embed, width, 84 // patch)
    own = frozen_network(backbone.spec, weights_of(backbone.network))
    assert_same(own.vit.pos_embed, width, 84 // patch)


def test_a_shipped_network_has_the_table():
    """The files hold no table: it is made as they are loaded."""
    specs = {}
    for name in shipped_backbones():
        backbone = load_backbone(name)
        if isinstance(spec := backbone.spec, ViTSpec):
            assert "pos_embed" not in weights_of(backbone.network)
            assert_same(backbone.vit.pos_embed, spec.width, spec.image_px // spec.patch)
            specs[name] = (spec.width, spec.image_px // spec.patch)
    assert specs["derm-vit-tiny-84"] == (192, 7)


def test_learned_positions_are_weights_like_all_others(hub):
    """A frozen network of timm's hub gives them, another takes them over, and none is filled without them."""
    backbone = load_backbone("timm:vit_tiny_patch16_224", image_px=36)
    weights = weights_of(backbone.network)
    assert weights.keys() == backbone.network.state_dict().keys()
    again = frozen_network(backbone.spec, weights)
    assert torch.equal(again.vit.pos_embed, backbone.vit.pos_embed) and again.spec.sha256 == backbone.spec.sha256
    del weights["pos_embed"]
    with pytest.raises(BackboneError, match=r"lacks some tensors or holds others \(pos_embed\)"):
        frozen_network(backbone.spec, weights)


@pytest.mark.parametrize(("width", "patch"), SHAPES)
def test_encoder_and_decoder_of_an_autoencoder_have_the_table_of_their_width(width, patch):
    model = MaskedAutoencoder(small(width, patch), decoder_width=32, decoder_depth=1)
    model.initialise(0)
    assert_same(model.backbone.pos_embed, width, 84 // patch)
    assert_same(model.decoder_positions, 32, 84 // patch)


def test_the_tables_are_what_enters_encoder_and_decoder_where_all_else_is_nothing():
    """models_mae.py adds them before masking and after the mask tokens; with weights of zero nothing else is there."""
    model = MaskedAutoencoder(small(16, 12), decoder_width=32, decoder_depth=1)
    entered: list[torch.Tensor] = []
    for blocks in (model.backbone.blocks, model.decoder["blocks"]):
        blocks[0].register_forward_pre_hook(lambda module, given: entered.append(given[0][0]))
    with torch.no_grad():
        for weight in model.parameters():
            if weight.requires_grad:
                weight.zero_()
        noise = torch.arange(49.0)[None].flip(1)  # the last patches stay visible, the last one first
        model(torch.rand(1, 3, 84, 84), noise, 0.75, True)
    encoder, decoder = entered
    visible = [0, *range(49, 49 - 12, -1)]  # int(49 / 4) of them, behind the class token
    np.testing.assert_allclose(encoder.numpy(), maes_table(16, 7)[visible], atol=1e-6)
    np.testing.assert_allclose(decoder.numpy(), maes_table(32, 7), atol=1e-6)
