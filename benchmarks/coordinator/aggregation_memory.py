"""Memory of the aggregation worker by the number of replies: a ResNet-18 each, averaged in a process of its own.

    python -m benchmarks.coordinator.aggregation_memory --replies 10,100
    python -m benchmarks.coordinator.aggregation_memory --replies 10,100 --mapped-only --rule median

Each count is done twice: with the replies mapped from their files, as the worker reads them, and all in memory, as it
did before. Both must give the same state. Four files stand for all replies: a mapping counts for each reply, as for
files of their own. Their updates differ in length, up to four times, and so do their claims: with `--claim-most 1` and
`--norm-most 1`, which `edgefl-coordinator init` writes and which are the defaults here, two of four are cut. `peak` is
the largest resident memory (VmHWM), `own` the largest part of it that no file backs, sampled each 10 ms. Whoever runs
it needs 0.2 GB of disk, and 46 MB of memory a reply for the second way.
"""

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

FILES = 4
RULES = ("mean", "clip", "median", "trimmed-mean", "mixed-mean", "multi-krum")


def main() -> None:
    """Make the replies, then measure each count in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--replies", default="10,100")
    parser.add_argument("--mapped-only", action="store_true")
    parser.add_argument("--rule", default="clip", choices=RULES)
    parser.add_argument("--claim-most", type=float, default=1.0)
    parser.add_argument("--norm-most", type=float, default=1.0)
    parser.add_argument("--network", default="resnet18", help="a name of timm's")
    parser.add_argument("--one", nargs=3, metavar=("FOLDER", "REPLIES", "WAY"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    bounds = {"rule": given.rule, "claim_most": given.claim_most, "norm_most": given.norm_most}
    federation = settings(given.network, bounds)
    if given.one:
        print(json.dumps(measured(Path(given.one[0]), int(given.one[1]), given.one[2], federation)))
        return
    with tempfile.TemporaryDirectory() as name:
        prepare(Path(name), federation)
        for replies in map(int, given.replies.split(",")):
            found = {}
            for way in ("mapped",) if given.mapped_only else ("mapped", "in memory"):
                words = [sys.executable, __file__, *sys.argv[1:], "--one", name, str(replies), way]
                found[way] = json.loads(subprocess.run(words, check=True, capture_output=True, text=True).stdout)
                shown = "  ".join(f"{key} {value}" for key, value in found[way].items())
                print(f"{replies:5} replies, {way:9}  {shown}", flush=True)
            if len({one["state"] for one in found.values()}) != 1:
                raise SystemExit("the two ways differ")


def task(network: str) -> dict[str, Any]:
    """A task of SimCLR, which averages a whole network."""
    from edgefl_coordinator.founding.task import task_of_method

    table, _ = task_of_method("fedsimclr", f"cnn:{network}", preset=None, assignments=[], image_px=72, seed=0)
    return {"name": "nevus", "classes": ["nevus", "other"], **table}


def settings(network: str, protection: dict[str, Any]) -> Any:
    """Settings of a federation with that task, and its [protection]."""
    from edgefl_coordinator.settings import settings_from_table

    rounds = {"count": 2, "quorum_min": 2, "quorum_target": 2}
    table = {"federation": "skin", "public_url": "https://127.0.0.1:8443", "rounds": rounds, "task": task(network)}
    return settings_from_table({**table, "protection": protection})


def prepare(folder: Path, federation: Any) -> None:
    """Write the state after the start, and replies that lie one to four times as far from it."""
    import numpy as np

    from edgefl_coordinator.rounds.jobs import make_job
    from edgefl_coordinator.rounds.worker import run_job
    from edgefl_protocol import Payload

    state = run_job(make_job(federation, "start", 0)).state
    (folder / "state").write_bytes(state)
    arrays = Payload.from_bytes(state, 2**31).arrays
    for number in range(FILES):
        rng = np.random.default_rng(number)
        moved = {
            name: array + rng.normal(0, 0.01 * (1 + number), array.shape).astype(array.dtype)
            if array.dtype.kind == "f"
            else array
            for name, array in arrays.items()
        }
        (folder / f"reply-{number}").write_bytes(Payload(moved, {"n_train": 100 + number}).to_bytes())


def measured(folder: Path, replies: int, way: str, federation: Any) -> dict[str, Any]:
    """Aggregate so many replies in this process; what it took, and a digest of the state."""
    from edgefl_coordinator.rounds import jobs
    from edgefl_coordinator.rounds.worker import run_job

    if way != "mapped":
        jobs.MAPPED_BYTES = 2**60
    files = {f"site-{number:05}": str(folder / f"reply-{number % FILES}") for number in range(replies)}
    job = jobs.make_job(federation, "aggregate", 1, state=str(folder / "state"), replies=files)
    before, stop, own = memory("RssAnon"), threading.Event(), [0]
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew

    def sample() -> None:
        while not stop.wait(0.01):
            own[0] = max(own[0], memory("RssAnon"))

    watching = threading.Thread(target=sample)
    watching.start()
    began = time.perf_counter()
    result = run_job(job)
    took = time.perf_counter() - began
    stop.set()
    watching.join()
    if result.problem:
        raise SystemExit(result.problem)
    return {
        "bounded": len(result.bounded), "before_mib": before >> 10, "own_mib": own[0] >> 10,
        "peak_mib": memory("VmHWM") >> 10, "seconds": round(took, 1),
        "state": hashlib.sha256(result.state).hexdigest()[:16],
    }  # fmt: skip


def memory(field: str) -> int:
    """A line of /proc/self/status, in KiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(f"{field}:")).split()[1])


if __name__ == "__main__":
    main()
