"""Scores made by hand and the pictures that are drawn of them."""

import numpy as np

from edgefl_client.scoring.drawing.score_picture import draw_heatmap
from edgefl_client.scoring.explanation import Explanation
from edgefl_protocol.pictures.class_info import KNOWN
from edgefl_protocol.pictures.score import ModelInfo, Score

MODEL = ModelInfo(id="a/b/c", sha256="0" * 64, version=1, state_kind="bundle", state_sha256="1" * 64)


def one_hot(side, row, column):
    tokens = np.full((side, side), 0.1, np.float32)
    tokens[row, column] = 1
    return tokens.ravel()


def score_with(attention, reasons=(), predicted="MEL"):
    return Score(
        image="x", predicted=predicted, probabilities={"MEL": 0.75, "NV": 0.25}, evidence=None, vacuity=0.4,
        dissonance=0.1, entropy_nats=0.5, refer=bool(reasons), refer_reasons=tuple(reasons), heatmap=None, model=MODEL,
        milliseconds=1.0, map=attention, info=KNOWN, rules_tried=("vacuity", "blur"), suspicious_from=0.2,
    )  # fmt: skip


def drawn_picture(photo, score, fit):
    """With the score's own map, as a bundle has it whose card found it true."""
    return draw_heatmap(photo, score, fit, Explanation(score.map, "So true."))
