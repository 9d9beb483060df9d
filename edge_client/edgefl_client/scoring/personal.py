"""The values a device learned for itself, kept only after they passed their gate.

Guarantees: a `PersonalState` that `load_personal` gives belongs to exactly this bundle (by the SHA-256 of its file, so
by federation and version too), has the bundle's tensors in their shapes, is bit for bit what was kept, and passed its
gate (`learning_verdict`). Values that passed an older gate, of fewer conditions, have no verdict: they are told of and
not used until a round of learning is judged. Source: docs/design.md 7, personal values.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from numpy.typing import NDArray

from edgefl_client.home import Home
from edgefl_client.scoring.checked_file import read_checked, write_checked
from edgefl_client.scoring.learning_verdict import Answers, LearningVerdict
from edgefl_client.trust.vouched_bundle import file_state
from edgefl_protocol.bundle import Bundle
from edgefl_protocol.errors import PayloadError, StorageError
from edgefl_protocol.payload import Payload, digest
from edgefl_protocol.pictures.light import LightRange

PERSONAL = "personal.payload"


@dataclass(frozen=True, kw_only=True)
class PersonalState:
    """Personal values for one bundle."""

    bundle_sha256: str  # of the bundle's file
    weights: Mapping[str, NDArray[Any]]  # tensors by name, the scoring graph's inputs besides `image`
    seen: tuple[bool, ...]  # per class, whether this device's own training rows held it
    verdict: LearningVerdict | None  # what the gate found; None where that was an older gate
    images: int  # pictures learned from
    round: int  # of learning that gave them
    light: LightRange | None = None  # of the pictures learned from; None of values from before it was kept

    @property
    def passed(self) -> bool:
        """Whether they may be used and shared."""
        return self.verdict is not None and self.verdict.passed


def save_personal(home: Home, state: PersonalState) -> None:
    """Keep values that passed their gate.

    Raises:
        ValueError: they did not pass.
    """
    verdict = state.verdict
    if verdict is None or not verdict.passed:
        raise ValueError("values that failed their gate are not kept")
    scalars: dict[str, int | float | str] = {
        "bundle_sha256": state.bundle_sha256,
        "seen": json.dumps(list(state.seen)),
        "images": state.images,
        "round": state.round,
        **({} if state.light is None else {"light": json.dumps(state.light.to_json())}),
        "held": verdict.held,
        "least_of_a_class": verdict.least_of_a_class,
        "class_rule": int(verdict.class_rule),
        "suspicious_judged": int(verdict.suspicious_judged),
        **({} if verdict.classes is None else {"classes": verdict.classes}),
        **_facts_of("bundle", verdict.bundle),
        **_facts_of("personal", verdict.personal),
        **({} if verdict.before is None else _facts_of("before", verdict.before)),
    }
    write_checked(home.prepare(home.learning) / PERSONAL, Payload(state.weights, scalars))


def load_personal(home: Home, bundle: Bundle, *, required: bool = False) -> PersonalState | None:
    """Load the personal values for a bundle, None where none passed the gate of today.

    Raises:
        StorageError: they are damaged, or there are none that are `required` (`no_personal`).
    """
    state = kept_personal(home)
    if state is None or state.bundle_sha256 != bundle.sha256 or not state.passed:
        if required:
            raise StorageError(
                "this device keeps no personal values for this bundle that passed their gate, as --weights personal "
                "needs; learn some with edgefl train, or leave that option out to score with the bundle's values",
                "no_personal",
            )
        return None
    shapes = {name: (value.dtype, value.shape) for name, value in bundle.weights.items()}
    found = {name: (value.dtype, value.shape) for name, value in state.weights.items()}
    if shapes != found or len(state.seen) != len(bundle.labels.classes):
        raise _damaged(home)
    return state


def kept_personal(home: Home) -> PersonalState | None:
    """Load the personal values of this home, whatever bundle they belong to: to tell of them, not to score with."""
    file = home.learning / PERSONAL
    if not file.exists():
        return None
    try:
        state = _read(read_checked(file))
    except (PayloadError, KeyError, TypeError, ValueError) as error:
        raise _damaged(home) from error
    if state.verdict is not None and not state.passed:
        raise _damaged(home)
    return state


@dataclass
class ValuesInUse:
    """The values that a process goes on to score with: another process may replace or remove what was learned."""

    home: Home
    bundle: Bundle
    sha256: str  # of these values, `digest`
    required: bool  # whether personal ones alone may score
    _seen: tuple[int, ...] | None = field(default=None, init=False)  # the file of personal values at the last look

    def check(self) -> None:
        """Refuse to go on where other values score now; it costs a look at one file that did not change.

        Raises:
            StorageError: so it is (`other_values`; `no_personal` where another start would find none, either), or the
                personal values cannot be read.
        """
        now = file_state(self.home.learning / PERSONAL)  # before it is read: what changes meanwhile is seen next time
        if now == self._seen:
            return
        kept = load_personal(self.home, self.bundle, required=self.required)
        if digest((self.bundle if kept is None else kept).weights) != self.sha256:
            raise StorageError(
                "the values that this command scores with are no longer in use, because others were learned or these "
                "were removed: start it again",
                "other_values",
            )
        self._seen = now


def _read(payload: Payload) -> PersonalState:
    facts = payload.scalars
    return PersonalState(
        bundle_sha256=str(facts["bundle_sha256"]),
        weights=payload.arrays,
        seen=tuple(bool(value) for value in json.loads(str(facts["seen"]))),
        verdict=_verdict(facts) if {"personal_missed", "suspicious_judged"} <= facts.keys() else None,
        images=int(facts["images"]),
        round=int(facts["round"]),
        light=LightRange.from_json(json.loads(str(facts["light"]))) if "light" in facts else None,
    )


def _facts_of(whose: str, found: Answers) -> dict[str, float | int]:
    """Write what a verdict tells of one set of values; an accuracy that nothing was told for is left out."""
    facts: dict[str, float | int] = {
        f"{whose}_balanced_accuracy": found.balanced_accuracy,
        f"{whose}_referred": found.referred,
        f"{whose}_unnoticed": found.wrong_not_referred,
        f"{whose}_missed": found.missed,
    }
    told = found.balanced_accuracy_not_referred
    return facts if told is None else {**facts, f"{whose}_balanced_accuracy_not_referred": told}


def _verdict(facts: Mapping[str, float | int | str]) -> LearningVerdict:
    def answers(whose: str) -> Answers:
        told = facts.get(f"{whose}_balanced_accuracy_not_referred")
        return Answers(
            balanced_accuracy=float(facts[f"{whose}_balanced_accuracy"]),
            referred=int(facts[f"{whose}_referred"]),
            balanced_accuracy_not_referred=None if told is None else float(told),
            wrong_not_referred=int(facts[f"{whose}_unnoticed"]),
            missed=int(facts[f"{whose}_missed"]),
        )

    return LearningVerdict(
        bundle=answers("bundle"),
        personal=answers("personal"),
        held=int(facts["held"]),
        least_of_a_class=int(facts["least_of_a_class"]),
        class_rule=bool(facts["class_rule"]),
        suspicious_judged=bool(facts["suspicious_judged"]),
        classes=int(facts["classes"]) if "classes" in facts else None,
        before=answers("before") if "before_balanced_accuracy" in facts else None,
    )


def _damaged(home: Home) -> StorageError:
    return StorageError(
        f"{home.learning / PERSONAL} is damaged: it holds no personal values as they were kept; remove it with edgefl "
        "personal remove, or score with --weights bundle",
        "damaged",
    )
