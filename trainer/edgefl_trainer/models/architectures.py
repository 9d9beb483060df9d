"""The shapes a backbone can have, and fresh networks of them: vision transformers and timm's convolutional networks.

Guarantees: the same shape and seed give the same weights, whatever was drawn before; a name goes to timm only if it is
one of the networks timm itself knows, never an address. Our vision transformers carry MAE's fixed two-dimensional
sin-cos positions (arXiv 2111.06377), which never move; convolutional networks start as timm starts them.
"""

import re
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from edgefl_trainer.errors import BackboneError
from edgefl_trainer.torch_seed import seeded

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
DEFAULT_PX = 84  # side of the images where nothing else is said
MOST_PX = 4096
MAX_PATCHES = 128 * 128


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """The shape of one of our own vision transformers."""

    width: int  # D
    depth: int  # L
    heads: int
    patch: int  # pixels
    image_px: int

    def __post_init__(self) -> None:
        bounds = {"width": 4096, "depth": 64, "heads": 64, "patch": 256, "image_px": MOST_PX}
        for name, most in bounds.items():
            if not 1 <= getattr(self, name) <= most:
                raise BackboneError(f"the backbone's {name} is {getattr(self, name)}; allowed: 1 to {most}.")
        if self.width % self.heads or self.width % 4:
            raise BackboneError(
                f"width {self.width} must be divisible by 4 (sin-cos positions) and by {self.heads} heads: "
                "choose another."
            )
        if self.image_px % self.patch:
            near = max(1, self.image_px // self.patch) * self.patch
            raise BackboneError(
                f"a patch of {self.patch} px does not divide images of {self.image_px} px: "
                f"use --image-px {near} or {near + self.patch}."
            )
        if (self.image_px // self.patch) ** 2 > MAX_PATCHES:
            raise BackboneError(
                f"images of {self.image_px} px give {(self.image_px // self.patch) ** 2} patches of {self.patch} "
                f"px; allowed: at most {MAX_PATCHES}."
            )


def sincos_positions(width: int, grid: int) -> Float[Tensor, "one tokens width"]:
    """Make MAE's position table: a zero row for the class token, then sin|cos of column and row, base 10000.

    (1, 1 + grid², D), with `grid` patches along one side and a width D divisible by 4.
    """
    frequencies = 10000.0 ** (-np.arange(width // 4, dtype=np.float64) / (width // 4))
    row, column = np.meshgrid(np.arange(grid), np.arange(grid), indexing="ij")
    halves = []
    for axis in (column, row):
        angles = axis.reshape(-1, 1) * frequencies
        halves += [np.sin(angles), np.cos(angles)]
    table = np.concatenate([np.zeros((1, width)), np.concatenate(halves, axis=1)])
    return torch.from_numpy(table[None]).float()


def build_vit(architecture: Architecture) -> nn.Module:
    """Make an untrained timm vision transformer of this shape with fixed positions; initialise with `initialise`.

    Its class token is not set.
    """
    from timm.models.vision_transformer import VisionTransformer

    vit: Any = VisionTransformer(  # timm's annotations stop half-way
        img_size=architecture.image_px,
        patch_size=architecture.patch,
        embed_dim=architecture.width,
        depth=architecture.depth,
        num_heads=architecture.heads,
        num_classes=0,
        weight_init="skip",  # timm would draw every weight, to be overwritten
    )
    vit.pos_embed.data.copy_(sincos_positions(architecture.width, architecture.image_px // architecture.patch))
    vit.pos_embed.requires_grad_(False)
    vit.fixed_positions = True  # said of the network: a frozen one asks no gradient for learned positions either
    return vit  # type: ignore[no-any-return]


def fixed_tensors(network: nn.Module) -> frozenset[str]:
    """Name the tensors that a network has by its shape alone: the position table of ours; timm's positions learn."""
    return frozenset({"pos_embed"} if getattr(network, "fixed_positions", False) else ())


def initialise(module: nn.Module, generator: torch.Generator) -> None:
    """Initialise as MAE does: Xavier-uniform linears (the patch convolution seen as one), zero biases, unit norms."""
    for layer in module.modules():
        if isinstance(layer, nn.Linear | nn.Conv2d):
            nn.init.xavier_uniform_(layer.weight.data.view(layer.weight.shape[0], -1), generator=generator)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
        elif isinstance(layer, nn.LayerNorm):
            nn.init.ones_(layer.weight)
            nn.init.zeros_(layer.bias)


def parse_architecture(name: str, image_px: int) -> Architecture | None:
    """Return the architecture that `tiny` or `vit:WIDTHxDEPTH/PATCH` names; None for the other forms."""
    if name == "tiny":
        return Architecture(width=64, depth=4, heads=2, patch=12, image_px=image_px)
    match = re.fullmatch(r"vit:(\d{2,4})x(\d{1,2})/(\d{1,2})", name)
    if match is None:
        return None
    width, depth, patch = map(int, match.groups())
    return Architecture(width=width, depth=depth, heads=max(1, width // 64), patch=patch, image_px=image_px)


@dataclass(frozen=True, kw_only=True)
class CNNArchitecture:
    """One of timm's convolutional networks, and what its input looks like."""

    cnn: str  # timm's name, such as resnet18
    image_px: int
    mean: tuple[float, float, float] = IMAGENET_MEAN
    std: tuple[float, float, float] = IMAGENET_STD

    def __post_init__(self) -> None:
        import timm

        # Other forms of a name would make timm read a folder or ask a hub.
        if not re.fullmatch(r"[a-z0-9_]{1,64}", self.cnn) or not timm.is_model(self.cnn):
            near = get_close_matches(self.cnn, timm.list_models(), n=3)
            guess = f" (near: {', '.join(near)})" if near else ""
            raise BackboneError(f"timm has no network {self.cnn!r}{guess}: name one that it has, such as cnn:resnet18.")
        if not 1 <= self.image_px <= MOST_PX:
            raise BackboneError(f"the backbone's image_px is {self.image_px}; allowed: 1 to {MOST_PX}.")
        for values in (self.mean, self.std):
            if len(values) != 3 or not all(0 <= value <= 1 for value in values):
                raise BackboneError(
                    f"a backbone's channel means and deviations must be three numbers from 0 to 1 each, not {values}."
                )
        if not all(self.std):
            raise BackboneError("a channel deviation of the backbone is 0.")


def build_cnn(name: str, seed: int) -> nn.Module:
    """Make a fresh convolutional network without classifier; its forward gives pooled features (B, D).

    `name` is timm's, see `CNNArchitecture`; a `BackboneError` where it is no convolutional network.
    """
    import timm

    with seeded(seed):  # timm draws from the global generator
        network: nn.Module = timm.create_model(name, pretrained=False, num_classes=0)
    if uses_attention(network):
        raise BackboneError(
            f"{name} is not a convolutional network but a {type(network).__name__}: name one such as cnn:resnet18, "
            "or use vit:WIDTHxDEPTH/PATCH."
        )
    # Depthwise layers learn faster so on a CPU; on a card it was not measured (docs/decisions/0070).
    layout = torch.contiguous_format if torch.cuda.is_available() else torch.channels_last
    return network.to(memory_format=layout)


def uses_attention(network: nn.Module) -> bool:
    """Tell whether any layer attends: then the network is not convolutional, whatever stands before it."""
    return any(hasattr(layer, "num_heads") for layer in network.modules())


def pooled_width(network: nn.Module, name: str, image_px: int) -> int:
    """Number D of pooled features, from one pass over a black image; `name` is for the sentence of an error.

    Raises:
        BackboneError: the image is smaller than what the network makes one position of, it cannot take that size, or
            its output is no pooled feature.
    """
    stages: Any = getattr(network, "feature_info", None) or [{}]
    least = int(stages[-1].get("reduction", 1))  # pixels along one side that become one position
    if image_px < least:
        raise BackboneError(
            f"backbone {name} cannot take images of {image_px} px, which are too small for it: use --image-px "
            f"{least} or more."
        )
    device = next(network.parameters()).device
    try:
        with torch.inference_mode():
            found = network.eval()(torch.zeros((1, 3, image_px, image_px), device=device))
    except (RuntimeError, ValueError, AssertionError) as error:
        raise BackboneError(
            f"backbone {name} cannot take images of {image_px} px: choose another --image-px or backbone."
        ) from error
    if not isinstance(found, Tensor) or found.ndim != 2:
        raise BackboneError(f"backbone {name} gives no pooled feature: choose another, such as cnn:resnet18.")
    return int(found.shape[1])
