"""`domainnet:DIR[,classes=ten|all]`: DomainNet in its official layout; a domain is a site.

`DOMAIN/CLASS/NAME.jpg`, and for each domain `DOMAIN_train.txt` and `DOMAIN_test.txt` beside the domain folders or in
`splits/`, whose lines are `DOMAIN/CLASS/NAME.jpg NUMBER`. The split of these files is kept. Of the 345 classes the ten
of PEP-FedPT's experiments are read (docs/methods.md 8.3), or all. A domain without split files is left out; one that
has them is read whole or refused. Differs from SGPT's loader: training rows are not cut to 5 % of the smallest domain.
Source: Peng et al., "Moment Matching for Multi-Source Domain Adaptation", ICCV 2019; docs/methods.md 8.3;
docs/reference/data.md.
"""

import re
from collections.abc import Collection
from pathlib import Path

from edgefl_trainer.data.errors import DataError, SpecError
from edgefl_trainer.data.rows import Row, SourceRows
from edgefl_trainer.data.sources.files import file_pixels
from edgefl_trainer.data.sources.store import FileStore, check_relative, open_store
from edgefl_trainer.data.sources.tables import TextFile, read_lines

DOMAINS = ("clipart", "infograph", "painting", "quickdraw", "real", "sketch")
TEN = (
    "bird",
    "feather",
    "headphones",
    "ice_cream",
    "teapot",
    "tiger",
    "whale",
    "windmill",
    "wine_glass",
    "zebra",
)
CLASSES = ("ten", "all")
NUMBERS = 345  # classes of the whole set; the files number them from 0

_NUMBER = re.compile(r"[0-9]{1,3}")
_FOLDERS = ("", "splits/")
_SPLITS = ("train", "test")


def read_domainnet(path: Path, classes: str) -> SourceRows:
    """Read the rows of each domain of a folder (or zip) in the order of its files, training rows first.

    A `DataError` where there is no split file, one of a pair or a picture is missing, or a line is damaged.
    """
    if classes not in CLASSES:
        raise SpecError(f"classes={classes} is not known for domainnet:; allowed: {', '.join(CLASSES)}.")
    store = open_store(path)
    wanted = TEN if classes == "ten" else None
    numbers: dict[str, int] = {}
    rows: list[Row] = []
    for domain in DOMAINS:
        files = {split: _split_file(store, domain, split) for split in _SPLITS}
        if not any(files.values()):
            continue
        for split, file in files.items():
            if file is None:
                raise DataError(f"{store.name} lacks {domain}_{split}.txt; put the official split file there.")
            rows += _rows(read_lines(store, file), domain, split, wanted, numbers)
    if not rows:
        names = ", ".join(DOMAINS)
        raise DataError(f"{store.name} has no DOMAIN_train.txt that lists a wanted class; the domains are {names}.")
    return SourceRows(f"domainnet:{path}", tuple(rows), file_pixels(store, rows))


def _split_file(store: FileStore, domain: str, split: str) -> str | None:
    return next((name for folder in _FOLDERS if store.has(name := f"{folder}{domain}_{split}.txt")), None)


def _rows(
    file: TextFile, domain: str, split: str, wanted: Collection[str] | None, numbers: dict[str, int]
) -> list[Row]:
    """The rows of one split file; `numbers` collects the number of each class over all files."""
    rows = []
    for line_number, line in file.lines:
        where = f"{file.where} line {line_number}"
        name, _, digits = line.rpartition(" ")
        parts = name.split("/")
        if len(parts) != 3 or parts[0] != domain:
            raise DataError(f"{where} is {line!r}; it must be of the form {domain}/CLASS/NAME.jpg NUMBER.")
        number = int(digits) if _NUMBER.fullmatch(digits) else NUMBERS
        if number >= NUMBERS or numbers.setdefault(parts[1], number) != number:
            raise DataError(
                f"{where} gives {parts[1]} the class number {digits}; each class must have one number from 0 to "
                f"{NUMBERS - 1}, the same in all files."
            )
        check_relative(name, where)
        if wanted is None or parts[1] in wanted:
            rows.append(Row(image=name, source=name, label=parts[1], site=domain, lesion=f"image:{name}", split=split))
    return rows
