"""`edgefl-export verify` on everything that is wrong: an error status and no word of success, ever.

Source: docs/security.md, checks 27 and 31; the lesson of a verify command that printed success after a failed check
(OpenSSF model signing 1.0.1, CVE-2022-36056).
"""

import re
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner
from tests.protocol.bundle.conftest import OTHER, VECTOR, GoodBundle
from tests.protocol.bundle.test_bundle import WAYS_TO_BE_WRONG

from edgefl_export.cli import main
from edgefl_protocol.bundle.archive import read_archive, write_archive
from edgefl_protocol.strict_json import parse_json, write_json

GOOD = GoodBundle(VECTOR.read_bytes())
# Every word by which a person or a script could take a refusal for a success.
SUCCESS = re.compile(r"\b(verified|valid|ok|okay|success\w*|passed|good|trusted and|accepted|authentic)\b|\u2713", re.I)


def verify(file: Path, *trust: Path, json: bool = False):
    options = [word for path in trust for word in ("--trust", str(path))] + ["--json"] * json
    return CliRunner().invoke(main, ["verify", str(file), *options])


@pytest.fixture
def trust(tmp_path):
    (tmp_path / "signing.pub").write_text(GOOD.key.public.hex())
    (tmp_path / "other.pub").write_text(OTHER.public.hex())
    return tmp_path / "signing.pub"


def assert_says_no(result, *codes: int) -> None:
    assert result.exit_code in codes, result.output
    assert result.stdout == ""
    assert "Traceback" not in result.stderr and len(result.stderr.splitlines()) == 1
    assert not SUCCESS.search(result.stderr), result.stderr


def test_every_released_version_still_verifies(trust):
    """docs/security.md check 31: the committed bundle of each released format (1) verifies under its key."""
    released = sorted(VECTOR.parent.glob("format*.edgefl"))
    assert [path.name for path in released] == ["format1.edgefl"]
    for path in released:
        result = verify(path, trust)
        assert result.exit_code == 0 and SUCCESS.search(result.stdout)


@pytest.mark.parametrize("as_json", [False, True], ids=["text", "json"])
@pytest.mark.parametrize("case", WAYS_TO_BE_WRONG)
def test_every_way_to_be_wrong_says_so(case, trust, tmp_path, as_json):
    """docs/security.md check 31: each case of the table of wrong bundles: exit 3, one sentence, no word of success."""
    _, make = WAYS_TO_BE_WRONG[case]
    (tmp_path / "wrong.edgefl").write_bytes(make(GOOD))
    assert_says_no(verify(tmp_path / "wrong.edgefl", trust, json=as_json), 3)


@pytest.mark.parametrize("cut", range(0, len(GOOD.data), 64))
def test_every_cut_says_so(cut, trust, tmp_path):
    """docs/security.md checks 31 and 60: the file cut at every 64th byte."""
    (tmp_path / "wrong.edgefl").write_bytes(GOOD.data[:cut])
    assert_says_no(verify(tmp_path / "wrong.edgefl", trust), 3)


def test_what_nobody_checked_is_printed_without_control_characters(tmp_path):
    """`inspect` shows unverified text: no key of labels or card clears the screen or begins a line."""
    members = read_archive(GOOD.data)
    card = write_json(parse_json(members["card.json"]) | {"\x1b[2J\nverified main/all version 9": 1})
    (tmp_path / "evil.edgefl").write_bytes(write_archive({**members, "card.json": card}))
    shown = CliRunner().invoke(main, ["inspect", str(tmp_path / "evil.edgefl")])
    assert shown.exit_code == 0 and r"\u001b[2J\nverified main/all" in shown.stdout
    assert all(line.isprintable() and not line.startswith("verified") for line in shown.stdout.splitlines())


def test_other_failures_say_so(trust, tmp_path):
    """docs/security.md check 31: another key, no key, no file, a folder, a key that is none, a key of low order."""
    shutil.copy(VECTOR, tmp_path / "good.edgefl")
    (tmp_path / "low.pub").write_text("00" * 32)
    (tmp_path / "none.pub").write_text("hello")
    good = tmp_path / "good.edgefl"
    for file, keys in (
        (good, [tmp_path / "other.pub"]),
        (good, []),
        (tmp_path / "missing.edgefl", [trust]),
        (tmp_path, [trust]),
        (good, [tmp_path / "low.pub"]),
        (good, [tmp_path / "none.pub"]),
        (good, [tmp_path / "missing.pub"]),
    ):
        result = verify(file, *keys)
        assert result.exit_code in (1, 2, 3), (file, keys)
        assert result.stdout == "" and "Traceback" not in result.stderr
        assert not SUCCESS.search(result.stderr), result.stderr
