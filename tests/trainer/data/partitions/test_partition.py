"""docs/methods.md 8 and docs/design.md 5: partitions are disjoint, complete, seed-stable, whole by lesion."""

import json
from collections import Counter, defaultdict
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.trainer.data.conftest import ZipMaker, ward_records

from edgefl_trainer.data import DataError, Row, load_federation
from edgefl_trainer.data.errors import PartitionError
from edgefl_trainer.data.partitions.make import deal, make_partition
from edgefl_trainer.data.partitions.partition import ROW_KINDS, Partition, read_partition
from edgefl_trainer.data.partitions.place import place_rows
from edgefl_trainer.data.partitions.plan import PartitionPlan

PLANS = {
    "natural": PartitionPlan(scheme="natural"),
    "natural, one named": PartitionPlan(scheme="natural", hold_out=("west",)),
    "natural held out": PartitionPlan(scheme="natural", holdout_sites=0.34),
    "iid": PartitionPlan(scheme="iid", sites=4),
    "iid beside whole sites": PartitionPlan(scheme="iid", sites=4, whole=("east",)),
    "dirichlet beside whole sites": PartitionPlan(scheme="dirichlet", sites=4, alpha=1.0, whole=("east", "west")),
    "dirichlet by class": PartitionPlan(scheme="dirichlet", sites=4, alpha=1.0, by="class"),
    "dirichlet by site": PartitionPlan(scheme="dirichlet", sites=4, alpha=0.3, by="site"),
    "pathological": PartitionPlan(scheme="pathological", sites=6, classes_per_site=2, holdout_sites=0.2),
    "domain": PartitionPlan(scheme="domain"),
    "domains cut": PartitionPlan(scheme="domain", sites=6),
    "domains cut by class": PartitionPlan(scheme="domain", sites=9, classes_per_site=1, holdout_sites=0.34),
}


