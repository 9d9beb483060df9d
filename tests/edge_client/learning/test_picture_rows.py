"""The table that names the owner's pictures."""

import numpy as np
import pytest
from PIL import Image
from tests.conftest import photo

from edgefl_client.learning.picture_rows import LabelsError, PreparedRows, fit_rows, read_labels, read_rows
from edgefl_client.scoring.pictures import PictureReader
from edgefl_client.sharing.feature_encoding import _FitPictures
from edgefl_protocol.pictures.light import Light
from edgefl_protocol.pictures.preprocess import Preprocess, TaughtPictures
from edgefl_protocol.pictures.quality import MOST_UNLIT

CLASSES = ("MEL", "NV", "BCC")


def test_table_is_read_with_names_beside_it(tmp_path):
    table = tmp_path / "labels.csv"
    table.write_text("\ufefflabel,image,age\nNV,a.jpg,3\nMEL,sub/b.png,\n", encoding="utf-8")
    rows = read_labels(table, CLASSES)
    assert [(row.path, row.label) for row in rows] == [(tmp_path / "a.jpg", 1), (tmp_path / "sub/b.png", 0)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"image,label\na.jpg,SCC\n", "not a class of this model"),
        (b"image,diagnosis\na.jpg,NV\n", "no column label"),
        (b"file\na.jpg\n", "no column image"),
        (b"file,diagnosis\n", "no column image"),  # with no row either: the rows are not what has to be mended first
        (b"image,label\n", "0 rows"),
        (b"", "0 rows"),
        (b"image,label\n,NV\n", "no image"),
        (b"image,label\na.jpg\n", "not a class"),
        (b"\xff\xfe\x00", "UTF-8"),
        (b'image,label\n"a.jpg,NV\n', "not a CSV"),
    ],
)
def test_bad_tables_are_one_sentence(tmp_path, text, message):
    table = tmp_path / "labels.csv"
    table.write_bytes(text)
    with pytest.raises(LabelsError, match=message) as error:
        read_labels(table, CLASSES)
    assert len(str(error.value).splitlines()) == 1


def test_taken_rows_keep_their_own_light():
    lights = tuple(Light(brightness=100.0 + n, red_by_green=1.2, blue_by_green=1.0, corners=1.0) for n in range(4))
    rows = PreparedRows(
        np.zeros((4, 2, 2, 3), np.uint8), np.arange(4), tuple("abcd"), unfit=frozenset({1}), lights=lights
    )
    assert rows.take(np.array([True, False, False, True])).lights == (lights[0], lights[3])
    assert fit_rows(rows).lights == (lights[0], lights[2], lights[3])


@pytest.mark.parametrize(("alpha", "fit"), [(255, True), (90, False)])
def test_what_is_transparent_neither_teaches_nor_gives_a_feature(tmp_path, alpha, fit):
    """`edgefl score` refers it (docs/reference/picture-gate.md), so nobody learns the white under it as skin."""
    picture = Image.fromarray(photo(96, 96))
    picture.putalpha(alpha)
    picture.save(tmp_path / "a.png")
    table = tmp_path / "labels.csv"
    table.write_text("image,label\na.png,NV\n")
    preprocess = Preprocess(size=24, fit="squash")
    with PictureReader() as reader:
        prepared = read_rows(read_labels(table, CLASSES), preprocess)
        pictures = _FitPictures([tmp_path / "a.png"], preprocess, reader, 1, MOST_UNLIT)
        assert (len(fit_rows(prepared).labels) == 1, len(list(pictures)) == 1) == (fit, fit)
    assert fit or set(pictures.left_out) >= {"transparent"}


@pytest.mark.parametrize(("side", "fit"), [(84, True), (83, False)])
def test_a_picture_as_large_as_the_taught_ones_teaches_and_gives_a_feature(tmp_path, side, fit):
    """docs/decisions/0073: `size` asks for the longest side of the taught pictures alone, as `edgefl score` does."""
    Image.fromarray(photo(side, side)).save(tmp_path / "a.png")
    table = tmp_path / "labels.csv"
    table.write_text("image,label\na.png,NV\n")
    preprocess = Preprocess(size=112, taught=TaughtPictures(side=84))
    with PictureReader() as reader:
        prepared = read_rows(read_labels(table, CLASSES), preprocess)
        pictures = _FitPictures([tmp_path / "a.png"], preprocess, reader, 1, MOST_UNLIT)
        assert (not prepared.unfit, len(list(pictures)) == 1) == (fit, fit)
    assert pictures.left_out == ({} if fit else {"size": 1})
