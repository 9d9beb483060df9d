"""The machine and the code of a run: versions, commit, seed, threads, by which a reader judges or repeats it."""

import platform
import subprocess
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from edgefl_protocol.distribution import DISTRIBUTION, VERSION

MODIFIED = "(modified)"  # of a commit: its tracked files were changed


def environment(seed: int) -> dict[str, Any]:
    """Describe machine, versions and commit, by which a reader judges or repeats the run."""
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
            "cuda": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
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
