"""Maps and features that mean nothing move little, and are told: docs/security.md 4.

Source: FedEvPrompt (arXiv 2411.10071) eq. 7, a step compares with the mean over peers of their mean maps; FedCLF (arXiv
2208.11278) section III, it contrasts with rows of the others' banks.
"""

import statistics
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgefl_coordinator.rounds.judging import judge
from edgefl_coordinator.rounds.passed_on import bounded_features, bounded_maps, oddities
from edgefl_coordinator.rounds.protection.bounding import Protection
from edgefl_coordinator.settings import ProtectionSettings
from edgefl_protocol import Payload

TOKENS, PEERS = 9, 5
HONEST = [f"clinic-{number}" for number in range(PEERS - 1)]
HALF = 2**-10  # what half precision rounds away


def normalised(rows: Any) -> np.ndarray:
    rows = np.asarray(rows, np.float64)
    return np.asarray((rows / rows.max(axis=1, keepdims=True)).astype(np.float16))


def honest_maps(seed: int, spread: float = 0.1) -> dict[str, np.ndarray]:
    """Maps that look at one spot, each a little differently."""
    rng = np.random.default_rng(seed)
    spot = np.exp(-(np.linspace(-2, 2, TOKENS) ** 2))
    return {name: normalised(spot + spread * rng.uniform(size=(3, TOKENS))) for name in HONEST}


def unit(rows: Any) -> np.ndarray:
    rows = np.asarray(rows, np.float64)
    return np.asarray((rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float16))


def bank(seed: int, rows: int = 20) -> np.ndarray:
    return unit(np.random.default_rng(seed).normal(size=(rows, 128)))


one_map = st.one_of(
    st.just([1.0] * TOKENS),
    st.integers(0, TOKENS - 1).map(lambda place: [float(one == place) for one in range(TOKENS)]),
    st.lists(st.floats(0, 1), min_size=TOKENS, max_size=TOKENS).filter(lambda found: max(found) > 0.01),
)
hostile_maps = st.lists(one_map, min_size=1, max_size=5).map(normalised)


def centre_of(means: list[np.ndarray]) -> np.ndarray:
    """The median of each token, in plain Python."""
    return np.array([statistics.median(mean[token] for mean in means) for token in range(TOKENS)])


@pytest.mark.parametrize("times", [1, 2])
@given(hostile_maps, st.integers(0, 1000))
def test_how_far_one_of_five_moves_the_mean_map(times: int, hostile: np.ndarray, seed: int) -> None:
    """As far as the usual member, or twice, and one vote of the four that another is handed; maps stay maps."""
    arrays = {**honest_maps(seed), "hostile": hostile}
    replies = {name: Payload({"maps.0": maps}, {}) for name, maps in arrays.items()}
    means = {name: maps.astype(np.float64).mean(axis=0) for name, maps in arrays.items()}
    centre = centre_of(list(means.values()))
    farthest = max(np.linalg.norm(means[name] - centre) for name in HONEST)
    found = bounded_maps(replies, Protection(ProtectionSettings(norm_most=times))).replies
    after = {name: reply.arrays["maps.0"] for name, reply in found.items()}
    handed = [maps.astype(np.float64).mean(axis=0) for name, maps in after.items() if name != HONEST[0]]
    mean = np.mean(handed, axis=0)
    without = mean + (centre - after["hostile"].astype(np.float64).mean(axis=0)) / len(handed)
    assert len(handed) == 4 and np.linalg.norm(mean - without) <= times / 4 * farthest + HALF * TOKENS
    for maps in after.values():
        assert maps.dtype == np.float16 and maps.min() >= 0 and maps.max() <= 1


