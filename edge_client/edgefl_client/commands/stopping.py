"""Ending on purpose: SIGTERM and Ctrl-C are heard and acted on where a stop is clean; a second one ends at once.

What is heard is said at once, because the picture or the step at hand may take seconds.
"""

import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress

_BETWEEN = frozenset({"reading", "judging", "choosing"})  # what learning tells where no step is under way


@contextmanager
def stop_on_signal(unit: str) -> Iterator[threading.Event]:
    """Make an event that SIGTERM and SIGINT set; a second one of them ends the process at once.

    Args:
        unit: what is finished before the stop, such as `picture`.
    """
    said = f"\nstopping after the present {unit}; a second Ctrl-C ends at once\n".encode()
    stop = threading.Event()
    kinds = (signal.SIGTERM, signal.SIGINT)
    before: list[Callable[..., object] | int | None] = [signal.getsignal(kind) for kind in kinds]

    def handle(kind: int, _frame: object) -> None:
        stop.set()
        signal.signal(kind, signal.SIG_DFL)
        with suppress(OSError):  # not by `click.echo`: this may have interrupted a line of its own
            os.write(2, said)

    for kind in kinds:
        signal.signal(kind, handle)
    try:
        yield stop
    finally:
        for kind, handler in zip(kinds, before, strict=True):
            signal.signal(kind, handler)


def pausing(
    report: Callable[[Mapping[str, float | int | str]], None], stop: threading.Event
) -> Callable[[Mapping[str, float | int | str]], None]:
    """Make a report of learning that also ends it between two pictures, once it was told to stop.

    Steps are ended by `limits.Limits.stopped`, which keeps a point first; what is read, judged or chosen here is done
    again another time.
    """

    def told(facts: Mapping[str, float | int | str]) -> None:
        report(facts)
        if stop.is_set() and not _BETWEEN.isdisjoint(facts):
            from edgefl_client.learning.errors import Paused
            from edgefl_client.learning.limits import TOLD_TO_STOP

            raise Paused(TOLD_TO_STOP)

    return told
