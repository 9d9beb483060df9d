"""The heat map lies where the network looked: alignment proven with maps of one hot patch."""

import io

import numpy as np
import pytest
from PIL import Image

from edgefl_client import Scorer
from edgefl_client.heatmap import draw_heatmap, overlay, place_map, png_bytes, strongest_region
from edgefl_protocol.imaging import decode
from edgefl_protocol.score import ModelInfo, Score

MODEL = ModelInfo(id="a/b/c", sha256="0" * 64, version=1, state_kind="bundle", state_sha256="1" * 64)


def one_hot(side, row, column):
    tokens = np.full((side, side), 0.1, np.float32)
    tokens[row, column] = 1
    return tokens.ravel()


def score_with(attention, reasons=(), predicted="MEL"):
    return Score(
        image="x", predicted=predicted, probabilities={"MEL": 0.75, "NV": 0.25}, evidence=None, vacuity=0.4,
        dissonance=0.1, entropy_nats=0.5, refer=bool(reasons), refer_reasons=tuple(reasons), heatmap=None, model=MODEL,
        milliseconds=1.0, attention=attention,
    )  # fmt: skip


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
    placed = place_map(score.attention, *upright.shape[:2], "squash")
    assert bright.ravel()[int(placed.values.argmax())]
    assert placed.values[bright].mean() > 0.75
    assert placed.values[bright[::-1, ::-1]].mean() < 0.25  # the opposite corner
    drawn = np.asarray(draw_heatmap(upright, score, "squash"))[: upright.shape[0], : upright.shape[1]]
    changed = np.abs(drawn.astype(int) - upright).sum(-1)
    assert changed[bright].mean() > 20 * changed[bright[::-1, ::-1]].mean()


@pytest.mark.parametrize(("height", "width"), [(600, 800), (800, 600), (84, 84), (100, 60)])
def test_photo_keeps_place_resolution_and_aspect(height, width):
    """The photo is at the top left, never reduced, enlarged by whole numbers only; low attention leaves it clear."""
    pixels = np.random.default_rng(1).integers(0, 256, (height, width, 3)).astype(np.uint8)
    picture = draw_heatmap(pixels, score_with(one_hot(7, 0, 0)), "squash")
    factor = max(1, -(-448 // max(height, width)))
    assert picture.width == max(448, factor * width)
    assert picture.height > factor * height + 60
    if factor == 1:
        corner = np.asarray(picture)[height // 2 : height, width // 2 : width]
        assert np.abs(corner.astype(int) - pixels[height // 2 :, width // 2 :]).max() <= 1


def test_strongest_region_is_a_tenth_of_the_area():
    tokens = np.random.default_rng(2).random((14, 14)).astype(np.float32)
    mask = strongest_region(place_map(tokens.ravel(), 400, 300, "squash"))
    assert mask.mean() == pytest.approx(0.10, abs=0.002)
    alone = strongest_region(place_map(one_hot(14, 3, 3), 400, 300, "squash"))
    assert 0.002 < alone.mean() < 0.03


def test_a_level_map_has_no_outline():
    """Noise must not be shown as a finding."""
    level = (0.97 + 0.03 * np.random.default_rng(3).random(49)).astype(np.float32)
    assert strongest_region(place_map(level, 100, 100, "squash")) is None


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


def test_caption_grows_with_reasons_and_names_them(monkeypatch):
    """docs/design.md, section 5: reasons in words; research-use note always."""
    said: list[str] = []
    from PIL import ImageDraw

    original = ImageDraw.ImageDraw.text

    def spy(self, at, text, *args, **kwargs):
        said.append(text)
        return original(self, at, text, *args, **kwargs)

    monkeypatch.setattr(ImageDraw.ImageDraw, "text", spy)
    pixels = np.full((500, 600, 3), 150, np.uint8)
    draw_heatmap(pixels, score_with(one_hot(7, 1, 1)), "squash")
    calm = " ".join(said)
    assert "MEL" in calm
    assert "75%" in calm
    assert "Vacuity 0.40" in calm
    assert "No reason to refer" in calm
    assert "Research use only" in calm
    said.clear()
    draw_heatmap(pixels, score_with(one_hot(7, 1, 1), ("vacuity", "unseen_class"), predicted=None), "crop")
    worried = " ".join(said)
    assert "No prediction" in worried
    assert "too little evidence" in worried
    assert "not trained on" in worried
    assert "outside the white frame" in worried


def test_png_holds_no_metadata(lab):
    """docs/security.md, check 36: nothing of EXIF or text reaches what we write."""
    exif = Image.Exif()
    exif[0x010E] = "CANARY-PATIENT"
    pixels = decode(lab.encoded(lab.photo(500, 400), "JPEG", exif=exif))
    data = png_bytes(draw_heatmap(pixels, score_with(one_hot(7, 1, 1)), "squash"))
    assert b"CANARY" not in data
    assert Image.open(io.BytesIO(data)).info == {}


def test_no_map_no_drawing(lab):
    with pytest.raises(ValueError, match="no attention map"):
        draw_heatmap(lab.photo(), score_with(None), "squash")
    with pytest.raises(ValueError, match="no square grid"):
        place_map(np.ones(7, np.float32), 10, 10, "squash")
    with pytest.raises(ValueError, match="fit is"):
        place_map(np.ones(9, np.float32), 10, 10, "pad")
