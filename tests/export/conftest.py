"""A finished run in a folder, written by the trainer's own writers around a small random network."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.shared import Shared, operators_read_once

from edgefl_export import cli
from edgefl_export.bundles.assemble import Members, build_members, site_model
from edgefl_protocol.rules.defaults import usual_prompt_length
from edgefl_trainer.contract import Predictor
from edgefl_trainer.engine.models import open_run, save_predictor
from edgefl_trainer.engine.settings import RunSettings
from edgefl_trainer.losses import class_prior
from edgefl_trainer.models.backbone_names import BACKBONE_FILE
from edgefl_trainer.models.backbones import backbone_bytes, frozen_network, load_backbone, weights_of
from edgefl_trainer.models.cnn import Backbone
from edgefl_trainer.models.head import init_head
from edgefl_trainer.models.scoring import ScoreModule, ScoreOptions
from edgefl_trainer.models.vit import init_prompts

CLASSES = ("MEL", "NV", "BKL")


def make_predictor(backbone: str = "vit:64x2/12", image_px: int = 36, **options) -> Predictor:
    """A predictor with random weights in every tensor, so that no output is flat."""
    vit = biased(load_backbone(backbone, image_px=image_px, seed=1))
    spec, draw = vit.spec, torch.Generator().manual_seed(2)
    chosen = ScoreOptions(**({"head_norm": "standardise"} | options))
    weight, bias = init_head(len(CLASSES), spec.width, draw)
    length = usual_prompt_length(spec.tokens)
    values = {
        "prompts.b": init_prompts(spec, 1, length, "uniform", draw),
        "prompts.t": init_prompts(spec, spec.depth - 1, length, "uniform", draw),
        "head.weight": weight * 30,
        "head.bias": bias,
        "features.mean": torch.randn(spec.width, generator=draw) * 0.1,
        "features.std": torch.rand(spec.width, generator=draw) + 0.5,
        "prior": class_prior([50, 30, 4]).float(),
        "usual.mean": torch.randn(spec.width, generator=draw) * 0.1,
        "usual.whitening": torch.randn((spec.width, spec.width), generator=draw) / spec.width,
        "temperature": torch.tensor(1.3),
    }
    tensors = {name: values[name].numpy() for name in chosen.tensors}
    return Predictor(ScoreModule(vit, chosen), tensors, (True, True, False))


def biased(fresh: Backbone) -> Backbone:
    """The network with biases, which a fresh one has not: they name some layers, and the fused graph moves others."""
    draw, weights = np.random.default_rng(3), dict(weights_of(fresh.network))
    for name, value in weights.items():
        if name.endswith("bias"):
            weights[name] = draw.normal(0, 0.2, value.shape).astype(value.dtype)
    return frozen_network(fresh.spec, weights)


def write_run(folder: Path, predictor: Predictor, backbone: Backbone | None = None) -> Path:
    """The files of a finished run that export reads; its backbone is the predictor's unless another is named."""
    frozen = backbone or predictor.module.backbone
    folder.mkdir()
    settings = RunSettings(
        method="fedevprompt",
        data=("lesions:sites=2,images=4,classes=NV+MEL+BKL",),
        backbone="tiny",
        image_px=frozen.spec.image_px,
        preset="tiny",
    )
    (folder / "config.toml").write_text(settings.to_toml())
    data = backbone_bytes(frozen.spec, weights_of(frozen.network), self_supervised=True)
    (folder / BACKBONE_FILE).write_bytes(data)
    save_predictor(folder / "models" / "north.safetensors", predictor)
    site = {"n_train": 84, "n_test": 20, "balanced_accuracy": 0.5, "auroc": None}
    site["balanced_accuracy_interval"] = [0.375, 0.625]
    summary = {
        "method": "fedevprompt",
        "task": "all",
        "classes": list(CLASSES),
        "sites": {"north": site},
        "mean_balanced_accuracy": 0.5,
    }
    calibration = {"temperature": 1.3, "refer_above": 0.8}
    (folder / "summary.json").write_text(json.dumps(summary))
    (folder / "calibration.json").write_text(json.dumps({**calibration, "sites": {"north": calibration}}))
    return folder


@pytest.fixture(scope="session", autouse=True)
def _operators() -> Iterator[None]:
    with operators_read_once():
        yield


@pytest.fixture(scope="session")
def predictor() -> Predictor:
    return make_predictor()


@pytest.fixture(scope="session")
def run_folder(tmp_path_factory: pytest.TempPathFactory, predictor: Predictor) -> Path:
    return write_run(tmp_path_factory.mktemp("runs") / "run", predictor)


@pytest.fixture(scope="session")
def members(run_folder: Path, shared: Shared) -> Members:
    """The bundle's files of the run, whose graph is traced once: that takes seconds."""
    with shared.traces():
        return build_members(site_model(open_run(run_folder), "north"))


@pytest.fixture(scope="session")
def graph(members: Members) -> bytes:
    return members.files["score.onnx"]


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """The developer's own key passphrase and build time must not enter."""
    for name in ("EDGEFL_KEY_PASSPHRASE", "SOURCE_DATE_EPOCH"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="session")
def built(run_folder: Path, shared: Shared) -> dict[str, Path]:
    """A key, and a bundle of the run signed with it through the command line: once for all processes."""
    from click.testing import CliRunner

    def make(folder: Path) -> None:
        runner = CliRunner()
        assert runner.invoke(cli.main, ["keygen", str(folder / "keys")]).exit_code == 0
        arguments = ["bundle", str(run_folder), "--site", "north", "--sign", str(folder / "keys")]
        more = ["-o", str(folder / "north.edgefl"), "--created", "1790000000", "--json"]
        with shared.traces():
            result = runner.invoke(cli.main, [*arguments, *more])
        assert result.exit_code == 0, result.stderr
        (folder / "out.json").write_text(result.stdout)

    folder = shared.made("export-built", make)
    file = folder / "north.edgefl"
    return {"file": file, "keys": folder / "keys", "pub": folder / "keys" / "signing.pub", "out": folder / "out.json"}


@pytest.fixture
def make() -> Callable[..., Predictor]:
    return make_predictor


@pytest.fixture
def images() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (64, 36, 36, 3), np.uint8)
