"""TIFF, HEIC and DICOM on the device: the right pixels, each way to be wrong, and a second process that may die."""

import io
import os
import signal
import struct
import sys
import zlib

import numpy as np
import pytest
from PIL import Image
from tests.edge_client.scoring.picture_files import SHAPE, code_of, saved, scene

from edgefl_client.scoring import pictures
from edgefl_client.scoring.decoders import MAX_ADDRESS_BYTES, REQUEST
from edgefl_client.scoring.pictures import FORMATS, PictureReader, kind_of
from edgefl_protocol.errors import ImageError


def oriented(number: int) -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = number
    return exif


@pytest.fixture(scope="module")
def reader():
    with PictureReader(FORMATS) as one:
        yield one


@pytest.mark.parametrize("compression", [None, "tiff_lzw", "tiff_deflate", "packbits"])
def test_tiff_gives_its_pixels(reader, compression):
    """Lossless, so exactly what was stored."""
    np.testing.assert_array_equal(reader.decode(saved(scene(), compression=compression)).pixels, scene())


UPRIGHT = {  # TIFF 6.0, tag 274: where row 0 and column 0 of the stored picture lie
    1: lambda a: a,
    2: lambda a: a[:, ::-1],
    3: lambda a: a[::-1, ::-1],
    4: lambda a: a[::-1],
    5: lambda a: a.transpose(1, 0, 2),
    6: lambda a: a[::-1].transpose(1, 0, 2),
    7: lambda a: a[::-1, ::-1].transpose(1, 0, 2),
    8: lambda a: a[:, ::-1].transpose(1, 0, 2),
}


@pytest.mark.parametrize("number", UPRIGHT)
def test_tiff_is_turned_upright_once(reader, number):
    """TIFF 6.0, tag 274; oracle: numpy flips."""
    np.testing.assert_array_equal(reader.decode(saved(scene(), exif=oriented(number))).pixels, UPRIGHT[number](scene()))


def sixteen_bit_rgb(samples: np.ndarray) -> bytes:
    """A TIFF of 16-bit RGB by hand (TIFF 6.0, sections 2 and 6): one strip, little endian."""
    height, width = samples.shape[:2]
    pixels = samples.astype("<u2").tobytes()
    entries = [
        (256, 3, 1, width), (257, 3, 1, height), (258, 3, 3, 8 + 2 + 12 * 9 + 4), (259, 3, 1, 1), (262, 3, 1, 2),
        (273, 4, 1, 8 + 2 + 12 * 9 + 4 + 6), (277, 3, 1, 3), (278, 3, 1, height), (279, 4, 1, len(pixels)),
    ]  # fmt: skip
    body = b"".join(struct.pack("<HHII", *entry) for entry in entries)
    return b"II*\x00" + struct.pack("<IH", 8, len(entries)) + body + bytes(4) + struct.pack("<3H", 16, 16, 16) + pixels


def test_tiff_modes(reader):
    """16 bits keep the high byte, CMYK and palettes become RGB, transparency is laid on white, as in imaging (9)."""
    grey = scene()[:, :, 0]
    deep = (grey.astype(np.uint16) << 8) + 255
    np.testing.assert_array_equal(reader.decode(saved(deep)).pixels[:, :, 1], grey)
    np.testing.assert_array_equal(reader.decode(saved(grey)).pixels[:, :, 2], grey)
    samples = scene().astype(np.uint16) * 256 + 200
    np.testing.assert_array_equal(reader.decode(sixteen_bit_rgb(samples)).pixels, scene())
    cmyk = Image.new("CMYK", (8, 8), (0, 255, 255, 0))
    assert np.abs(reader.decode(saved(cmyk)).pixels.astype(int) - [255, 0, 0]).max() <= 3
    clear = np.dstack([scene(), np.zeros(SHAPE, np.uint8)])
    assert (reader.decode(saved(clear)).pixels == 255).all()
    assert reader.decode(saved(clear)).transparent and not reader.decode(saved(scene())).transparent
    assert (reader.decode(saved(Image.fromarray(grey > 100))).pixels[:, :, 0] == (grey > 100) * 255).all()


def grey_tiff(samples: np.ndarray, photometric: int, compressed: bool = False) -> bytes:
    """A grey TIFF of 8 or 16 bits."""
    stored = samples.astype(f"<u{samples.dtype.itemsize}").tobytes()
    return tiff_of(samples.shape, stored, 8 * samples.dtype.itemsize, photometric, compressed=compressed)


