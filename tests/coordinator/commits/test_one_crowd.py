"""Replies that share one thread and its commits, over the real store: none that failed is acknowledged, none counts
twice, and each is answered as if it had come alone.

Source: docs/security.md, reliability, checks 18, 55 and 59; docs/decisions/0055.
"""

import itertools
import sqlite3
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from sqlalchemy import func, select, text
from tests.coordinator.carried import together
from tests.coordinator.rounds.test_any_order import worker

from edgefl_coordinator.rounds.aggregation import step
from edgefl_coordinator.store import audit
from edgefl_coordinator.store.audit_chain import check_log
from edgefl_coordinator.store.tables import replies, rounds
from edgefl_coordinator.web.operations import OPERATIONS
from edgefl_coordinator.web.sealed_requests import handle
from edgefl_protocol import Payload
from edgefl_protocol.messages.requests import ROUTES, EmptyRequest, Refusal, ReplyRequest

MEMBERS = 12


class Federation:
    """Members of one coordinator that all reply at once."""

    def __init__(self, coordinator: Any, tools: Any, payloads: list[Payload]) -> None:
        self.coordinator, self.payloads = coordinator, payloads
        self.members = [tools.quick_member(coordinator, f"clinic-{number:02}") for number in range(len(payloads))]
        tools.start_rounds(coordinator)

    def envelopes(self) -> list[bytes]:
        """A new envelope of each member, around its one work item."""
        return [
            one.envelope("reply", ReplyRequest(idem=f"{one.name:>016}", reply=payload).to_payload(), rnd=1)
            for one, payload in zip(self.members, self.payloads, strict=True)
        ]

    def answers(self, envelopes: list[bytes]) -> list[str]:
        """Send them in one crowd: what each is told, `accepted` or a refusal's code."""
        works = [partial(handle, self.coordinator, ROUTES["reply"], one) for one in envelopes]
        found = [one.get() for one in together(self.coordinator, works)]
        opened = zip(self.members, envelopes, found, strict=True)
        told = [Refusal.from_payload(one.open(request, answer.body)[1]) for one, request, answer in opened]
        return [refusal.code if refusal else "accepted" for refusal in told]

    def stored(self) -> list[str]:
        """Names of members whose reply is in the store with its content, one for each row; the log has as many rows."""
        with self.coordinator.store.transaction() as connection:
            rows = connection.execute(select(replies.c.skid, replies.c.blob)).all()
            log = list(audit.kept_rows(connection))
            check_log(log)
        assert [row.event for row in log].count("reply_accepted") == len(rows)
        names = {one.signing.key_id: (one.name, sent) for one, sent in zip(self.members, self.payloads, strict=True)}
        assert all(self.coordinator.store.get_blob(row.blob) == names[row.skid][1].to_bytes() for row in rows)
        return sorted(names[row.skid][0] for row in rows)

    def finish(self, told: list[str]) -> None:
        """All come again, as members do that were not acknowledged, or whose answer was lost: each counts once."""
        accepted = [one.name for one, what in zip(self.members, told, strict=True) if what == "accepted"]
        assert set(accepted) <= set(self.stored())
        for _ in range(2):
            assert self.answers(self.envelopes()) == ["accepted"] * len(self.members)
            assert self.stored() == [one.name for one in self.members]


@pytest.fixture
def federation(make_coordinator: Any, tools: Any) -> Federation:
    coordinator = make_coordinator(rounds={"quorum_target": 1000})
    return Federation(coordinator, tools, [tools.maps_payload(number) for number in range(MEMBERS)])


def failing(federation: Federation, which: int, *, keeps: bool = False) -> Callable[[Any], None]:
    """A commit that fails the time `which` of those from now on; `keeps`: only after it has reached the disk."""
    commit, number = federation.coordinator.store._engine.dialect.do_commit, itertools.count()

    def fails_once(connection: Any) -> None:
        broken = next(number) == which
        if keeps or not broken:
            commit(connection)
        if broken:
            raise sqlite3.OperationalError("disk I/O error")

    return fails_once


ALL, NONE = ["accepted"] * MEMBERS, ["internal"] * MEMBERS
LOOKED_UP, ADMITTED, DONE = range(3)  # the commits of a crowd whose members all come at once


