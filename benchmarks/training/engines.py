"""The same FedEvPrompt federation with one worker, with several and on Flower: seconds a round, memory, overhead.

Each engine is a row: a name and the options of `edgefl-train run` that ask for it. Turns alternate, one whole run each,
so that what else the machine does falls on all rows alike; a row's figures are medians over rounds, without the first,
in which workers begin. All runs must end with one digest.

* a round: from one finished phase to the next, by the time of `checkpoints/latest.json`.
* learning: seconds within `local_round`, by `metrics.jsonl`; summed over sites and divided by the workers.
* beside it: a round less that: judging, checkpoints, what goes to and fro, and waiting for the last site.
* memory: the sum over all processes of the run of their proportional set size (`/proc/PID/smaps_rollup`: a page that n
  processes share counts 1/n for each), at its peak; mapped pictures included.
* processor: seconds of all processes of the run, start included: the figure that other work on the machine moves least.

    python -m benchmarks.training.engines
    python -m benchmarks.training.engines --rows 1,2,flower-2    # in the environment that `make flower` makes
    python -m benchmarks.training.engines --rows 1,2,4 --backbone vit:768x12/12 --images 4 --rounds 2 --repeats 1
    python -m benchmarks.training.engines --rows 1 --sites 1000 --images 20 --participation 0.05
"""

import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import click

from edgefl_protocol.errors import EdgeflError
from edgefl_protocol.sentences import counted

LOOK_S = 0.05  # between two looks at the checkpoints
LOOKS = 10  # from one look at memory to the next, which costs time itself
MARK = "EDGEFL_ENGINES_ROW"  # in the environment of every process of a run
MIB = 1 << 20
CLI = "from edgefl_trainer.cli import main; main()"


@dataclass(frozen=True)
class Row:
    """An engine that is measured."""

    name: str
    options: tuple[str, ...]  # of `edgefl-train run`
    workers: int  # sites that it has under way at once


@dataclass
class Measured:
    """What the turns of a row gave."""

    rounds: list[float] = field(default_factory=list)  # seconds, without the first round of a run
    learning: list[float] = field(default_factory=list)  # of the same rounds, a worker's share
    first: list[float] = field(default_factory=list)  # seconds from the start of a run to the end of its first round
    peak: list[int] = field(default_factory=list)  # bytes
    processor: list[float] = field(default_factory=list)  # seconds of a whole run
    digests: set[str] = field(default_factory=set)

    def line(self) -> dict[str, float]:
        """The medians."""
        beside = [whole - part for whole, part in zip(self.rounds, self.learning, strict=True)]
        return {
            "round_seconds": statistics.median(self.rounds),
            "learning_seconds": statistics.median(self.learning),
            "beside_seconds": statistics.median(beside),
            "first_round_seconds": statistics.median(self.first),
            "processor_seconds": statistics.median(self.processor),
            "peak_pss_mib": statistics.median(self.peak) / MIB,
        }


def run_once(row: Row, words: Sequence[str], folder: Path, found: Measured) -> None:
    """One run of a row; an `EdgeflError` where it fails."""
    mark = f"{MARK}={folder}"
    command = [sys.executable, "-c", CLI, "run", *words, *row.options, "--out", str(folder), "--json"]
    latest, ends, peak, spent = folder / "checkpoints" / "latest.json", list[int](), 0, dict[str, float]()
    begun = time.time_ns()
    with tempfile.TemporaryFile("w+") as said, tempfile.TemporaryFile("w+") as summary:
        environment = {**os.environ, MARK: str(folder)}
        process = subprocess.Popen(command, env=environment, stdout=summary, stderr=said)
        looks = 0
        while process.poll() is None:
            with contextlib.suppress(OSError):
                changed = latest.stat().st_mtime_ns
                if changed not in ends:
                    ends.append(changed)
            peak = peak if looks % LOOKS else max(peak, proportional_size(mark, spent))
            looks += 1
            time.sleep(LOOK_S)
        if process.returncode:
            said.seek(0)
            raise EdgeflError(f"{row.name} failed: {said.read().strip().splitlines()[-1]}")
        summary.seek(0)
        found.digests.add(json.loads(summary.read())["state_sha256"])
    seconds = learning_seconds(folder / "metrics.jsonl")
    if len(ends) != len(seconds):
        raise EdgeflError(
            f"{row.name}: rounds were shorter than {LOOK_S} s and cannot be told apart: give more images."
        )
    found.first.append((ends[0] - begun) / 1e9)
    found.peak.append(peak)
    found.processor.append(sum(spent.values()))
    for index in range(1, len(ends)):
        found.rounds.append((ends[index] - ends[index - 1]) / 1e9)
        found.learning.append(seconds[index] / row.workers)


