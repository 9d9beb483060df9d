"""A member's dealings with its coordinator: the task, broadcasts, replies, bundles.

Opening a `Member` takes the lock on its keys and reads the folder that `enrol` filled. Nothing is sent before a
method is called; from then on each may raise `ExchangeError`: no answer, or a refusal. Replies come from the outbox
(`delivery`).
"""

import dataclasses
import logging
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Self

from edgefl_exchange import keys_and_index
from edgefl_exchange.blobs import PART_AGE_S, Pace, fetch_blob, send_blob, sweep_parts
from edgefl_exchange.broadcast_limits import check_broadcast, memory_bytes
from edgefl_exchange.caller import Caller, Speaker
from edgefl_exchange.coordinator_keys import CoordinatorView, wall_clock_ms
from edgefl_exchange.delivery import Courier, Delivery, Permit, Settled
from edgefl_exchange.errors import ExchangeError, NotEnrolled, SignedRefusal, Unavailable
from edgefl_exchange.identity import Identity
from edgefl_exchange.membership import Membership, load_membership, load_task, save_membership, save_task
from edgefl_exchange.outbox import Outbox, WorkItem
from edgefl_exchange.transport import Closing, Transport
from edgefl_exchange.trust_records import load_revoked, load_root, save_root
from edgefl_protocol.envelopes.blob import MAX_BLOB_BYTES, BlobReference
from edgefl_protocol.envelopes.keys import PublicSigningKey
from edgefl_protocol.errors import EdgeflError
from edgefl_protocol.messages.key_messages import IndexReply
from edgefl_protocol.messages.requests import (
    BroadcastRequest,
    BundleReply,
    BundleRequest,
    EmptyRequest,
    ReplyReply,
    ReplyRequest,
    TaskReply,
)
from edgefl_protocol.payload import Payload
from edgefl_protocol.records.coordinator_records import Index

_LOG = logging.getLogger("edgefl.exchange")


