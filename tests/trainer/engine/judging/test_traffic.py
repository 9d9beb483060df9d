"""Shares of whole models: docs/methods.md 8.4 and 11.4, against files of a finished run and counts by hand."""

import json

import pytest
from safetensors.numpy import load_file

from edgefl_trainer.engine.run import shares_of_models


def lines(*rounds: int) -> list[dict]:
    """A line for each reply: rounds of so many sites."""
    return [{"phase": "train", "round": number, "site": str(i)} for number, n in enumerate(rounds) for i in range(n)]


def test_a_share_is_of_the_sites_that_replied():
    """With `--participation` of one site in three, a site that sends its whole model still sends all of it."""
    head = {"model_bytes": 50, "full_model_bytes": 200}
    assert shares_of_models(head, lines(3, 3), 150.0) == {"share_of_models": 1.0, "share_of_full_models": 0.25}
    assert shares_of_models(head, [*lines(1, 1), {"phase": "warm", "round": 0}], 50.0)["share_of_models"] == 1.0
    assert shares_of_models({"full_model_bytes": 200}, lines(2), 4.0) == {"share_of_full_models": 0.01}
    assert shares_of_models(head, [], 0.0) == {}


@pytest.mark.parametrize("method", ["fedavg", "fedevprompt", "local"])
def test_a_full_model_is_what_a_site_scores_with(method, finished):
    """Its own file, but for the temperature that nobody sends, and that of the network."""
    folder = finished[method]
    found = json.loads((folder / "summary.json").read_text())
    kept = load_file(folder / "models/east.safetensors") | load_file(folder / "backbone.safetensors")
    size = sum(value.nbytes for name, value in kept.items() if name != "temperature")
    assert found["full_model_bytes"] == size
    assert found["share_of_full_models"] == pytest.approx(found["bytes_up_per_round"] / (2 * size))
    assert (found["share_of_full_models"] == 0) == (method == "local") and "share_of_models" not in found


def test_a_learned_network_is_the_full_model(mae):
    """`fedmae` sends the encoder and the decoder that learned with it: more than the model that is kept."""
    found = json.loads((mae / "summary.json").read_text())
    assert found["full_model_bytes"] == sum(value.nbytes for value in load_file(mae / "backbone.safetensors").values())
    assert found["share_of_full_models"] > 1
