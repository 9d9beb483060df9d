"""What a device takes for a setting that the federation does not name: the trainer's own default, for every key."""

from pathlib import Path

import pytest
from tests.trainer.methods.test_conformance import value_of

from edgefl_client.learning.round_plan import DEFAULTS, usual_prefix
from edgefl_export.errors import ExportError
from edgefl_export.training_members import learned_method
from edgefl_trainer.engine.models import FinishedRun
from edgefl_trainer.engine.settings import RunSettings, build, hyper_types
from edgefl_trainer.methods import METHODS
from edgefl_trainer.models.vit import prefix_length


@pytest.mark.parametrize("name", sorted(DEFAULTS))
def test_a_devices_defaults_are_the_trainers(name):
    """A key that only one of them knows would be refused by one, or followed by nobody."""
    method = build(METHODS[name], {})
    assert DEFAULTS[name] == {key: value_of(method, key) for key in hyper_types(METHODS[name])}


@pytest.mark.parametrize("tokens", [1, 9, 49, 144, 196, 1024])
def test_the_usual_length_of_prompts_is_the_trainers(tokens):
    """docs/methods.md 1.2: P = round(50·N/196)."""
    assert usual_prefix(tokens) == prefix_length(tokens)


def test_a_run_with_another_optimiser_is_not_exported_for_learning():
    """The step in a bundle is AdamW's; docs/methods.md 1.6."""
    settings = RunSettings(method="fedevprompt", data=("lesions:",), hyper={"optimizer": "sgd"})
    with pytest.raises(ExportError, match="optimizer is sgd; a device learns with adamw"):
        learned_method(FinishedRun(Path("none"), settings, {}, {}))
