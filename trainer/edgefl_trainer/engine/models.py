"""What a finished run scores with: one file of tensors for each site, beside the backbone they belong to.

`DIR/models/NAME.safetensors` holds the tensors by their payload names; its scalars hold the scoring options and the
classes the site has seen. Reading it back needs neither the data nor the method. Where a method can answer in more than
one way, its further models lie in `DIR/models/WAY/NAME.safetensors`.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from edgefl_protocol import Payload
from edgefl_protocol.durable import read_bounded, write_atomic
from edgefl_protocol.errors import EdgeflError
from edgefl_protocol.pictures.preprocess import Preprocess, TaughtPictures
from edgefl_protocol.rules.questions import Questions
from edgefl_trainer.contract import Examples, Prediction, Predictor
from edgefl_trainer.engine.folder import (
    CONFIG,
    SUMMARY,
    begun_hyper,
    check_finished,
    check_model,
    make_folder,
    model_sites,
)
from edgefl_trainer.engine.hyper_parameters import hyper_values
from edgefl_trainer.engine.settings import RunSettings, read_settings
from edgefl_trainer.errors import RunError
from edgefl_trainer.evaluate.metrics import predicted_classes
from edgefl_trainer.learning.learners.answer_rows import answer_rows
from edgefl_trainer.models.answers import AnswerModule, answer_options_from_json, answer_options_to_json
from edgefl_trainer.models.backbone_names import BACKBONE_FILE
from edgefl_trainer.models.backbones import frozen_network, load_backbone
from edgefl_trainer.models.cnn import Backbone
from edgefl_trainer.models.scoring import ScoreModule, options_from_json, options_to_json

MAX_MODEL_BYTES = 1 << 30
NETWORK = "network."  # begins the names of a site's own backbone weights
QUESTIONS_FILE = "questions.json"
SCORES, ANSWERS = "options", "answers"  # which options a file holds: of a score, or of an answer
BATCH = 64


@dataclass(frozen=True)
class FinishedRun:
    """A run directory, opened for evaluation, prediction and export."""

    folder: Path
    settings: RunSettings
    summary: Mapping[str, Any]
    calibration: Mapping[str, Any]

    @property
    def sites(self) -> tuple[str, ...]:
        """Sites that have a model."""
        return model_sites(self.folder)

    @property
    def classes(self) -> tuple[str, ...]:
        """Class names; a class index counts in them."""
        return tuple(self.summary["classes"])

    @cached_property
    def hyper(self) -> Mapping[str, Any]:
        """Every hyper-parameter as the run began; today's defaults where it did not keep them.

        A `SettingError` where the method is not known here.
        """
        return {**hyper_values(self.settings.build_method()), **begun_hyper(self.folder)}

    @cached_property
    def questions(self) -> Questions | None:
        """What the run's models know of questions; None where they score pictures alone.

        A `RunError` where the file is damaged.
        """
        path = self.folder / QUESTIONS_FILE
        if not path.exists():
            return None
        try:
            found = json.loads(read_bounded(path, MAX_MODEL_BYTES))
            return Questions(tuple(map(str, found["words"])), int(found["length"]))
        except (EdgeflError, KeyError, TypeError, ValueError) as error:
            raise RunError(f"{path} is damaged ({error}): put it back from a copy.", "damaged") from error

    @cached_property
    def backbone(self) -> Backbone:
        """The frozen network of the run."""
        name = self.settings.backbone
        if not name.startswith("timm:"):
            name = f"file:{self.folder / BACKBONE_FILE}"
        return load_backbone(name, image_px=self.settings.image_px or None, seed=self.settings.seed)

    @property
    def preprocess(self) -> Preprocess:
        """How a photo becomes the network's input."""
        spec = self.backbone.spec
        told = self.summary.get("taught_pictures")
        taught = None if told is None else TaughtPictures.from_json(told)
        return Preprocess(size=spec.image_px, colour=self.settings.colour, mean=spec.mean, std=spec.std, taught=taught)

    @property
    def further(self) -> tuple[str, ...]:
        """Names of further models of each site, see `contract.Declaration`."""
        return tuple(sorted(self.summary.get("further", {})))

    def predictor(self, site: str, further: str = "") -> Predictor:
        """Return what a site scores with: the method's first model, or the one of `further` that is named.

        A `RunError` where there is no such site or its file is damaged.
        """
        check_model(self.folder, site)
        return load_predictor(self.folder / "models" / further / f"{site}.safetensors", self.backbone)


