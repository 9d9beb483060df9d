"""What a device takes for a setting that the federation does not name: the trainer's own default, for every key."""

import pytest
from tests.trainer.methods.test_conformance import value_of

from edgefl_client.learning.agreed import DEFAULTS
from edgefl_trainer.engine.settings import build, hyper_types
from edgefl_trainer.methods import METHODS


@pytest.mark.parametrize("name", sorted(DEFAULTS))
def test_a_devices_defaults_are_the_trainers(name):
    """A key that only one of them knows would be refused by one, or followed by nobody."""
    method = build(METHODS[name], {})
    assert DEFAULTS[name] == {key: value_of(method, key) for key in hyper_types(METHODS[name])}
