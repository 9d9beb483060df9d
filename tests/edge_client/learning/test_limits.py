"""Limits of the owner: minutes, battery, memory; a step that would take too much memory is refused before the work."""

from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgefl_client.learning.errors import LearningError
from edgefl_client.learning.limits import Battery, LearningLimits, check_step_memory, read_battery


@dataclass
class Machine:
    """Memory of a process: a network, so much more for each picture of a step, and what was there before."""

    each: float
    peak: float = 0.0
    network: float = 100.0
    kept: float = 0.0  # from the second run on
    sizes: list[int] = field(default_factory=list)

    def take(self, size: int) -> None:
        self.sizes.append(size)
        self.peak = max(self.peak + 0.1, self._line(size))  # something always takes a little

    def _line(self, size: int) -> float:
        return self.network + self.each * size + (self.kept if len(self.sizes) > 1 else 0.0)

    def check(self, allowed: int, batch: int, least: int = 1) -> None:
        limits = LearningLimits(memory_mib=allowed, memory=lambda: self.peak)
        check_step_memory(limits, batch, lambda size: size, self.take, least)


def test_photographs_read_before_do_not_hide_what_a_step_needs() -> None:
    """A photograph took 200 MiB once; steps of up to ten pictures raise nothing, and 32 would need 420."""
    hidden = Machine(each=10, peak=200)
    with pytest.raises(LearningError, match=r"32 pictures needs about 420 MiB .* 310 are allowed: use --batch 20"):
        hidden.check(310, 32)
    assert hidden.sizes == [1, 1, 5, 5, 10, 10, 20, 20, 25, 25]


def test_what_the_second_run_keeps_is_not_taken_for_growth() -> None:
    """As a ResNet-18 of 64 px was seen to: 83 MiB more from the second run on, and 2.7 a picture; 64 need 619."""
    machine = Machine(each=2.7, network=363, kept=83)
    machine.check(625, 64, least=4)
    with pytest.raises(LearningError, match=r"64 pictures needs about 6(19|20) MiB"):
        Machine(each=2.7, network=363, kept=83).check(600, 64, least=4)


def test_what_fits_beside_what_was_taken_before_is_learned() -> None:
    """A whole step that stays below the peak is taken, and found to fit."""
    machine = Machine(each=2, peak=300)
    machine.check(310, 32)
    assert machine.sizes == [1, 1, 5, 5, 10, 10, 20, 20, 32, 32]


def test_a_peak_that_is_over_already() -> None:
    """Then nothing fits, and no larger step is tried."""
    machine = Machine(each=2, peak=300)
    with pytest.raises(LearningError, match=r"at least 300 MiB .* one picture does not fit either"):
        machine.check(299, 32)
    assert machine.sizes == [1, 1]


@given(
    each=st.floats(0.5, 50), before=st.floats(0, 2000), allowed=st.integers(100, 4000), batch=st.integers(1, 256),
    least=st.sampled_from([1, 4]),
)  # fmt: skip
def test_what_is_let_through_fits_and_so_does_the_advice(
    each: float, before: float, allowed: int, batch: int, least: int
) -> None:
    """Oracle: the machine's own line; what was there before counts."""
    machine = Machine(each=each, peak=before)
    try:
        machine.check(allowed, batch, least)
        assert max(before, 100 + each * batch) <= allowed + 1e-6
    except LearningError as error:
        advice = str(error).partition("--batch ")[2]
        if advice:
            assert 100 + each * int(advice) <= allowed + 1e-6
        else:
            assert before + 1 > allowed or 100 + each * least + 1 > allowed


def supply(folder, **files) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(f"{text}\n")


def test_battery_is_read_as_linux_tells_it(tmp_path):
    """Documentation/ABI/testing/sysfs-class-power: type, scope, status, capacity."""
    assert read_battery(tmp_path / "none") is None
    supply(tmp_path / "AC", type="Mains", online=1)
    supply(tmp_path / "mouse", type="Battery", scope="Device", status="Discharging", capacity=3)
    assert read_battery(tmp_path) is None
    supply(tmp_path / "BAT0", type="Battery", status="Discharging", capacity=42)
    supply(tmp_path / "BAT1", type="Battery", status="Charging", capacity=90)
    assert read_battery(tmp_path) == Battery(True, 42)
    limits = LearningLimits(battery=lambda: read_battery(tmp_path), battery_percent=43)
    assert "42 %" in limits.reached(0) and replace(limits, battery_percent=42).reached(0) is None
    supply(tmp_path / "BAT2", type="Battery", status="Not charging", capacity=5)  # rests while BAT0 drains
    assert read_battery(tmp_path) == Battery(True, 42)
    supply(tmp_path / "BAT0", type="Battery", status="Unknown", capacity="full")  # tells nothing that can be used
    assert read_battery(tmp_path) == Battery(False, 5)
    charging = replace(limits, battery=lambda: Battery(False, 1))
    assert charging.reached(0) is None


def test_minutes_and_memory():
    """Each limit speaks for itself; none given, none applies."""
    limits = LearningLimits(battery=lambda: None, clock=lambda: 130.0, memory=lambda: 300.0)
    assert limits.reached(0) is None
    assert "2 minutes" in replace(limits, minutes=2).reached(0)
    assert replace(limits, minutes=2).reached(11) is None
    assert "300 MiB" in replace(limits, memory_mib=299).reached(0)
    assert replace(limits, memory_mib=300).reached(0) is None
