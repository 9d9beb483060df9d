"""`edgefl-train data SPEC`: what the data holds is shown before anything is learned, and all that is wrong at once."""

import csv
import io

import numpy as np
import pytest
from PIL import Image
from tests.trainer.conftest import edgefl_train, records, write_index

from edgefl_trainer.data import DataError, load_federation
from edgefl_trainer.data.survey import read_tables
from edgefl_trainer.data.tasks import near_classes


def test_sites_classes_lesions_splits_and_sizes(tmp_path):
    """Twelve pictures of 36 px: two sites, two classes, four train and two test rows each."""
    found = [{**row, "lesion_id": f"{row['center']} {row['label']} {i % 6 // 4}"} for i, row in enumerate(records())]
    root = write_index(tmp_path / "w", found)
    outcome = edgefl_train("data", f"manifest:{root}", "--sheet", tmp_path / "sheet.png")
    assert outcome.code == 0 and "warning" not in outcome.err
    lines = [line.split() for line in outcome.out.splitlines()]
    assert lines[0] == ["site", "MEL", "NV", "lesions", "train", "test"]
    assert lines[1:3] == [["east", "3", "3", "4", "4", "2"], ["west", "3", "3", "4", "4", "2"]]
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
    (root / "pictures" / "i4.png").write_bytes(b"")
    outcome = edgefl_train("data", f"manifest:{root}")
    assert outcome.code == 1 and "3 pictures cannot be read" in outcome.out and "file is empty" in outcome.out
    assert all(f"pictures/{name}.png" in outcome.out for name in ("i2", "i4", "i7"))
    with pytest.raises(DataError) as caught:
        load_federation([f"manifest:{root}"], image_px=8)
    sentence = str(caught.value)
    assert (
        "2 of 12 pictures are missing: pictures/i2.png is not in" in sentence and "nor are pictures/i7.png" in sentence
    )


def test_a_run_names_all_broken_pictures_at_once_and_those_that_miss_beside_them(tmp_path):
    """`run` told the first one alone, and the next one after the first was mended."""
    root = write_index(tmp_path / "w", records())
    for number in range(12):
        (root / "pictures" / f"i{number}.png").write_bytes(b"")
    run = ("run", "local", "--data", f"manifest:{root}", "--preset", "tiny", "--out", tmp_path / "run")
    told = edgefl_train(*run).err
    assert "12 of 12 pictures cannot be read: Image 'i0' (pictures/i0.png in" in told and "file is empty" in told
    assert all(f"'i{number}'" in told for number in range(10)) and "and 2 more" in told and "'i10'" not in told
    for number in range(11):
        (root / "pictures" / f"i{number}.png").unlink()
    told = edgefl_train(*run).err
    assert "11 of 12 pictures are missing: pictures/i0.png" in told and "i9.png and 1 more" in told
    assert "Image 'i11' (pictures/i11.png in" in told


def test_an_empty_label_is_named(tmp_path):
    """The picture stood in a column `no label` of the survey, and nobody was told which it is."""
    found = records(label="", split="")
    root = write_index(tmp_path / "w", found)
    told = (
        f"1 of 12 rows of index.csv in {root} has an empty label, so only methods without labels learn from it; where "
        "that is meant, write the split unlabelled: i5 in line 7"
    )
    assert f"warning: {told}\n" in edgefl_train("data", f"manifest:{root}").err
    assert told in load_federation([f"manifest:{root}"], image_px=8).warnings
    meant = write_index(tmp_path / "v", records(label="", split="unlabelled"))
    assert "empty label" not in edgefl_train("data", f"manifest:{meant}").err
    without = write_index(tmp_path / "u", [{**one, "label": "", "split": ""} for one in found])
    assert "empty label" not in edgefl_train("data", f"manifest:{without}").err


def test_a_run_lists_all_that_it_refuses_as_data_does(tmp_path):
    """`run` told the first thing alone, and the next one after the first was mended."""
    root = write_index(tmp_path / "w", [{**one, "label": one["label"].lower() if i == 3 else one["label"]}
                                        for i, one in enumerate(records())])  # fmt: skip
    (root / "pictures" / "i2.png").unlink()
    outcome = edgefl_train("run", "local", "--data", f"manifest:{root}", "--preset", "tiny", "--out", tmp_path / "r")
    first, *listed = outcome.err.splitlines()
    assert outcome.code == 1 and first == "edgefl-train: a run refuses this data:" and len(listed) == 2
    assert "pictures/i2.png is not in" in listed[0] and "has both the class 'mel'" in listed[1]
    shown = edgefl_train("data", f"manifest:{root}").out
    assert f"a run refuses this data:\n{listed[1]}\n" in shown and "pictures/i2.png" in shown
    write_index(root, records(label="mel"))
    outcome = edgefl_train("run", "local", "--data", f"manifest:{root}", "--preset", "tiny", "--out", tmp_path / "r")
    assert len(outcome.err.splitlines()) == 1 and "has both the class 'mel'" in outcome.err


