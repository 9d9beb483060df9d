"""Prompt tokens in the sequence against a loop over timm's own blocks (docs/methods.md 5.3, prompt tokens)."""

import pytest
import torch

from edgefl_trainer.models.inserts import Tokens, insert_from_json, insert_to_json
from edgefl_trainer.rollout import rollout_from_factors


@pytest.fixture
def draw() -> torch.Generator:
    return torch.Generator().manual_seed(5)


def inserter(blocks, prompts):
    return Tokens(blocks).bind({"prompts.s": prompts}, lambda: torch.zeros(0))


def embedded(plain, image):
    return plain.norm_pre(plain._pos_embed(plain.patch_embed(image)))


def test_shallow_tokens_stay_to_the_end(make_timm, spec, vit, batch, draw):
    """VPT eq. 4 to 6: [cls, P, E] enters block 0, and what a block makes of P goes on to the next."""
    prompts = torch.randn((1, 2, spec.width), generator=draw)
    plain = make_timm(spec)
    x = embedded(plain, batch)
    x = torch.cat([x[:, :1], prompts[0].expand(2, -1, -1), x[:, 1:]], dim=1)
    for block in plain.blocks:
        x = block(x)
    x = plain.norm(x)
    for need_attention in (False, True):
        output = vit(batch, insert=inserter((0,), prompts), need_attention=need_attention)
        assert torch.allclose(output.cls, x[:, 0], atol=1e-5)
        assert torch.allclose(output.inserted, x[:, 1:3], atol=1e-5)
        assert torch.allclose(output.patch_mean, x[:, 3:].mean(1), atol=1e-5)


@pytest.mark.parametrize("deep", [2, 3])
def test_deep_tokens_take_the_place_of_those_before(make_timm, spec, vit, batch, draw, deep):
    """VPT eq. 7 and 8: a block's fresh tokens replace what the block before made of its own; the last ones stay."""
    prompts = torch.randn((deep, 2, spec.width), generator=draw)
    plain = make_timm(spec)
    x = embedded(plain, batch)
    cls, tokens, patches = x[:, :1], x[:, :0], x[:, 1:]
    for index, block in enumerate(plain.blocks):
        tokens = prompts[index].expand(2, -1, -1) if index < deep else tokens
        x = block(torch.cat([cls, tokens, patches], dim=1))
        cls, tokens, patches = x[:, :1], x[:, 1:3], x[:, 3:]
    output = vit(batch, insert=inserter(tuple(range(deep)), prompts))
    assert torch.allclose(output.cls, plain.norm(cls)[:, 0], atol=1e-5)
    assert torch.allclose(output.patch_mean, plain.norm(patches).mean(1), atol=1e-5)


def test_tokens_that_stay_are_not_tokens_that_are_replaced(spec, vit, batch, draw):
    """The two kinds differ even with equal values: replacing forgets what the block before wrote."""
    one = torch.randn((1, 2, spec.width), generator=draw)
    shallow = vit(batch, insert=inserter((0,), one)).cls
    deep = vit(batch, insert=inserter((0, 1, 2), one.expand(3, -1, -1))).cls
    assert not torch.allclose(shallow, deep, atol=1e-3)


@pytest.mark.parametrize("mode", ["renormalise", "sink"])
def test_the_map_leaves_the_tokens_out(make_timm, spec, vit, batch, draw, mode):
    """docs/methods.md, rollout: drop rows and columns of the prompts, divide rows by the rest, (A + I)/2, multiply."""
    prompts = torch.randn((2, 2, spec.width), generator=draw)
    plain = make_timm(spec)
    x = embedded(plain, batch)
    image = [0, *range(3, 3 + spec.tokens)]  # class token and patches
    product = torch.eye(1 + spec.tokens)
    for index, block in enumerate(plain.blocks):
        if index < 2:
            x = torch.cat([x[:, :1], prompts[index].expand(2, -1, -1), x[:, (1 if index == 0 else 3) :]], dim=1)
        q, k, _ = block.attn.qkv(block.norm1(x)).reshape(*x.shape[:2], 3, spec.heads, spec.head_width).unbind(2)
        logits = torch.einsum("bthe,bshe->bhts", q, k) / spec.head_width**0.5
        attention = logits.softmax(-1)[:, :, image][..., image]
        if mode == "renormalise":
            attention = attention / attention.sum(-1, keepdim=True)
        product = (attention.mean(1) + torch.eye(1 + spec.tokens)) / 2 @ product
        x = block(x)
    output = vit(batch, insert=inserter((0, 1), prompts), need_attention=True, prefix_mode=mode)
    found = rollout_from_factors(output.factors)
    found, expected = (m / m.amax(-1, keepdim=True) for m in (found.flatten(1), product[:, 0, 1:]))
    assert torch.allclose(found, expected, atol=1e-5)


def test_tokens_learn_through_every_block_they_enter(spec, vit, batch, draw):
    prompts = torch.randn((3, 2, spec.width), generator=draw).requires_grad_(True)
    vit(batch, insert=inserter((0, 1, 2), prompts)).cls.square().sum().backward()
    assert all(bool(row.any()) for row in prompts.grad)


def test_tokens_survive_their_file():
    tokens = Tokens((0, 2, 3))
    assert insert_from_json(insert_to_json(tokens)) == tokens
    assert tokens.last_block == 3


@pytest.mark.parametrize("blocks", [(), (1, 0), (0, 0), (-1,)])
def test_blocks_that_do_not_rise_are_refused(blocks):
    """Out of order, a block would cut away patches in place of the tokens that are not there yet."""
    with pytest.raises(ValueError, match="blocks"):
        Tokens(blocks)
    with pytest.raises(ValueError, match="blocks"):
        insert_from_json({"kind": "tokens", "blocks": list(blocks)})


def test_a_file_that_names_half_a_block_is_refused():
    """What a file holds is checked before it becomes a block, whether types are checked at run time or not."""
    with pytest.raises(ValueError, match="blocks"):
        insert_from_json({"kind": "tokens", "blocks": [0, 1.5]})
