"""Which network leaves with a site's model: the run's frozen one, or the site's own (docs/decisions/0017)."""

import dataclasses

import numpy as np
import pytest
import torch
from tests.export.conftest import make_predictor, write_run

from edgefl_export.bundles.assemble import backbone_name, site_model
from edgefl_protocol import Payload, digest
from edgefl_trainer.contract import Predictor
from edgefl_trainer.engine.models import open_run, predict, save_predictor
from edgefl_trainer.errors import RunError
from edgefl_trainer.models.backbones import build_network, frozen_network, load_backbone, weights_of
from edgefl_trainer.models.scoring import ScoreModule, ScoreOptions


def with_own_network(name: str) -> tuple[Predictor, Predictor]:
    """A predictor on the run's backbone, and the same head on a network that learned on."""
    backbone = load_backbone(name, image_px=36, seed=1)
    readout = "pooled" if name.startswith("cnn:") else "mean"
    options = ScoreOptions(readout=readout, output="softmax", prompts=())
    draw = np.random.default_rng(4)
    tensors = {
        "head.weight": draw.normal(0, 3, (3, backbone.spec.width)).astype(np.float32),
        "head.bias": np.zeros(3, np.float32),
        "temperature": np.float32(1.5).reshape(()),
    }
    shared = Predictor(ScoreModule(backbone, options), tensors, (True, True, False))
    network = build_network(backbone.spec, 2).train()
    network(torch.randn((4, 3, 36, 36), generator=torch.Generator().manual_seed(5)))  # moves running statistics
    weights = weights_of(network)
    module = ScoreModule(frozen_network(backbone.spec, weights), options)
    return shared, dataclasses.replace(shared, module=module, network=weights)


@pytest.mark.parametrize("name", ["tiny", "cnn:test_resnet"])
def test_a_run_gives_back_the_network_of_its_site(name, tmp_path, images):
    shared, own = with_own_network(name)
    folder = write_run(tmp_path / "run", own, shared.module.backbone)
    save_predictor(folder / "models" / "south.safetensors", shared)
    run = open_run(folder)
    found = run.predictor("north")
    assert digest(found.network) == digest(own.network) == found.module.backbone.spec.sha256
    assert {key: value.dtype for key, value in found.network.items()} == {
        key: value.dtype for key, value in own.network.items()
    }
    assert not [key for key in found.tensors if key.startswith("network.")]
    expected, other = (predict(one, images[:4]).probabilities for one in (own, shared))
    np.testing.assert_array_equal(predict(found, images[:4]).probabilities, expected)
    assert np.abs(expected - other).max() > 1e-3  # the run's backbone would have shown
    plain = run.predictor("south")
    assert plain.network == {}
    np.testing.assert_array_equal(predict(plain, images[:4]).probabilities, other)
    assert run.backbone.spec.sha256 == shared.module.backbone.spec.sha256


def test_the_card_names_the_network_that_scores(tmp_path):
    _, own = with_own_network("cnn:test_resnet")
    folder = write_run(tmp_path / "run", own, load_backbone("cnn:test_resnet", image_px=36, seed=1))
    card = site_model(open_run(folder), "north").card
    assert card.backbone == f"cnn:test_resnet at 36 px, sha256 {digest(own.network)[:12]}"
    assert backbone_name(make_predictor().module.backbone.spec).startswith("vit:64x2/12 at 36 px, sha256 ")


def test_a_network_that_lost_a_tensor_is_damaged(tmp_path):
    shared, own = with_own_network("cnn:test_resnet")
    folder = write_run(tmp_path / "run", own, shared.module.backbone)
    path = folder / "models" / "north.safetensors"
    payload = Payload.from_bytes(path.read_bytes(), 1 << 28)
    arrays = {key: value for key, value in payload.arrays.items() if not key.endswith("running_var")}
    path.write_bytes(Payload(arrays, payload.scalars).to_bytes())
    with pytest.raises(RunError, match=r"lacks some tensors or holds others .*running_var"):
        open_run(folder).predictor("north")
