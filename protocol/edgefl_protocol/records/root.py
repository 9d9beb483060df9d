"""The federation's root set: which keys are its coordinator's and which sign its bundles, vouched for offline.

k of n offline root keys sign the set {root keys, coordinator keys, bundle signers, version}; it is the way back after
the coordinator or a bundle signer was taken over (docs/security.md 2.6.6). The rules, those of TUF's root role:

    (1) the first set a device takes is signed by the root key that its invite pins, which stands among the set's root
        keys, and by the set's own threshold
    (2) each later one has the next number, and is signed by the threshold of the set before it and by its own: no
        version is skipped, none comes again, and one thief of fewer keys than a threshold changes nothing
    (3) the newest must not have expired; those before it may have: a device that slept long walks through them
    (4) signatures of keys that are not listed do not count and do no harm

Guarantees: a `Root` from `newest_root` obeys (1), (2) and (4); `check_current` is (3). A key that could sign for
everybody (low order) is refused when it enters, and no key stands in two of the lists: one key, one use.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from edgefl_protocol.envelopes.keys import PublicSigningKey, SigningKey
from edgefl_protocol.errors import RecordError
from edgefl_protocol.records.record_form import (
    COUNTS,
    TIMES,
    WORD,
    Rule,
    add_signature,
    check_fields,
    holds,
    make_several,
    parse,
    public_keys,
    split_several,
)
from edgefl_protocol.sentences import counted

ROOT_LABEL: Final = "eflf1/root"
MAX_ROOT_KEYS: Final = 16
MAX_COORDINATORS: Final = 8
MAX_SIGNERS: Final = 64
MAX_VERSIONS: Final = 256  # sets that a device walks through at once
MAX_CHAIN_BYTES: Final = 512 << 10


@dataclass(frozen=True, kw_only=True)
class Root:
    """One version of the set.

    Raises:
        RecordError: a list is too long, a key stands twice, or a threshold cannot be met.
    """

    federation: str  # whose
    version: int  # from 1, without gaps
    issued_ms: int  # Unix ms
    expires_ms: int  # Unix ms; from then on a device takes no new bundle
    root_keys: tuple[PublicSigningKey, ...]  # the offline keys
    threshold: int = 1  # how many of them must sign
    coordinators: tuple[PublicSigningKey, ...]  # signing keys of the coordinator that count now
    signers: tuple[PublicSigningKey, ...] = ()  # keys whose bundles of this federation count
    signer_threshold: int = 1  # how many trusted keys must have signed a bundle of this federation

    def __post_init__(self) -> None:
        if not 1 <= self.threshold <= len(self.root_keys):
            raise RecordError(
                f"the number of root keys that must sign is {self.threshold}; allowed: 1 to {len(self.root_keys)}"
            )
        if not 1 <= self.signer_threshold <= max(1, len(self.signers)):
            raise RecordError(
                f"the number of bundle signers that must sign is {self.signer_threshold}; allowed: 1 "
                f"to {max(1, len(self.signers))}"
            )
        if not self.coordinators:
            raise RecordError("a root set must list at least one key of the coordinator")
        everybody = [key.public for key in (*self.root_keys, *self.coordinators, *self.signers)]
        if len(set(everybody)) != len(everybody):
            raise RecordError("a key is in two lists of the root set; use each key for one purpose")

    def coordinator(self, key_id: str) -> PublicSigningKey | None:
        """Return the coordinator's key with this id, or None where it does not count."""
        return next((key for key in self.coordinators if key.key_id == key_id), None)

    def to_body(self) -> dict[str, Any]:
        """Return what is signed, as plain JSON values."""
        return {
            "federation": self.federation,
            "version": self.version,
            "issued_ms": self.issued_ms,
            "expires_ms": self.expires_ms,
            "root_keys": sorted(key.public.hex() for key in self.root_keys),
            "threshold": self.threshold,
            "coordinators": sorted(key.public.hex() for key in self.coordinators),
            "signers": sorted(key.public.hex() for key in self.signers),
            "signer_threshold": self.signer_threshold,
        }


def make_root(root: Root, keys: Iterable[SigningKey]) -> bytes:
    """Sign a set with the root keys at hand; others add theirs with `sign_root`."""
    body = root.to_body()
    _read(body)
    return make_several(keys, ROOT_LABEL, body)


def sign_root(record: bytes, key: SigningKey) -> bytes:
    """Add one signature to a set."""
    unverified_root(record)
    return add_signature(record, ROOT_LABEL, key)


def unverified_root(record: bytes) -> Root:
    """Read a set before any signature is checked: to show it or sign it, never to act on it."""
    return _read(parse(split_several(record)[0]))