def tiff_of(
    shape: tuple[int, ...], stored: bytes, bits: int, photometric: int = 1, kind: int = 1, compressed: bool = False
) -> bytes:
    """A grey TIFF by hand (TIFF 6.0, sections 3, 4 and 19): one strip, little endian, plain or by deflate."""
    height, width = shape
    pixels = zlib.compress(stored) if compressed else stored
    entries = [
        (256, 3, 1, width), (257, 3, 1, height), (258, 3, 1, bits), (259, 3, 1, 8 if compressed else 1),
        (262, 3, 1, photometric), (273, 4, 1, 8 + 2 + 12 * 10 + 4), (277, 3, 1, 1), (278, 3, 1, height),
        (279, 4, 1, len(pixels)), (339, 3, 1, kind),
    ]  # fmt: skip
    body = b"".join(struct.pack("<HHII", *entry) for entry in entries)
    return b"II*\x00" + struct.pack("<IH", 8, len(entries)) + body + bytes(4) + pixels


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("bits", [8, 16])
def test_tiff_whose_zero_is_white_is_no_negative(reader, bits, compressed):
    """TIFF 6.0, section 3, PhotometricInterpretation: WhiteIsZero (0) images 0 as white, BlackIsZero (1) as black."""
    grey = scene()[:, :, 0]
    samples = grey if bits == 8 else grey.astype(np.uint16) * 256 + 77
    for photometric, expected in ((1, grey), (0, 255 - grey)):
        found = reader.decode(grey_tiff(samples, photometric, compressed))
        np.testing.assert_array_equal(found.pixels, np.repeat(expected[:, :, None], 3, axis=2))


@pytest.mark.parametrize(
    ("bits", "kind", "stored"),
    [
        (12, 1, bytes([0xFF, 0xFF, 0xFF] * 48)),  # two samples in three bytes: white, and was nearly black
        (32, 1, np.full((8, 12), 2**18, "<u4").tobytes()),  # nearly black, and was white
        (8, 2, np.full((8, 12), -1, "i1").tobytes()),  # signed, and was wrapped into white
        (16, 2, np.full((8, 12), -1, "<i2").tobytes()),
        (32, 3, np.full((8, 12), 0.5, "<f4").tobytes()),
    ],
)
def test_tiff_of_other_samples_is_refused(reader, bits, kind, stored):
    """TIFF 6.0, sections 3 and 19, BitsPerSample and SampleFormat (1: unsigned, 2: signed, 3: floating)."""
    with pytest.raises(ImageError, match="1, 2, 4, 8 or 16 bits; save it with 8 bits") as refused:
        reader.decode(tiff_of((8, 12), stored, bits, kind=kind))
    assert refused.value.code == "unsupported_format"


