"""A device as a member of a federation, and the work of `edgefl enrol`.

`run_enrol` gives what `--json` prints; nothing is printed here.
"""

import datetime
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgefl_client.home import Home
from edgefl_client.sharing.broadcasts import forget_all
from edgefl_exchange.coordinator_keys import MAX_CORRECTION_MS, wall_clock_ms
from edgefl_exchange.enrolment import check_role, enrol, trust_certificate
from edgefl_exchange.errors import ExchangeError, NotEnrolled, Unavailable, unknown_keys_words
from edgefl_exchange.https import HttpsTransport
from edgefl_exchange.identity import Identity
from edgefl_exchange.member import Member
from edgefl_exchange.membership import Membership, ca_file, read_ca
from edgefl_exchange.outbox import Outbox, forget_outbox
from edgefl_exchange.transport import Transport
from edgefl_protocol.records.invite import decode_invite

Connect = Callable[[Path, Membership], Transport]


def connect_https(folder: Path, membership: Membership) -> Transport:
    """Make the transport of a real device."""
    return HttpsTransport(membership.url, ca_file(folder, membership), membership.proxy)


@dataclass(frozen=True, kw_only=True)
class Device:
    """What the commands need of this device."""

    home: Home  # its home folder
    passphrase: bytes | None = None  # opens encrypted keys, or None
    connect: Connect = connect_https  # makes the transport; a test passes its own
    clock_ms: Callable[[], int] = wall_clock_ms  # this machine's clock

    def member(self) -> Member:
        """Open the membership."""
        folder = self.home.member
        return Member(
            folder,
            lambda membership: self.connect(folder, membership),
            passphrase=self.passphrase,
            clock_ms=self.clock_ms,
        )

    def outbox(self, identity: Identity) -> Outbox:
        """Open the outbox."""
        self.home.prepare()
        return Outbox(self.home.outbox_file, identity.outbox_key)


def run_enrol(device: Device, text: str, ca: Path | None, proxy: str | None, suite: int) -> dict[str, Any]:
    """Join the federation of an invite, or go on where a joining was cut off."""
    again = (device.home.member / "membership.json").exists()
    # A used invite may be past its date. This clock may be ahead by as much as signed time corrects; `enrol` judges by
    # the corrected one.
    invite = decode_invite(text, 0 if again else device.clock_ms() - MAX_CORRECTION_MS)
    check_role(invite, "device")
    dropped = 0 if again else _forget_membership(device.home)
    folder = device.home.prepare(device.home.member)
    own_ca = trust_certificate(folder, invite, None if ca is None else read_ca(ca))
    draft = Membership(
        url=invite.url, federation=invite.federation, name=invite.name, role=invite.role, state="joining",
        coordinator_key_id=invite.coordinator_key_id, key_record=b"", key_number=0, key_fetched_ms=0, own_ca=own_ca,
        proxy=proxy, token_sha256=invite.token_sha256, idem="",
    )  # fmt: skip
    membership = enrol(
        folder, invite, device.connect(folder, draft), own_ca=own_ca, proxy=proxy, suite=suite,
        passphrase=device.passphrase, clock_ms=device.clock_ms,
    )  # fmt: skip
    if again:
        membership = _as_it_stands(device, membership)
    return {
        "federation": membership.federation,
        "name": membership.name,
        "role": membership.role,
        "state": membership.state,
        "fingerprint": membership.fingerprint,
        "dropped": dropped,
    }


def _as_it_stands(device: Device, known: Membership) -> Membership:
    """Ask whether the operator has approved since; where no answer comes, it is as it was last told.

    A `NotEnrolled` (`shut_out`) where the coordinator does not know these keys any more.
    """
    try:
        with device.member() as member:
            member.task()
            return member.membership
    except ExchangeError as error:
        if isinstance(error, Unavailable) and error.keys_unknown:
            raise NotEnrolled(
                f"{unknown_keys_words('device', 'edgefl sync')}; where it was shut out, move the folder "
                f"{device.home.member} away and enrol with a new invite",
                "shut_out",
            ) from error
        return known


def _forget_membership(home: Home) -> int:
    """Remove what a membership that is gone left, and say how many items waited: numbers and names may come again."""
    forget_all(home)
    if home.learning.exists():
        from edgefl_client.learning.live_round import (
            forget_federation,  # brings the runtime, which enrolling does without
        )

        forget_federation(home)
    return forget_outbox(home.outbox_file)


def today() -> datetime.date:
    """Read the date from this machine's clock (UTC)."""
    return datetime.datetime.now(datetime.UTC).date()
