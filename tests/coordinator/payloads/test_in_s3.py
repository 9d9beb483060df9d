"""A coordinator whose payloads lie in an S3-compatible store: what goes away, what its operator sees, whose it is.

The server is JuiceFS's gateway, whose S3 side is MinIO's server: no mock. Source: docs/security.md, reliability;
docs/decisions/0061.
"""

import datetime
import hashlib
import logging
import re
import shutil
import ssl
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import obstore
import pytest
from benchmarks.coordinator import s3_gateway
from tests.coordinator.kept_blobs import blob_names

from edgefl_coordinator.errors import OperatorError
from edgefl_coordinator.founding.folder import check_payloads
from edgefl_coordinator.payloads.s3 import S3Payloads
from edgefl_coordinator.rounds.aggregation import step
from edgefl_coordinator.settings import CoordinatorHome
from edgefl_coordinator.store import store as store_module
from edgefl_coordinator.store.coordinator import open_coordinator
from edgefl_coordinator.store.tables import replies, uploads
from edgefl_coordinator.web.operations import OPERATIONS
from edgefl_coordinator.web.tls import make_development_certificate
from edgefl_protocol import Payload
from edgefl_protocol.errors import StorageError
from edgefl_protocol.messages.requests import Refusal


@pytest.fixture
def payloads(gateway: Any) -> Callable[[], str]:
    """Of all coordinators here."""
    url: Callable[[], str] = gateway.url
    return url


@pytest.fixture
def blob(lab: Any) -> Any:
    return lab.Blob(lab.reply_of(1).to_bytes())


def lies_there(coordinator: Any) -> dict[str, bytes]:
    """Every object below the prefix, as the store's operator reads it."""
    held = coordinator.store.payloads._store
    paths = [one["path"] for batch in obstore.list(held) for one in batch]
    return {path: bytes(obstore.get(held, path).bytes()) for path in paths}


def test_its_operator_sees_sealed_bytes_only(federation, pair, blob, lab) -> None:
    """docs/security.md 1: of the state, broadcasts, replies and uploads no 32 bytes lie there as they are."""
    blob.put_all(pair[0])
    first = lies_there(federation)
    assert isinstance(blob.reply(pair[0]), Payload)
    found = {**first, **lies_there(federation)}
    assert {path.split("/")[0] for path in found} == {"owner", "payloads", "uploads"}
    plain = [lab.reply_of(1).to_bytes(), Payload(lab.weights(0)).to_bytes()]
    for secret in plain:
        for start in range(0, len(secret) - 32, 65_521):
            assert not any(secret[start : start + 32] in data for data in found.values())
    assert b'"backbone.conv"' in plain[0] and not any(b"backbone.conv" in data for data in found.values())
    assert not list(federation.store.home.blobs.iterdir())


def test_equal_payloads_lie_there_as_different_bytes(make_coordinator) -> None:
    """A key of each payload's own: under one key the chunks' counter would be a nonce used twice."""
    coordinator = make_coordinator()
    names = {coordinator.store.put_blob(bytes(100)).name for _ in range(2)}
    found = {data for path, data in lies_there(coordinator).items() if path.startswith("payloads/")}
    assert len(names) == len(found) == 2


def test_the_server_goes_away_in_mid_round(gateway, federation, pair, blob, lab) -> None:
    """Who sends hears 503 and keeps the work; what was acknowledged is there when it is back, and the round goes on."""
    second = lab.Blob(lab.reply_of(2).to_bytes())
    blob.put_all(pair[0])
    assert isinstance(blob.reply(pair[0]), Payload)
    have = second.put(pair[1], 0, 2**19)
    gateway.kill()
    refused = second.put(pair[1], have, 2**20)
    assert isinstance(refused, Refusal) and (refused.code, refused.status) == ("busy", 503)
    gateway.start()
    assert second.put(pair[1], 0, 0) == have == 2**19
    second.put_all(pair[1])
    gateway.kill()
    refused = second.reply(pair[1], idem="work-item-00000002")
    assert isinstance(refused, Refusal) and (refused.code, refused.status) == ("busy", 503)
    gateway.start()
    assert isinstance(second.reply(pair[1], idem="work-item-00000002"), Payload)
    gateway.kill()
    with pytest.raises(StorageError) as away:
        step(federation, lab.averaging_worker)
    assert away.value.code == "unreachable" and str(gateway.port) not in str(away.value)
    gateway.start()
    assert step(federation, lab.averaging_worker)
    (state,) = [row for row in lab.rows(federation, store_module.tables.states) if row.blob]
    mean = Payload.from_bytes(federation.store.get_blob(state.blob)).arrays["backbone.conv"]
    sent = [lab.reply_of(seed).arrays["backbone.conv"].astype(float) for seed in (1, 2)]
    assert (mean == ((sent[0] + sent[1]) / 2).astype("f4")).all()


