"""`edgefl-train predict` turns a picture that would pass, as the device does (docs/methods.md 1.8, rule `unsteady`)."""

import numpy as np
import pytest
from tests.trainer.conftest import write_picture

from edgefl_protocol.pictures.referral import JudgedPicture, ReferralRules
from edgefl_trainer.engine.judging import prediction
from edgefl_trainer.engine.models import open_run


@pytest.mark.parametrize("asks", [None, 0, 1, 2, 3])
def test_a_picture_that_asks_in_one_turn_is_referred(finished, tmp_path, monkeypatch, asks):
    """`nevus` is benign and `other` is not: of four inputs at most one says `other`."""
    run = open_run(finished["local"])
    calm, other = (
        np.array([0.98 if (name == "nevus") is calm else 0.02 for name in run.classes], np.float32)
        for calm in (True, False)
    )
    suspicious = tuple(name != "nevus" for name in run.classes)
    given = []

    def outputs(predictor, pixels):
        given.append(pixels)
        return {"probabilities": other if len(given) - 1 == asks else calm, "vacuity": np.float32(0.01)}

    monkeypatch.setattr(prediction, "_outputs", outputs)
    rules = ReferralRules(uncertain_above=None, dissonance_above=None, suspicious=suspicious, suspicious_from=0.25)
    monkeypatch.setattr(prediction, "referral_rules_of", lambda *_: rules)
    monkeypatch.setattr(prediction, "judge_picture", lambda *_, **__: JudgedPicture())
    write_picture(tmp_path / "a.png", 80, 1, px=50)
    (score,) = prediction.predict_files(run, "east", [tmp_path / "a.png"])
    wanted = () if asks is None else ("suspicious_class",) if asks == 0 else ("unsteady",)
    assert score.refer_reasons == wanted and ("unsteady" in score.rules_tried) is (asks != 0)
    assert len(given) == (1 if asks == 0 else 4)
    for quarter, pixels in enumerate(given):
        assert np.abs(pixels.astype(int) - np.rot90(given[0], quarter)).max() <= 2
