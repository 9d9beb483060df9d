"""CIFAR-100's page, "Binary version": <1 × coarse label><1 × fine label><3072 × pixel>, red, green, blue, row-major.

The drawn copy has that layout with 2 training images and 1 test image of each of the 100 classes.
"""

import io
import zipfile
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from edgefl_trainer.data import DataError, load_federation
from edgefl_trainer.data.sources.cifar100 import read_cifar100

FINE = [f"thing_{i:02d}" for i in range(100)]
COARSE = [f"kind_{i:02d}" for i in range(20)]


def pixel(number: int, colour: int, y: int, x: int) -> int:
    return (number * 31 + colour * 67 + y * 7 + x * 3) % 256


def record(number: int, fine: int) -> bytes:
    values = (pixel(number, colour, y, x) for colour in range(3) for y in range(32) for x in range(32))
    return bytes([fine % 20, fine, *values])


def write_binary(root: Path) -> Path:
    root.mkdir(parents=True)
    (root / "train.bin").write_bytes(b"".join(record(i, i % 100) for i in range(200)))
    (root / "test.bin").write_bytes(b"".join(record(1000 + i, 99 - i) for i in range(100)))
    (root / "fine_label_names.txt").write_text("\n".join(FINE) + "\n")
    (root / "coarse_label_names.txt").write_text("\n".join(COARSE) + "\n\n")  # the official file ends in an empty line
    return root


@pytest.fixture
def cifar(tmp_path: Path) -> Path:
    return write_binary(tmp_path / "cifar-100-binary")


def test_rows_have_the_fine_class_and_no_site(cifar: Path) -> None:
    rows = read_cifar100(cifar).rows
    assert Counter(row.split for row in rows) == {"train": 200, "test": 100}
    assert {row.site for row in rows} == {None}
    assert [row.label for row in rows[:200]] == FINE * 2
    assert [row.label for row in rows[200:]] == FINE[::-1]
    assert dict(rows[37].extra) == {"superclass": COARSE[17]}
    assert len({row.lesion for row in rows}) == 300


def test_pixels_are_colour_planes_row_by_row(cifar: Path) -> None:
    table = read_cifar100(cifar)
    some = (table.rows[203], table.rows[41])
    for number, (image, mask) in zip((1003, 41), table.pixels.load(some, 32, "squash"), strict=True):
        wanted = [[[pixel(number, c, y, x) for c in range(3)] for x in range(32)] for y in range(32)]
        np.testing.assert_array_equal(image, wanted)
        assert mask is None


def test_pixels_are_resized_as_a_picture_file_is(cifar: Path, tmp_path: Path) -> None:
    """docs/design.md 2, one image path: the same pixels from a PNG give the same picture."""
    table = read_cifar100(cifar)
    ((small, _),) = table.pixels.load(table.rows[:1], 32, "squash")
    stream = io.BytesIO()
    Image.fromarray(small).save(stream, "PNG")
    (tmp_path / "folder" / "ward" / "nv").mkdir(parents=True)
    (tmp_path / "folder" / "ward" / "nv" / "a.png").write_bytes(stream.getvalue())
    other = load_federation([f"folder:{tmp_path / 'folder'}"], image_px=80, cache_dir=tmp_path / "c")
    ((large, _),) = table.pixels.load(table.rows[:1], 80, "squash")
    np.testing.assert_array_equal(large, other.images[0])


def test_sites_come_from_a_suffix(cifar: Path, cache: Path) -> None:
    federation = load_federation([f"cifar100:{cifar}@split=iid:4"], image_px=32)
    assert len(federation.classes) == 100
    assert [len(site.test) for site in federation.sites.values()] == [25] * 4
    assert sum(len(site.train) + len(site.tune) for site in federation.sites.values()) == 200
    row = int(federation.sites["iid-2"].test[0])
    table = read_cifar100(cifar)
    ((image, _),) = table.pixels.load([r for r in table.rows if r.image == federation.names[row]], 32, "squash")
    np.testing.assert_array_equal(federation.images[row], image)


def test_without_sites_it_cannot_run(cifar: Path, cache: Path) -> None:
    with pytest.raises(DataError, match="names a site"):
        load_federation([f"cifar100:{cifar}"], image_px=32)


def test_folder_above_and_zip_read_alike(cifar: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "c.zip", "w") as archive:
        for path in sorted(cifar.iterdir()):
            archive.write(path, f"cifar-100-binary/{path.name}")
    above, packed = read_cifar100(cifar.parent), read_cifar100(tmp_path / "c.zip")
    assert above.rows == packed.rows
    assert [row.image for row in above.rows] == [row.image for row in read_cifar100(cifar).rows]


def test_changed_records_make_a_new_cache_entry(cifar: Path) -> None:
    before = read_cifar100(cifar).pixels.identity
    (cifar / "test.bin").write_bytes(b"".join(record(i, i) for i in range(100)) * 2)
    assert read_cifar100(cifar).pixels.identity != before


def test_the_pickle_is_refused_unopened(tmp_path: Path) -> None:
    """docs/security.md: no pickle is ever opened; the sentence names the archive that holds the binary form."""
    opened = tmp_path / "opened"
    bomb = b"cos\nmkdir\n(S'" + bytes(opened) + b"'\ntR."  # makes that folder when it is loaded
    folder = tmp_path / "cifar-100-python"
    folder.mkdir()
    for name in ("train", "test", "meta"):
        (folder / name).write_bytes(bomb)
    for path in (folder, tmp_path):
        with pytest.raises(DataError, match=r"pickle.*cifar-100-binary\.tar\.gz"):
            read_cifar100(path)
    assert not opened.exists()


@pytest.mark.parametrize(
    ("file", "change", "words"),
    [
        ("train.bin", None, ["no train.bin", "cifar-100-binary.tar.gz"]),
        ("test.bin", None, ["test.bin", "cannot be read"]),
        ("fine_label_names.txt", None, ["fine_label_names.txt"]),
        ("train.bin", lambda data: data[:-1], ["614,799 bytes", "3,074"]),
        ("train.bin", lambda data: data + b"\0", ["614,801 bytes"]),
        ("train.bin", lambda data: b"", ["0 bytes"]),
        ("train.bin", lambda data: data[:-3074], ["1 images of thing_99", "2 of thing_00", "is missing"]),
        ("test.bin", lambda data: data[:3074] + b"\0\x64" + data[3076:], ["record 1", "fine class 100", "0 to 99"]),
        ("test.bin", lambda data: b"\x14" + data[1:], ["record 0", "coarse class 20", "0 to 19"]),
        ("fine_label_names.txt", lambda data: b"apple\n" + data, ["101 different class names", "100"]),
        ("fine_label_names.txt", lambda data: data.replace(b"_07", b"_08"), ["99 different class names"]),
        ("coarse_label_names.txt", lambda data: b"\xff" + data, ["UTF-8"]),
    ],
)
def test_faults_are_named_in_one_sentence(cifar: Path, file: str, change, words: list[str]) -> None:
    path = cifar / file
    data = path.read_bytes()
    path.unlink()
    if change is not None:
        path.write_bytes(change(data))
    with pytest.raises(DataError) as caught:
        read_cifar100(cifar)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_a_packed_archive_says_unpack(tmp_path: Path) -> None:
    (tmp_path / "cifar-100-binary.tar.gz").write_bytes(b"\x1f\x8b")
    with pytest.raises(DataError, match="unpack"):
        read_cifar100(tmp_path / "cifar-100-binary.tar.gz")
