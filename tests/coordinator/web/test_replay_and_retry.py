"""Each envelope once, each work item once: docs/security.md checks 16 to 19."""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest
from sqlalchemy import func, select
from tests.coordinator.kept_blobs import blob_names

from edgefl_coordinator.errors import OperatorError
from edgefl_coordinator.store.coordinator import Coordinator, load_keys
from edgefl_coordinator.store.tables import audit, replies
from edgefl_coordinator.web import admission
from edgefl_protocol import Payload
from edgefl_protocol.messages.requests import Refusal, ReplyReply, ReplyRequest

pytestmark = pytest.mark.both_databases


def stored(coordinator) -> int:
    with coordinator.store.transaction() as connection:
        return connection.scalar(select(func.count()).select_from(replies))


def blobs(coordinator) -> int:
    return len(blob_names(coordinator.store))


def codes(answers) -> set[str]:
    return {answer.code if isinstance(answer, Refusal) else "accepted" for answer in answers}


@pytest.mark.parametrize(
    "times", [pytest.param(20, marks=pytest.mark.smaller), pytest.param(200, marks=pytest.mark.slow)]
)
def test_exact_replays(make_coordinator, clock, tools, times) -> None:
    """Check 17: the same bytes 100 and 1,000 times, at once, in turn, at another worker, after a restart, near
    expiry."""
    coordinator = make_coordinator()
    member, _ = (tools.approved_member(coordinator, name) for name in ("clinic-a", "clinic-b"))
    tools.start_rounds(coordinator)
    message = ReplyRequest(idem="work-item-00000001", reply=tools.maps_payload()).to_payload()
    request = member.envelope("reply", message, rnd=1)
    assert isinstance(member.send("reply", request), Payload)
    before = blobs(coordinator)
    with ThreadPoolExecutor(16) as pool:
        assert codes(pool.map(lambda _: member.send("reply", request), range(2 * times))) == {"replayed"}
    with pytest.raises(OperatorError, match="another process"):  # no worker with a store of its own
        make_coordinator()
    keys = load_keys(coordinator.store.home)
    # A second worker on this store, which shares nothing else with the first.
    member.coordinator = Coordinator(coordinator.settings, coordinator.store, keys, clock)
    assert codes(member.send("reply", request) for _ in range(times)) == {"replayed"}
    coordinator.store.close()
    member.coordinator = again = make_coordinator()
    assert codes(member.send("reply", request) for _ in range(times)) == {"replayed"}
    clock.now_ms += 299_999
    assert codes(member.send("reply", request) for _ in range(times)) == {"replayed"}
    clock.now_ms += 2
    assert member.send("reply", request) == 401  # past its time nothing needs to be remembered
    assert stored(again) == 1
    assert blobs(again) == before


def test_a_replayed_read_is_refused(coordinator, tools) -> None:
    """Check 17: requests that change nothing are admitted once, too."""
    member = tools.approved_member(coordinator, "clinic-a")
    request = member.envelope("task", Payload())
    assert isinstance(member.send("task", request), Payload)
    refused = member.send("task", request)
    assert isinstance(refused, Refusal) and (refused.code, refused.status) == ("replayed", 409)


class Raw:
    """Bytes that are no payload, for a member that seals them all the same."""

    def __init__(self, data: bytes) -> None:
        self.data = data

    def to_bytes(self) -> bytes:
        return self.data


MALFORMED = {
    "no payload": Raw(b"\xff" * 40),
    "nothing": Raw(b""),
    "a field too many": Payload({}, {"round": 1, "idem": "x" * 16, "error": "mine"}),
}


