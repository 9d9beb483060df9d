"""Every method that makes a model leaves through one door: export gates, bundle, device, the trainer's numbers.

docs/security.md check 32 for each line of the table of methods: probabilities and vacuity agree to 1e-4, what is named
and referred agrees exactly.
"""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result
from PIL import Image
from tests.shared import Shared

from edgefl_client.cli import cli as device_cli
from edgefl_export.cli import main as export_cli
from edgefl_trainer.cli import cli as trainer_cli
from edgefl_trainer.contract import declared
from edgefl_trainer.data.lesions import draw_lesion
from edgefl_trainer.engine.hyper_parameters import hyper_types
from edgefl_trainer.engine.models import open_run, predict
from edgefl_trainer.learning.unusual_features import everything_usual
from edgefl_trainer.methods import METHODS

DATA = "lesions:sites=2,images=24,px=36"
ENOUGH = "lesions:sites=2,images=80,px=36"  # training rows for a site to know what is usual there
CNN, VIT = "cnn:test_resnet", "vit:64x2/12"
MODELS = sorted(  # of pictures: those of questions are in `test_questions.py`
    name for name, kind in METHODS.items() if not declared(kind).encoder and not declared(kind).questions_only
)
LARGER = ("finetune", "mode=local", "cnn:mobilenetv3_small_050")  # its smaller form: the same on CNN
VARIANTS = (  # settings and networks under which a method's graph has other inputs, outputs or constants
    ("local", "loss=ce", VIT),
    ("local", "prompts=none", CNN),
    ("head", None, CNN),
    ("fedavg", "share=g", VIT),
    ("fedproto", "predict=nearest", VIT),
    ("finetune", "mode=local", CNN),
    LARGER,
)


def ask(command: object, *words: object) -> Result:
    return CliRunner().invoke(command, [str(word) for word in words], catch_exceptions=False)


def told(command: object, *words: object) -> list[dict]:
    done = ask(command, *words, "--json")
    assert done.exit_code == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def train(method: str, folder: Path, setting: str | None, backbone: str, data: str = DATA) -> Path:
    more = ["--set", setting] if setting else []
    if backbone == VIT and "b_blocks" in hyper_types(METHODS[method]):
        more += ["--set", "b_blocks=1"]  # of its two
    told(
        trainer_cli, "run", method, "--data", data, "--task", "nevus", "--preset", "tiny", "--backbone", backbone,
        "--image-px", "36", "--device", "cpu", "--rounds", "1", "--epochs", "1", "--out", folder, *more,
    )  # fmt: skip
    return folder


@pytest.fixture(scope="module", autouse=True)
def _traced_once(shared: Shared) -> Iterator[None]:
    """Methods that learn the same tensors on the same network have the same graph."""
    with shared.traces():
        yield


@pytest.fixture(scope="module")
def signer(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("signer") / "keys"
    assert ask(export_cli, "keygen", folder).exit_code == 0
    return folder


@pytest.fixture
def photos(tmp_path) -> list[Path]:
    files = []
    for number, label in enumerate(("MEL", "NV")):
        image, _ = draw_lesion(label, site=0, number=number, px=64)
        files.append(tmp_path / f"{label}.png")
        Image.fromarray(image).save(files[-1])
    return files


EVERY = [*((name, None, VIT) for name in MODELS), *VARIANTS]
# In every run of the tests: one on a convolutional network; test_trainer_device_parity has one with evidence and maps.
SOON = {("head", None, CNN)}


def tier(case: tuple[str, str | None, str]) -> list[pytest.MarkDecorator]:
    later = [pytest.mark.slow, pytest.mark.nightly] if case == LARGER else [pytest.mark.slow]
    return [] if case in SOON else later


@pytest.mark.parametrize(
    ("method", "setting", "backbone"),
    [pytest.param(*case, marks=tier(case)) for case in EVERY],
)
def test_a_model_scores_on_the_device_as_in_the_trainer(method, setting, backbone, signer, photos, tmp_path):
    run = train(method, tmp_path / "run", setting, backbone)
    assert pictures_drawn(run, signer, photos) == len(photos)


@pytest.mark.slow
@pytest.mark.parametrize(("method", "setting", "backbone"), [("local", None, VIT), ("fedavg", "prompts=none", CNN)])
def test_discounted_evidence_reaches_the_device(method, setting, backbone, signer, photos, tmp_path):
    """docs/methods.md, discounted evidence, on in the preset: with 40 training rows a bundle holds real distances."""
    run = train(method, tmp_path / "run", setting, backbone, ENOUGH)
    model = open_run(run).predictor("site-1")
    none = replace(model, tensors={**model.tensors, **everything_usual(model.module.backbone.spec.width)})
    noise = np.random.default_rng(0).integers(0, 256, (8, 36, 36, 3), dtype=np.uint8)
    assert (predict(model, noise).vacuity > predict(none, noise).vacuity + 1e-3).all()
    assert pictures_drawn(run, signer, photos) == len(photos)


def pictures_drawn(run: Path, signer: Path, photos: list[Path]) -> int:
    """Pictures that the device draws of the photos, once bundle, gates and device agree with the trainer.

    With a map where the bundle says that its own is true; else it says why there is none.
    """
    folder = run.parent
    bundle, public = folder / "site.edgefl", signer / "signing.pub"
    [facts] = told(export_cli, "bundle", run, "--site", "site-1", "--sign", signer, "-o", bundle)
    assert facts["parity"]
    assert all(figure["worst"] <= figure["allowed"] for figure in facts["parity"].values())
    assert told(export_cli, "verify", bundle, "--trust", public)[0]["verified"] is True
    expected = told(trainer_cli, "predict", run, *photos, "--site", "site-1")
    asked = ("score", *photos, "--model", bundle, "--trust", public, "--home", folder / "home")
    drawn = ask(device_cli, *asked, "--json", "--heatmap", folder / "maps")
    assert drawn.exit_code == 0, drawn.stderr
    found = [json.loads(line) for line in drawn.stdout.splitlines()]
    assert len(found) == len(expected) == len(photos)
    for device, trainer in zip(found, expected, strict=True):
        assert device.keys() == trainer.keys()
        for name in ("predicted", "refer", "refer_reasons", "rules_tried", "suspicious_from"):
            assert device[name] == trainer[name], name
        assert device["probabilities"].keys() == trainer["probabilities"].keys()
        values = [list(score["probabilities"].values()) for score in (device, trainer)]
        np.testing.assert_allclose(*values, atol=1e-4)
        assert device["vacuity"] == (
            None if trainer["vacuity"] is None else pytest.approx(trainer["vacuity"], abs=1e-4)
        )
    first, second = (score["probabilities"] for score in found)
    assert first != second  # two pictures, two answers: the picture reaches the model
    assert ("No map is drawn" in drawn.stderr) is not facts["map"]["shown"]
    return sum(score["heatmap"] is not None for score in found)
