"""Enrolment: docs/security.md checks 9, 21, 22 and 24."""

import hashlib
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey

from edgefl_coordinator.errors import NotAllowedError, OperatorError
from edgefl_coordinator.members import membership
from edgefl_coordinator.store import audit
from edgefl_coordinator.store.tables import invites
from edgefl_coordinator.web.operations import OPERATIONS
from edgefl_protocol import Payload
from edgefl_protocol.messages.requests import ROUTES, EmptyRequest, EnrolProofRequest, EnrolReply, Refusal
from edgefl_protocol.pae import pae

pytestmark = pytest.mark.both_databases

HOUR_MS = 3_600_000


def enrolled(coordinator: Any) -> list[str]:
    with coordinator.store.transaction() as connection:
        return [member.name for member in membership.listed(connection)]


def test_the_whole_way_in(coordinator, tools) -> None:
    """Check 21 and 22, the good case: invite, keys, nonce, fingerprint, approval."""
    member = tools.Member(coordinator, "clinic-a", suite=2)
    proof = member.enrol(tools.token_of(coordinator, "clinic-a"))
    assert proof.state == "pending"
    assert member.call("task", EmptyRequest().to_payload()).code == "pending"
    OPERATIONS["approve"](coordinator, {"name": "clinic-a", "fingerprint": proof.fingerprint.lower()})
    assert isinstance(member.call("task", EmptyRequest().to_payload()), Payload)


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"token": b"\0" * 32}, "unknown_invite"),
        ({"name": "somebody-else"}, "unknown_invite"),
        ({"role": "device"}, "unknown_invite"),
    ],
)
def test_an_invite_fits_one_token_name_and_role(coordinator, tools, change, code) -> None:
    """Check 21: wrong token, other name, other role."""
    member = tools.Member(coordinator, "clinic-a")
    request = member.enrolment(tools.token_of(coordinator, "clinic-a"), **change)
    answer = member.call("enrol", request.to_payload())
    assert isinstance(answer, Refusal) and answer.code == code and answer.status == 403
    assert enrolled(coordinator) == []


def test_an_expired_invite(coordinator, clock, tools) -> None:
    """Check 21: expired."""
    member = tools.Member(coordinator, "clinic-a")
    token = tools.token_of(coordinator, "clinic-a", hours=1)
    clock.now_ms += HOUR_MS
    answer = member.call("enrol", member.enrolment(token).to_payload())
    assert isinstance(answer, Refusal) and answer.code == "expired_invite" and "has expired" in answer.message
    assert enrolled(coordinator) == []


def test_a_withdrawn_invite(coordinator, clock, tools) -> None:
    """Check 21: an invite that fell into wrong hands lets nobody in. Of one that was used the member is shut out; an
    expired one is nothing to withdraw."""
    member = tools.Member(coordinator, "clinic-a")
    token = tools.token_of(coordinator, "clinic-a")
    assert OPERATIONS["revoke"](coordinator, {"name": "clinic-a"})["state"] == "withdrawn"
    answer = member.call("enrol", member.enrolment(token).to_payload())
    assert isinstance(answer, Refusal) and answer.code == "unknown_invite" and enrolled(coordinator) == []
    member.enrol(tools.token_of(coordinator, "clinic-a"))
    assert OPERATIONS["revoke"](coordinator, {"name": "clinic-a"})["state"] == "revoked"
    tools.token_of(coordinator, "clinic-a", hours=1)
    clock.now_ms += HOUR_MS
    with pytest.raises(OperatorError, match="clinic-a is shut out already; a new invite for that name makes a new"):
        OPERATIONS["revoke"](coordinator, {"name": "clinic-a"})


def test_an_invite_of_another_federation(make_coordinator, tools) -> None:
    """Check 21: other federation. Its token is unknown here, and an envelope for it is refused before the signature."""
    here, there = make_coordinator("here"), make_coordinator("there", federation="bone")
    token = tools.token_of(there, "clinic-a")
    member = tools.Member(here, "clinic-a")
    answer = member.call("enrol", member.enrolment(token).to_payload())
    assert isinstance(answer, Refusal) and answer.code == "unknown_invite"
    wrong = member.envelope("enrol", member.enrolment(token).to_payload(), fed="bone")
    assert member.send("enrol", wrong) == 401
    assert enrolled(here) == []


def test_twenty_at_once_with_one_token(coordinator, tools) -> None:
    """Check 21: 20 parallel uses of one token give exactly one enrolment."""
    token = tools.token_of(coordinator, "clinic-a")
    crowd = [tools.Member(coordinator, "clinic-a") for _ in range(20)]
    with ThreadPoolExecutor(20) as pool:
        answers = list(pool.map(lambda one: one.call("enrol", one.enrolment(token).to_payload()), crowd))
    assert sum(isinstance(answer, Payload) for answer in answers) == 1
    assert {answer.code for answer in answers if isinstance(answer, Refusal)} == {"used_invite"}
    assert enrolled(coordinator) == ["clinic-a"]


