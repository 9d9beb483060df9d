"""What each route's request and reply hold: typed values to and from a `Payload`.

Guarantees: a value of a class in this module that came from `from_payload` was checked: exactly the named scalars and
arrays, each of the stated type, form and bound; anything else is a `PayloadError` with code `bad_message`. Nothing here
knows the network, the clock or the store. Header words of an envelope: `typ` is "request" or "reply", `cty` is the
route's name. Source: docs/security.md, envelope and enrolment.

    cty          path               request             reply
    enrol        /v1/enrol          EnrolRequest        EnrolReply, sealed to the new key: reading it proves that key
    enrol-proof  /v1/enrol/proof    EnrolProofRequest   EnrolProofReply
    task         /v1/task           EmptyRequest        TaskReply
    broadcast    /v1/broadcast      BroadcastRequest    the method's broadcast, a bare `Payload`, or a `BlobReference`
    reply        /v1/reply          ReplyRequest        ReplyReply
    blob         /v1/blob           BlobPut or BlobGet  BlobPutReply or BlobGetReply (`blob_messages`)
    index        /v1/index          EmptyRequest        `key_messages.IndexReply`: index and revoked keys
    bundle       /v1/bundle         BundleRequest       BundleReply, or a `BlobReference` to the file
    keys         /v1/keys           EmptyRequest        RecordReply: the signed key record
    rotate       /v1/rotate         `key_messages.RotateRequest`    RotateReply

Any reply may be a `Refusal` instead: ask `Refusal.from_payload` first. Before its first envelope a newcomer knows no
sealing key, so the signed key record is also served plainly: `GET /v1/keys` answers the record's bytes, which the
pinned signing key proves. State-changing requests carry `idem`, the stable key of the work item: a retry repeats it.
"""

from dataclasses import dataclass
from typing import Self

from edgefl_protocol.envelopes.blob import MAX_INLINE_BYTES, BlobReference
from edgefl_protocol.envelopes.blob import NAMES as BLOB_NAMES
from edgefl_protocol.fields import (
    FINGERPRINT,
    IDEM,
    MAX_ROUND,
    NAME,
    bad_message,
    choice,
    expect_names,
    flag,
    hex_bytes,
    octet_array,
    octets,
    own_scalars,
    scalar_payload,
    text,
    whole,
)
from edgefl_protocol.messages.refusals import REFUSAL_STATUS as REFUSAL_STATUS
from edgefl_protocol.messages.refusals import Refusal as Refusal
from edgefl_protocol.messages.task_reply import ROUND_STATES as ROUND_STATES
from edgefl_protocol.messages.task_reply import TaskReply as TaskReply
from edgefl_protocol.payload import Payload
from edgefl_protocol.records.record_form import MAX_RECORD_BYTES
from edgefl_protocol.routes import ROLES as ROLES
from edgefl_protocol.routes import ROUTES as ROUTES
from edgefl_protocol.routes import Route as Route
from edgefl_protocol.strict_json import MAX_INT

MEMBER_STATES = ("pending", "approved")
RESERVED_SCALARS = frozenset({"idem", "error", "message"}) | BLOB_NAMES  # a method's payload may not use these names


