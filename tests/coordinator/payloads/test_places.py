"""The contract of the place where payloads lie, on the disk and in S3 (JuiceFS's gateway: MinIO's server, no mock).

Expected is what was written, byte for byte. Source: docs/security.md, reliability; docs/decisions/0061.
"""

import itertools
import time
from collections.abc import Callable
from typing import Any

import obstore
import pytest
from tests.coordinator.kept_blobs import blob_names

from edgefl_coordinator.payloads.disk import DiskPayloads
from edgefl_protocol.errors import StorageError

pytestmark = pytest.mark.both_places
CHUNK = 64 * 2**10  # of sealed payloads, docs/security.md 2.2
SIZES = [0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK, 9 * 2**20]  # the last is sent in parts
SAID = b"a secret of clinic-a "


def content(size: int) -> bytes:
    return (SAID * (size // len(SAID) + 1))[:size]


@pytest.fixture
def store(make_coordinator: Callable[..., Any]) -> Any:
    return make_coordinator().store


def held(payloads: Any, name: str) -> bytes:
    """What lies there, as whoever runs the place sees it."""
    if isinstance(payloads, DiskPayloads):
        return (payloads._folder / name).read_bytes()
    return bytes(obstore.get(payloads._store, f"payloads/{name}").bytes())


def spoil(payloads: Any, name: str, data: bytes) -> None:
    """Put something else in its place."""
    if isinstance(payloads, DiskPayloads):
        (payloads._folder / name).write_bytes(data)
    else:
        obstore.put(payloads._store, f"payloads/{name}", data)


@pytest.mark.parametrize("size", SIZES)
def test_what_was_put_is_there(store, tmp_path, size) -> None:
    """Whole, in pieces, by offset and as a file; and from a file as from memory."""
    data = content(size)
    (tmp_path / "made").write_bytes(data)
    for blob in (store.put_blob(data), *store.adopt([tmp_path / "made"])):
        assert (store.get_blob(blob.name), b"".join(store.pieces(blob.name)), blob.size) == (data, data, size)
        assert store.payloads.size(blob.name) == size
        assert store.file_of(blob.name, tmp_path / "spare").read_bytes() == data
        with store.payloads.reading(blob.name, 1000) as read:
            for offset in (0, 1, CHUNK - 1, CHUNK, 2 * CHUNK + 5, size - 1, size, size + 1):
                assert read(max(0, offset), 1000) == data[max(0, offset) :][:1000]
        with store.payloads.reading(blob.name, size) as read:
            found = [read(offset, CHUNK) for offset in range(0, size, CHUNK)]
        assert b"".join(found) == data


def test_putting_again_changes_nothing(store) -> None:
    """A put whose answer was lost is done again."""
    blob = store.put_blob(b"one")
    for _ in range(2):
        store.payloads.put(blob.name, b"one")
    assert store.get_blob(blob.name) == b"one" and blob_names(store) == {blob.name}


def test_equal_content_has_names_of_its_own(store) -> None:
    """What one row lets go of is not another's."""
    one, two = store.put_blob(b"same"), store.put_blob(b"same")
    store.drop_blobs([one.name, "0" * 32 + "-" + "0" * 16])  # and one that is not there
    assert store.get_blob(two.name) == b"same" and blob_names(store) == {two.name}
    for ask in (store.get_blob, store.payloads.size, lambda name: list(store.pieces(name))):
        with pytest.raises(StorageError) as missing:
            ask(one.name)
        assert missing.value.code == "missing"


@pytest.mark.parametrize("order", list(itertools.permutations([(0, 10), (0, 40), (30, 70)])))
def test_pieces_of_an_upload_in_any_order(store, order) -> None:
    """Two that come at once may overlap, and the shorter may come last: what was acknowledged is there."""
    data = bytes(range(100))
    name = store.new_upload()
    for offset, end in order:
        store.payloads.put_piece(name, offset, data[offset:end])
    store.payloads.put_piece(name, 30, data[30:70])  # once more
    assert b"".join(store.payloads.upload(name)) == data[:70]
    assert blob_names(store) == {name}
    store.drop_blobs([name])
    assert blob_names(store) == set()


@pytest.mark.parametrize("size", [1, CHUNK, 3 * CHUNK])
@pytest.mark.parametrize("harm", ["cut", "changed", "lengthened", "emptied", "exchanged"])
def test_a_payload_that_was_cut_or_changed_is_refused(store, tmp_path, size, harm) -> None:
    """A typed error, whoever reads; its text holds nothing of what lies there."""
    blob, other = store.put_blob(content(size)), b""
    if harm == "exchanged":
        second = store.put_blob(content(size)[::-1] + b"!")
        other = held(store.payloads, second.name)
    lies, middle = held(store.payloads, blob.name), size // 2
    flipped = lies[:middle] + bytes([lies[middle] ^ 1]) + lies[middle + 1 :]
    harmed = {"cut": lies[:-1], "changed": flipped, "lengthened": lies + b"x", "emptied": b"", "exchanged": other}
    spoil(store.payloads, blob.name, harmed[harm])
    for ask in (
        store.get_blob,
        lambda name: list(store.pieces(name)),
        lambda name: store.file_of(name, tmp_path / "spare"),
    ):
        with pytest.raises(StorageError) as damaged:
            ask(blob.name)
        assert damaged.value.code == "damaged" and len(str(damaged.value).splitlines()) == 1
        assert "secret" not in str(damaged.value)


def test_a_bound_is_kept(store) -> None:
    """Nobody reads more than asked for."""
    blob = store.put_blob(bytes(100))
    assert len(store.get_blob(blob.name, 100)) == 100
    with pytest.raises(StorageError) as long:
        store.get_blob(blob.name, 99)
    assert long.value.code == "too_large"


def test_names_by_age(store, monkeypatch) -> None:
    """A sweep leaves what another process may be about to name."""
    blob, name = store.put_blob(b"x"), store.new_upload()
    store.payloads.put_piece(name, 0, b"y")
    assert store.payloads.names() == {blob.name, name}
    assert store.payloads.names(time.time() - 60) == set()
    assert store.payloads.names(time.time() + 60) == {blob.name, name}
    monkeypatch.setattr("edgefl_coordinator.store.store._OLD_S", -60)  # where the place is shared, an hour
    assert store.sweep() == 2 and store.payloads.names() == set()
