"""The audit log as evidence: what changes, cuts or rewrites it is found, without the server too.

Source: docs/security.md 2.9, check 69. The digest and the head are written here once more, from the page.
"""

import asyncio
import contextlib
import hashlib
import itertools
import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from sqlalchemy import text

from edgefl_coordinator.cli import main
from edgefl_coordinator.errors import OperatorError
from edgefl_coordinator.members import coordinator_keys
from edgefl_coordinator.rounds.aggregation import step
from edgefl_coordinator.store import audit, audit_heads
from edgefl_coordinator.store.audit_chain import LogRow, check_log, make_head, read_head
from edgefl_coordinator.web import service
from edgefl_coordinator.web.operations import OPERATIONS
from edgefl_protocol import Payload
from edgefl_protocol.envelopes.keys import generate_signing_key
from edgefl_protocol.errors import RecordError
from edgefl_protocol.pae import pae

pytestmark = pytest.mark.both_databases

Rows = list[LogRow]


def chained(rows: Rows) -> Rows:
    """The rows with numbers and digests as the page has them: what a thief of the store can always compute."""
    previous, found = "0" * 64, []
    for number, row in enumerate(rows, 1):
        parts = (previous, str(number), str(row.at_ms), row.event, row.subject, row.detail)
        previous = hashlib.sha256(pae(b"efla1/audit", *(part.encode() for part in parts))).hexdigest()
        found.append(row._replace(number=number, sha256=previous))
    return found


@pytest.fixture
def lived(coordinator, tools, clock) -> Any:
    """A coordinator with some forty rows, signed twice."""
    for letter in "abc":
        tools.approved_member(coordinator, f"clinic-{letter}")
    audit_heads.sign(coordinator)
    for number in range(20):
        clock.now_ms += 1000
        with coordinator.store.transaction() as connection:
            audit.append(connection, clock.now_ms, "setting", f"rounds.{number}", {"from": number, "to": number + 1})
    audit_heads.sign(coordinator)
    return coordinator


def kept(coordinator: Any) -> Rows:
    with coordinator.store.transaction() as connection:
        return list(audit.kept_rows(connection))


def heads_of(coordinator: Any) -> list[Any]:
    return [read_head(line.encode()) for line in audit_heads.lines_of(coordinator)]


CHANGES: dict[str, Callable[[Rows, int], Rows]] = {
    "number": lambda rows, at: [*rows[:at], rows[at]._replace(number=rows[at].number + 1), *rows[at + 1 :]],
    "at_ms": lambda rows, at: [*rows[:at], rows[at]._replace(at_ms=rows[at].at_ms - 1), *rows[at + 1 :]],
    "event": lambda rows, at: [*rows[:at], rows[at]._replace(event=rows[at].event + "s"), *rows[at + 1 :]],
    "subject": lambda rows, at: [*rows[:at], rows[at]._replace(subject="clinic-z"), *rows[at + 1 :]],
    "detail": lambda rows, at: [*rows[:at], rows[at]._replace(detail='{"a":1}'), *rows[at + 1 :]],
    "sha256": lambda rows, at: [*rows[:at], rows[at]._replace(sha256=rows[at].sha256[::-1]), *rows[at + 1 :]],
    "removed": lambda rows, at: [*rows[:at], *rows[at + 1 :]],
    "moved": lambda rows, at: [*rows[:at], *rows[at + 1 :], rows[at]] if at + 1 < len(rows) else rows[::-1],
    "twice": lambda rows, at: [*rows[: at + 1], *rows[at:]],
    "cut": lambda rows, at: rows[:at],
}
REWRITTEN = ("at_ms", "event", "subject", "detail", "removed", "moved", "twice", "cut")


def test_the_log_of_a_coordinator_is_the_chain_of_the_page(lived) -> None:
    rows = kept(lived)
    assert rows == chained(rows) and len(rows) > 25
    assert check_log(rows, heads_of(lived), "skin", [lived.keys.signing.key_id]) == len(rows)
    assert OPERATIONS["audit"](lived, {}) == {
        "rows": len(rows), "signed_rows": len(rows), "signed_ms": lived.clock()
    }  # fmt: skip


