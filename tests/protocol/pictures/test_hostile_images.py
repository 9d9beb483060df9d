"""Photographs that are damaged, hostile or too large; arbitrary bytes. Source: docs/security.md checks 34 and 35."""

import json
import random
import struct
import subprocess
import sys
import warnings
import zlib
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from tests.protocol.pictures.conftest import chunk, encoded, exif, photograph, png

from edgefl_protocol.errors import ImageError
from edgefl_protocol.pictures import imaging
from edgefl_protocol.pictures.imaging import decode, flattened

CODES = {"too_large", "empty", "unsupported_format", "truncated", "unreadable", "animated"}


def apng(frames: int) -> bytes:
    header = struct.pack(">IIBBBBB", 1, 1, 8, 0, 0, 0, 0)
    pixel = chunk(b"IDAT", zlib.compress(b"\x00\x00"))
    control = b"".join(chunk(b"fcTL", bytes(26)) for _ in range(frames))
    return png(header, chunk(b"acTL", struct.pack(">II", frames, 0)), pixel, control)


def one_bit_png(side: int) -> bytes:
    packer = zlib.compressobj(9)
    row = bytes(side // 8 + 1)
    body = b"".join(packer.compress(row) for _ in range(side)) + packer.flush()
    return png(struct.pack(">IIBBBBB", side, side, 1, 0, 0, 0, 0), chunk(b"IDAT", body))


def pixel_png(*before: bytes) -> bytes:
    return png(struct.pack(">IIBBBBB", 1, 1, 8, 0, 0, 0, 0), *before, chunk(b"IDAT", zlib.compress(b"\x00\x00")))


def bombs() -> dict[str, tuple[bytes, str]]:
    """Each hostile file with the code it must be refused with."""
    spectral = encoded(np.full((1_000, 1_000, 3), 255, np.uint8), "JPEG", progressive=True)
    scan = spectral[spectral.rindex(b"\xff\xda") : -2]
    comment = b"\xff\xfe\x00\x06\xff\xd9\xff\xd9"  # passed over by its length: no end (ITU-T T.81, B.2.4.5)
    return {
        "30,000 x 30,000 one-bit PNG": (one_bit_png(30_000), "too_large"),
        "compressed text of 200 MB": (
            pixel_png(chunk(b"zTXt", b"k\x00\x00" + zlib.compress(bytes(200_000_000), 9))),
            "too_large",
        ),
        "private chunk of 8 MB": (pixel_png(chunk(b"prIv", bytes(8_000_000))), "too_large"),
        "compressed profile of 200 MB": (
            pixel_png(chunk(b"iCCP", b"k\x00\x00" + zlib.compress(bytes(200_000_000), 9))),
            "too_large",
        ),
        "100,000-frame APNG": (apng(100_000), "animated"),
        "1,000,000 empty chunks": (pixel_png(chunk(b"teXt", b"") * 1_000_000), "too_large"),
        "20 MB and one byte": (encoded(photograph()).ljust(imaging.MAX_FILE_BYTES + 1, b"\x00"), "too_large"),
        "700 progressive scans": (spectral[:-2] + scan * 700 + b"\xff\xd9", "too_large"),
        "700 of them behind an end in a comment": (spectral[:-2] + comment + scan * 700 + b"\xff\xd9", "too_large"),
        "700 of them behind a marker of no use": (spectral[:-2] + b"\xff\x02" + scan * 700 + b"\xff\xd9", "too_large"),
        "JPEG of 65,500 x 65,500": (
            encoded(photograph(), "JPEG").replace(struct.pack(">HH", 48, 64), struct.pack(">HH", 65_500, 65_500)),
            "too_large",
        ),
        "FITS as .jpg": (b"SIMPLE  =                    T".ljust(2_880), "unsupported_format"),
        "EPS as .jpg": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "unsupported_format"),
        "PSD as .jpg": (b"8BPS\x00\x01" + bytes(64), "unsupported_format"),
        "GIF as .jpg": (encoded(photograph(), "GIF"), "unsupported_format"),
        "TIFF as .jpg": (encoded(photograph(), "TIFF"), "unsupported_format"),
        "WebP as .jpg": (encoded(photograph(), "WEBP"), "unsupported_format"),
        "nothing": (b"", "empty"),
    }


