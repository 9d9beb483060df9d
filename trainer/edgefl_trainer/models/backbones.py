"""Backbones by name: architectures to be learned, files of our own runs, and timm's hub.

    tiny               4 blocks of width 64, patch 12: for tests and trials
    vit:192x12/12      width 192, 12 blocks, patch 12: an untrained vision transformer (heads of width 64)
    cnn:NAME           an untrained convolutional network by timm's name, such as cnn:resnet18
    run:DIR            what a run without labels learned, such as `edgefl-train run fedmae … --out DIR`
    file:PATH          the same file anywhere
    package:NAME       a network whose weights an optional package ships, see `models.packaged`
    timm:NAME          a plain vision transformer or convolutional network of timm's hub; needs a network the first time
    derm-vit-tiny-84   one that comes with EdgeFL, see `models.shipped`

A file holds every tensor that training moves, running statistics of batch norm included, and reads back to the same
digest; a fixed position table is not among them. Source: docs/methods.md, backbones; docs/decisions/0004 and 0017.
"""

import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, overload

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from edgefl_protocol import digest
from edgefl_protocol.durable import read_bounded
from edgefl_protocol.errors import EdgeflError, PayloadError
from edgefl_protocol.strict_json import parse_json
from edgefl_protocol.tensors import read_tensors, write_tensors
from edgefl_trainer.errors import BackboneError
from edgefl_trainer.models.architectures import (
    DEFAULT_PX,
    IMAGENET_MEAN,
    IMAGENET_STD,
    Architecture,
    CNNArchitecture,
    build_cnn,
    build_vit,
    fixed_tensors,
    initialise,
    parse_architecture,
    pooled_width,
    uses_attention,
)
from edgefl_trainer.models.backbone_names import OWN_FILE, backbone_file, check_name, unknown_backbone
from edgefl_trainer.models.cnn import Backbone, FrozenCNN
from edgefl_trainer.models.packaged import packaged_backbone
from edgefl_trainer.models.spec import BackboneSpec, CNNSpec, ViTSpec
from edgefl_trainer.models.vit import FrozenViT
from edgefl_trainer.torch_seed import Undrawn, seeded

MAX_BACKBONE_BYTES = 2 * 1024**3
RUNNING_STATISTICS = ("running_mean", "running_var")  # of batch norm: their range does not fit float16
SELF_SUPERVISED_NAMES = ("mae", "dino", "clip")  # in a name of timm's hub


@overload
def architecture_of(spec: ViTSpec) -> Architecture: ...
@overload
def architecture_of(spec: CNNSpec) -> CNNArchitecture: ...
def architecture_of(spec: BackboneSpec) -> Architecture | CNNArchitecture:
    """Return the architecture behind a spec, to learn on from its weights."""
    if isinstance(spec, CNNSpec):
        return CNNArchitecture(cnn=spec.architecture, image_px=spec.image_px, mean=spec.mean, std=spec.std)
    return Architecture(width=spec.width, depth=spec.depth, heads=spec.heads, patch=spec.patch, image_px=spec.image_px)


def build_network(spec: BackboneSpec, seed: int) -> nn.Module:
    """Make a fresh timm network of a backbone's architecture without classifier, to be trained.

    One of timm's hub is built as timm builds it, without asking the hub for weights. Of a convolutional one the forward
    gives pooled features (B, D); a vision transformer is timm's plain `VisionTransformer`. `load_weights` fills it,
    `weights_of` reads it.
    """
    if isinstance(spec, CNNSpec):
        return build_cnn(spec.architecture, seed)
    kind, _, model = spec.name.partition(":")
    if kind == "timm":
        return _timm_vit(model, spec.image_px, seed)
    return _fresh_vit(architecture_of(spec), seed)


def empty_network(spec: BackboneSpec) -> nn.Module:
    """Make a network of a backbone's architecture as `build_network` does, to be filled: its weights mean nothing."""
    with Undrawn():
        return build_network(spec, 0)


def weights_of(network: nn.Module) -> dict[str, NDArray[np.generic]]:
    """Return tensors of a network by timm's names, running statistics included; fixed position tables are left out."""
    fixed = fixed_tensors(network)
    return {name: value.detach().cpu().numpy() for name, value in network.state_dict().items() if name not in fixed}


def backbone_bytes(
    kind: BackboneSpec | Architecture | CNNArchitecture,
    weights: Mapping[str, NDArray[np.generic]],
    *,
    self_supervised: bool,
    half: bool = False,
    learned: bool | None = None,
) -> bytes:
    """Write the file of one of our own backbones: weights as safetensors, its shape in the metadata.

    The same input gives the same bytes.

    Args:
        kind: its shape, or a spec of that shape.
        weights: tensors by timm's names, without a fixed position table.
        self_supervised: learned without labels.
        half: store float16 (read back as float32); running statistics stay float32.
        learned: whether anything was learned in these weights; None where nobody knows, which the file leaves out.
    """
    architecture = architecture_of(kind) if isinstance(kind, ViTSpec | CNNSpec) else kind
    arrays = {name: _stored(name, value, half=half) for name, value in weights.items()}
    facts = {"format": 1, "architecture": asdict(architecture), "self_supervised": self_supervised}
    facts |= {} if learned is None else {"learned": learned}
    return write_tensors(arrays, {"backbone": json.dumps(facts, sort_keys=True)})