def test_a_column_that_looks_misspelt_is_told_with_the_name_expected(tmp_path):
    root = write_index(tmp_path / "w", [{**record, "LesionID": "a"} for record in records()])
    err = edgefl_train("data", f"manifest:{root}").err
    assert "has no column lesion_id" in err and "its column LesionID is not read as lesion_id; rename it" in err
    index = root / "index.csv"
    index.write_text(index.read_text().replace("center", "centre", 1))
    err = edgefl_train("data", f"manifest:{root}@site=one").err
    assert "has no column center: its pictures belong to no site; its column centre" in err
    index.write_text("")
    assert "has to name the columns, at least image and label" in edgefl_train("data", f"manifest:{root}").err


def test_a_run_is_told_of_an_absent_lesion_column_before_it_learns(tmp_path, monkeypatch, cached):
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("edgefl_trainer.engine.run.run_phases", stop)
    root = write_index(tmp_path / "w", records())
    outcome = edgefl_train("run", "local", "--data", f"manifest:{root}", "--preset", "tiny", "--out", tmp_path / "r")
    lines = outcome.err.splitlines()
    assert lines[1].startswith("data: 2 sites, 2 classes; rows: ")
    assert any("has no column lesion_id: each picture counts as a lesion of its own" in line for line in lines[2:])


def manifest(folder, old, new, **changes):
    """The usual table with a part of its text replaced."""
    root = write_index(folder / "w", records(**changes))
    index = root / "index.csv"
    index.write_text(index.read_text().replace(old, new, 1))
    return f"manifest:{root}"


def test_everything_that_a_run_refuses_is_listed_and_the_rest_is_counted(tmp_path):
    """A column `centre`, one `LesionID`, classes `Mel` and `nv` beside `MEL` and `NV`, and a missing file."""
    found = [{**record, "LesionID": "a"} for record in records()]
    found[0]["label"], found[1]["label"] = ("Mel", "nv") if found[0]["label"] == "MEL" else ("nv", "Mel")
    root = write_index(tmp_path / "w", found)
    index = root / "index.csv"
    index.write_text(index.read_text().replace("center", "centre", 1))
    (root / "pictures" / "i7.png").unlink()
    outcome = edgefl_train("data", f"manifest:{root}")
    assert outcome.code == 1 and "Traceback" not in outcome.err
    assert "its column LesionID is not read as lesion_id" in outcome.err
    refused = outcome.out.partition("a run refuses this data:")[2]
    assert "its column centre is not read as center; rename it" in refused and "No row of" in refused
    (alike,) = [line for line in refused.splitlines() if "same way in every row" in line]
    assert "both the class 'Mel' (image i" in alike and "both the class 'nv' (image i" in alike
    assert "1 picture cannot be read" in refused and "pictures/i7.png" in refused
    lines = [line.split() for line in outcome.out.splitlines()]
    assert lines[0][:5] == ["site", "MEL", "Mel", "NV", "nv"] and lines[1][:6] == ["no", "site", "5", "1", "5", "1"]
    with pytest.raises(DataError):
        load_federation([f"manifest:{root}"], image_px=8)


def test_data_refuses_classes_that_a_run_refuses_and_names_an_image(tmp_path):
    for task in ([], ["--task", "all"]):
        outcome = edgefl_train("data", manifest(tmp_path, "", "", label="mel"), *task)
        assert outcome.code == 1 and "both the class 'mel' (image i5) and the class 'MEL'" in outcome.out


def test_every_site_name_that_cannot_be_used_is_listed(tmp_path):
    root = write_index(tmp_path / "w", [{**r, "center": f"{r['center']} ward"} for r in records()])
    outcome = edgefl_train("data", f"manifest:{root}")
    assert outcome.code == 1 and all(f"names the site '{name} ward'" in outcome.out for name in ("east", "west"))


def test_a_site_that_the_data_does_not_have_is_told_beside_what_it_has(tmp_path):
    outcome = edgefl_train("data", manifest(tmp_path, "", "") + "@site=north")
    assert outcome.code == 1 and "has no site north; the sites of the data are east, west" in outcome.out
    assert "36 × 36 (12)" in outcome.out


