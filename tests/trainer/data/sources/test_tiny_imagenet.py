"""Layout of tiny-imagenet-200.zip: wnids.txt, and below train/WNID, val and test a folder images/ and a list of it.

Box lines are `NAME\\tx\\ty\\tx\\ty`, annotation lines `NAME\\tWNID\\tx\\ty\\tx\\ty`. Source: the archive's own layout.
"""

import io
import zipfile
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tests.trainer.data.conftest import spoil

from edgefl_trainer.data import DataError, load_federation
from edgefl_trainer.data.sources.tiny_imagenet import read_tiny_imagenet

WNIDS = ("n02124075", "n01443537", "n04067472")
VAL = {"val_0.JPEG": "n04067472", "val_1.JPEG": "n01443537", "val_2.JPEG": "n02124075"}


def jpeg(number: int, mode: str = "RGB") -> bytes:
    shape = (64, 64, 3) if mode == "RGB" else (64, 64)
    pixels = np.random.default_rng(number).integers(0, 256, shape, dtype=np.uint8)
    stream = io.BytesIO()
    Image.fromarray(pixels, mode=None).save(stream, "JPEG")
    return stream.getvalue()


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    root = tmp_path / "tiny-imagenet-200"
    for i, wnid in enumerate(WNIDS):
        (root / "train" / wnid / "images").mkdir(parents=True)
        names = [f"{wnid}_{n}.JPEG" for n in range(4)]
        for n, name in enumerate(names):  # some of the official pictures are grey
            (root / "train" / wnid / "images" / name).write_bytes(jpeg(10 * i + n, "L" if n == 3 else "RGB"))
        (root / "train" / wnid / f"{wnid}_boxes.txt").write_text("".join(f"{name}\t0\t10\t63\t58\n" for name in names))
    (root / "val" / "images").mkdir(parents=True)
    for n, name in enumerate(VAL):
        (root / "val" / "images" / name).write_bytes(jpeg(100 + n))
    lines = "".join(f"{name}\t{wnid}\t0\t32\t44\t62\n" for name, wnid in VAL.items())
    (root / "val" / "val_annotations.txt").write_text(lines)
    (root / "test" / "images").mkdir(parents=True)
    (root / "test" / "images" / "test_0.JPEG").write_bytes(jpeg(200))
    (root / "wnids.txt").write_text("\n".join(WNIDS))  # the official file has no newline at its end
    (root / "words.txt").write_text("n01443537\tgoldfish, Carassius auratus\n")
    return root


def test_val_is_the_test_set_and_test_is_not_read(tiny: Path) -> None:
    rows = read_tiny_imagenet(tiny).rows
    assert {row.image: row.label for row in rows if row.split == "test"} == VAL
    assert Counter(row.label for row in rows if row.split == "train") == dict.fromkeys(WNIDS, 4)
    assert len(rows) == 15
    assert {row.site for row in rows} == {None}
    assert all(row.image.split("_")[0] == row.label for row in rows if row.split == "train")


def test_zip_folder_and_folder_above_read_alike(tiny: Path, tmp_path: Path) -> None:
    path = tmp_path / "packed" / "tiny-imagenet-200.zip"
    path.parent.mkdir()
    with zipfile.ZipFile(path, "w") as archive:
        for file in sorted(tiny.rglob("*")):
            archive.write(file, file.relative_to(tiny.parent))
    packed, above = read_tiny_imagenet(path), read_tiny_imagenet(tiny.parent)
    assert packed.rows == above.rows
    assert [row.image for row in packed.rows] == [row.image for row in read_tiny_imagenet(tiny).rows]


def test_sites_come_from_a_suffix(tiny: Path, cache: Path) -> None:
    federation = load_federation([f"tiny-imagenet:{tiny}@split=iid:3"], image_px=64)
    assert federation.classes == tuple(sorted(WNIDS))
    row = federation.names.index("val_1.JPEG")
    with Image.open(tiny / "val" / "images" / "val_1.JPEG") as picture:
        np.testing.assert_array_equal(federation.images[row], np.asarray(picture))
    grey = federation.images[federation.names.index("n01443537_3.JPEG")]
    assert (grey[..., 0] == grey[..., 2]).all()


def test_without_sites_it_cannot_run(tiny: Path, cache: Path) -> None:
    with pytest.raises(DataError, match="names a site"):
        load_federation([f"tiny-imagenet:{tiny}"], image_px=64)


BOXES = "train/n01443537/n01443537_boxes.txt"
NOTES = "val/val_annotations.txt"


@pytest.mark.parametrize(
    ("file", "old", "new", "words"),
    [
        ("wnids.txt", None, None, ["no wnids.txt", "tiny-imagenet-200.zip"]),
        (BOXES, None, None, [BOXES, "cannot be read"]),
        (NOTES, None, None, [NOTES, "cannot be read"]),
        ("train/n01443537/images/n01443537_2.JPEG", None, None, ["n01443537_2.JPEG is not in"]),
        ("val/images/val_1.JPEG", None, None, ["val_1.JPEG is not in"]),
        ("wnids.txt", "n04067472", "n00000001", ["n00000001_boxes.txt"]),
        ("wnids.txt", "n04067472", "../up", ["'../up'", "outside"]),
        ("wnids.txt", "\nn04067472", "", ["line 1", "'n04067472'", "wnids.txt does not list"]),
        (NOTES, "val_1.JPEG\tn01443537", "val_1.JPEG\tn99", ["line 2", "'n99'"]),
        (NOTES, "\t44\t62\nval_2", "\nval_2", ["line 2", "4 fields", "six"]),
        (BOXES, "_1.JPEG\t0", "_1.JPEG", ["line 2", "4 fields", "five"]),
        (BOXES, "n01443537_1.JPEG", "n01443537_0.JPEG", ["'n01443537_0.JPEG' twice"]),
        (BOXES, "n01443537_1.JPEG", "../../../../x.JPEG", ["outside"]),
    ],
)
def test_faults_are_named_in_one_sentence(
    tiny: Path, file: str, old: str | None, new: str | None, words: list[str]
) -> None:
    spoil(tiny / file, old, new)
    with pytest.raises(DataError) as caught:
        read_tiny_imagenet(tiny)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_a_truncated_picture_is_named(tiny: Path, cache: Path) -> None:
    path = tiny / "val" / "images" / "val_2.JPEG"
    path.write_bytes(path.read_bytes()[:-300])
    with pytest.raises(DataError, match=r"'val_2.JPEG'"):
        load_federation([f"tiny-imagenet:{tiny}@site=one"], image_px=64)
