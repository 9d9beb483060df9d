"""The heat map lies where the network looked: alignment proven with maps of one hot patch."""

import io
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageFilter, ImageFont
from tests.edge_client.scoring.drawn_pictures import drawn_picture, one_hot, score_with

from edgefl_client import Scorer
from edgefl_client.scoring.drawing.heatmap import (
    ALPHA,
    gap_px,
    overlay,
    place_map,
    png_bytes,
    text_font,
    tint,
)
from edgefl_protocol.pictures.imaging import decode

LUMINANCE = np.array([0.299, 0.587, 0.114])  # ITU-R BT.601: what a print in grey keeps


def both_photos(picture, height, width):
    """The photo as it is, and the one with the map: side by side, `gap_px` of white between them."""
    pixels = np.asarray(picture)[:height]
    beside = width + gap_px(width, height)
    assert (pixels[:, width:beside] == 255).all()
    return pixels[:, :width], pixels[:, beside : beside + width]


def bilinear(tokens, height, width):
    """Bilinear interpolation with align_corners off, from its definition."""
    side = tokens.shape[0]

    def axis(length):
        at = np.clip((np.arange(length) + 0.5) * side / length - 0.5, 0, side - 1)
        low = np.floor(at).astype(int)
        return low, np.minimum(low + 1, side - 1), at - low

    y0, y1, fy = axis(height)
    x0, x1, fx = axis(width)
    fy, fx = fy[:, None], fx[None]
    top = tokens[np.ix_(y0, x0)] * (1 - fx) + tokens[np.ix_(y0, x1)] * fx
    bottom = tokens[np.ix_(y1, x0)] * (1 - fx) + tokens[np.ix_(y1, x1)] * fx
    return top * (1 - fy) + bottom * fy


@pytest.mark.parametrize(("height", "width"), [(150, 200), (200, 150), (224, 224), (301, 97)])
def test_map_is_stretched_bilinearly_over_the_whole_photo(height, width):
    """docs/methods.md, 1.4: upsampling is bilinear, align_corners off."""
    tokens = np.random.default_rng(5).random((7, 7)).astype(np.float32)
    placed = place_map(tokens.ravel(), height, width, "squash")
    assert placed.box == (0, 0, width, height)
    assert np.allclose(placed.values, bilinear(tokens, height, width), atol=1e-5)


@pytest.mark.parametrize(("height", "width"), [(300, 400), (400, 300), (333, 500)])
@pytest.mark.parametrize(("row", "column"), [(0, 0), (2, 5), (6, 6), (6, 0)])
def test_hot_patch_peaks_in_its_own_region(height, width, row, column):
    placed = place_map(one_hot(7, row, column), height, width, "squash")
    y, x = np.unravel_index(int(placed.values.argmax()), placed.values.shape)
    assert row * height / 7 <= y + 0.5 <= (row + 1) * height / 7
    assert column * width / 7 <= x + 0.5 <= (column + 1) * width / 7


