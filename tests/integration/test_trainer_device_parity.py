"""The same photograph through `edgefl-train predict` and `edgefl score`: one image path, one model, the same numbers.

docs/security.md check 32: probabilities, vacuity and dissonance agree to 1e-4, the named class and the reasons exactly.
"""

import io
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from click.testing import CliRunner
from PIL import Image, ImageFilter
from tests.edge_client.scoring.drawn_pictures import score_with
from tests.shared import Shared

from edgefl_client import Scorer
from edgefl_client.cli import cli as device_cli
from edgefl_client.commands.score_text import human_line
from edgefl_export.cli import main as export_cli
from edgefl_protocol.bundle import load_bundle
from edgefl_protocol.envelopes.key_files import read_public_key
from edgefl_protocol.pictures.imaging import decode, resize, shades_of_grey
from edgefl_protocol.pictures.referral import PICTURE_FAULTS
from edgefl_trainer.cli import cli as trainer_cli
from edgefl_trainer.commands.results_text import score_line
from edgefl_trainer.data.lesions import draw_lesion
from edgefl_trainer.engine.models import open_run, predict

DATA = "lesions:sites=2,images=160,px=36"  # enough to know their usual light
SIDE = 24  # px: four patches


def invoke(command: object, *words: object) -> str:
    done = CliRunner().invoke(command, [str(word) for word in words], catch_exceptions=False)
    assert done.exit_code == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def signed(shared: Shared) -> tuple[Path, Path, Path]:
    """A finished run, its signed bundle, and the signer's public key."""
    out = shared.made("parity", lambda folder: run_and_bundle(folder, shared))
    return out / "run", out / "site.edgefl", out / "signer" / "signing.pub"


def run_and_bundle(out: Path, shared: Shared) -> None:
    invoke(
        trainer_cli, "run", "fedevprompt", "--data", DATA, "--task", "nevus", "--preset", "tiny",
        "--backbone", "vit:64x2/12", "--set", "b_blocks=1", "--image-px", SIDE, "--rounds", 1, "--epochs", 1,
        "--colour", "shades_of_grey_6", "--out", out / "run",
    )  # fmt: skip
    invoke(export_cli, "keygen", out / "signer")
    with shared.traces():
        invoke(
            export_cli, "bundle", out / "run", "--site", "site-1", "--sign", out / "signer", "-o", out / "site.edgefl"
        )  # fmt: skip


def photo(shape: tuple[int, int], orientation: int = 1) -> bytes:
    """A drawn lesion stretched to (height, width), as a camera would store it."""
    image, _ = draw_lesion("MEL", site=0, number=3, px=160)
    picture = Image.fromarray(image).resize((shape[1], shape[0]), Image.Resampling.BICUBIC)
    exif = Image.Exif()
    exif[0x0112] = orientation
    stored = io.BytesIO()
    picture.save(stored, "JPEG", quality=92, exif=exif)
    return stored.getvalue()


def spoilt(change: Callable[[Image.Image], Image.Image]) -> bytes:
    """A photograph that the picture gate finds fault with."""
    stored = io.BytesIO()
    change(Image.open(io.BytesIO(photo((300, 400))))).save(stored, "PNG")
    return stored.getvalue()


