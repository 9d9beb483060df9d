"""A member's dealings with its coordinator: the task, broadcasts, replies, bundles.

Opening a `Member` reads the folder that `enrol` filled and takes the lock on its keys. Nothing is sent before a
method is called. Replies come from the outbox: an item is promised to a round durably, sent, and deleted only after a
signed answer. A contribution that comes too late waits for a later round; what was learned in a round is the answer to
its broadcast alone, and is dropped when that round is over.
"""

import dataclasses
import logging
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from edgefl_client.exchange.blobs import Pace, fetch_blob, send_blob, sweep_parts
from edgefl_client.exchange.caller import Caller
from edgefl_client.exchange.coordinator import CoordinatorView, wall_clock_ms
from edgefl_client.exchange.errors import NotEnrolled, OutboxError, Refused, Unavailable
from edgefl_client.exchange.identity import Identity
from edgefl_client.exchange.membership import Membership, load_membership, save_membership, save_task
from edgefl_client.exchange.outbox import LEARNED, Outbox, WorkItem
from edgefl_client.exchange.transport import Transport
from edgefl_protocol.blob import MAX_BLOB_BYTES, MAX_INLINE_BYTES, BlobReference
from edgefl_protocol.errors import EdgeflError
from edgefl_protocol.keys import PublicSigningKey
from edgefl_protocol.messages import (
    BroadcastRequest,
    BundleReply,
    BundleRequest,
    EmptyRequest,
    RecordReply,
    ReplyReply,
    ReplyRequest,
    TaskReply,
)
from edgefl_protocol.payload import Payload
from edgefl_protocol.records import Index, verify_index

# Refusals after which a reply can never be taken, in this round or a later one.
HOPELESS = frozenset({"bad_contribution", "bad_message", "too_large", "unsupported", "idem_conflict"})
# Refusals after which the same reply may be offered to a later round.
TOO_LATE = frozenset({"round_closed", "no_round", "already_replied"})
OVER = "round_over"  # of what was learned in a round that is over and was never sent
# Refusals after which the blob is sent again from the beginning.
BLOB_LOST = frozenset({"no_blob", "bad_blob"})
Permit = Callable[[WorkItem, int], EdgeflError | None]
_LOG = logging.getLogger("edgefl.exchange")


@dataclass(frozen=True, kw_only=True)
class Delivery:
    """What became of a work item.

    Attributes:
        idem: its key when it was offered.
        round: the round it was offered to.
        outcome: "accepted", "kept" (for a later round), "late" (deleted: it was learned in a round that is over),
            "refused" (deleted) or "held" (it may not leave; it stays).
        code: code of the signed refusal, or of what holds it, or None.
        message: its sentence, or None.
        bytes: length of its payload.
    """

    idem: str
    round: int
    outcome: str
    code: str | None = None
    message: str | None = None
    bytes: int


Settled = Callable[[WorkItem, Delivery], None]


