"""Small random vision transformers for the model tests."""

from collections.abc import Callable

import pytest
import torch
from timm.models.vision_transformer import VisionTransformer

from edgefl_trainer.models.spec import ViTSpec
from edgefl_trainer.models.vit import FrozenViT, init_prompts


def tiny_spec(**changes) -> ViTSpec:
    values = {
        "name": "tiny",
        "image_px": 32,
        "patch": 8,
        "depth": 3,
        "heads": 2,
        "width": 16,
        "mean": (0.5, 0.4, 0.3),
        "std": (0.2, 0.25, 0.3),
        "self_supervised": False,
        "sha256": "0" * 64,
    }
    return ViTSpec(**(values | changes))


def tiny_timm(spec: ViTSpec, **options) -> VisionTransformer:
    """A timm network of that shape with every parameter drawn at random (timm starts biases and scales flat)."""
    torch.manual_seed(0)
    values = {
        "img_size": spec.image_px,
        "patch_size": spec.patch,
        "embed_dim": spec.width,
        "depth": spec.depth,
        "num_heads": spec.heads,
        "num_classes": 0,
    }
    vit = VisionTransformer(**(values | options))
    for parameter in vit.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return vit.eval()


@pytest.fixture
def spec() -> ViTSpec:
    return tiny_spec()


@pytest.fixture
def make_spec() -> Callable[..., ViTSpec]:
    return tiny_spec


@pytest.fixture
def make_timm() -> Callable[..., VisionTransformer]:
    return tiny_timm


@pytest.fixture
def vit(spec) -> FrozenViT:
    return FrozenViT(tiny_timm(spec), spec)


@pytest.fixture
def prompts(spec) -> torch.Tensor:
    return init_prompts(spec, spec.depth, 4, "uniform", torch.Generator().manual_seed(1))


@pytest.fixture
def batch() -> torch.Tensor:
    return torch.randn((2, 3, 32, 32), generator=torch.Generator().manual_seed(2))
