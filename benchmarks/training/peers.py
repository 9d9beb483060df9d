"""FedAvg of a ResNet-18 on the same drawn pictures with EdgeFL, PFLlib and FL4Health: images a second, memory, lines.

Nothing of theirs is installed here: name what you have installed, and what is not named is left out. Turns alternate,
one whole run each; figures are medians over turns, of the rounds after the first, in which libraries load.

* pictures: four drawn sites, the same arrays for all. In each round every site learns one epoch of its training
  pictures and is judged on the same other pictures. PFLlib judges its training pictures, too: so it comes.
* rounds: EdgeFL's end with `checkpoints/latest.json`, PFLlib's with its line "time cost", FL4Health's with the next
  call for the settings of a round. They are looked for every quarter of a second.
* processor: seconds of all processes of the run, in a round; other work on the machine moves this figure least.
* memory: the sum over all processes of the run of their proportional set size, at its peak (as in `engines.py`).
* lines: of Python that a user writes for pictures of their own, without blank lines, comments and docstrings.

    python -m benchmarks.training.peers --pfllib PFLlib --pfllib-python pfllib/bin/python \\
        --fl4health-python fl4health/bin/python
"""

import contextlib
import io
import json
import os
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import tokenize
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import click
import numpy as np

from benchmarks.training.engines import CLI, MARK, MIB, proportional_size
from edgefl_protocol.errors import EdgeflError
from edgefl_trainer.contract import Examples
from edgefl_trainer.engine.settings import resolve
from edgefl_trainer.engine.sites import read_sites
from edgefl_trainer.experiments.study_book import phases_done
from edgefl_trainer.models.backbones import load_backbone

HERE = Path(__file__).parent
SITES, IMAGES, LEARNED, PX, BATCH = 4, 60, 32, 84, 16  # drawn pictures of a site, and of them those to learn from
CLASSES = 4
MEAN, STD = 0.5, 0.25  # any scale does: all learn from the same numbers
LOOK_S = 0.25
COST = re.compile(r"time cost -+ [0-9.]+")  # the end of PFLlib's round
GIVEN = {
    "preset": "tiny",
    "epochs": 1,
    "device": "cpu",
    "image_px": PX,
    "backbone": "cnn:resnet18",
    "data": f"lesions:sites={SITES},images={IMAGES},px={PX}",
    "images_per_site": LEARNED,
}  # EdgeFL's settings
HYPER = (f"batch={BATCH}", "augment=none")

Commands = Sequence[Sequence[str]]


@dataclass
class Peer:
    """Who is measured, and what the turns gave."""

    name: str
    lines: int  # that a user writes
    commands: Callable[[Path], Commands]  # of a run in a folder; the others begin once the first listens
    done: Callable[[Path], int]  # rounds that the run in a folder has finished
    address: str = ""  # where the first command listens
    rounds: list[float] = field(default_factory=list)  # seconds of a round, a turn
    processor: list[float] = field(default_factory=list)  # seconds of a round, a turn
    peak: list[int] = field(default_factory=list)  # bytes, a turn

    def row(self) -> str:
        """The medians, as a row of Markdown."""
        seconds, processor = statistics.median(self.rounds), statistics.median(self.processor)
        return (
            f"| {self.name} | {seconds:.1f} | {SITES * LEARNED / seconds:.1f} | {processor:.1f} | "
            f"{SITES * LEARNED / processor:.1f} | {statistics.median(self.peak) / MIB:.0f} | {self.lines} |"
        )


def write_pictures(path: Path) -> None:
    """Write the pictures of EdgeFL's run as plain arrays: (n, 3, px, px) float32 and (n,) classes."""
    read = resolve("finetune", {**GIVEN, "data": (GIVEN["data"],)}, None, HYPER)
    backbone = load_backbone(read.backbone, image_px=PX, seed=read.seed)
    _, task, sites = read_sites(read, read.build_method(), backbone, None)
    if len(task.classes) != CLASSES or any(len(site.train) != LEARNED for site in sites.values()):
        raise EdgeflError("the drawn pictures are other ones than this benchmark was written for.")
    arrays: dict[str, np.ndarray] = {"sites": np.asarray(len(sites))}
    for number, site in enumerate(sites.values()):
        for split, rows in (("learn", site.train), ("judge", site.tune)):
            arrays[f"{split}-x-{number}"], arrays[f"{split}-y-{number}"] = pixels(rows), rows.targets
    np.savez(path, allow_pickle=False, **arrays)


def pixels(rows: Examples) -> np.ndarray:
    """The pictures of some rows, scaled."""
    scaled = (rows.images[rows.places].astype(np.float32) / 255 - MEAN) / STD
    return np.ascontiguousarray(scaled.transpose(0, 3, 1, 2))


def edgefl(workers: int, rounds: int) -> Peer:
    """EdgeFL with so many workers."""
    words = [sys.executable, "-c", CLI, "run", "finetune", "--rounds", str(rounds), "--workers", str(workers)]
    for name, value in (*GIVEN.items(), *(("set", text) for text in HYPER)):
        words += ["--" + name.replace("_", "-"), str(value)]
    name = f"EdgeFL, {workers} worker{'s' * (workers > 1)}"
    return Peer(
        name, 0, lambda folder: [[*words, "--out", str(folder / "run")]], lambda folder: phases_done(folder / "run")
    )


