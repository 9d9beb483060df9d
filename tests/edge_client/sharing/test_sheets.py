"""What would leave, as a picture. Source: docs/reference/sharing.md; docs/security.md, check 36."""

import dataclasses

import numpy as np
import pytest
from PIL import Image

from edgefl_client.scoring.drawing.heatmap import colours
from edgefl_client.sharing.sheets import CELL_PX, LEAVES, STAYS, SharedMap, draw_maps

RNG = np.random.default_rng(7)


def shared(label, row, **other):
    values = RNG.random(36).astype(np.float16)
    pixels = RNG.integers(0, 256, (24, 24, 3)).astype(np.uint8)
    facts = {"array": f"maps.{ord(label[0]) % 3}", "row": row, "label": label, "values": values, "name": "a.png",
             "vacuity": 0.25, "pixels": pixels}  # fmt: skip
    return SharedMap(**(facts | other))


@pytest.fixture
def maps():
    return [shared("MEL", 0), shared("MEL", 1), shared("NV", 0), shared("MEL", 2)]


def corners(maps):
    """Left upper corner of each cell: a row per class in the order met, 12 px between cells."""
    rows, met = {}, []
    for one in maps:
        column = rows.setdefault(one.label, [len(rows), 0])
        met.append((12 + column[1] * (CELL_PX + 12), 64 + column[0] * (22 + CELL_PX + 22 + 12) + 22))
        column[1] += 1
    return met


def test_every_patch_is_one_square_of_its_colour(tmp_path, maps):
    """Drawn from the float16 values that would be sealed: 36 squares of 32 px, row-major, each of one colour."""
    draw_maps(tmp_path, maps, "0" * 64, 100)
    sheet = np.asarray(Image.open(tmp_path / LEAVES))
    for one, (left, top) in zip(maps, corners(maps), strict=True):
        cell = sheet[top + 1 : top + CELL_PX - 1, left + 1 : left + CELL_PX - 1]  # less its frame
        for patch, value in enumerate(one.values):
            y, x = (patch // 6) * 32 + 16 - 1, (patch % 6) * 32 + 16 - 1
            wanted = np.round(colours(np.float32(value))).astype(np.uint8)
            assert (cell[y - 12 : y + 12, x - 12 : x + 12] == wanted).all()


def test_the_sheet_that_shows_what_leaves_knows_nothing_of_the_pictures(tmp_path, maps):
    """Other pictures, names and vacuity: not one byte of the sheet changes. Other values: it does."""
    draw_maps(tmp_path / "a", maps, "0" * 64, 100)
    others = [dataclasses.replace(one, name="CANARY.jpg", vacuity=0.99, pixels=255 - one.pixels) for one in maps]
    draw_maps(tmp_path / "b", others, "0" * 64, 100)
    first, second = ((tmp_path / name / LEAVES).read_bytes() for name in "ab")
    assert first == second
    assert (tmp_path / "a" / STAYS).read_bytes() != (tmp_path / "b" / STAYS).read_bytes()
    values = maps[0].values.copy()
    values[0] = 1 - values[0]
    draw_maps(tmp_path / "c", [dataclasses.replace(maps[0], values=values), *maps[1:]], "0" * 64, 100)
    assert (tmp_path / "c" / LEAVES).read_bytes() != first


def test_the_pictures_lie_at_the_same_places(tmp_path, maps):
    """Side by side, patch lies beside patch: both sheets have one size, and the cells one place."""
    marked = [dataclasses.replace(one, pixels=np.full((24, 24, 3), 40 * n, np.uint8)) for n, one in enumerate(maps, 1)]
    found = draw_maps(tmp_path, marked, "0" * 64, 100)
    stays = np.asarray(Image.open(found["stays"]))
    assert stays.shape == np.asarray(Image.open(found["leaves"])).shape
    for number, (left, top) in enumerate(corners(maps), 1):
        assert (stays[top + 1 : top + CELL_PX - 1, left + 1 : left + CELL_PX - 1] == 40 * number).all()


def test_a_mean_is_drawn_once_beside_all_its_pictures(tmp_path, maps):
    """Three pictures of one mean: one map leaves, and its first place alone shows it; all pictures are shown."""
    mean = maps[0].values
    maps = [dataclasses.replace(one, row=0, values=mean) if one.label == "MEL" else one for one in maps]
    marked = [dataclasses.replace(one, pixels=np.full((24, 24, 3), 40 * n, np.uint8)) for n, one in enumerate(maps, 1)]
    found = draw_maps(tmp_path, marked, "0" * 64, 100)
    leaves, stays = (np.asarray(Image.open(found[name])) for name in ("leaves", "stays"))
    drawn = [leaves[top + 1 : top + CELL_PX - 1, left + 1 : left + CELL_PX - 1] for left, top in corners(maps)]
    assert [bool((cell == 255).all()) for cell in drawn] == [False, True, False, True]
    for number, (left, top) in enumerate(corners(maps), 1):
        assert (stays[top + 1 : top + CELL_PX - 1, left + 1 : left + CELL_PX - 1] == 40 * number).all()


def test_odd_names_and_odd_maps(tmp_path, maps):
    """A name that is no text, a very long one, a map that is no square grid: drawn all the same; owner only."""
    odd = [dataclasses.replace(maps[0], name="\udcff" * 3), dataclasses.replace(maps[1], name="x" * 300),
           dataclasses.replace(maps[2], values=maps[2].values[:35])]  # fmt: skip
    found = draw_maps(tmp_path / "new" / "folder", odd, "0" * 64, 100)
    assert {(tmp_path / "new" / "folder" / name).stat().st_mode & 0o777 for name in (LEAVES, STAYS)} == {0o600}
    assert np.asarray(Image.open(found["stays"])).shape[1] == 640
