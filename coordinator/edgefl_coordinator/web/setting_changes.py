"""`edgefl-coordinator set`: settings that an operator may change, checked together and written before they count.

Guarantees: a change is carried out as a whole or not at all; what `init` would refuse is refused; the audit log names
each key with its value. What the members agreed on, such as the method and the number of rounds, never changes: they
would leave. What was changed in the file by hand is held to the same when `serve` starts. Source:
docs/reference/coordinator.md.
"""

import difflib
import json
import shutil
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final
from urllib.parse import urlsplit

import msgspec
import tomli_w
from sqlalchemy import Connection

from edgefl_coordinator.errors import USAGE, OperatorError
from edgefl_coordinator.members import membership
from edgefl_coordinator.rounds import stored_rounds
from edgefl_coordinator.rounds.operator_gate import command_of
from edgefl_coordinator.rounds.quorum import beyond_members, unfinishable
from edgefl_coordinator.settings import (
    CoordinatorHome,
    CoordinatorSettings,
    agreed,
    by_name,
    settings_from_table,
    settings_to_table,
)
from edgefl_coordinator.store import audit
from edgefl_coordinator.store.coordinator import COUNTED, Coordinator, counted_settings, to_count
from edgefl_coordinator.store.statements import KEEP_FACT
from edgefl_coordinator.web.tls import first_certificate, refused_by_members, server_context
from edgefl_protocol.durable import write_atomic

_HTTPS: Final = 443
# Each is read again whenever it is used.
AT_ONCE: Final = (
    "public_url", "ca", "proxy_ends_tls", "task.max_samples",
    "rounds.quorum_min", "rounds.quorum_target", "rounds.deadline_s", "rounds.start", "rounds.min_cohort",
    "rounds.allow_small_cohort",
    "protection.rule", "protection.claim_most", "protection.norm_most", "protection.hostile", "protection.gate",
    "limits.reply_bytes", "limits.open_blobs", "limits.blob_age_s", "limits.skew_ms", "limits.lifetime_ms",
    "limits.worker_s", "limits.gate_s",
)  # fmt: skip
# Each is read once, when `serve` starts.
AT_RESTART: Final = (
    "host", "port", "certificate", "certificate_key",
    "limits.body_bytes", "limits.header_deadline_s", "limits.body_deadline_s", "limits.body_bytes_per_s",
    "limits.connections", "limits.one_address", "limits.waiting_bytes", "limits.open_per_minute",
)  # fmt: skip


