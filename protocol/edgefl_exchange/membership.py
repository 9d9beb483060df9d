"""What a member knows of its federation, as files in one folder (mode 0700).

    membership.json   the record below
    ca.pem            the coordinator's certificate or authority, where it is not a public one
    task.payload      the task as the coordinator last described it
    *.key, sequence-* keys and sequence numbers (`identity`, `key_change`)
    *.record          what the federation vouches for (`edgefl_exchange.trust_records`)

Every file is replaced atomically, so after a crash a folder holds the old record or the new one.
"""

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from edgefl_exchange.errors import NotEnrolled
from edgefl_exchange.tls import MAX_CA_BYTES
from edgefl_protocol.durable import read_bounded, read_private, write_atomic
from edgefl_protocol.errors import PayloadError, StorageError
from edgefl_protocol.messages.requests import TaskReply
from edgefl_protocol.payload import Payload
from edgefl_protocol.strict_json import parse_integers, write_json

MAX_MEMBERSHIP_BYTES = 128 * 2**10
STATES = ("joining", "pending", "approved")
_FILE, _CA, _TASK = "membership.json", "ca.pem", "task.payload"


@dataclass(frozen=True, kw_only=True)
class Membership:
    """One membership."""

    url: str  # the coordinator's public base
    federation: str  # name
    name: str  # this member's name
    role: str  # "site" or "device"
    state: str  # "joining" (enrolment not answered yet), "pending" (waits for the operator) or "approved"
    coordinator_key_id: str  # the pinned key id of the coordinator's signing key
    key_record: bytes  # its newest signed key record, as received
    key_number: int  # number of that record; a lower one is refused
    key_fetched_ms: int  # when it was fetched, Unix ms
    index_issued_ms: int = 0  # issue time of the newest index of bundles seen; an older one is refused
    own_ca: bool = False  # whether `ca.pem` holds the certificate to trust
    proxy: str | None = None  # proxy to go through; None or "" for none
    fingerprint: str = ""  # what the operator compares; empty while joining
    root_key_id: str | None = None  # key id of the federation's root key that the invite pins, or None
    keys_made_ms: int = 0  # when this member's own keys were made, Unix ms; 0 where unknown
    revoked_version: int = 0  # number of the newest list of revoked keys seen; an older one is refused
    # when an answer that nobody signed last said that the coordinator does not know these keys; 0 since a signed one
    unknown_ms: int = 0
    token_sha256: str  # hex digest of the invite's token, which tells a retry from a new invite
    idem: str  # stable key of the enrolment


def save_membership(folder: Path, membership: Membership) -> None:
    """Write the record."""
    record = dataclasses.asdict(membership) | {"format": 1, "key_record": membership.key_record.decode("ascii")}
    write_atomic(folder / _FILE, write_json(record) + b"\n", mode=0o600)


def load_membership(folder: Path) -> Membership:
    """Read the record.

    Raises:
        NotEnrolled: there is none.
    """
    path = folder / _FILE
    if not path.exists():
        raise NotEnrolled(
            "this device belongs to no federation yet; ask its operator for an invite: edgefl enrol INVITE"
        )
    try:
        record = parse_integers(read_private(path, MAX_MEMBERSHIP_BYTES).decode("ascii"))
        if not isinstance(record, dict) or record.pop("format", None) != 1:
            raise ValueError("unknown format")
        record["key_record"] = record["key_record"].encode("ascii")
        membership = Membership(**record)
        if membership.state not in STATES:
            raise ValueError("unknown state")
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise StorageError(
            f"{path} is damaged; restore it, or move the folder {folder} away and enrol with a new invite, which "
            "the operator can make for the same name after revoking the old keys",
            "damaged",
        ) from error
    return membership


def ca_file(folder: Path, membership: Membership) -> Path | None:
    """Return the file of the certificates to trust, or None for the public authorities."""
    return folder / _CA if membership.own_ca else None


def save_ca(folder: Path, pem: bytes) -> None:
    """Keep the certificate to trust."""
    write_atomic(folder / _CA, pem, mode=0o600)


def read_ca(path: Path) -> bytes:
    """Read the file given with `--ca`."""
    return read_bounded(path, MAX_CA_BYTES)


def save_task(folder: Path, task: TaskReply) -> None:
    """Keep the task for work done offline."""
    write_atomic(folder / _TASK, task.to_payload().to_bytes(), mode=0o600)


def load_task(folder: Path) -> TaskReply | None:
    """Read the task as last described, or None where it was never fetched."""
    path = folder / _TASK
    if not path.exists():
        return None
    try:
        return TaskReply.from_payload(Payload.from_bytes(read_bounded(path, 2**20)))
    except PayloadError as error:
        raise StorageError(f"{path} is damaged; fetch the task again with edgefl sync", "damaged") from error
