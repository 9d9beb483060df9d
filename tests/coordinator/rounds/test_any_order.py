"""Check 61: joining, uploads, duplicates, lateness, revocation, closing, restarts and clock jumps, in any order.

A program of hypothesis works on a real coordinator and on a model of thirty lines beside it; after each step both tell
the same answers, replies and round.
"""

import contextlib
import itertools
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from sqlalchemy import select

from edgefl_coordinator.founding.folder import make_home
from edgefl_coordinator.rounds.aggregation import step
from edgefl_coordinator.rounds.jobs import JobResult, read_job, write_result
from edgefl_coordinator.settings import CoordinatorHome
from edgefl_coordinator.store import audit
from edgefl_coordinator.store.audit_chain import check_log
from edgefl_coordinator.store.coordinator import open_coordinator
from edgefl_coordinator.store.tables import replies, rounds
from edgefl_coordinator.web.operations import OPERATIONS
from edgefl_protocol import Payload
from edgefl_protocol.messages.requests import Refusal

LEAST, TARGET, PERIOD_MS = 2, 3, 60_000
NAMES = st.integers(0, 9)


def worker(folder: Path, _: float) -> None:
    """Names the replies of each round in the state, and gives everybody an empty broadcast."""
    job = read_job(folder)
    state = Payload({}, {"replies": ",".join(sorted(job.replies))}).to_bytes()
    sent = dict.fromkeys(job.sites, Payload().to_bytes())
    write_result(folder, JobResult(b"" if job.kind == "broadcast" else state, ("train",) * 99, sent))


