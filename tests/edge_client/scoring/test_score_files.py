"""`edgefl score` over folders, patterns, standard input and every kind of file."""

import csv
import io
import json
import os
import sys

import numpy as np
import pytest
from PIL import Image

EVERY_FORMAT = ("--formats", "jpeg,png,tiff,heic,dicom")


def scored(run, *arguments):
    code, out, err = run("score", *arguments, "--model", "model.edgefl", "--trust", "signing.pub", "--json")
    return code, [json.loads(line) for line in out.splitlines()], err


def test_folders_are_read_to_the_bottom_and_patterns_expanded(run, files):
    """docs/guides/device.md: files, folders (recursive, sorted), globs; hidden files and our own heat maps are no
    pictures."""
    good = (files / "good.png").read_bytes()
    for name in ("in/b.png", "in/a/z.JPG", "in/a/deep/y.tif", "in/.hidden.png", "in/.git/x.png", "in/b.heatmap.png"):
        (files / name).parent.mkdir(parents=True, exist_ok=True)
        (files / name).write_bytes(good)
    (files / "in" / "loop").symlink_to(files / "in")
    code, lines, _ = scored(run, "in", *EVERY_FORMAT)
    assert (code, [line["image"] for line in lines]) == (0, ["in/a/deep/y.tif", "in/a/z.JPG", "in/b.png"])
    code, lines, _ = scored(run, "in/**/*.[pJ]*", "good.png")
    assert code == 0
    assert [line["image"] for line in lines][-1] == "good.png"
    assert "in/a/z.JPG" in [line["image"] for line in lines]
    code, lines, _ = scored(run, "in/*.bmp")
    assert (code, lines[0]["error"]["code"]) == (1, "missing")
    (files / "odd[1].png").write_bytes(good)
    assert scored(run, "odd[1].png")[0] == 0


def test_a_picture_whose_name_does_not_say_so_is_told(run, files):
    """Among others, and in a folder of its own: nobody may believe that it was scored. A table is none."""
    picture = (files / "good.png").read_bytes()
    for name in ("ward/a.png", "ward/IMG_0042", "ward/b.part", "alone/IMG_0043"):
        (files / name).parent.mkdir(exist_ok=True)
        (files / name).write_bytes(picture)
    (files / "ward" / "notes.csv").write_text("image,label\n")
    os.mkfifo(files / "ward" / "pipe")
    code, lines, err = scored(run, "ward")
    assert (code, [line["image"] for line in lines]) == (0, ["ward/a.png"])
    told = "Left out, because their names do not end like a picture's: ward/IMG_0042 and ward/b.part. Rename them"
    assert told in err and "notes" not in err and "pipe" not in err
    code, lines, err = scored(run, "alone")
    assert (code, lines) == (2, []) and "its name does not end like a picture's: alone/IMG_0043. Rename it" in err


def test_pictures_of_a_kind_that_is_not_read_are_told(run, files):
    """docs/guides/device.md: of a folder of mixed kinds nobody may believe that all of it was scored."""
    for name in (
        "day/a.png",
        "day/b.HEIC",
        "day/c.heic",
        "day/d.tif",
        "day/e.txt",
        "day/.f.dcm",
        "day/g.jfif",
        "day/h.webp",
    ):
        (files / name).parent.mkdir(exist_ok=True)
        (files / name).write_bytes((files / "good.png").read_bytes())
    code, lines, err = scored(run, "day")
    assert (code, [line["image"] for line in lines]) == (0, ["day/a.png", "day/g.jfif"])
    assert (
        "Left out, because files of these kinds are not read: 2 .heic, 1 .tif, 1 .webp. "
        "To read TIFF and HEIC too, give --formats jpeg,png,tiff,heic\n"
    ) in err
    (files / "day" / "i.jpg").write_bytes((files / "photo.JPG").read_bytes())
    err = scored(run, "day", "--formats", "tiff")[2]  # as the sentence read that named a kind alone
    assert (
        "not read with --formats tiff: 2 .heic, 1 .jfif, 1 .jpg, 1 .png, 1 .webp." in err
        and "give --formats" not in err
    )
    (files / "day" / "i.jpg").unlink()
    assert "Left out" not in scored(run, "day/a.png")[2]
    assert (
        "are not read with --formats jpeg,png,tiff,heic: 1 .webp."
        in scored(run, "day", "--formats", "png,jpeg,heic,tiff")[2]
    )
    (files / "photos").mkdir()
    (files / "photos" / "a.heic").write_bytes(b"")
    code, _, err = scored(run, "photos")
    assert code == 2 and "1 .heic" in err


