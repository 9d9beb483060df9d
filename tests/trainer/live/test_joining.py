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
from tests.trainer.live.test_site_work import OPTIONS, told

from edgefl_exchange.errors import Unavailable
from edgefl_exchange.https import HttpsTransport
from edgefl_protocol.messages.requests import TaskReply
from edgefl_trainer.contract import Phase
from edgefl_trainer.engine.folder import INPUTS, check_finished
from edgefl_trainer.errors import FederationRefused, RunError
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


def finished(folder: Path, told: TaskReply | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the folder of a site that is finished, whose coordinator tells this now; None where nobody answers."""

    class Seat:
        """The site's membership."""

        joined, home = True, folder

        def __init__(self, *_: object) -> None: ...

        def enrolled(self, *_: object) -> SimpleNamespace:
            return SimpleNamespace(name="site-1", federation="skin", role="site", fingerprint="F", state="approved")

        def task(self) -> TaskReply:
            if told is None:
                raise Unavailable("nobody answers")
            return told

    monkeypatch.setattr(joining, "SiteMembership", Seat)
    monkeypatch.setattr(joining, "load_membership", lambda _: Seat().enrolled())
    (folder / joining.MEMBER).mkdir()
    (folder / "summary.json").write_text(json.dumps({"state_sha256": "a" * 64}))


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

    def prepare(*_: object) -> None:
        raise GoneOn

    finished(tmp_path, answer and told_task(**answer), monkeypatch)
    monkeypatch.setattr(joining, "prepare", prepare)
    call = Join(folder=tmp_path, options=None, say=said.append)  # type: ignore[arg-type]
    if goes_on:
        with pytest.raises(GoneOn):
            join(call)
        return
    assert join(call)["summary"] == {"state_sha256": "a" * 64}
    assert any("nobody could be asked whether its federation goes on" in line for line in said) is (answer is None)


def test_a_finished_site_that_cannot_go_on_keeps_its_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """docs/reference/runs.md, a live federation: its table has more rows by now. They went before that was found, and
    the good model could be used no more."""
    said: list[str] = []
    finished(tmp_path, told(state="open", round=2), monkeypatch)
    (tmp_path / INPUTS).write_text(
        json.dumps({"partition_sha256": "of fewer rows", "backbone_sha256": "", "hyper": {}})
    )
    with pytest.raises(RunError, match="rows of the data have changed"):
        join(Join(folder=tmp_path, options=OPTIONS, say=said.append))
    check_finished(tmp_path)
    assert any("goes on: the results in" in line for line in said)
    (tmp_path / "summary.json").unlink()
    with pytest.raises(RunError, match=r"finish it with `edgefl-train join … --out"):
        check_finished(tmp_path)


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
