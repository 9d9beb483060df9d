"""Processes that die: one interpreter loads the trainer and forks a child for each command that is to be killed."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

# The child kills itself with SIGKILL right after a file of that name has been renamed into place: kill −9 at a moment
# that does not depend on the machine's speed.
NURSERY = """
import json, os, pathlib, signal, sys
import torch, timm, sklearn.linear_model, matplotlib
import edgefl_trainer.engine.run
from edgefl_trainer.cli import main
torch.set_num_threads(1)
plain = pathlib.Path.replace
for line in sys.stdin:
    request = json.loads(line)
    child = os.fork()
    if child == 0:
        def replace(self, target):
            found = plain(self, target)
            if str(target).endswith(request["kill_after"]):
                os.kill(os.getpid(), signal.SIGKILL)
            return found
        pathlib.Path.replace = replace
        sys.argv = ["edgefl-train", *request["arguments"]]
        try:
            main()
        finally:
            os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@pytest.fixture(scope="session")
def kill_after(cached: None) -> Iterator[Callable[..., None]]:
    """`kill_after("phase-0000/east.metrics.json", "run", …)` starts a command; it dies once that file is on disk."""
    nursery = subprocess.Popen(
        [sys.executable, "-c", NURSERY],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )

    def run(file: str, *arguments: object) -> None:
        nursery.stdin.write(json.dumps({"kill_after": file, "arguments": list(map(str, arguments))}) + "\n")
        nursery.stdin.flush()
        answer = nursery.stdout.readline().strip()
        if answer != "-9":
            nursery.kill()
            pytest.fail(f"the command ended with {answer!r} before {file} was there: {nursery.stderr.read()[-2000:]}")

    yield run
    nursery.stdin.close()
    nursery.wait(timeout=60)
    nursery.stdout.close()
    nursery.stderr.close()


def files_of(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
