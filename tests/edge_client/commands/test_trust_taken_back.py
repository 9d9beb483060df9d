"""Commands at work while the trust in their bundle ends: they end as `edgefl score` does, before the next picture.

Nothing on the device keeps a revocation from it. Source: docs/security.md 2.6.5 and check 24, "a revoked signer counts
nowhere, also not for the bundle in use"; docs/guides/device.md, "Watch a folder that a camera fills";
docs/reference/scores.md, exit codes.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.edge_client.commands.test_bad_input import offered

from edgefl_client.commands import score_text
from edgefl_client.home import Home
from edgefl_client.scoring import watched_folder
from edgefl_client.sharing import sync
from edgefl_client.trust.trusted_keys import remove_trusted
from edgefl_protocol import Payload, SigningKey
from edgefl_protocol.envelopes.keys import PublicSigningKey
from edgefl_protocol.errors import StorageError

OTHER = SigningKey(b"o" * 32)
PICTURES = 5


@pytest.fixture
def ward(run, lab, tmp_path):
    """A bundle in use whose signer was added by hand, and a folder that a camera fills."""
    (tmp_path / "model.edgefl").write_bytes(lab.bundle_bytes())
    assert run("use", tmp_path / "model.edgefl", "--trust", lab.SIGNER.public.hex())[0] == 0
    fill(tmp_path / "drop", lab, PICTURES)
    return tmp_path


def fill(folder: Path, lab, pictures: int, first: int = 0) -> None:
    folder.mkdir(exist_ok=True)
    for number in range(first, first + pictures):
        (folder / f"{number}.png").write_bytes(lab.encoded(lab.photo(60, 40)))


def scored(path: Path) -> list[str]:
    lines = path.read_text().splitlines() if path.exists() else []
    return [Path(json.loads(line)["image"]).name for line in lines]


def said_by_score(run, folder: Path, code: int) -> str:
    """The one sentence with which `edgefl score` refuses now."""
    found, out, err = run("score", folder / "drop" / "0.png")
    assert (found, out, len(err.splitlines())) == (code, "", 1), err
    return err.strip()


class Watching:
    """A real `edgefl watch` in a process of its own."""

    def __init__(self, out: Path) -> None:
        self.out = out
        words = ["watch", "drop", "--out", str(out), "--interval", "0.1", "--threads", "1"]
        code = "from edgefl_client.cli import main; main()"
        self.process = subprocess.Popen([sys.executable, "-c", code, *words], stderr=subprocess.PIPE, text=True)

    def until(self, lines: int) -> None:
        """Wait until so many pictures are scored."""
        end = time.monotonic() + 60
        while len(scored(self.out)) < lines:
            assert time.monotonic() < end and self.process.poll() is None, self.process.communicate()[1]
            time.sleep(0.02)

    def ended(self) -> tuple[int, str]:
        """Wait until it has ended: exit code and the last line of standard error."""
        err = self.process.communicate(timeout=60)[1]
        assert "Traceback" not in err
        return self.process.returncode, err.splitlines()[-1]


@pytest.fixture
def watching(request, tmp_path):
    started = []

    def start() -> Watching:
        started.append(Watching(tmp_path / "scores.jsonl"))
        return started[-1]

    yield start
    for one in started:
        one.process.kill()
        one.process.communicate()


def test_a_watch_ends_once_its_signer_is_removed(run, ward, lab, watching):
    """What comes afterwards is scored by the next watch, each picture once."""
    process = watching()
    process.until(PICTURES)
    assert run("trust", "remove", lab.SIGNER.key_id)[0] == 0
    fill(ward / "drop", lab, 2, first=PICTURES)
    assert process.ended() == (3, said_by_score(run, ward, 3))
    assert len(scored(process.out)) == PICTURES
    assert run("watch", "drop", "--once", "--out", process.out, "--interval", "0.1")[0] == 3
    assert run("trust", "add", lab.SIGNER.public.hex())[0] == 0
    assert run("watch", "drop", "--once", "--out", process.out, "--interval", "0.1")[0] == 0
    assert sorted(scored(process.out)) == [f"{number}.png" for number in range(PICTURES + 2)]


def test_a_watch_ends_once_sync_brings_a_revocation(run, device, live, lab, watching):
    """docs/security.md check 24: the list that another process fetched; also where no picture comes."""
    assert run("pull")[0] == 0
    fill(device / "drop", lab, PICTURES)
    process = watching()
    process.until(PICTURES)
    assert run("sync")[0] == 0  # a list that names nobody
    fill(device / "drop", lab, 1, first=PICTURES)
    process.until(PICTURES + 1)
    live.revoked = [lab.SIGNER.key_id]
    del live.bundles["main", "all", 1]
    assert run("sync")[0] == 3
    sentence = said_by_score(run, device, 3)
    assert process.ended() == (3, sentence) and "revoked" in sentence
    assert len(scored(process.out)) == PICTURES + 1
    (device / "carried.edgefl").write_bytes(lab.bundle_bytes())
    named = ("--model", device / "carried.edgefl", "--trust", lab.SIGNER.public.hex())
    assert run("watch", "drop", "--once", *named)[0] == 3


def full(*_: object) -> None:
    raise StorageError("cannot write the broadcast: the disk is full", "disk_full")


@pytest.mark.parametrize(
    ("stop", "code", "words"),
    [
        ("policy", 3, "cannot read the policy"),
        ("memory", 1, "half of its memory"),
        ("disk", 1, "the disk is full"),
        ("outbox", 1, "is damaged"),
    ],
)
def test_nothing_here_keeps_bundle_and_revocation_away(run, device, live, lab, monkeypatch, stop, code, words):
    """docs/guides/federation.md: both come with the next `sync`. It ended before it asked for them."""
    assert run("pull")[0] == 0
    live.broadcasts[1] = offered(2**20) if stop == "memory" else Payload({}, {"round": 1})
    monkeypatch.setattr("edgefl_exchange.member.memory_bytes", lambda: 2**20)
    if stop == "policy":
        (run.home / "policy.toml").write_text("format = 1\n[limits]\nrounds_per_dya = 3\n")
    elif stop == "disk":
        monkeypatch.setattr(sync, "keep_broadcast", full)
    elif stop == "outbox":
        (run.home / "outbox.sqlite3").write_bytes(b"no database" * 999)
    live.bundles["main", "all", 2] = lab.bundle_bytes(version=2)
    found, _, err = run("sync")
    assert found == code and words in err and err.count("edgefl: ") == 1
    assert json.loads(run("score", device / "0.png", "--json")[1])["model"]["version"] == 2
    live.revoked = [lab.SIGNER.key_id]
    live.bundles.clear()
    assert run("sync")[0] in (1, 3)
    assert "revoked" in said_by_score(run, device, 3)


def test_a_watch_goes_on_while_its_signer_counts(run, ward, lab, watching):
    """Another signer comes and goes, and a newer bundle comes into use: that is used after a restart."""
    process = watching()
    process.until(PICTURES)
    assert run("trust", "add", OTHER.public.hex(), "--name", "other")[0] == 0
    (ward / "newer.edgefl").write_bytes(lab.bundle_bytes(version=2))
    assert run("use", ward / "newer.edgefl")[0] == 0
    assert run("trust", "remove", "other")[0] == 0
    fill(ward / "drop", lab, 1, first=PICTURES)
    process.until(PICTURES + 1)
    process.process.send_signal(signal.SIGTERM)
    assert process.ended()[0] == 0
    versions = [json.loads(line)["model"]["version"] for line in process.out.read_text().splitlines()]
    assert versions == [1] * (PICTURES + 1)


def unreachable(home: Path) -> None:
    """Rights that are gone; to root, whom no rights keep out, a link that leads nowhere else."""
    if os.geteuid() == 0:
        (home / "member").symlink_to("member")
    else:
        home.chmod(0)


def no_file(home: Path) -> None:
    """A folder where the list of trusted signers was."""
    (home / "trust.json").unlink()
    (home / "trust.json").mkdir()


@pytest.mark.parametrize("spoil", [unreachable, no_file])
def test_a_watch_ends_where_it_cannot_read_whom_to_trust(run, ward, lab, watching, spoil):
    """Nobody may say that a signer still counts: one sentence, that of `edgefl score`, and no score."""
    process = watching()
    process.until(PICTURES)
    spoil(run.home)
    fill(ward / "drop", lab, 1, first=PICTURES)
    try:
        sentence = said_by_score(run, ward, 1)
        assert process.ended() == (1, sentence) and str(run.home) in sentence
    finally:
        run.home.chmod(0o700)
    assert len(scored(process.out)) == PICTURES


@pytest.mark.parametrize("signers", [("signer",), ("signer", "other")])
def test_no_further_picture_of_a_batch_is_scored(run, ward, lab, after, signers):
    """In the middle of five pictures: the two that were written stay, the next watch scores the other three."""
    if "other" in signers:
        run("trust", "add", OTHER.public.hex())
    after(2, watched_folder, "write_line", lambda: remove_trusted(Home(run.home), lab.SIGNER.key_id))
    out = ward / "scores.jsonl"
    code, _, err = run("watch", "drop", "--once", "--out", out, "--interval", "0.1")
    assert (code, scored(out)) == (3, ["0.png", "1.png"])
    assert err.splitlines()[-1] == said_by_score(run, ward, 3)
    assert run("trust", "add", lab.SIGNER.public.hex())[0] == 0
    assert run("watch", "drop", "--once", "--out", out, "--interval", "0.1")[0] == 0
    assert scored(out) == [f"{number}.png" for number in range(PICTURES)]


def test_what_did_not_change_is_not_verified_for_each_picture(run, ward, lab, after, monkeypatch):
    """As many signatures are verified for one picture as for five; and once more after a change."""
    made: list[bytes] = []
    real = PublicSigningKey.verify

    def verify(key, signature, *rest):
        made.append(signature)
        real(key, signature, *rest)

    monkeypatch.setattr(PublicSigningKey, "verify", verify)

    def verified(*more: int) -> int:
        made.clear()
        fill(ward / "drop", lab, 1 + sum(more), first=100 * (1 + sum(more)))
        code, out, _ = run("watch", "drop", "--once", "--interval", "0.1")
        assert code == 0
        assert len(out.splitlines()) == 1 + sum(more)
        return len(made)

    assert run("watch", "drop", "--once", "--interval", "0.1")[0] == 0
    one = verified()
    assert 1 <= one <= 2 and verified(4) == one
    after(2, score_text, "json_line", lambda: run.home.joinpath("trust.json").touch())
    assert verified(5) == one + 1


def test_score_ends_before_the_next_batch(run, ward, lab, after):
    """The lines that were printed stand; the last line is the sentence of a call that comes now."""
    after(2, score_text, "json_line", lambda: remove_trusted(Home(run.home), lab.SIGNER.key_id))
    code, out, err = run("score", "drop", "--json", "--batch", 2)
    assert (code, len(out.splitlines())) == (3, 2)
    assert err.splitlines()[-1] == said_by_score(run, ward, 3)
