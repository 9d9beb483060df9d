"""docs/design.md 5, `manifest:`: each fault of a person's data gives one clear sentence."""

import io
import zipfile
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from edgefl_trainer.data import DataError, load_federation
from edgefl_trainer.data.sources.manifest import read_manifest

# data/README.md: centre → (train, val); 2,084 images of no centre.
REAL_COUNTS = {
    "bcn": (8069, 2035),
    "vidir_molemax": (2488, 664),
    "vidir_modern": (2068, 547),
    "rosendahl": (1468, 367),
    "msk": (541, 121),
    "vienna_dias": (277, 75),
}


def record(image: str, **changes: str) -> dict[str, str]:
    base = {
        "image": image,
        "file": f"images/{image}.png",
        "label": "NV",
        "center": "east",
        "lesion_id": "",
        "split": "",
    }
    return base | changes


def two() -> list[dict[str, str]]:
    return [record("a"), record("b", label="MEL")]


def test_reads_csv_folder_and_zip_alike(make_zip, tmp_path: Path) -> None:
    path = make_zip(two())
    folder = tmp_path / "open"
    with zipfile.ZipFile(path) as archive:
        for name in archive.namelist():
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(archive.read(name))
    tables = [read_manifest(p) for p in (path, folder, folder / "index.csv")]
    assert tables[0].rows == tables[1].rows == tables[2].rows
    assert [row.label for row in tables[0].rows] == ["NV", "MEL"]


def test_columns_beyond_ours_are_kept(make_zip) -> None:
    """docs/design.md 5: "extra columns kept"."""
    rows = read_manifest(make_zip([record("a", sex="female"), record("b", sex="male")])).rows
    assert [dict(row.extra) for row in rows] == [{"sex": "female"}, {"sex": "male"}]


@pytest.mark.parametrize("column", ["center", "lesion_id", "split"])
def test_a_column_in_capitals_is_told(make_zip, column: str) -> None:
    """The hospital's own test rows, in a column SPLIT, were learned from without a word."""
    records = [
        {key.upper() if key == column else key: value for key, value in row.items()}
        for row in (record("a", **{column: "test"}), record("b", **{column: "train"}))
    ]
    told = "\n".join(read_manifest(make_zip(records)).warnings)
    assert f"has no column {column}: " in told
    assert f"its column {column.upper()} is not read as {column}; rename it if it is meant" in told


def test_what_other_programs_write_for_want_of_a_value_is_told(make_zip) -> None:
    """R's `write.csv` writes NA (its manual, `na`): pictures without a number were one lesion, of two classes."""
    records = [
        record("a", lesion_id="NA"),
        record("b", lesion_id="NA", label="MEL"),
        record("c", lesion_id="L1", center="null"),
        record("d", lesion_id="L2", label="N/A"),
        record("e", lesion_id="L3", label="nan"),
    ]
    path = make_zip(records)
    where = f"index.csv in {path}"
    value, empty = "which is read as", "where no value is known, leave the cell empty"
    assert list(read_manifest(path).warnings) == [
        f"2 rows of {where} have 'N/A' as label, {value} the name of a class; {empty}: d in line 5, e in line 6",
        f"1 row of {where} has 'null' as center, {value} the name of a site; {empty}: c in line 4",
        f"2 rows of {where} have 'NA' as lesion_id, {value} one lesion that all these pictures show; {empty}: "
        "a in line 2, b in line 3",
        f"1 lesion of {where} has rows of several labels, and a lesion has one; give each lesion a lesion_id of its "
        "own: NA (NV, MEL)",
    ]


def test_an_image_without_lesion_is_its_own_lesion(make_zip) -> None:
    rows = read_manifest(make_zip([record("a"), record("b"), record("c", lesion_id="L1")])).rows
    assert len({row.lesion for row in rows}) == 3


