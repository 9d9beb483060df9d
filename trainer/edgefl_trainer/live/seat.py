"""A site's seat in a federation: its keys, its membership and its outbox, in `DIR/member` (mode 0700).

Guarantees: keys are made once and an enrolment that was cut off goes on with them; nothing is sent to a coordinator
other than the one the invite pins; a reply enters the outbox, encrypted, before it is sent, is bound to its round
there, and is deleted only after a signed answer or when its round is past. Source: docs/security.md, enrolment and
idempotency.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from edgefl_client.exchange import (
    Delivery,
    EnrolmentError,
    Member,
    Membership,
    NotEnrolled,
    Outbox,
    Refused,
    TlsRefused,
    Unavailable,
    ca_file,
    enrol,
    load_membership,
    read_ca,
    trust_certificate,
)
from edgefl_client.exchange.coordinator import wall_clock_ms
from edgefl_client.exchange.https import HttpsTransport
from edgefl_protocol.errors import InviteError, StorageError
from edgefl_protocol.invite import Invite, decode_invite
from edgefl_protocol.messages import TaskReply
from edgefl_trainer.errors import FederationRefused, RunError

MEMBER = "member"
REPLY = "reply"
# Refusals of trust or policy: trying again changes nothing (docs/design.md 5, exit status 3).
_FINAL = frozenset(
    {
        "unknown_invite", "expired_invite", "used_invite", "known_key", "bad_proof", "not_approved", "revoked",
        "fingerprint_differs", "low_order_key", "expired",
    }
)  # fmt: skip


@dataclass(frozen=True)
class Seat:
    """Where a site keeps its membership.

    Attributes:
        folder: the run directory.
        passphrase: opens encrypted keys, or None.
    """

    folder: Path
    passphrase: bytes | None = None

    @property
    def home(self) -> Path:
        """The membership's folder."""
        return self.folder / MEMBER

    def enrolled(self, invite: str | None, ca: Path | None, proxy: str | None) -> Membership:
        """The membership, joined now with the invite where there is none yet.

        Args:
            invite: what the operator gave; None goes on with the membership that is there.
            ca: PEM file of the coordinator's certificate or authority, or None.
            proxy: proxy to use from now on, or None.

        Raises:
            RunError: there is neither an invite nor a membership.
            FederationRefused: the coordinator, its certificate or its fingerprint is refused, or refuses.
            Unavailable: nothing answered; the same command goes on.
            EdgeflError: a damaged invite or file, or a full disk.
        """
        known = self._known()
        if invite is None:
            if known is None or known.state == "joining":
                raise RunError(f"{self.folder} holds no finished enrolment: give the INVITE that the operator made.")
            return known
        with refusals():
            # A used invite may be past its date: the membership it made counts.
            found = decode_invite(invite, wall_clock_ms() if known is None or known.state == "joining" else 0)
            self._make_home()
            own_ca = trust_certificate(self.home, found, None if ca is None else read_ca(ca))
            return self._enrol(found, own_ca, proxy)

    @contextmanager
    def member(self) -> Iterator[Member]:
        """The membership, opened: holds the keys until the end.

        Raises:
            FederationRefused: the server is not the trusted one, or refuses for good.
            ExchangeError: the folder holds no finished enrolment, or nothing answered.
        """
        with refusals(), Member(self.home, self._transport, passphrase=self.passphrase) as member:
            yield member

    def keep(self, member: Member, round_: int, reply: bytes) -> None:
        """Put the reply of a round into the outbox, once; again changes nothing.

        Args:
            member: opened.
            round_: the coordinator's number of the round.
            reply: the payload's bytes.

        Raises:
            OutboxError: the outbox cannot take it.
            StorageError: the disk is full.
        """
        with self._outbox(member) as outbox:
            if not self._sweep(outbox, member, round_):
                item = outbox.put(member.membership.federation, REPLY, reply, member.now_ms())
                outbox.promise(item, round_)

    def deliver(self, member: Member, task: TaskReply) -> list[Delivery]:
        """Send what lies in the outbox for the open round.

        Args:
            member: opened.
            task: as just fetched.

        Raises:
            ExchangeError: no signed answer came; the reply stays.
        """
        with self._outbox(member) as outbox:
            self._sweep(outbox, member, task.round)
            return member.deliver(outbox, task)

    def _sweep(self, outbox: Outbox, member: Member, round_: int) -> bool:
        """Drop replies of other rounds, which are worth nothing in this one; whether there is one of this round."""
        there = [item for item in outbox.items(member.membership.federation) if item.kind == REPLY]
        for item in there:
            if item.round != round_:
                outbox.delete(item.idem)
        return any(item.round == round_ for item in there)

    def _known(self) -> Membership | None:
        try:
            return load_membership(self.home)
        except NotEnrolled:
            return None

    def _outbox(self, member: Member) -> Outbox:
        return Outbox(self.home / "outbox.sqlite", member.identity.outbox_key)

    def _make_home(self) -> None:
        try:
            self.home.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise StorageError(f"cannot make the folder {self.home}: {error.strerror}; name another --out") from error

    def _enrol(self, invite: Invite, own_ca: bool, proxy: str | None) -> Membership:
        transport = HttpsTransport(invite.url, self.home / "ca.pem" if own_ca else None, proxy)
        return enrol(self.home, invite, transport, own_ca=own_ca, proxy=proxy, passphrase=self.passphrase)

    def _transport(self, membership: Membership) -> HttpsTransport:
        return HttpsTransport(membership.url, ca_file(self.home, membership), membership.proxy)


@contextmanager
def refusals() -> Iterator[None]:
    """Turn refusals of trust and policy into the error that ends a command with status 3."""
    try:
        yield
    except Unavailable:
        raise
    except TlsRefused as error:
        raise FederationRefused(str(error), error.code) from error
    except (EnrolmentError, InviteError, Refused) as error:
        if error.code not in _FINAL:
            raise
        raise FederationRefused(str(error), error.code) from error
