"""From a finished run and one of its sites to the members of a bundle.

Guarantees: the graph passed the export gates with the very values that the bundle carries; the card names no path of
the exporting machine; what it says of suspicious classes was measured with the run's model, and in 8 bits with the
graph of the bundle; the same run, site and fields give the same bytes. Source: docs/design.md, section 7, bundle.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from edgefl_export.bundles.card_metrics import card_metrics
from edgefl_export.bundles.licence import PICTURES, answers_licence
from edgefl_export.bundles.shown_map import with_map
from edgefl_export.bundles.taught import TaughtWords
from edgefl_export.errors import ExportError
from edgefl_export.graphs.score import GraphForm, ScoreGraph, export_answer_graph, export_score_graph
from edgefl_export.int8.calibration import Calibration
from edgefl_export.int8.precision import (
    BATCH,
    Agreement,
    BothScores,
    FloatLayers,
    check_agreement,
    choose_layers,
    other_referral,
)
from edgefl_export.int8.reported_scores import scores_in_8_bits
from edgefl_export.parity.score_parity import (
    AskedWords,
    Parity,
    Pictures,
    check_parity,
    graph_scores,
    open_session,
    parity_images,
    parity_questions,
)
from edgefl_protocol.bundle import Card, Labels
from edgefl_protocol.bundle.figures import images_of_sites
from edgefl_protocol.bundle.model_card import REPORTED_RULE, referral_rules
from edgefl_protocol.bundle.question_table import MEMBER, QuestionTable, TriedQuestions
from edgefl_protocol.bundle.shown_map import ShownMap
from edgefl_protocol.pictures.class_info import ClassInfo, known_among, suspicious_classes
from edgefl_protocol.pictures.preprocess import Preprocess
from edgefl_protocol.pictures.suspicious import Suspicion
from edgefl_protocol.rules.questions import FIRST, Questions
from edgefl_protocol.sentences import counted
from edgefl_protocol.strict_json import write_json
from edgefl_protocol.tensors import write_tensors
from edgefl_trainer.contract import Predictor
from edgefl_trainer.data.tasks import task_word
from edgefl_trainer.engine.first_run import stays_untrained
from edgefl_trainer.engine.judging.suspicion import KeptScores, reported_scores, rule_on, site_suspicion
from edgefl_trainer.engine.models import FinishedRun
from edgefl_trainer.evaluate.calibration import choose_suspicion
from edgefl_trainer.evaluate.looking import tried_questions
from edgefl_trainer.evaluate.metrics import predicted_classes
from edgefl_trainer.models.answers import AnswerModule
from edgefl_trainer.models.spec import BackboneSpec, CNNSpec

INTENDED_USE = (
    "Research on federated learning for dermoscopic images of pigmented skin lesions. Not a medical device: the score "
    "supports no diagnosis, and a doctor decides."
)
ANSWERS_USE = (
    "Research on federated learning of medical visual question answering. Not a medical device: an answer is the most "
    "probable of a fixed list, no finding and no report, and a doctor decides."
)
SHOWN_LAYERS = 8  # the most sensitive ones, in the card


@dataclass(frozen=True, kw_only=True)
class SiteModel:
    """What leaves a run for a device: a predictor and the facts that travel with it."""

    predictor: Predictor
    classes: tuple[str, ...]
    info: Mapping[str, ClassInfo] | None  # what the classes mean, by name; None of answers
    preprocess: Preprocess
    card: Card
    task: str
    questions: Questions | None = None  # what it knows of questions; None where it scores pictures alone
    reported: KeptScores | None = None  # what it says of the rows that only report; None where the run kept nothing

    @property
    def labels(self) -> Labels:
        """What `labels.json` says; a `ValueError` where it cannot."""
        return Labels(self.classes, self.predictor.seen, self.info)


@dataclass(frozen=True)
class Members:
    """Files of a bundle by name, its card, the figures of its gates, and the oldest runtime it needs.

    `agreement` is that of the 8-bit graph with the float graph, which `parity` judges; None for fp32.
    """

    files: Mapping[str, bytes]
    card: Card
    parity: tuple[Parity, ...]
    min_runtime: str
    agreement: Agreement | None = None


def site_model(
    run: FinishedRun, site: str, given: Mapping[str, ClassInfo] | None = None, *, took_no_part: bool = False
) -> SiteModel:
    """Take one site's model out of a run.

    Args:
        given: what classes mean, where the product's own table does not know them.
        took_no_part: allow a site that took part in no round of its run or live federation.

    Raises:
        EdgeflError: no such site, or the run lacks what a bundle needs.
    """
    predictor, asked = run.predictor(site), run.questions is not None
    figures = run.summary.get("sites", {})
    part = figures.get(site, {}).get("took_part")
    if part and not part["rounds"] and not took_no_part:
        raise ExportError(
            f"{site} took part in 0 of {counted(part['of'], 'round')} of its run, so its model has learned "
            "nothing from its pictures: name another site or run, or export it all the same with --took-no-part"
        )
    calibration = run.calibration.get("sites", {}).get(site, {})
    missing = [name for name in ("temperature", "refer_above") if name not in calibration]
    if missing:
        raise ExportError(f"the run in {run.folder} has no {missing[0]} for site {site}; finish the run with --resume")
    if asked and given:
        raise ExportError("class information is about classes of lesions, and this run's are answers; leave it out")
    info = None if asked else known_among(run.classes, given)
    card = Card(
        intended_use=ANSWERS_USE if asked else INTENDED_USE,
        method=str(run.summary["method"]),
        site=site,
        sites=images_of_sites(figures),
        metrics=card_metrics(run.summary, site, calibration),
        temperature=float(np.float32(calibration["temperature"])),
        refer_above=float(calibration["refer_above"]),
        backbone=backbone_name(predictor.module.backbone.spec),
        licence_note=answers_licence(run.settings) if asked else PICTURES,
        suspicion=None if info is None else site_suspicion(run, site, info),
        untrained=stays_untrained(run.settings, run.folder),
    )
    task = task_word(str(run.summary["task"]))
    model = SiteModel(
        predictor=predictor,
        classes=run.classes,
        info=info,
        preprocess=run.preprocess,
        card=card,
        task=task,
        questions=run.questions,
        reported=None if info is None else reported_scores(run, site),
    )
    _check_readable(model)
    return replace(model, card=_with_reported_rule(model, card, model.reported))


def _check_readable(model: SiteModel) -> None:
    """Refuse names that no device would read, before minutes of tracing."""
    try:
        Labels.from_bytes(model.labels.to_bytes())
        if (asked := model.questions) is not None:
            QuestionTable.from_bytes(QuestionTable(asked, None, (False,) * len(asked.words)).to_bytes())
    except ValueError as error:
        raise ExportError(f"no device could read this model: {error}; change that in the data and run again") from error


def backbone_name(spec: BackboneSpec) -> str:
    """Return a name that holds elsewhere: timm's own, or the architecture; with the digest of the weights.

    Returns:
        Such as `vit:192x12/12 at 84 px, sha256 0123456789ab`; never the path it was read from.
    """
    if spec.name.startswith("timm:"):
        kind = spec.name
    elif isinstance(spec, CNNSpec):
        kind = f"cnn:{spec.architecture}"
    else:
        kind = f"vit:{spec.width}x{spec.depth}/{spec.patch}"
    return f"{kind} at {spec.image_px} px, sha256 {spec.sha256[:12]}"


def build_members(
    model: SiteModel,
    images: Pictures | None = None,
    questions: AskedWords | None = None,
    *,
    form: GraphForm = "fused",
    int8: Calibration | None = None,
    shown: ShownMap | None = None,
    tried: TriedQuestions | None = None,
    not_refused: NDArray[np.bool_] | None = None,
    taught: TaughtWords | None = None,
    report: Callable[[str], None] = lambda line: None,
) -> Members:
    """Trace, check and pack a model.

    Args:
        images: at least 64 prepared pictures for the export gates, (n, S, S, 3); drawn ones by default.
        questions: what is asked about each of them, of a model that answers questions; drawn ones by default.
        tried: how that did on the site's `tune` questions.
        not_refused: which of these a device may answer, as `OwnQuestions` has it.
        taught: which words it was taught; None leaves the bundle silent, and no device refuses one for it.
        int8: pictures for an 8-bit graph; None for fp32.
        shown: the map that a device shows, of `measured_map`; None leaves the card silent, and no map is drawn.

    Raises:
        ExportError: the graph cannot be made, or fails a gate.
    """
    tensors = _values(model)
    if len(model.classes) != len(model.predictor.seen) or len(model.classes) != tensors["head.bias"].shape[0]:
        raise ExportError(
            f"the run names {len(model.classes)} classes, but its head has {tensors['head.bias'].shape[0]}; run "
            "`edgefl-train run` again"
        )
    graph, parity = _checked_graph(model, tensors, form, shown, images, questions)
    card, data, min_runtime, found = model.card, graph.onnx, graph.min_runtime, None
    card = replace(card, map=shown)
    if int8 is not None:
        data, min_runtime, choice, found, scores = _quantised(model, graph.onnx, tensors, int8, report)
        suspicion = _chosen_anew(model, data, tensors, int8)
        found = replace(found, other_referral=_other_referral(model, scores, suspicion))
        facts = {**card.metrics, "int8": _int8_facts(choice, found, int8)}
        card = replace(card, metrics=facts, suspicion=suspicion)
        card = _with_reported_rule(model, card, _reported_anew(model, data, tensors, int8))
        tried = _tried_anew(model, data, tensors, int8, tried, not_refused)
    files = {
        "score.onnx": data,
        "weights.safetensors": write_tensors(tensors, {}),
        "preprocess.json": write_json(model.preprocess.to_json()),
        "labels.json": model.labels.to_bytes(),
        "card.json": card.to_bytes(),
    }
    if model.questions is not None:
        words = None if taught is None else taught.words
        files[MEMBER] = QuestionTable(model.questions, tried, words).to_bytes()
    return Members(files, card, tuple(parity), min_runtime, found)


def _checked_graph(
    model: SiteModel,
    tensors: Mapping[str, NDArray[np.float32]],
    form: GraphForm,
    shown: ShownMap | None,
    images: Pictures | None,
    questions: AskedWords | None,
) -> tuple[ScoreGraph, list[Parity]]:
    """Return the graph of a model and the figures of its gates."""
    cells = None if shown is None or not shown.shown else shown.cells
    module, asked = model.predictor.module.cpu().eval(), model.questions
    if asked is None:
        scoring = with_map(model.predictor.score_module, shown).eval()
        graph = export_score_graph(scoring, tensors, form)
        return graph, check_parity(graph.onnx, scoring, tensors, images, cells)
    assert isinstance(module, AnswerModule)
    if not module.options.sees_picture:
        raise ExportError("the model sees no picture: it is there to compare with, and no device asks it")
    if tensors["words.embedding"].shape[0] != FIRST + len(asked.words):
        raise ExportError("the run's list of words is not that of its model; run `edgefl-train run` again")
    graph = export_answer_graph(module, tensors, asked.length)
    side = module.backbone.spec.image_px
    pictures = parity_images(side) if images is None else images
    words = parity_questions(len(asked.words), asked.length, len(pictures)) if questions is None else questions
    return graph, check_parity(graph.onnx, module, tensors, pictures, cells, words)


def _quantised(
    model: SiteModel,
    graph: bytes,
    tensors: Mapping[str, NDArray[np.float32]],
    pictures: Calibration,
    report: Callable[[str], None],
) -> tuple[bytes, str, FloatLayers, Agreement, BothScores]:
    """Return the 8-bit graph, the oldest runtime that runs it, what stayed in float, and what the gate found."""
    from edgefl_export.int8 import quantise  # pulls in the runtime's tools, which fp32 does not need

    asked, seen = pictures.questions, _seen(model)
    quantiser = quantise.Quantiser(graph, tensors, pictures.ranges, asked.ranges)
    choice = choose_layers(
        quantiser, graph, tensors, pictures.choice, seen, report, pictures.float_layers, asked.choice
    )
    data = quantiser.build(choice.kept)
    gate = check_agreement(data, graph, tensors, pictures.gate, seen, asked.gate)
    return data, quantise.MIN_RUNTIME, choice, *gate


def _other_referral(model: SiteModel, scores: BothScores, suspicion: Suspicion | None) -> float | None:
    """Count the pictures that devices refer with one of two graphs alone; None of answers.

    Args:
        scores: of the float graph, and of the one with 8 bits.
        suspicion: what the card says of suspicious classes in 8 bits; the other thresholds stay.
    """
    if (seen := _seen(model)) is None:
        return None
    before, after = (
        referral_rules(model.labels, card) for card in (model.card, replace(model.card, suspicion=suspicion))
    )
    return other_referral(scores, seen, (before, after))


def _seen(model: SiteModel) -> tuple[bool, ...] | None:
    """Which classes a device may name; None of answers, of which it takes the most probable or refuses."""
    return model.predictor.seen if model.questions is None else None


def _tried_anew(
    model: SiteModel,
    graph: bytes,
    tensors: Mapping[str, NDArray[np.float32]],
    pictures: Calibration,
    tried: TriedQuestions | None,
    not_refused: NDArray[np.bool_] | None,
) -> TriedQuestions | None:
    """Count the answers of the 8-bit graph; what another picture changes was measured with the float one."""
    unsure_above = model.card.refer_above
    if tried is None or pictures.questions.tune is None or unsure_above is None:
        return tried
    found = graph_scores(open_session(graph), tensors, pictures.tune, BATCH, pictures.questions.tune)["probabilities"]
    seen, other = model.predictor.seen, tried.other_picture
    return tried_questions(found, pictures.targets, seen, unsure_above, other, not_refused)


def _chosen_anew(
    model: SiteModel, graph: bytes, tensors: Mapping[str, NDArray[np.float32]], pictures: Calibration
) -> Suspicion | None:
    """Choose the threshold of suspicious classes with the 8-bit graph: one picture that flips may break the target.

    Where the run scored no `tune` rows of the site, the card says so, and that stands.
    """
    before, info = model.card.suspicion, model.info
    if before is None or info is None or before.suspicious + before.benign == 0 or len(pictures.tune) == 0:
        return before
    found = graph_scores(open_session(graph), tensors, pictures.tune, BATCH)
    predicted = predicted_classes(found["probabilities"], found.get("vacuity"), model.predictor.seen)
    suspicious = np.array(suspicious_classes(model.classes, info))
    return choose_suspicion(found["probabilities"], predicted, pictures.targets, suspicious)


def _reported_anew(
    model: SiteModel, graph: bytes, tensors: Mapping[str, NDArray[np.float32]], pictures: Calibration
) -> KeptScores | None:
    """Score the rows that only report with the 8-bit graph; None of answers, and where they are not at hand."""
    if (seen := _seen(model)) is None or pictures.reported is None:
        return None
    return scores_in_8_bits(graph, tensors, pictures.reported, seen)


def _with_reported_rule(model: SiteModel, card: Card, reported: KeptScores | None) -> Card:
    """Say how the card's threshold did on rows that only report, by the scores of the very graph that leaves."""
    metrics = {name: value for name, value in card.metrics.items() if name != REPORTED_RULE}
    if reported is None or model.info is None or card.suspicion is None:
        return replace(card, metrics=metrics)
    tried = rule_on(reported, suspicious_classes(model.classes, model.info), card.suspicion.threshold)
    return replace(card, metrics=metrics if tried is None else {**metrics, REPORTED_RULE: tried.to_json()})