@pytest.mark.parametrize("bits", [1, 2, 4])
def test_tiff_of_few_bits_is_scaled_to_eight(reader, bits):
    """TIFF 6.0, section 4: samples of a row lie in whole bytes, the first in the highest bits."""
    samples = np.arange(8 * 16).reshape(8, 16) % 2**bits
    stored = np.packbits((samples[:, :, None] >> np.arange(bits)[::-1]) & 1).tobytes()
    expected = samples * (255 // (2**bits - 1))
    np.testing.assert_array_equal(reader.decode(tiff_of((8, 16), stored, bits)).pixels[:, :, 0], expected)


def test_tiff_that_is_refused(reader):
    whole = saved(scene())
    pages = saved(Image.fromarray(scene()), save_all=True, append_images=[Image.fromarray(scene(1))])
    assert code_of(reader, pages) == "animated"
    assert code_of(reader, whole[: len(whole) // 2]) in ("truncated", "unreadable")
    assert code_of(reader, b"II*\x00" + bytes(200)) == "unreadable"
    assert code_of(reader, saved(scene().astype(np.float32)[:, :, 0])) == "unsupported_format"
    assert code_of(reader, whole.ljust(20_000_001, b"\x00")) == "too_large"
    huge = bytearray(saved(Image.new("1", (8, 8))))
    for tag in (256, 257):  # width and height
        at = (
            huge.index(struct.pack("<HH", tag, 4))
            if struct.pack("<HH", tag, 4) in huge
            else huge.index(struct.pack("<HH", tag, 3))
        )
        huge[at : at + 12] = struct.pack("<HHII", tag, 4, 1, 30_000)
    assert code_of(reader, bytes(huge)) == "too_large"
    from PIL.TiffImagePlugin import ImageFileDirectory_v2

    raw = ImageFileDirectory_v2()
    raw[50706] = b"\x01\x04\x00\x00"  # DNGVersion
    assert code_of(reader, saved(scene(), tiffinfo=raw)) == "unsupported_format"
    np.testing.assert_array_equal(reader.decode(whole).pixels, scene())  # and the reader goes on


def test_mutated_tiffs_end_in_pixels_or_one_error(reader):
    """docs/security.md check 34, for TIFF: 300 damaged files, no crash reaches the caller."""
    rng = np.random.default_rng(34)
    seeds = [saved(scene(), compression=kind) for kind in (None, "tiff_lzw", "tiff_deflate")]
    found = {"pixels": 0, "error": 0}
    for number in range(300):
        data = bytearray(seeds[number % 3])
        for _ in range(int(rng.integers(1, 5))):
            data[int(rng.integers(0, len(data)))] = int(rng.integers(0, 256))
        if number % 5 == 0:
            data = data[: int(rng.integers(8, len(data)))]
        try:
            pixels = reader.decode(bytes(data)).pixels
            assert pixels.dtype == np.uint8 and pixels.ndim == 3
            found["pixels"] += 1
        except ImageError:
            found["error"] += 1
    assert min(found.values()) > 30, found


def test_content_decides_not_the_name():
    """docs/reference/pictures.md: a mislabelled file is what it holds."""
    assert kind_of(saved(scene())) == "tiff"
    assert kind_of(saved(scene(), "PNG")) == "png"
    assert kind_of(saved(scene(), "JPEG")) == "jpeg"
    assert kind_of(saved(scene(), "GIF")) is None
    assert kind_of(b"") is None


def test_kinds_that_are_never_read_are_named(reader):
    """docs/reference/pictures.md: a WebP named .webp was "of an unknown kind, whatever its name says"."""
    for kind, name in (("WEBP", "WebP"), ("BMP", "BMP"), ("GIF", "GIF")):
        with pytest.raises(ImageError, match=f"^this file is a {name} by its content; only .*: convert it$"):
            reader.decode(saved(scene(), kind))
    assert code_of(reader, b"") == "empty"


@pytest.mark.parametrize("data", [b"GIF89a" + bytes(90), b"%!PS-Adobe", b"8BPS\x00\x01", b"SIMPLE  = T"])
def test_other_files_are_refused(reader, data):
    assert code_of(reader, data) == "unsupported_format"


def test_formats_can_be_narrowed():
    """docs/security.md, attack list 6: a site that wants JPEG and PNG alone starts no other reader."""
    with PictureReader(("jpeg", "png")) as narrow:
        assert code_of(narrow, saved(scene())) == "unsupported_format"
        np.testing.assert_array_equal(narrow.decode(saved(scene(), "PNG")).pixels, scene())
        assert narrow.suffixes == (".jpg", ".jpeg", ".jpe", ".jfif", ".png")
        assert narrow.other_suffixes[:5] == (".tif", ".tiff", ".heic", ".heif", ".dcm")


@pytest.mark.parametrize(("kind", "start"), [("heic", b"\x00\x00\x00\x1cftypheic"), ("dicom", bytes(128) + b"DICM")])
def test_a_missing_extra_is_named(monkeypatch, kind, start):
    """docs/reference/pictures.md: a clear message where the extra is missing."""
    real = pictures.find_spec
    monkeypatch.setattr(pictures, "find_spec", lambda name: None if name in ("pillow_heif", "pydicom") else real(name))
    with PictureReader(FORMATS) as reader, pytest.raises(ImageError) as refused:
        reader.decode(start + bytes(100))
    assert refused.value.code == "missing_extra"
    assert f"needs edgefl-derm[{kind}]: pip install " in str(refused.value)


@pytest.mark.slow
def test_a_reader_that_dies_costs_one_picture():
    with PictureReader(FORMATS) as reader:
        np.testing.assert_array_equal(reader.decode(saved(scene())).pixels, scene())
        process = reader._process
        os.kill(process.pid, signal.SIGSTOP)  # it hears nothing any more
        reader_timeout, pictures.TIMEOUT_S = pictures.TIMEOUT_S, 0.5
        try:
            assert code_of(reader, saved(scene())) == "unreadable"
        finally:
            pictures.TIMEOUT_S = reader_timeout
        np.testing.assert_array_equal(reader.decode(saved(scene())).pixels, scene())
        os.kill(reader._process.pid, signal.SIGKILL)
        reader._process.wait()
        np.testing.assert_array_equal(reader.decode(saved(scene())).pixels, scene())
        last = reader._process
    assert last.poll() is not None  # none is left behind


def test_an_answer_that_was_not_taken_is_nobody_elses(monkeypatch):
    """Interrupted while an answer is read, the next picture must not get the pixels of the one before."""
    real = pictures._exactly

    def interrupted(stream, length):
        if length > 1000:
            raise KeyboardInterrupt
        return real(stream, length)

    with PictureReader(FORMATS) as reader:
        monkeypatch.setattr(pictures, "_exactly", interrupted)
        with pytest.raises(KeyboardInterrupt):
            reader.decode(saved(scene(0)))
        monkeypatch.setattr(pictures, "_exactly", real)
        np.testing.assert_array_equal(reader.decode(saved(scene(1))).pixels, scene(1))


def test_the_second_process_looks_where_this_one_does(tmp_path):
    """Installed into a folder that only PYTHONPATH names, as with pip install --target or --user, it is found."""
    import subprocess
    from pathlib import Path

    import edgefl_client
    import edgefl_protocol

    for package in (edgefl_client, edgefl_protocol):
        (tmp_path / package.__name__).symlink_to(Path(package.__path__[0]))
    for name in ("numpy", "numpy.libs", "PIL", "pillow.libs"):
        beside = Path(np.__path__[0]).parent / name
        if beside.exists():
            (tmp_path / name).symlink_to(beside)
    (tmp_path / "a.tif").write_bytes(saved(scene()))
    script = (
        "import sys; sys.path[:] = [p for p in sys.path if 'site-packages' not in p]\n"
        "from edgefl_client.scoring.pictures import PictureReader\n"
        "with PictureReader(('tiff',)) as reader: print(reader.decode(open('a.tif', 'rb').read()).pixels.shape)"
    )
    bare = Path(sys.base_prefix) / "bin" / f"python{sys.version_info.major}.{sys.version_info.minor}"
    done = subprocess.run(
        [bare if bare.exists() else sys.executable, "-S", "-c", script],
        cwd=tmp_path, env={"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert done.stdout.strip() == str(scene().shape), done.stderr


def test_an_orphan_ends_by_itself():
    """Where whoever asked was killed, an endless loop in a decoder still ends: SIGALRM, whose default is the end."""
    import subprocess

    script = (
        "import sys\n"
        "from edgefl_client.scoring import decoders\n"
        "decoders.MOST_SECONDS = 1\n"
        "decoders.DECODERS['tiff'] = lambda data: [None for _ in iter(int, 1)]\n"
        "decoders.serve(sys.stdin.buffer, sys.stdout.buffer)"
    )
    asked = REQUEST.pack(b"tiff", 4) + b"II*\0"
    done = subprocess.run([sys.executable, "-c", script], input=asked, capture_output=True, check=False, timeout=60)
    assert done.returncode == -signal.SIGALRM


def test_the_second_process_is_bounded():
    """Its address space is limited, and it ends with its input."""
    import subprocess

    script = (
        "import runpy, sys, resource\n"
        "sys.argv=['x']\n"
        "runpy.run_module('edgefl_client.scoring.decoders', run_name='__main__')\n"
        "print(resource.getrlimit(resource.RLIMIT_AS)[0])"  # to standard error: the other one takes answers alone
    )
    done = subprocess.run([sys.executable, "-c", script], input=b"", capture_output=True, check=True, timeout=60)
    assert int(done.stderr) == MAX_ADDRESS_BYTES and not done.stdout
    assert REQUEST.size == 12 and set(FORMATS) >= {"tiff", "heic", "dicom"}


HEIC_EXTRA = "pillow_heif not installed: needs edgefl-derm[heic]"


def heic(image: np.ndarray, orientation: int = 1, bits: int = 8) -> bytes:
    heif = pytest.importorskip("pillow_heif", reason=HEIC_EXTRA)
    out = io.BytesIO()
    made = heif.from_pillow(Image.fromarray(image))
    made.info["exif"] = oriented(orientation).tobytes()
    made.save(out, quality=-1, chroma=444)  # lossless but for the change of colour space
    return out.getvalue()


@pytest.mark.parametrize("orientation", [1, 3, 6, 8])
def test_heic_gives_upright_pixels(reader, orientation):
    """Turned once: the file's own rotation counts, the EXIF tag beside it does not turn it again."""
    got = reader.decode(heic(scene(), orientation)).pixels
    wanted = UPRIGHT[orientation](scene())
    assert got.shape == wanted.shape
    assert np.abs(got.astype(int) - wanted.astype(int)).mean() < 3


def test_heic_that_is_damaged(reader):
    whole = heic(scene())
    assert code_of(reader, whole[: len(whole) // 2]) in ("truncated", "unreadable")
    assert code_of(reader, whole[:40] + bytes(400)) in ("truncated", "unreadable")
