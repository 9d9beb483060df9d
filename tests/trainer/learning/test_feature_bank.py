"""The feature exchange: FedCLF (arXiv 2208.11278) section III A; docs/methods.md 2, feature exchange."""

import math
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import brentq
from scipy.stats import norm

from edgefl_protocol import Payload
from edgefl_protocol.rules import feature_rows
from edgefl_trainer.errors import SettingError, TrainingError
from edgefl_trainer.learning.unlabelled import feature_bank
from edgefl_trainer.learning.unlabelled.feature_bank import FeatureNoise, accepted, incoming, others_features


def bank(count: int, seed: int) -> np.ndarray:
    drawn = np.random.default_rng(seed).normal(size=(count, 128))
    return (drawn / np.linalg.norm(drawn, axis=1, keepdims=True)).astype(np.float32)


def reply(rows: np.ndarray) -> Payload:
    return Payload({"features": rows}, {"n_train": 4})


def rows_of(values: np.ndarray) -> list[bytes]:
    return [row.tobytes() for row in values]


@settings(max_examples=30)
@given(sizes=st.lists(st.integers(1, 9), min_size=2, max_size=5))
def test_a_site_receives_the_union_of_all_others_and_nothing_of_its_own(sizes):
    """FedCLF eq. 2."""
    sent = {f"s{i}": bank(count, i).astype(np.float16) for i, count in enumerate(sizes)}
    held = accepted({}, {site: reply(rows) for site, rows in sent.items()}, 10)
    for site, arrays in others_features(held, sorted(sent)).items():
        wanted = [row for other, rows in sent.items() if other != site for row in rows_of(rows)]
        assert sorted(rows_of(arrays["remote"])) == sorted(wanted)


def test_the_order_tells_nothing_of_who_sent_what():
    """The same set of features has the same order, whoever sent which of them and whatever the sites are called."""
    rows = bank(12, 0).astype(np.float16)
    parts = np.random.default_rng(1).permutation(12)
    one = others_features({"features.a": rows[:6], "features.b": rows[6:]}, ["z"])
    two = others_features({"features.m": rows[parts[:2]], "features.n": rows[parts[2:]]}, ["z"])
    np.testing.assert_array_equal(one["z"]["remote"], two["z"]["remote"])
    assert rows_of(one["z"]["remote"]) != rows_of(rows)  # and is not the order in which they came


def test_sites_are_mixed_in_the_order():
    """Runs of rows of one site are as short as a fair shuffle leaves them: about half of 400 neighbours differ."""
    ours = {f"features.{site}": bank(200, i).astype(np.float16) for i, site in enumerate("ab")}
    of_a = set(rows_of(ours["features.a"]))
    is_a = np.array([row in of_a for row in rows_of(others_features(ours, ["z"])["z"]["remote"])])
    changes = np.count_nonzero(is_a[1:] != is_a[:-1])
    assert abs(changes - 199.5) < 5 * math.sqrt(399 * 0.25)


def test_a_new_bank_replaces_the_old_and_other_arrays_stay():
    start = {
        "features.a": bank(3, 1).astype(np.float16),
        "features.b": bank(2, 2).astype(np.float16),
        "head.bias": np.ones(2),
    }
    new = bank(4, 3).astype(np.float16)
    held = accepted(start, {"a": reply(new)}, 10)
    np.testing.assert_array_equal(held["features.a"], new)
    np.testing.assert_array_equal(held["features.b"], start["features.b"])
    assert held["head.bias"] is start["head.bias"]


def test_there_is_a_most_that_a_site_receives(monkeypatch):
    monkeypatch.setattr(feature_bank, "MOST_ROWS", 5)
    found = others_features({"features.a": bank(9, 1).astype(np.float16)}, ["b"])["b"]["remote"]
    assert len(found) == 5


def test_a_site_alone_receives_nothing():
    assert others_features({"features.a": bank(3, 1).astype(np.float16)}, ["a"]) == {"a": {}}
    assert incoming({}, torch.device("cpu")) is None


def test_what_travels_is_half_precision_and_arrives_at_unit_length():
    """256 bytes a row; rounding moved the lengths, which the receiver brings back to 1."""
    halved = feature_rows.sent(bank(50, 1))
    assert len(Payload(halved, {}).to_bytes()) < 50 * 128 * 2 + 200
    got = incoming({"remote": halved["features"]}, torch.device("cpu"))
    assert got.dtype == torch.float32
    np.testing.assert_allclose(got.norm(dim=1), 1.0, atol=1e-6)


