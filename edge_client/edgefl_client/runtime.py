"""onnxruntime as this package uses it: graphs from verified bytes only, a fixed number of threads, idle between runs.

The graph is loaded with an empty folder as the only place external data could come from (docs/security.md, attack
list 1 and 2), and every way in which the runtime can fail becomes one sentence. An 8-bit graph runs in whole numbers
only where the processor multiplies and adds bytes exactly: x86 without VNNI adds pairs in 16 bits and saturates, so
there the same graph runs in float, slower and with the same scores (docs/decisions/0026). All graphs of a process share
memory that is bounded: one that asks for more ends with a sentence, and not with the device (attack list 3, check 30).
"""

import contextlib
import functools
import os
import re
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

import onnxruntime
from numpy.typing import NDArray
from onnxruntime.capi import onnxruntime_pybind11_state as runtime_errors

from edgefl_exchange.broadcast_limits import memory_bytes
from edgefl_protocol.bundle.manifest import release
from edgefl_protocol.distribution import require
from edgefl_protocol.errors import BundleError
from edgefl_protocol.processor import session_settings

require("onnxruntime", onnxruntime.__version__)

SPINS_BRIEFLY = release("1.31")  # from here on a thread can wait for its next part of a run for a stated time
SPIN_US = 50  # a tenth faster on free processors, and no slower on busy ones (docs/decisions/0026)

MOST_GRAPH_BYTES = 4 * 2**30  # for all graphs of a process together, and three quarters of the machine's memory
_ASKS_TOO_MUCH = "smaller than requested bytes"  # of the runtime's error where that is not enough

RUNTIME_ERRORS = (
    runtime_errors.Fail,
    runtime_errors.InvalidArgument,
    runtime_errors.InvalidGraph,
    runtime_errors.InvalidProtobuf,
    runtime_errors.NotImplemented,
    runtime_errors.RuntimeException,
    RuntimeError,
)


def check_runtime(least: str) -> None:
    """Refuse a runtime that is older than a bundle asks for.

    Raises:
        BundleError: this onnxruntime is older (`runtime_too_old`).
    """
    if _runtime() < release(least):
        raise BundleError(
            f"the bundle needs onnxruntime {least} or newer, and {onnxruntime.__version__} is installed; update "
            "onnxruntime",
            "runtime_too_old",
        )


def _runtime() -> tuple[int, ...]:
    """Version of this onnxruntime; a build may add .dev20250101 or +local, and one that names none counts as 0."""
    found = re.match(r"\d+(\.\d+){0,2}", onnxruntime.__version__)
    return release("0" if found is None else found[0])


def processors() -> int:
    """Number of processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def load_graph(model: bytes, threads: int) -> onnxruntime.InferenceSession:
    """Load a verified graph.

    Raises:
        BundleError: the runtime cannot load it.
    """
    options = onnxruntime.SessionOptions()
    options.execution_mode = onnxruntime.ExecutionMode.ORT_SEQUENTIAL
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 3  # errors only
    # Left to guess, it would run bytes that its own file format also fits, and nobody has checked that reading.
    options.add_session_config_entry("session.load_model_format", "ONNX")
    spins = _runtime() >= SPINS_BRIEFLY
    options.add_session_config_entry("session.intra_op.allow_spinning", "1" if spins else "0")
    if spins:
        options.add_session_config_entry("session.intra_op.spin_duration_us", str(SPIN_US))
        options.add_session_config_entry("session.force_spinning_stop", "1")
    options.add_session_config_entry("session.inter_op.allow_spinning", "0")
    bound_memory()
    options.add_session_config_entry("session.use_env_allocators", "1")
    for name, value in session_settings().items():
        options.add_session_config_entry(name, value)
    with tempfile.TemporaryDirectory(prefix="edgefl-empty-") as empty:
        options.add_session_config_entry("session.model_external_initializers_file_folder_path", empty)
        try:
            return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        except RUNTIME_ERRORS as error:
            _refuse_large("the model", error)
            raise BundleError(
                f"onnxruntime {onnxruntime.__version__} cannot load the model: {_first_line(error)}", "graph_load"
            ) from error


def run_graph(
    graph: onnxruntime.InferenceSession, outputs: Sequence[str], given: Mapping[str, NDArray[Any]], what: str
) -> dict[str, NDArray[Any]]:
    """Run a graph once and return these outputs by name; `what` names the graph where it fails (`graph_run`).

    A `BundleError` of code `graph_memory` where it asks for more memory than graphs may have.
    """
    try:
        return dict(zip(outputs, graph.run(list(outputs), dict(given)), strict=True))
    except RUNTIME_ERRORS as error:
        _refuse_large(what, error)
        raise BundleError(f"{what} cannot run: {_first_line(error)}", "graph_run") from error


@functools.cache
def bound_memory() -> int:
    """Bound what all graphs of this process may take together, once; returns the bytes."""
    most = min(MOST_GRAPH_BYTES, memory_bytes() * 3 // 4)
    kind = onnxruntime.OrtAllocatorType.ORT_ARENA_ALLOCATOR
    info = onnxruntime.OrtMemoryInfo("Cpu", kind, 0, onnxruntime.OrtMemType.DEFAULT)
    with contextlib.suppress(*RUNTIME_ERRORS):  # whoever imports this package may have bounded it before
        onnxruntime.create_and_register_allocator(info, onnxruntime.OrtArenaCfg({"max_mem": most}))
    return most


def _refuse_large(what: str, error: BaseException) -> None:
    if _ASKS_TOO_MUCH in str(error):
        raise BundleError(
            f"{what} asks for more than the {bound_memory() // 2**20} MiB that the graphs of a program may take here; "
            "build it for smaller pictures or batches",
            "graph_memory",
        ) from error


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__
