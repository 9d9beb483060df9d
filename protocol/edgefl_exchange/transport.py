"""One request, one answer: the only way bytes leave a site.

The protocol has one method, so that a test's coordinator in memory, our HTTPS transport and a simulated bad network are
the same thing to everything above. An answer is just bytes with a status: whether it means anything is decided by
opening it (docs/security.md, order of checks).
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

MAX_ANSWER_BYTES = 32 * 2**20 + 2**16  # a full payload and its envelope


@dataclass(frozen=True, kw_only=True)
class Request:
    """What is sent."""

    method: str  # "POST" with a body, or "GET"
    path: str  # path below the coordinator's public base, starting with "/"
    body: bytes = b""  # an envelope; empty for GET
    query: str = ""  # query string without "?"; only `/v1/time` has one
    max_answer_bytes: int = MAX_ANSWER_BYTES  # longest answer that is read

    def __repr__(self) -> str:
        return f"Request({self.method} {self.path}, {len(self.body)} bytes)"


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What came back, unverified."""

    status: int  # HTTP status; anybody on the way can forge it
    body: bytes  # at most `max_answer_bytes` of the request
    retry_after_s: float | None = None  # the wait the answer asks for, in seconds, if it does

    def __repr__(self) -> str:
        return f"Answer({self.status}, {len(self.body)} bytes)"


class Transport(Protocol):
    """Sends one request and gives its answer, or raises within its deadline."""

    def send(self, request: Request) -> Answer:
        """Send a request.

        Raises:
            Unavailable: no answer came within the deadline, or it was cut, too long or redirected.
            TlsRefused: the server is not the one this site trusts; nothing of the request was sent.
        """
        ...


@runtime_checkable
class Closing(Protocol):
    """A transport that holds connections, to be closed when its member is done."""

    def close(self) -> None:
        """Close the connections that it holds."""
        ...


def retry_waits(attempts: int, first_s: float, cap_s: float, rng: random.Random) -> Iterator[float]:
    """Draw the waits between attempts, in seconds: doubling, with full jitter, so that sites do not come back together.

    `attempts` are all, so one wait fewer is given; the first is at most `first_s`, any at most `cap_s`.
    """
    for step in range(attempts - 1):
        yield rng.uniform(0.0, min(cap_s, first_s * 2**step))
