"""Teaching a vision transformer the features of an ImageNet network. Source: FitNets, arXiv 1412.6550; docs 0068."""

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from examples import taught_network
from examples.taught_network import BATCH, STAGE, TEACHER, TEACHER_PX, Student, Teacher, floored, pictures_of, teach
from examples.teach_derm_backbone import NAME, card, network_of
from safetensors.numpy import load_file
from torch.nn.functional import interpolate

from edgefl_trainer.data import load_federation
from edgefl_trainer.errors import BackboneError, RunError
from edgefl_trainer.models.backbones import load_backbone

FOLDER = Path(__file__).parents[3] / "backbones"


@pytest.fixture(scope="module")
def federation(cached):
    return load_federation(["lesions:sites=2,images=24,px=84"], image_px=84, task="nevus", seed=0, unlabelled="spread")


@pytest.fixture(scope="module")
def teacher(federation):
    return Teacher(torch.from_numpy(np.array(federation.images[:BATCH])))


def test_the_targets_are_the_frozen_networks_own_features(federation, teacher):
    """Pooled: what `load_backbone` gives of the enlarged picture; cells: timm's own features of stride 16."""
    import timm

    pictures = torch.from_numpy(np.array(federation.images[:4]))
    large = interpolate(pictures.permute(0, 3, 1, 2).float(), size=(TEACHER_PX, TEACHER_PX), mode="bilinear",
                        antialias=True, align_corners=False)  # fmt: skip
    backbone = load_backbone(TEACHER, image_px=TEACHER_PX)
    pixels = (large / 255 - 0.5) / 0.5
    found = teacher(pictures)
    mean, deviation = teacher.scale
    with torch.no_grad():
        pooled = backbone(pixels).pooled
        whole = timm.create_model("tf_efficientnet_lite0", pretrained=False, features_only=True, out_indices=(3,))
        whole.load_state_dict(backbone.network.state_dict(), strict=False)
        cells = whole.eval()(pixels)[0]  # stride 16
    np.testing.assert_allclose(found.pooled * deviation.pooled + mean.pooled, pooled, atol=1e-3)
    assert cells.shape[1:] == (112, 7, 7) and STAGE == 4
    flat = cells.flatten(2).transpose(1, 2)
    np.testing.assert_allclose(found.cells * deviation.cells + mean.cells, flat, atol=2e-3)


def test_a_patch_learns_the_cell_of_its_own_place(teacher):
    """A bright square in one patch of a grey picture changes the cell of that patch most."""
    grey = np.full((84, 84, 3), 128, np.uint8)
    for row, column in ((1, 1), (3, 5), (6, 2)):
        marked = grey.copy()
        marked[12 * row + 3 : 12 * row + 9, 12 * column + 3 : 12 * column + 9] = 255
        change = teacher(torch.from_numpy(marked[None])).cells - teacher(torch.from_numpy(grey[None])).cells
        assert int(change.square().sum(-1).argmax()) == 7 * row + column


def test_a_channel_that_is_hardly_ever_on_does_not_outweigh_the_others():
    assert floored(torch.tensor([1e-9, 2.0, 4.0])).tolist() == pytest.approx([0.2, 2.0, 4.0])


def test_each_round_is_the_mean_of_the_sites_weighted_by_pictures(federation, tmp_path, monkeypatch):
    """With a step that adds the site's place, one and two, the mean is by hand."""

    def shift(student, teacher, rows, done, rounds, rng):
        add = 1.0 if len(rows) == counts[0] else 2.0
        with torch.no_grad():
            student.cells.bias += add
        return 0.0

    sites = pictures_of(federation)
    cut = replace(federation.sites["site-2"], train=federation.sites["site-2"].train[:5])
    uneven = replace(federation, sites={**federation.sites, "site-2": cut})
    counts = [len(rows) for rows in pictures_of(uneven).values()]
    assert counts[1] == 5 < counts[0] == len(sites["site-1"])
    monkeypatch.setattr(taught_network, "epoch", shift)
    teach(uneven, "vit:64x1/12", 1, 0, tmp_path)
    start = Student("vit:64x1/12", 84, (112, 1280), 0)
    moved = load_file(tmp_path / "state-01.safetensors")["cells.bias"] - start.cells.bias.detach().numpy()
    np.testing.assert_allclose(moved, (counts[0] * 1 + counts[1] * 2) / sum(counts), atol=1e-6)


