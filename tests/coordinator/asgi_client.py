"""The coordinator's HTTP application, asked in process."""

import asyncio
import threading
from dataclasses import dataclass
from typing import Any

from edgefl_coordinator.store.coordinator import Coordinator
from edgefl_coordinator.web.app import make_app


@dataclass(frozen=True)
class HttpAnswer:
    """What came back over ASGI."""

    status: int
    headers: dict[bytes, bytes]
    body: bytes


class AsgiClient:
    """A transport that calls the ASGI application in process, on an event loop in a thread."""

    def __init__(self, coordinator: Coordinator) -> None:
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()

        async def make() -> Any:
            return make_app(coordinator)

        self.app = asyncio.run_coroutine_threadsafe(make(), self.loop).result()

    def request(
        self,
        method: str,
        target: str,
        body: bytes | list[bytes] = b"",
        headers: dict[str, str] | None = None,
        *,
        address: str = "192.0.2.1",
    ) -> HttpAnswer:
        """Send one request; a list is sent in pieces. Content-Length is added unless `headers` are given."""
        return asyncio.run_coroutine_threadsafe(
            self._request(method, target, body, headers, address), self.loop
        ).result()

    async def _request(
        self, method: str, target: str, body: bytes | list[bytes], headers: dict[str, str] | None, address: str
    ) -> HttpAnswer:
        pieces = [body] if isinstance(body, bytes) else list(body)
        shown = (
            {"content-length": str(sum(map(len, pieces)))} if headers is None and method == "POST" else headers or {}
        )
        path, _, query = target.partition("?")
        scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": method, "scheme": "https",
            "path": path, "raw_path": path.encode(), "query_string": query.encode(), "root_path": "",
            "headers": [(name.lower().encode(), value.encode()) for name, value in shown.items()],
            "client": (address, 1), "server": ("127.0.0.1", 1), "state": {},
        }  # fmt: skip
        sent: list[Any] = []
        waiting = [
            {"type": "http.request", "body": piece, "more_body": index + 1 < len(pieces)}
            for index, piece in enumerate(pieces)
        ]

        async def receive() -> Any:
            return waiting.pop(0) if waiting else {"type": "http.disconnect"}

        async def send(event: Any) -> None:
            sent.append(event)

        await self.app(scope, receive, send)
        return HttpAnswer(
            sent[0]["status"], dict(sent[0]["headers"]), b"".join(event.get("body", b"") for event in sent[1:])
        )

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()
