"""What a request costs that is refused before its signature was verified: as much, whatever was wrong with it.

Guarantees: each such request looks a sender up, opens a seal and verifies a signature, one of each, over as many bytes
as it has; where the step that refused it comes before one of these, that work is done on a stand-in. So the time of an
answer tells nobody whether a key belongs to a member, was shut out, or whether a sealed part opened. It costs the
coordinator a millisecond, and anybody can ask for it; `known_sender` bounds how many bytes a stranger can have opened.
Source: docs/security.md 2.3, attack list 18, check 11.
"""

import contextlib
from typing import Final

from sqlalchemy import Connection

from edgefl_coordinator.members import membership
from edgefl_coordinator.members.membership import MemberRow
from edgefl_coordinator.store.coordinator import Coordinator
from edgefl_protocol import EnvelopeError, PublicSigningKey, unverified_header
from edgefl_protocol.envelopes.envelope import SEAL_LABEL, SIGN_LABEL
from edgefl_protocol.envelopes.header import Header, encode_header, parse_header
from edgefl_protocol.envelopes.keys import SEAL_OVERHEAD, SIGNATURE_BYTES, SealingKey
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
    """Looks up who sends a request and may call its route, once, and remembers whom it found."""

    def __init__(self, coordinator: Coordinator, route: Route, data: bytes) -> None:
        """Take a request, or its start."""
        self.coordinator = coordinator
        self.route = route
        self.data = data
        self.shut_out = ""  # the name of a revoked member whose key the request names
        self._asked = False
        self._member: MemberRow | None = None

    @property
    def found(self) -> MemberRow:
        """The member that may call."""
        assert self._member is not None
        return self._member

    def __call__(self, skid: str) -> PublicSigningKey | None:
        """Return the key of that id, where its member may call the route now."""
        self._asked = True
        with self.coordinator.store.look() as connection:  # `admit` asks again whose key it is
            known = self._known(connection, skid)
        if known is None:
            return None
        member, signing = known
        if member.state == "revoked":
            self.shut_out = member.name
            return None
        if self.route.roles and member.role not in self.route.roles:
            return None
        self._member = member
        return signing

    def look_up_once(self) -> None:
        """Look nobody up, where nobody was looked up yet."""
        if not self._asked:
            with contextlib.suppress(StorageError):  # nothing depends on it
                self(_NOBODY)

    def _known(self, connection: Connection, skid: str) -> tuple[MemberRow, PublicSigningKey] | None:
        """Return who has the key, as `membership.sender` does, which checks a key where it finds one."""
        known = membership.sender(connection, skid, _header(self.data).iat)
        if known is None:
            PublicSigningKey(self.coordinator.keys.signing.public)
        return known


def catch_up(error: EnvelopeError, senders: SenderLookup, now_ms: int) -> None:
    """Do what was left to do of a request when a step refused it, on stand-ins; see the module's guarantees."""
    coordinator, data, enrols = senders.coordinator, senders.data, senders.route.cty == "enrol"
    if isinstance(error, FrameError):
        _header(data)
    if not enrols:
        senders.look_up_once()
    verified = isinstance(error, SignatureError) or type(error) is EnvelopeError  # the latter: an enrolment's payload
    if not (verified or isinstance(error, OpenError) or (enrols and isinstance(error, SenderError))):
        _open(coordinator.keys.ring.opening(now_ms)[0], data)
    if not verified:
        own = coordinator.keys.signing.public_key
        with contextlib.suppress(SignatureError):
            own.verify(bytes(SIGNATURE_BYTES), SIGN_LABEL, data[:5], _NOBODYS, data)


def _header(data: bytes) -> Header:
    """Return the clear header of a request, or a stand-in where it has none."""
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
