"""A run, its bundle and a federation's task hold the same numbers: docs/decisions/0037."""

import math
from dataclasses import fields, replace
from typing import Any

import pytest
from tests.edge_client.learning.contrast_lab import contrast_plan
from tests.protocol.bundle.test_fedevprompt_plan import a_plan

from edgefl_protocol.rules import bounds
from edgefl_trainer.errors import SettingError
from edgefl_trainer.learning.attention_buffer import MapSharing
from edgefl_trainer.learning.evidential import EvidentialRecipe
from edgefl_trainer.learning.unlabelled.contrast import ContrastRecipe
from edgefl_trainer.learning.unlabelled.feature_bank import FeatureNoise
from edgefl_trainer.learning.unlabelled.self_supervised import SgdRecipe

RECIPES = {"fedevprompt": (EvidentialRecipe, MapSharing), "fedclf": (SgdRecipe, ContrastRecipe, FeatureNoise)}
RECORDS: dict[str, Any] = {"fedevprompt": a_plan(), "fedclf": contrast_plan()}

# By hand: what each may hold at its ends, and what lies just outside.
ENDS: dict[str, dict[str, tuple[tuple[float, ...], tuple[float, ...]]]] = {
    "fedevprompt": {
        "lr_b": ((0, 1), (-0.1, 1.1)), "lr_t": ((0, 1), (-0.1, 1.1)), "lr_head": ((0, 1), (-0.1, 1.1)),
        "weight_decay": ((0, 1), (-0.1, 1.1)), "batch": ((1, 65_536), (0, 65_537, 8.0)),
        "b_blocks": ((1, 1000), (0, 1001)), "prompt_length": ((0, 1, 10_000), (-1, 10_001)),
        "anneal_epochs": ((1, 10_000), (0, 10_001)), "prior_floor": ((0, 1), (-0.1, 1.1)),
        "kd_weight": ((0, 1), (-0.1, 1.1)), "maps_per_class": ((1, 100), (0, 101)),
    },
    "fedclf": {
        "lr": ((1e-6, 10), (0, 10.1)), "momentum": ((0, 0.999), (-0.1, 1)), "weight_decay": ((0, 1), (-0.1, 1.1)),
        "batch": ((4, 65_536), (3, 65_537)), "view_px": ((0, 2, 4096), (1, 4097)), "queue": ((2, 65_536), (1, 65_537)),
        "temperature": ((0.001, 10), (0, 10.1)), "key_momentum": ((0, 0.999), (-0.1, 1)),
        "dp_noise": ((0, 0.001, 1000), (1e-4, 1001)), "dp_delta": ((1e-12, 0.1), (0, 0.2)),
    },
}  # fmt: skip
CASES = [(method, name) for method, ends in ENDS.items() for name in ends]


def test_every_setting_with_bounds_stands_in_the_table() -> None:
    """The table above is whole."""
    assert ENDS["fedevprompt"].keys() == bounds.FEDEVPROMPT.keys() and ENDS["fedclf"].keys() == bounds.FEDCLF.keys()


@pytest.mark.parametrize(("method", "name"), CASES)
def test_trainer_and_record_refuse_the_same_values(method: str, name: str) -> None:
    """At both ends, outside them, and for what is no number."""
    (recipe,) = [one for one in RECIPES[method] if name in {entry.name for entry in fields(one)}]
    record, (within, outside) = RECORDS[method], ENDS[method][name]
    in_record = name in {entry.name for entry in fields(record)}
    for value in within:
        assert getattr(recipe(**{name: value}), name) == value
        if in_record and not (name == "view_px" and value == 0):  # a record holds what came of it
            replace(record, **{name: value})
    for value in (*outside, math.nan, math.inf, True, "1"):
        with pytest.raises(SettingError, match=rf"^{name} is .*; allowed: "):
            recipe(**{name: value})
        if in_record:
            with pytest.raises(ValueError, match=rf"^{name} must be a "):
                replace(record, **{name: value})
