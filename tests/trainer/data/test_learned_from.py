"""What is learned from and judged on is told before anything is learned: docs/reference/data.md, Look at data first."""

import shutil
import zipfile
from dataclasses import replace
from pathlib import Path

from tests.trainer.conftest import edgefl_train, pictures_of, rad_entries, records, write_index, write_rad

from edgefl_trainer.data import load_federation
from edgefl_trainer.data.partitions.make import make_partition
from edgefl_trainer.data.partitions.plan import PartitionPlan


def told(*specs: str, words: str, **given) -> tuple[list[str], list[str]]:
    """The warnings with these words: of `edgefl-train data`, and of a run."""
    outcome = edgefl_train("data", *specs)
    assert outcome.code == 0, outcome.out
    lines = [line.removeprefix("warning: ") for line in outcome.err.splitlines() if words in line]
    return lines, [line for line in load_federation(specs, image_px=36, **given).warnings if words in line]


def lesioned(**lesion_of: str) -> list[dict[str, str]]:
    """The usual rows, each a lesion of its own but these; i0 to i3 and i6 to i9 are `train`, the others `test`."""
    return [{**row, "lesion_id": lesion_of.get(row["image"], f"L-{row['image']}")} for row in records()]


def test_lesions_on_two_sides_of_the_sources_split_are_counted(tmp_path: Path, cached) -> None:
    """One lesion on both sides of a site, one learned from in the east and judged on in the west."""
    root = write_index(tmp_path / "w", lesioned(i0="L1", i4="L1", i1="L2", i11="L2", i5="L1"))
    in_data, in_run = told(f"manifest:{root}", words="judged on")
    assert in_data == in_run == [
        "2 of the 3 lesions that are judged on are learned from or tuned on, too, such as L1: the figures hold for new "
        "pictures, not for new lesions"
    ]  # fmt: skip


def test_lesions_of_one_side_are_not_told(tmp_path: Path, cached) -> None:
    root = write_index(tmp_path / "w", lesioned(i0="L1", i1="L1", i4="L2", i5="L2"))
    assert told(f"manifest:{root}", words="judged on") == ([], [])


def test_two_hospitals_may_number_their_lesions_alike(tmp_path: Path, cached) -> None:
    """The tables are another's; two tables of one site speak of the same lesions."""
    rows = lesioned(i0="L1", i10="L1")
    specs = [f"manifest:{write_index(tmp_path / s, [r for r in rows if r['center'] == s])}" for s in ("east", "west")]
    assert told(*specs, words="lesion") == ([], [])
    one = [{**row, "center": "north"} for row in rows]
    parts = {s: [r for r in one if r["split"] == s] for s in ("train", "test")}
    specs = [f"manifest:{write_index(tmp_path / s, parts[s])}" for s in parts]
    in_data, in_run = told(*specs, words="lesion")
    assert in_data == in_run and in_run[0].startswith("1 of the 4 lesions that are judged on is learned from")


def test_pictures_with_the_pixels_of_learned_ones_are_counted(tmp_path: Path, cached) -> None:
    """i4 is i0 of the same site, i10 is i0 of the other; i1 and i3 are alike and both learned from."""
    root = write_index(tmp_path / "w", lesioned())
    for one, other in ((0, 4), (0, 10), (1, 3)):
        shutil.copy(root / f"pictures/i{one}.png", root / f"pictures/i{other}.png")
    in_data, in_run = told(f"manifest:{root}", words="pixels, among")
    assert in_data == in_run == [
        "2 of the 4 pictures that are judged on are, by the pixels, among those that are learned from or tuned on, "
        "such as i10, which is i0: figures on them are too high"
    ]  # fmt: skip


def test_a_site_that_never_trains_makes_no_picture_known(tmp_path: Path, cached) -> None:
    """i4 is i0, in the east: told, unless the east is held out."""
    root = write_index(tmp_path / "w", lesioned())
    shutil.copy(root / "pictures/i0.png", root / "pictures/i4.png")
    spec = f"manifest:{root}"
    for held_out, count in (((), 1), (("east",), 0)):
        partition = replace(make_partition([spec], PartitionPlan(scheme="natural"), 0), held_out=held_out)
        told_of = load_federation([spec], image_px=36, partition=partition).warnings
        assert sum("by the pixels" in line for line in told_of) == count


def test_a_run_prints_what_is_judged_on_and_learned_from(tmp_path: Path, monkeypatch, cached) -> None:
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("edgefl_trainer.engine.run.run_phases", stop)
    root = write_index(tmp_path / "w", lesioned(i0="L1", i4="L1"))
    shutil.copy(root / "pictures/i0.png", root / "pictures/i10.png")
    given = ("--data", f"manifest:{root}", "--preset", "tiny", "--backbone", "tiny", "--image-px", "36")
    err = edgefl_train("run", "local", *given, "--out", tmp_path / "r").err
    assert "warning: 1 of the 4 lesions that are judged on is learned from" in err
    assert "warning: 1 of the 4 pictures that are judged on is, by the pixels, among" in err


def test_a_file_of_several_rows_and_a_picture_of_two_labels_are_told(tmp_path: Path, cached) -> None:
    """i3 (MEL) names the file of i1 (MEL); i8 (NV) has the pixels of i7 (MEL); all of them are `train` rows."""
    rows = lesioned()
    rows[3]["file"] = rows[1]["file"]
    root = write_index(tmp_path / "w", rows)
    shutil.copy(root / "pictures/i7.png", root / "pictures/i8.png")
    err = edgefl_train("data", f"manifest:{root}").err.splitlines()
    assert err == [
        "warning: 1 file is named by several rows, such as pictures/i1.png by i1 and i3",
        "warning: 1 picture has two labels, by its pixels, such as i7 (MEL) and i8 (NV)",
    ]


def test_questions_that_share_a_picture_raise_no_alarm(tmp_path: Path, cached) -> None:
    entries = rad_entries()
    whole = write_rad(tmp_path / "rad.zip", pictures_of(entries), trainset=entries)
    assert edgefl_train("data", f"vqa-rad:{whole}").err == ""
    asked = [{**entry, "qid": 9000 + i} for i, entry in enumerate(entries[::24])]
    both = write_rad(tmp_path / "both.zip", pictures_of(entries), trainset=entries, testset=asked)
    err = edgefl_train("data", f"vqa-rad:{both}").err.splitlines()
    assert len(err) == 1 and "are also shown by training questions" in err[0]
    assert [f"warning: {line}" for line in load_federation([f"vqa-rad:{both}"], image_px=24).warnings] == err


def test_a_copy_of_a_picture_under_another_name_is_told_for_questions_too(tmp_path: Path, cached) -> None:
    entries = rad_entries()
    copied = [{**entries[0], "qid": 9000, "image_name": "copy0.png"}, {**entries[4], "qid": 9001}]
    packed = write_rad(tmp_path / "rad.zip", pictures_of(entries), trainset=entries, testset=copied)
    with zipfile.ZipFile(packed, "a") as archive:
        archive.writestr("images/copy0.png", archive.read("images/head0.png"))
    in_data, in_run = told(f"vqa-rad:{packed}", words="by the pixels")
    assert in_data == in_run and len(in_run) == 1
    assert in_run[0].startswith("1 of the 2 pictures that are judged on is, by the pixels, among")
    assert "such as images/copy0.png, which is images/head0.png" in in_run[0]
