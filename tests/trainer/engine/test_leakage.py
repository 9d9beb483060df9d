"""Rows that only report never teach: `val` and `test` pictures and labels reach nothing but the summary's figures.

Source: docs/methods.md 1.6, rows: `train` learns, `tune` selects, stops and calibrates, `val` and `test` report.
"""

import csv
import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
from tests.trainer.conftest import TINY, edgefl_train, write_index

METHODS = ("local", "fedavg", "fedevprompt")
PER_SITE = 270  # 23 tune rows at each site: enough that a temperature is fitted


def records() -> list[dict[str, str]]:
    """Two sites; `write_index` draws every other picture bright, and bright is a nevus. Both reporting splits exist."""
    splits = ("train", "train", "train", "train", "val", "val", "test", "test", "train")
    rows = []
    for i in range(2 * PER_SITE):
        site, split = ("a", "b")[i // PER_SITE], splits[i // 2 % len(splits)]
        label = ("MEL", "NV")[i % 2]
        rows.append(
            {
                "image": f"i{i}",
                "file": f"p/i{i}.png",
                "label": label,
                "center": site,
                "lesion_id": f"l{i}",
                "split": split,
            }
        )
    return rows


def permuted(original: Path, folder: Path, splits: Sequence[str]) -> Path:
    """A copy in which each site's rows of those splits pass their picture on by one place and their label by another.

    Pictures move by one row and labels by two, so pictures, labels and their pairing all change.
    """
    shutil.copytree(original, folder)
    with (folder / "index.csv").open() as file:
        rows = list(csv.DictReader(file))
    for site in ("a", "b"):
        chosen = [row for row in rows if row["center"] == site and row["split"] in splits]
        pictures = [(original / row["file"]).read_bytes() for row in chosen]
        labels = [row["label"] for row in chosen]
        assert len(chosen) > 4
        assert len(set(labels)) == 2
        for i, row in enumerate(chosen):
            (folder / row["file"]).write_bytes(pictures[i - 1])
            row["label"] = labels[i - 2]
    with (folder / "index.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return folder


@pytest.fixture(scope="module")
def data(tmp_path_factory, cached) -> dict[str, Path]:
    """The drawn manifest, one with other reporting rows, and one with other training rows."""
    root = tmp_path_factory.mktemp("leakage")
    original = write_index(root / "original", records())
    return {
        "original": original,
        "report": permuted(original, root / "report", ("val", "test")),
        "train": permuted(original, root / "train", ("train",)),
    }


def learned(folder: Path) -> dict[str, object]:
    """All that training and choosing leave behind."""
    summary = json.loads((folder / "summary.json").read_text())
    metrics = (folder / "metrics.jsonl").read_text().splitlines()
    return {
        "state_sha256": summary["state_sha256"],
        "calibration": (folder / "calibration.json").read_bytes(),
        "readout": {name: site["readout"] for name, site in summary["sites"].items()},
        "models": {path.name: path.read_bytes() for path in sorted((folder / "models").iterdir())},
        "tune": [json.loads(line).get("tune_balanced_accuracy") for line in metrics],
    }


def figures(folder: Path) -> list[tuple[float, float]]:
    """What the reporting rows say of each site's model."""
    sites = json.loads((folder / "summary.json").read_text())["sites"].values()
    return [(site["brier"], site["ece"]) for site in sites]


def run(method: str, source: Path, out: Path) -> Path:
    outcome = edgefl_train(
        "run", method, "--data", f"manifest:{source}", "--task", "nevus", "--out", out, "--backbone", "tiny",
        "--rounds", 2, "--epochs", 1, *TINY,
    )  # fmt: skip
    assert outcome.code == 0, outcome.err
    return out


@pytest.mark.parametrize(
    "method", ["fedevprompt", *(pytest.param(name, marks=pytest.mark.slow) for name in METHODS[:2])]
)
def test_reported_rows_change_only_the_report(method, data, tmp_path):
    first = run(method, data["original"], tmp_path / "first")
    second = run(method, data["report"], tmp_path / "second")
    assert learned(first) == learned(second)
    assert figures(first) != figures(second)


def test_other_training_rows_change_what_is_learned(data, tmp_path):
    """The comparison above can fail: the same permutation of training rows changes every part of it."""
    first = learned(run("local", data["original"], tmp_path / "first"))
    second = learned(run("local", data["train"], tmp_path / "second"))
    assert first["state_sha256"] != second["state_sha256"]
    assert first["calibration"] != second["calibration"]
    assert first["models"] != second["models"]
