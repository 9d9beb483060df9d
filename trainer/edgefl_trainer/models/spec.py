"""What a frozen network is, beside its weights: a plain vision transformer or a convolutional network.

Plain values, without torch: they stand in `Task`, travel to a coordinator's configuration and are read back. What
needs patches, blocks or attention asks for them with `require_vit`, before a run begins. docs/methods.md, backbones.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from edgefl_trainer.errors import SettingError

Readout = Literal["cls", "mean", "prompted", "pooled"]
"""`cls`: class token after the final norm; `mean`: mean of the patch tokens after it; `prompted`: mean of the class
token and the prompt tokens that entered last (as many as a method says, see `ViTOutput.readout`); `pooled`: the one
feature of a convolutional network, pooled over the image."""


@dataclass(frozen=True, kw_only=True)
class ViTSpec:
    """A plain vision transformer."""

    name: str  # the argument that names it on the command line
    image_px: int  # side of the square input in pixels
    patch: int  # side of a patch in pixels
    depth: int  # number of blocks L
    heads: int  # attention heads h
    width: int  # token width D
    mean: tuple[float, float, float]  # channel means in [0, 1] subtracted from the image
    std: tuple[float, float, float]  # channel deviations the image is divided by
    self_supervised: bool  # learned without labels, so that features need standardising
    sha256: str  # digest of the weights in hexadecimal

    @property
    def grid(self) -> int:
        """Patches along one side."""
        return self.image_px // self.patch

    @property
    def tokens(self) -> int:
        """Number N of patch tokens."""
        return self.grid**2

    @property
    def head_width(self) -> int:
        """Width d_h of one attention head."""
        return self.width // self.heads


@dataclass(frozen=True, kw_only=True)
class CNNSpec:
    """A convolutional network."""

    name: str  # the argument that names it on the command line
    architecture: str  # timm's name of it, such as `resnet18`
    image_px: int  # side of the square input in pixels
    width: int  # number D of pooled features
    mean: tuple[float, float, float]  # channel means in [0, 1] subtracted from the image
    std: tuple[float, float, float]  # channel deviations the image is divided by
    self_supervised: bool  # learned without labels, so that features need standardising
    sha256: str  # digest of the weights and running statistics in hexadecimal


BackboneSpec = ViTSpec | CNNSpec


def readouts_of(spec: BackboneSpec) -> tuple[Readout, ...]:
    """List the features a bare network offers a head; the first is taken where nothing tells them apart."""
    return ("pooled",) if isinstance(spec, CNNSpec) else ("cls", "mean")


def settled_readout(wanted: str, spec: BackboneSpec) -> str:
    """Settle the readout: `auto` stays only for a network that has several.

    A `SettingError` where the network has no such readout.
    """
    offered = readouts_of(spec)
    if wanted == "auto":
        return offered[0] if len(offered) == 1 else wanted
    if wanted not in offered:
        raise SettingError(f"readout is {wanted!r}, but {spec.name} offers {', '.join(offered)}: leave readout out.")
    return wanted


def require_vit(spec: BackboneSpec, what: str) -> ViTSpec:
    """Return a vision transformer's specification, or refuse; `what` begins the sentence, such as `prompts=bt`.

    A `SettingError` where it is a convolutional network's, which has neither patches nor attention.
    """
    if isinstance(spec, ViTSpec):
        return spec
    raise SettingError(
        f"{what} needs a vision transformer, but {spec.name} is a convolutional network: use the method head, a "
        "method that takes --set prompts=none, or another --backbone."
    )


def spec_from_facts(facts: Mapping[str, Any]) -> BackboneSpec:
    """Make a specification of plain values, such as `dataclasses.asdict` gives.

    A `TypeError` where a value is missing or unknown, or `mean` or `std` is no sequence.
    """
    plain = {**facts, "mean": tuple(facts.get("mean", ())), "std": tuple(facts.get("std", ()))}
    return CNNSpec(**plain) if "architecture" in plain else ViTSpec(**plain)
