"""Which methods there are, and which settings each has, read from the text of their files.

The table of methods imports PyTorch, which takes seconds. Who mistyped a name hears of it at once, so names are looked
up here first. Guarantees: nothing is imported and nothing is written twice; where the text leaves any doubt the answer
is None, and the table itself decides later. A type that is not plain counts as text, which any value is.
"""

import ast
import sys
from collections.abc import Collection, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Literal

import edgefl_protocol

PACKAGE = Path(__file__).parent
TABLE = f"{PACKAGE.name}.methods"

_PLAIN: Mapping[str, Any] = {"bool": bool, "int": int, "float": float, "tuple[int, ...]": tuple[int, ...]}
_ROOTS = {PACKAGE.name: PACKAGE.parent, "edgefl_protocol": Path(edgefl_protocol.__file__).parents[1]}


class _Unclear(Exception):
    """The text of a class does not say which settings it has."""


def method_names() -> Collection[str]:
    """List the names of all methods: of the table where it is loaded, else of its text."""
    loaded = sys.modules.get(TABLE)
    return _written_table() if loaded is None else loaded.METHODS


def setting_types(method: str) -> Mapping[str, Any] | None:
    """Map every setting that `--set` can name for a method, those of a nested recipe too, to its type; None: unclear.

    These are the keys where pictures are asked nothing; for questions a method may have others.
    """
    classes = written_classes(method)
    if classes is None:
        return None
    return {
        ast.unparse(node.target): _plain(module, node.annotation)
        for module, found in classes
        for node in _fields(found)
        if _made_of(node.value) is None
    }


def written_classes(method: str) -> list[tuple[str, ast.ClassDef]] | None:
    """Give the text of a method's class and of those that it is made of, each with its module; None: unclear."""
    kind = _written_table().get(method)
    try:
        return None if kind is None else list(_classes(TABLE, kind))
    except _Unclear:
        return None


@cache
def imported_names(module: str) -> dict[str, tuple[str, str]]:
    """Map each name that the text of a module imports to its module, and to its name there."""
    return {
        alias.asname or alias.name: (node.module or "", alias.name)
        for node in _tree(module).body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }


@cache
def _written_table() -> dict[str, str]:
    """Name to class, as the dictionary METHODS is written: the one annotated assignment of its file."""
    written = next(node.value for node in _tree(TABLE).body if isinstance(node, ast.AnnAssign))
    if not isinstance(written, ast.Dict):
        raise TypeError(f"{TABLE} writes its table in another way than as a dictionary")
    pairs = zip(written.keys, written.values, strict=True)
    return {ast.literal_eval(name): ast.unparse(kind) for name, kind in pairs if name is not None}


@cache
def _tree(module: str) -> ast.Module:
    parts = module.split(".")
    below = _ROOTS[parts[0]].joinpath(*parts)
    path = below / "__init__.py" if below.is_dir() else below.with_suffix(".py")
    return ast.parse(path.read_text(encoding="utf-8"))


def _classes(module: str, kind: str) -> Iterator[tuple[str, ast.ClassDef]]:
    """A dataclass, and of each field that is made of another class, that one."""
    found = next((node for node in _tree(module).body if isinstance(node, ast.ClassDef) and node.name == kind), None)
    if found is None:
        whence = imported_names(module).get(kind, ("", ""))
        if not whence[0].startswith(PACKAGE.name):
            raise _Unclear
        yield from _classes(*whence)
        return
    if found.bases:
        raise _Unclear
    yield module, found
    for node in _fields(found):
        if (nested := _made_of(node.value)) is not None:
            yield from _classes(module, nested)


def _fields(found: ast.ClassDef) -> Iterator[ast.AnnAssign]:
    for node in found.body:
        if isinstance(node, ast.AnnAssign) and "ClassVar" not in ast.unparse(node.annotation):
            yield node


def _plain(module: str, annotation: ast.expr) -> Any:
    """The type that is written, or that its name stands for: a plain one, or Literal[…] of texts; else text."""
    if isinstance(annotation, ast.Name) and annotation.id not in _PLAIN:
        module, name = imported_names(module).get(annotation.id, (module, annotation.id))
        if module.partition(".")[0] not in _ROOTS:
            return str
        annotation = _assigned(module, name) or annotation
    if isinstance(annotation, ast.Subscript) and ast.unparse(annotation.value) == "Literal":
        return Literal[ast.literal_eval(annotation.slice)]
    return _PLAIN.get(ast.unparse(annotation), str)


def _assigned(module: str, name: str) -> ast.expr | None:
    """What a module assigns to a name, as it is written."""
    for node in _tree(module).body:
        if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == [name]:
            return node.value
    return None


def _made_of(value: ast.expr | None) -> str | None:
    """The class that a field's default is made of: `field(default_factory=X)`, or X called in a lambda."""
    if not isinstance(value, ast.Call):
        return None
    made = next((word.value for word in value.keywords if word.arg == "default_factory"), None)
    if isinstance(made, ast.Lambda) and isinstance(made.body, ast.Call):
        made = made.body.func
    if not isinstance(made, ast.Name):
        raise _Unclear
    return made.id
