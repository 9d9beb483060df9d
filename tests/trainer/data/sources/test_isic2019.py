"""docs/methods.md 7.1 and 7.2: Fed-ISIC2019 from the official files, on a drawn copy and on the real tables."""

import shutil
import zipfile
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from tests.trainer.data.conftest import png

from edgefl_trainer.data import DataError, load_federation
from edgefl_trainer.data.dealing import deal_test
from edgefl_trainer.data.site_rows import ROW_KINDS
from edgefl_trainer.data.sources.isic2019 import CENTRES, CLASSES, isic_rows
from edgefl_trainer.data.sources.store import open_store

# docs/methods.md 7.2: centre → images of each class, and FLamby's train and test images.
TALLY = {
    "bcn": ((2857, 4206, 2809, 737, 1138, 124, 111, 431), (9930, 2483)),
    "vidir_molemax": ((24, 3720, 2, 0, 124, 30, 54, 0), (3163, 791)),
    "vidir_modern": ((680, 1832, 211, 21, 475, 51, 82, 11), (2691, 672)),
    "rosendahl": ((342, 803, 296, 109, 490, 30, 3, 186), (1807, 452)),
    "msk": ((215, 415, 0, 0, 189, 0, 0, 0), (655, 164)),
    "vienna_dias": ((67, 350, 5, 0, 10, 4, 3, 0), (351, 88)),
}

# Ten images: one without lesion id, every centre, a HAM lesion of two images.
DRAWN = [
    ("ISIC_01", "NV", "", "", ""),
    ("ISIC_02", "MEL", "BCN_0000001", "", "train"),
    ("ISIC_03", "NV", "BCN_0000002", "", "test"),
    ("ISIC_04", "BKL", "MSK4_0000003", "", "train"),
    ("ISIC_05", "NV", "HAM_0000004", "vidir_molemax", "train"),
    ("ISIC_06", "NV", "HAM_0000004", "vidir_molemax", "test"),
    ("ISIC_07", "DF", "HAM_0000005", "vidir_modern", "train"),
    ("ISIC_08", "SCC", "HAM_0000006", "rosendahl", "train"),
    ("ISIC_09", "VASC", "HAM_0000007", "vienna_dias", "train"),
    ("ISIC_10", "AK", "HAM_0000006", "rosendahl", "train"),
]


@pytest.fixture
def drawn(tmp_path: Path) -> Path:
    root = tmp_path / "isic"
    pictures = root / "ISIC_2019_Training_Input"
    pictures.mkdir(parents=True)
    truth = ["image," + ",".join((*CLASSES, "UNK"))]
    meta = ["image,age_approx,anatom_site_general,lesion_id,sex"]
    ham = ["lesion_id,image_id,dx,dx_type,age,sex,localization,dataset"]
    flamby = ["image,target,center,fold,fold2"]
    for i, (image, label, lesion, dataset, fold) in enumerate(DRAWN):
        truth.append(f"{image}," + ",".join("1.0" if name == label else "0.0" for name in (*CLASSES, "UNK")))
        meta.append(f"{image},55,anterior torso,{lesion},female")
        if dataset:
            ham.append(f"{lesion},{image},nv,histo,55.0,female,back,{dataset}")
        if fold:
            centre = CENTRES.index(dataset) if dataset else {"BCN_": 0, "MSK4": 4}[lesion[:4]]
            flamby.append(f"{image},0,{centre},{fold},{fold}_{centre}")
        (pictures / f"{image}.png").write_bytes(png(i))
    for name, lines in (
        ("ISIC_2019_Training_GroundTruth.csv", truth),
        ("ISIC_2019_Training_Metadata.csv", meta),
        ("HAM10000_metadata", ham),
        ("train_test_split", flamby),
    ):
        (root / name).write_text("\n".join(lines) + "\n")
    return root


def test_drawn_copy_has_the_six_centres(drawn: Path, cache: Path) -> None:
    federation = load_federation([f"isic2019:{drawn}"], image_px=8)
    assert list(federation.sites) == sorted(CENTRES)
    used = [federation.names[i] for site in federation.sites.values() for kind in ROW_KINDS for i in site.rows(kind)]
    assert sorted(used) == [f"ISIC_{i:02d}" for i in range(2, 11)]  # ISIC_01 has no lesion id


