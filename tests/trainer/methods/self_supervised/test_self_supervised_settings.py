"""Settings of FedCLF and what it is compared with, written out: arXiv 2208.11278 section V-A; docs/methods.md 2, 11."""

from dataclasses import fields, is_dataclass

import pytest

from edgefl_trainer.engine.hyper_parameters import build
from edgefl_trainer.engine.settings import resolve
from edgefl_trainer.methods import METHODS

# V-A: batch 128, rate 0.03. MoCo's main_moco.py: momentum 0.9, weight decay 1e-4. docs/methods.md 2.5: batch norm is
# averaged, SGD's momentum begins afresh; 2.1: a view's size follows the image's (0).
SGD = {"lr": 0.03, "momentum": 0.9, "weight_decay": 1e-4, "batch": 128, "bn": "averaged", "view_px": 0}
SGD["optimizer_state"] = "reset"
# docs/methods.md 2.5: K, tau (MoCo v2's), m by the length of the run (0), two layers.
MOCO = {
    **SGD,
    "queue": 1024,
    "temperature": 0.2,
    "key_momentum": 0.0,
    "momentum_encoder": "averaged",
    "projection": "mlp",
}
DEFAULTS = {
    "fedclf": {**MOCO, "negatives": "remote", "dp_noise": 0.0, "dp_delta": 1e-5},  # FE+Neg; 11: no noise
    "fedmoco": MOCO,
    "local-cl": {**MOCO, "momentum_encoder": "local"},  # 2.4: it lives on
    "fedsimclr": {**SGD, "temperature": 0.2},  # 2.4
    "fedrotation": SGD,
}
NAMES = sorted(DEFAULTS)


def values_of(recipe) -> dict[str, object]:
    """Hyper-parameters, those of recipes within it too."""
    found: dict[str, object] = {}
    for entry in fields(recipe):
        value = getattr(recipe, entry.name)
        found |= values_of(value) if is_dataclass(value) else {entry.name: value}
    return found


@pytest.mark.parametrize("name", NAMES)
def test_defaults_are_the_papers_or_decided(name):
    assert values_of(build(METHODS[name], {})) == DEFAULTS[name]


def resolved(name: str, preset: str):
    return resolve(name, {"data": ("lesions:sites=2,images=40",), "preset": preset}, None, [])


@pytest.mark.parametrize("name", NAMES)
def test_the_papers_schedule(name):
    """V-A: 100 rounds of one epoch, all clients in each, all their images; ResNet-18, images of 72 px."""
    run = resolved(name, "paper")
    assert (run.rounds, run.epochs, run.participation, run.images_per_site) == (100, 1, 1.0, 0)
    assert (run.backbone, run.image_px) == ("cnn:resnet18", 72)
    assert values_of(run.build_method()) == DEFAULTS[name]


@pytest.mark.parametrize("name", NAMES)
def test_the_schedule_of_the_six_centres(name):
    """experiments/fedclf-fedmae-centres-local.toml: 20 rounds of one epoch, 600 images;

    docs/results/training_epoch.md: batch 64.
    """
    run = resolved(name, "bench84")
    assert (run.rounds, run.epochs, run.participation, run.images_per_site) == (20, 1, 1.0, 600)
    assert (run.backbone, run.image_px) == ("cnn:resnet18", 72)
    assert values_of(run.build_method()) == {**DEFAULTS[name], "batch": 64}
