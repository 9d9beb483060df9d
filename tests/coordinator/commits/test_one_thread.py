"""Work in a crowd: one commit for all who wait, what waits elsewhere holds up nobody, and errors are one's own."""

import threading
from queue import SimpleQueue
from typing import Any

import pytest

from edgefl_coordinator.commits import crowd
from edgefl_coordinator.commits.crowd import CarriedOut, Crowd


class Carried:
    """A crowd whose commits are counted, and what it told."""

    def __init__(self) -> None:
        self.events = list[str]()
        self.told: SimpleQueue[tuple[Any, CarriedOut]] = SimpleQueue()
        self.crowd = Crowd(lambda: self.events.append("commit"), lambda done: [self.told.put(one) for one in done])

    def of(self, *works: Any) -> dict[Any, CarriedOut]:
        for number, work in enumerate(works):
            self.crowd.run(work, number)
        return dict(self.told.get(timeout=20) for _ in works)


@pytest.fixture
def carried() -> Carried:
    return Carried()


def test_one_commit_serves_all_who_wait(carried) -> None:
    """Twenty that wait for a commit wait for the same one; each goes on behind it."""
    gate = threading.Event()

    def work(name: str) -> str:
        carried.events.append("works")
        crowd.wait_for_commit()
        carried.events.append("goes on")
        return name

    carried.crowd.run(lambda: gate.wait(20), "first")  # the others come meanwhile
    for number in range(20):
        carried.crowd.run(lambda number=number: work(f"{number}"), number)
    gate.set()
    found = dict(carried.told.get(timeout=20) for _ in range(21))
    assert {found[number].value for number in range(20)} == {f"{number}" for number in range(20)}
    assert [one for one, _ in _runs(carried.events)][:3] in (
        ["commit", "works", "commit"],
        ["works", "commit", "goes on"],
    )
    assert dict(_runs(carried.events))["works"] == 20 and dict(_runs(carried.events))["goes on"] == 20


def _runs(events: list[str]) -> list[tuple[str, int]]:
    """Each run of equal events, and how long it is."""
    found: list[tuple[str, int]] = []
    for one in events:
        if found and found[-1][0] == one:
            found[-1] = (one, found[-1][1] + 1)
        else:
            found.append((one, 1))
    return found


@pytest.mark.parametrize("where", [crowd.elsewhere, crowd.apart])
def test_what_takes_long_holds_up_nobody(carried, where) -> None:
    """A piece that waits for another thread lets the others be done."""
    gate = threading.Event()
    carried.crowd.run(lambda: where(lambda: (gate.wait(20), threading.current_thread().name)), "slow")
    assert carried.of(lambda: "quick")[0].value == "quick"
    gate.set()
    name, outcome = carried.told.get(timeout=20)
    assert name == "slow" and outcome.value[0] and outcome.value[1] != "crowd"


def test_errors_are_ones_own(carried) -> None:
    def fails() -> None:
        crowd.wait_for_commit()
        raise ValueError("mine")

    def elsewhere() -> None:
        crowd.elsewhere(fails)

    found = carried.of(fails, lambda: 2, elsewhere)
    assert [type(one.error) for _, one in sorted(found.items())] == [ValueError, type(None), ValueError]
    assert found[1].get() == 2
    with pytest.raises(ValueError, match="mine"):
        found[0].get()


def test_no_error_ends_the_thread_that_carries_everybody() -> None:
    """A commit without memory, a telling and works done elsewhere that fail: the next work is done all the same."""
    told: SimpleQueue[tuple[Any, CarriedOut]] = SimpleQueue()
    failing = iter([True, False, True, False, True])

    def commit() -> None:
        if next(failing, False):
            raise MemoryError

    def tell(done: Any) -> None:
        for one in done:
            told.put(one)
        raise RuntimeError

    def no_memory() -> None:
        raise MemoryError

    made = Crowd(commit, tell)
    for number in range(4):
        made.run(lambda: crowd.wait_for_commit() or "done", number)
        assert told.get(timeout=20)[1].get() == "done"
    made.run(lambda: crowd.elsewhere(no_memory), "elsewhere")
    assert isinstance(told.get(timeout=20)[1].error, MemoryError)
    made.run(lambda: crowd.apart(lambda: 2), "apart")
    assert told.get(timeout=20)[1].get() == 2


def test_where_no_thread_can_be_had_ones_own_work_fails_alone(carried, monkeypatch) -> None:
    assert carried.of(lambda: 1)[0].value == 1  # its thread has begun

    def refused(*_: Any) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(crowd, "_start_thread", refused)
    found = carried.of(lambda: crowd.apart(lambda: 1), lambda: 2)
    assert isinstance(found[0].error, RuntimeError) and found[1].value == 2


def test_outside_of_a_crowd_all_is_done_here() -> None:
    crowd.wait_for_commit()
    here = threading.current_thread().name
    assert {crowd.elsewhere(lambda: threading.current_thread().name), crowd.apart(lambda: here)} == {here}


def test_its_thread_ends_with_it(carried) -> None:
    before = set(threading.enumerate())
    assert carried.of(lambda: 1)[0].value == 1
    (thread,) = [one for one in set(threading.enumerate()) - before if one.name == "crowd"]
    del carried.crowd
    thread.join(20)
    assert not thread.is_alive()