def test_sites_that_differ_in_case_alone_are_told(tmp_path):
    err = edgefl_train("data", manifest(tmp_path, "", "", center="East")).err
    assert "warning: sites East and east differ in upper and lower case alone" in err


def test_sites_of_one_class_and_classes_of_one_picture_are_told(tmp_path):
    err = edgefl_train("data", manifest(tmp_path, "", "", center="north", label="BCC")).err
    assert "warning: site north has one class, BCC: its figures will say nothing" in err
    assert "warning: class BCC has 1 picture: too few to learn from and to judge on" in err


def test_every_image_that_is_named_twice_is_listed_with_its_lines_and_the_rest_is_counted(tmp_path):
    """The first of them ended the command, without a line. Rows 0, 3 and 7 are lines 2, 5 and 9 of the table."""
    found = records()
    for row, image in ((3, "i0"), (7, "i0"), (9, "i8")):
        found[row]["image"] = image
    root = write_index(tmp_path / "w", found)
    (root / "pictures/i5.png").write_bytes(b"")
    outcome = edgefl_train("data", f"manifest:{root}")
    assert outcome.code == 1 and "Traceback" not in outcome.err
    sentence = "names 2 images more than once: 'i0' in lines 2, 5 and 9, 'i8' in lines 10 and 11; image names must be"
    assert sentence in outcome.out.partition("a run refuses this data:")[2]
    assert "36 × 36 (11)" in outcome.out and "1 picture cannot be read" in outcome.out
    with pytest.raises(DataError, match="'i8' in lines 10 and 11"):
        load_federation([f"manifest:{root}"], image_px=8)


def test_of_many_images_that_are_named_twice_the_first_are_listed_and_the_others_counted(tmp_path):
    rows = [{**row, "image": f"{row['image']}-{part}"} for part in range(2) for row in records()] * 2
    out = edgefl_train("data", f"manifest:{write_index(tmp_path / 'w', rows)}").out
    assert "names 24 images more than once" in out and "and 4 more; image names must be unique" in out


def warnings_of(folder, rows):
    """What `data` warns of in a table of these rows."""
    return edgefl_train("data", f"manifest:{write_index(folder, rows)}").err.splitlines()


def test_empty_lesions_are_told_all_or_some_with_their_lines(tmp_path):
    """An unlabelled row is judged on by nobody, so its lesion does not matter."""
    rows = [{**row, "lesion_id": f"l{i}"} for i, row in enumerate(records())]
    assert not any("lesion_id" in line for line in warnings_of(tmp_path / "all", rows))
    rows[0] |= {"label": "", "split": "unlabelled", "lesion_id": ""}
    rows[2]["lesion_id"] = rows[5]["lesion_id"] = ""
    (line,) = [line for line in warnings_of(tmp_path / "some", rows) if "lesion_id" in line]
    assert "2 of 11 labelled rows of index.csv" in line and line.endswith("own: i2 in line 4, i5 in line 7")
    (line,) = [
        line for line in warnings_of(tmp_path / "none", [r | {"lesion_id": ""} for r in rows]) if "lesion" in line
    ]
    assert "has an empty column lesion_id: each picture counts as a lesion of its own" in line


def test_labelled_pictures_without_a_center_are_told(tmp_path):
    """They were left out of learning and judging without a word; unlabelled ones may be spread."""
    rows = [{**row, "lesion_id": f"l{i}"} for i, row in enumerate(records(center=""))]
    rows[0] |= {"label": "", "split": "unlabelled", "center": ""}
    (line,) = [line for line in warnings_of(tmp_path / "w", rows) if "center" in line]
    assert "1 labelled picture of manifest:" in line and line.endswith("judged on: i5")
    outcome = edgefl_train("data", f"manifest:{tmp_path / 'w'}@split=iid:2")
    assert "center" not in outcome.err  # all rows are dealt


@pytest.mark.parametrize("label", ["Nevus", "melanocytic naevus", "nevi", "M EL", "mels", "Melanoma"])
def test_classes_that_may_be_one_are_told(tmp_path, label):
    """Spaces, a plural, or a name that the product knows: NV is a nevus, MEL a melanoma."""
    meant = "MEL" if label[0] in "Mm" and "elanocytic" not in label else "NV"
    rows = [{**row, "lesion_id": f"l{i}"} for i, row in enumerate(records(label=label))]
    (line,) = [line for line in warnings_of(tmp_path / "w", rows) if "look like one" in line]
    assert f"{label} (1 picture)" in line and f"{meant} (" in line
    merged = edgefl_train("data", f"manifest:{tmp_path / 'w'}", "--task", "nevus")
    assert "look like one" not in merged.err


