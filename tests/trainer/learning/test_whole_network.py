"""docs/methods.md 3.4: rates, decay and drop path of fine-tuning, against the published recipes."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from edgefl_trainer.errors import SettingError
from edgefl_trainer.learning import whole_network
from edgefl_trainer.learning.whole_network import Classifier, NetworkRecipe, rate_share
from edgefl_trainer.models.backbones import build_network, load_backbone

STEPS = NetworkRecipe(optimizer="adam", schedule="steps", lr=1e-4)


@pytest.fixture(scope="module")
def vit12():
    return load_backbone("vit:64x12/12", image_px=36, seed=0)


def classifier(backbone, classes: int = 3) -> Classifier:
    readout = NetworkRecipe().readout_of(backbone.spec)
    return Classifier(build_network(backbone.spec, 1), backbone.spec.width, classes, readout)


def mae_scales(names: list[str], depth: int, decay: float) -> dict[str, float]:
    """facebookresearch/mae util/lr_decay.py, get_layer_id_for_vit and param_groups_lrd, in ten lines."""
    layers = depth + 1
    scales = [decay ** (layers - i) for i in range(layers + 1)]
    found = {}
    for name in names:
        if name in ("cls_token", "pos_embed") or name.startswith("patch_embed"):
            layer = 0
        elif name.startswith("blocks"):
            layer = int(name.split(".")[1]) + 1
        else:
            layer = layers
        found[name] = scales[layer]
    return found


def test_rates_of_a_twelve_block_network_are_maes(vit12):
    """arXiv 2111.06377, appendix A.1: layer-wise decay, from the head down to the patches."""
    model = classifier(vit12)
    names = [name.removeprefix("network.") for name in whole_network.learned_tensors(model)]
    oracle = mae_scales(names, 12, 0.65)
    optimizer = whole_network.make_optimizer(NetworkRecipe(layer_decay=0.65), model, 12, None)
    shares = [group["rate_share"] for group in optimizer.param_groups]
    assert dict(zip(names, shares, strict=True)) == pytest.approx(oracle)
    assert oracle["head.weight"] == 1 and oracle["patch_embed.proj.weight"] == pytest.approx(0.65**13)


def test_vectors_and_tokens_do_not_decay(vit12):
    """MAE's `param_groups_lrd`: no decay of one-dimensional tensors, nor of what the network names no_weight_decay."""
    model = classifier(vit12)
    optimizer = whole_network.make_optimizer(NetworkRecipe(weight_decay=0.05), model, 12, None)
    decays = {
        name: group["weight_decay"]
        for name, group in zip(whole_network.learned_tensors(model), optimizer.param_groups, strict=True)
    }
    assert decays["network.cls_token"] == decays["head.bias"] == decays["network.blocks.3.norm1.weight"] == 0
    assert decays["head.weight"] == decays["network.blocks.3.attn.qkv.weight"] == 0.05
    assert "network.pos_embed" not in decays  # fixed positions do not learn


def test_a_convolutional_network_learns_at_one_rate():
    assert {rate_share(name, 0, 0.65) for name in ("network.conv1.weight", "head.weight", "network.bn1.bias")} == {1.0}


def test_the_rate_falls_at_epochs_12_and_16_of_20():
    """arXiv 2208.11278 V-A: "a decay factor of 0.2 at epochs 12 and 16", as torch's MultiStepLR counts epochs."""
    weight = nn.Parameter(torch.zeros(1))
    oracle = torch.optim.SGD([weight], lr=1e-4)
    schedule = torch.optim.lr_scheduler.MultiStepLR(oracle, milestones=[12, 16], gamma=0.2)
    for epoch in range(20):
        for part in (0.0, 0.5, 0.99):
            assert STEPS.rate(epoch + part, 20) == pytest.approx(oracle.param_groups[0]["lr"])
        oracle.step()
        schedule.step()


def test_the_cosine_is_maes():
    """facebookresearch/mae util/lr_sched.py with warm-up 5 and min_lr 1e-6 of 50 epochs."""
    recipe = NetworkRecipe(lr=5e-4, warmup=5, min_lr=1e-6)
    for epoch in np.linspace(0, 50, 101):
        if epoch < 5:
            oracle = 5e-4 * epoch / 5
        else:
            oracle = 1e-6 + (5e-4 - 1e-6) * 0.5 * (1 + np.cos(np.pi * (epoch - 5) / 45))
        assert recipe.rate(float(epoch), 50) == pytest.approx(oracle, abs=1e-12)


@given(st.floats(0, 1), st.integers(1, 300), st.sampled_from(["cosine", "steps", "constant"]))
def test_a_rate_is_never_above_the_peak(share: float, total: int, schedule: str):
    recipe = replace(NetworkRecipe(), schedule=schedule)
    assert 0 <= recipe.rate(share * total, total) <= recipe.lr * (1 + 1e-12)


def test_drop_path_grows_from_block_to_block(vit12):
    """timm and MAE: stochastic depth in equal steps from 0 to the share in the last block."""
    model = classifier(vit12)
    whole_network.with_drop_path(model, 0.1)
    found = [(block.drop_path1.drop_prob, block.drop_path2.drop_prob) for block in model.network.blocks]
    assert found == [(pytest.approx(x), pytest.approx(x)) for x in np.linspace(0, 0.1, 12)]


@pytest.mark.parametrize("name", ["tiny", "cnn:resnet18"])
def test_training_and_scoring_read_the_same_feature(name: str):
    """In evaluation mode the head reads what the frozen network of a predictor gives it."""
    backbone = load_backbone(name, image_px=36, seed=1)
    model = Classifier(backbone.network, backbone.spec.width, 2, NetworkRecipe().readout_of(backbone.spec)).eval()
    pixels = backbone.normalise(torch.randint(0, 256, (3, 36, 36, 3), dtype=torch.uint8))
    with torch.inference_mode():
        expected = backbone(pixels).readout(model.readout)
        torch.testing.assert_close(model.features(pixels), expected, rtol=1e-5, atol=1e-5)


def test_a_norm_behind_the_mean_is_part_of_the_feature(hub):
    """timm's own forward without a classifier is mean, then `fc_norm`, for a network that was trained so."""
    backbone = load_backbone("timm:beit3_base_patch16_224", image_px=36)
    network, pixels = backbone.network, torch.randn((3, 3, 36, 36), generator=torch.Generator().manual_seed(0))
    assert isinstance(network.norm, nn.Identity) and isinstance(network.fc_norm, nn.LayerNorm)
    with torch.inference_mode():
        torch.testing.assert_close(Classifier(network, 64, 2, "mean").features(pixels), network(pixels))
        for readout in ("mean", "cls"):
            expected = backbone(pixels).readout(readout)
            torch.testing.assert_close(Classifier(network, 64, 2, readout).features(pixels), expected)


@pytest.mark.parametrize(("name", "readout"), [("tiny", "pooled"), ("cnn:resnet18", "mean")])
def test_a_readout_the_network_does_not_have_is_refused(name: str, readout: str):
    spec = load_backbone(name, image_px=36, seed=1).spec
    with pytest.raises(SettingError, match="leave --set readout out"):
        NetworkRecipe(readout=readout).readout_of(spec)


@pytest.mark.parametrize(
    ("name", "value"),
    [("lr", 0.0), ("min_lr", 1.0), ("warmup", -1.0), ("layer_decay", 0.0), ("drop_path", 1.0), ("batch", 0)],
)
def test_a_value_out_of_range_is_refused(name: str, value: float):
    with pytest.raises(SettingError, match=f"{name} is {value}; allowed"):
        replace(NetworkRecipe(), **{name: value})