def pfllib(checkout: Path, python: Path, pictures: Path, rounds: int) -> Peer:
    """PFLlib, from a checkout of its repository."""

    def commands(folder: Path) -> Commands:
        written = [str(python), str(HERE / "peer_pfllib.py"), str(pictures), str(folder / "dataset/lesions")]
        subprocess.run(written, check=True)
        words = ["-data", "lesions", "-m", "ResNet18", "-algo", "FedAvg", "-ncl", str(CLASSES), "-nc", str(SITES),
                 "-gr", str(rounds - 1), "-ls", "1", "-lbs", str(BATCH), "-lr", "0.01", "-dev", "cpu"]  # fmt: skip
        return [[str(python), str(checkout / "system/main.py"), *words]]

    return Peer(
        "PFLlib", written_lines(HERE / "peer_pfllib.py"), commands, lambda folder: len(COST.findall(said(folder)))
    )


def fl4health(python: Path, pictures: Path, rounds: int) -> Peer:
    """FL4Health: a server and a process for each site, over gRPC on the loopback interface."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    program = [str(python), str(HERE / "peer_fl4health.py")]
    server = [*program, "server", address, str(SITES), str(rounds), "1", str(BATCH)]
    clients = [[*program, "client", address, str(pictures), str(site)] for site in range(SITES)]

    def done(folder: Path) -> int:
        return max(0, len(re.findall("^(?:began|ended) ", said(folder), re.M)) - 1)

    lines = written_lines(HERE / "peer_fl4health.py")
    return Peer("FL4Health", lines, lambda folder: [server, *clients], done, address)


def run_once(peer: Peer, folder: Path) -> None:
    """One run; note what its rounds took. An `EdgeflError` where it fails."""
    mark, peak, spent, ends = f"{MARK}={folder}", 0, dict[str, float](), list[tuple[float, float]]()
    environment = {**os.environ, MARK: str(folder), "PYTHONUNBUFFERED": "1"}
    place = folder / "system"  # PFLlib reads ../dataset and writes ../results
    place.mkdir()
    with contextlib.ExitStack() as stack:
        started = []
        for number, command in enumerate(peer.commands(folder)):
            file = stack.enter_context((folder / f"said-{number}").open("w"))
            started.append(subprocess.Popen(command, cwd=place, env=environment, stdout=file, stderr=file))
            stack.callback(started[-1].kill)
            while peer.address and not answers(peer.address) and started[0].poll() is None:
                time.sleep(LOOK_S)
        while any(process.poll() is None for process in started) and not any(process.poll() for process in started):
            peak = max(peak, proportional_size(mark, spent))
            if peer.done(folder) > len(ends):
                ends.append((time.monotonic(), sum(spent.values())))
            time.sleep(LOOK_S)
    for number, process in sorted(enumerate(started), key=lambda one: -one[1].wait()):  # who was not killed here first
        if process.returncode:
            raise EdgeflError(f"{peer.name} failed: {said(folder, number).strip().splitlines()[-1]}")
    if len(ends) < 2:
        raise EdgeflError(f"{peer.name}: rounds were shorter than {LOOK_S} s and cannot be told apart.")
    peer.rounds.append((ends[-1][0] - ends[0][0]) / (len(ends) - 1))
    peer.processor.append((ends[-1][1] - ends[0][1]) / (len(ends) - 1))
    peer.peak.append(peak)


def said(folder: Path, number: int = 0) -> str:
    """What a command of the run in a folder has printed."""
    return (folder / f"said-{number}").read_text()


def answers(address: str) -> bool:
    """Whether somebody listens there."""
    host, port = address.split(":")
    with contextlib.suppress(OSError), socket.create_connection((host, int(port)), timeout=LOOK_S):
        return True
    return False


def written_lines(path: Path) -> int:
    """Count the lines of a program that hold code: neither blank nor comments nor docstrings."""
    lines: set[int] = set()
    before = tokenize.NEWLINE
    for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
        if token.type in (tokenize.COMMENT, tokenize.NL):
            continue
        alone = token.type == tokenize.STRING and before in (tokenize.NEWLINE, tokenize.INDENT)
        if not alone and token.type not in (tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER):
            lines |= set(range(token.start[0], token.end[0] + 1))
        before = token.type
    return len(lines)


@click.command()
@click.option("--pfllib", "checkout", type=click.Path(path_type=Path, exists=True), help="A checkout of PFLlib.")
@click.option("--pfllib-python", type=click.Path(path_type=Path), default=Path(sys.executable), help="Python for it.")
@click.option("--fl4health-python", type=click.Path(path_type=Path), help="Python that has fl4health and torchvision.")
@click.option("--rounds", type=click.IntRange(min=2), default=5, show_default=True, help="Rounds of a run.")
@click.option("--repeats", type=click.IntRange(min=1), default=3, show_default=True, help="Turns of each.")
def main(checkout: Path | None, pfllib_python: Path, fl4health_python: Path | None, rounds: int, repeats: int) -> None:
    """Measure who is there in turn, and print a table."""
    with tempfile.TemporaryDirectory() as scratch:
        pictures = Path(scratch) / "pictures.npz"
        write_pictures(pictures)
        peers = [edgefl(1, rounds), edgefl(2, rounds)]
        if checkout is not None:
            peers.append(pfllib(checkout.absolute(), pfllib_python.absolute(), pictures, rounds))
        if fl4health_python is not None:
            peers.append(fl4health(fl4health_python.absolute(), pictures, rounds))
        for turn in range(repeats):
            for number, peer in enumerate(peers):
                folder = Path(scratch) / f"{turn}-{number}"
                folder.mkdir()
                run_once(peer, folder)
                told = {"round": peer.rounds, "processor": peer.processor, "peak": peer.peak}
                click.echo(f"turn {turn + 1}, {peer.name}: {json.dumps(told)}", err=True)
    click.echo("| who | a round, s | images/s | processor s a round | images a processor s | peak, MiB | lines |")
    click.echo("| --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    for peer in peers:
        click.echo(peer.row())


if __name__ == "__main__":
    main()
