"""Questions about pictures as the rows of a federation: docs/reference/data.md, docs/decisions/0044."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.trainer.conftest import edgefl_train, pictures_of, rad_entries, write_rad

from edgefl_protocol.rules.questions import Questions, words_of
from edgefl_trainer.contract import Task
from edgefl_trainer.data import DataError, Federation, load_federation
from edgefl_trainer.data.questions import OTHER_ANSWER, Vocabulary
from edgefl_trainer.data.sources import files
from edgefl_trainer.engine.settings import RunSettings
from edgefl_trainer.engine.sites import build_sites, examples_of
from edgefl_trainer.methods import METHODS
from edgefl_trainer.models.backbones import load_backbone

ENTRIES = rad_entries()


@pytest.fixture
def rad(tmp_path: Path, cache: Path) -> Path:
    """Three organs, six pictures of each, four questions about each picture; no test questions."""
    return write_rad(tmp_path / "rad.zip", pictures_of(ENTRIES), trainset=ENTRIES)


def load(*specs: object, **given: Any) -> Federation:
    return load_federation([f"vqa-rad:{spec}" for spec in specs], image_px=24, **given)


def test_rows_are_questions_and_a_picture_is_stored_once(rad: Path) -> None:
    found = load(rad)
    assert found.images.shape == (18, 24, 24, 3) and len(found.names) == 72 == len(found.labels)
    assert found.pictures is not None and found.questions is not None
    for row, entry in enumerate(ENTRIES):
        assert found.lesions[row] == f"image:{entry['image_name']}"
        assert found.questions.texts[row] == entry["question"] and found.questions.kinds[row] == entry["question_type"]
        assert found.questions.closed[row] == (entry["answer_type"] == "CLOSED")
        bright = found.images[found.places([row])].mean() > 125
        assert bright == int(entry["image_name"][-5]) % 2  # how the picture of this number was drawn


def test_a_picture_is_decoded_once(rad: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decoded = []
    whole = files.decode
    monkeypatch.setattr(files, "decode", lambda data: (decoded.append(1), whole(data))[1])
    load(rad)
    load(rad, seed=3)
    assert len(decoded) == 18


def test_no_picture_stands_on_two_sides(rad: Path) -> None:
    """A row's lesion is its picture: train, tune and test are dealt by it, at each site a quarter and 15 per cent."""
    found = load(rad)
    assert list(found.sites) == ["rad-abdomen", "rad-chest", "rad-head"]
    for site in found.sites.values():
        kinds = {kind: {found.lesions[row] for row in site.rows(kind)} for kind in ("train", "tune", "test")}
        assert [len(kinds[kind]) for kind in ("train", "tune", "test")] == [3, 1, 2]
        assert not (kinds["train"] & kinds["tune"] or kinds["train"] & kinds["test"] or kinds["tune"] & kinds["test"])
        assert all(len(site.rows(kind)) == 4 * len(lesions) for kind, lesions in kinds.items())
    other = load(f"{rad}@rows=60/20/20")
    assert Counter(len(site.test) for site in other.sites.values()) == {4: 3}


def test_answers_and_words_are_those_of_the_training_rows(rad: Path) -> None:
    """Independently: the sorted answers and words of what is not test."""
    found = load(rad)
    assert found.questions is not None
    test = {int(row) for site in found.sites.values() for row in site.test}
    learned = [entry for row, entry in enumerate(ENTRIES) if row not in test]
    assert found.classes == tuple(sorted({entry["answer"].lower() for entry in learned}))
    words = sorted({word for entry in learned for word in entry["question"].lower().strip("?").split()})
    assert found.questions.vocabulary == Questions(tuple(words))
    assert found.questions.tokens.shape == (72, 20) and found.questions.tokens.min() == 0
    assert set(found.questions.tokens[found.sites["rad-head"].train].ravel()) <= {0, *range(2, 2 + len(words))}
    one = load(f"{rad}@site=rad-head")
    assert one.classes == found.classes and one.questions is not None
    assert one.questions.vocabulary == found.questions.vocabulary  # all sites share them


