"""What an int8 bundle says of suspicious classes: threshold and figures are those of its own graph."""

import shutil

import numpy as np
import pytest

from edgefl_export.bundles import assemble
from edgefl_export.int8 import precision
from edgefl_export.int8.calibration import Calibration, ReportedRows
from edgefl_export.parity.score_parity import graph_scores, open_session
from edgefl_protocol.pictures.referral import Measures, ReferralRules, asks_for_a_look
from edgefl_protocol.pictures.suspicious import DEFAULT_SUSPICIOUS_FROM
from edgefl_protocol.tensors import read_tensors
from edgefl_trainer.contract import Prediction
from edgefl_trainer.engine.judging.suspicion import save_reported_scores, save_tune_scores
from edgefl_trainer.engine.models import open_run
from edgefl_trainer.evaluate.intervals import Scored


@pytest.mark.parametrize("kept", [True, False])
def test_the_rule_for_suspicious_classes_is_measured_in_8_bits(
    run_folder, members, shared, tmp_path, monkeypatch, kept
):
    """docs/reference/scores.md, what a class means: threshold and figures are those of the graph in the bundle. The
    trainer's kept scores say otherwise here; a run without any still warns."""
    rng = np.random.default_rng(3)
    pictures, targets = rng.integers(0, 256, (90, 36, 36, 3), np.uint8), np.arange(90) % 3
    folder = shutil.copytree(run_folder, tmp_path / "run")
    if kept:
        other = rng.dirichlet([1.0, 2.0, 1.0], 90).astype(np.float32)
        save_tune_scores(folder, "north", Prediction(other, other.argmax(1), None, None, None, None), targets)
        save_reported_scores(folder, "north", Scored(other, targets, other.argmax(1), None, ("",) * 90))
    same = precision.Agreement(64, 1.0, 0.0, None)
    graph, layers = members.files["score.onnx"], precision.FloatLayers((), {}, same)
    weights = read_tensors(members.files["weights.safetensors"], max_bytes=1 << 30)[0]
    scores = graph_scores(open_session(graph), weights, pictures, 1)
    monkeypatch.setattr(assemble, "_quantised", lambda *_: (graph, "1.24", layers, same, (scores, scores)))
    rows = ReportedRows(pictures, np.arange(90), targets)
    sets = Calibration(ranges=pictures, choice=pictures, gate=pictures, tune=pictures, targets=targets, reported=rows)
    model = assemble.site_model(open_run(folder), "north")
    with shared.traces():
        card = assemble.build_members(model, int8=sets).card
    made, facts = card.suspicion, card.metrics["int8"]
    assert made is not None and isinstance(facts, dict)
    if not kept:
        assert facts["other_referral"] == 0  # the same scores under the same threshold
        assert made == model.card.suspicion and "kept no scores" in made.statement
        return
    asked = np.array([
        asks_for_a_look(
            Measures(probabilities=one, vacuity=None, dissonance=None, entropy_nats=0.0),
            int(np.argmax(one[:2])),  # the site never saw the third
            ReferralRules(
                uncertain_above=None, dissonance_above=None, suspicious=(True, False, False),
                suspicious_from=made.threshold,
            ),
        )
        for one in scores["probabilities"]
    ])  # fmt: skip
    ill = targets == 0
    assert made.threshold not in (None, DEFAULT_SUSPICIOUS_FROM) and (made.suspicious, made.benign) == (30, 60)
    assert made.sensitivity == asked[ill].mean() >= 0.95 and made.specificity == (~asked[~ill]).mean()
    told = {"pictures": 30, "passed": (~asked)[ill].sum(), "benign_passed": (~asked)[~ill].sum()}
    assert card.metrics["suspicious_reported"] == told
    assert made != model.card.suspicion and f"{asked[ill].sum()} of 30" in made.statement
