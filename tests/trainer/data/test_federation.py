"""docs/design.md 5: rows of a federation; who learns, tunes, reports, and from which pictures."""

import hashlib
import json
import random
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from tests.trainer.data.conftest import png, ward_records

from edgefl_trainer import data
from edgefl_trainer.data import DataError, Federation, load_federation
from edgefl_trainer.data.site_rows import ROW_KINDS


@pytest.fixture
def ward(make_zip, cache: Path) -> str:
    return f"manifest:{make_zip(ward_records())}"


def load(spec: str, **changes) -> Federation:
    return load_federation([spec], **({"image_px": 8} | changes))


def names(federation: Federation, site: str, kind: str) -> set[str]:
    return {federation.names[i] for i in federation.sites[site].rows(kind)}


def test_public_names_are_complete_and_sorted() -> None:
    """CONTRIBUTING.md, house style: each package lists its interface."""
    assert data.__all__ == sorted(data.__all__)
    assert all(hasattr(data, name) for name in data.__all__)


def test_no_lesion_stands_in_two_kinds_of_rows(ward: str) -> None:
    federation = load(ward)
    for site in federation.sites.values():
        groups = [{federation.lesions[i] for i in site.rows(kind)} for kind in ROW_KINDS]
        assert sum(map(len, groups)) == len(set().union(*groups)) == 40


def test_shares_by_lesion(ward: str) -> None:
    """A quarter of the lesions tests (docs/methods.md 1.6), 15 % of the others tune."""
    federation = load(ward)
    for site in federation.sites.values():
        lesions = {kind: len({federation.lesions[i] for i in site.rows(kind)}) for kind in ROW_KINDS}
        assert lesions == {"train": 26, "tune": 4, "val": 0, "test": 10, "unlabelled": 0}  # round(0.15·30) = 4


def test_classes_are_stratified(ward: str) -> None:
    """Half the lesions are NV, a quarter each of the others: so are the test rows, to one lesion."""
    federation = load(ward)
    for site in federation.sites.values():
        labels = Counter(
            federation.classes[federation.labels[i]] for i in {federation.lesions[i]: i for i in site.test}.values()
        )
        assert abs(labels["NV"] - 5) <= 1
        assert all(abs(labels[name] - 2.5) <= 1 for name in ("MEL", "BKL"))


def test_a_run_is_warned_of_classes_that_may_be_one(make_zip, cache: Path) -> None:
    """`edgefl-train data` warned, and who began with `run` had a class too many; a task that gathers both does not."""
    records = [{**row, "label": "Nevus"} if i % 4 == 0 else row for i, row in enumerate(ward_records())]
    spec = f"manifest:{make_zip(records)}"
    assert any("look like one" in line and "Nevus (" in line for line in load(spec).warnings)
    assert not any("look like one" in line for line in load(spec, task="nevus").warnings)


def test_row_order_of_the_index_changes_nothing(make_zip, cache: Path) -> None:
    records = ward_records()
    one = load(f"manifest:{make_zip(records)}")
    shuffled = random.Random(1).sample(records, len(records))
    other = load(f"manifest:{make_zip(shuffled, name='other.zip')}")
    assert one.partition_sha256 == other.partition_sha256


def test_seed_changes_the_rows(ward: str) -> None:
    assert load(ward).partition_sha256 == load(ward).partition_sha256 != load(ward, seed=1).partition_sha256


@pytest.mark.parametrize("suffix", ["", "@split=iid:3"])
def test_no_seed_moves_a_lesion_into_test_rows(ward: str, suffix: str) -> None:
    """docs/design.md 5, rows: a backbone learned with one seed has not seen the test lesions of a run with another."""
    held_out, tuned = [], []
    for seed in range(4):
        federation = load(ward + suffix, seed=seed)
        for kind, found in (("test", held_out), ("tune", tuned)):
            rows = np.concatenate([site.rows(kind) for site in federation.sites.values()])
            found.append({federation.lesions[i] for i in rows})
    assert len(held_out[0]) == 30  # a quarter of 120 lesions
    assert held_out[0] == held_out[1] == held_out[2] == held_out[3]
    assert len({frozenset(lesions) for lesions in tuned}) == 4
    assert all(not lesions & held_out[0] for lesions in tuned)


def test_each_iid_site_has_its_share_of_the_test_lesions(ward: str) -> None:
    """Dealt evenly, stratified by split: 120 lesions at three sites are 40 each, ten of them test."""
    federation = load(f"{ward}@split=iid:3")
    assert [len({federation.lesions[i] for i in site.test}) for site in federation.sites.values()] == [10, 10, 10]


