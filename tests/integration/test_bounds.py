"""A run, its bundle and a federation's task hold the same numbers: docs/decisions/0037."""

import math
from dataclasses import fields, replace
from typing import Any

import pytest
from tests.coordinator.conftest import settings_table
from tests.edge_client.learning.contrast_lab import contrast_plan
from tests.protocol.bundle.test_fedevprompt_plan import a_plan
from tests.protocol.test_messages import TASK

from edgefl_coordinator.settings import settings_from_table
from edgefl_protocol import EdgeflError, Payload
from edgefl_protocol.messages.requests import TaskReply
from edgefl_protocol.rules import bounds
from edgefl_trainer.engine.settings import resolve
from edgefl_trainer.errors import SettingError
from edgefl_trainer.learning.evidential import EvidentialRecipe
from edgefl_trainer.learning.maps.sharing import MapSharing
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
        "rollout_from": ((0, 999), (-1, 1000)),
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


def holders(name: str, value: Any) -> dict[str, Any]:
    """How each that has epochs and a seed is made: a run, a task in `config.toml` and on the wire, records."""
    wire = Payload({}, {**TASK.to_payload().scalars, name: value})
    records = {kind: (lambda one=one: replace(one, **{name: value})) for kind, one in RECORDS.items()}
    return records | {
        "run": lambda: resolve("local", {"data": ("lesions:sites=2",), "preset": "tiny", name: value}, None, ()),
        "config": lambda: settings_from_table(settings_table(task={name: value})),
        "task": lambda: TaskReply.from_payload(wire),
    }


# By hand, as above; a task whose epochs are 0 does not tell them.
OF_ALL = {"epochs": ((1, 10_000), (-1, 10_001)), "seed": ((0, 2_147_483_647), (-1, 2_147_483_648))}


@pytest.mark.parametrize("name", OF_ALL)
def test_run_task_and_record_hold_the_same_epochs_and_seeds(name: str) -> None:
    """At both ends, and just outside them: what a run was given, its task and its bundle can hold."""
    within, outside = OF_ALL[name]
    for value in within:
        assert all(make() is not None for make in holders(name, value).values())
    for value in outside:
        for where, make in holders(name, value).items():
            with pytest.raises((ValueError, EdgeflError), match=name):
                pytest.fail(f"{where} takes {make()}")
