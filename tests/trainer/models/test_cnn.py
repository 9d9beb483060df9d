"""Convolutional backbones: timm's own numbers in evaluation mode, running statistics that never move and are kept.

docs/methods.md, backbones; Ioffe and Szegedy, arXiv 1502.03167, 3.1: in inference batch norm is a fixed linear map.
"""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import timm
import torch

from edgefl_protocol import digest
from edgefl_protocol.tensors import read_tensors, write_tensors
from edgefl_trainer.errors import BackboneError, SettingError
from edgefl_trainer.models.backbone_names import has_own_weights, names_fresh_network
from edgefl_trainer.models.backbones import backbone_bytes, build_network, frozen_network, load_backbone, weights_of
from edgefl_trainer.models.cnn import CNNOutput, FrozenCNN
from edgefl_trainer.models.pixels import normalised, pixel_scale
from edgefl_trainer.models.scoring import ScoreModule, ScoreOptions
from edgefl_trainer.models.spec import CNNSpec, readouts_of, require_vit, settled_readout, spec_from_facts

SMALL = "cnn:test_resnet"  # timm's own network for tests: batch norm, max pooling, four stages
POOLED = ScoreOptions(readout="pooled", prompts=())


def used(network: torch.nn.Module, seed: int = 0) -> torch.nn.Module:
    """The network after some life: every weight drawn, running statistics far from their start, batches counted."""
    draw = torch.Generator().manual_seed(seed)
    for name, value in network.state_dict().items():
        if name.endswith("num_batches_tracked"):
            value.fill_(41)
        elif name.endswith("running_var"):
            value.uniform_(0.5, 2.0, generator=draw)
        elif value.ndim < 2:
            value.normal_(0, 0.3, generator=draw)
    return network


@pytest.fixture(scope="module")
def backbone() -> FrozenCNN:
    fresh = load_backbone(SMALL, image_px=40, seed=1)
    network = used(build_network(fresh.spec, 1))
    return frozen_network(fresh.spec, weights_of(network))


@pytest.fixture(scope="module")
def images() -> torch.Tensor:
    return torch.randint(0, 256, (3, 40, 40, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(2))


def test_pixels_are_normalised_as_a_plain_formula_has_it(images):
    mean, std = (0.5, 0.4, 0.3), (0.2, 0.25, 0.3)
    plain = (images.numpy().astype(np.float64) / 255 - np.array(mean)) / np.array(std)
    found = normalised(images, pixel_scale(mean), pixel_scale(std))
    np.testing.assert_allclose(found.numpy(), plain.transpose(0, 3, 1, 2), atol=1e-5)


def test_the_output_is_timms_own_in_evaluation_mode(backbone, images):
    plain = timm.create_model("test_resnet", pretrained=False, num_classes=0)
    plain.load_state_dict({name: torch.from_numpy(value) for name, value in weights_of(backbone.network).items()})
    pixels = backbone.normalise(images)
    with torch.inference_mode():
        wanted, other = plain.eval()(pixels), plain.train()(pixels)
        found = backbone.train()(pixels).pooled  # asked to train, and does not
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)  # another layout, other kernels
    assert (other - wanted).abs().max() > 1e-2  # batch statistics would have shown
    assert found.shape == (3, backbone.spec.width)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a card has the usual layout")
def test_channels_lie_last_on_a_cpu_and_weights_leave_in_their_usual_order(backbone):
    """docs/decisions/0070. A network that takes them in keeps its layout."""
    weight = backbone.network.get_parameter("conv1.0.weight")
    assert weight.is_contiguous(memory_format=torch.channels_last) and not weight.is_contiguous()
    sent = weights_of(backbone.network)["conv1.0.weight"]
    plain = timm.create_model("test_resnet", pretrained=False, num_classes=0)
    plain.load_state_dict({name: torch.from_numpy(value) for name, value in weights_of(backbone.network).items()})
    assert plain.get_parameter("conv1.0.weight").is_contiguous()
    assert plain.get_parameter("conv1.0.weight").detach().numpy().tobytes() == sent.tobytes()


def test_a_feature_does_not_depend_on_the_other_images_of_its_batch(backbone, images):
    with torch.inference_mode():
        together = backbone(backbone.normalise(images)).pooled
        alone = torch.cat([backbone(backbone.normalise(image[None])).pooled for image in images])
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=1e-5)