def learning_seconds(path: Path) -> list[float]:
    """Sum over the sites of each phase the seconds of `local_round`."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    phases = sorted({line["phase_index"] for line in lines})
    return [sum(line["seconds"] for line in lines if line["phase_index"] == index) for index in phases]


def proportional_size(mark: str, spent: dict[str, float]) -> int:
    """Sum the proportional set sizes, bytes, of all processes with a mark; note the processor seconds of each."""
    total = 0
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark.encode() in (process / "environ").read_bytes().split(b"\0"):
                lines = (process / "smaps_rollup").read_text().splitlines()
                user, system = (process / "stat").read_text().rpartition(")")[2].split()[11:13]
                spent[process.name] = (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")
                total += 1024 * sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return total


def report(rows: Sequence[Row], found: dict[str, Measured]) -> str:
    """The rows as a table of Markdown, and each one's round as a share of the first row's."""
    lines = [
        "| engine | a round, s | ratio | learning, s | beside it, s | first round, s | processor, s | peak, MiB |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    first = found[rows[0].name].line()["round_seconds"]
    for row in rows:
        line = found[row.name].line()
        lines.append(
            f"| {row.name} | {line['round_seconds']:.2f} | {line['round_seconds'] / first:.2f} | "
            f"{line['learning_seconds']:.2f} | {line['beside_seconds']:.2f} | {line['first_round_seconds']:.1f} | "
            f"{line['processor_seconds']:.0f} | {line['peak_pss_mib']:.0f} |"
        )
    return "\n".join(lines)


@click.command()
@click.option("--rows", default="1,2", show_default=True, help="Numbers of workers; flower-N: N of them on Flower.")
@click.option("--repeats", type=int, default=3, show_default=True, help="Turns of each row.")
@click.option("--sites", type=int, default=6, show_default=True, help="Sites that are drawn.")
@click.option("--images", type=int, default=60, show_default=True, help="Drawn images of a site.")
@click.option("--image-px", type=int, default=84, show_default=True, help="Side of the images.")
@click.option("--backbone", default="vit:192x12/12", show_default=True, help="Untrained network of this shape.")
@click.option("--rounds", type=int, default=4, show_default=True, help="Rounds of a run, at least two.")
@click.option("--participation", type=float, default=1.0, show_default=True, help="Share of the sites in a round.")
@click.option(
    "--device", default="cpu", show_default=True, type=click.Choice(["cpu", "cuda"]), help="Where sites learn."
)
def main(
    rows: str,
    repeats: int,
    sites: int,
    images: int,
    image_px: int,
    backbone: str,
    rounds: int,
    participation: float,
    device: str,
) -> None:
    """Measure the rows in turn and print a table."""
    engines = [engine(one) for one in rows.split(",")]
    words = ["fedevprompt", "--preset", "tiny", "--epochs", "1", "--rounds", str(rounds), "--backbone", backbone]
    words += ["--data", f"lesions:sites={sites},images={images},px={image_px}", "--image-px", str(image_px)]
    words += ["--participation", str(participation), "--device", device]
    found = {row.name: Measured() for row in engines}
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(repeats):
            for row in engines:
                run_once(row, words, Path(folder) / f"{engines.index(row)}-{turn}", found[row.name])
                click.echo(f"turn {turn + 1}, {row.name}: {json.dumps(found[row.name].line())}", err=True)
    click.echo(report(engines, found))
    digests = set.union(*(one.digests for one in found.values()))
    click.echo("one digest" if len(digests) == 1 else f"{len(digests)} digests: {', '.join(sorted(digests))}")
    sys.exit(len(digests) != 1)


def engine(text: str) -> Row:
    """Read a row: a number of workers, or that number on Flower's simulation."""
    name = "flower" if text.startswith("flower-") else "local"
    workers = int(text.removeprefix("flower-"))
    options = ("--engine", name, "--workers", str(workers))
    return Row(f"{name}, {counted(workers, 'worker')}", options, workers)


if __name__ == "__main__":
    main()
