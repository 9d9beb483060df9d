"""Which modules have slow tests, by their text: `make test-slow` reads no others; and in which order tests begin."""

import os
from collections.abc import Generator
from pathlib import Path

import pytest

HERE = Path(__file__).parent
SLOW = "mark.slow"  # stands in every module that has a slow test, or in the conftest of its folder
ASKED = ("slow", "slow and not nightly")  # of make's targets


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Where slow tests alone are asked for, leave modules unread that have none: three of four."""
    asked = config.option.markexpr in ASKED and collection_path.name.startswith("test_")
    return True if asked and collection_path.is_file() and not _may_be_slow(collection_path) else None


def _may_be_slow(module: Path) -> bool:
    near = (folder / "conftest.py" for folder in module.parents if HERE in folder.parents)
    return any(SLOW in file.read_text(encoding="utf-8") for file in (module, *near) if file.is_file())


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Generator[None, object, object]:
    """A slow test whose module does not say so would not be found; of those chosen, begin with what takes longest."""
    hidden = {item.path for item in items if item.get_closest_marker("slow") and not _may_be_slow(item.path)}
    if hidden:
        raise pytest.UsageError(f"`make test-slow` would not find the slow tests of {', '.join(map(str, hidden))}")
    found = yield  # pytest leaves out what `-m` and `-k` do not choose
    items[:] = dealt(items, int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")))
    return found


def dealt(items: list[pytest.Item], processes: int) -> list[pytest.Item]:
    """Deal the long tests to all processes, each before the others of its part: xdist's `worksteal` cuts what it is
    given into as many contiguous parts, and a process without work takes from the end of another's."""
    long, rest = [], []
    for item in items:
        (rest if item.get_closest_marker("long") is None else long).append(item)
    order, left = [], len(items)
    for place in range(processes):
        mine, size = long[place::processes], left // (processes - place)
        take = max(0, size - len(mine))
        order += mine + rest[:take]
        rest, left = rest[take:], left - size
    return order + rest