def test_the_same_newcomer_may_ask_again(coordinator, tools) -> None:
    """Check 19 at the door: a lost answer is asked for again, with the same nonce and one enrolment."""
    token = tools.token_of(coordinator, "clinic-a")
    member = tools.Member(coordinator, "clinic-a")
    answers = [member.call("enrol", member.enrolment(token).to_payload()) for _ in range(5)]
    assert len({EnrolReply.from_payload(answer).nonce for answer in answers}) == 1
    assert enrolled(coordinator) == ["clinic-a"]


def test_no_proof_of_the_signing_key(coordinator, tools) -> None:
    """Check 22: an enrolment that names a key its sender does not hold is refused like a broken envelope."""
    token = tools.token_of(coordinator, "clinic-a")
    thief, victim = tools.Member(coordinator, "clinic-a"), tools.Member(coordinator, "clinic-a")
    request = thief.enrolment(token, signing_public=victim.signing.public)
    assert thief.call("enrol", request.to_payload()) == 401
    assert enrolled(coordinator) == []


def test_no_proof_of_the_sealing_key(coordinator, tools) -> None:
    """Check 22: whoever names another's sealing key cannot return the nonce, and is never approved."""
    token = tools.token_of(coordinator, "clinic-a")
    thief, victim = tools.Member(coordinator, "clinic-a"), tools.Member(coordinator, "clinic-b")
    request = thief.envelope("enrol", thief.enrolment(token, sealing_public=victim.sealing.public).to_payload())
    from edgefl_coordinator.web.sealed_requests import handle

    answer = handle(coordinator, ROUTES["enrol"], request)
    with pytest.raises(Exception, match="another key"):
        thief.open(request, answer.body)
    thief.sealing = victim.sealing  # only to read the refusal
    guess = EnrolProofRequest(idem="p" * 16, nonce=b"\0" * 32)
    refused = thief.call("enrol-proof", guess.to_payload())
    assert isinstance(refused, Refusal) and refused.code == "bad_proof"
    with pytest.raises(OperatorError, match="not finished"):
        OPERATIONS["approve"](coordinator, {"name": "clinic-a", "fingerprint": "0" * 20})


def test_a_known_key_enters_once(coordinator, tools) -> None:
    """Check 22: a key that is already known makes no second enrolment."""
    member = tools.approved_member(coordinator, "clinic-a")
    again = tools.Member(coordinator, "clinic-b", signing=member.signing)
    answer = again.call("enrol", again.enrolment(tools.token_of(coordinator, "clinic-b")).to_payload())
    assert again.sealing is not member.sealing
    assert isinstance(answer, Refusal) and answer.code == "known_key"
    twin = tools.Member(coordinator, "clinic-c", sealing=member.sealing)
    answer = twin.call("enrol", twin.enrolment(tools.token_of(coordinator, "clinic-c")).to_payload())
    assert isinstance(answer, Refusal) and answer.code == "known_key"
    assert enrolled(coordinator) == ["clinic-a"]


def test_a_wrong_fingerprint_lets_nobody_in(coordinator, tools) -> None:
    """Check 22: fingerprint mismatch."""
    member = tools.Member(coordinator, "clinic-a")
    proof = member.enrol(tools.token_of(coordinator, "clinic-a"))
    wrong = ("1" if proof.fingerprint[0] != "1" else "2") + proof.fingerprint[1:]
    with pytest.raises(NotAllowedError, match="fingerprint"):
        OPERATIONS["approve"](coordinator, {"name": "clinic-a", "fingerprint": wrong})
    assert member.call("task", EmptyRequest().to_payload()).code == "pending"


def test_a_pending_member_may_call_one_route(coordinator, tools) -> None:
    """Check 22: every route but the proof refuses a pending member."""
    member = tools.Member(coordinator, "clinic-a")
    member.enrol(tools.token_of(coordinator, "clinic-a"))
    requests = {
        "task": Payload(), "index": Payload(), "keys": Payload(), "broadcast": Payload({}, {"round": 1}),
        "bundle": Payload({}, {"line": "main", "task": "nevus", "version": 1}),
    }  # fmt: skip
    for route, payload in requests.items():
        assert member.call(route, payload, rnd=0).code == "pending", route
    assert member.reply(1).code == "pending"


