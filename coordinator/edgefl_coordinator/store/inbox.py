"""Each envelope once, each work item once: replay windows and stored first answers.

Guarantees: the window of a sender is judged and kept in one transaction that is committed before or with the effect, so
neither a restart nor a second worker can admit an envelope twice. A repeated `idem` with the same payload gets the
first answer; with another payload it is refused. Only where its effect is lost it may be done again. Source:
docs/security.md, replay window and idempotency (checks 17 to 19); RFC 6479.
"""

from sqlalchemy import Connection, bindparam, delete, insert, select

from edgefl_coordinator.errors import RefusedError
from edgefl_coordinator.store.statements import Statement, keep_last
from edgefl_coordinator.store.tables import idempotency, mids, windows
from edgefl_protocol.envelopes.header import Header
from edgefl_protocol.envelopes.replay import EMPTY_BITMAP, NO_HIGHEST, judge
from edgefl_protocol.errors import ReplayError, SequenceError

_MESSAGE = (mids.c.skid == bindparam("skid")) & (mids.c.mid == bindparam("mid"))
_HIGHEST, _BITMAP = (
    select(column).where(windows.c.skid == bindparam("skid")).scalar_subquery()
    for column in (windows.c.highest, windows.c.bitmap)
)
_WINDOW = Statement(select(_HIGHEST, _BITMAP, select(mids.c.mid).where(_MESSAGE).scalar_subquery()))
_KEEP_WINDOW = keep_last(windows)
_KEEP_MID = Statement(insert(mids))
_FORGET = Statement(delete(mids).where(mids.c.until_ms < bindparam("now_ms")))
_ANSWER = Statement(
    select(idempotency.c.payload_sha256, idempotency.c.answer).where(
        idempotency.c.skid == bindparam("skid"), idempotency.c.idem == bindparam("idem")
    )
)
_KEEP_ANSWER = Statement(insert(idempotency))
_FORGET_ANSWER = Statement(
    delete(idempotency).where(idempotency.c.skid == bindparam("skid"), idempotency.c.idem == bindparam("idem"))
)


def forget(connection: Connection, now_ms: int) -> None:
    """Forget the ids of messages whose expiry refuses them by now."""
    _FORGET.run(connection, now_ms=now_ms)


def admit(connection: Connection, header: Header, now_ms: int, forget_ms: int) -> None:
    """Admit an authenticated envelope once.

    Args:
        forget_ms: until when the message id has to be remembered; later its expiry refuses it.

    Raises:
        RefusedError: `replayed`, `seq_behind` with the highest number, or `seq_jump`. A new message under a number that
            was used comes from a device that was restored from an image: it is behind, and told so.
    """
    found = _WINDOW.first(connection, skid=header.skid, mid=header.mid)
    highest, bitmap, seen = found or (None, None, None)
    if highest is None:
        highest, bitmap = NO_HIGHEST, EMPTY_BITMAP
    if seen:
        raise RefusedError("replayed", "this message was accepted before")
    try:
        highest, bitmap = judge(highest, bitmap, header.seq)
    except SequenceError as error:
        raise RefusedError(error.code, str(error), highest=error.highest) from error
    except ReplayError as error:  # its id is remembered until its time refuses it, so this is another message
        raise RefusedError("seq_behind", f"{error}; continue above {highest}", highest=highest) from error
    _KEEP_MID.send(connection, skid=header.skid, mid=header.mid, until_ms=forget_ms)
    _KEEP_WINDOW.send(connection, skid=header.skid, highest=highest, bitmap=bitmap)


def first_answer(connection: Connection, skid: str, idem: str, payload_sha256: str) -> bytes | None:
    """Return the stored first answer to this work item, or None if it is new.

    `idem_conflict` where the key was used with another payload.
    """
    row = _ANSWER.first(connection, skid=skid, idem=idem)
    if row is None:
        return None
    known, answer = row
    if known != payload_sha256:
        raise RefusedError("idem_conflict", "this idem was used with another payload; use a new one for new work")
    return bytes(answer)


def keep_answer(connection: Connection, now_ms: int, skid: str, idem: str, payload_sha256: str, answer: bytes) -> None:
    """Store the first answer to a work item, with the effect."""
    row = {"skid": skid, "idem": idem, "payload_sha256": payload_sha256, "answer": answer, "created_ms": now_ms}
    _KEEP_ANSWER.send(connection, **row)


def forget_answer(connection: Connection, skid: str, idem: str) -> None:
    """Let a work item be done again: its effect is lost."""
    _FORGET_ANSWER.run(connection, skid=skid, idem=idem)
