"""`edgefl doctor`. Source: docs/reference/doctor.md; docs/security.md, reliability table."""

import datetime
import json
import os
import shutil
import time
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from tests.edge_client.doctor.conftest import diagnosed

from edgefl_client.doctor import second_process
from edgefl_client.doctor.checks import Diagnosis, diagnosis_text
from edgefl_client.doctor.drawn_picture import drawn_picture
from edgefl_client.doctor.findings import Finding
from edgefl_exchange.errors import TlsRefused, Unavailable
from edgefl_protocol.pictures.quality import measure_quality
from edgefl_protocol.records.invite import encode_invite

DAY_MS = 86_400_000


def test_on_a_fresh_machine(run):
    """Neither membership nor model nor network: every check answers, nothing is made, exit 0."""
    code, found = diagnosed(run)
    assert code == 0 and not run.home.exists()
    assert found["runtime"]["state"] == "ok" and "onnxruntime" in found["runtime"]["detail"]
    assert found["model"]["state"] == found["signers"]["state"] == "warn"
    assert found["policy"]["found"] == "nothing may leave this device"
    assert {"home", "disk", "keys", "personal", "outbox"} <= set(found)


def test_a_device_in_order(run, device, live, monkeypatch):
    """Everything is ok, one line each; the speed of the model in use is measured; nothing leaves but one question."""
    here_ms = live.now_ms
    monkeypatch.setattr(time, "time_ns", lambda: here_ms * 1_000_000)  # measuring takes its time, the clocks agree
    run("pull")
    sent = len(live.requests)
    code, out, err = run("doctor", "--json")
    value = json.loads(out)
    assert (code, err) == (0, "") and [request.path for request in live.requests[sent:]] == ["/v1/time"]
    assert {one["state"] for one in value["findings"]} == {"ok"}, out
    assert value["speed"]["peak_memory_mib"] > 10
    assert [row["threads"] for row in value["speed"]["rows"]][1] == 1
    assert all(row["milliseconds"] > 0 for row in value["speed"]["rows"])
    findings = tuple(Finding(**one) for one in value["findings"])
    idle = {**value["speed"], "load_average": 0.0}  # else a line may say that the machine was busy
    diagnosis = Diagnosis(findings=findings, speed=idle)
    text = diagnosis_text(diagnosis).splitlines()
    assert [line.split()[0] for line in text[:-1]] == ["ok"] * len(findings)
    assert text[-1] == "Everything that was checked is in order."
    verbose = diagnosis_text(diagnosis, verbose=True).splitlines()
    assert set(text) < set(verbose) and len(verbose) == len(text) + 1 + 1 + 4  # versions; a head and four times
    assert all(line.endswith(" ms") for line in verbose[-5:-1])


@pytest.mark.usefixtures("unprobed")
def test_a_device_that_was_shut_out_is_not_in_order(run, device, live):
    """doctor.md: `keys`. It said "ok" of a revoked device; what it knows is what the last command was answered."""
    assert run("sync")[0] == 0 and diagnosed(run)[1]["keys"]["state"] == "ok"
    known, live.members = live.members, {}
    assert run("sync")[0] == 1
    for options in ((), ("--offline",)):
        found = diagnosed(run, *options)[1]["keys"]
        assert found["state"] == "warn" and "0 days ago the coordinator did not know these keys" in found["found"]
        assert "was shut out" in found["advice"] and str(run.home / "member") in found["advice"]
    live.members = known
    assert run("sync")[0] == 0 and diagnosed(run)[1]["keys"]["state"] == "ok"


