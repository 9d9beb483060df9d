"""`edgefl-train data SPEC`: what the data holds is shown before anything is learned, and all that is wrong at once."""

from PIL import Image
from tests.trainer.conftest import edgefl_train, records, write_index


def test_sites_classes_lesions_splits_and_sizes(tmp_path):
    """Twelve pictures of 36 px: two sites, two classes, four train and two test rows each."""
    root = write_index(tmp_path / "w", [{**record, "lesion_id": f"l{i // 2}"} for i, record in enumerate(records())])
    outcome = edgefl_train("data", f"manifest:{root}", "--sheet", tmp_path / "sheet.png")
    assert outcome.code == 0 and "warning" not in outcome.err
    lines = [line.split() for line in outcome.out.splitlines()]
    assert lines[0] == ["site", "MEL", "NV", "lesions", "train", "test"]
    assert lines[1:3] == [["east", "3", "3", "3", "4", "2"], ["west", "3", "3", "3", "4", "2"]]
    assert "36 × 36 (12)" in outcome.out
    with Image.open(tmp_path / "sheet.png") as sheet:
        assert sheet.size == (110 + 4 * 84, 18 + 2 * 84)
        assert len(sheet.crop((111, 19, 190, 99)).getcolors(10_000)) > 100  # a photograph, not paper


def test_every_broken_picture_is_listed_in_one_pass(tmp_path):
    root = write_index(tmp_path / "w", records())
    for name in ("i2", "i7"):
        (root / "pictures" / f"{name}.png").write_bytes(b"no picture")
    outcome = edgefl_train("data", f"manifest:{root}")
    assert outcome.code == 1
    assert (
        "2 pictures cannot be read" in outcome.out and "i2 (pictures/i2.png)" in outcome.out and "i7 (" in outcome.out
    )


def test_every_missing_picture_is_named_at_once(tmp_path):
    root = write_index(tmp_path / "w", records())
    for name in ("i2", "i7"):
        (root / "pictures" / f"{name}.png").unlink()
    sentence = edgefl_train("data", f"manifest:{root}").sentence()
    assert (
        "2 of 12 pictures are missing: pictures/i2.png is not in" in sentence and "nor are pictures/i7.png" in sentence
    )


def test_a_column_that_looks_misspelt_is_told_with_the_name_expected(tmp_path):
    root = write_index(tmp_path / "w", [{**record, "LesionID": "a"} for record in records()])
    err = edgefl_train("data", f"manifest:{root}").err
    assert "has no column lesion_id" in err and "its column LesionID is not read as lesion_id; rename it" in err
    index = root / "index.csv"
    index.write_text(index.read_text().replace("center", "centre", 1))
    err = edgefl_train("data", f"manifest:{root}@site=one").err
    assert "has no column center: its pictures belong to no site; its column centre" in err


def test_a_run_is_told_of_an_absent_lesion_column_before_it_learns(tmp_path, monkeypatch, cached):
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("edgefl_trainer.engine.run.run_phases", stop)
    root = write_index(tmp_path / "w", records())
    outcome = edgefl_train("run", "local", "--data", f"manifest:{root}", "--preset", "tiny", "--out", tmp_path / "r")
    lines = outcome.err.splitlines()
    assert lines[1].startswith("data: 2 sites, 2 classes; rows: ")
    assert "has no column lesion_id: each picture counts as a lesion of its own" in lines[2]
