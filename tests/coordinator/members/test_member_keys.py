"""A member's change of keys and its revocation, at the coordinator (docs/security.md 2.6.4 and 2.6.5)."""

import itertools
from typing import Any

import pytest

from edgefl_coordinator.web.operations import OPERATIONS
from edgefl_protocol import (
    Payload,
    SealingKey,
    SigningKey,
    fingerprint,
    generate_sealing_key,
    generate_signing_key,
)
from edgefl_protocol.messages.key_messages import IndexReply, RotateReply, RotateRequest
from edgefl_protocol.messages.requests import Refusal
from edgefl_protocol.records.record_form import make_several
from edgefl_protocol.records.revocation import verify_revoked
from edgefl_protocol.records.rotation import OVERLAP_MS, make_rotation

pytestmark = pytest.mark.both_databases

IDEM = "rotation-00000001"


class Rotating:
    """A member with its next keys."""

    def __init__(self, member: Any) -> None:
        self.member, self.old, self.old_box = member, member.signing, member.sealing
        self.new, self.box = generate_signing_key(), generate_sealing_key(1)

    def request(self, **changes: Any) -> Payload:
        keys = {"old": self.old, "new": self.new, "sealing": self.box.public_key, **changes}
        now_ms = self.member.coordinator.clock()
        record = make_rotation(keys["old"], keys["new"], keys["sealing"], "skin", now_ms)
        return RotateRequest(idem=IDEM, record=record).to_payload()

    def speak(self, signing: SigningKey, box: SealingKey, cty: str = "task", payload: Payload | None = None) -> Any:
        """Ask under given keys; each key counts its own messages."""
        self.member.signing, self.member.sealing = signing, box
        self.member.counter = counters.setdefault(signing.key_id, itertools.count(1000))
        return self.member.call(cty, Payload() if payload is None else payload)


counters: dict[str, Any] = {}


@pytest.fixture
def rotating(coordinator, tools) -> Rotating:
    return Rotating(tools.approved_member(coordinator, "clinic-a"))


def test_the_old_key_counts_for_seven_days_and_the_new_one_at_once(rotating, clock) -> None:
    """docs/security.md check 23: old key accepted inside the overlap, refused after; judged at `iat`, to the ms."""
    one = rotating
    answer = one.speak(one.old, one.old_box, "rotate", one.request())
    found = RotateReply.from_payload(answer)
    assert found.old_until_ms == clock.now_ms + OVERLAP_MS
    assert found.fingerprint == fingerprint("skin", one.new.public, one.box.public)
    assert isinstance(one.speak(one.new, one.box), Payload)
    for at_ms, counts in ((found.old_until_ms, True), (found.old_until_ms + 1, False)):
        clock.now_ms = at_ms
        assert (one.speak(one.old, one.box) != 401) is counts  # answers are sealed for the new key
    assert isinstance(one.speak(one.new, one.box), Payload)


def test_a_lost_answer_is_asked_for_again_under_either_key(rotating, clock) -> None:
    """docs/security.md check 23: the same change again changes nothing; after the overlap the new key may ask."""
    one = rotating
    first = one.speak(one.old, one.old_box, "rotate", one.request())
    again = one.speak(one.old, one.box, "rotate", one.request())
    assert first == again
    clock.now_ms += OVERLAP_MS + 1
    assert one.speak(one.old, one.box, "rotate", one.request()) == 401
    assert one.speak(one.new, one.box, "rotate", one.request()) == first
    with one.member.coordinator.store.transaction() as connection:
        assert connection.exec_driver_sql("SELECT COUNT(*) FROM audit WHERE event = 'keys_rotated'").scalar() == 1


def test_who_may_change_which_keys(rotating, coordinator, tools) -> None:
    """docs/security.md checks 22 and 23: no proof of either key, a known key, another's keys: 0 changed."""
    one, other = rotating, tools.approved_member(coordinator, "clinic-b")
    stranger = generate_signing_key()

    def refused(payload: Payload) -> str:
        answer = one.speak(one.old, one.old_box, "rotate", payload)
        assert isinstance(answer, Refusal)
        return answer.code

    body = {
        "federation": "skin", "old": one.old.public.hex(), "new": one.new.public.hex(), "suite": 1,
        "sealing": one.box.public.hex(), "issued_ms": 1,
    }  # fmt: skip
    for signers in ([one.old], [one.new], [one.old, stranger]):
        record = make_several(signers, "eflm1/rotate", body)
        assert refused(RotateRequest(idem=IDEM, record=record).to_payload()) == "bad_proof"
    assert refused(one.request(old=other.signing)) == "bad_proof"
    assert refused(one.request(old=stranger)) == "bad_proof"
    assert refused(one.request(new=other.signing)) == "known_key"
    assert refused(one.request(sealing=other.sealing.public_key)) == "known_key"
    assert refused(Payload({}, {"idem": IDEM})) == "bad_message"
    assert isinstance(one.speak(one.old, one.old_box), Payload)
    pending = tools.Member(coordinator, "clinic-c")
    pending.enrol(tools.token_of(coordinator, "clinic-c"))
    answer = pending.call("rotate", one.request())
    assert isinstance(answer, Refusal) and answer.code == "pending"


