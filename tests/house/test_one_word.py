"""One word per thing, also in code (docs/design.md 3): a class of the product has its name alone."""

import ast
import builtins
import re
from collections import defaultdict
from collections.abc import Iterator

from tests.house.conftest import walked

# Names that two modules may define, each with the reason.
SHARED = {}


def class_names(modules) -> dict[str, set[str]]:
    """Public class → the modules that define it, or that give the name to a type of another kind."""
    found: dict[str, set[str]] = defaultdict(set)
    classes: set[str] = set()
    for module in modules.values():
        for node in module.tree.body:
            if isinstance(node, ast.ClassDef):
                classes.add(node.name)
                found[node.name].add(module.name)
            elif isinstance(node, ast.Assign | ast.AnnAssign) and not is_type_variable(node.value):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                for target in targets:
                    if isinstance(target, ast.Name):
                        found[target.id].add(module.name)
    return {name: found[name] for name in classes if not name.startswith("_")}


def is_type_variable(value: ast.expr | None) -> bool:
    """Whether an assigned value is `TypeVar(…)`: such a name means something in its own module only."""
    return isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id == "TypeVar"


def test_a_class_has_its_name_alone(modules) -> None:
    """Whoever searches a class finds one definition, and no type alias of that name beside it."""
    twice = {name: sorted(where) for name, where in class_names(modules).items() if len(where) > 1}
    assert twice.keys() == SHARED.keys(), {name: where for name, where in twice.items() if name not in SHARED}


def test_two_classes_of_one_name_are_found(modules) -> None:
    """The check above can fail: without its type, a name that two modules give to something else counts."""
    names = class_names(modules)
    assert names["Member"] == {"edgefl_exchange.member"} and len(names) > 300


QUOTED = re.compile(r"`([A-Za-z_][\w.]*)(?:\(\))?`")
CAMEL = re.compile(r"[A-Z]+[a-z]\w*")


def names_of(tree: ast.Module) -> Iterator[str]:
    """Every name that a module defines, imports or asks an object for."""
    for node in walked(tree):
        if isinstance(node, ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.alias):
            yield (node.asname or node.name).rpartition(".")[2]


def classes_named(tree: ast.Module) -> Iterator[str]:
    """The names in backquotes in a module's docstrings that are written as a class is."""
    for node in walked(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            for quoted in QUOTED.findall(ast.get_docstring(node) or ""):
                yield from (part for part in quoted.split(".") if CAMEL.fullmatch(part))


def test_a_class_that_a_docstring_names_is_there(modules) -> None:
    """A name in backquotes that is written as a class is one that the code uses: none outlives its class."""
    known = {name for module in modules.values() for name in names_of(module.tree)} | set(dir(builtins))
    for module in modules.values():
        lost = set(classes_named(module.tree)) - known
        assert not lost, f"{module.path} names {sorted(lost)}"
    asked = ast.parse('"""See `Gone.is_there` and `Plan()`."""\ndef one():\n    """Of a `Payload`."""\n')
    assert [name for name in classes_named(asked) if name not in known] == ["Gone", "Plan"]