def test_a_transparent_picture_is_told(run, files):
    """docs/decisions/0011: laid on white; an alpha channel that is opaque everywhere is nothing to tell of."""
    for name, alpha in (("half.png", 128), ("thin.png", 240), ("opaque.png", 255)):
        image = Image.open(files / "good.png").convert("RGB")
        image.putalpha(alpha)
        image.save(files / name)
    _, (half, thin, opaque, good), _ = scored(run, "half.png", "thin.png", "opaque.png", "good.png")
    assert [one["transparent"] for one in (half, thin, opaque, good)] == [True, True, False, False]
    assert thin["probabilities"] != opaque["probabilities"] == good["probabilities"]
    # More than a tenth of white asks for another picture; less is told first.
    assert ["transparent" in one["refer_reasons"] for one in (half, thin, opaque)] == [True, False, False]
    options = ("half.png", "thin.png", "opaque.png", "--model", "model.edgefl", "--trust", "signing.pub")
    rows = list(csv.DictReader(io.StringIO(run("score", *options, "--csv")[1])))
    assert [row["transparent"] for row in rows] == ["true", "true", "false"]
    lines = run("score", *options)[1].splitlines()
    first = [
        line.partition(": ")[2].startswith("the picture's transparent parts were read as white; ") for line in lines
    ]
    assert first == [False, True, False] and "more than a tenth of it is transparent and was read as white" in lines[0]


def test_an_empty_folder_among_several_inputs_is_told(run, files):
    """docs/guides/device.md: nobody may believe that a ward was scored whose folder holds nothing."""
    (files / "empty").mkdir()
    code, lines, err = scored(run, "empty", "good.png")
    assert (code, len(lines)) == (0, 1) and "empty holds no file whose name ends in .jpg" in err
    assert "holds no file" not in scored(run, "good.png")[2]


@pytest.mark.parametrize("given", ["in", "in/closed", "in/**/*.png", "in/*/*.png"])
def test_a_folder_that_cannot_be_looked_into_is_told(run, files, monkeypatch, given):
    """Its pictures were left out without a word, and the command ended with 0. To root, whom no rights keep out, the
    system's answer is made up."""
    closed = files / "in" / "closed"
    closed.mkdir(parents=True)
    (files / "in" / "open").mkdir()
    (files / "in" / "open" / "a.png").write_bytes((files / "good.png").read_bytes())
    closed.chmod(0)
    if os.geteuid() == 0:
        scandir, access = os.scandir, os.access

        def refused(place="."):
            if str(place) == "in/closed":
                raise PermissionError(13, "Permission denied", place)
            return scandir(place)

        monkeypatch.setattr(os, "scandir", refused)
        monkeypatch.setattr(os, "access", lambda place, mode: str(place) != "in/closed" and access(place, mode))
    code, lines, err = scored(run, given)
    closed.chmod(0o700)
    (failure,) = [line for line in lines if "error" in line]
    assert code == 1 and failure["image"] == "in/closed" and "could not be scored" in err
    assert [line["image"] for line in lines if "error" not in line] == ([] if "closed" in given else ["in/open/a.png"])


