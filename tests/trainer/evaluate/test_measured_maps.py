"""Measured maps against a model whose truth is known: it answers by the brightness of patches, and by nothing else."""

import numpy as np
import pytest
import torch
from tests.trainer.models.conftest import tiny_spec, tiny_timm
from torch import nn

from edgefl_trainer.contract import Predictor
from edgefl_trainer.engine.models import predict
from edgefl_trainer.evaluate import measured_maps
from edgefl_trainer.evaluate.measured_maps import TRAVELS, measure_maps, occlusion_cells
from edgefl_trainer.models.cnn import FrozenCNN
from edgefl_trainer.models.scoring import ScoreModule, ScoreOptions
from edgefl_trainer.models.spec import CNNSpec
from edgefl_trainer.models.vit import FrozenViT

COUNT = 64


@pytest.fixture(scope="module")
def bright() -> Predictor:
    """Class 1 where the mean brightness is high; blocks add nothing to the patches, and attend to all alike."""
    spec = tiny_spec()
    network = tiny_timm(spec)
    with torch.no_grad():
        for block in network.blocks:
            for layer in (block.attn.qkv, block.attn.proj, block.mlp.fc2):
                layer.weight.zero_()
                layer.bias.zero_()
        network.pos_embed.zero_()
        network.patch_embed.proj.bias.zero_()
        network.patch_embed.proj.weight.zero_()
        network.patch_embed.proj.weight[0] = 1 / 192  # the mean of the patch, in units of the pictures' spread
        network.norm = nn.Identity()
    weight = np.zeros((2, spec.width), np.float32)
    weight[1, 0] = 12.0
    options = ScoreOptions(readout="mean", output="softmax", prompts=(), head_norm="none")
    tensors = {"head.weight": weight, "head.bias": np.array([0, 4.6], np.float32), "temperature": np.float32(1)}
    return Predictor(ScoreModule(FrozenViT(network, spec), options), tensors, (True, True))


@pytest.fixture(scope="module")
def pictures() -> tuple[np.ndarray, np.ndarray]:
    """Dark pictures with four bright patches that do not touch, so that a blur takes half of each; where they lie."""
    rng = np.random.default_rng(0)
    images = rng.integers(40, 60, (COUNT, 32, 32, 3)).astype(np.uint8)
    masks = np.zeros((COUNT, 32, 32), np.uint8)
    for index, (row, column) in enumerate(rng.integers(0, 2, (COUNT, 2)) * 8):
        for y, x in ((row, column), (row, column + 16), (row + 16, column), (row + 16, column + 16)):
            images[index, y : y + 8, x : x + 8] = 250
            masks[index, y : y + 8, x : x + 8] = 255
    return images, masks


def test_what_the_answer_hangs_on_is_found_by_share_and_occlusion(bright, pictures):
    """Hiding the bright patches changes the answer, hiding anything else does not; the masks say where it is."""
    images, masks = pictures
    said = []
    table = measure_maps(bright, images, [str(i) for i in range(COUNT)], masks=masks, report=said.append)
    assert (predict(bright, images).predicted == 1).all()
    for kind in ("share", "occlusion"):
        found = table.maps[kind]
        assert found.better_than_chance and found.hidden["mean"].marked == 1
        assert found.hidden["mean"].kept == 0 and found.hidden["mean"].random < 0.5
        assert found.hidden["blur"].marked > 0.9
        assert (found.in_lesion.marked, found.in_lesion.strongest) == (1, 1)
        assert found.in_lesion.chance == pytest.approx(0.25)
    assert not any(table.maps[kind].better_than_chance for kind in (TRAVELS, "rollout", "attention", "values"))
    assert table.shown.kind in ("share", "occlusion") and table.shown.shown
    assert set(table.maps) == {TRAVELS, "rollout", "attention", "values", "share", "occlusion"}
    assert f"{COUNT} pictures" in said[0]
    # of hiding: 2 ways x 2 sides for each of 6 maps and, random, for 2 quarters
    assert said[1:3] == [
        f"occlusion, picture by picture: {COUNT} steps …",
        "hiding quarters of all pictures: 32 steps …",
    ]
    again = measure_maps(bright, images, [str(i) for i in range(COUNT)], masks=masks)
    assert again.to_json() == table.to_json()


