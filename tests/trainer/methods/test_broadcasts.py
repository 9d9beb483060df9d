"""What the server of every method of the table sends: bounded, of declared kinds, and nobody's raw reply in it.

What sites send is bounded, too.
"""

from collections.abc import Iterable, Iterator, Mapping

import numpy as np
import pytest
from tests.trainer.methods.conftest import Exchange, after, play
from tests.trainer.methods.test_conformance import GIVEN, Played, backbone, form, kinds_given, small

from edgefl_protocol import Payload
from edgefl_trainer.contract import Phase, declared

__all__ = ["backbone"]  # a fixture: two blocks

# Kinds that a paper's server hands from one site to the others as they came. All else is a mean of several replies.
PASSED_ON = {"fedevprompt": {"maps"}, "fedclf": {"features"}}
EXACT = {"moments": "float64", "selections": "int64"}  # sums over pictures, and counts
FLOATS = ("float16", "float32")
LONGEST_TEXT = 16  # characters of a scalar: the name of a phase or of a readout


def all_given(method, run: Played, task, sites: Iterable[str]) -> list[Mapping[str, Payload]]:
    """Every broadcast of a run, and the one that models are made of at its end."""
    return [*(each.broadcasts for each in run.seen), method.broadcast(run.server, after(task), sorted(sites))]


def unsound(payload: Payload) -> Iterator[str]:
    """Arrays that are not of the usual precision, and texts that could hold anything; `Payload` takes no NaN."""
    for name, array in payload.arrays.items():
        if array.dtype.name not in (*FLOATS, EXACT.get(name.partition(".")[0])):
            yield f"{name} is {array.dtype.name}"
    for name, value in payload.scalars.items():
        if isinstance(value, str) and len(value) > LONGEST_TEXT:
            yield f"{name} is a text of {len(value)} characters"


def lines_of(payload: Payload) -> Iterator[tuple[bytes, str]]:
    """Each line of each array, and the array's name; of lines of one value, or of a single one, nothing is told."""
    for name, array in payload.arrays.items():
        for line in array.reshape(-1, array.shape[-1]) if array.ndim else ():
            if len(np.unique(line)) > 1:
                yield line.tobytes(), name


def passed_on(seen: Iterable[Exchange], last: Mapping[str, Payload]) -> dict[str, set[str]]:
    """Kind → arrays of a broadcast in which stands, number by number, a line that one other site alone had sent."""
    sent: dict[bytes, set[str]] = {}
    found: dict[str, set[str]] = {}

    def look(broadcasts: Mapping[str, Payload]) -> None:
        for site, payload in broadcasts.items():
            for line, name in lines_of(payload):
                if len(owners := sent.get(line, set())) == 1 and site not in owners:
                    found.setdefault(GIVEN[name.partition(".")[0]], set()).add(f"{name}, given to {site}")

    for each in seen:
        look(each.broadcasts)
        for site, reply in each.replies.items():
            for line, _ in lines_of(reply):
                sent.setdefault(line, set()).add(site)
    look(last)
    return found


@pytest.fixture
def run(name, make_task, make_site, played, backbone) -> Played:
    """Two rounds of three sites: of two, the mean of all others would be a reply as it came."""
    if ("rounds of three", name) not in played:
        task, seen = make_task(rounds=2), list[Exchange]()
        sites = {s: make_site(task, s, count=8, seed=i) for i, s in enumerate("abc")}
        played["rounds of three", name] = Played(*play(small(name), task, sites, watch=seen.append), seen)
    return played["rounds of three", name]


def test_a_broadcast_holds_what_the_method_declares(name, run, make_task):
    """docs/methods.md, what travels: what comes back from the server is of the kinds that sites sent, and no other."""
    method = small(name)
    given = [payload for one in all_given(method, run, make_task(rounds=2), "abc") for payload in one.values()]
    assert kinds_given(given) <= set(method.travels)


def test_payloads_hold_plain_floats_and_short_texts(name, run, make_task):
    given = all_given(small(name), run, make_task(rounds=2), "abc")
    both = [*given, *(each.replies for each in run.seen)]
    assert [line for one in both for payload in one.values() for line in unsound(payload)] == []


def test_no_broadcast_carries_another_sites_reply_unless_the_paper_does(name, run, make_task):
    """A method whose server hands on what single sites sent says so in `PASSED_ON`."""
    last = small(name).broadcast(run.server, after(make_task(rounds=2)), ["a", "b", "c"])
    found = passed_on(run.seen, last)
    assert found.keys() == PASSED_ON.get(name, set()), found