@pytest.mark.parametrize(
    ("change", "words"),
    [
        pytest.param(
            lambda r: r[0].pop("label") and r[1].pop("label"), ["no column label", "image, file"], id="column"
        ),
        pytest.param(
            lambda r: r[1].update(image="a"), ["1 image more than once", "'a' in lines 2 and 3"], id="duplicate"
        ),
        pytest.param(lambda r: r[1].update(split="dev"), ["line 3", "'dev'", "train, val, test"], id="split"),
        pytest.param(lambda r: r[1].update(split="train", label=""), ["line 3", "no label"], id="label"),
        pytest.param(lambda r: r[1].update(image=""), ["line 3", "no image name"], id="name"),
        pytest.param(lambda r: r[1].update(file="../b.png"), ["line 3", "'../b.png'", "outside"], id="climbs"),
        pytest.param(lambda r: r[1].update(file="/etc/b.png"), ["line 3", "outside"], id="absolute"),
        pytest.param(lambda r: r[1].update(file="images\\b.png"), ["line 3", "outside"], id="backslash"),
        pytest.param(lambda r: [x.update(center="") for x in r], ["names a site", "@site=NAME"], id="no-site"),
        pytest.param(lambda r: r[1].update(center="a/b"), ["'a/b'", "letters"], id="site-name"),
    ],
)
def test_a_wrong_index_is_named_in_one_sentence(make_zip, cache: Path, change, words: list[str]) -> None:
    records = two()
    path = make_zip(records)
    change(records)
    make_zip([dict(r) for r in records if "file" in r], name="ward.zip")
    with pytest.raises(DataError) as caught:
        load_federation([f"manifest:{path}"], image_px=8)
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        pytest.param({"images/b.png": b"not a picture"}, ["'b'", "images/b.png", "JPEG"], id="corrupt"),
        pytest.param({"images/stray.jpg": b"x"}, ["1 image ", "images/stray.jpg", "does not list"], id="stray"),
        pytest.param({"index.csv": b"image,label,file,center\na,NV,images/none.png,east\n"}, ["images/"], id="missing"),
        pytest.param({"index.csv": b"image,label\n\xff\xfe,NV\n"}, ["UTF-8"], id="encoding"),
        pytest.param({"index.csv": b"image,label\na\n"}, ["line 2", "1 field,"], id="ragged"),
        pytest.param(
            {"index.csv": b""}, ["first line has to name the columns, at least image and label"], id="empty-file"
        ),
        pytest.param({"index.csv": b"image,label,center,file\n"}, ["does not list"], id="no-rows"),
        pytest.param({"index.csv": b"image,image,label\n"}, ["twice"], id="double-column"),
        pytest.param({"index.csv": b"image,lable\na,NV\n"}, ["rename lable to label."], id="misspelt"),
        pytest.param(
            {"index.csv": b"isic_id,DX\na,NV\n"}, ["rename isic_id to image and DX to label."], id="other-names"
        ),
        pytest.param(
            {"index.csv": b"image,lable,centre,lesionid\na,NV,b,c\n"},
            ["rename lable to label, and rename centre to center and lesionid to lesion_id where that is meant."],
            id="all-at-once",
        ),
        pytest.param(
            {"index.csv": b"Image,label,centre\na,NV,b\n"},
            ["write image in small letters, and rename centre to center where that is meant."],
            id="capital-and-misspelt",
        ),
        pytest.param(
            {"index.csv": b"IMAGE,LABEL,CENTER,SPLIT\na,NV,b,test\n"},
            ["write image, label in small letters, and rename CENTER to center and SPLIT to split where that is"],
            id="all-capitals",
        ),
        pytest.param({"index.csv": b"image,LABELS\na,NV\n"}, ["rename LABELS to label."], id="misspelt-capitals"),
        pytest.param({"index.csv": b"image,colour\na,NV\n"}, ["columns are image, colour."], id="nothing-alike"),
    ],
)
def test_a_wrong_file_is_named_in_one_sentence(
    make_zip, cache: Path, extra: dict[str, bytes], words: list[str]
) -> None:
    path = make_zip(two(), extra)
    with pytest.raises(DataError) as caught:
        load_federation([f"manifest:{path}"], image_px=8)
    assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.parametrize(
    ("files", "told"),
    [
        (["trainset.json"], "it holds trainset.json, a list of questions: name it vqa-rad:{path}."),
        (["slake/train.json"], "it holds train.json, a list of questions: name it slake:{path}."),
        (["photos.csv"], "it holds photos.csv: call the list index.csv."),
        (["a.jpg"], "write it (docs/reference/data.md), or name another data SPEC."),
    ],
)
def test_data_without_their_list_are_told_how_they_are_read(tmp_path: Path, files: list[str], told: str) -> None:
    """docs/reference/data.md: a zip of VQA-RAD as a manifest was told that a list names the file index.csv."""
    path = tmp_path / "set.zip"
    with zipfile.ZipFile(path, "w") as written:
        for name in files:
            written.writestr(name, b"[]")
    with pytest.raises(DataError) as caught:
        read_manifest(path)
    sentence = f"{path} holds no index.csv, which lists the pictures and their labels; "
    assert str(caught.value) == sentence + told.format(path=path)


def test_a_folder_of_zips_names_one(tmp_path: Path) -> None:
    """docs/reference/data.md: the SPEC names the zip, not the folder it lies in."""
    (tmp_path / "fed.zip").write_bytes(b"")
    with pytest.raises(DataError, match=f"it holds zip files: name one, such as manifest:{tmp_path}/fed.zip"):
        read_manifest(tmp_path)


