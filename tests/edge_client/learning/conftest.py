"""A bundle that learns: softmax regression on mean colours, its step written out in ONNX operators by hand."""

import csv
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from PIL import Image

from edgefl_client.home import Home
from edgefl_protocol.bundle import Bundle, BundleFields, build_bundle, load_bundle
from edgefl_protocol.training import GRAPH, RECORD, TrainingPlan

TRAINED = ("head.weight", "head.bias")
COLOURS = {"MEL": (90, 60, 50), "NV": (180, 120, 90), "BCC": (200, 90, 90)}


def a_plan(**changes: Any) -> TrainingPlan:
    values: dict[str, Any] = {
        "trained": TRAINED, "rates": {"head.weight": 0.5, "head.bias": 0.1}, "weight_decay": 0.01, "batch": 4,
        "epochs": 2, "epochs_before": 0, "anneal_epochs": 10, "anneal_clock": "run", "kd_weight": 1e-6,
        "kd_peers": "sum", "prior_floor": 0.01, "balance": "none", "augment": "dihedral", "seed": 3,
    }  # fmt: skip
    return TrainingPlan(**{**values, **changes})


def step_graph(plan: TrainingPlan, weights: dict[str, np.ndarray], size: int, grid: int) -> bytes:
    """value − rate·m, m = 0.9·m + 0.1·g, g of the cross-entropy of softmax(x·wᵀ + b); the map term is left out."""
    node, classes = helper.make_node, len(weights["head.bias"])
    constants = {
        "c255": np.float32(255), "spatial": np.array([1, 2]), "last": np.array([-1]), "first": np.array([0]),
        "eye": np.eye(classes, dtype=np.float32), "keep": np.float32(0.9), "take": np.float32(0.1),
        "one64": np.int64(1), "none": np.float32(0), "tiny": np.float32(1e-9),
    }  # fmt: skip
    nodes = [
        node("Cast", ["image"], ["float"], to=TensorProto.FLOAT),
        node("Div", ["float", "c255"], ["scaled"]),
        node("ReduceMean", ["scaled", "spatial"], ["x"], keepdims=0),  # (B, 3)
        node("Transpose", ["head.weight"], ["wt"], perm=[1, 0]),
        node("MatMul", ["x", "wt"], ["xw"]),
        node("Add", ["xw", "head.bias"], ["logits"]),
        node("Softmax", ["logits"], ["p"], axis=-1),
        node("Gather", ["eye", "target"], ["y"]),
        node("Mul", ["p", "y"], ["own"]),
        node("ReduceSum", ["own", "last"], ["chance"], keepdims=0),
        node("Max", ["chance", "tiny"], ["safe"]),
        node("Log", ["safe"], ["log"]),
        node("ReduceMean", ["log"], ["mean"], keepdims=0),
        node("Neg", ["mean"], ["loss"]),
        node("Identity", ["none"], ["kd"]),
        node("Identity", ["none"], ["dead"]),
        node("Sub", ["p", "y"], ["gap"]),
        node("ReduceMean", ["gap", "first"], ["g.head.bias"], keepdims=0),
        node("Transpose", ["gap"], ["gt"], perm=[1, 0]),
        node("MatMul", ["gt", "x"], ["g.head.weight"]),
        node("Add", ["optimizer.step", "one64"], ["next.optimizer.step"]),
    ]
    for name in plan.trained:
        first, second = f"optimizer.exp_avg.{name}", f"optimizer.exp_avg_sq.{name}"
        nodes += [
            node("Mul", [first, "keep"], [f"a.{name}"]),
            node("Mul", [f"g.{name}", "take"], [f"b.{name}"]),
            node("Add", [f"a.{name}", f"b.{name}"], [f"next.{first}"]),
            node("Identity", [second], [f"next.{second}"]),
            node("Mul", [f"next.{first}", f"rate.{name}"], [f"c.{name}"]),
            node("Sub", [name, f"c.{name}"], [f"next.{name}"]),
        ]
    shapes: dict[str, tuple[int, list[Any]]] = {
        "image": (TensorProto.UINT8, ["B", size, size, 3]), "target": (TensorProto.INT64, ["B"]),
        "optimizer.step": (TensorProto.INT64, []), "peers.means": (TensorProto.FLOAT, [classes, grid * grid]),
        "peers.counts": (TensorProto.FLOAT, [classes]),
    }  # fmt: skip
    for name in plan.trained:
        for moment in ("", "optimizer.exp_avg.", "optimizer.exp_avg_sq."):
            shapes[moment + name] = (TensorProto.FLOAT, list(weights[name].shape))
    fixed = [name for name in weights if name not in plan.trained and name != "temperature"]
    shapes |= {name: (TensorProto.FLOAT, list(weights[name].shape)) for name in fixed}
    info = helper.make_tensor_value_info
    inputs = [info(name, *shapes.get(name, (TensorProto.FLOAT, []))) for name in (*plan.inputs, *fixed)]
    outputs = [info(name, *shapes.get(name.removeprefix("next."), (TensorProto.FLOAT, []))) for name in plan.outputs]
    stored = [numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()]
    graph = helper.make_graph(nodes, "train_step", inputs, outputs, stored)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    onnx.checker.check_model(model)
    return bytes(model.SerializeToString())


