"""The method that CONTRIBUTING.md shows is a method. Source: docs/design.md 4."""

import importlib.util
import json
import re
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from edgefl_trainer import cli
from edgefl_trainer.methods import METHODS

NAME = "edgefl_trainer.methods.shown_in_contributing"
pytestmark = pytest.mark.slow


@pytest.fixture
def shown(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> type:
    """The class of the page's Python block, in the table under the name `lgfedavg`."""
    (block,) = re.findall(r"^```python\n(.*?)^```", (root / "CONTRIBUTING.md").read_text(encoding="utf-8"), re.M | re.S)
    file = tmp_path / "lgfedavg.py"
    file.write_text(block, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(NAME, file)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, NAME, module)
    spec.loader.exec_module(module)
    monkeypatch.setitem(METHODS, "lgfedavg", module.LGFedAvg)
    return module.LGFedAvg


def test_one_file_and_one_line_make_a_method(shown, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """docs/design.md 4: it trains, is evaluated, counts its bytes and shares what it declares, with no other change."""
    monkeypatch.setenv("EDGEFL_CACHE", str(tmp_path / "cache"))
    out = tmp_path / "run"
    words = ["run", "lgfedavg", "--data", "lesions:sites=2,images=40,px=48", "--preset", "tiny", "--out", str(out)]
    done = CliRunner().invoke(cli.cli, [*words, "--device", "cpu"])
    assert done.exit_code == 0, done.output
    summary = json.loads((out / "summary.json").read_text())
    assert set(summary["sites"]) == {"site-1", "site-2"}
    width, classes, sites, four_bytes = 64, 4, 2, 4
    head = (width + 1) * classes * sites * four_bytes
    assert head <= summary["bytes_up_per_round"] < 2 * head  # the head and names around it, nothing more
    assert shown.travels == ("weights",)
