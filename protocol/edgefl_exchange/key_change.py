"""New keys of a member on the disk, so that a crash at any step leaves working keys.

    next-signing.key, next-sealing.key   made and flushed before anything is sent; the old ones go on counting
    outbox.key                           what the outbox is encrypted with, which does not change with the keys
    changed                              the coordinator has taken the new keys: from here on the change is carried out

The steps, each a whole file: (1) the next keys; (2) the coordinator's signed answer; (3) `outbox.key`; (4) `changed`;
(5) the next keys take the names of the old; (6) `changed` goes. Before (4) the old keys are used, and the coordinator
takes them for 7 days more; from (4) on whoever opens the folder finishes (5) and (6) first. An answer that never came
is asked for again under the old key, and where that has expired under the new one.

Source: docs/security.md 2.6.4, check 23.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Final

from edgefl_protocol.durable import flush_to_disk, read_private, write_atomic
from edgefl_protocol.envelopes.key_files import (
    MAX_KEY_FILE_BYTES,
    sealing_key_from_pem,
    sealing_key_to_pem,
    signing_key_from_pem,
    signing_key_to_pem,
)
from edgefl_protocol.envelopes.keys import (
    SUITE_X25519,
    SealingKey,
    SigningKey,
    generate_sealing_key,
    generate_signing_key,
)
from edgefl_protocol.errors import StorageError

SIGNING: Final = "signing.key"
SEALING: Final = "sealing.key"
_OUTBOX: Final = "outbox.key"
_CHANGED: Final = "changed"
_NEXT: Final = "next-"


def load_keys(folder: Path, passphrase: bytes | None) -> tuple[SigningKey, SealingKey]:
    """Read the keys that count."""
    return _load(folder, "", passphrase)


def load_next(folder: Path, passphrase: bytes | None) -> tuple[SigningKey, SealingKey] | None:
    """Read the keys of a change that was begun, or None where there is none."""
    if not all((folder / f"{_NEXT}{name}").exists() for name in (SIGNING, SEALING)):
        return None
    return _load(folder, _NEXT, passphrase)


def make_next(folder: Path, suite: int, passphrase: bytes | None) -> tuple[SigningKey, SealingKey]:
    """Step (1): make the next keys where there are none, and read them back from the disk.

    Raises:
        StorageError: the disk is full; the keys that count are untouched.
    """
    makers: dict[str, Callable[[], bytes]] = {
        SIGNING: lambda: signing_key_to_pem(generate_signing_key(), passphrase),
        SEALING: lambda: sealing_key_to_pem(generate_sealing_key(suite), passphrase),
    }
    for name, make in makers.items():
        if not (folder / f"{_NEXT}{name}").exists():
            write_atomic(folder / f"{_NEXT}{name}", make(), mode=0o600)
    return _load(folder, _NEXT, passphrase)


def drop_next(folder: Path) -> None:
    """Give a change up: the coordinator refused it."""
    for name in (SIGNING, SEALING):
        _remove(folder / f"{_NEXT}{name}")


def load_outbox_key(folder: Path, passphrase: bytes | None) -> bytes | None:
    """Read the outbox's own key, or None where the keys never changed and it follows from the sealing key."""
    path = folder / _OUTBOX
    if not path.exists():
        return None
    return sealing_key_from_pem(read_private(path, MAX_KEY_FILE_BYTES), passphrase).secret


def commit_change(folder: Path, outbox_key: bytes, passphrase: bytes | None) -> None:
    """Do steps (3) to (6), after the coordinator's signed answer.

    Raises:
        StorageError: the disk is full; the keys that count are untouched, or the change is finished at the next start.
    """
    if not (folder / _OUTBOX).exists():  # 32 secret bytes in the form of a sealing key: one form, one passphrase
        kept = SealingKey(SUITE_X25519, outbox_key)
        write_atomic(folder / _OUTBOX, sealing_key_to_pem(kept, passphrase), mode=0o600)
    write_atomic(folder / _CHANGED, b"1\n", mode=0o600)
    finish_change(folder)


def finish_change(folder: Path) -> None:
    """Do steps (5) and (6), where (4) was done."""
    if not (folder / _CHANGED).exists():
        return
    try:
        for name in (SIGNING, SEALING):
            following = folder / f"{_NEXT}{name}"
            if following.exists():
                following.replace(folder / name)
        flush_to_disk(folder)
    except OSError as error:
        raise StorageError(f"cannot change the keys in {folder}: {error.strerror}", "storage") from error
    _remove(folder / _CHANGED)


def remove_change(folder: Path) -> None:
    """Remove every trace of changes, for a new enrolment."""
    for path in sorted(folder.iterdir()):
        if re.fullmatch(rf"{_NEXT}.*\.key|{re.escape(_OUTBOX)}|{_CHANGED}", path.name):
            _remove(path)


def _load(folder: Path, prefix: str, passphrase: bytes | None) -> tuple[SigningKey, SealingKey]:
    signing = read_private(folder / f"{prefix}{SIGNING}", MAX_KEY_FILE_BYTES)
    sealing = read_private(folder / f"{prefix}{SEALING}", MAX_KEY_FILE_BYTES)
    return signing_key_from_pem(signing, passphrase), sealing_key_from_pem(sealing, passphrase)


def _remove(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise StorageError(f"cannot remove {path}: {error.strerror}", "storage") from error
