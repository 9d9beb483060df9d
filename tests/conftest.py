"""Bundles that really run, made by hand: one that scores by mean colours, and one that learns them; photos for both."""

import csv
import gc
import io
import os
import shutil
import struct
import zlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jaxtyping
import numpy as np
import onnx
import pytest
from hypothesis import HealthCheck, settings
from onnx import TensorProto, helper, numpy_helper
from PIL import Image
from tests.forks import GARBAGE
from tests.shared import forks, shared
from tests.slow_modules import pytest_collection_modifyitems, pytest_ignore_collect

from edgefl_protocol.bundle import Bundle, BundleFields, Card, Labels, build_bundle, load_bundle
from edgefl_protocol.bundle.archive import read_archive
from edgefl_protocol.bundle.fedevprompt_plan import FedEvPromptPlan, PromptForm
from edgefl_protocol.bundle.learning_plan import GRAPH, RECORD
from edgefl_protocol.bundle.shown_map import Advantage, HidingEffect, ShownMap
from edgefl_protocol.envelopes.keys import SigningKey
from edgefl_protocol.pictures.class_info import ClassInfo
from edgefl_protocol.pictures.preprocess import Preprocess, TaughtPictures
from edgefl_protocol.pictures.suspicious import Suspicion
from edgefl_protocol.strict_json import write_json
from edgefl_protocol.tensors import write_tensors