@pytest.mark.slow
def test_two_machines_on_postgresql(postgres, make_coordinator, lab, clock, tools, tmp_path) -> None:
    """Each with a copy of keys and settings: an upload begun at one goes on at the other, and either does the job."""
    url = postgres.database()
    one = make_coordinator(
        database=url,
        task={"method": "fedclf", "shares_maps": False, "backbone": lab.CNN},
        rounds={"quorum_target": 2, "min_cohort": 1, "allow_small_cohort": True},
        limits={"reply_bytes": 8 * 2**20},
    )
    there = CoordinatorHome(tmp_path / "another-machine")
    shutil.copytree(one.store.home.root, there.root)
    two = open_coordinator(there, clock=clock, joins=True)
    members = [tools.quick_member(one, name) for name in ("clinic-a", "clinic-b")]
    OPERATIONS["start"](one, {})
    assert step(one, lab.averaging_worker)
    for number, here in enumerate(members, start=1):
        far = tools.Member(two, here.name, signing=here.signing, sealing=here.sealing, counter=here.counter)
        blob = lab.Blob(lab.reply_of(number).to_bytes())
        have = blob.put(here, 0, 2**19)
        assert blob.put(far, 0, 0) == have == 2**19
        blob.put_all(far)
        assert isinstance(blob.reply(here, idem=f"work-item-0000000{number}"), Payload)
    rows = lab.rows(two, replies)
    found = {two.store.get_blob(row.blob) for row in rows}
    assert found == {lab.reply_of(number).to_bytes() for number in (1, 2)} and not lab.rows(one, uploads)
    one.store.close()
    assert two.store.database.lead(wait_s=10) and step(two, lab.averaging_worker)
    assert not any(list(coordinator.store.home.blobs.iterdir()) for coordinator in (one, two))
    two.store.close()
    postgres.drop(url)


def test_a_put_that_nobody_names_is_swept_an_hour_later(federation) -> None:
    """Killed between put and commit: nothing was acknowledged, and nothing stays for ever."""
    orphan, named = federation.store.put_blob(b"its transaction never came"), blob_names(federation.store)
    assert federation.store.sweep() == 0 and blob_names(federation.store) == named
    real = time.time
    try:
        store_module.time.time = lambda: real() + 4000
        assert federation.store.sweep() == 1
    finally:
        store_module.time.time = real
    assert orphan.name not in blob_names(federation.store)


def test_a_piece_of_a_blob_that_was_pushed_out_meanwhile_goes(federation, pair, clock, lab, monkeypatch) -> None:
    """No row names the object that comes too late; the member begins anew."""
    late, others = lab.Blob(bytes(100_000)), [lab.Blob(bytes(100_000)) for _ in range(2)]
    assert late.put(pair[0], 0, 10) == 10
    places = federation.store.payloads
    real = places.put_piece

    def slow(*arguments: Any) -> None:
        monkeypatch.setattr(places, "put_piece", real)
        for one in others:
            clock.now_ms += 1000
            assert one.put(pair[0], 0, 10) == 10
        real(*arguments)

    monkeypatch.setattr(places, "put_piece", slow)
    assert late.put(pair[0], 10, 20) == 0
    named = {row.blob for row in lab.rows(federation, uploads)}
    assert len(named) == 2 and {path.split("/")[1] for path in lies_there(federation) if "uploads/" in path} == named


def test_a_piece_that_was_changed_there_is_sent_again(federation, pair, blob) -> None:
    """The member's own digest finds it; what was bad is dropped and nothing counts."""
    blob.put_all(pair[0])
    held = federation.store.payloads._store
    path = next(path for path in lies_there(federation) if path.startswith("uploads/"))
    obstore.put(held, path, bytes(1000))
    refused = blob.reply(pair[0])
    assert isinstance(refused, Refusal) and refused.code == "bad_blob"
    blob.put_all(pair[0])
    assert isinstance(blob.reply(pair[0]), Payload)


def test_a_prefix_is_of_one_coordinator(gateway, make_coordinator) -> None:
    """Another's sweep would remove what this one keeps."""
    url = gateway.url()
    kept = make_coordinator("one", payloads=url).store.put_blob(b"kept")
    with pytest.raises(OperatorError, match="belongs to another coordinator"):
        make_coordinator("two", payloads=url)
    assert S3Payloads(url, b"").names() == {kept.name}
    with pytest.raises(OperatorError, match="there are objects below s3://edgefl/federation-"):
        S3Payloads(url, b"").try_out()


