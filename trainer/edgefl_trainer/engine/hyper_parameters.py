"""Hyper-parameters of a method: which it has, of which types, and a method made with those that are given.

Guarantees: names and types are those of the method's dataclass and of its recipe; what is mistyped is refused in one
sentence that names the nearest; what is not given keeps its default.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import TYPE_CHECKING, Any

from edgefl_trainer.data.specs import asks_questions
from edgefl_trainer.declared_names import method_names
from edgefl_trainer.engine import presets
from edgefl_trainer.engine.presets import PresetName
from edgefl_trainer.errors import SettingError
from edgefl_trainer.typed_values import HyperValue, hints, nearest, read_assignment, read_value

if TYPE_CHECKING:
    from edgefl_trainer.contract import Method


def check_method(name: str) -> None:
    """Refuse, by a `SettingError` that names the nearest one, a method that there is not."""
    known = method_names()
    if name not in known:
        raise SettingError(
            f"there is no method {name!r}; did you mean {nearest(name, known)}? `edgefl-train methods` lists all."
        )


def method_class(name: str) -> "type[Method]":
    """Find a method by name; a `SettingError` as of `check_method` where there is none."""
    check_method(name)
    from edgefl_trainer.methods import METHODS

    return METHODS[name]


def blank(method: str, data: Sequence[str] = ()) -> "Method":
    """Make a method with the defaults that it has for this data: pictures alone, or pictures that are asked questions.

    One without labels learns from the pictures, whatever is asked about them. A `SettingError` where the data asks
    questions and a method with labels answers none.
    """
    from edgefl_trainer.contract import declared

    kind = method_class(method)
    asking = next((text for text in data if asks_questions(text)), None)
    if asking is None or not kind.needs_labels:
        return kind()
    asked = declared(kind).asked
    if asked is None:
        from edgefl_trainer.methods import METHODS

        able = [name for name in sorted(METHODS) if declared(METHODS[name]).asked]
        raise SettingError(
            f"{asking} asks questions about its pictures, and {method} answers none: use {', '.join(able)}."
        )
    return asked.make()


def preset_of(
    method: str,
    preset: PresetName,
    backbone: str = "",
    hyper: Mapping[str, Any] | None = None,
    data: Sequence[str] = (),
) -> Mapping[str, Any]:
    """Return what a preset stands for with one method, a backbone's name, hyper-parameters that are given, and data."""
    found = presets.preset_of(method_class(method), preset, backbone, hyper or {}, asked=any(map(asks_questions, data)))
    known = hyper_types(blank(method, data))
    return {**found, "hyper": {name: value for name, value in found.get("hyper", {}).items() if name in known}}


def hyper_types(method: Any) -> dict[str, Any]:
    """List every hyper-parameter that `--set` can name, with its type; those of a nested recipe count as its own.

    `method` is one, or its class with the defaults.
    """
    instance = method() if isinstance(method, type) else method
    types = hints(type(instance))
    found: dict[str, Any] = {}
    for entry in fields(instance):
        value = getattr(instance, entry.name)
        found.update(hyper_types(value) if is_dataclass(value) else {entry.name: types[entry.name]})
    return found


def hyper_values(method: Any) -> dict[str, Any]:
    """List every hyper-parameter of a method with its value; those of a nested recipe count as its own."""
    found: dict[str, Any] = {}
    for entry in fields(method):
        value = getattr(method, entry.name)
        found.update(hyper_values(value) if is_dataclass(value) else {entry.name: value})
    return found


def build(make: Callable[[], Any], hyper: Mapping[str, Any]) -> Any:
    """Adjust what `make` gives by flat hyper-parameters; what is not named keeps its default, in its recipe too.

    `make` is a method's class, or gives a method (`blank`).

    Raises:
        SettingError: a name that the method does not have, or a value of another type or out of range.
    """
    return _adjusted(make(), hyper)


def _adjusted(instance: Any, hyper: Mapping[str, Any]) -> Any:
    types = hints(type(instance))
    known = hyper_types(instance)
    for name in hyper:
        if name not in known:
            from edgefl_trainer.methods import METHODS

            kind = type(instance)
            called = next((method for method, made in METHODS.items() if made is kind), kind.__name__)
            raise SettingError(f"{called} has no hyper-parameter {name!r}; did you mean {nearest(name, known)}?")
    values: dict[str, Any] = {}
    for entry in fields(instance):
        value = getattr(instance, entry.name)
        if is_dataclass(value):
            inner = {name: given for name, given in hyper.items() if name in hyper_types(value)}
            values[entry.name] = _adjusted(value, inner)
        elif entry.name in hyper:
            values[entry.name] = read_value(hyper[entry.name], types[entry.name], entry.name)
    return replace(instance, **values)


def assignment(method: Any, text: str) -> tuple[str, HyperValue]:
    """Read `key=value` by the type of the method's field; a `SettingError` where there is no such key or value."""
    return read_assignment(text, hyper_types(method))
