"""The route `blob`, and what the routes `reply`, `broadcast` and `bundle` do with large payloads.

Guarantees: a piece is answered once it is durable, and every answer tells how much is there; a blob is believed only
when its length, SHA-256 and every chunk are verified, one blob at a time in memory; a member reads and writes what its
own key sent or was sent, whatever id it names. What a member fetches is sealed when it is asked for, from the stored
payload, under a key that is derived from the coordinator's secret and the blob's random id: nothing lies twice on the
disk, and the same piece is the same each time. Source: docs/security.md 2.2, docs/decisions/0029.
"""

import hashlib
from typing import Any

from sqlalchemy import Connection, Row, select

from edgefl_coordinator.commits.shared_commit import may_be_kept
from edgefl_coordinator.errors import RefusedError
from edgefl_coordinator.members import uploads
from edgefl_coordinator.members.membership import MemberRow
from edgefl_coordinator.members.uploads import Upload
from edgefl_coordinator.rounds import stored_rounds
from edgefl_coordinator.store.coordinator import Coordinator
from edgefl_coordinator.store.statements import keep_first
from edgefl_coordinator.store.tables import offers
from edgefl_coordinator.web.admission import Call, read, refuse, transact
from edgefl_protocol import Payload
from edgefl_protocol.envelopes.blob import (
    KEY_BYTES,
    BlobReference,
    new_blob_id,
    open_blob,
    seal_chunks,
    seal_range,
    sealed_size,
)
from edgefl_protocol.errors import BlobError, StorageError
from edgefl_protocol.messages.blob_messages import (
    MAX_PIECE_BYTES,
    BlobGet,
    BlobGetReply,
    BlobPut,
    BlobPutReply,
    read_blob_request,
)

ENVELOPE_BYTES = 64 * 2**10  # more than an envelope adds to its payload
_KEEP_OFFER = keep_first(offers)


def blob_route(call: Call) -> Payload:
    """Take a piece of a blob, or give one."""
    request = read(call, read_blob_request)
    return _give(call, request) if isinstance(request, BlobGet) else _take_piece(call, request)


def take_blob(call: Call, reference: BlobReference) -> bytes:
    """Return the verified payload of a blob that the member has sent whole; hold `store.large` meanwhile.

    Raises:
        RefusedError: the round takes no reply, `no_blob` where some of it is missing, or `bad_blob`, which drops it.
    """
    settings, store, number = call.coordinator.settings, call.coordinator.store, call.opened.header.rnd
    limit = settings.limits.reply_bytes

    def effect(connection: Connection, member: MemberRow) -> Upload:
        stored_rounds.check_reply_due(connection, settings.rounds, call.now_ms, member, number)
        if reference.plain_bytes > limit:
            raise RefusedError("too_large", f"the reply has {reference.plain_bytes} bytes; at most {limit} are allowed")
        upload = uploads.find(connection, member.skid, reference.blob)
        if upload is None or upload.have < upload.size:
            raise RefusedError("no_blob", "a part of the reply's blob is missing; send it, then send the reply again")
        return upload

    upload = transact(call, effect)
    try:
        return open_blob(store.payloads.upload(upload.file), reference, limit)
    except BlobError as error:
        drop_upload(call, reference)
        refuse(call, RefusedError("bad_blob", f"{error}; it was dropped: send it again from the beginning"), error)


def drop_upload(call: Call, reference: BlobReference) -> None:
    """Forget a member's blob, which can never be taken."""
    files = transact(call, lambda connection, member: uploads.remove(connection, member.skid, reference.blob))
    call.coordinator.store.drop_blobs(files)


def offer(call: Call, blob: str) -> BlobReference:
    """Return the reference by which the member fetches a stored payload; the same each time.

    A `StorageError` where the payload is gone.
    """
    coordinator, store = call.coordinator, call.coordinator.store

    def known(connection: Connection, member: MemberRow) -> Row[Any] | None:
        return connection.execute(select(offers).where(offers.c.skid == member.skid, offers.c.blob == blob)).first()

    row = transact(call, known)
    if row is None:
        made, plain_bytes, hasher = new_blob_id(), store.payloads.size(blob), hashlib.sha256()
        for chunk in seal_chunks(store.pieces(blob), _file_key(coordinator, made)):
            hasher.update(chunk)

        def keep(connection: Connection, member: MemberRow) -> Row[Any] | None:
            values = {"id": made, "blob": blob, "bytes": plain_bytes, "sha256": hasher.hexdigest()}
            _KEEP_OFFER.run(connection, skid=member.skid, **values)  # it may have been asked for twice at once
            return known(connection, member)

        row = transact(call, keep)
        assert row is not None
    key = _file_key(coordinator, row.id)
    return BlobReference(blob=row.id, size=sealed_size(row.bytes), sha256=row.sha256, key=key)