# All encodings of the eight Ed25519 points of low order: 8 canonical and 6 others (C2SP/CCTV, ed25519).
ORDER_8 = (
    "26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc{}",
    "c7176a703d4dd84fba3c0b760d10670f2a2053fa2c39ccc64ec7fd7792ac03{}",
)
ED25519_LOW = [bytes.fromhex(text) for text in [
    "00" * 31 + "00", "00" * 31 + "80", "01" + "00" * 31, "01" + "00" * 30 + "80",
    "ec" + "ff" * 30 + "7f", "ec" + "ff" * 30 + "ff", "ed" + "ff" * 30 + "7f", "ed" + "ff" * 30 + "ff",
    "ee" + "ff" * 30 + "7f", "ee" + "ff" * 30 + "ff",
    ORDER_8[0].format("05"), ORDER_8[0].format("85"), ORDER_8[1].format("7a"), ORDER_8[1].format("fa"),
]]  # fmt: skip
# All u coordinates of low order, canonical or not, without and with the top bit that X25519 ignores (RFC 7748, CCTV).
X25519_LOW = [bytes.fromhex(text[:-2]) + bytes([int(text[-2:], 16) | top]) for top in (0, 128) for text in [
    "00" * 32, "01" + "00" * 31, "ec" + "ff" * 30 + "7f", "ed" + "ff" * 30 + "7f", "ee" + "ff" * 30 + "7f",
    "e0eb7a7c3b41b8ae1656e3faf19fc46ada098deb9c32b1fd866205165f49b800",
    "5f9c95bca3508c24b1d0b1559c83ef5b04445cc4581c8e86d8224eddd09f1157",
]]  # fmt: skip


class Forger:
    """Signs without a private key, under a public key of low order: S = 0, and R one of the eight points."""

    def __init__(self, public: bytes) -> None:
        self.public = public
        self.key_id = hashlib.sha256(pae(b"\x01", b"sign", public)).hexdigest()
        self.forged = False

    def sign(self, label: str, *parts: bytes) -> bytes:
        message = pae(label.encode(), *parts)
        for point in ED25519_LOW:
            try:
                Ed25519PublicKey.from_public_bytes(self.public).verify(point + bytes(32), message)
            except InvalidSignature:
                continue
            self.forged = True
            return point + bytes(32)
        return bytes(64)


def test_the_lists_of_low_order_keys_are_whole() -> None:
    """Check 9: 14 Ed25519 encodings; 7 u coordinates with and without the top bit, each with a zero secret."""
    assert len(set(ED25519_LOW)) == len(set(X25519_LOW)) == 14
    private = X25519PrivateKey.generate()
    for public in X25519_LOW:
        with pytest.raises(ValueError, match="shared"):
            private.exchange(X25519PublicKey.from_public_bytes(public))


@pytest.mark.parametrize("public", ED25519_LOW, ids=bytes.hex)
def test_a_low_order_signing_key_does_not_enrol(coordinator, tools, caplog, public) -> None:
    """Check 9 at enrolment: key id, invite and signature fit (the library accepts the forged one), and it is the key's
    order for which the newcomer is refused, with the one 401."""
    token = tools.token_of(coordinator, "clinic-a")
    member = tools.Member(coordinator, "clinic-a", signing=Forger(public))
    while not member.signing.forged:  # depends on the message's hash, so on its random id
        request = member.envelope("enrol", member.enrolment(token).to_payload())
    with caplog.at_level("INFO", logger="edgefl_coordinator"):
        assert member.send("enrol", request) == 401
    assert [record.getMessage() for record in caplog.records] == ["refused before the signature: enrol low_order_key"]
    assert enrolled(coordinator) == []


@pytest.mark.parametrize("suite", [1, 2])
def test_a_low_order_sealing_key_does_not_enrol(coordinator, tools, caplog, suite) -> None:
    """Check 9 at enrolment: the X25519 key, alone or in the hybrid, of a newcomer that is right in all else."""
    token = tools.token_of(coordinator, "clinic-a")
    member = tools.Member(coordinator, "clinic-a", suite=suite)
    with caplog.at_level("INFO", logger="edgefl_coordinator"):
        for public in X25519_LOW:
            request = member.enrolment(token, sealing_public=member.sealing.public[:-32] + public)
            assert member.call("enrol", request.to_payload()) == 401
    told = [record.getMessage() for record in caplog.records]
    assert told == ["refused before the signature: enrol low_order_key"] * 14
    assert enrolled(coordinator) == []
    assert isinstance(member.call("enrol", member.enrolment(token).to_payload()), Payload)


def test_revocation_holds_from_the_next_request(coordinator, tools) -> None:
    """Check 24: a revoked member is refused at once, and its name is free for a new enrolment."""
    member = tools.approved_member(coordinator, "clinic-a")
    assert isinstance(member.call("task", Payload()), Payload)
    OPERATIONS["revoke"](coordinator, {"name": "clinic-a"})
    assert member.call("task", Payload()) == 401
    tools.approved_member(coordinator, "clinic-a")


