"""The operator's gate may refuse what a round made: docs/security.md 4, docs/decisions/0053."""

import json
import stat
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from edgefl_coordinator.commands.status import status_lines
from edgefl_coordinator.errors import STOPPED, OperatorError
from edgefl_coordinator.rounds import stored_broadcasts
from edgefl_coordinator.rounds.aggregation import step
from edgefl_coordinator.rounds.jobs import JobResult, read_job, write_result
from edgefl_coordinator.rounds.operator_gate import ENVIRONMENT, ask, command_of
from edgefl_coordinator.rounds.worker import run_job
from edgefl_coordinator.rounds.worker_process import WorkerProcess
from edgefl_coordinator.store import audit_words
from edgefl_coordinator.web.operations import OPERATIONS
from edgefl_protocol import Payload
from edgefl_protocol.durable import PASSPHRASE_VARIABLE
from edgefl_protocol.messages.requests import BroadcastRequest, Refusal, TaskReply

pytest.importorskip("torch")

MEMBERS = ("clinic-a", "clinic-b", "clinic-c", "clinic-d")
GATE = f"""
import json, sys
from pathlib import Path
sys.path[:0] = {sys.path!r}
from edgefl_protocol import Payload
folder = Path(sys.argv[-1])
about = json.loads((folder / "round.json").read_text())
before, after = (Payload.from_bytes((folder / f"{{name}}.payload").read_bytes()) for name in ("before", "after"))
"""


@pytest.fixture
def gate(folder: Path) -> Any:
    """Make a gate of a few lines of Python; `before`, `after` and `about` are read for them."""

    def make(lines: str) -> str:
        file = folder / "gate.py"
        file.write_text(GATE + lines)
        return f"{sys.executable} {file}"

    return make


@pytest.fixture
def federation(make_coordinator, tools) -> Any:
    """Four members of a FedEvPrompt federation with a gate, in its first round."""

    def make(command: str, **rounds: Any) -> tuple[Any, list[Any]]:
        backbone = {
            "name": "tiny", "image_px": 24, "patch": 12, "depth": 4, "heads": 1, "width": 8, "mean": [0.5] * 3,
            "std": [0.5] * 3, "self_supervised": False, "sha256": "0" * 64,
        }  # fmt: skip
        coordinator = make_coordinator(
            task={"backbone": backbone}, protection={"gate": command, "rule": "mean"}, rounds={"count": 3, **rounds}
        )
        members = [tools.quick_member(coordinator, name) for name in MEMBERS]
        coordinator.serving = True
        OPERATIONS["start"](coordinator, {})
        assert step(coordinator, worker)
        return coordinator, members

    return make


def worker(folder: Path, timeout_s: float) -> None:
    """The real worker's job, in this process."""
    write_result(folder, run_job(read_job(folder), folder))


def reply_all(coordinator: Any, members: list[Any], number: int, tools: Any, seed: int = 0) -> None:
    for place, member in enumerate(members):
        assert isinstance(member.reply(number, payload=tools.maps_payload(10 * seed + place)), Payload)
    assert step(coordinator, worker)


def status(coordinator: Any) -> dict[str, Any]:
    return OPERATIONS["status"](coordinator, {})


def fetched(member: Any, number: int) -> Any:
    return member.call("broadcast", BroadcastRequest(round=number).to_payload(), rnd=number)


def broadcast_of(member: Any, number: int) -> set[bytes]:
    """The maps that a member is sent."""
    found = fetched(member, number)
    assert isinstance(found, Payload), found
    return {array.tobytes() for array in found.arrays.values()}


def maps_of(tools: Any, *seeds: int) -> set[bytes]:
    return {array.tobytes() for seed in seeds for array in tools.maps_payload(seed).arrays.values()}


REFUSES_2 = """
if about["round"] == 2:
    print("the second one is worse")
    sys.exit(3)
print(f"{len(before.arrays)} and {len(after.arrays)} arrays")
"""


