"""Limits that the owner sets to learning: minutes, memory, battery, or a word from outside.

A limit that is reached between two steps stops learning for now; it goes on there another time. Linux tells a battery
under /sys/class/power_supply and the largest memory of a process. Where the system tells nothing, that limit never
applies.

A batch that would take too much memory is refused before the work (`check_step_memory`). What is known of memory is its
peak, and reading photographs or loading a network may have raised that above what small steps take. So steps grow until
two of them raise the peak: these two tell the growth, and a step that raises nothing takes no more than was taken
before. Each is taken twice, because the runtime keeps more from the second run of a graph on, once: for a ResNet-18
that is 83 MiB, which would pass for growth, and 128 pictures need 1.1 GiB, not 3.5.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from edgefl_client.learning.errors import LearningError, Paused
from edgefl_client.memory import peak_memory_mib
from edgefl_protocol.sentences import counted

POWER = Path("/sys/class/power_supply")
TOLD_TO_STOP = "it was told to stop"
LEAST_GROWTH = 4  # pictures between two steps
RAISED, RAISED_MIB = 0.1, 8.0  # share of the peak, and MiB: from a smaller rise nothing can be told


@dataclass(frozen=True)
class Battery:
    """Tell whether the device runs on its battery, and the battery's charge in percent."""

    discharging: bool
    percent: int


def read_battery(folder: Path = POWER) -> Battery | None:
    """Read the emptiest battery that drains, or the emptiest where none drains; None where there is none."""
    found = list[Battery]()
    for supply in sorted(folder.glob("*")):
        if _text(supply / "type") != "Battery" or _text(supply / "scope") == "Device":  # a mouse, a pen
            continue
        charge = _text(supply / "capacity")
        if charge.isdecimal():
            found.append(Battery(_text(supply / "status") == "Discharging", int(charge)))
    draining = [battery for battery in found if battery.discharging]  # a second one may rest, emptier
    return min(draining or found, key=lambda battery: battery.percent, default=None)


@dataclass(frozen=True, kw_only=True)
class LearningLimits:
    """Say what the owner allows, and where it is read."""

    minutes: float | None = None  # of wall time; None for no limit
    memory_mib: int | None = None  # of resident memory; None for no limit
    battery_percent: int = 50  # on battery, learning stops below this charge
    stopped: Callable[[], bool] = lambda: False  # tells whether somebody told this process to stop
    battery: Callable[[], Battery | None] = read_battery  # reads the battery
    memory: Callable[[], float] = peak_memory_mib  # reads the peak memory, in MiB
    clock: Callable[[], float] = field(default=time.monotonic)  # monotonic seconds

    def reached(self, started: float) -> str | None:
        """Return the limit that is reached, as a clause of a sentence; None for none."""
        reason = self.forbidding()
        if reason is not None:
            return reason
        if self.minutes is not None and self.clock() - started >= 60 * self.minutes:
            return f"the limit of {self.minutes:g} {'minute is' if self.minutes == 1 else 'minutes is'} reached"
        if self.memory_mib is not None and (used := self.memory()) > self.memory_mib:
            return f"it took {used:.0f} MiB of memory, and {self.memory_mib} are allowed: a smaller --batch needs less"
        return None

    def forbidding(self) -> str | None:
        """Return the limit that forbids even to read a picture, as a clause of a sentence; None for none."""
        if self.stopped():
            return TOLD_TO_STOP
        battery = self.battery()
        if battery is not None and battery.discharging and battery.percent < self.battery_percent:
            return f"the battery is at {battery.percent} %, and learning needs {self.battery_percent} % or a charger"
        return None

    def check_begin(self) -> None:
        """Refuse the work where a limit forbids to begin it."""
        reason = self.forbidding()
        if reason is not None:
            raise Paused(reason)


def check_step_memory(
    limits: LearningLimits, batch: int, largest: Callable[[int], int], take: Callable[[int], object], least: int
) -> None:
    """Take small steps and refuse a batch of which a whole step would take too much memory.

    Args:
        limits: of the owner; nothing is done where memory has none.
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
        f"a step of {counted(pictures, 'picture')} needs {how} {needed:.0f} MiB of memory, and {allowed} are "
        "allowed: " + (f"use --batch {fits}" if fits else f"allow more, because {_number(least)} not fit either"),
        "memory",
    )


def _needed(
    limits: LearningLimits, allowed: int, pictures: int, take: Callable[[int], object], size: int
) -> tuple[float, str, int]:
    """Return the MiB of a whole step, how well they are known, and how many pictures fit."""
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


def _text(file: Path) -> str:
    try:
        return file.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""