def test_training_a_head_moves_nothing_inside(backbone, images):
    before = {name: value.clone() for name, value in backbone.network.state_dict().items()}
    head = torch.nn.Linear(backbone.spec.width, 2)
    backbone.train()
    for _ in range(3):
        head(backbone(backbone.normalise(images)).pooled).square().sum().backward()
    assert all(parameter.grad is None for parameter in backbone.parameters())
    for name, value in backbone.network.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_a_file_gives_back_every_tensor_and_the_same_digest(backbone, tmp_path):
    weights = weights_of(backbone.network)
    data = backbone_bytes(backbone.spec, weights, self_supervised=True)
    assert backbone_bytes(backbone.spec, dict(reversed(weights.items())), self_supervised=True) == data
    path = tmp_path / "b.safetensors"
    path.write_bytes(data)
    found = load_backbone(f"file:{path}")
    assert found.spec == dataclasses.replace(backbone.spec, name=f"file:{path}", self_supervised=True)
    assert found.spec.sha256 == digest(weights) == backbone.spec.sha256
    state = found.network.state_dict()
    assert set(state) == set(weights)
    counters = [name for name in state if name.endswith("num_batches_tracked")]
    assert counters
    for name, value in weights.items():
        np.testing.assert_array_equal(state[name].numpy(), value)
    assert all(state[name].dtype == torch.int64 and state[name] == 41 for name in counters)


def test_half_files_keep_running_statistics_whole(backbone, tmp_path):
    weights = weights_of(backbone.network)
    name = next(key for key in weights if key.endswith("running_var"))
    weights[name] = np.full_like(weights[name], 70_000.5)  # beyond float16
    arrays, _ = read_tensors(backbone_bytes(backbone.spec, weights, self_supervised=True, half=True), max_bytes=1 << 28)
    np.testing.assert_array_equal(arrays[name], weights[name])
    assert arrays["conv1.0.weight" if "conv1.0.weight" in arrays else "conv1.weight"].dtype == np.float16


def test_what_the_input_looks_like_comes_back_from_a_file(backbone, tmp_path):
    """A network that began at timm's hub is told other channel means than ImageNet's."""
    other = dataclasses.replace(backbone.spec, mean=(0.5, 0.5, 0.5), std=(0.25, 0.5, 0.5))
    path = tmp_path / "b"
    path.write_bytes(backbone_bytes(other, weights_of(backbone.network), self_supervised=False))
    spec = load_backbone(f"file:{path}", image_px=64).spec
    assert (spec.mean, spec.std, spec.image_px, spec.self_supervised) == (other.mean, other.std, 64, False)


@pytest.mark.parametrize(
    "change",
    [
        {"cnn": "no_such_network"},
        {"cnn": 7},
        {"cnn": "swin_tiny_patch4_window7_224"},
        {"image_px": 0},
        {"image_px": "84"},
        {"mean": [0.5]},
        {"std": [0, 0.5, 0.5]},
        {"std": 3},
        {"cnn": "mobilenetv3_small_050"},
    ],
)
def test_a_file_that_describes_another_network_is_refused(change, backbone, tmp_path):
    with pytest.raises(BackboneError):
        load_backbone(f"file:{described(change, backbone, tmp_path)}")


@pytest.mark.parametrize("name", ["hf-hub:somebody/network", "local-dir:/etc", "resnet18.a1_in1k", "../resnet18"])
def test_a_name_in_a_file_never_reaches_a_hub_or_a_folder(name, backbone, tmp_path, monkeypatch):
    monkeypatch.setattr(timm, "create_model", pytest.fail)
    with pytest.raises(BackboneError, match="is not a backbone that this program wrote"):
        load_backbone(f"file:{described({'cnn': name}, backbone, tmp_path)}")


def described(change: dict[str, object], backbone: FrozenCNN, folder: Path) -> Path:
    """A file of these weights with another description."""
    facts = {"cnn": "test_resnet", "image_px": 40, "mean": [0.5] * 3, "std": [0.5] * 3} | change
    text = json.dumps({"format": 1, "architecture": facts, "self_supervised": True})
    (folder / "b").write_bytes(write_tensors(weights_of(backbone.network), {"backbone": text}))
    return folder / "b"


