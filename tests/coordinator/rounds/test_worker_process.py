"""The process that stays between jobs: bounded, killable, begun anew. Source: docs/decisions/0034.

The real loop and the real server's half, with a job that says which processes it ran in, or does what its folder says.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from edgefl_coordinator.errors import STOPPED, OperatorError
from edgefl_coordinator.rounds.worker_process import WorkerProcess
from edgefl_protocol.durable import PASSPHRASE_VARIABLE

LOOP = """
import json, os, signal, sys, time
from edgefl_coordinator.rounds.worker_process import do_jobs

seen = []

def job(folder):
    seen.append(folder)
    told = {"pid": os.getpid(), "worker": os.getppid(), "jobs": len(seen)}
    (folder / "told").write_text(json.dumps(told))
    print("0")  # no answer
    if folder.name == "crash":
        os.kill(os.getpid(), signal.SIGKILL)
    if folder.name == "raise":
        raise RuntimeError("this cannot be")
    if folder.name == "hang":
        time.sleep(600)
    return 0

sys.exit(do_jobs(job, float(sys.argv[1])))
"""
SERVER = """
import os, signal, sys
from pathlib import Path
from edgefl_coordinator.rounds.worker_process import WorkerProcess

WorkerProcess((sys.executable, "-c", sys.argv[1], "600"))(Path(sys.argv[2]), 60)
os.kill(os.getpid(), signal.SIGKILL)
"""
LEAVES_ONCE = """
import os, sys

if not os.path.exists(sys.argv[2]):
    os.mkdir(sys.argv[2])
    os._exit(0)
