"""`benchmarks/causes/distillation_gradient.py`: norms of both terms of FedEvPrompt's loss (docs/methods.md 1.5)."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from benchmarks.causes import distillation_gradient
from click.testing import CliRunner

from edgefl_protocol import Payload
from edgefl_protocol.rules.maps import broadcast_name


@pytest.fixture(scope="module")
def script() -> dict:
    return vars(distillation_gradient)


def measured(script, folder: Path, *more: str) -> dict:
    outcome = CliRunner().invoke(script["main"], ["--run", str(folder), "--site", "east", "--json", *more])
    assert outcome.exit_code == 0, outcome.output
    return json.loads(outcome.stdout)


@pytest.fixture(scope="module")
def found(script, finished) -> dict:
    return measured(script, finished["fedevprompt"])


def test_the_term_is_linear_in_lambda(script, finished, found, tmp_path):
    """Ten times lambda is ten times its value and gradient, and leaves the evidential loss alone."""
    folder = shutil.copytree(finished["fedevprompt"], tmp_path / "run")
    config = (folder / "config.toml").read_text()
    (folder / "config.toml").write_text(config.replace("[hyper]", "[hyper]\nkd_weight = 1e-5"))
    one, ten = found, measured(script, folder)
    assert (one["site"], one["images"], one["kd_weight"]) == ("east", 13, 1e-6)
    assert one["evidential"] == ten["evidential"]
    for name in ("value", "prompts.b"):
        assert ten["distillation"][name] == pytest.approx(10 * one["distillation"][name], rel=1e-4) != 0
    assert one["ratio"]["prompts.b"] == one["distillation"]["prompts.b"] / one["evidential"]["prompts.b"]


def test_prompts_of_the_last_block_get_nothing(found):
    """docs/methods.md 1.4: exactly zero under `renormalise`; the tiny network's one t-block is its last."""
    assert found["distillation"]["prompts.t"] == found["ratio"]["prompts.t"] == 0.0
    assert found["evidential"]["prompts.t"] > 0


def test_the_whole_term_is_the_mean_squared_distance_to_every_map(script, finished, found):
    """Eq. 7 written out: each peer's maps at 224 px, one by one (docs/methods.md 1.5), constant included. One peer that
    sent the mean of a class, as `tiny` has it, has nothing around it."""
    assert found["whole_distillation"] == found["distillation"]["value"] > 0
    spread = script["spread_of_maps"]
    one, two = np.array([[1.0, 0.0], [0.0, 1.0]]), np.array([[1.0, 1.0]])
    own, gram = np.array([0.25, 0.5]), np.array([[2.0, 0.5], [0.5, 1.0]])
    maps = {broadcast_name(0, 1): one, broadcast_name(1, 1): two}

    def apart(rows):
        return np.mean([(own - row) @ gram @ (own - row) for row in rows])

    middle = (one.mean(axis=0) + two.mean(axis=0)) / 2
    about_the_mean = 2 * (own - middle) @ gram @ (own - middle)
    assert about_the_mean + spread(maps, [1], gram) == pytest.approx(apart(one) + apart(two))
    assert spread(maps, [0], gram) == 0.0


def test_prefixes_take_about_their_part_of_the_keys(found):
    """Keys near zero beside keys of any scale: the tiny network's 9 patches and class token have 2 prefixes."""
    assert found["prefix_attention"] == pytest.approx(2 / 12, abs=0.05)


def shifted(source: Path, folder: Path, name: str, by: float, at: tuple[int, ...]) -> Path:
    """A copy of the run in which one number of east's prompts is moved."""
    shutil.copytree(source, folder)
    latest = json.loads((folder / "checkpoints" / "latest.json").read_text())
    file = folder / "checkpoints" / latest["sites"]["east"]
    payload = Payload.from_bytes(file.read_bytes())
    arrays = {key: value.copy() for key, value in payload.arrays.items()}
    arrays[name][at] += by
    file.write_bytes(Payload(arrays, payload.scalars).to_bytes())
    return folder


def test_no_direction_is_steeper_than_the_gradient_says(script, finished, found, tmp_path):
    """Finite differences of the reported values in two single numbers: their squares stay within the squared norm."""
    step, total = 0.02, dict.fromkeys(("evidential", "distillation"), 0.0)
    for i, at in enumerate([(0, 0, 0, 0, 0), (1, 1, 0, 1, 2)]):
        up, down = (
            measured(script, shifted(finished["fedevprompt"], tmp_path / f"{i}{sign}", "prompts.b", sign * step, at))
            for sign in (1, -1)
        )
        for label in total:
            total[label] += ((up[label]["value"] - down[label]["value"]) / (2 * step)) ** 2
    for label, squares in total.items():
        assert 0 < np.sqrt(squares) <= 1.02 * found[label]["prompts.b"]


def test_other_methods_and_sites_are_refused_in_one_sentence(script, finished):
    for folder, site, words in (("local", "east", "name one of fedevprompt"), ("fedevprompt", "north", "has no site")):
        outcome = CliRunner().invoke(script["main"], ["--run", str(finished[folder]), "--site", site])
        assert outcome.exit_code == 1 and words in outcome.output
