"""500 real images through the trainer and through the device. Source: docs/security.md, check 32; docs/design.md 5."""

import csv
import io
import json
import os
import zipfile
from pathlib import Path

import numpy as np
import pytest
from tests.integration.test_trainer_device_parity import invoke, signed  # noqa: F401 - a fixture

from edgefl_client.cli import cli as device_cli
from edgefl_trainer.cli import cli as trainer_cli

IMAGES = 500
ARCHIVE = "fed_isic2019_84.zip"


@pytest.fixture(scope="module")
def photographs(tmp_path_factory) -> list[Path]:
    """500 dermoscopic images of the `val` rows, of all centres in turn."""
    if "EDGEFL_DATA" not in os.environ:
        pytest.skip("EDGEFL_DATA names no folder with the real images")
    archive = Path(os.environ["EDGEFL_DATA"]) / ARCHIVE
    if not archive.exists():
        pytest.skip(f"EDGEFL_DATA holds no {ARCHIVE}")
    folder = tmp_path_factory.mktemp("real")
    with zipfile.ZipFile(archive) as opened:
        (index,) = [name for name in opened.namelist() if name.endswith("index.csv")]
        rows = [row for row in csv.DictReader(io.StringIO(opened.read(index).decode())) if row["split"] == "val"]
        by_center: dict[str, list[str]] = {}
        for row in sorted(rows, key=lambda row: row["file"]):
            by_center.setdefault(row["center"], []).append(row["file"])
        turns = [name for turn in range(len(rows)) for names in by_center.values() for name in names[turn : turn + 1]]
        found = []
        for name in turns[:IMAGES]:
            path = folder / Path(name).name
            path.write_bytes(opened.read(str(Path(index).parent / name).lstrip("./")))
            found.append(path)
    assert len(found) == IMAGES
    return found


def lines(text: str) -> list[dict[str, object]]:
    return [json.loads(line) for line in text.splitlines()]


@pytest.mark.slow
@pytest.mark.data
@pytest.mark.parametrize("count", [40, pytest.param(IMAGES, marks=pytest.mark.nightly)])
def test_real_images_score_the_same(count, photographs, signed, tmp_path):  # noqa: F811
    """docs/security.md check 32, on 500 images and on some of them.

    Largest |difference| of any probability 1e-4, the named class equal on 99.8 % (499 of 500). The model is a small
    one, learned in the test; its depth does not enter the comparison.
    """
    run, bundle, public = signed
    photographs = photographs[:count]
    expected = lines(invoke(trainer_cli, "predict", run, *photographs, "--site", "site-1", "--json"))
    trusted = ("--model", bundle, "--trust", public, "--home", tmp_path / "home")
    found = lines(invoke(device_cli, "score", *photographs, *trusted, "--threads", 1, "--json"))
    assert [one["image"] for one in found] == [one["image"] for one in expected] and len(found) == count
    here, there = (np.array([list(one["probabilities"].values()) for one in side]) for side in (found, expected))
    assert np.abs(here - there).max() <= 1e-4
    vacuity = np.array([[one["vacuity"] for one in side] for side in (found, expected)], float)
    assert np.abs(vacuity[0] - vacuity[1]).max() <= 1e-4
    same = sum(one["predicted"] == other["predicted"] for one, other in zip(found, expected, strict=True))
    assert same >= 0.998 * count
    assert here.std(axis=0).min() > 1e-4  # the images do not all score alike: the test can fail
