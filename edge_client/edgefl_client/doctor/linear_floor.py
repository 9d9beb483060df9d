"""How long a network's linear layers alone take on this device: what no rearrangement of the same network goes below.

    layers   read off the score graph: each product with a fixed matrix (K, N), and the tokens M of one picture
    graph    a Gemm for each (M, K) x (K, N) in float32, or a MatMulInteger of unsigned by signed bytes, made here by
             hand: no onnx package. Weights are random; times do not depend on them
    measured on the runtime, with the threads and settings of scoring

Every layer takes all M tokens, also in the last block, where the network itself computes the class token alone. The
8-bit products come without making bytes of the activations. Beyond 16 million weights (64 MiB), layers are not run but
counted in by their share of the multiplications, so that asking costs little memory; products of fewer than eight
columns are not looked at. Sources: docs/design.md, section 8; docs/results/device.md, which judges by it.
"""

import math
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np

from edgefl_client.runtime import load_graph
from edgefl_protocol.bundle.onnx_wire import Message, read_model

Precision = Literal["fp32", "int8"]
MOST_VALUES: Final = 1 << 24  # of the weights that are measured
LEAST_COLUMNS: Final = 8
_PASSED_ON: Final = frozenset({"DequantizeLinear", "QuantizeLinear", "Transpose", "Cast", "Identity"})
_FLOAT, _UINT8, _INT8, _INT32, _INT64 = 1, 2, 3, 6, 7  # TensorProto.DataType
_OPSET, _IR_VERSION = 17, 8


@dataclass(frozen=True)
class LinearLayers:
    """The linear layers of a network."""

    tokens: int  # rows M that each takes for one picture
    shapes: tuple[tuple[int, int], ...]  # (K, N) of each, in the order of the graph

    @property
    def measured(self) -> tuple[tuple[int, int], ...]:
        """The first layers, of at most `MOST_VALUES` weights together, at least one."""
        sizes = np.cumsum([rows * columns for rows, columns in self.shapes])
        return self.shapes[: max(1, int((sizes <= MOST_VALUES).sum()))]

    @property
    def share(self) -> float:
        """Share of all multiplications that `measured` takes."""
        return sum(map(math.prod, self.measured)) / sum(map(math.prod, self.shapes))


def linear_layers(score_onnx: bytes) -> LinearLayers | None:
    """Read the linear layers of a vision transformer's score graph; None for a network of another kind."""
    graph = read_model(score_onnx).messages("graph")[0]
    tokens = next((_dims_of_output(one)[-1] for one in graph.messages("output") if one.text("name") == "map"), 0)
    shapes = {tensor.text("name"): tuple(_numbers(tensor, "dims")) for tensor in graph.messages("initializer")}
    found = []
    for node in graph.messages("node"):
        given, made, operator = _names(node, "input"), _names(node, "output"), node.text("op_type")
        if operator in _PASSED_ON and given and given[0] in shapes:
            shape = shapes[given[0]]
            shapes[made[0]] = shape[::-1] if operator == "Transpose" else shape
        elif operator in ("Gemm", "MatMul", "Conv") and len(given) > 1 and len(shapes.get(given[1], ())) in (2, 4):
            matrix = shapes[given[1]]
            found.append((matrix[0], matrix[1]) if len(matrix) == 2 else (math.prod(matrix[1:]), matrix[0]))
    wide = tuple(one for one in found if min(one) >= LEAST_COLUMNS)
    return LinearLayers(tokens + 1, wide) if tokens and wide else None


def floor_run(layers: LinearLayers, precision: Precision, threads: int) -> Callable[[], object]:
    """Make a function that runs the measured layers once, for one picture; to be timed."""
    session = load_graph(floor_graph(layers, precision), threads)
    draw, kinds = np.random.default_rng(0), {"fp32": np.float32, "int8": np.uint8}
    feeds = {
        f"x{width}": draw.integers(0, 256, (layers.tokens, width)).astype(kinds[precision])
        for width in sorted({rows for rows, _ in layers.measured})
    }
    return lambda: session.run(None, feeds)


def floor_graph(layers: LinearLayers, precision: Precision) -> bytes:
    """Write the measured layers as a serialised ModelProto; each gives its first row, so that little is copied out."""
    draw, parts = np.random.default_rng(1), list[bytes]()
    operator, given, made = ("Gemm", _FLOAT, _FLOAT) if precision == "fp32" else ("MatMulInteger", _UINT8, _INT32)
    parts.append(_bytes(5, _tensor("first", _INT64, (), struct.pack("<q", 0))))
    for number, (rows, columns) in enumerate(layers.measured):
        weight = draw.integers(-127, 128, (rows, columns)).astype(np.int8)
        stored = weight.tobytes() if precision == "int8" else (weight * np.float32(1e-3)).tobytes()
        kind = _INT8 if precision == "int8" else _FLOAT
        parts.append(_bytes(5, _tensor(f"w{number}", kind, (rows, columns), stored)))
        parts.append(_bytes(1, _node(operator, (f"x{rows}", f"w{number}"), f"y{number}")))
        parts.append(_bytes(1, _node("Gather", (f"y{number}", "first"), f"z{number}")))
        parts.append(_bytes(12, _value(f"z{number}", made, (columns,))))
    for width in sorted({rows for rows, _ in layers.measured}):
        parts.append(_bytes(11, _value(f"x{width}", given, (layers.tokens, width))))
    graph = b"".join([_bytes(2, b"floor"), *parts])
    return _number(1, _IR_VERSION) + _bytes(8, _number(2, _OPSET)) + _bytes(7, graph)


def _names(node: Message, field: str) -> list[str]:
    return [bytes(value).decode() for value in node.values.get(field, []) if isinstance(value, memoryview)]


def _numbers(message: Message, field: str) -> Iterator[int]:
    """Read the whole numbers of a repeated field, packed or not."""
    for value in message.values.get(field, []):
        if isinstance(value, int):
            yield value
        elif isinstance(value, memoryview):
            total = shift = 0
            for byte in value:
                total |= (byte & 0x7F) << shift
                shift += 7
                if byte < 0x80:
                    yield total
                    total = shift = 0


def _dims_of_output(value: Message) -> list[int]:
    """Read the lengths of an output's axes, 0 where one is free; [0] where there are none."""
    types = [tensor for kind in value.messages("type") for tensor in kind.messages("tensor_type")]
    return [
        dim.number("dim_value") for one in types for shape in one.messages("shape") for dim in shape.messages("dim")
    ] or [0]


def _varint(value: int) -> bytes:
    found = bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*found, value])


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _bytes(field: int, data: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(data)) + data


def _tensor(name: str, kind: int, shape: tuple[int, ...], data: bytes) -> bytes:
    dims = b"".join(_number(1, length) for length in shape)
    return dims + _number(2, kind) + _bytes(8, name.encode()) + _bytes(9, data)


def _node(operator: str, given: tuple[str, ...], made: str) -> bytes:
    inputs = b"".join(_bytes(1, name.encode()) for name in given)
    return inputs + _bytes(2, made.encode()) + _bytes(3, made.encode()) + _bytes(4, operator.encode())


def _value(name: str, kind: int, shape: tuple[int, ...]) -> bytes:
    dims = b"".join(_bytes(1, _number(1, length)) for length in shape)
    return _bytes(1, name.encode()) + _bytes(2, _bytes(1, _number(1, kind) + _bytes(2, dims)))
