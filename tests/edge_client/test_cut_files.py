"""Every file of a device's home, cut. Source: docs/security.md, reliability table (partial write), check 60."""

import shutil
import time

import numpy as np
import pytest

from edgefl_client.home import Home
from edgefl_client.scoring.checked_file import read_checked, write_checked
from edgefl_client.scoring.personal import kept_personal
from edgefl_client.sharing.policy import load_policy
from edgefl_client.sharing.spending import read_spent
from edgefl_client.trust import models
from edgefl_client.trust.trusted_keys import list_trusted
from edgefl_exchange.identity import BLOCK, Identity, SequenceNumbers
from edgefl_exchange.membership import load_membership, load_task
from edgefl_exchange.outbox import Outbox
from edgefl_exchange.tls import tls_context
from edgefl_exchange.trust_records import load_revoked, load_root
from edgefl_protocol import Payload
from edgefl_protocol.durable import read_bounded
from edgefl_protocol.errors import EdgeflError


@pytest.fixture
def full(run, device, live, lab):
    """A home that holds every kind of state file, and what each says."""
    live.bundles["main", "all", 1] = lab.bundle_bytes()
    peers = {f"maps.{peer}.0": np.ones((2, 36), np.float16) for peer in range(3)}
    live.broadcasts[1] = Payload(peers, {"phase": "train", "round": 1, "rounds": 5})
    assert run("pull")[0] == 0
    assert run("contribute", "--labels", device / "labels.csv")[0] == 0
    assert run("sync")[0] == 0
    assert run("rotate")[0] == 0
    assert run("contribute", "--labels", device / "labels.csv")[0] == 0  # one item waits
    return Home(run.home)


def keys_of(home):
    with Identity(home.member) as identity:
        return identity.signing.key_id, identity.sealing.key_id, identity.outbox_key


def waiting(home):
    with Identity(home.member) as identity, Outbox(home.outbox_file, identity.outbox_key) as outbox:
        return [(item.idem, item.payload) for item in outbox.items("skin")]


def version_in_use(home):
    archive = models.read_file(home, None)
    return models.open_model(home, archive, [], time.time_ns() // 1_000_000).manifest.version


NOW_MS = time.time_ns() // 1_000_000
READERS = {
    "trust.json": lambda home: [one.to_json() for one in list_trusted(home)],
    "current.json": lambda home: (models.last_seen(home), models.current_file(home)),
    "models/*.edgefl": version_in_use,
    "member/membership.json": lambda home: load_membership(home.member),
    "member/task.payload": lambda home: load_task(home.member),
    "member/signing.key": keys_of,
    "member/sealing.key": keys_of,
    "member/outbox.key": keys_of,
    "member/revoked.record": lambda home: load_revoked(home.member),
    "broadcasts/*.payload": lambda home: Payload.from_bytes(read_bounded(next(home.broadcasts.iterdir()), 2**26)),
    "outbox.sqlite3": waiting,
    "spent.json": lambda home: read_spent(home, NOW_MS),
}


def cut_everywhere(home, pattern):
    (path,) = home.root.glob(pattern)
    read, data = READERS[pattern], path.read_bytes()
    expected = read(home)
    assert expected, pattern
    cuts = range(0, len(data), 64)
    refused = 0
    for cut in cuts:
        path.write_bytes(data[:cut])
        try:
            found = read(home)
        except EdgeflError as error:
            refused += 1
            assert len(str(error).splitlines()) == 1
        else:
            assert found == expected or (pattern == "outbox.sqlite3" and cut == 0 and found == []), (pattern, cut)
    # A database may be read without its last page where nothing that is asked for lies in it.
    assert refused >= (len(cuts) // 2 if pattern == "outbox.sqlite3" else len(cuts)), pattern
    path.write_bytes(data)
    assert read(home) == expected, pattern


def test_each_file_cut_at_every_64th_byte(full):
    """docs/security.md check 60: every 64th byte of each file of a device's home: what it said, or one typed sentence.

    The outbox is a database: cut to nothing it is a new one, which holds nothing and says nothing wrong.
    """
    for pattern in READERS:
        cut_everywhere(full, pattern)


def test_every_file_of_the_home_is_in_the_table(full):
    """The table cannot fall behind: a file that no pattern names is locked, counted or tested by its own module."""
    named = {path for pattern in READERS for path in full.root.glob(pattern)}
    others = {str(path.relative_to(full.root)) for path in full.root.rglob("*") if path.is_file()} - {
        str(path.relative_to(full.root)) for path in named
    }
    sequences = {name for name in others if name.startswith("member/sequence-")}
    assert len(sequences) == 1  # of the key that counts or of the one before; the new one has sent nothing yet
    assert others - sequences <= {"member/lock", "policy.toml"}


@pytest.mark.parametrize("number", [9, 257, 12_800, 2**40])
def test_a_sequence_number_cut_at_every_byte(tmp_path, number):
    """docs/security.md check 60: the first digits of a number are a lower number, which was used: never taken."""
    path = tmp_path / f"sequence-{'a' * 16}"
    data = f"{number}\n".encode()
    for cut in range(len(data) + 1):
        path.write_bytes(data[:cut])
        path.chmod(0o600)
        numbers = SequenceNumbers(tmp_path, "a" * 64, lambda: True)
        if cut == len(data):
            assert numbers.following() == number
            assert path.read_text() == f"{number + BLOCK}\n"
        else:
            with pytest.raises(EdgeflError, match="damaged"):
                numbers.following()


def test_learned_values_cut_at_every_64th_byte(tmp_path):
    """docs/security.md check 60: checkpoints and personal values end with their SHA-256: whole, or one sentence."""
    content = Payload({"head.weight": np.arange(60, dtype=np.float32).reshape(3, 20)}, {"round": 3})
    write_checked(tmp_path / "values", content)
    data = (tmp_path / "values").read_bytes()
    for cut in range(0, len(data), 64):
        (tmp_path / "values").write_bytes(data[:cut])
        with pytest.raises(EdgeflError):
            read_checked(tmp_path / "values")
    (tmp_path / "values").write_bytes(data)
    assert read_checked(tmp_path / "values") == content


def test_what_is_not_there_is_nothing_wrong(full):
    """Each file removed: what a home without it says, or one sentence; no traceback, no other file invented."""
    for pattern, read in READERS.items():
        (path,) = full.root.glob(pattern)
        aside = path.with_name("aside")
        shutil.move(path, aside)
        try:
            read(full)
        except EdgeflError as error:
            assert len(str(error).splitlines()) == 1
        except StopIteration:
            assert pattern.startswith("broadcasts")
        finally:
            path.unlink(missing_ok=True)
            shutil.move(aside, path)
    assert (kept_personal(full), load_root(full.member)) == (None, None)
    assert load_policy(full) and tls_context(None)
