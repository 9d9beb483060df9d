"""FedCLF learns without labels, from a folder or a table that names images alone (docs/methods.md, FedCLF)."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from PIL import Image
from tests.edge_client.learning.contrast_lab import contrast_bundle, contrast_bytes, contrast_plan

from edgefl_client.cli import cli
from edgefl_client.home import Home
from edgefl_client.learning.errors import LearningError
from edgefl_client.learning.limits import LearningLimits
from edgefl_client.learning.own_pictures import Dealt, Table, read_dealt, remembered_table
from edgefl_protocol.bundle import Bundle
from edgefl_protocol.errors import ImageError


@pytest.fixture(scope="module")
def encoder(lab: SimpleNamespace) -> Bundle:
    return contrast_bundle(lab, contrast_plan())


@pytest.fixture
def folder(school: SimpleNamespace, tmp_path: Path) -> Path:
    """Three pictures and three in a folder below."""
    below: Path = school.table(tmp_path / "camera" / "monday", each=3, classes=("MEL",), spread=5).parent
    return Path(school.table(below.parent, each=3, classes=("NV",), spread=5)).parent


def dealt(home: Home, bundle: Bundle, file: Path, told: list[Any]) -> Dealt:
    return read_dealt(home, bundle, Table(file=file), LearningLimits(), told.append)


def warnings(told: list[Any]) -> list[str]:
    return [facts["warning"] for facts in told if "warning" in facts]


def test_a_folder_teaches_with_all_its_pictures(encoder: Bundle, home: Home, folder: Path) -> None:
    """No label is asked for and none is held back; the order is that of the names, so a digest can be repeated."""
    found = dealt(home, encoder, folder, told := [])
    assert (len(found.learn), len(found.held), found.left_out) == (6, 0, 0) and not warnings(told)
    again = dealt(home, encoder, folder, [])
    assert again.learn.digest() == found.learn.digest()
    names = sorted(str(path) for path in folder.rglob("*.png"))
    for image, name in zip(found.learn.images, names, strict=True):
        with Image.open(name) as picture:
            mean = np.asarray(picture, np.float64).mean(axis=(0, 1))
        np.testing.assert_allclose(image.mean(axis=(0, 1)), mean, atol=2)
    assert not (home.learning / "held.json").exists()


def test_labels_in_a_table_are_not_looked_at(encoder: Bundle, home: Home, folder: Path) -> None:
    """A column `image` is enough, and a label that no model knows is no reason to refuse."""
    (folder / "bare.csv").write_text("image\nNV0.png\nNV1.png\nNV2.png\nmonday/MEL0.png\n")
    (folder / "other.csv").write_text("image,label\nNV0.png,naevus\nNV1.png,\nNV2.png,?\nmonday/MEL0.png,MEL\n")
    bare, other = (dealt(home, encoder, folder / name, []) for name in ("bare.csv", "other.csv"))
    assert len(bare.learn) == 4 and bare.learn.digest() == other.learn.digest()


def test_what_the_gate_refers_takes_no_part(encoder: Bundle, home: Home, folder: Path) -> None:
    """docs/reference/picture-gate.md: what is not of skin neither teaches the encoder nor leaves a feature."""
    with Image.open(folder / "NV1.png") as picture:
        picture.convert("L").save(folder / "NV1.png")
    found = dealt(home, encoder, folder, [])
    assert (len(found.learn), found.left_out, len(found.learn.unfit)) == (5, 1, 0)


def test_a_broken_picture_of_a_folder_is_left_out_and_told(encoder: Bundle, home: Home, folder: Path) -> None:
    """A camera may be writing: nobody named it. In a table somebody did, so there it stops the round by its name."""
    (folder / "NV1.png").write_bytes((folder / "NV1.png").read_bytes()[:200])
    found = dealt(home, encoder, folder, told := [])
    assert (len(found.learn), found.left_out) == (5, 1)
    (warning,) = warnings(told)
    assert "NV1.png" in warning and warning.endswith("the picture is left out")
    (folder / "bare.csv").write_text("image\nNV0.png\nNV1.png\nNV2.png\n")
    with pytest.raises(ImageError, match=r"NV1\.png"):
        dealt(home, encoder, folder / "bare.csv", [])


def test_too_few_pictures_are_one_sentence(encoder: Bundle, home: Home, folder: Path, tmp_path: Path) -> None:
    """A step needs four different pictures that the gate leaves; an empty folder has none, copies are no more."""
    (tmp_path / "empty").mkdir()
    with pytest.raises(LearningError, match="holds 0 pictures of the formats jpeg, png"):
        dealt(home, encoder, tmp_path / "empty", [])
    first, *others = sorted(folder.rglob("*.png"))
    sentence = "only 3 can be used, and a step of learning needs 4"
    for path in others[2:]:  # four of one burst are one picture
        path.write_bytes(first.read_bytes())
    with pytest.raises(LearningError, match=sentence):
        dealt(home, encoder, folder, [])
    for path in others[2:]:
        with Image.open(path) as picture:
            picture.convert("L").save(path)
    with pytest.raises(LearningError, match=sentence) as refused:
        dealt(home, encoder, folder, [])
    assert refused.value.code == "few_images"


def test_prompts_need_labels(school: SimpleNamespace, home: Home, folder: Path) -> None:
    """docs/design.md 7: the gate of personal values judges by labels, so a folder is refused in a sentence."""
    with pytest.raises(LearningError, match="name a table of them with --labels") as refused:
        dealt(home, school.learning_bundle(), folder, [])
    assert refused.value.code == "no_labels"


@pytest.mark.parametrize("command", ["train", "sync"])
def test_pictures_are_named_once(command: str, folder: Path, tmp_path: Path) -> None:
    """Both options at once, or none where one is needed, is wrong usage; nothing is remembered."""
    (folder / "labels.csv").write_text("image,label\nNV0.png,NV\n")
    home = tmp_path / "home"
    both = [command, "--pictures", str(folder), "--labels", str(folder / "labels.csv"), "--home", str(home)]
    assert CliRunner().invoke(cli, both).exit_code == 2
    if command == "train":
        assert CliRunner().invoke(cli, [command, "--home", str(home)]).exit_code == 2
    assert remembered_table(Home(home)) is None


def test_train_remembers_a_folder_and_says_what_to_do(lab: SimpleNamespace, folder: Path, tmp_path: Path) -> None:
    """An encoder is learned in a federation alone: one sentence, and the next `edgefl sync` knows the folder."""
    (tmp_path / "model.edgefl").write_bytes(contrast_bytes(lab, contrast_plan()))
    words = ["--model", str(tmp_path / "model.edgefl"), "--trust", lab.SIGNER.public.hex(), "--batch", "4"]
    done = CliRunner().invoke(cli, ["train", "--pictures", str(folder), *words, "--home", str(tmp_path / "home")])
    assert isinstance(done.exception, LearningError) and done.exception.code == "alone"
    assert "take part with edgefl sync" in str(done.exception)
    assert remembered_table(Home(tmp_path / "home")) == Table(file=folder, batch=4)
