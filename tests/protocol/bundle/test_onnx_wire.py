"""The wire reader against the onnx package, and against graphs made to hurt."""

import random
import time
from collections.abc import Callable
from typing import Any

import pytest

from edgefl_protocol.bundle.onnx_wire import SCHEMA, TensorType, read_graph
from edgefl_protocol.errors import BundleError

onnx = pytest.importorskip("onnx", reason="onnx not installed: needs edgefl-derm[export]")


def refused(data: bytes) -> str:
    with pytest.raises(BundleError) as caught:
        read_graph(data)
    return caught.value.code


def model_of(good: Any) -> Any:
    return onnx.load_from_string(good.members["score.onnx"])


def message(number: int, content: bytes) -> bytes:
    """One length-delimited field of protobuf."""
    return varint(number << 3 | 2) + varint(len(content)) + content


def varint(value: int) -> bytes:
    result = b""
    while value >= 0x80:
        result += bytes([value & 0x7F | 0x80])
        value >>= 7
    return result + bytes([value])


def descriptor(kind: str) -> Any:
    found: Any = onnx.onnx_ml_pb2
    for part in kind.split("."):
        found = getattr(found, part)
    return found.DESCRIPTOR


@pytest.mark.parametrize("kind", sorted(SCHEMA))
def test_schema_is_that_of_onnx(kind: str) -> None:
    """Check (1): numbers, names, kinds and repetition are those of the installed onnx package's own descriptors."""
    theirs = {field.number: field for field in descriptor(kind).fields}
    numbers = {1: "fixed64", 2: "fixed32", 3: "int", 4: "int", 5: "int", 9: "bytes", 11: "message", 12: "bytes"}
    numbers |= {13: "int", 14: "int"}
    for number, (name, spec) in SCHEMA[kind].items():
        field = theirs[number]
        assert field.name == name
        assert field.is_repeated == spec.endswith("*")
        mine = spec.removesuffix("*")
        if mine in SCHEMA:
            assert field.message_type is descriptor(mine)
        elif field.message_type is None:
            assert mine == numbers[field.type]
        else:
            assert mine == "bytes"


def reachable(root: Any) -> set[str]:
    seen, todo = set(), [root]
    while todo:
        kind = todo.pop()
        if kind.full_name not in seen:
            seen.add(kind.full_name)
            todo += [field.message_type for field in kind.fields if field.message_type is not None]
    return seen


def test_no_tensor_hides_in_what_is_not_walked() -> None:
    """docs/security.md check 29: a message that is kept as plain bytes can hold neither a tensor nor a graph."""
    for kind, fields in SCHEMA.items():
        theirs = {field.number: field for field in descriptor(kind).fields}
        for number, (_, spec) in fields.items():
            inner = theirs[number].message_type
            if inner is not None and spec.removesuffix("*") == "bytes":
                assert reachable(inner).isdisjoint({"onnx.TensorProto", "onnx.GraphProto", "onnx.NodeProto"})


def test_reads_what_onnx_reads(good: Any) -> None:
    """Oracle: the onnx package's own reading of the committed graph."""
    model, graph = model_of(good), read_graph(good.members["score.onnx"])
    for mine, theirs in ((graph.inputs, model.graph.input), (graph.outputs, model.graph.output)):
        assert list(mine) == [value.name for value in theirs]
        for value in theirs:
            dims = tuple(d.dim_value if d.HasField("dim_value") else None for d in value.type.tensor_type.shape.dim)
            dtype = onnx.helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type).name
            assert mine[value.name] == TensorType(dtype, dims)
    assert graph.operators == {(node.domain, node.op_type) for node in model.graph.node}


def test_initializers_that_stand_as_inputs_are_left_out(good: Any) -> None:
    """Before IR version 4 each initializer stood among the inputs too: it is not something a caller must feed."""
    model = model_of(good)
    value = onnx.helper.make_tensor_value_info("plane", onnx.TensorProto.INT64, [2])
    model.graph.input.append(value)
    assert "plane" not in read_graph(model.SerializeToString()).inputs


def test_a_file_that_the_runtime_would_read_otherwise(good: Any) -> None:
    """docs/security.md, attack list 3: where bytes 4 to 7 say so, onnxruntime reads its own format, which is not
    walked; protobuf allows those bytes in a text field."""
    model = model_of(good)
    model.ClearField("producer_name")
    rest = model.SerializeToString()
    for name, allowed in ((b"\0\0ORTM", False), (b"\0\0ORTN", True), (b"\0ORTM\0", True)):
        data = message(2, name) + rest
        assert onnx.load_from_string(data).graph == model.graph  # sound for every reader of protobuf
        if allowed:
            read_graph(data)
        else:
            assert refused(data) == "bad_graph"


