"""A photograph is made like the few pixels of what a network learned from. Oracle: Pillow alone."""

import io
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from edgefl_protocol.pictures.imaging import Pixels, resize
from edgefl_protocol.pictures.preprocess import Preprocess, TaughtPictures, prepare

TAUGHT = {"side": 84, "jpeg_quality": 75}
RECORD = {
    "size": 112, "fit": "squash", "resample": "bicubic", "antialias": True, "colour": "none", "mean": [0.5] * 3,
    "std": [0.5] * 3, "taught": TAUGHT,
}  # fmt: skip


def photo(height: int, width: int, seed: int = 0) -> Pixels:
    """Smooth, as a photograph is, with some noise of a camera."""
    rng = np.random.default_rng(seed)
    coarse = Image.fromarray(rng.integers(60, 200, (5, 6, 3), dtype=np.uint8))
    smooth = np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC)).astype(int)
    return np.clip(smooth + rng.integers(-12, 13, smooth.shape), 0, 255).astype(np.uint8)


def saved(image: Image.Image, quality: int) -> bytes:
    file = io.BytesIO()
    image.save(file, "JPEG", quality=quality)
    return file.getvalue()


def test_a_photograph_is_shrunk_saved_and_enlarged_as_the_taught_ones_were() -> None:
    """By hand: what made the training file of 84 px, then what the training's loader does with that file."""
    camera = photo(300, 400)
    small = Image.fromarray(camera).resize((84, 84), Image.Resampling.BICUBIC)
    file = saved(small, 75)
    learned = Image.open(io.BytesIO(file)).convert("RGB").resize((112, 112), Image.Resampling.BICUBIC)
    how = Preprocess.from_json(RECORD)
    assert np.array_equal(prepare(camera, how), np.asarray(learned))
    assert np.array_equal(prepare(file, how), np.asarray(learned)), "the taught file itself gives what was learned"
    unlike = prepare(camera, Preprocess(size=112)).astype(int)
    assert np.abs(unlike - np.asarray(learned)).mean() > 1, "and without it the network sees another picture"


@given(st.integers(1, 84), st.integers(1, 84))
def test_a_picture_that_is_as_small_stays(height: int, width: int) -> None:
    image = photo(height, width)
    assert np.array_equal(prepare(image, Preprocess.from_json(RECORD)), resize(image, 112))


@given(st.integers(85, 300), st.integers(40, 300), st.sampled_from(["squash", "crop"]), st.sampled_from([None, 40, 95]))
def test_made_like_once_is_made_like(height: int, width: int, fit: str, quality: int | None) -> None:
    taught = TaughtPictures(side=84, jpeg_quality=quality)
    how = Preprocess(size=112, fit=fit, taught=taught)  # type: ignore[arg-type]
    once = taught.made_like(photo(height, width), how.fit)
    assert once.shape == (84, 84, 3)
    assert np.array_equal(prepare(once, how), prepare(photo(height, width), how))


def test_the_record_names_them_only_where_they_matter() -> None:
    """A bundle without them has the keys that older devices know, and no others."""
    read = Preprocess.from_json(json.loads(json.dumps(RECORD)))
    assert (read.taught, read.least_px) == (TaughtPictures(side=84, jpeg_quality=75), 84)
    assert read.to_json() == RECORD
    plain = {key: value for key, value in RECORD.items() if key != "taught"}
    assert Preprocess.from_json(plain).to_json() == plain
    assert Preprocess.from_json(plain).least_px == 112
    assert Preprocess(size=84, taught=TaughtPictures(side=100)).least_px == 84


@pytest.mark.parametrize(
    "change",
    [
        {"side": 0}, {"side": True}, {"side": 84.0}, {"side": 10**6}, {"jpeg_quality": 0}, {"jpeg_quality": 101},
        {"jpeg_quality": 75.0}, {"jpeg_quality": True}, {"more": 1},
    ],
)  # fmt: skip
def test_other_values_are_refused(change: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"side is|jpeg_quality is|not known"):
        Preprocess.from_json({**RECORD, "taught": {**TAUGHT, **change}})


@pytest.mark.parametrize("taught", [None, [], 84, {"side": 84}, {}])
def test_half_a_record_is_refused(taught: object) -> None:
    with pytest.raises(ValueError, match="taught"):
        Preprocess.from_json({**RECORD, "taught": taught})
