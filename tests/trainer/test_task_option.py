"""`--task NAME=A,B:REST` on the way from data to a score: docs/reference/data.md."""

import json
import shlex
from pathlib import Path

import pytest
from PIL import Image
from tests.trainer.conftest import TINY, edgefl_train, make_ward

from edgefl_trainer.data.lesions import draw_lesion

ROOT = Path(__file__).parents[2]
GROUPS = "mal=BCC,MEL:rest"


@pytest.fixture(scope="module")
def clinic(tmp_path_factory, cached) -> str:
    """Two sites with four classes."""
    counts = {site: {"BCC": 6, "BKL": 6, "MEL": 6, "NV": 8} for site in ("east", "west")}
    return f"folder:{make_ward(tmp_path_factory.mktemp('clinic'), counts)}"


def learned(out: Path, data: str, task: str, *more: object) -> Path:
    found = edgefl_train("run", "fedavg", "--data", data, "--task", task, "--out", out, *TINY, "--rounds", "1", *more)
    assert found.code == 0, found.err
    return out


@pytest.fixture(scope="module")
def gathered(tmp_path_factory, clinic) -> Path:
    return learned(tmp_path_factory.mktemp("gathered") / "run", clinic, GROUPS)


def summary(folder: Path) -> dict:
    return json.loads((folder / "summary.json").read_text())


def test_nevus_and_its_long_form_learn_the_same_bits(clinic, tmp_path):
    """docs/reference/data.md: labels, rows, figures and every learned value are equal."""
    one = summary(learned(tmp_path / "word", clinic, "nevus"))
    other = summary(learned(tmp_path / "groups", clinic, "nevus=NV:other"))
    same = ("classes", "partition_sha256", "sites", "pooled", "confusion", "state_sha256")
    assert {name: one[name] for name in same} == {name: other[name] for name in same}
    assert (one["task"], other["task"]) == ("nevus", "nevus=NV:other")


def test_a_run_of_groups_goes_on_is_judged_and_scores(gathered, clinic, tmp_path):
    assert summary(gathered)["classes"] == ["mal", "rest"]
    assert f'task = "{GROUPS}"' in (gathered / "config.toml").read_text()
    again = edgefl_train("run", "--resume", "--out", gathered, "--json")
    assert again.json()["task"] == GROUPS and "nothing was computed again" in again.err
    other = edgefl_train("run", "--resume", "--out", gathered, "--task", "mal=MEL:rest")
    assert other.code == 2 and f"has task = '{GROUPS}', but this command has 'mal=MEL:rest'" in other.sentence()
    judged = edgefl_train("evaluate", gathered, "--data", clinic, "--device", "cpu", "--json").json()
    assert judged["classes"] == ["mal", "rest"] and judged["sites"] == summary(gathered)["sites"]
    picture = tmp_path / "lesion.png"
    Image.fromarray(draw_lesion("MEL", site=0, number=0, px=84)[0]).save(picture)
    score = json.loads(edgefl_train("predict", gathered, picture, "--site", "east", "--json").out)
    assert list(score["probabilities"]) == ["mal", "rest"]
    assert "suspicious_class" in score["refer_reasons"]  # nobody described them


def test_data_that_lacks_a_class_of_the_task_is_judged(gathered, tmp_path, cached):
    """The run has seen BCC; a clinic without one is judged on what it has, and a class written otherwise is refused."""
    data = f"folder:{make_ward(tmp_path / 'b', {'east': {'MEL': 4, 'NV': 4}})}"
    assert edgefl_train("evaluate", gathered, "--data", data, "--json").json()["sites"]["east"]["n_test"] > 0
    data = f"folder:{make_ward(tmp_path / 'c', {'east': {'MEL': 4, 'NV': 4, 'bcc': 4}})}"
    assert "names 'BCC' and the data has 'bcc'" in edgefl_train("evaluate", gathered, "--data", data).sentence()


def test_a_partition_of_the_datas_classes_serves_every_task(clinic, tmp_path):
    file = tmp_path / "four.json"
    dealt = edgefl_train("partition", "--data", clinic, "--scheme", "iid", "--sites", "3", "-o", file)
    assert dealt.code == 0, dealt.err
    found = summary(learned(tmp_path / "run", clinic, GROUPS, "--partition", file))
    plain = summary(learned(tmp_path / "all", clinic, "all", "--partition", file))
    assert found["classes"] == ["mal", "rest"] and plain["classes"] == ["BCC", "BKL", "MEL", "NV"]
    assert found["partition"]["sha256"] == plain["partition"]["sha256"]
    rows = [{name: site["n_train"] for name, site in one["sites"].items()} for one in (found, plain)]
    assert rows[0] == rows[1]


def test_the_data_command_shows_what_a_task_makes_of_it(clinic):
    found = edgefl_train("data", clinic, "--task", GROUPS)
    lines = [line.split() for line in found.out.splitlines()]
    assert found.code == 0 and lines[0][:3] == ["site", "mal", "rest"]
    assert [line[:3] for line in lines[1:3]] == [["east", "12", "14"], ["west", "12", "14"]]
    wrong = edgefl_train("data", clinic, "--task", "mal=MELL:rest")
    assert wrong.code == 1 and "names the class 'MELL', which the data does not have; did you mean MEL?" in wrong.out
    assert "BKL" in wrong.out.splitlines()[0]  # the classes as the data has them


def test_an_experiment_takes_groups_from_its_file_or_the_command(tmp_path, monkeypatch):
    monkeypatch.setenv("EDGEFL_DATA", "/nowhere")
    text = (ROOT / "experiments/fedevprompt-table-1.toml").read_text()
    assert text.count('task = "nevus"') == 1
    (tmp_path / "own.toml").write_text(text.replace('task = "nevus"', f'task = "{GROUPS}"'))
    (tmp_path / "bad.toml").write_text(text.replace('task = "nevus"', 'task = "mal=MEL"'))
    given = ("--out", tmp_path / "o", "--rows", "local-bt", "--dry-run")
    for file, more in (("own.toml", ()), ("bad.toml", ("--task", GROUPS))):
        found = edgefl_train("experiment", tmp_path / file, *given, *more)
        words = shlex.split(found.out.splitlines()[-1])
        assert words[words.index("--task") + 1] == GROUPS
    assert "Task 'mal=MEL' is not known" in edgefl_train("experiment", tmp_path / "bad.toml", *given).sentence()


def test_what_is_no_task_is_refused_before_anything_is_read(tmp_path):
    found = edgefl_train("run", "fedavg", "--data", "folder:/nowhere", "--task", "mal=MEL,BCC", "--out", tmp_path / "r")
    assert found.code == 2 and "Task 'mal=MEL,BCC' is not known; allowed: all, nevus, or" in found.sentence()
    assert not (tmp_path / "r").exists()