@pytest.mark.parametrize("split", ["lesion", "flamby"])
def test_an_image_without_lesion_id_is_an_unlabelled_one_of_no_site(drawn: Path, cache: Path, split: str) -> None:
    """docs/methods.md 7.1: it teaches self-supervised methods where `spread` deals it to a site, and nothing else."""
    federation = load_federation([f"isic2019:{drawn},split={split}"], image_px=8, unlabelled="spread")
    [row] = np.concatenate([site.unlabelled for site in federation.sites.values()])
    assert (federation.names[row], federation.labels[row]) == ("ISIC_01", -1)
    plain = load_federation([f"isic2019:{drawn},split={split}"], image_px=8)
    for name, site in federation.sites.items():
        for kind in ("train", "tune", "val", "test"):
            np.testing.assert_array_equal(site.rows(kind), plain.sites[name].rows(kind))


def test_a_folder_without_any_of_those_pictures_is_flambys(drawn: Path, cache: Path) -> None:
    """FLamby's folder holds 23,247 pictures; where some of the 2,084 others are there, a missing one is a fault."""
    pictures = drawn / "ISIC_2019_Training_Input"
    (pictures / "ISIC_01.png").unlink()
    assert len(load_federation([f"isic2019:{drawn}"], image_px=8, unlabelled="spread").names) == 9
    (pictures / "ISIC_01.png").write_bytes(png(1))
    for name in ("ISIC_2019_Training_GroundTruth.csv", "ISIC_2019_Training_Metadata.csv"):
        table = drawn / name
        line = "ISIC_11,0,1,0,0,0,0,0,0,0" if "GroundTruth" in name else "ISIC_11,55,anterior torso,,female"
        table.write_text(f"{table.read_text()}{line}\n")
    with pytest.raises(DataError, match="ISIC_11"):
        load_federation([f"isic2019:{drawn}"], image_px=8)


def test_flamby_split_is_taken_as_it_is(drawn: Path, cache: Path) -> None:
    federation = load_federation([f"isic2019:{drawn},split=flamby"], image_px=8)
    test = {federation.names[i] for site in federation.sites.values() for i in site.test}
    assert test == {"ISIC_03", "ISIC_06"}


def test_what_is_known_of_a_patient_is_kept_by_our_words(drawn: Path) -> None:
    """data/README.md: the place on the body is called anatomy, `site` is a member of the federation."""
    rows = isic_rows(open_store(drawn), "lesion")
    assert dict(rows[0].extra) == {"age": "55", "sex": "female", "anatomy": "anterior torso"}


@pytest.mark.parametrize(
    ("name", "old", "new", "words"),
    [
        ("ISIC_2019_Training_GroundTruth.csv", "ISIC_02,1.0,", "ISIC_02,0.0,", ["line 3", "marks 0"]),
        ("ISIC_2019_Training_GroundTruth.csv", "ISIC_02,", "ISIC_99,", ["names ISIC_02", "ground truth does not"]),
        ("ISIC_2019_Training_Metadata.csv", "BCN_0000001", "XYZ_0000001", ["'XYZ_0000001'", "BCN_, HAM_ or MSK4"]),
        ("ISIC_2019_Training_Metadata.csv", "lesion_id", "lesion", ["no column lesion_id"]),
        ("HAM10000_metadata", ",vidir_modern", ",graz", ["'graz'"]),
        ("HAM10000_metadata", "ISIC_07", "ISIC_77", ["ISIC_07", "HAM10000 metadata lacks"]),
        ("train_test_split", "ISIC_07,0,2", "ISIC_07,0,3", ["vidir_modern", "centre 3"]),
        ("train_test_split", "ISIC_07", "ISIC_77", ["ISIC_07", "FLamby's split lacks"]),
        ("train_test_split", ",test,", ",dev,", ["'dev'"]),
    ],
)
def test_faults_of_the_tables_are_named(drawn: Path, name: str, old: str, new: str, words: list[str]) -> None:
    text = (drawn / name).read_text()
    assert old in text
    (drawn / name).write_text(text.replace(old, new, 1))
    with pytest.raises(DataError) as caught:
        isic_rows(open_store(drawn), "flamby")
    assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.parametrize("name", ["ISIC_2019_Training_GroundTruth.csv", "HAM10000_metadata"])
