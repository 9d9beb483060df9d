"""The frozen transformer against timm and a naive einsum reference (docs/methods.md, prefix prompts and rollout)."""

import numpy as np
import pytest
import torch
from timm.models.deit import VisionTransformerDistilled
from timm.models.vision_transformer import ResPostBlock

from edgefl_protocol.rules.defaults import usual_prompt_length
from edgefl_trainer.models.vit import FrozenViT, init_prompts
from edgefl_trainer.rollout import attention_rollout, max_normalise, rollout_from_factors

VARIANTS = [
    {},
    {"qkv_bias": False},
    {"qk_norm": True},
    {"init_values": 0.1},
    {"pre_norm": True},
    {"no_embed_class": True},
    {"scale_attn_norm": True, "scale_mlp_norm": True},
    {"global_pool": "avg"},
    {"final_norm": False},
]


@pytest.mark.parametrize("options", VARIANTS, ids=str)
@pytest.mark.parametrize("need_attention", [False, True])
def test_without_prompts_the_features_are_timms(make_timm, spec, batch, options, need_attention):
    """A frozen network without prefix computes timm's own forward pass, on both attention paths."""
    plain = make_timm(spec, **options)
    tokens = plain.forward_features(batch)
    output = FrozenViT(make_timm(spec, **options), spec)(batch, need_attention=need_attention)
    assert torch.allclose(output.cls, plain.fc_norm(tokens[:, 0]), atol=1e-5)
    assert torch.allclose(output.patch_mean, plain.fc_norm(tokens[:, 1:].mean(1)), atol=1e-5)
    pooled = output.readout("mean" if plain.global_pool == "avg" else "cls")
    assert torch.allclose(pooled, plain.forward_head(tokens, pre_logits=True), atol=1e-5)


