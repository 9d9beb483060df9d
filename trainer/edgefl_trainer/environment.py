"""The machine and the code of a run: versions, commit, seed, threads and dates, by which a reader judges or repeats it.

`environment.json` of a run's folder holds it. `begun` stays when a run goes on; `finished` is added at its end. Both
are UTC, to the second. Where a run goes on elsewhere, or with other versions, `earlier` keeps what it ran on before.
"""

import json
import platform
import subprocess
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from edgefl_protocol.distribution import DISTRIBUTION, VERSION
from edgefl_protocol.durable import write_atomic

ENVIRONMENT = "environment.json"
PLACE = ("versions", "commit", "machine")  # what tells one environment from another
EARLIER = "earlier"
MODIFIED = "(modified)"  # of a commit: its tracked files were changed


def environment_of(folder: Path) -> dict[str, Any]:
    """Read a run's `environment.json`; empty where it cannot be read, since whoever shows it can do without."""
    try:
        found = json.loads((folder / ENVIRONMENT).read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def write_environment(folder: Path, seed: int, device: torch.device, *, began_on: str = "auto") -> None:
    """Write what a run begins with; where it goes on, it began when it began, and what it ran on before is kept.

    `began_on` is the device of its `config.toml`.
    """
    before, now = environment_of(folder), environment(seed, device)
    earlier = list(before.get(EARLIER, ()))
    place = {name: before[name] for name in PLACE if name in before}
    # Older versions named the machine's card for a run on the processor, too, and kept nothing earlier.
    if began_on == "cpu" and not earlier and isinstance(place.get("machine"), dict):
        place["machine"] = {**place["machine"], "cuda": None}
    if place and place != {name: now[name] for name in PLACE}:
        earlier.append(place)
    _write(folder, {**now, "begun": before.get("begun") or _now(), **({EARLIER: earlier} if earlier else {})})


def all_environments(found: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return what a run ran on, of its `environment.json`: first what it began on."""
    return [*found.get(EARLIER, ()), found]


def write_finished(folder: Path) -> None:
    """Add when a run was finished, where its environment was written."""
    if found := environment_of(folder):
        _write(folder, {**found, "finished": _now()})


def _write(folder: Path, found: Mapping[str, Any]) -> None:
    write_atomic(folder / ENVIRONMENT, json.dumps(found, indent=2).encode() + b"\n")


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def environment(seed: int, device: torch.device) -> dict[str, Any]:
    """Describe machine, versions and commit, by which a reader judges or repeats a run on this device."""
    packages = ("torch", "timm", "numpy", "pillow", "scikit-learn")
    return {
        "versions": {DISTRIBUTION: VERSION}
        | {name: version(name) for name in packages}
        | {"python": platform.python_version()},
        "commit": commit_of(Path(__file__).parent),
        "seed": seed,
        "machine": {
            "system": platform.platform(),
            "processor": _processor(),
            "threads": torch.get_num_threads(),
            "cuda": torch.cuda.get_device_name() if device.type == "cuda" else None,
        },
    }


def commit_of(code: Path) -> str | None:
    """Name the commit of a source checkout by the folder of this module, and say where its files are modified.

    None for an installed wheel, also inside another checkout, and without git.
    """
    commit, _, prefix = _git(code, "rev-parse", "HEAD", "--show-prefix").strip().partition("\n")
    if prefix.strip("/") != "trainer/edgefl_trainer":
        return None
    changed = _git(code, "--no-optional-locks", "status", "--porcelain", "--untracked-files=no")
    return f"{commit} {MODIFIED}" if changed else commit


def _git(folder: Path, *command: str) -> str:
    """What git prints there; nothing where it fails, or is not installed."""
    try:
        found = subprocess.run(  # noqa: S603
            ["git", "-C", str(folder), *command],  # noqa: S607
            capture_output=True,
            text=True,
            check=False,
        )
    except OSError:
        return ""
    return found.stdout if found.returncode == 0 else ""


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.exists():
        return platform.processor()
    names = [
        line.partition(":")[2].strip() for line in cpuinfo.read_text().splitlines() if line.startswith("model name")
    ]
    return f"{names[0]}, {len(names)} cores" if names else platform.processor()
