"""A node answers a request: what its work gives, or its trouble in one sentence.

Guarantees: no exception leaves a handler, so that its text reaches the server only as `Trouble` has it. Behind a
SuperNode an error is told whole where its class never names a file or a row; of others class and code leave, and the
rest is printed where the data is. Source: docs/guides/flower.md, when a site fails.
"""

import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from flwr.app import Message

from edgefl_protocol import Payload
from edgefl_protocol.errors import EdgeflError, PayloadError
from edgefl_protocol.fields import CODE, sentence, text
from edgefl_trainer.errors import (
    BackboneError,
    BudgetError,
    FederationRefused,
    MethodError,
    RunError,
    SettingError,
    TrainingError,
)
from edgefl_trainer.flower.records import packed

TROUBLE = "trouble"
MOST_CHARACTERS = 2000
TOLD_WHOLE = (
    TrainingError, MethodError, SettingError, BackboneError, FederationRefused, RunError, PayloadError, BudgetError,
)  # fmt: skip


@dataclass(frozen=True)
class Trouble:
    """Why a site did not do what it was asked."""

    sentence: str
    code: str  # as of an `EdgeflError`

    def to_payload(self) -> Payload:
        """Return the payload that carries it."""
        words = " ".join(self.sentence.split())
        told = "".join(one for one in words if one.isprintable())[:MOST_CHARACTERS]
        return Payload({}, {"sentence": told, "code": self.code})

    @classmethod
    def from_payload(cls, payload: Payload) -> Self:
        """Read it; a `PayloadError` where something else was sent."""
        if set(payload.scalars) != {"sentence", "code"} or payload.arrays:
            raise PayloadError("a site told its trouble in another form", "bad_message")
        told = sentence(payload.scalars["sentence"], "sentence", MOST_CHARACTERS)
        return cls(told, text(payload.scalars["code"], "code", CODE))


def replied(message: Message, work: Callable[[], Mapping[str, Payload]], *, own_machine: bool) -> Message:
    """Do the work and make the reply, or tell the trouble; `own_machine`: server and site are one person's."""
    try:
        content = packed(work())
    except Exception as error:  # noqa: BLE001 - whatever it is, the server has to hear of it
        if not own_machine:
            traceback.print_exc(file=sys.stderr)  # at the site, whose data the text may name
        content = packed({TROUBLE: trouble_of(error, own_machine=own_machine).to_payload()})
    return Message(content, reply_to=message)


def trouble_of(error: Exception, *, own_machine: bool) -> Trouble:
    """Say what happened, without a word of the data where it leaves the site's machine."""
    kind = type(error).__name__
    if isinstance(error, EdgeflError):
        told = str(error) if own_machine or isinstance(error, TOLD_WHOLE) else _see_there(f"{kind}, {error.code}")
        return Trouble(told, error.code)
    if isinstance(error, MemoryError) or kind == "OutOfMemoryError":
        return Trouble("the memory of its machine or its GPU does not suffice: take smaller batches", "memory")
    place = traceback.extract_tb(error.__traceback__)[-1]
    where = f"{kind} in {Path(place.filename).name}, line {place.lineno}"
    return Trouble(f"a fault in the program: {where}: {error}" if own_machine else _see_there(where), "fault")


def _see_there(what: str) -> str:
    return f"its work failed ({what}); the log of its SuperNode says why"