def test_every_seed_has_the_same_answers_and_words(rad: Path) -> None:
    """docs/decisions/0044: tune rows are dealt by the seed, and the lists are read from them too."""
    found = [load(rad, seed=seed) for seed in range(4)]
    assert len({tuple(site.tune) for one in found for site in [one.sites["rad-head"]]}) > 1
    assert len({one.classes for one in found}) == 1
    assert len({one.questions.vocabulary for one in found if one.questions is not None}) == 1


TEXTS = st.text("abc xyz?1,肺", min_size=1, max_size=12).filter(lambda text: bool(words_of(text)))


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(asked=st.lists(st.tuples(TEXTS, st.text(max_size=8)), min_size=1, max_size=5))
def test_test_questions_change_no_byte_of_answers_and_words(rad: Path, asked: list[tuple[str, str]]) -> None:
    """The task's property, for the file of test questions in the same source and for one of its own."""
    changed = [
        {**ENTRIES[i], "qid": 9000 + i, "question": question, "answer": answer}
        for i, (question, answer) in enumerate(asked)
    ]
    more = write_rad(rad.parent / "more.zip", testset=changed)
    whole = write_rad(rad.parent / "whole.zip", pictures_of(ENTRIES), trainset=ENTRIES, testset=changed)
    for found in (load(rad, f"{more}@split=test"), load(whole)):
        assert found.questions is not None
        assert found.classes == ("abd", "chest", "head", "no", "yes")
        assert found.questions.vocabulary == load(rad, f"{rad.parent}/fixed.zip@split=test").questions.vocabulary  # type: ignore[union-attr]


@pytest.fixture(autouse=True)
def fixed(tmp_path: Path) -> Path:
    """A file of test questions alone: of each organ one picture, asked what no training question was."""
    asked = [
        {**entry, "qid": 5000 + i, "answer": answer, "question": "Quo vadis, organ?"}
        for i, (entry, answer) in enumerate(zip(ENTRIES[::24], ("Yes.", "left lung", "No"), strict=True))
    ]
    return write_rad(tmp_path / "fixed.zip", testset=asked)


def test_test_questions_in_a_file_of_their_own_take_the_pictures_of_the_first(rad: Path, fixed: Path) -> None:
    """The first source's questions are all learned from or tuned on; an answer nobody trained counts as wrong."""
    found = load(rad, f"{fixed}@split=test")
    assert found.images.shape[0] == 18 and found.questions is not None and found.report_split == "test"
    for name, site in found.sites.items():
        assert (len(site.train) + len(site.tune), len(site.val), len(site.test)) == (24, 0, 1), name
    rows = [int(site.test[0]) for site in found.sites.values()]
    assert [found.questions.texts[row] for row in rows] == ["Quo vadis, organ?"] * 3
    labels = {name: int(found.labels[site.test[0]]) for name, site in found.sites.items()}
    yes, no = found.classes.index("yes"), found.classes.index("no")
    assert labels == {"rad-head": yes, "rad-chest": OTHER_ANSWER, "rad-abdomen": no}
    organ = 2 + found.questions.vocabulary.words.index("organ")
    assert found.questions.tokens[rows[0]].tolist() == [1, 1, organ, *[0] * 17]
    for row in rows:
        [first] = {found.places([i])[0] for i in range(72) if found.lesions[i] == found.lesions[row]}
        assert found.places([row])[0] == first
    assert len(load(rad, f"{fixed}@split=test@site=rad-head").sites) == 3


def test_pictures_on_both_sides_of_the_sources_split_and_unknown_answers_are_told(rad: Path, fixed: Path) -> None:
    """All 203 pictures of VQA-RAD's official test questions are also among those of the training questions."""
    shared, unknown, words = load(rad, f"{fixed}@split=test").warnings
    assert shared.startswith("3 of the 3 pictures of the test questions are also shown by training questions")
    assert unknown == "1 of the 3 questions of test has an answer that no training question has: it counts as wrong"
    assert words == (  # vadis
        "a device refuses 3 of the 3 questions of test, for a word that no training question has, that negates, or "
        "that comes too late to be read, or for want of one that names anything; here they are judged all the same"
    )
    assert load(rad).warnings == ()


