"""When learning has to stop for now: minutes, memory, battery, or a word from outside. It goes on there another time.

Linux tells a battery under /sys/class/power_supply and the largest memory of a process; where the system tells nothing,
that limit never applies.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from edgefl_client.learning.errors import Paused
from edgefl_client.learning.stopping import TOLD_TO_STOP
from edgefl_client.memory import peak_memory_mib

POWER = Path("/sys/class/power_supply")


@dataclass(frozen=True)
class Battery:
    """The device's battery.

    Attributes:
        discharging: the device runs on it.
        percent: charge.
    """

    discharging: bool
    percent: int


def read_battery(folder: Path = POWER) -> Battery | None:
    """The emptiest battery that drains, or where none does the emptiest; None where the device itself has none."""
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
class Limits:
    """What the owner allows.

    Attributes:
        minutes: of wall time; None for no limit.
        memory_mib: of resident memory; None for no limit.
        battery_percent: on battery, learning stops below this charge.
        stopped: whether somebody told this process to stop.
        battery: reads the battery.
        memory: reads the peak memory.
        clock: monotonic seconds.
    """

    minutes: float | None = None
    memory_mib: int | None = None
    battery_percent: int = 50
    stopped: Callable[[], bool] = lambda: False
    battery: Callable[[], Battery | None] = read_battery
    memory: Callable[[], float] = peak_memory_mib
    clock: Callable[[], float] = field(default=time.monotonic)

    def reached(self, started: float) -> str | None:
        """The limit that is reached, as a clause of a sentence; None for none.

        Args:
            started: when this process began, by `clock`.
        """
        reason = self.forbidding()
        if reason is not None:
            return reason
        if self.minutes is not None and self.clock() - started >= 60 * self.minutes:
            return f"{self.minutes:g} minutes are over"
        if self.memory_mib is not None and (used := self.memory()) > self.memory_mib:
            return f"it took {used:.0f} MiB of memory, allowed are {self.memory_mib}: a smaller --batch needs less"
        return None

    def forbidding(self) -> str | None:
        """What keeps learning from so much as reading a picture, as a clause of a sentence; None for nothing."""
        if self.stopped():
            return TOLD_TO_STOP
        battery = self.battery()
        if battery is not None and battery.discharging and battery.percent < self.battery_percent:
            return f"the battery is at {battery.percent} %, learning needs {self.battery_percent} % or a charger"
        return None

    def check_begin(self) -> None:
        """Ask before the work.

        Raises:
            Paused: see `forbidding`.
        """
        reason = self.forbidding()
        if reason is not None:
            raise Paused(reason)


def _text(file: Path) -> str:
    try:
        return file.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""
