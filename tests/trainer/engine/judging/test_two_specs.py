"""Test questions in a file of their own, from `run` to `evaluate`: docs/reference/data.md.

Withheld questions are asked so: the file holds `testset.json` alone, and its pictures are those of the first SPEC.
"""

import json
import re
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest
from tests.trainer.conftest import edgefl_train, make_asked

from edgefl_trainer.engine.models import open_run
from edgefl_trainer.engine.sites import load_data

TINY = ("--preset", "tiny", "--image-px", "36", "--backbone", "tiny", "--device", "cpu")
SMALL = ("--set", "width=32", "--set", "heads=2", "--set", "batch=8")


def run(out: Path, *data: str, options: Sequence[object] = ()) -> dict:
    specs = [word for text in data for word in ("--data", text)]
    done = edgefl_train("run", "local", *specs, *TINY, *SMALL, "--rounds", 1, "--out", out, *options)
    assert done.code == 0, done.err
    return json.loads((out / "summary.json").read_text())


def zip_of(path: Path, **lists: Sequence[dict]) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, entries in lists.items():
            archive.writestr(f"{name}.json", json.dumps(entries))
    return path


def figures(summary: dict) -> dict:
    names = ("n_test", "accuracy", "accuracy_interval", "accuracy_open_questions", "accuracy_closed_questions")
    return {site: {name: found.get(name) for name in names} for site, found in summary["sites"].items()}


@pytest.fixture(scope="module")
def files(tmp_path_factory, cached) -> tuple[str, str, str]:
    """All in one folder; the same as a zip without test questions, and a zip of these alone."""
    root = tmp_path_factory.mktemp("two")
    whole = make_asked(root / "whole", {"HEAD": 12, "CHEST": 10, "ABD": 10}, test=6)
    with zipfile.ZipFile(root / "train.zip", "w") as archive:
        for path in sorted(whole.rglob("*.*")):
            if path.name != "testset.json":
                archive.write(path, path.relative_to(whole))
    more = zip_of(root / "more.zip", testset=json.loads((whole / "testset.json").read_text()))
    return f"vqa-rad:{whole}", f"vqa-rad:{root}/train.zip", f"vqa-rad:{more}@split=test"


@pytest.fixture(scope="module")
def parted(files, tmp_path_factory) -> tuple[Path, dict]:
    """A run over the two files."""
    folder = tmp_path_factory.mktemp("parted") / "run"
    return folder, run(folder, *files[1:])


def test_a_run_over_two_files_is_the_run_over_both_in_one(files, parted, tmp_path):
    """The official split says the same, and so do model, words, answers and figures."""
    _, found = parted
    whole = run(tmp_path / "whole", files[0])
    assert found["state_sha256"] == whole["state_sha256"] and found["classes"] == whole["classes"]
    assert figures(found) == figures(whole)
    assert {site["n_test"] for site in found["sites"].values()} == {12}


def test_evaluate_asks_the_questions_of_the_second_file(files, parted):
    """All of these and no others; without the first file there are no pictures, which a sentence says."""
    folder, found = parted
    told = ("evaluate", folder, "--json", "--device", "cpu", "--data")
    judged = edgefl_train(*told, files[1], "--data", files[2])
    assert judged.code == 0, judged.err
    assert figures(judged.json()) == figures(found)
    alone = edgefl_train(*told, files[2])
    assert alone.code == 1 and "holds none of the pictures that are asked about" in alone.sentence()
    assert "comes after it, with @split=test" in alone.sentence()


def test_evaluate_says_why_a_run_learned_from_fewer_pictures_than_training_questions_show(files, tmp_path):
    """A preset may bound the questions that a run draws: two counts of pictures then differ, and a sentence says why.

    Each training question is asked again; a run learns from three or four pictures of a site, and tunes on two.
    """
    with zipfile.ZipFile(files[1].partition(":")[2]) as archive:
        entries = json.loads(archive.read("trainset.json"))
    again = [{**one, "qid": 7000 + i} for i, one in enumerate(entries)]
    more = f"vqa-rad:{zip_of(tmp_path / 'again.zip', testset=again)}@split=test"
    run(tmp_path / "few", files[1], more, options=("--images-per-site", 8))
    told = ("--data", files[1], "--data", more, "--device", "cpu")
    err = edgefl_train("evaluate", tmp_path / "few", *told).err
    learned, total = map(int, re.search(r"(\d+) of these (\d+) pictures, by their pixels, are among", err).groups())
    assert 0 < learned < total == 32 and "32 of the 32 pictures of the test questions are also shown by" in err
    assert (
        "the figures are too high; of a site's training questions it drew at most 8, so it may have learned from fewer "
        "pictures than they show"
    ) in err


@pytest.mark.data
@pytest.mark.slow
def test_withheld_questions_about_the_official_pictures(real_data, cached, tmp_path):
    """A run over the official zip holds a quarter of each site's pictures out: their questions, in a file of their own,
    are judged by `evaluate` as `run` judged them; and `run` judges a model of all other questions on them."""
    first = f"vqa-rad:{real_data}/vqa_rad.zip"
    kept = run(tmp_path / "one", first)
    federation = load_data(open_run(tmp_path / "one").settings, 36)
    held = {federation.names[row] for site in federation.sites.values() for row in site.test}
    with zipfile.ZipFile(real_data / "vqa_rad.zip") as archive:
        entries = json.loads(archive.read("trainset.json"))
    withheld = [one for one in entries if any(name.endswith(f"trainset/{one['qid']}") for name in held)]
    assert len(withheld) == len(held) == sum(site["n_test"] for site in kept["sites"].values())
    more = f"vqa-rad:{zip_of(tmp_path / 'more.zip', testset=withheld)}@split=test"
    told = ("--device", "cpu", "--json")
    judged = edgefl_train("evaluate", tmp_path / "one", "--data", first, "--data", more, *told)
    assert judged.code == 0, judged.err
    assert figures(judged.json()) == figures(kept)
    both = run(tmp_path / "two", first, more)
    assert {name: site["n_test"] for name, site in both["sites"].items()} == {
        name: site["n_test"] for name, site in kept["sites"].items()
    }
