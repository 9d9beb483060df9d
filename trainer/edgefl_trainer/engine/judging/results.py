"""The results of a finished federation: calibrated models and their figures, or those of a learned encoder."""

import json
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from edgefl_protocol.durable import write_atomic
from edgefl_protocol.pictures.imaging import Colour
from edgefl_protocol.pictures.quality import usual_light, usual_unlit
from edgefl_protocol.pictures.referral import ABSTAIN_FROM
from edgefl_trainer.contract import Examples, Method, Phase, Prediction, Predictor, Site, Task, declared
from edgefl_trainer.data import Federation
from edgefl_trainer.data.questions import OTHER_ANSWER
from edgefl_trainer.engine.checkpoint import SelectedRound
from edgefl_trainer.engine.display import judging_of, warn
from edgefl_trainer.engine.first_run import has_learned
from edgefl_trainer.engine.folder import read_metrics
from edgefl_trainer.engine.judging.held_out import federation_figures, newcomers
from edgefl_trainer.engine.judging.learned_encoder import learned_backbone_results
from edgefl_trainer.engine.judging.suspicion import save_reported_scores, save_tune_scores
from edgefl_trainer.engine.local_engine import FederationState
from edgefl_trainer.engine.models import predict_rows, save_predictor
from edgefl_trainer.engine.selection import WATCHED_ROWS, judged_rows
from edgefl_trainer.engine.sites import learned_rows, report_rows
from edgefl_trainer.evaluate.answer_figures import usual_answers
from edgefl_trainer.evaluate.calibration import (
    fit_temperature,
    mean_figures,
    refer_threshold,
    relu_evidence,
    softplus_evidence,
)
from edgefl_trainer.evaluate.intervals import AskedRows, Scored
from edgefl_trainer.evaluate.metrics import entropy_nats
from edgefl_trainer.evaluate.no_round import trained_sites
from edgefl_trainer.evaluate.site_figures import thin_sites
from edgefl_trainer.evaluate.tables.shares import FULL_MODEL
from edgefl_trainer.learning.learners.answer_rows import answer_rows
from edgefl_trainer.learning.unusual_features import with_usual
from edgefl_trainer.method_halves import call_broadcast, call_predictor, stamped
from edgefl_trainer.models.answers import SHARED, AnswerModule
from edgefl_trainer.models.backbone_names import BACKBONE_FILE
from edgefl_trainer.models.backbones import backbone_bytes, weights_of
from edgefl_trainer.models.cnn import Backbone
from edgefl_trainer.models.scoring import ScoreOptions

FEATURE_BATCH = 256
OWN_ROUND = "own_round"  # further answers: the model of each site's own best round, where one round is for all
EVIDENCE = {
    "softplus": softplus_evidence,
    "relu": relu_evidence,
    "exp": lambda logits: np.exp(np.clip(logits, -10, 10)),
}


def results_of(
    folder: Path,
    method: Method,
    task: Task,
    backbone: Backbone,
    final: FederationState,
    federation: Federation,
    sites: Mapping[str, Site],
    held_out: Mapping[str, Site],
) -> dict[str, Any]:
    """Judge what a method learned and keep the network beside it: a learned encoder, or the frozen one of the run."""
    if declared(method).encoder:
        results = learned_backbone_results(folder, method, final, federation, sites)
        results[FULL_MODEL] = array_bytes(weights_of(backbone.network))
    else:
        save_backbone(folder, backbone)
        results = predictor_results(folder, method, task, final, federation, sites, held_out)
    results["taught_pictures"] = None if federation.taught is None else asdict(federation.taught)
    for name, part in parts_taken(method, task.rounds, read_metrics(folder), sorted(sites)).items():
        for answered in (results, *results.get("further", {}).values()):
            answered["sites"][name]["took_part"] = part
    for answered in (results, *results.get("further", {}).values()):
        answered.update(trained_sites(answered))
    return results