def test_what_waits_for_a_coordinator_that_shut_the_device_out_is_told_and_bounded(run, device, live, monkeypatch):
    """It waited for ever: only an exchange drops what is older than 30 days. Source: docs/security.md 2.5."""
    assert run("sync")[0] == 0 and run("contribute", "--labels", device / "labels.csv")[0] == 0
    known, live.members = live.members, {}
    assert run("sync")[0] == 1
    found = diagnosed(run, "--offline")[1]["outbox"]
    assert found["state"] == "warn" and "1 item waits" in found["found"]
    assert "the coordinator did not know this device's keys when it was last asked" in found["found"]
    assert "edgefl advanced outbox drop ID" in found["advice"] and "after 30 days" in found["advice"]
    told = json.loads(run("status", "--json")[1])
    assert (told["waiting"], told["membership"]["keys_known"]) == (1, False)
    assert "waiting in the outbox: 1; the coordinator did not know this device's keys" in run("status")[1]
    here_ns, there_ms = time.time_ns(), live.now_ms
    for days, left in ((29, 1), (31, 0)):
        monkeypatch.setattr(time, "time_ns", lambda days=days: here_ns + days * DAY_MS * 1_000_000)
        live.now_ms = there_ms + days * DAY_MS
        assert run("sync")[0] == 1 and json.loads(run("status", "--json")[1])["waiting"] == left
    monkeypatch.setattr(time, "time_ns", lambda: here_ns)
    live.members, live.now_ms = known, there_ms
    assert run("sync")[0] == 0 and json.loads(run("status", "--json")[1])["membership"]["keys_known"]


def test_enrolling_anew_drops_what_the_keys_that_are_gone_had_encrypted(run, device, live, invite):
    """No key opens it, and every sync of the new membership ended with `outbox_damaged`."""
    assert run("sync")[0] == 0 and run("contribute", "--labels", device / "labels.csv")[0] == 0
    (run.home / "member").rename(device / "member-that-is-gone")
    assert "waiting in the outbox: 1, of a membership that is gone" in run("status")[1]
    assert "the membership that they are for is gone" in diagnosed(run, "--offline")[1]["outbox"]["found"]
    code, _, err = run("enrol", encode_invite(live.invite("device-2"), live.now_ms))
    assert code == 0 and "the outbox held 1 item of a membership that is gone" in err
    assert not list(run.home.glob("outbox.sqlite3*"))
    live.approve("device-2")
    assert run("sync")[0] == 0 and json.loads(run("status", "--json")[1])["waiting"] == 0


FINDINGS = (
    Finding(check="a", state="ok", found="is there", detail="of version 3"),
    Finding(check="b", state="warn", found="ends soon", advice="renew it"),
    Finding(check="c", state="fail", found="is gone", advice="bring it back"),
)


SPEED = {
    "precision": "fp32", "load_average": 0.0, "processors": 2, "rows": [],
    "floors": [{"precision": "fp32", "threads": 2, "milliseconds": 1.0, "times": 2.0, "share": 1.0}],
}  # fmt: skip


@pytest.mark.parametrize(
    ("p95_ms", "load", "state", "words"),
    [
        (1883.2, 0.0, "warn", "up to 1883.2 ms, and a person waits from 1,000 ms on"),
        (1883.2, 2.0, "ok", "other work was running"),  # says little of the device
        (183.2, 0.0, "ok", "up to 183.2 ms, and a person notices the waiting from 1,000 ms on"),
    ],
)
def test_a_time_is_told_with_what_it_is_compared_with(run, monkeypatch, p95_ms, load, state, words):
    """Nielsen 1993, 5.5: after about one second a person's flow of thought is interrupted."""
    rows = [{"pictures": 1, "p95_milliseconds": p95_ms}, {"pictures": 8, "p95_milliseconds": 9000.0}]
    told = {"step": "speed", "rows": rows, "peak_memory_mib": 10, "processors": 2, "load_average": load}
    monkeypatch.setattr("edgefl_client.doctor.checks.probe", lambda *_, **__: iter([told]))
    found = {one["check"]: one for one in json.loads(run("doctor", "--offline", "--json")[1])["findings"]}["speed"]
    assert found["state"] == state and words in found["found"]
    assert (found["advice"] is not None) == (state == "warn")


