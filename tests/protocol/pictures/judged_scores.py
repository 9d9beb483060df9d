"""Scores of invented pictures, for the tests of referral and of what is said."""

import numpy as np

from edgefl_protocol.pictures.class_info import known_among
from edgefl_protocol.pictures.referral import JudgedPicture, ReferralRules
from edgefl_protocol.pictures.score import ModelInfo, Score, make_score

ISIC = ("MEL", "NV", "BCC", "AK", "BKL", "DF", "VASC", "SCC")
SOUND = JudgedPicture()
MODEL = ModelInfo(id="a/b/c", sha256="0" * 64, version=1, state_kind="bundle", state_sha256="1" * 64)


def a_score(probabilities, rules: ReferralRules, *, vacuity=0.1, info=None, picture=SOUND, **given) -> Score:
    outputs = {"probabilities": np.asarray(probabilities, np.float32)}
    if "evidence" in given:
        outputs["evidence"] = np.asarray(given["evidence"], np.float32)
    if vacuity is not None:
        outputs["vacuity"] = np.float32(vacuity)
    classes = given.get("classes", ISIC[: len(probabilities)])
    seen = given.get("seen", [True] * len(classes))
    return make_score(
        outputs, name="x", classes=classes, seen=seen, rules=rules, picture=picture,
        expired=None, model=MODEL, milliseconds=1.0, info=info,
    )  # fmt: skip


def rules_for(suspicious, *, above=0.6, start=0.25) -> ReferralRules:
    return ReferralRules(uncertain_above=above, dissonance_above=None, suspicious=suspicious, suspicious_from=start)


CALM = (0.04, 0.92, 0.04)
MELANOMA = (0.8, 0.1, 0.1)
THREE, DESCRIBED = rules_for((True, False, True)), known_among(ISIC)