@pytest.mark.parametrize("name", ["cnn:resnet18", "cnn:mobilenetv3_small_050"])
def test_networks_of_the_papers_take_their_sizes(name):
    """arXiv 2208.11278: ResNet-18 at 72 px; 64 px is Tiny-ImageNet's, 84 px that of the shipped images."""
    assert load_backbone(name).spec.image_px == 84
    spec = load_backbone(name, image_px=64).spec
    backbone = load_backbone(name, image_px=72)
    assert spec.width == backbone.spec.width == {"cnn:resnet18": 512}.get(name, 1024)
    with torch.inference_mode():
        found = backbone(backbone.normalise(torch.zeros((2, 72, 72, 3), dtype=torch.uint8)))
    assert found.pooled.shape == (2, spec.width)


def test_a_resnet_50_has_the_size_that_is_published():
    """He et al., arXiv 1512.03385: 25.6 million parameters, 2.05 million of them in the classifier."""
    with torch.device("meta"):
        network = timm.create_model("resnet50", pretrained=False, num_classes=0)
    assert sum(value.numel() for value in network.parameters()) == 25_557_032 - (2048 * 1000 + 1000)


def test_one_size_is_checked_at_the_door(backbone):
    with pytest.raises(ValueError, match=r"takes \(B, 3, 40, 40\)"):
        backbone(torch.zeros((1, 3, 64, 64)))


@pytest.mark.parametrize(
    ("name", "px", "sentence"),
    [
        ("cnn:resnet18", 8, "cannot take images of 8 px, which are too small for it: use --image-px 32 or more"),
        ("cnn:inception_v3", 64, "cannot take images of 64 px"),
        ("cnn:resnet19", 84, r"timm has no network 'resnet19' \(near: .*resnet18"),
        ("cnn:", 84, "timm has no network ''"),
        ("cnn:hf-hub:timm/resnet18", 84, "timm has no network"),
        ("cnn:resnet18", 5000, "allowed: 1 to 4096"),
        ("cnn:mobilevit_xxs", 84, "not a convolutional network"),
        ("cnn:vit_tiny_patch16_224", 224, "not a convolutional network"),
    ],
)
def test_what_cannot_be_a_convolutional_backbone_is_one_sentence(name, px, sentence):
    with pytest.raises(BackboneError, match=sentence) as caught:
        load_backbone(name, image_px=px)
    assert str(caught.value).count("\n") == 0


def test_weights_depend_on_the_seed_alone_and_disturb_nobody():
    torch.manual_seed(5)
    first = load_backbone(SMALL, seed=1).spec.sha256
    after = torch.rand(1)
    torch.manual_seed(5)
    assert torch.rand(1) == after
    assert load_backbone(SMALL, seed=1).spec.sha256 == first
    assert load_backbone(SMALL, seed=2).spec.sha256 != first


def test_a_fresh_network_learns_where_a_backbone_does_not(backbone, images):
    network = build_network(backbone.spec, 7)
    assert all(value.requires_grad for value in network.parameters())
    assert digest(weights_of(network)) == load_backbone(SMALL, image_px=40, seed=7).spec.sha256
    network.train()(backbone.normalise(images)).sum().backward()
    assert network.state_dict()[next(n for n in network.state_dict() if n.endswith("tracked"))] == 1


def test_a_network_of_timms_hub_goes_by_its_name(monkeypatch):
    """timm without its hub: an image size is no argument of convolutional networks, as timm itself finds."""
    plain, asked = timm.create_model, []

    def create(name, *, pretrained, **options):
        asked.append((name, pretrained))
        return plain(name, pretrained=False, **options)

    monkeypatch.setattr(timm, "create_model", create)
    spec = load_backbone("timm:mobilenetv3_small_050.lamb_in1k", image_px=64).spec
    assert set(asked) == {("mobilenetv3_small_050.lamb_in1k", True)}
    assert isinstance(spec, CNNSpec)
    assert (spec.architecture, spec.image_px, spec.width) == ("mobilenetv3_small_050", 64, 1024)
    assert not spec.self_supervised
    assert load_backbone("timm:resnet18").spec.image_px == 224  # what its weights were learned at


def test_names_say_whether_weights_are_fresh():
    assert names_fresh_network("cnn:resnet18") and not has_own_weights("cnn:resnet18")
    assert not names_fresh_network("timm:resnet18") and has_own_weights("timm:resnet18")
    assert not names_fresh_network("resnet18")


