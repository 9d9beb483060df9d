"""Joining a federation with an invite (docs/security.md, enrolment, steps 1 to 3).

1. The invite is decoded. The certificate it carries is the only one trusted; where it holds the hash alone, the file
   given must match it.
2. The coordinator's key record is fetched and must be signed by the key that the invite pins; only then is the token
   sealed.
3. Keys are made, and the token goes out in a sealed message signed with the new key: proof of the signing key.
4. The nonce that comes back, sealed to the new key, is returned: proof of the sealing key.
5. The fingerprint the coordinator shows its operator must be the one computed here.

A crash or a cut answer at any point costs nothing: the same invite goes on where it stopped, with the same keys and
`idem`. Of a membership that is there it changes the way to the coordinator alone, where another one is given.
"""

import dataclasses
import secrets
import time
from collections.abc import Callable
from pathlib import Path

from edgefl_exchange.caller import Caller
from edgefl_exchange.coordinator_keys import CoordinatorView, wall_clock_ms
from edgefl_exchange.errors import ExchangeError, NotEnrolled, TlsRefused
from edgefl_exchange.identity import Identity, create_identity, remove_identity
from edgefl_exchange.membership import Membership, load_membership, save_ca, save_membership
from edgefl_exchange.tls import certificates, pem_of, pinned_certificate
from edgefl_exchange.transport import Transport
from edgefl_protocol.envelopes.keys import DEFAULT_SUITE, fingerprint, same_fingerprint
from edgefl_protocol.messages.requests import EnrolProofReply, EnrolProofRequest, EnrolReply, EnrolRequest
from edgefl_protocol.records.invite import Invite


class EnrolmentError(ExchangeError):
    """The enrolment cannot go on."""

    code = "enrolment"


_JOINS_WITH = {"device": "edgefl enrol INVITE", "site": "edgefl-train join INVITE --data SPEC --out DIR"}


def check_role(invite: Invite, role: str) -> None:
    """Refuse an invite for another kind of member, before it is used up.

    Raises:
        EnrolmentError: `other_role`.
    """
    if invite.role != role:
        raise EnrolmentError(
            f"the invite is for a {invite.role}, and this command joins as a {role}: join with "
            f"{_JOINS_WITH[invite.role]}, or ask the operator for an invite with --role {role}",
            "other_role",
        )


def trust_certificate(folder: Path, invite: Invite, pem: bytes | None) -> bool:
    """Keep the certificate that is trusted for this federation; True where there is one of its own.

    Args:
        pem: the file given beside the invite; one that the invite does not pin is refused.

    Raises:
        EnrolmentError: this folder holds a membership that another invite made; its certificate stays.
        TlsRefused: the invite pins a certificate that it does not carry and that was not given.
    """
    _begun(folder, invite)
    if invite.tls_sha256 is None:
        if pem is None:
            return False
        certificates(pem)
        save_ca(folder, pem)
        return True
    if pem is None and invite.certificate is not None:
        pem = pem_of(invite.certificate)
    if pem is None:
        raise TlsRefused(
            "the invite names the coordinator's certificate but does not carry it; ask the operator for its file and "
            "give it with --ca FILE",
            code="ca_needed",
        )
    save_ca(folder, pinned_certificate(pem, bytes.fromhex(invite.tls_sha256)))
    return True


