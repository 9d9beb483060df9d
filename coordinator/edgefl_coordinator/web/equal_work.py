"""Work that makes a request which is refused before its signature was verified cost as much, whatever is wrong with it.

Guarantees: each request of a member's route costs one lookup of its sender (`SenderLookup`), and steps that the refusal
did not reach are done on stand-ins, over as many bytes as the request has (`catch_up`). So the time of an answer tells
nobody whether a key belongs to a member, was shut out, or whether a sealed part opened. It costs the coordinator a
millisecond, and anybody can ask for it; `sealed_requests.known_sender` bounds how many bytes a stranger can have
opened. Source: docs/security.md 2.3, attack list 18, check 11.
"""

import contextlib
from typing import Final

from sqlalchemy import Connection

from edgefl_coordinator.members import membership
from edgefl_coordinator.members.membership import MemberRow
from edgefl_coordinator.store.coordinator import Coordinator
from edgefl_protocol import EnvelopeError, PublicSigningKey, SealingKey, unverified_header
from edgefl_protocol.envelopes.envelope import SEAL_LABEL, SIGN_LABEL
from edgefl_protocol.envelopes.header import Header, encode_header, parse_header
from edgefl_protocol.envelopes.keys import SEAL_OVERHEAD, SIGNATURE_BYTES
from edgefl_protocol.errors import FrameError, OpenError, SenderError, SignatureError, StorageError
from edgefl_protocol.messages.requests import Route
from edgefl_protocol.pae import pae

_NOBODY: Final = "0" * 64  # the key id of no key
_NOBODYS: Final = encode_header({
    "v": 1, "typ": "request", "mth": "POST", "pth": "/v1/reply", "fed": "nobodys", "rnd": 1, "skid": _NOBODY,
    "rkid": _NOBODY, "iat": 0, "exp": 0, "seq": 1, "mid": "0" * 32, "cty": "reply", "len": 0,
})  # fmt: skip
_PARSED: Final = parse_header(_NOBODYS)


class SenderLookup:
    """Looks up who sends a request and may call its route, and remembers whom it found."""

    def __init__(self, coordinator: Coordinator, route: Route, data: bytes) -> None:
        """Take a request, or its start."""
        self.coordinator = coordinator
        self.route = route
        self.data = data
        self.shut_out = ""  # the name of a revoked member whose key the request names
        self.signing: PublicSigningKey | None = None  # the key that signed it, where its member may call
        self.failed: StorageError | None = None  # why the store could not be asked
        self._member: MemberRow | None = None

    @property
    def found(self) -> MemberRow:
        """The member that may call."""
        assert self._member is not None
        return self._member

    def look_up(self) -> None:
        """Look up whose key the request's header names, and whether that member may call the route now."""
        try:
            with self.coordinator.store.look() as connection:  # `admit` asks again whose key it is
                known = self._known(connection, _header_or_stand_in(self.data))
        except StorageError as error:
            self.failed = error
            return
        if known is None:
            return
        member, signing = known
        if member.state == "revoked":
            self.shut_out = member.name
        elif not self.route.roles or member.role in self.route.roles:
            self._member, self.signing = member, signing

    def _known(self, connection: Connection, header: Header) -> tuple[MemberRow, PublicSigningKey] | None:
        """Return who has the key, as `membership.sender` does, which checks a key where it finds one."""
        known = membership.sender(connection, header.skid, header.iat)
        if known is None:
            PublicSigningKey(self.coordinator.keys.signing.public)
        return known


def catch_up(
    error: EnvelopeError, data: bytes, key: SealingKey, own: PublicSigningKey, *, enrols: bool = False
) -> None:
    """Do what was left to do of a request when a step refused it, on stand-ins."""
    if isinstance(error, FrameError):
        _header_or_stand_in(data)
    verified = isinstance(error, SignatureError) or type(error) is EnvelopeError  # the latter: an enrolment's payload
    if not (verified or isinstance(error, OpenError) or (enrols and isinstance(error, SenderError))):
        _open(key, data)
    if not verified:
        with contextlib.suppress(SignatureError):
            own.verify(bytes(SIGNATURE_BYTES), SIGN_LABEL, data[:5], _NOBODYS, data)


def _header_or_stand_in(data: bytes) -> Header:
    """Return the clear header of a request, or where it has none a stand-in that takes as long."""
    try:
        return unverified_header(data)
    except FrameError:
        return parse_header(_NOBODYS)
    except EnvelopeError:
        return _PARSED


def _open(key: SealingKey, data: bytes) -> None:
    """Open what nobody sealed. The filling holds no key of low order, at which the work would end early."""
    least = SEAL_OVERHEAD[key.suite] + SIGNATURE_BYTES
    sealed = data if len(data) >= least else data + b"\x09" * least
    with contextlib.suppress(OpenError):
        key.open(sealed, pae(SEAL_LABEL, data[:5], _NOBODYS))
