"""The archive around a bundle, read from a file: every byte once, and as it is read from memory."""

import hashlib
import io
from typing import Any

import pytest

from edgefl_protocol.archive import open_archive, read_archive
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
