"""A bundle that answers questions, made by hand: what it should say to a question can be reckoned in ten lines.

The network looks at the mean brightness of the red channel and at the words: logits = bias + rows of a table, one for
each word that is read (padding has a row of zeros), + brightness · look. The map is the brightness of each patch.
"""

import contextlib
import sqlite3
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from edgefl_protocol.bundle import BundleFields, Card, Labels, build_bundle
from edgefl_protocol.bundle.question_table import MEMBER, OtherPicture, QuestionTable, TriedQuestions
from edgefl_protocol.bundle.shown_map import ShownMap
from edgefl_protocol.envelopes.keys import SigningKey
from edgefl_protocol.pictures.preprocess import Preprocess
from edgefl_protocol.rules.questions import Questions, token_ids
from edgefl_protocol.strict_json import write_json
from edgefl_protocol.tensors import write_tensors

NOW_MS = 1_790_000_000_000
SIZE, GRID, LENGTH = 24, 6, 6
WORDS = ("is", "there", "a", "fracture", "which", "organ", "shown")
ANSWERS = ("no", "yes", "lung", "liver", "2")
SIGNER = SigningKey(bytes(range(1, 33)))

_rows = np.zeros((2 + len(WORDS), len(ANSWERS)), np.float32)
_rows[2 + WORDS.index("fracture")] = (2.0, 1.0, -1.0, -1.0, -2.0)
_rows[2 + WORDS.index("organ")] = (-3.0, -3.0, 4.0, 2.0, -1.0)
_rows[2 + WORDS.index("is")] = (0.5, 0.25, 0.0, 0.0, 0.0)
WEIGHTS: dict[str, Any] = {
    "words": _rows,
    "head.bias": np.array([0.1, 0.2, 0.0, 0.0, -0.3], np.float32),
    "look": np.array([-2.0, 3.0, 0.0, 0.0, 0.0], np.float32),
    "temperature": np.array(1.5, np.float32),
}
VOCABULARY = Questions(WORDS, LENGTH)
TRIED = TriedQuestions(
    questions=150, right=90, answered=75, answered_right=60, other_picture=OtherPicture(right=60, low=0.08, high=0.31)
)


def expected(pixels: np.ndarray, question: str, weights: Mapping[str, Any] = WEIGHTS) -> np.ndarray:
    """Probabilities for prepared pixels (S, S, 3), reckoned without the graph."""
    tokens = token_ids(question, VOCABULARY.table, LENGTH)
    bright = pixels[..., 0].astype(np.float64).mean() / 255
    logits = weights["head.bias"] + sum(weights["words"][token] for token in tokens) + bright * weights["look"]
    grown = np.exp(logits / weights["temperature"] - (logits / weights["temperature"]).max())
    return np.asarray(grown / grown.sum())


def ask_graph(*, with_map: bool = True, length: int = LENGTH, answers: int = len(ANSWERS)) -> bytes:
    """`score.onnx` with the second input."""
    node, info, floats = helper.make_node, helper.make_tensor_value_info, TensorProto.FLOAT
    constants = {
        "c255": np.float32(255), "spatial": np.array([1, 2]), "last": np.array([-1]), "middle": np.array([1]),
        "red": np.array([0]), "flat": np.array([-1, GRID * GRID]), "tiny": np.float32(1e-6),
    }  # fmt: skip
    nodes = [
        node("Cast", ["image"], ["float"], to=floats),
        node("Div", ["float", "c255"], ["x"]),
        node("ReduceMean", ["x", "spatial"], ["means"], keepdims=0),  # (B, 3)
        node("Gather", ["means", "red"], ["bright"], axis=1),  # (B, 1)
        node("Mul", ["bright", "look"], ["looked"]),
        node("Gather", ["words", "question"], ["rows"], axis=0),  # (B, L, K)
        node("ReduceSum", ["rows", "middle"], ["asked"], keepdims=0),
        node("Add", ["looked", "asked"], ["both"]),
        node("Add", ["both", "head.bias"], ["cold"]),
        node("Div", ["cold", "temperature"], ["logits"]),
        node("Softmax", ["logits"], ["probabilities"], axis=-1),
    ]
    if with_map:
        nodes += [
            node("ReduceMean", ["x", "last"], ["grey"], keepdims=0),
            node("Unsqueeze", ["grey", "middle"], ["channel"]),
            node("AveragePool", ["channel"], ["pooled"], kernel_shape=[SIZE // GRID] * 2, strides=[SIZE // GRID] * 2),
            node("Reshape", ["pooled", "flat"], ["tokens"]),
            node("ReduceMax", ["tokens", "last"], ["top"], keepdims=1),
            node("Max", ["top", "tiny"], ["top1"]),
            node("Div", ["tokens", "top1"], ["map"]),
        ]
    inputs = [
        info("image", TensorProto.UINT8, ["B", SIZE, SIZE, 3]),
        info("question", TensorProto.INT64, ["B", length]),
        *(info(name, floats, list(value.shape)) for name, value in WEIGHTS.items()),
    ]
    outputs = [info("probabilities", floats, ["B", answers])]
    outputs += [info("map", floats, ["B", GRID * GRID])] if with_map else []
    used = {name for one in nodes for name in one.input}
    stored = [numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items() if name in used]
    graph = helper.make_graph(nodes, "score", inputs, outputs, stored)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    onnx.checker.check_model(model)
    return bytes(model.SerializeToString())


def ask_members(
    *,
    seen: tuple[bool, ...] = (True,) * len(ANSWERS),
    unsure_above: float | None = 1.2,
    tried: TriedQuestions | None = TRIED,
    shown: ShownMap | None = None,
    with_map: bool = True,
    metrics: dict[str, Any] | None = None,
    taught: tuple[bool, ...] | None = None,
) -> dict[str, bytes]:
    """The members of the bundle, by name."""
    card = Card(
        intended_use="tests", method="pfl-vqa", site="CHEST", sites={"CHEST": 10}, metrics=metrics or {},
        temperature=1.5, refer_above=unsure_above, backbone="none", licence_note="none", map=shown,
    )  # fmt: skip
    return {
        "score.onnx": ask_graph(with_map=with_map),
        "weights.safetensors": write_tensors(WEIGHTS, {}),
        "preprocess.json": write_json(Preprocess(size=SIZE, fit="squash").to_json()),
        "labels.json": Labels(ANSWERS, seen).to_bytes(),
        "card.json": card.to_bytes(),
        MEMBER: QuestionTable(VOCABULARY, tried, taught).to_bytes(),
    }


def signed(members: Mapping[str, bytes], *, version: int = 1, expires_ms: int | None = None) -> bytes:
    """The bundle of these members."""
    fields = BundleFields(
        federation=None, line="vqa", task="all", version=version, created_ms=NOW_MS, expires_ms=expires_ms
    )
    return build_bundle(members, fields, [SIGNER])


def ask_bundle(*, expires_ms: int | None = None, **options: Any) -> bytes:
    """The signed bundle; options as for `ask_members`."""
    return signed(ask_members(**options), expires_ms=expires_ms)


def rows(path: Path) -> list[dict[str, Any]]:
    """Read a log of answers."""
    with contextlib.closing(sqlite3.connect(path)) as db:
        db.row_factory = sqlite3.Row
        return [dict(row) for row in db.execute("SELECT * FROM answer ORDER BY number")]
