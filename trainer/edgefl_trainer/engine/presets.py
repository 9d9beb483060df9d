"""What the presets `tiny`, `bench84` and `paper` mean for families of methods; a method may declare its own.

`paper` is the schedule and the settings of the paper; the others shorten them to what a person can wait for.
"""

from collections.abc import Mapping
from typing import Any, Literal

from edgefl_trainer.contract import Method, Presets, declared

PresetName = Literal["tiny", "bench84", "paper"]

_LABELLED: Presets = {
    "tiny": {
        "rounds": 2,
        "epochs": 1,
        "images_per_site": 120,
        "hyper": {"lr_head": 2e-3, "discount": "unusual"},
    },
    "bench84": {  # 10 epochs where the paper has 75: ten times its rates for the prompts, chosen on tune rows
        "rounds": 5,
        "epochs": 2,
        "images_per_site": 1200,
        "hyper": {"lr_b": 2.5e-3, "lr_t": 5e-3, "lr_head": 5e-3, "discount": "unusual"},
    },
    "paper": {
        "rounds": 5,
        "epochs": 15,
        "hyper": {"evidence": "relu", "prompt_init": "uniform", "head_norm": "none", "augment": "none"},
    },
}
# The schedule of PEP-FedPT and of what it compares with (CIFAR-100); which share of the sites takes part is the data's.
_TOKENS: Presets = {
    "tiny": {"rounds": 2, "epochs": 1, "images_per_site": 120, "hyper": {"lr_head": 0.03}},
    "bench84": {"rounds": 5, "epochs": 2, "images_per_site": 1200, "hyper": {"lr_head": 0.01}},
    "paper": {
        "rounds": 100,
        "epochs": 5,
        "hyper": {"readout": "cls", "head_norm": "none", "augment": "none", "weighting": "uniform"},
    },
}
# FedCLF and what it compares with: a ResNet-18 at 72 px; `tiny` learns whatever backbone the run names.
_UNLABELLED: Presets = {
    "tiny": {"rounds": 2, "epochs": 1, "images_per_site": 240, "hyper": {"batch": 32, "queue": 128}},
    "bench84": {
        "rounds": 20,
        "epochs": 1,
        "images_per_site": 600,
        "backbone": "cnn:resnet18",
        "image_px": 72,
        "hyper": {"batch": 64},
    },
    "paper": {"rounds": 100, "epochs": 1, "backbone": "cnn:resnet18", "image_px": 72},
}
_OF_FAMILY: Mapping[str, Presets] = {"prompt tokens": _TOKENS}


def preset_of(method: type[Method], preset: PresetName, backbone: str, hyper: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what a preset stands for with one method; `backbone` and `hyper` are what is given, if anything."""
    own = declared(method).presets
    if own is not None:
        return own(backbone, hyper)[preset]
    return _OF_FAMILY.get(method.family, _LABELLED if method.needs_labels else _UNLABELLED)[preset]
