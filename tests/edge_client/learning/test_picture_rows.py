"""The table that names the owner's pictures."""

import pytest

from edgefl_client.learning.picture_rows import LabelsError, read_labels

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
