"""The code that a run names: a commit, and that its files were changed since; nothing where it was installed."""

import subprocess
from pathlib import Path

import pytest

from edgefl_trainer.environment import commit_of
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
