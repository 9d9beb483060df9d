"""What a device measures of itself; when 8-bit graphs run in whole numbers; memory that is given back."""

import math
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgefl_client import memory, runtime
from edgefl_client.doctor import measure as measuring
from edgefl_client.doctor.drawn_picture import camera_photo
from edgefl_client.doctor.measure import measure, medians_in_turn, scoring, table, timed
from edgefl_client.scoring.network import without_graphs
from edgefl_client.scoring.scorer import Scorer
from edgefl_protocol import processor
from edgefl_protocol.pictures import imaging


def ticking(milliseconds):
    """A clock by which the runs take these times, one after the other."""
    marks = iter([mark for taken in milliseconds for mark in (0.0, taken / 1e3)])
    return lambda: next(marks)


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=40))
def test_median_and_95th_percentile(taken):
    """Oracle: numpy's median, and the nearest-rank percentile from its definition."""
    runs = []
    found = timed("x", 2, lambda: runs.append(1), pictures=8, repeats=len(taken), clock=ticking(taken))
    assert len(runs) == len(taken) + 1  # one warm
    assert found.milliseconds == pytest.approx(np.median(taken), abs=0.01)
    rank = math.ceil(0.95 * len(taken))
    assert found.p95_milliseconds == pytest.approx(sorted(taken)[rank - 1], abs=0.01)
    assert found.pictures_per_second == pytest.approx(8e3 / np.median(taken), rel=0.01, abs=0.06)


def test_a_bundle_is_measured_and_shown(plain_bundle):
    """Network alone, one thread, eight at a time, and a photo: figures as JSON and a line each."""
    two, one = (Scorer(plain_bundle, threads=number) for number in (2, 1))
    found = measure(scoring(two), lambda: scoring(one)).to_json()
    assert [row["pictures"] for row in found["rows"]] == [1, 1, 8, 1]
    assert [row["threads"] for row in found["rows"]] == [2, 1, 2, 2]
    assert all(0 < row["milliseconds"] <= row["p95_milliseconds"] for row in found["rows"])
    assert found["precision"] == "fp32" and found["peak_memory_mib"] > 10
    lines = table({**found, "load_average": 0.0})
    assert len(lines) == 5 and all(line.endswith(" ms") for line in lines[1:])
    assert "fp32 bundle" in lines[0] and found["floors"] == []  # this model's only product is with a value


def test_a_busy_machine_is_told():
    """docs/reference/doctor.md: figures taken beside other work are not shown as the device's own."""
    found = {"precision": "fp32", "rows": [], "floors": [], "processors": 2}
    for load, told in ((None, False), (0.9, False), (1.0, False), (1.1, True), (9.2, True)):
        lines = table({**found, "load_average": load})
        assert ("other work was running" in lines[-1]) is told


def test_works_are_timed_in_turn():
    runs = []
    works = (lambda: runs.append("a"), lambda: runs.append("b"))
    found = medians_in_turn(works, repeats=3, clock=ticking([1, 10, 2, 20, 90, 900]))
    assert runs == ["a", "b"] * 4 and found == pytest.approx([2, 20])


@pytest.mark.slow
def test_memory_is_that_of_scoring_a_photo_with_one_model(plain_bundle, monkeypatch):
    """docs/reference/doctor.md: what a second model or a batch takes is no part of the figure, which is read before
    either."""
    scorer, events = Scorer(plain_bundle, threads=1), []
    photo, batch = scorer.score, scorer.score_batch
    monkeypatch.setattr(scorer, "score", lambda data: events.append("photo") or photo(data))

    def counted(rows, *names, **given):
        events.append(f"batch of {len(rows)}")
        return batch(rows, *names, **given)

    monkeypatch.setattr(scorer, "score_batch", counted)
    monkeypatch.setattr(measuring, "peak_memory_mib", lambda: events.append("memory") or 10.0)
    measure(scoring(scorer), lambda: events.append("second model") or scoring(scorer))
    assert [one for one in dict.fromkeys(events) if one != "batch of 1"] == [
        "photo", "memory", "batch of 8", "second model",
    ]  # fmt: skip


def test_the_drawn_photo_has_12_megapixels():
    """4000 × 3000, from its bytes, as a camera gives it."""
    assert imaging.decode(camera_photo()).shape == (3000, 4000, 3)


@pytest.mark.parametrize(
    ("flags", "has"),
    [
        ("fpu avx2 avx512f avx512_vnni", True),
        ("fpu avx2 avx_vnni", True),
        ("fpu avx2 avx512f", False),
        ("fpu avx512_vnni_other", False),
    ],
)
def test_vnni_is_read_from_the_flags(tmp_path, flags, has):
    """The names of the Linux kernel for the two forms of the instructions; a word that only begins so is none."""
    file = tmp_path / "cpuinfo"
    file.write_text(f"processor\t: 0\nmodel name\t: X\nflags\t\t: {flags}\n\nprocessor\t: 1\nflags\t\t: {flags}\n")
    assert processor.has_vnni(str(file)) == has
    assert not processor.has_vnni(str(tmp_path / "none"))


