"""Refuse before the work what would take too much memory; the memory of a step grows with its batch."""

from collections.abc import Callable

from edgefl_client.learning.errors import LearningError
from edgefl_client.learning.limits import Limits


def check_step_memory(
    limits: Limits,
    batch: int,
    largest: Callable[[int], int],
    take: Callable[[int], object],
    probes: tuple[int, int],
) -> None:
    """Take two small steps and tell from them what a whole one needs.

    Args:
        limits: of the owner; nothing is done where memory has none.
        batch: B.
        largest: pictures of the largest step that batches of so many give.
        take: takes a step of so many pictures; its results are thrown away.
        probes: pictures of the two steps.

    Raises:
        LearningError: a batch would take more than is allowed (`memory`); the sentence names one that fits.
    """
    if limits.memory_mib is None:
        return
    used = []
    for size in probes:
        take(size)
        used.append(limits.memory())
    least, most = probes
    each = (used[1] - used[0]) / (most - least)
    pictures = largest(batch)
    needed = used[1] + each * (pictures - most)
    if max(used[0], needed) <= limits.memory_mib:
        return
    room = least + int((limits.memory_mib - used[0]) / each) if each > 0 else 0
    fits = next((size for size in range(min(room, batch), least - 1, -1) if largest(size) <= room), 0)
    raise LearningError(
        f"a step of {pictures} pictures needs about {needed:.0f} MiB of memory, allowed are {limits.memory_mib}: "
        + (f"use --batch {fits}" if fits else f"allow more, {_number(least)} not fit either"),
        "memory",
    )


def _number(least: int) -> str:
    return "one picture does" if least == 1 else f"{least} pictures do"
