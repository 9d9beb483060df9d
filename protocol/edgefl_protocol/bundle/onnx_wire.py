"""A model graph read off the wire, without the onnx package: what it takes, what it gives, which operators it holds.

Guarantees of `read_graph`:

    (1) every field is one of the ONNX schema below: a field number or wire type it does not know, a singular field that
        stands twice, and protobuf groups are refused, so no other parser can see another model; texts, numbers and
        messages without tensors are not looked into
    (2) nesting, the number of fields and of nodes are bounded
    (3) no tensor lies outside the file: `external_data` or a `data_location` other than DEFAULT is refused in every
        TensorProto, wherever it hangs (initializer, sparse initializer, attribute, subgraph, function, training graph)
    (4) operators are listed from every node, those of subgraphs and functions included
    (5) graph inputs and outputs are named once and carry type and dimensions
    (6) the file is not marked as one of onnxruntime's own format, which the runtime would read in place of this one

Whether these operators and inputs are allowed is the business of `onnx_rules`.

Source: onnx/onnx.proto3 of ONNX 1.19 to 1.23 (field numbers; a test compares them), protobuf encoding guide (varints,
wire types, packed fields); docs/security.md, attack list 1 to 3, checks 29 and 30.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from edgefl_protocol.errors import BundleError

MAX_DEPTH: Final = 24  # messages inside messages: a subgraph costs four
MAX_FIELDS: Final = 1_000_000
MAX_NODES: Final = 50_000
MAX_NAME_BYTES: Final = 512
_RUNTIME_MARK: Final = slice(4, 8), b"ORTM"  # identifier of a flatbuffer that onnxruntime wrote

# Message -> field number -> (name, kind). Kinds: int, fixed32, fixed64, bytes, or the name of a message; a trailing *
# marks a repeated field, whose numbers may also come packed in one byte string.
SCHEMA: Final[dict[str, dict[int, tuple[str, str]]]] = {
    "ModelProto": {
        1: ("ir_version", "int"),
        2: ("producer_name", "bytes"),
        3: ("producer_version", "bytes"),
        4: ("domain", "bytes"),
        5: ("model_version", "int"),
        6: ("doc_string", "bytes"),
        7: ("graph", "GraphProto"),
        8: ("opset_import", "OperatorSetIdProto*"),
        14: ("metadata_props", "bytes*"),
        20: ("training_info", "TrainingInfoProto*"),
        25: ("functions", "FunctionProto*"),
    },
    "OperatorSetIdProto": {1: ("domain", "bytes"), 2: ("version", "int")},
    "TrainingInfoProto": {
        1: ("initialization", "GraphProto"),
        2: ("algorithm", "GraphProto"),
        3: ("initialization_binding", "bytes*"),
        4: ("update_binding", "bytes*"),
    },
    "FunctionProto": {
        1: ("name", "bytes"),
        4: ("input", "bytes*"),
        5: ("output", "bytes*"),
        6: ("attribute", "bytes*"),
        7: ("node", "NodeProto*"),
        8: ("doc_string", "bytes"),
        9: ("opset_import", "OperatorSetIdProto*"),
        10: ("domain", "bytes"),
        11: ("attribute_proto", "AttributeProto*"),
        12: ("value_info", "ValueInfoProto*"),
        13: ("overload", "bytes"),
        14: ("metadata_props", "bytes*"),
    },
    "GraphProto": {
        1: ("node", "NodeProto*"),
        2: ("name", "bytes"),
        5: ("initializer", "TensorProto*"),
        10: ("doc_string", "bytes"),
        11: ("input", "ValueInfoProto*"),
        12: ("output", "ValueInfoProto*"),
        13: ("value_info", "ValueInfoProto*"),
        14: ("quantization_annotation", "bytes*"),
        15: ("sparse_initializer", "SparseTensorProto*"),
        16: ("metadata_props", "bytes*"),
    },
    "NodeProto": {
        1: ("input", "bytes*"),
        2: ("output", "bytes*"),
        3: ("name", "bytes"),
        4: ("op_type", "bytes"),
        5: ("attribute", "AttributeProto*"),
        6: ("doc_string", "bytes"),
        7: ("domain", "bytes"),
        8: ("overload", "bytes"),
        9: ("metadata_props", "bytes*"),
    },
    "AttributeProto": {
        1: ("name", "bytes"),
        2: ("f", "fixed32"),
        3: ("i", "int"),
        4: ("s", "bytes"),
        5: ("t", "TensorProto"),
        6: ("g", "GraphProto"),
        7: ("floats", "fixed32*"),
        8: ("ints", "int*"),
        9: ("strings", "bytes*"),
        10: ("tensors", "TensorProto*"),
        11: ("graphs", "GraphProto*"),
        13: ("doc_string", "bytes"),
        14: ("tp", "TypeProto"),
        15: ("type_protos", "TypeProto*"),
        20: ("type", "int"),
        21: ("ref_attr_name", "bytes"),
        22: ("sparse_tensor", "SparseTensorProto"),
        23: ("sparse_tensors", "SparseTensorProto*"),
    },
    "TensorProto": {
        1: ("dims", "int*"),
        2: ("data_type", "int"),
        3: ("segment", "bytes"),
        4: ("float_data", "fixed32*"),
        5: ("int32_data", "int*"),
        6: ("string_data", "bytes*"),
        7: ("int64_data", "int*"),
        8: ("name", "bytes"),
        9: ("raw_data", "bytes"),
        10: ("double_data", "fixed64*"),
        11: ("uint64_data", "int*"),
        12: ("doc_string", "bytes"),
        13: ("external_data", "bytes*"),
        14: ("data_location", "int"),
        16: ("metadata_props", "bytes*"),
    },
    "SparseTensorProto": {1: ("values", "TensorProto"), 2: ("indices", "TensorProto"), 3: ("dims", "int*")},
    "ValueInfoProto": {
        1: ("name", "bytes"),
        2: ("type", "TypeProto"),
        3: ("doc_string", "bytes"),
        4: ("metadata_props", "bytes*"),
    },
    "TypeProto": {
        1: ("tensor_type", "TypeProto.Tensor"),
        4: ("sequence_type", "bytes"),
        5: ("map_type", "bytes"),
        6: ("denotation", "bytes"),
        8: ("sparse_tensor_type", "bytes"),
        9: ("optional_type", "bytes"),
    },
    "TypeProto.Tensor": {1: ("elem_type", "int"), 2: ("shape", "TensorShapeProto")},
    "TensorShapeProto": {1: ("dim", "TensorShapeProto.Dimension*")},
    "TensorShapeProto.Dimension": {
        1: ("dim_value", "int"),
        2: ("dim_param", "bytes"),
        3: ("denotation", "bytes"),
    },
}

# TensorProto.DataType
ELEMENT_TYPES: Final = {
    1: "float32",
    2: "uint8",
    3: "int8",
    4: "uint16",
    5: "int16",
    6: "int32",
    7: "int64",
    9: "bool",
    10: "float16",
    11: "float64",
    12: "uint32",
    13: "uint64",
}

_WIRE_TYPES: Final = {0: "int", 1: "fixed64", 2: "bytes", 5: "fixed32"}


@dataclass(frozen=True)
class TensorType:
    """Type of a graph input or output."""

    dtype: str  # numpy's name of the element type
    dims: tuple[int | None, ...]  # one entry per axis: a fixed length, or None where it is free


@dataclass(frozen=True)
class Graph:
    """What a model file declares."""

    # name to type, in the order of the graph; initializers that also stand as inputs are left out
    inputs: Mapping[str, TensorType]
    outputs: Mapping[str, TensorType]  # name to type, in the order of the graph
    # (domain, operator) of every node anywhere in the file; the standard domain is ""
    operators: frozenset[tuple[str, str]]
    functions: int  # number of model-local functions
    training_graphs: int  # number of training graphs


class Message:
    """One parsed protobuf message: field name to its values in wire order."""

    __slots__ = ("values",)

    def __init__(self) -> None:
        self.values: dict[str, list[int | memoryview | Message]] = {}

    def messages(self, name: str) -> list["Message"]:
        """Give the sub-messages of a field."""
        return [value for value in self.values.get(name, []) if isinstance(value, Message)]

    def text(self, name: str) -> str:
        """Give a short text field; "" where it is absent."""
        raw = self.values.get(name, [b""])[0]
        if not isinstance(raw, memoryview | bytes) or len(raw) > MAX_NAME_BYTES:
            raise _malformed(f"{name} is longer than {MAX_NAME_BYTES} bytes")
        try:
            return bytes(raw).decode("utf-8")
        except UnicodeDecodeError as error:
            raise _malformed(f"{name} is not UTF-8") from error

    def number(self, name: str) -> int:
        """Give an integer field; 0 where it is absent."""
        value = self.values.get(name, [0])[0]
        return value if isinstance(value, int) else 0


def read_graph(data: bytes) -> Graph:
    """Read a model file.

    Raises:
        BundleError: `external_data` for a tensor outside the file, `bad_graph` for everything else.
    """
    place, mark = _RUNTIME_MARK
    if data[place] == mark:  # (6)
        raise _malformed("it is marked as a file of onnxruntime's own format")
    walk = _Walk()
    model = walk.message(memoryview(data), "ModelProto", 0)
    graphs = model.messages("graph")
    if not graphs:
        raise _malformed("it holds no graph")
    # (5)
    initializers = {tensor.text("name") for tensor in graphs[0].messages("initializer")}
    inputs = _value_types(graphs[0], "input")
    return Graph(
        inputs=MappingProxyType({name: kind for name, kind in inputs.items() if name not in initializers}),
        outputs=MappingProxyType(_value_types(graphs[0], "output")),
        operators=frozenset(walk.operators),
        functions=len(model.messages("functions")),
        training_graphs=len(model.messages("training_info")),
    )


def read_model(data: bytes) -> Message:
    """Parse a whole model file under rules (1) to (3), to look at its nodes."""
    return _Walk().message(memoryview(data), "ModelProto", 0)


class _Walk:
    """One pass over a file, with its budget."""

    def __init__(self) -> None:
        self.fields = 0
        self.nodes = 0
        self.operators: set[tuple[str, str]] = set()

    def message(self, view: memoryview, kind: str, depth: int) -> Message:
        # (2)
        if depth > MAX_DEPTH:
            raise _malformed(f"messages are nested more than {MAX_DEPTH} deep")
        schema = SCHEMA[kind]
        result = Message()
        for number, wire_kind, value in _wire_fields(view):
            self.fields += 1
            if self.fields > MAX_FIELDS:
                raise _malformed(f"it has more than {MAX_FIELDS:,} fields")
            # (1)
            if number not in schema:
                raise _malformed(f"{kind} has an unknown field {number}")
            name, expected = schema[number]
            repeated = expected.endswith("*")
            expected = expected.removesuffix("*")
            if not repeated and name in result.values:
                raise _malformed(f"{kind}.{name} is given twice")
            if expected in SCHEMA:
                if not isinstance(value, memoryview):
                    raise _malformed(f"{kind}.{name} has the wrong wire type")
                result.values.setdefault(name, []).append(self.message(value, expected, depth + 1))
                continue
            packed = repeated and wire_kind == "bytes" and expected in ("int", "fixed32", "fixed64")
            if wire_kind != expected and not packed:
                raise _malformed(f"{kind}.{name} has the wrong wire type")
            result.values.setdefault(name, []).append(value)
        self.check(result, kind)
        return result

    def check(self, message: Message, kind: str) -> None:
        # (3)
        if kind == "TensorProto" and ("external_data" in message.values or message.number("data_location") != 0):
            raise BundleError(
                "the graph keeps a tensor outside its own file; only self-contained graphs are allowed: export it "
                "again with external_data=False",
                "external_data",
            )
        # (4)
        if kind == "NodeProto":
            self.nodes += 1
            if self.nodes > MAX_NODES:
                raise _malformed(f"it has more than {MAX_NODES:,} nodes")
            domain = message.text("domain")
            self.operators.add(("" if domain == "ai.onnx" else domain, message.text("op_type")))


def _wire_fields(view: memoryview) -> Iterator[tuple[int, str, int | memoryview]]:
    """Split a message into (field number, wire kind, value)."""
    position, end = 0, len(view)
    while position < end:
        tag, position = _varint(view, position)
        number, wire_kind = tag >> 3, _WIRE_TYPES.get(tag & 7)
        if wire_kind is None or not 0 < number < 2**29:
            raise _malformed("a field has an unknown wire type")
        if wire_kind == "int":
            value, position = _varint(view, position)
            yield number, wire_kind, value
            continue
        length = {"fixed64": 8, "fixed32": 4}.get(wire_kind, -1)
        if length < 0:
            length, position = _varint(view, position)
        if length > end - position:
            raise _malformed("a field is longer than the file")
        yield number, wire_kind, view[position : position + length]
        position += length


def _varint(view: memoryview, position: int) -> tuple[int, int]:
    """Read a base-128 number of at most 64 bits; returns it and the place behind it."""
    result = 0
    for shift in range(0, 70, 7):
        if position >= len(view):
            raise _malformed("it ends inside a number")
        byte = view[position]
        position += 1
        result |= (byte & 0x7F) << shift
        if byte < 0x80:
            if result >= 2**64:
                break
            return result, position
    raise _malformed("a number has more than 64 bits")


def _value_types(graph: Message, field: str) -> dict[str, TensorType]:
    types: dict[str, TensorType] = {}
    for value in graph.messages(field):
        name = value.text("name")
        tensors = [tensor for kind in value.messages("type") for tensor in kind.messages("tensor_type")]
        if not tensors or len(value.messages("type")[0].values.keys() - {"denotation"}) != 1:
            raise _malformed(f"{field} {name} is not a tensor")
        shapes = tensors[0].messages("shape")
        dtype = ELEMENT_TYPES.get(tensors[0].number("elem_type"))
        if name in types or dtype is None or not shapes:
            raise _malformed(f"{field} {name} is given twice, or lacks its type or shape")
        types[name] = TensorType(dtype, tuple(_length(dim) for dim in shapes[0].messages("dim")))
    return types


def _length(dim: Message) -> int | None:
    if "dim_value" in dim.values and "dim_param" in dim.values:
        raise _malformed("a dimension is both fixed and free")
    length = dim.number("dim_value") if "dim_value" in dim.values else None
    if length is not None and length >= 2**31:
        raise _malformed("a dimension is negative or above 2^31")
    return length


def _malformed(found: str) -> BundleError:
    return BundleError(f"the graph is refused: {found}; export it again with edgefl-export", "bad_graph")
