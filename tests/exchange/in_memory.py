"""A coordinator in memory that speaks the real protocol, and a wire between it and a member that can misbehave."""

import hashlib
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np

from edgefl_exchange.errors import Unavailable
from edgefl_exchange.transport import Answer, Request
from edgefl_protocol import (
    EnvelopeError,
    Expected,
    Opened,
    Payload,
    PublicSealingKey,
    ReplayWindow,
    fingerprint,
    generate_sealing_key,
    generate_signing_key,
    open_enrolment,
    open_envelope,
    reply_fields,
    seal,
)
from edgefl_protocol.envelopes.blob import BlobReference, open_blob
from edgefl_protocol.errors import ReplayError, SequenceError
from edgefl_protocol.messages.blob_messages import BlobPut, BlobPutReply
from edgefl_protocol.messages.key_messages import IndexReply, RotateReply, RotateRequest
from edgefl_protocol.messages.requests import (
    ROUTES,
    BundleReply,
    EnrolProofReply,
    EnrolReply,
    EnrolRequest,
    Refusal,
    ReplyReply,
    ReplyRequest,
    TaskReply,
)
from edgefl_protocol.records.coordinator_records import IndexEntry, make_index, make_key_record, make_time
from edgefl_protocol.records.invite import Invite
from edgefl_protocol.records.revocation import make_revoked
from edgefl_protocol.records.root import join_chain
from edgefl_protocol.records.rotation import OVERLAP_MS, verify_rotation

NOW_MS = 1_790_000_000_000
HOUR_MS = 3_600_000


