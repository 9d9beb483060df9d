"""Score photographs with a finished run: the reference that a device's scores are compared with."""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from edgefl_protocol import digest
from edgefl_protocol.bundle import Labels
from edgefl_protocol.bundle.card_words import better_than_chance, figures_against, untrained_warning
from edgefl_protocol.bundle.figures import images_of_sites, taught_by, taught_by_federation
from edgefl_protocol.bundle.never_predicted import never_predicted
from edgefl_protocol.bundle.tested_classes import untested_classes
from edgefl_protocol.durable import read_bounded
from edgefl_protocol.errors import EdgeflError
from edgefl_protocol.pictures.class_info import ClassInfo, known_among, suspicious_classes
from edgefl_protocol.pictures.imaging import MAX_FILE_BYTES, REDUCE, Pixels, flattened, open_photo
from edgefl_protocol.pictures.light import LightRange
from edgefl_protocol.pictures.preprocess import prepare_turned
from edgefl_protocol.pictures.quality import MOST_UNLIT, measure_quality
from edgefl_protocol.pictures.referral import ReferralRules, judge_picture
from edgefl_protocol.pictures.score import ModelInfo, Outputs, Score, make_score
from edgefl_trainer.contract import Predictor
from edgefl_trainer.data.class_info import read_class_info
from edgefl_trainer.engine.first_run import stays_untrained
from edgefl_trainer.engine.judging.suspicion import reported_rule, site_suspicion
from edgefl_trainer.engine.models import FinishedRun, predict
from edgefl_trainer.errors import RunError


def predict_files(
    run: FinishedRun, site: str, files: Sequence[Path], class_info: Path | None = None
) -> Iterator[Score | dict[str, Any]]:
    """Score photographs (JPEG or PNG) one by one with the model of a site.

    Yields the score of each file, whose JSON is the object that `edgefl score --json` prints, or `{"image", "error"}`
    for one that cannot be used. A `RunError` where the run has no model of this site.

    `class_info` is the file that the bundle is made with, see `data.class_info`.
    """
    if run.questions is not None:
        raise RunError(
            f"the run in {run.folder} answers questions about pictures, and a picture alone asks none: judge it with "
            "`edgefl-train evaluate`, or export it and ask with `edgefl ask`."
        )
    predictor = run.predictor(site)
    info = known_among(run.classes, None if class_info is None else read_class_info(class_info, run.classes))
    rules = referral_rules_of(run, site, info)
    model = model_info(run, site, predictor, info)
    for file in files:
        started = time.perf_counter()
        try:
            photo = flattened(open_photo(read_bounded(file, MAX_FILE_BYTES, REDUCE)))
            pixels, *turns = prepare_turned(photo.pixels, run.preprocess)
        except EdgeflError as error:
            yield {"image": str(file), "error": {"code": error.code, "message": str(error)}}
            continue
        quality = measure_quality(photo.pixels, run.preprocess.colour)
        judged = judge_picture(quality, run.preprocess.least_px, rules, white=photo.white)
        score = partial(
            make_score,
            _outputs(predictor, pixels),
            name=str(file),
            classes=run.classes,
            seen=predictor.seen,
            rules=rules,
            picture=judged,
            expired=None,
            model=model,
            info=info,
        )
        found = score(milliseconds=(time.perf_counter() - started) * 1e3)
        if not found.refer:
            turned = [_outputs(predictor, one) for one in turns]
            found = score(turned=turned, milliseconds=(time.perf_counter() - started) * 1e3)
        yield found


def _outputs(predictor: Predictor, pixels: Pixels) -> Outputs:
    """What the device's graph gives for one input (px, px, 3)."""
    scores = predict(predictor, pixels[None])
    quantities = {
        "probabilities": scores.probabilities,
        "evidence": scores.evidence,
        "vacuity": scores.vacuity,
        "dissonance": scores.dissonance,
        "map": scores.maps,
    }
    return {name: np.asarray(values[0]) for name, values in quantities.items() if values is not None}


def referral_rules_of(run: FinishedRun, site: str, info: Mapping[str, ClassInfo]) -> ReferralRules:
    """Return the referral rules that the site's bundle will have."""
    calibration = run.calibration["sites"][site]
    suspicion = site_suspicion(run, site, info)
    figures = run.summary.get("sites", {}).get(site, {})
    return ReferralRules(
        uncertain_above=float(calibration["refer_above"]),
        dissonance_above=None,
        suspicious=suspicious_classes(run.classes, info),
        suspicious_from=suspicion.threshold,
        unlit_above=float(calibration.get("unlit_above", MOST_UNLIT)),
        light=LightRange.from_json(calibration["light"]) if "light" in calibration else None,
        untested=untested_classes(figures, len(run.classes)),
        suspicious_tried=reported_rule(run, site, info, suspicion) or suspicion.tried,
    )


def model_info(run: FinishedRun, site: str, predictor: Predictor, info: Mapping[str, ClassInfo]) -> ModelInfo:
    """Describe a run as if it were a bundle: named by folder and site, version 0, digest that of the run."""
    state = digest(predictor.tensors)
    name, sha256 = f"{run.folder.name}/{site}", str(run.summary["state_sha256"])
    sites = run.summary.get("sites", {})
    figures = sites.get(site, {})
    temperature = float(run.calibration["sites"][site]["temperature"])
    travels = run.summary.get("travels")
    told = ModelInfo(
        id=name,
        sha256=sha256,
        version=0,
        state_kind="bundle",
        state_sha256=state,
        better_than_chance=better_than_chance(figures),
        site=site,
        learned_from=taught_by(site, images_of_sites(sites), figures, travels),
        learned_from_federation=taught_by_federation(run.summary.get("federation"), travels),
    )
    labels = Labels(run.classes, predictor.seen, info)
    never = never_predicted(labels, site=site if told.taught_elsewhere else None).warning
    untrained = untrained_warning(untrained=stays_untrained(run.settings, run.folder))
    return replace(told, warnings=(*untrained, *figures_against(figures, site, run.classes, temperature, never)))
