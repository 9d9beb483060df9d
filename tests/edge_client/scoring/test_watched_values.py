"""`edgefl watch` while the values that it scores with are removed or replaced: no further picture is scored by them.

Source: docs/reference/device-learning.md, which says what takes values out of use; docs/guides/device.md.
"""

import json
from pathlib import Path

import numpy as np
import pytest

from edgefl_client.home import Home
from edgefl_client.learning.checkpoint import forget
from edgefl_client.scoring import watched_folder
from edgefl_client.scoring.learning_verdict import Answers, LearningVerdict
from edgefl_client.scoring.personal import PersonalState, save_personal
from edgefl_protocol.bundle import load_bundle

PICTURES = 5
WORDS = ("watch", "drop", "--out", "scores.jsonl", "--interval", "0.1", "--threads", "1")
SENTENCE = (
    "edgefl: the values that this command scores with are no longer in use, because others were learned or these were "
    "removed: start it again"
)


@pytest.fixture
def ward(run, lab, tmp_path):
    """A bundle in use, and a folder that a camera filled."""
    (tmp_path / "model.edgefl").write_bytes(lab.bundle_bytes())
    assert run("use", tmp_path / "model.edgefl", "--trust", lab.SIGNER.public.hex())[0] == 0
    (tmp_path / "drop").mkdir()
    for number in range(PICTURES):
        (tmp_path / "drop" / f"{number}.png").write_bytes(lab.encoded(lab.photo(60, 40)))
    return tmp_path


def learn(home: Path, lab, scale: float, version: int = 1) -> None:
    """Put personal values into use, as a round that passed its gate does: those of a bundle, scaled."""
    bundle = load_bundle(lab.bundle_bytes(version=version), [lab.SIGNER.public], lab.NOW_MS)
    weights = {name: (np.float32(scale) * value).astype(value.dtype) for name, value in bundle.weights.items()}
    same = Answers(
        balanced_accuracy=0.8, referred=0, balanced_accuracy_not_referred=0.8, wrong_not_referred=0, missed=0
    )
    verdict = LearningVerdict(bundle=same, personal=same, held=90, least_of_a_class=30, class_rule=True)
    state = PersonalState(
        bundle_sha256=bundle.sha256, weights=weights, seen=(True,) * 3, verdict=verdict, images=9, round=1
    )
    save_personal(Home(home), state)


def states(out: Path) -> list[dict[str, str]]:
    return [json.loads(line)["model"]["state"] for line in out.read_text().splitlines()]


@pytest.mark.parametrize(
    ("then", "more", "ends", "kinds"),
    [
        ("removed", (), True, ("personal", "bundle")),
        ("learned anew", (), True, ("personal", "personal")),
        ("kept again", (), False, ("personal", "personal")),
        ("removed", ("--weights", "bundle"), False, ("bundle", "bundle")),
    ],
)
def test_no_further_picture_of_a_batch_is_scored(run, ward, lab, after, then, more, ends, kinds):
    """In the middle of five pictures: the two that were written stay, the next watch scores the others as it must."""
    learn(run.home, lab, 0.5)
    change = {
        "removed": lambda: forget(Home(run.home), everything=False),
        "learned anew": lambda: learn(run.home, lab, 0.25),
        "kept again": lambda: learn(run.home, lab, 0.5),
    }
    after(2, watched_folder, "write_line", change[then])
    code, _, err = run(*WORDS, "--once", *more)
    assert (code, len(states(ward / "scores.jsonl"))) == ((1, 2) if ends else (0, PICTURES))
    assert (err.splitlines()[-1] == SENTENCE) is ends
    assert run(*WORDS, "--once", *more)[0] == 0
    found = states(ward / "scores.jsonl")
    assert [state["kind"] for state in found] == [kinds[0]] * 2 + [kinds[1]] * (PICTURES - 2)
    assert len({state["sha256"] for state in found}) == 1 + ends


def test_it_asks_for_no_other_start_that_would_fail(run, ward, lab, after):
    """`--weights personal` once nothing is kept: the next start ends by the same sentence, as wrongly called (2)."""
    learn(run.home, lab, 0.5)
    after(2, watched_folder, "write_line", lambda: forget(Home(run.home), everything=False))
    ended, again = (run(*WORDS, "--once", "--weights", "personal") for _ in range(2))
    assert (ended[0], again[0], len(states(ward / "scores.jsonl"))) == (2, 2, 2)
    assert ended[2].splitlines()[-1] == again[2].splitlines()[-1]
    assert "leave that option out to score with the bundle's values" in ended[2] and "start it again" not in ended[2]
    assert run(*WORDS, "--once")[0] == 0


def test_it_ends_also_with_nothing_to_score(run, ward, lab, after):
    """The first values learned for its bundle end it; those for another bundle change nothing."""

    def too_late() -> None:
        raise AssertionError("it still looks for pictures")

    after(4, watched_folder, "look", lambda: learn(run.home, lab, 0.5, version=2))
    after(6, watched_folder, "look", lambda: learn(run.home, lab, 0.5))
    after(8, watched_folder, "look", too_late)
    code, _, err = run(*WORDS)
    assert (code, err.splitlines()[-1]) == (1, SENTENCE)
    assert [state["kind"] for state in states(ward / "scores.jsonl")] == ["bundle"] * PICTURES