def test_what_to_act_on_comes_first_and_floors_only_when_asked_for():
    """docs/reference/doctor.md: nobody can act on versions, a table of times or a floor."""
    diagnosis = Diagnosis(findings=FINDINGS, speed=SPEED)
    lines = diagnosis_text(diagnosis).splitlines()
    assert [line.split()[:2] for line in lines[:3]] == [["fail", "c"], ["warn", "b"], ["ok", "a"]]
    assert "bring it back" in lines[0] and "renew it" in lines[1]
    assert lines[3:] == ["1 of 3 checks failed, 1 asks for attention: the lines at the top say what to do."]
    verbose = diagnosis_text(diagnosis, verbose=True)
    assert "of version 3" in verbose and "linear layers alone" in verbose
    assert "of version 3" not in "".join(lines) and "linear" not in "".join(lines)


@pytest.mark.parametrize(("options", "floors"), [((), False), (("--verbose",), True), (("--json",), True)])
def test_floors_are_measured_only_for_those_who_see_them(run, monkeypatch, options, floors):
    asked = []
    monkeypatch.setattr("edgefl_client.doctor.checks.probe", lambda *_, **how: asked.append(how["floors"]) or iter(()))
    run("doctor", "--offline", *options)
    assert asked == [floors]


def test_the_drawn_picture_passes_the_gate():
    """So that the probe runs the model as a picture of skin does."""
    for height, width in ((84, 84), (224, 224), (300, 400)):
        assert measure_quality(drawn_picture(height, width)).reasons(84) == ()


@pytest.mark.parametrize(
    ("how", "most_seconds", "words"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGILL)", 60, "SIGILL"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", 60, "SIGSEGV"),
        ("import no_such_library", 60, "No module named 'no_such_library'"),
        ("raise SystemExit(7)", 60, "it ended with status 7"),
        ("import time; time.sleep(60)", 0.2, "no answer within 0.2 s"),
    ],
)
def test_a_runtime_that_dies_is_a_finding(run, monkeypatch, how, most_seconds, words):
    """The second process may crash, hang or lack a library: one line, fail, and the other checks still answer."""
    monkeypatch.setattr(second_process, "_START", how)
    monkeypatch.setattr(second_process, "MOST_SECONDS", most_seconds)
    code, found = diagnosed(run)
    assert code == 1 and found["runtime"]["state"] == "fail"
    assert words in found["runtime"]["found"] and "pip install" in found["runtime"]["advice"]
    assert found["outbox"]["state"] == "ok"


def test_a_runtime_that_dies_after_its_last_answer_is_a_finding(run, monkeypatch):
    """A library may end the process while it is unloaded: told as such, whatever was answered before."""
    said = [{"step": step, "error": {"code": "no_model", "message": "none"}} for step in ("runtime", "model")]
    answers = "".join(json.dumps(one) + "\n" for one in said).encode()
    monkeypatch.setattr(second_process, "_START", f"import os; os.write(1, {answers!r}); os.abort()")
    code, out, _ = run("doctor", "--offline", "--no-measure", "--json")
    last = [one for one in json.loads(out)["findings"] if one["check"] == "runtime"][-1]
    assert code == 1 and last["state"] == "fail" and "SIGABRT" in last["found"]


@pytest.mark.usefixtures("unprobed")
@pytest.mark.parametrize(
    ("off_s", "state"),
    [(0, "ok"), (-50, "ok"), (120, "warn"), (-120, "warn"), (47 * 3600, "warn"), (-47 * 3600, "warn"),
     (49 * 3600, "fail"), (-49 * 3600, "fail")],
)  # fmt: skip
def test_the_clock(run, device, live, monkeypatch, off_s, state):
    """docs/security.md, check 20: up to 48 hours are corrected by signed time, more are not."""
    here_ms = live.now_ms
    monkeypatch.setattr(time, "time_ns", lambda: here_ms * 1_000_000)  # a slow machine must not move it
    live.now_ms += off_s * 1000
    code, found = diagnosed(run)
    assert found["clock"]["state"] == state and code == (1 if state == "fail" else 0)
    if abs(off_s) > 60:
        assert ("behind" if off_s > 0 else "ahead") in found["clock"]["found"]


