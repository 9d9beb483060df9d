"""Targets of the Makefile that no other test takes. docs/guides/flower.md: what `make flower` leaves can be typed."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")
def test_make_flower_leaves_an_edgefl_train_that_runs_with_flowers_python(tmp_path: Path) -> None:
    """Both environments are there already; the stand-in for Python says what it is given."""
    flower, venv = tmp_path / "flower", tmp_path / "venv"
    (flower / "bin").mkdir(parents=True)
    venv.mkdir()
    python = flower / "bin/python"
    python.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    python.chmod(0o755)
    words = ["make", "flower", f"FLOWER={flower}", f"VENV={venv}"]
    for folder in (flower, venv):
        (folder / ".installed").touch()
        words += ["--old-file", str(folder / ".installed")]
    subprocess.run(words, cwd=ROOT, check=True, capture_output=True)
    said = subprocess.run([flower / "bin/edgefl-train", "run", "a b"], check=True, capture_output=True, text=True)
    assert said.stdout.splitlines() == [str(venv / "bin/edgefl-train"), "run", "a b"]
