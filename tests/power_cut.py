"""A disk that loses at a power cut what was not flushed: for docs/security.md check 58. It needs a C compiler."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).with_name("power_cut.c")
ROOT = Path(__file__).parents[1]
# How a script for `cut_after_each` begins. Its arguments are the root of the disk and a count.
BEGIN = """
import os, sys
from pathlib import Path

def flush(path):
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)

def flush_all(root):
    for path in [*sorted(Path(root).rglob("*")), Path(root)]:
        flush(path)

def acknowledged(what):
    print(what, flush=True)
    assert sys.stdin.readline() == "go on\\n"
"""


class FlushedDisk:
    """A folder `root` whose flushed state is kept beside it, for processes that run with `environment`."""

    def __init__(self, folder: Path) -> None:
        """Make the folder; skip the test by name where there is no C compiler."""
        compiler = shutil.which("cc")
        if compiler is None:
            pytest.skip("no C compiler (cc), which builds the disk that loses what was not flushed")
        self.root, self._image, library = folder / "disk", folder / "image", folder / "power_cut.so"
        self.root.mkdir()
        self._image.mkdir()
        subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-Wall", "-Werror", "-o", library, SOURCE], check=True)
        own = {"LD_PRELOAD": str(library), "POWER_CUT_ROOT": str(self.root), "POWER_CUT_IMAGE": str(self._image)}
        self.environment = {**os.environ, **own}

    def after_a_cut(self, target: Path) -> Path:
        """Make at `target` what the disk holds when the power comes back now."""
        self._restore(self.root.stat().st_ino, target)
        return target

    def _restore(self, inode: int, target: Path) -> None:
        names = self._image / f"names-{inode}"
        if names.exists():
            target.mkdir()
            for line in names.read_text().splitlines():
                number, name = line.split(" ", 1)
                self._restore(int(number), target / name)
        else:
            data = self._image / f"data-{inode}"
            target.write_bytes(data.read_bytes() if data.exists() else b"")
            target.chmod(0o600)


def cut_after_each(
    disk: FlushedDisk, script: str, count: int, folder: Path, *more: str
) -> list[tuple[list[str], Path]]:
    """Run a script; after each thing that it acknowledged: all that it has acknowledged, and what a cut leaves."""
    command = [sys.executable, "-c", script, str(disk.root), str(count), *more]
    found: list[tuple[list[str], Path]] = []
    told: list[str] = []
    with subprocess.Popen(
        command, cwd=ROOT, env=disk.environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        for line in process.stdout:
            told.append(line.strip())
            found.append((list(told), disk.after_a_cut(folder / f"cut-{len(found)}")))
            process.stdin.write("go on\n")
            process.stdin.flush()
    assert process.returncode == 0 and len(found) == count
    return found