@pytest.mark.parametrize(("which", "told", "sent_again"), [
    (LOOKED_UP, ALL, ["replayed"] * MEMBERS),
    (ADMITTED, NONE, ALL),  # nothing of them was kept, not even their numbers
    (DONE, NONE, ["replayed"] * MEMBERS),
])  # fmt: skip
def test_a_commit_that_fails_acknowledges_nobody(federation, monkeypatch, which, told, sent_again) -> None:
    """Twelve in a group: all of them are told to come again, none is in the store, and all can come again."""
    dialect, envelopes = federation.coordinator.store._engine.dialect, federation.envelopes()
    with monkeypatch.context() as patch:
        patch.setattr(dialect, "do_commit", failing(federation, which))
        assert federation.answers(envelopes) == told
    assert federation.stored() == ([one.name for one in federation.members] if told == ALL else [])
    assert federation.answers(envelopes) == sent_again
    federation.finish(told)


@pytest.mark.parametrize("which", [ADMITTED, DONE])
def test_a_commit_that_reached_the_disk_and_failed_counts_once(federation, monkeypatch, which) -> None:
    """Where a flush after the commit fails nobody is acknowledged either; the retry finds the first answer."""
    dialect = federation.coordinator.store._engine.dialect
    with monkeypatch.context() as patch:
        patch.setattr(dialect, "do_commit", failing(federation, which, keeps=True))
        assert federation.answers(federation.envelopes()) == NONE
    assert len(federation.stored()) == (MEMBERS if which == DONE else 0)
    federation.finish(NONE)


def test_a_disk_that_fills_up_in_the_middle_of_a_group(make_coordinator, tools) -> None:
    """Check 59: at every fifth count of pages that are left, SQLite undoes a group by itself; whoever is acknowledged
    is in the store, the others hear that the disk is full and come again.
    """
    task = {"backbone": {"image_px": 240, "patch": 12}}  # a reply takes a page
    coordinator = make_coordinator(rounds={"quorum_target": 1000}, task=task)
    ones, number = np.ones((2, 400), np.float16), range(MEMBERS)
    payloads = [Payload({"maps.0": ones, "maps.1": ones}, {"site_sha256": f"{one:064x}"}) for one in number]
    federation = Federation(coordinator, tools, payloads)
    store, accepted, seen = coordinator.store, set[str](), list[int]()
    with store.transaction() as connection:
        pages = int(connection.scalar(text("PRAGMA page_count")))
    for more in range(0, 100, 5):
        with store.transaction() as connection:
            connection.execute(text(f"PRAGMA max_page_count = {pages + more}"))
        told = federation.answers(federation.envelopes())
        assert set(told) <= {"storage_full", "accepted"}, told
        accepted |= {one.name for one, what in zip(federation.members, told, strict=True) if what == "accepted"}
        assert federation.stored() == sorted(accepted)
        seen.append(told.count("accepted"))
        if told == ALL:
            break
    assert seen[0] == 0 and any(0 < one < MEMBERS for one in seen)
    with store.transaction() as connection:
        connection.execute(text("PRAGMA max_page_count = 1073741823"))
        assert connection.scalar(text("PRAGMA integrity_check")) == "ok"
    federation.finish(told)


KINDS = ("reply", "the same item", "another item", "a later round", "an earlier round", "unsound", "bytes again",
         "task", "old", "far ahead", "broken", "no envelope", "a stranger")  # fmt: skip
PROGRAMS = st.lists(st.tuples(st.integers(0, 3), st.sampled_from(KINDS)), min_size=6, max_size=14)


