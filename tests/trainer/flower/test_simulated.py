"""The sites of a run at the nodes of a simulation, without Ray. Source: docs/design.md 4, same seed, same digest."""

from dataclasses import replace
from functools import partial

import pytest
from tests.trainer.flower.grid_here import GridHere, Node

from edgefl_protocol.errors import EdgeflError
from edgefl_trainer.engine import run as engine
from edgefl_trainer.engine.settings import resolve
from edgefl_trainer.errors import RunError
from edgefl_trainer.flower import simulated
from edgefl_trainer.flower.asking import Asking, Silence
from edgefl_trainer.flower.simulation import failure, found_crew, one_of, resources

SETTINGS = {"data": ("lesions:sites=3,images=40,px=36",), "preset": "tiny", "device": "cpu", "rounds": 2}


def here(count=3, **changes):
    """As many nodes of a simulation as there are sites, numbered out of order."""
    return GridHere(
        {
            97 - 31 * i: Node(simulated.app, {"partition-id": i, "num-partitions": count}, **changes)
            for i in range(count)
        }
    )


def drive(grid, settings, local):
    asking = Asking(grid=grid, poll_s=0.05, most_open=2, most_bytes=1 << 30, sleep=grid.sleep)
    digests = simulated.read_run(settings.to_toml(), 1).digests
    return replace(local, crew=found_crew(asking, settings, sorted(local.sites), digests)).run()


@pytest.mark.parametrize(
    "method",
    [
        "fedevprompt",
        "fedavg",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("pep-fedpt", "fedclf", "fedmae")),
    ],
)
def test_the_nodes_end_with_the_digest_of_the_local_engine(method, tmp_path, one_thread) -> None:
    settings = resolve(method, SETTINGS, None, [])
    grid = here()
    there = engine.run(settings, tmp_path / "there", resume=False, drive=partial(drive, grid, settings))
    local = engine.run(settings, tmp_path / "local", resume=False)
    assert there["state_sha256"] == local["state_sha256"]
    assert {key: there[key] for key in ("bytes_up_total", "sites")} == {
        key: local[key] for key in ("bytes_up_total", "sites")
    }
    assert all(node.heard[0] == "query" and node.heard.count("train") >= 2 for node in grid.nodes.values())


def test_a_site_that_fails_ends_the_run_with_its_sentence_and_the_others_are_kept(tmp_path, one_thread) -> None:
    """docs/design.md 5: a known failure is one sentence; the rounds before are kept."""
    settings = resolve("fedavg", SETTINGS, None, [])
    grid = here()
    full = simulated.read_run(settings.to_toml(), 1)
    broken = replace(full.sites["site-2"], train=None)
    simulated.read_run.cache_clear()
    kept = simulated.read_run

    def read(text, threads):
        found = kept(text, threads)
        return replace(found, sites={**found.sites, "site-2": broken})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(simulated, "read_run", read)
        with pytest.raises(EdgeflError, match="site-2") as failed:
            asking = Asking(grid=grid, poll_s=0.05, most_open=1, most_bytes=1 << 30, sleep=grid.sleep)

            def go(local):
                return replace(local, crew=found_crew(asking, settings, sorted(local.sites), full.digests)).run()

            engine.run(settings, tmp_path / "run", resume=False, drive=go)
    assert failed.value.code == "method" and "local_round of fedavg failed" in str(failed.value)
    assert (tmp_path / "run/checkpoints/phase-0000/site-1.metrics.json").exists()
    going_on = engine.run(settings, tmp_path / "run", resume=True)
    assert going_on["state_sha256"] == engine.run(settings, tmp_path / "local", resume=False)["state_sha256"]


def test_data_that_changed_meanwhile_is_refused(tmp_path, one_thread) -> None:
    settings = resolve("fedavg", SETTINGS, None, [])
    grid = here()
    asking = Asking(grid=grid, poll_s=0.05, most_bytes=1 << 30, sleep=grid.sleep)
    other = dict(simulated.read_run(settings.to_toml(), 1).digests, partition_sha256="0" * 64)
    with pytest.raises(RunError, match="the data or the network changed while the run began"):
        found_crew(asking, settings, ["site-1", "site-2", "site-3"], other)


@pytest.mark.parametrize(
    ("count", "who"), [(1, "one of the sites s-1"), (5, "one of the sites s-1, s-2, s-3 and 2 others")]
)
def test_before_a_node_has_said_its_name_the_sites_are_named(count, who) -> None:
    """A worker that ends while it begins: nobody knows yet whose it was."""
    error = failure(one_of([f"s-{i + 1}" for i in range(count)]), Silence("its worker process was ended"))
    assert str(error) == (
        f"{who} has no result: its worker process was ended; add --resume to go on: what is finished is kept."
    )


@pytest.mark.parametrize(("workers", "gpus", "share"), [(2, 0, 0), (1, 1, 1), (3, 1, 0.3333), (3, 2, 0.5), (4, 8, 1)])
def test_a_worker_takes_one_core_and_its_part_of_a_gpu(workers, gpus, share) -> None:
    """Ray starts no more workers than fit: parts of a GPU are dealt by its unit, 1/10,000, and never across two."""
    taken = resources(workers, gpus)
    assert taken["client_resources"] == {"num_cpus": 1, "num_gpus": share} and taken["init_args"]["num_cpus"] == workers
    assert taken["init_args"]["_node_ip_address"].startswith("127.") and not taken["init_args"]["include_dashboard"]
