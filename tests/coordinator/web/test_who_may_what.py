"""Check 25: every route for every kind of caller, and with the id of every other member's object."""

import hashlib
from typing import Any

import pytest

from edgefl_coordinator.rounds.aggregation import step
from edgefl_coordinator.web.operations import OPERATIONS
from edgefl_protocol import Payload, generate_sealing_key, generate_signing_key
from edgefl_protocol.envelopes.blob import BlobReference
from edgefl_protocol.messages.blob_messages import BlobGet, BlobPut, BlobPutReply
from edgefl_protocol.messages.key_messages import RotateRequest
from edgefl_protocol.messages.requests import (
    ROUTES,
    BroadcastRequest,
    BundleRequest,
    EnrolProofRequest,
    Refusal,
    ReplyRequest,
)
from edgefl_protocol.records.rotation import make_rotation

IDEM, BLOB = "work-item-00000001", "ab" * 16
PIECE = BlobPut(blob=BLOB, size=5000, sha256="0" * 64, offset=0, data=b"theirs")


@pytest.fixture
def federation(make_coordinator: Any) -> Any:
    return make_coordinator(rounds={"min_cohort": 1, "allow_small_cohort": True})


@pytest.fixture
def world(federation: Any, tools: Any) -> dict[str, Any]:
    """One caller of each kind, in the first round; `other` is the member whose objects the others name."""
    made = {
        "site": tools.approved_member(federation, "site"),
        "device": tools.approved_member(federation, "device", "device"),
        "other": tools.approved_member(federation, "other"),
        "revoked": tools.approved_member(federation, "revoked"),
        "pending": tools.Member(federation, "pending"),
        "unproved": tools.Member(federation, "unproved"),
        "stranger": tools.Member(federation, "stranger"),
    }
    made["pending"].enrol(tools.token_of(federation, "pending"))
    made["unproved"].call("enrol", made["unproved"].enrolment(tools.token_of(federation, "unproved")).to_payload())
    tools.start_rounds(federation)
    OPERATIONS["revoke"](federation, {"name": "revoked"})
    return made


def told(answer: Any) -> str:
    """`yes`, the code of a sealed refusal, or `401` of what was refused before its signature."""
    if isinstance(answer, Payload):
        return "yes"
    return answer.code if isinstance(answer, Refusal) else str(answer)


def asked(member: Any, cty: str, tools: Any) -> Payload:
    """What a member asks of each route on its own behalf."""
    payloads = {
        "enrol": lambda: member.enrolment(bytes(32)).to_payload(),
        "enrol-proof": lambda: EnrolProofRequest(idem=IDEM, nonce=bytes(32)).to_payload(),
        "broadcast": lambda: BroadcastRequest(round=1).to_payload(),
        "reply": lambda: ReplyRequest(idem=IDEM, reply=tools.maps_payload()).to_payload(),
        "blob": lambda: PIECE.to_payload(),
        "bundle": lambda: BundleRequest(line="none", task="none", version=1).to_payload(),
        "rotate": lambda: rotation_of(member),
    }
    return payloads.get(cty, Payload)()


def rotation_of(member: Any) -> Payload:
    record = make_rotation(
        member.signing, generate_signing_key(), generate_sealing_key(1).public_key, "skin", member.coordinator.clock()
    )
    return RotateRequest(idem=IDEM, record=record).to_payload()


# What each route answers to whom, where the caller names nothing of another member's. "yes" is what only the first row
# may get; an unknown invite, a wrong nonce and a bundle that is not there are no refusals of the caller.
OPEN = {"enrol": "unknown_invite", "enrol-proof": "bad_proof"}
ALLOWED = {**dict.fromkeys(ROUTES, "yes"), **OPEN, "bundle": "not_found"}
TABLE = {
    "site": ALLOWED,
    "device": ALLOWED,
    "pending": {**dict.fromkeys(ROUTES, "pending"), **OPEN},
    "unproved": {**dict.fromkeys(ROUTES, "not_approved"), **OPEN},
    "revoked": {**dict.fromkeys(ROUTES, "401"), "enrol": "unknown_invite"},
    "stranger": {**dict.fromkeys(ROUTES, "401"), "enrol": "unknown_invite"},
}