GOOD = bank(4, 7).astype(np.float16)
REFUSED = {
    "no features": ({"head.bias": np.ones(2)}, r"site a sent no features"),
    "float32": ({"features": GOOD.astype(np.float32)}, r"type float32 and shape \(4, 128\); they must be float16"),
    "wrong width": ({"features": GOOD[:, :64].copy()}, r"shape \(4, 64\); they must be float16 \(n, 128\)"),
    "one row flat": ({"features": GOOD[0].copy()}, r"shape \(128,\)"),
    "too many": ({"features": bank(11, 1).astype(np.float16)}, r"sent 11 features; allowed: 1 to 10"),
    "none": ({"features": GOOD[:0]}, r"sent 0 features"),
    "longer": ({"features": (GOOD * np.float16(3))}, r"a feature of length 3; features have length 1"),
    "zero": ({"features": np.zeros((2, 128), np.float16)}, r"a feature of length 0"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_bank_is_refused_by_name(case):
    arrays, sentence = REFUSED[case]
    with pytest.raises(TrainingError, match=sentence):
        accepted({}, {"a": Payload(arrays, {"n_train": 4}), "b": reply(GOOD)}, 10)


def test_a_feature_that_is_not_finite_is_refused():
    """A payload already refuses it; the server's own check stands behind it."""
    with pytest.raises(TrainingError, match="site a sent a feature that is not finite"):
        feature_bank._checked("a", {"features": np.full((1, 128), np.inf, np.float16)}, 10)


def test_features_of_another_width_are_refused_at_the_site():
    with pytest.raises(
        TrainingError,
        match=r"^the others' features are of type float16 and shape \(2, 64\), but must be",
    ):
        incoming({"remote": np.ones((2, 64), np.float16)}, torch.device("cpu"))


def exact_epsilon(multiplier: float, delta: float) -> float:
    """Balle and Wang (arXiv 1805.06083) Theorem 8, for sensitivity 1."""

    def excess(epsilon: float) -> float:
        a, b = 1 / (2 * multiplier), epsilon * multiplier
        return norm.cdf(a - b) - math.exp(epsilon) * norm.cdf(-a - b) - delta

    return brentq(excess, 0, 300)


@pytest.mark.parametrize(("sigma", "releases"), [(2.0, 1), (10.0, 1), (20.0, 101), (10.0, 4)])
def test_epsilon_bounds_the_exact_gaussian_mechanism_closely(sigma, releases):
    """Replacing one image moves one unit vector by at most 2; k releases equal one of noise sigma / sqrt(k)."""
    told = FeatureNoise(dp_noise=sigma).epsilon(releases)
    exact = exact_epsilon(sigma / 2 / math.sqrt(releases), 1e-5)
    assert exact <= told <= 1.2 * exact


def test_noise_has_the_stated_deviation_before_it_is_brought_back_to_unit_length():
    """In high dimension the mean similarity of a noised unit vector to itself is 1 / sqrt(1 + 128 sigma²)."""
    rows, sigma = bank(2000, 1), 0.1
    noised = FeatureNoise(dp_noise=sigma).added(rows, np.random.default_rng(0))
    np.testing.assert_allclose(np.linalg.norm(noised, axis=1), 1.0, atol=1e-6)
    similar = (noised * rows).sum(axis=1).mean()
    assert similar == pytest.approx(1 / math.sqrt(1 + 128 * sigma**2), abs=0.01)


def test_without_the_accounting_library_noise_is_refused_before_anything_begins(monkeypatch):
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    FeatureNoise().check_accountant()
    with pytest.raises(SettingError, match=r"needs dp-accounting, .* edgefl-derm\[privacy\]: pip install "):
        FeatureNoise(dp_noise=1.0).check_accountant()


@pytest.mark.parametrize("wrong", [{"dp_noise": -1.0}, {"dp_noise": 1e-9}, {"dp_delta": 0.0}])
def test_values_out_of_range_are_refused(wrong):
    with pytest.raises(SettingError, match=rf"{next(iter(wrong))} is .*; allowed: "):
        FeatureNoise(**wrong)