WRONG = {
    "s3://edgefl": "must be s3://BUCKET/PREFIX",
    "s3://[edgefl/x": "must be s3://BUCKET/PREFIX",
    "s3://edgefl/x?endpoint=https://[::1": "no host that can be read: write it as https://HOST",
    "https://edgefl/x": "must be s3://BUCKET/PREFIX",
    "s3://key:secret@edgefl/x": "must be s3://BUCKET/PREFIX",
    "s3://edgefl/x?secret=y": "has no part secret",
    "s3://edgefl/x?endpoint=http://store.example": "must begin with https://, unless it is this machine",
    "s3://edgefl/x?endpoint=http://127.0.0.1.example:9000": "must begin with https://, unless it is this machine",
    "s3://edgefl/x?endpoint=https://key:secret@store.example": "holds a password",
}


@pytest.mark.parametrize("url", WRONG)
def test_what_is_no_place_for_payloads(url) -> None:
    """One sentence each, before anything is called."""
    with pytest.raises(OperatorError, match=WRONG[url]) as refused:
        S3Payloads(url, b"")
    assert "secret" not in str(refused.value).replace("no part secret", "")


def test_without_tls_the_environment_names_this_machine_only(monkeypatch, gateway) -> None:
    """The endpoint may stand in the environment; TLS stays on there, too, whatever else stands beside it."""
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://store.example")
    with pytest.raises(OperatorError, match="must begin with https://"):
        S3Payloads("s3://edgefl/x", b"")
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", gateway.endpoint)
    assert S3Payloads("s3://edgefl/nobodys?region=us-east-1", b"").names() == set()


class Listing(BaseHTTPRequestHandler):
    """Answers as a store in which nothing lies."""

    def do_GET(self) -> None:
        body = b"<ListBucketResult><IsTruncated>false</IsTruncated></ListBucketResult>"
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


def test_tls_stays_on(tmp_path, monkeypatch, gateway) -> None:
    """A certificate of an authority that is not known is refused, whatever the environment says; with SSL_CERT_FILE
    the authority of a clinic is known."""
    made = make_development_certificate(["127.0.0.1"], datetime.datetime.now(datetime.UTC))
    for name, data in (("chain", made.chain), ("key", made.key), ("ca", made.ca)):
        (tmp_path / name).write_bytes(data)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "chain", tmp_path / "key")
    with HTTPServer(("127.0.0.1", 0), Listing) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"s3://edgefl/x?region=us-east-1&endpoint=https://127.0.0.1:{server.server_port}"
        monkeypatch.setenv("AWS_ALLOW_INVALID_CERTIFICATES", "true")
        with pytest.raises(StorageError) as refused:
            S3Payloads(url, b"").names()
        assert refused.value.code == "unreachable"
        monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "ca"))
        assert S3Payloads(url, b"").names() == set()
        server.shutdown()


def test_without_its_extra(monkeypatch) -> None:
    """docs/design.md 2: one sentence says what to install."""
    monkeypatch.setattr(store_module, "find_spec", lambda _: None)
    with pytest.raises(OperatorError, match=re.escape("need edgefl-derm[s3]: pip install ")):
        check_payloads("s3://edgefl/x")


def test_wrong_credentials_are_one_sentence(monkeypatch, gateway, make_coordinator, caplog, clock) -> None:
    """And no credential stands in it, in what the folder holds, in the log or in `status`."""
    caplog.set_level(logging.DEBUG)
    coordinator = make_coordinator()
    told = str(OPERATIONS["status"](coordinator, {})) + coordinator.store.payloads.described
    kept = [path.read_bytes() for path in Path(coordinator.store.home.root).rglob("*") if path.is_file()]
    coordinator.store.close()
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "another secret")
    with pytest.raises(StorageError) as refused:
        open_coordinator(coordinator.store.home, clock=clock)
    assert refused.value.code == "permissions" and str(refused.value).count("\n") == 0
    told += str(refused.value) + caplog.text
    for secret in (*s3_gateway.CREDENTIALS.values(), "another secret"):
        assert secret not in told and not any(secret.encode() in data for data in kept)


def test_many_at_once(federation) -> None:
    """Eight threads write and read; each finds what it wrote."""

    def work(number: int) -> bool:
        data = hashlib.sha256(str(number).encode()).digest() * 5000
        return bool(federation.store.get_blob(federation.store.put_blob(data).name) == data)

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(64)))
