"""The project's own source, parsed once, for the rules of the house."""

import ast
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MAY_LOAD = "trainer/edgefl_trainer/models/packaged.py"  # the one module that may call `torch.load`, see decisions/0067
PACKAGES = {
    "edgefl_protocol": "protocol",
    "edgefl_exchange": "protocol",
    "edgefl_trainer": "trainer",
    "edgefl_export": "export",
    "edgefl_client": "edge_client",
    "edgefl_coordinator": "coordinator",
}


@dataclass(frozen=True)
class Module:
    """One module of ours: dotted name, path below the root, text, syntax tree."""

    name: str
    path: Path
    text: str
    tree: ast.Module

    @property
    def is_package(self) -> bool:
        return self.path.name == "__init__.py"

    def imports(self) -> tuple[tuple[str, int], ...]:
        """Every module it imports, wherever the statement stands, with its line; type-only imports are left out."""
        return self._imports

    @cached_property
    def _imports(self) -> tuple[tuple[str, int], ...]:
        return tuple(self._found())

    def _found(self) -> Iterator[tuple[str, int]]:
        skipped = {id(node) for block in walked(self.tree) if _is_type_checking(block) for node in ast.walk(block)}
        for node in walked(self.tree):
            if id(node) in skipped:
                continue
            if isinstance(node, ast.Import):
                for alias in node.names:
                    yield alias.name, node.lineno
            elif isinstance(node, ast.ImportFrom):
                base = node.module or ""
                assert not node.level, f"{self.path}:{node.lineno}: relative import"
                for alias in node.names:
                    yield f"{base}.{alias.name}", node.lineno


@cache
def walked(tree: ast.AST) -> tuple[ast.AST, ...]:
    """Every node of a tree; many rules go over the same trees."""
    return tuple(ast.walk(tree))


def _is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


@pytest.fixture(scope="session")
def root() -> Path:
    return ROOT


@pytest.fixture(scope="session")
def modules() -> Mapping[str, Module]:
    """All modules of the packages, by dotted name."""
    found = {}
    for package, folder in PACKAGES.items():
        for file in sorted((ROOT / folder / package).rglob("*.py")):
            parts = file.relative_to(ROOT / folder).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            text = file.read_text(encoding="utf-8")
            found[name] = Module(name, file.relative_to(ROOT), text, ast.parse(text))
    return found


@pytest.fixture(scope="session")
def tracked() -> tuple[Path, ...]:
    """Every file that git tracks."""
    listed = subprocess.run(["git", "-C", str(ROOT), "ls-files", "-z"], capture_output=True, text=True, check=True)
    names = [name for name in listed.stdout.split("\0") if name]
    return tuple(path for path in map(Path, names) if (ROOT / path).is_file())


@pytest.fixture(scope="session")
def environment() -> dict[str, str]:
    """Our commands first on the path, one thread, no colours, a terminal of 80 columns."""
    here = str(Path(sys.executable).parent)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("EDGEFL_")}
    return kept | {
        "PATH": f"{here}{os.pathsep}{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "NO_COLOR": "1",
        "COLUMNS": "80",
        "PYTHONWARNINGS": "ignore",
    }


@pytest.fixture(scope="session")
def command(environment) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run a command line and give its outcome."""

    def run(*words: str, **options: object) -> subprocess.CompletedProcess[str]:
        options = {"env": environment, "timeout": 300, **options}
        return subprocess.run(words, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL, **options)

    return run
