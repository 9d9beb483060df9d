"""What the learning gate found, in words: a table for who just learned, a line for who asks for the status.

Both take the `gate` object of a report (`LearningVerdict.to_json`).
"""

from collections.abc import Mapping
from typing import Any

from edgefl_client.scoring.learning_verdict import LEAST_HELD, LEAST_NOT_REFERRED, LESS_ACCURATE
from edgefl_protocol.sentences import counted

_HEADS = {"personal": "learned here", "before": "in use before", "bundle": "bundle"}
_THEIRS = {"bundle": "the bundle's", "before": "those in use"}
_WIDTH = 40  # of a row's name
_COLUMN = 18


def verdict_table(gate: Mapping[str, Any]) -> str:
    """Write a line for each figure, the new values beside the others'; then why these failed, and what to know."""
    sides = _sides(gate)
    all_of = {side: _figures(gate, side) for side in sides}
    rows = [
        (f"{_pictures(gate['held_back'])} held back", *(_HEADS[side] for side in sides)),
        (f"balanced accuracy{_chance(gate)}", *(f"{all_of[side]['balanced_accuracy']:.3f}" for side in sides)),
        ("referred", *(_of_held(gate, all_of[side]["referred"]) for side in sides)),
        ("not referred", *(str(_not_referred(gate, side)) for side in sides)),
        ("  balanced accuracy of those", *(_accuracy(gate, side) for side in sides)),
        ("  wrong among those", *(str(all_of[side]["wrong_not_referred"]) for side in sides)),
        ("  missed: wrong, of a suspicious class", *(str(all_of[side]["missed"]) for side in sides)),
    ]
    lines = [
        "".join([f"{name:<{_WIDTH}}", *(f"{told:<{_COLUMN}}" for told in cells)]).rstrip() for name, *cells in rows
    ]
    return "\n".join([*lines, *_why_not(gate), *_remarks(gate)])


def verdict_line(gate: Mapping[str, Any]) -> str:
    """Write the same figures in one line, those of the bundle in brackets."""
    return (
        f"on {_pictures(gate['held_back'])} held back (in brackets the bundle's): balanced accuracy"
        f"{_chance(gate)} {_pair(gate, '{}_balanced_accuracy', '.3f')}, referred {_pair(gate, '{}_referred')}, "
        f"balanced accuracy of those not referred {_accuracy_on(gate, 'personal')} ({_accuracy_on(gate, 'bundle')}), "
        f"wrong among those {_pair(gate, '{}_wrong_not_referred')}, of these of a suspicious class "
        f"{_pair(gate, '{}_missed')}"
    )


def _sides(gate: Mapping[str, Any]) -> tuple[str, ...]:
    """Name the sets of values that answered: those that were in use stand between the new ones and the bundle's."""
    return ("personal", "bundle") if gate["before"] is None else ("personal", "before", "bundle")


def _figures(gate: Mapping[str, Any], side: str) -> Mapping[str, Any]:
    """Give the figures of one set of values, by name."""
    if side == "before":
        found: Mapping[str, Any] = gate["before"]
        return found
    names = ("balanced_accuracy", "referred", "balanced_accuracy_not_referred", "wrong_not_referred", "missed")
    return {name: gate[f"{side}_{name}"] for name in names}


def _chance(gate: Mapping[str, Any]) -> str:
    return "" if gate["chance"] is None else f" (chance: {gate['chance']:.3f})"


def _why_not(gate: Mapping[str, Any]) -> list[str]:
    """Say why values that did not pass are not used, a sentence each."""
    words = {
        "few_pictures": (
            f"Of a class only {counted(gate['least_of_a_class'], 'picture is', 'pictures are')} held back; "
            f"{LEAST_HELD} are needed."
        ),
        "no_suspicious": (
            "No picture held back is of a class that is not known to be benign, so nobody can tell whether the new "
            "values miss more of those: add pictures of such a class to the table."
        ),
        **_worse(gate, "bundle", gate["most_referred"], enough=gate["enough_not_referred"]),
    }
    said = [words[reason] for reason in gate["refused_for"] if reason != "before"]
    if (before := gate["before"]) is None:
        return said
    beside = _worse(gate, "before", before["most_referred"], enough=before["enough_not_referred"])
    return said + [beside[reason] for reason in before["worse_in"]]