def test_every_change_of_a_thousand_is_found(lived) -> None:
    """Check 69: each column edited, rows removed, moved, repeated, cut; as they are, and with the chain made anew."""
    rows, heads, draw = kept(lived), heads_of(lived), random.Random(69)
    kinds = [(kind, False) for kind in CHANGES] + [(kind, True) for kind in REWRITTEN]
    missed = []
    for kind, anew in itertools.islice(itertools.cycle(kinds), 1000):
        at = draw.randrange(len(rows) - (kind == "twice"))  # a row behind the newest head is a new one
        changed = CHANGES[kind](rows, at)
        changed = chained(changed) if anew else changed
        try:
            check_log(changed, heads, "skin", [lived.keys.signing.key_id])
            missed.append((kind, anew, at))
        except OperatorError:
            pass
    assert missed == []


def test_without_heads_a_chain_made_anew_would_pass(lived) -> None:
    """What the heads are for: the digests alone find no thief who computes them."""
    rows = chained([*kept(lived)[:3], *kept(lived)[5:]])
    assert check_log(rows) == len(rows)


def test_a_head_of_another_key_or_federation_does_not_count(lived) -> None:
    rows, thief = kept(lived), generate_signing_key()
    forged = read_head(make_head(thief, "skin", len(rows), rows[-1].sha256, 0))
    with pytest.raises(OperatorError, match="not known as the coordinator's"):
        check_log(rows, [forged], "skin", [lived.keys.signing.key_id])
    foreign = read_head(make_head(lived.keys.signing, "heart", len(rows), rows[-1].sha256, 0))
    with pytest.raises(OperatorError, match="of the federation heart"):
        check_log(rows, [foreign], "skin", [lived.keys.signing.key_id])
    signed = make_head(thief, "skin", 3, rows[2].sha256, 0)
    with pytest.raises(RecordError, match="not signed by"):
        read_head(make_head(lived.keys.signing, "skin", 3, rows[2].sha256, 0)[:-86] + signed[-86:])


def test_a_head_is_signed_when_something_happened(coordinator, tools, clock) -> None:
    tools.approved_member(coordinator, "clinic-a")
    first = audit_heads.sign(coordinator)
    assert first is not None and first.rows == len(kept(coordinator)) and first.at_ms == clock.now_ms
    assert audit_heads.sign(coordinator) is None
    tools.approved_member(coordinator, "clinic-b")
    second = audit_heads.sign(coordinator)
    assert second is not None and heads_of(coordinator) == [first, second]


def test_the_log_is_signed_each_hour_in_which_something_happened(coordinator, tools, monkeypatch) -> None:
    """docs/security.md 2.9, with hours of a hundredth of a second."""
    assert audit_heads.EACH_S == 3600
    monkeypatch.setattr(audit_heads, "EACH_S", 0.01)
    heads = coordinator.store.home.heads

    def signed_rows() -> list[int]:
        return [read_head(line).rows for line in heads.read_bytes().splitlines()] if heads.exists() else []

    async def run() -> None:
        task = asyncio.create_task(service._sign_log(coordinator))
        for name in ("clinic-a", "clinic-b"):
            tools.approved_member(coordinator, name)
            with coordinator.store.transaction() as connection:
                rows = audit.count(connection)
            until = time.monotonic() + 30
            while signed_rows()[-1:] != [rows] and time.monotonic() < until:
                await asyncio.sleep(0.01)
            assert signed_rows()[-1:] == [rows]
        task.cancel()

    asyncio.run(run())
    assert signed_rows() == sorted(set(signed_rows()))  # an hour without a row leaves none


