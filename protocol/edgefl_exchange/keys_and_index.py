"""A member's keys and its federation's records over time: its own change of keys, the index, the revoked keys.

Guarantees: a change of keys counts here only after the coordinator's signed answer (`key_change` makes each step safe
against crashes); an index and a list of revoked keys are kept only once both are verified, and neither ever goes back.
Source: docs/security.md 2.6.4, 2.6.5 and 2.8, checks 23, 24 and 26.
"""

import dataclasses
import logging
import secrets
from collections.abc import Callable
from pathlib import Path

from edgefl_exchange.caller import Caller
from edgefl_exchange.errors import SignedRefusal, Unavailable
from edgefl_exchange.identity import Identity, Successor
from edgefl_exchange.membership import Membership
from edgefl_exchange.trust_records import save_revoked
from edgefl_protocol.envelopes.keys import PublicSigningKey
from edgefl_protocol.errors import RecordError
from edgefl_protocol.messages.key_messages import IndexReply, RotateReply, RotateRequest
from edgefl_protocol.payload import Payload
from edgefl_protocol.records.coordinator_records import Index, verify_index
from edgefl_protocol.records.revocation import verify_revoked
from edgefl_protocol.records.rotation import make_rotation

ROTATE_AFTER_MS = 30 * 24 * 3600 * 1000  # age at which a member changes its keys by itself
# Refusals after which the next keys are given up: the coordinator will never take them.
_GIVEN_UP = frozenset({"replaced_key", "known_key", "bad_proof"})
_LOG = logging.getLogger("edgefl.exchange")


def change_keys(
    membership: Membership,
    identity: Identity,
    caller: Caller,
    caller_of: Callable[[Successor], Caller],
    now_ms: Callable[[], int],
) -> Membership:
    """Change a member's keys, or go on where a change was cut off.

    Args:
        caller_of: makes one that asks in the name of the next keys.

    Returns:
        The membership to keep: with the new fingerprint and the age of the new keys.

    Raises:
        Unavailable: no signed answer came; both keys are kept, and the next attempt goes on.
        SignedRefusal: the coordinator refused; the keys that count stay.
        StorageError: the disk is full; the keys that count stay.
    """
    successor = identity.begin_change()
    record = make_rotation(
        identity.signing, successor.signing, successor.sealing.public_key, membership.federation, now_ms()
    )
    request = RotateRequest(idem=secrets.token_hex(16), record=record).to_payload()
    try:
        answer = _ask(caller, request)
        if answer is None:  # the answer to an earlier attempt was lost, and the old key's time is over since
            answer = RotateReply.from_payload(caller_of(successor).call("rotate", request))
    except SignedRefusal as refusal:
        if refusal.code in _GIVEN_UP:
            identity.drop_change()
        raise
    identity.commit_change()
    _LOG.warning("keys changed; the fingerprint is %s", answer.fingerprint)
    return dataclasses.replace(membership, fingerprint=answer.fingerprint, keys_made_ms=now_ms())


def is_due(membership: Membership, now_ms: int) -> bool:
    """Tell whether this member's keys are 30 days old, or of unknown age."""
    return now_ms - membership.keys_made_ms >= ROTATE_AFTER_MS


def take_index(
    reply: IndexReply, folder: Path, membership: Membership, key: PublicSigningKey, now_ms: int
) -> tuple[Index, Membership]:
    """Verify the index and the list of revoked keys that came with it, and keep the list.

    Returns:
        The index, and the membership to keep.

    Raises:
        RecordError: one of the two is not the coordinator's, is expired, from the future or rolled back.
    """
    federation = membership.federation
    index = verify_index(reply.index, key, federation, now_ms, membership.index_issued_ms)
    try:
        revoked = verify_revoked(reply.revoked, key, federation, now_ms, membership.revoked_version)
    except RecordError as error:
        if error.code != "expired":
            raise
        raise RecordError(
            "the federation's list of revoked keys is older than 24 hours, so no new bundle is taken (the one in use "
            "goes on scoring); try again later, and tell the operator",
            "revoked_stale",
        ) from error
    save_revoked(folder, reply.revoked)
    return index, dataclasses.replace(membership, index_issued_ms=index.issued_ms, revoked_version=revoked.version)


def _ask(caller: Caller, request: Payload) -> RotateReply | None:
    """Ask under the old key; None where nothing signed came back, as from a coordinator that knows it no more."""
    try:
        return RotateReply.from_payload(caller.call("rotate", request))
    except Unavailable as problem:
        if problem.code != "not_signed":
            raise
        return None
