"""Sites side by side in several processes: the bits of one process, and what a fault in one of them leaves.

docs/design.md 4: a run killed at any moment resumes to the same digest; docs/reference/runs.md, workers.
"""

import itertools
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.trainer.engine.runners import PATIENCE_S, Faulty, Reading, Runner, Strange, judged
from tests.trainer.engine.test_local_engine import NAMES, Silent, engine

from edgefl_protocol.errors import ImageError
from edgefl_trainer.engine.checkpoint import Checkpoints
from edgefl_trainer.engine.folder import check_claim, working_in
from edgefl_trainer.engine.settings import RunSettings
from edgefl_trainer.engine.workers.parcel import ALIGNED, pack
from edgefl_trainer.engine.workers.pool import Workers, card_of, crowded_line
from edgefl_trainer.errors import TrainingError
from edgefl_trainer.models.backbones import load_backbone, weights_of


def with_workers(folder: Path, count: int, **changes):
    sites = changes.pop("sites", {name: Runner(name) for name in NAMES})
    with Workers(count, sites, changes.get("judge")) as crew:
        return engine(folder, sites=sites, crew=crew, **changes).run()


@pytest.fixture
def faulty(tmp_path):
    """`faulty(**changes)`: three sites, of which north fails once west of the same phase is on the disk."""
    plain = {name: Runner(name) for name in NAMES}
    west = tmp_path / "run" / "checkpoints" / "phase-0001" / "west.metrics.json"
    return lambda **changes: {**plain, "north": Faulty(Runner("north"), tmp_path / "mended", west, **changes)}


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
        with_workers(tmp_path / "run", 2, sites=faulty())
    assert Checkpoints(tmp_path / "run" / "checkpoints").load_site(1, "west") is not None
    (tmp_path / "mended").touch()
    again = with_workers(tmp_path / "run", 3, sites=faulty())
    assert again.digest() == engine(tmp_path / "whole").run().digest()


@pytest.mark.slow
def test_an_error_of_a_site_is_the_one_of_a_single_process(tmp_path, faulty):
    """Its type, its sentence and its code, and the place where it happened for whoever reads a traceback."""
    wrong = partial(ImageError, "picture 7 cannot be read", "too_large")
    with pytest.raises(ImageError) as found:
        with_workers(tmp_path / "run", 2, sites=faulty(error=wrong))
    assert (str(found.value), found.value.code) == ("picture 7 cannot be read", "too_large")
    assert "local_round" in found.value.__notes__[0]


@pytest.mark.slow
def test_an_error_that_cannot_be_sent_still_tells_its_cause(tmp_path, faulty):
    with pytest.raises(RuntimeError, match="Strange: this and that"):
        with_workers(tmp_path / "run", 2, sites=faulty(error=partial(Strange, "this", "that")))


@pytest.mark.slow
def test_no_worker_outlives_the_run(tmp_path, faulty):
    """After the end and after a fault; a worker that is busy is not waited for."""
    sites = {**faulty(), "east": Faulty(Runner("east"), tmp_path / "mended", tmp_path / "never")}
    begun = time.monotonic()
    crew = Workers(3, sites)
    with pytest.raises(TrainingError), crew:
        engine(tmp_path / "run", sites=sites, crew=crew).run()
    assert time.monotonic() - begun < PATIENCE_S
    assert len(crew._workers) == 3 and all(worker._process._closed for worker in crew._workers)


@pytest.mark.slow
def test_large_sites_begin_first(tmp_path):
    begun = []

    class Watching(Silent):
        def site_started(self, site):
            begun.append(site)

    sites = {name: Runner(name) for name in NAMES}
    with Workers(2, sites, None, {"east": 5, "north": 50, "west": 20}) as crew:
        engine(tmp_path, sites=sites, crew=crew, observer=Watching()).run()
    assert begun[:3] == ["north", "west", "east"]


def test_a_parcel_holds_each_array_once_and_gives_the_same_bits():
    """The network of the process that packs is the shared one, and an array over its memory is no second copy."""
    backbone = load_backbone("tiny", image_px=36)
    before = {name: value.copy() for name, value in weights_of(backbone.network).items()}
    fixed = np.arange(5.0)
    fixed.flags.writeable = False
    parcel = pack((backbone, weights_of(backbone.network), fixed))
    assert len(parcel.block) < 1.2 * sum(value.nbytes + ALIGNED for value in before.values())
    first, second = parcel.open(), parcel.open()
    for found in (first[0], second[0], backbone):
        assert {name: value.tobytes() for name, value in weights_of(found.network).items()} == {
            name: value.tobytes() for name, value in before.items()
        }
    for (name, own), one, two in zip(
        backbone.state_dict().items(), first[0].state_dict().values(), second[0].state_dict().values(), strict=True
    ):
        assert one.data_ptr() == two.data_ptr() == own.data_ptr(), name
        assert own.data_ptr() % ALIGNED == 0
    assert not first[0].network.training and not any(one.requires_grad for one in first[0].parameters())
    assert not first[2].flags.writeable and first[2].tolist() == fixed.tolist()
    assert torch.equal(first[0].pixel_mean, backbone.pixel_mean)


@pytest.mark.slow
def test_a_frozen_network_lies_once_in_memory(tmp_path):
    """Proportional set sizes (Linux, proc(5)): three workers that read all of it share its bytes with this process."""
    backbone = load_backbone("vit:768x12/12", image_px=36)
    size = sum(value.nbytes for value in weights_of(backbone.network).values())
    assert size > 300e6
    sites = {name: Reading(name, backbone.network, tmp_path, NAMES) for name in NAMES}
    with Workers(3, sites) as crew:
        engine(tmp_path / "run", sites=sites, crew=crew).run()
        rollups = [Path(f"/proc/{worker._process.pid}/smaps_rollup").read_text() for worker in crew._workers]
    pss = [1024 * int(rollup.partition("Pss:")[2].split()[0]) for rollup in rollups]
    shared = [1024 * int(rollup.partition("Pss_Shmem:")[2].split()[0]) for rollup in rollups]
    print("network", size, "pss of workers", pss, "of it shared memory", shared)
    assert len(pss) == 3
    assert sum(shared) < 1.1 * size, (shared, size)
    assert sum(pss) - sum(shared) < 2 * size, pss  # less than a copy for each


def test_pictures_stay_in_their_file(tmp_path):
    np.save(tmp_path / "images.npy", np.arange(24_000_000, dtype=np.uint8))
    images = np.load(tmp_path / "images.npy", mmap_mode="r")
    parcel = pack((images, images[5:9]))
    assert len(parcel.block) + len(parcel.words) < 10_000
    found, part = parcel.open()
    assert isinstance(found, np.memmap) and np.array_equal(found, images) and np.array_equal(part, images[5:9])


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