def test_the_commands_find_a_rewritten_store(lived) -> None:
    """`audit` and `log` of the running coordinator: every column, by whoever writes the database."""
    last = len(kept(lived))
    for statement in (
        "UPDATE audit SET subject = 'clinic-z' WHERE number = 2",
        "UPDATE audit SET event = 'approved' WHERE number = 2",
        "UPDATE audit SET detail = '{}' WHERE number = 2",
        "UPDATE audit SET at_ms = at_ms + 1 WHERE number = 1",
        "DELETE FROM audit WHERE number = 2",
        "UPDATE audit SET number = 1000 WHERE number = 2",
        f"DELETE FROM audit WHERE number > {last - 3}",
    ):
        before = kept(lived)
        with lived.store.transaction() as connection:
            connection.execute(text(statement))
        for operation, arguments in (("audit", {}), ("log", {"from_ms": 0, "most": 5})):
            with pytest.raises(OperatorError, match=r"audit log (is broken|was cut)"):
                OPERATIONS[operation](lived, arguments)
        with lived.store.transaction() as connection:
            connection.execute(text("DELETE FROM audit"))
            for row in before:
                connection.execute(text("INSERT INTO audit VALUES (:number,:at_ms,:event,:subject,:detail,:sha256)"),
                                   row._asdict())  # fmt: skip
    assert OPERATIONS["audit"](lived, {})["rows"] == last


@pytest.fixture
def copied(lived, tmp_path) -> tuple[Path, str, Any]:
    """A copy of the log, the key of its coordinator, and the coordinator's folder."""
    key_id, home = lived.keys.signing.key_id, lived.store.home
    lived.store.close()
    found = CliRunner().invoke(main, ["audit", "--home", str(home.root), "--write", str(tmp_path / "log.jsonl")])
    assert found.exit_code == 0 and "; signed up to row" in found.output, found.output
    return tmp_path / "log.jsonl", key_id, home


def checked(*given: object) -> tuple[int, str]:
    found = CliRunner().invoke(main, ["check-log", *map(str, given)])
    return found.exit_code, found.output


def test_a_copy_is_checked_with_the_public_key_alone(copied, tmp_path) -> None:
    copy, key_id, home = copied
    kept_elsewhere = tmp_path / "heads"
    kept_elsewhere.write_bytes(home.heads.read_bytes())
    (home.root).rename(tmp_path / "gone")
    status, said = checked(copy, "--key", key_id, "--heads", kept_elsewhere)
    assert (status, said.startswith("skin: ")) == (0, True), said
    facts = json.loads(checked(copy, "--key", key_id, "--json")[1])
    assert facts["rows"] == facts["signed_rows"] == len(copy.read_text().splitlines()) - 3
    assert checked(copy, "--key", generate_signing_key().key_id)[0] == 1


def test_a_key_is_named_by_its_id_or_its_file(copied, tmp_path) -> None:
    copy, key_id, home = copied
    assert checked(copy, "--key", home.signing_public)[0] == checked(copy, "--key", key_id)[0] == 0
    for wrong, said in (("abc", "is neither a key id"), (copy, "public key")):
        status, told = checked(copy, "--key", wrong)
        assert status == 2 and said in told, told
    status, told = checked(copy, "--key", "0" * 64)
    assert status == 1 and "name it with --key KEY_ID" in told


def test_a_server_cannot_take_back_what_it_signed(copied, tmp_path) -> None:
    """Heads kept elsewhere find the coordinator itself that removes rows, makes the chain anew and drops its heads."""
    copy, key_id, home = copied
    kept_elsewhere = tmp_path / "heads"
    kept_elsewhere.write_bytes(home.heads.read_bytes())
    first, *lines = copy.read_text().splitlines()
    rows = chained([LogRow(*json.loads(line)) for line in lines if line.startswith("[")][:12])
    early = [line for line in lines if line.startswith('"') and read_head(json.loads(line).encode()).rows <= 12]
    copy.write_text("\n".join([first, *(json.dumps(row) for row in rows), *early]) + "\n")
    assert checked(copy, "--key", key_id)[0] == (0 if early else 1)
    status, said = checked(copy, "--key", key_id, "--heads", kept_elsewhere)
    assert status == 1 and "the audit log was cut" in said


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "is no copy of an audit log"),
        (b"\x89PNG", "line 1, is no line"),
        (b'{"federation": "skin"}\n', "nobody can tell whether the copy was changed: `edgefl-coordinator serve` signs"),
        (b'{"federation": "skin"}\n[1, 2]\n', "is damaged"),
        (b'{"federation": "skin"}\n[1, 2, 3, 4, 5, 6]\n', "is damaged"),
        (b'{"federation": "skin"}\n"head"\n', "is damaged"),
        (b'{"federation": "skin"}\n7\n', "is damaged"),
    ],
)
def test_what_is_no_copy_is_refused_in_a_sentence(tmp_path, content, expected) -> None:
    (tmp_path / "copy").write_bytes(content)
    status, said = checked(tmp_path / "copy", "--key", "0" * 64)
    assert status == 1 and expected in said and len(said.splitlines()) == 1


