"""uvicorn's HTTP protocol with a receive deadline.

Guarantees:
    A connection whose request is not complete in time is closed, however slowly its bytes keep coming: the header
    within `header_deadline_s` of the first byte (or of connecting), the body within `body_deadline_s` of the header and
    a second more for each `body_bytes_per_s` that arrive, but never more than `body_deadline_s` ahead. So a body that
    comes at that rate or faster is never cut, and one that drips or stops is, whatever came of it before. While we do
    not read, the clock stands still. uvicorn itself waits for ever.
    A header has at most `HEADER_BYTES`. A connection asks one thing at a time: what comes before the answer is not
    read, and the connection closes with that answer. So nobody has more than one request in memory.
Source: docs/security.md, decision 8 and check 40; RFC 9112 9.3.2 (a server may close where requests are pipelined).
"""

import asyncio
from collections.abc import Callable
from typing import Any, ClassVar, Literal

from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from edgefl_coordinator.web.door import bound_buffer, let_in

HEADER_BYTES = 64 * 2**10
_FAREWELL_S = 0.5


def deadline_protocol(
    header_deadline_s: float, body_deadline_s: float, body_bytes_per_s: float
) -> type[HttpToolsProtocol]:
    """Return a protocol class for `uvicorn.Config(http=…)`."""
    given = {"header_s": header_deadline_s, "body_s": body_deadline_s, "bytes_per_s": body_bytes_per_s}
    return type("DeadlineProtocol", (_DeadlineProtocol,), given)


class _OneWrite:
    """A transport for one answer, whose header and body leave together: each write is a TLS record and a packet."""

    def __init__(self, transport: asyncio.Transport, cycle: RequestResponseCycle) -> None:
        self._transport = transport
        self._cycle = cycle
        self._waiting = list[bytes]()

    def write(self, data: bytes) -> None:
        """Keep a part of the answer; send what comes before it (100 Continue)."""
        if self._cycle.response_started:
            self._waiting.append(data)
        else:
            self._transport.write(data)

    def flush(self) -> None:
        """Send what is kept."""
        data, self._waiting = b"".join(self._waiting), []
        if data:
            self._transport.write(data)

    def close(self) -> None:
        """Send it, and close."""
        self.flush()
        self._transport.close()

    def is_closing(self) -> bool:
        """Tell whether the connection is on its way out."""
        return self._transport.is_closing()


class _Flow(FlowControl):
    """A connection's flow, which tells when reading stops and when it goes on."""

    def __init__(self, transport: asyncio.Transport, changed: Callable[[], None]) -> None:
        super().__init__(transport)
        self._changed = changed

    def pause_reading(self) -> None:
        """Read no more for now."""
        super().pause_reading()
        self._changed()

    def resume_reading(self) -> None:
        """Read on."""
        super().resume_reading()
        self._changed()


class _DeadlineProtocol(HttpToolsProtocol):
    """httptools with a clock that runs while a request is incomplete."""

    header_s: ClassVar[float]
    body_s: ClassVar[float]
    bytes_per_s: ClassVar[float]  # of a body

    def __init__(self, *args: Any, **extra: Any) -> None:
        super().__init__(*args, **extra)
        self._clock: asyncio.TimerHandle | None = None
        self._waits_for: Literal["header", "body", ""] = ""  # the rest of which; "": the request is whole, or none came
        self._deaf = False  # whether nothing is read any more
        self._header_bytes = 0  # that came of the header under way, and of what came with them
        self._parsed_bytes = 0  # of the header under way, in parts that are whole
        self._until = 0.0  # when its time is over, by the loop's
        self._left_s = 0.0  # of its time, while the clock stands still

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow = _Flow(transport, self._reading_changed)
        bound_buffer(transport)
        self._wait_for("header")

    def data_received(self, data: bytes) -> None:
        let_in(self.transport)
        if self._deaf:
            return
        before = self._waits_for
        if before == "body":
            self._until = min(self._until + len(data) / self.bytes_per_s, self.loop.time() + self.body_s)
        elif not before and not self._answers:
            self._waits_for, self._header_bytes = "header", 0
        self._header_bytes += len(data)
        super().data_received(data)
        if self._waits_for == "header" and self._header_bytes > HEADER_BYTES:
            self.send_400_response("the header is too long")
        if self.transport.is_closing():
            self._wait_for("")
        elif self._waits_for != before:
            self._wait_for(self._waits_for)

    @property
    def _answers(self) -> bool:
        """Whether the answer to a request that is whole is under way."""
        return self.cycle is not None and not self.cycle.response_complete

    def on_message_begin(self) -> None:
        if self._answers:
            raise ConnectionAbortedError  # which ends in `send_400_response`
        self._parsed_bytes = 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._count_header(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count_header(len(name) + len(value))
        super().on_header(name, value)

    def _count_header(self, length: int) -> None:
        """Count a part of a header that is whole; what is still to come is counted as it comes."""
        self._parsed_bytes += length
        if self._parsed_bytes > HEADER_BYTES:
            raise ConnectionAbortedError  # which ends in `send_400_response`

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        self.cycle.transport = _OneWrite(self.transport, self.cycle)  # type: ignore[assignment]
        self._waits_for = "body"

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._waits_for = ""

    def on_response_complete(self) -> None:
        self.cycle.transport.flush()  # type: ignore[attr-defined]
        super().on_response_complete()
        if self.transport.is_closing():
            self._wait_for("")

    def send_400_response(self, msg: str) -> None:
        """Refuse what is not HTTP; where an answer is under way, that is the last one, and no other comes before it."""
        if self._answers:
            self._deaf, self.cycle.keep_alive = True, False
        else:
            super().send_400_response(msg)

    def connection_lost(self, exc: Exception | None) -> None:
        self._wait_for("")
        super().connection_lost(exc)

    def shutdown(self) -> None:
        """Close, without waiting half a minute for a peer that never answers the TLS farewell."""
        super().shutdown()
        if self.transport.is_closing():
            self.loop.call_later(_FAREWELL_S, self.transport.abort)

    def _wait_for(self, part: Literal["header", "body", ""]) -> None:
        """Start the clock of a part of a request, or stop it."""
        self._stop_clock()
        self._waits_for, self._header_bytes = part, 0
        if part:
            self._left_s = self.header_s if part == "header" else self.body_s
            self._reading_changed()

    def _reading_changed(self) -> None:
        """Let the clock stand still while nothing is read."""
        now = self.loop.time()
        if self.flow.read_paused and self._clock is not None:
            self._left_s = self._until - now
            self._stop_clock()
        elif self._waits_for and not self.flow.read_paused and self._clock is None:
            self._until = now + self._left_s
            self._clock = self.loop.call_at(self._until, self._expire)

    def _stop_clock(self) -> None:
        if self._clock is not None:
            self._clock.cancel()
            self._clock = None

    def _expire(self) -> None:
        if self._until > self.loop.time():
            self._clock = self.loop.call_at(self._until, self._expire)
        else:
            self._clock = None
            self.transport.abort()