@pytest.mark.parametrize("shape", ["ones", "one point"])
def test_unbounded_they_move_more(shape: str) -> None:
    """The test above is able to fail: without the rule each of these moves the mean map beyond that bound."""
    hostile = np.ones((1, TOKENS)) if shape == "ones" else np.eye(TOKENS)[:1]
    arrays = {**honest_maps(3), "hostile": normalised(hostile)}
    means = {name: maps.astype(np.float64).mean(axis=0) for name, maps in arrays.items()}
    centre = centre_of(list(means.values()))
    farthest = max(np.linalg.norm(means[name] - centre) for name in HONEST)
    assert np.linalg.norm(means["hostile"] - centre) / PEERS > 2 / PEERS * farthest
    replies = {name: Payload({"maps.0": maps}, {}) for name, maps in arrays.items()}
    found = bounded_maps(replies, Protection())
    assert set(found.told) == {"hostile"} and "times as far from the median map" in found.told["hostile"]
    assert all(found.replies[name] is replies[name] for name in HONEST)
    unprotected = bounded_maps(replies, Protection(ProtectionSettings(rule="mean")))
    assert unprotected.replies == replies and not unprotected.told


def test_four_members_tell_nothing_and_other_classes_are_judged_alone() -> None:
    """A class of four members stays; what is usual for one class is not what is usual for another."""
    shown = enumerate(HONEST)
    few = {name: Payload({"maps.1": normalised(np.eye(TOKENS)[place : place + 1])}, {}) for place, name in shown}
    assert len(few) == 4 and bounded_maps(few, Protection()).replies == few
    both = {name: Payload({"maps.0": maps, "maps.2": maps}, {}) for name, maps in honest_maps(1).items()}
    both["hostile"] = Payload({"maps.0": normalised(np.ones((1, TOKENS))), "maps.2": honest_maps(2)["clinic-0"]}, {})
    found = bounded_maps(both, Protection()).replies["hostile"]
    assert found.arrays["maps.2"] is both["hostile"].arrays["maps.2"]
    assert not np.array_equal(found.arrays["maps.0"], both["hostile"].arrays["maps.0"])


def test_where_all_but_one_send_the_same_the_other_counts_as_they_do() -> None:
    same = honest_maps(1)["clinic-0"]
    replies = {name: Payload({"maps.0": same}, {}) for name in HONEST}
    replies["other"] = Payload({"maps.0": normalised(np.eye(TOKENS)[:2])}, {})
    drawn = bounded_maps(replies, Protection()).replies["other"].arrays["maps.0"].astype(float).mean(axis=0)
    np.testing.assert_allclose(drawn, same.astype(float).mean(axis=0), atol=HALF)


@pytest.mark.parametrize(("times", "share"), [(1.0, 1 / 2), (1.5, 3 / 5)])
@given(st.lists(st.integers(1, 60), min_size=4, max_size=4), st.integers(1, 400))
def test_how_much_of_the_bank_one_of_five_fills(times: float, share: float, honest: list[int], many: int) -> None:
    """At most one usual bank, or 1.5, beside another's no smaller one: who holds the third is handed the rest."""
    replies = {
        name: Payload({"features": bank(place, rows)}, {})
        for place, (name, rows) in enumerate(zip(HONEST, honest, strict=True))
    }
    replies["hostile"] = Payload({"features": bank(9, many)}, {})
    found = bounded_features(replies, Protection(ProtectionSettings(claim_most=times)), ()).replies
    rows = {name: len(reply.arrays["features"]) for name, reply in found.items()}
    for receiver in HONEST:
        assert rows["hostile"] / (sum(rows.values()) - rows[receiver]) <= share + 1e-9
    for name, reply in found.items():
        np.testing.assert_array_equal(reply.arrays["features"], replies[name].arrays["features"][-rows[name] :])