def test_a_copy_replaces_no_file(copied) -> None:
    copy, _, home = copied
    found = CliRunner().invoke(main, ["audit", "--home", str(home.root), "--write", str(copy)])
    assert found.exit_code == 2 and "exists; name a new file" in found.output


def test_each_decision_has_one_row(coordinator, tools, clock) -> None:
    """Check 69: what the operator or a rule decided, and no more: who only looks, or is a stranger, leaves no row."""
    seen = 0

    def decided(work: Callable[[], Any]) -> list[str]:
        nonlocal seen
        with contextlib.suppress(OperatorError):
            work()
        rows = kept(coordinator)
        found, seen = [row.event for row in rows[seen:]], len(rows)
        return found

    def operator(operation: str, **arguments: Any) -> list[str]:
        return decided(lambda: OPERATIONS[operation](coordinator, arguments))

    decided(lambda: coordinator_keys.note_keys(coordinator))  # as `serve` does when it begins
    one, other, stranger = (tools.Member(coordinator, f"clinic-{letter}") for letter in "abc")
    for member in (one, other):
        invited: list[bytes] = []
        assert decided(lambda m=member, i=invited: i.append(tools.token_of(coordinator, m.name))) == ["invite"]
        fingerprint: list[str] = []
        enrolled = decided(lambda m=member, i=invited, f=fingerprint: f.append(m.enrol(i[0]).fingerprint))
        assert enrolled == ["enrolled", "proved"]
        assert operator("approve", name=member.name, fingerprint="0" * 20) == ["fingerprint_mismatch"]
        assert operator("approve", name=member.name, fingerprint=fingerprint[0]) == ["approved"]
    assert operator("start") == ["start"]
    assert decided(lambda: step(coordinator, tools.toy_worker)) == ["state", "round_opened"]
    assert operator("set", changes={"rounds.deadline_s": "77", "rounds.quorum_target": "2"}) == ["setting", "setting"]
    for looks in ("status", "audit"):
        assert operator(looks) == []
    assert decided(lambda: one.call("task", Payload())) == decided(lambda: one.call("index", Payload())) == []
    assert decided(lambda: stranger.call("task", Payload())) == []
    assert decided(lambda: one.reply(1, idem="work-item-00000001")) == ["reply_accepted"]
    assert decided(lambda: one.reply(1, idem="work-item-00000001")) == []  # the first answer again
    for refused in (
        lambda: one.reply(1, idem="work-item-00000002"),  # already_replied
        lambda: one.reply(1, idem="work-item-00000001", payload=tools.maps_payload(7)),  # idem_conflict
        lambda: other.reply(3),  # no_round
        lambda: other.reply(1, payload=Payload({}, {})),  # bad_contribution
    ):
        assert decided(refused) == ["refused"]
    assert decided(lambda: other.reply(1)) == ["reply_accepted", "round_closed"]
    assert decided(lambda: step(coordinator, tools.toy_worker)) == ["state", "round_opened"]
    assert operator("rotate", signing=False) == ["sealing_key"]
    for expected in (["key_revoked"], []):
        assert operator("revoke_signer", key_id="a" * 64) == expected
    assert operator("revoke", name="clinic-a") == ["revoked", "key_revoked"]
    assert decided(lambda: one.call("task", Payload())) == []
    assert seen == check_log(kept(coordinator))
