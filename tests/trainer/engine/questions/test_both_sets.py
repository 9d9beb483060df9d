"""VQA-RAD's three organs and SLAKE's five regions as one federation. Source: docs/reference/data.md."""

import json

import pytest
from tests.trainer.conftest import edgefl_train, make_asked, make_slake

from edgefl_protocol.rules.questions import token_ids
from edgefl_trainer.data import load_federation

TINY = ("--preset", "tiny", "--image-px", "36", "--backbone", "tiny", "--device", "cpu", "--rounds", "2")
SMALL = ("--set", "width=32", "--set", "heads=2", "--set", "batch=8")
ORGANS = {"HEAD": "rad-head", "CHEST": "rad-chest", "ABD": "rad-abdomen"}
REGIONS = {
    "Lung": "slake-chest", "Abdomen": "slake-abdomen", "Brain_Tissue": "slake-brain", "Pelvic Cavity": "slake-pelvis",
    "Neck": "slake-neck",
}  # fmt: skip
EIGHT = sorted([*ORGANS.values(), *REGIONS.values()])


@pytest.fixture(scope="module")
def both(tmp_path_factory, cached) -> tuple[str, str]:
    """The SPECs of both layouts: six training pictures of each organ and region, three test pictures."""
    root = tmp_path_factory.mktemp("both")
    rad = make_asked(root / "rad", dict.fromkeys(ORGANS, 6), test=3)
    slake = make_slake(root / "slake", dict.fromkeys(REGIONS, 6), test=3, seed=1)
    first = json.loads((slake / "train.json").read_text())
    first[0] |= {"question": "Which shade?", "answer": "Two"}  # of one set alone
    (slake / "train.json").write_text(json.dumps(first))
    return f"vqa-rad:{rad}", f"slake:{slake}"


def test_both_sets_are_eight_sites_with_one_vocabulary(both):
    found = load_federation(both, image_px=24)
    assert sorted(found.sites) == EIGHT
    assert {(len(site.train) + len(site.tune), len(site.test)) for site in found.sites.values()} == {(12, 6)}
    assert found.images.shape == (8 * 9, 24, 24, 3)
    assert found.classes == ("2", "blue", "green", "no", "red", "yes")
    words = ("blue", "colour", "green", "is", "it", "red", "shade", "what", "which")
    assert found.questions is not None and found.questions.vocabulary.words == words
    table = {word: 2 + place for place, word in enumerate(words)}
    for site in ("rad-head", "slake-neck"):
        for row in found.sites[site].train:
            expected = token_ids(found.questions.texts[row], table, found.questions.vocabulary.length)
            assert found.questions.tokens[row].tolist() == expected.tolist()


@pytest.mark.slow
def test_eight_sites_of_both_sets_learn_together(both, tmp_path):
    given = ("--data", both[0], "--data", both[1])
    done = edgefl_train("run", "pfl-vqa", *given, *TINY, *SMALL, "--out", tmp_path / "run")
    assert done.code == 0, done.err
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert sorted(summary["sites"]) == EIGHT
    assert all(site["n_test"] == 6 and site["accuracy"] is not None for site in summary["sites"].values())
    judged = edgefl_train("evaluate", tmp_path / "run", "--data", both[1], "--json")
    assert judged.code == 0, judged.err
    sites = judged.json()["sites"]
    assert sorted(sites) == sorted(REGIONS.values())
    assert {name: site["accuracy"] for name, site in sites.items()} == {
        name: summary["sites"][name]["accuracy"] for name in sites
    }
