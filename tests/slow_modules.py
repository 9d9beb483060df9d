"""Which modules have slow tests, by their text: `make test-slow` reads no others."""

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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with what takes longest; a slow test whose module does not say so would not be found."""
    hidden = {item.path for item in items if item.get_closest_marker("slow") and not _may_be_slow(item.path)}
    if hidden:
        raise pytest.UsageError(f"`make test-slow` would not find the slow tests of {', '.join(map(str, hidden))}")
    items.sort(key=lambda item: item.get_closest_marker("long") is None)
