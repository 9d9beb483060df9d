"""uvicorn's HTTP protocol with a receive deadline.

Guarantees: a connection whose request is not complete in time is closed, however slowly its bytes keep coming: the
header within `header_deadline_s` of the first byte (or of connecting), the body within `body_deadline_s` of the header
and a second more for each `body_bytes_per_s` that arrive, but never more than `body_deadline_s` ahead. So a body that
comes at that rate or faster is never cut, and one that drips or stops is, whatever came of it before. What we do not
read meanwhile is not held against its sender. uvicorn itself waits for ever. Source: docs/security.md, decision 8 and
check 40.
"""

import asyncio
from collections.abc import Mapping
from typing import Any, ClassVar

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from edgefl_coordinator.web.door import bound_buffer, let_in

_FAREWELL_S = 0.5


def deadline_protocol(header_deadline_s: float, body_deadline_s: float, body_bytes_per_s: float) -> type[H11Protocol]:
    """Return a protocol class for `uvicorn.Config(http=…)`."""
    deadlines = {h11.IDLE: header_deadline_s, h11.SEND_BODY: body_deadline_s}
    return type("DeadlineProtocol", (_DeadlineProtocol,), {"deadlines_s": deadlines, "bytes_per_s": body_bytes_per_s})


class _DeadlineProtocol(H11Protocol):
    """h11 with a clock that runs while a request is incomplete."""

    deadlines_s: ClassVar[Mapping[object, float]]  # what we wait for (h11's name of the sender's state) → seconds
    bytes_per_s: ClassVar[float]  # of a body

    def __init__(self, *args: Any, **extra: Any) -> None:
        super().__init__(*args, **extra)
        self._clock: asyncio.TimerHandle | None = None
        self._clock_state: object = None
        self._until = 0.0  # when its time is over, by the loop's

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        bound_buffer(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        let_in(self.transport)
        if self._clock_state is h11.SEND_BODY:
            gained = self._until + len(data) / self.bytes_per_s
            self._until = min(gained, self.loop.time() + self.deadlines_s[h11.SEND_BODY])
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        # A pipelined request that is already there starts its own clock; an idle connection has uvicorn's.
        self._watch(idle=not self.conn.trailing_data[0])

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop()
        super().connection_lost(exc)

    def shutdown(self) -> None:
        """Close, without waiting half a minute for a peer that never answers the TLS farewell."""
        super().shutdown()
        if self.transport.is_closing():
            self.loop.call_later(_FAREWELL_S, self.transport.abort)

    def _watch(self, *, idle: bool = False) -> None:
        """Start the clock when what we wait for changes; stop it when a request is whole."""
        state = self.conn.their_state
        seconds = self.deadlines_s.get(state)
        if self.transport.is_closing() or idle or seconds is None:
            self._stop()
        elif self._clock is None or self._clock_state is not state:
            self._stop()
            self._clock_state = state
            self._until = self.loop.time() + seconds
            self._clock = self.loop.call_at(self._until, self._expire)

    def _stop(self) -> None:
        if self._clock is not None:
            self._clock.cancel()
        self._clock = None

    def _expire(self) -> None:
        now = self.loop.time()
        if self.flow.read_paused:  # it waits for us
            self._until = now + self.deadlines_s[self._clock_state]
        if self._until > now:
            self._clock = self.loop.call_at(self._until, self._expire)
        else:
            self._clock = None
            self.transport.abort()
