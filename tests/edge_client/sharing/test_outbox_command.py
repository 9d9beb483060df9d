"""`edgefl outbox`: list, show, drop. Source: docs/reference/sharing.md, "The outbox"; docs/security.md, check 14."""

import contextlib
import json
import re
import sqlite3
import subprocess
import sys

import pytest


@pytest.fixture
def waiting(run, device):
    """A device with one contribution in its outbox."""
    run("pull")
    report = json.loads(run("contribute", "--labels", device / "labels.csv", "--json")[1])
    assert report["idem"]
    return report


def test_an_empty_outbox_is_no_failure_and_makes_nothing(run):
    assert run("outbox") == (0, "nothing waits in the outbox\n", "")
    assert json.loads(run("outbox", "--json")[1]) == {"items": []}
    for verb in ("show", "drop"):
        code, out, err = run("outbox", verb, "12345678")
        assert (code, out) == (1, "") and "no item of the outbox" in err
    assert not run.home.exists()


def test_what_waits_is_listed_with_age_bytes_round_and_state(run, live, waiting, net):
    """Never sent, then sent without an answer, then gone after the signed one."""
    (item,) = json.loads(run("outbox", "--json")[1])["items"]
    facts = (item["id"], item["state"], item["round"], item["attempts"], item["federation"], item["kind"])
    assert facts == (waiting["idem"], "waiting", None, 0, "skin", "reply")
    assert waiting["bytes"] <= item["bytes"] <= waiting["bytes"] + 64  # encrypted: a nonce and a tag more
    assert 0 <= item["age_s"] < 600
    good = live.send
    live.send = lambda request: net.cut_answer(request, good) if request.path == "/v1/reply" else good(request)
    assert run("sync")[0] == 1
    (item,) = json.loads(run("outbox", "--json")[1])["items"]
    assert (item["state"], item["round"], item["attempts"]) == ("unanswered", 1, 1)
    assert "for round 1, sent 1 time without an answer" in run("outbox")[1]
    live.send = good
    assert run("sync")[0] == 0
    assert json.loads(run("outbox", "--json")[1])["items"] == []
    assert len(live.effects) == 1


@pytest.mark.parametrize(
    ("days", "words"),
    [(0, "( s|minutes) old"), (3, "3 days old"), (-2, "its age is unknown, because the clock was ahead")],
)
def test_age_in_words(run, waiting, days, words):
    with sqlite3.connect(run.home / "outbox.sqlite3") as db:
        db.execute("UPDATE item SET created_ms = created_ms - ?", (days * 86_400_000,))
    db.close()
    assert re.search(words, run("outbox")[1])


def test_show_tells_what_contribute_told(run, waiting):
    """Numbers and digest are those of the payload itself, whole or by the first digits of its id."""
    found = json.loads(run("outbox", "show", waiting["idem"][:8], "--json")[1])
    for key in ("travels", "arrays", "scalars", "bytes", "sha256"):
        assert found[key] == waiting[key]
    assert f"SHA-256 {waiting['sha256']}" in run("outbox", "show", waiting["idem"])[1]


def test_drop_is_for_good(run, live, waiting):
    """What is dropped never leaves; a second drop of it is one sentence."""
    dropped = json.loads(run("outbox", "drop", waiting["idem"][:10], "--json")[1])
    assert dropped["id"] == waiting["idem"]
    code, out, err = run("outbox", "drop", waiting["idem"])
    assert (code, out, len(err.splitlines())) == (1, "", 1)
    assert run("sync")[0] == 0 and live.effects == []


def test_what_may_have_arrived_is_said_when_it_is_dropped(run, live, waiting, net):
    good = live.send
    live.send = lambda request: net.cut_answer(request, good) if request.path == "/v1/reply" else good(request)
    assert run("sync")[0] == 1
    assert "may have arrived" in run("outbox", "drop", waiting["idem"])[1]


@pytest.mark.parametrize("which", ["", "abc", "0" * 32, "%", "'; DROP TABLE item; --"])
def test_an_unknown_id_is_one_sentence(run, waiting, which):
    for verb in ("show", "drop"):
        code, out, err = run("outbox", verb, which)
        assert (code, out, len(err.splitlines())) == (1, "", 1)
    assert len(json.loads(run("outbox", "--json")[1])["items"]) == 1


