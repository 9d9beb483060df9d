"""Everything that the pages show is executed, in order, as a reader would. Source: docs/design.md 5.

A `console` block holds commands behind "$ ", and sometimes what they print. `# fails: words` says that a command ends
with an error and what it says. `&` starts a server that lives to the end of the page, or a device that waits for its
approval: its output is read as far as the page shows it, and after the operator's `approve` it must end well.
"""

import csv
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from PIL import Image
from tests.forks import COMMANDS, Forks
from tests.shared import Shared
from tests.trainer.conftest import make_asked, make_slake

from edgefl_trainer.data.lesions import draw_lesion

pytestmark = pytest.mark.slow

BLOCK = re.compile(r"^```(console|python)\n(.*?)^```", re.M | re.S)
FINGERPRINT = re.compile(r"\b[0-9A-HJKMNP-TV-Z]{20}\b")
ROOT = Path(__file__).resolve().parents[2]
ELSEWHERE = {
    "docs/guides/papers-tables.md",  # tests/trainer/experiments/test_page.py
    "docs/guides/own-address.md",  # tests/house/test_own_address.py
}
LONG = {"docs/guides/federation.md", "docs/guides/device.md"}
PATIENCE_S = 90
AS_VQA_RAD = {  # drawn pictures are asked what VQA-RAD's sites are
    "what colour is it": "Is there a pleural effusion?",
    "is it red": "Is the heart enlarged?",
    "is it green": "Is there a pneumothorax?",
    "is it blue": "Is the trachea midline?",
}
SHELL = set("|&;<>$`*?#\n")  # what only a shell does


def pages_with_commands() -> list[str]:
    """Every page of the guides and the reference that shows a command or a program."""
    found = [page for part in ("guides", "reference") for page in sorted((ROOT / "docs" / part).glob("*.md"))]
    names = [str(page.relative_to(ROOT)) for page in found if BLOCK.search(page.read_text(encoding="utf-8"))]
    return [name for name in names if name not in ELSEWHERE]


class Reader:
    """Somebody who types a page's commands in one folder."""

    def __init__(self, folder: Path, environment: Mapping[str, str], forks: Forks) -> None:
        self.folder, self.forks = folder, forks
        self.environment = {**environment, "HOME": str(folder), "EDGEFL_CACHE": str(folder.parent / "cache")}
        self.port = _free_port()
        self.replaced: dict[str, str] = {}  # a value of the page → the one of this run
        self.servers: list[subprocess.Popen[bytes]] = []
        self.waiting: list[subprocess.Popen[bytes]] = []

    def read(self, page: Path) -> int:
        """Do what the page says; the number of commands."""
        count = 0
        for kind, body in BLOCK.findall(page.read_text(encoding="utf-8")):
            if kind == "python":
                self._check([sys.executable, "-c", body], body, "")
                continue
            for command, shown in _commands(body):
                self._type(command, shown)
                count += 1
        return count

    def close(self) -> None:
        """Stop the servers, and what still waits."""
        for server in [*self.waiting, *self.servers]:
            os.killpg(server.pid, signal.SIGTERM)
            server.wait(timeout=30)

    def _type(self, command: str, shown: str) -> None:
        for value, real in self.replaced.items():
            command = command.replace(value, real)
        command, _, wanted = (part.strip() for part in command.partition("# fails:"))
        if "edgefl-coordinator init" in command:
            command = f"{command.partition(' --port ')[0]} --port {self.port} {_after_port(command)}"
        if command.endswith("&") and " serve " in command:
            self._serve(command.removesuffix("&"))
            return
        if command.endswith("&"):
            printed = self._begin(command.removesuffix("&"))
        else:
            printed = self._check(["bash", "-c", command], command, wanted)
        if "edgefl-coordinator approve" in command:
            while self.waiting:
                assert self.waiting[0].wait(timeout=PATIENCE_S) == 0, (self.folder / "waiting.log").read_text()
                ended = self.waiting.pop(0)
                if ended.stdout:
                    ended.stdout.close()
        for value, real in zip(FINGERPRINT.findall(shown), FINGERPRINT.findall(printed), strict=bool(shown)):
            self.replaced[value] = real

    def _check(self, words: list[str], command: str, wanted: str) -> str:
        if not SHELL & set(command) and command.split()[0] in COMMANDS:
            done = self.forks.run(shlex.split(command), self.folder, self.environment)
        else:
            done = subprocess.run(
                words,
                cwd=self.folder,
                env=self.environment,
                capture_output=True,
                text=True,
                check=False,
                stdin=subprocess.DEVNULL,
                timeout=1200,
            )
        said = f"{command}\n{done.stdout}{done.stderr}"
        assert (done.returncode != 0) is bool(wanted), said
        assert wanted in done.stderr and "Traceback" not in done.stderr, said
        return done.stdout

    def _begin(self, command: str) -> str:
        """Start a command that waits for something; what it prints first."""
        log = (self.folder / "waiting.log").open("wb")
        words = ["bash", "-c", f"exec {command}"]
        started = subprocess.Popen(
            words, cwd=self.folder, env=self.environment, stdout=subprocess.PIPE, stderr=log, start_new_session=True
        )
        log.close()
        self.waiting.append(started)
        assert started.stdout
        return started.stdout.readline().decode()

    def _serve(self, command: str) -> None:
        log = (self.folder / "server.log").open("wb")
        words = ["bash", "-c", f"exec {command}"]
        server = subprocess.Popen(
            words, cwd=self.folder, env=self.environment, stdout=log, stderr=log, start_new_session=True
        )
        log.close()
        self.servers.append(server)
        end = time.monotonic() + PATIENCE_S
        while not any(self.folder.rglob("*.sock")):
            text = (self.folder / "server.log").read_text()
            assert server.poll() is None and time.monotonic() < end, f"{command} did not start:\n{text}"
            time.sleep(0.2)


