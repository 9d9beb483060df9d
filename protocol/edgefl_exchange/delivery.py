"""Sending what waits in the outbox: an item is promised to a round durably, sent, and deleted after a signed answer.

A contribution that comes too late waits for a later round; one that comes after this member's reply was refused takes
its place where the coordinator says that it may. What was learned in a round (`LEARNED`) answers its
broadcast alone: it is dropped when that round is over. Where the coordinator refuses it, it stays until then and is
offered again, for the operator may change what it was refused for (docs/decisions/0077). Guarantees: whoever depends on
what became of an item is told before the item is forgotten, and told again after a crash in between. Source:
docs/security.md, replay window and idempotency.
"""

import dataclasses
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from edgefl_exchange.errors import OutboxError, SignedRefusal, Unavailable
from edgefl_exchange.outbox import LEARNED, Outbox, WorkItem
from edgefl_protocol.envelopes.blob import BlobReference
from edgefl_protocol.errors import EdgeflError
from edgefl_protocol.messages.requests import ReplyReply, TaskReply
from edgefl_protocol.payload import Payload

# Refusals after which a reply is not taken, in this round or a later one, unless the operator changes a setting.
HOPELESS = frozenset({"bad_contribution", "bad_message", "too_large", "unsupported", "idem_conflict"})
# Refusals after which the same reply may be offered to a later round.
TOO_LATE = frozenset({"round_closed", "no_round", "already_replied"})
# Refusals after which the blob is sent again from the beginning.
BLOB_LOST = frozenset({"no_blob", "bad_blob"})
OVER = "round_over"  # of what was learned in a round that was over before it was first sent, or that refused it
_LOG = logging.getLogger("edgefl.exchange")


class ReplySender(Protocol):
    """What delivery asks of a member."""

    def reply(self, idem: str, payload: Payload | BlobReference, round_number: int) -> ReplyReply:
        """Send a round's reply once."""

    def send_blob(self, outbox: Outbox, item: WorkItem) -> None:
        """Send what the coordinator lacks of a large item."""


@dataclass(frozen=True, kw_only=True)
class Delivery:
    """What became of a work item."""

    idem: str  # its key when it was offered
    round: int  # the round it was offered to
    # "accepted", "kept" (for a later round), "late" (deleted: it was learned in a round that is over), "refused"
    # (deleted; what was learned stays while its round lasts) or "held" (it may not leave; it stays)
    outcome: str
    code: str | None = None  # code of the signed refusal, or of what holds it, or None
    message: str | None = None  # its sentence, or None
    bytes: int  # length of its payload


Permit = Callable[[WorkItem, int], EdgeflError | None]
Settled = Callable[[WorkItem, Delivery], None]


def settle(delivery: Delivery, count: Callable[[int], None], drop: Callable[[int], None]) -> None:
    """Count what was learned in a round exactly if its reply was accepted; else the member stays as before it.

    A member calls it with what it is told right before the outbox forgets an item, so both may be done twice.

    Args:
        count: given the round; the member's state is now the one after it.
        drop: given the round, which is over.
    """
    (count if delivery.outcome == "accepted" else drop)(delivery.round)