class Member:
    """An enrolled member.

    Args:
        connect: makes the transport from the membership.
        lock_wait_s: how long to wait for another process that uses the keys.

    Raises:
        NotEnrolled: the folder holds no finished enrolment.
        Unavailable: the coordinator's keys had to be fetched anew and could not be.
    """

    def __init__(
        self,
        folder: Path,
        connect: Callable[[Membership], Transport],
        *,
        passphrase: bytes | None = None,
        clock_ms: Callable[[], int] = wall_clock_ms,
        sleep: Callable[[float], None] = time.sleep,
        rng: random.Random | None = None,
        lock_wait_s: float = 10.0,
    ) -> None:
        self._folder = folder
        self._parts, self._bundle_parts = folder / "parts", folder / "bundle-parts"
        for parts in (self._parts, self._bundle_parts):
            sweep_parts(parts, rested_s=PART_AGE_S)
        _finished(folder)  # where there is none, no lock is taken
        self.identity = Identity(folder, passphrase, lock_wait_s)
        try:
            self.membership = _finished(folder)  # as it is now: another process may have changed it before the lock
            transport = self._transport = connect(self.membership)
            self._coordinator = CoordinatorView(
                transport, self.membership.coordinator_key_id, self.membership.federation,
                record=self.membership.key_record, fetched_ms=self.membership.key_fetched_ms, clock_ms=clock_ms,
                on_keys=self._keep_keys, root_key_id=self.membership.root_key_id, root=load_root(folder),
                on_root=lambda record: save_root(folder, record),
            )  # fmt: skip
        except BaseException:
            self.identity.close()
            raise

        def caller_of(speaker: Speaker, first: Callable[[], None] | None = None) -> Caller:
            return Caller(
                transport=transport, identity=speaker, federation=self.membership.federation,
                coordinator=self._coordinator, sleep=sleep, rng=rng, first=first,
            )  # fmt: skip

        self._caller_of = caller_of
        self._caller = caller_of(self.identity, self._settle_rotation)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.identity.close()
        if isinstance(self._transport, Closing):
            self._transport.close()

    def now_ms(self) -> int:
        """Return Unix milliseconds by the corrected clock."""
        return self._coordinator.now_ms()

    @property
    def signing(self) -> PublicSigningKey:
        """The coordinator's pinned signing key."""
        return self._coordinator.signing

    def task(self) -> TaskReply:
        """Fetch the task and keep it for work done offline; notes an approval, and that these keys are not known.

        Raises:
            NotEnrolled: the operator has not approved yet.
        """
        try:
            task = TaskReply.from_payload(self._caller.call("task", EmptyRequest().to_payload()))
        except SignedRefusal as refusal:
            if refusal.code not in ("pending", "not_approved"):
                raise
            raise NotEnrolled(
                f"the operator has not approved {self.membership.name} yet; its fingerprint is "
                f"{self.membership.fingerprint}",
                code="pending",
            ) from refusal
        except Unavailable as problem:
            if problem.keys_unknown:  # nobody signed that: it is noted, and believed by nobody but whoever asks
                self._save(dataclasses.replace(self.membership, unknown_ms=self.now_ms()))
            raise
        if self.membership.state != "approved" or self.membership.unknown_ms:
            self._save(dataclasses.replace(self.membership, state="approved", unknown_ms=0))
        save_task(self._folder, task)
        return task

    def broadcast(self, round_number: int) -> Payload:
        """Fetch this member's broadcast of a round, of any size; one that was cut off goes on where it stopped.

        Raises:
            ExchangeError: no answer, or a refusal (`small_cohort`, `no_round`, …).
            BlobError: what came is not what the coordinator signed; for a device, larger than it takes (`room`).
        """
        request = BroadcastRequest(round=round_number)
        answer = self._caller.call("broadcast", request.to_payload(), rnd=round_number)
        reference = BlobReference.from_payload(answer)
        if reference is None:
            sweep_parts(self._parts)
            return answer
        task = load_task(self._folder) if self.membership.role == "device" else None
        if task is not None:
            check_broadcast(reference.plain_bytes, task, memory_bytes())
        data = fetch_blob(self._caller, reference, self._parts, Pace(), MAX_BLOB_BYTES)
        return Payload.from_bytes(data, MAX_BLOB_BYTES)

    def reply(self, idem: str, payload: Payload | BlobReference, round_number: int) -> ReplyReply:
        """Send a round's reply once; sending it again under the same key changes nothing.

        Args:
            payload: the method's reply, or the blob that the coordinator holds. What an outbox delivers goes as
                a blob above 1 MiB.

        Raises:
            FrameError: the reply does not fit one envelope.
        """
        request = ReplyRequest(idem=idem, reply=payload)
        return ReplyReply.from_payload(self._caller.call("reply", request.to_payload(), rnd=round_number))

    def deliver(
        self,
        outbox: Outbox,
        task: TaskReply,
        permit: Permit | None = None,
        settled: Settled = lambda item, delivery: None,
    ) -> list[Delivery]:
        """Send the outbox's replies that are due in the open round.

        At most one reply is accepted per round, so an item promised to this round goes first and a later one waits.

        Args:
            permit: asked before each item and round whether it may leave; gives what holds it, or None. None: all may.
            settled: told of an item right before it is deleted; what it keeps is kept before the item is forgotten, and
                after a crash in between it is told again.

        Raises:
            ExchangeError: no signed answer came; the items stay.
        """
        courier = Courier(replies=self, outbox=outbox, task=task, permit=permit, settled=settled)
        return courier.deliver(self.membership.federation)

    def send_blob(self, outbox: Outbox, item: WorkItem) -> None:
        """Send what the coordinator lacks of a large item.

        Raises:
            ExchangeError: no answer, or a refusal; what has arrived is not sent again.
        """
        assert item.blob is not None
        send_blob(self._caller, item.blob, outbox.file_of(item.blob), Pace())

    def index(self) -> Index:
        """Fetch the signed index of current bundles; an older one than seen is refused.

        Raises:
            RecordError: the index is not the coordinator's, expired or rolled back.
        """
        self._coordinator.refresh_root()
        reply = IndexReply.from_payload(self._caller.call("index", EmptyRequest().to_payload()))
        index, membership = keys_and_index.take_index(reply, self._folder, self.membership, self.signing, self.now_ms())
        self._save(membership)
        return index

    def refresh_index_if_due(self) -> None:
        """Fetch index and revoked keys where the last list is a day old: a revocation reaches those who never pull."""
        kept = load_revoked(self._folder)
        if self.membership.state == "approved" and (kept is None or self.now_ms() > kept.expires_ms):
            self.index()

    def rotate(self) -> None:
        """Change this member's keys: new ones, signed by the old and by themselves (`keys_and_index.change_keys`).

        Raises:
            ExchangeError: no answer, or a refusal; the old keys go on counting.
        """
        changed = keys_and_index.change_keys(
            self.membership, self.identity, self._caller_of(self.identity), self._caller_of, self.now_ms
        )
        self._save(changed)

    def rotate_if_due(self) -> bool:
        """Change this member's keys where they are 30 days old; True where that was done."""
        if self.membership.state != "approved" or not keys_and_index.is_due(self.membership, self.now_ms()):
            return False
        self.rotate()
        return True

    def keep_fresh(self) -> bool:
        """Fetch the list of revoked keys and change this member's keys, where either is due.

        A failure waits for the next time and disturbs nothing else.

        Returns:
            Whether the keys were changed.
        """
        try:
            self.refresh_index_if_due()
        except EdgeflError as error:
            _LOG.warning("the list of revoked keys was not refreshed: %s", error)
        try:
            return self.rotate_if_due()
        except EdgeflError as error:
            _LOG.warning("the keys were not changed: %s", error)
            return False

    def _settle_rotation(self) -> None:
        """Go on with a change of keys that was cut off, before anything else is asked."""
        if self.identity.is_changing:
            try:
                self.rotate()
            except ExchangeError as error:
                _LOG.warning("the change of keys waits: %s", error)

    def bundle(self, line: str, task: str, version: int) -> bytes:
        """Fetch a bundle's file, of any size; nothing is believed of it before `load_bundle`.

        Raises:
            BlobError: what came is not what the coordinator signed.
        """
        request = BundleRequest(line=line, task=task, version=version)
        answer = self._caller.call("bundle", request.to_payload())
        reference = BlobReference.from_payload(answer)
        if reference is None:
            return BundleReply.from_payload(answer).bundle
        return fetch_blob(self._caller, reference, self._bundle_parts, Pace(), MAX_BLOB_BYTES)

    def _keep_keys(self, view: CoordinatorView) -> None:
        kept = dataclasses.replace(
            self.membership, key_record=view.record, key_number=view.key_number, key_fetched_ms=view.fetched_ms,
            coordinator_key_id=view.key_id,
        )  # fmt: skip
        if view.key_id != self.membership.coordinator_key_id:  # what the key before signed binds no more
            kept = dataclasses.replace(kept, index_issued_ms=0, revoked_version=0)
        self._save(kept)

    def _save(self, membership: Membership) -> None:
        save_membership(self._folder, membership)
        self.membership = membership


def _finished(folder: Path) -> Membership:
    """Read the membership, or raise `NotEnrolled` where its enrolment did not end."""
    found = load_membership(folder)
    if found.state == "joining":
        raise NotEnrolled("the enrolment is not finished; run edgefl enrol again with the same invite")
    return found
