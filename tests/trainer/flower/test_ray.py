"""`edgefl-train run --engine flower` on Ray itself, in a process of its own as at a terminal.

`test_simulated` holds the first rule without Ray. The oracle of every digest is the local engine, which never sees
Flower (docs/design.md 4: same seed, same digest).
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.trainer.conftest import make_asked

pytest.importorskip("flwr", reason="needs the extra flower: make test-flower")
pytestmark = pytest.mark.slow
LESIONS = "lesions:sites=3,images=40,px=36"
ORGANS = {"HEAD": 12, "CHEST": 12, "ABD": 12}
PROGRAM = "from edgefl_trainer.cli import main; main()"
PATIENCE_S = 600
ON_RAY = ("--engine", "flower", "--workers", "2")


def command(method: str, data: str, out: Path, *more: str, rounds: int = 2) -> list[str]:
    words = ["run", method, "--data", data, "--image-px", "36", "--preset", "tiny", "--device", "cpu"]
    return [sys.executable, "-c", PROGRAM, *words, "--rounds", str(rounds), "--out", str(out), *more]


def run(method: str, data: str, out: Path, *more: str, rounds: int = 2) -> str:
    """The digest of a run."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    words = command(method, data, out, *more, rounds=rounds)
    done = subprocess.run(words, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return str(json.loads((out / "summary.json").read_text())["state_sha256"])


def failed(out: Path, **environment: str) -> str:
    """The last line of a run that fails, which has no traceback."""
    given = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    words = command("fedavg", LESIONS, out, *ON_RAY)
    done = subprocess.run(words, env=given, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    return done.stderr.splitlines()[-1]


SIX = ["fedevprompt", *(pytest.param(name, marks=pytest.mark.long) for name in (
    "fedavg", "pep-fedpt", "fedclf", "fedmae", "pfl-vqa"))]  # fmt: skip


@pytest.mark.parametrize("method", SIX)
def test_a_run_on_ray_ends_with_the_digest_of_one_without(method, tmp_path) -> None:
    data = f"vqa-rad:{make_asked(tmp_path / 'vqa_rad', ORGANS)}" if method == "pfl-vqa" else LESIONS
    assert run(method, data, tmp_path / "ray", *ON_RAY) == run(method, data, tmp_path / "local")


@pytest.mark.long
def test_a_worker_that_is_killed_is_a_sentence_and_nothing_is_lost(tmp_path) -> None:
    """kill −9, as the system does for want of memory: the site is named, and the run goes on with either engine."""
    out, environment = tmp_path / "run", {**os.environ, "OMP_NUM_THREADS": "1"}
    words = command("fedavg", LESIONS, out, *ON_RAY, rounds=200)
    with subprocess.Popen(words, env=environment, stderr=subprocess.PIPE, text=True) as process:
        try:
            end = time.monotonic() + PATIENCE_S
            while not (out / "checkpoints/phase-0002").exists():
                assert time.monotonic() < end and process.poll() is None
                time.sleep(0.05)
            for worker in workers_below(process.pid):
                os.kill(worker, signal.SIGKILL)
            _, said = process.communicate(timeout=PATIENCE_S)
        finally:
            process.kill()
    last = said.splitlines()[-1]
    assert process.returncode == 1 and "Traceback" not in said, said
    assert "edgefl-train: site site-" in last and "perhaps by the system for want of memory" in last, last
    assert "add --resume to go on: what is finished is kept" in last
    done = json.loads((out / "checkpoints/latest.json").read_text())["phases"]
    assert done >= 2
    goes_on = [sys.executable, "-c", PROGRAM, "run", "--resume", "--out", str(out), "--json"]
    resumed = subprocess.run(goes_on, env=environment, capture_output=True, text=True, timeout=PATIENCE_S)
    assert resumed.returncode == 0, resumed.stderr
    assert json.loads(resumed.stdout)["state_sha256"] == run("fedavg", LESIONS, tmp_path / "local", rounds=200)


def workers_below(process: int) -> list[int]:
    """Ray's workers that descend from a process: they name themselves after what they run."""
    parents, names = {}, {}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(path.name)] = int((path / "stat").read_text().rpartition(")")[2].split()[1])
            names[int(path.name)] = (path / "cmdline").read_bytes().decode(errors="replace")
        except OSError:
            continue

    def below(one: int) -> bool:
        return one == process or (one in parents and below(parents[one]))

    return [one for one, name in names.items() if name.startswith("ray::") and below(one)]


@pytest.mark.long
def test_ray_without_memory_is_a_sentence(tmp_path) -> None:
    """Ray ends workers when the machine's memory is used up to a share; here that is always so."""
    last = failed(tmp_path / "run", RAY_memory_usage_threshold="0.01", RAY_memory_monitor_refresh_ms="50")
    assert last.startswith("edgefl-train: one of the sites site-1, site-2, site-3 has no result: "), last
    assert "want of memory: fewer workers need less; add --resume to go on" in last, last