@pytest.mark.parametrize(("height", "width"), [(300, 400), (400, 300)])
def test_after_a_crop_the_map_lies_on_the_centred_square(height, width):
    placed = place_map(one_hot(6, 0, 5), height, width, "crop")
    left, top, right, bottom = placed.box
    assert (right - left, bottom - top) == (300, 300)
    assert (left, top) == ((width - 300) // 2, (height - 300) // 2)
    y, x = np.unravel_index(int(placed.values.argmax()), placed.values.shape)
    assert top <= y <= top + 50
    assert right - 50 <= x <= right
    outside = np.ones(placed.values.shape, bool)
    outside[top:bottom, left:right] = False
    assert not placed.values[outside].any()


@pytest.mark.parametrize("orientation", [1, 3, 6, 8])
@pytest.mark.parametrize(("width", "height"), [(480, 360), (360, 480)])
def test_score_and_drawing_agree_on_a_turned_photo(lab, plain_bundle, orientation, width, height):
    """The tiny model's map is brightness: the bright corner of the upright photo must carry the outline.

    The stored pixels are turned by EXIF orientation; the picture drawn is the upright one.
    """
    pixels = lab.photo(width, height, (60, 40, 30))
    pixels[: height // 6, : width // 6] = 250  # stored top left
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = lab.encoded(pixels, "JPEG", quality=95, exif=exif)
    upright = decode(data)
    bright = upright.mean(-1) > 200
    score = Scorer(plain_bundle, threads=1).score(data)
    placed = place_map(score.map, *upright.shape[:2], "squash")
    assert bright.ravel()[int(placed.values.argmax())]
    assert placed.values[bright].mean() > 0.75
    assert placed.values[bright[::-1, ::-1]].mean() < 0.25  # the opposite corner
    photo, drawn = both_photos(drawn_picture(upright, score, "squash"), *upright.shape[:2])
    np.testing.assert_array_equal(photo, upright)
    laid = (drawn - (1 - ALPHA) * upright) @ LUMINANCE  # what was laid over the photo
    assert laid[bright].mean() > 3 * laid[bright[::-1, ::-1]].mean()


def stored_as(upright: np.ndarray, orientation: int) -> np.ndarray:
    """The pixels that EXIF 2.32, 4.6.5.1.6 turns into the upright ones; oracle: numpy."""
    turned = {
        1: upright, 2: upright[:, ::-1], 3: upright[::-1, ::-1], 4: upright[::-1], 5: upright.transpose(1, 0, 2),
        6: np.rot90(upright, 1), 7: upright.transpose(1, 0, 2)[::-1, ::-1], 8: np.rot90(upright, -1),
    }  # fmt: skip
    return np.ascontiguousarray(turned[orientation])


@pytest.mark.parametrize("fit", ["squash", "crop"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_the_mass_of_the_map_lies_in_the_lesion_however_the_photo_is_turned(lab, make_bundle, orientation, fit):
    """A lesion of known mask in a 4:3 photo, off the middle, bright because the tiny model's map is brightness.

    Of the map above its floor, at least 80 % lies in the mask widened by one patch, which is under 40 % of the photo;
    the strongest place lies in the mask itself.
    """
    height, width = 360, 480
    y, x = np.mgrid[0:height, 0:width]
    mask = ((x - 170) / 70) ** 2 + ((y - 230) / 50) ** 2 <= 1
    upright = lab.photo(width, height, (60, 40, 30))
    upright[mask] += 150
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = lab.encoded(stored_as(upright, orientation), "PNG", exif=exif)
    np.testing.assert_array_equal(decode(data), upright)
    score = Scorer(make_bundle(fit=fit), threads=1).score(data)
    placed = place_map(score.map, height, width, fit)
    assert mask.ravel()[int(placed.values.argmax())]
    left, top, right, bottom = placed.box
    patch = max(right - left, bottom - top) / lab.GRID
    wide = ((x - 170) / (70 + patch)) ** 2 + ((y - 230) / (50 + patch)) ** 2 <= 1
    above = np.clip(placed.values - np.median(placed.values[top:bottom, left:right]), 0, None)
    assert above[wide].sum() >= 0.8 * above.sum()
    assert wide.mean() < 0.4


@pytest.mark.parametrize(("height", "width"), [(600, 800), (800, 600), (84, 84), (100, 60)])
def test_photo_stands_untouched_beside_the_map(height, width):
    """Up to 1,600 px the photo is as it was, enlarged by whole numbers only."""
    pixels = np.random.default_rng(1).integers(0, 256, (height, width, 3)).astype(np.uint8)
    picture = drawn_picture(pixels, score_with(one_hot(7, 0, 0)), "squash")
    factor = max(1, -(-448 // max(height, width)))
    size = (factor * height, factor * width)
    photo, drawn = both_photos(picture, *size)
    assert picture.width == max(900, 2 * size[1] + gap_px(size[1], size[0]))
    assert picture.height > size[0] + 60
    shown = Image.fromarray(pixels).resize(size[::-1], Image.Resampling.BICUBIC)  # of its own size: a copy
    np.testing.assert_array_equal(photo, np.asarray(shown))
    assert (drawn != photo).any()


@pytest.mark.parametrize("skin", [(246, 237, 228), (215, 189, 150), (130, 92, 67), (41, 36, 32)])
def test_more_attention_is_brighter_in_grey(skin):
    """Printed in grey the map still reads: over each tone of skin (Monk 2019), brightness grows with the level."""
    levels = np.linspace(0, 1, 101, dtype=np.float32)[None]
    grey = tint(np.full((1, 101, 3), skin, np.uint8), levels)[0] @ LUMINANCE
    assert (np.diff(grey) > 0).all()
    assert grey[-1] - grey[0] > 80  # a third of the range of grey


@pytest.mark.parametrize("fit", ["squash", "crop"])
def test_the_outline_encloses_the_cells_whose_hiding_was_measured(fit):
    """docs/methods.md 1.8: the quarter of the cells with the largest values, and no other pixel."""
    tokens = np.random.default_rng(2).random((6, 6)).astype(np.float32)
    assert np.sort(tokens.ravel())[-9] > 0.5  # no cell of the quarter lies below half of the strongest
    placed = place_map(tokens.ravel(), 300, 420, fit)
    left, top, right, bottom = placed.box
    strong = np.sort(tokens.ravel())[-9]
    for row in range(300):
        for column in range(0, 420, 7):
            inside = left <= column < right and top <= row < bottom
            cell = tokens[(row - top) * 6 // (bottom - top) % 6, (column - left) * 6 // (right - left) % 6]
            assert placed.marked[row, column] == (inside and cell >= strong)


def test_what_speaks_against_the_answer_stays_pale():
    """Below zero hiding helps the answer: no colour, and no room on the scale."""
    values = np.array([1.0, 0.2, -3.0, 0.0], np.float32)
    placed = place_map(values, 400, 400, "squash")
    assert (placed.low, placed.high) == (0.0, 1.0)
    drawn = overlay(np.full((400, 400, 3), 150, np.uint8), placed, 2)
    against, nothing = drawn[390, 10], drawn[390, 390]
    np.testing.assert_array_equal(against, nothing)


def test_the_colours_end_at_the_strongest_part_also_where_a_part_speaks_more_against_the_answer():
    """A map of shares is scaled by its largest magnitude: the legend calls its last colour "most in this picture"."""
    placed = place_map(np.array([-1.0, 0.0, 0.1, 0.6], np.float32), 400, 400, "squash")
    assert (placed.low, placed.high) == (0.0, pytest.approx(0.6))
    grey = np.full((400, 400, 3), 150, np.uint8)
    strongest = overlay(grey, placed, 2)[350, 350]  # inside the outline
    np.testing.assert_array_equal(strongest, tint(grey[:1, :1], np.ones((1, 1), np.float32))[0, 0])


def test_a_level_map_has_no_outline_and_stays_pale():
    """Noise must not be shown as a finding."""
    level = (0.97 + 0.03 * np.random.default_rng(3).random(49)).astype(np.float32)
    placed = place_map(level, 100, 100, "squash")
    assert not placed.marked.any() and placed.values.max() - placed.low < 0.5 * (placed.high - placed.low)


def test_the_caption_counts_what_is_outlined(said):
    """One part of 49 carries the answer: it alone is outlined, not a quarter."""
    placed = place_map(one_hot(7, 1, 1), 490, 490, "squash")
    assert placed.marked.sum() == 70 * 70
    drawn_picture(np.full((490, 490, 3), 150, np.uint8), score_with(one_hot(7, 1, 1)), "squash")
    assert "Outlined here: 1 of 49 parts" in " ".join(said)


@pytest.mark.parametrize(("row", "column"), [(0, 0), (0, 3), (6, 6), (3, 0)])
def test_an_outline_at_the_edge_of_the_photo_is_closed(row, column):
    """Where the photo ends the whole line lies in it: white between black. Its outer half was cut off there."""
    drawn = overlay(np.full((490, 490, 3), 150, np.uint8), place_map(one_hot(7, row, column), 490, 490, "squash"), 2)
    rim = 3  # of a line of 2
    top, bottom, left, right = (
        70 * at + (69 - rim * (at == 6) if end else rim * (at == 0)) for at in (row, column) for end in (False, True)
    )
    white = (drawn == 255).all(-1)
    across, down = slice(left, right + 1), slice(top, bottom + 1)
    assert white[top, across].all() and white[bottom, across].all()
    assert white[down, left].all() and white[down, right].all()
    sides = {"top": drawn[0, across], "bottom": drawn[-1, across], "left": drawn[down, 0], "right": drawn[down, -1]}
    ends = {"top": row == 0, "bottom": row == 6, "left": column == 0, "right": column == 6}
    assert {name: bool((side == 0).all()) for name, side in sides.items()} == ends


@pytest.mark.parametrize("skin", [(235, 200, 185), (60, 38, 30)])
def test_outline_stands_out_on_light_and_dark_skin(skin):
    """White on black: on any skin one of the two differs from it by more than half the range."""
    pixels = np.full((500, 500, 3), skin, np.uint8)
    drawn = overlay(pixels, place_map(one_hot(7, 3, 3), 500, 500, "squash"), 2)
    white = (drawn == 255).all(-1)
    black = (drawn == 0).all(-1)
    assert white.sum() > 500
    assert black.sum() > 500
    assert max(abs(255 - skin[1]), skin[1]) > 127


@pytest.mark.parametrize("fit", ["squash", "crop"])
def test_a_large_photo_is_reduced_in_place(said, fit):
    """Photo pixel (x, y) is picture pixel (x, y) times 1600 / longer side, and the map lies on it as on the photo."""
    pixels = np.full((1500, 2000, 3), 128, np.uint8)
    pixels[1300:1320, 400:420] = (0, 0, 255)  # far from the hot patch
    picture = drawn_picture(pixels, score_with(one_hot(7, 1, 5)), fit)
    photo, drawn = (one.astype(int) for one in both_photos(picture, 1200, 1600))
    assert "Photo reduced." in " ".join(said)
    blue = np.argwhere(photo[..., 2] - photo[..., 0] > 100)
    blue = blue[(blue[:, 0] > 900)]
    assert np.allclose(blue.mean(0), [1310 * 1600 / 2000 - 0.5, 410 * 1600 / 2000 - 0.5], atol=1)
    black = np.argwhere((drawn < 10).all(-1))  # the outline's rim
    black = black[np.abs(black[:, 1] - 800) < 580] if fit == "crop" else black  # without the frame of the square
    black = black[(black[:, 0] > 20) & (black[:, 0] < 1180)]
    left, side_px = (0, 1600 / 7) if fit == "squash" else (200, 1200 / 7)
    middle = (black.min(0) + black.max(0)) / 2
    assert np.allclose(middle, [1.5 * 1200 / 7 - 0.5, left + 5.5 * side_px - 0.5], atol=1.5)


_MEASURE = """
import numpy as np
from edgefl_client.scoring.explanation import Explanation
from edgefl_client.scoring.drawing.heatmap import png_bytes
from edgefl_client.scoring.drawing.score_picture import draw_heatmap
from edgefl_protocol.pictures.score import ModelInfo, Score

def peak_kib():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM"))

def drawn(photo):
    model = ModelInfo(id="a/b/c", sha256="0" * 64, version=1, state_kind="bundle", state_sha256="1" * 64)
    score = Score(image=None, predicted="A", probabilities={"A": 1.0}, evidence=None, vacuity=None, dissonance=None,
        entropy_nats=0.0, refer=False, refer_reasons=(), heatmap=None, model=model, milliseconds=1.0,
        map=np.linspace(0, 1, 196, dtype=np.float32))
    png_bytes(draw_heatmap(photo, score, "squash", Explanation(score.map, "So true.")))

drawn(np.zeros((50, 50, 3), np.uint8))
photo = np.full((3000, 4000, 3), 90, np.uint8)
before = peak_kib()
drawn(photo)
print(peak_kib() - before)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from /proc")
def test_drawing_a_12_megapixel_photo_takes_little_memory():
    """docs/design.md, section 6: a small device draws a phone's photo; at most 300 MiB beside the photo itself."""
    run = subprocess.run([sys.executable, "-c", _MEASURE], capture_output=True, text=True, check=True)
    assert int(run.stdout) < 300 * 1024


@pytest.mark.parametrize("line_px", [2, 3, 4])
def test_the_outline_is_where_pillows_filters_put_it(line_px):
    """Oracle: the border by a filter of 3 by 3, thickened as often as half its width; white over black.

    What is nearer to the photo's edge than half the line does not count: the whole line lies in the photo.
    """
    hot = np.random.default_rng(line_px).random(49).astype(np.float32)
    placed = place_map(hot / hot.max(), 90, 120, "squash")
    rim = 3 * line_px // 2
    inside = np.pad(placed.marked[rim:-rim, rim:-rim], rim + 1)
    mask = Image.fromarray(inside.astype(np.uint8) * 255)
    border = (np.asarray(mask) > np.asarray(mask.filter(ImageFilter.MinFilter(3))))[1:-1, 1:-1]
    expected = np.full((90, 120, 3), 128, np.uint8)
    for ink, width in ((0, 3 * line_px), (255, line_px)):
        thick = Image.fromarray(border.astype(np.uint8) * 255)
        for _ in range(width // 2):
            thick = thick.filter(ImageFilter.MaxFilter(3))
        expected[np.asarray(thick) > 0] = ink
    found = overlay(np.full((90, 120, 3), 128, np.uint8), placed, line_px)
    drawn = (expected != 128).any(-1)
    np.testing.assert_array_equal(found[drawn], expected[drawn])


def test_fonts_are_loaded_once_for_all_pictures(monkeypatch):
    """Ten texts of four sizes on each picture."""
    loaded = []
    plain = ImageFont.load_default
    monkeypatch.setattr(ImageFont, "load_default", lambda size: loaded.append(size) or plain(size))
    text_font.cache_clear()
    for _ in range(2):
        drawn_picture(np.full((500, 600, 3), 150, np.uint8), score_with(one_hot(7, 1, 1)), "squash")
    assert loaded and sorted(set(loaded)) == sorted(loaded)


def test_png_holds_no_metadata(lab):
    """docs/security.md, check 36: nothing of EXIF or text reaches what we write."""
    exif = Image.Exif()
    exif[0x010E] = "CANARY-PATIENT"
    pixels = decode(lab.encoded(lab.photo(500, 400), "JPEG", exif=exif))
    data = png_bytes(drawn_picture(pixels, score_with(one_hot(7, 1, 1)), "squash"))
    assert b"CANARY" not in data
    assert Image.open(io.BytesIO(data)).info == {}


def test_a_map_that_is_no_square_grid_is_refused(lab):
    with pytest.raises(ValueError, match="not a square grid"):
        place_map(np.ones(7, np.float32), 10, 10, "squash")
    with pytest.raises(ValueError, match="fit is"):
        place_map(np.ones(9, np.float32), 10, 10, "pad")
