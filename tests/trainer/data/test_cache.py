"""docs/design.md 5 and 10: pictures are decoded once; a cache entry is whole or absent."""

import io
import os
import resource
import zipfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tests.trainer.data.conftest import png, ward_records

from edgefl_protocol.pictures.preprocess import Preprocess, prepare
from edgefl_trainer.data import DataError, default_cache_dir, load_federation
from edgefl_trainer.data.cache import cached_pictures
from edgefl_trainer.data.sources import files
from edgefl_trainer.data.sources.manifest import read_manifest


def never(data: bytes) -> np.ndarray:
    raise AssertionError("a picture was decoded again")


def test_second_load_decodes_nothing(make_zip, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = f"manifest:{make_zip(ward_records(4))}"
    first = load_federation([spec], image_px=8)
    monkeypatch.setattr(files, "decode", never)
    second = load_federation([spec], image_px=8, task="nevus", seed=3)
    np.testing.assert_array_equal(first.images, second.images)
    assert isinstance(second.images, np.memmap)
    assert not second.images.flags.writeable


def test_pictures_of_the_right_size_are_not_resampled(make_zip, cache: Path) -> None:
    """Pillow alone is the oracle."""
    federation = load_federation([f"manifest:{make_zip(ward_records(3))}"], image_px=8)
    for i, image in enumerate(federation.images):
        with Image.open(io.BytesIO(png(i))) as picture:
            np.testing.assert_array_equal(image, np.asarray(picture))


def test_other_size_other_source_other_entry(make_zip, cache: Path) -> None:
    records = ward_records(3)
    path = make_zip(records)
    load_federation([f"manifest:{path}"], image_px=8)
    load_federation([f"manifest:{path}"], image_px=16)
    load_federation([f"manifest:{path}"], image_px=16, fit="crop")
    assert len(list(cache.iterdir())) == 3
    make_zip(records, {records[0]["file"]: png(999)})
    changed = load_federation([f"manifest:{path}"], image_px=8)
    assert len(list(cache.iterdir())) == 4
    with Image.open(io.BytesIO(png(999))) as picture:
        np.testing.assert_array_equal(changed.images[0], np.asarray(picture))


@pytest.mark.parametrize("of", ["cache.PREPROCESSING", "cache.PIL.__version__"])
def test_what_decodes_otherwise_makes_another_entry(make_zip, cache: Path, monkeypatch, of: str) -> None:
    """`preprocess.prepare`: equal bytes of one Pillow version; a run learned pixels that no device showed any more."""
    spec = f"manifest:{make_zip(ward_records(2))}"
    load_federation([spec], image_px=8)
    monkeypatch.setattr(f"edgefl_trainer.data.{of}", "another")
    load_federation([spec], image_px=8)
    assert len(list(cache.iterdir())) == 2


def test_the_colour_of_the_light_is_removed_as_a_device_removes_it(make_zip, cache: Path) -> None:
    """The picture is resized first, as `preprocess.prepare` does, and pictures as they are keep their entry."""
    path = make_zip(ward_records(3))
    corrected = load_federation([f"manifest:{path}"], image_px=16, colour="shades_of_grey_6")
    for i, image in enumerate(corrected.images):
        np.testing.assert_array_equal(image, prepare(png(i), Preprocess(size=16, colour="shades_of_grey_6")))
        assert not np.array_equal(image, prepare(png(i), Preprocess(size=16)))
    assert corrected.colour == "shades_of_grey_6"
    plain = load_federation([f"manifest:{path}"], image_px=16)
    np.testing.assert_array_equal(plain.images[0], prepare(png(0), Preprocess(size=16)))
    assert len(list(cache.iterdir())) == 2


def test_a_changed_file_of_a_folder_is_read_again(tmp_path: Path, cache: Path) -> None:
    for i in range(8):
        path = tmp_path / "clinic" / "east" / ("nevus", "other")[i % 2] / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(png(i))
    spec = f"folder:{tmp_path / 'clinic'}"
    before = np.array(load_federation([spec], image_px=8).images)
    path.write_bytes(png(99, px=16))
    after = load_federation([spec], image_px=8).images
    assert (before != after).any(axis=(1, 2, 3)).sum() == 1


def test_a_fault_leaves_no_entry(make_zip, cache: Path) -> None:
    records = ward_records(4)
    path = make_zip(records, {records[-1]["file"]: b"broken"})
    with pytest.raises(DataError, match="neither JPEG nor PNG"):
        load_federation([f"manifest:{path}"], image_px=8)
    assert list(cache.iterdir()) == []
    make_zip(records)
    assert len(load_federation([f"manifest:{path}"], image_px=8).images) == len(records)


def test_a_cache_that_cannot_be_written_is_named(make_zip, tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    with pytest.raises(DataError, match=r"cannot be written .* EDGEFL_CACHE"):
        load_federation([f"manifest:{make_zip(ward_records(2))}"], image_px=8, cache_dir=blocked / "cache")


def test_a_full_disk_is_one_sentence_and_leaves_nothing(make_zip, cache: Path) -> None:
    """Bad input, "a disk that is full": a limit on file size stands for it, and fails in the same place."""
    path = make_zip(ward_records(6))
    table = read_manifest(path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2048, hard))
    try:
        with pytest.raises(DataError, match=r"cannot be written .* free space there"):
            cached_pictures([table], 8, "squash", cache)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(cache.iterdir()) == []


def test_what_a_killed_process_left_is_cleared(make_zip, cache: Path) -> None:
    old, young = cache / ".0123.ab.tmp", cache / ".4567.cd.tmp"
    for folder in (old, young):
        folder.mkdir(parents=True)
    os.utime(old, (0, 0))
    load_federation([f"manifest:{make_zip(ward_records(2))}"], image_px=8)
    assert not old.exists()
    assert young.exists()


def test_a_damaged_entry_is_named(make_zip, cache: Path) -> None:
    spec = f"manifest:{make_zip(ward_records(2))}"
    load_federation([spec], image_px=8)
    (entry,) = cache.iterdir()
    (entry / "images.npy").write_bytes(b"nothing")
    with pytest.raises(DataError, match=r"damaged; remove it"):
        load_federation([spec], image_px=8)


def test_two_writers_of_one_entry(make_zip, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While one process decodes, another publishes the same entry: both end with it."""
    table = read_manifest(make_zip(ward_records(2)))
    real_decode, other = files.decode, []

    def slow(data: bytes) -> np.ndarray:
        if not other:
            other.append(None)
            cached_pictures([table], 8, "squash", cache)
        return real_decode(data)

    monkeypatch.setattr(files, "decode", slow)
    pictures = cached_pictures([table], 8, "squash", cache)
    assert len(pictures.images) == len(table.rows)
    assert [path.name[0] for path in cache.iterdir()] != ["."]
    assert len(list(cache.iterdir())) == 1


def test_default_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("EDGEFL_CACHE", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_cache_dir() == tmp_path / ".cache" / "edgefl"


def test_zip_members_stay_inside_the_zip(make_zip, cache: Path, tmp_path: Path) -> None:
    """docs/security.md: nothing is ever extracted to disk."""
    path = make_zip(ward_records(2))
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("../escaped.txt", "x")
    load_federation([f"manifest:{path}"], image_px=8)
    assert not (tmp_path.parent / "escaped.txt").exists()
