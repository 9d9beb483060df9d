"""`edgefl pull` at the command line, against a coordinator in memory: which bundle comes, and what a kill leaves."""

import json
from pathlib import Path

import pytest

from edgefl_client.trust import models
from edgefl_exchange.errors import ExchangeError
from edgefl_exchange.identity import Identity


def test_pull_takes_only_the_bundle_of_the_signed_index(run, device, live, lab):
    """docs/security.md, check 26: rollback, other line, another federation: the one in use stays."""
    live.bundles["main", "all", 2] = lab.bundle_bytes(version=2)
    assert json.loads(run("pull", "--json")[1])["version"] == 2
    del live.bundles["main", "all", 2]
    code, _, err = run("pull")
    assert code == 3
    assert "version 1" in err
    live.bundles["main", "all", 3] = lab.bundle_bytes(version=3, federation="other")
    code, _, err = run("pull")
    assert code == 3
    assert "signed index" in err
    assert json.loads(run("score", device / "0.png", "--json")[1])["model"]["version"] == 2


def test_a_bundle_of_the_same_version_or_another_line_does_not_replace(run, device, live, lab):
    """docs/security.md, check 26: same federation, line and task, and a version strictly above."""
    run("pull")
    before = json.loads(run("status", "--json")[1])["model"]["sha256"]
    live.bundles["main", "all", 1] = lab.bundle_bytes(refer_above=0.5)
    code, _, err = run("pull")
    assert code == 3
    assert "this device already runs version 1" in err
    live.bundles = {("night", "all", 2): lab.bundle_bytes(version=2, line="night")}
    live.line = "night"
    code, _, err = run("pull")
    assert code == 3
    assert "skin/night/all" in err
    assert json.loads(run("status", "--json")[1])["model"]["sha256"] == before


def test_a_lost_bundle_is_fetched_again(run, device, live, lab):
    """Without the file only the highest version seen counts, so that the device can recover."""
    run("pull")
    next((run.home / "models").glob("*.edgefl")).unlink()
    live.bundles["main", "all", 2] = lab.bundle_bytes(version=2)
    assert json.loads(run("pull", "--json")[1])["version"] == 2


@pytest.mark.parametrize("damage", [Path.unlink, lambda file: file.write_bytes(file.read_bytes()[:-1] + b"?")])
def test_a_lost_or_damaged_bundle_of_this_very_version_is_fetched_again(run, device, damage):
    """What cannot score is not "in use already": the same command that brought it brings it again."""
    run("pull")
    damage(next((run.home / "models").glob("*.edgefl")))
    assert run("score", device / "0.png")[0] != 0
    assert json.loads(run("pull", "--json")[1])["changed"] is True
    assert run("score", device / "0.png")[0] == 0
    assert json.loads(run("pull", "--json")[1])["changed"] is False


def test_pull_without_trust_is_refused(run, device, live, lab):
    run("trust", "remove", lab.SIGNER.public.hex())
    code, _, err = run("pull")
    assert code == 3
    assert lab.SIGNER.key_id in err


def test_pull_killed_between_its_two_writes_keeps_the_old(run, device, live, lab, monkeypatch):
    """docs/security.md, check 33: the old or the new, never none, never half."""
    run("pull")
    live.bundles["main", "all", 2] = lab.bundle_bytes(version=2)

    def killed(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("edgefl_client.trust.models.write_json", killed)
        assert run("pull")[0] == 1
    assert json.loads(run("score", device / "0.png", "--json")[1])["model"]["version"] == 1
    assert json.loads(run("pull", "--json")[1])["version"] == 2
    assert len(list((run.home / "models").glob("*.edgefl"))) == 1


def test_two_pulls_at_once_do_not_go_back(run, device, live, lab, monkeypatch):
    """docs/security.md, check 26, rollback: who has looked at an index installs before another looks at a later one."""
    install = models.install
    held = []

    def installing(*words):
        with pytest.raises(ExchangeError, match="another edgefl process"):
            Identity(run.home / "member", lock_wait_s=0.0)
        held.append(True)
        return install(*words)

    monkeypatch.setattr(models, "install", installing)
    assert run("pull")[0] == 0 and held == [True]