def enrol(
    folder: Path,
    invite: Invite,
    transport: Transport,
    *,
    own_ca: bool = False,
    proxy: str | None = None,
    suite: int = DEFAULT_SUITE,
    passphrase: bytes | None = None,
    clock_ms: Callable[[], int] = wall_clock_ms,
    sleep: Callable[[float], None] = time.sleep,
) -> Membership:
    """Join the invite's federation, or go on with a joining that was cut off.

    Args:
        transport: to the invite's URL, trusting what `trust_certificate` kept.
        own_ca: whether that is a certificate of its own.
        proxy: to go through from now on, "" for none; None leaves that of a membership as it is, and is none for one
            that is still joining.

    Returns:
        The membership, in state "pending" (or "approved", where the operator was quick).

    Raises:
        EnrolmentError: this folder holds another membership, or the fingerprints differ.
        SignedRefusal: the coordinator refused the token or a proof.
        Unavailable: no signed answer came; run it again.
    """
    begun = _begun(folder, invite)
    if begun is not None and begun.state != "joining":
        return keep_way(folder, begun, passphrase, own_ca=own_ca, proxy=proxy)
    view = CoordinatorView(transport, invite.coordinator_key_id, invite.federation, clock_ms=clock_ms)
    if view.now_ms() > invite.expires_ms:
        raise EnrolmentError("the invite has expired; ask the operator for a new one", "expired_invite")
    create_identity(folder, suite, passphrase)
    joining = Membership(
        url=invite.url, federation=invite.federation, name=invite.name, role=invite.role, state="joining",
        coordinator_key_id=invite.coordinator_key_id, key_record=view.record, key_number=view.key_number,
        key_fetched_ms=view.fetched_ms, own_ca=own_ca, proxy=proxy, token_sha256=invite.token_sha256,
        root_key_id=invite.root_key_id, keys_made_ms=view.now_ms(),
        idem=begun.idem if begun is not None else secrets.token_hex(16),
    )  # fmt: skip
    save_membership(folder, joining)
    with Identity(folder, passphrase) as identity:
        caller = Caller(
            transport=transport, identity=identity, federation=invite.federation, coordinator=view, sleep=sleep
        )
        found = _prove(caller, identity, invite, joining.idem)
    joined = dataclasses.replace(joining, state=found.state, fingerprint=found.fingerprint)
    save_membership(folder, joined)
    return joined


def keep_way(
    folder: Path, known: Membership, passphrase: bytes | None, *, own_ca: bool = False, proxy: str | None = None
) -> Membership:
    """Keep the way to the coordinator that is given for a membership, where it has another one; return the membership.

    Args:
        own_ca, proxy: as of `enrol`.

    Raises:
        ExchangeError: another process holds the keys.
    """

    def changed(one: Membership) -> Membership:
        return dataclasses.replace(one, own_ca=own_ca or one.own_ca, proxy=one.proxy if proxy is None else proxy)

    if changed(known) == known:
        return known
    with Identity(folder, passphrase):  # no other process writes the record meanwhile
        kept = changed(load_membership(folder))
        save_membership(folder, kept)
    return kept


def _begun(folder: Path, invite: Invite) -> Membership | None:
    """The membership that this invite began; what another unanswered invite left behind is cleared away."""
    try:
        found = load_membership(folder)
    except NotEnrolled:
        return None
    if found.token_sha256 == invite.token_sha256:
        return found
    if found.state != "joining":
        raise EnrolmentError(
            f"this device already belongs to the federation {found.federation}, as {found.name}; if its operator has "
            f"shut it out, move the folder {folder} away and enrol again; to join another federation, use another home "
            "folder (--home)",
            code="already_enrolled",
        )
    remove_identity(folder)
    return None


def _prove(caller: Caller, identity: Identity, invite: Invite, idem: str) -> EnrolProofReply:
    """Send the token, then the nonce that only the new sealing key can read."""
    request = EnrolRequest(
        idem=idem, token=invite.token, name=invite.name, role=invite.role, signing_public=identity.signing.public,
        sealing_suite=identity.sealing.suite, sealing_public=identity.sealing.public,
    )  # fmt: skip
    nonce = EnrolReply.from_payload(caller.call("enrol", request.to_payload())).nonce
    proof = EnrolProofRequest(idem=f"{idem}-proof", nonce=nonce)
    found = EnrolProofReply.from_payload(caller.call("enrol-proof", proof.to_payload()))
    own = fingerprint(invite.federation, identity.signing.public, identity.sealing.public)
    if not same_fingerprint(found.fingerprint, own):
        raise EnrolmentError(
            f"the coordinator shows the fingerprint {found.fingerprint}, but these keys have {own}: somebody may "
            "have replaced the keys on the way; tell the operator not to approve this device",
            code="fingerprint_differs",
        )
    return dataclasses.replace(found, fingerprint=own)