class Side:
    """A coordinator and the requests of a program, sealed for it."""

    def __init__(self, coordinator: Any, tools: Any) -> None:
        self.coordinator, self.tools = coordinator, tools
        self.stranger = tools.Member(coordinator, "stranger")
        tools.quick_member(coordinator, "first")
        OPERATIONS["start"](coordinator, {})

    def next_round(self) -> int:
        """The round that is open once all that is due was done."""
        while step(self.coordinator, worker):
            pass
        with self.coordinator.store.transaction() as connection:
            return int(connection.scalar(select(func.max(rounds.c.number))))

    def sealed(self, program: list[tuple[int, str]], number: int) -> list[tuple[Any, str, bytes]]:
        """Who sends, the route, and the envelope."""
        members = [self.tools.quick_member(self.coordinator, f"clinic-{number}-{one}") for one in range(4)]
        now = self.next_round()
        made = list[tuple[Any, str, bytes]]()
        for place, (which, kind) in enumerate(program):
            member, before = members[which], [one for one in made if one[0] is members[which]]
            if kind == "bytes again" and before:
                made.append(before[-1])
                continue
            item = f"{place:016}" if kind == "another item" else f"{member.name:>016}"
            payload = self.tools.maps_payload(0)
            if kind == "unsound":
                payload = Payload({"maps.0": payload.arrays["maps.0"] * 2}, payload.scalars)
            cty, message = "reply", ReplyRequest(idem=item, reply=payload).to_payload()
            if kind == "task":
                cty, message = "task", EmptyRequest().to_payload()
            rnd = {"task": 0, "a later round": now + 1, "an earlier round": now - 1}.get(kind, now)
            header = {"old": {"iat": self.coordinator.clock() - 10**7}, "far ahead": {"seq": 2**40}}.get(kind, {})
            sender = self.stranger if kind == "a stranger" else member
            data = sender.envelope(cty, message, rnd=rnd, **header)
            if kind == "broken":
                data = data[:-1] + bytes([data[-1] ^ 1])
            made.append((sender, cty, b"no envelope" if kind == "no envelope" else data))
        return made

    def told(self, sealed: list[tuple[Any, str, bytes]], answers: list[Any]) -> list[tuple[str, bytes]]:
        """What each sender reads: `accepted`, a refusal's code or a bare status, and all of it."""
        found = list[tuple[str, bytes]]()
        for (member, _, request), answer in zip(sealed, answers, strict=True):
            if answer.sealed:
                status, payload = member.open(request, answer.body)
                refusal = Refusal.from_payload(payload)
                assert status == answer.status
                found.append((refusal.code if refusal else "accepted", payload.to_bytes()))
            else:
                found.append((str(answer.status), answer.body))
        return found

    def kept(self) -> tuple[Counter[Any], Counter[Any]]:
        """Rows of replies, and of the log since the last member joined."""
        with self.coordinator.store.transaction() as connection:
            rows = connection.execute(select(replies.c.number, replies.c.idem, replies.c.sha256)).all()
            log = list(audit.kept_rows(connection))
        check_log(log)
        joined = max(place for place, row in enumerate(log) if row.event == "approved")
        return Counter(map(tuple, rows)), Counter((row.event, row.subject, row.detail) for row in log[joined + 1 :])


@pytest.mark.parametrize("programs", [6, pytest.param(300, marks=[pytest.mark.slow, pytest.mark.nightly])])
def test_a_crowd_answers_as_one_after_the_other_is_answered(make_coordinator, tools, programs) -> None:
    """Any mix of requests, the third reply of which closes the round: the same answers to each, the same replies in the
    store, the same rows in the log.
    """
    rules = {"count": 99, "quorum_target": 3}
    alone, crowded = (Side(make_coordinator(name, rounds=rules), tools) for name in ("a", "b"))
    crowded.stranger.signing = alone.stranger.signing
    numbers, seen = itertools.count(), Counter[str]()

    @settings(max_examples=programs, deadline=None, database=None, derandomize=True, phases=[Phase.generate],
              suppress_health_check=[HealthCheck.too_slow])  # fmt: skip
    @given(PROGRAMS)
    def same(program: list[tuple[int, str]]) -> None:
        number = next(numbers)
        mine, theirs = (side.sealed(program, number) for side in (alone, crowded))
        one = alone.told(mine, [handle(alone.coordinator, ROUTES[cty], data) for _, cty, data in mine])
        works = [partial(handle, crowded.coordinator, ROUTES[cty], data) for _, cty, data in theirs]
        other = crowded.told(theirs, [outcome.get() for outcome in together(crowded.coordinator, works)])
        assert one == other
        assert alone.kept() == crowded.kept()
        assert alone.next_round() == crowded.next_round()
        seen.update(code for code, _ in one)

    same()
    assert min(seen[code] for code in ("accepted", "round_closed", "bad_contribution", "401")) > 0, seen