def test_a_grant_counts_for_features_and_contributions_do_not_tell_what_is_usual() -> None:
    """Three devices that give five pictures each do not make a bank of 60 an odd one."""
    replies = {name: Payload({"features": bank(place, 60)}, {}) for place, name in enumerate(HONEST[:2])}
    replies |= {f"device-{number}": Payload({"features": bank(10 + number, 5)}, {}) for number in range(3)}
    replies["hospital"] = Payload({"features": bank(20, 900)}, {})
    found = bounded_features(replies, Protection(), [name for name in replies if name.startswith("device")])
    assert {name: len(reply.arrays["features"]) for name, reply in found.replies.items()} == {
        "clinic-0": 60, "clinic-1": 60, "device-0": 5, "device-1": 5, "device-2": 5, "hospital": 90,
    }  # fmt: skip
    assert found.told == {
        "hospital": "of its 900 features the newest 90 count, 1.5 times the median; approve it again with --images to "
        "let more count"
    }
    granted = bounded_features(replies, Protection(granted={"hospital": 500}), ())
    assert len(granted.replies["hospital"].arrays["features"]) == 500


ODD = {
    "all alike": normalised(np.full((2, TOKENS), 0.25)),
    "of one point or axis alone": normalised(np.eye(TOKENS)[3:4]),
    "that another member sent in the same round": honest_maps(5)["clinic-0"],
    "that it was handed": normalised(np.linspace(1, 2, TOKENS)[None]),
}


@pytest.mark.parametrize("what", ODD)
def test_odd_maps_are_told_with_their_sender(what: str) -> None:
    """A member's name and what is odd, never a number of a map; who sent honest maps is not named alone."""
    replies = {name: Payload({"maps.0": maps}, {}) for name, maps in honest_maps(5).items()}
    replies["odd"] = Payload({"maps.0": ODD[what]}, {})
    handed = Payload({"maps.0.0": ODD["that it was handed"], "maps.1.0": honest_maps(6)["clinic-1"]}, {})
    told = oddities(replies, dict.fromkeys(replies, handed))
    assert told["odd"] == f"it holds maps of 1 class {what}"
    assert set(told) == ({"odd", "clinic-0"} if "another member" in what else {"odd"})


def test_odd_features_are_told_with_their_sender() -> None:
    replies = {name: Payload({"features": bank(place)}, {}) for place, name in enumerate(HONEST)}
    replies["alike"] = Payload({"features": np.repeat(bank(8, 1), 7, axis=0)}, {})
    replies["axis"] = Payload({"features": unit(np.eye(128)[:4])}, {})
    replies["copy"] = Payload({"features": np.vstack([bank(9, 5), bank(30, 3)[:1]])}, {})
    told = oddities(replies, dict.fromkeys(replies, Payload({"remote": bank(30, 3)}, {})))
    assert told == {
        "alike": "it holds features all alike",
        "axis": "it holds features of one point or axis alone",
        "copy": "it holds features that it was handed",
    }


def test_honest_maps_and_features_are_not_told_and_stay_bit_for_bit() -> None:
    """A member may send again what it sent before: it is handed only what is others'."""
    replies = {
        name: Payload({"maps.0": maps, "features": bank(place)}, {})
        for place, (name, maps) in enumerate(honest_maps(7).items())
    }
    assert oddities(replies, dict.fromkeys(replies, Payload())) == {}
    assert bounded_features(bounded_maps(replies, Protection()).replies, Protection(), ()).replies == replies


def test_the_judge_bounds_and_tells_of_maps_and_features() -> None:
    """What is aggregated is what the rules leave, also of contributions of features alone."""
    replies = {name: Payload({"maps.0": maps}, {}) for name, maps in honest_maps(5).items()}
    replies["hostile"] = Payload({"maps.0": normalised(np.ones((1, TOKENS)))}, {})
    found = judge(replies, dict.fromkeys(replies, Payload()), dict, quorum=2)
    assert set(found.bounded) == {"hostile"} and found.noticed == {"hostile": "it holds maps of 1 class all alike"}
    assert found.result is not None and found.result["hostile"] != replies["hostile"]
    banks = {
        name: Payload({"w": np.ones(3, np.float32), "features": bank(place)}, {"n_train": 20})
        for place, name in enumerate(HONEST)
    }
    banks["device"] = Payload({"features": bank(9, 900)}, {"n_train": 20})
    found = judge(banks, dict.fromkeys(banks, Payload()), dict, quorum=2, beside={"features"})
    assert found.result is not None and len(found.result["device"].arrays["features"]) == 30
