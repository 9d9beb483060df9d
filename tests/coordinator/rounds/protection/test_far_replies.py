"""Replies that would pull the mean away: docs/security.md check 46 for weights, by the rule of distances."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from edgefl_coordinator.rounds.judging import FARTHEST, judge
from edgefl_coordinator.rounds.protection.bounding import Protection
from edgefl_coordinator.settings import ProtectionSettings
from edgefl_protocol import Payload

SITES = [f"clinic-{number}" for number in range(10)]
HOSTILE = SITES[:2]
SIZE = 10_000
rng = np.random.default_rng(46)
SENT = rng.normal(size=SIZE).astype(np.float32)
# docs/security.md 4: ten sites whose updates share a direction, with noise of the same length
COMMON = 0.1 * rng.normal(size=SIZE)
HONEST = {name: (SENT + COMMON + 0.1 * rng.normal(size=SIZE)).astype(np.float32) for name in SITES}


def reply(weights: np.ndarray, n_train: int = 100) -> Payload:
    arrays = {"backbone.conv": weights.reshape(100, 100), "backbone.bn.num": np.array(7)}
    return Payload(arrays, {"site_sha256": "0" * 64, "n_train": n_train})


def mean(chosen: Any) -> np.ndarray:
    """The mean by numbers of images, in float64."""
    total = sum(one.scalars["n_train"] for one in chosen.values())
    kept = [
        one.arrays["backbone.conv"] * np.float64(one.scalars["n_train"]) / total for _, one in sorted(chosen.items())
    ]
    return np.asarray(np.sum(kept, axis=0).reshape(-1))


def judged(offered: dict[str, Payload], protection: Protection | None = None) -> Any:
    broadcast = Payload({**reply(SENT).arrays, "remote": np.ones((4, 8), np.float16)}, {"phase": "train"})
    return judge(offered, dict.fromkeys(offered, broadcast), mean, quorum=2, protection=protection)


ATTACKS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "weights times 10^6": lambda weights: weights * np.float32(1e6),
    "update times 10^6": lambda weights: SENT + np.float32(1e6) * (weights - SENT),
    "update times -10": lambda weights: SENT - 10 * (weights - SENT),
    "weights times -10": lambda weights: -10 * weights,
    "largest float": lambda weights: np.full_like(weights, np.finfo(np.float32).max),
    "zero": np.zeros_like,
}


@pytest.mark.parametrize("name", ATTACKS)
def test_two_of_ten(name: str) -> None:
    """Check 46: ×10^6, ×(−10), zero from 2 of 10: the round completes, relative error at most 0.5, offenders named."""
    offered = {one: reply(ATTACKS[name](HONEST[one]) if one in HOSTILE else HONEST[one]) for one in SITES}
    verdict = judged(offered)
    expected = mean({one: reply(HONEST[one]) for one in SITES if one not in HOSTILE})
    error = np.linalg.norm(verdict.result - expected) / np.linalg.norm(expected)
    assert error <= 0.5
    if name != "zero":  # nothing is no attack on the weights' scale; it only thins the mean
        assert set(verdict.refused) == set(HOSTILE) and error < 1e-6
        assert all("times as far" in why for why in verdict.refused.values())


def test_without_the_rule_the_attacks_work() -> None:
    """The test is able to fail: the bare mean of the same replies is off by more than the bound."""
    expected = mean({one: reply(HONEST[one]) for one in SITES if one not in HOSTILE})
    for name in sorted(set(ATTACKS) - {"zero"}):
        offered = {one: reply(ATTACKS[name](HONEST[one]) if one in HOSTILE else HONEST[one]) for one in SITES}
        with np.errstate(over="ignore"):
            error = np.linalg.norm(mean(offered) - expected)
        scale = np.linalg.norm(expected - SENT if name.startswith("update") else expected)
        assert error / scale > 0.5, name


def test_honest_replies_all_count() -> None:
    verdict = judged({one: reply(HONEST[one]) for one in SITES})
    assert not verdict.refused and not verdict.problem


def test_a_larger_site_may_go_farther() -> None:
    """Steps grow with images: a hospital among devices is no offender, for its update is cut. Where nothing is cut only
    granted images count, or a claim would be an allowance."""
    far = (SENT + 15 * (HONEST["clinic-9"] - SENT)).astype(np.float32)
    offered = {one: reply(HONEST[one], 20) for one in SITES[:4]} | {"hospital": reply(far, 500)}
    assert not judged(offered).refused and set(judged(offered).bounded) == {"hospital"}
    assert set(judged({**offered, "hospital": reply(far, 30)}).refused) == {"hospital"}
    mean = ProtectionSettings(rule="mean")
    assert not judged(offered, Protection(mean, {"hospital": 500})).refused
    assert set(judged(offered, Protection(mean)).refused) == {"hospital"}
    assert set(judged(offered, Protection(mean, {"hospital": 30})).refused) == {"hospital"}


@pytest.mark.parametrize("count", [1, 2])
def test_two_replies_tell_nothing_of_each_other(count: int) -> None:
    """With fewer than three the median says nothing; nobody is blamed."""
    offered = {one: reply(HONEST[one]) for one in SITES[:count]}
    offered[SITES[0]] = reply(ATTACKS["update times 10^6"](HONEST[SITES[0]]))
    assert not judge(offered, dict.fromkeys(offered, reply(SENT)), len, quorum=1).refused


def test_where_nothing_was_learned_there_is_no_scale() -> None:
    """Most sites give back what they got (the last exchange): the one that learned something is no offender."""
    offered = {one: reply(SENT) for one in SITES[:3]} | {"clinic-9": reply(HONEST["clinic-9"])}
    assert not judged(offered).refused


def test_features_and_maps_are_not_compared() -> None:
    """What the broadcast does not hold (features, maps, the first prototypes) has rules of its own."""
    offered = {one: Payload({"features": np.ones((3, 4), np.float16)}, {"site_sha256": "0" * 64}) for one in SITES}
    verdict = judge(offered, dict.fromkeys(offered, Payload({"remote": np.ones(3)}, {})), len, quorum=2)
    assert verdict.result == 10 and not verdict.refused


def test_the_bound_lies_below_ten() -> None:
    """Check 46 names an update times −10."""
    assert 1 < FARTHEST < 10
