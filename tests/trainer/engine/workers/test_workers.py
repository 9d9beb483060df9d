"""Sites side by side in several processes: the bits of one process, and what a fault in one of them leaves.

docs/design.md 4: a run killed at any moment resumes to the same digest; docs/reference/runs.md, workers.
"""

import itertools
import json
import time
from ctypes import addressof
from dataclasses import replace
from multiprocessing.connection import Pipe
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.trainer.engine import runners
from tests.trainer.engine.runners import PARTITION, PATIENCE_S, Runner, judged, settings_of
from tests.trainer.engine.test_local_engine import NAMES, Silent, engine

from edgefl_protocol import Payload
from edgefl_protocol.errors import EdgeflError, PayloadError
from edgefl_trainer.engine.checkpoint import Checkpoints
from edgefl_trainer.engine.folder import check_claim, working_in
from edgefl_trainer.engine.settings import RunSettings
from edgefl_trainer.engine.workers import messages, pool
from edgefl_trainer.engine.workers.pool import Workers, card_of, crowded_line
from edgefl_trainer.engine.workers.run_again import read_run
from edgefl_trainer.engine.workers.shared_network import ALIGNED, share, shared_network
from edgefl_trainer.errors import TrainingError
from edgefl_trainer.models.backbones import load_backbone, weights_of


@pytest.fixture(autouse=True)
def made_here(monkeypatch):
    """Workers make the sites of `runners`."""
    monkeypatch.setattr(pool, "_work", runners.work)


def workers(count: int, network=None, sizes=None, **told) -> Workers:
    network = network or load_backbone("tiny", image_px=36)
    return Workers(count, (settings_of(NAMES, **told), PARTITION), network, sizes)


def with_workers(folder: Path, count: int, faults=None, **changes):
    with workers(count, faults=faults) as crew:
        return engine(folder, crew=crew, **changes).run()


@pytest.fixture
def faulty(tmp_path):
    """`faulty(error=…)`: three sites, of which north fails once west of the same phase is on the disk."""
    west = tmp_path / "run" / "checkpoints" / "phase-0001" / "west.metrics.json"
    return lambda **more: {"north": {"mended": str(tmp_path / "mended"), "after": str(west), **more}}