def load_backbone(name: str, *, image_px: int | None = None, seed: int = 0) -> Backbone:
    """Build and freeze the backbone that `name`, one of the forms of the module docstring, stands for.

    Args:
        image_px: side of the images in pixels; None takes the backbone's own (84 for untrained ones).
        seed: start of an untrained network.

    Raises:
        BackboneError: unknown form, missing file, wrong shape, or an image size it cannot take.
    """
    check_name(name)
    if (path := backbone_file(name)) is not None:
        return _from_file(path, name, image_px)
    kind, _, rest = name.partition(":")
    if kind == "timm":
        return _from_timm(rest, name, image_px)
    if kind == "package":
        return _from_package(rest, name, image_px)
    if kind == "cnn":
        named = CNNArchitecture(cnn=rest, image_px=image_px or DEFAULT_PX)
        return _frozen(build_cnn(rest, seed), name, named, self_supervised=True)
    architecture = parse_architecture(name, image_px or DEFAULT_PX)
    if architecture is None:
        raise unknown_backbone(name)
    return _frozen(_fresh_vit(architecture, seed), name, architecture, self_supervised=True)


def frozen_network(spec: BackboneSpec, weights: Mapping[str, NDArray[np.generic]]) -> Backbone:
    """Put other weights into the architecture and freeze it: a site that learned its own network scores with it.

    Its spec has the digest of these weights (see `weights_of`). A `BackboneError` where they are not this
    architecture's.
    """
    network = empty_network(spec)
    load_weights(network, weights, spec.name)
    return freeze(network, replace(spec, sha256=digest(weights_of(network))))


def freeze(network: nn.Module, spec: BackboneSpec) -> Backbone:
    """Freeze a network that the specification describes."""
    return FrozenCNN(network, spec) if isinstance(spec, CNNSpec) else FrozenViT(network, spec)


def load_weights(network: nn.Module, arrays: Mapping[str, NDArray[np.generic]], name: str) -> None:
    """Fill a network with tensors by timm's names; every tensor but a fixed position table must be there.

    Raises:
        BackboneError: one is missing, unknown, or of another shape.
    """
    state = {key: torch.from_numpy(np.array(_stored(key, value, half=False))) for key, value in arrays.items()}
    try:
        missing, unexpected = network.load_state_dict(state, strict=False)
    except RuntimeError as error:
        raise BackboneError(
            f"backbone {name} holds tensors whose shapes do not fit its architecture: learn it again, or copy it "
            "again.",
            "backbone_unreadable",
        ) from error
    if odd := sorted({*unexpected, *missing} - fixed_tensors(network)):
        raise BackboneError(
            f"backbone {name} lacks some tensors or holds others ({', '.join(odd[:4])}): learn it again, or copy it "
            "again.",
            "backbone_unreadable",
        )


def _stored(name: str, value: NDArray[np.generic], *, half: bool) -> NDArray[np.generic]:
    """A tensor as files hold it: counters as they are, everything else in the asked precision."""
    if not np.issubdtype(value.dtype, np.floating):
        return value
    return value.astype(np.float16 if half and not name.endswith(RUNNING_STATISTICS) else np.float32)


def _fresh_vit(architecture: Architecture, seed: int) -> nn.Module:
    vit = build_vit(architecture)
    initialise(vit, generator := torch.Generator().manual_seed(seed))
    nn.init.normal_(vit.get_parameter("cls_token"), std=0.02, generator=generator)
    return vit


def _timm_vit(model: str, image_px: int, seed: int) -> nn.Module:
    import timm

    with seeded(seed):  # timm draws from the global generator
        vit: nn.Module = timm.create_model(model, pretrained=False, num_classes=0, img_size=image_px)
    return vit


