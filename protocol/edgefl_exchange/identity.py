"""A member's private keys and sequence numbers on the disk.

* Keys lie in one folder (mode 0700), each file 0600 and refused when others can read it; with a passphrase they are
  encrypted.
* The key of the outbox is derived from the first sealing key and lies nowhere until that key is changed; then it lies
  in `outbox.key`, kept as the keys are.
* A sequence number is never used twice, not even after a crash: numbers are reserved on the disk in blocks of 256
  before the first of a block is used. A lock keeps a second process (cron and a hand) from sharing the key.

Source: docs/security.md, replay window, and keys at rest; RFC 5869 (HKDF).
"""

from collections.abc import Callable
from pathlib import Path
from typing import Self

from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from edgefl_exchange import key_change
from edgefl_exchange.errors import ExchangeError
from edgefl_exchange.key_change import SEALING, SIGNING
from edgefl_protocol.durable import read_private, write_atomic
from edgefl_protocol.envelopes.key_files import sealing_key_to_pem, signing_key_to_pem
from edgefl_protocol.envelopes.keys import (
    DEFAULT_SUITE,
    SealingKey,
    SigningKey,
    generate_sealing_key,
    generate_signing_key,
)
from edgefl_protocol.errors import StorageError
from edgefl_protocol.lock_file import LockFile

BLOCK = 256  # sequence numbers reserved at a time
MAX_SEQUENCE = 2**53 - 1
MAX_JUMP = 2**32
LOCK_WAIT_S = 10.0
_LOCK = "lock"
_OUTBOX_LABEL = b"eflo1/outbox"


class SequenceNumbers:
    """The sequence numbers of one signing key, reserved on the disk."""

    def __init__(self, folder: Path, key_id: str, is_held: Callable[[], bool]) -> None:
        self._file = folder / f"sequence-{key_id[:16]}"
        self._is_held = is_held
        self._next = self._end = 0  # of the block reserved by this process

    def following(self) -> int:
        """Return a number that was never used with this key."""
        if self._next == self._end:
            self._reserve(self._read())
        number = self._next
        self._next += 1
        return number

    def jump_above(self, highest: int) -> None:
        """Continue above what the coordinator has seen; see `Identity.jump_above`."""
        here = max(self._next, self._read())
        if highest + BLOCK - here > MAX_JUMP or highest + 2 * BLOCK > MAX_SEQUENCE:
            raise ExchangeError(
                f"the coordinator asks for sequence numbers above {highest}, but this key has reached {here}, and a "
                f"jump of more than {MAX_JUMP} is refused; ask the operator for a new invite",
                code="seq_jump",
            )
        self._reserve(max(here, highest + BLOCK))

    def _read(self) -> int:
        if not self._file.exists():
            return 1
        text = read_private(self._file, 32).decode("ascii", "replace")
        # The line end shows that the number is whole: the first digits of one are a lower number, used before.
        if not text.endswith("\n") or not text[:-1].isdigit() or not 1 <= int(text) <= MAX_SEQUENCE:
            raise StorageError(f"{self._file} is damaged; ask the operator for a new invite", "damaged")
        return int(text)

    def _reserve(self, start: int) -> None:
        if not self._is_held():
            raise ExchangeError("these keys are closed already", code="closed")
        write_atomic(self._file, f"{start + BLOCK}\n".encode("ascii"), mode=0o600)
        self._next, self._end = start, start + BLOCK


class Successor:
    """The next keys of a member, to speak with before they count here."""

    def __init__(self, keys: tuple[SigningKey, SealingKey], old: SealingKey, numbers: SequenceNumbers) -> None:
        self.signing, self.sealing = keys
        self.opening = [self.sealing, old]  # an answer may be sealed for either
        self._numbers = numbers

    def next_sequence(self) -> int:
        """See `Identity.next_sequence`."""
        return self._numbers.following()

    def jump_above(self, highest: int) -> None:
        """See `Identity.jump_above`."""
        self._numbers.jump_above(highest)


