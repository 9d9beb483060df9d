"""The form of a reply: what the replies of one round have in common, whatever the method.

    the whole       names, types and shapes of the arrays, names and kinds of the scalars
    by class        `prototypes.<k>`: a site has those of its own classes, all of one type and shape
    rows            of `features`, and of what is there by class: a site with few images has few

Guarantees: two replies of one method and task have equal forms in each part that both hold. Source: docs/security.md,
poisoning.
"""

import re

from edgefl_protocol.payload import Payload

ReplyForm = tuple[tuple[str, str], ...]

_ROWS_OF_A_SITE = frozenset({"features"})
_CLASS = re.compile(r"(.+)\.(?:0|[1-9][0-9]*)")


def form_parts(reply: Payload, whole: str = "") -> dict[str, ReplyForm]:
    """Return the form: a part called `whole` for what every reply holds, one for each name that is there by class."""
    parts: dict[str, set[tuple[str, str]]] = {whole: set()}
    for name, array in reply.arrays.items():
        by_class = _CLASS.fullmatch(name)
        extents: list[object] = list(array.shape)
        if (by_class or name in _ROWS_OF_A_SITE) and array.ndim > 1:
            extents[0] = "any"
        shown = f"array {by_class.group(1)}.<k>" if by_class else f"array {name}"
        described = f"{array.dtype} with shape ({', '.join(map(str, extents))})"
        parts.setdefault(shown if by_class else whole, set()).add((shown, described))
    for name, value in reply.scalars.items():
        by_class = _CLASS.fullmatch(name)
        shown = f"scalar {by_class.group(1)}.<k>" if by_class else f"scalar {name}"
        kind = "text" if isinstance(value, str) else "a number"
        parts.setdefault(shown if by_class else whole, set()).add((shown, kind))
    return {part: tuple(sorted(form)) for part, form in parts.items()}


def difference(form: ReplyForm, usual: ReplyForm, where: str, *, many: bool = False) -> str:
    """Say the first thing in which a form differs from the one that is found `where`, such as `most replies`."""
    name = min(name for name, _ in set(form) ^ set(usual))
    found, wanted = (" or ".join(what for key, what in one if key == name) for one in (form, usual))
    if not wanted:
        return f"the {name[:60]} is not in the form that {where} {'have' if many else 'has'}"
    if not found:
        return f"the {name[:60]} is missing, but {where} {'hold' if many else 'holds'} it"
    return f"the {name[:60]} is {found}, but in {where} it is {wanted}"