def rows_of(seed: int = 0, official: bool = False) -> list[Row]:
    """Three sites of 60 lesions with 1 to 3 pictures, classes of unequal size; 1 in 4 lesions is test."""
    rows = []
    for site in ("east", "north", "west"):
        for i in range(60):
            label = ("NV", "NV", "MEL", "BKL")[(i // 4 + seed) % 4]
            for view in range(1 + i % 3):
                rows.append(
                    Row(
                        image=f"{site}{i}-{view}",
                        source="",
                        label=label,
                        site=None if official else site,
                        lesion=f"{site}{i}",
                        split="test" if i % 4 == 3 else "train",
                    )
                )
    rows += [Row(f"extra{i}", "", None, None, f"extra{i}", "unlabelled") for i in range(5)]
    return rows


@pytest.fixture(params=PLANS)
def plan(request: pytest.FixtureRequest) -> PartitionPlan:
    return PLANS[request.param]


def counts(partition: Partition, kinds: tuple[str, ...]) -> dict[str, Counter]:
    return {name: Counter(label for kind in kinds for _, label in rows[kind]) for name, rows in partition.sites.items()}


def test_every_labelled_row_in_exactly_one_site(plan: PartitionPlan) -> None:
    rows = rows_of()
    made = deal(rows, plan, 0)
    placed = [(image, label) for kinds in made.sites.values() for kind in ROW_KINDS for image, label in kinds[kind]]
    assert sorted(placed) == sorted((row.image, row.label) for row in rows if row.label)
    split_of = {row.image: row.split for row in rows}
    for kinds in made.sites.values():
        assert {split_of[image] for image, _ in kinds["train"] + kinds["tune"]} == {"train"}
        assert {split_of[image] for image, _ in kinds["test"]} <= {"test"}


def test_a_lesion_stands_in_one_place(plan: PartitionPlan) -> None:
    lesion_of = {row.image: row.lesion for row in rows_of()}
    places = defaultdict(set)
    for name, kinds in deal(rows_of(), plan, 0).sites.items():
        for kind in ROW_KINDS:
            for image, _ in kinds[kind]:
                places[lesion_of[image]].add((name, kind))
    assert {len(found) for found in places.values()} == {1}


@settings(max_examples=15)
@given(data=st.data(), seed=st.integers(0, 3), name=st.sampled_from(sorted(PLANS)))
def test_the_order_of_rows_does_not_matter_and_the_seed_does(data: st.DataObject, seed: int, name: str) -> None:
    rows = rows_of()
    one, other = deal(rows, PLANS[name], seed), deal(data.draw(st.permutations(rows)), PLANS[name], seed)
    assert one == other and one.to_bytes() == other.to_bytes()
    assert deal(rows, PLANS[name], seed + 1).sha256 != one.sha256


def test_class_promises_of_the_schemes() -> None:
    by_class = counts(deal(rows_of(), PLANS["pathological"], 0), ("train", "tune"))
    assert {len(found) for found in by_class.values()} == {2}
    assert Counter(label for found in by_class.values() for label in found) == {"BKL": 4, "MEL": 4, "NV": 4}
    in_domain = deal(rows_of(), PLANS["domains cut by class"], 0)
    assert {len(found) for found in counts(in_domain, ("train", "tune")).values()} == {1}
    assert {(name[:-2], image.rstrip("-0123456789")) for name, kinds in in_domain.sites.items() for kind in ROW_KINDS
            for image, _ in kinds[kind]} == {(domain, domain) for domain in ("east", "north", "west")}  # fmt: skip
    iid = counts(deal(rows_of(), PLANS["iid"], 0), ("train", "tune"))
    for label in ("NV", "MEL", "BKL"):
        found = [site[label] for site in iid.values()]
        assert max(found) - min(found) <= 6  # two lesions of three images


@pytest.mark.parametrize("name", ["pathological", "dirichlet by class", "dirichlet by site", "domains cut by class"])
def test_test_rows_have_the_class_shares_of_the_training_rows(name: str) -> None:
    """8.2: same per-site class shares, rows of official test sets too; nothing of a class the site does not learn."""
    made = deal(rows_of(official=not name.startswith("domain")), PLANS[name], 0)
    train, test = counts(made, ("train", "tune")), counts(made, ("test",))
    groups = {name[:-2]: [site for site in made.sites if site[:-2] == name[:-2]] for name in made.sites}
    for group in groups.values():
        for label in ("NV", "MEL", "BKL"):
            learned = sum(train[site][label] for site in group)
            due = sum(test[site][label] for site in group)
            for site in group:
                share = due * train[site][label] / learned
                assert abs(test[site][label] - share) < 4 + 1e-9  # a lesion of three images and a floor
                assert train[site][label] or not test[site][label]


def test_held_out_sites() -> None:
    """8.4: 90 % train, 10 % never do; one held-out site of every domain (54 and 6 of DomainNet's 60)."""
    assert deal(rows_of(), PLANS["natural"], 0).held_out == ()
    assert len(deal(rows_of(), PLANS["natural held out"], 0).held_out) == 1
    cut = deal(rows_of(), PLANS["domains cut by class"], 0)
    assert sorted(name[:-2] for name in cut.held_out) == ["east", "north", "west"]
    rows = [Row(f"{d}{i}", "", "ab"[i % 2], f"d{d}", f"{d}{i}", "train") for d in range(6) for i in range(40)]
    made = deal(rows, PartitionPlan(scheme="domain", sites=60, holdout_sites=0.1), 3)
    assert len(made.sites) == 60 and sorted(name[:2] for name in made.held_out) == [f"d{d}" for d in range(6)]
    assert (
        len({deal(rows, PartitionPlan(scheme="domain", sites=60, holdout_sites=0.1), s).held_out for s in range(5)})
        == 5
    )
    held = PartitionPlan(scheme="iid", sites=1018, holdout_sites=0.1)
    many = [Row(f"{i}", "", "a", None, f"{i}", "train") for i in range(1018)]
    assert len(deal(many, held, 0).held_out) == 102  # iNaturalist: 916 and 102
    assert deal(rows, PartitionPlan(scheme="domain", sites=60), 3).sha256 != made.sha256


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"scheme": "dirichlet"}, "needs --sites"),
        ({"scheme": "pathological", "sites": 3}, "needs --classes-per-site"),
        ({"scheme": "natural", "sites": 3}, "leave --sites out"),
        ({"scheme": "iid", "sites": 3, "alpha": 0.3}, "leave --alpha out"),
        ({"scheme": "dirichlet", "sites": 3, "alpha": 0.0}, "--alpha is 0.0; allowed: above 0"),
        ({"scheme": "dirichlet", "sites": 3, "alpha": float("nan")}, "--alpha is nan"),
        ({"scheme": "iid", "sites": 0}, "--sites is 0"),
        ({"scheme": "natural", "holdout_sites": 1.0}, "--holdout-sites is 1.0"),
        ({"scheme": "natural", "holdout_sites": 0.1}, "larger --holdout-sites"),
        ({"scheme": "natural", "hold_out": ("south",)}, "names some of east, north, west, and not all"),
        ({"scheme": "natural", "hold_out": ("east", "north", "west")}, "and not all"),
        ({"scheme": "natural", "hold_out": ()}, "names one site or more"),
        ({"scheme": "natural", "hold_out": ("east",), "holdout_sites": 0.4}, "in place of --holdout-sites"),
        ({"scheme": "iid", "sites": 136}, "lower --sites"),
        ({"scheme": "dirichlet", "sites": 300, "by": "site"}, "300 sites are more than the 135 lesions"),
        ({"scheme": "dirichlet", "sites": 20, "alpha": 0.001}, "larger --alpha, or lower --sites"),
        ({"scheme": "pathological", "sites": 3, "classes_per_site": 4}, "lower --classes-per-site"),
        ({"scheme": "pathological", "sites": 4, "classes_per_site": 2}, "give --sites 3 or 6"),
        ({"scheme": "domain", "sites": 4}, "give --sites 3 or a multiple"),
        ({"scheme": "natural", "whole": ("east",)}, "leave --whole out"),
        ({"scheme": "iid", "sites": 3, "whole": ("south",)}, "south, which the data does not have; its sites are east"),
        ({"scheme": "iid", "sites": 2, "whole": ("east", "west")}, "give --sites 3 or more"),
        ({"scheme": "iid", "sites": 4, "whole": ("east", "north", "west")}, "names all sites"),
        ({"scheme": "iid", "sites": 4, "whole": ()}, "names no site"),
    ],
)
def test_an_impossible_partition_says_which_number_to_change(options: dict, says: str) -> None:
    with pytest.raises(PartitionError, match=says) as refused:
        deal(rows_of(), PartitionPlan(**options), 0)
    assert refused.value.code == "setting"
    assert str(refused.value).count("\n") == 0


