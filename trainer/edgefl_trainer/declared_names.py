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

PACKAGE = Path(__file__).parent
TABLE = f"{PACKAGE.name}.methods"

_PLAIN: Mapping[str, Any] = {"bool": bool, "int": int, "float": float, "tuple[int, ...]": tuple[int, ...]}


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
    kind = _written_table().get(method)
    try:
        return None if kind is None else dict(_typed(TABLE, kind))
    except _Unclear:
        return None


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
    below = PACKAGE.parent.joinpath(*module.split("."))
    path = below / "__init__.py" if below.is_dir() else below.with_suffix(".py")
    return ast.parse(path.read_text(encoding="utf-8"))


def _typed(module: str, kind: str) -> Iterator[tuple[str, Any]]:
    """The fields of a dataclass, each with its type; of one that is made of another class, that one's."""
    body = _tree(module).body
    whence = {
        alias.asname or alias.name: (node.module or "", alias.name)
        for node in body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    found = next((node for node in body if isinstance(node, ast.ClassDef) and node.name == kind), None)
    if found is None:
        if not whence.get(kind, ("",))[0].startswith(PACKAGE.name):
            raise _Unclear
        yield from _typed(*whence[kind])
        return
    if found.bases:
        raise _Unclear
    for node in found.body:
        if isinstance(node, ast.AnnAssign) and "ClassVar" not in ast.unparse(node.annotation):
            nested = _made_of(node.value)
            if nested is None:
                yield ast.unparse(node.target), _plain(node.annotation)
            else:
                yield from _typed(module, nested)


def _plain(annotation: ast.expr) -> Any:
    """The type that is written: a plain one, or Literal[…] of texts; text stands for any other."""
    if isinstance(annotation, ast.Subscript) and ast.unparse(annotation.value) == "Literal":
        return Literal[ast.literal_eval(annotation.slice)]
    return _PLAIN.get(ast.unparse(annotation), str)


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