def external(tensor: Any, way: str) -> Any:
    """Turn a tensor into one whose data lie elsewhere."""
    locations = {"relative": "weights.bin", "parent": "../secret", "absolute": "/etc/passwd", "hard link": "link.bin"}
    tensor.ClearField("raw_data")
    if way == "flag only":
        tensor.data_location = onnx.TensorProto.EXTERNAL
        return tensor
    entry = tensor.external_data.add()
    entry.key, entry.value = "location", locations.get(way, "*/_ORT_MEM_ADDR_/*")
    if way != "field only":
        tensor.data_location = onnx.TensorProto.EXTERNAL
    return tensor


WAYS = ("relative", "parent", "absolute", "hard link", "memory address", "flag only", "field only")


def hidden(model: Any, place: str, way: str) -> bytes:
    """Put an external tensor at one of the places where a tensor may hang."""
    helper, graph = onnx.helper, model.graph
    tensor = external(helper.make_tensor("far", onnx.TensorProto.FLOAT, [1], b"\x00" * 4, raw=True), way)
    near = helper.make_tensor("near", onnx.TensorProto.INT64, [1], [0])
    inner = helper.make_graph([], "inner", [], [helper.make_tensor_value_info("far", 1, [1])], [tensor])
    node = helper.make_node("Constant", [], ["far_out"])
    if place == "initializer":
        graph.initializer.append(tensor)
    elif place in ("sparse values", "sparse indices"):
        pair = (tensor, near) if place == "sparse values" else (near, tensor)
        graph.sparse_initializer.append(onnx.SparseTensorProto(values=pair[0], indices=pair[1], dims=[4]))
    elif place == "constant":
        node.attribute.append(helper.make_attribute("value", tensor))
        graph.node.append(node)
    elif place == "sparse constant":
        sparse = onnx.SparseTensorProto(values=tensor, indices=near, dims=[4])
        node.attribute.append(helper.make_attribute("sparse_value", sparse))
        graph.node.append(node)
    elif place == "tensor list":
        node.attribute.append(helper.make_attribute("many", [tensor]))
        graph.node.append(node)
    elif place in ("subgraph", "subgraph list"):
        value = inner if place == "subgraph" else [inner]
        branch = helper.make_node("If", ["far_out"], ["x"])
        branch.attribute.append(helper.make_attribute("then_branch", value))
        graph.node.append(branch)
    elif place in ("function", "function default"):
        attribute = helper.make_attribute("value", tensor)
        if place == "function":
            node.attribute.append(attribute)
        function = onnx.FunctionProto(name="f", domain="mine", node=[node])
        if place == "function default":
            function.attribute_proto.append(attribute)
        model.functions.append(function)
    else:
        model.training_info.add().algorithm.CopyFrom(inner)
    return model.SerializeToString()


PLACES = (
    "initializer",
    "sparse values",
    "sparse indices",
    "constant",
    "sparse constant",
    "tensor list",
    "subgraph",
    "subgraph list",
    "function",
    "function default",
    "training graph",
)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("place", PLACES)
def test_external_data_is_refused_everywhere(good: Any, place: str, way: str) -> None:
    """docs/security.md check 29: even correctly signed, no bundle and so no session comes of it, in any graph."""
    data = hidden(model_of(good), place, way)
    assert refused(data) == "external_data"
    for member in ("score.onnx", "train_step.onnx", "encode.onnx"):
        with pytest.raises(BundleError) as caught:
            good.load(good.resign({member: data}))
        assert caught.value.code == "external_data"


def test_internal_tensor_at_the_same_place_is_read(good: Any) -> None:
    """The test above is able to fail: with the data inside, the very same graph is read."""
    model = model_of(good)
    model.graph.initializer.append(onnx.helper.make_tensor("near", 1, [1], b"\x00" * 4, raw=True))
    assert read_graph(model.SerializeToString()).outputs


def test_external_data_survives_no_repetition(good: Any) -> None:
    """Check (1): protobuf lets the last of repeated singular fields win and merges repeated messages; here they are
    refused, so an innocent second value hides nothing.
    """
    tensor = onnx.helper.make_tensor("t", 1, [1], b"\x00" * 4, raw=True).SerializeToString()
    twice = tensor + varint(14 << 3) + varint(1) + varint(14 << 3) + varint(0)
    data = good.members["score.onnx"]
    assert refused(data + message(7, message(5, twice))) == "bad_graph"  # a second graph
    assert refused(message(7, message(5, twice))) == "bad_graph"
    assert refused(message(7, message(5, tensor + varint(14 << 3) + varint(1)))) == "external_data"