def reference(plain, image, prompts, place="after"):
    """FedEvPrompt eq. 1 token by token: Attention(h_Q, [P_k; h_K], [P_v; h_V]) in einsum, sharing nothing with ours."""
    x = plain._pos_embed(plain.patch_embed(image))
    attentions = []
    for block, prefix in zip(plain.blocks, prompts, strict=True):
        y = block.norm1(x)
        b, t, d = y.shape
        h = block.attn.num_heads
        q, k, v = (part.view(b, t, h, d // h) for part in block.attn.qkv(y).split(d, dim=-1))
        if place == "before":  # prefixes are tokens of width d, and pass through W_k and W_v with their biases
            weight, bias = block.attn.qkv.weight, block.attn.qkv.bias
            rows = [prefix[j].flatten(1) @ weight[(j + 1) * d : (j + 2) * d].T for j in (0, 1)]
            rows = [row + bias[(j + 1) * d : (j + 2) * d] for j, row in enumerate(rows)]
            prefix = torch.stack([row.view(-1, h, d // h) for row in rows])
        k = torch.cat([prefix[0].expand(b, *prefix[0].shape), k], dim=1)
        v = torch.cat([prefix[1].expand(b, *prefix[1].shape), v], dim=1)
        scores = torch.einsum("bthe,bshe->bhts", q, k) / (d // h) ** 0.5
        weights = torch.exp(scores) / torch.exp(scores).sum(-1, keepdim=True)
        attentions.append(weights)
        x = x + block.attn.proj(torch.einsum("bhts,bshe->bthe", weights, v).reshape(b, t, d))
        x = x + block.mlp(block.norm2(x))
    return plain.norm(x), attentions


@pytest.mark.parametrize("place", ["after", "before"])
@pytest.mark.parametrize("need_attention", [False, True])
def test_prefix_attention_equals_the_einsum_reference(make_timm, spec, vit, batch, prompts, need_attention, place):
    """docs/methods.md, prefix prompts: prefix first, keys and values only, after the projection or before it."""
    tokens, _ = reference(make_timm(spec), batch, prompts, place)
    output = vit(batch, prompts, need_attention=need_attention, prefix_place=place)
    assert torch.allclose(output.cls, tokens[:, 0], atol=1e-5)
    assert torch.allclose(output.patch_mean, tokens[:, 1:].mean(1), atol=1e-5)
    assert len(output.factors) == (spec.depth if need_attention else 0)


@pytest.mark.parametrize("mode", ["renormalise", "sink"])
def test_factors_give_the_rollout_of_the_reference_attention(make_timm, spec, vit, batch, prompts, mode):
    """docs/methods.md, rollout: dropping the prefix and dividing by the rest equals a softmax over the other logits."""
    _, attentions = reference(make_timm(spec), batch, prompts)
    output = vit(batch, prompts, need_attention=True, prefix_mode=mode)
    assert torch.allclose(rollout_from_factors(output.factors), attention_rollout(attentions, 4, mode), rtol=1e-4)
    rows = torch.stack(output.factors).sum(-1)
    assert torch.allclose(rows, torch.ones_like(rows), atol=1e-5) == (mode == "renormalise")
    assert all(factor.dtype == torch.float32 for factor in output.factors)


def test_renormalised_factor_survives_a_prefix_that_takes_all_attention(vit, batch, prompts):
    """docs/methods.md, rollout: computed from the logits it needs no epsilon, even where the share underflows."""
    huge = prompts.clone()
    huge[:, 0] *= 1e5
    output = vit(batch, huge, need_attention=True)
    rows = torch.stack(output.factors).sum(-1)
    assert torch.allclose(rows, torch.ones_like(rows), atol=1e-5)


@pytest.mark.parametrize("mode", ["renormalise", "sink"])
def test_distillation_gradient_of_the_last_block(vit, batch, prompts, mode):
    """docs/methods.md, tests: the map's gradient for the last block's keys is zero when renormalised, not as sink.

    The last block's values never reach a map; the earlier blocks' keys and values always do.
    """
    prompts.requires_grad_(True)
    maps = max_normalise(rollout_from_factors(vit(batch, prompts, need_attention=True, prefix_mode=mode).factors))
    (gradient,) = torch.autograd.grad((maps - 0.5).square().sum(), prompts)
    last_keys, last_values = gradient[-1]
    assert bool(last_keys.any()) == (mode == "sink")
    assert not last_values.any()
    assert gradient[0, 0].any() and gradient[0, 1].any()


def test_loss_gradient_is_the_same_on_both_attention_paths(vit, batch, prompts):
    """The fused and the explicit path are one function: same gradient of the features for every prompt."""
    prompts.requires_grad_(True)
    gradients = [
        torch.autograd.grad(vit(batch, prompts, need_attention=need).cls.square().sum(), prompts)[0]
        for need in (False, True)
    ]
    assert torch.allclose(*gradients, rtol=1e-3, atol=1e-5)


def test_bf16_autocast_keeps_the_factors_in_float32(vit, batch, prompts):
    """docs/methods.md, rollout: under bf16 autocast the map is close and rows sum to 1 at float32 accuracy."""
    exact = vit(batch, prompts, need_attention=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rough = vit(batch, prompts, need_attention=True)
    rows = torch.stack(rough.factors).sum(-1)
    assert all(factor.dtype == torch.float32 for factor in rough.factors)
    assert torch.allclose(rows, torch.ones_like(rows), atol=1e-5)
    assert torch.allclose(rollout_from_factors(rough.factors), rollout_from_factors(exact.factors), rtol=0.2)


def test_backbone_stays_frozen_in_training_mode(make_timm, spec, batch, prompts):
    """No weight learns, and dropout inside the network never acts, whatever mode the module is put in."""
    vit = FrozenViT(make_timm(spec, proj_drop_rate=0.5, drop_path_rate=0.5, pos_drop_rate=0.5), spec).train()
    prompts.requires_grad_(True)
    first, second = vit(batch, prompts).cls, vit(batch, prompts).cls
    assert torch.equal(first, second)
    first.sum().backward()
    assert prompts.grad is not None and prompts.grad.any()
    assert all(not p.requires_grad and p.grad is None for p in vit.parameters())


def test_normalise_is_the_described_arithmetic(vit):
    """Pixels of 8 bits, channels last → (x/255 − mean)/std, channels first; numpy as oracle."""
    image = np.random.default_rng(0).integers(0, 256, (2, 32, 32, 3), np.uint8)
    expected = ((image / 255 - [0.5, 0.4, 0.3]) / [0.2, 0.25, 0.3]).transpose(0, 3, 1, 2)
    assert vit.normalise(torch.from_numpy(image)).numpy() == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(("tokens", "length"), [(196, 50), (144, 37), (49, 12), (256, 65), (1, 1)])
def test_prefix_length_scales_with_the_tokens(tokens, length):
    """docs/methods.md, prefix prompts: P = round(50·N/196): 50 at 14 × 14, 37 at 12 × 12, 12 at 7 × 7."""
    assert usual_prompt_length(tokens) == length


def test_prompts_of_vit_small_have_the_paper_count(make_spec):
    """docs/methods.md, prefix prompts: (12, 2, 50, 6, 64), of which 115,200 numbers in three b-blocks; U(−1, 1)."""
    spec = make_spec(image_px=224, patch=16, depth=12, heads=6, width=384)
    draw = torch.Generator().manual_seed(0)
    b = init_prompts(spec, 3, usual_prompt_length(spec.tokens), "uniform", draw)
    t = init_prompts(spec, 9, usual_prompt_length(spec.tokens), "uniform", draw)
    assert tuple(b.shape) == (3, 2, 50, 6, 64) and b.numel() == 115_200 and t.numel() == 345_600
    assert -1 <= t.min() < -0.99 and 0.99 < t.max() <= 1 and abs(t.mean()) < 0.01
    normal = init_prompts(spec, 9, 50, "normal", draw)
    assert float(normal[:, 0].std()) == pytest.approx(0.02, rel=0.02) and not normal[:, 1].any()


@pytest.mark.parametrize(
    ("options", "lacking"),
    [
        ({"class_token": False, "global_pool": "avg"}, "class token"),
        ({"reg_tokens": 4}, "register tokens"),
        ({"block_fn": ResPostBlock, "init_values": 0.1}, "pre-norm blocks"),
        ({"global_pool": "map"}, "attention pooling"),
        ({"dynamic_img_size": True}, "fixed image size"),
    ],
)
def test_networks_without_a_needed_part_are_refused_by_name(make_timm, spec, options, lacking):
    """Only plain transformers with a class token are supported; the error names what is missing."""
    with pytest.raises(ValueError, match=lacking):
        FrozenViT(make_timm(spec, **options), spec)


def test_other_architectures_are_refused(spec):
    """A distilled transformer and a network of another family are named as such."""
    distilled = VisionTransformerDistilled(img_size=32, patch_size=8, embed_dim=16, depth=3, num_heads=2, num_classes=0)
    with pytest.raises(ValueError, match="distillation token"):
        FrozenViT(distilled, spec)
    with pytest.raises(ValueError, match="VisionTransformer"):
        FrozenViT(torch.nn.Linear(2, 2), spec)


def test_wrong_description_prompts_or_image_size_are_refused(make_timm, make_spec, spec, vit, batch):
    """A wrong image size for the backbone, and shapes that do not fit, say what was found and what is taken."""
    with pytest.raises(ValueError, match=r"depth 3 instead of 4"):
        FrozenViT(make_timm(spec), make_spec(depth=4))
    with pytest.raises(ValueError, match=r"takes \(3, 2, 4, 2, 8\)"):
        vit(batch, torch.zeros((2, 2, 4, 2, 8)))
    with pytest.raises(ValueError, match=r"takes \(B, 3, 32, 32\)"):
        vit(torch.zeros((1, 3, 40, 40)))
