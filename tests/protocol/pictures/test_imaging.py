"""The image path against numpy and torch oracles, and against files that are damaged, hostile or merely unusual."""

import io
import json
import struct
import time
import zipfile
import zlib
from os import environ
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from PIL import Image
from tests.protocol.pictures.conftest import chunk, encoded, exif, photograph, png

from edgefl_protocol.errors import ImageError
from edgefl_protocol.pictures.imaging import decode, flattened, open_photo, resize, shades_of_grey
from edgefl_protocol.pictures.preprocess import Preprocess, prepare


def bicubic_antialias(image: np.ndarray, size: int) -> np.ndarray:
    """Keys' cubic with a = -0.5, its support widened by the shrinking factor, weights normalised; in float64."""

    def weights(length: int) -> np.ndarray:
        scale = length / size
        widen = max(scale, 1.0)
        distance = np.abs((np.arange(length) + 0.5) - (np.arange(size)[:, None] + 0.5) * scale) / widen
        near = (1.5 * distance - 2.5) * distance**2 + 1
        far = ((-0.5 * distance + 2.5) * distance - 4) * distance + 2
        w = np.where(distance < 1, near, np.where(distance < 2, far, 0.0))
        return w / w.sum(axis=1, keepdims=True)

    rows, columns = weights(image.shape[0]), weights(image.shape[1])
    return np.clip(np.moveaxis(rows @ np.moveaxis(image.astype(float), 2, 0) @ columns.T, 0, 2), 0, 255)


@pytest.mark.parametrize(("height", "width", "size"), [(150, 200, 84), (48, 64, 84), (84, 84, 28), (31, 300, 32)])
def test_resize_is_bicubic_with_antialias(height: int, width: int, size: int) -> None:
    """The bundle format, preprocess.json: bicubic, antialias. Oracle: the filter written out in numpy, in float64."""
    image = photograph(height, width)
    difference = np.abs(resize(image, size).astype(float) - bicubic_antialias(image, size))
    assert difference.max() <= 1.5  # Pillow rounds after each of the two passes
    assert difference.mean() <= 0.5


def test_resize_agrees_with_torch() -> None:
    """The trainers of the papers resize with torch's antialiased bicubic: no pixel differs by more than rounding."""
    torch = pytest.importorskip("torch", reason="torch not installed: needs edgefl-derm[trainer]")
    image = photograph(150, 200)
    planes = torch.from_numpy(image.astype(np.float32)).permute(2, 0, 1)[None]
    theirs = torch.nn.functional.interpolate(planes, (84, 84), mode="bicubic", antialias=True)[0].permute(1, 2, 0)
    assert np.abs(resize(image, 84).astype(float) - theirs.clamp(0, 255).numpy()).max() <= 1.5


@pytest.mark.parametrize("fit", ["squash", "crop"])
def test_four_to_three_photograph(fit: str) -> None:
    """A 4:3 ramp I(x) = x keeps its place: squash shows all of it, crop the centred square, both within one level."""
    height, width, size = 150, 200, 50
    ramp = np.repeat(np.tile(np.arange(width, dtype=np.uint8), (height, 1))[:, :, None], 3, axis=2)
    side, left = (width, 0.0) if fit == "squash" else (height, (width - height) / 2)
    expected = left + (np.arange(size) + 0.5) * side / size - 0.5
    got = resize(ramp, size, fit)[:, 2:-2, 0]  # type: ignore[arg-type]  # the outermost columns lack one neighbour
    assert np.abs(got - expected[2:-2]).max() <= 1.0


def test_crop_equals_resizing_the_shorter_side_then_cutting() -> None:
    """`crop` = resize the shorter side, then centre crop, where no rounding of the longer side enters (4:3 to 60)."""
    image = photograph(150, 200)
    longer = np.asarray(Image.fromarray(image).resize((80, 60), Image.Resampling.BICUBIC))
    assert np.abs(resize(image, 60, "crop").astype(int) - longer[:, 10:70].astype(int)).max() <= 1


def test_extreme_aspect_ratio_is_cheap() -> None:
    """docs/security.md check 35: a 1 x 40,000,000 picture must not be blown up by `crop`."""
    image = np.zeros((1, 40_000_000, 3), np.uint8)
    started = time.process_time()
    assert resize(image, 224, "crop").shape == (224, 224, 3)
    assert time.process_time() - started < 1.0


