"""The two bundles with a training step, of FedEvPrompt and of FedCLF: made by the command line, once in a run of tests.

Tracing a step takes a minute of processor time even for a small network, and everybody who needs one takes these.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from click.testing import CliRunner
from tests.export.conftest import CLASSES, make_predictor, write_run
from tests.shared import Shared

from edgefl_export import cli
from edgefl_protocol.bundle import Bundle, load_bundle
from edgefl_trainer.contract import Predictor
from edgefl_trainer.engine.settings import RunSettings
from edgefl_trainer.losses import class_prior
from edgefl_trainer.models.backbones import load_backbone
from edgefl_trainer.models.head import init_head
from edgefl_trainer.models.scoring import ScoreModule, ScoreOptions

NUMBERED = ("MEL", "NV", "BCC")
CREATED_MS = 1_790_000_000_000
SIDE = 36
HYPER: dict[str, int | float | str] = {"batch": 16, "queue": 40, "lr": 0.03}  # of the run that learned the backbone


@dataclass(frozen=True)
class LearningBundle:
    """A run, its bundle with a training step, the signer's public key, and what the command told of the gates."""

    run: Path
    file: Path
    signer: bytes
    gates: Mapping[str, Any]

    def load(self) -> Bundle:
        return load_bundle(self.file.read_bytes(), [self.signer], CREATED_MS)


def prompt_bundle(shared: Shared) -> LearningBundle:
    """FedEvPrompt on the predictor of `make_predictor`."""
    return _exported(shared, "prompt-bundle", lambda folder: write_run(folder / "run", make_predictor()))


def contrast_bundle(shared: Shared) -> LearningBundle:
    """FedCLF on a small convolutional network, which it learned with `HYPER`."""
    return _exported(shared, "contrast-bundle", learned_run)


def learned_run(folder: Path) -> Path:
    """A run in a folder that exists, on a backbone that another run in it learned with `HYPER`."""
    (folder / "learned").mkdir()
    before = RunSettings(
        method="fedclf", data=("lesions:",), backbone="cnn:test_resnet", image_px=SIDE, preset="tiny", epochs=1,
        seed=4, hyper=HYPER,
    )  # fmt: skip
    (folder / "learned" / "config.toml").write_text(before.to_toml())
    return cnn_run(folder / "run", folder / "learned")


def _exported(shared: Shared, name: str, write: Callable[[Path], Path]) -> LearningBundle:
    def make(folder: Path) -> None:
        run, runner = write(folder), CliRunner()
        summary = json.loads((run / "summary.json").read_text())
        (run / "summary.json").write_text(json.dumps({**summary, "classes": list(NUMBERED)}))
        assert runner.invoke(cli.main, ["keygen", str(folder / "keys")]).exit_code == 0
        words = ["bundle", str(run), "--site", "north", "--federation", "skin", "--with-training", "--json"]
        more = ["--sign", str(folder / "keys"), "--created", str(CREATED_MS // 1000)]
        with shared.traces():
            result = runner.invoke(cli.main, [*words, *more, "-o", str(folder / "north.edgefl")])
        assert result.exit_code == 0, result.stderr
        (folder / "told.json").write_text(result.stdout)

    folder = shared.made(name, make)
    signer = bytes.fromhex((folder / "keys" / "signing.pub").read_text())
    gates = json.loads((folder / "told.json").read_text())["training"]
    return LearningBundle(folder / "run", folder / "north.edgefl", signer, gates)


def cnn_predictor() -> Predictor:
    cnn, drawn = load_backbone("cnn:test_resnet", image_px=SIDE, seed=1), torch.Generator().manual_seed(2)
    weight, bias = init_head(len(CLASSES), cnn.spec.width, drawn)
    options = ScoreOptions(readout="pooled", prompts=())
    values = {
        "head.weight": weight, "head.bias": bias, "prior": class_prior([50, 30, 4]).float(),
        "temperature": torch.tensor(1.0),
    }  # fmt: skip
    tensors = {name: values[name].numpy() for name in options.tensors}
    return Predictor(ScoreModule(cnn, options), tensors, (True, True, False))


def cnn_run(folder: Path, learned: Path | None) -> Path:
    """A finished run of a head on a convolutional network; `learned`, where FedCLF learned that, or None."""
    run = write_run(folder, cnn_predictor())
    backbone = "cnn:test_resnet" if learned is None else f"run:{learned}"
    settings = RunSettings(
        method="head", data=("lesions:",), backbone=backbone, image_px=SIDE, preset="tiny", epochs=1, seed=4
    )
    (run / "config.toml").write_text(settings.to_toml())
    return run