def test_a_refused_round_keeps_the_state_before_it_and_the_next_one_begins_there(federation, gate, tools) -> None:
    """What round 1 made counts, what round 2 made does not, and round 3 counts again; status and log say so."""
    coordinator, members = federation(gate(REFUSES_2))
    reply_all(coordinator, members, 1, tools)
    assert broadcast_of(members[0], 2) == maps_of(tools, 1, 2, 3)
    reply_all(coordinator, members, 2, tools, seed=1)
    facts = status(coordinator)
    assert (facts["round"], facts["state"]) == (3, "open")
    assert facts["gate_refused"] == [{"round": 2, "said": "the second one is worse"}]
    assert facts["refused"] == [] and facts["bounded"] == []  # nobody is guessed
    assert any("round 2" in line and "the second one is worse" in line for line in status_lines(facts))
    assert broadcast_of(members[0], 3) == maps_of(tools, 1, 2, 3)
    reply_all(coordinator, members, 3, tools, seed=2)
    assert status(coordinator)["state"] == "done"
    assert broadcast_of(members[0], 4) == maps_of(tools, 21, 22, 23)
    rows = OPERATIONS["log"](coordinator, {"from_ms": 0, "most": 100})["shown"]
    told = [(row["event"], row["subject"], row["detail"]) for row in rows if row["event"].startswith("gate_")]
    assert told == [
        ("gate_accepted", "1", {"said": "0 and 8 arrays"}),
        ("gate_refused", "2", {"said": "the second one is worse"}),
        ("gate_accepted", "3", {"said": "8 and 8 arrays"}),
    ]
    assert audit_words.explanation("gate_refused", told[1][2]) == "the second one is worse"
    assert "worse" not in audit_words.event_words(*told[1])


def test_members_are_told_what_is_so(federation, gate, tools) -> None:
    """Their replies came, and count for nothing; what the gate said is the operator's."""
    coordinator, members = federation(gate(REFUSES_2))
    for number in (1, 2):
        reply_all(coordinator, members, number, tools, seed=number)
    found = TaskReply.from_payload(members[0].call("task", Payload({}, {})))
    assert found.stuck == (
        "round 2 was refused by the operator's gate: its replies count for nothing, and round 3 begins where it began"
    )
    assert (found.round, found.replied, found.refusal) == (3, False, "")
    late = members[0].reply(2, idem="another-work-item")
    assert isinstance(late, Refusal) and late.code == "round_closed"
    reply_all(coordinator, members, 3, tools)
    assert TaskReply.from_payload(members[0].call("task", Payload({}, {}))).stuck == ""


def test_after_a_refused_first_round_everybody_may_have_the_second(federation, gate, tools) -> None:
    """Nobody's contribution lies in its broadcast, so none can be told apart; then the rule counts as ever."""
    coordinator, members = federation(gate("sys.exit(3 if about['round'] == 1 else 0)"), quorum_target=3, min_cohort=3)
    reply_all(coordinator, members[:3], 1, tools)
    assert broadcast_of(members[0], 2) == set()
    reply_all(coordinator, members[:3], 2, tools)
    refused = fetched(members[0], 3)
    assert isinstance(refused, Refusal) and refused.code == "small_cohort"
    assert broadcast_of(members[3], 3) == maps_of(tools, 0, 1, 2)


