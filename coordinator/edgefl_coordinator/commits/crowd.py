"""Many pieces of work in one thread: where one waits for a commit, the others go on, and one commit serves them all.

Guarantees: work in a crowd is written as if it had a thread of its own. It stops only where it waits for its commit
(`wait_for_commit`), or for what is done `elsewhere` or `apart`, so between two such places nobody else of the crowd
runs. The crowd commits once none of them can go on without it. A thread of its own for each costs as much processor
time as HTTP and the database together (docs/decisions/0055). Source: greenlet's documentation, "Greenlet Concepts".
"""

import contextlib
import logging
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, Final, TypeVar

from greenlet import getcurrent, greenlet

log = logging.getLogger("edgefl_coordinator")

Value = TypeVar("Value")
Action = Callable[[], Any]


@dataclass(frozen=True)
class CarriedOut:
    """What work returned or raised."""

    value: Any = None
    error: BaseException | None = None

    @classmethod
    def of(cls, work: Action) -> "CarriedOut":
        """Do the work."""
        try:
            return cls(work())
        except BaseException as error:  # noqa: BLE001 - whoever waits for it gets it
            return cls(error=error)

    def get(self) -> Any:
        """Return it, or raise it."""
        if self.error is not None:
            raise self.error
        return self.value


AllCarriedOut = Sequence[tuple[Any, CarriedOut]]  # whose work, and what came of it


@dataclass(frozen=True)
class _Asked:
    work: Action
    by: Any


@dataclass(frozen=True)
class _Apart:
    """Work that gets a thread of its own."""

    work: Action


_Came = _Asked | tuple[greenlet, CarriedOut]  # new work, or what a piece waited for
_Queue = SimpleQueue[list[_Came] | None]
_Jobs = Sequence[tuple[greenlet, Action]]
_NOTHING: Final = CarriedOut()
_COMMIT: Final = object()  # what a piece that waits for a commit hands to the crowd's thread
_HERE = threading.local()  # `hub`: the greenlet that carries a crowd on, in its thread


class Crowd:
    """A thread that carries many pieces of work on at once, and one beside it for what they do elsewhere."""

    def __init__(self, commit: Callable[[], None], tell: Callable[[AllCarriedOut], None]) -> None:
        """Make a crowd, whose threads begin with the first work.

        Args:
            commit: commits all that was done so far. Whoever waits for it is told by it how it went: what it raises
                ends neither the thread nor the others' work.
            tell: takes what came of works, in the crowd's thread.
        """
        self._carrying = (commit, tell)
        self._came: _Queue = SimpleQueue()
        self._beginning = threading.Lock()
        self._begun = False

    def run(self, work: Action, by: object) -> None:
        """Carry work on with that of others; what comes of it is told with `by`."""
        if not self._begun:
            self._begin()
        self._came.put([_Asked(work, by)])

    def _begin(self) -> None:
        with self._beginning:
            if self._begun:
                return
            given = (self._came, *self._carrying)
            threading.Thread(target=_carry_on, args=given, name="crowd", daemon=True).start()
            weakref.finalize(self, self._came.put, None)
            self._begun = True


def wait_for_commit() -> None:
    """Let others of the crowd go on until all that was done so far is committed; outside of a crowd, nothing."""
    if in_crowd():
        _HERE.hub.switch(_COMMIT)


def elsewhere(work: Callable[[], Value]) -> Value:
    """Do what needs no store beside the crowd's thread, also while that commits; outside of a crowd, here and now."""
    if not in_crowd():
        return work()
    found: Value = _HERE.hub.switch(work).get()
    return found


def apart(work: Callable[[], Value]) -> Value:
    """Do what waits for locks and files in a thread of its own; outside of a crowd, here and now."""
    if not in_crowd():
        return work()
    found: Value = _HERE.hub.switch(_Apart(work)).get()
    return found


def in_crowd() -> bool:
    """Tell whether the caller is a piece of work in a crowd."""
    hub = getattr(_HERE, "hub", None)
    return hub is not None and getcurrent() is not hub


def _carry_on(came: _Queue, commit: Callable[[], None], tell: Callable[[AllCarriedOut], None]) -> None:
    """The crowd's thread, until None comes."""
    _HERE.hub = getcurrent()
    committing: list[greenlet] = []
    done: list[tuple[Any, CarriedOut]] = []
    with ThreadPoolExecutor(1, thread_name_prefix="beside-crowd") as beside:
        while (taken := _taken(came, wait=not committing)) is not None:
            going = [(piece, _NOTHING) for piece in committing]
            going += [(_piece(one, done), _NOTHING) if isinstance(one, _Asked) else one for one in taken]
            committing, jobs = [], list[tuple[greenlet, Action]]()
            for piece, outcome in going:
                wants = piece.switch(outcome)
                if wants is _COMMIT:
                    committing.append(piece)
                elif isinstance(wants, _Apart):
                    _hand_over(_start_thread, [(piece, wants.work)], came)
                elif not piece.dead:
                    jobs.append((piece, wants))
            if jobs:
                _hand_over(beside.submit, jobs, came)
            if done:
                with _survived("an answer was not told"):
                    tell(tuple(done))
                done.clear()
            with _survived("a commit failed"):
                commit()


@contextlib.contextmanager
def _survived(what: str) -> Iterator[None]:
    """Log an error that must not end the thread which carries everybody's work."""
    try:
        yield
    except BaseException as error:  # noqa: BLE001 - also no memory: the next work must find the thread alive
        log.error("%s: %s", what, type(error).__name__, extra={"once_a_minute": True})


def _start_thread(target: Callable[..., None], *given: Any) -> None:
    threading.Thread(target=target, args=given, name="apart", daemon=True).start()


def _hand_over(begin: Callable[..., Any], jobs: _Jobs, came: _Queue) -> None:
    """Have jobs done in another thread; where none can be had, each piece gets that error."""
    try:
        begin(_do_all, jobs, came)
    except BaseException as error:  # noqa: BLE001 - whoever waits for the job gets it
        came.put([(piece, CarriedOut(error=error)) for piece, _ in jobs])


def _taken(came: _Queue, *, wait: bool) -> list[_Came] | None:
    """Take all that came; None at the end."""
    found: list[_Came] = []
    with contextlib.suppress(Empty):
        while True:
            one = came.get(block=wait and not found)
            if one is None:
                return None
            found += one
    return found


def _piece(asked: _Asked, done: list[tuple[Any, CarriedOut]]) -> greenlet:
    def carried_out(_: CarriedOut) -> None:
        done.append((asked.by, CarriedOut.of(asked.work)))

    return greenlet(carried_out)


def _do_all(jobs: _Jobs, came: _Queue) -> None:
    """Do jobs; each piece gets what came of its own."""
    came.put([(piece, CarriedOut.of(work)) for piece, work in jobs])