def parts_taken(
    method: Method, rounds: int, lines: Sequence[Mapping[str, Any]], sites: Sequence[str]
) -> dict[str, dict[str, int]]:
    """Count, of each site, in how many of the rounds that train it took part; nothing where a method has none.

    A `final` phase is one of them where a site's own model comes of it: an encoder's only gathers what stayed local.
    """
    kinds = {"train"} if declared(method).encoder else {"train", "final"}
    training = {phase.round for phase in method.phases(rounds) if phase.kind in kinds}
    taken = {(line["site"], line["round"]) for line in lines if line["phase"] in kinds}
    each = {name: sum((name, number) in taken for number in training) for name in sites}
    return {name: {"rounds": some, "of": len(training)} for name, some in each.items()} if training else {}


def save_backbone(folder: Path, backbone: Backbone) -> None:
    """Keep the frozen network beside the results, so that they can be scored and exported without its source."""
    if backbone.spec.name.startswith("timm:"):
        return  # positions of timm's networks are learned and their files large: named, not copied
    spec, learned = backbone.spec, has_learned(backbone.spec.name)
    data = backbone_bytes(spec, weights_of(backbone.network), self_supervised=spec.self_supervised, learned=learned)
    write_atomic(folder / BACKBONE_FILE, data)


def predictor_results(
    folder: Path,
    method: Method,
    task: Task,
    final: FederationState,
    federation: Federation,
    sites: Mapping[str, Site],
    held_out: Mapping[str, Site],
) -> dict[str, Any]:
    """Calibrate each site's model on its tune rows, save it, and judge it on the rows that only report.

    What a site's model is made of: `_rounds_of`. Further models are judged alike. Held-out sites: `held_out`.
    """
    scored: dict[str, Scored] = {}
    seen: dict[str, Sequence[bool]] = {}
    facts: dict[str, dict[str, Any]] = {}
    calibration: dict[str, dict[str, Any]] = {}
    further: dict[str, dict[str, Scored]] = defaultdict(dict)
    told: dict[str, dict[str, dict[str, Any]]] = defaultdict(dict)  # facts of the sites with a further model
    sizes: dict[str, int] = {}
    judging = judging_of(federation, sites, held_out)
    for name, kept, own in _rounds_of(method, task, final, sorted(sites)):
        site = sites[name]
        judging.site(name)
        calibrated = calibrate(_predictor_of(method, site, kept), site)
        predictor, calibration[name] = calibrated.predictor, {**calibrated.figures, **_usual(site, federation.colour)}
        if calibrated.tune is not None:
            save_tune_scores(folder, name, calibrated.tune, site.tune.targets)
        save_predictor(folder / "models" / f"{name}.safetensors", predictor)
        tuned = judged_rows(site, None if name in final.selected or own is not None else WATCHED_ROWS)
        facts[name], sizes = _facts_of_trained(site, predictor, kept, task, tuned), _sizes(predictor, task)
        facts[name] |= {"refer_above": calibrated.figures["refer_above"], **(learned := learned_rows(federation, site))}
        seen[name], rows = predictor.seen, report_rows(federation, name)
        scored[name] = score(predictor, rows, federation, name, site.device)
        for way, (one, of) in further_models(method, site, kept, own).items():
            told[way][name] = {**_facts_of_trained(site, one, of, task, tuned), **learned}
            save_predictor(folder / "models" / way / f"{name}.safetensors", one)
            further[way][name] = score(one, rows, federation, name, site.device)
    means = mean_figures(calibration, {name: len(site.tune) for name, site in sites.items()})
    models = _held_out_models(folder, method, task, final, held_out, means["temperature"])
    calibration |= dict.fromkeys(models, means)
    write_atomic(folder / "calibration.json", json.dumps({**means, "sites": calibration}, indent=2).encode())
    for name in sorted(held_out):
        rows, model = report_rows(federation, name), models.get(name)
        facts[name] = _facts_of_held_out(rows, model)
        if model is not None:
            seen[name] = model.seen
            judging.site(name)
            scored[name] = score(model, rows, federation, name, held_out[name].device)
    _keep_reported(folder, scored, seen, federation)
    reports = {way: federation_figures(found, told[way]) for way, found in further.items()}
    return {
        "classes": list(federation.classes),
        "backbone_sha256": task.backbone.sha256,
        "reported_rows": federation.report_split,
        **sizes,
        **federation_figures(scored, facts),
        **({"further": reports} if reports else {}),
    }


