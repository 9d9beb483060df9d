"""README of the federated vision split files: `federated_train*.csv` with the columns user_id, image_id, class, label.

Pictures lie as iNaturalist 2017 is packed: train_val_images/GROUP/SPECIES/IMAGE_ID.jpg. PEP-FedPT (docs/methods.md 5):
users with at least 16 training images.
"""

import hashlib
import shutil
from collections import Counter
from pathlib import Path

import pytest
from tests.trainer.data.conftest import png

from edgefl_trainer.data import DataError, load_federation
from edgefl_trainer.data.rows import Row
from edgefl_trainer.data.sources.inat import OPTIONS, read_inat

USERS = {"17": 20, "4": 40, "903": 19, "55": 3}  # images of each; 19 keep 15 for training, 20 keep 16
SPECIES = ("Aves/Pica pica", "Plantae/Acer rubrum", "Insecta/Danaus plexippus")
CSV = "inaturalist-user-120k/federated_train_user_120k.csv"


def image_id(user: str, number: int) -> str:
    return hashlib.md5(f"{user}/{number}".encode(), usedforsecurity=False).hexdigest()


@pytest.fixture
def inat(tmp_path: Path) -> Path:
    root = tmp_path / "inat"
    lines = ["user_id,image_id,class,label"]
    for user, count in USERS.items():
        for i in range(count):
            species = i % 3
            name = image_id(user, i)
            lines.append(f"{user},{name},{species * 601},{species + 2000}")
            path = root / "train_val_images" / SPECIES[species] / f"{name}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(png(i))  # the decoder goes by content
    (root / CSV).parent.mkdir()
    (root / CSV).write_text("\n".join(lines) + "\n")
    (root / "inaturalist-user-120k" / "test.csv").write_text("image_id,class,label\nabc,0,2000\n")
    return root


def read(root: Path, **options: str) -> tuple[Row, ...]:
    return read_inat(root, OPTIONS | options).rows


def counts(rows: tuple[Row, ...]) -> dict[str | None, tuple[int, int]]:
    splits = Counter((row.site, row.split) for row in rows)
    return {site: (splits[site, "train"], splits[site, "test"]) for site in {row.site for row in rows}}


def test_users_with_sixteen_training_images_are_sites(inat: Path) -> None:
    """A fifth of each user's images tests."""
    assert counts(read(inat)) == {"user-17": (16, 4), "user-4": (32, 8)}
    assert counts(read(inat, min_train="1")) == {
        "user-17": (16, 4), "user-4": (32, 8), "user-903": (15, 4), "user-55": (2, 1),
    }  # fmt: skip


def test_the_seed_of_the_spec_draws_the_test_rows_and_the_run_s_does_not(inat: Path, cache: Path) -> None:
    """docs/design.md 5: which rows are `test` does not depend on the run's seed."""

    def tested(spec: str, seed: int) -> set[str]:
        federation = load_federation([spec], image_px=8, seed=seed)
        return {federation.names[i] for site in federation.sites.values() for i in site.test}

    assert tested(f"inat:{inat}", 0) == tested(f"inat:{inat}", 1) != tested(f"inat:{inat},seed=1", 0)


def test_a_site_keeps_its_test_rows_beside_others(inat: Path) -> None:
    def tested(rows: tuple[Row, ...]) -> set[str]:
        return {row.image for row in rows if row.split == "test" and row.site == "user-4"}

    before = tested(read(inat))
    lines = (inat / CSV).read_text().splitlines()
    (inat / CSV).write_text("\n".join([lines[0], *(line for line in lines[:0:-1] if line.startswith("4,"))]) + "\n")
    assert tested(read(inat)) == before


def test_class_and_species_stand_with_the_row(inat: Path) -> None:
    for row in read(inat):
        extra = dict(row.extra)
        assert row.source.split("/")[-2] == extra["species"]
        assert row.label == f"{(int(extra['label']) - 2000) * 601:04d}"
        assert row.source.endswith(f"/{row.image}.jpg")
    assert len({row.lesion for row in read(inat)}) == 60


