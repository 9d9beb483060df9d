"""Thirty days without a network. Source: docs/security.md, check 71; docs/reference/scores.md, "Offline"."""

import json
import time

import pytest

from edgefl_exchange.errors import Unavailable

DAY_MS = 86_400_000


@pytest.fixture
def calendar(monkeypatch, live, lab):
    """Sets this device's clock and the coordinator's to days after the bundle was made."""

    def set_to(days):
        now_ms = lab.NOW_MS + round(days * DAY_MS)
        monkeypatch.setattr(time, "time_ns", lambda: now_ms * 1_000_000)
        live.now_ms = now_ms

    set_to(0)
    return set_to


@pytest.fixture
def unplugged(live, monkeypatch):
    """Takes the network away; gives what puts it back."""

    def down(_):
        raise Unavailable("cannot reach coordinator.example: the connection failed; try again later", "unreachable")

    good = live.send
    monkeypatch.setattr(live, "send", down)
    return lambda: monkeypatch.setattr(live, "send", good)


@pytest.fixture
def offline(calendar, run, live, lab, labelled):
    """A device with a bundle that lasts 31 days, from the first of them."""
    from edgefl_protocol.records.invite import encode_invite

    assert run("enrol", encode_invite(live.invite(), live.now_ms))[0] == 0
    live.approve()
    live.bundles["main", "all", 1] = lab.bundle_bytes(expires_ms=lab.NOW_MS + 31 * DAY_MS)
    for words in (("trust", "add", lab.SIGNER.public.hex()), ("policy", "allow", "maps"), ("pull",)):
        assert run(*words)[0] == 0
    return labelled


def test_check_71_thirty_days_offline(run, offline, calendar, live, lab, request):
    """docs/security.md, check 71: it scores every day, says how old its bundle is, and stops when the manifest says."""
    put_back = request.getfixturevalue("unplugged")
    first = json.loads(run("score", offline / "0.png", "--json")[1])["probabilities"]
    for day in range(0, 31, 3):
        calendar(day + 0.5)
        code, out, err = run("score", offline / "0.png", "--json")
        told = json.loads(out)
        assert code == 0 and told["probabilities"] == first and "model_expired" not in told["refer_reasons"]
        assert ("expires in" in err) == (31 - day <= 14)
        code, out, _ = run("status", "--json")
        status = json.loads(out)
        assert code == 0 and status["coordinator"]["reachable"] is False
        assert (status["model"]["age_days"], status["model"]["expires_in_days"]) == (day, 30 - day)
        left = f"{30 - day} days" if day < 30 else "12 hours"
        assert f"published {day} days ago, expires in {left}" in run("status", "--offline")[1]
        if day == 6:
            assert run("contribute", "--labels", offline / "labels.csv")[0] == 0
        code, out, err = run("sync")
        assert (code, out, len(err.splitlines())) == (1, "", 1)
    calendar(31)
    for words in (("score", offline / "0.png"), ("watch", offline, "--once"), ("contribute", "--labels", "x")):
        code, out, err = run(*words)
        assert (code, out) == (3, "") and "expired" in err.splitlines()[-1]
    for days, since in ((32.9, "45 hours"), (33, "2 days")):
        calendar(days)
        assert f"published {int(days)} days ago, expired {since} ago" in run("status", "--offline")[1]
        assert f"the bundle expired {since} ago" in run("score", offline / "0.png")[2]
    live.bundles["main", "all", 2] = lab.bundle_bytes(version=2)
    put_back()  # keys of the coordinator have run out meanwhile, a contribution has waited for 27 days
    assert json.loads(run("pull", "--json")[1])["version"] == 2
    assert json.loads(run("sync", "--json")[1])["waiting"] == 0
    assert [name for name, _, _ in live.effects] == ["device-1"]
    assert run("score", offline / "0.png")[0] == 0


def test_a_bundle_without_an_end_is_scored_with_for_years(run, calendar, files):
    """The manifest's policy decides, nothing else; `edgefl doctor` says that it is old."""
    calendar(1000)
    code, out, _ = run("score", files / "good.png", "--model", files / "model.edgefl", "--trust",
                       files / "signing.pub", "--json")  # fmt: skip
    assert code == 0 and json.loads(out)["predicted"]