def test_bombs_are_refused_without_memory(tmp_path: Path) -> None:
    """docs/security.md check 35: each refused with its code in under 1 s of CPU, memory growth under 100 MB in all.

    Run in a process of its own, so that the peak of other tests does not hide growth here.
    """
    hostile = bombs()
    for index, (data, _) in enumerate(hostile.values()):
        (tmp_path / f"{index:03}").write_bytes(data)
    script = """
import json, sys, time
from pathlib import Path
from edgefl_client.memory import peak_memory_mib as peak  # that of pytest is none of it
from edgefl_protocol.errors import ImageError
from edgefl_protocol.pictures.imaging import decode
files = [p.read_bytes() for p in sorted(Path(sys.argv[1]).iterdir())]
before, rows = peak(), []
for data in files:
    started = time.process_time()
    try:
        decode(data)
        code = "accepted"
    except ImageError as error:
        code = error.code
    rows.append([code, time.process_time() - started, peak() - before])
print(json.dumps(rows))
"""
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    assert len(rows) == len(hostile)
    for (name, (_, expected)), (code, seconds, growth) in zip(hostile.items(), rows, strict=True):
        assert (name, code) == (name, expected)
        assert seconds < 1.0, name
        assert growth < 100, f"{name}: {growth} MB"


def mutated(data: bytes, rng: random.Random) -> bytes:
    changed = bytearray(data)
    kind = rng.randrange(5)
    place = rng.randrange(len(changed))
    if kind == 0:
        for _ in range(rng.randrange(1, 6)):
            changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    elif kind == 1:
        changed[place] = rng.randrange(256)
    elif kind == 2:
        del changed[place:]
    elif kind == 3:
        del changed[place : place + rng.randrange(1, 40)]
    else:
        changed[place:place] = rng.randbytes(rng.randrange(1, 40))
    return bytes(changed)


def test_mutated_images() -> None:
    """docs/security.md check 34: 1,000 damaged JPEG and PNG files, each an array or one ImageError of a known code."""
    rng = random.Random(20_260_734)
    image = photograph()
    alpha = np.dstack([image, image[:, :, 0]])
    seeds = [
        encoded(image, "JPEG", exif=exif(6)),
        encoded(image, "JPEG", progressive=True),
        encoded(Image.fromarray(image).convert("CMYK"), "JPEG"),
        encoded(image, exif=exif(3)),
        encoded(alpha),
        encoded(Image.fromarray(image).quantize(32)),
        encoded(image[:, :, 0].astype(np.uint16) * 256),
    ]
    codes: dict[str, int] = {}
    for index in range(1_000):
        try:
            got = decode(mutated(seeds[index % len(seeds)], rng))
            assert got.dtype == np.uint8
            assert got.ndim == 3
            assert got.shape[2] == 3
            codes["array"] = codes.get("array", 0) + 1
        except ImageError as error:
            codes[error.code] = codes.get(error.code, 0) + 1
    assert set(codes) <= CODES | {"array"}, codes
    assert codes["array"] > 50, codes  # the test would be blind if everything were refused
    assert codes["truncated"] > 50, codes
    assert codes["unreadable"] > 50, codes


@settings(max_examples=200)
@given(st.sampled_from([b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b""]), st.binary(max_size=200))
def test_arbitrary_bytes(start: bytes, rest: bytes) -> None:
    """docs/security.md check 34: bytes that only begin like an image end in one ImageError."""
    with pytest.raises(ImageError) as caught:
        decode(start + rest)
    assert caught.value.code in CODES


def test_threads_share_the_decoder() -> None:
    """Check (4) changes process-wide warning filters for a moment: in threads too, results and filters stay right."""
    files = [encoded(photograph(seed=seed), "JPEG") for seed in range(4)]
    expected = [decode(data) for data in files]
    filters = list(warnings.filters)
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(decode, files * 50))
    assert all(np.array_equal(got, expected[index % 4]) for index, got in enumerate(results))
    assert list(warnings.filters) == filters