def test_a_cohort_counts_nobody_of_a_refused_round(make_coordinator, tools) -> None:
    """An average holds who replied in the newest round that counts, whoever replied in a refused one since."""

    def refuses_2(folder: Path, timeout_s: float) -> None:
        job = read_job(folder)
        sent = {site: Payload({}, {"round": 1}).to_bytes() for site in job.sites}
        word: Any = {"aggregate": "refused" if job.number == 2 else "accepted"}.get(job.kind, "")
        write_result(folder, JobResult(Payload().to_bytes(), ("train",) * 3, sent, gate=word))

    task = {"method": "fedavg", "shares_maps": False}
    coordinator = make_coordinator(task=task, rounds={"quorum_min": 3, "quorum_target": 3, "min_cohort": 2})
    members = [tools.quick_member(coordinator, name) for name in MEMBERS]
    OPERATIONS["start"](coordinator, {})
    assert step(coordinator, refuses_2)
    for number, replying in ((1, members[:3]), (2, [*members[:2], members[3]])):
        for member in replying:
            assert isinstance(member.reply(number), Payload)
        assert step(coordinator, refuses_2)
    with coordinator.store.transaction() as connection:
        others = stored_broadcasts.others_in_broadcasts(connection, 3)
    assert [others[member.signing.key_id] for member in members] == [2, 2, 2, 3]


def test_the_last_round_refused(federation, gate, tools) -> None:
    """The federation is over, with the digest of the state before, and says so."""
    coordinator, members = federation(gate("sys.exit(3 if about['round'] == about['rounds'] else 0)"), count=2)
    reply_all(coordinator, members, 1, tools)
    reply_all(coordinator, members, 2, tools, seed=1)
    assert status(coordinator)["state"] == "done"
    assert broadcast_of(members[0], 3) == maps_of(tools, 1, 2, 3)
    found = TaskReply.from_payload(members[0].call("task", Payload({}, {})))
    assert found.stuck == "round 2, the last, was refused by the operator's gate: what was learned before it counts"


@pytest.mark.parametrize(
    ("lines", "sentence"),
    [
        ("sys.exit(1)", "the gate gave no verdict, but ended with status 1: no message"),
        ("raise SystemExit('no pictures')", "the gate gave no verdict, but ended with status 1: no pictures"),
        ("import os; os.kill(os.getpid(), 9)", "the gate gave no verdict, but ended with status -9: no message"),
        ("import time; time.sleep(60)", "the gate gave no verdict in 1 s and was stopped"),
    ],
)
def test_without_a_verdict_nothing_is_published(federation, gate, tools, lines, sentence) -> None:
    """The round stands and is tried again; once the gate answers, it goes on with the same replies."""
    coordinator, members = federation(gate(lines))
    if "sleep" in lines:
        OPERATIONS["set"](coordinator, {"changes": {"limits.gate_s": "1"}})
    for place, member in enumerate(members):
        assert isinstance(member.reply(1, payload=tools.maps_payload(place)), Payload)
    for _ in range(2):
        with pytest.raises(OperatorError, match=sentence):
            step(coordinator, worker)
    facts = status(coordinator)
    assert (facts["round"], facts["state"], facts["standing"]["cause"]) == (1, "closed", "job_failed")
    assert sentence in facts["failing"]["error"] and facts["gate_refused"] == []
    assert "gate" not in TaskReply.from_payload(members[0].call("task", Payload({}, {}))).stuck
    gate("")
    OPERATIONS["set"](coordinator, {"changes": {"limits.gate_s": "60"}})  # a busy machine is no fault
    assert step(coordinator, worker)
    assert broadcast_of(members[0], 2) == maps_of(tools, 1, 2, 3)


def test_a_verdict_is_stored_with_its_state_or_not_at_all(federation, gate, tools, folder) -> None:
    """Killed between the verdict and the commit: the gate is asked again, and one verdict counts."""
    coordinator, members = federation(gate("open(sys.argv[1], 'a').write('asked '); sys.exit(3)"))
    asked = folder / "asked"
    OPERATIONS["set"](coordinator, {"changes": {"protection.gate": gate_with(coordinator, asked)}})
    for place, member in enumerate(members):
        assert isinstance(member.reply(1, payload=tools.maps_payload(place)), Payload)

    def killed(job: Path, timeout_s: float) -> None:
        worker(job, timeout_s)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        step(coordinator, killed)
    assert (status(coordinator)["round"], status(coordinator)["gate_refused"]) == (1, [])
    assert step(coordinator, worker)
    assert asked.read_text() == "asked asked "
    assert status(coordinator)["gate_refused"] == [{"round": 1, "said": ""}]
    assert not step(coordinator, worker)


