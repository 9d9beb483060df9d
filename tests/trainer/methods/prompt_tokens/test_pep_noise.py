"""The noise on PEP-FedPT's class means against appendix A.4.1 (arXiv 2510.25372; docs/methods.md 6)."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from tests.trainer.conftest import run
from tests.trainer.methods.prompt_tokens.test_pep_fedpt import first_broadcast, make

from edgefl_protocol import Payload
from edgefl_trainer.contract import State
from edgefl_trainer.errors import SettingError
from edgefl_trainer.learning.prototypes import LaplaceNoise, class_prototypes, contributions
from edgefl_trainer.methods.pep_fedpt import TRAINED
from edgefl_trainer.models.inserts import Mixed


class Recorded:
    """A generator that adds no noise and remembers the scales it was asked for."""

    def __init__(self):
        self.scales = []

    def laplace(self, location, scale, size):
        assert location == 0.0
        self.scales.append(scale)
        return np.zeros(size)


def tokens_of(counts: dict[int, int], seed: int = 0, width: int = 6) -> tuple[np.ndarray, np.ndarray]:
    """(n, 2, D) tokens and their labels."""
    targets = np.repeat(list(counts), list(counts.values())).astype(np.int64)
    return np.random.default_rng(seed).normal(size=(len(targets), 2, width)).astype(np.float32), targets


@pytest.mark.parametrize("known", [True, False])
def test_noise_has_the_scale_of_appendix_a41(known):
    """S = 2·max ||cls − mu||_1/N, scale S/epsilon; mu the federation's prototype, or the site's mean without one."""
    tokens, targets = tokens_of({0: 4, 2: 9})
    centres = np.full((2, 3, 6), 0.5 if known else 0.0, dtype=np.float32)
    rng = Recorded()
    sent = LaplaceNoise(0.2, 0.0).prototypes(tokens, targets, centres, rng)
    expected = []
    for label in (0, 2):
        for j in range(2):
            rows = tokens[targets == label][:, j].astype(np.float64)
            mu = centres[j, label] if known else rows.mean(axis=0)
            expected.append(2 * max(np.abs(row - mu).sum() for row in rows) / len(rows) / 0.2)
    np.testing.assert_allclose(rng.scales, expected, rtol=1e-9)
    np.testing.assert_allclose(sent, class_prototypes(tokens, targets, 3), atol=1e-6)


def test_what_is_sent_is_laplace_distributed():
    """Kolmogorov-Smirnov on 4,000 coordinates against scipy's Laplace of that scale."""
    tokens, targets = tokens_of({0: 5}, width=2000)
    centres = np.zeros((2, 1, 2000), dtype=np.float32)
    sent = LaplaceNoise(0.5, 3.0).prototypes(tokens, targets, centres, np.random.default_rng(4))
    clean = LaplaceNoise(0.5, 3.0).prototypes(tokens, targets, centres, Recorded())
    assert stats.kstest((sent - clean).ravel(), stats.laplace(scale=2 * 3.0 / 5 / 0.5).cdf).pvalue > 0.01


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("radius", [0.0, 2.0])
def test_a_class_of_one_image_is_not_sent(known, radius):
    """docs/methods.md 6: whatever the centre, and with a bound too."""
    tokens, targets = tokens_of({0: 1, 1: 2})
    centres = np.full((2, 3, 6), 0.5 if known else 0.0, dtype=np.float32)
    sent = LaplaceNoise(0.2, radius).prototypes(tokens, targets, centres, np.random.default_rng(0))
    assert not sent[:, 0].any() and sent[:, 1].any()
    assert contributions({"a": Payload({"prototypes": sent}, {})})[1].tolist() == [[0, 1, 0], [0, 1, 0]]


def test_equal_images_are_not_sent_without_noise():
    """docs/methods.md 6: around their own mean S is 0, and the embedding itself would go out."""
    tokens, targets = tokens_of({0: 3, 1: 3})
    tokens[targets == 0] = 1.0
    sent = LaplaceNoise(0.2, 0.0).prototypes(tokens, targets, np.zeros((2, 2, 6), np.float32), np.random.default_rng(0))
    assert not sent[:, 0].any() and sent[:, 1].any()


@settings(max_examples=60)
@given(seed=st.integers(0, 2**32 - 1), radius=st.floats(0.01, 20), known=st.booleans(), far=st.floats(0, 1e6))
def test_clipped_means_move_no_further_than_the_noise_covers(seed, radius, known, far):
    """docs/methods.md 6: with `dp_clip_l1=B` replacing one image moves the mean by at most 2B/N in L1."""
    tokens, targets = tokens_of({0: 4}, seed)
    centres = np.full((2, 1, 6), 0.3 if known else 0.0, dtype=np.float32)
    other = tokens.copy()
    other[1] = far
    noise, before, later = LaplaceNoise(0.2, radius), Recorded(), Recorded()
    moved_by = np.abs(
        noise.prototypes(tokens, targets, centres, before).astype(np.float64)
        - noise.prototypes(other, targets, centres, later)
    ).sum(axis=-1)
    assert before.scales == later.scales == pytest.approx([2 * radius / 4 / 0.2] * 2)  # the data do not show in it
    assert (moved_by <= 2 * radius / 4 + 1e-4 * radius + 1e-5).all()


