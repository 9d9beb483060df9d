"""Which values of a setting are out of range, read from the text of a method's classes before PyTorch is imported.

What is read stands in `__post_init__`: `check_ranges(self, TABLE)` of a table in `edgefl_protocol.rules.bounds`, and
plain comparisons of `check_bounds(self, key=(least <= self.key <= most, "what is allowed"))`. Guarantees: a value is
refused here only where its class refuses it, with the same sentence; where the text leaves any doubt, such as a bound
that is another setting, the class decides later.
"""

import ast
import operator
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from typing import Any, Final

from edgefl_protocol.rules import bounds
from edgefl_protocol.rules.bounds import Range
from edgefl_trainer.declared_names import imported_names, written_classes
from edgefl_trainer.errors import SettingError

_COMPARED: Final[Mapping[type[ast.cmpop], Callable[[Any, Any], bool]]] = {
    ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge, ast.Eq: operator.eq,
}  # fmt: skip


def check_range(method: str, key: str, value: object) -> None:
    """Refuse, by a `SettingError`, a value that is a number and out of the range that is written for it."""
    if type(value) not in (int, float):
        return
    for module, found in written_classes(method) or ():
        for call in _checks(found):
            allowed = _refused(module, call, key, value)
            if allowed is not None:
                raise SettingError(f"{key} is {value}; allowed: {allowed}.")


def _checks(found: ast.ClassDef) -> Iterator[ast.Call]:
    """The calls of a class's `__post_init__` that stand there without a condition."""
    for node in found.body:
        if isinstance(node, ast.FunctionDef) and node.name == "__post_init__":
            for step in node.body:
                if isinstance(step, ast.Expr) and isinstance(step.value, ast.Call):
                    yield step.value


def _refused(module: str, call: ast.Call, key: str, value: object) -> str | None:
    """What a call allows, where it refuses the value; None where it does not, or the text does not say."""
    name = ast.unparse(call.func)
    if name == "check_ranges" and len(call.args) == 2:
        table = imported_names(module).get(ast.unparse(call.args[1]), ("", ""))
        ranges: Mapping[str, Range] = getattr(bounds, table[1], {}) if table[0] == bounds.__name__ else {}
        return str(ranges[key]) if key in ranges and not ranges[key].holds(value) else None
    if name != "check_bounds":
        return None
    for word in call.keywords:
        pair = word.value
        if word.arg == key and isinstance(pair, ast.Tuple) and isinstance(pair.elts[1], ast.Constant):
            return str(pair.elts[1].value) if _holds(pair.elts[0], key, value) is False else None
    return None


def _holds(test: ast.expr, key: str, value: object) -> bool | None:
    """Whether a comparison of numbers and the setting itself holds; None for anything else."""
    if not isinstance(test, ast.Compare):
        return None
    sides: list[Any] = []
    for side in (test.left, *test.comparators):
        if isinstance(side, ast.Constant):
            sides.append(side.value)
        elif ast.unparse(side) == f"self.{key}":
            sides.append(value)
        else:
            return None
    if any(type(one) not in _COMPARED for one in test.ops):
        return None
    steps = zip(test.ops, pairwise(sides), strict=True)
    return all(_COMPARED[type(compared)](low, high) for compared, (low, high) in steps)