def test_no_secret_is_shown(run, waiting):
    """docs/security.md, check 14: neither keys nor the contents of items, in no form of output."""
    said = ""
    for command in (("outbox",), ("outbox", "--json"), ("outbox", "show", waiting["idem"], "--json")):
        code, out, err = run(*command)
        assert code == 0
        said += out + err
    for path in (run.home / "member").glob("*.key"):
        for line in path.read_text().splitlines():
            assert len(line) < 30 or line not in said
    with sqlite3.connect(run.home / "outbox.sqlite3") as db:
        (sealed,) = db.execute("SELECT sealed FROM item").fetchone()
    db.close()
    assert sealed.hex()[:32] not in said


def test_listing_needs_no_passphrase_and_looking_does(run, live, invite, lab, labelled, monkeypatch):
    """Keys under a passphrase: the list is open, contents and dropping are not."""
    monkeypatch.setenv("EDGEFL_KEY_PASSPHRASE", "correct horse")
    assert run("enrol", invite)[0] == 0
    live.approve()
    live.bundles["main", "all", 1] = lab.bundle_bytes()
    for command in (("trust", "add", lab.SIGNER.public.hex()), ("policy", "allow", "maps"), ("pull",),
                    ("contribute", "--labels", labelled / "labels.csv")):  # fmt: skip
        assert run(*command)[0] == 0
    monkeypatch.delenv("EDGEFL_KEY_PASSPHRASE")
    (item,) = json.loads(run("outbox", "--json")[1])["items"]
    for verb in ("show", "drop"):
        code, _, err = run("outbox", verb, item["id"])
        assert code == 1 and "passphrase" in err
    assert json.loads(run("outbox", "--json")[1])["items"]


def test_a_damaged_outbox_is_one_sentence(run, waiting):
    """docs/security.md, check 60: a typed error; the file is not touched."""
    path = run.home / "outbox.sqlite3"
    path.write_bytes(b"no database" * 100)
    for command in (("outbox",), ("outbox", "show", waiting["idem"]), ("outbox", "drop", waiting["idem"])):
        code, out, err = run(*command)
        assert (code, out, len(err.splitlines())) == (1, "", 1)
        assert "outbox.sqlite3" in err
    assert path.read_bytes() == b"no database" * 100


CUT_OFF = """
import os, sqlite3, sys
db = sqlite3.connect(sys.argv[1], isolation_level=None)
db.execute("PRAGMA cache_size=2")
db.execute("BEGIN IMMEDIATE")
db.execute("UPDATE item SET sealed = zeroblob(200000), bytes = 200000")
db.execute("INSERT INTO item SELECT 'other', federation, kind, 9, 0, 0, 1, zeroblob(200000), NULL FROM item")
os._exit(9)
"""


def test_a_kill_in_the_middle_of_a_write_is_no_damage(run, waiting):
    """docs/security.md, reliability table: listing undoes what was cut off, and never says to move the file away."""
    path = run.home / "outbox.sqlite3"
    assert subprocess.run([sys.executable, "-c", CUT_OFF, path], check=False).returncode == 9
    assert path.with_name("outbox.sqlite3-journal").stat().st_size > 0
    code, out, err = run("outbox", "--json")
    assert (code, err) == (0, "")
    assert [item["id"] for item in json.loads(out)["items"]] == [waiting["idem"]]
    assert json.loads(run("outbox", "show", waiting["idem"], "--json")[1])["sha256"] == waiting["sha256"]


def test_an_outbox_that_is_held_or_was_never_begun(run, waiting, monkeypatch):
    """Held by another process is not damaged; one that was killed before it had a table holds nothing."""
    path = run.home / "outbox.sqlite3"
    connect = sqlite3.connect
    monkeypatch.setattr(sqlite3, "connect", lambda *given, **named: connect(*given, **(named | {"timeout": 0.0})))
    with contextlib.closing(connect(path, isolation_level=None)) as holder:
        holder.execute("BEGIN EXCLUSIVE")
        code, out, err = run("outbox")
    assert (code, out) == (1, "") and "in use by another edgefl process" in err
    path.write_bytes(b"")
    assert run("outbox")[:2] == (0, "nothing waits in the outbox\n")