def test_partition_digest_is_over_sites_kinds_names_and_labels(ward: str) -> None:
    """An independent ten-liner: JSON with sorted keys of site → kind → [name, label]."""
    federation = load(ward)
    content = {}
    for name, site in federation.sites.items():
        content[name] = {
            kind: sorted([federation.names[i], federation.classes[federation.labels[i]]] for i in site.rows(kind))
            for kind in ("train", "tune", "val", "test", "unlabelled")
        }
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    assert federation.partition_sha256 == hashlib.sha256(text.encode()).hexdigest()


def test_val_and_test_are_taken_as_given(make_zip, cache: Path) -> None:
    records = ward_records()
    for i, record in enumerate(records):
        record["split"] = ("train", "val", "test")[hash_of(record["lesion_id"]) % 3] if i else "train"
    federation = load(f"manifest:{make_zip(records)}")
    for kind in ("val", "test"):
        given = {r["image"] for r in records if r["split"] == kind}
        assert set().union(*(names(federation, site, kind) for site in federation.sites)) == given
    assert federation.report_split == "test"


def hash_of(text: str) -> int:
    return int(hashlib.sha256(text.encode()).hexdigest(), 16)


def test_report_split_is_val_without_test_rows(make_zip, cache: Path) -> None:
    records = [r | {"split": "val" if r["lesion_id"].endswith("3") else "train"} for r in ward_records()]
    assert load(f"manifest:{make_zip(records)}").report_split == "val"


def test_limit_bounds_train_and_leaves_the_rest(ward: str) -> None:
    whole, limited = load(ward), load(ward, limit=20)
    for name, site in limited.sites.items():
        assert 18 <= len(site.train) <= 20
        assert set(site.train) <= set(whole.sites[name].train)
        for kind in ("tune", "test"):
            np.testing.assert_array_equal(site.rows(kind), whole.sites[name].rows(kind))


def test_nevus_task(ward: str) -> None:
    """docs/methods.md 1.6: nevus (class NV) versus rest."""
    every, nevus = load(ward), load(ward, task="nevus")
    assert nevus.classes == ("nevus", "other")
    assert every.classes == ("BKL", "MEL", "NV")
    np.testing.assert_array_equal(nevus.labels == 0, every.labels == every.classes.index("NV"))
    for site in every.sites:
        assert names(every, site, "tune") == names(nevus, site, "tune")


def test_chosen_classes_keep_their_order(ward: str) -> None:
    federation = load(ward, classes=["NV", "BKL"])
    assert federation.classes == ("NV", "BKL")
    used = np.concatenate([site.rows(kind) for site in federation.sites.values() for kind in ROW_KINDS])
    assert set(federation.labels[used]) == {0, 1}
    assert federation.counts(used).sum() == len(used)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"classes": ["NV", "XX"]}, ["'XX'", "BKL, MEL, NV"]),
        ({"classes": ["NV", "NV"]}, ["'NV'", "twice"]),
        ({"task": "melanoma"}, ["'melanoma'", "all, nevus, or NAME=A,B:REST"]),
        ({"task": "nevus", "classes": ["MEL"]}, ["needs a class named NV"]),
        ({"limit": 0}, ["limit is 0"]),
        ({"image_px": 0}, ["image size is 0"]),
    ],
)
def test_unusable_choices(ward: str, changes: dict, words: list[str]) -> None:
    with pytest.raises(DataError) as caught:
        load(ward, **changes)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_a_site_without_an_image_of_the_chosen_classes_is_named(make_zip, cache: Path) -> None:
    records = [r | ({"label": "NV"} if r["center"] == "west" else {}) for r in ward_records()]
    with pytest.raises(DataError, match="Site west has no image"):
        load(f"manifest:{make_zip(records)}", classes=["MEL", "BKL"])


def test_a_site_with_one_class_and_test_rows_without_a_class_are_allowed(make_zip, cache: Path) -> None:
    records = [r | ({"label": "NV"} if r["center"] == "west" else {}) for r in ward_records()]
    federation = load(f"manifest:{make_zip(records)}")
    assert np.count_nonzero(federation.counts(federation.sites["west"].train)) == 1


def stateless(n: int = 30) -> list[dict[str, str]]:
    free = [
        {
            "image": f"free{i}",
            "file": f"images/free{i}.png",
            "label": "",
            "center": "",
            "lesion_id": "",
            "split": "unlabelled",
        }
        for i in range(n)
    ]
    own = [r | {"split": "unlabelled"} if r["lesion_id"].endswith("L1") else r for r in ward_records()]
    return own + free


