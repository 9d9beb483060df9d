"""What a run and its workers tell one another: payloads, as sites and servers do.

    asked   words, state, broadcast    which half, of which site
    told    words                      of a step, of a judgement, or why it failed
            words, state, reply        of a site that learned

Guarantees: what is read is bounded and was judged by `Payload`; of an error its kind, sentence, code and traceback are
kept, and nothing of it is executed.
"""

import json
import traceback
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from edgefl_protocol import Payload
from edgefl_protocol.errors import EdgeflError
from edgefl_trainer.contract import State
from edgefl_trainer.engine.checkpoint import MAX_STATE_BYTES
from edgefl_trainer.errors import TrainingError


def words_payload(words: Mapping[str, Any]) -> Payload:
    """Put words into a payload, as JSON: figures of an epoch are lists, and may be no finite numbers."""
    return Payload({"json": np.frombuffer(json.dumps(words).encode(), np.uint8)}, {})


def words_of(payload: Payload) -> dict[str, Any]:
    """Read the words of `words_payload`."""
    return dict(json.loads(payload.arrays["json"].tobytes()))


def state_of(payload: Payload) -> State:
    """Read the state that `State.payload` gave."""
    return State(payload.arrays, payload.scalars)


def send(link: Connection, words: Mapping[str, Any], *payloads: Payload) -> None:
    """Send words and what belongs to them; nothing of it where a part may not travel."""
    for data in [payload.to_bytes() for payload in (words_payload(words), *payloads)]:
        link.send_bytes(data)


def received(link: Connection) -> Payload:
    """Wait for the next payload; an `EOFError` or `OSError` where the other side has ended."""
    return Payload.from_bytes(link.recv_bytes(MAX_STATE_BYTES), MAX_STATE_BYTES)


def error_words(error: Exception) -> dict[str, str]:
    """Say what went wrong, and where, for whoever reads a traceback."""
    code = error.code if isinstance(error, EdgeflError) else ""
    place = "".join(traceback.format_exception(error))
    return {"error": type(error).__name__, "sentence": str(error), "code": code, "traceback": place}


def error_of(words: Mapping[str, str]) -> Exception:
    """Make the error of `error_words`: one of ours where it was one of ours, else a defect."""
    ours = TrainingError if words["error"] == TrainingError.__name__ else EdgeflError
    defect = RuntimeError(f"{words['error']}: {words['sentence']}")
    found = ours(words["sentence"], words["code"]) if words["code"] else defect
    found.add_note(f"In a worker:\n{words['traceback']}")
    return found
