"""The code that a run names: a commit, and that its files were changed since; nothing where it was installed."""

import json
import subprocess
from pathlib import Path

import pytest
import torch

from edgefl_trainer.environment import commit_of, environment_of, write_environment
from edgefl_trainer.evaluate.tables.text import origin

IDENTITY = ("-c", "user.name=a", "-c", "user.email=a@b.example", "-c", "commit.gpgsign=false")


def git(folder: Path, *command: str) -> str:
    return subprocess.run(["git", "-C", folder, *IDENTITY, *command], check=True, capture_output=True, text=True).stdout


@pytest.fixture
def checkout(tmp_path):
    code = tmp_path / "trainer/edgefl_trainer"
    code.mkdir(parents=True)
    (code / "run.py").write_text("learns = True\n")
    (tmp_path / "README.md").write_text("read me\n")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", "-A")
    git(tmp_path, "commit", "-qm", "first")
    return tmp_path


def test_a_changed_checkout_does_not_count_as_its_commit(checkout):
    code = checkout / "trainer/edgefl_trainer"
    commit = git(checkout, "rev-parse", "HEAD").strip()
    (checkout / "runs").mkdir()
    (checkout / "runs/summary.json").write_text("{}")  # tracked by nobody: results of the commit
    assert commit_of(code) == commit
    for file in ("README.md", "trainer/edgefl_trainer/run.py"):
        before = (checkout / file).read_text()
        (checkout / file).write_text("changed\n")
        assert commit_of(code) == f"{commit} (modified)"
        git(checkout, "add", file)
        assert commit_of(code) == f"{commit} (modified)"  # staged, and in no commit
        (checkout / file).write_text(before)
        git(checkout, "add", file)
    assert commit_of(code) == commit


def test_an_installed_wheel_has_no_commit(checkout):
    """Also inside a checkout of something else, changed or not."""
    inside = checkout / ".venv/lib/python3/site-packages/edgefl_trainer"
    inside.mkdir(parents=True)
    assert commit_of(inside) is None
    (checkout / "README.md").write_text("changed\n")
    assert commit_of(inside) is None


def test_a_caption_tells_a_changed_checkout_from_its_commit():
    at, changed = (
        {"commit": commit, "machine": {"processor": "CPU"}} for commit in ("a" * 40, f"{'a' * 40} (modified)")
    )
    assert origin([at]) == f"CPU; commit {'a' * 12}"
    assert origin([changed, at]) == f"CPU; commit {'a' * 12}, {'a' * 12} (modified)"


def test_a_run_that_went_on_elsewhere_names_both(tmp_path):
    """docs/reference/runs.md: only the last machine and commit were named, as if they had made it all."""
    old = {"versions": {"torch": "2.0"}, "commit": "a" * 40, "machine": {"processor": "Old CPU", "cuda": "Old card"}}
    (tmp_path / "environment.json").write_text(json.dumps({**old, "seed": 7, "begun": "2020-01-01T00:00:00+00:00"}))
    for _ in range(2):  # the second time nothing is new
        write_environment(tmp_path, 7, torch.device("cpu"))
        found = environment_of(tmp_path)
        assert found["earlier"] == [old] and found["begun"].startswith("2020") and found["seed"] == 7
    told = origin([found])
    assert "Old card" in told and found["machine"]["processor"] in told and "a" * 12 in told
    here = {name: found[name] for name in old}
    (tmp_path / "environment.json").write_text(json.dumps({**old, "earlier": [here]}))
    write_environment(tmp_path, 7, torch.device("cpu"))
    assert environment_of(tmp_path)["earlier"] == [here, old]


def test_an_older_versions_run_on_the_processor_was_made_on_no_card(tmp_path, monkeypatch):
    """Older versions named the machine's card for runs with `device = "cpu"` as well: tables said it had made them."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "a card")
    write_environment(tmp_path, 7, torch.device("cpu"))
    here = environment_of(tmp_path)
    for commit in (here["commit"], "a" * 40):  # the same version again; a newer one
        old = {**here, "commit": commit, "machine": {**here["machine"], "cuda": "a card"}}
        for device, card in (("cpu", False), ("cuda", True)):
            (tmp_path / "environment.json").write_text(json.dumps(old))
            write_environment(tmp_path, 7, torch.device(device), began_on="cpu")
            found = environment_of(tmp_path)
            assert [place["machine"]["cuda"] for place in found.get("earlier", ())] in ([], [None])
            assert ("a card" in origin([found])) is card and ("a" * 12 in origin([found])) is (commit == "a" * 40)
    write_environment(tmp_path, 7, torch.device("cpu"), began_on="cpu")  # it has been on the card since
    assert [place["machine"]["cuda"] for place in environment_of(tmp_path)["earlier"]] == [None, "a card"]


def test_a_run_on_the_processor_names_no_card(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "a card")
    for device, card in (("cpu", None), ("cuda", "a card")):
        write_environment(tmp_path, 0, torch.device(device))
        assert environment_of(tmp_path)["machine"]["cuda"] == card