def _commands(body: str) -> Iterator[tuple[str, str]]:
    """Each command of a block with the output shown below it."""
    for part in re.split(r"^\$ ", body, flags=re.M)[1:]:
        command, _, shown = part.partition("\n")
        yield command, shown.strip()


def _after_port(command: str) -> str:
    found = re.search(r" --port \d+ ?(.*)$", command)
    return found[1] if found else ""


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _own_files(folder: Path) -> None:
    """What the pages call yours: a photo, a table of labelled pictures, one to learn from, and questions."""
    drawn = Image.fromarray(draw_lesion("MEL", site=0, number=7, px=256)[0])
    drawn.resize((640, 480)).save(folder / "photo.jpg", quality=90)
    with (folder / "labels.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["image", "label"])
        for number, label in enumerate(("NV", "MEL", "BKL", "BCC")):
            Image.fromarray(draw_lesion(label, site=1, number=number, px=128)[0]).save(folder / f"own-{label}.png")
            rows.writerow([f"own-{label}.png", label])
    (folder / "own").mkdir()
    with (folder / "own/labels.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["image", "label", "lesion_id"])
        for label in ("MEL", "NV"):
            for number in range(27):
                Image.fromarray(draw_lesion(label, site=1, number=number, px=64)[0]).save(
                    folder / f"own/{label}{number}.png"
                )
                rows.writerow([f"{label}{number}.png", label, f"{label}-{number}"])
    asked = make_asked(folder / "vqa_rad", {"HEAD": 24, "CHEST": 48, "ABD": 24}, words=AS_VQA_RAD)
    shutil.copy(next((asked / "images").glob("chest-*.png")), folder / "chest.png")
    shutil.make_archive(str(asked), "zip", asked)
    make_slake(folder / "Slake1.0", dict.fromkeys(("Lung", "Abdomen", "Brain", "Pelvic Cavity", "Neck"), 6), test=3)
    with zipfile.ZipFile(folder / "withheld.zip", "w") as archive:
        archive.writestr("testset.json", json.dumps(json.loads((asked / "trainset.json").read_text())[:9]))


@pytest.fixture(scope="module")
def readme(root: Path, environment, forks: Forks, shared: Shared) -> Path:
    """The folder of somebody who followed the README, once for all pages."""

    def follow(folder: Path) -> None:
        _own_files(folder)
        reader = Reader(folder, environment, forks)
        try:
            assert reader.read(root / "README.md") >= 10
        finally:
            reader.close()

    return shared.made("reader-of-readme", follow)


def test_readme(readme: Path) -> None:
    """Every quick start of the README works as printed, one after the other."""
    assert (readme / "heatmaps").is_dir() and list((readme / "heatmaps").glob("*.png"))
    assert (readme / "runs/uniform/summary.json").is_file()


@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=[pytest.mark.long] if page in LONG else []) for page in pages_with_commands()]
)
def test_page(page: str, readme: Path, root: Path, environment, forks: Forks) -> None:
    """A page works for whoever has followed the README."""
    folder = readme.parent / page.removesuffix(".md").replace("/", "-")
    folder.mkdir()
    for name in ("runs/first", "runs/alone", "signer", "own", "Slake1.0"):
        shutil.copytree(readme / name, folder / name)
    photos = [*readme.glob("*.png"), readme / "photo.jpg"]
    for file in [readme / "first.edgefl", *photos, readme / "labels.csv", *readme.glob("*.zip")]:
        shutil.copy(file, folder)
    reader = Reader(folder, environment, forks)
    try:
        assert reader.read(root / page) >= 1
    finally:
        reader.close()