@pytest.fixture
def of_counts(active, make_task, make_site, played) -> list[Played]:
    """Two rounds of sites a and b: a has as many pictures as b, or twice as many; of each class 5 maps travel."""
    if ("counts", active) not in played:
        task, played["counts", active] = make_task(rounds=2), []
        for count in (10, 20):
            seen: list[Exchange] = []
            sites = {"a": make_site(task, "a", count=count), "b": make_site(task, "b", count=10, seed=2)}
            played["counts", active].append(Played(*play(small(active), task, sites, watch=seen.append), seen))
    return played["counts", active]


def bytes_of(backbone) -> int:
    return sum(value.numel() * 4 for value in backbone.state_dict().values())


def test_a_broadcast_is_as_large_with_any_number_of_pictures(active, make_task, of_counts, backbone):
    """What a site is given is bounded by classes, network and sites; of the pictures of others nothing in it grows."""
    forms = []
    for played in of_counts:
        given = all_given(small(active), played, make_task(rounds=2), "ab")
        forms.append([(site, form(payload)) for one in given for site, payload in one.items()])
        largest = max(len(payload.to_bytes()) for one in given for payload in one.values())
        assert largest < 3 * bytes_of(backbone)  # a network, and its average beside it
    assert forms[0] == forms[1]


def test_a_reply_is_as_large_in_every_round_and_with_any_number_of_images(active, of_counts, backbone):
    """What leaves a site is bounded by classes and network, never by its images: none of it grows with them."""
    seen = of_counts[1].seen
    forms = {(exchange.phase.kind, form(reply)) for exchange in seen for reply in exchange.replies.values()}
    kinds = [exchange.phase for exchange in seen]
    if declared(small(active)).encoder:  # its two final phases ask for different things
        forms, kinds = {f for f in forms if f[0] == "train"}, [p for p in kinds if p.kind == "train"]
    assert len(forms) == len({phase.kind for phase in kinds})
    largest = max(len(reply.to_bytes()) for exchange in seen for reply in exchange.replies.values())
    copies = 2 if getattr(getattr(small(active), "contrast", None), "momentum_encoder", "") == "averaged" else 1
    assert largest < (copies + 1) * bytes_of(backbone)


ROUND = Phase("train", 1)
OWN = Payload({"head.weight": np.array([[1, 2], [3, 4]], np.float32)}, {})
OTHER = np.array([[5, 6], [7, 8]], np.float32)
REPLIES = {"a": OWN, "b": Payload({"head.weight": OTHER}, {})}


@pytest.mark.parametrize(
    ("arrays", "found"),
    [
        ({"head.weight": (2 * OWN.arrays["head.weight"] + OTHER) / 3}, {}),
        ({"head.weight": OWN.arrays["head.weight"]}, {}),
        ({"head.weight": np.concatenate([OTHER[1:], OTHER * 2])}, {"weights": {"head.weight, given to a"}}),
        ({"features.1": OTHER[0]}, {"features": {"features.1, given to a"}}),
        ({"head.weight": np.zeros((2, 2), np.float32)}, {}),
    ],
    ids=["mean", "its own", "a line of b's", "under another name", "zeros"],
)
def test_another_sites_reply_in_a_broadcast_is_found(arrays, found):
    assert passed_on([Exchange(ROUND, {}, REPLIES)], {"a": Payload(arrays, {})}) == found
    assert passed_on([Exchange(ROUND, {"a": Payload(arrays, {})}, {})], {}) == {}  # before anybody sent it


@pytest.mark.parametrize(
    ("payload", "told"),
    [
        (Payload({"head.bias": np.array([1, 2], np.float64)}, {}), ["head.bias is float64"]),
        (Payload({"labels": np.array([1, 0], np.int64)}, {}), ["labels is int64"]),
        (Payload({"images": np.zeros((2, 4, 4, 3), np.uint8)}, {}), ["images is uint8"]),
        (Payload({}, {"seen": "0,1,1,0,1,0,0,1,1,1,0,1"}), ["seen is a text of 23 characters"]),
        (Payload({"selections": np.array([3])}, {"readout": "cls", "n": 12, "loss": 0.1 + 0.2}), []),
    ],
)
def test_what_does_not_belong_into_a_payload_is_found(payload, told):
    assert list(unsound(payload)) == told


def test_an_array_that_no_kind_names_is_found():
    payload = Payload({"images.b": np.zeros(3, np.float32), "features.1": np.zeros(3, np.float32)}, {})
    assert kinds_given([payload]) == {"the unknown array images.b", "features"}
