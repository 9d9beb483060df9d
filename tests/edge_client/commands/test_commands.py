"""enrol, pull, contribute, sync and status at the command line, against a coordinator in memory."""

import base64
import contextlib
import dataclasses
import json
import logging
import sqlite3

import numpy as np
import pytest

from edgefl_client.home import Home
from edgefl_client.learning.own_pictures import Table, remember_table, remembered_table
from edgefl_exchange.errors import TlsRefused, Unavailable
from edgefl_protocol import Payload
from edgefl_protocol.messages.requests import Refusal


def test_the_whole_way(run, device, live, lab, capsys):
    """docs/design.md, section 5: enrol, pull, contribute, sync, status."""
    code, out, _ = run("pull", "--json")
    assert code == 0
    assert json.loads(out)["changed"] is True
    assert json.loads(run("pull", "--json")[1])["changed"] is False
    code, out, _ = run("contribute", "--labels", device / "labels.csv", "--json")
    report = json.loads(out)
    assert code == 0
    assert report["maps"] == {"MEL": 3, "NV": 3}
    assert json.loads(run("status", "--json")[1])["waiting"] == 1
    peers = {f"maps.{peer}.0": np.ones((2, 36), np.float16) for peer in range(3)}
    live.broadcasts[1] = Payload(peers, {"phase": "train", "round": 1, "rounds": 5})
    code, out, _ = run("sync", "--json")
    value = json.loads(out)
    assert code == 0
    assert [one["outcome"] for one in value["sent"]] == ["accepted"]
    assert value["broadcast"]["maps"] == 6
    assert value["waiting"] == 0
    ((name, round_number, data),) = live.effects
    assert (name, round_number, len(data)) == ("device-1", 1, report["bytes"])
    sent = Payload.from_bytes(data)
    assert set(sent.arrays) == {"maps.0", "maps.1"}
    assert dict(sent.scalars) == {
        "site_sha256": json.loads(run("score", device / "0.png", "--json")[1])["model"]["state"]["sha256"]
    }
    assert json.loads(run("sync", "--json")[1])["sent"] == []
    status = json.loads(run("status", "--json")[1])
    assert status["round"] == {"number": 1, "state": "open", "replied": True, "refused": False, "stuck": None}
    assert status["membership"]["state"] == "approved"


def test_a_stuck_round_is_told_in_the_coordinators_words(run, device, live):
    """`status` and `sync` print the sentence that the operator reads; --json has it; a round that goes on has none."""
    assert run("pull")[0] == 0
    assert json.loads(run("status", "--json")[1])["round"]["stuck"] is None
    assert json.loads(run("sync", "--json")[1])["round"]["stuck"] is None
    live.stuck = "round 1 is stuck since 2026-03-01 12:00:00 UTC: it needs 3 replies; the operator runs: something"
    for command in ("status", "sync"):
        assert live.stuck in run(command)[1]
        assert json.loads(run(command, "--json")[1])["round"]["stuck"] == live.stuck


def test_the_end_of_the_federation_is_called_so(run, device, live):
    """It said "round 1 is done; nothing to learn: no round is open, round 1 is done" to whoever waits for round 2."""
    assert run("pull")[0] == 0
    live.state = "done"
    out = run("sync", "--labels", device / "labels.csv")[1]
    assert out.startswith("the federation is over: its last round, 1, is done\n") and "no round is open" not in out
    assert "round: the federation is over; its last round, 1, is done, reply not sent\n" in run("status")[1]


def test_a_sync_tells_the_round_as_its_own_reply_left_it(run, device, live, monkeypatch):
    """What was asked for before the reply was sent would call the round stuck that this reply has closed."""
    assert run("pull")[0] == run("contribute", "--labels", device / "labels.csv")[0] == 0
    live.stuck, taken = "round 1 is stuck: it has 1 reply and needs 2", live._reply

    def closes(*arguments):
        answer = taken(*arguments)
        live.state, live.stuck = "closed", ""
        return answer

    monkeypatch.setattr(live, "_reply", closes)
    code, out, _ = run("sync")
    assert (
        code == 0
        and out.startswith("reply accepted")
        and out.splitlines()[1] == "round 1 is closed, with this reply"
        and "stuck" not in out
    )


