"""A graph that asks for more memory than a device gives is refused, whoever signed it: docs/security.md check 30."""

import re
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from edgefl_client import Scorer
from edgefl_protocol.bundle import BundleFields, build_bundle, load_bundle
from edgefl_protocol.bundle.archive import read_archive
from edgefl_protocol.bundle.onnx_rules import check_operators
from edgefl_protocol.errors import BundleError

SIDE = 40_320  # a square of float32: 6.5 GB
node = helper.make_node
# Each makes `large` of a few bytes; the runtime sees the size of some of them only when it runs them.
WAYS = {
    "constant": [node("ConstantOfShape", ["square"], ["large"])],
    "folded": [node("Expand", ["half", "square"], ["large"])],
    "of the picture": [node("Expand", ["cold_mean", "square"], ["large"])],
    "product": [
        node("Expand", ["cold_mean", "column"], ["a"]), node("Expand", ["cold_mean", "row"], ["b"]),
        node("MatMul", ["a", "b"], ["large"]),
    ],
    "padding": [
        node("Reshape", ["cold_mean", "one_one"], ["a"]), node("Pad", ["a", "padding", "half"], ["large"]),
    ],
}  # fmt: skip


def large_bundle(lab, way: str, side: int = SIDE) -> bytes:
    """A well-signed bundle whose graph adds nothing to the dissonance, by way of a large square."""
    members = read_archive(lab.bundle_bytes())
    for name in ("manifest.json", "signatures.json"):
        del members[name]
    model = onnx.load_from_string(members["score.onnx"])
    graph = model.graph
    constants = {
        "square": [side, side], "column": [side, 1], "row": [1, side], "one_one": [1, 1], "both_axes": [0, 1],
        "padding": [0, 0, side - 1, side - 1],
    }  # fmt: skip
    graph.initializer.extend(numpy_helper.from_array(np.array(value), name) for name, value in constants.items())
    graph.initializer.append(numpy_helper.from_array(np.array(0.5, np.float32), "half"))
    graph.initializer.append(numpy_helper.from_array(np.array(0.0, np.float32), "nothing"))
    graph.node[-1 - [one.output[0] for one in graph.node][::-1].index("dissonance")].output[0] = "dissonance_before"
    graph.node.extend([
        node("ReduceMean", ["cold"], ["cold_mean"], keepdims=0), *WAYS[way],
        node("ReduceMean", ["large", "both_axes"], ["mean"], keepdims=0), node("Mul", ["mean", "nothing"], ["added"]),
        node("Add", ["dissonance_before", "added"], ["dissonance"]),
    ])  # fmt: skip
    assert check_operators(model.SerializeToString())  # nothing in its form is wrong
    fields = BundleFields(federation="skin", line="main", task="all", version=2, created_ms=lab.NOW_MS, expires_ms=None)
    return build_bundle({**members, "score.onnx": model.SerializeToString()}, fields, [lab.SIGNER])


def peak_mib() -> float:
    found = re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())
    assert found
    return int(found[1]) / 1024


@pytest.mark.parametrize("way", WAYS)
def test_a_graph_that_asks_for_6_gigabytes_is_refused(lab, way) -> None:
    """By its code, before it has them; the same graph with a small square scores."""
    before = peak_mib()
    bundle = load_bundle(large_bundle(lab, way), [lab.SIGNER.public], lab.NOW_MS)
    with pytest.raises(BundleError, match=r"asks for more than the \d+ MiB that the graphs") as refused:
        Scorer(bundle, threads=1).score(lab.photo())
    assert refused.value.code == "graph_memory" and peak_mib() - before < 500
    small = load_bundle(large_bundle(lab, way, side=8), [lab.SIGNER.public], lab.NOW_MS)
    plain = load_bundle(lab.bundle_bytes(), [lab.SIGNER.public], lab.NOW_MS)
    assert Scorer(small, threads=1).score(lab.photo()).dissonance == pytest.approx(
        Scorer(plain, threads=1).score(lab.photo()).dissonance
    )


def test_such_a_bundle_does_not_take_the_place_of_one_that_works(run, lab, tmp_path) -> None:
    """`edgefl use` runs a graph once before it is used."""
    (tmp_path / "good.edgefl").write_bytes(lab.bundle_bytes(version=1))
    (tmp_path / "large.edgefl").write_bytes(large_bundle(lab, "of the picture"))
    assert run("use", "good.edgefl", "--trust", lab.SIGNER.public.hex())[0] == 0
    code, _, err = run("use", "large.edgefl")
    assert code != 0 and "asks for more than" in err
    good = load_bundle(lab.bundle_bytes(version=1), [lab.SIGNER.public], lab.NOW_MS)
    assert good.sha256 in run("status", "--json")[1]
