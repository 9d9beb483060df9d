"""What `edgefl score` tells of its model and of what it was given: whose pictures, a model as a picture, Ctrl-C."""

import csv
import io
import json
from itertools import islice

from edgefl_client.scoring import score_files

WHOSE = "expect more wrong answers on pictures of another centre or camera."
MODEL = ("--model", "model.edgefl", "--trust", "signing.pub")


def test_a_run_says_once_whose_pictures_the_model_learned_from(run, files) -> None:
    """docs/reference/scores.md: `ask` said it of each answer, and no score did."""
    code, out, err = run("score", "good.png", "good.png", *MODEL)
    assert code == 0 and err.count(WHOSE) == 1 and WHOSE not in out
    told = json.loads(run("score", "good.png", *MODEL, "--json")[1])
    (row,) = csv.DictReader(io.StringIO(run("score", "good.png", *MODEL, "--csv")[1]))
    assert told["learned_from"] and row["learned_from"] == "; ".join(told["learned_from"])
    assert f"the site {told['learned_from'][0]}; {WHOSE}" in err


def test_a_live_sites_average_names_the_federation_of_the_others(run, files, lab) -> None:
    """A bundle of FedAvg from `edgefl-train join` said in each score that it learned from one site's pictures alone."""
    averaged = lab.bundle_bytes(metrics={"travels": ["weights"], "live_federation": "skin"})
    (files / "model.edgefl").write_bytes(averaged)
    others = "also learned from pictures of other sites of the federation skin, which it does not name; expect more"
    code, _, err = run("score", "good.png", *MODEL)
    assert code == 0 and f"It is the model of the site one, and {others}" in err
    told = json.loads(run("score", "good.png", *MODEL, "--json")[1])
    (row,) = csv.DictReader(io.StringIO(run("score", "good.png", *MODEL, "--csv")[1]))
    assert told["learned_from"] == ["one"]
    assert told["learned_from_federation"] == row["learned_from_federation"] == "skin"


def test_a_model_given_as_a_picture_is_called_one(run, files) -> None:
    """It was "of an unknown kind by its content; only JPEG and PNG can be read"."""
    code, out, _ = run("score", "model.edgefl", *MODEL)
    assert code == 1 and "model.edgefl: this is a model, not a picture: name it with --model" in out


def test_ctrl_c_tells_how_many_were_scored(run, files, monkeypatch) -> None:
    """A shell calls a command that Ctrl-C ended 130 (128 and the signal's number, POSIX `sh`, 2.8.2)."""
    whole = score_files.score_files

    def interrupted(task, names):
        yield from whole(task, islice(names, 2))
        raise KeyboardInterrupt

    monkeypatch.setattr(score_files, "score_files", interrupted)
    code, out, err = run("score", *["good.png"] * 5, *MODEL)
    assert code == 130 and len(out.splitlines()) == 2
    assert "stopped: 2 of 5 pictures done; score the others again" in err