@pytest.mark.parametrize(("mode", "own", "free"), [("none", 0, 0), ("site", 2, 0), ("spread", 2, 10)])
def test_unlabelled_images(make_zip, cache: Path, mode: str, own: int, free: int) -> None:
    """docs/design.md 5: images without a centre belong to no site; `spread` deals them in proportion to size."""
    federation = load(f"manifest:{make_zip(stateless())}", unlabelled=mode)
    for name, site in federation.sites.items():
        got = names(federation, name, "unlabelled")
        assert sum(image.startswith(name) for image in got) == own
        assert sum(image.startswith("free") for image in got) == free
        assert (federation.labels[site.unlabelled] == -1).all()


def photographed_again() -> list[dict[str, str]]:
    """Of each lesion a labelled picture, one without label at the same site, and one whose site nobody noted."""
    first = [r for r in ward_records() if r["image"].endswith("_0")]
    again = [
        r | {"image": f"{r['image']}_{kind}", "file": f"{r['file']}.{kind}.png", "label": "", "split": "unlabelled"}
        for r in first
        for kind in ("own", "free")
    ]
    return [*first, *(r | {"center": ""} if r["image"].endswith("free") else r for r in again)]


def test_an_unlabelled_picture_of_a_lesion_that_is_held_back_is_not_learned_from(make_zip, cache: Path) -> None:
    """docs/reference/data.md, rows: what judges a network is no lesion that it learned from, with or without a
    label."""
    spec = f"manifest:{make_zip(photographed_again())}"
    federation, everywhere = load(spec, unlabelled="spread"), set[str]()
    tested = {federation.lesions[i] for site in federation.sites.values() for i in site.test}
    for name, site in federation.sites.items():
        learned = {federation.lesions[i] for i in site.unlabelled}
        assert not learned & (tested | {federation.lesions[i] for i in site.tune})
        own = {image for image in names(federation, name, "unlabelled") if image.endswith("own")}
        assert own == {f"{image}_own" for image in names(federation, name, "train")}
        everywhere |= {federation.lesions[i] for i in site.unlabelled if federation.names[i].endswith("free")}
    assert everywhere  # pictures of no site are still dealt
    alone = load(f"{spec}@site=north", unlabelled="spread")
    assert names(alone, "north", "unlabelled") == names(federation, "north", "unlabelled")


def test_one_site_alone_has_the_rows_it_has_beside_the_others(make_zip, cache: Path) -> None:
    """A live site reads `@site=NAME`; its rows equal those of the simulation."""
    spec = f"manifest:{make_zip(stateless())}"
    together, alone = load(spec, unlabelled="spread"), load(f"{spec}@site=north", unlabelled="spread")
    assert list(alone.sites) == ["north"]
    assert alone.classes == together.classes
    for kind in ROW_KINDS:
        assert names(alone, "north", kind) == names(together, "north", kind)


def test_site_name_for_data_that_names_none(make_zip, cache: Path) -> None:
    records = [r | {"center": ""} for r in ward_records(sites=("x",))]
    assert list(load(f"manifest:{make_zip(records)}@site=ward-7").sites) == ["ward-7"]


def test_an_unknown_site_is_named(ward: str) -> None:
    with pytest.raises(DataError, match=r"has no site south; .* east, north, west"):
        load(f"{ward}@site=south")


def test_iid_sites(ward: str) -> None:
    federation = load(f"{ward}@split=iid:4")
    assert list(federation.sites) == ["iid-1", "iid-2", "iid-3", "iid-4"]
    rows = [np.concatenate([site.rows(kind) for kind in ROW_KINDS]) for site in federation.sites.values()]
    assert sum(map(len, rows)) == len(federation.labels)
    assert [len({federation.lesions[i] for i in here}) for here in rows] == [30] * 4  # 120 lesions


def test_more_iid_sites_than_lesions(ward: str) -> None:
    with pytest.raises(DataError, match="121 sites, but the data holds only 120 lesions: write @split=iid:120 or less"):
        load(f"{ward}@split=iid:121")


def test_two_sources_make_one_federation(make_zip, cache: Path) -> None:
    east = make_zip(ward_records(sites=("east",)), name="a.zip")
    west = make_zip(ward_records(sites=("west",)), name="b.zip")
    both = load_federation([f"manifest:{west}", f"manifest:{east}"], image_px=8)
    assert list(both.sites) == ["east", "west"]
    for name, path in (("east", east), ("west", west)):
        one = load(f"manifest:{path}")
        pictures = {one.names[i]: one.images[i] for i in one.sites[name].train}
        for i in both.sites[name].train:
            np.testing.assert_array_equal(both.images[i], pictures[both.names[i]])


