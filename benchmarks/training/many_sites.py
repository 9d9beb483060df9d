"""Memory and time of the local engine by the number of sites, of which as many take part in a round.

Nothing is learned: a site adds up numbers and keeps a state of 0.5 MiB, so what is left is the engine. Memory is that
of Python's and numpy's arrays at its peak (tracemalloc, which slows all rows alike).

    python -m benchmarks.training.many_sites
"""

import tempfile
import time
import tracemalloc
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np

from edgefl_protocol import Payload
from edgefl_trainer.contract import Phase, Scalar, State, Task
from edgefl_trainer.engine.checkpoint import SiteResult
from edgefl_trainer.engine.local_engine import LocalEngine
from edgefl_trainer.models.spec import ViTSpec

NUMBERS = 65536
NETWORK = ViTSpec(
    name="none", image_px=12, patch=12, depth=1, heads=1, width=4, mean=(0, 0, 0), std=(1, 1, 1),
    self_supervised=True, sha256="0" * 64,
)  # fmt: skip


class Adding:
    """The server adds up what sites send."""

    travels = ("weights",)

    def phases(self, rounds: int) -> list[Phase]:
        """Train only."""
        return [Phase("train", number) for number in range(1, rounds + 1)]

    def start(self, task: Task, sites: Sequence[str]) -> State:
        """Begin with nothing."""
        return State({"sum": np.zeros(2)})

    def broadcast(self, state: State, phase: Phase, sites: Sequence[str]) -> dict[str, Payload]:
        """Send the sum."""
        return dict.fromkeys(sites, Payload(state.arrays, {}))

    def aggregate(self, state: State, phase: Phase, replies: Mapping[str, Payload]) -> State:
        """Add up."""
        return State({"sum": sum((replies[name].arrays["sum"] for name in sorted(replies)), start=np.zeros(2))})


class AddingSite:
    """A site of it: keeps a large state, sends two numbers."""

    def local_round(
        self, state: State, broadcast: Payload, report: Callable[[Mapping[str, Scalar]], None]
    ) -> SiteResult:
        """Count in the state; send two ones."""
        kept = state.arrays.get("kept", np.zeros(NUMBERS)) + 1
        return SiteResult(State({"kept": kept}), Payload({"sum": np.ones(2)}, {}), {"loss": 0.0})


class Clock:
    """Notes the processor time at which each phase begins; hears of nothing else."""

    def __init__(self) -> None:
        self.begun: list[float] = []

    def phase_started(self, *_: object) -> None:
        """Note the time."""
        self.begun.append(time.process_time())

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_: None


def measure(sites: int, part: int, rounds: int) -> tuple[float, float]:
    """Peak of arrays in MiB, and processor milliseconds of each of the last ten rounds."""
    names, clock, method, site = [f"s{i:05d}" for i in range(sites)], Clock(), Adding(), AddingSite()
    task = Task(name="all", classes=("a", "b"), backbone=NETWORK, rounds=rounds, epochs=1, seed=4)
    with tempfile.TemporaryDirectory() as folder:
        values: dict[str, Any] = {"method": method, "sites": dict.fromkeys(names, site), "observer": clock}
        engine = LocalEngine(task=task, folder=Path(folder), participation=part / sites, **values)
        tracemalloc.start()
        engine.run()
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    last = clock.begun[-11:]
    return peak / 2**20, 1000 * (last[-1] - last[0]) / (len(last) - 1)


@click.command()
@click.option("--sites", default="100,1000", show_default=True, help="Numbers of sites, separated by commas.")
@click.option("--part", type=int, default=20, show_default=True, help="Sites of a round.")
@click.option("--rounds", type=int, default=50, show_default=True, help="Rounds of each run.")
def main(sites: str, part: int, rounds: int) -> None:
    """Measure each number of sites and print a table."""
    click.echo("| sites | peak of arrays, MiB | processor ms a round, last ten |\n| ---: | ---: | ---: |")
    for count in map(int, sites.split(",")):
        peak, milliseconds = measure(count, part, rounds)
        click.echo(f"| {count:,} | {peak:.1f} | {milliseconds:.0f} |")


if __name__ == "__main__":
    main()