@dataclass
class FakeCoordinator:
    """The server half of the protocol, in memory. `effects` counts what really happened."""

    now_ms: int = NOW_MS
    classes: tuple[str, ...] = ("MEL", "NV", "BCC")
    tokens: int = 36
    round: int = 1
    state: str = "open"
    line: str = "main"
    method: str = "fedevprompt"
    epochs: int = 0
    travels: tuple[str, ...] = ()
    stuck: str = ""
    effects: list[tuple[str, int, bytes]] = field(default_factory=list)
    bundles: dict[tuple[str, str, int], bytes] = field(default_factory=dict)
    refuse: dict[str, Refusal] = field(default_factory=dict)
    requests: list[Request] = field(default_factory=list)
    root_key_id: str | None = None  # what invites pin
    roots: list[bytes] = field(default_factory=list)
    revoked: list[str] = field(default_factory=list)  # key ids
    revoked_record: bytes | None = None  # an old list, sent in place of a fresh one
    until_ms: dict[str, int] = field(default_factory=dict)  # key id of an old key → until when it counts

    def __post_init__(self) -> None:
        self.signing, self.sealing = generate_signing_key(), generate_sealing_key(2)
        self.key_number = 1
        self.tokens_open: dict[bytes, str] = {}
        self.members: dict[str, SimpleNamespace] = {}
        self.window = ReplayWindow()
        self.answers: dict[tuple[str, str], tuple[str, Payload]] = {}
        self.replied: set[tuple[str, int]] = set()
        self.broadcasts: dict[int, Payload] = {}
        self.blobs: dict[tuple[str, str], bytearray] = {}

    def invite(self, name: str = "device-1", tls_sha256: str | None = None) -> Invite:
        token = random.Random(name).randbytes(32)
        self.tokens_open[token] = name
        return Invite(
            url="https://coordinator.example", federation="skin", coordinator_key_id=self.signing.key_id,
            root_key_id=self.root_key_id, tls_sha256=tls_sha256, token=token, name=name, role="device",
            expires_ms=self.now_ms + 24 * HOUR_MS,
        )  # fmt: skip

    def approve(self, name: str = "device-1") -> None:
        for member in self.members.values():
            if member.name == name:
                member.state = "approved"

    def send(self, request: Request) -> Answer:
        self.requests.append(request)
        if request.method == "GET":
            return Answer(status=200, body=self._plain(request))
        try:
            route = next(route for route in ROUTES.values() if route.path == request.path)
            opened, sealing = self._open(request.body, route.cty)
        except (EnvelopeError, StopIteration):
            return Answer(status=401, body=b'{"error":"refused"}\n')
        answer = self._judge(route.cty, opened)
        status = answer.status if isinstance(answer, Refusal) else 200
        payload = answer.to_payload() if isinstance(answer, Refusal) else answer
        fields = reply_fields(opened, sts=status, now_ms=self.now_ms)
        return Answer(status=status, body=seal(payload.to_bytes(), fields, self.signing, sealing))

    def _plain(self, request: Request) -> bytes:
        if request.path == "/v1/root":
            return join_chain(self.roots)
        if request.path == "/v1/time":
            return make_time(self.signing, request.query.removeprefix("nonce="), self.now_ms)
        return make_key_record(
            self.signing, "skin", self.sealing.public_key, self.key_number, self.now_ms, self.now_ms + 168 * HOUR_MS
        )

    def _open(self, body: bytes, cty: str) -> tuple[Opened, PublicSealingKey]:
        expected = Expected(pth=ROUTES[cty].path, fed="skin", typ="request", cty=cty)
        guard = SimpleNamespace(admit=lambda header, now_ms: None)
        if cty == "enrol":
            opened = open_enrolment(body, self.sealing, expected, self.now_ms, guard)
            request = EnrolRequest.from_payload(Payload.from_bytes(opened.payload))
            return opened, PublicSealingKey(request.sealing_suite, request.sealing_public)
        known = {
            skid: member.keys[skid]
            for skid, member in self.members.items()
            if self.now_ms <= self.until_ms.get(skid, self.now_ms)
        }
        opened = open_envelope(body, self.sealing, known, expected, self.now_ms, guard)
        return opened, self.members[opened.header.skid].sealing

    def _judge(self, cty: str, opened: Opened) -> Payload | Refusal:
        skid = opened.header.skid
        if (skid, opened.header.mid) in self.window._seen:
            return Refusal(code="replayed", message="seen before")
        try:
            self.window.admit(opened.header, self.now_ms)
        except ReplayError:  # another message under a number that was used
            return Refusal(code="seq_behind", message="sequence", highest=self.window._windows[skid][0])
        except SequenceError as error:
            return Refusal(code=error.code, message="sequence", highest=error.highest)
        if cty in self.refuse:
            return self.refuse[cty]
        payload = Payload.from_bytes(opened.payload)
        if cty.startswith("enrol"):
            return self._enrol(skid, payload)
        if self.members[skid].state != "approved":
            return Refusal(code="pending", message="not approved yet")
        return getattr(self, f"_{cty}")(skid, opened, payload)

    def _enrol(self, skid: str, payload: Payload) -> Payload | Refusal:
        if "nonce" in payload.scalars:
            member = self.members[skid]
            if payload.scalars["nonce"] != member.nonce.hex():
                return Refusal(code="bad_proof", message="wrong nonce")
            shown = fingerprint("skin", member.signing, member.sealing.public)
            return EnrolProofReply(state=member.state, fingerprint=shown).to_payload()
        request = EnrolRequest.from_payload(payload)
        if skid not in self.members:
            if self.tokens_open.pop(request.token, None) != request.name:
                return Refusal(code="used_invite", message="this invite was used")
            sealing = PublicSealingKey(request.sealing_suite, request.sealing_public)
            nonce = hashlib.sha256(skid.encode()).digest()
            self.members[skid] = SimpleNamespace(
                name=request.name, signing=request.signing_public, sealing=sealing, nonce=nonce, state="pending",
                keys={skid: request.signing_public},
            )  # fmt: skip
        return EnrolReply(state="pending", nonce=self.members[skid].nonce).to_payload()

    def _task(self, skid: str, *_: Any) -> Payload:
        return TaskReply(
            method=self.method, task="all", line=self.line, classes=self.classes, rounds=5, round=self.round,
            phase="train" if self.round else "", state=self.state, deadline_ms=self.now_ms + HOUR_MS,
            tokens=self.tokens, maps_per_class=5, quorum_min=1, quorum_target=4, max_reply_bytes=2**20,
            replied=(skid, self.round) in self.replied, settings={}, epochs=self.epochs,
            travels=self.travels, stuck=self.stuck,
        ).to_payload()  # fmt: skip

    def _broadcast(self, skid: str, opened: Opened, payload: Payload) -> Payload | Refusal:
        found = self.broadcasts.get(opened.header.rnd)
        return found or Refusal(code="small_cohort", message="fewer than 3 other sites contributed")

    def _reply(self, skid: str, opened: Opened, payload: Payload) -> Payload | Refusal:
        request = ReplyRequest.from_payload(payload)
        sha256 = hashlib.sha256(opened.payload).hexdigest()
        known = self.answers.get((skid, request.idem))
        if known is not None:
            return known[1] if known[0] == sha256 else Refusal(code="idem_conflict", message="other payload")
        if self.state != "open" or opened.header.rnd != self.round:
            return Refusal(code="round_closed", message="too late")
        if (skid, self.round) in self.replied:
            return Refusal(code="already_replied", message="another reply was accepted")
        content = self._content(skid, request.reply)
        if isinstance(content, Refusal):
            return content
        self.replied.add((skid, self.round))
        self.effects.append((self.members[skid].name, self.round, content))
        answer = ReplyReply(accepted=True, first_answer_ms=self.now_ms).to_payload()
        self.answers[skid, request.idem] = (sha256, answer)
        return answer

    def _content(self, skid: str, reply: Payload | BlobReference) -> bytes | Refusal:
        if isinstance(reply, Payload):
            return reply.to_bytes()
        held = bytes(self.blobs.get((skid, reply.blob), b""))
        return open_blob([held], reply) if len(held) == reply.size else Refusal(code="no_blob", message="send it")

    def _blob(self, skid: str, opened: Opened, payload: Payload) -> Payload:
        piece = BlobPut.from_payload(payload)
        held = self.blobs.setdefault((skid, piece.blob), bytearray())
        if piece.offset == len(held):
            held += piece.data
        return BlobPutReply(have=len(held), piece_bytes=2**22).to_payload()

    def _rotate(self, skid: str, opened: Opened, payload: Payload) -> Payload | Refusal:
        rotation = verify_rotation(RotateRequest.from_payload(payload).record, "skin")
        member = self.members[skid]
        if rotation.new.public != member.signing:
            if rotation.old.public != member.signing:
                return Refusal(code="replaced_key", message="replaced by another key")
            member.signing, member.sealing = rotation.new.public, rotation.sealing
            member.keys[rotation.new.key_id] = rotation.new.public
            self.members[rotation.new.key_id] = member
            self.until_ms[rotation.old.key_id] = self.now_ms + OVERLAP_MS
        shown = fingerprint("skin", member.signing, member.sealing.public)
        until_ms = self.until_ms[rotation.old.key_id]
        return RotateReply(old_until_ms=until_ms, fingerprint=shown).to_payload()

    def _index(self, *_: Any) -> Payload:
        entries = [
            IndexEntry(line=line, task=task, version=version, sha256=hashlib.sha256(data).hexdigest(), size=len(data))
            for (line, task, version), data in self.bundles.items()
        ]
        newest = {(entry.line, entry.task): entry for entry in sorted(entries)}
        index = make_index(self.signing, "skin", newest.values(), self.now_ms, self.now_ms + 24 * HOUR_MS)
        revoked = self.revoked_record or make_revoked(
            self.signing, "skin", len(self.revoked) + 1, self.revoked, self.now_ms, self.now_ms + 24 * HOUR_MS
        )
        return IndexReply(index=index, revoked=revoked).to_payload()

    def _bundle(self, skid: str, opened: Opened, payload: Payload) -> Payload | Refusal:
        wanted = tuple(payload.scalars[key] for key in ("line", "task", "version"))
        return BundleReply(bundle=self.bundles[wanted]).to_payload()  # type: ignore[index]


Fault = Callable[[Request, Callable[[Request], Answer]], Answer]


@dataclass
class Wire:
    """A transport that applies one fault per request, in order, and is a good wire after the last."""

    inner: Any
    faults: list[Fault | None] = field(default_factory=list)
    sent: list[Request] = field(default_factory=list)

    def send(self, request: Request) -> Answer:
        self.sent.append(request)
        fault = self.faults.pop(0) if self.faults else None
        return self.inner.send(request) if fault is None else fault(request, self.inner.send)


def cut_answer(request: Request, send: Callable[[Request], Answer]) -> Answer:
    """The coordinator acts; its answer never arrives."""
    send(request)
    raise Unavailable("the answer was cut off", "cut_off")


def lost_request(request: Request, send: Callable[[Request], Answer]) -> Answer:
    raise Unavailable("no connection", "unreachable")


def reply_of(value: float) -> Payload:
    return Payload({"maps.0": np.full((1, 36), value, np.float16)}, {"site_sha256": "0" * 64})
