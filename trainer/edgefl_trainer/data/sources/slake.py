"""`slake:PATH[,lang=en|zh]`: SLAKE, questions about radiology images in English and Chinese; a site is a body region.

`train.json`, perhaps `validate.json` and `test.json`, and the pictures `imgs/xmlabN/source.jpg`, in a folder or zip.
The ten values of `location` are five sites. One language is read. Masks, detections and the knowledge graph are not.

`location` is where the picture was taken; what a question asks may name another place.
Source: Liu et al., "SLAKE: A semantically-labeled knowledge-enhanced dataset for medical visual question answering",
ISBI 2021; docs/reference/data.md.
"""

from pathlib import Path

from edgefl_trainer.data.errors import SpecError
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

LANGUAGES = ("en", "zh")
SITES = {
    "Lung": "slake-chest", "Chest_lung": "slake-chest", "Chest_heart": "slake-chest",
    "Chest_mediastinal": "slake-chest", "Abdomen": "slake-abdomen", "Brain": "slake-brain",
    "Brain_Tissue": "slake-brain", "Brain_Face": "slake-brain", "Pelvic Cavity": "slake-pelvis", "Neck": "slake-neck",
}  # fmt: skip
"""Location → site."""
LAYOUT = Layout({"train": "train.json", "val": "validate.json", "test": "test.json"}, depth=2, folder="imgs")


def read_slake(path: Path, lang: str, *, test_only: bool = False, pictures: Path | None = None) -> SourceRows:
    """Read one row for each question of a language, in the order of the files.

    Args:
        lang: `en` or `zh`.
        test_only: read `test.json` alone.
        pictures: folder or zip where the pictures lie; None: `path`.

    Raises:
        DataError: A file is missing, or a question cannot be used; missing pictures are for the reader of the rows.
    """
    if lang not in LANGUAGES:
        raise SpecError(f"lang={lang} is not known for slake:; allowed: {', '.join(LANGUAGES)}.")
    lists = read_layout(LAYOUT, open_store(path), test_only=test_only)
    store = open_store(pictures or path)
    places = PictureFiles(store, LAYOUT)
    rows = [
        _row(entry, split, places)
        for split, entries in lists
        for entry in entries
        if entry.one_of("q_lang", dict(zip(LANGUAGES, LANGUAGES, strict=True))) == lang
    ]
    return question_rows(f"slake:{path}", store, rows)


def _row(entry: ListedQuestion, split: str, places: PictureFiles) -> Row:
    return make_row(
        entry,
        split,
        site=entry.one_of("location", SITES),
        picture=places.locate(entry, "img_name"),
        kind=entry.text("content_type"),
    )