def _int8_facts(choice: FloatLayers, found: Agreement, pictures: Calibration) -> dict[str, object]:
    """Return what the card says about 8 bits: what was measured, and on how many pictures."""
    ranked = sorted(choice.sensitivity.items(), key=lambda pair: -pair[1])
    return {
        "layers": len(choice.sensitivity),
        "kept_in_float": list(choice.kept),
        "most_sensitive": {name: float(f"{value:.2e}") for name, value in ranked[:SHOWN_LAYERS]},
        "images": {"ranges": len(pictures.ranges), "choice": len(pictures.choice), "gate": found.images},
        "same_class": round(found.same_class, 5),
        "mean_change": round(found.change, 6),
        "mean_map_change": None if found.map_change is None else round(found.map_change, 6),
        "other_referral": None if found.other_referral is None else round(found.other_referral, 5),
    }


def _values(model: SiteModel) -> dict[str, NDArray[np.float32]]:
    """Return the tensors the graph takes, and no others: a bundle carries exactly its graph's inputs."""
    names = model.predictor.module.options.tensors
    missing = [name for name in names if name not in model.predictor.tensors]
    if missing:
        raise ExportError(f"the model lacks the tensors {', '.join(missing)}; run `edgefl-train run` again")
    return {name: np.array(model.predictor.tensors[name], dtype=np.float32, order="C", copy=True) for name in names}