@dataclass(frozen=True, kw_only=True)
class Courier:
    """Delivers one outbox to one coordinator."""

    replies: ReplySender  # the member
    outbox: Outbox  # its outbox
    task: TaskReply  # as just fetched
    # asked before each item and round whether it may leave; gives what holds it, or None. None: all may
    permit: Permit | None
    settled: Settled  # told of an item right before it is deleted

    def deliver(self, federation: str) -> list[Delivery]:
        """Send what is due; at most one reply is accepted per round, so what was promised goes first.

        Raises:
            ExchangeError: no signed answer came; the items stay.
        """
        done: list[Delivery] = []
        task, answered = self.task, self.task.replied and not self.task.correctable
        items = [item for item in self.outbox.items(federation) if item.kind in ("reply", LEARNED)]
        items.sort(key=lambda item: item.round is None)  # stable: what was promised to a round is settled first
        for item in items:
            due = item
            if item.round is not None:
                # Its answer may have been lost: the same key in the same round gives the first answer again.
                delivery, due = self._settle(item, item.round)
                if delivery is not None:
                    done.append(delivery)
                    answered = answered or (delivery.outcome == "accepted" and item.round == task.round)
                if due.round is not None or item.round == task.round:
                    continue
            if task.state == "open" and not answered:
                if held := self._held(due, task.round):
                    done.append(held)
                    continue
                self.outbox.promise(due.idem, task.round)
                delivery, _ = self._offer(due, task.round)
                done.append(delivery)
                answered = delivery.outcome == "accepted"
        return done

    def _settle(self, item: WorkItem, round_number: int) -> tuple[Delivery | None, WorkItem]:
        """Send what is promised to a round; gives what became of it, and the item as it is then."""
        if item.kind == LEARNED:
            over = self.task.round > round_number or self.task.state == "done"
            if item.attempts == 0 and over:  # nobody can have it
                return self._over(item, round_number), item
            if item.attempts == 0 and self.task.state != "open":  # closed; it may open again
                return None, item
        if held := self._held(item, round_number):
            return held, item
        if item.kind == LEARNED:
            self.outbox.promise(item.idem, round_number)
        return self._offer(item, round_number)

    def _offer(self, item: WorkItem, round_number: int) -> tuple[Delivery, WorkItem]:
        """Send one item to one round; gives what became of it and, where it was freed, the item under its new key."""
        delivery = Delivery(idem=item.idem, round=round_number, outcome="accepted", bytes=item.size)
        try:
            self._send(item, round_number)
        except SignedRefusal as refusal:
            if refusal.code in BLOB_LOST:
                raise _lost_blob(item, refusal) from refusal
            outcome = _outcome(refusal, item)
            delivery = dataclasses.replace(delivery, outcome=outcome, code=refusal.code, message=str(refusal))
            _LOG.warning("reply of round %d %s: %s", round_number, outcome, refusal)
            if outcome == "kept":
                return delivery, dataclasses.replace(item, idem=self.outbox.release(item), round=None, attempts=0)
            if outcome == "refused" and item.kind == LEARNED:
                if self.task.round != round_number or self.task.state == "done":  # it can be offered no more
                    return self._over(item, round_number), item
                self.outbox.take_back(item.idem)
                return delivery, item
        self._forget(item, delivery)
        return delivery, item

    def _over(self, item: WorkItem, round_number: int) -> Delivery:
        """Drop what was learned in a round that takes it no more."""
        why = f"round {round_number} was over before its reply was taken; what was learned in it is dropped"
        delivery = Delivery(idem=item.idem, round=round_number, outcome="late", code=OVER, message=why, bytes=item.size)
        self._forget(item, delivery)
        return delivery

    def _send(self, item: WorkItem, round_number: int) -> None:
        """Send one item: inline, or as a blob, of which only what the coordinator lacks is sent."""
        if item.blob is None:
            self.replies.reply(item.idem, Payload.from_bytes(item.payload), round_number)
            return
        try:
            # First: it may be answered, or too late, or be there.
            self.replies.reply(item.idem, item.blob, round_number)
        except SignedRefusal as refusal:
            if refusal.code != "no_blob":
                raise
            self.replies.send_blob(self.outbox, item)
            self.replies.reply(item.idem, item.blob, round_number)

    def _held(self, item: WorkItem, round_number: int) -> Delivery | None:
        """What became of an item that may not leave; None where it may."""
        error = None if self.permit is None else self.permit(item, round_number)
        if error is None:
            return None
        return Delivery(
            idem=item.idem, round=round_number, outcome="held", code=error.code, message=str(error), bytes=item.size
        )

    def _forget(self, item: WorkItem, delivery: Delivery) -> None:
        """Delete a settled item, after all that depends on it was kept."""
        self.settled(item, delivery)
        self.outbox.delete(item.idem)


def _outcome(refusal: SignedRefusal, item: WorkItem) -> str:
    """What a refusal makes of an item."""
    if refusal.code in HOPELESS:
        return "refused"
    if refusal.code in TOO_LATE:
        return "late" if item.kind == LEARNED else "kept"
    raise refusal


def _lost_blob(item: WorkItem, refusal: SignedRefusal) -> EdgeflError:
    """Why a blob that was sent does not count: our own file is damaged, or it will be sent anew."""
    try:
        item.content()
    except OutboxError as error:
        return error
    return Unavailable(
        f"the coordinator does not have the whole reply ({refusal}); it will be sent again", refusal.code
    )
