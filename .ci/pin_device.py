"""Write requirements-device.txt: the device's dependencies, pinned with hashes.

    python .ci/pin_device.py > requirements-device.txt

Versions come from constraints.txt. For every platform and Python below, `pip download` fetches the wheels that pip
would install there, and the hash of each becomes one line. Source: docs/security.md, attack list 22.
"""

import hashlib
import re
import subprocess
import sys
import tempfile
import tomllib
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MACHINES = ("x86_64", "aarch64")
PYTHONS = ("3.11", "3.12", "3.13")
GLIBC = ("2_28", "2_27", "2_17")  # of Debian 10, Ubuntu 18.10 and RHEL 8 or newer
HEADER = """\
# What a device installs, every file pinned by hash (written by .ci/pin_device.py; do not edit):
#     pip install --require-hashes -r requirements-device.txt
#     pip install --no-deps edgefl_derm-{version}-py3-none-any.whl
# Hashes are those of the wheels for Linux (glibc 2.28 or newer) on {machines}, CPython {pythons}.
"""


def main() -> None:
    """Download, hash, print."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    found: dict[tuple[str, str], set[str]] = defaultdict(set)
    for machine in MACHINES:
        for python in PYTHONS:
            with tempfile.TemporaryDirectory() as folder:
                download(project["dependencies"], machine, python, folder)
                for wheel in Path(folder).iterdir():
                    name, version = wheel.name.split("-")[:2]
                    key = re.sub(r"[-_.]+", "-", name).lower()
                    found[key, version].add(hashlib.sha256(wheel.read_bytes()).hexdigest())
    print(
        HEADER.format(version=project["version"], machines=" and ".join(MACHINES), pythons=", ".join(PYTHONS)), end=""
    )
    for (name, version), hashes in sorted(found.items()):
        print(" \\\n".join([f"{name}=={version}", *(f"    --hash=sha256:{one}" for one in sorted(hashes))]))


def download(requirements: list[str], machine: str, python: str, folder: str) -> None:
    """Fetch the wheels that pip would install for one machine and Python."""
    platforms = [f"--platform=manylinux_{glibc}_{machine}" for glibc in GLIBC]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--only-binary=:all:", "--implementation=cp"]
    command += [*platforms, f"--python-version={python}", f"--dest={folder}", "-c", str(ROOT / "constraints.txt")]
    subprocess.run([*command, *requirements], check=True, stdout=sys.stderr)


if __name__ == "__main__":
    main()
