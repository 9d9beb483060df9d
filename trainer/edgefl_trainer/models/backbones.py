"""Backbones by name: architectures to be learned, files of our own runs, and timm's hub.

    tiny               4 blocks of width 64, patch 12: for tests and trials
    vit:192x12/12      width 192, 12 blocks, patch 12: an untrained network (heads of width 64)
    run:DIR            what `edgefl-train run fedmae … --out DIR` learned
    file:PATH          the same file anywhere
    timm:NAME          a plain vision transformer of timm's hub; needs a network the first time

Our own networks carry MAE's fixed two-dimensional sin-cos positions (arXiv 2111.06377), which never move.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor, nn

from edgefl_protocol import digest
from edgefl_protocol.durable import read_bounded
from edgefl_protocol.errors import EdgeflError, PayloadError
from edgefl_protocol.tensors import read_tensors, write_tensors
from edgefl_trainer.errors import BackboneError
from edgefl_trainer.models.vit import BackboneSpec, FrozenViT

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
BACKBONE_FILE = "backbone.safetensors"
MAX_BACKBONE_BYTES = 2 * 1024**3
MAX_PATCHES = 128 * 128
FORMS = "tiny, vit:WIDTHxDEPTH/PATCH, run:DIR, file:PATH or timm:NAME"


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """The shape of one of our own vision transformers."""

    width: int  # D
    depth: int  # L
    heads: int
    patch: int  # pixels
    image_px: int

    def __post_init__(self) -> None:
        bounds = {"width": 4096, "depth": 64, "heads": 64, "patch": 256, "image_px": 4096}
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
                f"images of {self.image_px} px give {(self.image_px // self.patch) ** 2} patches of {self.patch} px; "
                f"allowed: {MAX_PATCHES}."
            )


def sincos_positions(width: int, grid: int) -> Float[Tensor, "one tokens width"]:
    """MAE's position table: a zero row for the class token, then sin|cos of the column and of the row, base 10000.

    Args:
        width: D, divisible by 4.
        grid: patches along one side.

    Returns:
        (1, 1 + grid², D), float32.
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
    """An untrained timm vision transformer of this shape with fixed positions; initialise with `initialise`."""
    from timm.models.vision_transformer import VisionTransformer

    vit: Any = VisionTransformer(  # timm's annotations stop half-way
        img_size=architecture.image_px,
        patch_size=architecture.patch,
        embed_dim=architecture.width,
        depth=architecture.depth,
        num_heads=architecture.heads,
        num_classes=0,
    )
    vit.pos_embed.data.copy_(sincos_positions(architecture.width, architecture.image_px // architecture.patch))
    vit.pos_embed.requires_grad_(False)
    return vit  # type: ignore[no-any-return]


def initialise(module: nn.Module, generator: torch.Generator) -> None:
    """MAE's start: Xavier-uniform linears (the patch convolution seen as one), zero biases, unit norms."""
    for layer in module.modules():
        if isinstance(layer, nn.Linear | nn.Conv2d):
            nn.init.xavier_uniform_(layer.weight.data.view(layer.weight.shape[0], -1), generator=generator)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
        elif isinstance(layer, nn.LayerNorm):
            nn.init.ones_(layer.weight)
            nn.init.zeros_(layer.bias)


def parse_architecture(name: str, image_px: int) -> Architecture | None:
    """The architecture that `tiny` or `vit:WIDTHxDEPTH/PATCH` names; None for the other forms."""
    if name == "tiny":
        return Architecture(width=64, depth=4, heads=2, patch=12, image_px=image_px)
    match = re.fullmatch(r"vit:(\d{2,4})x(\d{1,2})/(\d{1,2})", name)
    if match is None:
        return None
    width, depth, patch = map(int, match.groups())
    return Architecture(width=width, depth=depth, heads=max(1, width // 64), patch=patch, image_px=image_px)


def architecture_of(spec: BackboneSpec) -> Architecture:
    """The architecture behind a spec, to learn on from its weights."""
    return Architecture(width=spec.width, depth=spec.depth, heads=spec.heads, patch=spec.patch, image_px=spec.image_px)


def weights_of(vit: nn.Module) -> dict[str, NDArray[np.generic]]:
    """Learnable tensors of a network by timm's names; fixed position tables are left out."""
    return {
        name: value.detach().cpu().numpy()
        for name, value in vit.state_dict().items()
        if name != "pos_embed" or vit.get_parameter("pos_embed").requires_grad
    }


def backbone_bytes(
    architecture: Architecture, weights: Mapping[str, NDArray[np.generic]], *, self_supervised: bool, half: bool = False
) -> bytes:
    """The file of one of our own backbones: weights as safetensors, its shape in the metadata.

    Args:
        architecture: its shape.
        weights: tensors by timm's names, without the position table.
        self_supervised: learned without labels.
        half: store float16 (read back as float32).

    Returns:
        The file's bytes; the same input gives the same bytes.
    """
    arrays = {name: value.astype(np.float16 if half else np.float32) for name, value in weights.items()}
    facts = {"format": 1, "architecture": asdict(architecture), "self_supervised": self_supervised}
    return write_tensors(arrays, {"backbone": json.dumps(facts, sort_keys=True)})


def load_backbone(name: str, *, image_px: int | None = None, seed: int = 0) -> FrozenViT:
    """Build and freeze the backbone that `name` stands for.

    Args:
        name: one of the forms of the module docstring.
        image_px: side of the images in pixels; None takes the backbone's own (84 for untrained ones).
        seed: start of an untrained network.

    Returns:
        The frozen network.

    Raises:
        BackboneError: unknown form, missing file, wrong shape, or an image size it cannot take.
    """
    kind, _, rest = name.partition(":")
    if kind == "run":
        return _from_file(Path(rest) / BACKBONE_FILE, name, image_px)
    if kind == "file":
        return _from_file(Path(rest), name, image_px)
    if kind == "timm":
        return _from_timm(rest, name, image_px)
    architecture = parse_architecture(name, image_px or 84)
    if architecture is None:
        raise BackboneError(f"no backbone is called {name!r}: use {FORMS}.")
    vit = build_vit(architecture)
    initialise(vit, generator := torch.Generator().manual_seed(seed))
    nn.init.normal_(vit.get_parameter("cls_token"), std=0.02, generator=generator)
    return _frozen(vit, name, architecture, self_supervised=True)


def is_trained(name: str) -> bool:
    """False for a bare architecture, whose features are those of a random network."""
    return name.partition(":")[0] in {"run", "file", "timm"}


def _from_file(path: Path, name: str, image_px: int | None) -> FrozenViT:
    if not path.is_file():
        raise BackboneError(f"there is no backbone at {path}: name a finished `edgefl-train run fedmae` folder.")
    try:
        data = read_bounded(path, MAX_BACKBONE_BYTES)
        if data[8:9] != b"{":  # where the header begins, behind its length
            raise PayloadError("it is not a safetensors file", "bad_header")
        arrays, metadata = read_tensors(data, max_bytes=MAX_BACKBONE_BYTES)
        facts = json.loads(metadata["backbone"])
        architecture = Architecture(**facts["architecture"])
        self_supervised = bool(facts["self_supervised"])
    except (EdgeflError, KeyError, TypeError, ValueError) as error:
        raise BackboneError(
            f"{path} is not a backbone this program wrote ({error}): name a finished `edgefl-train run fedmae` folder.",
            "backbone_unreadable",
        ) from error
    if image_px not in (None, architecture.image_px):
        raise BackboneError(
            f"backbone {name} was learned on {architecture.image_px}-px images and cannot take {image_px} px: "
            f"use --image-px {architecture.image_px} or another backbone."
        )
    vit = build_vit(architecture)
    load_weights(vit, arrays, name)
    return _frozen(vit, name, architecture, self_supervised=self_supervised)


def load_weights(vit: nn.Module, arrays: Mapping[str, NDArray[np.generic]], name: str) -> None:
    """Fill a network with tensors by timm's names; every tensor but a fixed position table must be there."""
    state = {key: torch.from_numpy(value.astype(np.float32)) for key, value in arrays.items()}
    try:
        missing, unexpected = vit.load_state_dict(state, strict=False)
    except RuntimeError as error:
        raise BackboneError(
            f"backbone {name} holds tensors of other shapes than its architecture: learn or copy it again.",
            "backbone_unreadable",
        ) from error
    if odd := sorted({*unexpected, *missing} - {"pos_embed"}):
        raise BackboneError(
            f"backbone {name} lacks or adds the tensors {', '.join(odd[:4])}: learn or copy it again.",
            "backbone_unreadable",
        )


def _from_timm(model: str, name: str, image_px: int | None) -> FrozenViT:
    import timm
    from timm.models.vision_transformer import VisionTransformer

    plain = "choose a plain ViT such as timm:vit_small_patch16_224"
    size: dict[str, Any] = {} if image_px is None else {"img_size": image_px}
    try:
        vit: Any = timm.create_model(model, pretrained=True, num_classes=0, **size)
    except (OSError, RuntimeError, TypeError, AssertionError, ValueError) as error:
        raise BackboneError(
            f"timm could not give {model!r} ({type(error).__name__}): check the name and the network"
            f"{'' if image_px is None else f', and that the model takes images of {image_px} px'}.",
            "backbone_unreadable" if isinstance(error, OSError) else None,
        ) from error
    if not isinstance(vit, VisionTransformer):
        raise BackboneError(f"{name} is a {type(vit).__name__}, which takes no prefix prompts: {plain}.")
    blocks: Any = vit.blocks
    config: Any = vit.pretrained_cfg
    spec = BackboneSpec(
        name=name,
        image_px=vit.patch_embed.img_size[0],
        patch=vit.patch_embed.patch_size[0],
        depth=len(blocks),
        heads=blocks[0].attn.num_heads,
        width=vit.embed_dim,
        mean=tuple(config["mean"]),
        std=tuple(config["std"]),
        self_supervised=any(word in model for word in ("mae", "dino", "clip")),
        sha256=digest(weights_of(vit)),
    )
    try:
        return FrozenViT(vit, spec)
    except ValueError as error:
        raise BackboneError(f"{error}: {plain}.") from error


def _frozen(vit: nn.Module, name: str, architecture: Architecture, *, self_supervised: bool) -> FrozenViT:
    spec = BackboneSpec(
        name=name,
        image_px=architecture.image_px,
        patch=architecture.patch,
        depth=architecture.depth,
        heads=architecture.heads,
        width=architecture.width,
        mean=IMAGENET_MEAN,
        std=IMAGENET_STD,
        self_supervised=self_supervised,
        sha256=digest(weights_of(vit)),
    )
    return FrozenViT(vit, spec)