def _keep_reported(
    folder: Path, scored: Mapping[str, Scored], seen: Mapping[str, Sequence[bool]], federation: Federation
) -> None:
    """Keep the scores of the rows that only report, and warn of sites that have few of them."""
    for name, found in scored.items():
        if found.asked is None:  # no rule of suspicious classes judges answers
            save_reported_scores(folder, name, found)
    for line in thin_sites(scored, seen, federation.classes, federation.report_split):
        warn(line)


def array_bytes(arrays: Mapping[str, NDArray[np.generic]]) -> int:
    """Sum the bytes of some arrays."""
    return sum(value.nbytes for value in arrays.values())


def _sizes(predictor: Predictor, task: Task) -> dict[str, int]:
    """Sum the bytes of a site's whole model, network included; of one that answers also those that the site learned."""
    tensors = {name: value for name, value in predictor.tensors.items() if not name.startswith((SHARED, "temperature"))}
    own = array_bytes(tensors)
    whole = {FULL_MODEL: own + array_bytes(weights_of(predictor.module.backbone.network))}
    return whole if task.questions is None else {"model_bytes": own + array_bytes(predictor.network), **whole}


def _facts_of_trained(
    site: Site, predictor: Predictor, kept: SelectedRound, task: Task, tuned: Examples
) -> dict[str, Any]:
    return {
        "n_train": len(site.train),
        "n_labelled": len(site.train),
        "held_out": False,
        "classes_learned": sum(map(bool, predictor.seen)),
        "classes_tuned": len(np.unique(tuned.targets)),
        "readout": predictor.module.options.readout,
        "selected_round": kept.round,
        "selected_phase": "train" if kept.round <= task.rounds else "final",
    }


def _facts_of_held_out(rows: Examples, model: Predictor | None) -> dict[str, Any]:
    told: dict[str, Any] = {"n_test": len(rows), "classes_tested": len(np.unique(rows.targets))}
    if model is not None:
        told["classes_learned"] = sum(map(bool, model.seen))
    readout = None if model is None else model.module.options.readout
    return {"n_train": 0, "n_labelled": 0, "held_out": True, "readout": readout, **told}


def _rounds_of(
    method: Method, task: Task, final: FederationState, names: Sequence[str]
) -> Iterator[tuple[str, SelectedRound, SelectedRound | None]]:
    """What each site's model is made of: the round best for all, with the site's own; the one it selected; the last."""
    last, after = method.phases(task.rounds)[-1].round, Phase("final", task.rounds + 1)
    others = [name for name in names if name not in final.selected]
    broadcasts = (
        call_broadcast(method, final.server, after, names) if others else {}
    )  # a live site has no server's state
    for name in names:
        own = final.selected.get(name)
        if own is None:
            own = SelectedRound(last, final.sites[name], stamped(broadcasts[name], after, task.rounds))
        together = final.together.get(name)
        yield (name, own, None) if together is None else (name, together, own)


def _predictor_of(method: Method, site: Site, kept: SelectedRound) -> Predictor:
    predictor = call_predictor(method, site, kept.state, kept.broadcast)
    if predictor is None:
        raise TypeError(f"method {type(method).__name__} makes neither a predictor nor a backbone")
    return predictor


def further_models(
    method: Method, site: Site, kept: SelectedRound, own: SelectedRound | None = None
) -> dict[str, tuple[Predictor, SelectedRound]]:
    """Return a site's further models, calibrated, each with its round: of its method, and of its own best round."""
    further = declared(method).further_predictors
    offered = further(method, site, kept.state, kept.broadcast) if further else {}
    found = {way: (calibrate(predictor, site).predictor, kept) for way, predictor in sorted(offered.items())}
    if own is not None:
        found[OWN_ROUND] = (calibrate(_predictor_of(method, site, own), site).predictor, own)
    return found


def _held_out_models(
    folder: Path, method: Method, task: Task, final: FederationState, sites: Mapping[str, Site], temperature: float
) -> dict[str, Predictor]:
    """Models of the sites that never trained, saved; without those for which the method has none.

    What is usual is the site's own: without it foreign pictures would be scored as those of no trained site are.
    """
    models: dict[str, Predictor] = {}
    if not sites:
        return models
    for name, predictor in sorted(newcomers(method, task, final.server, sites, final.together).items()):
        models[name] = _with_temperature(with_usual(predictor, sites[name]), temperature)
        save_predictor(folder / "models" / f"{name}.safetensors", models[name])
    return models


