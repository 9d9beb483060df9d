"""Drawn lesions as files: for whoever wants to try a device, or a table of their own form, and has no pictures yet.

Guarantees: a folder that holds anything is left alone; the table names every picture once.
"""

import csv
from pathlib import Path

from PIL import Image

from edgefl_trainer.data.errors import DataError
from edgefl_trainer.data.lesions.pixels import DrawnPixels
from edgefl_trainer.data.survey import Tables

TABLE = "labels.csv"
_COLUMNS = ("image", "label", "lesion_id")


def write_drawn(tables: Tables, folder: Path) -> int:
    """Write pictures as PNG files, and the table `labels.csv` beside them; gives how many there are.

    Raises:
        DataError: some data is not drawn, for its pictures lie in files already; or the folder is not empty.
    """
    for table, _ in tables.rows:
        if not isinstance(table.pixels, DrawnPixels):
            raise DataError(f"{table.name} is not drawn: its pictures lie in files already. --write takes lesions:…")
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise DataError(f"{folder} is not empty: name a new folder.")
    lines = []
    for table, rows in tables.rows:
        assert isinstance(table.pixels, DrawnPixels)
        drawn = table.pixels.load(rows, table.pixels.settings.px, "squash")
        for row, (photo, _) in zip(rows, drawn, strict=True):
            name = f"{row.image.replace('/', '-')}.png"
            Image.fromarray(photo).save(folder / name)
            lines.append((name, row.label, row.lesion))
    with (folder / TABLE).open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([_COLUMNS, *lines])
    return len(lines)