def test_a_student_comes_nearer_to_its_teacher(federation, tmp_path, capsys, monkeypatch):
    """Six steps a site and round: in the last of six rounds the loss is clearly below that of the first."""
    monkeypatch.setattr(taught_network, "BATCH", 4)
    teach(federation, "vit:64x1/12", 6, 0, tmp_path)
    losses = [float(line.split("loss ")[1].split(",")[0]) for line in capsys.readouterr().err.splitlines()]
    assert len(losses) == 12 and sum(losses[-2:]) < 0.9 * sum(losses[:2])


def test_teaching_reads_no_label_and_goes_on(federation, tmp_path, one_thread):
    """Other labels give the same student; a second round on the first one's state gives what two in a row give."""
    for name in ("straight", "halted"):
        (tmp_path / name).mkdir()
    teach(federation, "vit:64x1/12", 2, 0, tmp_path / "straight")
    turned = replace(federation, labels=1 - federation.labels)
    teach(turned, "vit:64x1/12", 2, 0, tmp_path / "halted")
    (tmp_path / "halted/state-02.safetensors").unlink()
    teach(turned, "vit:64x1/12", 2, 0, tmp_path / "halted")
    for name in ("round-01", "round-02", "state-02"):
        one, other = ((tmp_path / folder / f"{name}.safetensors").read_bytes() for folder in ("straight", "halted"))
        assert one == other


def test_only_a_vision_transformer_can_be_taught():
    with pytest.raises(BackboneError, match="only a vision transformer"):
        Student("cnn:resnet18", 84, (112, 1280), 0)


@pytest.fixture(scope="module")
def record() -> dict:
    return json.loads((FOLDER / f"{NAME}.json").read_text())


def test_file_record_and_card_agree(record):
    """docs/decisions/0021: at most 12 MB of float16, and a card that is written from the record."""
    file = FOLDER / f"{NAME}.safetensors"
    spec = load_backbone(NAME).spec
    assert (spec.width, spec.depth, spec.patch, spec.image_px, spec.self_supervised) == (192, 12, 12, 84, True)
    assert spec.sha256 == record["sha256"] and file.stat().st_size == record["bytes"] <= 12_000_000
    assert {value.dtype for value in load_file(file).values()} == {np.dtype(np.float16)}
    text = (FOLDER / f"{NAME}.md").read_text()
    assert text == card(record) and spec.sha256 in text and "$EDGEFL_DATA" in text
    assert not re.search(r"(?<![\w.$])/(home|work|root|tmp|Users)/", text + json.dumps(record))


def test_the_licence_stands_beside_it():
    notice = (FOLDER / f"LICENSE-{NAME}").read_text()
    for told in (
        "CC BY-NC 4.0",
        "ISIC 2019",
        "BCN20000",
        "HAM10000",
        "1710.05006",
        "EfficientNet",
        "Apache License 2.0",
    ):
        assert told in notice


def test_it_is_worth_shipping(record):
    """Nevus against the rest: above the network that it began with, as mean of centres and pooled."""
    rows = record["probe"]["nevus"]
    for figure in ("mean", "pooled"):
        assert rows["taught.mean"][figure] > max(rows["start.mean"][figure], rows["colours"][figure])
    for probes in record["probe"].values():
        for row in probes.values():  # by hand: a mean is that of its centres
            assert row["mean"] == pytest.approx(np.mean(list(row["sites"].values())), abs=1e-4)


def test_a_run_that_learned_no_network_has_none_to_probe(finished):
    with pytest.raises(RunError, match="learned no network that all share"):
        network_of(finished["local"])
