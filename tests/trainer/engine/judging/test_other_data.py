"""docs/guides/first-run.md, "Judge on other data": what of the data is judged, and with whose model."""

import json
import shutil

import pytest
from PIL import Image
from tests.trainer.conftest import edgefl_train, make_ward

COUNTS = {"east": {"nevus": 4, "other": 4}, "west": {"nevus": 4, "other": 4}}


@pytest.fixture
def other(tmp_path, cached):
    """Pictures of the run's sites that it never saw, in folders: no split is named."""
    root = make_ward(tmp_path / "other", COUNTS, seed=9)
    for path in [*root.glob("*/*/*.*")]:
        path.rename(path.with_name(f"new-{path.name}"))
    return root


def listed_in(folder, *, split="", header="image,file,label,center,split"):
    """The same pictures behind an index."""
    files = sorted(path.relative_to(folder) for path in folder.rglob("*.*") if path.suffix != ".csv")
    lines = [f"p{i},{file},{file.parts[1]},{file.parts[0]},{split}" for i, file in enumerate(files)]
    (folder / "index.csv").write_text("\n".join([header, *lines]))
    return f"manifest:{folder}"


def judged(run, data, *more):
    outcome = edgefl_train("evaluate", run, "--data", data, "--device", "cpu", *more)
    assert outcome.code == 0, outcome.err
    return outcome


def test_data_without_splits_is_judged_whole(other, finished):
    """A quarter of it was judged in silence, and a class with 45 pictures there had 12."""
    for data in (f"folder:{other}", listed_in(other)):
        found = judged(finished["local"], data, "--json").json()
        assert {name: site["n_test"] for name, site in found["sites"].items()} == {"east": 8, "west": 8}
        assert (found["labelled"], found["rows_learned_from"], found["reported_rows"]) == (16, 0, "test")
    told = judged(finished["local"], f"folder:{other}", "--plot", other.parent / "c.png")
    assert "not judged" not in told.out and "reported on all 16 pictures" in told.err  # there is no split `test`
    assert told.out.splitlines()[0].split()[:3] == ["site", "train", "judged"]


def test_what_is_left_out_is_said(other, ward, finished, tmp_path):
    """Rows of other splits; data that the run learned from keeps the quarter that the run held out."""
    data = listed_in(other)
    text = (other / "index.csv").read_text().splitlines()
    (other / "index.csv").write_text(
        "\n".join(line + ("train" if 0 < i < 6 else "test" * (i > 0)) for i, line in enumerate(text))
    )
    advice = " In a manifest, a column split that says test has all of them judged\n"
    assert f"5 of 16 pictures are not judged: they are no `test` rows.{advice}" in judged(finished["local"], data).out
    own = judged(finished["local"], ward)
    summary = json.loads((finished["local"] / "summary.json").read_text())["sites"]
    left = 40 - sum(site["n_test"] for site in summary.values())
    assert f"{left} of 40 pictures are not judged" in own.out and "manifest" not in own.out  # it is of a folder
    gone = tmp_path / "run"
    shutil.copytree(finished["local"], gone, ignore=shutil.ignore_patterns("checkpoints"))
    config = gone / "config.toml"
    config.write_text(config.read_text().replace(ward, f"folder:{tmp_path / 'gone'}"))
    assert f"{left} of 40 pictures are not judged" in judged(gone, ward).out  # what it learned from cannot be told


def test_one_picture_that_the_run_learned_from_has_all_dealt(other, ward, finished):
    """Judged whole, pictures that a model has learned would make its figures too high."""
    folder = other / "east" / "nevus"
    for place, file in enumerate(sorted((type(other)(ward.removeprefix("folder:")) / "east" / "nevus").iterdir())):
        shutil.copy(file, folder / f"known-{place}{file.suffix}")
    found = judged(finished["local"], f"folder:{other}", "--json").json()
    assert found["sites"]["west"]["n_test"] == 2 and found["labelled"] > 16


def test_pictures_saved_anew_are_judged_as_the_run_dealt_them(ward, finished, tmp_path):
    """By their pixels they are new, by their names at their site they are not: all of them were judged."""
    anew = tmp_path / "anew"
    shutil.copytree(ward.removeprefix("folder:"), anew)
    for path in anew.glob("*/*/*.*"):
        with Image.open(path) as picture:
            turned = picture.transpose(Image.Transpose.ROTATE_180)
        turned.save(path)
    own, found = (judged(finished["local"], data) for data in (ward, f"folder:{anew}"))
    left = [next(line for line in one.out.splitlines() if "not judged" in line) for one in (own, found)]
    assert left[0] == left[1] and "warning" not in found.err
    listed = listed_in(anew, split="test", header="place,image,label,center,split")
    told = judged(finished["local"], listed).err
    assert "lesions have the name of a lesion or an image that the same site learned from" in told


def test_another_hospitals_data_is_judged_with_the_model_of_one_site(other, finished, tmp_path):
    """No site of theirs has a model; `--site` lends one, and all of the data is judged."""
    (other / "west").rename(other / "our-ward")
    shutil.rmtree(other / "east")
    refused = edgefl_train("evaluate", finished["local"], "--data", f"folder:{other}")
    assert refused.code == 2 and "no site of the data (our-ward) has a model" in refused.sentence()
    assert "east and west: --site NAME judges all of the data with the model of one" in refused.sentence()
    found = judged(finished["local"], f"folder:{other}", "--site", "west", "--json").json()
    assert (list(found["sites"]), found["model_of"], found["sites_without_model"]) == (["our-ward"], "west", [])
    (other / "our-ward").rename(other / "west")
    same = judged(finished["local"], f"folder:{other}", "--json").json()
    ward, west = found["sites"]["our-ward"], same["sites"]["west"]
    learned = ("took_part", "n_train", "n_labelled")
    # A folder's lesions are named by their place, and their names seed the draws of an interval.
    equal = [key for key in west if key not in learned and not key.endswith("_interval")]
    assert ward.keys() | {"took_part"} == west.keys() and len(equal) > 20
    assert {key: ward[key] for key in equal} == {key: west[key] for key in equal}
    assert ward["n_train"] == 0 < west["n_train"]  # that ward taught nothing
    text = judged(finished["local"], f"folder:{other}", "--site", "west", "--ood", "textures").out
    assert text.startswith("all sites of the data are judged with the model of west\n") and "AUROC of the unc" in text
    unknown = edgefl_train("evaluate", finished["local"], "--data", f"folder:{other}", "--site", "bcn")
    assert unknown.code == 2 and "has no model of site 'bcn'; it has east, west" in unknown.sentence()
