"""What is written never lands among, or over, what a person put there (docs/reference/runs.md)."""

import json
import shutil
from pathlib import Path

import pytest
from tests.trainer.conftest import edgefl_train
from tests.trainer.engine.conftest import files_of

FILE = Path(__file__).parents[2] / "experiments/fedevprompt-table-1.toml"
PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture
def thesis(tmp_path) -> Path:
    folder = tmp_path / "thesis"
    folder.mkdir()
    for name in ("chapter.tex", "figure.pdf"):
        (folder / name).write_text("x")
    return folder


@pytest.mark.parametrize(
    ("words", "lacks"),
    [
        (("experiment", FILE, "--tiny", "--rows", "local-bt"), "no runs of an experiment"),
        (("join", "efl1-x", "--data", "lesions:"), "no membership"),
        (("run", "local", "--data", "lesions:", "--preset", "tiny"), "no run"),
    ],
)
def test_a_folder_with_something_else_is_never_taken(thesis, words, lacks, monkeypatch):
    monkeypatch.setenv("EDGEFL_DATA", "/nowhere")
    outcome = edgefl_train(*words, "--out", thesis)
    assert outcome.code == 2
    assert outcome.sentence() == (
        f"{thesis} holds {lacks}, but it holds chapter.tex and 1 more: name a new or empty folder with --out."
    )
    assert files_of(thesis) == {"chapter.tex", "figure.pdf"}


def test_an_experiment_goes_on_beside_a_persons_notes(tmp_path, cached, monkeypatch):
    monkeypatch.setenv("EDGEFL_DATA", "/nowhere")
    words = ("experiment", FILE, "--tiny", "--rows", "local-bt", "--rounds", "1", "--device", "cpu", "--out", tmp_path)
    assert edgefl_train(*words).code == 0
    (tmp_path / "notes.md").write_text("x")
    again = edgefl_train(*words)
    assert again.code == 0 and "finished before" in again.err


@pytest.fixture
def served(finished, tmp_path) -> Path:
    """A site's folder and the server's, as a federation of SuperNodes leaves them (docs/guides/flower.md)."""
    shutil.copytree(finished["local"], tmp_path / "site-1/server-1")
    (tmp_path / "server").mkdir()
    shutil.copy(finished["local"] / "config.toml", tmp_path / "server")
    (tmp_path / "server/federation.json").write_text('{"federation": "server-1"}')
    summary = {"method": "local", "task": "all", "sites": ["site-1"], "state_sha256": "ab" * 32}  # of an older version
    (tmp_path / "server/summary.json").write_text(json.dumps(summary))
    return tmp_path


@pytest.mark.parametrize(
    "words",
    [
        ("table",),
        ("report", "-o", "page.html"),
        ("evaluate", "--data", "lesions:"),
        ("predict", "x.png", "--site", "a"),
    ],
)
def test_the_servers_half_of_a_federation_is_no_run(served, words):
    outcome = edgefl_train(words[0], served / "server", *words[1:])
    assert outcome.code == 2 and "server holds the server's half of a federation, without a model" in outcome.sentence()


def test_a_table_of_a_federation_leaves_its_server_out(served):
    outcome = edgefl_train("table", served)
    assert outcome.code == 0, outcome.err
    assert "server (the server's half of a federation)" in outcome.err and "| local |" in outcome.out


@pytest.mark.parametrize("command", ["table", "evaluate", "data"])
def test_a_picture_replaces_a_picture_and_nothing_else(command, finished, ward, tmp_path):
    words = {
        "table": ("table", finished["local"], "--metric", "accuracy", "--plot"),
        "evaluate": ("evaluate", finished["local"], "--data", ward, "--plot"),
        "data": ("data", ward, "--sheet"),
    }[command]
    mine, drawn = tmp_path / "results.png", tmp_path / "drawn.png"
    mine.write_text("site,accuracy\n")
    outcome = edgefl_train(*words, mine)
    assert outcome.code == 2 and f"{mine} exists and is no PNG: name another file." in outcome.err
    assert mine.read_text() == "site,accuracy\n"
    drawn.write_bytes(PNG)
    if command == "data":  # what is looked at once is not drawn anew by chance
        refused = edgefl_train(*words, drawn)
        assert refused.code == 2 and f"{drawn} exists already: name another file, or overwrite it" in refused.err
        assert drawn.read_bytes() == PNG
        words = ("data", ward, "--force", "--sheet")
    assert edgefl_train(*words, drawn).code == 0
    assert drawn.read_bytes().startswith(PNG) and len(drawn.read_bytes()) > len(PNG)
