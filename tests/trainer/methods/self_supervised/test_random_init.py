"""Random init: no pre-training (arXiv 2208.11278 section V); a run is a network and nothing else."""

import numpy as np
import pytest
from tests.trainer.conftest import edgefl_train, run

from edgefl_protocol.tensors import read_tensors
from edgefl_trainer.contract import declared
from edgefl_trainer.engine.hyper_parameters import build
from edgefl_trainer.methods import METHODS
from edgefl_trainer.models.backbones import load_backbone, weights_of


@pytest.mark.parametrize("network", ["tiny", "cnn:test_resnet"])
def test_a_run_delivers_the_fresh_network_of_its_seed(network, ward, tmp_path):
    outcome = run("random-init", ward, tmp_path / "run", network, "--seed", "5", "--json")
    summary = outcome.json()
    assert summary["bytes_up_total"] == summary["bytes_down_total"] == 0
    arrays, _ = read_tensors((tmp_path / "run" / "backbone.safetensors").read_bytes(), max_bytes=1 << 24)
    fresh = load_backbone(network, image_px=36, seed=5)
    inside = fresh.network if network.startswith("cnn") else fresh.vit
    for name, value in weights_of(inside).items():
        np.testing.assert_array_equal(arrays[name], value, err_msg=name)


def test_resuming_it_gives_the_same(ward, tmp_path):
    first = run("random-init", ward, tmp_path / "run", "tiny", "--json").json()
    (tmp_path / "run" / "summary.json").unlink()
    again = edgefl_train("run", "random-init", "--config", tmp_path / "run" / "config.toml", "--out", tmp_path / "run",
                         "--resume", "--json").json()  # fmt: skip
    assert again["state_sha256"] == first["state_sha256"]


def test_it_is_what_the_others_begin_with(make_task):
    task = make_task(seed=4)
    fresh = METHODS["random-init"]().start(task, ["a"])
    for other in ("fedclf", "fedmoco", "fedsimclr", "fedrotation", "local-cl", "fedmae"):
        method = build(METHODS[other], {})
        found = declared(method).encoder(method.start(task, ["a"]))
        wanted = dict(declared(METHODS["random-init"]).encoder(fresh))
        if other == "fedmae":  # its sites draw the class token that they keep
            del wanted["cls_token"]
        assert found.keys() == wanted.keys()
        assert all(np.array_equal(found[name], wanted[name]) for name in wanted), other
