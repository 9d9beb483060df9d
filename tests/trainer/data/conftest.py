"""Drawn copies of the layouts a person may hand us; nothing here comes from a patient."""

import csv
import io
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

Records = Sequence[Mapping[str, str]]
ZipMaker = Callable[..., Path]


def png(number: int, px: int = 8) -> bytes:
    """A picture that no other number gives; PNG keeps every pixel."""
    pixels = np.random.default_rng(number).integers(0, 256, (px, px, 3), dtype=np.uint8)
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, "PNG")
    return stream.getvalue()


def index_text(records: Records) -> str:
    stream = io.StringIO()
    writer = csv.DictWriter(stream, list(records[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(records)
    return stream.getvalue()


def ward_records(n: int = 40, sites: Sequence[str] = ("east", "north", "west")) -> list[dict[str, str]]:
    """n lesions a site with 1, 2 or 3 pictures each, classes NV, MEL, BKL, no split."""
    return [
        {
            "image": f"{site}_{lesion}_{view}",
            "file": f"images/{site}_{lesion}_{view}.png",
            "label": ("NV", "MEL", "NV", "BKL")[lesion % 4],
            "center": site,
            "lesion_id": f"{site}-L{lesion}",
            "split": "",
        }
        for site in sites
        for lesion in range(n)
        for view in range(1 + lesion % 3)
    ]


@pytest.fixture
def make_zip(tmp_path: Path) -> ZipMaker:
    """Write a zip with `index.csv` and one picture for each record; `extra` adds or replaces members."""

    def make(records: Records, extra: Mapping[str, bytes] | None = None, name: str = "ward.zip") -> Path:
        members = {"index.csv": index_text(records).encode()}
        members |= {record["file"]: png(i) for i, record in enumerate(records)}
        members |= extra or {}
        path = tmp_path / name
        with zipfile.ZipFile(path, "w") as archive:
            for member, data in members.items():
                archive.writestr(zipfile.ZipInfo(member, (2026, 1, 1, 0, 0, 0)), data)
        return path

    return make


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty picture cache, named by `EDGEFL_CACHE`."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("EDGEFL_CACHE", str(folder))
    return folder


def spoil(path: Path, old: str | None, new: str | None) -> None:
    """Remove a file, or put `new` in the place of `old` in its text."""
    if old is None:
        path.unlink()
        return
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, str(new)))
