"""The archive around a bundle: read once, and nothing but the one canonical form. Source: docs/security.md check 28."""

import hashlib
import io
import json
import struct
import subprocess
import sys
import zipfile
import zlib
from pathlib import Path
from typing import Any

import pytest
from tests.protocol.bundle.conftest import code_of

from edgefl_protocol.bundle.archive import open_archive, read_archive, write_archive
from edgefl_protocol.errors import BundleError


class Watched(io.BytesIO):
    """A file that notes how often each of its bytes was read."""

    def __init__(self, data: bytes) -> None:
        super().__init__(data)
        self.times = [0] * len(data)

    def read(self, size: int | None = -1, /) -> bytes:
        begin = self.tell()
        content = super().read(size)
        for place in range(begin, begin + len(content)):
            self.times[place] += 1
        return content


def test_members_and_hashes_are_those_of_the_bytes(good: Any) -> None:
    """hashlib over the file and over each member is the oracle."""
    archive = open_archive(io.BytesIO(good.data))
    assert archive.members == read_archive(good.data) and list(archive.members)[:1] == ["manifest.json"]
    assert archive.sha256 == hashlib.sha256(good.data).hexdigest()
    assert archive.hashes == {name: hashlib.sha256(content).hexdigest() for name, content in archive.members.items()}


def test_every_byte_of_a_member_is_read_once(good: Any) -> None:
    """docs/security.md, attack list 10: no byte is checked in one reading and used from another."""
    file = Watched(good.data)
    open_archive(file)
    assert file.times[:4] == [2] * 4  # the mark of an archive, looked at before its header is
    assert set(file.times[4:]) == {1}


def test_a_file_that_becomes_shorter_is_refused(good: Any) -> None:
    """docs/security.md, attack list 10: what is missing while reading is noticed, whatever the directory claims."""

    class Shrinking(io.BytesIO):
        def read(self, size: int | None = -1, /) -> bytes:
            return super().read(size)[:100]

    with pytest.raises(BundleError) as caught:
        open_archive(Shrinking(good.data))
    assert caught.value.code == "bad_archive"


def test_a_refused_file_is_refused_like_its_bytes(good: Any, tmp_path: Any) -> None:
    """docs/security.md check 28: cut anywhere, or with a byte turned anywhere, file and bytes get the same answer."""
    for place in range(0, len(good.data), 97):
        for wrong in (good.data[:place], good.data[:place] + bytes([good.data[place] ^ 1]) + good.data[place + 1 :]):
            path = tmp_path / "wrong.edgefl"
            path.write_bytes(wrong)
            with pytest.raises(BundleError) as from_bytes:
                read_archive(wrong)
            with path.open("rb") as file, pytest.raises(BundleError) as from_file:
                open_archive(file)
            assert str(from_file.value) == str(from_bytes.value) and from_file.value.code == from_bytes.value.code


def zipped(entries: list[tuple[zipfile.ZipInfo, bytes]], method: int = zipfile.ZIP_STORED) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", method) as archive:
        for info, content in entries:
            info.compress_type = method
            archive.writestr(info, content)
    return stream.getvalue()


def info(name: str, mode: int = 0o100644, system: int = 3) -> zipfile.ZipInfo:
    made = zipfile.ZipInfo(name)
    made.external_attr = mode << 16
    made.create_system = system
    return made


