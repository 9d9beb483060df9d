"""What an operator can do, one function an operation: the same whether `serve` runs or not.

Guarantees: each takes plain JSON values and returns them, changes the store in one transaction, and writes an audit
row. An invite's token is returned once and never stored. Source: docs/security.md, enrolment.
"""

import dataclasses
import hashlib
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from sqlalchemy import Connection

from edgefl_coordinator.errors import NotAllowedError, OperatorError
from edgefl_coordinator.members import coordinator_keys, grants, membership, uploads
from edgefl_coordinator.members.membership import MemberRow
from edgefl_coordinator.rounds import findings, refused, stored_rounds, task_status
from edgefl_coordinator.rounds.quorum import beyond_members, is_risky, set_command
from edgefl_coordinator.rounds.stuck import PUBLISH, lacks_bundle, stuck_sentence
from edgefl_coordinator.settings import RoundSettings
from edgefl_coordinator.store import audit, audit_heads, publishing, revocations
from edgefl_coordinator.store.audit_chain import RESTORED
from edgefl_coordinator.store.coordinator import Coordinator
from edgefl_coordinator.web.backup_operations import begin_backup, end_backup
from edgefl_coordinator.web.bundle_operations import publish, publish_root, revoke_signer
from edgefl_coordinator.web.setting_changes import change_settings
from edgefl_coordinator.web.tls import first_certificate, refused_by_members
from edgefl_protocol.envelopes.blob import sealed_size
from edgefl_protocol.errors import BundleError, EdgeflError, InviteError, RecordError
from edgefl_protocol.records.invite import MAX_CERTIFICATE_BYTES, TOKEN_BYTES, Invite, encode_invite

Arguments = Mapping[str, Any]
Facts = dict[str, Any]

_HOUR_MS = 3_600_000
MAX_SHOWN_ROWS = 10_000  # a few megabytes


def invite(coordinator: Coordinator, arguments: Arguments) -> Facts:
    """Make an invite: {name, role, hours} → {invite, name, role, expires_ms, ca, replaced, over}.

    `ca` is the file to hand over beside it, where the certificate is too large for the invite; else None. `replaced`
    tells what of this name counts no more: "invite", "enrolment" or None; `over`, whether all rounds are.

    Raises:
        OperatorError: an approved member has that name, or a value has not its form.
        StorageError: the certificate cannot be read, or the disk is full.
    """
    settings, now_ms = coordinator.settings, coordinator.clock()
    ca = coordinator.store.home.root / settings.ca if settings.ca else None
    certificate = first_certificate(ca) if ca else None
    carried = certificate if certificate and len(certificate) <= MAX_CERTIFICATE_BYTES else None
    try:
        record = Invite(
            url=settings.public_url,
            federation=settings.federation,
            coordinator_key_id=coordinator.keys.signing.key_id,
            root_key_id=settings.root_key_id or None,
            tls_sha256=hashlib.sha256(certificate).hexdigest() if certificate else None,
            certificate=carried,
            token=secrets.token_bytes(TOKEN_BYTES),
            name=str(arguments["name"]),
            role=str(arguments["role"]),
            expires_ms=now_ms + int(arguments["hours"] * _HOUR_MS),
        )
        text = encode_invite(record, now_ms)
    except InviteError as error:
        raise OperatorError(str(error)) from error
    with coordinator.store.transaction() as connection:
        replaced = membership.add_invite(connection, now_ms, record)
        over = task_status.round_state(connection) == "done"
    facts = {"name": record.name, "role": record.role, "expires_ms": record.expires_ms, "replaced": replaced}
    return {"invite": text, **facts, "ca": str(ca) if certificate and not carried else None, "over": over}


