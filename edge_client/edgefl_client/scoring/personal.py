"""The values a device learned for itself, kept only after they passed their gate.

Guarantees: a `PersonalState` that `load_personal` gives belongs to exactly this bundle (by the SHA-256 of its file, so
by federation and version too), has the bundle's tensors in their shapes, is bit for bit what was kept, and was at least
as good as the bundle on the pictures held back. Source: docs/design.md 7, personal values.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from edgefl_client.home import Home
from edgefl_client.scoring.checked_file import read_checked, write_checked
from edgefl_client.scoring.gate_verdict import GateVerdict
from edgefl_protocol.bundle import Bundle
from edgefl_protocol.errors import PayloadError, StorageError
from edgefl_protocol.payload import Payload

PERSONAL = "personal.payload"


@dataclass(frozen=True, kw_only=True)
class PersonalState:
    """Personal values for one bundle."""

    bundle_sha256: str  # of the bundle's file
    weights: Mapping[str, NDArray[Any]]  # tensors by name, the scoring graph's inputs besides `image`
    seen: tuple[bool, ...]  # per class, whether this device's own training rows held it
    verdict: GateVerdict  # what the gate found
    images: int  # pictures learned from
    round: int  # of learning that gave them


def save_personal(home: Home, state: PersonalState) -> None:
    """Keep values that passed their gate.

    Raises:
        ValueError: they did not pass.
    """
    if not state.verdict.passed:
        raise ValueError("values that failed their gate are not kept")
    scalars: dict[str, int | float | str] = {
        "bundle_sha256": state.bundle_sha256,
        "seen": json.dumps(list(state.seen)),
        "images": state.images,
        "round": state.round,
        "held": state.verdict.held,
        "least_of_a_class": state.verdict.least_of_a_class,
        "bundle_balanced_accuracy": state.verdict.bundle,
        "personal_balanced_accuracy": state.verdict.personal,
        "bundle_unnoticed": state.verdict.bundle_unnoticed,
        "personal_unnoticed": state.verdict.personal_unnoticed,
    }
    write_checked(home.prepare(home.learning) / PERSONAL, Payload(state.weights, scalars))


def load_personal(home: Home, bundle: Bundle) -> PersonalState | None:
    """Load the personal values for a bundle, None where none passed."""
    state = kept_personal(home)
    if state is None or state.bundle_sha256 != bundle.sha256:
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
    if not state.verdict.passed:
        raise _damaged(home)
    return state


def _read(payload: Payload) -> PersonalState:
    facts = payload.scalars
    verdict = GateVerdict(
        bundle=float(facts["bundle_balanced_accuracy"]),
        personal=float(facts["personal_balanced_accuracy"]),
        held=int(facts["held"]),
        least_of_a_class=int(facts["least_of_a_class"]),
        bundle_unnoticed=int(facts["bundle_unnoticed"]),
        personal_unnoticed=int(facts["personal_unnoticed"]),
    )
    return PersonalState(
        bundle_sha256=str(facts["bundle_sha256"]),
        weights=payload.arrays,
        seen=tuple(bool(value) for value in json.loads(str(facts["seen"]))),
        verdict=verdict,
        images=int(facts["images"]),
        round=int(facts["round"]),
    )


def _damaged(home: Home) -> StorageError:
    return StorageError(
        f"{home.learning / PERSONAL} is damaged: it holds no personal values as they were kept; remove it with edgefl "
        "personal remove, or score with --weights bundle",
        "damaged",
    )
