"""Score photographs with a finished run: the reference that a device's scores are compared with."""

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from edgefl_protocol import digest
from edgefl_protocol.durable import read_bounded
from edgefl_protocol.errors import EdgeflError
from edgefl_protocol.pictures.imaging import MAX_FILE_BYTES, decode, prepare
from edgefl_protocol.pictures.quality import measure_quality
from edgefl_protocol.pictures.referral import ReferralRules
from edgefl_protocol.pictures.score import ModelInfo, make_score
from edgefl_trainer.contract import Predictor
from edgefl_trainer.engine.models import FinishedRun, predict


def predict_files(run: FinishedRun, site: str, files: Sequence[Path]) -> Iterator[dict[str, Any]]:
    """Score photographs (JPEG or PNG) one by one with the model of a site.

    Yields the object `edgefl score --json` prints for each file, or `{"image", "error"}` for one that cannot be used. A
    `RunError` where the run has no model of this site.
    """
    predictor = run.predictor(site)
    refer_above = float(run.calibration["sites"][site]["refer_above"])
    model = model_info(run, site, predictor)
    for file in files:
        started = time.perf_counter()
        try:
            photo = decode(read_bounded(file, MAX_FILE_BYTES))
            pixels = prepare(photo, run.preprocess)
        except EdgeflError as error:
            yield {"image": str(file), "error": {"code": error.code, "message": str(error)}}
            continue
        scores = predict(predictor, pixels[None])
        quantities = {
            "probabilities": scores.probabilities,
            "evidence": scores.evidence,
            "vacuity": scores.vacuity,
            "dissonance": scores.dissonance,
            "map": scores.maps,
        }
        yield make_score(
            {name: np.asarray(values[0]) for name, values in quantities.items() if values is not None},
            name=str(file),
            classes=run.classes,
            seen=predictor.seen,
            rules=ReferralRules(uncertain_above=refer_above, dissonance_above=None),
            gate=measure_quality(photo).reasons(run.preprocess.size),
            expired=False,
            model=model,
            milliseconds=(time.perf_counter() - started) * 1e3,
        ).to_json()


def model_info(run: FinishedRun, site: str, predictor: Predictor) -> ModelInfo:
    """Describe a run as if it were a bundle: named by folder and site, version 0, digest that of the run."""
    state = digest(predictor.tensors)
    name, sha256 = f"{run.folder.name}/{site}", str(run.summary["state_sha256"])
    return ModelInfo(id=name, sha256=sha256, version=0, state_kind="bundle", state_sha256=state)
