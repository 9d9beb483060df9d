"""What a federation vouches for on this device: its root set and its list of revoked keys, as files.

    root.record      the newest root set, verified when it came
    revoked.record   the newest list of revoked keys, verified when it came

Both lie in the membership's folder (mode 0600). Guarantees: `save_*` is called with what was verified; what is read
back has its form, and a root set still carries its own threshold of signatures; anything else is one sentence.
Loading this module loads no network and no numpy, so that a device which only scores pays nothing for it.
"""

from pathlib import Path

from edgefl_protocol.durable import read_private, write_atomic
from edgefl_protocol.errors import RecordError, StorageError
from edgefl_protocol.records.coordinator_records import MAX_RECORD_BYTES
from edgefl_protocol.records.revocation import RevokedKeys, unverified_revoked
from edgefl_protocol.records.root import Root, check_signed, unverified_root

_ROOT, _REVOKED = "root.record", "revoked.record"


def record_files(folder: Path) -> tuple[Path, Path]:
    """Name the files of root set and list of revoked keys."""
    return folder / _ROOT, folder / _REVOKED


def save_root(folder: Path, record: bytes) -> None:
    """Keep a verified root set."""
    write_atomic(folder / _ROOT, record, mode=0o600)


def load_root(folder: Path) -> Root | None:
    """Read the root set that counts here, or None where none ever came."""
    record = _read(folder / _ROOT)
    if record is None:
        return None
    try:
        root = unverified_root(record)
        check_signed(record, root)
    except RecordError as error:
        raise _damaged(folder / _ROOT) from error
    return root


def save_revoked(folder: Path, record: bytes) -> None:
    """Keep a verified list of revoked keys."""
    write_atomic(folder / _REVOKED, record, mode=0o600)


def load_revoked(folder: Path) -> RevokedKeys | None:
    """Read the newest list of revoked keys, however old, or None where none ever came."""
    record = _read(folder / _REVOKED)
    if record is None:
        return None
    try:
        return unverified_revoked(record)
    except RecordError as error:
        raise _damaged(folder / _REVOKED) from error


def _read(path: Path) -> bytes | None:
    """Read a record; None only where there is none: one that cannot be reached may name the very key that counts."""
    try:
        return read_private(path, MAX_RECORD_BYTES)
    except StorageError as error:
        if error.code != "missing":
            raise
        return None


def _damaged(path: Path) -> StorageError:
    return StorageError(f"{path} is damaged; remove it and run edgefl sync, which fetches it again", "damaged")