def change_settings(coordinator: Coordinator, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Change settings: {changes: {key: text}} → {changed: {key: value}, restart: [keys that count after a restart],
    warning}. The warning, or None, says that members go on calling a port that nothing may listen on.

    Raises:
        OperatorError: a key that is unknown or never changes (also where the file was changed by hand), a value out of
            bounds, a file that is no certificate or does not fit the others or the public address, or rounds that could
            not finish.
        StorageError: nothing was changed.
    """
    if not all(str(word).isprintable() for item in arguments["changes"].items() for word in item):
        raise OperatorError("a setting and its value are one printable line each", USAGE)
    home, table = coordinator.store.home, settings_to_table(coordinator.settings)
    changed = {key: _place(table, key, str(text)) for key, text in arguments["changes"].items()}
    try:
        after = settings_from_table(table)
    except ValueError as error:
        raise OperatorError(str(error), USAGE) from error
    with coordinator.store.transaction() as connection:
        noted = counted_settings(connection)
    before = noted or coordinator.settings
    _check_agreed(home, before, after)
    if why := _could_stop(before, after):
        raise OperatorError(why, USAGE)
    _check_files(home, {**_edits(before, after), **changed}, after)
    with coordinator.store.transaction() as connection:
        _log(connection, coordinator.clock(), before, after, changed)
        if noted is not None:  # before the first start there is nothing that began
            _count(connection, after)
        members = len(membership.approved(connection)) if after.rounds != before.rounds else 0
        write_atomic(home.config, tomli_w.dumps(settings_to_table(after)).encode(), mode=0o600)
    coordinator.settings = after
    restart = [key for key in changed if key in AT_RESTART]
    late = beyond_members(after.rounds, members)[0] if members else ""
    return {"changed": changed, "restart": restart, "warning": late or _other_port(before, after) or None}


def check_edits(coordinator: Coordinator) -> None:
    """Hold the settings that `serve` finds in the file against those that counted last, if any did.

    An `OperatorError` where one was changed by hand that never changes, or `change_settings` would refuse the change.
    """
    home, after = coordinator.store.home, coordinator.settings
    with coordinator.store.transaction() as connection:
        before = counted_settings(connection)
    if before is not None:
        _check_agreed(home, before, after)
        if why := _could_stop(before, after):
            raise OperatorError(f"{home.config}: {why}")
        _check_files(home, _edits(before, after), after)


def note_edits(connection: Connection, coordinator: Coordinator) -> None:
    """Let the settings that `serve` found count: what was changed by hand stands in the audit log, too."""
    after = coordinator.settings
    _log(connection, coordinator.clock(), counted_settings(connection) or after, after, {})
    _count(connection, after)


def _count(connection: Connection, settings: CoordinatorSettings) -> None:
    KEEP_FACT.run(connection, key=COUNTED, value=json.dumps(to_count(settings)))


def _log(
    connection: Connection,
    now_ms: int,
    before: CoordinatorSettings,
    after: CoordinatorSettings,
    changed: Mapping[str, Any],
) -> None:
    """Note each change in the audit log, and let replies be judged again that it may let pass."""
    for key, value in {**changed, **_edits(before, after)}.items():
        audit.append(connection, now_ms, "setting", key, {"value": value})
    if (after.rounds, after.protection) != (before.rounds, before.protection):
        stored_rounds.judge_again(connection, now_ms)


def _edits(before: CoordinatorSettings, after: CoordinatorSettings) -> dict[str, Any]:
    """Return key → new value of the settings that may change, and did."""
    old, new = by_name(before), by_name(after)
    return {key: new[key] for key in (*AT_ONCE, *AT_RESTART) if new[key] != old[key]}


def _could_stop(before: CoordinatorSettings, after: CoordinatorSettings) -> str:
    """Say why the rounds could stop for good; "" where they could not, or could for the same reason before."""
    why = unfinishable(after.rounds, after.task)
    return "" if why == unfinishable(before.rounds, before.task) else why


def _check_agreed(home: CoordinatorHome, before: CoordinatorSettings, after: CoordinatorSettings) -> None:
    """Refuse, by an `OperatorError`, what was changed by hand and never changes."""
    old, new = agreed(before), agreed(after)
    told = [
        f"{key} is {_shown(new, key)}, but the federation began with {_shown(old, key)}"
        for key in {**old, **new}
        if (key in old, old.get(key)) != (key in new, new.get(key))
    ]
    if told:
        raise OperatorError(f"{'; '.join(told)}: put {'it' if len(told) == 1 else 'them'} back in {home.config}")


def _shown(settings: Mapping[str, Any], key: str) -> str:
    """Write a value as the file has it."""
    return json.dumps(settings[key], ensure_ascii=False) if key in settings else "none"


def _other_port(before: CoordinatorSettings, after: CoordinatorSettings) -> str:
    """Say that the port changed, and with it no longer is the one that members call; "" where it is, or never was."""
    fitting = other_port(after)
    called = urlsplit(after.public_url).port or _HTTPS
    if not fitting or after.port == before.port or before.port != called:
        return ""
    return (
        f"members go on calling {after.public_url}; unless that is forwarded to port {after.port}, run: "
        f"edgefl-coordinator set public_url {fitting}. It counts for new invites: who is a member already calls the "
        "address of its invite"
    )


def other_port(settings: CoordinatorSettings) -> str:
    """Return the public address with the port that the server listens on; "" where members call that one."""
    url = urlsplit(settings.public_url)
    if settings.port in (0, url.port or _HTTPS):
        return ""
    name = f"[{url.hostname}]" if ":" in str(url.hostname) else url.hostname
    return url._replace(netloc=f"{name}:{settings.port}").geturl()


def _check_files(home: CoordinatorHome, changed: Collection[str], after: CoordinatorSettings) -> None:
    """Load the PEM files that a change names, and look for the gate: what could not be used is refused now."""
    if {"certificate", "certificate_key"} & set(changed):
        server_context(home.root / after.certificate, home.root / after.certificate_key)
    if "ca" in changed and after.ca:
        first_certificate(home.root / after.ca)
    command = command_of(after.protection.gate, home.root)
    if "protection.gate" in changed and command and shutil.which(command[0]) is None:
        raise OperatorError(f"protection.gate names {command[0]}, which is no program that can be started here", USAGE)
    if {"certificate", "certificate_key", "ca", "public_url", "proxy_ends_tls"} & set(changed) and (
        why := refused_by_members(home, after)
    ):
        raise OperatorError(why, USAGE)


def _place(table: dict[str, Any], key: str, text: str) -> Any:
    """Put a value, given as text, where its key says; return it."""
    known = (*AT_ONCE, *AT_RESTART)
    if key not in known:
        raise OperatorError(_no_such(key, known, table), USAGE)
    *sections, name = key.split(".")
    for section in sections:
        table = table[section]
    table[name] = _read(text, type(table[name]), key)
    return table[name]


def _no_such(key: str, known: Sequence[str], table: Mapping[str, Any]) -> str:
    """Say that a setting never changes, or what it might have been meant for."""
    section, _, name = key.rpartition(".")
    if name in (table.get(section, {}) if section else table):
        return (
            f"{key} cannot be changed, because members rely on it; make another federation with `edgefl-coordinator "
            "init`"
        )
    near = difflib.get_close_matches(key, known, 1)
    return f"there is no setting {key}; " + (
        f"did you mean {near[0]}?" if near else f"these can be changed: {', '.join(sorted(known))}"
    )


def _read(text: str, kind: type, key: str) -> Any:
    try:
        return msgspec.convert(text, kind, strict=False)
    except msgspec.ValidationError as error:
        wanted = {int: "a whole number", float: "a number", bool: "true or false"}[kind]
        raise OperatorError(f"{key} takes {wanted}, not {text!r}", USAGE) from error