def _from_file(path: Path, name: str, image_px: int | None) -> Backbone:
    try:
        data = read_bounded(path, MAX_BACKBONE_BYTES)
        if data[8:9] != b"{":  # where the header begins, behind its length
            raise PayloadError("it is not a safetensors file", "bad_header")
        arrays, metadata = read_tensors(data, max_bytes=MAX_BACKBONE_BYTES)
        facts: Any = parse_json(metadata["backbone"].encode())
        architecture = _architecture_in(facts["architecture"])
        self_supervised = bool(facts["self_supervised"])
    except (EdgeflError, KeyError, TypeError, ValueError) as error:
        raise BackboneError(
            f"{path} is not a backbone that this program wrote ({error}): {OWN_FILE}.",
            "backbone_unreadable",
        ) from error
    if isinstance(architecture, CNNArchitecture):  # takes images of any size
        architecture = replace(architecture, image_px=image_px or architecture.image_px)
        network = build_cnn(architecture.cnn, 0)
    elif image_px not in (None, architecture.image_px):
        raise BackboneError(
            f"backbone {name} was learned on {architecture.image_px}-px images and cannot take images of {image_px} "
            f"px: use --image-px {architecture.image_px} or another backbone."
        )
    else:
        network = build_vit(architecture)
    load_weights(network, arrays, name)
    return _frozen(network, name, architecture, self_supervised=self_supervised)


def _from_package(packaged: str, name: str, image_px: int | None) -> Backbone:
    architecture, tensors = packaged_backbone(packaged)
    architecture = replace(architecture, image_px=image_px or architecture.image_px)
    network = build_cnn(architecture.cnn, 0)
    load_weights(network, tensors, name)
    return _frozen(network, name, architecture, self_supervised=False)


def _architecture_in(facts: Mapping[str, Any]) -> Architecture | CNNArchitecture:
    if "cnn" not in facts:
        return Architecture(**facts)
    return CNNArchitecture(**{**facts, "mean": tuple(facts["mean"]), "std": tuple(facts["std"])})


def _from_timm(model: str, name: str, image_px: int | None) -> Backbone:
    from timm.models.vision_transformer import VisionTransformer

    plain = "choose a plain ViT such as timm:vit_small_patch16_224, or a convolutional network such as timm:resnet18"
    network: Any = _pretrained(model, image_px)
    config: Any = network.pretrained_cfg
    shared: dict[str, Any] = {
        "name": name,
        "mean": tuple(config["mean"]),
        "std": tuple(config["std"]),
        "self_supervised": any(word in model for word in SELF_SUPERVISED_NAMES),
        "sha256": digest(weights_of(network)),
    }
    if not isinstance(network, VisionTransformer):
        if uses_attention(network):
            raise BackboneError(f"{name} is a {type(network).__name__}, which cannot take prefix prompts: {plain}.")
        px = image_px or int(config["input_size"][-1])
        width = pooled_width(network, name, px)
        architecture = model.rpartition("/")[2].partition(".")[0]  # without hub and tag
        return FrozenCNN(network, CNNSpec(architecture=architecture, image_px=px, width=width, **shared))
    blocks: Any = network.blocks
    spec = ViTSpec(
        image_px=network.patch_embed.img_size[0],
        patch=network.patch_embed.patch_size[0],
        depth=len(blocks),
        heads=blocks[0].attn.num_heads,
        width=network.embed_dim,
        **shared,
    )
    try:
        return FrozenViT(network, spec)
    except ValueError as error:
        raise BackboneError(f"{error}: {plain}.") from error


def _pretrained(model: str, image_px: int | None) -> nn.Module:
    """timm's network with its weights; vision transformers are made for an image size, others know none."""
    import timm

    size: dict[str, Any] = {} if image_px is None else {"img_size": image_px}
    try:
        with _quiet_hub():
            try:
                network: nn.Module = timm.create_model(model, pretrained=True, num_classes=0, **size)
            except TypeError:
                network = timm.create_model(model, pretrained=True, num_classes=0)
    except (OSError, RuntimeError, TypeError, AssertionError, ValueError) as error:
        raise BackboneError(
            f"timm could not give {model!r} ({type(error).__name__}): check the name and the network"
            f"{'' if image_px is None else f', and that the model takes images of {image_px} px'}.",
            "backbone_unreadable" if isinstance(error, OSError) else None,
        ) from error
    return network


@contextmanager
def _quiet_hub() -> Iterator[None]:
    """What the hub logs of each of its attempts is not shown: our one sentence says that it failed."""
    log = logging.getLogger("huggingface_hub")
    before = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(before)


def _frozen(
    network: nn.Module, name: str, architecture: Architecture | CNNArchitecture, *, self_supervised: bool
) -> Backbone:
    sha256 = digest(weights_of(network))
    if isinstance(architecture, CNNArchitecture):
        width = pooled_width(network, name, architecture.image_px)
        spec = CNNSpec(
            name=name,
            architecture=architecture.cnn,
            image_px=architecture.image_px,
            width=width,
            mean=architecture.mean,
            std=architecture.std,
            self_supervised=self_supervised,
            sha256=sha256,
        )
        return FrozenCNN(network, spec)
    return FrozenViT(
        network,
        ViTSpec(
            name=name,
            **asdict(architecture),
            mean=IMAGENET_MEAN,
            std=IMAGENET_STD,
            self_supervised=self_supervised,
            sha256=sha256,
        ),
    )
