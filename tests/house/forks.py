"""Our commands in forks of one process that has the large libraries loaded: each its own process, none loads them anew.

What a command does to its process (working folder, environment, streams, signals) ends with its fork.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from importlib.metadata import entry_points
from pathlib import Path

COMMANDS = {
    entry.name: entry.module for entry in entry_points(group="console_scripts") if entry.value.startswith("edgefl_")
}

PARENT = """
import importlib, json, os, sys, traceback
import matplotlib, onnx, onnxruntime, onnxscript, sklearn.linear_model, timm, torch
for line in sys.stdin:
    asked = json.loads(line)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.chdir(asked["folder"])
            os.environ.clear()
            os.environ.update(asked["environment"])
            streams = (os.devnull, os.O_RDONLY), (asked["out"], os.O_WRONLY), (asked["err"], os.O_WRONLY)
            for number, (name, flags) in enumerate(streams):
                os.dup2(os.open(name, flags), number)
            sys.stdin, sys.argv = open(0, closefd=False), asked["words"]
            importlib.import_module(asked["module"]).main()
            code = 0
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
            if isinstance(stop.code, str):
                print(stop.code, file=sys.stderr)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


class Forks:
    """The process that is forked, from its start to `close`."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        words = [sys.executable, "-c", PARENT]
        pipe = subprocess.PIPE
        self._parent = subprocess.Popen(words, stdin=pipe, stdout=pipe, text=True, env=dict(environment))
        self._streams = Path(tempfile.mkdtemp(prefix="forks-"))

    def run(
        self, words: Sequence[str], folder: Path, environment: Mapping[str, str]
    ) -> subprocess.CompletedProcess[str]:
        """One of our commands, with nothing on its standard input."""
        out, err = self._streams / "out", self._streams / "err"
        for file in (out, err):
            file.write_bytes(b"")
        asked = {
            "words": list(words), "module": COMMANDS[words[0]], "folder": str(folder), "out": str(out), "err": str(err),
            "environment": dict(environment),
        }  # fmt: skip
        assert self._parent.stdin and self._parent.stdout
        self._parent.stdin.write(json.dumps(asked) + "\n")
        self._parent.stdin.flush()
        code = int(self._parent.stdout.readline())
        return subprocess.CompletedProcess(list(words), code, out.read_text(), err.read_text())

    def close(self) -> None:
        """End the process."""
        assert self._parent.stdin and self._parent.stdout
        self._parent.stdin.close()
        self._parent.stdout.close()
        self._parent.wait(timeout=60)