"""


@pytest.fixture
def worker():
    found = WorkerProcess((sys.executable, "-c", LOOP, "600"))
    yield found
    found.stop()


@pytest.fixture
def folder(tmp_path):
    def make(name):
        (tmp_path / name).mkdir()
        return tmp_path / name

    return make


def told(folder: Path) -> dict:
    return json.loads((folder / "told").read_text())


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"


def wait_until(done) -> None:
    end = time.monotonic() + 60
    while not done():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_one_worker_and_a_fresh_process_for_each_job(worker, folder):
    jobs = [folder(name) for name in ("one", "two", "three")]
    for one in jobs:
        worker(one, 60)
    assert len({told(one)["pid"] for one in jobs}) == 3
    assert len({told(one)["worker"] for one in jobs}) == 1
    assert [told(one)["jobs"] for one in jobs] == [1, 1, 1]  # nothing of the one before is left


@pytest.mark.parametrize(("name", "sentence"), [("crash", r"failed \(-9\)"), ("raise", r"\(1\): .*this cannot be")])
def test_a_job_that_crashes_ends_alone(worker, folder, name, sentence):
    worker(folder("before"), 60)
    with pytest.raises(OperatorError, match=sentence):
        worker(folder(name), 60)
    worker(after := folder("after"), 60)
    assert told(after)["worker"] == told(after.with_name("before"))["worker"]


def test_a_job_that_takes_too_long_is_ended(worker, folder):
    worker(folder("before"), 60)
    with pytest.raises(OperatorError, match="was stopped"):
        worker(hung := folder("hang"), 0.5)
    wait_until(lambda: not is_alive(told(hung)["pid"]))
    worker(after := folder("after"), 60)
    assert told(after)["worker"] != told(hung)["worker"]


def test_a_worker_that_was_killed_is_begun_anew(worker, folder):
    """Between two jobs nobody notices; during one the job ends with it, and is told."""
    worker(first := folder("first"), 60)
    os.kill(told(first)["worker"], signal.SIGKILL)
    wait_until(lambda: not is_alive(told(first)["worker"]))
    worker(second := folder("second"), 60)
    assert told(second)["worker"] != told(first)["worker"]
    hung = folder("hang")

    def kill() -> None:
        wait_until((hung / "told").exists)
        wait_until(lambda: (hung / "told").stat().st_size > 0)
        os.kill(told(hung)["worker"], signal.SIGKILL)

    thread = threading.Thread(target=kill)
    thread.start()
    with pytest.raises(OperatorError, match=r"failed \(-9\)"):
        worker(hung, 60)
    thread.join()
    wait_until(lambda: not is_alive(told(hung)["pid"]))


@pytest.mark.slow
def test_a_worker_at_rest_is_begun_anew(folder):
    worker = WorkerProcess((sys.executable, "-c", LOOP, "0.2"))
    jobs = [folder(name) for name in ("one", "two")]
    for one in jobs:
        worker(one, 60)
        wait_until(lambda one=one: not is_alive(told(one)["worker"]))
    assert told(jobs[0])["worker"] != told(jobs[1])["worker"]
    worker.stop()


def test_a_worker_that_goes_to_rest_as_it_is_asked(folder, tmp_path):
    """It ends well without an answer: asked once more, another does the job."""
    worker = WorkerProcess((sys.executable, "-c", LEAVES_ONCE + LOOP, "600", str(tmp_path / "mark")))
    worker(one := folder("one"), 60)
    assert told(one)["jobs"] == 1
    worker.stop()


def test_a_worker_that_cannot_begin_says_why(folder):
    worker = WorkerProcess((sys.executable, "-c", "import no_such_module"))
    with pytest.raises(OperatorError, match=r"failed \(1\): ModuleNotFoundError"):
        worker(folder("one"), 60)
    worker.stop()


def test_a_worker_may_say_much(folder):
    """A library that warns 300 kB long while it is imported stops nothing, and what it said last is what is told."""
    warns = "import sys; sys.stderr.write('x' * 300_000 + '\\n')\n"
    worker = WorkerProcess((sys.executable, "-c", warns + LOOP, "600"))
    worker(one := folder("one"), 60)
    assert told(one)["jobs"] == 1
    worker.stop()
    broken = WorkerProcess((sys.executable, "-c", warns + "import no_such_module"))
    with pytest.raises(OperatorError, match=r"failed \(1\): ModuleNotFoundError"):
        broken(folder("two"), 60)
    broken.stop()


def test_stopped_from_another_thread(worker, folder):
    hung = folder("hang")
    thread = threading.Thread(target=lambda: (wait_until((hung / "told").exists), worker.stop()))
    thread.start()
    with pytest.raises(OperatorError, match="does the job at the next start") as ended:
        worker(hung, 60)
    thread.join()
    assert ended.value.code == STOPPED
    with pytest.raises(OperatorError, match="does the job at the next start"):
        worker(folder("one"), 60)


def test_it_does_not_outlive_the_server(folder):
    """The server is killed: the loop's input ends, and so does the loop."""
    one = folder("one")
    done = subprocess.run([sys.executable, "-c", SERVER, LOOP, str(one)], check=False, timeout=120)
    assert done.returncode == -signal.SIGKILL
    wait_until(lambda: not is_alive(told(one)["worker"]))


def test_a_worker_that_says_something_else_is_ended(folder, tmp_path):
    """A library that prints while it is imported: its line is no job's status, and no job gets the one before's."""
    prints_once = """
import os, sys

if not os.path.exists(sys.argv[2]):
    os.mkdir(sys.argv[2])
    print("welcome", flush=True)
"""
    worker = WorkerProcess((sys.executable, "-c", prints_once + LOOP, "600", str(tmp_path / "begun")))
    try:
        with pytest.raises(OperatorError, match="unexpected answer 'welcome' and was stopped"):
            worker(folder("one"), 60)
        worker(folder("two"), 60)
        assert told(tmp_path / "two")["jobs"] == 1
    finally:
        worker.stop()


def test_the_worker_does_not_inherit_the_passphrase(tmp_path, monkeypatch):
    """It opens no key: docs/security.md 2.6, step 7."""
    monkeypatch.setenv(PASSPHRASE_VARIABLE, "correct horse")
    monkeypatch.setenv("EDGEFL_TEST_OTHER", "stays")
    told = tmp_path / "environment"
    listing = f"import os, sys; open({str(told)!r}, 'w').write(repr(sorted(os.environ)))"
    with pytest.raises(OperatorError):
        WorkerProcess((sys.executable, "-c", listing))(tmp_path, 60)
    assert PASSPHRASE_VARIABLE not in told.read_text() and "EDGEFL_TEST_OTHER" in told.read_text()