def gate_with(coordinator: Any, argument: Path) -> str:
    return f"{coordinator.settings.protection.gate} {argument}"


def test_who_is_shut_out_meanwhile_is_judged_without(federation, gate, tools) -> None:
    """A verdict over a reply of a member that was revoked while the gate looked is not stored."""
    coordinator, members = federation(gate("sys.exit(3 if 'maps.0.clinic-d' in after.arrays else 0)"))
    for place, member in enumerate(members):
        assert isinstance(member.reply(1, payload=tools.maps_payload(place)), Payload)

    def meanwhile(job: Path, timeout_s: float) -> None:
        worker(job, timeout_s)
        OPERATIONS["revoke"](coordinator, {"name": "clinic-d"})

    assert step(coordinator, meanwhile)
    assert (status(coordinator)["round"], status(coordinator)["gate_refused"]) == (1, [])
    assert step(coordinator, worker)
    assert (status(coordinator)["round"], status(coordinator)["gate_refused"]) == (2, [])


def test_the_gate_reads_states_and_the_task_and_no_reply(federation, gate, tools, folder) -> None:
    """Two states, what the task is, and nothing else: no reply, no key, no passphrase, no standard input."""
    seen = folder / "seen.json"
    lines = f"""
import os
found = dict(files=sorted(os.listdir(folder)), about=about, typed=sys.stdin.read(), words=sys.argv[1:-1])
open({str(seen)!r}, "w").write(json.dumps(found))
"""
    coordinator, members = federation(f"{gate(lines)} 'one word' --least 0.5; $HOME")
    reply_all(coordinator, members, 1, tools)
    found = json.loads(seen.read_text())
    assert found["files"] == ["after.payload", "before.payload", "round.json"]
    assert found["words"] == ["one word", "--least", "0.5;", "$HOME"]  # no shell read them
    assert found["typed"] == ""
    assert set(found["about"]) == {"round", "rounds", "phase", "method", "settings", "task"}
    assert found["about"]["phase"] == "train" and found["about"]["task"]["classes"] == ["nevus", "other"]


def test_a_stop_ends_the_gate_and_no_passphrase_reaches_it(federation, gate, tools, folder, monkeypatch) -> None:
    """In the worker's own process: a stopped server leaves no gate, nor what that began, and the round is judged at the
    next start."""
    monkeypatch.setenv(PASSPHRASE_VARIABLE, "canary")
    told = folder / "told.json"
    lines = f"""
import os, subprocess, time
begun = subprocess.Popen(["sleep", "120"])
Path({str(told)!r} + ".tmp").write_text(json.dumps([[os.getpid(), begun.pid], sorted(os.environ)]))
os.rename({str(told)!r} + ".tmp", {str(told)!r})
time.sleep(120)
"""
    coordinator, members = federation(gate(lines))
    for place, member in enumerate(members):
        assert isinstance(member.reply(1, payload=tools.maps_payload(place)), Payload)
    process, until = WorkerProcess(), time.monotonic() + 60
    with ThreadPoolExecutor(1) as pool:
        doing = pool.submit(step, coordinator, process)
        while not told.exists() and time.monotonic() < until:
            time.sleep(0.05)
        process.stop()
        with pytest.raises(OperatorError) as stopped:
            doing.result(60)
    pids, names = json.loads(told.read_text())
    assert stopped.value.code == STOPPED and PASSPHRASE_VARIABLE not in names
    assert ended(*pids)
    facts = status(coordinator)
    assert (facts["round"], facts["failing"], facts["gate_refused"]) == (1, None, [])
    gate("")
    assert step(coordinator, worker)
    assert status(coordinator)["round"] == 2


