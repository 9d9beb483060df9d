"""What a reply may hold: docs/security.md check 37 at the coordinator, docs/methods.md on what FedEvPrompt shares."""

import numpy as np
import pytest
from tests.coordinator.kept_blobs import blob_names

from edgefl_protocol import Payload
from edgefl_protocol.messages.requests import Refusal

pytestmark = pytest.mark.both_databases

GOOD = np.array([[0.25, 1.0, 0.0, 0.5]], np.float16)
SHA = {"site_sha256": "0" * 64}

# fmt: off
BAD = {
    "another array":   Payload({"weights": GOOD}, SHA),
    "class too high":  Payload({"maps.2": GOOD}, SHA),
    "class spelled":   Payload({"maps.01": GOOD}, SHA),
    "float32":         Payload({"maps.0": GOOD.astype(np.float32)}, SHA),
    "one-dimensional":        Payload({"maps.0": GOOD[0]}, SHA),
    "too many maps":   Payload({"maps.0": np.repeat(GOOD, 3, axis=0)}, SHA),
    "no map":          Payload({"maps.0": GOOD[:0]}, SHA),
    "other grid":      Payload({"maps.0": np.ones((1, 9), np.float16)}, SHA),
    "input size":      Payload({"maps.0": np.ones((1, 576), np.float16)}, SHA),
    "negative":        Payload({"maps.0": GOOD - np.float16(0.5)}, SHA),
    "above one":       Payload({"maps.0": GOOD * np.float16(2)}, SHA),
    "not normalised":  Payload({"maps.0": GOOD * np.float16(0.5)}, SHA),
    "second not":      Payload({"maps.0": np.concatenate([GOOD, GOOD / 2])}, SHA),
    "no digest":       Payload({"maps.0": GOOD}, {}),
    "another scalar":  Payload({"maps.0": GOOD}, {**SHA, "patient": "x"}),
    "a number more":   Payload({"maps.0": GOOD}, {**SHA, "n_train": 17}),
    "digest a number": Payload({"maps.0": GOOD}, {"site_sha256": 7}),
}
# fmt: on


@pytest.fixture
def member(coordinator, tools):
    found = tools.approved_member(coordinator, "clinic-a")
    tools.start_rounds(coordinator)
    return found


@pytest.mark.parametrize("name", BAD)
def test_bad_contributions(member, name) -> None:
    """Refused typed, nothing stored; the same member may then send a good one."""
    refused = member.reply(1, payload=BAD[name])
    assert isinstance(refused, Refusal) and (refused.code, refused.status) == ("bad_contribution", 422)
    assert isinstance(member.reply(1, payload=Payload({"maps.1": GOOD}, SHA), idem="good-work-item-1"), Payload)


OF_MAPS = sorted(name for name in BAD if name not in ("another array", "no digest", "another scalar", "a number more"))
WEIGHTS = {"prompts.b": np.ones((2, 2), np.float32)}


@pytest.mark.parametrize("name", OF_MAPS)
def test_maps_beside_weights_are_checked_in_full(make_coordinator, tools, name) -> None:
    """docs/security.md 4: with kd=on of FedAvg each member learns from everybody's maps, as with FedEvPrompt."""
    travels = ("prompts", "weights", "maps")
    coordinator = make_coordinator(task={"method": "fedavg", "shares_maps": False, "travels": travels})
    member = tools.approved_member(coordinator, "clinic-a")
    tools.start_rounds(coordinator)
    claimed = {**SHA, "n_train": 17}
    refused = member.reply(1, payload=Payload({**WEIGHTS, **BAD[name].arrays}, {**claimed, **BAD[name].scalars}))
    assert isinstance(refused, Refusal) and (refused.code, refused.status) == ("bad_contribution", 422)
    good = Payload({**WEIGHTS, "maps.1": GOOD}, claimed)
    assert isinstance(member.reply(1, payload=good, idem="good-work-item-1"), Payload)


def test_members_of_an_older_federation_send_by_the_methods_setting(make_coordinator, tools) -> None:
    """`init` once took another number of maps a class than the method's, by which members choose beside weights."""
    kept = {"maps_per_class": 2, "settings": {"maps_per_class": 5}}
    coordinator = make_coordinator(
        task={"method": "fedavg", "shares_maps": False, "travels": ("prompts", "weights", "maps"), **kept}
    )
    member = tools.approved_member(coordinator, "clinic-a")
    tools.start_rounds(coordinator)
    for number, answer in ((6, Refusal), (5, Payload)):
        sent = Payload({**WEIGHTS, "maps.1": np.repeat(GOOD, number, axis=0)}, {**SHA, "n_train": 17})
        found = member.reply(1, payload=sent, idem=f"maps-work-item-{number}")
        assert isinstance(found, answer)
    assert coordinator.settings.task.maps_per_class == 2