def test_a_question_without_an_answer_is_neither_learned_from_nor_judged_on(rad: Path, tmp_path: Path) -> None:
    """A blank answer is none; one that nobody trained is an answer, which counts as wrong: docs/reference/data.md."""
    asked = [
        {**entry, "qid": 5000 + i, "answer": answer}
        for i, (entry, answer) in enumerate(zip(ENTRIES[::24], ("Yes.", "left lung", "  "), strict=True))
    ]
    found = load(rad, f"{write_rad(tmp_path / 'blank.zip', testset=asked)}@split=test")
    assert {name: len(site.test) for name, site in found.sites.items()} == {
        "rad-abdomen": 0, "rad-chest": 1, "rad-head": 1
    }  # fmt: skip
    assert any("1 question without an answer, such as testset/5002: neither" in line for line in found.warnings)
    assert any(line.startswith("1 of the 2 questions of test has an answer that no") for line in found.warnings)


def test_test_questions_with_a_word_that_another_site_taught_are_counted(tmp_path: Path, cache: Path) -> None:
    """The word is in every site's table and in no other site's training questions; docs/decisions/0051."""
    taught = [
        {**one, "question": "Is the catheter bright?"} if one["image_organ"] == "CHEST" else one for one in ENTRIES
    ]
    asked = [{**one, "qid": 5000 + i, "question": "Is the catheter bright?"} for i, one in enumerate(ENTRIES[::24])]
    data = write_rad(tmp_path / "rad.zip", pictures_of(taught), trainset=taught)
    more = write_rad(tmp_path / "more.zip", testset=asked)
    told = (
        "where the weights of a model stay at its site, a device refuses another 2 of the 3 questions of test, for a "
        "word that their own site did not teach"
    )
    assert told in load(data, f"{more}@split=test").warnings
    shown = edgefl_train("data", f"vqa-rad:{data}", f"vqa-rad:{more}@split=test")
    assert f"warning: {told}" in shown.err
    assert not any("did not teach" in line for line in load(data).warnings)


def test_data_to_judge_a_run_on_is_read_with_the_runs_words(rad: Path) -> None:
    known = Vocabulary(("yes", "no"), Questions(("bright", "is"), length=4))
    found = load(rad, vocabulary=known)
    assert found.classes == ("yes", "no") and found.questions is not None
    assert found.questions.tokens[0].tolist() == [3, 1, 1, 1] and found.questions.tokens.shape == (72, 4)
    assert {int(label) for label in found.labels} == {0, 1, OTHER_ANSWER}
    head = found.sites["rad-head"]
    assert (len(head.train) + len(head.tune), len(head.test)) == (8, 8)  # the unknown is judged, never learned from


def test_the_digest_of_who_has_which_rows_covers_the_questions(rad: Path) -> None:
    before = load(rad).partition_sha256
    write_rad(rad, pictures_of(ENTRIES), trainset=ENTRIES[::-1])
    assert load(rad).partition_sha256 == before
    for key, value in (("question", "Is it dark?"), ("answer", "maybe"), ("image_name", ENTRIES[1]["image_name"])):
        changed = [{**entry, key: value} if entry is ENTRIES[-1] else entry for entry in ENTRIES]
        write_rad(rad, pictures_of(ENTRIES), trainset=changed)
        assert load(rad).partition_sha256 != before, key


def test_examples_read_pictures_questions_and_targets(rad: Path) -> None:
    found = load(rad)
    assert found.questions is not None
    tune = examples_of(found, found.sites["rad-chest"].tune)
    images, targets = tune.read(np.array([2, 0]))
    rows = found.sites["rad-chest"].tune[[2, 0]]
    np.testing.assert_array_equal(images.numpy(), found.images[found.places(rows)])
    np.testing.assert_array_equal(targets.numpy(), found.labels[rows])
    np.testing.assert_array_equal(tune.asked(np.array([2, 0])).numpy(), found.questions.tokens[rows])


def test_without_labels_a_picture_is_learned_from_once(rad: Path) -> None:
    """As long as it has questions; those of tune pictures are not learned from."""
    backbone = load_backbone("tiny", image_px=24)
    found = load(rad)
    task = Task(name="pixels", classes=found.classes, backbone=backbone.spec, rounds=1, epochs=1, seed=0)
    sites = build_sites(found, task, backbone, RunSettings(method="local", data=("x",)), METHODS["local"]())
    assert {(len(site.unlabelled), len(site.train)) for site in sites.values()} == {(3, 12)}