def hostile_archives(good: Any) -> dict[str, bytes]:
    members = read_archive(good.data)
    plain = [(info(name), content) for name, content in members.items()]

    def renamed(name: str, mode: int = 0o100644) -> bytes:
        return zipped([*plain[:-1], (info(name, mode), plain[-1][1])])

    end = struct.unpack_from("<I", good.data, len(good.data) - 6)[0]
    second = good.data.index(b"PK\x03\x04", 4)
    entry = good.data.index(b"PK\x01\x02", good.data.index(b"PK\x01\x02") + 4)
    overlap = bytearray(good.data)
    struct.pack_into("<I", overlap, entry + 42, 0)  # the second entry points at the first member
    hidden = bytearray(good.data)
    hidden[end:end] = b"hidden"
    struct.pack_into("<I", hidden, len(hidden) - 6, end + 6)
    encrypted = bytearray(good.data)
    encrypted[second + 6] |= 1
    bomb = zlib.compressobj(1, zlib.DEFLATED, -15)
    deflated = b"".join(bomb.compress(bytes(1 << 20)) for _ in range(300)) + bomb.flush()
    stored_bomb = bytearray(zipped([*plain, (info("tokenizer.json"), deflated)]))
    for mark, at in ((b"PK\x03\x04", 8), (b"PK\x01\x02", 10)):
        struct.pack_into("<H", stored_bomb, stored_bomb.rindex(mark) + at, zipfile.ZIP_DEFLATED)
    many = zipped([(info(f"m{i}.json"), b"") for i in range(65_535)])
    return {
        "parent folder": renamed("../../evil.json"),
        "absolute": renamed("/tmp/evil.json"),
        "drive letter": renamed("C:\\evil.json"),
        "backslash": renamed("a\\..\\..\\evil.json"),
        "folder": renamed("sub/evil.json"),
        "NUL in the name": renamed("evil.json_.txt").replace(b"evil.json_", b"evil.json\x00"),
        "symbolic link": renamed("weights.safetensors", 0o120777),
        "device": renamed("weights.safetensors", 0o020666),
        "named pipe": renamed("weights.safetensors", 0o010666),
        "folder entry": renamed("evil/", 0o040755),
        "deflated": zipped(plain, zipfile.ZIP_DEFLATED),
        "deflated bomb": bytes(stored_bomb),
        "65,535 members": many,
        "overlap": bytes(overlap),
        "hidden bytes": bytes(hidden),
        "leading bytes": b"#!/bin/sh\n" + good.data,
        "encrypted flag": bytes(encrypted),
        "comment": good.data[:-2] + b"\x04\x00evil",
        "other date": zipped(
            [*plain[:-1], (zipfile.ZipInfo("weights.safetensors", (2026, 1, 1, 0, 0, 0)), plain[-1][1])]
        ),
    }


def test_zip_slip_set(good: Any, tmp_path: Path) -> None:
    """docs/security.md check 28: none loads, no file appears anywhere near, memory growth under 100 MB in all.

    A hard link cannot be said in a zip; a name that stands twice has its own test below.
    """
    archives = hostile_archives(good)
    assert good.data not in archives.values()
    inputs, inside = tmp_path / "in", tmp_path / "a" / "b"
    inputs.mkdir()
    inside.mkdir(parents=True)
    for index, data in enumerate(archives.values()):
        (inputs / f"{index:03}").write_bytes(data)
    script = """
import json, sys
from pathlib import Path
from edgefl_client.memory import peak_memory_mib as peak  # that of pytest is none of it
from edgefl_protocol.bundle import load_bundle
from edgefl_protocol.errors import BundleError
files = [p.read_bytes() for p in sorted(Path(sys.argv[1]).iterdir())]
before, codes = peak(), []
for data in files:
    try:
        load_bundle(data, [bytes.fromhex(sys.argv[2])], int(sys.argv[3]))
        codes.append("loaded")
    except BundleError as error:
        codes.append(error.code)
print(json.dumps([codes, peak() - before]))
"""
    arguments = [sys.executable, "-c", script, str(inputs), good.key.public.hex(), str(good.now_ms)]
    done = subprocess.run(arguments, capture_output=True, text=True, check=False, cwd=inside)
    assert done.returncode == 0, done.stderr
    codes, growth = json.loads(done.stdout)
    for name, code in zip(archives, codes, strict=True):
        assert code in ("bad_archive", "truncated"), name
    assert growth < 100, f"{growth} MB"
    assert sorted(p.name for p in tmp_path.rglob("*") if p.is_file()) == sorted(p.name for p in inputs.iterdir())


def test_duplicate_member(good: Any) -> None:
    """docs/security.md check 28: a name that stands twice, in an archive that is canonical in all else."""
    data = write_archive({"card.json": b"{}", "cord.json": b"{}"}).replace(b"cord.json", b"card.json")
    assert code_of(lambda: read_archive(data)) == "bad_archive"


def test_write_archive_refuses(good: Any) -> None:
    """The writer makes no archive that the reader would refuse."""
    for name in ("../a.json", "a/b.json", "A.json", "a", ".json", ""):
        assert code_of(lambda name=name: write_archive({name: b""})) == "bad_archive"
    assert code_of(lambda: write_archive({f"m{i}.json": b"" for i in range(17)})) == "bad_archive"
