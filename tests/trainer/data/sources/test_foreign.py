"""docs/methods.md, "foreign pictures": drawn textures and skin, folders and zips, bounded and repeatable."""

import hashlib
import zipfile
from pathlib import Path

import numpy as np
import pytest
from tests.trainer.data.conftest import png

from edgefl_protocol.pictures.imaging import shades_of_grey
from edgefl_trainer.data import DataError
from edgefl_trainer.data.sources import foreign
from edgefl_trainer.data.sources.foreign import DRAWN, read_foreign
from edgefl_trainer.data.sources.textures import TEXTURES, draw_texture


def test_the_colour_of_their_light_is_removed_too() -> None:
    plain, corrected = (read_foreign("skin", 24, colour) for colour in ("none", "shades_of_grey_6"))
    np.testing.assert_array_equal(corrected, np.stack([shades_of_grey(one) for one in plain]))
    assert not np.array_equal(corrected, plain)


@pytest.mark.parametrize("source", ["textures", "skin"])
def test_drawn_pictures_repeat_and_differ_from_one_another(source: str) -> None:
    images = read_foreign(source, 24)
    assert images.shape == (DRAWN, 24, 24, 3) and images.dtype == np.uint8
    np.testing.assert_array_equal(images, read_foreign(source, 24))
    assert len({hashlib.sha256(image.tobytes()).digest() for image in images}) == DRAWN


@pytest.mark.parametrize("kind", range(len(TEXTURES)))
def test_every_kind_of_texture_is_a_pattern(kind: int) -> None:
    """Not flat: some channel varies far beyond the sensor's noise of 5 levels in most of its pictures."""
    spreads = [draw_texture(kind + len(TEXTURES) * i, px=48).std(axis=(0, 1)).max() for i in range(12)]
    assert np.median(spreads) > 20


def test_a_texture_depends_on_number_and_seed_alone() -> None:
    np.testing.assert_array_equal(draw_texture(7, px=16), draw_texture(7, px=16))
    assert not np.array_equal(draw_texture(7, px=16), draw_texture(7, px=16, seed=1))
    assert not np.array_equal(draw_texture(7, px=16), draw_texture(7 + len(TEXTURES), px=16))


def test_a_folder_and_a_zip_of_the_same_pictures_are_the_same(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    with zipfile.ZipFile(tmp_path / "all.zip", "w") as archive:
        for i, name in enumerate(["b.png", "deep/a.png", "notes.txt"]):
            (tmp_path / name).write_bytes(png(i, px=20))
            archive.writestr(name, png(i, px=20))
    inside = tmp_path / "folder"
    inside.mkdir()
    (tmp_path / "b.png").rename(inside / "b.png")
    (tmp_path / "deep").rename(inside / "deep")
    images = read_foreign(str(tmp_path / "all.zip"), 8)
    assert images.shape == (2, 8, 8, 3)
    np.testing.assert_array_equal(images, read_foreign(str(inside), 8))


def test_faults_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match="holds 0 pictures"):
        read_foreign(str(tmp_path), 8)
    with pytest.raises(DataError, match="nowhere"):
        read_foreign(str(tmp_path / "nowhere"), 8)
    (tmp_path / "bad.png").write_bytes(png(1)[:40])
    with pytest.raises(DataError, match=r"bad\.png"):
        read_foreign(str(tmp_path), 8)
    (tmp_path / "bad.png").write_bytes(png(1))
    (tmp_path / "more.png").write_bytes(png(2))
    monkeypatch.setattr(foreign, "MAX_PICTURES", 1)
    with pytest.raises(DataError, match="holds 2 pictures; allowed: 1 to 1"):
        read_foreign(str(tmp_path), 8)


@pytest.mark.slow
@pytest.mark.data
def test_radiology_pictures_can_be_read(real_data: Path) -> None:
    """data/README.md: VQA-RAD holds 315 radiology images."""
    assert len(read_foreign(str(real_data / "vqa_rad.zip"), 32)) == 315