def test_a_pattern_finds_what_a_shell_would(run, files):
    """docs/guides/device.md: hidden files only where the pattern names them; heat maps of ours are no pictures."""
    for name in ("in/a.png", "in/.b.png", "in/c.heatmap.png", "in/.d/e.png"):
        (files / name).parent.mkdir(parents=True, exist_ok=True)
        (files / name).write_bytes((files / "good.png").read_bytes())
    assert [line["image"] for line in scored(run, "in/*.png")[1]] == ["in/a.png"]
    assert [line["image"] for line in scored(run, "in/**/*.png")[1]] == ["in/a.png"]
    assert [line["image"] for line in scored(run, "in/.*.png")[1]] == ["in/.b.png"]
    assert [line["image"] for line in scored(run, "in/../in/*.png")[1]] == ["in/../in/a.png"]


def test_a_picture_on_standard_input(run, files, monkeypatch):
    """docs/guides/device.md: standard input; the picture is named "-"."""
    for data, code, key in (((files / "good.png").read_bytes(), 0, "predicted"), (b"", 1, "error")):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
        found, (line,), _ = scored(run, "-")
        assert (found, line["image"], key in line) == (code, "-", True)
    assert line["error"]["message"].startswith("standard input held no picture")  # no file that could be copied again


ODD_NAME = "odd\n\x07a.png,nevus,0.001.png"


def test_a_name_cannot_pass_for_a_line_of_its_own(run, files):
    """RFC 4180, 2.6: a value with a line break is quoted; what a terminal shows holds no control character."""
    (files / ODD_NAME).write_bytes((files / "good.png").read_bytes())
    options = (ODD_NAME, "text.jpg", "--model", "model.edgefl", "--trust", "signing.pub")
    rows = list(csv.DictReader(io.StringIO(run("score", *options, "--csv")[1])))
    assert [row["image"] for row in rows] == [ODD_NAME, "text.jpg"]
    _, out, _ = run("score", *options)
    assert len(out.splitlines()) == 2 and "\x07" not in out
    assert out.startswith("odd\\n\\x07a.png,nevus,0.001.png: ")


def test_an_empty_name_is_no_folder(run, files):
    """`edgefl score "$PHOTO"` with an empty variable must not score all that lies here."""
    code, (empty, good), _ = scored(run, "", "good.png")
    assert (code, empty["error"]["code"], "error" in good) == (1, "missing", False)


def test_a_missing_extra_ends_with_2(run, files, monkeypatch):
    """docs/design.md, section 5: 2 for a missing extra; the other pictures still score."""
    from edgefl_client.scoring import pictures

    monkeypatch.setattr(pictures, "find_spec", lambda name: None)
    (files / "a.heic").write_bytes(b"\x00\x00\x00\x1cftypheic" + bytes(50))
    code, lines, err = scored(run, "a.heic", "good.png", *EVERY_FORMAT)
    assert (code, lines[0]["error"]["code"], "error" in lines[1]) == (2, "missing_extra", False)
    assert "needs edgefl-derm[heic]: pip install " in err
    assert scored(run, "a.heic", "text.jpg", *EVERY_FORMAT)[0] == 1


def test_other_formats_are_read_where_they_are_named(run, files):
    with Image.open(files / "good.png") as image:
        image.save(files / "page.tif")
    assert scored(run, "page.tif", "--formats", "jpeg,png,tiff")[0] == 0
    code, (line,), _ = scored(run, "page.tif")
    assert line["error"]["message"] == (
        "this file is a TIFF by its content; only JPEG and PNG can be read: convert it, or give --formats jpeg,png,tiff"
    )
    assert (code, line["error"]["code"]) == (1, "unsupported_format")
    assert scored(run, "page.tif", "--formats", "gif")[0] == 2


def test_batches_give_the_same_lines(run, files):
    """One picture a run, three a run: the same classes and reasons, in the same order; errors in their places."""
    names = ["good.png", "text.jpg", "photo.JPG", "good.png", "cut.png", "photo.JPG"]
    said = []
    for batch in (1, 3):
        _, lines, _ = scored(run, *names, "--batch", batch)
        said.append([(one["image"], one.get("predicted"), one.get("refer_reasons"), "error" in one) for one in lines])
    assert said[0] == said[1]


