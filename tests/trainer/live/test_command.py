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


def test_a_run_of_its_own_is_no_place_for_a_membership(tmp_path: Path, monkeypatch) -> None:
    """What the run holds would be taken for the federation's result, and the invite would be spent."""
    monkeypatch.setattr("edgefl_trainer.live.site_membership.SiteMembership.enrolled", _used)
    run = tmp_path / "run"
    run.mkdir()
    for name in ("config.toml", "summary.json"):
        (run / name).write_text("")
    done = edgefl_train("join", "efl1-x", *DATA, "--out", run)
    assert (done.code, done.out) == (2, "") and "holds no membership, but it holds config.toml and 1 more" in done.err
    assert "name a new or empty folder with --out" in done.err and not (run / "member").exists()


def _used(*_: object) -> None:
    raise AssertionError("the invite would be used now")


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (("--site", "nowhere"), "has no site nowhere; the sites of the data are site-1, site-2"),
        ((), "has the sites site-1 and site-2: name this site with --site NAME"),
    ],
)
def test_an_invite_is_not_spent_on_a_site_that_is_not_there(given, sentence, tmp_path: Path, monkeypatch) -> None:
    """An invite enrols once: what the data alone can tell is told before it is used."""
    monkeypatch.setattr("edgefl_trainer.live.site_membership.SiteMembership.enrolled", _used)
    done = edgefl_train("join", "efl1-x", *DATA[:2], *given, "--out", tmp_path / "out")
    assert done.code in (1, 2) and sentence in done.err and not (tmp_path / "out").exists()
