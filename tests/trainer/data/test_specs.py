"""docs/design.md 5: `KIND:BODY,option=value@site=NAME`."""

import shutil
import zipfile
from pathlib import Path

import pytest
from tests.trainer.conftest import rad_entries, write_rad
from tests.trainer.data.conftest import png

from edgefl_trainer.data import DataError, load_federation
from edgefl_trainer.data.errors import SpecError
from edgefl_trainer.data.specs import parse_spec


@pytest.mark.parametrize(
    ("text", "kind", "body", "options", "site", "iid"),
    [
        ("manifest:/d/fed.zip", "manifest", "/d/fed.zip", {}, None, None),
        ("manifest:/d/a,b=c/fed.zip", "manifest", "/d/a,b=c/fed.zip", {}, None, None),
        ("isic2019:/d,split=flamby", "isic2019", "/d", {"split": "flamby"}, None, None),
        ("lesions:sites=3,images=40", "lesions", "", {"sites": "3", "images": "40"}, None, None),
        ("lesions:", "lesions", "", {}, None, None),
        ("folder:/d@site=ward-7", "folder", "/d", {}, "ward-7", None),
        ("folder:/d@home@split=iid:7", "folder", "/d@home", {}, None, 7),
    ],
)
def test_parse(text: str, kind: str, body: str, options: dict, site: str | None, iid: int | None) -> None:
    spec = parse_spec(text)
    assert (spec.kind, spec.body, dict(spec.options), spec.site, spec.iid_sites) == (kind, body, options, site, iid)