def test_a_site_that_is_named_is_held_out_and_no_row_moves() -> None:
    """With the same seed the sites and rows are those of no held-out site; the plan tells the name."""
    rows = rows_of()
    plain, named = (deal(rows, PartitionPlan(scheme="natural", hold_out=held), 0) for held in (None, ("west",)))
    assert (plain.held_out, named.held_out) == ((), ("west",))
    assert plain.sites == named.sites
    assert named.plan.to_json() == {"scheme": "natural", "holdout_sites": 0.0, "hold_out": ("west",)}


def test_whole_sites_are_as_they_were_and_the_rest_is_dealt_evenly() -> None:
    """FedCLF V-A: three collections are a site each, seven random parts of a fourth are the others."""
    plan = PartitionPlan(scheme="iid", sites=5, whole=("west", "east"))
    made, own = deal(rows_of(), plan, 3), deal(rows_of(), PartitionPlan(scheme="natural"), 3)
    assert sorted(made.sites) == ["east", "iid-1", "iid-2", "iid-3", "west"]
    for name in ("east", "west"):
        assert made.sites[name] == own.sites[name]
    learning = ("train", "tune")
    parts = [sum(counts(made, learning)[f"iid-{i}"].values()) for i in (1, 2, 3)]
    assert sum(parts) == sum(counts(own, learning)["north"].values()) and max(parts) - min(parts) <= 6
    assert plan.to_json() == {"scheme": "iid", "sites": 5, "whole": ("east", "west"), "holdout_sites": 0.0}
    assert deal(rows_of(), PartitionPlan(scheme="iid", sites=5), 3).plan.to_json().keys() == {
        "scheme", "sites", "holdout_sites",
    }  # fmt: skip


def test_a_lesion_of_a_whole_site_is_dealt_to_nobody_else() -> None:
    """Nine lesions of HAM10000 stand in two centres (docs/methods.md 7.2): no picture of one is to be learned beside
    where another is judged."""
    twice = [Row("double", "", "MEL", "north", "east0", "train"), Row("late", "", None, "east", "late", "unlabelled")]
    rows = [*rows_of(), *twice]
    made = deal(rows, PartitionPlan(scheme="iid", sites=3, whole=("east",)), 0)
    assert "double" in {image for kind in ROW_KINDS for image, _ in made.sites["east"][kind]}
    placed = {row.image: row.site for row in place_rows(rows, made)}
    assert placed["double"] == "east" and placed["late"] == "east" and placed["extra0"] is None