def test_noise_is_fresh_each_round_and_its_cost_is_told(make_task, make_site):
    """Three positions a round at epsilon 0.2: 0.6 a round, with the warm start 1.8 in two rounds (composition)."""
    task, heard = make_task(rounds=2), []
    site = replace(make_site(task), report=heard.append)
    method = make(dp_epsilon=0.2, dp_clip_l1=5.0)
    _, broadcasts = first_broadcast(method, task, {"a": site})
    state, first = method.local_round(site, State({}, {"epsilon_spent": 0.6}), broadcasts["a"])
    assert first.scalars["epsilon_spent"] == pytest.approx(1.2) == state.values["epsilon_spent"]
    again = Payload(broadcasts["a"].arrays, {**broadcasts["a"].scalars, "round": 2})
    state, second = method.local_round(site, state, again)
    assert state.values["epsilon_spent"] == pytest.approx(1.8)
    assert not np.array_equal(first.arrays["prototypes"], second.arrays["prototypes"])
    warnings = [fact["warning"] for fact in heard if "warning" in fact]
    assert warnings == [
        "class means of site a cost epsilon 0.6 a round and 1.8 in all, for one picture (several of one patient cost "
        "more), given the prompts and head, and how many images each class has; prompts and weights leave without "
        "noise. The noise comes from the seed: whoever knows that can take it off."
    ]
    clean = make()
    _, reply = clean.local_round(site, State(), broadcasts["a"])
    assert "epsilon_spent" not in reply.scalars
    for name in TRAINED:  # the noise is on class means only
        np.testing.assert_array_equal(reply.arrays[name], first.arrays[name])


def test_the_papers_noise_tells_no_epsilon(make_task, make_site):
    """docs/methods.md 6: its scale comes from the data, so epsilon is no guarantee: none is counted, sent or told."""
    task, heard = make_task(rounds=2), []
    site = replace(make_site(task), report=heard.append, noise="secret")
    method = make(dp_epsilon=0.2)
    _, broadcasts = first_broadcast(method, task, {"a": site})
    state, reply = method.local_round(site, State({}, {"releases": 1}), broadcasts["a"])
    assert state.values == {"releases": 2} and "epsilon_spent" not in reply.scalars
    warnings = [fact["warning"] for fact in heard if "warning" in fact]
    assert warnings == [
        "noise on class means of site a is no guarantee: its scale comes from the data that it should hide (--set "
        "dp_clip_l1=B gives one). It is on them only; prompts and weights leave without noise."
    ]


def test_a_run_under_the_papers_noise_ends_without_an_epsilon(ward, tmp_path):
    """In text and in `summary.json`, where it is null; with a bound it stands there."""
    settings = {"paper": (), "bound": ("--set", "dp_clip_l1=5")}
    ends = {
        name: run("pep-fedpt", ward, tmp_path / name, "tiny", "--set", "dp_epsilon=0.2", *more, "--rounds", 1)
        for name, more in settings.items()
    }
    found = {name: json.loads((tmp_path / name / "summary.json").read_text()) for name in ends}
    assert found["paper"]["epsilon_spent"] is None and "epsilon 1.2" not in ends["paper"].out + ends["paper"].err
    assert "privacy noise: no guarantee, so no epsilon is told: its scale comes from the data" in ends["paper"].out
    assert found["bound"]["epsilon_spent"] == dict.fromkeys(("east", "west"), pytest.approx(1.2))
    assert "privacy noise: epsilon 1.2 at delta 0 in all" in ends["bound"].out
    for end in ends.values():
        assert "The noise is on class means only; prompts, weights and features left the sites without" in end.out


def test_the_noise_of_a_site_that_keeps_it_secret_cannot_be_drawn_again(make_task, make_site):
    """docs/methods.md 6: who knows seed, site and round can take seeded noise off; secret noise differs each time."""
    task = make_task()
    site, method = make_site(task), make(dp_epsilon=0.2)
    _, broadcasts = first_broadcast(method, task, {"a": site})
    sent = {
        noise: [
            method.local_round(replace(site, noise=noise), State(), broadcasts["a"])[1].arrays["prototypes"]
            for _ in range(2)
        ]
        for noise in ("seeded", "secret")
    }
    np.testing.assert_array_equal(*sent["seeded"])
    assert not np.array_equal(*sent["secret"])


def test_under_the_papers_noise_scores_are_near_the_prior():
    """docs/methods.md 6: at D = 768, N = 50, epsilon 0.2 the noise is far above the signal.

    Without noise a class's images give it nearly the whole score; with it they give it what its share is, near mixing
    by the prior alone.
    """
    rng, shares = np.random.default_rng(1), torch.tensor([0.5, 0.3, 0.2])
    centre, offsets = rng.normal(size=768), rng.normal(size=(3, 768))
    targets = np.repeat(np.arange(3), 50)
    tokens = (centre + offsets[targets] + 0.5 * rng.normal(size=(150, 768))).astype(np.float32)[:, None]
    none = np.zeros((1, 3, 768), dtype=np.float32)

    def scores(prototypes: np.ndarray) -> np.ndarray:
        return Mixed().scores(torch.from_numpy(tokens[:, 0]), torch.from_numpy(prototypes[0]), shares).numpy()

    clean = scores(class_prototypes(tokens, targets, 3))
    noisy = np.mean(
        [scores(LaplaceNoise(0.2, 0.0).prototypes(tokens, targets, none, np.random.default_rng(n))) for n in range(60)],
        axis=0,
    )
    for k in range(3):
        assert clean[targets == k, k].mean() > 0.99
        assert noisy[targets == k, k].mean() == pytest.approx(float(shares[k]), abs=0.1)


def test_a_radius_without_noise_is_refused():
    """A site that clips and adds nothing would send its class means as they are."""
    with pytest.raises(SettingError, match=r"dp_clip_l1 is 5\.0, but there is no noise: give dp_epsilon too"):
        make(dp_clip_l1=5.0)
    assert make(dp_clip_l1=5.0, dp_epsilon=0.2).dp_clip_l1 == 5.0