@pytest.mark.usefixtures("unprobed")
def test_the_coordinator(run, device, live, monkeypatch, net):
    """Not reached: a warning, for scoring needs nobody. Another certificate, or an unsigned answer: never ok."""

    def down(_):
        raise Unavailable("cannot reach coordinator.example: the connection failed; try again later", "unreachable")

    def other(_):
        raise TlsRefused("the certificate of coordinator.example does not fit; nothing was sent")

    good = live.send
    for wrong, state, code in ((down, "warn", 0), (other, "fail", 1)):
        monkeypatch.setattr(live, "send", wrong)
        done, found = diagnosed(run)
        assert (done, found["coordinator"]["state"], "clock" in found) == (code, state, False)

    def replayed(request):
        import dataclasses

        return (
            good(dataclasses.replace(request, query="nonce=another")) if request.path == "/v1/time" else good(request)
        )

    monkeypatch.setattr(live, "send", replayed)
    assert diagnosed(run)[1]["coordinator"]["state"] == "warn"
    sent = len(live.requests)
    assert diagnosed(run, "--offline")[1]["coordinator"]["found"] == "not asked" and len(live.requests) == sent


@pytest.mark.usefixtures("unprobed")
def test_a_home_that_cannot_be_written_is_no_healthy_one(run, live, invite, monkeypatch):
    """`edgefl use` failed where `doctor` found everything in order."""
    assert run("enrol", invite)[0] == 0
    access, opened = os.access, [run.home / name for name in ("watch-0.lock", "watched.sqlite3")]
    for file in opened:
        file.touch(mode=0o600)
    for closed in (run.home, run.home / "member", *opened):
        monkeypatch.setattr(os, "access", lambda path, mode, closed=closed: path != closed and access(path, mode))
        code, found = diagnosed(run, "--offline")
        assert code == 1 and found["home"]["found"] == f"this user cannot read and write {closed}"
        assert found["home"]["advice"] == f"chmod -R u+rwX {run.home}"
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    assert diagnosed(run, "--offline")[1]["home"]["advice"] == f"chown -R 12345 {run.home}, as root"


@pytest.mark.usefixtures("unprobed")
def test_keys_and_modes(run, live, invite):
    """Pending, approved, open to others, damaged, missing."""
    assert run("enrol", invite)[0] == 0
    _, found = diagnosed(run)
    assert found["keys"]["state"] == "warn" and "fingerprint" in found["keys"]["advice"]
    live.approve()
    assert run("sync")[0] == 0
    assert diagnosed(run)[1]["keys"]["state"] == "ok"
    key = run.home / "member" / "signing.key"
    key.chmod(0o640)
    code, found = diagnosed(run)
    assert (code, found["home"]["state"], found["keys"]["state"]) == (1, "fail", "fail")
    assert "signing.key" in found["home"]["found"] and "chmod" in found["home"]["advice"]
    key.chmod(0o600)
    key.write_bytes(b"rubbish")
    assert diagnosed(run)[1]["keys"]["state"] == "fail"
    key.unlink()
    assert diagnosed(run)[1]["keys"]["state"] == "fail"


@pytest.mark.usefixtures("unprobed")
def test_keys_under_a_passphrase(run, invite, monkeypatch):
    monkeypatch.setenv("EDGEFL_KEY_PASSPHRASE", "correct horse")
    assert run("enrol", invite)[0] == 0
    assert diagnosed(run)[1]["keys"]["state"] == "warn"  # pending
    monkeypatch.delenv("EDGEFL_KEY_PASSPHRASE")
    code, found = diagnosed(run)
    assert code == 0 and "--passphrase-file" in found["keys"]["advice"]
    monkeypatch.setenv("EDGEFL_KEY_PASSPHRASE", "wrong")
    code, found = diagnosed(run)
    assert code == 1 and "passphrase" in found["keys"]["found"]


def certificate(days):
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "coordinator.example")])
    ends = datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=days, hours=1)
    made = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
    made = made.serial_number(1).not_valid_before(ends - datetime.timedelta(days=400)).not_valid_after(ends)
    return made.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


