"""`run --workers N`: the digest of one worker for every kind of method, and what signals to a whole run leave.

docs/design.md 4 and 10 (faults); docs/reference/runs.md, workers.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.trainer.conftest import MAE, TINY, edgefl_train
from tests.trainer.engine.runners import wait_for
from tests.trainer.engine.test_resume import timeless

pytestmark = pytest.mark.slow
PATIENCE_S = 300  # on a machine that may be busy
# A shell has its jobs in the background ignore Ctrl-C.
CLI = "import signal as s; s.signal(s.SIGINT, s.default_int_handler); from edgefl_trainer.cli import main; main()"
METHODS = {
    "fedevprompt": ("--select", "tune"),
    "fedavg": (),
    "pep-fedpt": (),
    "fedclf": ("--set", "batch=8"),
    "fedmae": MAE,
    "pfl-vqa": (),
}


@pytest.mark.parametrize("method", METHODS)
def test_two_workers_give_the_digest_of_one(method, tmp_path, ward, asked):
    """Same states, figures and lines of metrics, but for what a clock says."""
    data = asked if method == "pfl-vqa" else ward
    found = {}
    for count in (1, 2):
        out = tmp_path / str(count)
        words = ("run", method, "--data", data, "--out", out, "--backbone", "tiny", *TINY, "--rounds", "2")
        found[count] = edgefl_train(*words, *METHODS[method], "--workers", count, "--json").json()
    clocks = {"seconds", "images_per_second", "wait_share"}
    one, two = ({name: value for name, value in found[count].items() if name not in clocks} for count in (1, 2))
    assert one == two
    assert told(tmp_path / "1") == told(tmp_path / "2")


def told(folder: Path) -> list[dict]:
    """The lines of metrics, whose epochs tell no clock either."""
    lines = timeless(folder)
    for line in lines:
        epochs = line.get("epochs", [])
        line["epochs"] = [{k: v for k, v in one.items() if not k.endswith("seconds")} for one in epochs]
        line.pop("learn_seconds", None)
    return lines


class Started:
    """A run of two workers in a session of its own; every process of it has a mark in its environment."""

    def __init__(self, folder: Path, ward: str) -> None:
        self.folder = folder
        words = ["run", "fedavg", "--data", ward, "--out", folder, "--backbone", "tiny", *TINY, "--rounds", "400"]
        self.mark = f"EDGEFL_TEST_MARK={folder}"
        environment = dict([*os.environ.items(), self.mark.split("=")]) | {"OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-c", CLI, *map(str, words), "--workers", "2"],
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        wait_for(folder / "checkpoints" / "latest.json")

    def all(self) -> set[int]:
        """Every process of the run that is left."""
        return {int(path.parent.name) for path in Path("/proc").glob("[0-9]*/environ") if self._is_ours(path)}

    def workers(self) -> list[int]:
        """Those that learn: forked by the process that has the libraries."""
        parents = {one: int(Path(f"/proc/{one}/stat").read_text().rpartition(")")[2].split()[1]) for one in self.all()}
        first = self.process.pid
        return sorted(one for one, parent in parents.items() if parent in parents and parent != first)

    def ended(self) -> bool:
        end = time.monotonic() + PATIENCE_S
        while self.all() and time.monotonic() < end:
            time.sleep(0.05)
        return not self.all()

    def _is_ours(self, environ: Path) -> bool:
        try:
            return self.mark.encode() in environ.read_bytes().split(b"\0")
        except OSError:
            return False


@pytest.fixture
def started(tmp_path, ward):
    run = Started(tmp_path / "run", ward)
    yield run
    for one in run.all():
        os.kill(one, signal.SIGKILL)
    run.process.communicate()


def test_a_killed_worker_ends_the_run_with_its_site_named(started):
    os.kill(started.workers()[0], signal.SIGKILL)
    _, said = started.process.communicate(timeout=PATIENCE_S)
    assert started.process.returncode == 1
    last = said.splitlines()[-1]
    assert last.startswith("edgefl-train: site ") and "killed by the system (signal 9)" in last, said
    assert "Traceback" not in said
    assert started.ended()


def test_no_worker_outlives_a_killed_run(started):
    assert len(started.workers()) == 2
    started.process.kill()
    assert started.ended()


def test_ctrl_c_stops_all_and_says_how_to_go_on(started):
    os.killpg(started.process.pid, signal.SIGINT)
    _, said = started.process.communicate(timeout=PATIENCE_S)
    assert started.process.returncode == 1
    assert said.splitlines()[-1] == f"stopped; continue with: edgefl-train run --resume --out {started.folder}"
    assert "Traceback" not in said
    assert started.ended()


@pytest.mark.parametrize(
    "moment",
    [pytest.param("phase-0000/west.metrics.json", marks=pytest.mark.nightly), "phase-0001/east.metrics.json"],
)
def test_a_killed_run_goes_on_with_another_number_to_the_same_digest(moment, tmp_path, ward, kill_after):
    words = ("--data", ward, "--backbone", "tiny", *TINY, "--rounds", "2")
    whole = edgefl_train("run", "fedevprompt", *words, "--out", tmp_path / "whole", "--json").json()
    kill_after(moment, "run", "fedevprompt", *words, "--out", tmp_path / "run", "--workers", 2)
    assert not (tmp_path / "run" / "summary.json").exists()
    found = edgefl_train("run", "--resume", "--out", tmp_path / "run", "--workers", 3, "--json").json()
    assert found["state_sha256"] == whole["state_sha256"]
    assert timeless(tmp_path / "run") == timeless(tmp_path / "whole")
