"""Parsers refuse what they cannot read, by an error of ours and soon: docs/security.md check 15."""

import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.fuzz.run import MOST_S
from tests.fuzz.targets import FOUND, TARGETS, check


@pytest.mark.parametrize("name", TARGETS)
def test_examples_are_read_and_known_defects_stay_mended(name: str) -> None:
    """Fuzzing begins with inputs that get past the first check; each that was a defect once is refused, or read, in
    time."""
    target = TARGETS[name]
    for seed in target.seeds():
        target.reads(seed)
        for cut in (0, 1, len(seed) // 2, len(seed) - 1):
            check(target, seed[:cut])
    for path in sorted((FOUND / name).glob("*")):
        begun = time.thread_time()
        check(target, path.read_bytes())
        assert time.thread_time() - begun < MOST_S, path


def fuzzed(*words: str) -> "subprocess.CompletedProcess[str]":
    run = [sys.executable, "-m", "tests.fuzz.run", *words]
    return subprocess.run(run, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2])


@pytest.mark.slow
@pytest.mark.parametrize("minutes", ["0.2", pytest.param("1", marks=pytest.mark.nightly)])
def test_fuzzing_finds_no_defect(minutes: str, tmp_path: Path) -> None:
    """Check 15: 0 crashes, 0 inputs that take more than 100 ms; `make fuzz MINUTES=30` goes on for longer."""
    pytest.importorskip("atheris", reason="atheris has wheels for Python 3.11 to 3.13 on x86-64 alone")
    ran = fuzzed("--minutes", minutes, "--found", str(tmp_path))
    assert ran.returncode == 0, ran.stdout[-4000:] + ran.stderr[-4000:]
    assert ran.stdout.count(" inputs, ") == len(TARGETS) and "?" not in ran.stdout