@pytest.mark.usefixtures("unprobed")
@pytest.mark.parametrize(("days", "state"), [(90, "ok"), (5, "warn"), (-1, "fail"), (None, "fail")])
def test_the_certificate(run, live, invite, tmp_path, days, state):
    (tmp_path / "ca.pem").write_bytes(certificate(90))
    assert run("enrol", invite, "--ca", tmp_path / "ca.pem")[0] == 0
    own = run.home / "member" / "ca.pem"
    own.write_bytes(b"no certificate" if days is None else certificate(days))
    own.chmod(0o600)
    code, found = diagnosed(run, "--offline")
    assert found["certificate"][0]["state"] == state and code == (1 if state == "fail" else 0)
    assert found["certificate"][1]["found"].startswith("key record 1 of the coordinator expires in ")


@pytest.mark.usefixtures("unprobed")
def test_policy_outbox_and_learned_values(run, device):
    """What ends soon or waits long is told; what is damaged fails, each alone."""
    import sqlite3

    run("pull")
    run("contribute", "--labels", device / "labels.csv")
    assert "1 item waits" in diagnosed(run)[1]["outbox"]["found"]
    with sqlite3.connect(run.home / "outbox.sqlite3") as db:
        db.execute("UPDATE item SET created_ms = created_ms - ?", (9 * DAY_MS,))
    db.close()
    soon = (datetime.datetime.now(datetime.UTC).date() + datetime.timedelta(days=3)).isoformat()
    run("policy", "allow", "maps", "--until", soon)
    code, found = diagnosed(run)
    assert (code, found["outbox"]["state"], found["policy"]["state"]) == (0, "warn", "warn")
    assert "dropped" in found["outbox"]["found"] and "edgefl policy allow maps" in found["policy"]["advice"]
    (run.home / "policy.toml").write_text("format = 1\nfree = true\n")
    (run.home / "outbox.sqlite3").write_bytes(b"rubbish" * 200)
    (run.home / "learning").mkdir()
    (run.home / "learning" / "personal.payload").write_bytes(b"rubbish")
    (run.home / "trust.json").write_bytes(b"rubbish")
    code, found = diagnosed(run, "--offline")
    states = {name: found[name]["state"] for name in ("policy", "outbox", "personal", "signers", "keys")}
    assert code == 1
    assert states == {"policy": "fail", "outbox": "fail", "personal": "fail", "signers": "fail", "keys": "ok"}


@pytest.mark.usefixtures("unprobed")
@pytest.mark.parametrize(("free_mib", "state"), [(5000, "ok"), (500, "warn"), (10, "fail")])
def test_the_disk(run, monkeypatch, free_mib, state):
    real = shutil.disk_usage(Path("/"))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: real._replace(free=free_mib * 2**20))
    code, found = diagnosed(run)
    assert found["disk"]["state"] == state and code == (1 if state == "fail" else 0)


@pytest.mark.usefixtures("unprobed")
def test_no_command_leaves_a_file_open_to_others(run, device):
    """docs/security.md 2.6.7: whatever the umask, all that lies in the home is its owner's alone."""
    before = os.umask(0)
    try:
        for words in (("pull",), ("contribute", "--labels", device / "labels.csv"), ("sync",), ("outbox",),
                      ("policy", "deny", "maps"), ("watch", device, "--once", "--interval", "0.1")):  # fmt: skip
            assert run(*words)[0] == 0
    finally:
        os.umask(before)
    assert diagnosed(run)[1]["home"]["state"] == "ok"


@pytest.mark.usefixtures("unprobed")
def test_looking_changes_nothing(run, device):
    """Not one file of the home is made, changed or removed, and the member's sequence numbers stay where they are."""
    run("pull")
    run("contribute", "--labels", device / "labels.csv")

    def everything():
        return {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in run.home.rglob("*") if path.is_file()}

    before = everything()
    assert diagnosed(run)[0] == 0
    assert everything() == before