def test_png_damage_is_seen() -> None:
    """Check (3): every single flipped byte of the picture's own chunks is refused by the checksum, none scored."""
    data = encoded(photograph(6, 6))
    for place in range(8, len(data) - 12):
        with pytest.raises(ImageError):
            decode(data[:place] + bytes([data[place] ^ 0x10]) + data[place + 1 :])


@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_a_jpeg_whose_rest_is_missing_is_refused(mode: str) -> None:
    """Check (7): cut anywhere and closed by an end marker, a baseline JPEG still decodes; nothing of it is scored."""
    picture = Image.fromarray(photograph(120, 160)).convert(mode)
    out = BytesIO()
    picture.save(out, "JPEG", quality=90)
    whole = out.getvalue()
    begin = whole.index(b"\xff\xda") + 20
    decode(whole)
    for place in range(begin, len(whole) - 60, (len(whole) - begin) // 9):
        damaged = whole[:place] + b"\xff\xd9"
        with Image.open(BytesIO(damaged)) as opened:
            opened.load()  # Pillow says nothing
        with pytest.raises(ImageError) as caught:
            decode(damaged)
        assert caught.value.code == "truncated"


def test_a_jpeg_whose_last_part_was_never_written_is_refused() -> None:
    """Check (6): a copy that stopped leaves zeros at the file's end, which decode to colours. A thumbnail has an end of
    its own (EXIF 2.32, 4.5.8), and so may what a phone appends, of which no byte counts (ITU-T T.81, B.1.1.3)."""
    small = encoded(photograph(16, 16), "JPEG")
    whole = encoded(photograph(120, 160), "JPEG", quality=96, subsampling=0, exif=exif(1) + small)
    begin = whole.rindex(b"\xff\xda") + 20
    assert small in whole and begin > whole.index(small) + len(small)
    for place in range(begin, len(whole) // 2, len(whole) // 9):
        unwritten = whole[:place] + bytes(len(whole) - place)
        with Image.open(BytesIO(unwritten)) as opened:
            opened.load()  # Pillow says nothing: there are zeros enough for all blocks
        with pytest.raises(ImageError, match="the JPEG has no end; copy the file again") as caught:
            decode(unwritten)
        assert caught.value.code == "truncated"
    np.testing.assert_array_equal(decode(whole + b"video\xff\xda" + bytes(99)), decode(whole))


@pytest.mark.parametrize("progressive", [False, True])
def test_the_video_behind_a_photograph_has_no_scans(progressive: bool) -> None:
    """Check (6): a motion photo. The two bytes of a scan's marker stand anywhere in a video, or in a thumbnail; behind
    its end marker a picture has no scans (ITU-T T.81, B.1.1.3 and B.1.1.4)."""
    small = encoded(photograph(16, 16), "JPEG")
    whole = encoded(photograph(120, 160), "JPEG", exif=exif(1) + small, progressive=progressive)
    video = b"\xff\xda" * (imaging.MAX_SCAN_PIXELS // (120 * 160) + 1)
    np.testing.assert_array_equal(decode(whole + video), decode(whole))


def test_a_grey_picture_and_a_grey_frame_are_whole() -> None:
    """The grey of missing data is no fault where a picture begins with it too."""
    grey = np.full((64, 96, 3), 128, np.uint8)
    np.testing.assert_array_equal(decode(encoded(grey, "JPEG")), grey)
    framed = grey.copy()
    framed[16:48, 24:72] = photograph(32, 48)
    assert decode(encoded(framed, "JPEG")).shape == grey.shape
    for drawn in (slice(None), slice(16, None)):  # padded on the right, and at the top as well
        margin = grey.copy()
        margin[drawn, :72] = photograph(64, 72)[drawn]
        assert decode(encoded(margin, "JPEG")).shape == grey.shape
    np.testing.assert_array_equal(decode(encoded(framed)), framed)


def test_too_many_pixels_of_an_opened_image() -> None:
    """Check (5) holds for an opened image too."""
    with pytest.raises(ImageError) as caught:
        flattened(Image.new("1", (8_000, 5_001)))
    assert caught.value.code == "too_large"