def _pictures(rows: Examples) -> Iterator[NDArray[np.uint8]]:
    return (rows.images[place] for place in np.unique(rows.places))


@dataclass(frozen=True)
class Calibrated:
    """A site's model after its `tune` rows were looked at."""

    predictor: Predictor
    figures: dict[str, float]  # temperature and referral threshold
    tune: Prediction | None  # scores of the tune rows; None where there are none


def calibrate(predictor: Predictor, site: Site) -> Calibrated:
    """Measure what is usual in the site's training rows; then temperature and referral threshold, on its tune rows."""
    predictor, tune = with_usual(predictor, site), site.tune
    options, evidence = predictor.module.options, None
    if isinstance(options, ScoreOptions) and options.output == "evidential":
        evidence = EVIDENCE[options.evidence]
    most = ABSTAIN_FROM if evidence is not None else math.log(len(predictor.seen))
    if len(tune) == 0:
        return Calibrated(predictor, {"temperature": 1.0, "refer_above": most}, None)  # no threshold
    logits = tune_logits(predictor, tune, site.device)
    prior = predictor.tensors.get("prior")
    temperature = fit_temperature(logits, tune.targets, prior, evidence, seen=predictor.seen)
    calibrated = _with_temperature(predictor, temperature)
    scores = predict_rows(calibrated, tune, site.device)
    uncertainty = scores.vacuity if scores.vacuity is not None else entropy_nats(scores.probabilities)
    threshold = refer_threshold(uncertainty, scores.predicted == tune.targets, ceiling=most)
    figures = {"temperature": float(temperature), "refer_above": float(threshold)}
    return Calibrated(calibrated, figures, scores)


def _usual(site: Site, colour: Colour) -> dict[str, Any]:
    """How nearly all training pictures of a site are lit: how much of them is not, and in which light.

    Pictures that questions are asked about are radiographs and the like, which are black in part.
    """
    asked = site.task.questions is not None
    light = usual_light(_pictures(site.train), colour, asked=asked)
    told = {} if light is None else {"light": light.to_json()}
    return told if asked else {"unlit_above": usual_unlit(_pictures(site.train)), **told}


def score(predictor: Predictor, rows: Examples, federation: Federation, site: str, device: torch.device) -> Scored:
    """Score some rows of a site; none gives none. An answer that no training row has is one more class, never named."""
    names = tuple(federation.lesions[i] for i in rows.rows)
    questions = federation.questions
    classes = len(predictor.seen) + (questions is not None)
    if len(rows) == 0:
        empty = np.zeros((0, classes), dtype=np.float32)
        return Scored(empty, np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64), None, names)
    scores = predict_rows(predictor, rows, device)
    if questions is None:
        return Scored(scores.probabilities, rows.targets, scores.predicted, scores.vacuity, names)
    probabilities = np.pad(scores.probabilities, ((0, 0), (0, 1)))
    target = np.where(rows.targets == OTHER_ANSWER, classes - 1, rows.targets)
    learned = federation.sites[site].train
    usual = usual_answers(
        rows.labels[learned], [questions.kinds[i] for i in learned], [questions.kinds[i] for i in rows.rows]
    )
    asked = AskedRows(questions.closed[rows.rows], usual)
    return Scored(probabilities, target, scores.predicted, scores.vacuity, names, asked)


def tune_logits(predictor: Predictor, rows: Examples, device: torch.device) -> NDArray[np.float64]:
    """Compute the logits (B, K) of some rows, before temperature and evidence."""
    if isinstance(predictor.module, AnswerModule):
        return answer_rows(predictor, rows, device)["logits"].astype(np.float64)
    module = predictor.module.to(device)
    tensors = {name: torch.from_numpy(np.array(value)).to(device) for name, value in predictor.tensors.items()}
    parts = []
    with torch.inference_mode():
        for images, _ in rows.in_order(FEATURE_BATCH):
            output = module.output(images.to(device), tensors, need_attention=False)
            parts.append(module.logits(module.features(output, tensors), tensors).double().cpu().numpy())
    return np.concatenate(parts)


def _with_temperature(predictor: Predictor, temperature: float) -> Predictor:
    return replace(predictor, tensors={**predictor.tensors, "temperature": np.asarray(temperature, dtype=np.float32)})