def test_classes_that_may_be_one_are_told_of_one_group_and_refused_of_two(tmp_path):
    """They were looked for among the groups: a Melanoma beside MEL was taught as rest without a word."""
    rows = [{**row, "lesion_id": f"l{i}"} for i, row in enumerate(records(label="Melanoma"))]
    spec = f"manifest:{write_index(tmp_path / 'w', rows)}"
    apart = edgefl_train("data", spec, "--task", "mal=MEL:rest")
    assert apart.code == 1 and "counts 'MEL' to 'mal' and 'Melanoma' to 'rest', but they look like one" in apart.out
    together = edgefl_train("data", spec, "--task", "mal=MEL,Melanoma:rest")
    (line,) = [line for line in together.err.splitlines() if "look like one" in line]
    assert together.code == 0 and "Melanoma (1 picture)" in line and "MEL (" in line


def test_tune_rows_are_said_to_be_among_the_train_rows(tmp_path):
    """`run` counts train, tune and test rows, and this table train and test ones."""
    told = "a run tunes on some of the train rows: 15 % of each site's lesions"
    assert told in edgefl_train("data", f"manifest:{write_index(tmp_path / 'w', records())}").out


def test_every_spelling_of_a_class_that_may_be_one_is_told():
    """Of Nevus, nv and NV two were named; which differ in case alone a run refuses by itself."""
    (line,) = near_classes({"Nevus": 3, "nv": 2, "NV": 1, "MEL": 4})
    assert line.startswith("classes Nevus (3 pictures), nv (2 pictures), NV (1 picture) look like one")
    assert list(near_classes({"nv": 2, "NV": 1})) == []


@pytest.mark.parametrize("labels", [("NV", "MEL", "BCC", "SCC", "AK", "akiec"), ("ab", "abs"), ("grade 1", "grade 2")])
def test_classes_that_differ_are_not(labels):
    assert list(near_classes(dict.fromkeys(labels, 3))) == []


def test_pictures_of_one_colour_are_told_and_cut_off_ones_are_refused(tmp_path):
    root = write_index(tmp_path / "w", [{**row, "lesion_id": f"l{i}"} for i, row in enumerate(records())])
    for name in ("i2", "i7"):
        Image.new("RGB", (36, 36), (0, 90, 0)).save(root / f"pictures/{name}.png")
    stream = io.BytesIO()
    with Image.open(root / "pictures/i4.png") as picture:
        picture.save(stream, "JPEG")
    (root / "pictures/i4.png").write_bytes(stream.getvalue()[:-200])
    outcome = edgefl_train("data", f"manifest:{root}")
    told = "2 pictures of one colour, with nothing to learn from: i2 (pictures/i2.png), i7 (pictures/i7.png)"
    assert told in outcome.err
    assert outcome.code == 1 and "1 picture cannot be read" in outcome.out and "i4 (pictures/i4.png)" in outcome.out


def test_a_misspelt_center_is_told_before_what_else_could_be_done(tmp_path):
    sentence = edgefl_train("data", manifest(tmp_path, "center", "centre")).out
    assert sentence.index("its column centre is not read as center; rename it") < sentence.index("No row of")
    assert "centre" not in edgefl_train("data", manifest(tmp_path, "center", "centre")).err  # told once


def test_where_no_column_names_files_the_name_that_was_looked_for_is_told(tmp_path):
    spec = manifest(tmp_path, "file", "path")
    *_, more, last = edgefl_train("data", spec).out.splitlines()  # the cause stands last, where it is seen
    assert more == "  and 2 more" and last.endswith("has no column file, so IMAGE.jpg was looked for.")
    with pytest.raises(DataError, match="has no column file, so IMAGE"):
        load_federation([spec], image_px=8)


def test_a_column_image_may_name_the_files(tmp_path):
    """A table that a device learns from has such a column (docs/guides/learn-on-a-device.md)."""
    root = write_index(tmp_path / "w", records())
    index = root / "index.csv"
    lines = [line.split(",") for line in index.read_text().splitlines()]
    index.write_text("\n".join(",".join([line[1], *line[2:]]) for line in lines).replace("file", "image", 1))
    outcome = edgefl_train("data", f"manifest:{root}")
    assert "missing" not in outcome.out + outcome.err and outcome.code == 0, outcome.out + outcome.err


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        (
            "image,file,label,center,split",
            "image;file;label;center;split",
            ": save it as CSV UTF-8 with commas; fields that hold a comma in quotes",
        ),
        ("image,file,label", "Image,file,Label", "write image, label in small letters"),
        ("pictures/i0", "pictures\\i0", "with /"),
    ],
)
def test_a_table_that_another_program_wrote_says_what_to_change(tmp_path, old, new, words):
    assert words in edgefl_train("data", manifest(tmp_path, old, new)).sentence()


