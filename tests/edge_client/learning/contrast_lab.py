"""A bundle that learns FedCLF, made by hand: an encoder of one matrix on mean colours, pushed away.

    feature = unit(mean colour · wᵀ)      loss = mean over pictures and negatives of (mean colour · wᵀ)·negative

The gradient of that loss is an outer product of two means, so a round can be followed in a few lines of numpy.
"""

from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from edgefl_protocol.bundle import Bundle, BundleFields, build_bundle, load_bundle
from edgefl_protocol.bundle.archive import read_archive
from edgefl_protocol.bundle.fedclf_plan import ENCODER, FedCLFPlan
from edgefl_protocol.bundle.learning_plan import GRAPH, RECORD

FLOAT, INT64 = TensorProto.FLOAT, TensorProto.INT64
VIEW_PX = 16


def contrast_plan(**changes: Any) -> FedCLFPlan:
    values: dict[str, Any] = {
        "parameters": {"head.weight": (128, 3)}, "statistics": {"backbone.mean": (3,)}, "counters": ("backbone.seen",),
        "norm": ("backbone.mean", "backbone.seen"), "view_px": VIEW_PX, "lr": 0.5, "momentum": 0.9,
        "weight_decay": 0.01, "batch": 4, "bn": "averaged", "queue": 10, "temperature": 0.2, "key_momentum": 0.9,
        "momentum_encoder": "reset", "negatives": "remote", "epochs": 2, "balance": "none", "seed": 5,
    }  # fmt: skip
    return FedCLFPlan(**{**values, **changes})


def contrast_bytes(lab: SimpleNamespace, plan: FedCLFPlan) -> bytes:
    """The file of a bundle that learns as `plan` says."""
    members = {
        name: content
        for name, content in read_archive(lab.bundle_bytes()).items()
        if not name.startswith(("manifest", "signatures"))
    }
    members |= {GRAPH: step_graph(plan), ENCODER: encoder_graph(plan), RECORD: plan.to_bytes()}
    fields = BundleFields(federation="skin", line="main", task="all", version=1, created_ms=lab.NOW_MS)
    return build_bundle(members, fields, [lab.SIGNER])


def contrast_bundle(lab: SimpleNamespace, plan: FedCLFPlan) -> Bundle:
    """The same, verified."""
    return load_bundle(contrast_bytes(lab, plan), [lab.SIGNER.public], lab.NOW_MS)


def _encode(view: str, weight: str, out: str) -> list[onnx.NodeProto]:
    node = helper.make_node
    return [
        node("ReduceMean", [view, "spatial"], [f"{out}.colour"], keepdims=0),  # (B, 3)
        node("Transpose", [weight], [f"{out}.t"], perm=[1, 0]),
        node("MatMul", [f"{out}.colour", f"{out}.t"], [f"{out}.raw"]),
        node("ReduceSumSquare", [f"{out}.raw", "last"], [f"{out}.square"], keepdims=1),
        node("Sqrt", [f"{out}.square"], [f"{out}.length"]),
        node("Div", [f"{out}.raw", f"{out}.length"], [out]),
    ]


def _moved(prefix: str, colour: str) -> list[onnx.NodeProto]:
    node = helper.make_node
    return [
        node("ReduceMean", [colour, "first_axis"], [f"{prefix}now"], keepdims=0),
        node("Mul", [f"{prefix}backbone.mean", "keep"], [f"{prefix}old"]),
        node("Mul", [f"{prefix}now", "take"], [f"{prefix}new"]),
        node("Add", [f"{prefix}old", f"{prefix}new"], [f"next.{prefix}backbone.mean"]),
        node("Add", [f"{prefix}backbone.seen", "one64"], [f"next.{prefix}backbone.seen"]),
    ]


def step_graph(plan: FedCLFPlan) -> bytes:
    node, buffer, slow = helper.make_node, "optimizer.momentum_buffer.head.weight", "momentum.head.weight"
    nodes = [
        node("Sub", ["one", "key_momentum"], ["rest"]),
        node("Mul", [slow, "key_momentum"], ["slow.old"]),
        node("Mul", ["head.weight", "rest"], ["slow.new"]),
        node("Add", ["slow.old", "slow.new"], [f"next.{slow}"]),
        *_encode("first", "head.weight", "query"),
        *_encode("second", f"next.{slow}", "keys"),
        node("ReduceMean", ["query.colour", "first_axis"], ["colour"], keepdims=1),  # (1, 3)
        node("ReduceMean", ["negatives", "first_axis"], ["negative"], keepdims=1),  # (1, 128)
        node("Transpose", ["negative"], ["column"], perm=[1, 0]),
        node("MatMul", ["column", "colour"], ["gradient"]),
        node("Mul", ["head.weight", "gradient"], ["product"]),
        node("ReduceSum", ["product"], ["loss"], keepdims=0),
        node("Mul", [buffer, "momentum"], ["buffer.old"]),
        node("Mul", ["head.weight", "weight_decay"], ["decay"]),
        node("Add", ["gradient", "decay"], ["pull"]),
        node("Add", ["buffer.old", "pull"], [f"next.{buffer}"]),
        node("Mul", [f"next.{buffer}", "rate"], ["change"]),
        node("Sub", ["head.weight", "change"], ["next.head.weight"]),
        *_moved("", "query.colour"),
        *_moved("momentum.", "keys.colour"),
    ]
    return _model("train_step", nodes, list(plan.inputs), list(plan.outputs), plan)


def encoder_graph(plan: FedCLFPlan) -> bytes:
    return _model("encode", _encode("views", "head.weight", "features"), ["views", "head.weight"], ["features"], plan)


def _model(name: str, nodes: list[onnx.NodeProto], inputs: list[str], outputs: list[str], plan: FedCLFPlan) -> bytes:
    views = (FLOAT, ["B", 3, plan.view_px, plan.view_px])
    kinds: dict[str, tuple[int, list[Any]]] = dict.fromkeys(("first", "second", "views"), views)
    kinds |= {"negatives": (FLOAT, ["Q", 128]), "keys": (FLOAT, ["B", 128]), "features": (FLOAT, ["B", 128])}
    for tensor in plan.state:
        whole = tensor.removeprefix("momentum.") in plan.counters
        kinds[tensor] = kinds[f"next.{tensor}"] = (INT64 if whole else FLOAT, list(plan.shape(tensor)))
    constants = {
        "spatial": np.array([2, 3]), "last": np.array([-1]), "first_axis": np.array([0]), "one": np.float32(1),
        "one64": np.int64(1), "keep": np.float32(0.9), "take": np.float32(0.1),
    }  # fmt: skip
    used = {one for node in nodes for one in node.input}
    stored = [numpy_helper.from_array(np.asarray(value), key) for key, value in constants.items() if key in used]
    info = helper.make_tensor_value_info
    given, made = ([info(one, *kinds.get(one, (FLOAT, []))) for one in names] for names in (inputs, outputs))
    model = helper.make_model(
        helper.make_graph(nodes, name, given, made, stored), opset_imports=[helper.make_opsetid("", 18)], ir_version=9
    )
    onnx.checker.check_model(model)
    data: bytes = model.SerializeToString()
    return data
