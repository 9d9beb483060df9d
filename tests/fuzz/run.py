"""Fuzz the parsers, guided by the branches that they take: `python -m tests.fuzz.run --minutes 30`.

Each target has a process of its own and an equal share of the time. An input that is a defect, or takes more than
100 ms of processor time, stops its target and stays in `--found`; put it into tests/vectors/fuzz/TARGET/ with the
repair, where a quick test reads it ever after. What new branches took is kept in `--corpus` and begins the next run.
Source: docs/security.md check 15; libFuzzer through atheris.
"""

import argparse
import contextlib
import importlib
import io
import os
import re
import sys
import tempfile
import time
import traceback
from pathlib import Path

MOST_S = 0.1  # of processor time, for one input
LONGEST = {"archive": 8192, "bundle": 4096, "graph": 4096}  # bytes of an input; elsewhere 2,048


def main() -> int:
    """Fuzz all targets, one after the other; 1 where one of them has a defect."""
    import atheris

    options = _options()
    quiet = contextlib.redirect_stderr(io.StringIO())  # it names every module
    with quiet, atheris.instrument_imports(include=["edgefl_protocol"]):  # once, for seconds; each target is a fork
        targets = importlib.import_module("tests.fuzz.targets")
    names = options.targets or list(targets.TARGETS)
    seconds, failed = options.minutes * 60 / len(names), []
    with tempfile.TemporaryDirectory(prefix="edgefl-fuzz-") as spare:
        for name in names:
            said, code = _forked(name, seconds, Path(options.corpus or spare) / name, Path(options.found))
            print(f"{name:16} {_told(said)}{' DEFECT' * bool(code)}", flush=True)
            if code:
                failed.append(name)
                print(said[-4000:], flush=True)
    return 1 if failed else 0


def _forked(name: str, seconds: float, corpus: Path, found: Path) -> tuple[str, int]:
    """Fuzz one target in a process of its own; return what it printed, and how it ended."""
    with tempfile.TemporaryFile("w+b") as said:
        child = os.fork()
        if child == 0:
            code = 1
            try:
                for stream in (1, 2):
                    os.dup2(said.fileno(), stream)
                code = fuzz(name, seconds, corpus, found)
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(code)
        _, status = os.waitpid(child, 0)
        said.seek(0)
        return said.read().decode(errors="replace"), os.waitstatus_to_exitcode(status)


def fuzz(name: str, seconds: float, corpus: Path, found: Path) -> int:
    """Fuzz one target in this process, which ends with it."""
    import atheris

    targets = importlib.import_module("tests.fuzz.targets")
    target = targets.TARGETS[name]
    corpus.mkdir(parents=True, exist_ok=True)
    found.mkdir(parents=True, exist_ok=True)
    for place, seed in enumerate(target.seeds()):
        (corpus / f"seed-{place:03}").write_bytes(seed)
    known = [path.read_bytes() for path in sorted((targets.FOUND / name).glob("*"))]
    for place, data in enumerate(known):
        (corpus / f"known-{place:03}").write_bytes(data)

    def once(data: bytes) -> None:
        taken = _seconds(targets, target, data)
        if taken > MOST_S:  # again, twice: the first time something may have been collected or imported
            taken = min(taken, *(_seconds(targets, target, data) for _ in range(2)))
            assert taken <= MOST_S, f"{taken:.3f} s of processor time for {len(data)} bytes"

    words = [sys.argv[0], f"-max_total_time={max(1, round(seconds))}", f"-max_len={LONGEST.get(name, 2048)}",
             "-timeout=20", "-rss_limit_mb=2048", f"-artifact_prefix={found}/{name}-", "-print_final_stats=1",
             str(corpus)]  # fmt: skip
    atheris.Setup(words, once)
    atheris.Fuzz()
    return 0


def _seconds(targets: object, target: object, data: bytes) -> float:
    begun = time.thread_time()
    targets.check(target, data)  # type: ignore[attr-defined]
    return time.thread_time() - begun


def _told(output: str) -> str:
    """Inputs and branches, as libFuzzer tells them."""
    runs = re.findall(r"stat::number_of_executed_units:\s*(\d+)", output) or ["?"]
    branches = re.findall(r"cov: (\d+)", output) or ["?"]
    return f"{runs[-1]:>9} inputs, {branches[-1]:>5} branches"


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("targets", nargs="*", metavar="TARGET", help="parsers to fuzz; all of them if none is named")
    parser.add_argument("--minutes", type=float, default=1.0, help="for all targets together [default: %(default)s]")
    parser.add_argument("--corpus", default="", metavar="DIR", help="inputs to begin with and to add to")
    parser.add_argument("--found", default="fuzz-found", metavar="DIR", help="where defects go [default: %(default)s]")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
