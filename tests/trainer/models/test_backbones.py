"""Backbones by name and by file: what is read back is what was written, and what cannot be used is refused."""

import struct

import numpy as np
import pytest
import timm
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from edgefl_protocol.tensors import read_tensors, write_tensors
from edgefl_trainer.errors import BackboneError
from edgefl_trainer.models.architectures import Architecture, build_vit, initialise, parse_architecture
from edgefl_trainer.models.backbone_names import has_own_weights
from edgefl_trainer.models.backbones import (
    architecture_of,
    backbone_bytes,
    build_network,
    frozen_network,
    load_backbone,
    weights_of,
)
from edgefl_trainer.models.network_kind import network_kind

SMALL = Architecture(width=32, depth=2, heads=2, patch=12, image_px=36)


def learned(seed: int = 5) -> dict[str, np.ndarray]:
    """Weights of a small network, every one of them drawn."""
    vit = build_vit(SMALL)
    draw = np.random.default_rng(seed)
    return {name: draw.normal(0, 0.1, value.shape).astype(np.float32) for name, value in weights_of(vit).items()}


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "backbone.safetensors"
    path.write_bytes(backbone_bytes(SMALL, learned(), self_supervised=True))
    return path


@pytest.fixture
def unplugged(monkeypatch):
    """timm without its hub: every network starts untrained; what was asked for."""
    plain = timm.create_model
    asked = []

    def create(name, *, pretrained, **options):
        asked.append((name, pretrained))
        torch.manual_seed(0)
        return plain(name, pretrained=False, **options)

    monkeypatch.setattr(timm, "create_model", create)
    return asked


