"""The blob route over TLS through a proxy that does what bad networks do, at one piece after the other."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.exchange.test_network_faults import FAULTS, LONG, SHORT, Proxy

from edgefl_coordinator.store import counts
from edgefl_coordinator.store.coordinator import wall_clock_ms
from edgefl_coordinator.store.tables import replies
from edgefl_coordinator.web.operations import OPERATIONS
from edgefl_exchange.https import HttpsTransport
from edgefl_exchange.member import Member
from edgefl_exchange.outbox import Outbox
from edgefl_exchange.transport import Answer, Request

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


class Switch:
    """The good network, but for one request to the blob route, which goes through the bad one."""

    def __init__(self, good: HttpsTransport, bad: HttpsTransport) -> None:
        self.good, self.bad, self.at, self.seen = good, bad, 0, 0

    def send(self, request: Request) -> Answer:
        self.seen += request.path == "/v1/blob"
        through_bad = request.path == "/v1/blob" and self.seen == self.at
        return (self.bad if through_bad else self.good).send(request)


@pytest.fixture
def member(served, lab, tmp_path) -> Iterator[tuple[Any, Proxy, Switch, Member, Path]]:
    coordinator, port = served
    folder = lab.join(coordinator, port, tmp_path / "member")
    OPERATIONS["start"](coordinator, {})
    proxy, ca = Proxy(port), folder / "ca.pem"
    good = HttpsTransport(f"https://127.0.0.1:{port}", ca, deadlines=LONG)
    switch = Switch(good, HttpsTransport(f"https://127.0.0.1:{proxy.port}", ca, deadlines=SHORT))
    with Member(folder, lambda _: switch, sleep=lambda _: None) as one:
        while one.task().round != 1:
            pass
        yield coordinator, proxy, switch, one, folder
    proxy.close()


@pytest.mark.slow
def test_twelve_faults_on_the_blob_route(member, lab) -> None:
    """Check 63, the blob route: reset, drop, delay, half-close, truncate, throttle, corrupt at a piece up and a piece
    down: the transfer ends well, the reply counts once and the broadcast is whole."""
    coordinator, proxy, switch, one, folder = member
    expected = lab.weights(0)["backbone.conv"].tobytes()
    with Outbox(folder / "outbox.sqlite3", lab.KEY) as outbox:
        for number, fault in enumerate(FAULTS):
            switch.at, switch.seen, proxy.fault = 1 + number % 3, 0, fault
            assert one.broadcast(1).arrays["backbone.conv"].tobytes() == expected, fault
            outbox.put("skin", "reply", lab.reply_of(number).to_bytes(), wall_clock_ms())
            switch.at, switch.seen = 1 + number % 3, 0
            (done,) = one.deliver(outbox, one.task())
            assert done.outcome == "accepted" and switch.seen >= switch.at, fault
            (row,) = lab.rows(coordinator, replies)
            assert coordinator.store.get_blob(row.blob) == lab.reply_of(number).to_bytes()
            with coordinator.store.transaction() as connection:
                connection.execute(replies.delete())
                counts.drop(connection)