def test_what_is_not_skin_gets_no_prediction_and_no_heat_map(run, lab, files):
    """docs/reference/picture-gate.md: a class and a map would only look like an answer; every key stays."""
    (files / "sky.png").write_bytes(lab.encoded(lab.photo(60, 40, (90, 140, 220))))
    _, (usual,), _ = scored(run, "good.png")
    code, (line,), _ = scored(run, "sky.png", "--heatmap", "maps")
    assert (code, set(line)) == (0, set(usual))
    assert (line["predicted"], line["heatmap"], line["refer"]) == (None, None, True)
    assert line["refer_reasons"] == ["not_skin"]
    assert not list((files / "maps").iterdir())
    out = run("score", "sky.png", "--model", "model.edgefl", "--trust", "signing.pub")[1]
    assert "no prediction" in out and "not those of skin" in out


def test_the_card_sets_the_threshold_and_the_weights_the_temperature(run, lab, files):
    """docs/design.md, section 5: both come from the bundle; another card, another referral, another temperature."""
    lines = {}
    for name, options in (
        ("low", {"refer_above": 0.01}),
        ("high", {"refer_above": 0.99}),
        ("warm", {"temperature": 5.0}),
    ):
        if "temperature" in options:
            options = {"temperature": np.array(5.0, np.float32)}
        (files / "model.edgefl").write_bytes(lab.bundle_bytes(**options))
        lines[name] = scored(run, "good.png")[1][0]
    assert lines["low"]["refer_reasons"] == ["vacuity"]
    assert lines["high"]["refer_reasons"] == []
    assert lines["low"]["evidence"] == lines["high"]["evidence"]
    assert max(lines["warm"]["evidence"].values()) < max(lines["high"]["evidence"].values())


def test_no_metadata_is_passed_on(run, lab, files):
    """docs/security.md check 36: EXIF, GPS, XMP, comments, text and profiles planted in 20 files reach no output."""
    canary = b"CANARY-4711"
    pixels = lab.photo(90, 80)
    exif = Image.Exif()
    exif[0x010E] = exif[0x013B] = canary.decode()  # description, artist
    exif.get_ifd(0x8825)[29] = "2026:11:21"  # GPS date
    exif.get_ifd(0x8825)[0] = canary
    names = []
    for number in range(20):
        kind = ("JPEG", "PNG", "TIFF")[number % 3]
        more = {"comment": canary} if kind == "JPEG" else {}
        if kind == "PNG":
            from PIL.PngImagePlugin import PngInfo

            more["pnginfo"] = PngInfo()
            more["pnginfo"].add_text("Patient", canary.decode())
        data = lab.encoded(pixels, kind, exif=exif, icc_profile=canary * 20, **more)
        assert canary in data
        names.append(f"{number}.{kind.lower()}")
        (files / names[-1]).write_bytes(data)
    code, out, err = run(
        "score", *names, "--model", "model.edgefl", "--trust", "signing.pub", "--json", "--heatmap", "m", *EVERY_FORMAT
    )
    assert code == 0
    drawn = [path.read_bytes() for path in (files / "m").iterdir()]
    assert len(drawn) == 20
    assert canary not in out.encode() + err.encode() + b"".join(drawn)
    for data in drawn:
        with Image.open(io.BytesIO(data)) as image:
            assert not image.info and not image.getexif()


def test_the_progress_bar_is_for_people_at_a_terminal(run, files, monkeypatch):
    """docs/guides/device.md: a bar for folders; on standard error, never among the results, never into a log file."""
    import click

    bars = []
    monkeypatch.setattr(click, "progressbar", lambda **options: bars.append(options["length"]) or _Bar())
    scored(run, *["good.png"] * 5)
    assert bars == []
    monkeypatch.setattr("edgefl_client.commands.score.at_a_terminal", lambda: True)
    _, lines, _ = scored(run, *["good.png"] * 5)
    assert (bars, len(lines)) == ([5], 5)
    scored(run, *["good.png"] * 3)
    assert bars == [5]