def test_a_missing_table_is_named(drawn: Path, name: str) -> None:
    (drawn / name).unlink()
    with pytest.raises(DataError, match=name.split(".")[0]):
        isic_rows(open_store(drawn), "lesion")


def test_a_missing_picture_is_named(drawn: Path, cache: Path) -> None:
    (drawn / "ISIC_2019_Training_Input" / "ISIC_05.png").unlink()
    with pytest.raises(DataError, match="ISIC_05"):
        load_federation([f"isic2019:{drawn}"], image_px=8)


def test_copies_of_another_colour_are_not_taken_for_the_official_pictures(drawn: Path) -> None:
    """FLamby writes copies with the same names into the folder `…_preprocessed`, which stands later in name order."""
    official = drawn / "ISIC_2019_Training_Input"
    copies = drawn / "ISIC_2019_Training_Input_preprocessed"
    shutil.copytree(official, copies)
    rows = isic_rows(open_store(drawn), "lesion")
    assert {Path(row.source).parent.name for row in rows} == {official.name}
    official.rename(drawn / "other")
    with pytest.raises(DataError, match=r"2 pictures called ISIC_01: .* keep one, in the folder ISIC_2019_Training_In"):
        isic_rows(open_store(drawn), "lesion")
    shutil.rmtree(drawn / "other")
    assert {Path(row.source).parent.name for row in isic_rows(open_store(drawn), "lesion")} == {copies.name}


def test_pictures_of_one_name_that_no_list_names_are_passed_over(drawn: Path) -> None:
    """They were refused, with the advice to keep one of them among the official pictures."""
    wanted = isic_rows(open_store(drawn), "lesion")
    for folder in ("extra", "x2"):
        (drawn / folder).mkdir()
        (drawn / folder / "thumb.jpg").write_bytes(png(0))
    assert isic_rows(open_store(drawn), "lesion") == wanted


@pytest.mark.data
def test_real_tables_tally(real_data: Path) -> None:
    """docs/methods.md 7.2: 23,247 images, classes of each centre, and FLamby's train and test images."""
    rows = isic_rows(open_store(real_data / "isic2019_tables.zip"), "flamby")
    classes = Counter((row.site, row.label) for row in rows)
    folds = Counter((row.site, row.split) for row in rows)
    assert len(rows) == 23_247
    with zipfile.ZipFile(real_data / "isic2019_tables.zip") as tables:
        lines = tables.read("ISIC_2019_Training_Metadata.csv").decode().splitlines()
    assert sum(line.split(",")[3] == "" for line in lines) == 2_084  # without lesion id: no site, no picture here
    for site, (tally, split) in TALLY.items():
        assert tuple(classes[site, label] for label in CLASSES) == tally
        assert (folds[site, "train"], folds[site, "test"]) == split


@pytest.mark.slow
@pytest.mark.data
def test_real_lesion_split_does_not_leak(real_data: Path) -> None:
    """docs/methods.md 7.2: FLamby's split leaks 696 HAM lesions, ours none; a quarter of the lesions tests."""
    store = open_store(real_data / "isic2019_tables.zip")

    def leaking(rows: list) -> set[str]:
        train = {row.lesion for row in rows if row.split == "train"}
        return train & {row.lesion for row in rows if row.split == "test"}

    assert sum(lesion.startswith("HAM_") for lesion in leaking(list(isic_rows(store, "flamby")))) == 696
    dealt = deal_test(isic_rows(store, "lesion"))
    assert leaking(dealt) == set()
    for site in CENTRES:
        share = len({r.lesion for r in dealt if r.site == site and r.split == "test"}) / len(
            {r.lesion for r in dealt if r.site == site}
        )
        assert abs(share - 0.25) < 0.01
