"""Change one rule at a time, in a copy of this checkout, and see that its quick test turns red.

    python tests/mutate.py [NAME …]      all rules of tests/mutations.toml, or those named

First every test runs on the unchanged copy and must pass. Ends with status 1 where a test stays green under its
mutation, and where the text to be replaced does not occur exactly once: then the rule has moved, and its row with it.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("protocol", "trainer", "export", "edge_client", "coordinator")


@dataclass(frozen=True)
class Mutation:
    """One row: `old` becomes `new` in `file`, and `test` turns red."""

    name: str
    file: str
    old: str
    new: str
    test: str


def copied(folder: Path) -> None:
    """Copy what git tracks."""
    listed = subprocess.run(["git", "-C", str(ROOT), "ls-files", "-z"], capture_output=True, text=True, check=True)
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)


def tests_end(folder: Path, tests: list[str], **more: str) -> tuple[int, str]:
    """Exit status and last line of pytest in the copy, without the slow tests; `more` goes into the environment."""
    paths = os.pathsep.join(str(folder / package) for package in PACKAGES)
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **more}
    words = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", "not slow", *tests]
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    return done.returncode, (done.stdout.strip().splitlines() or [done.stderr])[-1]


def outcome(folder: Path, mutation: Mutation) -> str:
    """What the mutation did: `red`, or what is wrong."""
    file = folder / mutation.file
    text = file.read_text(encoding="utf-8") if file.exists() else ""
    if text.count(mutation.old) != 1:
        return f"NOT FOUND: {mutation.file} has this text {text.count(mutation.old)} times: {mutation.old!r}"
    file.write_text(text.replace(mutation.old, mutation.new), encoding="utf-8")
    try:  # compiled, two mutations of one file in one second look alike where their lengths are equal
        code, last = tests_end(folder, [mutation.test], PYTHONDONTWRITEBYTECODE="1")
    finally:
        file.write_text(text, encoding="utf-8")
    return "red" if code == 1 else f"STAYS GREEN: {mutation.test}: {last}" if code == 0 else f"DID NOT RUN: {last}"


def main() -> int:
    """Run the rows named on the command line, or all."""
    rows = tomllib.loads((ROOT / "tests/mutations.toml").read_text(encoding="utf-8"))["mutation"]
    mutations = {row["name"]: Mutation(**row) for row in rows}
    if unknown := set(sys.argv[1:]) - set(mutations):
        sys.exit(f"no row of tests/mutations.toml is called {', '.join(sorted(unknown))}")
    chosen = [mutations[name] for name in sys.argv[1:]] or list(mutations.values())
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        copied(folder)
        code, last = tests_end(folder, sorted({one.test for one in chosen}))
        print(f"unchanged: {last}", flush=True)
        good = code == 0
        for one in chosen:
            begun = time.monotonic()
            found = outcome(folder, one)
            good = good and found == "red"
            print(f"{one.name}: {found} ({time.monotonic() - begun:.0f} s)", flush=True)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