ORIENTED = {  # EXIF 2.32, 4.6.5.1.6: where row 0 and column 0 of the stored picture lie
    1: lambda a: a,
    2: lambda a: a[:, ::-1],
    3: lambda a: a[::-1, ::-1],
    4: lambda a: a[::-1],
    5: lambda a: a.transpose(1, 0, 2),
    6: lambda a: a[::-1].transpose(1, 0, 2),
    7: lambda a: a[::-1, ::-1].transpose(1, 0, 2),
    8: lambda a: a[:, ::-1].transpose(1, 0, 2),
}


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("orientation", sorted(ORIENTED))
def test_exif_orientation(orientation: int, order: str) -> None:
    """EXIF 2.32: all eight orientations in both byte orders, PNG (exact) and JPEG; oracle: numpy flips."""
    image = photograph()
    upright = ORIENTED[orientation](image)
    np.testing.assert_array_equal(decode(encoded(image, exif=exif(orientation, order))), upright)
    plain, turned = (encoded(image, "JPEG", quality=95, exif=exif(o, order)) for o in (1, orientation))
    np.testing.assert_array_equal(decode(turned), ORIENTED[orientation](decode(plain)))


@pytest.mark.parametrize(
    "damaged",
    [
        b"",
        b"Exif\x00\x00",
        exif(0),
        exif(9),
        exif(6, kind=4),
        exif(6)[:20],
        exif(6).replace(b"*\x00\x08", b"*\x00\xff"),
    ],
)
def test_damaged_exif_means_upright(damaged: bytes) -> None:
    """Check (8): damaged EXIF neither refuses a photograph nor turns it."""
    image = photograph()
    options = {"exif": damaged} if damaged else {}
    np.testing.assert_array_equal(decode(encoded(image, **options)), image)


@given(arrays(np.uint8, st.tuples(st.integers(1, 12), st.integers(1, 12), st.just(3))))
def test_png_pixels_are_exact(image: np.ndarray) -> None:
    """PNG is lossless, so decode must give back what was stored."""
    np.testing.assert_array_equal(decode(encoded(image)), image)


def test_metadata_changes_nothing() -> None:
    """docs/security.md check 36: text, GPS and profile next to the pixels leave no trace in the array."""
    from PIL.PngImagePlugin import PngInfo

    text = PngInfo()
    text.add_text("Patient", "CANARY-4711")
    image = photograph()
    planted = encoded(image, pnginfo=text, icc_profile=b"CANARY-4711" * 20)
    assert b"CANARY-4711" in planted
    np.testing.assert_array_equal(decode(planted), decode(encoded(image)))


def test_pixel_modes() -> None:
    """Check (9): each mode of the two formats against the value a viewer on white shows."""
    grey = photograph()[:, :, 0]
    three = np.repeat(grey[:, :, None], 3, axis=2)
    np.testing.assert_array_equal(decode(encoded(grey)), three)
    bits = grey > 128
    np.testing.assert_array_equal(decode(encoded(Image.fromarray(bits)))[:, :, 1], bits * np.uint8(255))
    deep = grey.astype(np.uint16) * 256 + 255  # the high byte is kept, not clipped at 255
    np.testing.assert_array_equal(decode(encoded(deep)), three)
    palette = Image.fromarray(photograph()).quantize(16)
    np.testing.assert_array_equal(decode(encoded(palette)), np.asarray(palette.convert("RGB")))
    cmyk = Image.new("CMYK", (8, 8), (0, 255, 255, 0))  # full magenta and yellow: red
    assert np.abs(decode(encoded(cmyk, "JPEG", quality=100)).astype(int) - [255, 0, 0]).max() <= 3
    jpeg = encoded(grey, "JPEG", quality=100)
    assert np.abs(decode(jpeg).astype(int) - three).max() <= 3


def test_sixteen_bit_colour_keeps_the_high_byte() -> None:
    """Check (9): a 16-bit RGB PNG made by hand from the PNG specification, 11.2.1."""
    samples = (np.arange(2 * 3 * 3).reshape(2, 3, 3) * 3_500).astype(">u2")
    rows = b"".join(b"\x00" + row.tobytes() for row in samples)
    made = png(struct.pack(">IIBBBBB", 3, 2, 16, 2, 0, 0, 0), chunk(b"IDAT", zlib.compress(rows)))
    np.testing.assert_array_equal(decode(made), (samples >> 8).astype(np.uint8))


