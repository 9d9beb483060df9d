"""`edgefl-coordinator status`: the sentence of a stuck round, the command as it has to be typed, and --watch."""

import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner

from edgefl_coordinator.cli import main
from edgefl_coordinator.commands import status as status_command
from edgefl_coordinator.commands.options import Operator
from edgefl_coordinator.errors import OperatorError
from edgefl_coordinator.rounds import task_status
from edgefl_coordinator.rounds.aggregation import step
from edgefl_coordinator.store import audit, audit_words, publishing, store
from edgefl_coordinator.store.audit_chain import RESTORED
from edgefl_coordinator.store.moments import moment
from edgefl_coordinator.web.operations import OPERATIONS
from edgefl_coordinator.web.service import note_stop
from edgefl_protocol import Payload
from edgefl_protocol.messages.requests import BroadcastRequest, TaskReply

OLD = {"quorum_min": 2, "quorum_target": 3, "min_cohort": 3}


@pytest.fixture
def served(make_coordinator, monkeypatch) -> Iterator[Any]:
    """A coordinator that answers the commands of this process as its server would."""
    coordinator = make_coordinator(rounds=OLD)
    coordinator.serving = True

    def run(_: Operator, operation: str, **arguments: object) -> dict[str, Any]:
        return dict(json.loads(json.dumps(OPERATIONS[operation](coordinator, arguments))))

    monkeypatch.setattr(Operator, "run", run)
    return coordinator


def run(*words: str) -> Any:
    return CliRunner().invoke(main, [*words, "--home", "/srv/fl"])


def stalled(coordinator, tools) -> None:
    """Round 2 of three members, of whom nobody may have the broadcast."""
    three = [tools.approved_member(coordinator, f"clinic-{letter}") for letter in "abc"]
    tools.start_rounds(coordinator)
    for member in three:
        member.reply(1)
    assert step(coordinator, tools.toy_worker)


def test_stuck_and_the_command_that_mends_it(served, tools) -> None:
    """What is printed can be typed: it names the home; --json has it in fields; after it the round goes on."""
    waiting = run("status").stdout
    assert "waits: the first round opens when the operator starts it; run: edgefl-coordinator start" not in waiting
    stalled(served, tools)
    facts = json.loads(run("status", "--json").stdout)["standing"]
    invite, command = facts["commands"]
    assert invite == "edgefl-coordinator invite NAME --role device --home /srv/fl"
    assert command == "edgefl-coordinator set rounds.min_cohort 2 rounds.quorum_min 3 --home /srv/fl"
    assert (facts["kind"], facts["cause"]) == ("stuck", "small_cohort")
    fewer = f"(2 more members are needed); or, if fewer others are enough: {command}"
    assert facts["mend"] == f"the operator runs: {invite} {fewer}"
    line = run("status").stdout.splitlines()[2]
    assert line == f"  {facts['sentence']}" and line.endswith(command)
    assert run(*command.split()[1:-2]).exit_code == 0
    assert "stuck" not in run("status").stdout
    assert "  waits: the round has 0 replies and needs 3\n" in run("status").stdout


class Watched:
    """Stands for the clock between two looks: does one thing after the other, then the person presses Ctrl-C."""

    def __init__(self, *steps: Any) -> None:
        self.steps = list(steps)

    def __call__(self, seconds: float) -> None:
        assert seconds == 0.5
        if not self.steps:
            raise KeyboardInterrupt
        self.steps.pop(0)()


