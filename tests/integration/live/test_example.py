"""`examples/live_federation.py --tiny` as a person runs it: eight processes, TLS, one method or both, two rounds each.

Its exports trace only what no process of the tests has traced yet; their gates are asked as always.

Source: docs/design.md 1 (devices and GPU servers in one federation), STYLE 3 (every example runs in the tests).
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.shared import FOLDER, Shared

pytestmark = [pytest.mark.slow, pytest.mark.long]

ROOT = Path(__file__).resolve().parents[3]
# The script, whose commands are forked from a process that has imported these modules; a device's, too.
RUN = """
import live_processes
live_processes.ENTRIES["edgefl"] = "edgefl_client.cli"
loaded = [*live_processes.IMPORTED, "edgefl_client.scoring.score_files", "tests.integration.traced_once"]
live_processes.FORKING.set_forkserver_preload(loaded)
import live_federation
live_federation.main()
"""
EXCHANGES = {"fedevprompt": 2, "fedclf": 3}  # of a method, whose folder has its name; a warm one among FedCLF's


# FedEvPrompt over TLS, which the larger form has too, is in each run of the tests in `test_devices.py`.
@pytest.mark.parametrize("methods", [("fedclf",), pytest.param(tuple(EXCHANGES), marks=pytest.mark.nightly)], ids=len)
def test_servers_and_devices_learn_together(methods: tuple[str, ...], tmp_path: Path, shared: Shared) -> None:
    """Everybody answers every exchange; hospitals end with the digest that the coordinator shows; results are runs."""
    out = tmp_path / "out"
    paths = os.pathsep.join([str(ROOT / "examples"), str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": paths, FOLDER: str(shared.folder)}
    chosen = [word for method in methods for word in ("--method", method)]
    script = [sys.executable, "-c", RUN, "--tiny", "--out", str(out), *chosen]
    done = subprocess.run(
        script, capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=3600, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    shown = re.findall(r"^digest of the whole federation: ([0-9a-f]{64})$", done.stdout, re.M)
    assert len(shown) == len(methods)
    for digest, method in zip(shown, methods, strict=True):
        for name in ("hospital-1", "hospital-2"):
            summary = json.loads((out / method / name / "summary.json").read_text())
            assert (summary["method"], summary["state_sha256"]) == (method, digest)
            lines = (out / method / name / "metrics.jsonl").read_text().splitlines()
            assert len(lines) == EXCHANGES[method]
    rows = re.findall(r"^(hospital-\d|device-\d) +(\d+) +([\d,]+) +([\d,]+)  ", done.stdout, re.M)
    assert sorted((name, int(count)) for name, count, *_ in rows) == sorted(
        (name, EXCHANGES[method])
        for method in methods
        for name in ("hospital-1", "hospital-2", "device-1", "device-2", "device-3")
    )
    assert all(sent != "0" and received != "0" for *_, sent, received in rows)
