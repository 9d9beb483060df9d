"""The bundle in use is replaced as a whole, or not at all. Source: docs/security.md 2.8, check 33."""

import itertools
import os
import subprocess
import sys

import pytest

from edgefl_client.home import Home
from edgefl_client.trust import models
from edgefl_protocol.bundle import load_bundle

WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT


class Killed(BaseException):
    """The process is gone: nothing that would tidy up may catch this."""


class Plug:
    """Stops the process at its n-th change of the disk, and lets nothing more through, as kill -9 does.

    Python tells an audit hook each file that is opened for writing, renamed, removed or made, before it happens.
    """

    def __init__(self) -> None:
        self.armed, self.at, self.steps = False, 0, 0
        sys.addaudithook(self.hook)

    def hook(self, event: str, arguments: tuple[object, ...]) -> None:
        if not self.armed or not (
            event in ("os.rename", "os.remove", "os.mkdir", "os.chmod", "os.link", "os.truncate")
            or (event == "open" and isinstance(arguments[2], int) and arguments[2] & WRITING)
        ):
            return
        self.steps += 1
        if self.steps >= self.at:
            raise Killed


@pytest.fixture(scope="module")
def plug():
    return Plug()


@pytest.fixture(scope="module")
def versions(lab):
    """Ten bundles of one line."""
    return [lab.bundle_bytes(version=number) for number in range(1, 11)]


def loaded(lab, data):
    return load_bundle(data, [lab.SIGNER.public], lab.NOW_MS)


def in_use(home: Home, lab) -> int:
    """Version of the bundle that runs, verified whole."""
    archive = models.read_file(home, None)
    return models.open_model(home, archive, [lab.SIGNER.public], lab.NOW_MS).manifest.version


@pytest.mark.parametrize("updates", [2, pytest.param(5, marks=pytest.mark.slow)])
def test_killed_at_every_step_the_old_or_the_new_runs(lab, plug, versions, tmp_path, updates):
    """docs/security.md check 33: every step of 2 and of 5 updates: the old or the new, and the next update goes
    through."""
    kills = 0
    for old, new in itertools.pairwise(versions[: updates + 1]):
        step = 0
        while True:
            step += 1
            home = Home(tmp_path / f"{kills}")
            models.install(home, old, loaded(lab, old))
            before = in_use(home, lab)
            plug.at, plug.steps, plug.armed = step, 0, True
            try:
                models.install(home, new, loaded(lab, new))
            except Killed:
                kills += 1
            else:
                break
            finally:
                plug.armed = False
            assert in_use(home, lab) in (before, before + 1)
            seen = models.last_seen(home)["skin", "main", "all"]
            assert seen in (before, before + 1) and seen >= in_use(home, lab) - 1
            models.install(home, new, loaded(lab, new))
            assert in_use(home, lab) == before + 1
            kept = [path.name for path in home.models.iterdir() if path.suffix == ".edgefl"]
            assert f"{loaded(lab, new).sha256}.edgefl" in kept
        assert in_use(home, lab) == before + 1
    assert kills >= 5 * updates  # file and record each opened and renamed, the old file removed


SWAPPING = """
import os, random, signal, sys, time
from pathlib import Path
from edgefl_client.trust import models
from edgefl_client.home import Home
from edgefl_protocol.bundle import load_bundle

root, public, now_ms, kills = Path(sys.argv[1]), bytes.fromhex(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
files = [path.read_bytes() for path in sorted((root / "bundles").iterdir())]
bundles = [load_bundle(data, [public], now_ms) for data in files]
home = Home(root / "home")
models.install(home, files[0], bundles[0])
draw, seen = random.Random(33), set()
for number in range(kills):
    child = os.fork()
    if child == 0:
        while True:
            for data, bundle in zip(files, bundles):
                models.install(home, data, bundle)
    time.sleep(draw.uniform(0.0, 0.006))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    archive = models.read_file(home, None)
    seen.add(load_bundle(archive, [public], now_ms).manifest.version)
print(len(seen), flush=True)
"""


@pytest.mark.parametrize("kills", [40, pytest.param(200, marks=pytest.mark.slow)])
def test_kills_while_bundles_are_swapped(lab, versions, tmp_path, kills):
    """docs/security.md check 33: 40 and 200 kills -9 of a process that swaps bundles: one whole bundle is always in
    use."""
    (tmp_path / "bundles").mkdir()
    for number, data in enumerate(versions[:4]):
        (tmp_path / "bundles" / f"{number}").write_bytes(data)
    command = [sys.executable, "-c", SWAPPING, str(tmp_path), lab.SIGNER.public.hex(), str(lab.NOW_MS), str(kills)]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 1  # it was killed after different updates


def test_the_test_can_fail(plug, tmp_path):
    """The hook stops a plain write, too."""
    plug.at, plug.steps, plug.armed = 1, 0, True
    try:
        with pytest.raises(Killed):
            (tmp_path / "x").write_bytes(b"x")
    finally:
        plug.armed = False
    assert not (tmp_path / "x").exists()
