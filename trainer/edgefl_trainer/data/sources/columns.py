"""Columns of a table of images that another program, or another person, calls by another name.

Guarantees: a column is named as the one that may be meant, and never read as it. Source: docs/reference/data.md.
"""

import difflib
from collections.abc import Sequence

KNOWN = ("image", "file", "label", "center", "lesion_id", "split")
OPTIONAL = ("center", "lesion_id", "split")  # bear on who learns from what
_ALIKE = {  # how else people write it, without case and signs
    "image": {"filename", "imageid", "imagename", "isicid", "img", "imgid", "picture", "photo", "path", "filepath"},
    "label": {"diagnosis", "dx", "class", "target", "category", "diagnostic", "groundtruth"},
    "center": {"centre", "hospital", "institution", "clinic", "centerid", "centreid"},
    "lesion_id": {"lesion", "lesionno", "lesionnumber", "patientid", "patient"},
    "split": {"splits", "fold", "subset", "partition"},
}


def column_meant(name: str, columns: Sequence[str]) -> str | None:
    """Find the column that may be meant by `name`, which is not among `columns`; None where none looks like it.

    One that another name of `KNOWN` has is not meant. Of several the first that people write for it comes first.
    """
    others = [column for column in columns if column not in KNOWN]
    written = next((column for column in others if _plain(column) in {_plain(name), *_ALIKE[name]}), None)
    by_fold = {column.casefold(): column for column in reversed(others)}
    close = difflib.get_close_matches(name, by_fold, n=1, cutoff=0.8)
    return written or (by_fold[close[0]] if close else None)


def _plain(column: str) -> str:
    return "".join(letter for letter in column.casefold() if letter.isalnum())
