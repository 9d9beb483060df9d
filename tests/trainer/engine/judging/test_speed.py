"""`images_per_second` and `wait_share` of docs/reference/runs.md, reckoned by hand from lines of `metrics.jsonl`."""

import json
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
from tests.trainer.engine.test_sites import site

from edgefl_protocol import Payload
from edgefl_trainer.contract import State
from edgefl_trainer.engine import local_engine
from edgefl_trainer.engine.run import speed

EAST = {"phase": "train", "round": 1, "site": "east", "seconds": 4.0, "images": 120, "wait_seconds": 1.0}
WEST = {"phase": "train", "round": 1, "site": "west", "seconds": 6.0, "images": 30, "wait_seconds": 0.5}
LAST = {"phase": "final", "round": 2, "site": "east", "seconds": 90.0, "images": 900, "wait_seconds": 80.0}
QUIET = {"phase": "train", "round": 1, "site": "north", "seconds": 15.0, "images": 100}  # does not tell of waiting
SILENT = {"phase": "train", "round": 1, "site": "south", "seconds": 7.0}


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ([EAST, WEST, LAST], {"images_per_second": 15.0, "wait_share": 0.15}),  # 150 in 10 s, 1.5 s of them waiting
        ([EAST], {"images_per_second": 30.0, "wait_share": 0.25}),
        ([WEST], {"images_per_second": 5.0, "wait_share": 0.0833}),
        ([EAST, WEST, QUIET], {"images_per_second": 10.0, "wait_share": 0.15}),  # 250 in 25 s; waiting is told of 10
        ([EAST, WEST, SILENT], {"images_per_second": 15.0, "wait_share": 0.15}),
        ([QUIET], {"images_per_second": 6.7}),
        ([SILENT, LAST], {}),
        ([], {}),
    ],
)
def test_speed_is_all_images_by_all_seconds_of_site_work(lines, expected, tmp_path):
    """Sums of train rounds, not means of sites: a large site weighs more. A line that does not tell is left out."""
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert speed(tmp_path) == expected


@dataclass
class Telling:
    """Two steps of 30 images, each after a quarter of a second of waiting."""

    def local_round(self, site, state, broadcast):
        for step in (1, 2):
            site.report({"step": step, "images": 30, "wait_seconds": 0.25})
        return State(), Payload({}, {})


def test_a_line_has_the_speed_of_its_site(monkeypatch):
    """60 images from second 10 to second 14."""
    clock = iter([10.0, 14.0])
    monkeypatch.setattr(local_engine, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    runner = local_engine.InProcessSite(Telling(), site([0]))
    line = runner.local_round(State(), Payload({}, {"round": 1}), lambda _: None).metrics
    assert line == {"seconds": 4.0, "images": 60, "images_per_second": 15.0, "wait_seconds": 0.5}
