"""Who sends a request, looked up before anything of it is checked.

Guarantees: each request of a member's route costs one lookup, whatever is wrong with it, and by the same work; what
else a refusal costs says `beside.cryptography_work`. It costs the coordinator a millisecond, and anybody can ask for
it; `known_sender` bounds how many bytes a stranger can have opened. Source: docs/security.md 2.3, attack list 18, check
11.
"""

from sqlalchemy import Connection

from edgefl_coordinator.beside.cryptography_work import header_or_stand_in
from edgefl_coordinator.members import membership
from edgefl_coordinator.members.membership import MemberRow
from edgefl_coordinator.store.coordinator import Coordinator
from edgefl_protocol import PublicSigningKey
from edgefl_protocol.envelopes.header import Header
from edgefl_protocol.errors import StorageError
from edgefl_protocol.messages.requests import Route


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
                known = self._known(connection, header_or_stand_in(self.data))
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
