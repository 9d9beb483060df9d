"""`training.json` of FedCLF and the contract of its two graphs (docs/design.md, sections 7 and 9; check 30)."""

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper
from tests.edge_client.learning.contrast_lab import contrast_plan, encoder_graph, step_graph

from edgefl_protocol.bundle.fedclf_plan import ENCODER, FedCLFPlan, begun
from edgefl_protocol.bundle.learning_plan import GRAPH, RECORD
from edgefl_protocol.bundle.onnx_training import read_plan
from edgefl_protocol.errors import BundleError
from edgefl_protocol.rules.slow_encoder import BUFFER, SLOW

Change = Callable[[Any], None]


def changed(data: bytes, change: Change) -> bytes:
    model = onnx.load_from_string(data)
    change(model)
    made: bytes = model.SerializeToString()
    return made


def parts(step: Change | None = None, encoder: Change | None = None, **plan: Any) -> dict[str, bytes]:
    made, none = contrast_plan(), lambda model: None
    return {
        GRAPH: changed(step_graph(made), step or none),
        ENCODER: changed(encoder_graph(made), encoder or none),
        RECORD: contrast_plan(**plan).to_bytes(),
    }


def code(good: Any, changes: dict[str, bytes]) -> str:
    with pytest.raises(BundleError) as caught:
        good.load(good.resign(changes))
    return caught.value.code


def test_a_bundle_of_this_kind_loads(good: Any) -> None:
    """Graphs, record and the score of another method stand side by side."""
    loaded = good.load(good.resign(parts()))
    assert loaded.training == contrast_plan() and set(loaded.extras) == {GRAPH, ENCODER, RECORD}


def test_its_members_come_together(good: Any) -> None:
    """Neither step, nor encoder, nor record is anything without the others."""
    for missing in (GRAPH, ENCODER, RECORD):
        some = {name: content for name, content in parts().items() if name != missing}
        assert code(good, some) == "wrong_members"


def renamed(which: str, name: str) -> Change:
    def change(model: Any) -> None:
        for value in getattr(model.graph, which):
            if value.name == name:
                value.name = "other"

    return change


def retyped(which: str, name: str, kind: int, dims: list[Any]) -> Change:
    def change(model: Any) -> None:
        values = getattr(model.graph, which)
        for value in values:
            if value.name == name:
                value.CopyFrom(helper.make_tensor_value_info(name, kind, dims))

    return change


FLOAT, INT64 = TensorProto.FLOAT, TensorProto.INT64


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (retyped("input", "head.weight", FLOAT, [128, 4]), "wrong_inputs"),
        (retyped("input", f"{SLOW}backbone.seen", FLOAT, []), "wrong_inputs"),
        (retyped("input", "first", FLOAT, ["B", 3, 8, 8]), "wrong_inputs"),
        (retyped("input", "negatives", FLOAT, [7, 128]), "wrong_inputs"),
        (renamed("input", f"{BUFFER}head.weight"), "wrong_inputs"),
        (retyped("output", "keys", FLOAT, ["B", 64]), "wrong_outputs"),
        (retyped("output", "next.head.weight", FLOAT, ["B", 128, 3]), "wrong_outputs"),
        (renamed("output", "loss"), "wrong_outputs"),
    ],
)
def test_a_step_of_another_network_is_refused(good: Any, change: Change, expected: str) -> None:
    """docs/security.md check 30: names, types and shapes are those of the record, so no output is larger than known."""
    assert code(good, parts(step=change)) == expected


def test_an_encoder_of_another_network_is_refused(good: Any) -> None:
    """The same for the second graph."""
    assert code(good, parts(encoder=retyped("input", "views", FLOAT, ["B", 3, 8, 8]))) == "wrong_inputs"
    assert code(good, parts(encoder=retyped("output", "features", FLOAT, ["B", 64]))) == "wrong_outputs"
    assert code(good, parts(encoder=lambda model: setattr(model.graph.node[0], "op_type", "Loop"))) != ""


def test_a_record_of_another_network_is_refused(good: Any) -> None:
    """The record that is signed with the graphs describes them."""
    assert code(good, parts(parameters={"head.weight": (128, 4)})) == "wrong_inputs"
    assert code(good, parts(view_px=17)) == "wrong_inputs"


def test_a_network_of_single_numbers_is_one_like_others(good: Any) -> None:
    """A parameter without an axis, such as a learned scale, has the shape (): a plan of it, and a refusal in words."""
    assert contrast_plan(parameters={"head.weight": (128, 3), "scale": ()}).shape(f"{SLOW}scale") == ()
    assert code(good, parts(parameters={"head.weight": ()})) == "wrong_inputs"


