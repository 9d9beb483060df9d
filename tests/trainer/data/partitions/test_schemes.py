"""docs/methods.md 8.1, 8.2: what each scheme promises about who holds what, and the distributions it draws from."""

from collections import Counter, defaultdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from edgefl_trainer.data.errors import PartitionError
from edgefl_trainer.data.partitions.schemes import (
    Lesion,
    cut,
    dirichlet_by_class,
    dirichlet_by_site,
    follow,
    pathological,
)


def lesions_of(counts: dict[str, int], images: int = 1) -> list[Lesion]:
    return [Lesion(f"{label}{i}", label, images) for label, n in counts.items() for i in range(n)]


def table(lesions: list[Lesion], site_of: dict[str, int], sites: int) -> dict[str, list[int]]:
    """Class → images at each site."""
    found = {lesion.label: [0] * sites for lesion in lesions}
    for lesion in lesions:
        found[lesion.label][site_of[lesion.name]] += lesion.images
    return found


mixed = st.lists(st.tuples(st.sampled_from("abcd"), st.integers(1, 4)), min_size=30, max_size=80).map(
    lambda pairs: [Lesion(f"L{i}", label, images) for i, (label, images) in enumerate(pairs)]
)
SCHEMES = {
    "class": lambda lesions, sites, seed: dirichlet_by_class(lesions, sites, 5.0, seed, least=0),
    "site": lambda lesions, sites, seed: dirichlet_by_site(lesions, sites, 0.5, seed),
    "pathological": lambda lesions, sites, seed: pathological(
        lesions, sites, len({lesion.label for lesion in lesions}), seed
    ),
}


@pytest.mark.parametrize("scheme", SCHEMES)
@settings(max_examples=40)
@given(lesions=mixed, sites=st.integers(1, 3), seed=st.integers(0, 5), data=st.data())
def test_every_lesion_in_one_site_whatever_the_order(scheme, lesions, sites, seed, data):
    deal = SCHEMES[scheme]
    try:
        site_of = deal(lesions, sites, seed)
    except PartitionError:
        assert scheme == "pathological" and min(Counter(lesion.label for lesion in lesions).values()) < sites
        return
    assert set(site_of) == {lesion.name for lesion in lesions}
    assert set(site_of.values()) <= set(range(sites))
    assert site_of == deal(data.draw(st.permutations(lesions)), sites, seed)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_another_seed_deals_otherwise(scheme):
    lesions = lesions_of({"a": 50, "b": 50, "c": 50})
    assert len({tuple(sorted(SCHEMES[scheme](lesions, 3, seed).items())) for seed in range(6)}) == 6