PHOTOS: dict[str, Callable[[], bytes]] = {
    "4:3": lambda: photo((300, 400)),
    "3:4": lambda: photo((400, 300)),
    "turned by EXIF": lambda: photo((300, 400), orientation=6),
    "smaller than the network": lambda: photo((18, 24)),
    "blurred": lambda: spoilt(lambda image: image.filter(ImageFilter.GaussianBlur(16))),
    "too dark": lambda: spoilt(lambda image: image.point(lambda value: value // 8)),
    "no skin": lambda: spoilt(lambda image: image.convert("L")),
    "a strip": lambda: spoilt(lambda image: image.resize((400, 100))),
    "transparent": lambda: spoilt(lambda image: Image.merge("RGBA", (*image.split(), Image.new("L", image.size, 230)))),
    "a stop and a half darker": lambda: spoilt(lambda image: image.point(lambda value: value // 3)),
    "in blue light": lambda: spoilt(lambda image: image.convert("RGB", (0.8, 0, 0, 0, 0, 1, 0, 0, 0, 0, 1.15, 0))),
}
FAULTS = {
    "smaller than the network": "size", "a strip": "shape", "blurred": "blur", "too dark": "exposure",
    "no skin": "not_skin",
}  # fmt: skip

# Of the colour of the light the model keeps nothing, so that is not compared.
LIGHT = {"4:3": None, "in blue light": None, "a stop and a half darker": "darker"}


@pytest.fixture(scope="module")
def said(signed, tmp_path_factory) -> dict[str, tuple[dict, dict]]:
    """What the trainer and what the device says of each photograph, where they are given all of them."""
    run, bundle, public = signed
    folder = tmp_path_factory.mktemp("photos")
    files = [folder / f"{number}.jpg" for number, _ in enumerate(PHOTOS)]
    for file, made in zip(files, PHOTOS.values(), strict=True):
        file.write_bytes(made())
    trainer = invoke(trainer_cli, "predict", run, *files, "--site", "site-1", "--json").splitlines()
    asked = ("--model", bundle, "--trust", public, "--home", folder / "home", "--json")
    device = invoke(device_cli, "score", *files, *asked).splitlines()
    told = [(json.loads(one), json.loads(other)) for one, other in zip(trainer, device, strict=True)]
    return dict(zip(PHOTOS, told, strict=True))


@pytest.mark.slow
def test_a_single_row_of_prompts_has_a_fused_form(signed):
    """docs/methods.md 1.2: four patches have one prompt, 50 · 4/196 rounded; onnxruntime takes that graph too."""
    _, file, public = signed
    bundle = load_bundle(file.read_bytes(), [read_public_key(public).public], 2**41)
    assert bundle.weights["prompts.b"].shape[2] == 1
    assert any(node.op_type == "Attention" for node in onnx.load_from_string(bundle.score_onnx).graph.node)


@pytest.mark.parametrize("kind", PHOTOS)
def test_a_photograph_scores_the_same_in_trainer_and_device(kind, said):
    expected, found = said[kind]
    assert found.keys() == expected.keys()
    names = (
        "predicted",
        "refer",
        "refer_reasons",
        "image",
        "predicted_name",
        "malignancy",
        "rules_tried",
        "exposure",
        "light",
        "transparent",
        "learned_from",
        "suspicious_tried",
    )
    for name in (*names, "suspicious_from", "suspicious_rule", "vacuity_from", "dissonance_from", "entropy_from"):
        assert found[name] == expected[name], name
    assert found["model"]["better_than_chance"] is expected["model"]["better_than_chance"]
    assert found["model"]["warnings"] == expected["model"]["warnings"]
    for name in ("vacuity", "dissonance", "entropy_nats", "suspicious_probability"):
        assert found[name] == pytest.approx(expected[name], abs=1e-4), name
    for name, tolerance in (("probabilities", 1e-4), ("evidence", 1e-3)):
        assert found[name].keys() == expected[name].keys()
        np.testing.assert_allclose(list(found[name].values()), list(expected[name].values()), atol=tolerance)
    faults = [reason for reason in found["refer_reasons"] if reason in PICTURE_FAULTS]
    assert FAULTS[kind] in faults if kind in FAULTS else not faults
    assert "light" in found["rules_tried"] and ("light" in found["refer_reasons"]) is (found["light"] is not None)
    if kind in LIGHT:
        assert found["light"] == LIGHT[kind]
    assert (found["predicted"] is None) is bool({"size", "not_skin"} & set(faults))
    assert found["transparent"] is (kind == "transparent")


def test_both_remove_the_colour_that_training_removed(signed, tmp_path):
    """The run says so once; the oracle is the model on a picture corrected by hand, not by what the run tells."""
    run, file, public = signed
    bundle = load_bundle(file.read_bytes(), [read_public_key(public).public], 2**41)
    assert bundle.preprocess.colour == "shades_of_grey_6"
    picture = tmp_path / "photo.jpg"
    picture.write_bytes(PHOTOS["in blue light"]())
    corrected = shades_of_grey(resize(decode(picture.read_bytes()), SIDE))
    expected = predict(open_run(run).predictor("site-1"), corrected[None]).probabilities[0]
    found = Scorer(bundle, threads=1).score(picture.read_bytes())
    np.testing.assert_allclose(list(found.probabilities.values()), expected, atol=1e-4)


def test_turning_the_picture_by_exif_is_turning_the_pixels(signed, tmp_path):
    """A device that ignored EXIF would score another picture: the upright file and the tagged one agree."""
    _, bundle, public = signed
    tagged, upright = tmp_path / "tagged.png", tmp_path / "upright.png"
    image, _ = draw_lesion("BKL", site=1, number=5, px=96)
    exif = Image.Exif()
    exif[0x0112] = 3  # half a turn
    Image.fromarray(image).save(upright)
    Image.fromarray(np.rot90(image, 2)).save(tagged, exif=exif)
    told = invoke(
        device_cli, "score", upright, tagged, "--model", bundle, "--trust", public, "--home", tmp_path / "h", "--json"
    )
    first, second = (json.loads(line) for line in told.splitlines())
    assert first["probabilities"] == second["probabilities"]


@pytest.mark.parametrize("line", [human_line, score_line])
def test_without_vacuity_the_line_names_the_uncertainty(line):
    with_vacuity = score_with(None)
    assert ", vacuity 0.40" in line(with_vacuity) and "uncertainty" not in line(with_vacuity)
    softmax = replace(with_vacuity, vacuity=None, refer=True, refer_reasons=("vacuity",), entropy_from=0.4)
    assert ", uncertainty 0.72, above the rule's 0.58" in line(softmax) and "vacuity" not in line(softmax)
    assert line(softmax).count("uncertainty") == 1 and "refer: its answer is too uncertain" in line(softmax)


def test_a_run_of_small_pictures_scores_as_it_learned(signed, shared: Shared, tmp_path):
    """A run over pictures of 18 px, which the network reads at 24: a device shrinks a photograph first, as `predict`.

    The run's own summary says what its pictures were like; here it is said of a run that is there already.
    """
    run, _, public = signed
    small = tmp_path / "small"
    shutil.copytree(run, small)
    summary = json.loads((small / "summary.json").read_text())
    assert summary["taught_pictures"] is None, "36 px are more than the network reads"
    told = {"side": 18, "jpeg_quality": 40}
    (small / "summary.json").write_text(json.dumps({**summary, "taught_pictures": told}))
    bundle, file = tmp_path / "small.edgefl", tmp_path / "photo.jpg"
    file.write_bytes(photo((300, 400)))
    with shared.traces():
        invoke(export_cli, "bundle", small, "--site", "site-1", "--sign", public.parent, "-o", bundle)
    expected = json.loads(invoke(trainer_cli, "predict", small, file, "--site", "site-1", "--json"))
    found = json.loads(
        invoke(device_cli, "score", file, "--model", bundle, "--trust", public, "--home", tmp_path / "home", "--json")
    )
    assert found["probabilities"] == pytest.approx(expected["probabilities"], abs=1e-4)
    sharp = json.loads(invoke(trainer_cli, "predict", run, file, "--site", "site-1", "--json"))
    assert found["probabilities"] != pytest.approx(sharp["probabilities"], abs=1e-4)
