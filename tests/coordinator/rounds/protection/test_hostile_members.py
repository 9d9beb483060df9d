"""No member outweighs its share: docs/security.md 4, checks 46 and 47.

Ten members, two of them hostile, learn a logistic regression for 20 rounds with the real judge and FedAvg's real mean.
"""

import itertools
import statistics
from collections.abc import Callable, Mapping

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from edgefl_coordinator.cli import main
from edgefl_coordinator.rounds.judging import judge
from edgefl_coordinator.rounds.protection import updates
from edgefl_coordinator.rounds.protection.bounding import Protection, bounded_claims, bounded_updates
from edgefl_coordinator.settings import CoordinatorHome, ProtectionSettings, load_settings
from edgefl_protocol import Payload
from edgefl_trainer.learning.averaging import sample_weights, weighted_mean

SITES = [f"clinic-{number}" for number in range(10)]
HOSTILE = SITES[:2]
DIMENSIONS, ROUNDS, IMAGES = 20, 20, 200
Weights = np.ndarray


def rows(rng: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Two classes that a plane divides with some noise; the last value is a constant."""
    target = rng.integers(0, 2, count)
    values = rng.normal(size=(count, DIMENSIONS)) + np.where(target, 1, -1)[:, None] * np.linspace(0, 0.6, DIMENSIONS)
    return np.hstack([values, np.ones((count, 1))]), target


RNG = np.random.default_rng(47)
TRAIN = {name: rows(RNG, IMAGES) for name in SITES}
TEST = rows(RNG, 2000)


def learned(weights: Weights, values: np.ndarray, target: np.ndarray, steps: int = 5, rate: float = 0.5) -> Weights:
    """Gradient descent on the cross-entropy."""
    for _ in range(steps):
        found = 1 / (1 + np.exp(-np.clip(values @ weights, -500, 500)))
        weights = weights - rate * values.T @ (found - target) / len(target)
    return weights


def accuracy(weights: Weights) -> float:
    values, target = TEST
    return float(np.mean((values @ weights > 0) == target))


def sign_flip(sent: Weights, honest: list[Weights]) -> Weights:
    return sent - 8 * (np.mean(honest, axis=0) - sent)


def little_is_enough(sent: Weights, honest: list[Weights]) -> Weights:
    """Baruch et al., NeurIPS 2019: the mean of the honest, 1.5 deviations to the other side."""
    return np.asarray(np.mean(honest, axis=0) - 1.5 * np.std(honest, axis=0) * np.sign(np.mean(honest, axis=0) - sent))


def replaced(sent: Weights, honest: list[Weights]) -> Weights:
    """Bagdasaryan et al., AISTATS 2020: a model that calls everything the first class, scaled up."""
    return sent + 100 * (np.r_[np.zeros(DIMENSIONS), -10.0] - sent)


def label_flip(sent: Weights, honest: list[Weights]) -> Weights:
    values, target = TRAIN[HOSTILE[0]]
    return learned(sent, values, 1 - target, steps=25)


ATTACKS: dict[str, Callable[[Weights, list[Weights]], Weights]] = {
    "sign flip": sign_flip,
    "a little is enough": little_is_enough,
    "replacement": replaced,
    "label flip": label_flip,
    "usual length": lambda sent, honest: sent - (np.mean(honest, axis=0) - sent),  # only its claim makes it dangerous
}
RULES = ["clip", "median", "trimmed-mean", "mixed-mean", "multi-krum"]


def payload(weights: Weights, images: int = IMAGES) -> Payload:
    return Payload(
        {"head.weight": np.clip(weights, -1e9, 1e9).astype(np.float32)}, {"site_sha256": "0" * 64, "n_train": images}
    )


def federation(attack: str | None, protection: Protection | None, claimed: int = 1_000_000) -> float:
    """Learn for 20 rounds and return the accuracy; without protection FedAvg's mean takes whatever comes."""

    def take(replies: Mapping[str, Payload]) -> Weights:
        return np.asarray(weighted_mean(replies, sample_weights(replies))["head.weight"], np.float64)

    weights = np.zeros(DIMENSIONS + 1)
    for _ in range(ROUNDS):
        honest = {name: learned(weights, *TRAIN[name]) for name in SITES if attack is None or name not in HOSTILE}
        replies = {name: payload(found) for name, found in honest.items()}
        if attack is not None:
            hostile = ATTACKS[attack](weights, list(honest.values()))
            replies |= {name: payload(hostile, claimed) for name in HOSTILE}
        if protection is None:
            weights = take(replies)
            continue
        verdict = judge(replies, dict.fromkeys(replies, payload(weights)), take, quorum=2, protection=protection)
        assert verdict.result is not None, verdict.problem
        weights = verdict.result
    return accuracy(weights)


@pytest.fixture(scope="module")
def undisturbed() -> float:
    """The accuracy of ten honest members under the usual bounds."""
    return federation(None, Protection())


@pytest.fixture(scope="module")
def unbounded() -> float:
    """The accuracy of ten honest members under FedAvg's mean alone."""
    return federation(None, None)


@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.parametrize("rule", RULES)
def test_twenty_rounds_with_a_fifth_hostile(attack: str, rule: str, undisturbed: float) -> None:
    """Check 47: accuracy falls by at most 3 points, whatever the hostile fifth claims and sends."""
    assert undisturbed > 0.85
    protection = Protection(ProtectionSettings(rule=rule))  # type: ignore[arg-type]
    assert federation(attack, protection) >= undisturbed - 0.03


@pytest.mark.parametrize("attack", ["sign flip", "replacement", "label flip", "usual length"])
def test_without_protection_the_attacks_work(attack: str, unbounded: float) -> None:
    """The test above is able to fail. "A little is enough" costs a point here even then: a fifth are too few for it."""
    assert federation(attack, None) < unbounded - 0.03


def test_honest_rounds_are_the_mean_itself(undisturbed: float, unbounded: float) -> None:
    """With honest, alike members no bit differs from FedAvg without any bound."""
    assert undisturbed == unbounded


DIRECTION = st.lists(st.floats(-1, 1), min_size=DIMENSIONS + 1, max_size=DIMENSIONS + 1).filter(any)
HONEST_CLAIMS = st.one_of(st.just([IMAGES] * 4), st.lists(st.integers(1, 10**4), min_size=4, max_size=4))


def moved_by_one(protection: Protection, claims: list[int], claimed: int, update: Weights) -> tuple[float, float]:
    """How far one more than four honest members moves the mean, and how long the longest honest update is."""
    sent, rng = payload(np.zeros(DIMENSIONS + 1)), np.random.default_rng(5)
    honest = {name: payload(rng.normal(size=DIMENSIONS + 1), one) for name, one in zip(SITES, claims, strict=False)}
    replies = {**honest, "hostile": payload(update, claimed)}
    weighed = bounded_claims(replies, protection).replies
    found = bounded_updates(weighed, dict.fromkeys(replies, sent), protection).replies
    weights = sample_weights(found)
    part = weights["hostile"] / sum(weights.values()) * (updates.distance(found["hostile"], sent) or 0)
    return part, max(updates.distance(one, sent) or 0 for one in honest.values())


@given(HONEST_CLAIMS, st.integers(1, 10**6), st.floats(1e-3, 1e6), DIRECTION)
def test_how_far_one_of_five_moves_the_mean(claims, claimed, scale, direction) -> None:
    """6/7 of an update at most: 1.5 of 1.5 + 2 votes where two honest members claim next to nothing, twice as long;
    6/11 with 1.5 of 1.5 + 4 votes, where the claims are alike."""
    part, longest = moved_by_one(Protection(), claims, claimed, scale * np.array(direction))
    assert part <= longest * (6 / 11 if len(set(claims)) == 1 else 6 / 7) * 1.0001


@pytest.fixture(scope="module")
def new_federation(tmp_path_factory: pytest.TempPathFactory) -> Protection:
    """The bounds that `init` writes into config.toml."""
    home = tmp_path_factory.mktemp("home") / "new"
    words = ["init", str(home), "--federation", "skin", "--classes", "nevus,other", "--backbone", "tiny"]
    made = CliRunner().invoke(main, [*words, "--preset", "tiny"])
    assert made.exit_code == 0, made.stderr
    return Protection(load_settings(CoordinatorHome(home)).protection)


def test_a_new_federation_bounds_everybody_alike(new_federation: Protection) -> None:
    """docs/decisions/0065: of five alike members one moves the mean by its fifth, whatever it claims and sends."""
    assert (new_federation.settings.claim_most, new_federation.settings.norm_most) == (1, 1)
    rng, sent = np.random.default_rng(65), payload(np.zeros(DIMENSIONS + 1))
    changes = [change / np.linalg.norm(change) for change in rng.normal(size=(4, DIMENSIONS + 1))]
    honest = {name: payload(change) for name, change in zip(SITES, changes, strict=False)}
    without = np.sum(changes, axis=0) / 5

    def mean(replies: Mapping[str, Payload]) -> Weights:
        return np.asarray(weighted_mean(replies, sample_weights(replies))["head.weight"], np.float64)

    for times in (100, 7):
        replies = {**honest, "hostile": payload(-times * changes[0], 1_000_000)}
        broadcasts = dict.fromkeys(replies, sent)
        bounded = bounded_updates(bounded_claims(replies, new_federation).replies, broadcasts, new_federation)
        assert np.linalg.norm(mean(bounded.replies) - without) == pytest.approx(1 / 5, rel=1e-5)
    verdict = judge(replies, broadcasts, mean, quorum=2, protection=new_federation)  # 100 times is refused before
    assert verdict.result is not None and not verdict.refused and "hostile" in verdict.bounded
    assert np.linalg.norm(verdict.result - without) == pytest.approx(1 / 5, rel=1e-5)


@given(HONEST_CLAIMS, st.integers(1, 10**6), st.floats(1e-3, 1e6), DIRECTION)
def test_how_far_one_of_five_moves_the_mean_of_a_new_federation(claims, claimed, scale, direction) -> None:
    """A third of an update at most, where two honest members claim next to nothing; a fifth where claims are alike."""
    bounds = Protection(ProtectionSettings(claim_most=1, norm_most=1))
    part, longest = moved_by_one(bounds, claims, claimed, scale * np.array(direction))
    assert part <= longest * (1 / 5 if len(set(claims)) == 1 else 1 / 3) * 1.0001


def test_a_claim_weighs_one_and_a_half_times_the_median_or_what_was_granted() -> None:
    """Weights are bounded by the round's median claim and by the operator's grant; the member is told of."""
    offered = {name: payload(np.zeros(3), 100) for name in SITES[:4]} | {"big": payload(np.zeros(3), 5000)}
    found = bounded_claims(offered, Protection())
    assert found.replies["big"].scalars["n_train"] == 150 and set(found.told) == {"big"}
    granted = bounded_claims(offered, Protection(granted={"big": 4000, "clinic-0": 50}))
    assert {name: reply.scalars["n_train"] for name, reply in granted.replies.items()} == {
        "big": 4000, "clinic-0": 50, "clinic-1": 100, "clinic-2": 100, "clinic-3": 100,
    }  # fmt: skip


def test_counts_of_classes_are_bounded_by_their_sum() -> None:
    """FedProto weighs a prototype by its class's images, `n.<k>`: an honest site may have one class alone."""
    usual = {name: Payload({}, {"n.0": 50, "n.7": 50}) for name in SITES[:4]}
    offered = {**usual, "one": Payload({}, {"n.0": 100}), "big": Payload({}, {"n.0": 900_000, "n.3": 100_000})}
    found = bounded_claims(offered, Protection())
    assert found.replies["one"].scalars == {"n.0": 100} and set(found.told) == {"big"}
    assert found.replies["big"].scalars == {"n.0": 135, "n.3": 15}


def test_a_class_with_few_images_is_not_bounded_away() -> None:
    usual = {name: Payload({}, {"n.0": 50, "n.7": 50}) for name in SITES[:4]}
    found = bounded_claims({**usual, "hospital": Payload({}, {"n.0": 5000, "n.2": 3})}, Protection())
    assert found.replies["hospital"].scalars["n.2"] == 1


@pytest.mark.parametrize("large", [[10**12, 0], [2**62, 2**62]], ids=["large", "a sum of 2**63"])
def test_counts_in_an_array_are_bounded_as_claims_are(large) -> None:
    """SGPT weighs keys by how often a site chose each group: docs/methods.md 5.3. The second sum has no int64."""
    offered = {name: Payload({"selections": np.array([60, 40])}, {"n_train": 100}) for name in SITES[:4]}
    offered["big"] = Payload({"selections": np.array(large)}, {"n_train": 100})
    found = bounded_claims(offered, Protection())
    assert found.replies["big"].arrays["selections"].tolist() == ([150, 0] if large[1] == 0 else [75, 75]) and set(
        found.told
    ) == {"big"}
    assert all(found.replies[name] is offered[name] for name in SITES[:4])


def bounded_alone(replies: dict[str, Payload], broadcast: Payload, rule: str = "clip") -> dict[str, Payload]:
    protection = Protection(ProtectionSettings(rule=rule))  # type: ignore[arg-type]
    return bounded_updates(replies, dict.fromkeys(replies, broadcast), protection).replies


@pytest.mark.parametrize(
    ("far", "most", "told"),
    [
        (1.0004, 1.0, "changed 1.0004 times as much as the median, and count as much as the median"),
        (7.0, 1.5, "changed 7 times as much as the median, and count as 1.5 times"),
    ],
)
def test_what_was_cut_is_told_with_numbers_that_differ(far: float, most: float, told: str) -> None:
    """`changed 1 times as much as the median, and count as 1 times` told an operator nothing."""
    one = np.ones(4)
    replies = {site: Payload({"head.weight": one}, {}) for site in SITES[:4]}
    replies["far"] = Payload({"head.weight": far * one}, {})
    protection = Protection(ProtectionSettings(rule="clip", norm_most=most))
    sent = Payload({"head.weight": 0 * one}, {})
    assert bounded_updates(replies, dict.fromkeys(replies, sent), protection).told["far"].endswith(told)


def test_what_was_never_broadcast_is_bounded_too() -> None:
    """First prototypes and moments of features: there is nothing yet that they could lie far from."""
    for name in ("prototypes.3", "moments.cls", "prompts.change"):
        replies = {site: Payload({name: np.ones((2, 4), np.float32)}, {}) for site in SITES[:4]}
        replies["far"] = Payload({name: np.full((2, 4), 1e30, np.float32)}, {})
        found = bounded_alone(replies, Payload())
        np.testing.assert_allclose(found["far"].arrays[name], 2, rtol=1e-6)
        assert all(found[site] is replies[site] for site in SITES[:4])


def test_one_kind_of_array_is_no_allowance_for_another() -> None:
    """Running variances drift by 5, the head by 0.01: a head that moves by 0.5 is cut."""
    sent = Payload({"head.weight": np.zeros((2, 8)), "backbone.bn.running_var": np.zeros(1000)}, {})
    honest = Payload({"head.weight": np.full((2, 8), 0.01), "backbone.bn.running_var": np.full(1000, 5.0)}, {})
    hostile = Payload({"head.weight": np.full((2, 8), 0.5), "backbone.bn.running_var": np.full(1000, 5.0)}, {})
    found = bounded_alone({**dict.fromkeys(SITES[:4], honest), "hostile": hostile}, sent)["hostile"]
    np.testing.assert_allclose(found.arrays["head.weight"], 0.02)
    np.testing.assert_array_equal(found.arrays["backbone.bn.running_var"], 5.0)


def test_a_site_without_a_class_sends_no_update_of_it() -> None:
    """PEP-FedPT's prototypes are one array, zeros for a class that a site lacks: they stay zeros, and are not far."""
    rng = np.random.default_rng(1)
    sent = Payload({"prototypes": rng.normal(size=(2, 8, 4))}, {})
    moved = sent.arrays["prototypes"] + 0.1
    few = np.where(np.arange(8)[None, :, None] < 2, moved, 0.0)
    replies = {
        **{name: Payload({"prototypes": moved}, {}) for name in SITES[:4]},
        "few": Payload({"prototypes": few}, {}),
    }
    for rule in RULES:
        found = bounded_alone(replies, sent, rule)
        if "few" in found:
            np.testing.assert_allclose(found["few"].arrays["prototypes"], few)


@pytest.mark.parametrize("rule", RULES)
def test_a_class_of_two_is_bounded_whatever_the_rule(rule: str) -> None:
    """Of two prototypes of a class nobody can tell which is right, but neither outweighs the other without bound."""
    arrays = {"prototypes.0": np.ones(4), "prototypes.1": np.ones(4)}
    replies = {name: Payload({"prototypes.0": np.ones(4)}, {}) for name in SITES[:4]}
    replies |= {"rare": Payload(arrays, {}), "hostile": Payload({**arrays, "prototypes.1": np.full(4, 1e6)}, {})}
    found = bounded_alone(replies, Payload(), rule)
    if "hostile" in found:
        np.testing.assert_allclose(found["hostile"].arrays["prototypes.1"], 2)


def test_who_did_not_move_tells_what_is_usual() -> None:
    """Most give back what they got; of two that moved the shorter bounds the longer."""
    replies = {name: payload(np.zeros(4)) for name in SITES[:3]}
    replies |= {"small": payload(np.full(4, 0.1)), "large": payload(np.full(4, 1e6))}
    found = bounded_alone(replies, payload(np.zeros(4)))
    np.testing.assert_allclose(found["large"].arrays["head.weight"], 0.2, rtol=1e-6)


def test_krum_counts_what_a_reply_leaves_out() -> None:
    """A member that sends one array of two is not nearest to everybody."""
    sent = Payload({"a": np.zeros(4), "b": np.zeros(4)}, {})
    rng = np.random.default_rng(2)
    full = [Payload({"a": np.ones(4) + 0.01 * rng.normal(size=4), "b": np.ones(4)}, {}) for _ in range(5)]
    part = Payload({"a": np.ones(4)}, {})
    assert updates.farthest([*full, part], [sent] * 6, 0.15) == [5]


def stacked(count: int) -> st.SearchStrategy[list[list[float]]]:
    return st.lists(st.lists(st.floats(-100, 100), min_size=3, max_size=3), min_size=count, max_size=count)


@given(stacked(7))
def test_centres_against_plain_python(found: list[list[float]]) -> None:
    """Median and trimmed mean, number by number, as Yin et al. define them."""
    by_number = list(zip(*found, strict=True))
    np.testing.assert_allclose(updates.median(np.array(found)), [statistics.median(one) for one in by_number])
    trimmed = [statistics.fmean(sorted(one)[2:-2]) for one in by_number]  # a fifth of seven, rounded up
    np.testing.assert_allclose(updates.trimmed_mean(np.array(found), 0.2), trimmed, atol=1e-9)


@given(stacked(7))
def test_mixing_against_plain_python(found: list[list[float]]) -> None:
    """Allouah et al., algorithm 2: each becomes the mean of its n − f nearest, itself among them."""
    sent = Payload({"w": np.zeros(3)}, {})
    replies = [Payload({"w": np.array(one)}, {}) for one in found]
    mixed = updates.nearest_mixing(replies, [sent] * 7, 0.2) @ np.array(found)
    for one, got in zip(found, mixed, strict=True):
        apart = [sum((a - b) ** 2 for a, b in zip(one, two, strict=True)) for two in found]
        near = sorted(apart)[4]  # of five, itself among them
        sure = [two for two, far in zip(found, apart, strict=True) if far < near - 1e-6]
        tied = [two for two, far in zip(found, apart, strict=True) if abs(far - near) <= 1e-6]
        wanted = [np.mean([*sure, *some], axis=0) for some in itertools.combinations(tied, 5 - len(sure))]
        assert min(float(np.abs(got - one_of).max()) for one_of in wanted) < 1e-6


def test_mixing_where_some_lack_an_array() -> None:
    """Of an array that three of four hold, each is mixed with those of its nearest that hold it."""
    sent = Payload({"a": np.zeros(2), "b": np.zeros(1)}, {})
    values = [(0.0, 1.0), (0.1, 2.0), (0.2, 3.0)]
    full = [Payload({"a": np.full(2, a), "b": np.array([b])}, {}) for a, b in values]
    part = Payload({"a": np.full(2, 9.0)}, {})
    mixing = updates.nearest_mixing([*full, part], [sent] * 4, 0.25)
    found = updates.centred([*full, part], [sent] * 4, updates.median, 3, mixing)
    assert {float(one.arrays["b"][0]) for one in found[:3]} == {2.0} and "b" not in found[3].arrays


@given(stacked(7))
def test_krum_against_plain_python(found: list[list[float]]) -> None:
    """Blanchard et al.: the score is the sum of squared distances to the n − f − 2 nearest."""
    sent = Payload({"w": np.zeros(3)}, {})
    replies = [Payload({"w": np.array(one)}, {}) for one in found]
    scores = []
    for one in range(7):
        apart = [sum((a - b) ** 2 for a, b in zip(found[one], found[two], strict=True)) for two in range(7)]
        scores.append(sum(sorted(apart)[: 1 + 7 - 2 - 2]))  # the nearest is the update itself
    left_out = updates.farthest(replies, [sent] * 7, 0.2)
    kept = [scores[place] for place in range(7) if place not in left_out]
    assert len(left_out) == 2 and min(scores[place] for place in left_out) >= max(kept) - 1e-6


@pytest.mark.parametrize(("replies", "hostile"), [(1, 0), (2, 0), (3, 1), (4, 1), (5, 1), (6, 2), (10, 2), (11, 3)])
def test_how_many_may_be_hostile(replies: int, hostile: int) -> None:
    assert updates.hostile_among(replies, 0.2) == hostile
