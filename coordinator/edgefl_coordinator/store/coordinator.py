"""The coordinator as one object: its settings, store, keys and clock.

Guarantees: built once at start; everything else takes it as an argument. Keys are read from files that only their owner
can read. The clock is a field, so tests set it.
"""

import hmac
import json
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

from sqlalchemy import Connection

from edgefl_coordinator.settings import (
    CoordinatorHome,
    CoordinatorSettings,
    load_settings,
    settings_from_table,
    settings_to_table,
)
from edgefl_coordinator.store import revocations
from edgefl_coordinator.store.key_ring import SealingRing, load_ring
from edgefl_coordinator.store.statements import FACT
from edgefl_coordinator.store.store import SECRET_FILE_BYTES, Store, open_store
from edgefl_protocol.durable import read_private
from edgefl_protocol.envelopes.key_files import MAX_KEY_FILE_BYTES, signing_key_from_pem
from edgefl_protocol.envelopes.keys import SealingKey, SigningKey
from edgefl_protocol.errors import EdgeflError, KeyMaterialError
from edgefl_protocol.pae import pae
from edgefl_protocol.records.coordinator_records import make_key_record
from edgefl_protocol.records.root import join_chain

COUNTED: Final = "counted_settings"  # the fact that holds the settings that counted last
_PLACES: Final = ("database", "payloads")  # where the store lies; `restore` may put it elsewhere
_SETTLED_NS = 5_000_000_000  # since a file was changed: `set` has noted its change by then
INDEX_VALID_MS = 24 * 3600 * 1000


def wall_clock_ms() -> int:
    """Return Unix milliseconds."""
    return time.time_ns() // 1_000_000


@dataclass
class Keys:
    """The coordinator's own secrets; `coordinator_keys` changes them while requests read them."""

    signing: SigningKey  # signs replies, records and the index
    ring: SealingRing  # the sealing keys; replaced as a whole
    secret: bytes = field(repr=False)  # nonces and peer orders are derived from it; never leaves this process
    passphrase: bytes | None = field(default=None, repr=False)  # encrypts keys on the disk
    changing: threading.RLock = field(default_factory=threading.RLock, repr=False)  # held while a key is changed

    @property
    def sealing(self) -> SealingKey:
        """What members seal for now."""
        return self.ring.current


@dataclass
class Coordinator:
    """Everything a request or a command needs."""

    settings: CoordinatorSettings  # replaced as a whole by `edgefl-coordinator set` while requests read them
    store: Store
    keys: Keys
    clock: Callable[[], int] = wall_clock_ms
    serving: bool = False  # whether this process runs the rounds
    told_stuck: tuple[int, int, str] | None = None  # a round, when members were told how it stands, and the sentence
    seen: tuple[tuple[int, int], ...] = ()  # which files of settings and keys this process has read
    all_served: tuple[int, int] | None = None  # a round, and the members' changes until which nobody lacks a broadcast

    def keep_up(self) -> None:
        """Take over settings and keys that another process of this coordinator has changed; keep one's own meanwhile.

        What is not whole yet is looked at again the next time. What was changed by hand is not taken over, nor a
        signing key that no root set lists: the next `serve` says what is wrong with them.
        """
        if not self.store.database.shared or self.seen == (found := _files_seen(self.store.home)):
            return
        if not self.keys.changing.acquire(blocking=False):
            return
        try:
            with suppress(EdgeflError):
                settings, keys = load_settings(self.store.home), load_keys(self.store.home, self.keys.passphrase)
                with self.store.transaction() as connection:
                    counted, root = counted_settings(connection), revocations.newest(connection)
                own = keys.signing.key_id
                listed = own == self.keys.signing.key_id or (root is not None and root.coordinator(own) is not None)
                noted = counted is None or to_count(counted) == to_count(settings)
                self.keys.ring = keys.ring
                self.keys.signing = keys.signing if listed else self.keys.signing
                self.settings = settings if noted else self.settings
                if (listed and noted) or time.time_ns() - max(changed for _, changed in found) > _SETTLED_NS:
                    self.seen = found
        finally:
            self.keys.changing.release()

    def derive(self, purpose: str, *parts: str) -> bytes:
        """Return 32 bytes that only this coordinator can compute, the same each time for the same words."""
        message = pae(purpose.encode(), *(part.encode() for part in parts))
        return hmac.digest(self.keys.secret, message, "sha256")

    def key_record(self) -> bytes:
        """Return the signed record of the current keys."""
        now_ms, ring = self.clock(), self.keys.ring
        key, until_ms = ring.current.public_key, ring.record_until(now_ms)
        return make_key_record(self.keys.signing, self.settings.federation, key, ring.number, now_ms, until_ms)

    def root_chain(self) -> bytes:
        """Return the published root sets, one on each line; empty where there are none."""
        with self.store.transaction() as connection:
            return join_chain(revocations.chain(connection))