def test_an_approved_name_gets_no_second_invite(coordinator, tools) -> None:
    tools.approved_member(coordinator, "clinic-a")
    with pytest.raises(OperatorError, match="revoke"):
        tools.token_of(coordinator, "clinic-a")


def test_approving_again_compares_again(coordinator, tools) -> None:
    """Check 22: a second `approve` with another fingerprint is refused, although the member is in."""
    member = tools.Member(coordinator, "clinic-a")
    right = member.enrol(tools.token_of(coordinator, "clinic-a")).fingerprint
    OPERATIONS["approve"](coordinator, {"name": "clinic-a", "fingerprint": right})
    wrong = ("1" if right[0] != "1" else "2") + right[1:]
    with pytest.raises(NotAllowedError, match="fingerprint"):
        OPERATIONS["approve"](coordinator, {"name": "clinic-a", "fingerprint": wrong})
    assert OPERATIONS["approve"](coordinator, {"name": "clinic-a", "fingerprint": right})["state"] == "approved"


def at_once(*works: Callable[[], Any]) -> list[Any]:
    """Do works at once, each in a thread of its own; what each returned or raised."""
    barrier = threading.Barrier(len(works))

    def one(work: Callable[[], Any]) -> Any:
        barrier.wait(20)
        try:
            return work()
        except OperatorError as error:
            return error

    with ThreadPoolExecutor(len(works)) as pool:
        return list(pool.map(one, works))


def test_operators_who_approve_at_once(coordinator, tools) -> None:
    """Eight, of whom two compared wrongly: the member is let in once, and the log tells of the two."""
    newcomer = tools.Member(coordinator, "clinic-a")
    right = newcomer.enrol(tools.token_of(coordinator, "clinic-a")).fingerprint
    typed = [right] * 6 + ["0" * 20] * 2
    approve = OPERATIONS["approve"]
    found = at_once(*(partial(approve, coordinator, {"name": "clinic-a", "fingerprint": one}) for one in typed))
    assert [one["state"] for one in found[:6]] == ["approved"] * 6
    assert [type(one) for one in found[6:]] == [NotAllowedError] * 2
    with coordinator.store.transaction() as connection:
        log = Counter(row.event for row in audit.kept_rows(connection))
    assert (log["approved"], log["fingerprint_mismatch"]) == (1, 2)
    assert isinstance(newcomer.call("task", Payload()), Payload)


def test_an_operator_who_approves_while_another_shuts_out(coordinator, tools) -> None:
    """Whoever comes first, the member ends shut out, and the log tells in which order it went."""
    for number in range(4):
        name = f"clinic-{number}"
        newcomer = tools.Member(coordinator, name)
        right = newcomer.enrol(tools.token_of(coordinator, name)).fingerprint
        approved, revoked = at_once(
            partial(OPERATIONS["approve"], coordinator, {"name": name, "fingerprint": right}),
            partial(OPERATIONS["revoke"], coordinator, {"name": name}),
        )
        assert revoked["state"] == "revoked" and newcomer.call("task", Payload()) == 401
        with coordinator.store.transaction() as connection:
            log = [row.event for row in audit.kept_rows(connection) if row.subject == name]
        told = [event for event in log if event in ("approved", "revoked")]
        assert told == (["revoked"] if isinstance(approved, OperatorError) else ["approved", "revoked"])


def test_a_new_invite_ends_the_older_ones(coordinator, clock, tools) -> None:
    """Check 21: one living invite a name; a name that is taken is a typed refusal, however the invite came about."""
    older, newer = tools.token_of(coordinator, "clinic-a"), tools.token_of(coordinator, "clinic-a")
    late = tools.Member(coordinator, "clinic-a")
    answer = late.call("enrol", late.enrolment(older).to_payload())
    assert isinstance(answer, Refusal) and answer.code == "expired_invite" and "a newer invite" in answer.message
    tools.Member(coordinator, "clinic-a").enrol(newer)
    with coordinator.store.transaction() as connection:
        connection.execute(invites.update().where(invites.c.used_by.is_(None)).values(expires_ms=clock() + HOUR_MS))
    answer = late.call("enrol", late.enrolment(older).to_payload())
    assert isinstance(answer, Refusal) and answer.code == "used_invite"


def test_a_round_only_where_there_is_one(coordinator, tools) -> None:
    """docs/security.md, envelope: `rnd` is 0 on routes without a round, and anything else is refused sealed."""
    newcomer = tools.Member(coordinator, "clinic-b")
    request = newcomer.enrolment(tools.token_of(coordinator, "clinic-b")).to_payload()
    assert newcomer.call("enrol", request, rnd=1).code == "bad_message"
    member = tools.approved_member(coordinator, "clinic-a")
    for route in ("task", "index", "keys"):
        assert member.call(route, Payload(), rnd=1).code == "bad_message", route
        assert isinstance(member.call(route, Payload()), Payload)
