"""How a picture is lit: the four numbers, the range of a site, and what is said of a picture outside."""

import csv
import io
import math
import zipfile
from dataclasses import replace
from os import environ
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from edgefl_protocol.pictures.imaging import decode, light_of, shades_of_grey
from edgefl_protocol.pictures.light import (
    SIDES,
    Light,
    LightRange,
    asked_range_of,
    measure_light,
    own_range_of,
    range_of,
)
from edgefl_protocol.pictures.quality import measure_quality, usual_light
from edgefl_protocol.pictures.referral import ReferralRules, unlike_learned
from edgefl_trainer.data.lesions import draw_lesion

CANCERS = ("MEL", "BCC", "SCC")
RANGE = LightRange(brightness=(100.0, 200.0), red_by_green=(1.0, 1.5), blue_by_green=(0.8, 1.2), corners=(0.7, 1.3))
SKIN_LEVEL = 170
WITHIN = {"brightness": 150.0, "red_by_green": 1.2, "blue_by_green": 1.0, "corners": 0.95}


def drawn(number: int):
    return draw_lesion("NV", site=0, number=number, px=48)[0]


def lit(picture, factors):
    return np.rint(np.minimum(picture * np.array(factors), 255)).astype(np.uint8)


def test_light_is_the_sixth_power_mean_of_each_channel():
    picture = drawn(1)
    expected = [
        (sum(float(v) ** 6 for v in picture[..., c].ravel()) / picture[..., c].size) ** (1 / 6) for c in range(3)
    ]
    np.testing.assert_allclose(light_of(picture), expected, rtol=1e-12)


def test_the_numbers_of_one_colour():
    light = measure_light(np.full((5, 7, 3), (200, 100, 50), np.uint8))
    assert light.brightness == pytest.approx(0.299 * 200 + 0.587 * 100 + 0.114 * 50, rel=1e-6)
    assert (light.red_by_green, light.blue_by_green, light.corners) == (pytest.approx(2.0), pytest.approx(0.5), 1.0)


def test_brightness_is_of_what_is_lit_and_not_clipped():
    """A black ring and white writing move nothing: the oracle is the percentile of the pixels between."""
    picture = drawn(2)
    luminance = picture @ np.array([0.299, 0.587, 0.114])
    expected = np.percentile(luminance[(luminance >= 25) & (picture < 250).any(axis=2)], 75)
    assert measure_light(picture).brightness == pytest.approx(expected, rel=1e-5)
    spoilt = np.concatenate([picture, np.zeros((20, 48, 3), np.uint8), np.full((20, 48, 3), 255, np.uint8)])
    assert measure_light(spoilt).brightness == pytest.approx(expected, rel=1e-5)


def test_a_black_picture_has_finite_numbers():
    assert measure_light(np.zeros((4, 4, 3), np.uint8)) == Light(
        brightness=1.0, red_by_green=1.0, blue_by_green=1.0, corners=1.0
    )


def test_it_is_measured_at_the_scale_of_the_gate():
    """What 84 px cannot show is not seen: noise of single pixels of a larger photograph is averaged first."""
    noise = np.random.default_rng(5).choice([60, 240], (336, 336, 1)).astype(np.uint8)
    picture = np.broadcast_to(noise, (336, 336, 3)).copy()
    small = np.asarray(Image.fromarray(picture).resize((84, 84), Image.Resampling.BICUBIC, reducing_gap=3.0))
    assert measure_quality(picture).light == measure_light(small)
    assert abs(measure_light(picture).brightness - measure_light(small).brightness) > 30


def test_of_a_model_that_removes_colour_it_is_the_light_that_is_left():
    """So the range of its run, of pictures that were corrected, and a photograph on a device are compared alike."""
    picture = lit(drawn(3), (1, 0.7, 0.8))
    assert measure_quality(picture, "shades_of_grey_6").light == measure_light(shades_of_grey(picture))


def vignetted(picture, share):
    """Darken towards the corners by 1 - share r², where r is 1 in the corners."""
    height, width = picture.shape[:2]
    y, x = (np.mgrid[0:height, 0:width] + 0.5) / np.array([height, width])[:, None, None] * 2 - 1
    return np.rint(picture * (1 - share * (x**2 + y**2) / 2)[..., None]).astype(np.uint8)


@pytest.mark.parametrize("shape", [(84, 84), (84, 63), (30, 84)])
def test_corners_are_compared_with_the_middle_whatever_the_shape(shape):
    """Of an even picture the oracle is the fall itself: median of r² beyond 0.7 over the 75th percentile within 0.5."""
    even = np.full((*shape, 3), SKIN_LEVEL, np.uint8)
    assert measure_light(even).corners == pytest.approx(1.0)
    drawn_r2 = (np.random.default_rng(3).uniform(-1, 1, (200_000, 2)) ** 2).sum(1) / 2
    fall = 1 - 0.4 * drawn_r2
    expected = np.median(fall[drawn_r2 > 0.7]) / np.quantile(fall[drawn_r2 < 0.5], 0.75)
    assert measure_light(vignetted(even, 0.4)).corners == pytest.approx(expected, rel=0.03)
    assert measure_light((even * 0.6).astype(np.uint8)).corners == pytest.approx(1.0)


