"""`vqa-rad:PATH`: the official files, their traps, and their counts (docs/reference/data.md; Lau et al. 2018)."""

import json
import zipfile
from collections import Counter
from pathlib import Path

import pytest
from tests.trainer.conftest import pictures_of, rad_entries, write_rad

from edgefl_trainer.data import DataError, load_federation
from edgefl_trainer.data.questions import vocabulary_of
from edgefl_trainer.data.sources.vqa_rad import read_vqa_rad

ENTRY = {
    "qid": 7,
    "image_name": "synpic1.jpg",
    "image_organ": "CHEST",
    "question": " Is  the lung\tclear? ",
    "answer": "The Left  lung.",
    "answer_type": "CLOSED ",
    "question_type": "PRSE, ATRIB",
    "phrase_type": "freeform",
}


def table(path: Path, *entries: dict):
    return read_vqa_rad(write_rad(path / "rad.zip", trainset=entries))


@pytest.mark.data
def test_the_official_training_questions_tally(real_data: Path) -> None:
    """Counts of the project's notes on the data set: organs, types, pictures; 1,713 of the closed are yes or no.

    458 answers is what MEVF's list of this file has (aioz-ai/MICCAI19-MedVQA, `trainval_ans2label`).
    """
    found = read_vqa_rad(real_data / "vqa_rad.zip")
    assert Counter(row.site for row in found.rows) == {"rad-head": 977, "rad-chest": 1088, "rad-abdomen": 999}
    assert Counter(row.question.closed for row in found.rows) == {True: 1823, False: 1241}
    assert len({row.lesion for row in found.rows}) == 314 == len(found.each_picture())
    assert sum(row.question.closed and row.label in ("yes", "no") for row in found.rows) == 1713
    assert len({row.label for row in found.rows}) == 458
    assert {row.split for row in found.rows} == {""} and not found.warnings
    kinds = {part for row in found.rows for part in row.question.kind.split(", ")}
    assert " ".join(sorted(kinds)) == "ABN ATTRIB COLOR COUNT MODALITY ORGAN OTHER PLANE POS PRES SIZE"
    with zipfile.ZipFile(real_data / "vqa_rad.zip") as archive:
        raw = json.loads(archive.read("trainset.json"))
    assert len({" ".join(str(entry["answer"]).lower().split()) for entry in raw}) == 476  # in lower case alone


@pytest.mark.slow
@pytest.mark.data
def test_the_official_pictures_are_read_once_and_dealt_whole(real_data: Path, cache: Path) -> None:
    """All 314 pictures that are asked about; the zip's 315th is not."""
    found = load_federation([f"vqa-rad:{real_data}/vqa_rad.zip"], image_px=32)
    assert found.images.shape == (314, 32, 32, 3)
    kinds = ("train", "tune", "test")
    held = {name: [{found.lesions[row] for row in site.rows(kind)} for kind in kinds] for name, site in
            found.sites.items()}  # fmt: skip
    assert {name: sum(len(site.rows(kind)) for kind in kinds) for name, site in found.sites.items()} == {
        "rad-abdomen": 999, "rad-chest": 1088, "rad-head": 977
    }  # fmt: skip
    for train, tune, test in held.values():
        assert not (train & tune or train & test or tune & test)
        assert len(test) == round((len(train) + len(tune) + len(test)) / 4)


@pytest.mark.data
def test_answers_are_grouped_as_the_fields_list_groups_them(real_data: Path) -> None:
    """An independent writing of MEVF's `preprocess_answer`: two answers are one here where they are one there."""
    import re

    signs = ';/[]"{}()=+\\_-><@`,?!'
    written = "zero one two three four five six seven eight nine ten"
    numbers = {"none": 0, **{word: number for number, word in enumerate(written.split(" "))}}

    def theirs(text: str) -> str:
        out = text
        for sign in signs:
            beside = f"{sign} " in text or f" {sign}" in text or re.search(r"\d,\d", text)
            out = out.replace(sign, "" if beside else " ")
        out = re.sub(r"\.(?!\d)", "", out).lower()
        words = [str(numbers.get(word, word)) for word in out.split() if word not in ("a", "an", "the")]
        return " ".join(words).replace("x ray", "xray")

    with zipfile.ZipFile(real_data / "vqa_rad.zip") as archive:
        raw = json.loads(archive.read("trainset.json"))
    found = read_vqa_rad(real_data / "vqa_rad.zip")
    pairs = {(row.label, theirs(str(entry["answer"]))) for row, entry in zip(found.rows, raw, strict=True)}
    assert len(pairs) == len({ours for ours, _ in pairs}) == len({one for _, one in pairs}) == 458


