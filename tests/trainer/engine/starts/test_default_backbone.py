"""Which network a run stands on when none is named: what `run` says in its first line, and in `--help`."""

import pytest
from tests.trainer.conftest import edgefl_train

from edgefl_trainer.contract import declared
from edgefl_trainer.engine.settings import resolve
from edgefl_trainer.errors import SettingError
from edgefl_trainer.methods import METHODS
from edgefl_trainer.models.backbone_names import has_own_weights
from edgefl_trainer.models.shipped import USUAL, shipped_backbones

WARD = ("folder:x",)


@pytest.mark.parametrize("method", sorted(METHODS))
@pytest.mark.parametrize("preset", ["bench84", "paper"])
def test_no_method_with_labels_stands_on_an_untrained_network_unless_told(method, preset):
    settings = resolve(method, {"data": WARD, "preset": preset}, None, [])
    assert (settings.backbone == "derm-vit-tiny-84") == METHODS[method].needs_labels
    assert has_own_weights(settings.backbone) or declared(METHODS[method]).encoder is not None


def test_a_named_network_and_a_named_size_count():
    assert resolve("local", {"data": WARD, "backbone": "run:a"}, None, []).backbone == "run:a"
    assert resolve("local", {"data": WARD, "image_px": 84}, None, []).backbone == "derm-vit-tiny-84"
    with pytest.raises(SettingError, match=r"no network that comes with EdgeFL takes images of 200 px"):
        resolve("local", {"data": WARD, "image_px": 200}, None, [])


def test_help_and_files_name_the_same_networks():
    assert set(USUAL.values()) <= shipped_backbones().keys()
    assert "[default: derm-vit-tiny-84" in " ".join(edgefl_train("run", "--help").out.split())


@pytest.mark.parametrize(
    ("method", "options", "line"),
    [
        ("head", (), "backbone derm-vit-tiny-84, for images of 84 px: trained, stays as it is"),
        ("head", ("--preset", "tiny"), "backbone tiny, for images of 84 px: untrained, stays as it is"),
        ("fedmae", ("--preset", "tiny"), "backbone tiny, for images of 84 px: starts from random weights"),
        ("random-init", (), "backbone cnn:resnet18, for images of 72 px: starts from random weights"),
    ],
)
def test_a_run_as_typed_names_its_network_in_the_first_line(method, options, line, ward, tmp_path, monkeypatch):
    def stop(*_: object) -> None:
        raise KeyboardInterrupt  # before any learning

    monkeypatch.setattr("edgefl_trainer.engine.run.run_phases", stop)
    outcome = edgefl_train("run", method, "--data", ward, "--out", tmp_path / "run", *options)
    assert outcome.err.splitlines()[0].startswith(line), outcome.err


@pytest.mark.parametrize(
    ("chosen", "until"),
    [
        (("--rounds", 3, "--epochs", 2), "epoch 6 of the run"),
        (("--rounds", 3, "--epochs", 2, "--set", "anneal_epochs=2"), "epoch 3 of the run"),
        (("--rounds", 3, "--epochs", 2, "--set", "anneal_clock=round"), "epoch 2 of each round"),
        (("--rounds", 3, "--epochs", 1, "--set", "anneal_clock=round"), None),
        (("--rounds", 3, "--epochs", 2, "--set", "loss=ce"), None),
    ],
)
def test_why_a_loss_may_rise_is_said_once(chosen, until, ward, tmp_path, monkeypatch):
    """docs/methods.md 1.3: the weight of the KL term is min(1, t / anneal_epochs), 0 in the first epoch."""

    def stop(*_: object) -> None:
        raise KeyboardInterrupt  # before any learning

    monkeypatch.setattr("edgefl_trainer.engine.run.run_phases", stop)
    run = ("run", "local", "--data", ward, "--out", tmp_path / "run", "--preset", "tiny")
    found = [line for line in edgefl_train(*run, *chosen).err.splitlines() if "loss may rise" in line]
    told = [f"the loss may rise until {until}: the weight of its KL term grows till then (--set anneal_epochs)"]
    assert found == (told if until else [])
