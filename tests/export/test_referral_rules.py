"""The rules of a bundle are those of `edgefl-train predict`, and say how they do where nothing was chosen."""

import numpy as np
import pytest
from tests.export.conftest import write_run

from edgefl_export.bundles import assemble
from edgefl_protocol.bundle import Labels
from edgefl_protocol.bundle.model_card import referral_rules
from edgefl_protocol.pictures.class_info import known_among
from edgefl_protocol.pictures.suspicious import DEFAULT_SUSPICIOUS_FROM
from edgefl_trainer.contract import Prediction
from edgefl_trainer.data.class_info import read_class_info
from edgefl_trainer.engine.judging.prediction import referral_rules_of
from edgefl_trainer.engine.judging.suspicion import save_reported_scores, save_tune_scores, tune_scores
from edgefl_trainer.engine.models import open_run
from edgefl_trainer.errors import RunError
from edgefl_trainer.evaluate.intervals import Scored

SKIN = '[bkl]\nname = "Warty mole"\nmeaning = "Not looked into."\nmalignancy = "unknown"\n'


@pytest.mark.parametrize("ill", [5, 30])
def test_trainer_and_device_refer_by_the_same_rules(tmp_path, predictor, ill):
    """One threshold, chosen on the kept scores of tune rows: what `predict` uses and what the bundle carries."""
    folder = write_run(tmp_path / "run", predictor)
    run = open_run(folder)
    rng = np.random.default_rng(5)
    probabilities = rng.dirichlet([1.0, 2.0, 1.0], 80).astype(np.float32)
    found = Prediction(probabilities, probabilities.argmax(1), None, None, None, None)
    targets = np.where(np.arange(80) < ill, 0, 1)
    save_tune_scores(folder, "north", found, targets)
    reported = rng.dirichlet([1.0, 2.0, 1.0], 80).astype(np.float32)
    save_reported_scores(folder, "north", Scored(reported, targets, reported.argmax(1), None, ("",) * 80))
    (tmp_path / "classes.toml").write_text(SKIN)
    mine = read_class_info(tmp_path / "classes.toml", run.classes)
    for described, flags in (({}, (True, False, False)), (mine, (True, False, True))):
        model = assemble.site_model(run, "north", described)
        labels = Labels(model.classes, model.predictor.seen, model.info)
        rules = referral_rules(labels, model.card)
        assert rules == referral_rules_of(run, "north", known_among(run.classes, described))
        tried = rules.suspicious_tried
        assert tried is not None and tried.pictures == ill, "of the reported rows, by hand:"
        asks = np.array(flags)
        least = min(rules.suspicious_from or DEFAULT_SUSPICIOUS_FROM, 1 / 3)
        passed = ~(asks[reported.argmax(1)] | (reported[:, asks].sum(axis=1) >= least))
        assert (tried.passed, tried.benign_passed) == (passed[:ill].sum(), passed[ill:].sum())
        assert rules.suspicious == flags and (rules.suspicious_from is not None) is (ill >= 20)


@pytest.mark.parametrize("predicted", [-2, 3])
def test_kept_scores_of_a_class_that_is_none_are_damaged(tmp_path, predictor, predicted):
    """−1 says that no class was named; the run has three."""
    folder = write_run(tmp_path / "run", predictor)
    probabilities = np.full((30, 3), 1 / 3, np.float32)
    named = np.array([predicted] + [-1] * 29)
    save_tune_scores(folder, "north", Prediction(probabilities, named, None, None, None, None), np.zeros(30, np.int64))
    with pytest.raises(RunError, match="cannot be read"):
        tune_scores(open_run(folder), "north")