@dataclass(frozen=True, kw_only=True)
class EnrolRequest:
    """A newcomer's first message, self-signed: its invite token and its two public keys."""

    idem: str  # stable key of this enrolment; the retry after a lost answer repeats it
    token: bytes  # the 32 secret bytes of the invite; never shown by `repr`
    name: str  # the member's name, as the invite was made for
    role: str  # "site" or "device"
    signing_public: bytes  # Ed25519 public key, 32 bytes; must hash to the envelope's `skid`
    sealing_suite: int  # 1 or 2
    sealing_public: bytes  # HPKE public key of that suite, 32 or 1184 + 32 bytes

    def __repr__(self) -> str:
        return f"EnrolRequest(name={self.name!r}, role={self.role!r})"

    to_payload = scalar_payload

    @classmethod
    def from_payload(cls, payload: Payload) -> Self:
        """Return the checked message, or raise `PayloadError`."""
        scalars = own_scalars(cls, payload, "enrol")
        suite = whole(scalars["sealing_suite"], "sealing_suite", 1, 2)
        return cls(
            idem=text(scalars["idem"], "idem", IDEM),
            token=hex_bytes(scalars["token"], "token", 32),
            name=text(scalars["name"], "name", NAME),
            role=choice(scalars["role"], "role", ROLES),
            signing_public=hex_bytes(scalars["signing_public"], "signing_public", 32),
            sealing_suite=suite,
            sealing_public=hex_bytes(scalars["sealing_public"], "sealing_public", 32 if suite == 1 else 1216),
        )


@dataclass(frozen=True, kw_only=True)
class EnrolReply:
    """The answer to `enrol`: a nonce that only the holder of the new sealing key can read."""

    state: str  # "pending"
    nonce: bytes  # 32 bytes

    to_payload = scalar_payload

    @classmethod
    def from_payload(cls, payload: Payload) -> Self:
        """Return the checked message, or raise `PayloadError`."""
        scalars = own_scalars(cls, payload, "enrol reply")
        return cls(
            state=choice(scalars["state"], "state", MEMBER_STATES),
            nonce=hex_bytes(scalars["nonce"], "nonce", 32),
        )


@dataclass(frozen=True, kw_only=True)
class EnrolProofRequest:
    """The nonce of `EnrolReply` sent back: proof of the new sealing key."""

    idem: str
    nonce: bytes  # 32 bytes

    to_payload = scalar_payload

    @classmethod
    def from_payload(cls, payload: Payload) -> Self:
        """Return the checked message, or raise `PayloadError`."""
        scalars = own_scalars(cls, payload, "enrol-proof")
        return cls(
            idem=text(scalars["idem"], "idem", IDEM),
            nonce=hex_bytes(scalars["nonce"], "nonce", 32),
        )


@dataclass(frozen=True, kw_only=True)
class EnrolProofReply:
    """Where the enrolment stands, and the fingerprint the operator compares before approving.

    Sent again (with a new `idem`) it tells a waiting member whether it has been approved.
    """

    state: str  # "pending" or "approved"
    fingerprint: str  # 20 Crockford base32 characters

    to_payload = scalar_payload

    @classmethod
    def from_payload(cls, payload: Payload) -> Self:
        """Return the checked message, or raise `PayloadError`."""
        scalars = own_scalars(cls, payload, "enrol-proof reply")
        return cls(
            state=choice(scalars["state"], "state", MEMBER_STATES),
            fingerprint=text(scalars["fingerprint"], "fingerprint", FINGERPRINT),
        )


@dataclass(frozen=True, kw_only=True)
class EmptyRequest:
    """Asks for what the route gives, with no field: `task`, `index`, `keys`."""

    to_payload = scalar_payload

    @classmethod
    def from_payload(cls, payload: Payload) -> Self:
        """Return the checked message, or raise `PayloadError`."""
        own_scalars(cls, payload, "request")
        return cls()


@dataclass(frozen=True, kw_only=True)
class BroadcastRequest:
    """Asks for this member's broadcast of a round. The answer is the method's own payload, or a `Refusal`."""

    round: int

    to_payload = scalar_payload

    @classmethod
    def from_payload(cls, payload: Payload) -> Self:
        """Return the checked message, or raise `PayloadError`."""
        scalars = own_scalars(cls, payload, "broadcast")
        return cls(round=whole(scalars["round"], "round", 1, MAX_ROUND))


