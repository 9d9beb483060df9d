"""Keys at rest and sequence numbers that are never used twice."""

import hmac
import subprocess
import sys

import pytest

from edgefl_exchange.errors import ExchangeError, OutboxError
from edgefl_exchange.identity import BLOCK, Identity, create_identity, remove_identity
from edgefl_exchange.outbox import Outbox
from edgefl_protocol.errors import KeyMaterialError, StorageError


@pytest.fixture
def keys(tmp_path):
    folder = tmp_path / "keys"
    folder.mkdir(mode=0o700)
    create_identity(folder, suite=1)
    return folder


def test_numbers_never_repeat_over_reopening(keys):
    """docs/security.md, idempotency: reserved in blocks of 256 on disk, so a crash never reuses a number."""
    seen = []
    for rounds in (3, BLOCK + 5, 1):
        with Identity(keys) as identity:
            seen += [identity.next_sequence() for _ in range(rounds)]
    assert len(set(seen)) == len(seen)
    assert seen == sorted(seen)
    assert min(seen) >= 1


CRASH = """
import os, sys
from pathlib import Path
from edgefl_exchange.identity import Identity
identity = Identity(Path(sys.argv[1]))
for _ in range(int(sys.argv[2])):
    print(identity.next_sequence(), flush=True)
os.kill(os.getpid(), 9)
"""


def test_numbers_never_repeat_over_a_kill(keys):
    """docs/security.md, check 56: SIGKILL between two sends; the lock goes with the process."""
    seen = []
    for count in (1, 300):
        done = subprocess.run([sys.executable, "-c", CRASH, str(keys), str(count)], capture_output=True, text=True)
        assert done.returncode == -9
        seen += [int(line) for line in done.stdout.split()]
    assert len(seen) == 301
    assert len(set(seen)) == 301


def test_jump_goes_above_and_is_bounded(keys):
    """docs/security.md, idempotency: highest + 256; jumps above 2^32 are refused."""
    with Identity(keys) as identity:
        assert identity.next_sequence() == 1
        identity.jump_above(10_000)
        assert identity.next_sequence() == 10_000 + BLOCK
        identity.jump_above(50)  # never back
        assert identity.next_sequence() > 10_000 + BLOCK
        with pytest.raises(ExchangeError) as error:
            identity.jump_above(2**33 + 20_000)
        assert error.value.code == "seq_jump"
        with pytest.raises(ExchangeError):
            identity.jump_above(2**53)
    with Identity(keys) as identity:
        assert identity.next_sequence() > 10_000 + BLOCK


@pytest.mark.parametrize("content", [b"", b"x", b"-5", b"0", b"9" * 20, b"1e9", b"\xff"])
def test_a_damaged_sequence_file_is_refused(keys, content):
    """docs/security.md, check 60: never a wrong number."""
    with Identity(keys) as identity:
        identity.next_sequence()
    (path,) = keys.glob("sequence-*")
    path.write_bytes(content)
    with Identity(keys) as identity, pytest.raises(StorageError):
        identity.next_sequence()


def test_passphrase_protects_both_keys(tmp_path):
    """docs/security.md, keys at rest."""
    tmp_path.chmod(0o700)
    create_identity(tmp_path, suite=2, passphrase=b"correct horse")
    with pytest.raises(KeyMaterialError, match="passphrase"):
        Identity(tmp_path)
    with pytest.raises(KeyMaterialError, match="passphrase"):
        Identity(tmp_path, b"wrong")
    with Identity(tmp_path, b"correct horse") as identity:
        assert identity.sealing.suite == 2


def test_creating_again_keeps_keys_and_removing_forgets_them(keys):
    before = {path.name: path.read_bytes() for path in keys.glob("*.key")}
    create_identity(keys, suite=1)
    assert {path.name: path.read_bytes() for path in keys.glob("*.key")} == before
    remove_identity(keys)
    with pytest.raises(StorageError):
        Identity(keys)
    create_identity(keys, suite=1)
    assert {path.name: path.read_bytes() for path in keys.glob("*.key")} != before


def test_the_outbox_opens_with_the_passphrase_only(tmp_path):
    """docs/security.md 2.6, keys at rest: nothing on a stolen disk opens the outbox while keys are encrypted."""
    folder = tmp_path / "member"
    folder.mkdir(mode=0o700)
    create_identity(folder, suite=2, passphrase=b"correct horse")
    with Identity(folder, b"correct horse") as identity:
        key, secret = identity.outbox_key, identity.sealing.secret
    with Outbox(tmp_path / "outbox.sqlite3", key) as outbox:
        outbox.put("skin", "reply", b"the canary in the outbox", 1_790_000_000_000)
    on_disk = {path.name: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert b"canary" not in b"".join(on_disk.values())
    for name, data in on_disk.items():
        assert key not in data and key.hex().encode() not in data and secret not in data, name
    with pytest.raises(KeyMaterialError, match="passphrase"):
        Identity(folder)
    with (
        Identity(folder, b"correct horse") as identity,
        Outbox(tmp_path / "outbox.sqlite3", identity.outbox_key) as own,
    ):
        assert [item.payload for item in own.items("skin")] == [b"the canary in the outbox"]


def test_the_outbox_key_is_hkdf_of_the_sealing_secret(keys):
    """RFC 5869 by hand: extract with a salt of zeros, expand once with our label; another member has another key."""
    with Identity(keys) as identity:
        extracted = hmac.digest(bytes(32), identity.sealing.secret, "sha256")
        assert identity.outbox_key == hmac.digest(extracted, b"eflo1/outbox" + b"\x01", "sha256")
        assert identity.outbox_key != identity.sealing.secret
    assert sorted(path.name for path in keys.iterdir()) == ["lock", "sealing.key", "signing.key"]


def test_an_outbox_of_other_keys_is_one_sentence(tmp_path, keys):
    """docs/design.md, section 5: what was found and what to do, where the keys were replaced under an outbox."""
    with Identity(keys) as identity, Outbox(tmp_path / "outbox.sqlite3", identity.outbox_key) as outbox:
        outbox.put("skin", "reply", b"work", 1_790_000_000_000)
    remove_identity(keys)
    create_identity(keys, suite=1)
    with (
        Identity(keys) as identity,
        Outbox(tmp_path / "outbox.sqlite3", identity.outbox_key) as outbox,
        pytest.raises(OutboxError, match=r"other keys.*move the file away and contribute again") as refused,
    ):
        outbox.items("skin")
    assert refused.value.code == "outbox_damaged"
