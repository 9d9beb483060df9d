"""`training.json` and the contract of `train_step.onnx` (docs/design.md, sections 7 and 9)."""

import json
from collections.abc import Callable
from typing import Any

import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper

from edgefl_protocol.bundle.fedevprompt_plan import FedEvPromptPlan, PromptForm, constants, fresh_state
from edgefl_protocol.bundle.learning_plan import GRAPH, RECORD, ScoreFacts
from edgefl_protocol.bundle.onnx_wire import TensorType, read_graph
from edgefl_protocol.errors import BundleError

FLOAT, INT64, UINT8 = TensorProto.FLOAT, TensorProto.INT64, TensorProto.UINT8


FORM = PromptForm(
    network="5a" * 32, prompts="bt", b_blocks=3, prompt_length=50, prefix="after", evidence="softplus", readout="cls",
    head_norm="none", rollout="renormalise", kd_metric="bilinear",
)  # fmt: skip


def a_plan(trained: tuple[str, ...] = ("head.bias",), **changes: Any) -> FedEvPromptPlan:
    values: dict[str, Any] = {
        "trained": trained, "rates": dict.fromkeys(trained, 5e-4), "weight_decay": 0.01, "batch": 32, "epochs": 2,
        "epochs_before": 10, "anneal_epochs": 10, "anneal_clock": "run", "kd_weight": 1e-6, "kd_peers": "sum",
        "prior_floor": 0.01, "balance": "none", "augment": "dihedral", "seed": 0, "form": FORM,
    }  # fmt: skip
    return FedEvPromptPlan(**{**values, **changes})


def step_model(good: Any, plan: FedEvPromptPlan) -> Any:
    """A graph of the right signature that changes nothing."""
    bundle = good.load()
    score = read_graph(good.members["score.onnx"])
    shapes: dict[str, tuple[int, list[Any]]] = {
        name: (INT64 if value.dtype.kind == "i" else FLOAT, list(value.shape))
        for name, value in {**fresh_state(plan, bundle.weights), **constants(plan, bundle.weights)}.items()
    }
    side, classes = bundle.preprocess.size, len(bundle.labels.classes)
    tokens = score.outputs["map"].dims[-1]
    shapes |= {"image": (UINT8, ["B", side, side, 3]), "target": (INT64, ["B"])}
    shapes |= {"peers.means": (FLOAT, [classes, tokens]), "peers.counts": (FLOAT, [classes])}
    info = helper.make_tensor_value_info
    names = [*plan.inputs, *constants(plan, bundle.weights)]
    inputs = [info(name, *shapes.get(name, (FLOAT, []))) for name in names]
    outputs = [info(name, *shapes.get(name.removeprefix("next."), (FLOAT, []))) for name in plan.outputs]
    nodes = [helper.make_node("Identity", [name], [f"next.{name}"]) for name in plan.state]
    nodes += [helper.make_node("Identity", ["kl_weight"], [name]) for name in ("loss", "kd", "dead")]
    model = helper.make_model(helper.make_graph(nodes, "step", inputs, outputs), ir_version=9)
    onnx.checker.check_model(model)
    return model


def members(good: Any, plan: FedEvPromptPlan, change: Callable[[Any], None] = lambda model: None) -> dict[str, bytes]:
    model = step_model(good, plan)
    change(model)
    return {GRAPH: model.SerializeToString(), RECORD: plan.to_bytes()}


def code(good: Any, changes: dict[str, bytes]) -> str:
    with pytest.raises(BundleError) as caught:
        good.load(good.resign(changes))
    return caught.value.code


def test_a_learning_bundle_loads(good: Any) -> None:
    """A bundle with both members carries its plan; one without has none."""
    plan = a_plan()
    loaded = good.load(good.resign(members(good, plan)))
    assert loaded.training == plan and set(loaded.extras) == {GRAPH, RECORD}
    assert good.load().training is None


def test_the_two_members_come_together(good: Any) -> None:
    """Neither a graph without its record nor a record without its graph is anything a device can use."""
    both = members(good, a_plan())
    assert [code(good, {name: both[name]}) for name in (GRAPH, RECORD)] == ["wrong_members"] * 2


def retyped(which: str, name: str, kind: int, dims: list[Any]) -> Callable[[Any], None]:
    def change(model: Any) -> None:
        for value in getattr(model.graph, which):
            if value.name == name:
                value.CopyFrom(helper.make_tensor_value_info(name, kind, dims))

    return change


def renamed(which: str, name: str) -> Callable[[Any], None]:
    def change(model: Any) -> None:
        for value in getattr(model.graph, which):
            value.name = "other" if value.name == name else value.name

    return change


