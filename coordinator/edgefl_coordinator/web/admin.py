"""Administration over a Unix socket while `serve` runs, over the opened store while it does not.

Guarantees: the socket has mode 0600 in a folder of mode 0700, so only its owner can connect; one request is one JSON
line of at most 64 KiB, answered by one. Whoever finds no server takes the store's lock, so two never write; where the
lock is taken, a server that starts or another command is waited for. Source: docs/security.md, decision 7.
"""

import asyncio
import contextlib
import json
import os
import socket
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from edgefl_coordinator.errors import IN_USE, NotAllowedError, OperatorError
from edgefl_coordinator.settings import CoordinatorHome
from edgefl_protocol.errors import EdgeflError

if TYPE_CHECKING:  # the store takes half a second to import, which a command that asks the server can do without
    from edgefl_coordinator.store.coordinator import Coordinator
    from edgefl_coordinator.web.operations import Arguments, Facts

_MAX_LINE = 64 * 2**10
_MAX_ANSWER = 16 * 2**20
_TIMEOUT_S = 60.0
_LONG_S = {"begin_backup": 24 * 3600.0}  # of what takes as long as the store is large; a server that ends is noticed
_PATIENCE_S = 20.0  # for a server that has the store and does not listen yet


def run_operation(home: CoordinatorHome, name: str, arguments: "Arguments", passphrase: bytes | None = None) -> "Facts":
    """Run one operation of `OPERATIONS`, by the running server if there is one, else with the keys' passphrase.

    Raises:
        NotAllowedError: refused by policy or trust.
        EdgeflError: it failed; one sentence.
    """
    until = time.monotonic() + _PATIENCE_S
    while (answer := _ask(home, {"operation": name, "arguments": dict(arguments)})) is None:
        try:
            return _run_alone(home, name, arguments, passphrase)
        except OperatorError as error:
            if error.code != IN_USE or time.monotonic() > until:
                raise
        time.sleep(0.1)
    if "error" in answer:
        kind = NotAllowedError if answer.get("refused") else OperatorError
        raise kind(str(answer["error"]), str(answer.get("code", "operator")))
    return dict(answer["result"])


def _run_alone(home: CoordinatorHome, name: str, arguments: "Arguments", passphrase: bytes | None) -> "Facts":
    """Run one operation over the store itself.

    An `OperatorError` where another process has it (`IN_USE`), or the operation failed.
    """
    from edgefl_coordinator.store.coordinator import open_coordinator
    from edgefl_coordinator.web.operations import OPERATIONS

    coordinator = open_coordinator(home, passphrase)
    coordinator.store.leaves_objects = True
    try:
        return OPERATIONS[name](coordinator, arguments)
    finally:
        coordinator.store.close()


def is_served(home: CoordinatorHome) -> bool:
    """Tell whether a server of this folder listens on its socket."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection, contextlib.suppress(OSError):
        with _short_path(home) as path:
            connection.connect(path)
        return True
    return False


async def serve_admin(coordinator: "Coordinator") -> asyncio.Server:
    """Listen on the administration socket; close the returned server at the end.

    An `OperatorError` where the home's path is too long for a socket.
    """

    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            line = await asyncio.wait_for(reader.readuntil(b"\n"), _TIMEOUT_S)
            writer.write(json.dumps(await asyncio.to_thread(_answer, coordinator, line)).encode() + b"\n")
            await writer.drain()
        writer.close()

    home = coordinator.store.home
    home.socket.unlink(missing_ok=True)  # a leftover: we hold the store's lock, so nobody listens
    before = os.umask(0o177)
    try:
        with _short_path(home) as path:
            return await asyncio.start_unix_server(client, path, limit=_MAX_LINE)
    finally:
        os.umask(before)


def _answer(coordinator: "Coordinator", line: bytes) -> "Facts":
    """Run what one line asks for."""
    from edgefl_coordinator.web.operations import OPERATIONS, REFUSING

    try:
        request = json.loads(line)
        operation = OPERATIONS[request["operation"]]
        return {"result": operation(coordinator, request["arguments"])}
    except EdgeflError as error:
        return {"error": str(error), "code": error.code, "refused": isinstance(error, REFUSING)}
    except (ValueError, KeyError, TypeError) as error:
        return {"error": f"the request is not one this version understands ({type(error).__name__})", "code": "usage"}


def _ask(home: CoordinatorHome, request: dict[str, Any]) -> dict[str, Any] | None:
    """Send one request to the running server; None where none runs."""
    if not home.socket.exists():
        return None
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection, _short_path(home) as path:
        connection.settimeout(_LONG_S.get(request["operation"], _TIMEOUT_S))
        try:
            connection.connect(path)
        except (ConnectionRefusedError, FileNotFoundError):
            return None  # left over by a killed server
        except PermissionError:
            raise OperatorError(f"{home.socket} belongs to another user; run this as the coordinator's user") from None
        try:
            connection.sendall(json.dumps(request).encode() + b"\n")
            received = bytearray()
            while not received.endswith(b"\n") and len(received) <= _MAX_ANSWER:
                piece = connection.recv(65536)
                if not piece:
                    break
                received += piece
            answer = json.loads(received)
        except (OSError, ValueError):
            raise OperatorError("the running coordinator did not answer; look at its log and try again") from None
    return dict(answer)


@contextlib.contextmanager
def _short_path(home: CoordinatorHome) -> Iterator[str]:
    """Give a path to the socket that fits the 108 bytes of a Unix address, whatever the home's length."""
    plain = str(home.socket)
    if len(plain.encode()) < 104:
        yield plain
        return
    folder = os.open(home.root, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{folder}/{home.socket.name}"
    finally:
        os.close(folder)
