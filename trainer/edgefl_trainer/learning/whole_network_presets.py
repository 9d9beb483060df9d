"""What the presets mean for fine-tuning, by kind of network and mode.

`paper` is arXiv 2208.11278 section V-A (CNN) and V-B (ViT): in local mode the rounds are where a site judges its model,
the schedule spans rounds times epochs. The others shorten it (docs/methods.md 3.4).
"""

from collections.abc import Mapping
from typing import Any

from edgefl_trainer.contract import Presets
from edgefl_trainer.models.kind import network_kind

Preset = Mapping[str, Any]

_VIT: Preset = {
    "optimizer": "adamw",
    "schedule": "cosine",
    "warmup": 5.0,
    "layer_decay": 0.65,
    "drop_path": 0.1,
    "weight_decay": 0.05,
}
_SHORT: Preset = {"lr": 1e-3, "batch": 16, "warmup": 2.0, "layer_decay": 0.75}  # 10 % of 600 images: 80 steps in all
_CNN: Preset = {"optimizer": "adam", "weight_decay": 0.0, "lr": 1e-4}
_FEW: Preset = {"images_per_site": 600, "select": "tune"}
_FEWEST: Preset = {"rounds": 2, "epochs": 1, "images_per_site": 120, "select": "tune"}

_VIT_LOCAL: Presets = {
    "tiny": {**_FEWEST, "hyper": {**_VIT, "lr": 1e-3, "batch": 16, "warmup": 0.0}},
    "bench84": {"rounds": 10, "epochs": 2, **_FEW, "hyper": {**_VIT, **_SHORT}},
    "paper": {"rounds": 40, "epochs": 5, "select": "tune", "hyper": {**_VIT, "lr": 1e-3, "batch": 512}},
}
_VIT_FEDERATED: Presets = {
    "tiny": {**_FEWEST, "hyper": {**_VIT, "lr": 1e-3, "batch": 16, "warmup": 0.0}},
    "bench84": {"rounds": 20, "epochs": 1, **_FEW, "hyper": {**_VIT, **_SHORT}},
    "paper": {"rounds": 50, "epochs": 1, "select": "tune", "hyper": {**_VIT, "lr": 5e-4, "batch": 256}},
}
_CNN_LOCAL: Presets = {
    "tiny": {**_FEWEST, "hyper": {**_CNN, "lr": 1e-3, "batch": 16, "schedule": "steps"}},
    "bench84": {"rounds": 10, "epochs": 2, **_FEW, "hyper": {**_CNN, "lr": 3e-4, "batch": 16, "schedule": "steps"}},
    "paper": {"rounds": 20, "epochs": 1, "select": "tune", "hyper": {**_CNN, "batch": 256, "schedule": "steps"}},
}
_CNN_FEDERATED: Presets = {
    "tiny": {**_FEWEST, "hyper": {**_CNN, "lr": 1e-3, "batch": 16, "schedule": "constant"}},
    "bench84": {"rounds": 20, "epochs": 1, **_FEW, "hyper": {**_CNN, "lr": 3e-4, "batch": 16, "schedule": "constant"}},
    "paper": {"rounds": 100, "epochs": 1, "select": "tune", "hyper": {**_CNN, "batch": 128, "schedule": "constant"}},
}


def presets_of(backbone: str, hyper: Mapping[str, Any]) -> Presets:
    """The presets for the kind of network that a backbone's name stands for, and for `mode`, federated unless given."""
    local = hyper.get("mode") == "local"
    if network_kind(backbone) == "vit":
        return _VIT_LOCAL if local else _VIT_FEDERATED
    return _CNN_LOCAL if local else _CNN_FEDERATED