def approve(coordinator: Coordinator, arguments: Arguments) -> Facts:
    """Let a pending member in: {name, fingerprint, and perhaps images} → the member, and `over` as in `invite`.

    With `images` its replies weigh up to so many, also where it was approved before, and the refused replies of the
    open round are judged again. Raises as `membership.approve`.
    """
    federation, now_ms, name = coordinator.settings.federation, coordinator.clock(), str(arguments["name"])
    mismatch: NotAllowedError | None = None
    with coordinator.store.transaction() as connection:
        try:
            member = membership.approve(connection, now_ms, name, str(arguments["fingerprint"]), federation)
            if arguments.get("images") is not None:
                grants.grant(connection, now_ms, member, int(arguments["images"]))
                stored_rounds.judge_again(connection, now_ms)
            over = task_status.round_state(connection) == "done"
        except NotAllowedError as error:  # its audit row is kept
            mismatch = error
    if mismatch is not None:
        raise mismatch
    return {"name": member.name, "role": member.role, "state": "approved", "over": over}


def revoke(coordinator: Coordinator, arguments: Arguments) -> Facts:
    """Shut a member out, or withdraw an open invite: {name} → {name, state: "revoked" or "withdrawn", warnings}.

    A member's reply of the open round is dropped. `warnings` are those of `status`. An `OperatorError` where there is
    neither.
    """
    dropped: list[str] = []
    with coordinator.store.transaction() as connection:
        member = membership.revoke(connection, coordinator.clock(), str(arguments["name"]))
        if member:
            dropped += stored_rounds.drop_open_reply(connection, member.skid)
            dropped += uploads.remove_of(connection, member.skid)
        warnings = _warnings(coordinator, connection)
    coordinator.store.drop_blobs(dropped)
    return {"name": arguments["name"], "state": "revoked" if member else "withdrawn", "warnings": warnings}


def rotate(coordinator: Coordinator, arguments: Arguments) -> Facts:
    """Renew the sealing key, or change the signing key: {signing: bool} → what `coordinator_keys` tells."""
    if arguments["signing"]:
        return dict(coordinator_keys.change_signing(coordinator))
    return dict(coordinator_keys.renew_sealing(coordinator))


def start(coordinator: Coordinator, _: Arguments) -> Facts:
    """Open the first round with whoever is approved: {} → {approved, warnings}: those of `status` about so few.

    An `OperatorError` where nobody is approved, or the rounds have begun or are over.
    """
    with coordinator.store.transaction() as connection:
        approved = membership.approved(connection)
        if task_status.round_state(connection) == "done":
            raise OperatorError(
                "this federation is over: all its rounds are done, so none is left to open; for more, make a new one "
                "with `edgefl-coordinator init`"
            )
        if not approved:
            raise OperatorError("no member is approved yet; invite and approve members first")
        if stored_rounds.latest_state(connection) is not None:
            raise OperatorError("the rounds have already begun; see `edgefl-coordinator status`")
        stored_rounds.set_fact(connection, "start_wanted", True)
        audit.append(connection, coordinator.clock(), "start", coordinator.settings.federation)
    return {"approved": len(approved), "warnings": _too_few(coordinator.settings.rounds, len(approved))}


