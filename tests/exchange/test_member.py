"""Enrolment and calls against a coordinator in memory, over a wire that cuts, forges and swaps."""

import dataclasses
import os

import pytest

from edgefl_client.commands.failures import exit_code
from edgefl_exchange.enrolment import EnrolmentError, enrol
from edgefl_exchange.errors import ExchangeError, NotEnrolled, SignedRefusal, Unavailable
from edgefl_exchange.identity import BLOCK
from edgefl_exchange.member import Member
from edgefl_exchange.membership import load_membership, load_task
from edgefl_exchange.outbox import Outbox
from edgefl_exchange.transport import Answer
from edgefl_protocol import Payload, fingerprint, generate_sealing_key, generate_signing_key
from edgefl_protocol.errors import RecordError, StorageError
from edgefl_protocol.messages.requests import Refusal

KEY = bytes(32)


def quick(folder, transport, **options):
    return Member(folder, lambda _: transport, sleep=lambda _: None, lock_wait_s=0.2, **options)


def test_enrolment_ends_pending_with_the_fingerprint_of_both(coordinator, folder, net):
    """docs/security.md, enrolment, steps 1 to 3."""
    membership = enrol(folder, coordinator.invite(), coordinator, clock_ms=lambda: net.NOW_MS)
    (member,) = coordinator.members.values()
    assert membership.state == "pending"
    assert membership.fingerprint == fingerprint("skin", member.signing, member.sealing.public)
    assert member.sealing.suite == 2
    assert load_membership(folder) == membership
    with quick(folder, coordinator, clock_ms=lambda: net.NOW_MS) as one, pytest.raises(NotEnrolled, match="approved"):
        one.task()
    coordinator.approve()
    with quick(folder, coordinator, clock_ms=lambda: net.NOW_MS) as one:
        assert one.task().classes == coordinator.classes
    assert load_membership(folder).state == "approved"
    assert load_task(folder).tokens == 36


@pytest.mark.parametrize("cut", range(4))
def test_enrolment_goes_on_after_a_cut_at_every_request(coordinator, folder, net, cut):
    """docs/security.md, check 19 for enrolment: same invite, same keys, one member."""
    wire = net.Wire(coordinator, faults=[None] * cut + [net.cut_answer] * 4)
    invite = coordinator.invite()
    with pytest.raises(Unavailable):
        enrol(folder, invite, wire, clock_ms=lambda: net.NOW_MS, sleep=lambda _: None)
    membership = enrol(folder, invite, coordinator, clock_ms=lambda: net.NOW_MS, sleep=lambda _: None)
    assert membership.state == "pending"
    assert len(coordinator.members) == 1
    again = enrol(folder, invite, coordinator, clock_ms=lambda: net.NOW_MS)
    assert again == membership


def test_the_token_is_never_sealed_for_another_coordinator(coordinator, folder, net):
    """docs/security.md, enrolment step 1: a key record not signed by the pinned key is refused first."""
    other = net.FakeCoordinator()
    with pytest.raises(RecordError) as error:
        enrol(folder, coordinator.invite(), other, clock_ms=lambda: net.NOW_MS)
    assert exit_code(error.value) == 3
    assert [request.method for request in other.requests] == ["GET"]


@pytest.mark.parametrize("body", [b"<html><h1>503 Service Unavailable</h1></html>", b"", b'{"error":"busy"}', b"A.B"])
def test_a_page_that_is_no_record_means_try_again_later(coordinator, folder, net, body):
    """docs/security.md, order of checks: an unsealed answer only ever means "try again later"."""
    wire = net.Wire(coordinator, faults=[lambda request, send: Answer(status=503, body=body)])
    with pytest.raises(Unavailable) as error:
        enrol(folder, coordinator.invite(), wire, clock_ms=lambda: net.NOW_MS, sleep=lambda _: None)
    assert exit_code(error.value) == 1
    assert enrol(folder, coordinator.invite(), wire, clock_ms=lambda: net.NOW_MS).state == "pending"


def test_an_expired_invite_by_the_corrected_clock(coordinator, folder, net):
    invite = coordinator.invite()
    coordinator.now_ms = net.NOW_MS + 25 * net.HOUR_MS
    with pytest.raises(EnrolmentError, match="expired"):
        enrol(folder, invite, coordinator, clock_ms=lambda: net.NOW_MS)
    assert not coordinator.members


