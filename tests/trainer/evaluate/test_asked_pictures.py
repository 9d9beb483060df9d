"""benchmarks/asked_pictures.py on drawn pictures, whose colour the picture alone tells."""

import json
import runpy
from pathlib import Path

import pytest
from click.testing import CliRunner
from tests.trainer.conftest import edgefl_train, make_asked

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "asked_pictures.py"
NETWORK = ("--backbone", "tiny", "--image-px", "36")


@pytest.fixture(scope="module")
def drawn(tmp_path_factory, cached):
    return make_asked(tmp_path_factory.mktemp("drawn"), {"HEAD": 72, "CHEST": 72, "ABD": 72})


def lines(*words):
    done = CliRunner().invoke(runpy.run_path(str(SCRIPT))["main"], list(map(str, words)))
    assert done.exit_code == 0, done.output
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_sites_that_look_alike_are_not_told_apart(drawn):
    """Every site draws the same three colours: one of three at chance."""
    found = lines("held", "--data", f"vqa-rad:{drawn}", *NETWORK)
    assert [line["from"] for line in found] == ["12 x 12 pixels", "tiny"]
    assert all(0.1 < line["balanced_accuracy"] < 0.6 for line in found)


def test_words_alone_tell_little_and_the_picture_tells_a_yes(drawn):
    """Four wordings, each asked often: at most half of the yes/no questions, and a third of the colours."""
    found = lines("worded", "--data", f"vqa-rad:{drawn}", *NETWORK)
    sites, shares = found[:3], found[3:]
    for site in sites:
        assert site["questions"] == 2 * site["pictures"] and site["worded_once"] == 0
        assert site["told_by_words"] < 0.7 * site["questions"]
        assert site["judged_with_an_answer_of_the_site"] == site["judged"]
    by = {(line["from"], line["folds_of"]): line["accuracy"] for line in shares}
    assert len(by) == 6
    for unit in ("pictures", "questions"):
        assert by["words", unit] < 0.65 < by["words, site, words x picture", unit]


@pytest.mark.slow
def test_a_run_is_asked_with_both_pictures(drawn, tmp_path):
    run = tmp_path / "run"
    small = ("--preset", "tiny", "--backbone", "vit:32x2/12", "--image-px", "36", "--rounds", 1, "--device", "cpu")
    done = edgefl_train("run", "local", "--data", f"vqa-rad:{drawn}", *small, "--set", "picture=hidden", "--out", run)
    assert done.code == 0, done.err
    found = lines("asked", run)
    assert {line["rows"] for line in found} <= {"train", "tune", "test"} and len({line["site"] for line in found}) == 3
    for line in found:  # the picture is hidden: another one changes nothing
        assert line["own_picture"] == line["other_picture"] and line["share_lost_interval"] == [0.0, 0.0]
        assert 0 <= line["own_picture"] <= line["questions"]


@pytest.mark.slow
def test_a_run_is_asked_without_its_prompts(drawn, tmp_path):
    """Fresh gates are 0 and learn from there; prompts that all begin alike still point one way."""
    run = tmp_path / "run"
    small = ("--preset", "tiny", "--backbone", "vit:32x2/12", "--image-px", "36", "--rounds", 1, "--device", "cpu")
    done = edgefl_train("run", "pfl-vqa", "--data", f"vqa-rad:{drawn}", *small, "--out", run)
    assert done.code == 0, done.err
    found = lines("prompted", run)
    sites, pairs = found[:3], found[3:]
    for line in sites:
        assert len(line["gates"]) == 2 and any(line["gates"])
        assert 0 <= line["changed_without_prompts"] <= line["questions"]
        assert abs(line["right"] - line["right_without_prompts"]) <= line["changed_without_prompts"]
    assert len(pairs) == 3 and all(0 < line["cosine"] <= 1 for line in pairs)