def test_what_was_learned_from_is_counted_by_picture(rad: Path, fixed: Path) -> None:
    own = load(rad)
    held_out = np.unique(own.places(own.sites["rad-head"].test))
    assert own.learned_among(own.images[held_out]) == 0
    assert own.learned_among(own.images) == 12  # of each organ three pictures are learned from and one is tuned on


def test_sites_dealt_evenly_share_no_picture(rad: Path) -> None:
    found = load(f"{rad}@split=iid:3")
    held = [{found.lesions[row] for kind in ("train", "tune", "test") for row in site.rows(kind)} for site in
            found.sites.values()]  # fmt: skip
    assert [len(lesions) for lesions in held] == [6, 6, 6] and len(set.union(*held)) == 18


def test_a_site_of_one_question_learns_from_it(rad: Path) -> None:
    entries = [*ENTRIES[:24], ENTRIES[24]]
    write_rad(rad, pictures_of(entries), trainset=entries)
    chest = load(rad).sites["rad-chest"]
    assert [len(chest.rows(kind)) for kind in ("train", "tune", "val", "test")] == [1, 0, 0, 0]
    assert (
        "site rad-chest has 1 question: too few to learn from and to judge"
        in edgefl_train("data", f"vqa-rad:{rad}").err
    )


def test_what_is_for_pictures_alone_is_refused(rad: Path, fixed: Path, tmp_path: Path) -> None:
    ours = f"vqa-rad:{rad}"

    def refused(*specs: str, **given: Any) -> str:
        with pytest.raises(DataError) as caught:
            load_federation(specs, image_px=24, **given)
        return str(caught.value)

    assert refused(ours, task="nevus").startswith("--task is for pictures alone")
    assert refused(ours, classes=["yes"]).startswith("--classes is for pictures alone")
    assert "holds questions and lesions:" in refused(ours, "lesions:images=8")
    assert "has @split=test, which is for questions alone" in refused("lesions:images=8@split=test")
    assert "leave @split=iid out" in refused(f"{ours}@split=iid:2", f"vqa-rad:{fixed}@split=test")
    assert "@split=test" in refused(f"vqa-rad:{fixed}@split=test", ours)  # its pictures come later
    given = ("partition", "--data", ours, "--scheme", "iid", "--sites", "2", "-o", tmp_path / "p.json")
    assert "holds questions, and a partition deals pictures alone" in edgefl_train(*given).sentence()
    assert "--task is for pictures alone" in edgefl_train("data", ours, "--task", "nevus").sentence()


def test_the_survey_counts_questions_and_pictures(rad: Path, fixed: Path, tmp_path: Path) -> None:
    outcome = edgefl_train("data", f"vqa-rad:{rad}", f"vqa-rad:{fixed}@split=test", "--sheet", tmp_path / "s.png")
    assert outcome.code == 0, outcome.err
    lines = [line.split() for line in outcome.out.splitlines()]
    assert lines[0] == ["site", "closed", "open", "pictures", "train", "test"]
    assert lines[1] == ["rad-abdomen", "13", "12", "6", "24", "1"]
    assert "training questions: 13 words, 5 answers" in outcome.out and "36 × 36 (18)" in outcome.out
    assert "warning: 3 of the 3 pictures of the test questions" in outcome.err
    assert (tmp_path / "s.png").exists()


def test_a_missing_picture_is_told_once_and_before_a_run(rad: Path) -> None:
    write_rad(rad, pictures_of(ENTRIES) - {"head1.png", "abd0.png"}, trainset=ENTRIES)
    outcome = edgefl_train("data", f"vqa-rad:{rad}")
    assert outcome.code == 1 and "2 pictures cannot be read" in outcome.out
    assert outcome.out.count("head1.png") == outcome.out.count("abd0.png") == 1
    with pytest.raises(DataError, match=r"2 of 18 pictures are missing: images/head1.png is not in .*abd0.png"):
        load(rad)
    write_rad(rad, trainset=ENTRIES)
    outcome = edgefl_train("data", f"vqa-rad:{rad}")
    assert outcome.code == 1 and "holds none of the pictures that are asked about" in outcome.out
    assert "closed" in outcome.out and "cannot be read" not in outcome.out