def test_a_sync_whose_reply_was_taken_succeeds_where_the_round_is_not_told_after_it(run, device, live, monkeypatch):
    """The reply counts; what was known before it is told without the sentence that may be past."""
    assert run("pull")[0] == run("contribute", "--labels", device / "labels.csv")[0] == 0
    live.stuck, taken = "round 1 is stuck: it has 1 reply and needs 2", live._reply

    def then_refuses(*arguments):
        live.refuse["task"] = Refusal(code="busy", message="later")
        return taken(*arguments)

    monkeypatch.setattr(live, "_reply", then_refuses)
    code, out, _ = run("sync")
    assert code == 0 and "reply accepted" in out and "stuck" not in out


@pytest.mark.parametrize("stuck", ["", "; round 1 is stuck since then: it has 1 reply and needs 2"])
def test_a_sync_tells_that_the_reply_of_the_round_before_was_refused(run, device, live, monkeypatch, stuck):
    """The coordinator says so until the next reply is there, which this very sync may send."""
    assert run("pull")[0] == run("contribute", "--labels", device / "labels.csv")[0] == 0
    refusal = "the reply of round 0 was refused: it lies far off; the round went on without it"
    live.stuck, taken = refusal + stuck, live._reply

    def then_hears(*arguments):
        answer, live.stuck = taken(*arguments), ""
        return answer

    monkeypatch.setattr(live, "_reply", then_hears)
    code, out, _ = run("sync")
    assert code == 0 and "reply accepted" in out and out.rstrip().endswith(refusal)


def test_what_is_contributed_after_the_rounds_reply_waits_for_the_next(run, device, live):
    assert run("pull")[0] == 0
    offer = ("contribute", "--labels", device / "labels.csv", "--send")
    assert run(*offer)[1].splitlines()[-1] == "0 items wait"
    assert run(*offer)[1].splitlines()[-1] == "1 item waits for the next round" and len(live.effects) == 1
    assert json.loads(run("sync", "--json")[1])["round"]["replied"] is True


def test_a_home_that_is_misspelt_has_no_status(run, device, tmp_path):
    code, out, err = run("status", "--home", tmp_path / "hom")
    assert (code, out) == (2, "") and f"there is no home folder {tmp_path / 'hom'}" in err
    assert run("status", "--home", run.home)[0] == 0


def test_dry_run_keeps_nothing(run, device):
    """docs/security.md, exchange policy: the device shows what leaves it."""
    run("pull")
    code, out, _ = run("contribute", "--labels", device / "labels.csv", "--dry-run", "--json")
    report = json.loads(out)
    assert code == 0
    facts = {name: (one["dtype"], one["shape"], one["bytes"], one["max"]) for name, one in report["arrays"].items()}
    assert facts == dict.fromkeys(("maps.0", "maps.1"), ("float16", [3, 36], 216, 1.0))
    assert set(report["scalars"]) == {"site_sha256"}
    assert report["idem"] is None
    assert json.loads(run("status", "--json", "--offline")[1])["waiting"] == 0


def test_no_word_of_the_pictures_leaves(run, device, live, lab):
    """docs/security.md, check 36: file names, EXIF and text of the pictures are in no outgoing byte."""
    from PIL import Image

    exif = Image.Exif()
    exif[0x010E] = "CANARY-EXIF"
    (device / "CANARY-NAME.jpg").write_bytes(lab.encoded(lab.photo(), "JPEG", exif=exif, comment=b"CANARY-COMMENT"))
    (device / "labels.csv").write_text("image,label,patient\nCANARY-NAME.jpg,MEL,CANARY-PATIENT\n")
    run("pull")
    assert run("contribute", "--labels", device / "labels.csv")[0] == 0
    assert run("sync")[0] == 0
    ((_, _, data),) = live.effects
    assert b"CANARY" not in data
    for path in run.home.rglob("*"):
        assert path.is_dir() or b"CANARY" not in path.read_bytes()


def written(secret):
    """The ways in which bytes come to stand in a text."""
    coded = {base64.b64encode(secret), base64.urlsafe_b64encode(secret), base64.b32encode(secret)}
    return {secret.hex(), repr(secret)[2:-1], str(list(secret))[1:-1], *(text.decode().rstrip("=") for text in coded)}