def ward(make_zip: ZipMaker) -> str:
    return f"manifest:{make_zip(ward_records(24))}"


def test_the_file_gives_the_partition_back(make_zip: ZipMaker, tmp_path: Path, plan: PartitionPlan) -> None:
    made = make_partition([ward(make_zip)], plan, 7)
    path = tmp_path / "partition.json"
    path.write_bytes(made.to_bytes())
    assert read_partition(path) == made
    assert json.loads(path.read_text())["partition_sha256"] == made.sha256


def test_a_run_over_a_partition_has_its_rows_and_its_digest(
    make_zip: ZipMaker, cache: Path, plan: PartitionPlan
) -> None:
    """The digest of a run's summary is the file's, whatever the seed of the run."""
    spec = ward(make_zip)
    made = make_partition([spec], plan, 7)
    for seed in (0, 7):
        federation = load_federation([spec], image_px=8, seed=seed, partition=made)
        assert federation.partition_sha256 == made.sha256
        assert federation.held_out == made.held_out
        for name, site in federation.sites.items():
            for kind in ROW_KINDS:
                found = {(federation.names[i], federation.classes[federation.labels[i]]) for i in site.rows(kind)}
                assert found == set(made.sites[name][kind])


def test_natural_and_iid_are_those_without_a_file(make_zip: ZipMaker, cache: Path) -> None:
    spec = ward(make_zip)
    assert make_partition([spec], PartitionPlan(scheme="natural"), 3).sha256 == (
        load_federation([spec], image_px=8, seed=3).partition_sha256
    )
    assert make_partition([spec], PartitionPlan(scheme="iid", sites=4), 3).sha256 == (
        load_federation([f"{spec}@split=iid:4"], image_px=8, seed=3).partition_sha256
    )


def test_rows_in_per_cent_are_those_without_a_file(make_zip: ZipMaker, cache: Path) -> None:
    spec = f"manifest:{make_zip(ward_records())}"
    made = make_partition([f"{spec}@rows=60/20/20"], PartitionPlan(scheme="natural"), 0)
    assert made.sha256 == load_federation([f"{spec}@rows=60/20/20"], image_px=8).partition_sha256
    with pytest.raises(PartitionError, match="different @rows"):
        make_partition([spec, f"{spec}@rows=60/20/20"], PartitionPlan(scheme="natural"), 0)


def test_task_limit_and_classes_act_on_the_dealt_rows(make_zip: ZipMaker, cache: Path) -> None:
    spec = ward(make_zip)
    made = make_partition([spec], PartitionPlan(scheme="iid", sites=3), 0)
    limited = load_federation([spec], image_px=8, partition=made, task="nevus", limit=5, classes=["NV", "MEL"])
    whole = load_federation([spec], image_px=8, partition=made)
    assert limited.classes == ("nevus", "other")
    for name, site in limited.sites.items():
        assert 0 < len(site.train) <= 5 and set(site.train) <= set(whole.sites[name].train)
        assert set(site.tune) <= set(whole.sites[name].tune)
    some = make_partition([spec], PartitionPlan(scheme="iid", sites=3), 0, classes=["NV", "MEL"])
    assert some.classes == ("MEL", "NV")
    assert load_federation([spec], image_px=8, partition=some).classes == ("MEL", "NV")
    with pytest.raises(DataError, match="'BKL' is not in the partition"):
        load_federation([spec], image_px=8, partition=some, classes=["BKL"])
    with pytest.raises(PartitionError, match="'NEW' is not in the data"):
        make_partition([spec], PartitionPlan(scheme="iid", sites=3), 0, classes=["NEW"])


def test_unlabelled_images_are_spread_over_the_sites_that_train(make_zip: ZipMaker, cache: Path) -> None:
    free = [
        {**record, "image": f"free{i}", "file": f"images/free{i}.png", "label": "", "lesion_id": f"free{i}"}
        for i, record in enumerate(ward_records(24)[:30])
    ]
    records = ward_records(24) + [{**record, "center": ("", "east")[i % 2]} for i, record in enumerate(free)]
    spec = f"manifest:{make_zip(records)}"
    made = make_partition([spec], PartitionPlan(scheme="iid", sites=4, holdout_sites=0.25), 0)
    for mode, expected in (("none", 0), ("site", 0), ("spread", 30)):
        federation = load_federation([spec], image_px=8, partition=made, unlabelled=mode)
        assert sum(len(site.unlabelled) for site in federation.sites.values()) == expected
        assert all(len(federation.sites[name].unlabelled) == 0 for name in made.held_out)
    natural = make_partition([spec], PartitionPlan(scheme="natural"), 0)
    federation = load_federation([spec], image_px=8, partition=natural, unlabelled="site")
    assert {name: len(site.unlabelled) for name, site in federation.sites.items()} == {
        "east": 15,
        "north": 0,
        "west": 0,
    }