def test_refused_token_and_second_membership(coordinator, folder, net):
    invite = coordinator.invite()
    coordinator.tokens_open.clear()
    with pytest.raises(SignedRefusal, match="used") as refused:
        enrol(folder, invite, coordinator, clock_ms=lambda: net.NOW_MS)
    assert refused.value.code == "used_invite"
    first = (folder / "signing.key").read_bytes()
    enrol(folder, coordinator.invite("device-2"), coordinator, clock_ms=lambda: net.NOW_MS)
    assert (folder / "signing.key").read_bytes() != first  # a new invite, new keys
    with pytest.raises(EnrolmentError, match="already"):
        enrol(folder, coordinator.invite("device-3"), coordinator, clock_ms=lambda: net.NOW_MS)


def test_a_fingerprint_that_differs_stops_the_enrolment(coordinator, folder, net, monkeypatch):
    """docs/security.md, check 22: fingerprint mismatch: 0 enrolled."""
    original = coordinator._enrol

    def other_fingerprint(skid, payload):
        answer = original(skid, payload)
        if "fingerprint" in answer.scalars:
            return Payload({}, {**answer.scalars, "fingerprint": "0" * 20})
        return answer

    monkeypatch.setattr(coordinator, "_enrol", other_fingerprint)
    with pytest.raises(EnrolmentError, match="replaced the keys"):
        enrol(folder, coordinator.invite(), coordinator, clock_ms=lambda: net.NOW_MS)
    assert load_membership(folder).state == "joining"


@pytest.mark.parametrize("times", [30, pytest.param(200, marks=pytest.mark.slow)])
def test_retry_after_a_cut_answer_has_one_effect(member, coordinator, wire, net, times):
    """docs/security.md, check 19: new envelope, same idem, 30 and 200 times: one effect each, identical answer."""
    for number in range(times):
        coordinator.round = number + 1
        wire.faults = [net.cut_answer] * (number % 3)
        idem = f"{number:032x}"
        answer = member.reply(idem, net.reply_of(1), number + 1)
        coordinator.now_ms += 1
        assert member.reply(idem, net.reply_of(1), number + 1) == answer
    assert len(coordinator.effects) == times
    bodies = [request.body for request in wire.sent if request.method == "POST"]
    assert len(set(bodies)) == len(bodies)  # no envelope was ever sent twice


@pytest.mark.parametrize(("asked_s", "waits"), [(5.0, 3), (300.0, 0)])
def test_a_wait_that_anybody_may_ask_for_holds_no_keys(joined, coordinator, folder, net, asked_s, waits):
    """docs/security.md, order of checks: an unsealed 503 is forged easily; a long wait is left to a later call."""
    slept = []
    wire = net.Wire(coordinator, [lambda request, send: Answer(status=503, body=b"busy", retry_after_s=asked_s)] * 99)
    with (
        Member(folder, lambda _: wire, clock_ms=lambda: net.NOW_MS, sleep=slept.append) as member,
        pytest.raises(Unavailable) as problem,
    ):
        member.task()
    assert problem.value.retry_after_s == asked_s
    assert len(slept) == waits and all(asked_s <= wait <= 20 for wait in slept)


@pytest.mark.parametrize("times", [100, pytest.param(1000, marks=pytest.mark.slow)])
def test_exact_replays_have_no_effect(member, coordinator, wire, net, times):
    """docs/security.md, check 17: the same bytes again, 100 and 1,000 times: 0 accepted."""
    member.reply("a" * 32, net.reply_of(1), 1)
    captured = wire.sent[-1]
    coordinator.replied.clear()
    coordinator.answers.clear()
    for _ in range(times):
        coordinator.send(captured)
    assert len(coordinator.effects) == 1


def test_a_replayed_answer_of_an_attacker_is_not_believed(member, coordinator, wire, net):
    """docs/security.md, check 8: swapped replies: 0 accepted; an old answer to the same route neither."""
    member.task()
    old: list[Answer] = []

    def record(request, send):
        old.append(send(request))
        return old[-1]

    def swap(request, send):
        send(request)
        return old[0]

    wire.faults = [record]
    assert member.task().round == 1
    coordinator.round = 2
    wire.faults = [swap, None, None, None]
    assert member.task().round == 2
    wire.faults = [swap] * 20
    with pytest.raises(Unavailable) as problem:
        member.task()
    assert problem.value.code == "not_signed"


def forge_status(request, send):
    answer = send(request)
    return dataclasses.replace(answer, status=500)


def flip_byte(request, send):
    answer = send(request)
    position = len(answer.body) // 2
    changed = bytes([answer.body[position] ^ 1])
    return dataclasses.replace(answer, body=answer.body[:position] + changed + answer.body[position + 1 :])


def change_path(request, send):
    return send(dataclasses.replace(request, path="/v1/index"))


