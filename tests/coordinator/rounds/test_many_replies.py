"""The aggregation worker's memory does not grow with the number of large replies, and its results stay bit for bit.

Source: docs/methods.md, aggregation (the same job gives the same bytes).
benchmarks/coordinator/aggregation_memory.py measures a ResNet-18 of each of 10, 100 and 1,000 sites.
"""

import mmap
import resource
from pathlib import Path

import numpy as np
import pytest

from edgefl_coordinator.rounds import jobs
from edgefl_coordinator.rounds.jobs import Job, read_replies
from edgefl_protocol import Payload
from edgefl_protocol.errors import PayloadError, StorageError

pytest.importorskip("torch")

NUMBERS = 2**20  # of a reply: 4 MiB


def job_of(files: list[Path]) -> Job:
    replies = {f"site-{number:04}": str(file) for number, file in enumerate(files)}
    return Job(kind="aggregate", number=1, method="finetune", settings={}, task={}, replies=replies, quorum=2)


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    """Three large replies, of which a round may have many."""
    for number in range(3):
        drawn = np.random.default_rng(number).normal(size=(2, NUMBERS // 2)).astype(np.float32)
        arrays = {"backbone.a": drawn[0], "head.b": drawn[1]}
        (tmp_path / str(number)).write_bytes(Payload(arrays, {"n_train": 10 * number + 5}).to_bytes())
    return [tmp_path / str(number) for number in range(3)]


def resident() -> int:
    """Resident bytes of this process, of its own and of files."""
    return 1024 * int(Path("/proc/self/status").read_text().partition("VmRSS:")[2].split()[0])


def test_a_mean_is_the_same_bit_for_bit_and_one_reply_is_in_memory(files, monkeypatch) -> None:
    """Sixty replies of 4 MiB, 240 MiB in all: the pages of two at most, while they are averaged."""
    from edgefl_trainer.learning import averaging

    many = [files[number % 3] for number in range(60)]
    with monkeypatch.context() as context:
        context.setattr(jobs, "MAPPED_BYTES", 2**40)
        plain = read_replies(job_of(many[:7]))
        wanted = averaging.weighted_mean(plain, averaging.sample_weights(plain))
    some = read_replies(job_of(many[:7]))
    assert all(some[name] == plain[name] for name in plain)
    found = averaging.weighted_mean(some, averaging.sample_weights(some))
    assert {name: array.tobytes() for name, array in found.items()} == {
        name: array.tobytes() for name, array in wanted.items()
    }
    before, most = resident(), 0
    replies = read_replies(job_of(many))
    for name in ("backbone.a", "head.b"):
        for reply in replies.values():
            assert np.isfinite(reply.arrays[name].sum())
            most = max(most, resident() - before)
    assert most < 2 * 4 * NUMBERS + 2**20  # a reply has 4 * NUMBERS


def test_mapped_replies_are_checked_as_ever(files, tmp_path: Path) -> None:
    """A large reply that breaks its form, or is gone, is refused; arrays cannot be written."""
    (reply, *_) = read_replies(job_of(files)).values()
    with pytest.raises(ValueError, match="read-only"):
        reply.arrays["head.b"][0] = 1
    broken = bytearray(files[0].read_bytes())
    broken[-4:] = np.float32(np.nan).tobytes()
    (tmp_path / "broken").write_bytes(broken)
    for bad, error in ((tmp_path / "broken", PayloadError), (tmp_path / "gone", StorageError)):
        with pytest.raises(error):
            read_replies(job_of([files[0], bad]))
    (tmp_path / "broken").write_bytes(files[0].read_bytes()[:-1])
    with pytest.raises(PayloadError):
        read_replies(job_of([tmp_path / "broken"]))


def test_a_mapping_that_can_be_written_is_copied(files, tmp_path: Path) -> None:
    """`Payload`: nobody else can change its arrays."""
    with files[0].open("r+b") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as mapped:
        payload = Payload.from_bytes(mapped, 2**30)
        before = payload.arrays["head.b"].copy()
        mapped[-4:] = b"\0\0\0\0"
        np.testing.assert_array_equal(payload.arrays["head.b"], before)


def test_more_replies_than_open_files(files) -> None:
    """The limit of open files is raised as far as it goes; what is beyond it is read as it is."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (200, hard))
        assert jobs._raise_descriptors(300) == 300 and resource.getrlimit(resource.RLIMIT_NOFILE)[0] == 428
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    window = jobs._Window(1)
    kinds = [isinstance(jobs._read_reply(file, window).arrays, jobs._MappedArrays) for file in files]
    assert kinds == [True, False, False]