def test_a_replaced_key_cannot_be_changed_again(rotating) -> None:
    """A thief of the old key cannot take the membership over inside the overlap."""
    one = rotating
    one.speak(one.old, one.old_box, "rotate", one.request())
    theft = one.request(new=generate_signing_key(), sealing=generate_sealing_key(1).public_key)
    answer = one.speak(one.old, one.box, "rotate", theft)
    assert isinstance(answer, Refusal) and answer.code == "replaced_key"
    again = one.request(old=one.new, new=one.old)
    answer = one.speak(one.new, one.box, "rotate", again)
    assert isinstance(answer, Refusal) and answer.code == "known_key"  # a key enters once


def test_one_member_replies_once_whichever_key_it_uses(rotating, coordinator, tools) -> None:
    """A change of keys inside a round makes no second member, and the reply of before stands."""
    one = rotating
    tools.start_rounds(coordinator)
    assert isinstance(one.member.reply(1, idem="before-0000000001"), Payload)
    one.speak(one.old, one.old_box, "rotate", one.request())
    one.speak(one.new, one.box)
    answer = one.member.reply(1, idem="after-00000000001")
    assert isinstance(answer, Refusal) and answer.code == "already_replied"
    assert isinstance(one.member.reply(1, idem="before-0000000001"), Payload)  # the first answer, sealed anew
    status = OPERATIONS["status"](coordinator, {})
    assert [(member["name"], member["replied"]) for member in status["members"]] == [("clinic-a", True)]
    assert status["members"][0]["fingerprint"] == fingerprint("skin", one.new.public, one.box.public)


def test_revocation_refuses_every_key_on_the_next_request(rotating, coordinator, clock, tools) -> None:
    """docs/security.md check 24: old and new key refused on the next request; both stand in the signed list."""
    one = rotating
    witness = tools.approved_member(coordinator, "clinic-b")

    def listed() -> tuple[int, frozenset[str]]:
        reply = IndexReply.from_payload(witness.call("index", Payload()))
        found = verify_revoked(reply.revoked, coordinator.keys.signing.public_key, "skin", clock.now_ms)
        assert found.expires_ms - found.issued_ms == 24 * 3600 * 1000
        return found.version, found.key_ids

    assert listed() == (1, frozenset())
    tools.start_rounds(coordinator)
    one.speak(one.old, one.old_box, "rotate", one.request())
    one.speak(one.new, one.box)
    assert isinstance(one.member.reply(1), Payload)
    OPERATIONS["revoke"](coordinator, {"name": "clinic-a"})
    assert one.speak(one.new, one.box) == one.speak(one.old, one.box) == 401
    assert one.speak(one.new, one.box, "rotate", one.request()) == 401
    assert listed() == (3, {one.old.key_id, one.new.key_id})
    assert OPERATIONS["status"](coordinator, {})["replies"] == 0  # its reply of the open round is dropped
    signer = generate_signing_key()
    OPERATIONS["revoke_signer"](coordinator, {"key_id": signer.key_id})
    OPERATIONS["revoke_signer"](coordinator, {"key_id": signer.key_id})
    assert listed() == (4, {one.old.key_id, one.new.key_id, signer.key_id})


def test_a_revoked_signers_bundle_is_not_the_current_one(coordinator) -> None:
    """docs/security.md check 26, fast-forward: the number that a thief took does not stay in the way."""
    from edgefl_coordinator.errors import OperatorError
    from edgefl_coordinator.store import publishing, revocations

    good, thief = "a" * 64, "b" * 64

    def publish(version: int, *signers: str) -> None:
        blob = coordinator.store.put_blob(f"bundle {version}".encode())
        with coordinator.store.transaction() as connection:
            publishing.publish(connection, 0, line="main", task="nevus", version=version, bundle_id="x", blob=blob,
                               signers=signers)  # fmt: skip

    def current() -> list[int]:
        with coordinator.store.transaction() as connection:
            return [entry.version for entry in publishing.entries(connection)]

    publish(1, good)
    publish(2**31, thief)
    assert current() == [2**31]
    with coordinator.store.transaction() as connection:
        revocations.revoke_signer(connection, 0, thief)
    assert current() == [1]
    publish(2, good, thief)  # one good signature is enough
    assert current() == [2]
    for version, signers in ((3, (thief,)), (2, (good,)), (2**31, (good,))):
        with pytest.raises(OperatorError):
            publish(version, *signers)
