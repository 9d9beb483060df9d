"""What a person reads of a method and its settings, taken from where they are declared.

    what, for whom      the docstring of the method: its first line, and the line that begins with "For"
    key, default        the field, and what a preset makes of it
    meaning             the comment beside the field, or right above it, without its mark
    allowed             the field's type, or the sentence that refuses a number out of range
    source              the mark that ends the comment, or else the paper

A comment says first what the setting is. It ends with a mark in parentheses where the paper does not have the setting:

    (ours)                      no paper has it
    (docs/decisions/0023)       ours, too; the page says why
    (arXiv 2003.04297)          another paper has it
    (public code)               only code published with the paper has it, or its default
    (default ours)              the paper has the setting, but not this default

The last may follow another, as in `(arXiv 2105.00243; default ours)`. Without a mark the paper is the
attribute `paper` of the class that declares the setting, a method or a recipe, and that of the method for values that
it gives a recipe. So nothing is written twice, and what is listed is what a run checks.
"""

import inspect
import re
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, get_args, get_origin

from edgefl_trainer.contract import declared
from edgefl_trainer.engine.hyper_parameters import build, hyper_values
from edgefl_trainer.engine.presets import PresetName, preset_of
from edgefl_trainer.errors import SettingError
from edgefl_trainer.methods import METHODS
from edgefl_trainer.typed_values import allowed, hints

_COMMENT = re.compile(r"\s*#\s*(?P<text>.*)")
_MARK = re.compile(
    r"\s*\((?P<origin>ours|docs/decisions/\d{4}|arXiv \d{4}\.\d{5}|public code|(?=default ours))(?:; )?"
    r"(?P<default>default ours)?\)$"
)
_REFUSED = re.compile(r"; allowed: (?P<allowed>.*)\.$", re.DOTALL)
_FAR: Mapping[Any, tuple[Any, ...]] = {int: (-(10**12), 10**12), float: (float("nan"), -1e30, 1e30)}


@dataclass(frozen=True, kw_only=True)
class Described:
    """A setting of a method."""

    key: str
    default: Any
    presets: Mapping[str, Any]  # by name, where a preset has another value
    allowed: str
    meaning: str
    source: str


def value_text(value: Any) -> str:
    """Return the value of a setting as a person reads it."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, tuple | list):
        return ",".join(map(str, value)) or "auto"
    return f"{value:g}" if isinstance(value, float) else str(value)


def purpose(kind: type[Any]) -> str:
    """Return what a method does and for whom, as its docstring says."""
    lines = inspect.cleandoc(kind.__doc__ or "").splitlines()
    whom = next((line for line in lines[1:] if line.startswith("For ")), "")
    return f"{lines[0] if lines else ''} {whom}".strip()


def settings_of(name: str, *, asked: bool = False) -> list[Described]:
    """Describe every setting that `--set` can name, in the order of the fields.

    `asked`: those it has where pictures are asked questions; none where it answers no questions.
    """
    kind = METHODS[name]
    made = kind()
    if asked:
        answers = declared(kind).asked
        if answers is None:
            return []
        made = answers.make()
    values = hyper_values(made)
    owned = list(_declared(made))
    comments = {owner: _comments(owner) for owner in dict.fromkeys(owner for owner, *_ in owned)}
    chosen = {preset: _preset(kind, preset, values, asked=asked) for preset in get_args(PresetName)}
    return [
        Described(
            key=key,
            default=values[key],
            presets={
                preset: given[key] for preset, given in chosen.items() if given.get(key, values[key]) != values[key]
            },
            allowed=_allowed(made, key, hints(owner)[key]),
            meaning=_MARK.sub("", comments[owner].get(key, "")),
            source=_source(kind, owner, comments[owner].get(key, ""), given=values[key] != usual),
        )
        for owner, key, usual in owned
    ]


def _preset(kind: type[Any], preset: PresetName, values: Mapping[str, Any], *, asked: bool) -> Mapping[str, Any]:
    given: Mapping[str, Any] = preset_of(kind, preset, "", {}, asked=asked).get("hyper", {})
    return {key: value for key, value in given.items() if key in values}


def _declared(made: Any) -> Iterator[tuple[type[Any], str, Any]]:
    """The class that declares each setting, its key, and its default there; nested recipes in place."""
    for entry in fields(made):
        value = getattr(made, entry.name)
        if is_dataclass(value):
            yield from _declared(value)
        else:
            yield type(made), entry.name, entry.default


def _comments(kind: type[Any]) -> dict[str, str]:
    """Field to the comment that stands beside it, or else on the lines above it."""
    found: dict[str, str] = {}
    above = ""
    for line in textwrap.dedent(inspect.getsource(kind)).splitlines():
        code, mark, comment = line.partition("#")
        field = re.match(r"    (\w+): ", code)
        if field:
            found[field[1]] = comment.strip() if mark else above
        own = _COMMENT.fullmatch(line)
        above = f"{above} {own['text']}".strip() if own else ""
    return found


def _allowed(made: Any, key: str, wanted: Any) -> str:
    """What may be written: choices of the type, or what a refusal of an absurd number says."""
    if get_args(wanted) and get_origin(wanted) is not tuple:
        return ", ".join(map(str, get_args(wanted)))
    for value in _FAR.get(wanted, ()):
        try:
            build(lambda: made, {key: value})
        except SettingError as error:
            if refused := _REFUSED.search(str(error)):
                return refused["allowed"]
    return allowed(wanted, None)


def _source(kind: type[Any], owner: Any, comment: str, *, given: bool) -> str:
    """Who has the setting, and whether its default is ours; `given`: the method gives its recipe another value."""
    mark = _MARK.search(comment)
    origin, default = (mark["origin"], mark["default"]) if mark else ("", None)
    if origin.startswith(("ours", "docs")):
        return origin
    if given:
        return str(kind.paper)
    source = {"": str(owner.paper), "public code": f"public code of {owner.paper}"}.get(origin, origin)
    return f"{source}, {default}" if default else source