HOSTILE: dict[str, Callable[[], bytes]] = {
    "empty": lambda: b"",
    "no graph": lambda: varint(1 << 3) + varint(8),
    "group": lambda: b"\x3b\x3c",
    "wire type 7": lambda: b"\x3f\x00",
    "field number 0": lambda: b"\x02\x00",
    "unknown field": lambda: message(99, b""),
    "unknown field of a node": lambda: message(7, message(1, message(10, b"device"))),
    "graph as a number": lambda: varint(7 << 3) + varint(3),
    "operator as a number": lambda: message(7, message(1, varint(4 << 3) + varint(3))),
    "number as bytes": lambda: message(1, b"8"),
    "length beyond the end": lambda: b"\x3a\xff\x7f",
    "length of 2^64-1": lambda: b"\x3a" + b"\xff" * 9 + b"\x01",
    "number of eleven bytes": lambda: b"\x08" + b"\x80" * 10 + b"\x01",
    "number above 64 bits": lambda: b"\x08" + b"\xff" * 9 + b"\x7f",
    "ends inside a number": lambda: b"\x08\x80",
    "name not UTF-8": lambda: message(7, message(1, message(4, b"\xff"))),
    "long operator name": lambda: message(7, message(1, message(4, b"A" * 513))),
    "input without a type": lambda: message(7, message(11, message(1, b"x"))),
    "input of a sequence": lambda: message(7, message(11, message(1, b"x") + message(2, message(4, b"")))),
    "negative dimension": lambda: message(7, message(11, typed(varint(1 << 3) + varint(2**64 - 1)))),
    "dimension fixed and free": lambda: message(7, message(11, typed(varint(1 << 3) + b"\x01" + message(2, b"b")))),
    "input twice": lambda: message(7, message(11, typed(b"")) * 2),
    "nested 2,000 deep": lambda: nested(2_000),
    "1,100,000 fields": lambda: message(7, message(1, message(1, b"") * 1_100_000)),
    "60,000 nodes": lambda: message(7, message(1, b"") * 60_000),
}
LARGE = {"1,100,000 fields"}


def typed(dim: bytes) -> bytes:
    """A ValueInfoProto `x`, float32, of one dimension."""
    tensor = varint(1 << 3) + varint(1) + message(2, message(1, dim))
    return message(1, b"x") + message(2, message(1, tensor))


def nested(depth: int) -> bytes:
    """A graph in an attribute of a node of a graph, and so on."""
    graph = b""
    for _ in range(depth):
        graph = message(1, message(5, message(6, graph)))
    return message(7, graph)


def processor_seconds(work: Callable[[], object]) -> float:
    started = time.process_time()
    work()
    return time.process_time() - started


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name in LARGE else []) for name in sorted(HOSTILE)]
)
def test_hostile_wire_bytes(name: str) -> None:
    """Checks (1), (2) and (5): one typed refusal each, within a hundred passes over two million numbers."""
    data = HOSTILE[name]()
    found: list[str] = []
    used = processor_seconds(lambda: found.append(refused(data)))
    assert found == ["bad_graph"]
    assert used < 100 * processor_seconds(lambda: [value * value for value in range(2_000_000)])


def test_truncated_anywhere(good: Any) -> None:
    """A graph cut at any byte is refused or, cut between two fields of the model, read as the shorter model it is."""
    data = good.members["score.onnx"]
    whole = read_graph(data)
    for length in range(len(data)):
        try:
            graph = read_graph(data[:length])
        except BundleError as error:
            assert error.code == "bad_graph"
        else:
            assert graph.outputs == whole.outputs  # only trailing model fields, such as opset_import, were cut


def test_mutated_graphs(good: Any) -> None:
    """docs/security.md check 27, behind the signature: 3,000 changed graphs end in a Graph or one BundleError."""
    rng = random.Random(20_260_729)
    data = good.members["score.onnx"]
    read = 0
    for _ in range(3_000):
        changed = bytearray(data)
        for _ in range(rng.randrange(1, 4)):
            changed[rng.randrange(len(changed))] = rng.randrange(256)
        try:
            read_graph(bytes(changed))
            read += 1
        except BundleError as error:
            assert error.code in ("bad_graph", "external_data")
    assert 0 < read < 3_000
