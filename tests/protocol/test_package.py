"""The package's front door: its example runs, its list is complete, its errors form the drawn tree."""

import ast
import doctest
import importlib
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest

import edgefl_protocol
from edgefl_protocol import errors

FOLDER = Path(edgefl_protocol.__file__).parent
MODULES = sorted(
    module.name.removeprefix("edgefl_protocol.")
    for module in pkgutil.walk_packages([str(FOLDER)], "edgefl_protocol.")
    if not module.ispkg
)


def test_the_example_of_the_docstring_runs():
    """Everything that is shown is executed."""
    result = doctest.testmod(edgefl_protocol)
    assert result.attempted > 10 and result.failed == 0


def test_all_is_sorted_and_names_every_public_import():
    """What a type checker is told to import is what is listed, and comes from there when first used."""
    tree = ast.parse((FOLDER / "__init__.py").read_text())
    told = {
        alias.name: node.module
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module.startswith("edgefl_protocol.")
        for alias in node.names
    }
    assert list(edgefl_protocol.__all__) == sorted(told)
    for name, module in told.items():
        value = getattr(edgefl_protocol, name)
        assert value is getattr(importlib.import_module(module), name) and value.__doc__


def test_importing_the_package_loads_none_of_its_libraries():
    """A device that only scores pays for what it uses: reading a bundle's archive needs neither numpy nor keys."""
    libraries = {"numpy", "PIL", "cryptography"}
    code = f"import sys, edgefl_protocol.bundle.archive\nprint(*sorted({libraries} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


def test_a_name_that_is_not_there_is_said():
    with pytest.raises(AttributeError, match="no attribute 'sael'"):
        _ = edgefl_protocol.sael


def test_the_drawn_error_tree_is_the_real_one():
    """The tree in the docstring names every class under its parent, and no other."""
    drawn = {}
    parents = {0: "EdgeflError"}
    for line in errors.__doc__.splitlines():
        found = re.match(r"    ([ │├└─]*)(\w+Error)\b", line)
        if found and found[2] != "EdgeflError":
            depth = len(found[1]) // 4
            drawn[found[2]] = parents[depth - 1]
            parents[depth] = found[2]
    real = {
        name: value.__bases__[0].__name__
        for name, value in vars(errors).items()
        if isinstance(value, type) and name not in ("EdgeflError", "Exception")
    }
    assert drawn == real and len(real) >= 18


@pytest.mark.parametrize("name", sorted(name for name in vars(errors) if name.endswith("Error")))
def test_an_error_carries_a_code_and_one_sentence(name):
    kind = getattr(errors, name)
    assert re.fullmatch(r"[a-z_]+", kind("x").code)
    assert str(kind("one sentence", "special")) == "one sentence" and kind("x", "special").code == "special"
    assert kind.code != "special"


def test_nothing_of_ours_and_nothing_heavy_is_imported():
    """The design's import rule: this package stands alone on numpy, Pillow and cryptography."""
    code = "import sys, importlib\n" + "\n".join(f"importlib.import_module('edgefl_protocol.{m}')" for m in MODULES)
    code += "\nprint(*sorted({name.partition('.')[0] for name in sys.modules}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert not loaded & {"torch", "timm", "onnx", "onnxruntime", "requests", "safetensors", "pickle5"}
    assert {name for name in loaded if name.startswith("edgefl_")} == {"edgefl_protocol"}


def test_two_modules_alone_touch_the_disk_the_clock_or_the_network():
    """Pure core, thin edges (docs/decisions/0007): files in `durable`, locks in `lock_file`, nothing else."""
    banned = {"socket", "ssl", "requests", "time", "datetime", "sqlite3", "pathlib", "os", "subprocess", "pickle"}
    for name in MODULES:
        tree = ast.parse((FOLDER / f"{name.replace('.', '/')}.py").read_text())
        used = {alias.name.partition(".")[0] for n in ast.walk(tree) if isinstance(n, ast.Import) for alias in n.names}
        used |= {(n.module or "").partition(".")[0] for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
        calls = {n.func.id for n in ast.walk(tree) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)}
        if name not in ("durable", "lock_file"):
            assert not used & banned and not calls & {"open", "eval", "exec"}, name