def test_federation(inat: Path, cache: Path) -> None:
    federation = load_federation([f"inat:{inat},min_train=15"], image_px=8)
    assert federation.classes == ("0000", "0601", "1202")
    assert list(federation.sites) == ["user-17", "user-4", "user-903"]
    assert federation.report_split == "test"
    alone = load_federation([f"inat:{inat},min_train=15@site=user-4"], image_px=8)
    wanted = [federation.names[i] for i in federation.sites["user-4"].test]
    assert [alone.names[i] for i in alone.sites["user-4"].test] == wanted


def test_pictures_of_users_that_are_dropped_need_not_be_there(inat: Path) -> None:
    (inat / "train_val_images" / SPECIES[0] / f"{image_id('55', 0)}.jpg").unlink()
    read(inat)
    with pytest.raises(DataError, match=image_id("55", 0)):
        read(inat, min_train="1")


def test_a_smaller_copy_is_not_taken_for_the_official_picture(inat: Path) -> None:
    """docs/reference/data.md: pictures lie in `train_val_images/`; copies may lie anywhere, and later in name order."""
    shutil.copytree(inat / "train_val_images", inat / "zoomed")
    assert {row.source.partition("/")[0] for row in read(inat)} == {"train_val_images"}


def test_split_by_place(inat: Path) -> None:
    (inat / CSV).rename(inat / "federated_train_geo_1k.csv")
    assert set(counts(read(inat, split="geo_1k"))) == {"geo-17", "geo-4"}


FIRST = f"17,{image_id('17', 0)},0,2000"


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        (FIRST, f"17,{'0' * 32},0,2000", [f"{'0' * 32}.jpg", "federated_train_user_120k.csv"]),
        (FIRST, FIRST.replace(",0,", ",1203,"), ["line 2", "'1203'", "0 to 1202"]),
        (FIRST, FIRST.replace(",0,", ",-1,"), ["line 2", "'-1'"]),
        (FIRST, FIRST.replace(",0,", ",,"), ["line 2", "''"]),
        (FIRST, FIRST[3:], ["line 2", "3 fields"]),
        (FIRST, FIRST.replace("17,", ",", 1), ["line 2", "lacks its user_id"]),
        (FIRST, "17,,0,2000", ["line 2", "lacks its image_id"]),
        (FIRST, f"{FIRST}\n{FIRST}", ["twice"]),
        ("user_id,", "user_120k,", ["no column user_id"]),
    ],
)
def test_faults_of_the_file_are_named(inat: Path, old: str, new: str, words: list[str]) -> None:
    text = (inat / CSV).read_text()
    assert old in text
    (inat / CSV).write_text(text.replace(old, new))
    with pytest.raises(DataError) as caught:
        read(inat)
    assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.parametrize(
    ("suffix", "words"),
    [
        (",min_train=0", ["min_train=0", "1 to 9999"]),
        (",min_train=x", ["min_train=x"]),
        (",seed=-1", ["seed=-1", "0 to 9999"]),
        (",min_train=33", ["No site", "33", "largest has 32"]),
        (",split=geo_1k", ["no federated_train_geo_1k.csv"]),
        (",split=*", ["split=*"]),
        (",users=3", ["option users", "split, min_train, seed"]),
    ],
)
def test_faults_of_the_spec_are_named(inat: Path, suffix: str, words: list[str]) -> None:
    with pytest.raises(DataError) as caught:
        load_federation([f"inat:{inat}{suffix}"], image_px=8)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_a_user_name_that_cannot_be_a_site_is_named(inat: Path, cache: Path) -> None:
    text = (inat / CSV).read_text().replace("\n17,", "\nJane Doe,")
    (inat / CSV).write_text(text)
    with pytest.raises(DataError, match="user-Jane Doe"):
        load_federation([f"inat:{inat}"], image_px=8)
