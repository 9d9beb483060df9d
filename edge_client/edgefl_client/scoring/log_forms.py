"""What a row of a log holds (`log_file`): of `edgefl score` a picture and its figures, of `edgefl ask` a question.

A question is known by the SHA-256 of its text: it may name a patient. Numbers are written so that reading them gives
the same bits.
"""

import json
from typing import Any, Final

from edgefl_client.scoring.log_file import LogForm
from edgefl_client.scoring.score_files import Failure, Result, text_sha256
from edgefl_protocol.pictures.answer import PictureAnswer
from edgefl_protocol.pictures.score import Score

_SCORES = """
CREATE TABLE score (
    number INTEGER PRIMARY KEY,
    at TEXT NOT NULL,
    device TEXT NOT NULL,
    software TEXT NOT NULL,
    threads INTEGER NOT NULL,
    image_sha256 TEXT,
    model_id TEXT NOT NULL,
    model_sha256 TEXT NOT NULL,
    model_version INTEGER NOT NULL,
    weights TEXT NOT NULL,
    weights_sha256 TEXT NOT NULL,
    preprocessing TEXT NOT NULL,
    temperature REAL,
    predicted TEXT,
    probabilities TEXT,
    evidence TEXT,
    vacuity REAL,
    dissonance REAL,
    entropy_nats REAL,
    out_of_scope INTEGER,
    refer INTEGER,
    refer_reasons TEXT,
    error_code TEXT
) STRICT
"""
_SCORE = """
INSERT INTO score (
    at, device, software, threads, image_sha256, model_id, model_sha256, model_version, weights, weights_sha256,
    preprocessing, temperature, predicted, probabilities, evidence, vacuity, dissonance, entropy_nats, out_of_scope,
    refer, refer_reasons, error_code, vacuity_from, entropy_from, dissonance_from, suspicious_from, rules_tried,
    turned_suspicious_probability
) VALUES (
    :at, :device, :software, :threads, :image_sha256, :model_id, :model_sha256, :model_version, :weights,
    :weights_sha256, :preprocessing, :temperature, :predicted, :probabilities, :evidence, :vacuity, :dissonance,
    :entropy_nats, :out_of_scope, :refer, :refer_reasons, :error_code, :vacuity_from, :entropy_from, :dissonance_from,
    :suspicious_from, :rules_tried, :turned_suspicious_probability
)
"""
_LATER = {
    "vacuity_from": "ALTER TABLE score ADD COLUMN vacuity_from REAL",
    "entropy_from": "ALTER TABLE score ADD COLUMN entropy_from REAL",
    "dissonance_from": "ALTER TABLE score ADD COLUMN dissonance_from REAL",
    "suspicious_from": "ALTER TABLE score ADD COLUMN suspicious_from REAL",
    "rules_tried": "ALTER TABLE score ADD COLUMN rules_tried TEXT",
    "turned_suspicious_probability": "ALTER TABLE score ADD COLUMN turned_suspicious_probability REAL",
}
_ANSWERS = """
CREATE TABLE answer (
    number INTEGER PRIMARY KEY,
    at TEXT NOT NULL,
    device TEXT NOT NULL,
    software TEXT NOT NULL,
    threads INTEGER NOT NULL,
    image_sha256 TEXT,
    model_id TEXT NOT NULL,
    model_sha256 TEXT NOT NULL,
    model_version INTEGER NOT NULL,
    weights TEXT NOT NULL,
    weights_sha256 TEXT NOT NULL,
    preprocessing TEXT NOT NULL,
    temperature REAL,
    question_sha256 TEXT NOT NULL,
    answer TEXT,
    probabilities TEXT,
    entropy_nats REAL,
    refused INTEGER,
    refuse_reasons TEXT,
    error_code TEXT
) STRICT
"""
_ANSWER = """
INSERT INTO answer (
    at, device, software, threads, image_sha256, model_id, model_sha256, model_version, weights, weights_sha256,
    preprocessing, temperature, question_sha256, answer, probabilities, entropy_nats, refused, refuse_reasons,
    error_code
) VALUES (
    :at, :device, :software, :threads, :image_sha256, :model_id, :model_sha256, :model_version, :weights,
    :weights_sha256, :preprocessing, :temperature, :question_sha256, :answer, :probabilities, :entropy_nats, :refused,
    :refuse_reasons, :error_code
)
"""

SCORES: Final = LogForm(
    noun="score",
    mark=(0x45464C31, 1),  # "EFL1"
    beginning=(_SCORES, "PRAGMA application_id=1162234929", "PRAGMA user_version=1"),
    insert=_SCORE,
    columns=(
        "predicted", "probabilities", "evidence", "vacuity", "dissonance", "entropy_nats", "out_of_scope", "refer",
        "refer_reasons", "error_code", *_LATER,
    ),
    later=_LATER,
)  # fmt: skip
ANSWERS: Final = LogForm(
    noun="answer",
    mark=(0x45464131, 1),  # "EFA1"
    beginning=(_ANSWERS, "PRAGMA application_id=1162232113", "PRAGMA user_version=1"),
    insert=_ANSWER,
    columns=(
        "question_sha256", "answer", "probabilities", "entropy_nats", "refused", "refuse_reasons", "error_code",
    ),
)  # fmt: skip
_OUT_OF_SCOPE = frozenset({"not_skin", "unseen_class"})


def score_columns(result: Result) -> dict[str, Any]:
    """Fill the columns of a result; its name is not kept."""
    return {"error_code": result.code} if isinstance(result, Failure) else _numbers(result)


def _numbers(score: Score) -> dict[str, Any]:
    """Fill the columns of one score. Numbers are written so that reading them gives the same bits."""
    return {
        "predicted": score.predicted,
        "probabilities": json.dumps(dict(score.probabilities)),
        "evidence": None if score.evidence is None else json.dumps(dict(score.evidence)),
        "vacuity": score.vacuity,
        "dissonance": score.dissonance,
        "entropy_nats": score.entropy_nats,
        "out_of_scope": int(score.predicted is None or bool(_OUT_OF_SCOPE & set(score.refer_reasons))),
        "refer": int(score.refer),
        "refer_reasons": " ".join(score.refer_reasons),
        "vacuity_from": score.vacuity_from,
        "entropy_from": score.entropy_from,
        "dissonance_from": score.dissonance_from,
        "suspicious_from": score.suspicious_from,
        "rules_tried": " ".join(score.rules_tried),
        "turned_suspicious_probability": score.turned_suspicious_probability,
    }


def answer_columns(question: str, result: PictureAnswer | Failure) -> dict[str, Any]:
    """Fill the columns of a result; numbers are written so that reading them gives the same bits."""
    asked = {"question_sha256": text_sha256(question)}
    if isinstance(result, Failure):
        return {**asked, "error_code": result.code}
    return {
        **asked,
        "answer": result.answer,
        "probabilities": json.dumps(dict(result.probabilities)),
        "entropy_nats": result.entropy_nats,
        "refused": int(result.refused),
        "refuse_reasons": " ".join(result.refuse_reasons),
    }