def test_how_long_maps_take_is_told_after_the_first(run, files, monkeypatch):
    """A map hides the picture's parts one after the other: a ward's pictures were silent for minutes."""
    monkeypatch.setattr("edgefl_client.commands.score.LONG_S", 0.0)
    names = ["good.png"] * 3
    err = scored(run, *names, "--heatmap", "maps")[2]
    assert err.count("A picture with its map took ") == 1 and "; the other 2 pictures take about " in err
    for given in (names, ["good.png", "--heatmap", "maps"]):
        assert "took" not in scored(run, *given)[2]
    monkeypatch.setattr("edgefl_client.commands.score.LONG_S", 600.0)
    assert "took" not in scored(run, *names, "--heatmap", "maps")[2]


class _Bar:
    def __enter__(self):
        return self

    def __exit__(self, *_):
        return None

    def update(self, steps):
        assert steps == 1


def _unusual(lab) -> dict[str, tuple[bytes, str]]:
    """docs/reference/pictures.md: each kind with what it gives, the code of an error or the reasons to refer."""
    photo = lab.photo(60, 40)
    image, grey = Image.fromarray(photo), Image.fromarray(photo).convert("L")
    animated = lab.encoded(photo, "PNG", save_all=True, append_images=[Image.fromarray(photo[::-1])])
    exif = Image.Exif()
    exif[0x0112] = 6
    png = lab.encoded(photo)
    clear = Image.fromarray(np.dstack([photo, np.zeros((40, 60), np.uint8)]))

    def saved(one: Image.Image, kind: str, **options: object) -> bytes:
        out = io.BytesIO()
        one.save(out, kind, **options)
        return out.getvalue()

    return {
        "greyscale.jpg": (saved(grey, "JPEG"), "not_skin"),
        "sixteen bits.png": (saved(Image.fromarray(np.asarray(grey).astype(np.uint16) << 8), "PNG"), "not_skin"),
        "cmyk.jpg": (saved(image.convert("CMYK"), "JPEG", quality=95), ""),
        "palette.png": (saved(image.quantize(64), "PNG"), ""),
        "half transparent.png": (
            saved(Image.fromarray(np.dstack([photo, np.full((40, 60), 250, np.uint8)])), "PNG"),
            "",
        ),
        "transparent.png": (saved(clear, "PNG"), "blur exposure not_skin dark_corners transparent"),
        "turned.jpg": (saved(image, "JPEG", quality=95, exif=exif), ""),
        "turned.tif": (saved(image, "TIFF", exif=exif), ""),
        "a png.jpg": (png, ""),
        "a jpeg.tif": (saved(image, "JPEG", quality=95), ""),
        "a gif.png": (saved(image, "GIF"), "unsupported_format"),
        "animated.png": (animated, "animated"),
        "pages.tif": (saved(image, "TIFF", save_all=True, append_images=[image]), "animated"),
        "cut.png": (png[: len(png) // 2], "truncated"),
        "cut.jpg": (saved(image, "JPEG")[:400], "truncated"),
        "empty.png": (b"", "empty"),
        "huge.png": (png.ljust(20_000_001, b"\0"), "too_large"),
        "many pixels.png": (lab.png(8_000, 5_001, bytes(1_001 * 5_001)), "too_large"),
        "small.png": (lab.encoded(lab.photo(20, 20)), "size"),
    }


def test_every_unusual_file_has_its_answer(run, lab, files):
    """docs/reference/pictures.md."""
    kinds = _unusual(lab)
    for name, (data, _) in kinds.items():
        (files / name).write_bytes(data)
    code, lines, _ = scored(run, *kinds, *EVERY_FORMAT)
    assert code == 1
    found = [line["error"]["code"] if "error" in line else " ".join(line["refer_reasons"]) for line in lines]
    assert dict(zip(kinds, found, strict=True)) == {name: answer for name, (_, answer) in kinds.items()}
    assert json.dumps(lines).count("for example to 4,000 pixels on its longer side") == 2
    same = {json.dumps(line["probabilities"]) for line in lines if line["image"] in ("a png.jpg", "good.png")}
    assert len(same) == 1
