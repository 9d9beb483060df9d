"""What one run of the tests makes once for all its processes: traced graphs, finished runs, bundles.

A file lock holds the others back while one process makes a thing. A graph's name is the digest of all that was traced,
values of the network included, so another network, another option or another step is another graph. Of the tensors
that a graph takes, only the shapes count; gates compare it with the values of each model.
"""

import fcntl
import functools
import hashlib
import importlib
import inspect
import os
import pkgutil
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from tests.forks import Forks

FOLDER = "EDGEFL_TESTS_SHARED"  # where a process that is no test's own finds the folder of `Shared`


class Shared:
    """A folder of one run of the tests, the same in each of its processes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tracing = False
        folder.mkdir(exist_ok=True)

    def made(self, name: str, make: Callable[[Path], object]) -> Path:
        """The folder that `make` filled; the first who asks has it made, the others wait for it."""
        place = self.folder / name
        with (self.folder / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not (place / "finished").exists():
                place.mkdir(exist_ok=True)
                make(place)
                (place / "finished").touch()
        return place

    @contextmanager
    def traces(self) -> Iterator[None]:
        """Within it, only what no process has traced yet is traced; an equal step or module gets the same graph.

        It may be entered within itself: a fixture of the whole run is made while a module's holds it.
        """
        if self.tracing:
            yield
            return
        modules = _export_modules()
        scoring, learning = (_defined(modules, name) for name in ("export_score_graph", "export_training_graph"))
        traced, stepped = scoring._trace, learning.export_training_graph

        def score(module: Any, image: Any, tensors: Mapping[str, Any], *rest: Any) -> Any:
            import onnx

            made = functools.partial(traced, module, image, tensors, *rest)
            shapes = [(name, value.dtype, value.shape) for name, value in tensors.items()]
            key = (module, image, shapes, rest)
            found = self._bytes("score", key, lambda: made().SerializeToString(deterministic=True))
            return onnx.load_from_string(found)

        def training(step: Any, tensors: Mapping[str, Any], *rest: Any, **named: Any) -> bytes:
            shapes = [(name, value.dtype, value.shape) for name, value in tensors.items()]
            key = (_fixed(step), shapes, rest, named)
            return self._bytes("step", key, lambda: stepped(step, tensors, *rest, **named))

        with ExitStack() as patches:
            patches.enter_context(operators_read_once())
            patches.enter_context(mock.patch.object(scoring, "_trace", score))
            for module in modules:
                if getattr(module, "export_training_graph", None) is stepped:
                    patches.enter_context(mock.patch.object(module, "export_training_graph", training))
            patches.enter_context(mock.patch.object(self, "tracing", True))
            yield

    def _bytes(self, kind: str, key: object, make: Callable[[], bytes]) -> bytes:
        place = self.made(f"{kind}-{fingerprint(key)}", lambda folder: (folder / "graph").write_bytes(make()))
        return (place / "graph").read_bytes()


_OPERATORS = dict[object, Any]()  # PyTorch's tables for its exporter by what was asked for, once a process has read one


@contextmanager
def operators_read_once() -> Iterator[None]:
    """Within it, PyTorch's exporter keeps its table of operators, which it otherwise reads a second long per graph.

    Nor does it note for each node which line of Python made it, a tenth of its time: no graph of ours holds that.
    """
    from torch.fx import config
    from torch.onnx._internal.exporter._registration import ONNXRegistry

    plain = ONNXRegistry.from_torchlib

    def read(**asked: Any) -> Any:
        key = tuple(sorted(asked.items()))
        if key not in _OPERATORS:
            _OPERATORS[key] = plain(**asked)
        return _OPERATORS[key]

    unlined = mock.patch.object(config, "do_not_emit_stack_traces", True)
    with unlined, mock.patch.object(ONNXRegistry, "from_torchlib", staticmethod(read)):
        yield


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Shared:
    """What this run of the tests makes once for all its processes.

    xdist gives each process a temporary folder of its own, beside the others'.
    """
    own = tmp_path_factory.getbasetemp()
    return Shared((own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "shared")


@pytest.fixture(scope="session")
def forks(shared: Shared) -> Iterator[Forks]:
    """Our commands in forks of one process, which all tests share."""
    found = Forks(shared.folder)
    yield found
    found.close()


def _fixed(step: Any) -> object:
    """What a graph holds of a step: FedCLF's takes the network's values and the rate, and batch and bank are free."""
    from edgefl_export.methods.fedclf import FedCLFStep

    own = getattr(step, "__self__", step)
    if not isinstance(own, FedCLFStep):
        return step
    form = {name: (value.dtype, value.shape) for name, value in own.model.state_dict().items()}
    names = {field.name for field in fields(own.plan)} - {"batch", "queue", "lr", "epochs", "seed"}
    plan = {name: getattr(own.plan, name) for name in sorted(names)}
    return type(own), getattr(step, "__name__", None), str(own.model), form, plan, own.mean, own.std


def _export_modules() -> list[types.ModuleType]:
    """All modules of the export, imported, so that none takes a name while it stands for something else."""
    import edgefl_export

    names = [name for _, name, _ in pkgutil.walk_packages(edgefl_export.__path__, "edgefl_export.")]
    return [importlib.import_module(name) for name in names]


def _defined(modules: list[types.ModuleType], name: str) -> Any:
    """The module that defines a function."""
    (found,) = [one for one in modules if getattr(getattr(one, name, None), "__module__", None) == one.__name__]
    return found


def fingerprint(value: object) -> str:
    """A digest of everything that a value holds; what it does not know is a TypeError, never an equal digest."""
    found = hashlib.sha256()
    _enter(value, found, {})
    return found.hexdigest()[:32]


def _enter(value: Any, found: Any, met: dict[int, tuple[int, object]]) -> None:
    """Write type and content of a value into a digest; something met before is its number."""
    import torch

    found.update(f"<{type(value).__module__}.{type(value).__qualname__}".encode())
    plain = (str, int, float, bool, type(None), bytes, Path, torch.dtype, torch.device, torch.Size, types.EllipsisType)
    if isinstance(value, plain):
        found.update(repr(value).encode())
    elif id(value) in met:
        found.update(f"met {met[id(value)][0]}".encode())
    else:
        met[id(value)] = len(met), value  # held, so that no later one has its id
        for part in _parts(value):
            _enter(part, found, met)
    found.update(b">")


def _parts(value: Any) -> Iterator[object]:
    import torch

    if isinstance(value, np.ndarray | np.generic):
        yield from (str(value.dtype), value.shape, np.ascontiguousarray(value).tobytes())
    elif isinstance(value, torch.Tensor):
        yield from (value.requires_grad, value.detach().cpu().numpy())
    elif isinstance(value, Mapping):
        yield from value.items()
    elif isinstance(value, list | tuple):
        yield from value
    elif isinstance(value, set | frozenset):
        yield from sorted(value)
    elif isinstance(value, torch.nn.Module):
        yield from sorted(vars(value).items())
    elif is_dataclass(value) and not isinstance(value, type):
        named = [field.name for field in fields(value)]
        if type(value).__module__ == "edgefl_trainer.models.spec":
            named.remove("name")  # tells the folder that a network was read from
        yield from ((name, getattr(value, name)) for name in named)
    elif isinstance(value, functools.partial):
        yield from (value.func, value.args, value.keywords)
    elif inspect.ismethod(value):
        yield from (value.__self__, value.__func__)
    elif isinstance(value, types.FunctionType):
        yield from (value.__module__, value.__qualname__, value.__code__.co_code, value.__defaults__)
        yield from (cell.cell_contents for cell in value.__closure__ or ())
    elif isinstance(value, type | types.BuiltinFunctionType):
        yield from (value.__module__, value.__qualname__)
    else:
        raise TypeError(f"no digest of {type(value)}: {value!r}")
