"""Refuse before the work what would take too much memory; the memory of a step grows with its batch.

What is known of memory is its peak, and reading photographs or loading a network may have raised that above what small
steps take. So steps grow until two of them raise the peak: these two tell the growth, and a step that raises nothing
takes no more than was taken before. Each is taken twice, because the runtime keeps more from the second run of a graph
on, once: for a ResNet-18 that is 83 MiB, which would pass for growth, and 128 pictures need 1.1 GiB, not 3.5.
"""

from collections.abc import Callable

from edgefl_client.learning.errors import LearningError
from edgefl_client.learning.limits import Limits

LEAST_GROWTH = 4  # pictures between two steps
RAISED, RAISED_MIB = 0.1, 8.0  # share of the peak, and MiB: from a smaller rise nothing can be told


def check_step_memory(
    limits: Limits, batch: int, largest: Callable[[int], int], take: Callable[[int], object], least: int
) -> None:
    """Take small steps and tell from them what a whole one needs.

    Args:
        limits: of the owner; nothing is done where memory has none.
        batch: B.
        largest: pictures of the largest step that batches of so many give.
        take: takes a step of so many pictures; its results are thrown away.
        least: pictures of the smallest step.

    Raises:
        LearningError: a batch would take more than is allowed (`memory`); the sentence names one that fits.
    """
    allowed = limits.memory_mib
    if allowed is None:
        return
    pictures = largest(batch)
    needed, how, room = _needed(limits, allowed, pictures, take, min(least, pictures))
    if needed <= allowed:
        return
    fits = next((size for size in range(min(room, batch), least - 1, -1) if largest(size) <= room), 0)
    raise LearningError(
        f"a step of {pictures} pictures needs {how} {needed:.0f} MiB of memory, allowed are {allowed}: "
        + (f"use --batch {fits}" if fits else f"allow more, {_number(least)} not fit either"),
        "memory",
    )


def _needed(
    limits: Limits, allowed: int, pictures: int, take: Callable[[int], object], size: int
) -> tuple[float, str, int]:
    """MiB of a whole step; how well that is known; and how many pictures fit."""
    before, room, raised = limits.memory(), 0, list[tuple[int, float]]()
    while True:
        for _ in range(2):
            take(size)
        used = limits.memory()
        if used >= before + max(RAISED_MIB, RAISED * before):
            before = used
            raised.append((size, used))
        if len(raised) == 2:
            (few, low), (many, high) = raised
            each = (high - low) / (many - few)
            return high + each * (pictures - many), "about", few + int((allowed - low) / each)
        if used > allowed or size == pictures:
            return used, "at least", room
        # A step that raised the peak may be near what is allowed already.
        more = size // 4 if raised else size
        room, size = size, min(pictures, size + max(more, LEAST_GROWTH))


def _number(least: int) -> str:
    return "one picture does" if least == 1 else f"{least} pictures do"
