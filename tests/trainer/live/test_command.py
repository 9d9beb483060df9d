"""`edgefl-train join` at the command line: status and one sentence for what cannot begin. Source: docs/design.md 5."""

from pathlib import Path

import pytest
from tests.trainer.conftest import edgefl_train

DATA = ("--data", "lesions:sites=2,images=40,px=36", "--site", "site-1")


@pytest.mark.parametrize(
    ("words", "status", "sentence"),
    [
        (("efl1-nonsense",), 1, "copy the whole invite again"),
        (("no-invite",), 1, "an invite starts with efl1-"),
        ((), 2, "holds no finished enrolment: give the INVITE that the operator made"),
        (("efl1-x", "--images-per-site", "-1"), 2, "--images-per-site"),
        (("efl1-x", "--ca", "nowhere.pem"), 2, "nowhere.pem"),
    ],
)
def test_what_cannot_begin(words: tuple[str, ...], status: int, sentence: str, tmp_path: Path) -> None:
    done = edgefl_train("join", *words, *DATA, "--out", tmp_path / "out")
    assert (done.code, done.out) == (status, "")
    assert sentence in done.err and "Traceback" not in done.err
    assert not (tmp_path / "out").exists()  # nothing was begun