def test_a_specification_reads_back_from_plain_values(backbone, vit):
    for spec in (backbone.spec, vit.spec):
        assert spec_from_facts(json.loads(json.dumps(dataclasses.asdict(spec)))) == spec
    with pytest.raises(TypeError):
        spec_from_facts({"name": "x"})
    with pytest.raises(TypeError):
        spec_from_facts({**dataclasses.asdict(backbone.spec), "patch": 8})


def test_what_needs_patches_says_so(backbone, vit):
    assert require_vit(vit.spec, "fedvpt") is vit.spec
    with pytest.raises(SettingError, match="fedvpt needs a vision transformer, but cnn:test_resnet is a convolutional"):
        require_vit(backbone.spec, "fedvpt")


def test_a_network_with_one_readout_has_nothing_to_decide(backbone, vit):
    assert readouts_of(backbone.spec) == ("pooled",)
    assert settled_readout("auto", backbone.spec) == "pooled"
    assert settled_readout("auto", vit.spec) == "auto"
    assert settled_readout("mean", vit.spec) == "mean"
    for wanted, spec in (("cls", backbone.spec), ("pooled", vit.spec)):
        with pytest.raises(SettingError, match=f"readout is '{wanted}'"):
            settled_readout(wanted, spec)


def test_each_kind_of_network_gives_its_own_readouts_only(backbone, vit, images, batch):
    with pytest.raises(ValueError, match="no readout 'cls'"):
        backbone(backbone.normalise(images)).readout("cls")
    with pytest.raises(ValueError, match="no readout 'pooled'"):
        vit(batch).readout("pooled")


def test_a_score_of_a_convolutional_network_has_no_map(backbone, images):
    tensors = {
        "head.weight": torch.randn((2, backbone.spec.width), generator=torch.Generator().manual_seed(3)),
        "head.bias": torch.ones(2),
        "prior": torch.tensor([0.4, 1.6]),
        "temperature": torch.tensor(2.0),
    }
    module = ScoreModule(backbone, POOLED)
    found = module(images, tensors)
    assert found.map is None
    assert tuple(found.named()) == POOLED.outputs == ("probabilities", "evidence", "vacuity", "dissonance")
    assert dataclasses.replace(POOLED, output="softmax").outputs == ("probabilities",)
    output = module.output(images, tensors, need_attention=True)
    assert isinstance(output, CNNOutput)
    evidence = np.log1p(np.exp((output.pooled @ tensors["head.weight"].T + 1).numpy().astype(np.float64) / 2))
    alpha = evidence + tensors["prior"].numpy()
    np.testing.assert_allclose(found.probabilities, alpha / alpha.sum(axis=1, keepdims=True), atol=1e-5)


def test_a_scoring_module_refuses_what_its_network_cannot_give(backbone, vit):
    for network, options in (
        (backbone, ScoreOptions(readout="cls", prompts=())),
        (backbone, ScoreOptions(readout="pooled", prompts=("prompts.b", "prompts.t"))),
        (vit, ScoreOptions(readout="pooled", prompts=())),
    ):
        with pytest.raises(ValueError, match="has no readout"):
            ScoreModule(network, options)
    with pytest.raises(TypeError, match="not a vision transformer"):
        ScoreModule(backbone, POOLED).vit  # noqa: B018


def test_own_weights_make_another_network_of_the_same_shape(backbone, vit, images, batch):
    """What a site that fine-tuned its whole network scores with; the run's backbone stays as it was."""
    own = used(build_network(backbone.spec, 3), seed=9)
    frozen = frozen_network(backbone.spec, weights_of(own))
    assert frozen.spec.sha256 == digest(weights_of(own)) != backbone.spec.sha256
    with torch.inference_mode():
        pixels = backbone.normalise(images)
        torch.testing.assert_close(frozen(pixels).pooled, own.eval()(pixels), atol=0, rtol=0)
        learned = {name: value + np.float32(0.1) for name, value in weights_of(vit.network).items()}
        learned.pop("pos_embed", None)  # the fixture's table is learned, ours are fixed
        other = frozen_network(vit.spec, learned)
        assert set(weights_of(other.network)) == set(learned)
        assert other(batch).cls.shape == (2, vit.spec.width)
    with pytest.raises(BackboneError, match="lacks some tensors or holds others"):
        frozen_network(backbone.spec, {name: value for name, value in weights_of(own).items() if "fc" in name})
