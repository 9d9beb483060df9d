"""docs/design.md 5 (Rows): dealt by lesion and seed, stratified by class, whatever the order of rows."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from edgefl_trainer.data.dealing import choose_limit, choose_share, deal_iid, deal_test, lesion_order, spread
from edgefl_trainer.data.rows import Row

strata = st.dictionaries(st.text("abcdef0123456789", min_size=1, max_size=6), st.sampled_from("xyz"), max_size=60)


def row(image: str, label: str | None = "NV", site: str | None = "east", lesion: str = "", split: str = "") -> Row:
    return Row(image, f"{image}.png", label, site, lesion or image, split)


@given(strata, st.integers(0, 5), st.floats(0, 1))
def test_a_share_of_every_class(classes: dict[str, str], seed: int, share: float) -> None:
    """Any prefix holds of a class of n lesions its share to within one lesion for each class there is."""
    order = lesion_order(classes, "p", seed)
    assert sorted(order) == sorted(classes)
    taken = Counter(classes[lesion] for lesion in order[: round(share * len(order))])
    for label, n in Counter(classes.values()).items():
        assert abs(taken[label] - share * n) <= len(set(classes.values()))


@given(strata, st.integers(0, 5))
def test_order_depends_on_names_not_on_insertion(classes: dict[str, str], seed: int) -> None:
    assert lesion_order(classes, "p", seed) == lesion_order(dict(reversed(classes.items())), "p", seed)


@given(strata, st.floats(0, 1))
def test_a_share_never_takes_all(classes: dict[str, str], share: float) -> None:
    chosen = choose_share(classes, share, "p", 0)
    assert len(chosen) == min(round(share * len(classes)), max(len(classes) - 1, 0))


@given(st.lists(st.sampled_from("abcdefghij"), max_size=40), st.integers(0, 50))
def test_limit_is_by_lesion_and_as_full_as_it_can_be(lesions: list[str], limit: int) -> None:
    sizes = Counter(lesions)
    chosen = choose_limit(lesions, ["NV"] * len(lesions), limit, "p", 0)
    total = sum(sizes[lesion] for lesion in chosen)
    assert total <= limit
    assert all(total + n > limit for lesion, n in sizes.items() if lesion not in chosen)


@given(st.lists(st.sampled_from("abcdefghijklmnop"), max_size=60), st.integers(1, 50), st.integers(1, 50))
def test_spread_is_in_proportion_and_whole(lesions: list[str], east: int, west: int) -> None:
    """Each site's share differs from its due by less than one lesion."""
    got = spread(lesions, {"east": east, "west": west}, 0)
    assert len({(lesion, site) for lesion, site in zip(lesions, got, strict=True)}) == len(set(lesions))
    largest = max(Counter(lesions).values(), default=0)
    assert abs(got.count("east") - len(lesions) * east / (east + west)) <= largest


def test_nothing_to_spread_to() -> None:
    assert spread(["a"], {}, 0) == [None]


def test_a_lesion_of_two_sites_stays_on_one_side() -> None:
    """docs/methods.md 7.2: nine lesions span two centres."""
    rows = [row(f"{site}{i}", site=site, lesion=f"L{i}") for site in ("east", "west") for i in range(40)]
    dealt = deal_test(rows)
    sides = {(r.lesion, r.split) for r in dealt}
    assert len(sides) == 40
    assert Counter(r.split for r in dealt) == {"train": 60, "test": 20}


def test_given_splits_are_not_touched() -> None:
    rows = [row("a", split="val"), row("b", split="train"), row("c", split="test"), row("d", label=None)]
    assert [r.split for r in deal_test(rows)] == ["val", "train", "test", "unlabelled"]


def test_a_lesion_whose_side_the_source_names_stays_there() -> None:
    """docs/reference/data.md: rows that are dealt here never put a lesion on two sides; others are dealt as ever."""
    alone = [row(f"b{i}", lesion=f"M{i}") for i in range(40)]
    given = [
        row(f"{side}{i}", lesion=f"{side}-{i}", split=side) for side in ("train", "val", "test") for i in range(20)
    ]
    follow = [row(f"{r.image}-again", site="west", lesion=r.lesion) for r in given]
    both = [row("x", lesion="X", split="train"), row("y", lesion="X", split="test"), row("z", lesion="X")]
    dealt = {r.image: r.split for r in deal_test([*alone, *given, *follow, *both])}
    assert all(dealt[f"{r.image}-again"] == dealt[r.image] == r.split for r in given)
    assert (dealt["x"], dealt["y"], dealt["z"]) == ("train", "test", "test")
    assert {r.image: r.split for r in deal_test(alone)}.items() <= dealt.items()


@given(st.integers(1, 6), st.integers(0, 3))
def test_iid_sites_are_even(sites: int, seed: int) -> None:
    rows = [row(f"{i}-{v}", label=("NV", "MEL")[i % 2], lesion=f"L{i}") for i in range(24) for v in range(2)]
    dealt = deal_iid(rows, sites, seed)
    assert len({(r.lesion, r.site) for r in dealt}) == 24
    for label in ("NV", "MEL"):
        sizes = Counter(r.site for r in dealt if r.label == label)
        assert max(sizes.values()) - min(sizes.values()) <= 2 * 1  # one lesion of two pictures
