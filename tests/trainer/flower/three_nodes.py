"""Three SuperNodes of three sites, without SuperLink and network, and the plan of their server."""

from dataclasses import replace
from pathlib import Path

import pytest
from tests.trainer.conftest import make_asked
from tests.trainer.flower.grid_here import GridHere, Node

from edgefl_trainer.flower import away, federation
from edgefl_trainer.flower.asking import Asking
from edgefl_trainer.flower.federation import Arrangement

DATA = "lesions:sites=3,images=40,px=36"
SITES = ("site-1", "site-2", "site-3")
TOML = """method = "{method}"
preset = "tiny"
rounds = {rounds}
image_px = 36
{classes}
"""
CLASSES = 'classes = ["BCC", "BKL", "MEL", "NV"]'


@pytest.fixture
def begin(tmp_path: Path, one_thread, monkeypatch):
    """Write the server's settings, and give three nodes and the plan."""

    def make(method="fedevprompt", rounds=2, classes=CLASSES, **plan):
        (tmp_path / "federation.toml").write_text(TOML.format(method=method, rounds=rounds, classes=classes))
        nodes = {
            97 - 31 * i: Node(away.app, {"site": name, "data": DATA, "out": str(tmp_path / name), "device": "cpu"})
            for i, name in enumerate(SITES)
        }
        grid = GridHere(nodes)
        monkeypatch.setattr(federation, "Asking", lambda **given: Asking(**given, clock=grid.clock, sleep=grid.sleep))
        given = {
            "config": str(tmp_path / "federation.toml"),
            "out": str(tmp_path / "server"),
            "sites": ", ".join(SITES),
        }
        return grid, Arrangement.of({**given, **plan})

    return make


def asked(begin, tmp_path):
    """A federation whose pictures are asked questions, each site with its own words."""
    data = f"vqa-rad:{make_asked(tmp_path / 'vqa_rad', {'HEAD': 12, 'CHEST': 12, 'ABD': 12})}"
    grid, plan = begin("pfl-vqa", classes=f'data = ["{data}"]')
    sites = ("rad-abdomen", "rad-chest", "rad-head")
    for node, name in zip(grid.nodes.values(), sites, strict=True):
        node.config |= {"site": name, "data": data, "out": str(tmp_path / name), "words": "share"}
    return grid, replace(plan, sites=sites, quorum=3), data


def lines(capsys, word):
    return [line for line in capsys.readouterr().err.splitlines() if word in line]