class Model:
    """What must hold, without a database: docs/security.md, reliability."""

    def __init__(self, now_ms: int) -> None:
        self.number, self.deadline_ms, self.open = 1, now_ms + PERIOD_MS, True
        self.here: dict[str, str] = {}  # who replied in this round → with which work item
        self.answers: dict[tuple[str, str], bytes] = {}  # first answers, for ever
        self.belongs: set[str] = set()

    def due(self, now_ms: int) -> tuple[bool, int]:
        """Whether the round is still open, and its deadline, once somebody looks at it now."""
        if not self.open or len(self.here) >= TARGET:
            return False, self.deadline_ms
        late = now_ms - self.deadline_ms
        if late < 0:
            return True, self.deadline_ms
        return len(self.here) < LEAST, self.deadline_ms + PERIOD_MS * (late // PERIOD_MS + 1)

    def verdict(self, name: str, number: int, item: str, now_ms: int) -> str:
        """What a reply is answered."""
        if name not in self.belongs:
            return "401"
        if (name, item) in self.answers:
            return "first answer"
        if number > self.number:
            return "no_round"
        if number < self.number or not self.due(now_ms)[0]:
            return "round_closed"
        return "already_replied" if name in self.here else "accepted"

    def accept(self, name: str, item: str, now_ms: int) -> None:
        self.open, self.deadline_ms = self.due(now_ms)
        self.here[name] = item
        self.open = self.due(now_ms)[0]

    def aggregate(self, now_ms: int) -> None:
        self.open, deadline_ms = self.due(now_ms)
        self.deadline_ms = deadline_ms if self.open else self.deadline_ms
        if not self.open:
            self.number, self.here, self.open, self.deadline_ms = self.number + 1, {}, True, now_ms + PERIOD_MS


class AnyOrder(RuleBasedStateMachine):
    """A federation to which anything may happen at any time."""

    tools: Any
    clock_of: Any

    @initialize()
    def begin(self) -> None:
        self.ends = contextlib.ExitStack()
        memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
        folder = self.ends.enter_context(tempfile.TemporaryDirectory(dir=memory, prefix="edgefl-"))
        self.home, self.clock = CoordinatorHome(Path(folder) / "home"), self.clock_of()
        rules = {"count": 99, "quorum_min": LEAST, "quorum_target": TARGET, "deadline_s": PERIOD_MS // 1000}
        make_home(self.home, self.tools.settings_table(rounds=rules))
        self.coordinator = open_coordinator(self.home, clock=self.clock)
        self.members = dict[str, Any]()
        self.items = (f"work-item-{number:08}" for number in itertools.count())
        self.join()
        OPERATIONS["start"](self.coordinator, {})
        assert step(self.coordinator, worker)
        self.model = Model(self.clock())
        self.model.belongs = set(self.members)

    def teardown(self) -> None:
        if hasattr(self, "coordinator"):
            with self.coordinator.store.transaction() as connection:
                check_log(audit.kept_rows(connection))
            self.coordinator.store.close()
            self.ends.close()

    @precondition(lambda self: len(self.members) < 6)
    @rule()
    def join(self) -> None:
        name = f"clinic-{len(self.members)}"
        self.members[name] = self.tools.quick_member(self.coordinator, name)
        if hasattr(self, "model"):
            self.model.belongs.add(name)

    def reply(self, which: int, number: int, item: str) -> None:
        """Send a reply, and compare the answer with the model's."""
        name, now_ms = sorted(self.members)[which % len(self.members)], self.clock()
        wanted = self.model.verdict(name, number, item, now_ms)
        found = self.members[name].reply(number, item)
        if wanted == "accepted":
            assert isinstance(found, Payload), found
            self.model.accept(name, item, now_ms)
            self.model.answers[name, item] = found.to_bytes()
        elif wanted == "first answer":
            assert isinstance(found, Payload) and found.to_bytes() == self.model.answers[name, item]
        else:
            assert (found.code if isinstance(found, Refusal) else str(found)) == wanted

    @rule(which=NAMES)
    def upload(self, which: int) -> None:
        self.reply(which, self.model.number, next(self.items))

    @rule(which=NAMES, ahead=st.sampled_from([-1, 1]))
    def upload_late_or_early(self, which: int, ahead: int) -> None:
        self.reply(which, max(0, self.model.number + ahead), next(self.items))

    @precondition(lambda self: self.model.answers)
    @rule(which=NAMES)
    def upload_again(self, which: int) -> None:
        name, item = sorted(self.model.answers)[which % len(self.model.answers)]
        self.reply(sorted(self.members).index(name), self.model.number, item)

    @precondition(lambda self: len(self.model.belongs) > 1)
    @rule(which=NAMES)
    def revoke(self, which: int) -> None:
        name = sorted(self.model.belongs)[which % len(self.model.belongs)]
        OPERATIONS["revoke"](self.coordinator, {"name": name})
        self.model.belongs.remove(name)
        if self.model.open:
            self.model.here.pop(name, None)

    @rule(seconds=st.sampled_from([-90, 1, 20, 59, 60, 61, 200]))
    def the_clock_jumps(self, seconds: int) -> None:
        self.clock.now_ms += 1000 * seconds

    @rule()
    def look_at_the_rounds(self) -> None:
        while step(self.coordinator, worker):
            pass
        self.model.aggregate(self.clock())

    @rule()
    def restart(self) -> None:
        self.coordinator.store.close()
        self.coordinator = open_coordinator(self.home, clock=self.clock)
        for member in self.members.values():
            member.coordinator = self.coordinator

    @invariant()
    def both_tell_the_same(self) -> None:
        """The replies of the round, how often one was accepted, and which round it is."""
        if not hasattr(self, "model"):
            return
        with self.coordinator.store.transaction() as connection:
            number, state = connection.execute(
                select(rounds.c.number, rounds.c.state).order_by(rounds.c.number.desc())
            ).first()
            stored = sorted(connection.scalars(select(replies.c.idem).where(replies.c.number == number)))
            accepted = audit.times_of(connection, ("reply_accepted",), from_ms=0)
        assert (number, state == "open") == (self.model.number, self.model.open)
        assert stored == sorted(self.model.here.values())
        assert len(accepted) == len(self.model.answers)


@pytest.mark.parametrize(
    "programs",
    [
        pytest.param(8, marks=pytest.mark.smaller),
        pytest.param(40, marks=pytest.mark.slow),
        pytest.param(500, marks=[pytest.mark.slow, pytest.mark.nightly]),
    ],
)
def test_in_any_order(tools: Any, clock: Any, programs: int) -> None:
    """Check 61: 8, 40 and 500 programs of up to 40 steps."""
    machine = type("Machine", (AnyOrder,), {"tools": tools, "clock_of": type(clock)})
    checks = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]
    rules = settings(
        max_examples=programs, stateful_step_count=40, deadline=None, database=None, suppress_health_check=checks,
        derandomize=True,
    )  # fmt: skip
    run_state_machine_as_test(machine, settings=rules)
