"""What the routes about keys hold: a member's change of keys, and the index with the list of revoked keys.

Guarantees: those of `messages`: a value from `from_payload` has exactly the named fields, each of its form.

    cty          path               request             reply
    rotate       /v1/rotate         RotateRequest       RotateReply
    index        /v1/index          EmptyRequest        IndexReply: both signed records of one moment
"""

from dataclasses import dataclass
from typing import Self

from edgefl_protocol.fields import (
    FINGERPRINT,
    IDEM,
    expect_names,
    octet_array,
    octets,
    own_scalars,
    scalar_payload,
    text,
    whole,
)
from edgefl_protocol.payload import Payload
from edgefl_protocol.records.record_form import MAX_RECORD_BYTES
from edgefl_protocol.strict_json import MAX_INT


@dataclass(frozen=True, kw_only=True)
class RotateRequest:
    """A member's new keys. It may come under the old key or under the new one: a retry after a lost answer."""

    idem: str  # stable key of this change
    record: bytes  # what `rotation.make_rotation` made

    def to_payload(self) -> Payload:
        """Return the payload that carries this message."""
        return Payload({"record": octet_array(self.record, "record", MAX_RECORD_BYTES)}, {"idem": self.idem})

    @classmethod
    def from_payload(cls, payload: Payload) -> Self:
        """Return the checked message, or raise `PayloadError`."""
        expect_names(payload, "rotate", frozenset({"idem"}), frozenset({"record"}))
        return cls(idem=text(payload.scalars["idem"], "idem", IDEM), record=octets(payload, "record", MAX_RECORD_BYTES))


@dataclass(frozen=True, kw_only=True)
class RotateReply:
    """The new keys count."""

    old_until_ms: int  # Unix milliseconds until which the old signing key goes on counting
    fingerprint: str  # of the new keys, 20 Crockford base32 characters

    to_payload = scalar_payload

    @classmethod
    def from_payload(cls, payload: Payload) -> Self:
        """Return the checked message, or raise `PayloadError`."""
        scalars = own_scalars(cls, payload, "rotate reply")
        return cls(
            old_until_ms=whole(scalars["old_until_ms"], "old_until_ms", 0, MAX_INT),
            fingerprint=text(scalars["fingerprint"], "fingerprint", FINGERPRINT),
        )


@dataclass(frozen=True, kw_only=True)
class IndexReply:
    """The signed index of current bundles and the signed list of revoked keys; the reader verifies both itself."""

    index: bytes
    revoked: bytes

    def to_payload(self) -> Payload:
        """Return the payload that carries this message."""
        records = {"index": self.index, "revoked": self.revoked}
        return Payload({name: octet_array(data, name, MAX_RECORD_BYTES) for name, data in records.items()}, {})

    @classmethod
    def from_payload(cls, payload: Payload) -> Self:
        """Return the checked message, or raise `PayloadError`."""
        expect_names(payload, "index reply", frozenset(), frozenset({"index", "revoked"}))
        return cls(
            index=octets(payload, "index", MAX_RECORD_BYTES), revoked=octets(payload, "revoked", MAX_RECORD_BYTES)
        )
