"""`benchmarks/coordinator/coordinator_load.py`: sealed uploads to the real server, all answered and in the store."""

import json

import pytest
from benchmarks.coordinator import coordinator_load
from click.testing import CliRunner


@pytest.mark.slow
def test_a_tiny_run() -> None:
    """Twenty members, two rounds: the figures belong together; the benchmark itself compares answers and store."""
    sizes = ("--members", "20", "--uploads", "40", "--connections", "8", "--suite", "1", "--json")
    run = CliRunner().invoke(coordinator_load.main, sizes)
    (found,) = json.loads(run.stdout)
    assert (found["members"], found["uploads"], found["connections"], found["suite"]) == (20, 40, 8, 1)
    assert found["per_s"] > 0 and 0 < found["p50_ms"] <= found["p99_ms"]
    assert (found["database"], found["processes"], found["database_ms"]) == ("sqlite", 1, 0)
    assert found["ratio"] == found["server_ms"] / found["floor_ms"] and found["mib_last"] > 0


@pytest.mark.slow
def test_a_tiny_run_on_postgresql(postgres) -> None:
    """Two servers share one database: each upload is in the store once."""
    sizes = ("--members", "20", "--uploads", "40", "--connections", "8", "--suite", "1", "--json")
    more = ("--database", "postgresql", "--processes", "2")
    run = CliRunner().invoke(coordinator_load.main, (*sizes, *more))
    (found,) = json.loads(run.stdout)
    assert (found["database"], found["processes"], found["uploads"]) == ("postgresql", 2, 40)
    assert found["per_s"] > 0 and found["database_ms"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("database", ["sqlite", pytest.param("postgresql", marks=pytest.mark.nightly)], indirect=True)
def test_a_tiny_run_with_kills(database) -> None:
    """Servers die while replies come: the benchmark itself looks that each is in the store and in the log once."""
    kind, processes = ("postgresql", "2") if database() else ("sqlite", "1")
    sizes = ("--members", "20", "--uploads", "40", "--connections", "4", "--suite", "1", "--kills", "3", "--json")
    more = ("--database", kind, "--processes", processes)
    run = CliRunner().invoke(coordinator_load.main, (*sizes, *more))
    (found,) = json.loads(run.stdout)
    assert found["kills"] == 3 and found["uploads"] >= 40


def test_frames(tmp_path) -> None:
    functions = vars(coordinator_load)
    bodies = [b"", b"one", b"x" * 70_000]
    functions["write_frames"](tmp_path / "frames", bodies)
    assert list(functions["frames"](tmp_path / "frames")) == bodies
