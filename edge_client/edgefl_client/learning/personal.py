"""The values a device learned for itself, kept only after they passed their gate.

Guarantees: a `PersonalState` that `load_personal` gives belongs to exactly this bundle (by the SHA-256 of its file),
has the bundle's tensors in their shapes, and was at least as good as the bundle on the pictures held back. Source:
docs/design.md, section 7, graphs.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from edgefl_client.home import Home
from edgefl_client.learning.gate import Verdict
from edgefl_protocol.bundle import Bundle
from edgefl_protocol.durable import read_bounded, write_atomic
from edgefl_protocol.errors import PayloadError, StorageError
from edgefl_protocol.payload import Payload

MAX_BYTES = 2**30
_FILE = "personal.payload"


@dataclass(frozen=True, kw_only=True)
class PersonalState:
    """Personal values for one bundle.

    Attributes:
        weights: tensors by name, the scoring graph's inputs besides `image`.
        seen: per class, whether this device's own training rows held it.
        verdict: what the gate found.
        images: pictures learned from.
        round: of learning that gave them.
    """

    weights: Mapping[str, NDArray[Any]]
    seen: tuple[bool, ...]
    verdict: Verdict
    images: int
    round: int


def save_personal(home: Home, bundle: Bundle, state: PersonalState) -> None:
    """Keep values that passed their gate.

    Raises:
        StorageError: the disk is full; the values before are still there.
        ValueError: they did not pass.
    """
    if not state.verdict.passed:
        raise ValueError("values that failed their gate are not kept")
    scalars: dict[str, int | float | str] = {
        "bundle_sha256": bundle.sha256,
        "seen": json.dumps(list(state.seen)),
        "images": state.images,
        "round": state.round,
        "held": state.verdict.held,
        "least_of_a_class": state.verdict.least_of_a_class,
        "bundle_balanced_accuracy": state.verdict.bundle,
        "personal_balanced_accuracy": state.verdict.personal,
    }
    write_atomic(home.prepare(home.learning) / _FILE, Payload(state.weights, scalars).to_bytes(), mode=0o600)


def load_personal(home: Home, bundle: Bundle) -> PersonalState | None:
    """The personal values for a bundle, None where none passed.

    Raises:
        StorageError: the file is damaged.
    """
    file = home.learning / _FILE
    if not file.exists():
        return None
    try:
        payload = Payload.from_bytes(read_bounded(file, MAX_BYTES), MAX_BYTES)
        if payload.scalars["bundle_sha256"] != bundle.sha256:
            return None
        state = _read(payload)
    except (PayloadError, KeyError, TypeError, ValueError) as error:
        raise _damaged(str(file)) from error
    shapes = {name: (value.dtype, value.shape) for name, value in bundle.weights.items()}
    found = {name: (value.dtype, value.shape) for name, value in state.weights.items()}
    if shapes != found or len(state.seen) != len(bundle.labels.classes) or not state.verdict.passed:
        raise _damaged(str(file))
    return state


def _read(payload: Payload) -> PersonalState:
    facts = payload.scalars
    verdict = Verdict(
        bundle=float(facts["bundle_balanced_accuracy"]),
        personal=float(facts["personal_balanced_accuracy"]),
        held=int(facts["held"]),
        least_of_a_class=int(facts["least_of_a_class"]),
    )
    return PersonalState(
        weights=payload.arrays,
        seen=tuple(bool(value) for value in json.loads(str(facts["seen"]))),
        verdict=verdict,
        images=int(facts["images"]),
        round=int(facts["round"]),
    )


def _damaged(file: str) -> StorageError:
    return StorageError(f"{file} is damaged: it holds no personal values of this bundle; remove it", "damaged")