def test_stray_spaces_spellings_and_lists_of_types_are_put_right(tmp_path: Path) -> None:
    """Two rows of the real file have `CLOSED `; types are written PRSE and ATRIB, and in either order."""
    [row] = table(tmp_path, ENTRY).rows
    assert (row.question.text, row.label) == ("Is the lung clear?", "left lung")
    assert row.question.closed and row.question.kind == "ATTRIB, PRES"
    assert (row.image, row.site, row.lesion) == ("trainset/7", "rad-chest", "image:synpic1.jpg")
    assert row.source == "images/synpic1.jpg"


@pytest.mark.parametrize(("answer", "label"), [(12, "12"), (2.5, "2.5"), ("Two", "2"), ("", None), (" ", None)])
def test_answers_that_are_numbers_and_answers_that_are_empty(tmp_path: Path, answer, label) -> None:
    """Ten answers of the real file are integers; a question of SLAKE has none."""
    found = table(tmp_path, {**ENTRY, "answer": answer}, {**ENTRY, "qid": 8})
    assert found.rows[0].label == label
    assert len(found.warnings) == (label is None)
    if label is None:
        assert "1 question without an answer, such as trainset/7: neither learned from nor" in found.warnings[0]


def test_the_official_split_or_a_dealt_one(tmp_path: Path) -> None:
    """With `testset.json` the file's split holds; without it the rows are dealt like those of any source."""
    entries, others = rad_entries(2), rad_entries(2, each=1, first=500)
    both = read_vqa_rad(write_rad(tmp_path / "a.zip", pictures_of(entries), trainset=entries, testset=others))
    assert Counter(row.split for row in both.rows) == {"train": 24, "test": 6}
    alone = read_vqa_rad(write_rad(tmp_path / "b.zip", trainset=entries))
    assert {row.split for row in alone.rows} == {""}
    judged = read_vqa_rad(write_rad(tmp_path / "c.zip", testset=others), test_only=True)
    assert {row.split for row in judged.rows} == {"test"} and len(judged.rows) == 6


def test_files_may_lie_deeper_and_in_a_folder(tmp_path: Path) -> None:
    """As somebody unpacks it; a Mac's shadow files are none of it."""
    entries = rad_entries(1)
    zipped = write_rad(tmp_path / "a.zip", pictures_of(entries), trainset=entries)
    root = tmp_path / "d" / "VQA-RAD"
    (root / "pictures").mkdir(parents=True)
    (tmp_path / "d" / "__MACOSX").mkdir()
    (tmp_path / "d" / "__MACOSX" / "trainset.json").write_bytes(b"\x00\x05")
    with zipfile.ZipFile(zipped) as archive:
        (root / "trainset.json").write_bytes(archive.read("trainset.json"))
        for name in archive.namelist():
            if name.startswith("images/"):
                (root / "pictures" / name.removeprefix("images/")).write_bytes(archive.read(name))
    found = read_vqa_rad(tmp_path / "d")
    assert {row.source.rpartition("/")[0] for row in found.rows} == {"VQA-RAD/pictures"}
    assert not found.pixels.missing


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"image_organ": "KNEE"}, ["Question 7 of trainset.json", "image_organ 'KNEE'", "HEAD, CHEST, ABD"]),
        ({"answer_type": "YES/NO"}, ["answer_type 'YES/NO'", "OPEN, CLOSED"]),
        ({"question": None}, ["has no text as question"]),
        ({"answer": True}, ["has no text as answer"]),
        ({"answer": ["a"]}, ["has no text as answer"]),
        ({"question": "?!"}, ["Question 7 of", "holds no word"]),
        ({"question": "lung " * 10_000}, ["50,000 characters as question", "at most 1,000"]),
        ({"image_name": "../../etc/passwd.jpg"}, ["'../../etc/passwd.jpg'", "as the official files do"]),
        ({"image_name": "/x.jpg"}, ["'/x.jpg'"]),
        ({"image_name": "x.exe"}, ["'x.exe'"]),
    ],
)
def test_a_question_that_cannot_be_used_is_named(tmp_path: Path, changes: dict, words: list[str]) -> None:
    with pytest.raises(DataError) as caught:
        table(tmp_path, {**ENTRY, **changes})
    assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("{}", "is not a list of questions"),
        ("[1]", "is not a list of questions"),
        ("[]", "holds no rows"),
    ],
)
def test_a_damaged_list_is_named(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "trainset.json").write_text(text)
    with pytest.raises(DataError, match=words):
        read_vqa_rad(tmp_path)


def test_a_question_that_stands_twice_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="names image 'trainset/7' twice"):
        table(tmp_path, ENTRY, ENTRY)


def test_without_training_questions_the_file_is_asked_for(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"lacks trainset.json.*@split=test, after"):
        read_vqa_rad(write_rad(tmp_path / "a.zip", testset=rad_entries(1)))
    with pytest.raises(DataError, match=r"lacks testset.json"):
        read_vqa_rad(write_rad(tmp_path / "b.zip", trainset=rad_entries(1)), test_only=True)
    rows = read_vqa_rad(tmp_path / "a.zip", test_only=True).rows
    with pytest.raises(DataError, match="no training question with an answer"):
        vocabulary_of(rows)
