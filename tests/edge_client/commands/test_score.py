"""`edgefl score`: what it says of its input and its thresholds beside the scores."""

import csv
import io

import pytest

MODEL = ("--model", "model.edgefl", "--trust", "signing.pub")


@pytest.mark.parametrize(
    ("softmax", "own"), [(False, "above a vacuity of 0.383;"), (True, "above an entropy of 0.383 nats;")]
)
@pytest.mark.parametrize(
    "command", [("score", "good.png", "photo.JPG", "--json"), ("watch", ".", "--once", "--interval", "0.1")]
)
def test_a_looser_threshold_than_the_models_is_told_once(run, files, lab, command, softmax, own):
    """Nearly switched off, the rule said nothing of it: the model's own, what counts instead, and that it is looser."""
    (files / "model.edgefl").write_bytes(lab.bundle_bytes(softmax=softmax, refer_above=0.383))
    unit = " nats" if softmax else ""
    told = f"{own} with --refer-above that is 0.9{unit}, so the recommendation is looser than the model's own.\n"
    _, out, err = run(*command, *MODEL, "--refer-above", "0.9")
    assert err.count(told) == 1 and told not in out
    for same_or_stricter in (("--refer-above", "0.383"), ("--refer-above", "0.1"), ()):
        assert "looser" not in run(*command, *MODEL, *same_or_stricter)[2]


def test_a_threshold_is_compared_with_the_models_as_it_is_told(run, files, lab):
    """A person who copies the number that stands there is not told that it is looser."""
    (files / "model.edgefl").write_bytes(lab.bundle_bytes(refer_above=0.38273876))
    assert "0.382739;" in run("score", "good.png", *MODEL, "--refer-above", "0.9")[2]
    assert "looser" not in run("score", "good.png", *MODEL, "--refer-above", "0.382739")[2]
    (files / "model.edgefl").write_bytes(lab.bundle_bytes(refer_above=None))
    assert "looser" not in run("score", "good.png", *MODEL, "--refer-above", "0.9")[2]  # stricter than none


def test_csv_gives_a_name_as_it_is(run, files):
    """The codes of a terminal's colours were taken out of the name, which then was that of another file or of none."""
    red = "\x1b[31mred.png"
    (files / red).write_bytes((files / "good.png").read_bytes())
    rows = list(csv.DictReader(io.StringIO(run("score", red, *MODEL, "--csv")[1])))
    assert [row["image"] for row in rows] == [red]
    assert run("score", red, *MODEL)[1].startswith("\\x1b[31mred.png: ")  # a line for a person steers no terminal


def test_folders_behind_links_are_told(run, files):
    """They are not followed, for a link may lead back; nobody may believe that their pictures were scored."""
    picture = (files / "good.png").read_bytes()
    for name in ("day/a.png", "ward/b.png", "day/sub/c.png"):
        (files / name).parent.mkdir(exist_ok=True)
        (files / name).write_bytes(picture)
    (files / "day" / "sub" / "dir").symlink_to(files / "ward")
    code, out, err = run("score", "day", *MODEL)
    assert (code, len(out.splitlines())) == (0, 2)
    assert "Left out: 1 folder behind a link: day/sub/dir. What such a folder holds is scored where you give" in err
    (files / "day" / "\x1b[1mloop").symlink_to(files / "day")
    (files / "day" / ".hidden").symlink_to(files / "ward")
    assert "2 folders behind links: day/\\x1b[1mloop and day/sub/dir. " in run("score", "day", *MODEL)[2]
    for number in range(20):
        (files / "day" / f"link-{number:02d}").symlink_to(files / "ward")
    assert "22 folders behind links: " in (err := run("score", "day", *MODEL)[2]) and "and 14 more. " in err
    assert run("score", "day/sub/dir", *MODEL)[1].startswith("day/sub/dir/b.png: ")
    assert "behind" not in run("score", "ward", *MODEL)[2]


def test_a_folder_of_our_own_heat_maps_is_told(run, files):
    """Their names do end in .png."""
    (files / "maps").mkdir()
    for name in ("a.heatmap.png", "b.heatmap.png"):
        (files / "maps" / name).write_bytes((files / "good.png").read_bytes())
    code, out, err = run("score", "maps", *MODEL)
    assert (code, out) == (2, "") and "Error: no picture to score (2 of EdgeFL's own heat maps left out)\n" in err
    code, out, err = run("score", "maps", "good.png", *MODEL)
    assert code == 0 and "maps holds no picture to score (2 of EdgeFL's own heat maps left out)\n" in err
    assert "ends in" not in err


def test_standard_input_is_one_picture(run, files):
    """The second - found nothing left, and was said to be an empty file that should be copied again."""
    code, out, err = run("score", "-", "-", *MODEL)
    assert (code, out) == (2, "") and "- is one picture on standard input: give it once" in err
