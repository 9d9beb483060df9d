"""What the learning gate found, in words: a table for who just learned, a line for who asks for the status.

Both take the `gate` object of a report (`LearningVerdict.to_json`).
"""

from collections.abc import Mapping
from typing import Any

from edgefl_client.scoring.learning_verdict import LEAST_HELD, LEAST_NOT_REFERRED, LESS_ACCURATE
from edgefl_protocol.sentences import counted

_SIDES = ("personal", "bundle")
_WIDTH = 40  # of a row's name
_COLUMN = 18


def verdict_table(gate: Mapping[str, Any]) -> str:
    """Write a line for each figure, personal values beside the bundle's; then why these failed, and what to know."""
    rows = [
        (f"{_pictures(gate['held_back'])} held back", "learned here", "bundle"),
        ("balanced accuracy", *(f"{gate[f'{side}_balanced_accuracy']:.3f}" for side in _SIDES)),
        ("referred", *(_of_held(gate, gate[f"{side}_referred"]) for side in _SIDES)),
        ("not referred", *(str(_not_referred(gate, side)) for side in _SIDES)),
        ("  balanced accuracy of those", *(_accuracy(gate, side) for side in _SIDES)),
        ("  wrong among those", *(str(gate[f"{side}_wrong_not_referred"]) for side in _SIDES)),
        ("  missed: wrong, of a suspicious class", *(str(gate[f"{side}_missed"]) for side in _SIDES)),
    ]
    lines = [f"{name:<{_WIDTH}}{personal:<{_COLUMN}}{bundle}" for name, personal, bundle in rows]
    return "\n".join([*lines, *_why_not(gate), *_remarks(gate)])


def verdict_line(gate: Mapping[str, Any]) -> str:
    """Write the same figures in one line, those of the bundle in brackets."""
    return (
        f"on {_pictures(gate['held_back'])} held back (in brackets the bundle's): balanced accuracy "
        f"{_pair(gate, '{}_balanced_accuracy', '.3f')}, referred {_pair(gate, '{}_referred')}, balanced accuracy of "
        f"those not referred {_accuracy_on(gate, 'personal')} ({_accuracy_on(gate, 'bundle')}), wrong among those "
        f"{_pair(gate, '{}_wrong_not_referred')}, of these of a suspicious class {_pair(gate, '{}_missed')}"
    )


def _why_not(gate: Mapping[str, Any]) -> list[str]:
    """Say why values that did not pass are not used, a sentence each."""
    more, allowed = (gate[key] - gate["bundle_referred"] for key in ("personal_referred", "most_referred"))
    words = {
        "few_pictures": (
            f"Of a class only {counted(gate['least_of_a_class'], 'picture is', 'pictures are')} held back; "
            f"{LEAST_HELD} are needed."
        ),
        "balanced_accuracy": "The new values have a lower balanced accuracy than the bundle's.",
        "referrals": f"The new values refer {_pictures(more)} more than the bundle's; allowed: {allowed}.",
        "not_referred": _less_right(gate),
        "no_suspicious": (
            "No picture held back is of a class that is not known to be benign, so nobody can tell whether the new "
            "values miss more of those: add pictures of such a class to the table."
        ),
        "missed": (
            f"The new values miss {_pictures(gate['personal_missed'])} of suspicious classes, the bundle's "
            f"{gate['bundle_missed'] or 'none'}; no more are allowed."
        ),
    }
    return [words[reason] for reason in gate["refused_for"]]


def _less_right(gate: Mapping[str, Any]) -> str:
    ours, theirs = (gate[f"{side}_balanced_accuracy_not_referred"] or 0.0 for side in _SIDES)
    if gate["enough_not_referred"]:
        return (
            f"Of the pictures not referred, the balanced accuracy of the new values is {theirs - ours:.3f} lower than "
            f"the bundle's; allowed: {LESS_ACCURATE:.3f}."
        )
    wrong, bundle = (gate[f"{side}_wrong_not_referred"] for side in _SIDES)
    said = f"The new values are wrong about {_pictures(wrong)} that they do not refer"
    return f"{said}, the bundle's about {bundle or 'none'}."


def _pictures(count: int) -> str:
    return counted(count, "picture")


def _remarks(gate: Mapping[str, Any]) -> list[str]:
    """What the figures need for their reading."""
    said = []
    if not any(_not_referred(gate, side) for side in _SIDES):
        said.append(_all_referred(gate))
    elif not gate["enough_not_referred"]:
        said.append(
            f"Where fewer than {LEAST_NOT_REFERRED} pictures are not referred, nobody can tell how right those answers "
            "are: new values must then refer no more pictures than the bundle's, and be wrong without a referral no "
            "more often."
        )
    if not gate["class_rule"]:
        said.append(
            "No class of this bundle is known to be benign, so edgefl score refers every picture; these figures leave "
            "that rule out, and count every wrong answer as missed."
        )
    return said


def _all_referred(gate: Mapping[str, Any]) -> str:
    """Say what the gate could not judge where neither side leaves a picture without a referral, and what it did."""
    nothing = "Both refer every picture held back, so there is no answer without a referral to judge."
    if not gate["passed"]:
        return nothing
    return (
        f"{nothing} The new values are used because their balanced accuracy of all pictures is not below the bundle's."
    )


def _accuracy(gate: Mapping[str, Any], side: str) -> str:
    count, accuracy = _not_referred(gate, side), gate[f"{side}_balanced_accuracy_not_referred"]
    if accuracy is None or count < LEAST_NOT_REFERRED:
        return f"too few: {count}"
    return f"{accuracy:.3f}"


def _accuracy_on(gate: Mapping[str, Any], side: str) -> str:
    said, count = _accuracy(gate, side), _not_referred(gate, side)
    return f"{said} on {count}" if count >= LEAST_NOT_REFERRED else said


def _not_referred(gate: Mapping[str, Any], side: str) -> int:
    return int(gate["held_back"]) - int(gate[f"{side}_referred"])


def _of_held(gate: Mapping[str, Any], count: int) -> str:
    return f"{count} ({100 * count / gate['held_back']:.0f} %)"


def _pair(gate: Mapping[str, Any], key: str, form: str = "") -> str:
    return f"{gate[key.format('personal')]:{form}} ({gate[key.format('bundle')]:{form}})"
