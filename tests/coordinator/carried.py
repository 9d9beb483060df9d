"""Sealed requests, carried out as the HTTPS application does: replies and tasks in a crowd, the others in a thread."""

import threading
from collections.abc import Callable, Sequence
from functools import partial
from queue import SimpleQueue
from typing import Any

from edgefl_coordinator.commits.crowd import CarriedOut, Crowd, in_crowd
from edgefl_coordinator.store.coordinator import Coordinator
from edgefl_coordinator.web.app import in_one_thread
from edgefl_coordinator.web.sealed_requests import HttpResponse, handle
from edgefl_protocol.messages.requests import Route

LONGEST_S = 60.0


def answered(coordinator: Coordinator, route: Route, request: bytes) -> HttpResponse:
    """Answer one request."""
    work = partial(handle, coordinator, route, request)
    if coordinator.store.database.shared or not in_one_thread(route, request) or in_crowd():
        return work()
    answer: HttpResponse = together(coordinator, [work])[0].get()
    return answer


def together(coordinator: Coordinator, works: Sequence[Callable[[], Any]]) -> list[CarriedOut]:
    """Have one crowd carry works on at once, begun in the order in which they are given; returns what came of each."""
    told: SimpleQueue[Any] = SimpleQueue()
    crowd, all_came, found = Crowd(coordinator.store.commit, told.put), threading.Event(), dict[int, CarriedOut]()
    crowd.run(partial(all_came.wait, LONGEST_S), -1)
    for number, work in enumerate(works):
        crowd.run(work, number)
    all_came.set()
    while len(found) < len(works):
        found |= {which: outcome for which, outcome in told.get(timeout=LONGEST_S) if which >= 0}
    return [found[which] for which in range(len(works))]
