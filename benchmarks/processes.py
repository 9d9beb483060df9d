"""A benchmark in a process of its own."""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def started(module: str) -> list[str]:
    """Return the command that runs a module of `benchmarks`, from whatever folder this process was started in."""
    path, run = f"sys.path.insert(0, {str(ROOT)!r})", f"runpy.run_module({module!r}, run_name='__main__')"
    return [sys.executable, "-c", f"import runpy, sys; {path}; {run}"]