def test_sixty_twenty_twenty(ward: str) -> None:
    """FedCLF (arXiv 2208.11278, V-A): "on each device" 60 % train, 20 % validation, 20 % test; here by lesion."""
    usual, asked = load(ward), load(f"{ward}@rows=60/20/20")
    for name, site in asked.sites.items():
        lesions = {kind: {asked.lesions[i] for i in site.rows(kind)} for kind in ROW_KINDS}
        assert [len(lesions[kind]) for kind in ("train", "tune", "test")] == [24, 8, 8]  # of 40
        assert lesions["test"] <= {usual.lesions[i] for i in usual.sites[name].test}  # a quarter is held out as a rule


def test_a_source_that_names_its_splits_is_not_dealt(make_zip, cache: Path) -> None:
    records = [{**record, "split": "train"} for record in ward_records()]
    with pytest.raises(DataError, match="deals all its rows itself; leave @rows out"):
        load(f"manifest:{make_zip(records)}@rows=60/20/20")


def test_one_site_of_two_sources_has_one_split(make_zip, cache: Path) -> None:
    one = make_zip(ward_records(sites=("east",)), name="a.zip")
    records = [{**record, "image": f"b{record['image']}"} for record in ward_records(sites=("east",))]
    other = make_zip(records, name="b.zip")
    with pytest.raises(DataError, match="Site east has rows of several data sources with different @rows"):
        load_federation([f"manifest:{one}", f"manifest:{other}@rows=60/20/20"], image_px=8)


def test_a_class_that_sources_write_differently_is_named(make_zip, cache: Path) -> None:
    """Otherwise the site of the second source would lose the class without a word."""
    one = make_zip(ward_records(sites=("east",)), name="a.zip")
    west = [{**record, "label": record["label"].lower()} for record in ward_records(sites=("west",))]
    specs = [f"manifest:{one}", f"manifest:{make_zip(west, name='b.zip')}"]
    for classes in (None, ["MEL", "NV"]):
        with pytest.raises(
            DataError, match=r"has both the class '.*' .image west_0_0. and the class '.*'; spell a class the same way"
        ):
            load_federation(specs, image_px=8, classes=classes)
    with pytest.raises(DataError, match=r"class 'nv' .*, both the class 'mel' "):
        load_federation(specs, image_px=8, classes=["MEL", "NV"])
    assert load_federation(specs, image_px=8, task="nevus").classes == ("nevus", "other")


def test_seven_parts_and_small_sets_of_their_own(make_zip, cache: Path, tmp_path: Path) -> None:
    """FedCLF (V-A): seven random parts of one set, three small sets as sites, the classes that all of them have."""
    large = make_zip(ward_records(70, sites=("east", "west")), name="large.zip")
    specs = [f"manifest:{large}@split=iid:7@rows=60/20/20"]
    for i, name in enumerate(("AtlasDerm", "Dermnet", "DarkDerm")):
        for label in ("NV", "MEL", "eczema"):
            (tmp_path / name / label).mkdir(parents=True)
            for j in range(10):
                (tmp_path / name / label / f"{j}.png").write_bytes(png(1000 * i + j))
        specs.append(f"folder:{tmp_path / name}@site={name}@rows=60/20/20")
    made = load_federation(specs, image_px=8, classes=["MEL", "NV"])
    assert list(made.sites) == ["AtlasDerm", "DarkDerm", "Dermnet", *(f"iid-{i}" for i in range(1, 8))]
    assert made.classes == ("MEL", "NV")
    for name in ("AtlasDerm", "Dermnet", "DarkDerm"):
        assert [len(made.sites[name].rows(kind)) for kind in ("train", "tune", "test")] == [12, 4, 4]
        assert made.counts(made.sites[name].train).tolist() == [6, 6]
    parts = [site for name, site in made.sites.items() if name.startswith("iid")]
    lesions = [{made.lesions[i] for kind in ROW_KINDS for i in site.rows(kind)} for site in parts]
    assert sum(map(len, lesions)) == len(set.union(*lesions)) == 106  # 140 without 34 of BKL


def test_the_same_source_twice_is_refused(ward: str) -> None:
    with pytest.raises(DataError, match="twice"):
        load_federation([ward, ward], image_px=8)


def test_no_source() -> None:
    with pytest.raises(DataError, match="give --data SPEC"):
        load_federation([], image_px=8)