@pytest.mark.parametrize("route", ["task", "index", "keys", "broadcast", "bundle", "reply", "enrol-proof"])
@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_message_is_a_replay_when_it_comes_again(coordinator, tools, route, name) -> None:
    """Check 17: the replay row stands before the payload is read; what was refused for its form is not read twice."""
    member = tools.approved_member(coordinator, "clinic-a")
    rnd = 1 if route in ("broadcast", "reply") else 0
    request = member.envelope(route, MALFORMED[name], rnd=rnd)
    assert codes([member.send(route, request)]) == {"bad_message"}
    assert codes([member.send(route, request)]) == {"replayed"}
    with coordinator.store.transaction() as connection:  # each decision has one row (check 69)
        rows = list(connection.scalars(select(audit.c.detail).where(audit.c.event == "refused")))
    assert [json.loads(row)["code"] for row in rows] == ["bad_message", "replayed"]


def test_a_message_that_kills_the_reader_is_read_once(make_coordinator, tools, monkeypatch) -> None:
    """Check 17: the row is durable before the payload is looked at: dying over it does not let it in again."""
    coordinator = make_coordinator()
    member = tools.approved_member(coordinator, "clinic-a")
    request = member.envelope("task", Payload())
    with monkeypatch.context() as patch:
        patch.setattr(admission.Payload, "from_bytes", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            member.send("task", request)
    coordinator.store.close()
    member.coordinator = make_coordinator()
    assert codes([member.send("task", request)]) == {"replayed"}


def test_a_pending_members_payload_is_not_read(coordinator, tools) -> None:
    """docs/security.md, order of checks: the member's state is judged with the window, before the payload."""
    member = tools.Member(coordinator, "clinic-a")
    member.enrol(tools.token_of(coordinator, "clinic-a"))
    request = member.envelope("reply", MALFORMED["no payload"], rnd=1)
    assert codes([member.send("reply", request)]) == {"pending"}
    assert codes([member.send("reply", request)]) == {"replayed"}


def test_a_message_id_counts_once_whatever_its_number(coordinator, tools) -> None:
    """docs/security.md, replay window: `mid` is unique by itself; another sender may use the same."""
    one, two = (tools.approved_member(coordinator, name) for name in ("clinic-a", "clinic-b"))
    mid = {"mid": "ab" * 16}
    assert isinstance(one.send("task", one.envelope("task", Payload(), **mid)), Payload)
    assert one.send("task", one.envelope("task", Payload(), **mid)).code == "replayed"
    assert isinstance(two.send("task", two.envelope("task", Payload(), **mid)), Payload)


@pytest.mark.parametrize(
    "items", [pytest.param(24, marks=pytest.mark.smaller), pytest.param(200, marks=pytest.mark.slow)]
)
def test_concurrent_double_submissions(make_coordinator, tools, items) -> None:
    """Check 18: 24 and 200 work items, each sent twice at once (same idem, new envelope), are each accepted once."""
    coordinator = make_coordinator(rounds={"quorum_target": 1000})
    crowd = [tools.quick_member(coordinator, f"clinic-{number:03}") for number in range(items)]
    tools.start_rounds(coordinator)
    sealed = [
        (member, member.envelope("reply", ReplyRequest(idem="x" * 16, reply=tools.maps_payload()).to_payload(), rnd=1))
        for member in crowd
        for _ in range(2)
    ]
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda pair: pair[0].send("reply", pair[1]), sealed))
    assert codes(answers) == {"accepted"}
    assert [answers[2 * i].to_bytes() for i in range(items)] == [answers[2 * i + 1].to_bytes() for i in range(items)]
    assert stored(coordinator) == items
    coordinator.store.sweep()
    assert blobs(coordinator) == items + items + 1  # replies, broadcasts, state


@pytest.mark.parametrize("times", [20, pytest.param(200, marks=pytest.mark.slow)])
def test_retries_after_a_cut_answer(coordinator, clock, tools, times) -> None:
    """Check 19: the same work item 20 and 200 times, each in a new envelope: one effect, always the first answer."""
    member, _ = (tools.approved_member(coordinator, name) for name in ("clinic-a", "clinic-b"))
    tools.start_rounds(coordinator)
    first = member.reply(1, idem="work-item-00000001")
    assert ReplyReply.from_payload(first).first_answer_ms == clock.now_ms
    for _ in range(times - 1):
        clock.now_ms += 100
        assert member.reply(1, idem="work-item-00000001") == first
    assert stored(coordinator) == 1


