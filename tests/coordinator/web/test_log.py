"""What `serve` logs, and `edgefl-coordinator log`: who, what and when, and nothing that a member wrote. Source:
docs/security.md, check 14; docs/reference/coordinator.md."""

import io
import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from tests.coordinator.web.running import Running

from edgefl_coordinator.cli import main
from edgefl_coordinator.rounds.aggregation import step
from edgefl_coordinator.store import audit, audit_words
from edgefl_coordinator.web.log_lines import EventLog, OnceAMinute, configure_logging, log
from edgefl_coordinator.web.operations import OPERATIONS
from edgefl_coordinator.web.routes import HANDLERS
from edgefl_protocol import Payload
from edgefl_protocol.messages.requests import ReplyRequest

PATIENT = "Erika-Mustermann-1964"
PACKAGE = Path(audit.__file__).resolve().parents[1]


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    """Where the log goes; the loggers are left as they were."""
    root = logging.getLogger()
    before = root.handlers[:], root.level, log.level
    yield io.StringIO()
    root.handlers[:], root.level = before[0], before[1]
    log.setLevel(before[2])


def lived(coordinator, tools) -> None:
    """A little of a federation's life: enrolment, a wrong fingerprint, approval, a round, refusals, a failure."""
    member = tools.approved_member(coordinator, "clinic-a")
    for letter in "bcd":
        tools.approved_member(coordinator, f"clinic-{letter}")
    tools.start_rounds(coordinator)
    assert isinstance(member.reply(1), Payload)
    assert member.reply(3).code == "no_round"
    with coordinator.store.transaction() as connection:
        now_ms = coordinator.clock()
        reason = f"the array {PATIENT} is not in the form that"
        audit.append(connection, now_ms, "reply_refused", "clinic-b", {"round": 1, "reason": reason})
        audit.append(connection, now_ms, "round_reopened", "1", {"problem": PATIENT, "replies": 1, "deadline_ms": 0})
        audit.append(connection, now_ms, "job_failed", "1", {"kind": "aggregate", "error": PATIENT})


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_events_are_logged_once_with_time_and_level(coordinator, tools, stream, log_format) -> None:
    """A line for each, in order, after it is kept; explanations, which may hold what a member wrote, stay out."""
    configure_logging(stream, log_format, "info")
    events = EventLog(coordinator)
    lived(coordinator, tools)
    events.catch_up()
    events.catch_up()
    text = stream.getvalue()
    lines = text.splitlines()
    assert PATIENT not in text and len(set(lines)) == len(lines)
    if log_format == "json":
        found = [(one["level"], one["message"]) for one in map(json.loads, lines)]
        assert all(re.fullmatch(r"2026-09-21T14:13:20\.000Z", json.loads(line)["time"]) for line in lines)
        assert {"event": "refused", "subject": "clinic-a", "code": "no_round"}.items() <= next(
            json.loads(line) for line in lines if "no_round" in line
        ).items()
    else:
        parts = [line.split(" ", 2) for line in lines]
        found = [(level.lower(), words) for _, level, words in parts]
        assert {moment for moment, *_ in parts} == {"2026-09-21T14:13:20.000Z"}
    assert found[:4] == [
        ("info", "clinic-a was invited as site"),
        ("info", "clinic-a enrolled as site"),
        ("info", "clinic-a proved its keys and waits for approval"),
        ("info", "clinic-a was approved"),
    ]
    assert found[-6:] == [
        ("info", "round 1 opened (warm), until 14:14:20 UTC"),
        ("info", f"clinic-a replied in round 1, {len(tools.maps_payload().to_bytes())} bytes"),
        ("warning", "clinic-a was refused on reply: no_round"),
        ("warning", "the reply of clinic-b in round 1 was refused"),
        ("warning", "round 1 accepts replies again until 00:00:00 UTC and keeps the usable ones: 1"),
        ("error", "round 1: the coordinator could not do its job (aggregate)"),
    ]


def test_only_what_is_kept_is_logged(coordinator, stream) -> None:
    """What a transaction took back never happened."""
    configure_logging(stream, "text", "debug")
    events = EventLog(coordinator)
    with pytest.raises(RuntimeError), coordinator.store.transaction() as connection:
        audit.append(connection, 0, "approved", "clinic-a")
        raise RuntimeError
    events.catch_up()
    assert stream.getvalue() == ""


def test_levels(coordinator, tools, stream) -> None:
    """`--log-level warning` leaves refusals and failures; what a member fetches is for debug."""
    configure_logging(stream, "text", "warning")
    events = EventLog(coordinator)
    lived(coordinator, tools)
    events.catch_up()
    assert {line.split(" ", 2)[1] for line in stream.getvalue().splitlines()} == {"WARNING", "ERROR"}
    assert audit_words.event_level("broadcast_released", {}) == logging.DEBUG
    assert audit_words.event_level("refused", {"code": "pending"}) == logging.DEBUG