WRONG: list[dict[str, Any]] = [
    {"kind": "fedmoco"}, {"negatives": "all"}, {"bn": "none"}, {"momentum_encoder": "ema"}, {"balance": "some"},
    {"batch": 1}, {"batch": True}, {"queue": 1}, {"queue": 70_000}, {"view_px": 0}, {"epochs": 0}, {"seed": -1},
    {"lr": -0.1}, {"lr": float("nan")}, {"momentum": 1.5}, {"temperature": 0.0}, {"key_momentum": 2}, {"lr": "fast"},
    {"parameters": {}}, {"parameters": {"w": (0,)}}, {"parameters": {"w": (2**20, 2**20)}},
    {"parameters": {"w": (1.5,)}}, {"parameters": {"rate": (3,)}}, {"parameters": {"momentum.w": (3,)}},
    {"parameters": {"first": (3,)}}, {"parameters": {"x" * 201: (3,)}}, {"counters": ("head.weight",)},
    {"norm": ("nowhere",)},
]  # fmt: skip


@pytest.mark.parametrize("change", WRONG)
def test_values_that_are_not_of_their_form_are_refused(change: dict[str, Any]) -> None:
    """No rate or size of a plan that exists can be negative, infinite or of unknown meaning."""
    with pytest.raises(ValueError, match=r"must|has the name"):
        contrast_plan(**change)


def test_a_record_is_strict() -> None:
    """Missing, unknown and misshapen entries of the JSON."""
    record = json.loads(contrast_plan().to_bytes())
    wrong: list[dict[str, Any]] = [
        {**record, "more": 1}, {name: value for name, value in record.items() if name != "lr"},
        {**record, "parameters": [1]}, {**record, "parameters": {"w": 3}}, {**record, "counters": "one"},
        {**record, "norm": [3]}, {**record, "lr": [0.1]},
    ]  # fmt: skip
    for one in wrong:
        with pytest.raises(ValueError, match=r"must|not known here"):
            read_plan(json.dumps(one).encode())


@given(
    names=st.lists(st.text("abc.", min_size=1, max_size=9), min_size=1, max_size=6, unique=True),
    sides=st.lists(st.integers(1, 9), max_size=4),
    lr=st.floats(0, 10, exclude_min=True),
    batch=st.integers(4, 65_536),
)
def test_a_plan_survives_the_file(names: list[str], sides: list[int], lr: float, batch: int) -> None:
    """Written and read again it is equal, and equal plans give equal bytes."""
    shapes = {name: tuple(sides) for name in names}
    plan = contrast_plan(parameters=shapes, statistics={}, counters=(), norm=(), lr=lr, batch=batch)
    found = read_plan(plan.to_bytes())
    assert found == plan and isinstance(found, FedCLFPlan) and found.to_bytes() == plan.to_bytes()
    assert list(found.parameters) == list(plan.parameters)  # the order of the graph


def test_the_slow_encoder_begins_as_a_copy() -> None:
    """docs/methods.md, FedCLF: a copy of the broadcast encoder, but where one came; buffers of zero."""
    plan = contrast_plan()
    own = {
        "head.weight": np.ones((128, 3), np.float32), "backbone.mean": np.zeros(3, np.float32),
        "backbone.seen": np.asarray(4, np.int64),
    }  # fmt: skip
    theirs = np.full((128, 3), 2, np.float32)
    state = begun(plan, {**own, f"{SLOW}head.weight": theirs})
    assert tuple(state) == plan.state
    assert (state[f"{SLOW}head.weight"] == theirs).all() and int(state[f"{SLOW}backbone.seen"]) == 4
    assert not state[f"{BUFFER}head.weight"].any() and state[f"{BUFFER}head.weight"].shape == (128, 3)
    went_on = begun(plan, {**own, f"{BUFFER}head.weight": theirs})
    assert (went_on[f"{BUFFER}head.weight"] == theirs).all()


def test_a_record_from_before_begins_momentum_afresh() -> None:
    """Bundles from before `optimizer_state` go on as they were; with `keep` its buffers stay on the device."""
    record = json.loads(contrast_plan().to_bytes())
    del record["optimizer_state"]
    assert FedCLFPlan.from_bytes(json.dumps(record).encode()) == contrast_plan()
    assert not [name for name in contrast_plan().stays if name.startswith(BUFFER)]
    keeps = contrast_plan(optimizer_state="keep")
    assert f"{BUFFER}head.weight" in keeps.stays and not [name for name in keeps.leaves if name.startswith(BUFFER)]
    assert contrast_plan().following({"optimizer_state": "keep"}) == keeps
