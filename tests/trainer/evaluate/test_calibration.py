"""docs/methods.md, "temperature" and "referral"."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import softmax

from edgefl_trainer.evaluate.calibration import (
    TEMPERATURE_BOUNDS,
    fit_temperature,
    mean_figures,
    negative_log_likelihood,
    refer_threshold,
    relu_evidence,
    softplus_evidence,
)


def classes_drawn_from(probabilities, rng):
    return (probabilities.cumsum(axis=1) < rng.random((probabilities.shape[0], 1))).sum(axis=1)


@pytest.mark.parametrize("truth", [0.5, 1.0, 2.5])
def test_softmax_temperature_is_recovered(truth):
    """Labels drawn from softmax(z / T): the likelihood peaks at T (Guo et al. 2017, sec. 4.2)."""
    rng = np.random.default_rng(0)
    logits = rng.normal(0.0, 2.0, (20_000, 4))
    target = classes_drawn_from(softmax(logits / truth, axis=1), rng)
    assert fit_temperature(logits, target, None, None) == pytest.approx(truth, rel=0.05)


@pytest.mark.parametrize(("truth", "prior"), [(0.4, (1.0, 1.0, 1.0)), (1.7, (0.95, 1.0, 1.05))])
def test_evidential_temperature_is_recovered(truth, prior):
    """Labels drawn from the Dirichlet mean (softplus(z/T) + W) / S, at a temperature that keeps the answers."""
    rng, prior = np.random.default_rng(1), np.array(prior)
    logits = rng.normal(1.0, 3.0, (40_000, 3))
    alpha = np.log1p(np.exp(logits / truth)) + prior
    target = classes_drawn_from(alpha / alpha.sum(axis=1, keepdims=True), rng)
    assert fit_temperature(logits, target, prior, softplus_evidence) == pytest.approx(truth, rel=0.1)


@pytest.mark.parametrize(
    ("rows", "target"), [(19, np.arange(19) % 2), (40, np.zeros(40, dtype=np.int64)), (0, np.zeros(0, dtype=np.int64))]
)
def test_too_few_rows_or_one_class_give_one(rows, target):
    logits = np.random.default_rng(2).normal(size=(rows, 2))
    assert fit_temperature(logits, target, None, None) == 1.0


def test_separable_rows_stop_at_the_bound():
    """The likelihood of perfectly sorted rows grows for ever as T falls: the bound holds."""
    target = np.arange(40) % 2
    logits = np.where(np.eye(2)[target] > 0, 5.0, -5.0) * 0.1
    assert fit_temperature(logits, target, None, None) == pytest.approx(TEMPERATURE_BOUNDS[0], rel=1e-3)


@given(seed=st.integers(0, 1000), evidence=st.sampled_from([None, softplus_evidence, relu_evidence]))
@settings(max_examples=30)
def test_the_fit_never_loses_to_no_temperature(seed, evidence):
    rng = np.random.default_rng(seed)
    logits, target = rng.normal(0.0, rng.uniform(0.1, 8.0), (60, 3)), rng.integers(0, 3, 60)
    prior = np.array([0.3, 1.2, 1.5])
    found = fit_temperature(logits, target, prior, evidence)
    low, high = TEMPERATURE_BOUNDS
    assert low * 0.999 <= found <= high * 1.001
    assert negative_log_likelihood(logits, target, prior, evidence, found) <= negative_log_likelihood(
        logits, target, prior, evidence, 1.0
    )


def shown(logits, prior, seen, temperature):
    """The class of the largest alpha among those that are known (docs/methods.md 1.3), −1 without evidence; and whether
    another class has the largest of all, which a person is told in its place."""
    found = []
    for row in logits / temperature:
        alpha = [np.log1p(np.exp(value)) + weight for value, weight in zip(row, prior, strict=True)]
        known = [index for index in range(len(alpha)) if seen[index]]
        if len(alpha) / sum(alpha) >= 0.999:
            found.append((-1, False))
        else:
            found.append((max(known, key=alpha.__getitem__), not seen[max(range(len(alpha)), key=alpha.__getitem__)]))
    return np.array(found)


def changed(logits, prior, seen, temperature):
    """Share of the rows that are shown something else than without a temperature."""
    return (shown(logits, prior, seen, temperature) != shown(logits, prior, seen, 1.0)).any(axis=1).mean()


@given(seed=st.integers(0, 1000), shift=st.floats(-4.0, 1.0), skewed=st.booleans())
@settings(max_examples=30)
def test_a_temperature_keeps_the_answers(seed, shift, skewed):
    """At most one of fifty rows is shown another answer: a smaller temperature takes evidence from classes that
    have little, and what is left names the class of the largest prior."""
    rng = np.random.default_rng(seed)
    logits, target = rng.normal(shift, 1.0, (200, 4)), rng.choice(4, 200, p=[0.7, 0.2, 0.06, 0.04])
    logits[np.arange(200), target] += 1.0
    prior = 4 / 3 * (1 - np.bincount(target, minlength=4) / 200) if skewed else np.ones(4)
    seen = [True, True, True, bool(seed % 2)]
    found = fit_temperature(logits, target, prior, softplus_evidence, seen=seen)
    assert changed(logits, prior, seen, found) <= 0.02


@pytest.mark.parametrize("counts", [(230, 180, 190), (200, 200), (200, 190)])
def test_no_answer_is_lost_to_a_class_that_the_site_never_saw(counts):
    """Of eight classes those without a row have the largest prior. Where the others are equally common their priors
    are equal, so no temperature changes which of them is named, but whether it is shown."""
    rng, known = np.random.default_rng(0), len(counts)
    prior = 8 / 7 * (1 - np.pad(counts, (0, 8 - known)) / sum(counts))
    target = rng.integers(0, known, 300)
    logits = rng.normal(-1.0, 1.0, (300, 8))
    logits[:, known:] -= 3.0
    logits[np.arange(300), target] += 2.0
    seen = [index < known for index in range(8)]
    found = fit_temperature(logits, target, prior, softplus_evidence, seen=seen)
    assert changed(logits, prior, seen, 0.1) > 0.02 >= changed(logits, prior, seen, found)


@pytest.mark.parametrize("seed", range(5))
def test_no_temperature_that_is_allowed_is_likelier(seed):
    """Beside a grid of half per cents, in the valley that the fit found."""
    rng = np.random.default_rng(seed)
    target = rng.choice(4, 400, p=[0.6, 0.25, 0.1, 0.05])
    logits = rng.normal(-1.5, 1.0, (400, 4))
    logits[np.arange(400), target] += 1.5
    prior, seen = 4 / 3 * (1 - np.bincount(target, minlength=4) / 400), [True] * 4
    found = fit_temperature(logits, target, prior, softplus_evidence)
    beside = [one for one in found * np.exp(np.arange(-20, 21) * 0.005) if changed(logits, prior, seen, one) <= 0.02]
    least = min(negative_log_likelihood(logits, target, prior, softplus_evidence, one) for one in beside)
    assert negative_log_likelihood(logits, target, prior, softplus_evidence, found) <= least + 2e-3


def test_the_likeliest_temperature_would_name_the_rarer_class():
    """What the rule is for: twenty rows of a hundred have a little evidence for the common class. The likeliest
    temperature of all takes it away, for the others gain more, and the prior then names the other class."""
    target, prior = np.array([0] * 60 + [1] * 40), np.array([0.8, 1.2])
    logits = np.array([(-0.3, -3.0)] * 20 + [(3.0, -3.0)] * 40 + [(-3.0, 3.0)] * 40)

    def loss(temperature):
        return negative_log_likelihood(logits, target, prior, softplus_evidence, temperature)

    likeliest = min(np.geomspace(0.1, 10, 99), key=loss)
    found = fit_temperature(logits, target, prior, softplus_evidence)
    wrong = [(shown(logits, prior, [True] * 2, one)[:, 0] != target).mean() for one in (1.0, likeliest, found)]
    assert wrong == [0.0, 0.2, 0.0] and loss(likeliest) < loss(found) < loss(1.0)


def test_likelihood_by_hand():
    """relu((2, -1)/0.5) = (4, 0); W = (0.5, 1.5): p = (4.5, 1.5)/6."""
    logits, prior = np.array([[2.0, -1.0]]), np.array([0.5, 1.5])
    assert negative_log_likelihood(logits, np.array([0]), prior, relu_evidence, 0.5) == pytest.approx(-np.log(0.75))
    assert negative_log_likelihood(logits, np.array([1]), prior, relu_evidence, 0.5) == pytest.approx(-np.log(0.25))


def test_threshold_is_the_largest_vacuity_that_keeps_the_error_rate():
    """100 rows in order of vacuity, the 80 most certain right, then every second one wrong: found by enumeration."""
    vacuity = np.arange(100) / 100
    correct = (np.arange(100) < 80) | (np.arange(100) % 2 == 0)
    kept = [i for i in range(100) if np.mean(~correct[: i + 1]) <= 0.08]
    assert refer_threshold(vacuity, correct, target_error=0.08) == vacuity[max(kept)]


def test_a_model_without_tune_errors_refers_what_is_less_certain_than_all_of_them():
    vacuity = np.linspace(0.1, 0.6, 50)
    assert refer_threshold(vacuity, np.ones(50, dtype=bool)) == pytest.approx(0.6)


def test_a_weak_model_still_answers_for_half_of_its_rows():
    vacuity = np.linspace(0.1, 0.9, 40)
    found = refer_threshold(vacuity, np.zeros(40, dtype=bool))
    assert np.mean(vacuity > found) == 0.5


def test_few_rows_refer_only_where_there_is_no_evidence():
    assert refer_threshold(np.full(19, 0.5), np.ones(19, dtype=bool)) == 0.999


def test_an_entropy_is_bounded_by_its_own_ceiling():
    """Eight classes: entropies up to ln 8 = 2.08 nats, beyond any vacuity."""
    entropy = np.linspace(0.5, 2.0, 30)
    assert refer_threshold(entropy, np.ones(30, dtype=bool), ceiling=np.log(8)) == pytest.approx(2.0)
    assert refer_threshold(entropy[:5], np.ones(5, dtype=bool), ceiling=np.log(8)) == np.log(8)


@given(
    seed=st.integers(0, 10_000),
    rows=st.integers(20, 80),
    target_error=st.floats(0.0, 0.5),
    max_referred=st.floats(0.0, 0.9),
)
@settings(max_examples=60)
def test_threshold_keeps_its_bounds_for_any_rows(seed, rows, target_error, max_referred):
    rng = np.random.default_rng(seed)
    vacuity = rng.random(rows).round(1)  # ties
    correct = rng.random(rows) < 0.8
    found = refer_threshold(vacuity, correct, target_error=target_error, max_referred=max_referred)
    assert 0.0 <= found <= 0.999
    assert np.mean(np.minimum(vacuity, 0.999) > found) <= max_referred + 1e-12
    order = rng.permutation(rows)
    assert found == refer_threshold(
        vacuity[order], correct[order], target_error=target_error, max_referred=max_referred
    )


@pytest.mark.parametrize(
    ("rows", "temperature", "threshold"),
    [((20, 40, 19), 2.0, 0.4), ((3, 0, 19), (1.0 + 3.0 + 1.0) / 3, (0.3 + 0.5 + 0.999) / 3)],
)
def test_a_held_out_site_gets_the_mean_of_those_that_were_fitted(rows, temperature, threshold):
    """docs/methods.md 1.8: with fewer than 20 tune rows there is no threshold but the largest value, which is none."""
    sites = {
        "east": {"temperature": 1.0, "refer_above": 0.3},
        "north": {"temperature": 3.0, "refer_above": 0.5},
        "west": {"temperature": 1.0, "refer_above": 0.999},
    }
    found = mean_figures(sites, dict(zip(sites, rows, strict=True)))
    assert found == {"temperature": pytest.approx(temperature), "refer_above": pytest.approx(threshold)}