def test_a_selected_site_is_dealt_alone(make_zip: ZipMaker, cache: Path) -> None:
    spec = ward(make_zip) + "@site=west"
    made = make_partition([spec], PartitionPlan(scheme="iid", sites=2), 0)
    assert {image[:4] for kinds in made.sites.values() for kind in ROW_KINDS for image, _ in kinds[kind]} == {"west"}
    assert load_federation([spec], image_px=8, partition=made).partition_sha256 == made.sha256


def test_other_data_is_refused(make_zip: ZipMaker, cache: Path) -> None:
    spec = ward(make_zip)
    made = make_partition([spec], PartitionPlan(scheme="iid", sites=3), 0)
    records = ward_records(24)
    changed = [{**records[0], "label": "BKL"}, *records[1:]]
    more = [*records, {**records[0], "image": "new", "file": "images/new.png"}]
    for name, others, says in (
        ("fewer.zip", ward_records(23), "images of the partition are not in the data"),
        ("changed.zip", changed, "has the class NV in the partition"),
        ("more.zip", more, "'new'.*is not in the partition"),
    ):
        with pytest.raises(DataError, match=says):
            load_federation([f"manifest:{make_zip(others, name=name)}"], image_px=8, partition=made)
    with pytest.raises(DataError, match="two of the data sources"):
        make_partition([spec, spec], PartitionPlan(scheme="iid", sites=3), 0)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda found: found["held_out"].append("site-1"), "was changed|held-out site is unknown"),
        (lambda found: found["held_out"].append("iid-2"), "was changed"),
        (lambda found: found["sites"]["iid-1"].pop("tune"), "was changed"),
        (lambda found: found["plan"].update(scheme="best"), "no scheme 'best'"),
        (lambda found: found["plan"].update(colour="red"), "not a partition file"),
        (lambda found: found.pop("seed"), "not a partition file"),
        (lambda found: found.update(format=2), "format 2"),
        (lambda found: found.update(sites=[]), "not a partition file"),
        (lambda found: found["sites"]["iid-1"]["tune"].update(found["sites"]["iid-2"]["train"]), "is listed twice"),
    ],
)
def test_a_changed_file_is_refused(tmp_path: Path, change, says: str) -> None:
    path = tmp_path / "partition.json"
    found = json.loads(deal(rows_of(), PLANS["iid"], 0).to_bytes())
    change(found)
    path.write_text(json.dumps(found))
    with pytest.raises(DataError, match=says) as refused:
        read_partition(path)
    assert refused.value.code == "data"


@pytest.mark.parametrize("text", ["", "[]", "{}", "[" * 100_000, "null", '{"format": 1, "plan": 3}'])
def test_what_is_no_partition_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "partition.json"
    path.write_text(text)
    with pytest.raises(DataError, match="not a partition file"):
        read_partition(path)


@pytest.mark.slow
@pytest.mark.data
def test_real_centres(real_data: Path) -> None:
    """The six centres of Fed-ISIC2019: 18,720 labelled images, their tally, and 16 sites of two classes each."""
    spec = f"manifest:{real_data / 'fed_isic2019_84.zip'}"
    natural = make_partition([spec], PartitionPlan(scheme="natural"), 0)
    learning, val = natural.counts(("train", "tune")), natural.counts(("val",))
    assert {name: (found.total(), val[name].total()) for name, found in learning.items()} == {
        "bcn": (8069, 2035), "msk": (541, 121), "rosendahl": (1468, 367), "vidir_modern": (2068, 547),
        "vidir_molemax": (2488, 664), "vienna_dias": (277, 75),
    }  # fmt: skip
    dealt = make_partition([spec], PartitionPlan(scheme="pathological", sites=16, classes_per_site=2), 0)
    assert sum(found.total() for found in dealt.counts(ROW_KINDS).values()) == 18_720
    assert {len(found) for found in dealt.counts(("train", "tune")).values()} == {2}
    assert all(set(dealt.counts(("val",))[name]) <= set(dealt.counts(("train", "tune"))[name]) for name in dealt.sites)
