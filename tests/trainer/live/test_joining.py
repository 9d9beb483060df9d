"""Waiting for a coordinator ends where it knows the site no more. Source: docs/reference/runs.md, a live federation."""

import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.exchange.tls_server import QUICK, post
from tests.told import told_task

from edgefl_exchange.errors import Unavailable
from edgefl_exchange.https import HttpsTransport
from edgefl_trainer.contract import Phase
from edgefl_trainer.errors import FederationRefused
from edgefl_trainer.live import joining
from edgefl_trainer.live.joining import Join, _patiently, _rounds_text, _tell_judged, join


def asking(statuses: list[int | None], waits: list[float], **more: Any) -> Any:
    """Ask a coordinator whose answers nobody signed, with these HTTP statuses; then it answers."""
    answers: Iterator[int | None] = iter(statuses)
    call = Join(folder=None, options=None, say=lambda _: None, sleep=waits.append, **more)  # type: ignore[arg-type]

    def ask() -> str:
        for status in answers:
            raise Unavailable("the answer is not one that the coordinator signed", "not_signed", status=status)
        return "the task"

    return _patiently(call, ask)


def test_a_site_that_was_shut_out_does_not_wait_without_end() -> None:
    """It waited for ever, with a line that did not say whom to ask."""
    waits: list[float] = []
    with pytest.raises(FederationRefused) as refused:
        asking([401] * 9, waits)
    assert (refused.value.code, len(waits)) == ("shut_out", 3)
    assert "ask its operator whether the site was shut out, or was sent a newer invite" in str(refused.value)


def test_other_troubles_are_waited_out() -> None:
    waits: list[float] = []
    assert asking([401, 401, 401, 503, 401, 401, 401, None], waits) == "the task" and len(waits) == 8


def test_a_page_of_plain_http_ends_no_run() -> None:
    """docs/security.md, order of checks: anybody on the way can send it. It ended a run with status 3."""
    said: list[str] = []
    answers = iter([b"HTTP/1.1 503 Service Unavailable\r\n\r\n", b"SSH-2.0-OpenSSH_9.2\r\n"])
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            for answer in answers:
                with listening.accept()[0] as connection:
                    connection.recv(4096)
                    connection.sendall(answer)

        server = threading.Thread(target=serve, daemon=True)
        server.start()
        address = f"https://127.0.0.1:{listening.getsockname()[1]}"
        tries = iter(range(3))

        def ask() -> str:
            if next(tries) < 2:
                post(HttpsTransport(address, deadlines=QUICK))
            return "the task"

        call = Join(folder=None, options=None, say=said.append, sleep=lambda _: None)  # type: ignore[arg-type]
        assert _patiently(call, ask) == "the task"
        server.join(5)
    assert len(said) == 1 and "is not TLS" in said[0]


def test_once_asks_once() -> None:
    with pytest.raises(Unavailable):
        asking([401], [], once=True)


class GoneOn(BaseException):
    """The site went on with its federation."""


@pytest.mark.parametrize(
    ("answer", "goes_on"),
    [
        ({"state": "open", "round": 5}, True),
        ({"state": "closed", "round": 5}, True),
        ({"state": "done", "state_sha256": "b" * 64}, True),  # its end was another one, without this site
        ({"state": "done", "state_sha256": "a" * 64}, False),
        (None, False),
    ],
)
def test_a_finished_site_asks_once_whether_its_federation_goes_on(
    answer: dict[str, Any] | None, goes_on: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """docs/guides/backup.md: rounds after the backup are done again, the last one too. It never asked."""
    said: list[str] = []

    class Seat:
        """A member of a coordinator that answers so."""

        joined, home = True, tmp_path

        def __init__(self, *_: object) -> None: ...

        def enrolled(self, *_: object) -> SimpleNamespace:
            return SimpleNamespace(name="site-1", federation="skin", role="site", fingerprint="F", state="approved")

        def task(self) -> Any:
            if answer is None:
                raise Unavailable("nobody answers")
            return told_task(**answer)

    def prepare(*_: object) -> None:
        raise GoneOn

    monkeypatch.setattr(joining, "SiteMembership", Seat)
    monkeypatch.setattr(joining, "load_membership", lambda _: Seat().enrolled())
    monkeypatch.setattr(joining, "prepare", prepare)
    (tmp_path / joining.MEMBER).mkdir()
    (tmp_path / "summary.json").write_text(json.dumps({"state_sha256": "a" * 64}))
    call = Join(folder=tmp_path, options=None, say=said.append)  # type: ignore[arg-type]
    if goes_on:
        with pytest.raises(GoneOn):
            join(call)
        return
    assert join(call)["summary"] == {"state_sha256": "a" * 64}
    assert any("nobody could be asked whether its federation goes on" in line for line in said) is (answer is None)


@pytest.mark.parametrize(
    ("kinds", "text"),
    [
        (["train"] * 4, "4"),
        (["warm", *["train"] * 4], "4 of training, 5 with warm"),
        (["train", "final", "final"], "1 of training, 3 with final"),
    ],
)
def test_rounds_are_counted_as_the_coordinator_counts_them(kinds: list[str], text: str) -> None:
    """`init --rounds 4` was followed by `round 2 of 5` of the coordinator and `round 1/4` of the site."""
    assert _rounds_text([Phase(kind, place) for place, kind in enumerate(kinds)]) == text  # type: ignore[arg-type]


def test_a_tune_figure_says_of_how_many_rows_it_is() -> None:
    said: list[str] = []
    _tell_judged(said.append, "before exchange 2", {"tune_balanced_accuracy": 0.5, "tune_rows": 1})
    assert said == ["before exchange 2: tune balanced accuracy 50.0% (of 1 row)"]
