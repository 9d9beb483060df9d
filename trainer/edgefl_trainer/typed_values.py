"""Values from TOML, JSON and the command line, read strictly as the types that are declared for them.

A whole number passes for a number and a list for a tuple; nothing else is converted. Bounds stand in the type
(`Annotated[int, Meta(ge=1, description="at least 1")]`). What does not fit is one sentence: `rounds is 'five'; allowed:
a whole number.`
"""

import difflib
import re
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import msgspec

from edgefl_trainer.errors import SettingError

MOST_NAMED = 12  # names that one sentence can list
PlainValue = bool | int | float | str | tuple[int | float | str, ...]  # of a setting in a table of settings
HyperValue = bool | int | float | str | tuple[int, ...]  # of a method's setting
PlainTable = Mapping[str, PlainValue]

_WORDS: Mapping[Any, str] = {
    bool: "on or off",
    int: "a whole number",
    float: "a number",
    str: "text",
    tuple[int, ...]: "whole numbers separated by commas, such as 5,6,7, or auto",
    tuple[str, ...]: "a list of texts",
}
_PATH = re.compile(r" - at `\$(.*)`$")
_STEP = re.compile(r"\.(\w+)|\[(\d+)\]|\[(\.\.\.)\]")
_UNKNOWN = re.compile(r"Object contains unknown field `(.*?)`")
_MISSING = re.compile(r"Object missing required field `(.*?)`")


def nearest(name: str, known: Iterable[str]) -> str:
    """Name the known names that look most like `name`; where none does, all of a short list, else the nearest."""
    names = sorted(known)
    far = names if len(names) <= MOST_NAMED else difflib.get_close_matches(name, names, n=1, cutoff=0)
    return ", ".join(difflib.get_close_matches(name, names, n=3, cutoff=0.4) or far)


def hints(kind: Any) -> Mapping[str, Any]:
    """Return the declared type of each field of a class, with its bounds."""
    return typing.get_type_hints(kind, include_extras=True)


def fits(value: object, wanted: Any, *, texts: bool = False) -> bool:
    """Tell whether a value is of a type and within its bounds; with `texts` a text may stand for a number."""
    try:
        msgspec.convert(value, wanted, strict=not texts)
    except msgspec.ValidationError:
        return False
    return True


def allowed(wanted: Any, value: object, *, texts: bool = False) -> str:
    """Return what a person may write instead of a value that does not fit."""
    origin, parts = get_origin(wanted), get_args(wanted)
    if origin is Annotated:
        plain, *bounds = parts
        return str(bounds[0].description) if fits(value, plain, texts=texts) else allowed(plain, value)
    if _first(wanted) is not wanted:
        return allowed(_first(wanted), value, texts=texts)
    if origin is Literal:
        return ", ".join(map(str, parts))
    return _WORDS.get(wanted) or ("a list" if origin is tuple else "a table of key = value")


def read_value(value: object, wanted: Any, name: str, *, texts: bool = False) -> Any:
    """Read a value as its declared type; with `texts` a text may stand for a number.

    A `SettingError` whose sentence says what is allowed.
    """
    try:
        return msgspec.convert(value, wanted, strict=not texts)
    except msgspec.ValidationError as error:
        raise SettingError(f"{name} is {value!r}; allowed: {allowed(wanted, value, texts=texts)}.") from error


def read_assignment(text: str, known: Mapping[str, Any]) -> tuple[str, HyperValue]:
    """Read `key=value` of `--set` by the type of its key; a `SettingError` where there is no such key or value."""
    key, equals, value = text.partition("=")
    if not known:
        raise SettingError(f"--set {text}: this method has no hyper-parameters; leave --set out.")
    if not equals:
        raise SettingError(f"--set {text}: write KEY=VALUE with one of these keys: {', '.join(sorted(known))}.")
    if key not in known:
        alike = difflib.get_close_matches(key, sorted(known), n=3)
        meant = f" Did you mean {' or '.join(alike)}?" if alike else ""
        raise SettingError(f"--set {text}: there is no key {key!r}; the keys are {', '.join(sorted(known))}.{meant}")
    wanted = known[key]
    try:
        if wanted is bool:
            return key, {"on": True, "true": True, "off": False, "false": False}[value.lower()]
        if wanted in (int, float):
            return key, wanted(value)
        if get_origin(wanted) is tuple:
            return key, () if value == "auto" else tuple(int(part) for part in value.split(","))
    except (KeyError, ValueError):
        raise SettingError(f"--set {text}: {key} takes {allowed(wanted, value)}.") from None
    choices = get_args(wanted)
    if choices and value not in choices:
        raise SettingError(f"--set {text}: {key} is one of {', '.join(map(str, choices))}.")
    return key, value


def read_table(found: object, kind: type[Any], name: str) -> Any:
    """Read a `msgspec.Struct` that forbids unknown fields, from a table of TOML.

    Raises:
        SettingError: a key is unknown or missing or a value does not fit; the sentence names the place.
    """
    try:
        return msgspec.convert(found, kind)
    except msgspec.ValidationError as error:
        raise SettingError(_sentence(str(error), found, kind, name)) from error


def _sentence(problem: str, found: Any, wanted: Any, place: str) -> str:
    path = _PATH.search(problem)
    for field, index, some in _STEP.findall(path[1] if path else ""):
        wanted = _first(wanted)
        if some:  # msgspec does not say which key of a mapping
            wanted = get_args(wanted)[1]
            field = next(key for key, value in found.items() if not fits(value, wanted))
        elif field:
            wanted = hints(wanted)[field]
        else:
            wanted = get_args(wanted)[0]
        found = found[int(index) if index else field]
        place = f"{place}, entry {int(index) + 1}" if index else f"{field} of {place}"
    wanted = _first(wanted)
    if unknown := _UNKNOWN.match(problem):
        return f"{place} has the unknown key {unknown[1]!r}; did you mean {nearest(unknown[1], hints(wanted))}?"
    if missing := _MISSING.match(problem):
        return f"{place} has no {missing[1]!r}: add it."
    return f"{place} is {found!r}; allowed: {allowed(wanted, found)}."


def _first(wanted: Any) -> Any:
    """The type of a value that may also be left out."""
    return get_args(wanted)[0] if get_origin(wanted) in (Union, types.UnionType) else wanted
