"""A disk that loses at a power cut what was not flushed: for docs/security.md check 58. It needs a C compiler."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).with_name("power_cut.c")
ROOT = Path(__file__).parents[1]
# How a script for `cut_after_each` begins. Its arguments are the root of the disk and a count.
BEGIN = """
import os, sys, threading
from pathlib import Path

one_is_told = threading.Lock()

def acknowledged(what):
    with one_is_told:
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
        self._restore(self.root.stat().st_ino, "d", target)
        return target

    def _restore(self, inode: int, kind: str, target: Path) -> None:
        """Make a folder of the names that were flushed, or a file of the bytes; what never was is empty."""
        kept = self._image / f"{'names' if kind == 'd' else 'data'}-{inode}"
        if kind == "d":
            target.mkdir()
            for line in kept.read_text().splitlines() if kept.exists() else ():
                number, which, name = line.split(" ", 2)
                self._restore(int(number), which, target / name)
        else:
            target.write_bytes(kept.read_bytes() if kept.exists() else b"")
            target.chmod(0o600)


def cut_after_each(
    disk: FlushedDisk, script: str, count: int, folder: Path, *more: str
) -> Iterator[tuple[list[str], Path]]:
    """Run a script; after each thing that it acknowledged: all that it has acknowledged, and what a cut leaves.

    All of its threads stand still meanwhile, each wherever it is. What a cut left is gone after its turn.
    """
    command = [sys.executable, "-c", script, str(disk.root), str(count), *more]
    told: list[str] = []
    with subprocess.Popen(
        command, cwd=ROOT, env=disk.environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        try:
            for line in process.stdout:
                told.append(line.strip())
                process.send_signal(signal.SIGSTOP)
                assert os.WIFSTOPPED(os.waitpid(process.pid, os.WUNTRACED)[1])
                left = disk.after_a_cut(folder / "after-a-cut")
                yield list(told), left
                shutil.rmtree(left)
                process.send_signal(signal.SIGCONT)
                process.stdin.write("go on\n")
                process.stdin.flush()
        except BaseException:
            process.kill()
            raise
    assert process.returncode == 0 and len(told) == count