class Member:
    """An enrolled member.

    Args:
        folder: the membership's folder.
        connect: makes the transport from the membership.
        passphrase: opens encrypted keys.
        clock_ms: this machine's clock.
        sleep: waits between attempts.
        rng: jitter of the waits.
        lock_wait_s: how long to wait for another process that uses the keys.

    Raises:
        NotEnrolled: the folder holds no finished enrolment.
        Unavailable: the coordinator's keys had to be fetched anew and could not be.
        EdgeflError: keys, files or records are damaged.
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
        self._parts = folder / "parts"
        self.membership = load_membership(folder)
        if self.membership.state == "joining":
            raise NotEnrolled("the enrolment is not finished; run edgefl enrol again with the same invite")
        transport = connect(self.membership)
        self.identity = Identity(folder, passphrase, lock_wait_s)
        try:
            self._coordinator = CoordinatorView(
                transport, self.membership.coordinator_key_id, self.membership.federation,
                record=self.membership.key_record, fetched_ms=self.membership.key_fetched_ms, clock_ms=clock_ms,
                on_keys=self._keep_keys,
            )  # fmt: skip
        except BaseException:
            self.identity.close()
            raise
        self._caller = Caller(
            transport=transport, identity=self.identity, federation=self.membership.federation,
            coordinator=self._coordinator, sleep=sleep, rng=rng,
        )  # fmt: skip

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.identity.close()

    def now_ms(self) -> int:
        """Unix milliseconds by the corrected clock."""
        return self._coordinator.now_ms()

    @property
    def signing(self) -> PublicSigningKey:
        """The coordinator's pinned signing key."""
        return self._coordinator.signing

    def task(self) -> TaskReply:
        """Fetch the task and keep it for work done offline; notes an approval that came meanwhile.

        Raises:
            NotEnrolled: the operator has not approved yet.
            ExchangeError: no answer, or a refusal.
        """
        try:
            task = TaskReply.from_payload(self._caller.call("task", EmptyRequest().to_payload()))
        except Refused as refusal:
            if refusal.code not in ("pending", "not_approved"):
                raise
            raise NotEnrolled(
                f"the operator has not approved {self.membership.name} yet; its fingerprint is "
                f"{self.membership.fingerprint}",
                code="pending",
            ) from refusal
        if self.membership.state != "approved":
            self._save(dataclasses.replace(self.membership, state="approved"))
        save_task(self._folder, task)
        return task

    def broadcast(self, round_number: int) -> Payload:
        """Fetch this member's broadcast of a round, of any size; one that was cut off goes on where it stopped.

        Args:
            round_number: from 1.

        Raises:
            ExchangeError: no answer, or a refusal (`small_cohort`, `no_round`, …).
            BlobError: what came is not what the coordinator signed.
            StorageError: the disk is full.
        """
        request = BroadcastRequest(round=round_number)
        answer = self._caller.call("broadcast", request.to_payload(), rnd=round_number)
        reference = BlobReference.from_payload(answer)
        if reference is None:
            sweep_parts(self._parts)
            return answer
        data = fetch_blob(self._caller, reference, self._parts, Pace(), MAX_BLOB_BYTES)
        return Payload.from_bytes(data, MAX_BLOB_BYTES)

    def reply(self, idem: str, payload: Payload | BlobReference, round_number: int) -> ReplyReply:
        """Send a round's reply once; sending it again under the same key changes nothing.

        Args:
            idem: stable key of the work item.
            payload: the method's reply, or the blob that the coordinator holds. What does not fit one envelope is put
                into an outbox and delivered from there.
            round_number: the open round.

        Raises:
            ExchangeError: no answer, or a refusal.
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
            outbox: this member's outbox.
            task: as just fetched.
            permit: asked before each item and round whether it may leave; gives what holds it, or None. None: all may.
            settled: told of an item right before it is deleted; what it keeps is kept before the item is forgotten, and
                after a crash in between it is told again.

        Returns:
            What became of each item that was offered.

        Raises:
            ExchangeError: no signed answer came; the items stay.
        """
        done: list[Delivery] = []
        items = [item for item in outbox.items(self.membership.federation) if item.kind in ("reply", LEARNED)]
        items.sort(key=lambda item: item.round is None)  # stable: what was promised to a round is settled first
        answered = task.replied
        for item in items:
            due = item
            if item.round is not None:
                # Its answer may have been lost: the same key in the same round gives the first answer again.
                delivery, due = self._settle(outbox, item, item.round, task, permit, settled)
                if delivery is not None:
                    done.append(delivery)
                    answered = answered or (delivery.outcome == "accepted" and item.round == task.round)
                if due.round is not None or item.round == task.round:
                    continue
            if task.state == "open" and not answered:
                if held := _held(permit, due, task.round):
                    done.append(held)
                    continue
                outbox.promise(due.idem, task.round)
                delivery, _ = self._offer(outbox, due, task.round, settled)
                done.append(delivery)
                answered = delivery.outcome == "accepted"
        return done

    def _send(self, outbox: Outbox, item: WorkItem, round_number: int) -> None:
        """Send one item: inline, or as a blob, of which only what the coordinator lacks is sent."""
        if item.blob is None or item.size <= MAX_INLINE_BYTES:
            self.reply(item.idem, Payload.from_bytes(item.payload), round_number)
            return
        try:
            self.reply(item.idem, item.blob, round_number)  # first: it may be answered, or too late, or be there
        except Refused as refusal:
            if refusal.code != "no_blob":
                raise
            send_blob(self._caller, item.blob, outbox.file_of(item.blob), Pace())
            self.reply(item.idem, item.blob, round_number)

    def index(self) -> Index:
        """Fetch the signed index of current bundles; an older one than seen is refused.

        Raises:
            ExchangeError: no answer, or a refusal.
            RecordError: the index is not the coordinator's, expired or rolled back.
        """
        record = RecordReply.from_payload(self._caller.call("index", EmptyRequest().to_payload())).record
        index = verify_index(
            record, self.signing, self.membership.federation, self.now_ms(), self.membership.index_issued_ms
        )
        self._save(dataclasses.replace(self.membership, index_issued_ms=index.issued_ms))
        return index

    def bundle(self, line: str, task: str, version: int) -> bytes:
        """Fetch a bundle's file; nothing is believed of it before `load_bundle`.

        Raises:
            ExchangeError: no answer, or a refusal.
        """
        request = BundleRequest(line=line, task=task, version=version)
        return BundleReply.from_payload(self._caller.call("bundle", request.to_payload())).bundle

    def _settle(
        self,
        outbox: Outbox,
        item: WorkItem,
        round_number: int,
        task: TaskReply,
        permit: Permit | None,
        settled: Settled,
    ) -> tuple[Delivery | None, WorkItem]:
        """Send what is promised to a round; gives what became of it, and the item as it is then."""
        if item.kind == LEARNED:
            if item.attempts == 0 and task.round > round_number:  # nobody can have it
                why = f"round {round_number} was over before its reply could be sent; what was learned in it is dropped"
                delivery = Delivery(
                    idem=item.idem, round=round_number, outcome="late", code=OVER, message=why, bytes=len(item.payload)
                )
                _forget(outbox, item, delivery, settled)
                return delivery, item
            if item.attempts == 0 and task.state != "open":  # closed; it may open again
                return None, item
        if held := _held(permit, item, round_number):
            return held, item
        if item.kind == LEARNED:
            outbox.promise(item.idem, round_number)
        return self._offer(outbox, item, round_number, settled)

    def _offer(self, outbox: Outbox, item: WorkItem, round_number: int, settled: Settled) -> tuple[Delivery, WorkItem]:
        """Send one item to one round; gives what became of it and, where it was freed, the item under its new key."""
        delivery = Delivery(idem=item.idem, round=round_number, outcome="accepted", bytes=item.size)
        try:
            self.reply(item.idem, Payload.from_bytes(item.payload), round_number)
        except Refused as refusal:
            outcome = _outcome(refusal, item)
            delivery = dataclasses.replace(delivery, outcome=outcome, code=refusal.code, message=str(refusal))
            _LOG.warning("reply of round %d %s: %s", round_number, outcome, refusal)
            if outcome == "kept":
                return delivery, dataclasses.replace(item, idem=outbox.release(item), round=None, attempts=0)
        _forget(outbox, item, delivery, settled)
        return delivery, item

    def _keep_keys(self, view: CoordinatorView) -> None:
        self._save(
            dataclasses.replace(
                self.membership, key_record=view.record, key_number=view.key_number, key_fetched_ms=view.fetched_ms
            )
        )

    def _save(self, membership: Membership) -> None:
        save_membership(self._folder, membership)
        self.membership = membership


def _held(permit: Permit | None, item: WorkItem, round_number: int) -> Delivery | None:
    """What became of an item that may not leave; None where it may."""
    error = None if permit is None else permit(item, round_number)
    if error is None:
        return None
    return Delivery(
        idem=item.idem, round=round_number, outcome="held", code=error.code, message=str(error), bytes=item.size
    )


def _outcome(refusal: Refused, item: WorkItem) -> str:
    """What a refusal makes of an item.

    Raises:
        Refused: it is about something else than the item.
    """
    if refusal.code in HOPELESS:
        return "refused"
    if refusal.code in TOO_LATE:
        return "late" if item.kind == LEARNED else "kept"
    raise refusal


def _forget(outbox: Outbox, item: WorkItem, delivery: Delivery, settled: Settled) -> None:
    """Delete a settled item, after all that depends on it was kept."""
    settled(item, delivery)
    outbox.delete(item.idem)


def _lost_blob(item: WorkItem, refusal: Refused) -> EdgeflError:
    """Why a blob that was sent does not count: our own file is damaged, or it will be sent anew."""
    try:
        item.content()
    except OutboxError as error:
        return error
    return Unavailable(f"the coordinator does not have the reply whole ({refusal}); it is sent again", refusal.code)