def test_a_picture_without_corners_has_corners_like_its_middle():
    assert measure_light(np.full((2, 2, 3), SKIN_LEVEL, np.uint8)).corners == 1.0


@given(st.integers(0, 20), st.tuples(*[st.floats(0.5, 1.0)] * 3))
def test_a_lamp_moves_the_numbers_by_its_own_ratios(number, factors):
    before, after = (measure_light(one) for one in (drawn(number), lit(drawn(number), factors)))
    red, green, blue = factors
    assert after.red_by_green / before.red_by_green == pytest.approx(red / green, rel=0.02)
    assert after.blue_by_green / before.blue_by_green == pytest.approx(blue / green, rel=0.02)


def test_a_range_leaves_half_a_percent_outside_at_each_end_and_more_of_the_darkest():
    lights = [Light(brightness=50.0 + n, red_by_green=1.0, blue_by_green=1.0, corners=1.0) for n in range(200)]
    found = range_of(lights)
    assert [found.unlike(one) for one in lights] == ["darker"] * 5 + [None] * 194 + ["brighter"]
    ratios = range_of(
        [Light(brightness=99.0, red_by_green=1 + n / 1000, blue_by_green=1.0, corners=1.0) for n in range(200)]
    )
    assert ratios.red_by_green == (pytest.approx(1.000995), pytest.approx(1.198005))
    assert range_of(lights[:99]) is None
    dark = [Light(brightness=99.0, red_by_green=1.0, blue_by_green=1.0, corners=0.5 + n / 400) for n in range(200)]
    of_corners = [range_of(dark, "shades_of_grey_6").unlike(one) for one in dark]
    assert of_corners == ["darker in its corners"] * 10 + [None] * 190
    corrected = range_of(lights, "shades_of_grey_6")
    assert (corrected.red_by_green, corrected.blue_by_green) == (None, None)


@pytest.mark.parametrize("name", SIDES)
def test_a_picture_outside_is_called_by_its_side(name):
    low, high = getattr(RANGE, name)
    middle = {one: math.sqrt(math.prod(getattr(RANGE, one))) for one in SIDES}
    for value, side in ((low * 0.99, 0), (high * 1.01, 1)):
        named = (*SIDES[name], None)[side]  # corners that are brighter are none of the light's faults
        named = "bluer" if (name, side) == ("red_by_green", 0) else named
        assert RANGE.unlike(Light(**{**middle, name: value})) == named
    for value in (low, high):
        assert RANGE.unlike(Light(**{**WITHIN, name: value})) is None
    if name != "brightness":
        assert LightRange(brightness=RANGE.brightness).unlike(Light(**{**WITHIN, name: high * 2})) is None


@pytest.mark.parametrize(
    ("factors", "word"),
    [((0.7, 1, 1.2), "bluer"), ((0.8, 1, 0.75), "greener"), ((1, 1, 0.6), "yellower"), ((1.5, 1, 1), "redder")],
)
def test_a_cast_is_called_by_its_colour(factors, word):
    red, green, blue = factors
    light = Light(brightness=150.0, red_by_green=1.24 * red / green, blue_by_green=0.99 * blue / green, corners=1.0)
    assert RANGE.unlike(light) == word


def test_of_two_faults_the_larger_one_is_named():
    assert RANGE.unlike(Light(brightness=205.0, red_by_green=0.5, blue_by_green=0.9, corners=1.0)) == "greener"


def test_one_odd_picture_widens_no_range_of_a_device():
    lights = [Light(brightness=140.0 + n, red_by_green=1.2, blue_by_green=1.0, corners=1.0) for n in range(39)]
    odd = Light(brightness=1.0, red_by_green=1.2, blue_by_green=1.0, corners=1.0)
    assert own_range_of([*lights, odd]).brightness[0] > 135
    assert own_range_of(lights[:19]) is None


def test_a_device_compares_no_colour_that_its_model_removed():
    """docs/reference/picture-gate.md, light: such a model compares brightness and corners alone. What is left of the
    ratios is rounding; a picture a hair outside of theirs, and as bright as the device's own, asks for nothing."""
    rounding = [1.0 + n / 10_000 for n in range(-10, 11)]
    lights = [Light(brightness=60.0, red_by_green=one, blue_by_green=1.0, corners=0.9) for one in rounding]
    own = own_range_of(lights, "shades_of_grey_6")
    assert own.to_json() == {"brightness": [60.0, 60.0], "corners": [0.9, 0.9]}
    model = LightRange(brightness=(100.0, 200.0), corners=(0.7, 1.3))
    kept_before = own_range_of(lights)  # as values hold it that were learned before colour was left out
    for usual in (own, kept_before):
        rules = ReferralRules(
            uncertain_above=None, dissonance_above=None, suspicious=None, suspicious_from=None, light=model,
            own_light=usual,
        )  # fmt: skip
        assert unlike_learned(replace(lights[0], red_by_green=1.002, blue_by_green=0.998), rules) is None
        assert unlike_learned(replace(lights[0], brightness=85.0), rules) == "darker"
        assert unlike_learned(replace(lights[0], corners=0.5), rules) is not None