@pytest.mark.parametrize(
    ("machine", "vnni", "exact"),
    [("x86_64", True, True), ("x86_64", False, False), ("AMD64", False, False), ("aarch64", False, True)],
)
def test_whole_numbers_only_where_they_are_exact(monkeypatch, plain_bundle, machine, vnni, exact):
    """docs/decisions/0026: x86 without VNNI saturates, so there 8-bit layers run in float; the score is the same."""
    monkeypatch.setattr(processor.platform, "machine", lambda: machine)
    monkeypatch.setattr(processor, "has_vnni", lambda: vnni)
    assert processor.multiplies_bytes() == exact
    session = runtime.load_graph(plain_bundle.score_onnx, 1)
    options = session.get_session_options()
    if exact:
        with pytest.raises(RuntimeError):
            options.get_session_config_entry("session.disable_quant_qdq")
    else:
        assert options.get_session_config_entry("session.disable_quant_qdq") == "1"


def test_threads_stop_with_the_run(plain_bundle):
    """A thread waits 50 µs at most for its next part, and never between runs; older runtimes do not spin at all."""
    options = runtime.load_graph(plain_bundle.score_onnx, 2).get_session_options()
    if options.get_session_config_entry("session.intra_op.allow_spinning") == "1":
        assert options.get_session_config_entry("session.force_spinning_stop") == "1"
        assert int(options.get_session_config_entry("session.intra_op.spin_duration_us")) <= 50


def test_an_older_runtime_does_not_spin(plain_bundle, monkeypatch):
    """Before 1.31 the time cannot be stated, so threads sleep at once."""
    monkeypatch.setattr(runtime.onnxruntime, "__version__", "1.30.2")
    options = runtime.load_graph(plain_bundle.score_onnx, 2).get_session_options()
    assert options.get_session_config_entry("session.intra_op.allow_spinning") == "0"


def test_a_scorer_needs_no_graphs_afterwards(plain_bundle, lab):
    """Most of a bundle's bytes are its graphs: the scorer gives them back and scores as before."""
    scorer = Scorer(plain_bundle)
    less = without_graphs(plain_bundle)
    assert less.score_onnx == b"" and not less.extras and plain_bundle.score_onnx
    assert less.sha256 == plain_bundle.sha256 and less.weights is plain_bundle.weights
    photo = lab.encoded(lab.photo(60, 40))
    assert scorer.score(photo).probabilities == Scorer(plain_bundle).score(photo).probabilities


_AS_A_CHILD = """
import subprocess, sys
large = b"x" * (300 << 20)
child = "from edgefl_client.memory import peak_memory_mib; print(peak_memory_mib())"
print(subprocess.run([sys.executable, "-c", child], capture_output=True, text=True, check=True).stdout)
"""


@pytest.mark.skipif(not memory.STATUS.exists(), reason="the kernel tells no peak of one program alone")
def test_peak_memory_is_not_that_of_the_program_that_started_us():
    """proc(5), VmHWM; getrusage(2) would tell the 300 MiB of an application that starts `edgefl`."""
    told = subprocess.run([sys.executable, "-c", _AS_A_CHILD], capture_output=True, text=True, check=True).stdout
    assert 5 < float(told) < 200


def test_peak_memory_where_the_kernel_tells_none(tmp_path):
    """Then it is the system's accounting, in its own unit: of a process that holds numpy, tens of MiB."""
    (tmp_path / "status").write_bytes(b"Name:\t\xff\n")
    for status in (tmp_path / "status", tmp_path / "none"):
        assert 20 < memory.peak_memory_mib(status) < 100_000


def test_large_blocks_are_mapped_apart_or_left_alone(monkeypatch):
    """glibc takes the setting; a system without it is left as it is, without an error."""
    assert memory.map_large_blocks_apart() in (True, False)
    monkeypatch.setattr(memory.ctypes, "CDLL", lambda name: object())
    assert memory.map_large_blocks_apart() is False


@given(width=st.integers(1, 70), height=st.integers(1, 70), strip=st.integers(1, 900), seed=st.integers(0, 99))
def test_strips_are_the_picture(width, height, strip, seed):
    """Oracle: numpy.asarray of the whole image, at every size of a strip."""
    from PIL import Image

    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(imaging, "STRIP_PIXELS", strip)
        assert (imaging.flattened(Image.fromarray(pixels)).pixels == pixels).all()