@pytest.mark.parametrize("name", ["tiny", "cnn:test_resnet", "timm:vit_tiny_patch16_224"])
def test_a_network_that_is_filled_draws_nothing(name, unplugged):
    """Draws take most of the time of building one; what it is filled with is there to the bit."""
    drawn = []

    class Watched(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            drawn.extend([str(func)] * any(word in str(func) for word in ("normal_", "uniform_")))
            return func(*args, **(kwargs or {}))

    with Watched():
        spec = load_backbone(name, image_px=48, seed=3).spec
        assert drawn
        weights = {key: np.ones_like(value) for key, value in weights_of(build_network(spec, 0)).items()}
        drawn.clear()
        network = frozen_network(spec, weights).network
    assert not drawn
    assert all((value == 1).all() for value in weights_of(network).values())


def test_a_file_gives_back_every_weight(file):
    weights = learned()
    vit = load_backbone(f"file:{file}")
    assert architecture_of(vit.spec) == SMALL
    assert vit.spec.self_supervised
    state = vit.vit.state_dict()
    assert set(state) - set(weights) == {"pos_embed"}
    for name, value in weights.items():
        np.testing.assert_array_equal(state[name].numpy(), value)


def test_run_names_the_same_file(file):
    assert load_backbone(f"run:{file.parent}").spec.sha256 == load_backbone(f"file:{file}").spec.sha256


def test_half_precision_files_read_back_as_single(tmp_path, file):
    path = tmp_path / "half.safetensors"
    path.write_bytes(backbone_bytes(SMALL, learned(), self_supervised=True, half=True))
    assert path.stat().st_size < 0.6 * file.stat().st_size
    vit = load_backbone(f"file:{path}")
    for name, value in learned().items():
        found = vit.vit.state_dict()[name]
        assert found.dtype == torch.float32
        np.testing.assert_array_equal(found.numpy(), value.astype(np.float16).astype(np.float32))


def test_the_same_weights_make_the_same_file():
    first = backbone_bytes(SMALL, learned(), self_supervised=True)
    backwards = dict(reversed(learned().items()))
    assert backbone_bytes(SMALL, backwards, self_supervised=True) == first
    assert backbone_bytes(SMALL, learned(6), self_supervised=True) != first


def test_loading_freezes(file):
    vit = load_backbone(f"file:{file}").train()
    assert not any(parameter.requires_grad for parameter in vit.parameters())
    assert not vit.vit.training


def changed(file, arrays=None, metadata=None):
    """The file with other tensors or another description."""
    found, facts = read_tensors(file.read_bytes(), max_bytes=1 << 30)
    file.write_bytes(
        write_tensors(found if arrays is None else arrays(dict(found)), facts if metadata is None else metadata)
    )


@pytest.mark.parametrize(
    "arrays",
    [
        lambda found: {**found, "norm.weight": np.ones(33, np.float32)},
        lambda found: {**found, "blocks.0.attn.qkv.weight": found["blocks.0.attn.qkv.weight"].T.copy()},
        lambda found: {name: value for name, value in found.items() if name != "cls_token"},
        lambda found: {**found, "blocks.2.norm1.weight": np.ones(32, np.float32)},
        lambda found: {},
    ],
    ids=["longer", "turned", "lacking", "added", "empty"],
)
def test_other_tensors_than_the_architectures_are_refused(arrays, file):
    changed(file, arrays)
    with pytest.raises(BackboneError, match="tensors") as caught:
        load_backbone(f"file:{file}")
    assert caught.value.code == "backbone_unreadable"


@pytest.mark.parametrize(
    "shape",
    [
        '{"width": 32, "depth": 2, "heads": 0, "patch": 12, "image_px": 36}',
        '{"width": 32, "depth": 2, "heads": 2, "patch": 0, "image_px": 36}',
        '{"width": 32000000, "depth": 2, "heads": 2, "patch": 12, "image_px": 36}',
        '{"width": "32", "depth": 2, "heads": 2, "patch": 12, "image_px": 36}',
        '{"width": 32}',
        "[]",
        "null",
        "[" * 5000 + "]" * 5000,
        '{"width": 32, "depth": 2, "heads": 2, "patch": 12, "image_px": 36, "image_px": 36}',
    ],
)
def test_a_described_shape_that_cannot_be_is_refused(shape, file):
    changed(file, metadata={"backbone": f'{{"format": 1, "architecture": {shape}, "self_supervised": true}}'})
    with pytest.raises(BackboneError, match="is not a backbone that this program wrote"):
        load_backbone(f"file:{file}")
    assert network_kind(f"file:{file}") == "vit"  # whoever loads it refuses it


@settings(max_examples=60)
@given(cut=st.integers(0, 300), data=st.binary(max_size=64))
def test_a_damaged_file_is_refused_and_nothing_else_happens(tmp_path_factory, cut, data):
    path = tmp_path_factory.mktemp("damaged") / "b"
    path.write_bytes(backbone_bytes(SMALL, learned(), self_supervised=True)[:cut] + data)
    with pytest.raises(BackboneError, match="is not a backbone that this program wrote"):
        load_backbone(f"file:{path}")


@pytest.mark.parametrize("data", [b"\x89PNG\r\n\x1a\n" + b"picture" * 9, b"PK\x03\x04" + b"archive" * 9, b"some text"])
def test_a_file_of_another_kind_is_called_so(data, tmp_path):
    """Its first bytes are no length of a header: nobody is told how many bytes they would stand for."""
    (tmp_path / "b").write_bytes(data)
    with pytest.raises(BackboneError, match="it is not a safetensors file") as caught:
        load_backbone(f"file:{tmp_path / 'b'}")
    assert "bytes" not in str(caught.value)


def test_a_header_that_promises_gigabytes_is_refused(tmp_path):
    path = tmp_path / "b"
    path.write_bytes(struct.pack("<Q", 1 << 40))
    with pytest.raises(BackboneError):
        load_backbone(f"file:{path}")


def test_a_missing_file_says_what_to_name(tmp_path):
    with pytest.raises(
        BackboneError, match=r"there is no backbone at .*: name the folder of a finished run without labels"
    ):
        load_backbone(f"run:{tmp_path}")


def test_what_file_names_and_is_not_there_is_told_apart(tmp_path):
    """Each advice is of what was typed: a run's folder is written run:DIR."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "backbone.safetensors").write_bytes(b"x")
    for typed, said in (
        ("nowhere.npz", "which is no file: file:PATH names a file of EdgeFL's own, such as the backbone.safetensors"),
        ("", "which is a folder: file:PATH names"),
        ("run", f"is a folder: write run:{tmp_path / 'run'} for the network that a run left there"),
    ):
        with pytest.raises(BackboneError) as caught:
            load_backbone(f"file:{tmp_path / typed}")
        assert said in str(caught.value)


def test_another_image_size_than_it_learned_is_refused(file):
    with pytest.raises(BackboneError, match="36-px images and cannot take images of 48 px: use --image-px 36"):
        load_backbone(f"file:{file}", image_px=48)


@pytest.mark.parametrize(
    "name", ["", "tinny", "resnet18", "vit:", "vit:192x12", "vit:192x12/", "http://x/y", "run", "file"]
)
def test_unknown_forms_list_the_known_ones(name):
    with pytest.raises(BackboneError) as caught:
        load_backbone(name)
    assert "vit:WIDTHxDEPTH/PATCH" in str(caught.value) or "there is no backbone at" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "px"),
    [("vit:64x4/0", 36), ("vit:64x0/12", 36), ("vit:66x4/12", 36), ("vit:0000x4/12", 36), ("vit:64x99/12", 36)],
)
def test_shapes_that_cannot_be_are_refused(name, px):
    with pytest.raises(BackboneError):
        load_backbone(name, image_px=px)


@given(patch=st.integers(2, 32), px=st.integers(1, 400))
def test_a_size_the_patch_does_not_divide_names_two_that_it_does(patch, px):
    if px % patch == 0:
        return
    with pytest.raises(BackboneError) as caught:
        Architecture(width=64, depth=2, heads=1, patch=patch, image_px=px)
    first, second = (int(word) for word in str(caught.value).rstrip(".").split("--image-px ")[1].split(" or "))
    assert 0 < first < second and first % patch == second % patch == 0
    assert first - patch < px < second or px < patch


def test_names_give_the_shapes_they_say():
    assert parse_architecture("vit:192x12/12", 84) == Architecture(width=192, depth=12, heads=3, patch=12, image_px=84)
    assert parse_architecture("tiny", 36) == Architecture(width=64, depth=4, heads=2, patch=12, image_px=36)
    assert parse_architecture("timm:vit_small_patch16_224", 224) is None
    spec = load_backbone("tiny").spec
    assert (spec.image_px, spec.tokens) == (84, 49)  # the size of the shipped small images


def test_an_untrained_network_depends_on_the_seed_alone():
    first = load_backbone("tiny", image_px=36, seed=1).spec.sha256
    torch.manual_seed(99)
    assert load_backbone("tiny", image_px=36, seed=1).spec.sha256 == first
    assert load_backbone("tiny", image_px=36, seed=2).spec.sha256 != first


def test_only_bare_architectures_are_untrained():
    assert [has_own_weights(name) for name in ("tiny", "vit:192x12/12", "run:x", "file:x", "timm:x")] == [
        False, False, True, True, True
    ]  # fmt: skip


def test_networks_start_as_maes_do():
    """arXiv 2111.06377, A.1: Xavier-uniform linears, the patch convolution seen as one, zero biases, unit norms."""
    vit = build_vit(SMALL)
    initialise(vit, torch.Generator().manual_seed(0))
    state = vit.state_dict()
    for name, value in state.items():
        if name.endswith("norm1.weight") or name == "norm.weight":
            np.testing.assert_array_equal(value, 1)
        elif name.endswith("bias"):
            np.testing.assert_array_equal(value, 0)
    fan = {
        "blocks.0.attn.qkv.weight": 32 + 96,
        "blocks.1.mlp.fc1.weight": 32 + 128,
        "patch_embed.proj.weight": 432 + 32,
    }
    for name, total in fan.items():
        bound = np.sqrt(6 / total)
        found = state[name].abs().max().item()
        assert 0.9 * bound < found <= bound, name


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "deit_tiny_patch16_224"])
def test_a_plain_vit_of_timm_goes_by_its_name(name, unplugged):
    vit = load_backbone(f"timm:{name}")
    assert unplugged == [(name, True)]  # weights of the hub are what is asked for
    spec = vit.spec
    assert (spec.image_px, spec.patch, spec.depth, spec.heads, spec.width) == (224, 16, 12, 3, 192)
    assert not spec.self_supervised
    images = torch.randint(0, 256, (1, 224, 224, 3), dtype=torch.uint8)
    with torch.inference_mode():
        plain = images.permute(0, 3, 1, 2) / 255
        plain = (plain - torch.tensor(spec.mean).view(3, 1, 1)) / torch.tensor(spec.std).view(3, 1, 1)
        wanted = vit.vit.forward_features(plain)[:, 0]
        found = vit(vit.normalise(images)).cls
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)


def test_a_vit_of_timm_takes_another_size_when_asked(unplugged):
    assert load_backbone("timm:vit_tiny_patch16_224", image_px=96).spec.tokens == 36


@pytest.mark.parametrize(
    "name",
    [
        "deit_tiny_distilled_patch16_224",
        "swin_tiny_patch4_window7_224",
        "mobilevit_xxs",
        "vit_relpos_small_patch16_224",
        "vit_small_patch14_reg4_dinov2",
        pytest.param("naflexvit_base_patch16_gap", marks=pytest.mark.slow),
    ],
)
def test_networks_that_take_no_prefix_prompts_are_refused(name, unplugged):
    with pytest.raises(BackboneError, match="plain ViT such as timm:vit_small_patch16_224"):
        load_backbone(f"timm:{name}")


@pytest.mark.parametrize(
    ("failure", "code"),
    [
        (OSError("no route to host"), "backbone_unreadable"),
        (FileNotFoundError("not in the cache"), "backbone_unreadable"),
        (RuntimeError("Unknown model (vit_samll)"), "backbone"),
        (TypeError("unexpected keyword img_size"), "backbone"),
    ],
)
def test_a_network_of_timm_that_cannot_be_had_is_a_sentence(failure, code, monkeypatch):
    def create(*_, **__):
        raise failure

    monkeypatch.setattr(timm, "create_model", create)
    with pytest.raises(BackboneError, match=r"check the name and the network\.$") as caught:
        load_backbone("timm:vit_samll")
    assert caught.value.code == code
    with pytest.raises(BackboneError, match=r"and the network, and that the model takes images of 84 px\.$"):
        load_backbone("timm:vit_samll", image_px=84)


def test_without_a_network_timm_is_a_sentence(monkeypatch, tmp_path):
    """The hub's own error without a network, not one that we thought of."""
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(BackboneError, match="check the name and the network"):
        load_backbone("timm:vit_tiny_patch16_224")
