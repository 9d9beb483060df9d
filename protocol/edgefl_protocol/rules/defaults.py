"""The default of every setting that a broadcast or bundle carries, and what a default of 0 stands for.

The trainer's recipes take their defaults from here; a device takes them for what a federation's task does not name.
Meaning and source of each setting: docs/methods.md, 1 (FedEvPrompt) and 2.3 (FedCLF); bounds: `bounds`.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, Literal

from edgefl_protocol.rules.maps import MAX_MAPS


class FedEvPromptDefaults:
    """FedEvPrompt (arXiv 2411.10071): local learning, the form of the model, and the maps that travel."""

    lr_b: Final = 2.5e-4
    lr_t: Final = 5e-4
    lr_head: Final = 5e-4
    weight_decay: Final = 1e-2
    optimizer: Final = "adamw"
    batch: Final = 32
    prompts: Final = "bt"
    b_blocks: Final = 3
    prompt_length: Final = 0  # 0: `usual_prompt_length`
    prompt_init: Final = "normal"
    prefix: Final = "after"
    loss: Final = "evidential"
    evidence: Final = "softplus"
    anneal_epochs: Final = 10
    anneal_clock: Final = "run"
    prior_floor: Final = 1e-2
    discount: Final = "none"
    readout: Final = "auto"
    head_norm: Final = "auto"
    augment: Final = "dihedral"
    kd_weight: Final = 1e-6  # lambda
    maps_per_class: Final = MAX_MAPS  # M
    select: Final = "vacuity"
    sent_maps: Final = "each"
    rollout: Final = "renormalise"
    kd_metric: Final = "bilinear"
    rollout_from: Final = 0
    kd_batch: Final = "mean"
    kd_peers: Final = "sum"


class FedCLFDefaults:
    """FedCLF (arXiv 2208.11278): SGD, momentum contrast, and the features that travel."""

    lr: Final = 0.03
    momentum: Final = 0.9
    weight_decay: Final = 1e-4
    optimizer_state: Final = "reset"
    batch: Final = 128
    bn: Final = "averaged"
    view_px: Final = 0  # 0: `usual_view_side`
    queue: Final = 1024
    temperature: Final = 0.2
    key_momentum: Final = 0.0  # 0: by the length of the run
    momentum_encoder: Final = "averaged"
    projection: Final = "mlp"
    negatives: Final = "remote"
    dp_noise: Final = 0.0
    dp_delta: Final = 1e-5


def by_name(declared: type) -> Mapping[str, bool | int | float | str]:
    """Return the defaults that a class above declares, by the names of the settings."""
    return MappingProxyType({name: value for name, value in vars(declared).items() if not name.startswith("_")})


def usual_prompt_length(tokens: int) -> int:
    """Return P where `prompt_length` is 0: 50 for 14 × 14 patches, in proportion otherwise (docs/methods.md, 1.2)."""
    return max(1, round(50 * tokens / 196))


def usual_head_norm(self_supervised: bool) -> Literal["standardise", "none"]:
    """Return what `head_norm=auto` stands for: features of a network learned without labels are standardised."""
    return "standardise" if self_supervised else "none"


def usual_view_side(image_px: int) -> int:
    """Return the side of a convolutional network's views where `view_px` is 0: 8/9 of the image, at least 2."""
    return max(2, image_px * 8 // 9)
