"""`slake:PATH[,lang=en|zh]`: languages, regions and counts (docs/reference/data.md; Liu et al. 2021)."""

import json
import zipfile
from collections import Counter
from pathlib import Path

import pytest
from tests.trainer.data.conftest import png

from edgefl_protocol.rules.questions import normalised_answer, words_of
from edgefl_trainer.data import DataError, load_federation
from edgefl_trainer.data.questions import check_pictures
from edgefl_trainer.data.sources.slake import read_slake
from edgefl_trainer.data.survey import read_tables

REGIONS = {  # of English questions: train, validate, test
    "slake-chest": (1959, 435, 429),
    "slake-abdomen": (1506, 296, 313),
    "slake-brain": (1103, 240, 237),
    "slake-pelvis": (222, 42, 47),
    "slake-neck": (129, 40, 35),
}


def entry(number: int, location: str = "Lung", lang: str = "en", **changes: object) -> dict:
    return {
        "img_id": number,
        "img_name": f"xmlab{number}/source.jpg",
        "question": "Is the lung healthy?" if lang == "en" else "肺健康吗?",
        "answer": "Yes" if lang == "en" else "是",
        "q_lang": lang,
        "location": location,
        "modality": "CT",
        "answer_type": "CLOSED",
        "base_type": "vqa",
        "content_type": "Abnormality",
        "triple": ["vhead", "_", "_"],
        "qid": number,
        **changes,
    }


def write_slake(path: Path, lists: dict[str, list[dict]], pictures: tuple[int, ...] = ()) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, entries in lists.items():
            archive.writestr(f"{name}.json", json.dumps(entries))
        for number in pictures:
            archive.writestr(f"imgs/xmlab{number}/source.jpg", png(number))
            archive.writestr(f"imgs/xmlab{number}/mask.png", png(number + 500))
    return path


@pytest.mark.data
def test_the_official_questions_tally(real_data: Path) -> None:
    """Counts of the project's notes: English 4,919, 1,053 and 1,061 questions about 450, 96 and 96 pictures."""
    found = read_slake(real_data / "slake_questions.zip", "en")
    counts = Counter((row.site, row.split) for row in found.rows)
    assert {site: tuple(counts[site, split] for split in ("train", "val", "test")) for site in REGIONS} == REGIONS
    assert len(found.rows) == 4919 + 1053 + 1061
    pictures = {split: {row.lesion for row in found.rows if row.split == split} for split in ("train", "val", "test")}
    assert [len(pictures[split]) for split in ("train", "val", "test")] == [450, 96, 96]
    assert len(set.union(*pictures.values())) == 642  # no picture is shared
    kinds = Counter((row.split, row.question.closed) for row in found.rows)
    assert [kinds["train", False], kinds["train", True]] == [2976, 1943]
    assert [kinds["test", False], kinds["test", True]] == [645, 416]
    assert "1 question without an answer, such as train/1622" in found.warnings[0]


@pytest.mark.slow
@pytest.mark.data
def test_both_languages_of_the_official_file(real_data: Path) -> None:
    """9,835, 2,099 and 2,094 questions in both languages together."""
    rows = [*read_slake(real_data / "slake_questions.zip", "en").rows]
    rows += read_slake(real_data / "slake_questions.zip", "zh").rows
    assert Counter(row.split for row in rows) == {"train": 9835, "val": 2099, "test": 2094}


@pytest.mark.data
def test_eight_sites_of_both_sets(real_data: Path) -> None:
    """VQA-RAD's three organs and SLAKE's five regions are eight sites."""
    specs = [f"vqa-rad:{real_data}/vqa_rad.zip", f"slake:{real_data}/slake_questions.zip"]
    counts = Counter(row.site for _, rows in read_tables(specs).rows for row in rows)
    organs = {"rad-head": 977, "rad-chest": 1088, "rad-abdomen": 999}
    assert counts == {**organs, **{site: sum(split) for site, split in REGIONS.items()}}


@pytest.mark.slow
@pytest.mark.data
def test_the_official_questions_of_both_sets_are_one_federation(real_data: Path, tmp_path: Path, cache: Path) -> None:
    """SLAKE's official questions about drawn pictures, for want of its own: eight sites, one list of answers."""
    whole = tmp_path / "slake.zip"
    with zipfile.ZipFile(real_data / "slake_questions.zip") as lists, zipfile.ZipFile(whole, "w") as archive:
        entries = {Path(name).name: json.loads(lists.read(name)) for name in lists.namelist() if name.endswith(".json")}
        for file in ("train.json", "validate.json", "test.json"):
            archive.writestr(file, json.dumps(entries[file]))
        for name in sorted({one["img_name"] for found in entries.values() for one in found}):
            archive.writestr(f"imgs/{name}", png(len(name)))
    found = load_federation([f"vqa-rad:{real_data}/vqa_rad.zip", f"slake:{whole}"], image_px=8)
    assert found.images.shape[0] == 314 + 642
    counts = {name: sum(map(len, (s.train, s.tune, s.val, s.test))) for name, s in found.sites.items()}
    organs = {"rad-head": 977, "rad-chest": 1088, "rad-abdomen": 999}
    assert counts.keys() == organs.keys() | REGIONS.keys()
    assert {name: counts[name] for name in organs} == organs
    missing = {name: sum(split) - counts[name] for name, split in REGIONS.items()}
    assert sorted(missing.values()) == [0, 0, 0, 0, 1]  # a question without an answer
    english = [one for one in entries["train.json"] if one["q_lang"] == "en" and str(one["answer"]).strip()]
    assert {normalised_answer(str(one["answer"])) for one in english} <= set(found.classes)
    assert found.questions is not None
    assert {word for one in english for word in words_of(one["question"])} <= {*found.questions.vocabulary.words}