@settings(max_examples=60)
@given(images=st.lists(st.integers(1, 3), max_size=30), shares=st.lists(st.integers(0, 9), min_size=1, max_size=8))
def test_cut_by_cumulative_floors(images, shares):
    """NIID-Bench's `np.split` at floors of the running share, for one image a lesion; never a site of share 0."""
    if sum(shares) == 0:
        return
    whole = np.array(shares)
    ordered = [Lesion(str(i), "a", n) for i, n in enumerate(images)]
    for given_shares in (whole, whole / whole.sum()):
        got = cut(ordered, given_shares)
        assert (np.diff(got) >= 0).all() and not set(got.tolist()) & set(np.flatnonzero(whole == 0).tolist())
    ones = [Lesion(str(i), "a", 1) for i in range(len(images))]
    places = [len(ones) * int(c) // int(whole.sum()) for c in np.cumsum(whole)[:-1]]
    expected = np.concatenate(
        [np.full(len(part), j) for j, part in enumerate(np.split(np.arange(len(ones)), places))] or [[]]
    )
    assert cut(ones, whole).tolist() == expected.astype(int).tolist()


def test_class_wise_shares_have_the_concentration_asked_for():
    """A share of Dir(α·1) over C sites is Beta(α, α(C − 1)): 300 draws of a site's share against that distribution."""
    sites, alpha, n = 5, 0.3, 10_000
    ordered = lesions_of({"a": n // 10}, images=10)
    shares = []
    for seed in range(300):
        found = table(ordered, dirichlet_by_class(ordered, sites, alpha, seed, least=0), sites)
        shares.append(found["a"][seed % sites] / n)
    floors = np.random.default_rng(1).uniform(0, 10 / n, len(shares))  # a cut lies anywhere inside a lesion
    fits = stats.kstest(np.array(shares) + floors, stats.beta(alpha, alpha * (sites - 1)).cdf)
    assert fits.pvalue > 1e-3
    misfit = stats.kstest(np.array(shares) + floors, stats.beta(1.0, sites - 1.0).cdf)
    assert misfit.pvalue < 1e-6


def test_class_wise_fills_no_site_beyond_its_even_share_but_by_its_last_class():
    """8.2: sites that already hold n/C get no more, so before its last class a site held less than n/C."""
    lesions = lesions_of(dict.fromkeys("abcdefghij", 100))
    for seed in range(20):
        found = table(lesions, dirichlet_by_class(lesions, 4, 0.3, seed), 4)
        for j in range(4):
            held = [found[label][j] for label in sorted(found)]
            last = max(k for k, n in enumerate(held) if n)
            assert sum(held[:last]) < 1000 / 4
        assert min(sum(found[label][j] for label in found) for j in range(4)) >= 10


def feddyn(counts: np.ndarray, sites: int, alpha: float, rng: np.random.Generator) -> np.ndarray:
    """(C, K) images: FedDyn's loop as docs/methods.md 8.2 tells it, with its rejections."""
    left, got = counts.copy(), np.zeros((sites, len(counts)), dtype=int)
    priors = rng.dirichlet(np.full(len(counts), alpha), sites)
    size = counts.sum() // sites
    while left.sum():
        site = rng.integers(sites)
        if got[site].sum() < size:
            k = rng.choice(len(counts), p=priors[site])
            if left[k] == 0 and priors[site][left > 0].sum() < 1e-3:
                k = rng.choice(np.flatnonzero(left))
            if left[k]:
                left[k] -= 1
                got[site, k] += 1
    return got


@pytest.mark.parametrize("alpha", [pytest.param(0.3, marks=pytest.mark.slow), 3.0])
def test_site_wise_concentration_against_the_reference_loop(alpha):
    """Mean over sites of Σ p², the purity of a site: ours and the rejection loop agree within 4 standard errors."""
    sites, classes, each = 6, 5, 24
    lesions = lesions_of(dict.fromkeys("abcde"[:classes], each))

    def purity(held: np.ndarray) -> float:
        return float(np.square(held / held.sum(axis=1, keepdims=True)).sum(axis=1).mean())

    ours, theirs = [], []
    for seed in range(40):
        found = table(lesions, dirichlet_by_site(lesions, sites, alpha, seed), sites)
        ours.append(purity(np.array(list(found.values())).T))
        rng = np.random.default_rng(seed)
        theirs.append(purity(feddyn(np.full(classes, each), sites, alpha, rng)))
    error = np.sqrt(np.var(ours, ddof=1) / 40 + np.var(theirs, ddof=1) / 40)
    assert abs(np.mean(ours) - np.mean(theirs)) < 4 * error
    assert np.mean(ours) > (0.4 if alpha < 1 else 0.2)  # 0.2: every class alike


@settings(max_examples=30)
@given(count=st.integers(10, 120), sites=st.integers(1, 9), seed=st.integers(0, 9), alpha=st.sampled_from([1e-3, 0.3]))
def test_site_wise_sizes_are_equal(count, sites, seed, alpha):
    lesions = [Lesion(f"L{i}", "abc"[i % 3], 1) for i in range(count)]
    sizes = Counter(dirichlet_by_site(lesions, sites, alpha, seed).values())
    assert set(sizes.values()) <= {count // sites, -(-count // sites)}


@settings(max_examples=40)
@given(
    classes=st.integers(2, 8),
    factor=st.integers(1, 3),
    each=st.integers(1, 8),
    seed=st.integers(0, 9),
    big=st.booleans(),
)
def test_pathological_places(classes, factor, each, seed, big):
    """8.1: every site holds n classes, every class stands in n·C/K sites."""
    each = min(each, classes)
    sites = classes * factor // np.gcd(classes, each)
    lesions = lesions_of(dict.fromkeys("abcdefgh"[:classes], 300 if big else each * sites // classes))
    found = np.array(list(table(lesions, pathological(lesions, sites, each, seed), sites).values()))  # (K, C)
    assert ((found > 0).sum(axis=0) == each).all()
    assert ((found > 0).sum(axis=1) == each * sites // classes).all()
    assert found.sum() == len(lesions)


def test_pathological_shares_are_uniform_between_040_and_060_normalised():
    """8.1: with two holders of a class a share is a/(a + b), a and b ~ U(0.4, 0.6): between 0.4 and 0.6."""
    lesions = lesions_of({"a": 1000, "b": 1000})
    shares = []
    for seed in range(100):
        found = table(lesions, pathological(lesions, 2, 2, seed), 2)
        shares += [found["a"][0] / 1000, found["b"][0] / 1000]
    rng = np.random.default_rng(0)
    a, b = rng.uniform(0.4, 0.6, (2, 2000))
    assert min(shares) >= 0.398 and max(shares) <= 0.602
    assert stats.ks_2samp(shares, a / (a + b)).pvalue > 1e-3


def test_pathological_size_of_the_papers():
    """docs/methods.md 5: CIFAR-100 with 100 sites of 10 classes, Tiny-ImageNet with 200 of 10: no class twice."""
    for classes in (100, 200):
        lesions = lesions_of({f"c{k:03d}": 40 for k in range(classes)})
        held = defaultdict(set)
        for name, site in pathological(lesions, classes, 10, 0).items():
            held[site].add(name[:4])
        assert {len(found) for found in held.values()} == {10}


def test_rows_that_only_report_follow_the_training_counts():
    """8.2: per-site class shares of the training rows; none of a class to a site that does not learn it."""
    test = lesions_of({"a": 100, "b": 10, "new": 12})
    counts = {"a": [30, 0, 10], "b": [0, 5, 0]}
    site_of = follow(test, counts, "test", 0)
    assert table(test, site_of, 3) == {"a": [75, 0, 25], "b": [0, 10, 0], "new": [8, 1, 3]}


@pytest.mark.parametrize(
    ("deal", "says"),
    [
        (lambda: pathological(lesions_of({"a": 9, "b": 9}), 4, 3, 0), "--classes-per-site"),
        (lambda: pathological(lesions_of(dict.fromkeys("abc", 90)), 4, 2, 0), "--sites 3 or 6"),
        (lambda: pathological(lesions_of({"a": 9, "b": 1}), 4, 1, 0), "Class b has 1 lesion for the 2 sites"),
        (lambda: dirichlet_by_class(lesions_of({"a": 60, "b": 60}), 12, 1e-3, 0), "larger --alpha, or lower --sites"),
        (lambda: dirichlet_by_site(lesions_of({"a": 3}, images=9), 8, 0.3, 0), "lower --sites"),
    ],
)
def test_what_cannot_be_made_says_which_number_to_change(deal, says):
    with pytest.raises(PartitionError, match=says) as refused:
        deal()
    assert refused.value.code == "setting"