def _worse(gate: Mapping[str, Any], side: str, most_referred: int, *, enough: bool) -> dict[str, str]:
    """Say of each condition that compares how the new values are worse than those of a side."""
    ours, others, theirs = _figures(gate, "personal"), _figures(gate, side), _THEIRS[side]
    more, allowed = (count - others["referred"] for count in (ours["referred"], most_referred))
    return {
        "balanced_accuracy": f"The new values have a lower balanced accuracy than {theirs}.",
        "referrals": f"The new values refer {_pictures(more)} more than {theirs}; allowed: {allowed}.",
        "not_referred": _less_right(ours, others, theirs, enough=enough),
        "missed": (
            f"The new values miss {_pictures(ours['missed'])} of suspicious classes, {theirs} "
            f"{others['missed'] or 'none'}; no more are allowed."
        ),
    }


def _less_right(ours: Mapping[str, Any], others: Mapping[str, Any], theirs: str, *, enough: bool) -> str:
    if enough:
        new, old = (side["balanced_accuracy_not_referred"] or 0.0 for side in (ours, others))
        return (
            f"Of the pictures not referred, the balanced accuracy of the new values is {old - new:.3f} lower than "
            f"with {theirs}; allowed: {LESS_ACCURATE:.3f}."
        )
    said = f"The new values are wrong about {_pictures(ours['wrong_not_referred'])} that they do not refer"
    return f"{said}, {theirs} about {others['wrong_not_referred'] or 'none'}."


def _pictures(count: int) -> str:
    return counted(count, "picture")


def _remarks(gate: Mapping[str, Any]) -> list[str]:
    """What the figures need for their reading."""
    said, before = [], gate["before"]
    if gate["chance"] is not None and gate["personal_balanced_accuracy"] <= gate["chance"]:
        said.append(f"A guess has a balanced accuracy of {gate['chance']:.3f}; the new values are no better.")
    if not any(_not_referred(gate, side) for side in _sides(gate)):
        said.append(_all_referred(gate))
    elif not gate["enough_not_referred"] or (before is not None and not before["enough_not_referred"]):
        compared = "the bundle's" if before is None else "the bundle's and no more than those in use"
        said.append(
            f"Where fewer than {LEAST_NOT_REFERRED} pictures are not referred, nobody can tell how right those answers "
            f"are: new values must then refer no more pictures than {compared}, and be wrong without a referral no "
            "more often."
        )
    if not gate["class_rule"]:
        said.append(
            "No class of this bundle is known to be benign, so edgefl score refers every picture; these figures leave "
            "that rule out, and count every wrong answer as missed."
        )
    return said


def _all_referred(gate: Mapping[str, Any]) -> str:
    """Say what the gate could not judge where nobody leaves a picture without a referral, and what it did."""
    alone = gate["before"] is None
    nothing = (
        f"{'Both' if alone else 'All'} refer every picture held back, so there is no answer without a referral to "
        "judge. The conditions about referrals, answers without one and missed pictures compared nothing."
    )
    if not gate["passed"]:
        return nothing
    others = "the bundle's" if alone else "the bundle's, nor below that of the values in use before"
    return f"{nothing} The new values are used because their balanced accuracy of all pictures is not below {others}."


def _accuracy(gate: Mapping[str, Any], side: str) -> str:
    count, accuracy = _not_referred(gate, side), _figures(gate, side)["balanced_accuracy_not_referred"]
    if accuracy is None or count < LEAST_NOT_REFERRED:
        return f"too few: {count}"
    return f"{accuracy:.3f}"


def _accuracy_on(gate: Mapping[str, Any], side: str) -> str:
    said, count = _accuracy(gate, side), _not_referred(gate, side)
    return f"{said} on {count}" if count >= LEAST_NOT_REFERRED else said


def _not_referred(gate: Mapping[str, Any], side: str) -> int:
    return int(gate["held_back"]) - int(_figures(gate, side)["referred"])


def _of_held(gate: Mapping[str, Any], count: int) -> str:
    return f"{count} ({100 * count / gate['held_back']:.0f} %)"


def _pair(gate: Mapping[str, Any], key: str, form: str = "") -> str:
    return f"{gate[key.format('personal')]:{form}} ({gate[key.format('bundle')]:{form}})"
