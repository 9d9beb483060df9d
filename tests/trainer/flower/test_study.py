"""`edgefl-train experiment --engine flower`: a study whose runs have their sites on Flower's simulation.

The oracle is the same study without Flower (docs/guides/papers-tables.md, several runs at once).
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.trainer.conftest import edgefl_train

from edgefl_trainer.experiments.crews import RunJob
from edgefl_trainer.experiments.files import read_experiment
from edgefl_trainer.experiments.planning import Choice, plan_runs
from edgefl_trainer.experiments.running import jobs_of
from edgefl_trainer.experiments.watching import StudyWatch

pytest.importorskip("flwr", reason="needs the extra flower: make test-flower")
pytestmark = pytest.mark.slow
FILE = Path(__file__).parents[3] / "experiments/fedevprompt-table-1.toml"
ONE = (FILE, "--tiny", "--rows", "fedavg-bt", "--seeds", "0", "--device", "cpu", "--rounds", "1")
CHOICE = (FILE, "--tiny", "--rows", "fedavg-bt", "--seeds", "0,1", "--device", "cpu", "--rounds", "20")
PROGRAM = "from edgefl_trainer.cli import main; main()"
PATIENCE_S = 900  # Ray begins four times, on a machine that may be busy


def until(true: Callable[[], object]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < end
        time.sleep(0.1)


def digests(folder: Path) -> list[str]:
    return [json.loads(path.read_text())["state_sha256"] for path in sorted(folder.glob("*/*/seed-*/summary.json"))]


def marked(mark: str) -> list[int]:
    """Processes whose environment has a mark: the command, its runs, and all that Ray began."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            has = mark.encode() in path.read_bytes().split(b"\0")
            gone = (path.parent / "stat").read_text().rpartition(")")[2].split()[0] == "Z"
        except OSError:
            continue
        if has and not gone:
            found.append(int(path.parent.name))
    return found


def jobs(out: Path) -> list[RunJob]:
    """The runs that the command makes."""
    choice = Choice(out=out, seeds=(0, 1), rows=("fedavg-bt",), tiny=True, flags={"device": "cpu", "rounds": 20})
    return jobs_of(plan_runs(read_experiment(FILE), choice, os.environ))


@contextmanager
def study(out: Path, mark: str, choice: tuple[object, ...] = CHOICE) -> Iterator[subprocess.Popen]:
    words = [*map(str, choice), "--engine", "flower", "--workers", "2", "--out", str(out)]
    environment = dict([*os.environ.items(), mark.split("=")]) | {"OMP_NUM_THREADS": "1"}
    with (out.parent / "said").open("ab") as said:
        process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, "experiment", *words], env=environment, stdout=said, stderr=said
        )
        try:
            yield process
        finally:
            process.kill()
            process.wait()


def test_a_study_of_one_run_ends_with_the_digest_without_flower(tmp_path, monkeypatch, cached) -> None:
    """The short form of the next one."""
    monkeypatch.setenv("EDGEFL_DATA", "/nowhere")
    with study(tmp_path / "out", f"EDGEFL_TEST_MARK={tmp_path}", ONE) as leading:
        assert leading.wait(PATIENCE_S) == 0, (tmp_path / "said").read_text()
    alone = edgefl_train("experiment", *ONE, "--out", tmp_path / "alone")
    assert alone.code == 0 and digests(tmp_path / "out") == digests(tmp_path / "alone") and digests(tmp_path / "out")


@pytest.mark.long
def test_a_killed_study_goes_on_to_the_digests_without_flower(tmp_path, monkeypatch, cached) -> None:
    """kill −9 of the command: no process of Ray's outlives it, what was done is kept, and `--watch` tells of it."""
    monkeypatch.setenv("EDGEFL_DATA", "/nowhere")
    out, mark = tmp_path / "out", f"EDGEFL_TEST_MARK={tmp_path}"

    latest = out / "centres/fedavg-bt/seed-1/checkpoints/latest.json"
    with study(out, mark) as leading:
        until(latest.exists)
        state = StudyWatch(jobs(out), out).state()  # what a second terminal is told
        first, second = state["runs"]
        assert (state["led"], first["state"], second["state"]) == (True, "finished", "running"), state
        assert second["worker"] == 1 and second["process"] in marked(mark) and second["sites"] in (4, None)
        leading.kill()
        leading.wait()
        until(lambda: not marked(mark))
    told = edgefl_train("experiment", *CHOICE, "--out", out, "--watch", "--json")
    state = json.loads(told.out)
    assert not state["led"] and [run["state"] for run in state["runs"]] == ["finished", "stopped"]
    with study(out, mark) as leading:
        assert leading.wait(PATIENCE_S) == 0, (tmp_path / "said").read_text()
    said = (tmp_path / "said").read_text()
    assert "seed-0: FedAvg: finished before" in said and "seed-1: FedAvg: mean" in said
    alone = edgefl_train("experiment", *CHOICE, "--out", tmp_path / "alone")
    assert alone.code == 0 and digests(out) == digests(tmp_path / "alone") and len(digests(out)) == 2