@pytest.mark.parametrize(("name", "words"), [("s.txt", "does not end in .png"), ("none/s.png", "there is no folder")])
def test_a_sheet_that_cannot_be_drawn_is_refused_before_anything_is_read(tmp_path, name, words):
    outcome = edgefl_train("data", "manifest:/there/is/none", "--sheet", tmp_path / name)
    assert outcome.code == 2 and words in outcome.err


def test_a_file_as_run_directory_and_no_data_are_told(tmp_path):
    (tmp_path / "file").write_text("x")
    given = ("run", "local", "--preset", "tiny", "--backbone", "tiny", "--out")
    assert (
        "is a file: name a new or empty folder"
        in edgefl_train(*given, tmp_path / "file", "--data", "lesions:").sentence()
    )
    assert "give --data SPEC" in edgefl_train(*given, tmp_path / "new").sentence()


def test_drawn_pictures_are_written_with_a_table_that_a_device_takes(tmp_path):
    """data.md: the pages spoke of photo.jpg and labels.csv, and no command made some."""
    spec, folder = "lesions:sites=1,images=6,px=64", tmp_path / "drawn"
    assert edgefl_train("data", spec, "--write", folder).code == 0
    with (folder / "labels.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == ["image", "label", "lesion_id"] and len(rows) == 6
    assert {row["image"] for row in rows} == {one.name for one in folder.glob("*.png")}
    table = read_tables([spec]).rows[0]
    assert [(row["label"], row["lesion_id"]) for row in rows] == [(row.label, row.lesion) for row in table[1]]
    for written, row in zip(rows, table[1], strict=True):
        drawn, _ = next(iter(table[0].pixels.load([row], 64, "squash")))
        np.testing.assert_array_equal(np.asarray(Image.open(folder / written["image"])), drawn)
    again = edgefl_train("data", spec, "--write", folder)
    assert again.code == 1 and "is not empty" in again.err
    files = write_index(tmp_path / "w", records())
    other = edgefl_train("data", f"manifest:{files}", "--write", tmp_path / "other")
    assert other.code == 1 and "is not drawn" in other.err and not (tmp_path / "other").exists()


def test_data_of_one_class_is_refused_as_a_run_refuses_it_and_the_advice_can_be_followed(tmp_path):
    """`data` passed it, and `run` said to add classes with --classes, which the data does not have."""
    root = write_index(tmp_path / "w", [{**one, "label": "NV"} for one in records()])
    told = "The data has 1 class, NV, and learning from labels needs at least two: add pictures of another class"
    shown = edgefl_train("data", f"manifest:{root}")
    assert shown.code == 1 and f"a run refuses this data:\n  {told}" in shown.out
    run = ("run", "local", "--data", f"manifest:{root}", "--preset", "tiny", "--out", tmp_path / "r")
    outcome = edgefl_train(*run)
    assert outcome.code == 1 and told in outcome.sentence() and "--classes" not in outcome.err
    assert not (tmp_path / "r").exists()
    nevi = edgefl_train(*run, "--task", "nevus")
    assert nevi.code == 1 and "Task nevus needs a class beside the nevi; the data has NV" in nevi.err
    assert "Task nevus needs a class beside the nevi" in edgefl_train("data", f"manifest:{root}", "--task", "nevus").out
    without = write_index(tmp_path / "u", [{**one, "label": "", "split": "unlabelled"} for one in records()])
    assert edgefl_train("data", f"manifest:{without}").code == 0  # meant for methods without labels


def test_a_site_without_a_picture_to_train_on_is_refused_as_a_run_refuses_it(tmp_path):
    """All rows of one site are test rows; a SPEC that leaves it out is taken."""
    found = [{**one, "split": "test"} if one["center"] == "east" else one for one in records()]
    root = write_index(tmp_path / "w", found)
    shown = edgefl_train("data", f"manifest:{root}")
    told = "site east has no labelled image to train on: add images, or leave the site out"
    assert shown.code == 1 and f"  {told}" in shown.out
    run = ("run", "local", "--data", f"manifest:{root}", "--preset", "tiny", "--out", tmp_path / "r")
    assert told in edgefl_train(*run).sentence()
    assert edgefl_train("data", f"manifest:{root}@site=west").code == 0
