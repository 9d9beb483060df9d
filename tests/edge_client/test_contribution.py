"""Which maps a device contributes, and what leaves it."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgefl_client.learning.label_table import (
    MAX_MAPS,
    Candidate,
    LabelsError,
    read_labels,
    reply_payload,
    select_maps,
)
from edgefl_protocol import Payload

CLASSES = ("MEL", "NV", "BCC")


def candidate(label, vacuity, attention=None):
    shape = np.linspace(0.1, 1, 9, dtype=np.float32)
    return Candidate(label=label, vacuity=vacuity, attention=shape if attention is None else attention)


@given(st.lists(st.tuples(st.integers(0, 2), st.sampled_from([0.1, 0.2, 0.5, 0.9])), max_size=40))
def test_lowest_vacuity_first_ties_by_index(rows):
    """docs/methods.md, 1.5: per class rank by u ascending, the first M; ties by sample index; fewer where fewer are."""
    chosen = select_maps([candidate(*row) for row in rows])
    assert set(chosen) == {label for label, _ in rows}
    for label, positions in chosen.items():
        ranked = sorted((vacuity, place) for place, (klass, vacuity) in enumerate(rows) if klass == label)
        assert positions == [place for _, place in ranked][:5]
    assert MAX_MAPS == 5  # M of the paper


def test_payload_is_maps_and_digest_only():
    """docs/design.md, section 7: float16, patch resolution, max-normalised; site_sha256; nothing else travels."""
    rng = np.random.default_rng(0)
    rows = [candidate(k % 2, 0.1 * k, (7 * rng.random(16)).astype(np.float32)) for k in range(8)]
    payload = reply_payload(rows, select_maps(rows), "ab" * 32)
    assert {name: (array.dtype, array.shape) for name, array in payload.arrays.items()} == {
        "maps.0": (np.float16, (4, 16)),
        "maps.1": (np.float16, (4, 16)),
    }
    assert dict(payload.scalars) == {"site_sha256": "ab" * 32}
    for label in (0, 1):
        maps = payload.arrays[f"maps.{label}"].astype(np.float64)
        wanted = np.stack([row.attention / row.attention.max() for row in rows if row.label == label])
        assert np.array_equal(maps.max(1), np.ones(4))
        assert np.allclose(maps, wanted, atol=2**-11)
    assert Payload.from_bytes(payload.to_bytes()) == payload


@pytest.mark.parametrize("attention", [np.zeros(9), np.full(9, np.nan), np.array([1.0] * 8 + [np.inf]), -np.ones(9)])
def test_empty_or_broken_maps_never_travel(attention):
    rows = [candidate(0, 0.1, attention.astype(np.float32))]
    with pytest.raises(LabelsError), np.errstate(all="ignore"):
        reply_payload(rows, select_maps(rows), "0" * 64)


def test_table_is_read_with_names_beside_it(tmp_path):
    table = tmp_path / "labels.csv"
    table.write_text("\ufefflabel,image,age\nNV,a.jpg,3\nMEL,sub/b.png,\n", encoding="utf-8")
    rows = read_labels(table, CLASSES)
    assert [(row.path, row.label) for row in rows] == [(tmp_path / "a.jpg", 1), (tmp_path / "sub/b.png", 0)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"image,label\na.jpg,SCC\n", "no class of this model"),
        (b"image,diagnosis\na.jpg,NV\n", "no column label"),
        (b"file\na.jpg\n", "no column image"),
        (b"image,label\n", "0 rows"),
        (b"", "0 rows"),
        (b"image,label\n,NV\n", "no image"),
        (b"image,label\na.jpg\n", "no class"),
        (b"\xff\xfe\x00", "UTF-8"),
        (b'image,label\n"a.jpg,NV\n', "no CSV"),
    ],
)
def test_bad_tables_are_one_sentence(tmp_path, text, message):
    table = tmp_path / "labels.csv"
    table.write_bytes(text)
    with pytest.raises(LabelsError, match=message) as error:
        read_labels(table, CLASSES)
    assert len(str(error.value).splitlines()) == 1