@pytest.mark.parametrize("as_json", [True, False])
def test_watch_prints_each_change_until_ctrl_c(served, tools, monkeypatch, as_json) -> None:
    """One line of JSON for a change, and none where a member was heard and nothing else changed; Ctrl-C ends it with
    status 0 and no word."""
    member: list[Any] = []

    def joins() -> None:
        member.append(tools.approved_member(served, "clinic-a"))

    def asks() -> None:
        served.clock.now_ms += 1000
        member[0].call("task", Payload())

    monkeypatch.setattr(status_command, "sleep", Watched(lambda: None, joins, lambda: None, asks))
    done = run("status", "--watch", "--interval", "0.5", *(["--json"] if as_json else []))
    assert done.exit_code == 0 and done.stderr == ""
    if as_json:
        assert [len(json.loads(line)["members"]) for line in done.stdout.splitlines()] == [0, 1]
    else:
        assert done.stdout.count("skin: fedevprompt on nevus") == 2 and done.stdout.count("  site   clinic-a") == 1
        blocks = done.stdout.split("\n\n")
        assert len(blocks) == 3 and blocks[-1] == ""
        assert all(re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC\nskin:", block) for block in blocks[:2])
        assert "\x1b" not in done.stdout  # it is no terminal


def test_rounds_are_counted_alike(served, tools) -> None:
    """`init --rounds 2` was followed by `round 0 of 2`, and by `round 1 of 3` once the method's warm one counted."""
    tools.approved_member(served, "clinic-a")
    assert "\nbefore the first of 2 rounds of training: waiting, 0 replies" in run("status").stdout
    tools.start_rounds(served)
    assert "\nround 1 of 3 (2 rounds of training; this one is warm): open, 0 replies" in run("status").stdout
    facts = json.loads(run("status", "--json").stdout)
    assert (facts["rounds"], facts["train_rounds"], facts["phase"]) == (3, 2, "warm")


def test_members_and_their_fingerprints(served, tools, clock) -> None:
    """docs/security.md check 22: who approves compares what the member told, so a pending one's is not shown. Who was
    heard, and when; after `revoke` a quorum beyond the members that are left, with what mends it."""
    for letter in "abc":
        tools.approved_member(served, f"clinic-{letter}")
    waiting = tools.Member(served, "hospital")
    proof = waiting.enrol(tools.token_of(served, "hospital"))
    shown = run("status").stdout
    assert "  site   hospital  pending, last heard 2026-09-21 14:13:20 UTC\n" in shown
    assert proof.fingerprint not in shown and proof.fingerprint not in run("status", "--json").stdout
    tools.start_rounds(served)
    OPERATIONS["approve"](served, {"name": "hospital", "fingerprint": proof.fingerprint})
    clock.now_ms += 60_000
    waiting.call("task", Payload())
    shown = run("status").stdout
    line = f"  site   hospital  approved, last heard 2026-09-21 14:14:20 UTC  {proof.fingerprint}\n"
    assert line in shown and "warning" not in shown
    assert "clinic-a  approved, last heard 2026-09-21 14:13:20 UTC" in shown
    assert run("revoke", "hospital").stderr == ""
    told = run("revoke", "clinic-a")
    command = "edgefl-coordinator set rounds.quorum_target 2 --home /srv/fl"
    why = "a round closes early at 3 replies, and 2 members are approved, so each waits for its deadline"
    assert told.stderr == f"warning: {why}; run: {command}\n"
    assert f"  warning: {why}; run: {command}\n" in run("status").stdout
    several = run("revoke", "clinic-b").stderr  # too few are left: protection is not what is given up first
    assert (
        "so none can close; invite and approve members; or, if a single contribution may be told apart, run: "
        in several
    )


def test_invites_and_who_was_shut_out(served, tools, clock) -> None:
    """Both are listed until they end: by enrolment, expiry or `revoke`; by joining again under the same name. An
    enrolment that a new invite replaced was not shut out."""
    tools.approved_member(served, "clinic-a")
    tools.Member(served, "clinic-b").enrol(tools.token_of(served, "clinic-b"))
    tools.token_of(served, "clinic-b")
    assert run("revoke", "clinic-a").stdout == "clinic-a is revoked\n"
    again = run("revoke", "clinic-a")
    assert again.exit_code == 1 and "clinic-a is shut out already" in again.stderr
    assert "no member is named nobody" in run("revoke", "nobody").stderr
    shown = run("status").stdout
    assert "  site   clinic-b  invited, until 2026-09-21 15:13:20 UTC\n" in shown
    assert "  site   clinic-a  shut out 2026-09-21 14:13:20 UTC\n" in shown and shown.count("shut out") == 1
    facts = json.loads(run("status", "--json").stdout)
    assert facts["members"] == []
    assert facts["shut_out"] == [{"name": "clinic-a", "role": "site", "revoked_ms": clock.now_ms}]
    early = run("approve", "clinic-b", "--fingerprint", "7QK2M0F4V8R1XJ3TZB5C")
    assert early.exit_code == 1 and "clinic-b is invited and has not enrolled" in early.stderr
    assert facts["invites"] == [{"name": "clinic-b", "role": "site", "expires_ms": clock.now_ms + 3_600_000}]
    assert run("revoke", "clinic-b").stdout == "the invite for clinic-b is withdrawn\n"
    tools.approved_member(served, "clinic-a")
    shown = run("status").stdout
    assert "invited" not in shown and "shut out" not in shown


def test_an_open_round_without_a_bundle(served, tools) -> None:
    """Sites learn without one; a device cannot, and its operator is told."""
    tools.approved_member(served, "hospital")
    tools.start_rounds(served)
    assert "no bundle" not in run("status").stdout
    tools.approved_member(served, "clinic-a", "device")
    warned = "warning: no bundle of main/nevus is published, so devices have no model to learn with; run: edgefl-coord"
    assert warned in run("status").stdout
    blob = served.store.put_blob(b"bundle")
    with served.store.transaction() as connection:
        publishing.publish(connection, 0, line="main", task="nevus", version=1, bundle_id="x", blob=blob)
    assert "no bundle" not in run("status").stdout


def test_a_missing_bundle_is_told_beside_and_before_another_cause(served, tools, clock) -> None:
    """A quorum out of reach hid it; of silence it is the cause, which the operator and the device's owner read."""
    OPERATIONS["set"](served, {"changes": {"rounds.quorum_min": "3", "rounds.min_cohort": "2"}})
    one, two, _ = [tools.approved_member(served, f"clinic-{letter}", "device") for letter in "abc"]
    tools.start_rounds(served)
    one.reply(1)
    clock.now_ms += 60_000
    told = TaskReply.from_payload(two.call("task", Payload())).stuck
    shown = run("status").stdout
    assert "no bundle of main/nevus is published" in shown and shown.count("no bundle") == 1
    assert "operator runs: edgefl-coordinator publish FILE.edgefl --trust PUB --home /srv/fl; then each" in shown
    assert "  not replied: clinic-b, clinic-c\n" in shown and "revoke" not in shown
    assert "tell the operator to publish one" in told and "edgefl-coordinator" not in told
    run("revoke", "clinic-c")
    lines = run("status").stdout.splitlines()[2:4]
    assert lines[0].startswith("  warning: no bundle of main/nevus") and "it needs 3 replies" in lines[1]


def test_who_has_not_replied(served, tools, clock) -> None:
    """From the beginning of a round, and where it is stuck by silence: the operator reads the names, which members are
    not told."""
    three = [tools.approved_member(served, f"clinic-{letter}") for letter in "abc"]
    tools.start_rounds(served)
    three[0].reply(1)
    waits = run("status").stdout
    assert "  waits: the round has 1 reply and needs 2\n  not replied: clinic-b, clinic-c\n" in waits
    clock.now_ms += 60_000
    told = TaskReply.from_payload(three[1].call("task", Payload()))
    assert "  not replied: clinic-b, clinic-c\n" in run("status").stdout and "clinic" not in told.stuck


def test_a_status_for_alarms(served, tools) -> None:
    """docs/reference/coordinator.md: status 1 where somebody has to do something; what waits is in `sentence`, too."""
    waits = json.loads(run("status", "--json", "--check").stdout)["standing"]
    assert waits["kind"] == "waits" and waits["sentence"] == f"{waits['why']}; {waits['mend']}"
    assert run("status", "--check").exit_code == 0
    served.serving = False
    assert run("status", "--check").exit_code == 1 and run("status").exit_code == 0
    served.serving = True
    served.settings = msgspec.structs.replace(served.settings, public_url="https://fl.example.org")
    refused = run("status", "--check")
    assert refused.exit_code == 1 and "warning: members that call https://fl.example.org refuse" in refused.stdout
    served.settings = msgspec.structs.replace(served.settings, public_url="https://127.0.0.1:8443")
    stalled(served, tools)
    stuck = run("status", "--check")
    assert stuck.exit_code == 1 and "is stuck since" in stuck.stdout
    assert run("status", "--check", "--watch").exit_code == 2


def test_a_full_disk_sounds_the_alarm(served, tools, monkeypatch) -> None:
    """`status --check` ended with 0 and `status` waited for replies while the server refused each one, for the store
    was full. Where a reply may not fit any more a warning says so, and the alarm comes before the rounds stop."""
    for letter in "abc":
        tools.approved_member(served, f"clinic-{letter}")
    tools.start_rounds(served)
    assert run("status", "--check").exit_code == 0
    monkeypatch.setattr(served.store.payloads, "free_bytes", lambda: 20 * 2**20)
    low = run("status", "--check")
    assert low.exit_code == 1 and "  waits: the round has 0 replies and needs 2\n" in low.stdout
    blobs = served.store.home.blobs
    why = f"the disk of {blobs} has 20 MiB free, and one reply may take 32 MiB, so replies may be refused"
    assert f"  warning: {why}; make room there\n" in low.stdout
    monkeypatch.setattr(store, "has_room", lambda folder, size: folder != served.store.home.root)
    full = run("status", "--check")
    what = "round 1 is stuck: the coordinator's disk is full, so it can keep nothing that members send"
    assert full.exit_code == 1 and f"  {what}; make room on the disk of {blobs.parent}\n" in full.stdout
    facts = json.loads(run("status", "--json").stdout)
    assert (facts["standing"]["cause"], facts["standing"]["since_ms"], facts["warnings"]) == ("disk_full", None, [])


# A shell has its background jobs ignore SIGINT, and what they begin inherits that.
LISTENING = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
WATCHING = f"{LISTENING}; from edgefl_coordinator.cli import main; main()"


def test_ctrl_c_of_a_process(make_coordinator) -> None:
    """As a person types it."""
    coordinator = make_coordinator()
    coordinator.store.close()
    words = ["status", "--watch", "--json", "--home", str(coordinator.store.home.root)]
    with subprocess.Popen(
        [sys.executable, "-c", WATCHING, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as watching:
        assert watching.stdout is not None and watching.stderr is not None
        try:
            assert json.loads(watching.stdout.readline())["round"] == 0
            watching.send_signal(signal.SIGINT)
            assert watching.wait(timeout=20) == 0
            assert watching.stderr.read() == b""
        finally:
            watching.kill()


def test_no_server_runs_since_the_last_one_stopped(make_coordinator, tools) -> None:
    """Since it stopped, or since the folder was restored. Nobody notes when one is killed: then its last sign is told,
    which may be hours before. The operator's own commands need no server and are no sign of one."""
    coordinator = make_coordinator(rounds={"quorum_min": 3, "quorum_target": 3, "min_cohort": 2})
    clock, three = coordinator.clock, [tools.approved_member(coordinator, f"clinic-{letter}") for letter in "abc"]

    def told() -> tuple[int | None, str]:
        clock.now_ms += 1_000
        OPERATIONS["set"](coordinator, {"changes": {"rounds.deadline_s": clock.now_ms % 999 + 60}})
        found = OPERATIONS["status"](coordinator, {})["standing"]
        assert (found["kind"], found["cause"]) == ("stuck", "not_served")
        return found["since_ms"], found["sentence"].partition(", so members")[0]

    killed = "round 1 is stuck: the server is not running (it last did something at {})"
    tools.start_rounds(coordinator)
    assert told() == (None, killed.format(moment(clock.now_ms - 1_000)))
    clock.now_ms += 60_000
    three[0].call("task", Payload())
    assert told() == (None, killed.format(moment(clock.now_ms - 1_000)))
    clock.now_ms += 60_000
    note_stop(coordinator)
    stopped_ms = clock.now_ms
    assert told() == (stopped_ms, f"round 1 is stuck since {moment(stopped_ms)}: the server is not running")
    clock.now_ms += 60_000
    with coordinator.store.transaction() as connection:
        audit.append(connection, clock.now_ms, RESTORED, "skin")
    since = f"round 1 is stuck since {moment(clock.now_ms)}"
    assert told() == (clock.now_ms - 1_000, f"{since}: the server has not run since this folder was restored")


def test_start_with_too_few_says_what_revoke_and_status_say(served, tools, clock) -> None:
    """A round of two members that needs three replies cannot close: `start` opened it without a word. One command
    mends it, whoever tells it; and it is stuck since the third was shut out, not since the round opened."""
    OPERATIONS["set"](served, {"changes": {"rounds.quorum_min": "3", "rounds.min_cohort": "2"}})
    for letter in "ab":
        tools.approved_member(served, f"clinic-{letter}")
    started = run("start")
    command = (
        "edgefl-coordinator set rounds.quorum_target 2 rounds.quorum_min 2 rounds.min_cohort 1 "
        "rounds.allow_small_cohort true --home /srv/fl"
    )
    why = "a round needs 3 replies, and 2 members are approved, so none can close"
    assert why in started.stderr and started.stderr.rstrip().endswith(command)
    assert step(served, tools.toy_worker)
    tools.approved_member(served, "clinic-with-a-name")
    assert json.loads(run("status", "--json").stdout)["standing"]["kind"] == "waits"
    waiting = run("status").stdout
    assert "(closes as soon as 3 replies are there), closes 20" in waiting
    clock.now_ms += 600_000
    assert command in run("revoke", "clinic-with-a-name").stderr
    facts = json.loads(run("status", "--json").stdout)
    assert facts["standing"]["since_ms"] == clock.now_ms and facts["standing"]["commands"][-1] == command
    waits = tools.Member(served, "hospital")
    waits.enrol(tools.token_of(served, "hospital"))
    shown = run("status").stdout
    assert "edgefl-coordinator approve hospital --fingerprint FINGERPRINT --home /srv/fl" in shown
    assert "closes" not in shown  # no deadline ends a round that is stuck
    columns = {line.index(state) for line in shown.splitlines() for state in ("approved,", "shut out", "pending,")
               if re.match(r"  site +\S+ +(approved|shut out|pending)", line) and state in line}  # fmt: skip
    assert len(columns) == 1


def test_the_end_is_called_the_end(make_coordinator, tools) -> None:
    """`status` said "round 3 of 3: done" where others say that the federation is over; the log spoke of a round 4."""
    alone = {"quorum_min": 1, "quorum_target": 1, "min_cohort": 0, "allow_small_cohort": True}
    coordinator = make_coordinator(rounds=alone)
    member = tools.approved_member(coordinator, "clinic-a")
    tools.start_rounds(coordinator)
    for number in (1, 2, 3):
        member.reply(number)
        assert step(coordinator, tools.toy_worker)
    member.call("broadcast", BroadcastRequest(round=4).to_payload(), rnd=4)
    facts = OPERATIONS["status"](coordinator, {})
    (line,) = [one for one in status_command.status_lines(facts) if "rounds" in one]
    assert line == "over: all 3 rounds are done; in the last one, 1 reply"
    (row,) = [one for one in OPERATIONS["log"](coordinator, {"from_ms": 0, "most": 99})["shown"]
              if "released" in one["event"]]  # fmt: skip
    told = audit_words.event_words(row["event"], row["subject"], row["detail"])
    assert told == "clinic-a fetched the last broadcast, made after the last round"
    with pytest.raises(OperatorError, match="this federation is over: all its rounds are done"):
        OPERATIONS["start"](coordinator, {})


def test_many_members_hear_how_it_stands_as_it_was_a_moment_ago(coordinator, tools, clock, monkeypatch) -> None:
    """To find out takes a look at every member, and every member asks: at most every five seconds, and each round."""
    pair = [tools.approved_member(coordinator, name) for name in ("clinic-a", "clinic-b")]
    tools.start_rounds(coordinator)
    looked = []
    stands = task_status.how_it_stands
    monkeypatch.setattr(task_status, "how_it_stands", lambda *given, **how: looked.append(1) or stands(*given, **how))
    for _ in range(2):
        pair[0].call("task", Payload())
    assert len(looked) == 2  # two members: always as it is
    monkeypatch.setattr(task_status, "_MANY", 1)
    for after_ms, count in ((0, 2), (4_999, 2), (1, 3), (0, 3), (-1, 4)):
        clock.now_ms += after_ms
        pair[1].call("task", Payload())
        assert len(looked) == count
