"""A site's seat in a federation: its keys, its membership and its outbox, in `DIR/member` (mode 0700).

Guarantees: keys are made once and an enrolment that was cut off goes on with them; nothing is sent to a coordinator
other than the one the invite pins; a reply enters the outbox, encrypted, before it is sent, is bound to its round
there, and is deleted only after a signed answer or when its round is past. Source: docs/security.md, enrolment and
idempotency.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from edgefl_exchange.coordinator_keys import MAX_CORRECTION_MS, wall_clock_ms
from edgefl_exchange.delivery import Delivery
from edgefl_exchange.enrolment import EnrolmentError, check_role, enrol, keep_way, trust_certificate
from edgefl_exchange.errors import (
    REFUSED_FOR_GOOD,
    ExchangeError,
    NotEnrolled,
    SignedRefusal,
    TlsRefused,
    Unavailable,
)
from edgefl_exchange.https import HttpsTransport
from edgefl_exchange.member import Member
from edgefl_exchange.membership import Membership, ca_file, load_membership, read_ca
from edgefl_exchange.outbox import Outbox, WorkItem
from edgefl_exchange.tls import certificates
from edgefl_protocol.errors import EdgeflError, InviteError, StorageError
from edgefl_protocol.messages.requests import TaskReply
from edgefl_protocol.records.invite import Invite, decode_invite
from edgefl_trainer.engine.folder import MEMBER
from edgefl_trainer.errors import FederationRefused, RunError

_NOT_AGAIN = EdgeflError("the reply was refused, and nothing has changed since", "held")

ReplySettled = Callable[[Delivery], None]


@dataclass(frozen=True)
class Reply:
    """What was learned in a round, to be sent."""

    round: int  # the coordinator's number of it
    content: bytes  # bytes of the payload


@dataclass(frozen=True)
class SiteMembership:
    """Where a site keeps its membership."""

    folder: Path  # the run directory
    passphrase: bytes | None = None  # opens encrypted keys, or None

    @property
    def home(self) -> Path:
        """The membership's folder."""
        return self.folder / MEMBER

    @property
    def joined(self) -> bool:
        """Whether the coordinator has taken the site's keys, so that no invite is needed any more."""
        known = self._known()
        return known is not None and known.state != "joining"

    def enrolled(self, invite: str | None, ca: Path | None, proxy: str | None) -> Membership:
        """Return the membership; join now with the invite where there is none yet.

        Args:
            invite: what the operator gave; None goes on with the membership that is there.
            ca: PEM file of the coordinator's certificate or authority, or None. Without an invite it has to hold
                the one that is trusted already.
            proxy: to use from now on, "" for none; None leaves it as it is.

        Raises:
            RunError: there is neither an invite nor a membership, or the certificate is another.
            FederationRefused: the coordinator, its certificate or its fingerprint is refused, or refuses.
            Unavailable: nothing answered; the same command goes on.
            EdgeflError: a damaged invite or file, or a full disk.
        """
        known = self._known()
        if invite is None:
            if known is None or known.state == "joining":
                raise RunError(f"{self.folder} holds no finished enrolment: give the INVITE that the operator made.")
            if ca is not None:
                self._check_trusted(known, ca)
            return keep_way(self.home, known, self.passphrase, proxy=proxy)
        with refusals():
            joined = self.joined
            # A used invite may be past its date. This clock may be ahead by as much as signed time corrects; `enrol`
            # judges by the corrected one.
            found = decode_invite(invite, 0 if joined else wall_clock_ms() - MAX_CORRECTION_MS)
            if known is not None and joined:
                self._check_same(known, found)
                if ca is None:
                    return keep_way(self.home, known, self.passphrase, proxy=proxy)
            check_role(found, "site")
            self._make_home()
            own_ca = trust_certificate(self.home, found, None if ca is None else read_ca(ca))
            transport = HttpsTransport(found.url, self.home / "ca.pem" if own_ca else None, proxy)
            return enrol(self.home, found, transport, own_ca=own_ca, proxy=proxy, passphrase=self.passphrase)

    @contextmanager
    def member(self) -> Iterator[Member]:
        """Open the membership, and hold its keys until the end.

        A `FederationRefused` where the server is not the trusted one, or refuses for good; an `ExchangeError` where the
        folder holds no finished enrolment, or nothing answered.
        """
        with refusals(), Member(self.home, self._transport, passphrase=self.passphrase) as member:
            yield member

    def task(self) -> TaskReply:
        """Fetch the signed task; raises `NotEnrolled` while the operator has not approved."""
        with self.member() as member:
            return member.task()

    def meet(
        self, reply: Reply | None, settled: ReplySettled, refused: Mapping[int, int]
    ) -> tuple[TaskReply, list[Delivery]]:
        """Meet the coordinator once: a new reply enters the outbox, the task is asked for, what waits is sent.

        Gives the task, and what became of each reply that was offered.

        Args:
            reply: what was learned since the last meeting; given again, it is kept once.
            settled: told what became of a reply before the outbox forgets it; after a crash in between, again.
            refused: round → its deadline, Unix milliseconds, when its reply was refused; that reply is not offered
                again before the deadline is another.

        Raises:
            FederationRefused: the server is not the trusted one, or refuses for good.
            ExchangeError: no signed answer came; replies stay.
            StorageError: the disk is full.
        """
        with self.member() as member, Outbox(self.home / "outbox.sqlite", member.identity.outbox_key) as outbox:
            if reply is not None:
                outbox.put_learned(member.membership.federation, reply.round, reply.content, member.now_ms())
            told = member.task()

            def hear(item: WorkItem, delivery: Delivery) -> None:
                settled(delivery)

            def again(_item: WorkItem, number: int) -> EdgeflError | None:
                return _NOT_AGAIN if refused.get(number) == told.deadline_ms else None

            sent = member.deliver(outbox, told, again, hear)
            return told, [one for one in sent if one.outcome != "held"]

    def rotate(self) -> None:
        """Change the keys where they are old; a failure, signed or not, leaves the old ones for the next time."""
        with contextlib.suppress(ExchangeError, FederationRefused), self.member() as member:
            member.rotate_if_due()

    def _check_same(self, known: Membership, invite: Invite) -> None:
        if known.token_sha256 != invite.token_sha256:
            raise RunError(
                f"{self.folder} belongs to {known.name} of the federation {known.federation}, which joined with "
                "another invite: name another --out, or leave INVITE out."
            )

    def _check_trusted(self, known: Membership, ca: Path) -> None:
        """Refuse a certificate that is not trusted yet: whether it may be, the invite says."""
        kept = ca_file(self.home, known)
        trusted = set[bytes]() if kept is None else set(certificates(read_ca(kept)))
        if not trusted or not trusted <= set(certificates(read_ca(ca))):
            raise RunError(f"{ca} does not hold the certificate that {self.folder} trusts: give INVITE, too.")

    def _known(self) -> Membership | None:
        try:
            return load_membership(self.home)
        except NotEnrolled:
            return None

    def _make_home(self) -> None:
        try:
            self.home.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise StorageError(f"cannot make the folder {self.home}: {error.strerror}; name another --out") from error

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
    except (EnrolmentError, InviteError, SignedRefusal) as error:
        if error.code not in REFUSED_FOR_GOOD:
            raise
        raise FederationRefused(str(error), error.code) from error
