"""`edgefl sync` killed before every write and every request: nothing lost, nothing twice."""

import os
import shutil
import sqlite3
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.edge_client.learning.rounds.conftest import OPTIONS, STEPS, Learner

from edgefl_client.scoring.personal import load_personal


class Killed(BaseException):
    """What SIGKILL would do, at a point the test chooses; nothing catches it."""


def kill_at(monkeypatch: pytest.MonkeyPatch, device: Learner, number: int) -> Callable[[], int]:
    """Kill before the `number`-th thing that outlives the process: a file replaced, a transaction, a request sent."""
    seen = [0]

    def happen() -> None:
        seen[0] += 1
        if seen[0] == number:
            raise Killed

    def replacing(source: Any, target: Any, real: Callable[..., None] = os.replace) -> None:
        happen()
        real(source, target)

    class Database:
        """A connection that counts its commits."""

        def __init__(self, *arguments: Any, **options: Any) -> None:
            self._real = connect(*arguments, **options)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._real, name)

        def execute(self, sql: str, *values: Any) -> Any:
            if sql == "COMMIT":
                happen()
            return self._real.execute(sql, *values)

    connect = sqlite3.connect
    send = device.coordinator.send
    monkeypatch.setattr(os, "replace", replacing)
    monkeypatch.setattr(sqlite3, "connect", Database)
    monkeypatch.setattr(device.wire, "inner", SimpleNamespace(send=lambda request: (happen(), send(request))[1]))
    return lambda: seen[0]


@pytest.mark.parametrize("every", [pytest.param(6, marks=pytest.mark.smaller), pytest.param(1, marks=pytest.mark.slow)])
def test_killed_before_a_write_or_a_request(template: Learner, tmp_path: Path, every: int) -> None:
    """docs/security.md check 56, at some points and at each: nothing is lost, nothing is sent twice, no step is learned
    twice."""
    whole = template.copied(tmp_path / "whole")
    with pytest.MonkeyPatch.context() as patch:
        counted = kill_at(patch, whole, 0)
        whole.sync()
        points = counted()
    expected, standing = list(whole.coordinator.effects), whole.standing
    assert len(expected) == 1 and points >= 20
    for number in range(1, points + 1, every):
        device = template.copied(tmp_path / str(number))
        steps: list[str] = []
        options = replace(OPTIONS, report=lambda facts, steps=steps: steps.append("step") if "step" in facts else None)
        with pytest.MonkeyPatch.context() as patch, pytest.raises(Killed):
            kill_at(patch, device, number)
            device.sync(options)
        found = device.sync(options)
        assert found.problem is None, number
        assert device.coordinator.effects == expected, number
        assert device.standing == standing, number
        assert not (device.home.learning / "live-next.payload").exists(), number
        assert found.report["waiting"] == 0 and len(steps) <= STEPS + 1, (number, steps)
        personal = load_personal(device.home, device.bundle)
        assert personal is None or personal.round == 1
        shutil.rmtree(device.home.root)