def test_every_route_for_every_caller(world: Any, tools: Any) -> None:
    """Check 25: the whole table, exactly; the change of keys comes last, for afterwards the old key has gone."""
    order = sorted(ROUTES, key=lambda cty: cty == "rotate")
    for who, row in TABLE.items():
        member = world[who]
        found = {cty: told(member.call(cty, asked(member, cty, tools), rnd=int(ROUTES[cty].in_round))) for cty in order}
        assert found == row, who


def reference(blob: str) -> BlobReference:
    return BlobReference(blob=blob, size=5000, sha256="0" * 64, key=bytes(32))


def test_every_object_of_another_member(world: Any, federation: Any, tools: Any) -> None:
    """Check 25: a blob under way, a work item, a nonce, a change of keys, an invite: each is its owner's alone, and is
    as it was afterwards."""
    other = world["other"]
    nonce = federation.derive("enrol-nonce", other.signing.key_id)  # what was sealed to it once
    assert BlobPutReply.from_payload(other.call("blob", PIECE.to_payload())).have == 6
    assert isinstance(other.reply(1, IDEM), Payload)
    invited = tools.token_of(federation, "newcomer")
    objects: dict[str, tuple[str, Payload, int, str]] = {
        "blob, to read": ("blob", BlobGet(blob=BLOB, offset=0, length=100).to_payload(), 0, "not_found"),
        "blob, as a reply": ("reply", ReplyRequest(idem="x" * 16, reply=reference(BLOB)).to_payload(), 1, "no_blob"),
        "nonce": ("enrol-proof", EnrolProofRequest(idem=IDEM, nonce=nonce).to_payload(), 0, "bad_proof"),
        "change of keys": ("rotate", rotation_of(other), 0, "bad_proof"),
    }
    for who in ("site", "device"):
        for name, (cty, payload, number, code) in objects.items():
            assert told(world[who].call(cty, payload, rnd=number)) == code, (who, name)
        # the same blob id and the same work item's key are another blob and another item
        mine = BlobPutReply.from_payload(world[who].call("blob", PIECE.to_payload()))
        assert mine.have == 6
        assert isinstance(world[who].reply(1, IDEM, tools.maps_payload(seed=7)), Payload)
        # another's invite: the name and role it was made for are part of it
        token = world[who].enrolment(invited)
        assert told(world[who].call("enrol", token.to_payload())) == "unknown_invite"
    more = BlobPut(blob=BLOB, size=5000, sha256="0" * 64, offset=6, data=b"more")
    assert BlobPutReply.from_payload(other.call("blob", more.to_payload())).have == 10
    assert told(other.reply(1, IDEM)) == "yes"  # the first answer, for the same content


def test_a_broadcast_holds_the_others_and_is_ones_own(world: Any, federation: Any, tools: Any) -> None:
    """Check 25: the same request gets each member its own broadcast, and no later or earlier round's."""
    for seed, who in enumerate(("site", "device", "other")):
        assert isinstance(world[who].reply(1, payload=tools.maps_payload(seed)), Payload)
    federation.clock.now_ms += 61_000
    assert step(federation, tools.toy_worker)
    digests = {}
    for who in ("site", "device", "other"):
        found = world[who].call("broadcast", BroadcastRequest(round=2).to_payload(), rnd=2)
        assert isinstance(found, Payload), found
        digests[who] = hashlib.sha256(found.to_bytes()).hexdigest()
        for number, code in ((1, "round_closed"), (3, "no_round")):
            assert told(world[who].call("broadcast", BroadcastRequest(round=number).to_payload(), rnd=number)) == code
        wrong = world[who].call("broadcast", BroadcastRequest(round=2).to_payload(), rnd=1)
        assert told(wrong) == "bad_message"
    assert len(set(digests.values())) == 3