def test_a_long_step_says_how_far_it_is_and_the_time_left(monkeypatch):
    """docs/guides/device.md: after the last map was made, an export was silent for minutes. 6 s a step, 4 steps."""
    now = [0.0]
    monkeypatch.setattr(measured_maps, "monotonic", lambda: now[0])
    said: list[str] = []
    steps = measured_maps._Steps(4, "hiding", said.append)
    for _ in range(4):
        now[0] += 6
        steps.done()
    assert said == ["hiding: 4 steps …", "hiding: 2 of 4, 12 s left"]


def test_occlusion_equals_brute_force(bright, pictures):
    """One picture after the other with one patch in its mean colour, scored alone."""
    image = pictures[0][0]
    model = measured_maps._Model(bright, torch.device("cpu"))
    probabilities, named = model.answers(image[None], np.zeros(1, np.int64))
    found = measured_maps._occlusion(
        model, (image[None], np.zeros(1, np.int64)), probabilities, named, 16, lambda line: None
    )[0]
    whole, falls = predict(bright, image[None]).probabilities[0, 1], []
    for cell in range(16):
        row, column = divmod(cell, 4)
        hidden = image.copy()
        hidden[8 * row : 8 * row + 8, 8 * column : 8 * column + 8] = np.round(image.mean(axis=(0, 1)))
        falls.append(whole - predict(bright, hidden[None]).probabilities[0, 1])
    assert found == pytest.approx(np.array(falls) / max(falls), abs=1e-4)


def test_a_network_too_slow_for_occlusion_has_its_other_maps(bright, pictures, monkeypatch):
    """docs/decisions/0040: what a device would compute for too long is no candidate."""
    monkeypatch.setattr(measured_maps, "MOST_GFLOP", 1e-9)
    table = measure_maps(bright, pictures[0], [str(i) for i in range(COUNT)])
    assert "occlusion" not in table.maps and table.cells is None and table.shown.kind == "share"


def test_a_convolutional_network_has_occlusion_or_nothing(monkeypatch):
    """On a grid of 7 by 7, for it has no patches."""
    spec = CNNSpec(
        name="small", architecture="none", image_px=32, width=3, mean=(0.5,) * 3, std=(0.2,) * 3,
        self_supervised=False, sha256="0" * 64,
    )  # fmt: skip
    network = FrozenCNN(nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten()), spec)
    tensors = {"head.weight": np.eye(2, 3, dtype=np.float32), "head.bias": np.zeros(2, np.float32)}
    module = ScoreModule(network, ScoreOptions(readout="pooled", output="softmax", prompts=()))
    predictor = Predictor(module, {**tensors, "temperature": np.float32(1)}, (True, True))
    images = np.random.default_rng(1).integers(0, 256, (40, 32, 32, 3)).astype(np.uint8)
    assert occlusion_cells(network) == 49
    table = measure_maps(predictor, images, [str(i) for i in range(40)])
    assert set(table.maps) == {"occlusion"} and table.cells == 49
    monkeypatch.setattr(measured_maps, "MOST_GFLOP", -1)
    assert measure_maps(predictor, images, [str(i) for i in range(40)]).shown.why == "no_map"


def test_pictures_without_an_answer_do_not_count(bright, pictures):
    """No class was seen: nothing is predicted, so nothing can change, and no map can be true of it."""
    blind = Predictor(bright.module, bright.tensors, (False, False))
    table = measure_maps(blind, pictures[0], [str(i) for i in range(COUNT)])
    assert (table.pictures, table.maps, table.shown.why) == (0, {}, "few_pictures")
