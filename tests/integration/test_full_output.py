"""A disk that is full behind standard output: one sentence and exit 1, whichever command it is."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from edgefl_coordinator.founding.folder import make_home
from edgefl_coordinator.settings import CoordinatorHome

FULL = Path("/dev/full")
PROGRAMS = {
    "edgefl": "edgefl_client.cli",
    "edgefl-train": "edgefl_trainer.cli",
    "edgefl-export": "edgefl_export.cli",
    "edgefl-coordinator": "edgefl_coordinator.cli",
}
SETTINGS = {
    "federation": "skin",
    "public_url": "https://127.0.0.1:8443",
    "suite": 1,
    "task": {
        "method": "fedevprompt",
        "name": "nevus",
        "classes": ["nevus", "other"],
        "maps_per_class": 2,
        "backbone": {"image_px": 24, "patch": 12},
    },
    "rounds": {"count": 2, "quorum_min": 2, "quorum_target": 4, "deadline_s": 60, "start": "manual"},
}


@pytest.mark.skipif(not FULL.exists(), reason="this system has no /dev/full")
@pytest.mark.parametrize(
    ("program", "what"),
    [
        ("edgefl", "help"),
        ("edgefl", "result"),
        ("edgefl-train", "help"),
        ("edgefl-export", "result"),
        ("edgefl-coordinator", "result"),
        pytest.param("edgefl-train", "result", marks=pytest.mark.slow),  # which imports PyTorch
        pytest.param("edgefl-export", "help", marks=pytest.mark.slow),
        pytest.param("edgefl-coordinator", "help", marks=pytest.mark.slow),
    ],
)
def test_a_full_disk_behind_standard_output_is_one_sentence(program, what, tmp_path):
    """docs/design.md, section 5: a known failure is one sentence, exit 1, never a traceback."""
    make_home(CoordinatorHome(tmp_path / "coordinator"), SETTINGS)
    results = {
        "edgefl": ["trust", "list", "--home", str(tmp_path / "device")],
        "edgefl-train": ["methods"],
        "edgefl-export": ["keygen", str(tmp_path / "keys")],
        "edgefl-coordinator": ["status", "--home", str(tmp_path / "coordinator")],
    }
    arguments = ["--help"] if what == "help" else results[program]
    script = f"from {PROGRAMS[program]} import main; main()"
    environment = {**os.environ, "EDGEFL_KEY_PASSPHRASE": "a passphrase, so that nothing warns of its want"}
    if program == "edgefl-coordinator":
        del environment["EDGEFL_KEY_PASSPHRASE"]
    with FULL.open("wb") as out:
        done = subprocess.run(
            [sys.executable, "-c", script, *arguments],
            stdout=out, stderr=subprocess.PIPE, text=True, check=False, env=environment,
        )  # fmt: skip
    assert done.returncode == 1, done.stderr
    assert done.stderr.count("\n") == 1 and "No space left on device" in done.stderr, done.stderr