def signed_by(record: bytes, by: Root) -> int:
    """Return how many of one set's root keys signed a record; wrong signatures do not count."""
    body, signatures = split_several(record)
    return sum(holds(key, signatures, ROOT_LABEL, body) for key in by.root_keys)


def check_signed(record: bytes, by: Root) -> None:
    """Require signatures of a threshold of one set's root keys.

    Raises:
        RecordError: too few of them signed (`too_few_signatures`).
    """
    signed = signed_by(record, by)
    if signed < by.threshold:
        raise RecordError(
            f"{counted(signed, 'root key')} of version {by.version} signed the root set, but {by.threshold} must",
            "too_few_signatures",
        )


def newest_root(
    chain: Sequence[bytes], federation: str, pinned_key_id: str, trusted: Root | None = None
) -> tuple[Root, bytes] | None:
    """Walk through the sets and return the newest with its record, or None where nothing newer than `trusted` is there.

    Args:
        chain: sets in the order of their numbers, as received.
        pinned_key_id: of the root key that the invite pins.
        trusted: the set that counts now, or None at the first time.

    Raises:
        RecordError: code `wrong_key` (nothing here is signed by the pinned key), `wrong_federation`,
            `too_few_signatures`, `skipped_version`, `rolled_back`, `too_many_versions` or `bad_record`.
    """
    if len(chain) > MAX_VERSIONS:
        raise RecordError(f"{len(chain)} root sets; at most {MAX_VERSIONS} are allowed", "too_many_versions")
    found: tuple[Root, bytes] | None = None
    for record in chain:
        root = unverified_root(record)
        if root.federation != federation:
            raise RecordError(f"the root set is of federation {root.federation}, not {federation}", "wrong_federation")
        here = found[0] if found is not None else trusted
        if here is None:
            if not _begins(record, root, pinned_key_id):
                continue
        elif found is None and root.version <= here.version:
            continue  # what is trusted already, and before it
        elif root.version != here.version + 1:
            code = "skipped_version" if root.version > here.version else "rolled_back"
            raise RecordError(
                f"root set {root.version} follows root set {here.version}, but none may be left out", code
            )
        else:
            check_signed(record, here)
        check_signed(record, root)
        found = root, record
    if found is None and trusted is None:
        raise RecordError("none of these root sets is signed by the root key that the invite names", "wrong_key")
    return found


def check_current(root: Root, now_ms: int) -> None:
    """Refuse a set that has expired: a newer one may be kept from us.

    Raises:
        RecordError: code `root_expired`.
    """
    if now_ms > root.expires_ms:
        days = (now_ms - root.expires_ms) // 86_400_000
        raise RecordError(
            f"the federation's root set {root.version} expired {counted(days, 'day')} ago, and no newer one came; "
            "ask the operator to sign a new one",
            "root_expired",
        )


def join_chain(records: Iterable[bytes]) -> bytes:
    """Return the bytes in which sets travel and are kept: one on each line."""
    data = b"".join(record + b"\n" for record in records)
    if len(data) > MAX_CHAIN_BYTES:
        raise RecordError(f"root sets of {len(data)} bytes; at most {MAX_CHAIN_BYTES} are allowed", "too_large")
    return data


def split_chain(data: bytes) -> list[bytes]:
    """Return the sets in what `join_chain` made; none is verified."""
    if len(data) > MAX_CHAIN_BYTES or not data.endswith(b"\n"):
        raise RecordError("this is not a list of root sets")
    return data.removesuffix(b"\n").split(b"\n")


def _begins(record: bytes, root: Root, pinned_key_id: str) -> bool:
    """Rule (1): whether the pinned key stands among the set's root keys and signed it."""
    pinned = next((key for key in root.root_keys if key.key_id == pinned_key_id), None)
    body, signatures = split_several(record)
    return pinned is not None and holds(pinned, signatures, ROOT_LABEL, body)


def _read(body: dict[str, Any]) -> Root:
    forms: dict[str, Rule] = {"federation": WORD, "version": COUNTS, "issued_ms": TIMES, "expires_ms": TIMES}
    forms |= {"root_keys": None, "threshold": COUNTS, "coordinators": None, "signers": None, "signer_threshold": COUNTS}
    check_fields(body, forms)
    return Root(
        federation=body["federation"],
        version=body["version"],
        issued_ms=body["issued_ms"],
        expires_ms=body["expires_ms"],
        root_keys=public_keys(body["root_keys"], "root_keys", MAX_ROOT_KEYS),
        threshold=body["threshold"],
        coordinators=public_keys(body["coordinators"], "coordinators", MAX_COORDINATORS),
        signers=public_keys(body["signers"], "signers", MAX_SIGNERS),
        signer_threshold=body["signer_threshold"],
    )