def change_request(request, send):
    if not request.body:
        return Answer(status=502, body=b"")
    return send(dataclasses.replace(request, body=request.body[:-1] + bytes([request.body[-1] ^ 1])))


def empty(request, send):
    return Answer(status=200, body=b"")


def forged_page(status):
    return lambda request, send: Answer(status=status, body=b"<html>accepted</html>")


@pytest.mark.parametrize(
    "fault",
    [
        flip_byte,
        change_path,
        change_request,
        empty,
        *map(forged_page, (200, 401, 403, 404, 410, 500)),
    ],
)
def test_a_proxy_that_edits_things_changes_nothing(member, coordinator, wire, folder, tmp_path, net, fault):
    """docs/security.md, check 44: 0 accepted changes; an unsealed status only means "try again later"."""
    task = member.task()
    with Outbox(tmp_path / "outbox.sqlite3", KEY) as outbox:
        outbox.put("skin", "reply", net.reply_of(1).to_bytes(), 0)
        before = load_membership(folder)
        wire.faults = [fault] * 50
        with pytest.raises(Unavailable):
            member.deliver(outbox, task)
        assert len(outbox.items("skin")) == 1
        after = load_membership(folder)
        assert (after.state, after.key_number) == (before.state, before.key_number)
        wire.faults = []
        (done,) = member.deliver(outbox, task)
        assert done.outcome == "accepted"
        assert outbox.items("skin") == []
    assert len(coordinator.effects) == 1


def test_an_edited_status_of_a_signed_answer_is_ignored(member, wire):
    """docs/security.md, envelope: the status that counts is the signed one."""
    wire.faults = [forge_status]
    assert member.task().round == 1


def test_restored_device_jumps_above_once(member, coordinator, wire, folder, net):
    """docs/security.md, idempotency: seq_behind → highest + 256, once; a jump above 2^32 is refused."""
    coordinator.window._windows[member.identity.signing.key_id] = (5_000, bytes(256))
    assert member.task().round == 1
    assert member.identity.next_sequence() == 5_000 + BLOCK + 1
    coordinator.window._windows[member.identity.signing.key_id] = (2**40, bytes(256))
    with pytest.raises(ExchangeError) as error:
        member.task()
    assert error.value.code == "seq_jump"
    coordinator.window._windows.clear()
    coordinator.refuse["task"] = Refusal(code="seq_behind", message="again", highest=9_000)
    with pytest.raises(SignedRefusal):  # a second request for a jump in one call is not followed
        member.task()


@pytest.mark.parametrize(
    ("hours", "recovers"), [(-47, True), (-3, True), (3, True), (47, True), (-49, False), (49, False)]
)
def test_wrong_clock_recovers_within_48_hours(joined, coordinator, wire, folder, net, hours, recovers):
    """docs/security.md, check 20: a device 47 h off recovers, 49 h off refuses."""
    wrong = net.NOW_MS + hours * net.HOUR_MS
    if recovers:
        with quick(folder, wire, clock_ms=lambda: wrong) as one:
            assert one.task().round == 1
            assert abs(one.now_ms() - net.NOW_MS) < 2_000
    else:
        with pytest.raises(ExchangeError, match="hours off"), quick(folder, wire, clock_ms=lambda: wrong) as one:
            one.task()


def test_time_answers_only_a_fresh_nonce(joined, coordinator, wire, folder, net):
    """docs/security.md, replay: a signed time that was recorded before does not move the clock."""
    wrong = net.NOW_MS - 5 * net.HOUR_MS
    recorded = coordinator._plain
    stale = recorded(type("R", (), {"path": "/v1/time", "query": "nonce=" + "A" * 32})())
    coordinator._plain = lambda request: stale if request.path == "/v1/time" else recorded(request)
    with quick(folder, wire, clock_ms=lambda: wrong) as one:
        with pytest.raises(Unavailable):
            one.task()
        assert one.now_ms() == wrong


def test_coordinators_new_sealing_key_is_picked_up(member, coordinator, folder):
    """docs/security.md, rotation: the key record is refreshed; its number never goes down."""
    coordinator.sealing, coordinator.key_number = generate_sealing_key(1), 7
    assert member.task().round == 1
    assert load_membership(folder).key_number == 7
    coordinator.sealing, coordinator.key_number = generate_sealing_key(1), 6
    with pytest.raises(Unavailable):
        member.task()
    assert load_membership(folder).key_number == 7