class Identity:
    """The private half of a member, held by this process alone until `close`.

    A change of keys that was cut off is finished first (`key_change`).

    Args:
        lock_wait_s: how long to wait for another process to let go.

    Raises:
        ExchangeError: another process holds the keys.
    """

    def __init__(self, folder: Path, passphrase: bytes | None = None, lock_wait_s: float = LOCK_WAIT_S) -> None:
        self._folder = folder
        self._passphrase = passphrase
        self._following: SealingKey | None = None  # of a change that waits for the coordinator's answer
        self._lock = _acquire(folder / _LOCK, lock_wait_s)
        try:
            key_change.finish_change(folder)
            self._load()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let other processes use the keys."""
        self._lock.close()

    @property
    def opening(self) -> list[SealingKey]:
        """Sealing keys that an answer may be sealed for: this one, and the next where a change was begun."""
        return [self.sealing, *([] if self._following is None else [self._following])]

    @property
    def is_changing(self) -> bool:
        """Whether next keys wait for the coordinator's answer."""
        return self._following is not None

    def next_sequence(self) -> int:
        """Return a sequence number that was never used with this key."""
        return self._numbers.following()

    def jump_above(self, highest: int) -> None:
        """Continue above what the coordinator has seen, after a device was restored from an older image.

        Raises:
            ExchangeError: the jump is larger than 2^32, which no restored device needs.
        """
        self._numbers.jump_above(highest)

    def begin_change(self) -> Successor:
        """Make the next keys on the disk, or take those of a change that was begun; the old ones go on counting."""
        keys = key_change.make_next(self._folder, self.sealing.suite, self._passphrase)
        self._following = keys[1]
        return Successor(keys, self.sealing, SequenceNumbers(self._folder, keys[0].key_id, self._is_held))

    def commit_change(self) -> None:
        """Use the next keys from now on: the coordinator's signed answer says that it takes them.

        Raises:
            StorageError: the disk is full; at the next start the change is finished or the old keys count.
        """
        key_change.commit_change(self._folder, self.outbox_key, self._passphrase)
        self._load()

    def drop_change(self) -> None:
        """Give a change up that the coordinator refused; the keys that count stay."""
        key_change.drop_next(self._folder)
        self._following = None

    def _load(self) -> None:
        self.signing, self.sealing = key_change.load_keys(self._folder, self._passphrase)
        kept = key_change.load_outbox_key(self._folder, self._passphrase)
        self.outbox_key = _derive(_OUTBOX_LABEL, self.sealing.secret) if kept is None else kept
        following = key_change.load_next(self._folder, self._passphrase)
        self._following = None if following is None else following[1]
        self._numbers = SequenceNumbers(self._folder, self.signing.key_id, self._is_held)

    def _is_held(self) -> bool:
        return self._lock.is_open


def create_identity(folder: Path, suite: int = DEFAULT_SUITE, passphrase: bytes | None = None) -> None:
    """Make a member's keys in an existing folder of mode 0700, of sealing suite 1 or 2; keys that are there stay."""
    makers: dict[str, Callable[[], bytes]] = {
        SIGNING: lambda: signing_key_to_pem(generate_signing_key(), passphrase),
        SEALING: lambda: sealing_key_to_pem(generate_sealing_key(suite), passphrase),
    }
    for name, make in makers.items():
        if not (folder / name).exists():
            write_atomic(folder / name, make(), mode=0o600)


def remove_identity(folder: Path) -> None:
    """Remove a member's keys and sequence numbers, so that a new enrolment starts afresh."""
    key_change.remove_change(folder)
    for path in [folder / name for name in (SIGNING, SEALING)] + sorted(folder.glob("sequence-*")):
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise StorageError(f"cannot remove {path}: {error.strerror}", "storage") from error


def _derive(label: bytes, secret: bytes) -> bytes:
    """32 bytes that only the holder of a secret can compute, for the one use that the label names."""
    return HKDF(hashes.SHA256(), length=32, salt=None, info=label).derive(secret)


def _acquire(path: Path, wait_s: float) -> LockFile:
    busy = ExchangeError(
        f"another edgefl process has used this member's keys for {wait_s:g} s; try again when it is done",
        code="keys_in_use",
    )
    try:
        return LockFile(path, busy, wait_s=wait_s)
    except OSError as error:
        raise StorageError(f"cannot write {path}: {error.strerror}", "storage") from error