@pytest.mark.parametrize("count", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_any_number_of_workers_is_the_same_run(tmp_path, count):
    """Same states and same lines, with judging, in name order whichever site was done first."""
    alone = engine(tmp_path / "alone", judge=judged).run()
    assert with_workers(tmp_path / "several", count, judge=judged).digest() == alone.digest()
    lines = [(tmp_path / name / "metrics.jsonl").read_text() for name in ("alone", "several")]
    assert lines[0] == lines[1]


def test_a_worker_that_is_killed_is_a_sentence_and_nothing_is_lost(tmp_path, faulty):
    """west stood on the disk before north died: each site is durable when it is done."""
    with pytest.raises(TrainingError, match=r"site north: the worker .* killed by the system \(signal 9\).* --resume"):
        with_workers(tmp_path / "run", 2, faulty())
    assert Checkpoints(tmp_path / "run" / "checkpoints").load_site(1, "west") is not None
    (tmp_path / "mended").touch()
    again = with_workers(tmp_path / "run", 3, faulty())
    assert again.digest() == engine(tmp_path / "whole").run().digest()


@pytest.mark.parametrize(
    ("error", "kind", "told", "code"),
    [
        ("known", EdgeflError, "picture 7 cannot be read", "too_large"),
        pytest.param("training", TrainingError, "site north diverged", "training", marks=pytest.mark.slow),
        pytest.param("defect", RuntimeError, "Strange: this and that", None, marks=pytest.mark.slow),
    ],
)
def test_an_error_of_a_site_tells_its_sentence_and_its_place(tmp_path, faulty, error, kind, told, code):
    """The sentence and the code of a single process; the place for whoever reads a traceback."""
    with pytest.raises(kind) as found:
        with_workers(tmp_path / "run", 2, faulty(error=error))
    assert (type(found.value), str(found.value), getattr(found.value, "code", None)) == (kind, told, code)
    assert "local_round" in found.value.__notes__[0]


def test_a_worker_that_reads_other_rows_is_refused(tmp_path):
    crew = Workers(2, (settings_of(NAMES), "of other rows"), load_backbone("tiny", image_px=36))
    with pytest.raises(EdgeflError, match="the data or the network changed while the run began") as found, crew:
        engine(tmp_path, crew=crew).run()
    assert found.value.code == "run"


@pytest.mark.slow
def test_no_worker_outlives_the_run(tmp_path, faulty):
    """After the end and after a fault; a worker that is busy is not waited for."""
    waiting = {"mended": str(tmp_path / "mended"), "after": str(tmp_path / "never")}
    begun = time.monotonic()
    crew = workers(3, faults={**faulty(), "east": waiting})
    with pytest.raises(TrainingError), crew:
        engine(tmp_path / "run", crew=crew).run()
    assert time.monotonic() - begun < PATIENCE_S
    assert len(crew._workers) == 3 and all(worker._process._closed for worker in crew._workers)


@pytest.mark.slow
def test_large_sites_begin_first(tmp_path):
    begun = []

    class Watching(Silent):
        def site_started(self, site):
            begun.append(site)

    with workers(2, sizes={"east": 5, "north": 50, "west": 20}) as crew:
        engine(tmp_path, crew=crew, observer=Watching()).run()
    assert begun[:3] == ["north", "west", "east"]


@pytest.mark.parametrize("name", ["tiny", "cnn:test_resnet"])
def test_a_shared_network_has_the_same_bits_and_is_no_copy(name):
    """The network of the process that shares is the shared one, running statistics and counters included."""
    share(load_backbone("tiny", image_px=36))  # the next block may lie behind it
    backbone = load_backbone(name, image_px=36, seed=3)
    before = {key: value.clone() for key, value in backbone.network.state_dict().items()}
    words, block = share(backbone)
    assert len(block) < 1.2 * sum(value.nbytes + ALIGNED for value in before.values())
    first, last = addressof(block), addressof(block) + len(block)
    for made in (shared_network(words, block), shared_network(words, block), backbone):
        assert made.spec == backbone.spec and type(made) is type(backbone)
        assert not made.network.training and not any(one.requires_grad for one in made.parameters())
        assert made.network.state_dict().keys() == before.keys()
        for key, value in made.network.state_dict().items():
            assert torch.equal(value, before[key]) and value.dtype == before[key].dtype, key
            assert first <= value.data_ptr() < last and value.data_ptr() % ALIGNED == 0, key
    assert weights_of(shared_network(words, block).network).keys() == weights_of(backbone.network).keys()


@pytest.mark.slow
def test_a_frozen_network_lies_once_in_memory(tmp_path):
    """Proportional set sizes (Linux, proc(5)): three workers that read all of it share its bytes with this process."""
    backbone = load_backbone("vit:768x12/12", image_px=36)
    size = sum(value.nbytes for value in weights_of(backbone.network).values())
    assert size > 300e6
    with workers(3, backbone, reading=tmp_path) as crew:
        engine(tmp_path / "run", crew=crew).run()
        rollups = [Path(f"/proc/{worker._process.pid}/smaps_rollup").read_text() for worker in crew._workers]
    pss = [1024 * int(rollup.partition("Pss:")[2].split()[0]) for rollup in rollups]
    shared = [1024 * int(rollup.partition("Pss_Shmem:")[2].split()[0]) for rollup in rollups]
    print("network", size, "pss of workers", pss, "of it shared memory", shared)
    assert len(pss) == 3
    assert sum(shared) < 1.1 * size, (shared, size)
    assert sum(pss) - sum(shared) < 2 * size, pss  # less than a copy for each


def test_what_a_worker_reads_is_what_the_run_read(cached):
    """Rows and network by their digests; pictures stay in their file, which each process maps."""
    settings = RunSettings(method="fedavg", data=("lesions:sites=2,images=20,px=36",), image_px=36)
    own = read_run(settings.to_toml(), torch.get_num_threads())
    read_run.cache_clear()
    network = shared_network(*share(load_backbone("tiny", image_px=36)))
    again = read_run(settings.to_toml(), torch.get_num_threads(), network)
    assert again is not own and again.digests == own.digests
    for name, site in again.sites.items():
        assert site.backbone is network
        assert isinstance(site.train.images, np.memmap) and site.train.images.mode == "r"
        assert site.train.images.filename == own.sites[name].train.images.filename
        assert np.array_equal(site.train.rows, own.sites[name].train.rows)
    other = read_run(replace(settings, seed=1).to_toml(), torch.get_num_threads()).digests
    assert other["partition_sha256"] != own.digests["partition_sha256"]


def test_messages_are_bounded_and_judged(monkeypatch):
    """docs/security.md 5, as for what comes from afar: too long is not read, and what is no payload is refused."""
    here, there = Pipe()
    messages.send(there, {"loss": float("nan"), "epochs": [{"loss": 0.1}]}, Payload({"a": np.arange(3)}, {"n": 1}))
    words = messages.words_of(messages.received(here))
    assert json.dumps(words) == '{"loss": NaN, "epochs": [{"loss": 0.1}]}'
    assert messages.received(here) == Payload({"a": np.arange(3)}, {"n": 1})
    there.send_bytes(b"no payload at all")
    with pytest.raises(PayloadError):
        messages.received(here)
    monkeypatch.setattr(messages, "MAX_STATE_BYTES", 10)
    there.send_bytes(bytes(11))
    with pytest.raises(OSError, match="bad message length"):
        messages.received(here)


def test_workers_that_hinder_one_another_are_told_of():
    assert crowded_line(1, 64, 4) == crowded_line(4, 4, 16) == crowded_line(2, 1, 2) == ""
    assert "4 workers of 8 threads each" in crowded_line(4, 8, 16) and "OMP_NUM_THREADS=4" in crowded_line(4, 8, 16)
    assert crowded_line(8, 1, 4).endswith("on 4 cores: give --workers 4.")


def test_workers_take_cards_in_turn():
    """Of those that the run sees, by the names that the run was given."""
    assert [card_of(i, 0, None) for i in range(2)] == [None, None]
    assert [card_of(i, 2, None) for i in range(3)] == ["0", "1", "0"]
    assert [card_of(i, 2, "3, GPU-5a") for i in range(3)] == ["3", "GPU-5a", "3"]


def test_the_number_of_workers_is_no_part_of_what_a_run_is(tmp_path):
    """A run may go on with another number, and runs that differ in it alone are repetitions of one another."""
    one = RunSettings(method="local", data=("lesions:sites=2",))
    four = replace(one, workers=4)
    assert four.digest_but_seed() == one.digest_but_seed()
    with working_in(tmp_path, one, resume=False):
        pass
    check_claim(tmp_path, four, resume=True)


def test_a_phase_reads_the_states_of_its_own_sites_alone(tmp_path, monkeypatch):
    """Of 40 sites two work in a round: no round reads more than two states."""
    names = [f"s{i:02d}" for i in range(40)]
    read, plain = [], Checkpoints.load_state

    def load_state(self, file):
        read.append(file)
        return plain(self, file)

    rounds = []
    monkeypatch.setattr(Checkpoints, "load_state", load_state)

    class Watching(Silent):
        def phase_started(self, phase, *_):
            rounds.append((phase.kind, len(read)))

    task = replace(engine(tmp_path).task, rounds=6)
    run = engine(
        tmp_path, task=task, sites={name: Runner(name) for name in names}, participation=0.05, observer=Watching()
    )
    run.run()
    train = [count for kind, count in rounds if kind != "warm"]
    assert all(later - before == 2 for before, later in itertools.pairwise(train))