def test_a_retry_is_answered_after_the_round_closed(coordinator, clock, tools) -> None:
    """Check 19: the first answer comes back even when the round has closed meanwhile."""
    one, two = (tools.approved_member(coordinator, name) for name in ("clinic-a", "clinic-b"))
    tools.start_rounds(coordinator)
    first = one.reply(1, idem="work-item-00000001")
    two.reply(1)
    clock.now_ms += 60_000
    assert two.reply(1, idem="other-work-item-2").code == "round_closed"
    assert one.reply(1, idem="work-item-00000001") == first


def test_one_idem_for_two_payloads(coordinator, tools) -> None:
    """docs/security.md, idempotency: same key, other payload is a typed conflict."""
    member = tools.approved_member(coordinator, "clinic-a")
    tools.start_rounds(coordinator)
    member.reply(1, idem="work-item-00000001")
    refused = member.reply(1, idem="work-item-00000001", payload=tools.maps_payload(seed=5))
    assert isinstance(refused, Refusal) and (refused.code, refused.status) == ("idem_conflict", 409)
    refused = member.reply(1, idem="work-item-00000002")
    assert refused.code == "already_replied"
    assert stored(coordinator) == 1


def test_a_member_restored_from_an_image(coordinator, tools) -> None:
    """docs/security.md, replay window: a number below the window, or used in it, is told the highest; a huge jump is
    refused."""
    member = tools.approved_member(coordinator, "clinic-a")
    used = member.envelope("task", Payload(), seq=2_000)
    assert isinstance(member.send("task", used), Payload)
    behind = member.send("task", member.envelope("task", Payload(), seq=2_000))  # of an image of a moment ago
    assert (behind.code, behind.highest) == ("seq_behind", 2_000)
    assert member.send("task", used).code == "replayed"
    assert isinstance(member.send("task", member.envelope("task", Payload(), seq=50_000)), Payload)
    behind = member.send("task", member.envelope("task", Payload(), seq=7))
    assert (behind.code, behind.highest) == ("seq_behind", 50_000)
    first = member.envelope("task", Payload(), seq=60_000)
    assert isinstance(member.send("task", first), Payload)
    assert isinstance(member.send("task", member.envelope("task", Payload(), seq=90_000)), Payload)
    assert member.send("task", first).code == "replayed"  # its number left the window, its id is remembered
    assert isinstance(member.send("task", member.envelope("task", Payload(), seq=90_000 + 256)), Payload)
    assert member.send("task", member.envelope("task", Payload(), seq=2**33)).code == "seq_jump"


@pytest.mark.parametrize(
    "order",
    [
        pytest.param(range(3, 23), id="up", marks=pytest.mark.smaller),
        pytest.param(range(22, 2, -1), id="down", marks=pytest.mark.smaller),
        pytest.param(range(3, 103), id="100 up", marks=pytest.mark.slow),
        pytest.param(range(102, 2, -1), id="100 down", marks=pytest.mark.slow),
    ],
)
def test_shuffled_numbers_inside_the_window(coordinator, tools, order) -> None:
    """Check 16 against the store: numbers in any order inside the window are admitted exactly once. Another message
    under one of them is told to jump."""
    member = tools.approved_member(coordinator, "clinic-a")
    sent = [member.envelope("task", Payload(), seq=seq) for seq in order]
    assert all(isinstance(member.send("task", one), Payload) for one in sent)
    assert codes(member.send("task", one) for one in sent) == {"replayed"}
    assert codes(member.send("task", member.envelope("task", Payload(), seq=seq)) for seq in order) == {"seq_behind"}