@dataclass(frozen=True, kw_only=True)
class ReplyRequest:
    """A member's reply of a round, which the header's `rnd` names: the method's payload and the work item's key."""

    idem: str  # stable key of this work item
    # the method's reply payload, which uses no name of `RESERVED_SCALARS`; or the blob that holds it
    reply: Payload | BlobReference

    def to_payload(self) -> Payload:
        """Return the payload that carries this message, or raise `PayloadError` for a reserved name."""
        if isinstance(self.reply, BlobReference):
            return Payload({}, {**self.reply.to_scalars(), "idem": self.idem})
        clash = RESERVED_SCALARS & frozenset(self.reply.scalars)
        if clash:
            raise bad_message(f"the method's reply uses the reserved names {', '.join(sorted(clash))}: rename them")
        return Payload(self.reply.arrays, {**self.reply.scalars, "idem": self.idem})

    @classmethod
    def from_payload(cls, payload: Payload) -> Self:
        """Return the checked message, or raise `PayloadError`. The method's part is judged by the coordinator."""
        idem = text(payload.scalars.get("idem"), "idem", IDEM)
        reply = payload.without("idem")
        reference = BlobReference.from_payload(reply)
        if reference is not None:
            return cls(idem=idem, reply=reference)
        clash = RESERVED_SCALARS & frozenset(reply.scalars)
        if clash:
            raise bad_message(f"the reply uses the reserved names {', '.join(sorted(clash))}: rename them")
        return cls(idem=idem, reply=reply)


@dataclass(frozen=True, kw_only=True)
class ReplyReply:
    """The reply is stored durably. A retry gets the same answer, the first one."""

    accepted: bool  # always true; refusals are typed
    first_answer_ms: int  # Unix milliseconds at which the work item was first accepted

    to_payload = scalar_payload

    @classmethod
    def from_payload(cls, payload: Payload) -> Self:
        """Return the checked message, or raise `PayloadError`."""
        scalars = own_scalars(cls, payload, "reply's answer")
        return cls(
            accepted=flag(scalars["accepted"], "accepted"),
            first_answer_ms=whole(scalars["first_answer_ms"], "first_answer_ms", 0, MAX_INT),
        )


@dataclass(frozen=True, kw_only=True)
class RecordReply:
    """A signed record, byte for byte: the reader verifies it itself. `keys` answers with one."""

    record: bytes

    def to_payload(self) -> Payload:
        """Return the payload that carries this message."""
        return Payload({"record": octet_array(self.record, "record", MAX_RECORD_BYTES)}, {})

    @classmethod
    def from_payload(cls, payload: Payload) -> Self:
        """Return the checked message, or raise `PayloadError`."""
        expect_names(payload, "record reply", frozenset(), frozenset({"record"}))
        return cls(record=octets(payload, "record", MAX_RECORD_BYTES))


@dataclass(frozen=True, kw_only=True)
class BundleRequest:
    """Asks for one bundle by name and version, as the index lists it."""

    line: str
    task: str
    version: int

    to_payload = scalar_payload

    @classmethod
    def from_payload(cls, payload: Payload) -> Self:
        """Return the checked message, or raise `PayloadError`."""
        scalars = own_scalars(cls, payload, "bundle")
        return cls(
            line=text(scalars["line"], "line", NAME),
            task=text(scalars["task"], "task", NAME),
            version=whole(scalars["version"], "version", 0, MAX_INT),
        )


@dataclass(frozen=True, kw_only=True)
class BundleReply:
    """The bytes of a bundle file; nothing is believed of them before `load_bundle`."""

    bundle: bytes

    def __repr__(self) -> str:
        return f"BundleReply({len(self.bundle)} bytes)"

    def to_payload(self) -> Payload:
        """Return the payload that carries this message."""
        return Payload({"bundle": octet_array(self.bundle, "bundle", MAX_INLINE_BYTES)}, {})

    @classmethod
    def from_payload(cls, payload: Payload) -> Self:
        """Return the checked message, or raise `PayloadError`."""
        expect_names(payload, "bundle reply", frozenset(), frozenset({"bundle"}))
        return cls(bundle=octets(payload, "bundle", MAX_INLINE_BYTES))