def status(coordinator: Coordinator, _: Arguments) -> Facts:
    """Tell how the federation stands; a stable JSON object."""
    settings, full = coordinator.settings, coordinator.store.full_folder()
    with coordinator.store.transaction() as connection:
        current = stored_rounds.current_round(connection)
        everybody = membership.listed(connection)
        number = current.number if current else 0
        phases = task_status.phases(connection)
        judged = number if task_status.round_state(connection) == "done" else number - 1
        bundles = [{"line": one.line, "task": one.task, "version": one.version,
                    "not_taken": publishing.not_taken(connection, one.signers) or None}
                   for one in publishing.current(connection)]  # fmt: skip
        last = audit.last(connection)
        heard = membership.heard_ms(connection)
        invites, shut_out = membership.open_invites(connection, coordinator.clock()), membership.shut_out(connection)
        replied = {member.skid: stored_rounds.has_replied(connection, member.skid, number) for member in everybody}
        granted = grants.granted(connection)
        facts: Facts = {
            "federation": settings.federation,
            "url": settings.public_url,
            "method": settings.task.method,
            "task": settings.task.name,
            "classes": list(settings.task.classes),
            "state": task_status.round_state(connection),
            "round": number,
            "rounds": len(phases) or settings.rounds.count,
            "train_rounds": settings.rounds.count,
            "phase": stored_rounds.phase_of(connection, number),
            "replies": current.replies if current else 0,
            "contributions": stored_rounds.counted(connection, number, beside=True),
            "quorum_min": settings.rounds.quorum_min,
            "quorum_target": settings.rounds.quorum_target,
            "deadline_ms": current.deadline_ms if current and current.state == "open" else None,
            "problem": stored_rounds.problem_of(connection, number),
            "refused": refused.refused_since(connection, number - 1),
            "bounded": findings.bounded_in(connection, judged),
            "noticed": findings.noticed_in(connection, judged),
            "gate_refused": [{"round": one, "said": said} for one, said in findings.refused_rounds(connection).items()],
            "failing": task_status.failing_job(connection, settings.rounds),
            "state_sha256": task_status.state_sha256(connection),
            "keys": _key_facts(coordinator, connection),
            "standing": _standing(coordinator, connection, number, full),
            "warnings": _warnings(coordinator, connection, full),
        }
    return facts | {
        "min_cohort": settings.rounds.min_cohort,
        "members": [
            _member_facts(one, settings.federation)
            | {"images": granted.get(one.name), "replied": replied[one.skid], "heard_ms": heard.get(one.skid)}
            for one in everybody
        ],
        "invites": invites,
        "shut_out": shut_out,
        "bundles": bundles,
        "certificate_problem": _certificate_problem(coordinator),
        "journal_mode": coordinator.store.database.name,
        "last_event": last,
    }


def _member_facts(member: MemberRow, federation: str) -> Facts:
    """Tell who a member is; its fingerprint only once it is approved, for a copied one compares nothing."""
    shown = member.fingerprint(federation) if member.state == "approved" else None
    return {"name": member.name, "role": member.role, "state": member.state, "fingerprint": shown}


def _standing(coordinator: Coordinator, connection: Connection, number: int, full: Path | None) -> Facts:
    """Tell whether the federation goes on, and what mends it where it does not."""
    disowned_ms = revocations.disowned_ms(connection, coordinator.keys.signing.key_id)
    found = task_status.how_it_stands(
        connection, coordinator.settings, coordinator.clock(), served=coordinator.serving, disowned_ms=disowned_ms,
        full=str(full or ""),
    )  # fmt: skip
    failing = task_status.failing_job(connection, coordinator.settings.rounds)
    if failing and found.cause == "job_failed":  # members are not told the error
        found = dataclasses.replace(found, mend=f"resolve this: {failing['error']}")
    sentence = stuck_sentence(found, number) or "; ".join(filter(None, (found.why, found.mend)))
    return dataclasses.asdict(found) | {"commands": list(found.commands), "sentence": sentence}


def _certificate_problem(coordinator: Coordinator) -> str | None:
    try:
        return refused_by_members(coordinator.store.home, coordinator.settings) or None
    except EdgeflError as error:  # a file that `serve` could not use when it starts again
        return str(error)


def _warnings(coordinator: Coordinator, connection: Connection, full: Path | None = None) -> list[Facts]:
    """Tell what will hold rounds up: [{cause, why, command, risky}]; nothing before the first round, or after the last.

    `cause` is a word as in `standing`, or `disk_low`; `risky` tells that after the command a single contribution can
    be told apart. That a disk is `full`, `standing` says.
    """
    rules, task = coordinator.settings.rounds, coordinator.settings.task
    if task_status.round_state(connection) in ("waiting", "done"):
        return []
    approved = membership.approved(connection)
    found = _too_few(rules, len(approved))
    if any(one.role == "device" for one in approved) and (lacking := task_status.unpublished(connection, task)):
        bundle = {"cause": "no_bundle", "why": lacks_bundle(lacking), "command": PUBLISH, "risky": False}
        found.insert(0, bundle)  # without it no device replies, however few replies are needed
    return found if full else found + _low_disk(coordinator)