__all__ = ["forks", "pytest_collection_modifyitems", "pytest_ignore_collect", "shared"]  # fixtures and hooks
# A busy machine is no fault of the code under test: no deadline, no complaint about slow generation. Here, above all
# rooms: a module that another room imports is read before the conftest of its own.
settings.register_profile("edgefl", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("edgefl")
MEMORY, ENOUGH = Path("/dev/shm"), 4 * 2**30  # bytes; a whole run leaves 1.5 GiB in its folders
HERE = Path(__file__).parent
# Tests that call networks, losses and methods themselves: there the shapes of tensors are checked at run time.
SHAPED = [HERE / part for part in ("export", "trainer/learning", "trainer/methods", "trainer/models")]
REPEATED = {"test_broadcasts.py", "test_contract.py"}  # which call what test_conformance.py calls, on the same networks


def pytest_configure() -> None:
    """Keep the folders of tests in memory where there is room: homes and stores flush each step, slowly on a disk."""
    gc.disable()  # while tests are collected: what that makes is kept
    if MEMORY.is_dir() and shutil.disk_usage(MEMORY).free > ENOUGH:
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(MEMORY))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Check shapes where tensors are what is tested; whole runs repeat the same calls, a tenth slower if checked."""
    checked = item.path.parent == HERE / "trainer" or any(item.path.is_relative_to(part) for part in SHAPED)
    jaxtyping.config.update("jaxtyping_disable", not checked or item.path.name in REPEATED)


def pytest_collection_finish() -> None:
    """Leave what was imported and collected out of garbage collections: it lives to the end, and is much."""
    gc.freeze()
    gc.set_threshold(*GARBAGE)
    gc.enable()


NOW_MS = 1_790_000_000_000
SIZE, GRID = 24, 6  # px, tokens a side
CLASSES = ("MEL", "NV", "BCC")
HARMLESS = {name: ClassInfo(name, "Called harmless by a test.", "benign") for name in CLASSES}
SIGNER = SigningKey(bytes(range(1, 33)))

WEIGHTS: dict[str, Any] = {
    "head.weight": (8 * np.eye(3)).astype(np.float32),
    "head.bias": np.array([-3.0, -3.5, -4.0], np.float32),
    "prior": np.array([0.5, 0.7, 1.8], np.float32),
    "temperature": np.array(1.25, np.float32),
}


def evidence_nodes() -> list[onnx.NodeProto]:
    """From logits to evidence, vacuity and dissonance."""
    node = helper.make_node
    return [
        node("Softplus", ["logits"], ["evidence"]),
        node("Add", ["evidence", "prior"], ["alpha"]),
        node("ReduceSum", ["alpha", "last"], ["strength"], keepdims=1),
        node("Div", ["alpha", "strength"], ["probabilities"]),
        node("Squeeze", ["strength", "last"], ["s"]),
        node("Div", ["k", "s"], ["vacuity"]),
        node("Div", ["evidence", "strength"], ["belief"]),
        node("Unsqueeze", ["belief", "a1"], ["bj"]),  # (B, 1, K)
        node("Unsqueeze", ["belief", "a2"], ["bk"]),  # (B, K, 1)
        node("Sub", ["bj", "bk"], ["d"]),
        node("Abs", ["d"], ["gap"]),
        node("Add", ["bj", "bk"], ["both"]),
        node("Max", ["both", "tiny"], ["safe"]),
        node("Div", ["gap", "safe"], ["ratio"]),
        node("Sub", ["one", "ratio"], ["balance"]),
        node("Mul", ["bj", "off"], ["others"]),
        node("Mul", ["others", "balance"], ["weighted"]),
        node("ReduceSum", ["weighted", "last"], ["num"], keepdims=0),
        node("ReduceSum", ["others", "last"], ["den"], keepdims=0),
        node("Max", ["den", "tiny"], ["den1"]),
        node("Div", ["num", "den1"], ["share"]),
        node("Mul", ["belief", "share"], ["terms"]),
        node("ReduceSum", ["terms", "last"], ["dissonance"], keepdims=0),
    ]


def score_graph(*, softmax: bool = False, with_map: bool = True, classes: int = 3) -> bytes:
    """`score.onnx` of a model that looks at mean colour; its map is the brightness of each patch."""
    node = helper.make_node
    constants = {
        "c255": np.float32(255), "k": np.float32(classes), "zero": np.float32(0), "one": np.float32(1),
        "tiny": np.float32(1e-6), "spatial": np.array([1, 2]), "last": np.array([-1]), "a1": np.array([1]),
        "a2": np.array([2]), "off": (1 - np.eye(classes)).astype(np.float32)[None], "flat": np.array([-1, GRID * GRID]),
    }  # fmt: skip
    nodes = [
        node("Cast", ["image"], ["float"], to=TensorProto.FLOAT),
        node("Div", ["float", "c255"], ["x"]),  # (B, S, S, 3)
        node("ReduceMean", ["x", "spatial"], ["features"], keepdims=0),  # (B, 3)
        node("Transpose", ["head.weight"], ["wt"], perm=[1, 0]),
        node("MatMul", ["features", "wt"], ["xw"]),
        node("Add", ["xw", "head.bias"], ["cold"]),
        node("Div", ["cold", "temperature"], ["logits"]),
    ]
    if softmax:
        nodes += [node("Softmax", ["logits"], ["probabilities"], axis=-1)]
    else:
        nodes += evidence_nodes()
    if with_map:
        nodes += [
            node("ReduceMean", ["x", "last"], ["grey"], keepdims=0),
            node("Unsqueeze", ["grey", "a1"], ["channel"]),  # (B, 1, S, S)
            node("AveragePool", ["channel"], ["pooled"], kernel_shape=[SIZE // GRID] * 2, strides=[SIZE // GRID] * 2),
            node("Reshape", ["pooled", "flat"], ["tokens"]),
            node("ReduceMax", ["tokens", "last"], ["top"], keepdims=1),
            node("Max", ["top", "tiny"], ["top1"]),
            node("Div", ["tokens", "top1"], ["map"]),
        ]
    floats = TensorProto.FLOAT
    rows = {"probabilities": [classes], "evidence": [classes], "vacuity": [], "dissonance": [], "map": [GRID * GRID]}
    wanted = ["probabilities"] if softmax else ["probabilities", "evidence", "vacuity", "dissonance"]
    inputs = [helper.make_tensor_value_info("image", TensorProto.UINT8, ["B", SIZE, SIZE, 3])]
    for name, value in weights_for(softmax).items():
        inputs.append(helper.make_tensor_value_info(name, floats, list(value.shape)))
    outputs = [helper.make_tensor_value_info(name, floats, ["B", *rows[name]]) for name in wanted + ["map"] * with_map]
    used = {name for one in nodes for name in one.input}
    stored = [numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items() if name in used]
    graph = helper.make_graph(nodes, "score", inputs, outputs, stored)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    onnx.checker.check_model(model)
    return model.SerializeToString()


def weights_for(softmax: bool) -> dict[str, Any]:
    return {name: value for name, value in WEIGHTS.items() if not (softmax and name == "prior")}


def bundle_bytes(
    *,
    softmax: bool = False,
    with_map: bool = True,
    seen: tuple[bool, ...] = (True, True, True),
    refer_above: float | None = 0.9,
    fit: str = "squash",
    taught: TaughtPictures | None = None,
    version: int = 1,
    federation: str | None = "skin",
    line: str = "main",
    expires_ms: int | None = None,
    metrics: dict[str, Any] | None = None,
    signer: SigningKey = SIGNER,
    needs: dict[str, str] | None = None,
    info: dict[str, ClassInfo] | None = HARMLESS,
    suspicion: Suspicion | None = None,
    shown: ShownMap | str | None = "rollout",
    **weights: Any,
) -> bytes:
    """A signed bundle; `needs`: its min_client or min_runtime; keyword weights replace tensors (`__` for a dot).

    Its classes are called benign unless `info` says otherwise, so that the other rules can be seen alone; and its map
    was found true, unless `shown` says otherwise (None for a bundle from before maps were measured).
    """
    if isinstance(shown, str):
        shown = true_map(shown) if with_map else None
    values = {**weights_for(softmax), **{name.replace("__", "."): value for name, value in weights.items()}}
    card = Card(
        intended_use="tests", method="fedevprompt", site="one", sites={"one": 10}, metrics=metrics or {},
        temperature=1.25, refer_above=refer_above, backbone="none", licence_note="none",
        suspicion=suspicion, map=shown,
    )  # fmt: skip
    members = {
        "score.onnx": score_graph(softmax=softmax, with_map=with_map),
        "weights.safetensors": write_tensors(values, {}),
        "preprocess.json": write_json(Preprocess(size=SIZE, fit=fit, taught=taught).to_json()),  # type: ignore[arg-type]
        "labels.json": Labels(CLASSES, seen, info).to_bytes(),
        "card.json": card.to_bytes(),
    }
    fields = BundleFields(
        federation=federation, line=line, task="all", version=version, created_ms=NOW_MS, expires_ms=expires_ms,
        **(needs or {}),
    )  # fmt: skip
    return build_bundle(members, fields, [signer])


def true_map(kind: str, **changes: Any) -> ShownMap:
    """A map that was found true: hiding what it marks changes 1 answer in 3, any other place 1 in 10."""
    effect = HidingEffect(marked=1 / 3, random=0.1, kept=0.05, kept_random=0.25)
    advantage = Advantage(value=0.2, low=0.12, high=0.28)
    values = {"why": None, "kind": kind, "pictures": 96, "advantage": advantage}
    return ShownMap(**{**values, "hidden": {"mean": effect, "blur": effect}, **changes})  # type: ignore[arg-type]


@pytest.fixture(scope="session")
def lab() -> SimpleNamespace:
    """The makers above, for tests."""
    return SimpleNamespace(
        CLASSES=CLASSES, GRID=GRID, NOW_MS=NOW_MS, SIGNER=SIGNER, SIZE=SIZE, WEIGHTS=WEIGHTS,
        bundle_bytes=bundle_bytes, true_map=true_map, encoded=encoded, photo=photo, png=png, png_chunk=png_chunk,
    )  # fmt: skip


def photo(width: int = 40, height: int = 30, colour: tuple[int, int, int] = (180, 120, 90)) -> np.ndarray:
    """A picture that passes the gate where its colour is one of skin: fine grain of +-8 levels around one colour."""
    grain = np.random.default_rng(0).integers(-8, 9, (height, width, 1))
    return np.clip(np.asarray(colour) + grain, 0, 255).astype(np.uint8)


def encoded(pixels: np.ndarray, kind: str = "PNG", **options: Any) -> bytes:
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, kind, **options)
    return out.getvalue()


def png_chunk(kind, data):
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width, height, rows, extra=b"", depth=1, colour=0):
    head = png_chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0))
    body = png_chunk(b"IDAT", zlib.compress(rows, 9)) + png_chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + head + extra + body


TRAINED = ("head.weight", "head.bias")
COLOURS = {"MEL": (90, 60, 50), "NV": (180, 120, 90), "BCC": (200, 90, 90)}


FORM = PromptForm(
    network="0" * 64, prompts="bt", b_blocks=3, prompt_length=9, prefix="after", evidence="softplus", readout="cls",
    head_norm="none", rollout="renormalise", kd_metric="bilinear",
)  # fmt: skip


def a_plan(**changes: Any) -> FedEvPromptPlan:
    values: dict[str, Any] = {
        "trained": TRAINED, "rates": {"head.weight": 0.5, "head.bias": 0.1}, "weight_decay": 0.01, "batch": 4,
        "epochs": 2, "epochs_before": 0, "anneal_epochs": 10, "anneal_clock": "run", "kd_weight": 1e-6,
        "kd_peers": "sum", "prior_floor": 0.01, "balance": "none", "augment": "dihedral", "seed": 3,
        "form": FORM,
    }  # fmt: skip
    return FedEvPromptPlan(**{**values, **changes})


def step_shapes(
    plan: FedEvPromptPlan, weights: dict[str, np.ndarray], size: int, grid: int
) -> dict[str, tuple[int, list[Any]]]:
    """Type and shape of everything a step takes that is no lone float."""
    classes = len(weights["head.bias"])
    shapes: dict[str, tuple[int, list[Any]]] = {
        "image": (TensorProto.UINT8, ["B", size, size, 3]), "target": (TensorProto.INT64, ["B"]),
        "optimizer.step": (TensorProto.INT64, []), "peers.means": (TensorProto.FLOAT, [classes, grid * grid]),
        "peers.counts": (TensorProto.FLOAT, [classes]),
    }  # fmt: skip
    for name in plan.trained:
        for moment in ("", "optimizer.exp_avg.", "optimizer.exp_avg_sq."):
            shapes[moment + name] = (TensorProto.FLOAT, list(weights[name].shape))
    shapes |= {name: (TensorProto.FLOAT, list(weights[name].shape)) for name in fixed_by(plan, weights)}
    return shapes


def fixed_by(plan: FedEvPromptPlan, weights: dict[str, np.ndarray]) -> list[str]:
    """The tensors of a bundle that a step reads and never changes."""
    return [name for name in weights if name not in plan.trained and name != "temperature"]


def step_graph(plan: FedEvPromptPlan, weights: dict[str, np.ndarray], size: int, grid: int) -> bytes:
    """value − rate·m, m = 0.9·m + 0.1·g, g of the cross-entropy of softmax(x·wᵀ + b).

    The others' maps enter too: kd_weight · count · mean brightness of a class is added to the gradient of its bias.
    """
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
        node("ReduceMean", ["gap", "first"], ["own.head.bias"], keepdims=0),
        node("ReduceMean", ["peers.means", "last"], ["brightness"], keepdims=0),  # (K,)
        node("Mul", ["brightness", "peers.counts"], ["pull"]),
        node("Mul", ["pull", "kd_weight"], ["weighed"]),
        node("Add", ["own.head.bias", "weighed"], ["g.head.bias"]),
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
    shapes, fixed = step_shapes(plan, weights, size, grid), fixed_by(plan, weights)
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
    return {
        name: content
        for name, content in read_archive(data).items()
        if name not in ("manifest.json", "signatures.json")
    }


def table(
    folder: Path, each: int = 27, classes: tuple[str, ...] = ("MEL", "NV"), spread: int = 25, seed: int = 1
) -> Path:
    """A CSV of drawn pictures: a colour per class, and noise."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
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