def deep_png(
    samples: np.ndarray, colour: tuple[int, int, int], *, interlaced: bool = False, late: bool = False
) -> bytes:
    """A 16-bit RGB PNG with a transparent colour, by hand from the PNG specification, 8.1, 11.2.1 and 11.3.1.1."""
    passes = [(0, 0, 8, 8), (0, 4, 8, 8), (4, 0, 8, 4), (0, 2, 4, 4), (2, 0, 4, 2), (0, 1, 2, 2), (1, 0, 2, 1)]
    parts = [samples[y::down, x::right] for y, x, down, right in (passes if interlaced else [(0, 0, 1, 1)])]
    rows = b"".join(b"\x00" + row.astype(">u2").tobytes() for part in parts for row in part if part.size)
    head = struct.pack(">IIBBBBB", samples.shape[1], samples.shape[0], 16, 2, 0, 0, interlaced)
    clear, body = chunk(b"tRNS", struct.pack(">HHH", *colour)), chunk(b"IDAT", zlib.compress(rows))
    return png(head, body, clear) if late else png(head, clear, body)


LESION = (0x3020, 0x1811, 0x1005)


@pytest.mark.parametrize("interlaced", [False, True])
@pytest.mark.parametrize("orientation", [1, 6])
@pytest.mark.parametrize(
    "colour", [LESION, (0xFF30, 0xFF18, 0xFF10), (0x0030, 0x0018, 0x0010), (0x3021, 0x1811, 0x1005)]
)
def test_a_transparent_colour_of_16_bits_is_matched_in_all_of_them(
    colour: tuple[int, int, int], orientation: int, interlaced: bool
) -> None:
    """PNG specification, 11.3.1.1: a pixel is transparent where all its samples match, in 16 bits. A colour that has
    the lesion's high bytes as its low ones, or another low byte, whitens nothing."""
    samples = np.full((12, 11, 3), (0xB478, 0x7810, 0x5A33))
    samples[4:8, 3:7] = LESION
    made = deep_png(samples, colour, interlaced=interlaced)
    made = made.replace(b"\x00\x00\x00\x06tRNS", chunk(b"eXIf", exif(orientation)[6:]) + b"\x00\x00\x00\x06tRNS")
    clear = (samples == colour).all(axis=2)
    expected = np.where(clear[:, :, None], 255, samples >> 8).astype(np.uint8)
    found = flattened(open_photo(made))
    np.testing.assert_array_equal(found.pixels, ORIENTED[orientation](expected))
    assert found.white == pytest.approx(clear.mean()) and clear.any() == (colour == LESION)


