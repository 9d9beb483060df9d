"""Enrolment: docs/security.md checks 9, 21, 22 and 24."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from edgefl_coordinator import members
from edgefl_coordinator.errors import OperatorError, PolicyError
from edgefl_coordinator.operations import OPERATIONS
from edgefl_coordinator.schema import invites
from edgefl_protocol import Payload
from edgefl_protocol.messages import ROUTES, EmptyRequest, EnrolProofRequest, EnrolReply, Refusal

HOUR_MS = 3_600_000


def enrolled(coordinator: Any) -> list[str]:
    with coordinator.store.transaction() as connection:
        return [member.name for member in members.listed(connection)]


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
    assert isinstance(answer, Refusal) and answer.code == "expired_invite"
    assert enrolled(coordinator) == []


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
    from edgefl_coordinator.handling import handle

    answer = handle(coordinator, ROUTES["enrol"], request)
    with pytest.raises(Exception, match="another key"):
        thief.open(request, answer.body)
    thief.sealing = victim.sealing  # only to read the refusal
    guess = EnrolProofRequest(idem="p" * 16, nonce=b"\0" * 32)
    refused = thief.call("enrol-proof", guess.to_payload())
    assert isinstance(refused, Refusal) and refused.code == "bad_proof"
    with pytest.raises(OperatorError, match="not proved"):
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
    with pytest.raises(PolicyError, match="fingerprint"):
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


def test_low_order_keys_do_not_enrol(coordinator, tools) -> None:
    """Check 9 at enrolment: a signing or sealing key of low order gets the one 401, and no enrolment."""
    token = tools.token_of(coordinator, "clinic-a")
    member = tools.Member(coordinator, "clinic-a")
    for change in ({"signing_public": bytes(32)}, {"sealing_public": bytes(32)}, {"sealing_public": b"\1" + bytes(31)}):
        assert member.call("enrol", member.enrolment(token, **change).to_payload()) == 401
    assert enrolled(coordinator) == []


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
    with pytest.raises(PolicyError, match="fingerprint"):
        OPERATIONS["approve"](coordinator, {"name": "clinic-a", "fingerprint": wrong})
    assert OPERATIONS["approve"](coordinator, {"name": "clinic-a", "fingerprint": right})["state"] == "approved"


def test_a_new_invite_ends_the_older_ones(coordinator, clock, tools) -> None:
    """Check 21: one living invite a name; a name that is taken is a typed refusal, however the invite came about."""
    older, newer = tools.token_of(coordinator, "clinic-a"), tools.token_of(coordinator, "clinic-a")
    late = tools.Member(coordinator, "clinic-a")
    answer = late.call("enrol", late.enrolment(older).to_payload())
    assert isinstance(answer, Refusal) and answer.code == "expired_invite"
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