def open_run(folder: Path) -> FinishedRun:
    """Open a run directory; a `RunError` where it is none, or its run is not finished."""
    check_finished(folder)
    settings = read_settings(folder / CONFIG)
    try:
        summary = json.loads((folder / SUMMARY).read_text())
        judged = (folder / "models").exists()  # a run that learned a backbone has neither models nor calibration
        calibration = json.loads((folder / "calibration.json").read_text()) if judged else {}
    except (OSError, ValueError) as error:
        raise RunError(
            f"the results in {folder} are damaged ({error}): run it again with --resume.", "damaged"
        ) from error
    return FinishedRun(folder, settings, summary, calibration)


def save_questions(folder: Path, questions: Questions) -> None:
    """Write what the models of a run know of questions: the words, and how many of a question are read."""
    write_atomic(folder / QUESTIONS_FILE, json.dumps(asdict(questions)).encode() + b"\n")


def save_predictor(path: Path, predictor: Predictor) -> None:
    """Write a site's scoring tensors and its own network's, options and seen classes."""
    module = predictor.module
    if isinstance(module, AnswerModule):
        kind, options = ANSWERS, answer_options_to_json(module.options)
    else:
        kind, options = SCORES, options_to_json(module.options)
    scalars = {kind: json.dumps(options, sort_keys=True), "seen": json.dumps(list(predictor.seen))}
    make_folder(path.parent)
    own = {f"{NETWORK}{name}": value for name, value in predictor.network.items()}
    write_atomic(path, Payload({**predictor.tensors, **own}, scalars).to_bytes())


def load_predictor(path: Path, backbone: Backbone) -> Predictor:
    """Read what `save_predictor` wrote; a `RunError` where it is missing or damaged."""
    try:
        payload = Payload.from_bytes(read_bounded(path, MAX_MODEL_BYTES), MAX_MODEL_BYTES)
        seen = tuple(bool(value) for value in json.loads(str(payload.scalars["seen"])))
        own = {name.removeprefix(NETWORK): payload.arrays[name] for name in payload.arrays if name.startswith(NETWORK)}
        module = _module(payload, frozen_network(backbone.spec, own) if own else backbone)
    except (EdgeflError, KeyError, TypeError, ValueError) as error:
        raise RunError(
            f"the model {path} cannot be read ({error}): remove the run's summary.json and run again with --resume.",
            "damaged",
        ) from error
    tensors = {k: np.asarray(v, np.float32) for k, v in payload.arrays.items() if not k.startswith(NETWORK)}
    return Predictor(module, tensors, seen, own)


def _module(payload: Payload, backbone: Backbone) -> ScoreModule | AnswerModule:
    """The module whose options a file of `save_predictor` holds."""
    if ANSWERS in payload.scalars:
        return AnswerModule(backbone, answer_options_from_json(json.loads(str(payload.scalars[ANSWERS]))))
    return ScoreModule(backbone, options_from_json(json.loads(str(payload.scalars[SCORES]))))


def predict(predictor: Predictor, images: NDArray[np.uint8], device: torch.device | None = None) -> Prediction:
    """Score images prepared by `edgefl_protocol.pictures.imaging` (B, px, px, 3), in order and in batches.

    `device` is where to compute; None is the CPU.
    """
    where = device or torch.device("cpu")
    module = predictor.module.to(where).eval()
    tensors = {name: torch.from_numpy(np.array(value)).to(where) for name, value in predictor.tensors.items()}
    parts = []
    with torch.inference_mode():
        for start in range(0, len(images), BATCH):
            batch = torch.from_numpy(np.array(images[start : start + BATCH])).to(where)
            parts.append({name: value.cpu().numpy() for name, value in module(batch, tensors).named().items()})
    if not parts:
        raise RunError("no image to score was given: name at least one.")
    return _prediction({name: np.concatenate([part[name] for part in parts]) for name in parts[0]}, predictor)


def predict_rows(predictor: Predictor, rows: Examples, device: torch.device | None = None) -> Prediction:
    """Score at least one row: its picture, or what is asked about it; see `predict`."""
    if isinstance(predictor.module, AnswerModule):
        return _prediction(answer_rows(predictor, rows, device or torch.device("cpu")), predictor)
    return predict(predictor, rows.images[rows.places], device)


def _prediction(joined: Mapping[str, NDArray[np.float32]], predictor: Predictor) -> Prediction:
    vacuity = joined.get("vacuity")
    return Prediction(
        probabilities=joined["probabilities"],
        predicted=predicted_classes(joined["probabilities"], vacuity, predictor.seen),
        evidence=joined.get("evidence"),
        vacuity=vacuity,
        dissonance=joined.get("dissonance"),
        maps=joined.get("map"),
    )