def test_secrets_are_in_no_log_and_no_output(run, live, invite, labelled, lab, caplog, net):
    """docs/security.md, check 14: keys, token, payload: 0 hits in logs, output and error text."""
    caplog.set_level(logging.DEBUG)
    (token,) = live.tokens_open  # before the enrolment uses it up
    live.bundles["main", "all", 1] = lab.bundle_bytes()
    inner = live.send
    said = ""

    def heard(*command):
        nonlocal said
        code, out, err = run(*command)
        said += out + err
        return code

    def with_a_dead_wire(*command):
        live.send = lambda request: net.lost_request(request, inner)
        assert heard(*command) in (0, 1)
        live.send = inner

    with_a_dead_wire("enrol", invite)
    assert heard("enrol", invite) == 0
    live.approve()
    heard("trust", "add", lab.SIGNER.public.hex())
    heard("policy", "allow", "maps")
    assert heard("pull") == 0
    assert heard("contribute", "--labels", labelled / "labels.csv") == 0
    for command in (("sync",), ("status",), ("pull",), ("enrol", invite)):
        with_a_dead_wire(*command)
    assert heard("sync") == heard("status") == 0
    said += caplog.text
    ((_, _, payload),) = live.effects
    arrays = Payload.from_bytes(payload).arrays.values()
    keys = [path.read_bytes() for path in (run.home / "member").glob("*.key")]
    lines = [line for key in keys for line in key.split(b"\n") if len(line) > 40]
    assert token
    assert lines
    secrets = [token, payload, *keys, *lines, *(array.tobytes()[:24] for array in arrays)]
    canaries = {invite, invite[10:60]}.union(*map(written, secrets))
    assert not [canary for canary in canaries if canary in said]
    assert {path.stat().st_mode & 0o077 for path in run.home.rglob("*")} == {0}


def test_one_item_waits(run, device, live):
    """Between rounds nothing is taken, so it stays in the outbox."""
    run("pull")
    assert run("contribute", "--labels", device / "labels.csv")[0] == 0
    for live.state, words in (("closed", "1 item waits"), ("open", "0 items wait")):
        code, out, _ = run("sync")
        assert code == 0 and words in out.splitlines()


def test_coordinator_down_is_one_sentence_and_loses_nothing(run, device, live, monkeypatch):
    run("pull")
    run("contribute", "--labels", device / "labels.csv")

    def down(_):
        raise Unavailable("cannot reach coordinator.example: the connection failed; try again later", "unreachable")

    monkeypatch.setattr(live, "send", down)
    for command in ("sync", "pull"):
        code, out, err = run(command)
        assert (code, out) == (1, "")
        assert len([line for line in err.splitlines() if line.startswith("edgefl:")]) == 1
    status = json.loads(run("status", "--json")[1])
    assert status["coordinator"]["reachable"] is False
    assert status["waiting"] == 1
    assert run("score", device / "0.png")[0] == 0  # offline scoring goes on
    monkeypatch.undo()


def test_a_coordinator_that_refuses_was_reached(run, live, invite, monkeypatch):
    """docs/security.md, order of checks: a signed refusal is an answer; a certificate that does not fit is none."""
    assert run("enrol", invite)[0] == 0

    def asked():
        code, out, _ = run("status", "--json")
        assert code == 0
        value = json.loads(out)["coordinator"]
        return value["reachable"], value["error"] and value["error"]["code"]

    assert asked() == (True, "pending")
    live.approve()
    assert asked() == (True, None)
    live.refuse["task"] = Refusal(code="revoked", message="the operator shut this member out")
    assert asked() == (True, "revoked")

    def other_certificate(_):
        raise TlsRefused("the certificate of coordinator.example does not fit; nothing was sent")

    monkeypatch.setattr(live, "send", other_certificate)
    assert asked() == (False, "tls_refused")


def test_what_waits_is_sent_before_it_can_expire(run, device, live, monkeypatch):
    """docs/security.md, reliability table: age is the last reason to lose work, and a jumped clock is none."""
    run("pull")

    def contributed(created_ms):
        assert run("contribute", "--labels", device / "labels.csv")[0] == 0
        with contextlib.closing(sqlite3.connect(run.home / "outbox.sqlite3")) as db, db:
            db.execute("UPDATE item SET created_ms = ?", (created_ms,))

    def synced():
        value = json.loads(run("sync", "--json")[1])
        return len(value["sent"]), value["expired"], value["waiting"]

    old = live.now_ms - 31 * 86_400_000
    contributed(old)
    assert synced() == (1, 0, 0)
    live.round, live.state = 2, "closed"
    contributed(5_000)  # put before the clock was set
    assert synced() == (0, 0, 1)
    contributed(old)
    assert synced() == (0, 1, 0)


def test_another_table_is_read_as_the_one_before(run, device):
    """docs/reference/device-learning.md: formats and batch are the device's; `sync --labels` changes the file alone."""
    home, before = Home(run.home), Table(file=device / "old.csv", formats=("jpeg", "tiff"), batch=3)
    remember_table(home, before)
    assert run("sync", "--labels", device / "labels.csv")[0] == 0
    assert remembered_table(home) == dataclasses.replace(before, file=device / "labels.csv")
