"""Local CL, then fine-tuning: each site goes on with the encoder that it learned. Source: arXiv 2208.11278 section V-A
("pre-trains the model by contrastive learning independently on each device"), engine/own_networks.py."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from tests.trainer.conftest import TINY, edgefl_train, make_ward
from tests.trainer.engine.test_sites import rows_of
from tests.trainer.engine.test_sites import site as make_site

from edgefl_trainer.contract import Declaration, State
from edgefl_trainer.engine.own_networks import mean_network

STILL = ("--set", "lr=1e-12", "--set", "min_lr=0", "--set", "weight_decay=0", "--set", "augment=none")


@pytest.fixture(scope="module")
def uneven(tmp_path_factory, cached) -> str:
    """Two sites, one twice as large as the other: the SPEC of a `folder:`."""
    counts = {"east": {"nevus": 6, "other": 6}, "west": {"nevus": 14, "other": 10}}
    return f"folder:{make_ward(tmp_path_factory.mktemp('uneven'), counts)}"


@pytest.fixture(scope="module")
def apart(tmp_path_factory, uneven) -> Path:
    """A finished run of `local-cl` over two sites of unequal size."""
    folder = tmp_path_factory.mktemp("apart") / "run"
    found = edgefl_train("run", "local-cl", "--data", uneven, "--out", folder, "--rounds", 1, "--set", "batch=8",
                         "--backbone", "cnn:mobilenetv3_small_050", *TINY, "--json")  # fmt: skip
    assert found.code == 0, found.err
    return folder


def weights(path: Path, prefix: str = "") -> dict[str, np.ndarray]:
    return {name.removeprefix(prefix): value for name, value in load_file(path).items() if name.startswith(prefix)}


def test_every_site_keeps_its_encoder_and_the_runs_is_their_mean(apart):
    east, west, both = (
        weights(apart / path)
        for path in ("networks/east.safetensors", "networks/west.safetensors", "backbone.safetensors")
    )
    sizes = [line["n_train"] for line in _sites(apart)]
    assert sizes[1] > 1.5 * sizes[0]
    assert set(east) == set(west) == set(both)
    assert sum(not np.array_equal(east[name], west[name]) for name in east) > len(east) / 2
    for name in [name for name in both if np.issubdtype(both[name].dtype, np.floating)]:
        mean = np.average([east[name].astype(np.float64), west[name]], axis=0, weights=sizes)
        np.testing.assert_allclose(both[name], mean, rtol=1e-5, atol=1e-7)


class Apart:
    """A site's encoder is its state."""

    declares = Declaration(encoder=lambda state: state.arrays, apart=True)


def test_the_mean_counts_the_images_that_each_site_learned_from():
    """By hand: 0 of one image and 4 of three are 3. Labelled rows do not count, nor a site that has learned nothing."""
    sites = {
        name: replace(make_site([0] * labelled), unlabelled=rows_of([0] * count))
        for name, labelled, count in (("east", 9, 1), ("west", 2, 3), ("north", 4, 50))
    }
    states = {"east": State({"w": np.zeros(2)}), "west": State({"w": np.full(2, 4.0)}), "north": State()}
    np.testing.assert_array_equal(mean_network(Apart(), states, sites)["w"], [3.0, 3.0])


@pytest.mark.parametrize("mode", ["local", "federated"])
def test_fine_tuning_starts_from_a_sites_own_encoder_alone_and_from_the_mean_together(apart, uneven, mode, tmp_path):
    """With a rate of nothing a model ends where it began."""
    found = edgefl_train("run", "finetune", "--data", uneven, "--out", tmp_path / "o", "--backbone", f"run:{apart}",
                         "--set", f"mode={mode}", "--rounds", 1, *STILL, *TINY, "--json")  # fmt: skip
    assert found.code == 0, found.err
    for site in ("east", "west"):
        start = weights(apart / (f"networks/{site}.safetensors" if mode == "local" else "backbone.safetensors"))
        ended = weights(tmp_path / f"o/models/{site}.safetensors", "network.")
        learned = [name for name in ended if name.endswith(("weight", "bias"))]
        assert len(learned) > 50
        for name in learned:
            np.testing.assert_allclose(ended[name], start[name], rtol=1e-5, atol=1e-7, err_msg=name)


def test_a_site_that_took_part_in_no_round_has_no_encoder_and_no_weight(ward, tmp_path):
    """One round with one of two sites: its encoder is the run's, also for the probe."""
    found = edgefl_train("run", "local-cl", "--data", ward, "--out", tmp_path / "run", "--backbone", "cnn:test_resnet",
                         "--rounds", 1, "--participation", 0.5, "--set", "batch=8", *TINY, "--json")  # fmt: skip
    assert found.code == 0, found.err
    [network] = (tmp_path / "run" / "networks").iterdir()
    assert weights(network).keys() == weights(tmp_path / "run" / "backbone.safetensors").keys()
    for name, value in weights(tmp_path / "run" / "backbone.safetensors").items():
        np.testing.assert_allclose(value, weights(network)[name], rtol=1e-6, err_msg=name)


def test_sites_without_an_encoder_of_their_own_start_from_the_mean(apart, tmp_path, cached):
    """Another federation than the one that learned: the run's one backbone serves."""
    found = edgefl_train("run", "finetune", "--data", "lesions:sites=2,images=20,px=48", "--out", tmp_path / "o",
                         "--backbone", f"run:{apart}", "--set", "mode=local", "--rounds", 1, *STILL, *TINY,
                         "--json")  # fmt: skip
    assert found.code == 0, found.err
    start, ended = (
        weights(apart / "backbone.safetensors"),
        weights(tmp_path / "o/models/site-1.safetensors", "network."),
    )
    np.testing.assert_allclose(ended["conv_stem.weight"], start["conv_stem.weight"], rtol=1e-5, atol=1e-7)


def _sites(run: Path) -> list[dict]:
    found = json.loads((run / "summary.json").read_text())["sites"]
    return [found[name] for name in sorted(found)]