def test_a_mean_of_maps_where_it_is_asked_for(make_coordinator, tools) -> None:
    """M is 2, so a mean of maps that reach 1 reaches 1/2; a second map, or a map that could be no such mean, is none.
    Where each map is asked for, a mean is refused ("not normalised" above)."""
    coordinator = make_coordinator("means", task={"settings": {"sent_maps": "mean"}})
    member = tools.approved_member(coordinator, "clinic-a")
    tools.start_rounds(coordinator)
    for number, wrong in enumerate((np.repeat(GOOD, 2, axis=0), GOOD * np.float16(0.49))):
        refused = member.reply(1, payload=Payload({"maps.0": wrong}, SHA), idem=f"wrong-work-item-{number}")
        assert isinstance(refused, Refusal) and (refused.code, refused.status) == ("bad_contribution", 422)
    mean = GOOD * np.float16(0.5)
    assert isinstance(member.reply(1, payload=Payload({"maps.0": mean}, SHA), idem="good-work-item-1"), Payload)


def test_not_a_number_never_arrives(member) -> None:
    """Check 46, the first line of defence: NaN cannot be written, and bytes that hold it do not parse."""
    data = bytearray(Payload({"maps.0": GOOD}, {**SHA, "idem": "work-item-00000001"}).to_bytes())
    place = data.rindex(np.float16(0.25).tobytes())
    data[place : place + 2] = np.float16(np.nan).tobytes()

    class Raw:
        def to_bytes(self) -> bytes:
            return bytes(data)

    refused = member.call("reply", Raw(), rnd=1)
    assert isinstance(refused, Refusal) and refused.code == "bad_message"


@pytest.mark.parametrize(
    ("arrays", "scalars"),
    [
        ({}, {"n.0": 1e9}),
        ({}, {"n.7": 10**12}),
        ({}, {"n_train": 5.0}),
        ({}, {"n_train": -1}),
        ({"selections": np.array([100, -390])}, {}),
        ({"selections": np.array([100, 2**40 + 1])}, {}),
    ],
    ids=["a float", "above the bound", "a whole float", "below 0", "a count below 0", "a count too large"],
)
def test_claims_are_whole_numbers_within_the_bound(make_coordinator, tools, arrays, scalars) -> None:
    """Check 46: what weighs a reply, in scalars or in an array of counts."""
    coordinator = make_coordinator(task={"method": "sgpt", "shares_maps": False})
    member = tools.approved_member(coordinator, "clinic-a")
    tools.start_rounds(coordinator)
    refused = member.reply(1, payload=Payload(arrays, {**SHA, **scalars}))
    assert isinstance(refused, Refusal) and refused.code == "bad_contribution"


def test_a_reply_above_the_cap(make_coordinator, tools) -> None:
    """The task states the cap; a longer reply is refused typed."""
    coordinator = make_coordinator(limits={"reply_bytes": 100})
    member = tools.approved_member(coordinator, "clinic-a")
    tools.start_rounds(coordinator)
    refused = member.reply(1)
    assert isinstance(refused, Refusal) and (refused.code, refused.status) == ("too_large", 413)


def test_no_more_maps_than_travel_together(make_coordinator, tools, monkeypatch) -> None:
    """docs/security.md 2.2: 4,000 tensors travel together, and the server's state holds the newest maps of everybody
    who ever came: a reply too many is refused, so that no round is lost to it."""
    assert make_coordinator("real").settings.task.most_arrays == 4000 - 500
    monkeypatch.setattr("edgefl_coordinator.settings.MAX_TENSORS", 500 + 3)
    coordinator = make_coordinator("small")
    first, second = (tools.approved_member(coordinator, name) for name in ("clinic-a", "clinic-b"))
    tools.start_rounds(coordinator)
    assert isinstance(first.reply(1, payload=tools.maps_payload(1)), Payload)
    blobs = sorted(blob_names(coordinator.store))
    answer = second.reply(1, payload=tools.maps_payload(2))
    assert isinstance(answer, Refusal) and answer.code == "too_large" and "the federation is full" in answer.message
    assert sorted(blob_names(coordinator.store)) == blobs
    assert isinstance(second.reply(1, payload=tools.maps_payload(2, classes=(1,))), Payload)
