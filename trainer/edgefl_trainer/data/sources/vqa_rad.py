"""`vqa-rad:PATH`: VQA-RAD, questions that clinicians asked about radiology images; a site is an organ.

`trainset.json`, perhaps `testset.json`, and the pictures `images/NAME.jpg`, in a folder or zip. Without `testset.json`
a share of each site's pictures is dealt to `test`, as for every source without a split.

Differs from the published files: stray spaces and spellings of types are put right (`CLOSED `, `ATRIB`), a list of
types stands in alphabetical order, and answers that are numbers are text. All 203 pictures of the official test
questions are among those of the training questions, which is told, not changed.
Source: Lau et al., "A dataset of clinically generated visual questions and answers about radiology images", Scientific
Data 2018; docs/reference/data.md.
"""

from pathlib import Path

from edgefl_trainer.data.rows import Row, SourceRows
from edgefl_trainer.data.sources.question_files import (
    Layout,
    ListedQuestion,
    PictureFiles,
    make_row,
    question_rows,
    read_layout,
)
from edgefl_trainer.data.sources.store import open_store

SITES = {"HEAD": "rad-head", "CHEST": "rad-chest", "ABD": "rad-abdomen"}  # organ → site
LAYOUT = Layout({"train": "trainset.json", "test": "testset.json"}, depth=1, folder="images")
_MISSPELT = {"ATRIB": "ATTRIB", "PRSE": "PRES"}


def read_vqa_rad(path: Path, *, test_only: bool = False, pictures: Path | None = None) -> SourceRows:
    """Read one row for each question, in the order of the files.

    Args:
        test_only: read `testset.json` alone.
        pictures: folder or zip where the pictures lie; None: `path`.

    Raises:
        DataError: A file is missing, or a question cannot be used; missing pictures are for the reader of the rows.
    """
    lists = read_layout(LAYOUT, open_store(path), test_only=test_only)
    store = open_store(pictures or path)
    places = PictureFiles(store, LAYOUT)
    rows = [_row(entry, split, places) for split, entries in lists for entry in entries]
    return question_rows(f"vqa-rad:{path}", store, rows)


def _row(entry: ListedQuestion, split: str, places: PictureFiles) -> Row:
    types = {_MISSPELT.get(one.strip(), one.strip()) for one in entry.text("question_type").upper().split(",")}
    return make_row(
        entry,
        split,
        site=entry.one_of("image_organ", SITES),
        picture=places.locate(entry, "image_name"),
        kind=", ".join(sorted(types)),
    )
