"""What a device remembers of its bundles: `current.json` in exactly its form, or a refusal in one sentence."""

import hashlib
import json

import pytest

from edgefl_client.home import Home
from edgefl_client.trust import models
from edgefl_protocol.bundle import load_bundle
from edgefl_protocol.errors import BundleError, StorageError


@pytest.fixture
def home(tmp_path, lab):
    """A home whose bundle in use is version 2."""
    home = Home(tmp_path / "home")
    data = lab.bundle_bytes(version=2)
    models.install(home, data, load_bundle(data, [lab.SIGNER.public], lab.NOW_MS))
    return home


def seen_with(**changes):
    return [{"federation": "skin", "line": "main", "task": "all", "version": 2, **changes}]


DAMAGE = [
    {},
    {"format": 1},
    {"format": 2, "current": "0" * 64, "seen": seen_with()},
    {"format": 1, "current": "0" * 64, "seen": []},
    {"format": 1, "current": "../../etc/passwd", "seen": seen_with()},
    {"format": 1, "current": 7, "seen": seen_with()},
    {"format": 1, "current": "0" * 64, "seen": {}},
    {"format": 1, "current": "0" * 64, "seen": [3]},
    {"format": 1, "current": "0" * 64, "seen": [{"federation": "skin"}]},
    {"format": 1, "current": "0" * 64, "seen": seen_with(version="2")},
    {"format": 1, "current": "0" * 64, "seen": seen_with(version=True)},
    {"format": 1, "current": "0" * 64, "seen": seen_with(version=0)},
    {"format": 1, "current": "0" * 64, "seen": seen_with(line=None)},
    {"format": 1, "current": "0" * 64, "seen": seen_with() + seen_with(version=1)},
    {"format": 1, "current": "0" * 64, "seen": seen_with(), "more": 1},
]


@pytest.mark.parametrize("value", DAMAGE)
def test_a_damaged_record_is_one_sentence_and_never_no_protection(home, lab, value):
    """docs/security.md, check 26: no form of the file lets a device forget which versions it saw."""
    archive = models.read_file(home, None)
    home.current_file.write_text(json.dumps(value))
    for use in (
        models.last_seen,
        models.current_file,
        lambda home: models.read_file(home, None),
        lambda home: models.open_model(home, archive, [lab.SIGNER.public], lab.NOW_MS),
    ):
        with pytest.raises(StorageError) as error:
            use(home)
        assert error.value.code == "damaged"


def test_a_record_that_says_two_things_is_damaged(home):
    """RFC 8259, section 4: what a second value of a name means is anybody's guess; here it would forget a version."""
    whole = json.dumps({"format": 1, "current": "0" * 64, "seen": seen_with()})
    for text in (f'{whole[:-1]}, "seen": []}}', whole.replace('"format": 1', '"format": 1.0')):
        assert json.loads(text)
        home.current_file.write_text(text)
        with pytest.raises(StorageError, match="damaged"):
            models.last_seen(home)


def test_the_highest_version_seen_is_kept(home, lab, tmp_path):
    """docs/security.md, check 26: an older bundle is refused also when it is named by hand."""
    assert models.last_seen(home) == {("skin", "main", "all"): 2}
    (tmp_path / "old.edgefl").write_bytes(lab.bundle_bytes(version=1))
    with pytest.raises(BundleError) as error:
        old = models.read_file(home, tmp_path / "old.edgefl")
        models.open_model(home, old, [lab.SIGNER.public], lab.NOW_MS)
    assert error.value.code == "rolled_back"
    assert "If version 2 was bad" in str(error.value) and "edgefl-export bundle --version 3" in str(error.value)


def test_without_the_file_there_is_no_model(tmp_path):
    with pytest.raises(models.NoModel):
        models.current_file(Home(tmp_path))
    assert models.last_seen(Home(tmp_path)) == {}


def test_a_model_that_is_gone_is_installed_again(home):
    """Its path says nothing to whoever never chose it."""
    models.current_file(home).unlink()
    with pytest.raises(StorageError, match="is gone: install it again with edgefl use FILE, or in a") as error:
        models.read_file(home, None)
    assert error.value.code == "missing"


def test_another_model_of_the_same_version_is_told_by_its_digest(run, lab, tmp_path):
    """Whoever exports with the default `--version` gives two models one name; a device can go back."""
    files = []
    for refer_above in (0.9, 0.8):
        files.append(tmp_path / f"{refer_above}.edgefl")
        files[-1].write_bytes(lab.bundle_bytes(federation=None, version=3, refer_above=refer_above))
    first, other = (hashlib.sha256(file.read_bytes()).hexdigest() for file in files)
    assert run("use", files[0], "--trust", lab.SIGNER.public.hex())[0] == 0
    replaced = run("use", files[1])[1].splitlines()[1]
    assert f"another model of the same version: SHA-256 {first[:16]}… before, {other[:16]}… now" in replaced
    assert "to go back, edgefl use with its file" in replaced and "never" not in replaced
    told = json.loads(run("use", files[0], "--json")[1])
    assert (told["replaced_sha256"], told["sha256"], told["same_version"]) == (other, first, True)