@pytest.mark.parametrize("days", [0, 2])
def test_an_older_coordinator_is_called_so_until_it_counts_higher(joined, coordinator, folder, wire, net, days):
    """An old copy of its folder is served: nobody was shut out, and its operator mends it. coordinator.md, Keep."""
    older, coordinator.sealing, coordinator.key_number = coordinator.sealing, generate_sealing_key(1), 7
    with quick(folder, wire, clock_ms=lambda: net.NOW_MS) as member:
        member.task()
    coordinator.sealing, coordinator.key_number = older, 2
    coordinator.now_ms = later = net.NOW_MS + days * 24 * net.HOUR_MS  # from a day on the keys are fetched anew first
    with pytest.raises(Unavailable) as problem, quick(folder, wire, clock_ms=lambda: later) as member:
        member.task()
    said = str(problem.value)
    assert "key record 2 is older than number 7" in said and "an old copy or backup is served" in said
    assert "edgefl-coordinator rotate until the number is above 7" in said and "shut out" not in said
    assert exit_code(problem.value) == 1 and not problem.value.keys_unknown
    assert load_membership(folder).key_number == 7 and not load_membership(folder).unknown_ms
    coordinator.sealing, coordinator.key_number = generate_sealing_key(1), 8  # rotated, six times
    with quick(folder, wire, clock_ms=lambda: later) as member:
        assert member.task().round == 1


def test_another_signing_key_is_never_believed(member, coordinator):
    coordinator.signing = generate_signing_key()
    with pytest.raises(Unavailable):
        member.task()


def test_old_key_record_is_refreshed_before_sealing(joined, coordinator, wire, folder, net):
    """docs/security.md, rotation: a record older than 24 h is fetched anew."""
    later = net.NOW_MS + 25 * net.HOUR_MS
    coordinator.now_ms = later
    with quick(folder, wire, clock_ms=lambda: later):
        assert [request.path for request in wire.sent] == ["/v1/keys"]
    assert load_membership(folder).key_fetched_ms == later


def test_index_never_goes_back(member, coordinator, net):
    """docs/security.md, check 26: an older index than one seen is refused."""
    coordinator.bundles["main", "all", 1] = b"x"
    assert member.index().current("main", "all").version == 1
    coordinator.now_ms -= 60_000
    with pytest.raises(RecordError) as error:
        member.index()
    assert error.value.code == "rolled_back"


@pytest.mark.parametrize("code", ["busy", "storage_full", "internal"])
def test_a_busy_coordinator_is_asked_again_and_then_left(member, coordinator, wire, code):
    coordinator.refuse["task"] = Refusal(code=code, message="later")
    with pytest.raises(Unavailable, match="later"):
        member.task()
    assert len([request for request in wire.sent if request.path == "/v1/task"]) == 4


def test_second_process_cannot_use_the_keys(member, folder, wire):
    """docs/security.md, idempotency: a lock file per key."""
    with pytest.raises(ExchangeError, match="another edgefl process") as error:
        quick(folder, wire)
    assert error.value.code == "keys_in_use"


def test_keys_open_to_others_are_refused(joined, folder, wire):
    """docs/security.md, keys at rest: mode 0600, refused if group or world readable."""
    assert {path.stat().st_mode & 0o777 for path in folder.glob("*.key")} == {0o600}
    (folder / "sealing.key").chmod(0o640)
    with pytest.raises(StorageError, match="chmod 600"):
        quick(folder, wire)


@pytest.mark.parametrize("cut", range(0, 1200, 97))
def test_a_truncated_membership_is_a_sentence(joined, folder, wire, cut):
    """docs/security.md, check 60: truncation of a state file: typed error, never a wrong number."""
    path = folder / "membership.json"
    data = path.read_bytes()
    path.write_bytes(data[:cut])
    os.chmod(path, 0o600)
    with pytest.raises((StorageError, NotEnrolled)):
        quick(folder, wire)


def test_every_attempt_waits_with_jitter(joined, coordinator, folder, wire, net):
    """docs/security.md, reliability: jittered backoff."""
    waits: list[float] = []
    with Member(folder, lambda _: wire, clock_ms=lambda: net.NOW_MS, sleep=waits.append) as one:
        wire.faults = [net.lost_request] * 4
        with pytest.raises(Unavailable):
            one.task()
    assert len(waits) == 3
    assert all(0 <= wait <= 0.5 * 2**step for step, wait in enumerate(waits))
    assert len(set(waits)) == 3


@pytest.mark.parametrize(("status", "told"), [(401, True), (500, False)])
def test_an_unsigned_401_may_mean_shut_out(member, wire, status, told):
    """A coordinator signs nothing for whom it revoked, and anybody can forge that: so it is said as a question."""
    wire.faults = [forged_page(status)] * 50
    with pytest.raises(Unavailable) as problem:
        member.task()
    assert ("ask the operator whether this member was shut out" in str(problem.value)) == told