def test_one_language_is_read(tmp_path: Path) -> None:
    path = write_slake(tmp_path / "s.zip", {"train": [entry(1), entry(2, lang="zh"), entry(3, q_lang="EN ")]})
    assert [row.label for row in read_slake(path, "en").rows] == ["yes", "yes"]
    assert [row.label for row in read_slake(path, "zh").rows] == ["是"]
    with pytest.raises(DataError, match="lang=de is not known for slake:; allowed: en, zh"):
        load_federation([f"slake:{path},lang=de"], image_px=8)


@pytest.mark.parametrize(
    ("location", "site"),
    [
        ("Chest_heart", "slake-chest"),
        ("Brain_Face", "slake-brain"),
        ("Pelvic Cavity", "slake-pelvis"),
        (" neck ", "slake-neck"),
    ],
)
def test_ten_locations_are_five_sites(tmp_path: Path, location: str, site: str) -> None:
    path = write_slake(tmp_path / "s.zip", {"train": [entry(1, location)]})
    assert [row.site for row in read_slake(path, "en").rows] == [site]
    write_slake(tmp_path / "t.zip", {"train": [entry(1, "Knee")]})
    with pytest.raises(DataError, match=r"Question 1 of train.json in .* has the location 'Knee'; allowed: Lung, "):
        read_slake(tmp_path / "t.zip", "en")


def test_pictures_lie_in_their_folders_and_masks_are_none(tmp_path: Path) -> None:
    lists = {"train": [entry(1), entry(2)], "validate": [entry(3)], "test": [entry(4)]}
    found = read_slake(write_slake(tmp_path / "s.zip", lists, (1, 2, 3, 4)), "en")
    assert [row.source for row in found.rows] == [f"imgs/xmlab{n}/source.jpg" for n in (1, 2, 3, 4)]
    assert [row.split for row in found.rows] == ["train", "train", "val", "test"]
    assert not found.pixels.missing


def test_a_copy_is_not_taken_for_the_official_picture(tmp_path: Path) -> None:
    """docs/reference/data.md: pictures lie at `imgs/xmlabN/source.jpg`; those of another folder come later here."""
    path = write_slake(tmp_path / "s.zip", {"train": [entry(1)]}, pictures=(1,))
    with zipfile.ZipFile(path, "a") as archive:
        (official,) = [name for name in archive.namelist() if name.endswith("source.jpg")]
        archive.writestr(official.replace("imgs/", "small/"), archive.read(official))
    assert {row.source for row in read_slake(path, "en").rows} == {official}


def test_questions_without_pictures_load_and_say_so(tmp_path: Path, cache: Path) -> None:
    path = write_slake(tmp_path / "s.zip", {"train": [entry(1), entry(2)]})
    found = read_slake(path, "en")
    assert len(found.rows) == 2
    with pytest.raises(DataError, match=r"holds none of the pictures that are asked about, such as imgs/xmlab1/source"):
        check_pictures(found.pixels, 2)
    with pytest.raises(DataError, match=r"holds none of the pictures that are asked about"):
        load_federation([f"slake:{path}"], image_px=8)
    write_slake(path, {"train": [entry(1), entry(2), entry(2, qid=9)]}, (1,))
    with pytest.raises(DataError, match=r"^imgs/xmlab2/source.jpg is not in .*; add what is missing"):
        load_federation([f"slake:{path}"], image_px=8)


def test_validation_questions_change_no_byte_of_answers_and_words(tmp_path: Path) -> None:
    """Answers and words come from the training file alone, whatever the one for validation holds."""
    learned = [entry(1), entry(2, answer="No")]
    found = [
        load_federation(
            [f"slake:{write_slake(tmp_path / f'{number}.zip', {'train': learned, 'validate': [kept]}, (1, 2, 3))}"],
            image_px=8,
        )
        for number, kept in enumerate((entry(3), entry(3, question="Quo vadis, organ?", answer="left lung")))
    ]
    assert found[0].questions is not None and found[1].questions is not None
    assert found[0].questions.vocabulary == found[1].questions.vocabulary
