"""The HTTP side on a real socket, without TLS, and a sender that drips."""

import asyncio
import socket
import threading
import time

import uvicorn

from edgefl_coordinator.web.app import make_app
from edgefl_coordinator.web.deadline import deadline_protocol


class Running:
    """The application under uvicorn with our receive deadline on 127.0.0.1, without TLS: for slow senders."""

    def __init__(self, coordinator, header_s: float, body_s: float, bytes_per_s: float = 2**15) -> None:
        self.listening = socket.create_server(("127.0.0.1", 0), backlog=1024)
        self.port = self.listening.getsockname()[1]
        protocol = deadline_protocol(header_s, body_s, bytes_per_s)
        config = uvicorn.Config(make_app(coordinator), http=protocol, ws="none", lifespan="off", log_config=None)
        self.server = uvicorn.Server(config)
        self.thread = threading.Thread(
            target=lambda: asyncio.run(self.server.serve(sockets=[self.listening])), daemon=True
        )

    def __enter__(self) -> "Running":
        self.thread.start()
        while not self.server.started:
            time.sleep(0.01)
        return self

    def __exit__(self, *_: object) -> None:
        self.server.should_exit = True
        self.thread.join()
        self.listening.close()

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=20)

    def healthy(self) -> float:
        """Seconds that a good request waits for its answer."""
        started = time.monotonic()
        with self.connect() as one:
            one.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            answer = b""
            while piece := one.recv(4096):
                answer += piece
        assert b" 200 " in answer.split(b"\r\n")[0] and answer.endswith(b"ok\n")
        return time.monotonic() - started


def seconds_until_closed(one: socket.socket, drip: bytes = b"") -> float:
    """Drip bytes in until the other side closes."""
    started = time.monotonic()
    one.settimeout(0.1)
    while time.monotonic() - started < 15:
        try:
            if drip:
                one.send(drip)
            if one.recv(1024) == b"":
                break
        except TimeoutError:
            continue
        except OSError:
            break
    return time.monotonic() - started