def ended(*pids: int) -> bool:
    """Whether these processes ended, or do so within seconds: a kill takes a moment."""
    until = time.monotonic() + 10

    def lives(pid: int) -> bool:
        file = Path(f"/proc/{pid}/stat")
        return file.exists() and file.read_text().rpartition(")")[2].split()[0] != "Z"

    while (left := any(map(lives, pids))) and time.monotonic() < until:
        time.sleep(0.02)
    return not left


@pytest.mark.parametrize(("last", "most_s"), [("", 60.0), ("time.sleep(60)", 4.0)], ids=["verdict", "late"])
def test_what_a_gate_began_ends_with_it(tmp_path, last, most_s) -> None:
    """A process that it started in the background holds no GPU, and no worker, once the gate has ended or was late."""
    begun = "import subprocess, sys, time; one = subprocess.Popen(['sleep', '120']); "
    program = [sys.executable, "-c", f"{begun}print(one.pid, file=open(sys.argv[1] + '/pid', 'w'), flush=True); {last}"]
    started = time.monotonic()
    if last:
        with pytest.raises(OperatorError, match="no verdict in 4 s"):
            ask(program, tmp_path, most_s)
    else:
        assert ask(program, tmp_path, most_s).accepted
    assert time.monotonic() - started < 20
    assert ended(int((tmp_path / "pid").read_text()))


def test_a_gate_has_a_small_environment(tmp_path, monkeypatch) -> None:
    """No secret of the environment of `serve` reaches it, whatever its name; what a program needs to run does."""
    for name in ("DATABASE_URL", "LD_PRELOAD_CANARY", PASSPHRASE_VARIABLE, "TZ"):
        monkeypatch.setenv(name, "canary")
    program = [sys.executable, "-c", "import json, os; print(json.dumps(sorted(os.environ)))"]
    found = set(json.loads(ask(program, tmp_path, 30).said))
    assert found <= set(ENVIRONMENT) and {"PATH", "TZ"} <= found
    given = ["/usr/bin/env", "MORE=1", *program]
    assert "MORE" in json.loads(ask(given, tmp_path, 30).said)


def test_what_a_gate_prints_fills_no_disk(tmp_path) -> None:
    """It writes into a pipe, and 64 MiB of it leave the last line."""
    loud = "import os, sys; print('x' * 2**26); print('y' * 2**26, file=sys.stderr); "
    loud += "print([os.fstat(number).st_mode for number in (1, 2)])"
    found = ask([sys.executable, "-c", loud], tmp_path, 60)
    assert found.accepted and all(map(stat.S_ISFIFO, json.loads(found.said)))


def test_a_gate_that_is_no_program_is_refused_by_set(coordinator, folder) -> None:
    for command, sentence in {
        "no-such-gate": "which is no program that can be started here",
        "'open": "protection.gate is no command: No closing quotation",
    }.items():
        with pytest.raises(OperatorError, match=sentence):
            OPERATIONS["set"](coordinator, {"changes": {"protection.gate": command}})
    (coordinator.store.home.root / "gate").write_text("#!/bin/sh\n")
    (coordinator.store.home.root / "gate").chmod(0o700)
    OPERATIONS["set"](coordinator, {"changes": {"protection.gate": "gate --least 0.5"}})
    home = coordinator.store.home.root
    assert command_of(coordinator.settings.protection.gate, home) == (str(home / "gate"), "--least", "0.5")
    OPERATIONS["set"](coordinator, {"changes": {"protection.gate": ""}})
    assert command_of(coordinator.settings.protection.gate, home) == ()


def test_what_a_gate_prints_stays_one_short_line(tmp_path) -> None:
    program = [sys.executable, "-c", r"print('first'); print('last\x1b[2J' + 'x' * 10000); raise SystemExit(3)"]
    found = ask(program, tmp_path, 30)
    assert not found.accepted and len(found.said) <= 300 and found.said.isprintable()