def to_count(settings: CoordinatorSettings) -> dict[str, Any]:
    """Return the table of settings as the store notes them: without where it lies."""
    return {name: value for name, value in settings_to_table(settings).items() if name not in _PLACES}


def counted_settings(connection: Connection) -> CoordinatorSettings | None:
    """Return the settings that counted last; None before the first start, and where another version noted others."""
    noted = FACT.value(connection, key=COUNTED)
    try:
        return None if noted is None else settings_from_table(json.loads(noted))
    except ValueError:
        return None


def _files_seen(home: CoordinatorHome) -> tuple[tuple[int, int], ...]:
    """Tell the files of settings and keys as they are now from those of before: each change makes another file."""
    found = []
    for path in (home.config, home.sealing_ring, home.signing):
        with suppress(OSError):
            status = path.stat()
            found.append((status.st_ino, status.st_mtime_ns))
    return tuple(found)


def load_keys(home: CoordinatorHome, passphrase: bytes | None = None) -> Keys:
    """Read the keys of a home.

    A `StorageError` where a file is missing, or others can read it; a `KeyMaterialError` where it holds no such key, or
    the passphrase does not fit.
    """
    path = home.keys / "secret.bin"
    secret = read_private(path, SECRET_FILE_BYTES)
    if len(secret) != SECRET_FILE_BYTES:
        raise KeyMaterialError(
            f"{path} has {len(secret)} bytes, but must have {SECRET_FILE_BYTES}; restore it from the backup"
        )
    try:
        signing = signing_key_from_pem(read_private(home.signing, MAX_KEY_FILE_BYTES), passphrase)
        return Keys(signing=signing, ring=load_ring(home, passphrase), secret=secret, passphrase=passphrase)
    except KeyMaterialError as error:
        raise KeyMaterialError(f"{home.keys}: {error}", error.code) from error


def owner_of(secret: bytes) -> str:
    """Return what says, in a database, whose it is: only the coordinator with this secret can compute it."""
    return hmac.digest(secret, pae(b"store"), "sha256").hex()


def open_coordinator(
    home: CoordinatorHome,
    passphrase: bytes | None = None,
    clock: Callable[[], int] = wall_clock_ms,
    wait_s: float = 0.0,
    *,
    joins: bool = False,
) -> Coordinator:
    """Open settings, keys and store of a home; close it with `store.close()`.

    Args:
        passphrase: of the keys.
        clock: gives Unix milliseconds.
        wait_s: how long to wait for another process.
        joins: serve beside other processes, where the store can be shared.

    Raises:
        OperatorError: settings are wrong, or another process has the store open.
        StorageError: a file cannot be read.
        KeyMaterialError: a key file is unusable.
    """
    seen, settings = _files_seen(home), load_settings(home)
    store = open_store(home, wait_s, settings.database, settings.payloads, joins=joins)
    try:
        # Only now: whoever had the store open may have changed the keys.
        coordinator = Coordinator(settings, store, load_keys(home, passphrase), clock, seen=seen)
        store.claim(owner_of(coordinator.keys.secret))
        if store.database.shared and not joins:
            store.sweep(opens=True)
        return coordinator
    except BaseException:
        store.close()
        raise