def test_every_event_has_words() -> None:
    """No event of the code is without its sentence, whose names are those of its row."""
    source = "\n".join(path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py"))
    named = set(re.findall(r"audit\.append\(\s*\w+,\s*[\w.()]+,\s*\"(\w+)\"", source)) | {"sealing_key", "signing_key"}
    assert len(named) >= 25
    assert named - set(audit_words._WORDS) == {"job_failed"} - set(audit_words._WORDS)
    assert audit_words.event_words("of_another_version", "clinic-a", {}) == "clinic-a: of_another_version"


def test_what_anybody_can_cause_is_logged_once_a_minute(stream) -> None:
    """A flood of requests without a signature fills no disk; other lines are not held back."""
    now_s = [0.0]
    configure_logging(stream, "text", "info")
    handler = logging.getLogger().handlers[0]
    handler.filters[:] = [OnceAMinute(lambda: now_s[0])]
    for _ in range(1000):
        log.info("refused before the signature: %s %s", "enrol", "expired", extra={"once_a_minute": True})
    log.info("refused before the signature: %s %s", "task", "expired", extra={"once_a_minute": True})
    log.info("another")
    log.info("another")
    now_s[0] = 60.0
    log.info("refused before the signature: %s %s", "enrol", "expired", extra={"once_a_minute": True})
    said = [line.split(" ", 2)[2] for line in stream.getvalue().splitlines()]
    assert said == [
        "refused before the signature: enrol expired", "refused before the signature: task expired", "another",
        "another", "refused before the signature: enrol expired, and 999 times since the last such line",
    ]  # fmt: skip


def test_the_log_for_a_person(coordinator, tools, clock) -> None:
    """When, what and who, with explanations; it counts as `audit` does, and takes the newest rows since a time."""
    lived(coordinator, tools)
    clock.now_ms += 24 * 3600 * 1000
    tools.approved_member(coordinator, "clinic-e")
    count = OPERATIONS["audit"](coordinator, {})["rows"]
    coordinator.store.close()
    home = str(coordinator.store.home.root)

    def run(*words: str):
        return CliRunner().invoke(main, ["log", *words, "--home", home])

    shown = run()
    assert shown.exit_code == 0 and shown.stderr == f"{count} of {count} rows, unbroken\n"
    lines = shown.stdout.splitlines()
    assert len(lines) == count
    assert "     1  2026-09-21 14:13:20 UTC  clinic-a was invited as site" in lines
    assert f"the reply of clinic-b in round 1 was refused: the array {PATIENT} is not in the form" in shown.stdout
    last = run("--limit", "2")
    assert last.stdout.splitlines() == lines[-2:] and last.stderr.startswith("2 of ")
    today = run("--since", "2026-09-22", "--json")
    found = json.loads(today.stdout)
    assert found["rows"] == count and [row["event"] for row in found["shown"]] == [
        "invite", "enrolled", "proved", "approved",
    ]  # fmt: skip
    assert set(found["shown"][0]) == {"number", "at_ms", "event", "subject", "detail"}
    assert run("--since", "yesterday").exit_code == 2


def test_a_log_that_was_edited_is_not_shown(coordinator, tools) -> None:
    """Check 69 holds for what is read, too."""
    tools.approved_member(coordinator, "clinic-a")
    with coordinator.store.transaction() as connection:
        connection.exec_driver_sql("UPDATE audit SET subject = 'clinic-b' WHERE number = 1")
    coordinator.store.close()
    shown = CliRunner().invoke(main, ["log", "--home", str(coordinator.store.home.root)])
    assert shown.exit_code == 1 and "broken at row 1" in shown.stderr and shown.stdout == ""


def test_a_member_that_was_shut_out_is_named(coordinator, tools, stream) -> None:
    """docs/reference/coordinator.md, the log: it is not told so, and asks the operator why nothing answers."""
    configure_logging(stream, "text", "info")
    member, stranger = tools.approved_member(coordinator, "clinic-a"), tools.Member(coordinator, "clinic-b")
    OPERATIONS["revoke"](coordinator, {"name": "clinic-a"})
    for one in (member, stranger):
        assert one.call("task", Payload()) == 401
    said = [line.split(" ", 2)[2] for line in stream.getvalue().splitlines()]
    assert said == [
        "refused before the signature: task unknown_sender (it names the key of clinic-a, who was shut out)",
        "refused before the signature: task unknown_sender",
    ]


def test_the_end_of_a_federation_is_logged(make_coordinator, tools, stream) -> None:
    """docs/reference/coordinator.md, the log: once, after the last of its rounds."""
    coordinator = make_coordinator(rounds={"quorum_min": 1, "quorum_target": 1})
    configure_logging(stream, "text", "info")
    events, member = EventLog(coordinator), tools.approved_member(coordinator, "clinic-a")
    tools.start_rounds(coordinator)
    for number in (1, 2, 3):
        events.catch_up()
        assert "is over" not in stream.getvalue()
        assert isinstance(member.reply(number), Payload)
        assert step(coordinator, tools.toy_worker)
    events.catch_up()
    assert stream.getvalue().count("INFO the federation skin is over: its last round, 3, is done\n") == 1


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_a_fault_in_the_middle_of_a_request_tells_no_secret(
    coordinator, tools, stream, monkeypatch, log_format
) -> None:
    """Check 14: what `serve` logs of it says where it was, and not one byte of keys, payload or what a member wrote,
    though its message quotes them all.
    """
    member = tools.approved_member(coordinator, "clinic-a")
    tools.start_rounds(coordinator)
    secrets = [coordinator.keys.signing.seed.hex(), coordinator.keys.secret.hex(), PATIENT]

    def breaks(call: Any) -> None:
        try:
            int(PATIENT)
        except ValueError:
            raise LookupError(*secrets, call.opened.payload)  # noqa: B904 - the error before it is told, too

    monkeypatch.setitem(HANDLERS, "reply", breaks)
    configure_logging(stream, log_format, "debug")
    body = member.envelope("reply", ReplyRequest(idem="x" * 16, reply=tools.maps_payload()).to_payload(), rnd=1)
    with Running(coordinator, 20, 20) as running, running.connect() as one:
        one.sendall(b"POST /v1/reply HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        assert one.recv(4096).startswith(b"HTTP/1.1 500 ")
    text = stream.getvalue()
    assert "LookupError" in text and "ValueError" in text and "in breaks" in text and "in handle" in text
    assert not [secret for secret in (*secrets, "maps.0") if secret in text]
