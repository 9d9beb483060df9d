"""docs/methods.md 3.4: what the presets `paper` and `bench84` mean for fine-tuning, written out from its table."""

import pytest

from edgefl_trainer.engine.settings import RunSettings, resolve

# Rounds, epochs of one, batch, peak rate and schedule. `paper`: arXiv 2208.11278 V-A (ResNet-18) and V-B (ViT-B).
TABLE = {
    ("paper", "cnn:resnet18", "local"): (20, 1, 256, 1e-4, "steps"),
    ("paper", "cnn:resnet18", "federated"): (100, 1, 128, 1e-4, "constant"),
    ("paper", "vit:768x12/16", "local"): (40, 5, 512, 1e-3, "cosine"),
    ("paper", "vit:768x12/16", "federated"): (50, 1, 256, 5e-4, "cosine"),
    ("bench84", "cnn:resnet18", "local"): (10, 2, 16, 3e-4, "steps"),
    ("bench84", "cnn:resnet18", "federated"): (20, 1, 16, 3e-4, "constant"),
    ("bench84", "vit:768x12/16", "local"): (10, 2, 16, 1e-3, "cosine"),
    ("bench84", "vit:768x12/16", "federated"): (20, 1, 16, 1e-3, "cosine"),
}


def resolved(preset: str, backbone: str, mode: str) -> RunSettings:
    return resolve("finetune", {"data": ("folder:x",), "preset": preset, "backbone": backbone}, None, [f"mode={mode}"])


@pytest.mark.parametrize(("preset", "backbone", "mode"), TABLE)
def test_a_preset_is_the_tables(preset, backbone, mode):
    settings = resolved(preset, backbone, mode)
    recipe = settings.build_method().recipe
    found = (settings.rounds, settings.epochs, recipe.batch, recipe.lr, recipe.schedule)
    assert found == TABLE[preset, backbone, mode]
    assert settings.images_per_site == (600 if preset == "bench84" else 0)
    assert settings.select == {"local": "tune", "federated": "pooled"}[mode]  # V-B: one global model


@pytest.mark.parametrize("preset", ["paper", "bench84"])
@pytest.mark.parametrize("mode", ["local", "federated"])
def test_a_kind_of_network_has_its_optimiser(preset, mode):
    """Rows "optimiser" and "schedule"; layer decay and drop path of MAE's recipe, 0.75 and 2 epochs of `bench84`."""
    vit = resolved(preset, "vit:768x12/16", mode).build_method().recipe
    assert (vit.optimizer, vit.weight_decay, vit.min_lr, vit.drop_path) == ("adamw", 0.05, 1e-6, 0.1)
    assert vit.layer_decay == (0.65 if preset == "paper" else 0.75)
    assert vit.warmup == (5 if preset == "paper" else 2)
    cnn = resolved(preset, "cnn:resnet18", mode).build_method().recipe
    assert (cnn.optimizer, cnn.weight_decay) == ("adam", 0)
    for recipe in (vit, cnn):
        assert (recipe.augment, recipe.smallest_crop, recipe.readout) == ("crops", 0.2, "auto")