def test_a_photograph_is_outside_the_range_of_radiographs():
    """Grey pictures of which some have a level more of one channel; of fewer than 40 nobody says what is usual."""
    radiographs = [np.full((4, 4, 3), 120 + n, np.uint8) + np.array([n % 2, 0, 0], np.uint8) for n in range(40)]
    found = asked_range_of([measure_light(one) for one in radiographs])
    assert asked_range_of([measure_light(one) for one in radiographs[:39]]) is None
    assert found.brightness == (pytest.approx(120 / 1.02, rel=0.005), pytest.approx(159 * 1.02, rel=0.005))
    assert all(found.unlike(measure_light(one)) is None for one in radiographs)
    assert found.unlike(measure_light(radiographs[3] + np.array([2, 0, 0], np.uint8))) is None
    assert found.unlike(measure_light(drawn(4))) == "redder"
    corrected = asked_range_of([measure_light(one) for one in radiographs], "shades_of_grey_6")
    assert (corrected.red_by_green, corrected.blue_by_green, corrected.corners, found.corners) == (None,) * 4


def test_the_range_of_radiographs_ends_where_light_does():
    black, white = (Light(brightness=one, red_by_green=1.0, blue_by_green=1.0, corners=1.0) for one in (1.0, 255.0))
    assert asked_range_of([black, white] * 20).brightness == (1.0, 255.0)


def test_what_a_device_learned_from_is_usual_too_and_nothing_between():
    own = LightRange(brightness=(60.0, 70.0), red_by_green=(1.0, 1.5), blue_by_green=(0.8, 1.2))
    rules = ReferralRules(
        uncertain_above=None, dissonance_above=None, suspicious=None, suspicious_from=None, light=RANGE, own_light=own
    )
    said = {value: unlike_learned(Light(**{**WITHIN, "brightness": value}), rules) for value in (65.0, 85.0, 150.0)}
    assert said == {65.0: None, 85.0: "darker", 150.0: None}


@pytest.mark.parametrize("found", [RANGE, LightRange(brightness=(1.5, 2.5))])
def test_a_range_travels_as_json(found):
    assert LightRange.from_json(found.to_json()) == found


@pytest.mark.parametrize(
    "record",
    [
        None, [], {}, {"brightness": 3}, {"brightness": [1]}, {"brightness": [2, 1]}, {"brightness": [0, 1]},
        {"brightness": [1, float("inf")]}, {"brightness": ["1", "2"]}, {"brightness": [True, 2]},
        {"brightness": [1, 2], "contrast": [1, 2]}, {"red_by_green": [1, 2]}, {"brightness": [float("nan"), 2]},
        {"brightness": [1, 256]}, {"brightness": [1, 10**400]}, {"brightness": [1, 2], "red_by_green": [1e-9, 2]},
    ],
)  # fmt: skip
def test_anything_else_is_refused(record):
    with pytest.raises(ValueError, match=r"light|brightness|red_by_green"):
        LightRange.from_json(record)


@pytest.mark.slow
@pytest.mark.data
@pytest.mark.skipif("EDGEFL_DATA" not in environ, reason="EDGEFL_DATA is not set: no real images here")
def test_real_cancers_in_another_light_are_seen() -> None:
    """The centre of the models to try: hardly a picture of its own, and most of what is lit otherwise."""
    with zipfile.ZipFile(Path(environ["EDGEFL_DATA"]) / "fed_isic2019_84.zip") as archive:
        table = csv.DictReader(io.StringIO(archive.read("index.csv").decode()))
        found = [
            (row["split"], row["label"], decode(archive.read(row["file"])))
            for row in table
            if row["center"] == "rosendahl"
        ]
    learned = usual_light(picture for split, _, picture in found if split == "train")
    seen = [picture for split, _, picture in found if split == "val"]
    cancers = [picture for split, label, picture in found if split == "val" and label in CANCERS][:60]

    def referred(pictures):
        return np.mean([learned.unlike(measure_quality(one).light) is not None for one in pictures])

    assert referred(seen) < 0.12
    for factors in ((0.8, 1, 1.15), (0.9, 1.1, 0.9), (0.7, 0.7, 0.7), (0.4, 0.4, 0.4)):
        assert referred([lit(one, factors) for one in cancers]) > 0.75
    assert referred([vignetted(one, 0.4) for one in cancers]) > 0.4
    assert referred([vignetted(one, 0.6) for one in cancers]) > 0.9
    assert referred([lit(one, (0.8, 0.8, 0.8)) for one in cancers]) > 0.4
