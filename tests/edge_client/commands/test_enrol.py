"""`edgefl enrol` at the command line, against a coordinator in memory: invites, certificates, keys, approval."""

import dataclasses

import pytest

from edgefl_client.sharing import enrolled_device
from edgefl_protocol.records.invite import encode_invite


def test_enrolling_again_tells_of_the_approval(run, live, invite):
    assert " is pending in skin" in run("enrol", invite)[1]
    assert " is pending in skin" in run("enrol", invite)[1]
    live.approve()
    assert run("enrol", invite)[1] == "device-1 is approved in skin; nothing more is needed to join\n"  # no fingerprint
    _, out, err = run("enrol", invite, "--wait")
    assert "round 1 is open" in out.splitlines() and "Waiting" not in err


def test_enrolling_again_on_a_device_that_was_shut_out_says_so(run, live, invite, monkeypatch):
    """A revoked device was told " is approved", with status 0. One signed answer later nothing of it is left."""
    monkeypatch.setattr("edgefl_exchange.caller.MAX_WAIT_S", 0.0)
    run("enrol", invite)
    live.approve()
    run("sync")
    known, live.members = live.members, {}
    code, out, err = run("enrol", invite)
    assert code == 1 and "approved" not in out and "does not know this device's keys any more" in err
    assert f"move the folder {run.home / 'member'} away and enrol with a new invite" in err
    live.members = known
    code, out, _ = run("enrol", invite)
    assert code == 0 and " is approved in skin" in out


def test_before_the_approval_every_command_is_refused(run, live, invite):
    """docs/design.md, section 5: 3 for what policy refuses; without any enrolment nothing was refused: 1."""
    assert run("pull")[0] == 1
    assert run("enrol", invite)[0] == 0
    for command in ("pull", "sync"):
        code, out, err = run(command)
        assert (code, out) == (3, "")
        assert "not approved" in err
    live.approve()
    assert run("sync")[0] == 0


def test_nothing_published_no_membership_not_approved(run, live, invite, lab):
    for command in (("pull",), ("sync",), ("contribute", "--labels", "x.csv")):
        code, _, err = run(*command)
        assert code == 1
        assert len(err.splitlines()) == 1
    assert run("enrol", invite)[0] == 0
    code, _, err = run("sync")
    assert code == 3
    assert "not approved" in err
    live.approve()
    code, _, err = run("pull")
    assert code == 1
    assert "no bundle" in err


@pytest.mark.parametrize(("text", "code"), [("nonsense", 1), ("efl1-AAAA", 1)])
def test_damaged_invites(run, text, code):
    assert run("enrol", text)[0] == code


def test_expired_invite(run, live):
    text = encode_invite(live.invite(), live.now_ms)
    old = dataclasses.replace(live.invite(), expires_ms=live.now_ms - 3_600_000)
    code, _, err = run("enrol", encode_invite(old, live.now_ms - 7_200_000))
    assert code == 3
    assert "expired" in err
    assert text


def test_a_pinned_certificate_must_be_given(run, live, tmp_path):
    """docs/security.md, enrolment step 1."""
    pinned = encode_invite(live.invite(tls_sha256="ab" * 32), live.now_ms)
    code, _, err = run("enrol", pinned)
    assert code == 3
    assert "--ca" in err
    (tmp_path / "ca.pem").write_text("nonsense")
    assert run("enrol", pinned, "--ca", tmp_path / "ca.pem")[0] == 3
    assert run("enrol", pinned, "--ca", tmp_path / "none.pem")[0] == 1


def test_another_invite_leaves_the_certificate_alone(run, live, device, lab):
    """The certificate of a membership is replaced by no later invite."""
    (run.home / "member" / "ca.pem").write_text("kept")
    other = encode_invite(live.invite("device-2"), live.now_ms)
    code, _, err = run("enrol", other, "--ca", run.home / "member" / "signing.key")
    assert code == 1
    assert f"move the folder {run.home / 'member'} away and enrol again" in err  # where it was shut out
    assert (run.home / "member" / "ca.pem").read_text() == "kept"


def test_an_invite_for_a_site_is_not_used_up(run, live):
    """An invite enrols once: the device says what its role is for, and leaves nothing behind."""
    invite = dataclasses.replace(live.invite("hospital"), role="site")
    code, _, err = run("enrol", encode_invite(invite, live.now_ms))
    assert (
        code == 3 and "the invite is for a site, and this command joins as a device: join with edgefl-train join" in err
    )
    assert not (run.home / "member" / "signing.key").exists()


def test_an_invite_from_standard_input(run, invite, monkeypatch):
    """docs/security.md, check 14: the token in no process list."""
    import io

    monkeypatch.setattr("sys.stdin", io.StringIO(f"{invite}\n"))
    assert run("enrol", "-")[0] == 0


def test_keys_with_a_passphrase(run, live, invite, monkeypatch, tmp_path):
    """docs/design.md, section 5: passphrase by file or environment; nothing ever prompts."""
    (tmp_path / "pass").write_text("\ncorrect horse\n")
    (tmp_path / "pass").chmod(0o640)
    code, _, err = run("enrol", invite, "--passphrase-file", tmp_path / "pass")
    assert code == 1 and "chmod 600" in err and not (run.home / "member" / "signing.key").exists()
    (tmp_path / "pass").chmod(0o600)
    assert run("enrol", invite, "--passphrase-file", tmp_path / "pass")[0] == 0
    live.approve()
    code, _, err = run("sync")
    assert code == 1
    assert "passphrase" in err
    monkeypatch.setenv("EDGEFL_KEY_PASSPHRASE", "\ncorrect horse")  # one line end is no part of it, the first is
    assert run("sync")[0] == 0


def test_another_proxy_counts_from_now_on(run, live, invite, monkeypatch):
    """Also with an invite whose three days are long over. It was passed over in silence, or the invite refused."""
    ways = []
    monkeypatch.setattr(enrolled_device, "HttpsTransport", lambda url, ca, proxy: ways.append(proxy) or live)
    run("enrol", invite, "--proxy", "http://old:3128")
    live.approve()
    past = dataclasses.replace(live.invite(), expires_ms=live.now_ms - 400 * 3_600_000)
    used = encode_invite(past, past.expires_ms - 1)
    for given, kept in (
        (("--proxy", "http://new:3128"), "http://new:3128"),
        ((), "http://new:3128"),
        (("--proxy", ""), ""),
    ):
        assert run("enrol", used, *given)[0] == 0
        assert run("sync")[0] == 0 and ways[-1] == kept