def _low_disk(coordinator: Coordinator) -> list[Facts]:
    """Tell that a reply as large as is allowed would be refused for want of room, as `_warnings` does."""
    folder = coordinator.store.home.blobs
    try:
        free = coordinator.store.payloads.free_bytes()
    except OSError as error:
        why = f"{folder} cannot be used ({error.strerror or error}), so replies may be refused"
        return [{"cause": "disk_low", "why": why, "command": None, "risky": False}]
    needed = 2 * sealed_size(coordinator.settings.limits.reply_bytes)  # as it comes, and opened
    if free >= needed:
        return []
    why = (
        f"the disk of {folder} has {free / 2**20:.0f} MiB free, and one reply may take "
        f"{needed / 2**20:.0f} MiB, so replies may be refused"
    )
    return [{"cause": "disk_low", "why": why, "command": None, "risky": False}]


def _too_few(rules: RoundSettings, members: int) -> list[Facts]:
    """Tell that rounds cannot close, or close late, with so many members, as `_warnings` does."""
    why, changes = beyond_members(rules, members)
    command = set_command(changes) if changes else None
    return [{"cause": "too_few_members", "why": why, "command": command, "risky": is_risky(changes)}] if why else []


def _key_facts(coordinator: Coordinator, connection: Connection) -> Facts:
    """Tell which keys count: this coordinator's, the root set's, and how many are revoked."""
    ring, root = coordinator.keys.ring, revocations.newest(connection)
    version, key_ids = revocations.listed(connection)
    restored = audit.newest_of(connection, (RESTORED,))
    return {
        "signing": coordinator.keys.signing.key_id,
        "sealing_number": ring.number,
        "sealing_made_ms": ring.made_ms,
        "sealing_restored": restored is not None and restored[2] == ring.made_ms,
        "root_version": root.version if root else None,
        "root_expires_ms": root.expires_ms if root else None,
        "revoked": len(key_ids),
        "revoked_version": version,
    }


def verify_audit(coordinator: Coordinator, arguments: Arguments) -> Facts:
    """Check the audit log: {key_ids, restored} → {rows, signed_rows, signed_ms}; an `OperatorError` where it is broken.

    `key_ids` are signing keys that the coordinator had before, `restored` rows at which the log was restored.
    """
    known = arguments.get("key_ids", ()), arguments.get("restored", ())
    with coordinator.store.transaction() as connection:
        count, head = audit_heads.verify(coordinator, connection, *known)
    return {"rows": count, "signed_rows": head.rows if head else 0, "signed_ms": head.at_ms if head else None}


def copy_log(coordinator: Coordinator, arguments: Arguments) -> Facts:
    """Return a piece of the audit log as it is kept: {after, most} → {federation, rows, heads (of the first)}."""
    after, most = int(arguments["after"]), min(int(arguments["most"]), MAX_SHOWN_ROWS)
    with coordinator.store.transaction() as connection:
        rows = [list(row) for row in audit.kept_rows(connection, after=after, most=most)]
    heads = audit_heads.lines_of(coordinator) if after == 0 else []
    return {"federation": coordinator.settings.federation, "rows": rows, "heads": heads}


def show_log(coordinator: Coordinator, arguments: Arguments) -> Facts:
    """Check the audit log and return its newest rows: {from_ms, most} → {rows: how many there are, shown: [row]}.

    An `OperatorError` where the chain is broken.
    """
    most = min(int(arguments["most"]), MAX_SHOWN_ROWS)
    with coordinator.store.transaction() as connection:
        count, _ = audit_heads.verify(coordinator, connection)
        found = audit.newest_rows(connection, from_ms=int(arguments["from_ms"]), most=most)
    return {"rows": count, "shown": [dataclasses.asdict(row) for row in found]}


OPERATIONS: Mapping[str, Callable[[Coordinator, Arguments], Facts]] = {
    "invite": invite,
    "approve": approve,
    "revoke": revoke,
    "revoke_signer": revoke_signer,
    "rotate": rotate,
    "publish_root": publish_root,
    "start": start,
    "status": status,
    "publish": publish,
    "audit": verify_audit,
    "log": show_log,
    "copy_log": copy_log,
    "set": change_settings,
    "begin_backup": begin_backup,
    "end_backup": end_backup,
}

REFUSING = (NotAllowedError, BundleError, RecordError)  # exit 3