def test_a_truncated_picture_names_file_and_image(make_zip, cache: Path) -> None:
    stream = io.BytesIO()
    Image.fromarray(np.full((64, 64, 3), 90, np.uint8)).save(stream, "JPEG")
    path = make_zip(two(), {"images/b.png": stream.getvalue()[:-200]})
    with pytest.raises(DataError, match=r"'b' \(images/b.png"):
        load_federation([f"manifest:{path}"], image_px=8)


def test_a_link_out_of_the_folder_is_refused(tmp_path: Path) -> None:
    """docs/security.md: nothing outside the named folder is read."""
    (tmp_path / "secret.png").write_bytes(b"x")
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "a.png").symlink_to(tmp_path / "secret.png")
    (folder / "index.csv").write_text("image,label,center,file\na,NV,east,a.png\n")
    with pytest.raises(DataError, match="leaves the folder"):
        read_manifest(folder)


@pytest.mark.parametrize("name", ["none.zip", "none.csv", "none"])
def test_a_missing_path_is_named(tmp_path: Path, name: str) -> None:
    with pytest.raises(DataError, match=name):
        read_manifest(tmp_path / name)


def test_a_file_that_is_no_zip_is_named(tmp_path: Path) -> None:
    (tmp_path / "x.zip").write_bytes(b"PK nothing")
    with pytest.raises(DataError, match=r"x\.zip is not a readable zip file\.$"):
        read_manifest(tmp_path / "x.zip")


@pytest.mark.parametrize("method", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_a_zip_whose_unpacking_has_no_bound_is_refused(tmp_path: Path, method: int) -> None:
    """APPNOTE 4.4.5: 12 is bzip2, 14 LZMA. `zipfile` unpacks these without a limit: 4 kB took 1.2 GB."""
    with zipfile.ZipFile(tmp_path / "w.zip", "w", method) as archive:
        archive.writestr("index.csv", "image,label\n")
    with pytest.raises(DataError, match=rf"index.csv in .* is compressed by method {method}, .* method, deflate\."):
        read_manifest(tmp_path / "w.zip")


def test_a_zip_of_a_later_version_is_named(tmp_path: Path) -> None:
    """APPNOTE 4.4.3: the version needed to extract, here 9.9, stands in the directory at the end, after 6 bytes."""
    path = tmp_path / "w.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("index.csv", "image,label\n")
    data = bytearray(path.read_bytes())
    data[data.index(b"PK\1\2") + 6] = 99
    path.write_bytes(data)
    with pytest.raises(DataError, match=r"w\.zip is not a readable zip file: zip file version 9\.9"):
        read_manifest(path)


def test_a_zip_that_unpacks_to_too_much_is_refused(make_zip, cache: Path, tmp_path: Path) -> None:
    """The bound holds for the unpacked size, which the zip states."""
    path = make_zip(two())
    with zipfile.ZipFile(path, "a", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("images/c.png", bytes(20_000_001))
    text = "image,label,center,file\n" + "".join(f"{n},NV,east,images/{n}.png\n" for n in "abc")
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(tmp_path / "new.zip", "w", zipfile.ZIP_DEFLATED) as new:
        for name in old.namelist():
            new.writestr(name, text if name == "index.csv" else old.read(name))
    with pytest.raises(DataError, match=r"images/c.png .* more than the 20000000 bytes"):
        load_federation([f"manifest:{tmp_path / 'new.zip'}"], image_px=8)


@pytest.mark.data
def test_real_counts_and_lesions(real_data: Path) -> None:
    """data/README.md: images of each centre and split; no lesion stands in two splits; 2,084 images of no centre."""
    rows = read_manifest(real_data / "fed_isic2019_84.zip").rows
    counts = Counter((row.site, row.split) for row in rows)
    assert {site: (counts[site, "train"], counts[site, "val"]) for site in REAL_COUNTS} == REAL_COUNTS
    assert counts[None, "unlabelled"] == 2084
    assert len(rows) == 20_804
    train = {row.lesion for row in rows if row.split == "train"}
    assert not train & {row.lesion for row in rows if row.split == "val"}


@pytest.mark.data
def test_real_pictures_come_through_unchanged(real_data: Path) -> None:
    """docs/design.md 2: pictures at their own size are decoded and nothing else; Pillow alone is the oracle."""
    table = read_manifest(real_data / "fed_isic2019_84.zip")
    some = table.rows[::1500]
    with zipfile.ZipFile(real_data / "fed_isic2019_84.zip") as archive:
        for row, (image, _) in zip(some, table.pixels.load(some, 84, "squash"), strict=True):
            with Image.open(io.BytesIO(archive.read(row.source))) as picture:
                np.testing.assert_array_equal(image, np.asarray(picture.convert("RGB")))