def _file_key(coordinator: Coordinator, blob: str) -> bytes:
    """A key of its own for every id, which is random and names one payload for ever."""
    return coordinator.derive("blob-key", blob)[:KEY_BYTES]


def _give(call: Call, request: BlobGet) -> Payload:
    def effect(connection: Connection, member: MemberRow) -> tuple[str, int]:
        found = select(offers).where(offers.c.id == request.blob, offers.c.skid == member.skid)
        row = connection.execute(found).first()
        if row is None:
            raise RefusedError("not_found", "there is no such blob for this member; fetch again what named it")
        return row.blob, row.bytes

    name, plain_bytes = transact(call, effect)
    key, length = _file_key(call.coordinator, request.blob), min(request.length, _piece_bytes(call))
    try:
        with call.coordinator.store.payloads.reading(name, length) as read_at:
            data = seal_range(read_at, plain_bytes, key, request.offset, length)
    except StorageError as error:  # its round ended between the two
        if error.code != "missing":
            raise
        refuse(call, RefusedError("not_found", "this blob has been deleted; ask for the task again"), error)
    return BlobGetReply(data=data).to_payload()


def _take_piece(call: Call, put: BlobPut) -> Payload:
    store = call.coordinator.store

    def known(connection: Connection, member: MemberRow) -> Upload | None:
        upload = uploads.find(connection, member.skid, put.blob)
        return None if upload is None else uploads.same(upload, put)

    upload = transact(call, known) or _begin(call, put)
    if put.data and put.offset == upload.have:
        store.payloads.put_piece(upload.file, put.offset, put.data)
        end = put.offset + len(put.data)
        found = transact(call, lambda connection, member: uploads.count(connection, call.now_ms, member.skid, put, end))
        if found is None:  # pushed out meanwhile: nothing names this piece
            store.drop_blobs([upload.file])
        upload = found or Upload(put.blob, put.size, put.sha256, 0, "")
    return BlobPutReply(have=upload.have, piece_bytes=_piece_bytes(call)).to_payload()


def _begin(call: Call, put: BlobPut) -> Upload:
    """Begin a blob, where its size is within the task's cap and the disk has room for it, for its payload, and for what
    other members have begun: so that together they do not fill the disk that the store lies on.

    Raises:
        RefusedError: `too_large` or `storage_full`; nothing was kept.
    """
    store, limits = call.coordinator.store, call.coordinator.settings.limits
    most = sealed_size(limits.reply_bytes)
    if put.size > most:
        refuse(call, RefusedError("too_large", f"the blob has {put.size} bytes; at most {most} are allowed"))
    promised = transact(call, lambda connection, member: uploads.promised_bytes(connection, but_of=member.skid))
    if store.payloads.free_bytes() < promised + 2 * put.size:
        refuse(
            call, RefusedError("storage_full", "the coordinator's disk is almost full; keep the blob and send it later")
        )
    file = store.new_upload()
    spare = [file]  # files that no row names

    def effect(connection: Connection, member: MemberRow) -> tuple[Upload, list[str]]:
        twin = uploads.find(connection, member.skid, put.blob)  # begun twice at once
        if twin is not None:
            return uploads.same(twin, put), spare
        return uploads.begin(connection, call.now_ms, member, put, file, limits.open_blobs)

    try:
        upload, spare = transact(call, effect)
        return upload
    except StorageError as error:
        if may_be_kept(error):
            spare = []
        raise
    finally:
        store.drop_blobs(spare)


def _piece_bytes(call: Call) -> int:
    """Longest piece whose envelope fits a body."""
    return min(MAX_PIECE_BYTES, call.coordinator.settings.limits.body_bytes - ENVELOPE_BYTES)