@pytest.mark.parametrize("orientation", [1, 6])
@pytest.mark.parametrize("colour", [0, 1, 2, 3, 9, 15])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_a_transparent_grey_of_few_bits_is_compared_as_it_is_stored(bits: int, colour: int, orientation: int) -> None:
    """PNG specification, 11.3.1.1 and 13.12: samples match in their own bits, of the colour the lowest ones count, and
    a sample is shown as its share of the largest. A lesion of grey 15 of 15 under white was scored as it was."""
    samples = np.arange(8 * 16).reshape(8, 16) % 2**bits
    packed = np.packbits((samples[:, :, None] >> np.arange(bits)[::-1]) & 1, axis=None).reshape(8, -1)
    body = chunk(b"IDAT", zlib.compress(b"".join(b"\x00" + row.tobytes() for row in packed)))
    head = struct.pack(">IIBBBBB", 16, 8, bits, 0, 0, 0, 0)
    made = png(head, chunk(b"tRNS", struct.pack(">H", colour)), chunk(b"eXIf", exif(orientation)[6:]), body)
    clear = samples == colour % 2**bits
    expected = np.where(clear, 255, samples * 255 // (2**bits - 1))[:, :, None].repeat(3, axis=2)
    found = flattened(open_photo(made))
    np.testing.assert_array_equal(found.pixels, ORIENTED[orientation](expected))
    assert found.white == pytest.approx(clear.mean())


def test_where_the_low_bytes_are_lost_no_colour_is_transparent() -> None:
    """Whoever has decoded a picture hands over its high bytes alone; a colour after the pixels is against 5.6."""
    samples = np.full((4, 4, 3), LESION)
    opened = Image.open(io.BytesIO(deep_png(samples, (0xFF30, 0xFF18, 0xFF10))))
    opened.load()
    for image in (opened, open_photo(deep_png(samples, LESION, late=True))):
        assert flattened(image).white == 0 and (flattened(image).pixels == np.array(LESION) >> 8).all()


def test_transparency_is_laid_on_white() -> None:
    """Check (9): c * alpha + 255 * (1 - alpha); hidden colours do not show, in RGBA, LA and palettes."""
    colour = photograph(16, 16)
    alpha = np.tile(np.linspace(0, 255, 16).astype(np.uint8), (16, 1))
    expected = colour * (alpha[:, :, None] / 255) + 255 * (1 - alpha[:, :, None] / 255)
    assert np.abs(decode(encoded(np.dstack([colour, alpha]))) - expected).max() <= 1
    grey = np.dstack([colour[:, :, 0], alpha])
    assert np.abs(decode(encoded(Image.fromarray(grey, "LA")))[:, :, 2] - expected[:, :, 0]).max() <= 1
    palette = Image.new("P", (4, 4), 1)
    palette.putpalette([0, 0, 0, 200, 10, 10])
    assert (decode(encoded(palette, transparency=1)) == 255).all()
    assert (decode(encoded(palette, transparency=bytes([0, 255]))) == [200, 10, 10]).all()
    assert (decode(encoded(Image.new("RGB", (4, 4), (1, 2, 3)), transparency=(1, 2, 3))) == 255).all()


def test_what_was_transparent_is_told() -> None:
    """docs/decisions/0011: an alpha channel that is opaque everywhere changes nothing, so nothing is told of it."""
    clear, half, opaque = (Image.new("RGBA", (4, 4), (9, 9, 9, alpha)) for alpha in (0, 128, 255))
    half_grey, plain = Image.new("LA", (4, 4), (9, 128)), Image.new("RGB", (4, 4), (1, 2, 3))
    palette = Image.new("P", (4, 4), 1)
    palette.putpalette([1, 2, 3, 200, 10, 10])
    deep = Image.fromarray(np.full((4, 4), 300, np.uint16))
    for image, options, told in (
        (clear, {}, True), (half, {}, True), (opaque, {}, False), (half_grey, {}, True), (plain, {}, False),
        (plain, {"transparency": (1, 2, 3)}, True), (plain, {"transparency": (3, 2, 1)}, False),
        (palette, {"transparency": 1}, True), (palette, {"transparency": bytes([0, 255])}, False),
        (deep, {"transparency": 300}, True), (deep, {"transparency": 301}, False), (deep, {}, False),
    ):  # fmt: skip
        data = encoded(image, **options)
        found = flattened(open_photo(data))
        assert found.transparent is told, (image.mode, options)
        np.testing.assert_array_equal(found.pixels, decode(data))


def test_how_much_white_was_laid_under_is_told() -> None:
    """A tenth of the pixels wholly transparent counts as a picture that is a tenth transparent all over."""
    for share, alphas in ((1.0, [0] * 100), (1 - 128 / 255, [128] * 100), (0.1, [0] * 10 + [255] * 90)):
        image = Image.new("RGBA", (10, 10), (9, 9, 9))
        image.putalpha(Image.frombytes("L", (10, 10), bytes(alphas)))
        assert flattened(open_photo(encoded(image))).white == pytest.approx(share)


def test_main_picture_of_a_multi_picture_jpeg() -> None:
    """Module text: phones add gain maps; the first picture counts, the rest is ignored."""
    first, second = photograph(), photograph(20, 20, seed=1)
    many = encoded(Image.fromarray(first), "MPO", save_all=True, append_images=[Image.fromarray(second)])
    assert decode(many).shape == first.shape


def test_an_opened_image_equals_its_file() -> None:
    """One image path: an opened image and its file give the same array."""
    data = encoded(photograph(), "JPEG", exif=exif(6))
    np.testing.assert_array_equal(flattened(Image.open(io.BytesIO(data))).pixels, decode(data))


def test_shades_of_grey_formula() -> None:
    """docs/methods.md 7.3: e = mean(I^6)^(1/6), unit length, I / (e sqrt 3), clipped instead of wrapped."""
    image = photograph()
    image[0, 0] = (255, 255, 10)  # a highlight that the gain pushes above 255
    light = (image.astype(float) ** 6).mean(axis=(0, 1)) ** (1 / 6)
    light /= np.linalg.norm(light)
    expected = np.minimum(image / (light * np.sqrt(3)), 255)
    got = shades_of_grey(image).astype(float)
    assert ((expected - got > -1e-6) & (expected - got < 1 + 1e-6)).all()  # truncated to whole numbers
    assert expected.max() == 255  # the clip is exercised
    assert (shades_of_grey(np.zeros((4, 4, 3), np.uint8)) == 0).all()
    grey = np.full((4, 4, 3), 77, np.uint8)
    assert np.abs(shades_of_grey(grey).astype(int) - 77).max() <= 1  # grey light: nothing to correct


def test_prepare_is_the_composition() -> None:
    """Bytes and the decoded array give the same input; colour comes after resizing (docs/methods.md 7.3)."""
    image = photograph()
    for fit in ("squash", "crop"):
        plain = Preprocess(size=32, fit=fit)  # type: ignore[arg-type]
        np.testing.assert_array_equal(prepare(encoded(image), plain), resize(image, 32, fit))  # type: ignore[arg-type]
        grey = Preprocess(size=32, fit=fit, colour="shades_of_grey_6")  # type: ignore[arg-type]
        np.testing.assert_array_equal(prepare(image, grey), shades_of_grey(prepare(image, plain)))


def test_prepare_leaves_its_input_alone() -> None:
    image = photograph()
    before = image.copy()
    prepare(image, Preprocess(size=64, colour="shades_of_grey_6"))[:] = 0
    np.testing.assert_array_equal(image, before)


RECORD = {
    "size": 84,
    "fit": "squash",
    "resample": "bicubic",
    "antialias": True,
    "colour": "none",
    "mean": [0.5, 0.5, 0.5],
    "std": [0.25, 0.25, 0.25],
}


def test_preprocess_record_round_trip() -> None:
    """The bundle format, preprocess.json, through real JSON."""
    read = Preprocess.from_json(json.loads(json.dumps(RECORD)))
    assert read == Preprocess(size=84, std=(0.25, 0.25, 0.25))
    assert read.to_json() == RECORD


@pytest.mark.parametrize(
    "change",
    [
        {"size": 0},
        {"size": True},
        {"size": 84.0},
        {"size": 10**6},
        {"fit": "stretch"},
        {"resample": "nearest"},
        {"antialias": False},
        {"antialias": 1},
        {"colour": "grey_world"},
        {"mean": [0.5, 0.5]},
        {"mean": "abc"},
        {"mean": [0.5, float("nan"), 0.5]},
        {"mean": [True, 0.5, 0.5]},
        {"std": [0.0, 1.0, 1.0]},
        {"fit": ["squash"]},
        {"extra": 1},
        {"size": None},
    ],
)
def test_preprocess_refuses(change: dict[str, object]) -> None:
    """The bundle format: exact keys and known values, else the record is refused."""
    with pytest.raises(ValueError, match=r"\w+ is|keys are"):
        Preprocess.from_json({**RECORD, **change})


@pytest.mark.parametrize("wrong", [np.zeros((4, 4), np.uint8), np.zeros((4, 4, 3)), np.zeros((0, 4, 3), np.uint8)])
def test_arrays_of_other_forms_are_refused(wrong: np.ndarray) -> None:
    with pytest.raises(ImageError, match="uint8 of"):
        prepare(wrong, Preprocess(size=8))


@pytest.mark.data
def test_real_photographs_against_the_oracle() -> None:
    """Real 4:3 dermoscopic JPEGs: the same pixels as Pillow's plain decoder, resized as the numpy oracle says."""
    if "EDGEFL_DATA" not in environ:
        pytest.skip("EDGEFL_DATA is not set: no real images here")
    with zipfile.ZipFile(Path(environ["EDGEFL_DATA"]) / "ham10000_msk_200x150.zip") as archive:
        names = sorted(name for name in archive.namelist() if name.endswith(".jpg"))[::1_500]
        assert names
        for name in names:
            data = archive.read(name)
            plain = np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))
            np.testing.assert_array_equal(decode(data), plain)
            assert np.abs(prepare(data, Preprocess(size=84)) - bicubic_antialias(plain, 84)).max() <= 1.5
