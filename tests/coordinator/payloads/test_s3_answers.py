"""Answers of an S3-compatible store that the tests' own server does not give: conditions, and objects that are gone.

Source: RFC 9110, section 13.1.2 (If-None-Match) and 15.5.5; Amazon S3's PutObject, DeleteObject, ListObjectsV2.
"""

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from edgefl_coordinator.errors import OperatorError
from edgefl_coordinator.payloads.s3 import S3Payloads

ONE = "<Contents><Key>{}</Key><Size>1</Size><LastModified>2026-01-01T00:00:00.000Z</LastModified></Contents>"


class Answers(BaseHTTPRequestHandler):
    """Keeps objects in `server.held`; answers with the status in `server.says` where a path is named there."""

    protocol_version = "HTTP/1.1"
    server: Any

    def do_GET(self) -> None:
        path, _, asked = self.path.partition("?")
        self.server.asked.append((self.command, self.path))
        if "list-type" in asked:
            prefix = parse_qs(asked)["prefix"][0]
            found = "".join(ONE.format(key) for key in self.server.held if key.startswith(prefix))
            self._answer(200, f"<ListBucketResult><IsTruncated>false</IsTruncated>{found}</ListBucketResult>".encode())
        else:
            held = self.server.held.get(path.removeprefix("/edgefl/"))
            self._answer(404 if held is None else 200, held or b"")

    def do_PUT(self) -> None:
        data = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.asked.append((self.command, self.path))
        key = urlsplit(self.path).path.removeprefix("/edgefl/")
        self.server.before_put()
        if self.headers["If-None-Match"] == "*" and key in self.server.held:
            self._answer(412)
        else:
            self.server.held[key] = data
            self._answer(200)

    def do_POST(self) -> None:
        self.server.asked.append((self.command, self.path))
        self._answer(400)

    def do_DELETE(self) -> None:
        key = self.path.removeprefix("/edgefl/")
        self.server.asked.append((self.command, key))
        status = self.server.says.get(key) or (204 if self.server.held.pop(key, None) else 404)
        self._answer(status)

    def _answer(self, status: int, body: bytes = b"") -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", '"1"')
        self.send_header("Last-Modified", "Thu, 01 Jan 2026 00:00:00 GMT")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "anybody")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "anything")
    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        found: Any = server
        found.held, found.says, found.asked, found.before_put = {}, {}, [], lambda: None
        found.url = f"s3://edgefl/x?region=us-east-1&endpoint=http://127.0.0.1:{server.server_port}"
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield found
        server.shutdown()


def test_of_two_that_claim_a_prefix_at_once_one_gets_it(answers) -> None:
    """Both found it empty; the other's `owner` came first."""
    answers.before_put = lambda: answers.held.setdefault("x/owner", b"another")
    with pytest.raises(OperatorError, match="belongs to another coordinator"):
        S3Payloads(answers.url, b"").claim("this one")
    assert answers.held == {"x/owner": b"another"}


def test_a_claim_whose_answer_was_lost_holds(answers) -> None:
    """The library sends it again, and hears that it is there."""
    answers.before_put = lambda: answers.held.setdefault("x/owner", b"this one")
    S3Payloads(answers.url, b"").claim("this one")
    assert answers.held == {"x/owner": b"this one"}


def test_a_used_prefix_without_owner_is_not_taken_over(answers) -> None:
    """Whoever claimed it would sweep what lies there."""
    answers.held["x/payloads/of-somebody"] = b"."
    with pytest.raises(OperatorError, match="there are objects below"):
        S3Payloads(answers.url, b"").claim("this one")
    assert answers.held == {"x/payloads/of-somebody": b"."}


@pytest.mark.parametrize("status", [403, 404, 500])
def test_a_name_that_is_not_deleted_keeps_no_other(answers, monkeypatch, status) -> None:
    """Refused, gone already, or an error of the server's: the pieces of an upload and the names after it go."""
    monkeypatch.setattr("edgefl_coordinator.payloads.s3._RETRIES", {"max_retries": 0})
    paths = ["x/payloads/one", "x/payloads/two", "x/uploads/three/0-1", "x/uploads/three/1-1"]
    answers.held.update(dict.fromkeys(paths, b"."))
    answers.says["x/payloads/one"] = status
    S3Payloads(answers.url, b"").delete(["one", "two", "three"])
    assert answers.held.keys() == {"x/payloads/one"}


def test_a_store_that_is_away_is_not_asked_for_each_name(answers, monkeypatch) -> None:
    """A sweep of thousands would wait for hours, and the next one finds them all."""
    monkeypatch.setattr("edgefl_coordinator.payloads.s3._RETRIES", {"max_retries": 0})
    answers.says.update({f"x/payloads/{number}": 500 for number in range(20)})
    S3Payloads(answers.url, b"").delete(str(number) for number in range(20))
    assert sum(method == "DELETE" for method, _ in answers.asked) == 3


def test_a_payload_of_some_mebibytes_is_one_request(answers) -> None:
    """Requests are what such a store lets one wait for."""
    S3Payloads(answers.url, b"").put("one", bytes(7 * 2**20))
    assert [method for method, _ in answers.asked] == ["PUT"]
