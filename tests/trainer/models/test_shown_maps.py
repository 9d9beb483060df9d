"""Maps for a person (docs/methods.md 1.8), each against its definition; the map that travels stays what it was."""

import numpy as np
import pytest
import torch
from torch import nn

from edgefl_trainer.models.scoring import ScoreModule, ScoreOptions
from edgefl_trainer.models.shown_maps import attention_map, graph_maps, patch_features, share_map
from edgefl_trainer.models.vit import FrozenViT
from edgefl_trainer.rollout import rollout_from_factors

CLASSES, WIDTH = 3, 16


def options_and_tensors(vit, **chosen):
    options = ScoreOptions(**{"prompts": (), "head_norm": "standardise", **chosen})
    draw = torch.Generator().manual_seed(5)
    values = {
        "head.weight": torch.randn((CLASSES, WIDTH), generator=draw),
        "head.bias": torch.randn(CLASSES, generator=draw),
        "features.mean": torch.randn(WIDTH, generator=draw),
        "features.std": torch.rand(WIDTH, generator=draw) + 0.5,
        "prior": torch.ones(CLASSES),
        "temperature": torch.tensor(1.7),
    }
    return options, {name: values[name] for name in options.tensors}


def pictures(count=3):
    return torch.randint(0, 256, (count, 32, 32, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(6))


@pytest.fixture(params=[False, True], ids=["norm of tokens", "norm behind the mean"])
def network(request, spec, make_timm):
    """Networks of both kinds: timm gives those for average pooling a final norm behind it."""
    made = make_timm(spec, global_pool="avg") if request.param else make_timm(spec)
    assert isinstance(made.fc_norm, nn.LayerNorm) is request.param
    return FrozenViT(made, spec)


@pytest.mark.parametrize("head_norm", ["standardise", "none"])
def test_shares_sum_to_the_logit_less_its_bias_exactly(network, head_norm):
    """The head is linear behind the mean: nothing is left over, whichever norm the network has."""
    options, tensors = options_and_tensors(network, readout="mean", head_norm=head_norm)
    module = ScoreModule(network, options)
    output = module.output(pictures(), tensors, need_attention=False)
    features = module.standardised(patch_features(output, network.vit.fc_norm), tensors)
    torch.testing.assert_close(features.mean(dim=1), module.features(output, tensors), rtol=1e-4, atol=1e-5)
    for label in range(CLASSES):
        shares = share_map(features, tensors["head.weight"][label].expand(3, -1))
        logits = module.logits(module.features(output, tensors), tensors)[:, label] - tensors["head.bias"][label]
        torch.testing.assert_close(shares.sum(dim=1), logits, rtol=1e-4, atol=1e-4)


def test_the_share_of_the_patch_that_decides_is_the_largest(vit):
    """A head that reads the brightness of patches, written into a network whose blocks do nothing."""
    network = vit.vit
    with torch.no_grad():
        for block in network.blocks:
            block.attn.proj.weight.zero_(), block.attn.proj.bias.zero_()
            block.mlp.fc2.weight.zero_(), block.mlp.fc2.bias.zero_()
        network.pos_embed.zero_(), network.patch_embed.proj.bias.zero_()
        network.patch_embed.proj.weight.zero_()
        network.patch_embed.proj.weight[0] = 1.0 / 64
        network.norm = nn.Identity()
    options, tensors = options_and_tensors(vit, readout="mean", head_norm="none", output="softmax")
    tensors |= {"head.weight": torch.zeros((CLASSES, WIDTH)), "head.bias": torch.zeros(CLASSES)}
    tensors["head.weight"][1, 0] = 1.0
    dark = torch.full((16, 32, 32, 3), 100, dtype=torch.uint8)
    for patch in range(16):  # one bright patch a picture
        row, column = divmod(patch, 4)
        dark[patch, 8 * row : 8 * row + 8, 8 * column : 8 * column + 8] = 250
    shown = ScoreModule(vit, options, "share")(dark, tensors).shown
    assert shown.argmax(dim=1).tolist() == list(range(16))


@pytest.mark.parametrize("readout", ["cls", "mean"])
@pytest.mark.parametrize("prefix_mode", ["renormalise", "sink"])
def test_attention_values_and_rollout_read_the_rows_of_the_head(vit, prompts, readout, prefix_mode):
    """Oracle: the definition over recorded heads; rollout as a product of whole matrices."""
    options, tensors = options_and_tensors(vit, readout=readout, prefix_mode=prefix_mode)
    tensors["p"] = prompts
    options = ScoreOptions(**{**vars(options), "prompts": ("p",)})
    module = ScoreModule(vit, options, "values")
    output = module.output(pictures(), tensors, need_attention=True)
    rows = np.eye(17)[0] if readout == "cls" else np.r_[0, np.full(16, 1 / 16)]
    factors = [factor.numpy().astype(np.float64) for factor in output.factors]
    whole = np.stack([np.eye(17)] * 3)
    for factor in factors:
        whole = (factor + np.eye(17)) / 2 @ whole
    of_patches = readout == "mean"
    found = rollout_from_factors(output.factors, of_patches=of_patches)
    np.testing.assert_allclose(found, (rows @ whole)[:, 1:], rtol=1e-4)
    np.testing.assert_allclose(attention_map("rollout", output, readout), found, rtol=1e-6)
    np.testing.assert_allclose(attention_map("attention", output, readout), (rows @ factors[-1])[:, 1:], rtol=1e-4)
    heads, values = last_block(vit, pictures(), prompts, prefix_mode)
    weighted = (heads * np.linalg.norm(values, axis=-1)[:, :, None, :]).mean(axis=1)
    np.testing.assert_allclose(heads.mean(axis=1), factors[-1], rtol=1e-3, atol=1e-6)
    np.testing.assert_allclose(attention_map("values", output, readout), (rows @ weighted)[:, 1:], rtol=1e-3)


def last_block(vit, images, prompts, prefix_mode):
    """Attention of each head and the values of the last block, (B, h, 17, 17) and (B, h, 17, dh), by numpy."""
    caught = []
    block = vit.vit.blocks[-1]
    hook = block.norm1.register_forward_hook(lambda _m, _i, out: caught.append(out))
    vit(vit.normalise(images), prompts)
    hook.remove()
    tokens = caught[0]
    parts = block.attn.qkv(tokens).detach().numpy().reshape(len(images), 17, 3, 2, 8).transpose(2, 0, 3, 1, 4)
    query, key, value = parts.astype(np.float64)
    before = prompts[-1, 0].numpy().transpose(1, 0, 2)  # (h, P, dh)
    key = np.concatenate([np.broadcast_to(before, (len(images), *before.shape)), key], axis=2)
    weights = np.exp(query @ key.transpose(0, 1, 3, 2) / 8**0.5)
    weights /= weights.sum(axis=-1, keepdims=True)
    image = weights[..., before.shape[1] :]
    if prefix_mode == "renormalise":
        image = image / image.sum(axis=-1, keepdims=True)
    return image, value


@pytest.mark.parametrize("readout", ["cls", "mean"])
def test_the_map_that_travels_does_not_change_by_a_bit(vit, readout):
    """docs/design.md 7: what is shown is a further output."""
    options, tensors = options_and_tensors(vit, readout=readout)
    usual = ScoreModule(vit, options)(pictures(), tensors).named()
    assert "shown" not in usual
    for kind in graph_maps(vit, readout):
        module = ScoreModule(vit, options, kind)
        found = module(pictures(), tensors).named()
        assert tuple(found) == module.outputs == (*options.outputs, "shown")
        assert all(torch.equal(found[name], usual[name]) for name in usual), kind
        assert found["shown"].shape == usual["map"].shape
        assert found["shown"].abs().amax(dim=1).tolist() == pytest.approx([1] * 3)


def test_a_map_that_the_network_does_not_have_is_refused(vit):
    assert graph_maps(vit, "cls") == graph_maps(vit, "prompted") == ("attention", "values")
    assert graph_maps(vit, "mean") == ("rollout", "attention", "values", "share")
    with pytest.raises(ValueError, match="no map 'share'"):
        ScoreModule(vit, ScoreOptions(prompts=()), "share")
