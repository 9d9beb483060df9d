"""Every row of tests/mutations.toml still names a rule and a test. `python tests/mutate.py` runs them."""

import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ROWS = tomllib.loads((ROOT / "tests/mutations.toml").read_text(encoding="utf-8"))["mutation"]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["name"])
def test_a_rule_that_moved_took_its_row_along(row) -> None:
    """The text to change stands in its file once, the change changes it, and the test that must turn red is there."""
    assert (ROOT / row["file"]).read_text(encoding="utf-8").count(row["old"]) == 1
    assert row["new"] != row["old"]
    file, _, name = row["test"].partition("::")
    assert f"def {name.partition('[')[0]}" in (ROOT / file).read_text(encoding="utf-8")


def test_no_rule_is_dropped() -> None:
    """The least number of rules that are broken; raise it with each new one."""
    assert len(ROWS) >= 41