@pytest.fixture(scope="session")
def school(lab: SimpleNamespace) -> SimpleNamespace:
    """Makers of learning bundles and of tables of labelled pictures."""

    def learning_bytes(weights: dict[str, Any] | None = None, **changes: Any) -> bytes:
        data = lab.bundle_bytes(**(weights or {}))
        plain = load_bundle(data, [lab.SIGNER.public], lab.NOW_MS)
        plan = a_plan(**changes)
        graph = step_graph(plan, dict(lab.WEIGHTS), lab.SIZE, lab.GRID)
        members = {**members_of(data), GRAPH: graph, RECORD: plan.to_bytes()}
        m = plain.manifest
        fields = BundleFields(
            federation=m.federation, line=m.line, task=m.task, version=m.version, created_ms=m.created_ms
        )
        return build_bundle(members, fields, [lab.SIGNER])

    def learning_bundle(**changes: Any) -> Bundle:
        return load_bundle(learning_bytes(**changes), [lab.SIGNER.public], lab.NOW_MS)

    return SimpleNamespace(learning_bytes=learning_bytes, learning_bundle=learning_bundle, table=table, plan=a_plan)


def members_of(data: bytes) -> dict[str, bytes]:
    from edgefl_protocol.archive import read_archive

    return {
        name: content
        for name, content in read_archive(data).items()
        if name not in ("manifest.json", "signatures.json")
    }


def table(folder: Path, each: int = 27, classes: tuple[str, ...] = ("MEL", "NV"), spread: int = 25) -> Path:
    """A CSV of drawn pictures: a colour per class, and noise."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(1)
    with (folder / "labels.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["image", "label", "lesion_id"])
        for name in classes:
            for index in range(each):
                colour = np.array(COLOURS[name]) + rng.normal(0, spread, 3)
                pixels = np.clip(colour + rng.normal(0, 10, (30, 30, 3)), 0, 255).astype(np.uint8)
                Image.fromarray(pixels).save(folder / f"{name}{index}.png")
                rows.writerow([f"{name}{index}.png", name, f"{name}-{index}"])
    return folder / "labels.csv"


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path / "home")


@pytest.fixture(scope="session")
def labels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """27 pictures of each of two classes: 20 are held back, 7 teach."""
    return table(tmp_path_factory.mktemp("pictures"))


@pytest.fixture(scope="session")
def bundle(school: SimpleNamespace) -> Bundle:
    made: Callable[..., Bundle] = school.learning_bundle
    return made()
