"""`training.json` of a method that has no record of its own (docs/design.md, sections 7 and 9; check 30)."""

import json
from typing import Any

import numpy as np
import pytest

from edgefl_protocol.bundle.learning_plan import ScoreFacts
from edgefl_protocol.bundle.onnx_training import read_plan
from edgefl_protocol.bundle.onnx_wire import TensorType
from edgefl_protocol.bundle.step_plan import StepPlan
from edgefl_protocol.errors import BundleError

PLAN = StepPlan(
    kind="headavg", settings={"lr": 0.25, "loss": "ce"}, fixed={"readout": "cls"}, defaults={"lr": 0.1, "loss": "ce"},
    state={"head.bias": ("float32", (3,)), "optimizer.step": ("int64", ())}, figures=("loss",),
    given={"image": ("uint8", (None, 6, 6, 3)), "lr": ("float32", ())}, needs_labels=True, frozen_sha256="5a" * 32,
    batch=8, epochs=2, balance="none", seed=4,
)  # fmt: skip

BAD: dict[str, Any] = {
    "kind": "Head", "settings": {"lr": [1]}, "fixed": {"next.x": 1}, "defaults": 3, "state": {}, "given": {"x": 1},
    "figures": ["head.bias"], "needs_labels": 1, "frozen_sha256": "00", "batch": 0, "epochs": 0, "balance": "some",
    "seed": -1,
}  # fmt: skip
FORMS: list[tuple[str, Any]] = [
    ("state", {"w": ["float32", [None]]}), ("state", {"w": ["float16", [2]]}), ("state", {"w": ["float32", [0]]}),
    ("state", {"w": ["float32", [2**14, 2**14]]}), ("state", {"w w": ["int64", []]}), ("state", {"w": "float32"}),
    ("given", {"x": ["uint8", [2, None]]}), ("given", {"x": [["uint8"], [2]]}),
]  # fmt: skip


def test_a_record_survives_its_bytes() -> None:
    """Reading what was written gives the same record, and equal records equal bytes."""
    found = read_plan(PLAN.to_bytes())
    assert found == PLAN and found.to_bytes() == PLAN.to_bytes()


@pytest.mark.parametrize(("name", "value"), [*BAD.items(), *FORMS])
def test_a_record_of_another_form_is_refused(name: str, value: object) -> None:
    """docs/security.md check 30: what a step keeps is known and bounded before any graph runs."""
    record = json.loads(PLAN.to_bytes())
    for changed in ({**record, name: value}, {**record, "more": 1}, {k: v for k, v in record.items() if k != name}):
        with pytest.raises(ValueError, match=r"must|not known here"):
            read_plan(json.dumps(changed).encode())


def test_the_graph_takes_the_bundles_tensors_and_gives_the_state_back() -> None:
    """What a step learned can be put where it came from, and no output is larger than what went in."""
    bias, prior = TensorType("float32", (3,)), TensorType("float32", (4,))
    score = ScoreFacts({"head.bias": bias, "prior": prior, "temperature": TensorType("float32", ())}, {}, 6)
    (contract,) = PLAN.graphs(score).values()
    count, number = TensorType("int64", ()), TensorType("float32", ())
    image = TensorType("uint8", (None, 6, 6, 3))
    assert contract.inputs == {
        "image": image, "lr": number, "head.bias": bias, "optimizer.step": count, "prior": prior,
    }  # fmt: skip
    assert contract.outputs == {"loss": number, "next.head.bias": bias, "next.optimizer.step": count}
    with pytest.raises(BundleError, match=r"training step and the bundle differ in head\.bias"):
        PLAN.graphs(ScoreFacts({"head.bias": prior}, {}, 6))


def test_learning_begins_with_the_bundles_values() -> None:
    """And with zeros for what the bundle does not hold; constants are the rest, but for the temperature."""
    weights = {"head.bias": np.ones(3, np.float32), "prior": np.ones(4, np.float32), "temperature": np.float32(2)}
    state = PLAN.started(weights)
    assert state["head.bias"].tolist() == [1, 1, 1] and int(state["optimizer.step"]) == 0
    assert state["head.bias"] is not weights["head.bias"]
    assert set(PLAN.constants(weights)) == {"prior"} and PLAN.numbers() == {"lr": np.float32(0.25)}


def test_settings_are_followed_in_their_own_kind() -> None:
    """A coordinator that errs: a word for a number is refused, as are values that no record can hold."""
    changed = PLAN.following({"lr": 0.5, "batch": 4, "readout": "mean"})
    assert (changed.settings["lr"], changed.batch, changed.fixed) == (0.5, 4, PLAN.fixed)
    wrong: list[dict[str, Any]] = [{"lr": "fast"}, {"loss": 3}, {"lr": True}, {"batch": 0}, {"lr": float("nan")}]
    for told in wrong:
        with pytest.raises(ValueError, match="must be"):
            PLAN.following(told)
