"""The coordinator's own keys over time: its sealing key weekly, its signing key when the root set says so.

Guarantees: keys are on the disk before they are used, and each change leaves one audit row, also where the process was
killed between the two. A new signing key counts only once a published root set lists it: members then take it in place
of the one their invite pinned. `serve` refuses any other. Source: docs/security.md 2.6.4 and 2.6.6, check 23.
"""

import json
from dataclasses import replace

from sqlalchemy import Connection, select

from edgefl_coordinator.errors import OperatorError
from edgefl_coordinator.store import audit, revocations
from edgefl_coordinator.store.coordinator import Coordinator
from edgefl_coordinator.store.key_ring import save_ring
from edgefl_coordinator.store.tables import audit as log
from edgefl_protocol.durable import flush_to_disk, read_private, write_atomic
from edgefl_protocol.envelopes.key_files import (
    MAX_KEY_FILE_BYTES,
    public_key_line,
    signing_key_from_pem,
    signing_key_to_pem,
)
from edgefl_protocol.envelopes.keys import SigningKey, generate_sealing_key, generate_signing_key
from edgefl_protocol.errors import StorageError
from edgefl_protocol.records.root import unverified_root

Facts = dict[str, str | int]

_SEALING, _SIGNING = "sealing_key", "signing_key"  # events of the audit log


def tend_keys(coordinator: Coordinator) -> bool:
    """Renew the sealing key where a week is over, and forget keys whose time is over; return whether something changed.

    A `StorageError` of the disk leaves the keys before in use.
    """
    keys, now_ms = coordinator.keys, coordinator.clock()
    with keys.changing:
        if keys.ring.is_due(now_ms):
            _renew(coordinator, keep_old=True)
            return True
        pruned = keys.ring.without_past(now_ms)
        if pruned == keys.ring:
            return False
        save_ring(coordinator.store.home, pruned, keys.passphrase)
        keys.ring = pruned
    return True


def foreign_key(connection: Connection, coordinator: Coordinator) -> str:
    """Say in one sentence that the signing key is not the one that this coordinator used until now; "" where it is.

    It may be another where the published root set lists it: so a change ends that was killed before its audit row.
    What the log tells of a key that no root set listed was never its own, but for the first one.
    """
    own, root = coordinator.keys.signing.key_id, revocations.newest(connection)
    told = select(log.c.detail).where(log.c.event == _SIGNING).order_by(log.c.number)
    noted = [str(json.loads(detail)["key_id"]) for detail in connection.scalars(told)]
    once = {key.key_id for record in revocations.chain(connection) for key in unverified_root(record).coordinators}
    used = [key_id for key_id in noted if key_id == noted[0] or key_id in once]
    if not used or own == used[-1] or (root is not None and root.coordinator(own) is not None):
        return ""
    lists = " and its root set lists" if root is not None and root.coordinator(used[-1]) is not None else ""
    return (
        f"{coordinator.store.home.signing} is not the key {used[-1]} that this coordinator used until now{lists}: put "
        "it back from the backup"
    )


def check_signing(coordinator: Coordinator) -> None:
    """Refuse, by an `OperatorError`, to serve with a signing key that is not this coordinator's."""
    with coordinator.store.transaction() as connection:
        if told := foreign_key(connection, coordinator):
            raise OperatorError(told)


def note_keys(coordinator: Coordinator) -> None:
    """Write the audit rows of changes that a crash left without one."""
    keys, now_ms = coordinator.keys, coordinator.clock()
    used: dict[str, Facts] = {
        _SEALING: {"number": keys.ring.number, "key_id": keys.ring.current.key_id},
        _SIGNING: {"key_id": keys.signing.key_id},
    }
    with coordinator.store.transaction() as connection:
        for event, detail in used.items():
            last = audit.newest_of(connection, {event})
            if last is None or last[3] != detail:
                audit.append(connection, now_ms, event, coordinator.settings.federation, detail)


def renew_sealing(coordinator: Coordinator) -> Facts:
    """Renew the sealing key now; the one before opens messages for two days more.

    The list of revoked keys gets a number above all before, because the operator does this after restoring a backup,
    too. `revoked` counts the keys on it: those that the operator has to compare. A `StorageError` of the disk leaves
    the keys before in use.
    """
    with coordinator.keys.changing:
        _renew(coordinator, keep_old=True)
    with coordinator.store.transaction() as connection:
        revocations.number_anew(connection, coordinator.clock())
        revoked = len(revocations.listed(connection)[1])
    return {
        "number": coordinator.keys.ring.number, "key_id": coordinator.keys.sealing.key_id, "revoked": revoked
    }  # fmt: skip


def renew_restored(coordinator: Coordinator, passed_ms: int) -> None:
    """Use a new sealing key in a restored folder, and none of before: what was sealed until now opens no more.

    The number of its record rises by one, and by one for each second that passed since the backup, so it is above every
    number that members have seen. A `StorageError` of the disk leaves the keys before in use.
    """
    keys = coordinator.keys
    with keys.changing:
        keys.ring = replace(keys.ring, number=keys.ring.number + passed_ms // 1000)
        _renew(coordinator, keep_old=False)


def change_signing(coordinator: Coordinator) -> Facts:
    """Change the signing key, in two steps: make the next one; then, once the root set lists it, use it.

    With the change the sealing keys are new as well, and none of before opens anything: who stole one key may have
    stolen all. Returns state ("prepared" or "changed"), public key, key id and file of the public key.

    Raises:
        OperatorError: the next key is made, but no published root set lists it yet.
        StorageError: the disk; the keys before go on counting.
    """
    keys, home = coordinator.keys, coordinator.store.home
    with keys.changing:
        if not home.next_signing.exists():
            fresh = generate_signing_key()
            write_atomic(home.next_public, public_key_line(fresh.public_key))
            write_atomic(home.next_signing, signing_key_to_pem(fresh, keys.passphrase), mode=0o600)
            return _told("prepared", fresh, str(home.next_public))
        fresh = signing_key_from_pem(read_private(home.next_signing, MAX_KEY_FILE_BYTES), keys.passphrase)
        with coordinator.store.transaction() as connection:
            root = revocations.newest(connection)
        if root is None or root.coordinator(fresh.key_id) is None:
            raise OperatorError(
                "no published root set lists the next key yet: sign one that does (--coordinator "
                f"{home.next_public}), publish it, and run this command again"
            )
        _renew(coordinator, keep_old=False)
        write_atomic(home.signing_public, public_key_line(fresh.public_key))
        try:
            home.next_signing.replace(home.signing)  # the step that counts; killed before it, run the command again
            flush_to_disk(home.keys)
            home.next_public.unlink(missing_ok=True)
        except OSError as error:
            raise StorageError(f"cannot change the key in {home.keys}: {error.strerror}", "storage") from error
        keys.signing = fresh
        note_keys(coordinator)
    return _told("changed", fresh, str(home.signing_public))


def _renew(coordinator: Coordinator, *, keep_old: bool) -> None:
    keys = coordinator.keys
    fresh = generate_sealing_key(coordinator.settings.suite)
    ring = keys.ring.renewed(fresh, coordinator.clock(), keep_old=keep_old)
    save_ring(coordinator.store.home, ring, keys.passphrase)
    keys.ring = ring
    (coordinator.store.home.keys / "sealing.key").unlink(missing_ok=True)  # of a home made before there was a ring
    note_keys(coordinator)


def _told(state: str, key: SigningKey, file: str) -> Facts:
    return {"state": state, "public": key.public.hex(), "key_id": key.key_id, "file": file}