@pytest.mark.parametrize("text", ["folder:/d@split=iid:7@rows=60/20/20", "folder:/d@rows=60/20/20@split=iid:7"])
def test_rows_of_a_spec(text: str) -> None:
    """docs/reference/data.md, suffixes: train, tune and test in per cent; tune is a share of what is not test."""
    spec = parse_spec(text)
    assert (spec.body, spec.site, spec.iid_sites) == ("/d", None, 7)
    assert spec.shares is not None and (spec.shares.test, spec.shares.tune) == (0.2, 0.25)
    assert parse_spec("folder:/d").shares is None


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("fed.zip", ["is not a data SPEC", "did you mean manifest:fed.zip?"]),
        ("own/good.csv@site=here", ["did you mean manifest:own/good.csv@site=here?"]),
        ("manfest:fed.zip", ["did you mean manifest:fed.zip?"]),
        ("webdataset:x", ["is not a data SPEC"]),
        ("folder:x@site=", ["site ''"]),
        ("folder:x@site=../up", ["'../up'"]),
        ("folder:x@split=dirichlet:3", ["@split=iid:N"]),
        ("folder:x@split=iid:0", ["@split=iid:N"]),
        ("folder:x@split=iid:²", ["@split=iid:N"]),
        ("folder:x@split=test", ["@split=test, which is for questions alone (vqa-rad, slake)"]),
        ("vqa-rad:x@split=tset", ["@split=tset", "allowed: @split=test for test questions alone, or @split=iid:N"]),
        ("vqa-rad:x@split=", ["has @split=;", "@split=test for test questions alone"]),
        ("slake:x@split=test,lang=zh", ["@split=test,lang=zh", "options such as lang=zh stand before a suffix"]),
        ("lesions:imags=4", ["unknown option imags (did you mean images?); lesions: knows sites,"]),
        ("slake:x,language=en", ["unknown option language", "slake: knows lang"]),
        ("vqa-rad:x,lang=en", ["unknown option lang", "vqa-rad: knows none"]),
        ("vqa-rad:x,split=test", ["has split as an option", "write it as a suffix, @split=test"]),
        ("vqa-rad:x@splt=test", ["unknown suffix @splt", "did you mean @split=test?"]),
        ("vqa-rad:x@split=test@rows=60/20/20", ["both @split=test and @rows", "leave @rows out"]),
        ("vqa-rad:x@split=test@split=test", ["two suffixes @split"]),
        ("folder:x@rows=60/20", ["@rows=60/20", "add up to 100"]),
        ("folder:x@rows=60/30/20", ["@rows=60/30/20", "add up to 100"]),
        ("folder:x@rows=80/20/00", ["@rows=80/20/00", "whole numbers from 1"]),
        ("folder:x@split=iid:2@split=iid:3", ["two suffixes @split"]),
        ("folder:x@site=a@split=iid:3", ["both @site and @split"]),
        ("folder:", ["names no path"]),
        ("lesions:site=3", ["option site", "sites, images, seed"]),
        ("lesions:abc", ["'abc' before its options"]),
        ("lesions:sites=0", ["sites=0", "from 1 to"]),
        ("lesions:sites=2,classes=NV+XX", ["NV+XX", "MEL"]),
        ("lesions:skew=2", ["skew=2", "from 0 to 1"]),
        ("lesions:skew=nan", ["skew=nan"]),
        ("lesions:classes=NV+MEL,absent=2", ["absent=2", "0 to 1"]),
        ("isic2019:/,split=random", ["'random'", "lesion, flamby"]),
    ],
)
def test_faults_are_named(text: str, words: list[str]) -> None:
    with pytest.raises(DataError) as caught:
        load_federation([text], image_px=8)
    assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.parametrize(
    ("texts", "words"),
    [
        (["vqa-rad:a", "vqa-rad:b@split=test", "vqa-rad:b@split=test"], ["leave 'vqa-rad:b@split=test' out"]),
        (
            ["vqa-rad:a", "vqa-rad:a@split=test"],
            ["'vqa-rad:a' and 'vqa-rad:a@split=test' read the same test questions"],
        ),
        (["vqa-rad:a@split=test", "vqa-rad:a"], ["name them once: leave 'vqa-rad:a@split=test' out"]),
        (["vqa-rad:a@split=iid:2", "vqa-rad:b@split=test"], ["leave @split=iid out"]),
    ],
)
def test_faults_of_several_specs_are_named(tmp_path: Path, texts: list[str], words: list[str], monkeypatch) -> None:
    """Test questions that stand in a federation twice would count twice."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a").mkdir()
    write_rad(tmp_path / "a.zip", trainset=rad_entries(1), testset=rad_entries(1, each=1, first=500))
    with zipfile.ZipFile(tmp_path / "a.zip") as archive:
        for name in archive.namelist():
            (tmp_path / "a" / name).write_bytes(archive.read(name))
    with pytest.raises(SpecError) as caught:
        load_federation(texts, image_px=8)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def clinic(root: Path, *names: str) -> str:
    for i, name in enumerate(names):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(png(i))
    return f"folder:{root}"


def test_folder_of_sites_and_classes(tmp_path: Path) -> None:
    files = [f"{site}/{label}/{i}.png" for site in ("east", "west") for label in ("mel", "nevus") for i in range(10)]
    spec = clinic(tmp_path / "d", *files, "east/unlabelled/x.png", "east/mel/notes.txt")
    federation = load_federation([spec], image_px=8, unlabelled="site", cache_dir=tmp_path / "c")
    assert federation.classes == ("mel", "nevus")
    assert {name: len(site.unlabelled) for name, site in federation.sites.items()} == {"east": 1, "west": 0}
    for i, name in enumerate(federation.names):
        label = federation.labels[i]
        assert name.split("/")[1] == (federation.classes[label] if label >= 0 else "unlabelled")


def test_a_linked_class_folder_is_refused(tmp_path: Path) -> None:
    """Its pictures were dropped in silence: the walk looks behind no link."""
    (tmp_path / "w" / "east" / "NV").mkdir(parents=True)
    (tmp_path / "w" / "east" / "NV" / "a.png").write_bytes(png(0))
    (tmp_path / "mel").mkdir()
    (tmp_path / "mel" / "b.png").write_bytes(png(1))
    link = tmp_path / "w" / "east" / "MEL"
    for target, words in ((tmp_path / "mel", "a link to a folder: put the folder"), (tmp_path / "gone", "to nothing")):
        link.symlink_to(target)
        with pytest.raises(DataError, match=f"east/MEL in .* {words}"):
            load_federation([f"folder:{tmp_path / 'w'}"], image_px=8)
        link.unlink()


def test_a_link_to_nothing_is_refused_where_a_run_may_read_it(tmp_path: Path, cache: Path) -> None:
    """A link to notes that are gone ended every command; pictures and tables (`testset.json`) are not left out unseen,
    nor is a folder, which may have a stop in its name."""
    spec = clinic(tmp_path / "w", "east/MEL/a.png", "east/NV/b.png")
    (tmp_path / "w" / "notes.txt").symlink_to(tmp_path / "gone")
    assert load_federation([spec], image_px=8).classes == ("MEL", "NV")
    for name in ("east/NV/c.PNG", "testset.json", "index.csv", "St. Mary"):
        link = tmp_path / "w" / name
        link.symlink_to(tmp_path / "gone")
        with pytest.raises(DataError, match=f"{name} in .* is a link to nothing"):
            load_federation([spec], image_px=8)
        link.unlink()


def test_a_hidden_folder_is_no_class(tmp_path: Path, cache: Path) -> None:
    """A NAS keeps small copies in `@eaDir`, a desktop in `.thumbnails`: both were learned as diagnoses."""
    for number, folder in enumerate(("east/NV", "east/MEL", "east/.thumbnails", "east/@eaDir", ".trash/NV")):
        (tmp_path / "w" / folder).mkdir(parents=True)
        (tmp_path / "w" / folder / f"{number}.png").write_bytes(png(number))
    federation = load_federation([f"folder:{tmp_path / 'w'}"], image_px=8)
    assert federation.classes == ("MEL", "NV") and list(federation.sites) == ["east"]


def test_folder_of_classes_with_a_site_name(tmp_path: Path) -> None:
    spec = clinic(tmp_path / "d", *(f"{label}/{i}.png" for label in ("mel", "nevus") for i in range(6)))
    federation = load_federation([f"{spec}@site=ward"], image_px=8, cache_dir=tmp_path / "c")
    assert list(federation.sites) == ["ward"]


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (["a/b/c/d.png", "east/nv/1.png"], ["a/b/c/d.png", "in the wrong place"]),
        (["nv/1.png", "east/nv/1.png"], ["nv/1.png", "in the wrong place"]),
        (["1.png"], ["1.png", "in the wrong place"]),
        (["notes.txt"], ["holds no .jpg"]),
        (["east/nv/1.tif", "east/mel/2.gif"], ["holds no .jpg", "Convert its 2 pictures of other forms."]),
        (["east/nv/1.png", "east/mel/2.TIFF"], ["east/mel in", "would lose all pictures"]),
    ],
)
def test_folder_faults(tmp_path: Path, names: list[str], words: list[str]) -> None:
    with pytest.raises(DataError) as caught:
        load_federation([clinic(tmp_path / "d", *names)], image_px=8)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_pictures_in_other_forms_are_told(tmp_path: Path) -> None:
    """docs/reference/data.md, `folder:DIR`: a class is smaller for each of them, and nobody would know."""
    names = [f"{site}/{label}/{i}.png" for site in ("east", "west") for label in ("mel", "nv") for i in range(6)]
    beside = ("overview.gif", "east/overview.bmp", "east/nv/originals/1.tif")  # of no class: told, and nothing refused
    hidden = ("west/nv/.9.gif", ".cache/1.webp", "east/nv/@eaDir/a.webp", "west/notes.txt")
    spec = clinic(tmp_path / "d", *names, "east/mel/7.tif", "west/nv/8.webp", *beside, *hidden)
    told = load_federation([spec], image_px=8, cache_dir=tmp_path / "c").warnings
    (line,) = [line for line in told if "left out" in line]
    assert line.startswith(f"5 pictures are left out of {tmp_path / 'd'}, the first east/mel/7.tif")


@pytest.mark.parametrize("packed", [False, True])
def test_a_site_without_a_picture_is_named(tmp_path: Path, packed: bool) -> None:
    """docs/reference/data.md, `folder:DIR`: no site is dropped in silence; folders of the system are no sites."""
    root = tmp_path / "d"
    spec = clinic(root, *(f"{site}/{label}/{i}.png" for site in ("a", "b") for label in ("x", "y") for i in range(6)))
    for folder in (".git", "__MACOSX"):
        (root / folder).mkdir()

    def load() -> list[str]:
        archive = shutil.make_archive(str(tmp_path / "packed"), "zip", root) if packed else None
        source = f"folder:{archive}" if archive else spec
        return list(load_federation([source], image_px=8, cache_dir=tmp_path / "c").sites)

    assert load() == ["a", "b"]
    (root / "north" / "x").mkdir(parents=True)
    with pytest.raises(DataError, match=r"folder north in .* holds no"):
        load()
