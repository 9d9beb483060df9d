"""Ctrl-C: the last line is the exact command that goes on, and it does (docs/reference/runs.md)."""

import io
import json
import shlex
from pathlib import Path

import pytest
from tests.trainer.conftest import TINY, edgefl_train, records, write_index

from edgefl_trainer.live import SiteMembership

FILE = Path(__file__).parents[2] / "experiments/fedevprompt-table-1.toml"
JOIN = ("--data", "lesions:sites=2,images=40,px=36", "--site", "site-1")
TOLD = "stopped; continue with: "


def stop(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


def told(outcome) -> list[str]:
    """The words of the command that goes on."""
    assert outcome.code == 1 and outcome.out == "" and "Traceback" not in outcome.err
    line = outcome.err.splitlines()[-1]
    assert line.startswith(TOLD), line
    return shlex.split(line.removeprefix(TOLD))


def digest(folder: Path) -> str:
    return json.loads((folder / "summary.json").read_text())["state_sha256"]


@pytest.fixture
def stopped(monkeypatch):
    """Runs a command that a person stops when its first round would begin."""

    def run(*words: object):
        with monkeypatch.context() as patched:
            patched.setattr("edgefl_trainer.engine.run.run_phases", stop)
            return edgefl_train(*words)

    return run


def test_a_fine_tuning_run(mae, tmp_path, stopped):
    folder = tmp_path / "my run"
    words = ("finetune", mae, "--mode", "local", "--labels", "0.5", "--out", folder, "--rounds", "1", "--device", "cpu")
    goes_on = told(stopped(*words))
    assert goes_on == ["edgefl-train", "run", "--resume", "--out", str(folder)]
    assert edgefl_train(*goes_on[1:]).code == 0
    assert edgefl_train(*words[:-5], tmp_path / "other", *words[-4:]).code == 0
    assert digest(folder) == digest(tmp_path / "other")  # the run is the one that was asked for


def test_a_run_whose_paths_are_relative_goes_on_from_any_folder(tmp_path, monkeypatch, stopped, mae):
    """The command was good in the folder where the first one was typed alone: "No manifest at clean.csv"."""
    home = tmp_path / "my work"
    write_index(home, [{**one, "split": ""} for one in records()])
    monkeypatch.chdir(home)
    data = ("--data", "manifest:index.csv", "--backbone", f"run:{mae}", "--rounds", "1", *TINY)
    outcome = stopped("run", "local", *data, "--out", "run")
    line = outcome.err.splitlines()[-1]
    assert line == f"{TOLD}cd '{home}' && edgefl-train run --resume --out run"
    assert "manifest:index.csv" in (home / "run/config.toml").read_text()  # what was typed, and so is its digest
    for words, away in ((("--out", home / "run2"), True), (("--out", "run3"), True), (("--out", home / "run4"), False)):
        given = data if away else ("--data", f"manifest:{home}/index.csv", *data[2:])
        assert ("cd '" in stopped("run", "local", *given, *words).err.splitlines()[-1]) == away


def test_an_experiment(tmp_path, stopped, cached, monkeypatch):
    monkeypatch.setenv("EDGEFL_DATA", "/nowhere")
    out = tmp_path / "my table"
    words = ("experiment", FILE, "--tiny", "--rows", "local-bt", "--rounds", "1", "--device", "cpu", "--out", out)
    goes_on = told(stopped(*words))
    assert goes_on == ["edgefl-train", *map(str, words)]
    found = edgefl_train(*goes_on[1:])
    assert found.code == 0 and (out / "centres/local-bt/seed-0/summary.json").exists()


@pytest.mark.parametrize("state", [None, "joining", "pending"])
@pytest.mark.parametrize("invite", ["efl1-secret", "-"])
def test_a_site_that_waits_in_a_federation(tmp_path, monkeypatch, state, invite):
    """The invite is repeated while it is needed, and stands in no list of processes once it is used up."""
    known = None if state is None else type("Known", (), {"state": state})
    monkeypatch.setattr(SiteMembership, "_known", lambda self: known)
    monkeypatch.setattr("edgefl_trainer.live.join", stop)
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    plain = ["join", *JOIN, "--out", str(tmp_path / "own site")]
    goes_on = told(edgefl_train("join", invite, *plain[1:]))
    assert goes_on == ["edgefl-train", *(plain if state == "pending" else ["join", invite, *plain[1:]])]


@pytest.mark.parametrize(("rounds", "said"), [(1, True), (2, False)])
def test_one_round_of_maps_says_that_none_has_come_back(ward, mae, tmp_path, rounds, said):
    """docs/methods.md 1.1: a site learns in round r from the maps of round r - 1."""
    given = ("--data", ward, "--backbone", f"run:{mae}", *TINY, "--rounds", rounds)
    text = edgefl_train("run", "fedevprompt", *given, "--out", tmp_path / "maps").out
    assert ("one round: sites have sent their maps, but none has come back yet" in text) == said
    other = edgefl_train("run", "fedavg", *given, "--out", tmp_path / "weights").out
    assert "come back" not in other