WRONG: dict[str, tuple[Callable[[Any], None], str]] = {
    "picture of another size": (retyped("input", "image", UINT8, ["B", 9, 9, 3]), "wrong_inputs"),
    "labels of another type": (retyped("input", "target", FLOAT, ["B"]), "wrong_inputs"),
    "moments of another shape": (retyped("input", "optimizer.exp_avg.head.bias", FLOAT, [99]), "wrong_inputs"),
    "peers of another class count": (retyped("input", "peers.counts", FLOAT, [99]), "wrong_inputs"),
    "step count as a float": (retyped("input", "optimizer.step", FLOAT, []), "wrong_inputs"),
    "a rate under another name": (renamed("input", "rate.head.bias"), "wrong_inputs"),
    "a value of another shape": (retyped("output", "next.head.bias", FLOAT, [4000, 4000]), "wrong_outputs"),
    "a free length": (retyped("output", "next.head.bias", FLOAT, ["N"]), "wrong_outputs"),
    "a loss for each picture": (retyped("output", "loss", FLOAT, ["B"]), "wrong_outputs"),
    "no loss": (renamed("output", "loss"), "wrong_outputs"),
}


@pytest.mark.parametrize("name", sorted(WRONG))
def test_a_graph_of_another_signature_is_refused(good: Any, name: str) -> None:
    """docs/security.md check 30: what a step takes and gives is known before it runs, correctly signed or not."""
    change, expected = WRONG[name]
    assert code(good, members(good, a_plan(), change)) == expected


def test_a_tensor_the_bundle_lacks_cannot_learn(good: Any) -> None:
    """The record names only tensors of the bundle, and neither what is fitted afterwards nor what is counted."""
    for name in ("prompts.none", "temperature", "prior"):
        changed = {**members(good, a_plan()), RECORD: a_plan(("head.bias", name)).to_bytes()}
        assert code(good, changed) == "wrong_inputs", name


def test_softmax_models_have_no_evidential_step(good: Any) -> None:
    """The contract asks for evidence and a map."""
    weights = {"head.bias": TensorType("float32", (3,))}
    with pytest.raises(BundleError, match="evidence and a map"):
        a_plan().graphs(ScoreFacts(weights, {}, good.load().preprocess.size))


BAD: dict[str, Any] = {
    "kind": "fedclf2", "trained": [], "rates": {"head.bias": -1.0}, "weight_decay": 2, "batch": 0, "epochs": 1.5,
    "epochs_before": -1, "anneal_epochs": 0, "anneal_clock": "wall", "kd_weight": True, "kd_peers": [],
    "prior_floor": "1", "balance": None, "augment": "crop", "seed": 2**40, "form": "bt",
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(BAD))
def test_a_setting_of_another_form_is_refused(good: Any, name: str) -> None:
    """A signed record is no less strict: no negative rate, no unknown word, no number in quotes."""
    record = json.loads(a_plan().to_bytes())
    changed = {**members(good, a_plan()), RECORD: json.dumps({**record, name: BAD[name]}).encode()}
    assert code(good, changed) == "bad_training"
    less = {key: value for key, value in record.items() if key != name}
    assert code(good, {**changed, RECORD: json.dumps(less).encode()}) == "bad_training"
    assert code(good, {**changed, RECORD: json.dumps({**record, "more": 1}).encode()}) == "bad_training"


BAD_FORMS: dict[str, Any] = {
    "network": "5A" * 32, "prompts": "none", "b_blocks": -1, "prompt_length": 0, "prefix": "auto", "evidence": "square",
    "readout": "pooled", "head_norm": [], "rollout": None, "kd_metric": "cubic",
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(BAD_FORMS))
def test_a_graph_is_described_in_known_words(good: Any, name: str) -> None:
    """Decision 0028: a device holds what stands in the graph against its federation's task, so nothing may be open."""
    record = json.loads(a_plan().to_bytes())
    form = record["form"]
    less = {key: value for key, value in form.items() if key != name}
    for wrong in ({**form, name: BAD_FORMS[name]}, less, {**form, "more": 1}):
        changed = {**members(good, a_plan()), RECORD: json.dumps({**record, "form": wrong}).encode()}
        assert code(good, changed) == "bad_training"


@given(st.floats(0, 1), st.integers(1, 1024), st.sampled_from(["sum", "mean5"]), st.integers(0, 2**31 - 1))
def test_a_plan_survives_its_bytes(rate: float, batch: int, peers: Any, seed: int) -> None:
    """Reading what was written gives the same plan, and equal plans equal bytes."""
    plan = a_plan(rates={"head.bias": rate}, batch=batch, kd_peers=peers, seed=seed)
    assert FedEvPromptPlan.from_bytes(plan.to_bytes()) == plan
    assert FedEvPromptPlan.from_bytes(plan.to_bytes()).to_bytes() == plan.to_bytes()


def test_the_annealing_goes_on_where_the_run_stopped() -> None:
    """docs/methods.md 1.3 and 1.6: min(1, t/10), t counts epochs over all rounds, or from each round's start."""
    fresh = a_plan(epochs_before=0)
    assert [fresh.kl_weight(r, e) for r, e in ((1, 0), (1, 1), (3, 1), (6, 0), (9, 1))] == [0, 0.1, 0.5, 1, 1]
    assert a_plan().kl_weight(1, 0) == 1
    assert a_plan(anneal_clock="round", epochs_before=0).kl_weight(7, 1) == 0.1
