"""docs/guides/own-address.md, typed as it stands: a certificate of one's own, behind both kinds of reverse proxy."""

import asyncio
import datetime
import ssl
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from tests.forks import Forks
from tests.house.test_pages import Reader

from edgefl_coordinator.web.tls import make_development_certificate, server_context

PAGE = "docs/guides/own-address.md"
OWN_CERTIFICATE = (
    "edgefl-coordinator set certificate /etc/fl/fullchain.pem certificate_key /etc/fl/privkey.pem ca "
    "/etc/fl/authority.pem"
)
PROXYS_CERTIFICATE = "edgefl-coordinator set ca /etc/fl/authority.pem proxy_ends_tls true"


async def passed_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Pass bytes on until the one side ends."""
    with suppress(OSError):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    writer.close()


@contextmanager
def proxy(there: int, ours: ssl.SSLContext | None, authority: Path) -> Iterator[tuple[int, list[str]]]:
    """A proxy on a port of its own, and the addresses that came. With a context of its own it ends TLS, and speaks it
    anew to the coordinator, whose authority it knows."""
    came: list[str] = []

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        came.append(writer.get_extra_info("peername")[0])
        context = ssl.create_default_context(cafile=str(authority)) if ours else None
        name = "localhost" if ours else None
        far = await asyncio.open_connection("127.0.0.1", there, ssl=context, server_hostname=name)
        await asyncio.gather(passed_on(reader, far[1]), passed_on(far[0], writer))

    async def serve() -> None:
        async with await asyncio.start_server(connected, "127.0.0.1", 0, ssl=ours) as server:
            ready.set_result((asyncio.get_running_loop(), server.sockets[0].getsockname()[1]))
            await stop.wait()

    ready: Future[tuple[asyncio.AbstractEventLoop, int]] = Future()
    stop = asyncio.Event()
    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    loop, port = ready.result(20)
    try:
        yield port, came
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(20)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["forwards", "ends TLS"])
def test_the_page(kind: str, root: Path, tmp_path: Path, environment, forks: Forks) -> None:
    """A device joins through the proxy, trusting the authority of the house alone; of the second kind the coordinator
    has its development certificate, as the page says."""
    files = tmp_path / "etc/fl"
    files.mkdir(parents=True)
    made = make_development_certificate(["localhost"], datetime.datetime.now(datetime.UTC))
    for name, data in (("fullchain", made.chain), ("privkey", made.key), ("authority", made.ca)):
        (files / f"{name}.pem").write_bytes(data)
    ours = server_context(files / "fullchain.pem", files / "privkey.pem") if kind == "ends TLS" else None
    reader = Reader(tmp_path, environment, forks)
    with proxy(reader.port, ours, tmp_path / "federation/tls/ca.pem") as (port, came):
        if ours:
            reader.replaced[OWN_CERTIFICATE] = PROXYS_CERTIFICATE
        reader.replaced |= {"https://fl.example.org": f"https://localhost:{port}", "/etc/fl/": f"{files}/"}
        try:
            page = (root / PAGE).read_text(encoding="utf-8")
            assert OWN_CERTIFICATE in page and PROXYS_CERTIFICATE in page
            assert reader.read(root / PAGE) >= 8
        finally:
            reader.close()
    assert len(came) >= 2  # enrolment and status
    log = (tmp_path / "server.log").read_text()
    assert '"message": "clinic-1 was approved"' in log and "Traceback" not in log
