"""Rules of a bundle, and whose pictures it learned from: as `edgefl-train predict` has it. How rules do elsewhere."""

import json
from dataclasses import replace

import numpy as np
import pytest
from tests.export.conftest import write_run

from edgefl_export.bundles import assemble
from edgefl_protocol.bundle import Labels
from edgefl_protocol.bundle.card_words import shown_weaknesses
from edgefl_protocol.bundle.figures import learned_from, learned_from_federation
from edgefl_protocol.bundle.model_card import referral_rules
from edgefl_protocol.pictures.class_info import known_among
from edgefl_protocol.pictures.suspicious import DEFAULT_SUSPICIOUS_FROM
from edgefl_trainer.contract import Prediction
from edgefl_trainer.data.class_info import read_class_info
from edgefl_trainer.engine.judging.prediction import model_info, referral_rules_of
from edgefl_trainer.engine.judging.suspicion import save_reported_scores, save_tune_scores, tune_scores
from edgefl_trainer.engine.models import open_run
from edgefl_trainer.errors import RunError
from edgefl_trainer.evaluate.intervals import Scored

SKIN = '[BKL]\nname = "Warty mole"\nmeaning = "Not looked into."\nmalignancy = "unknown"\n'


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


@pytest.mark.parametrize(
    ("changes", "sites", "federation"),
    [
        ({}, ("north", "west"), None),
        ({"travels": ["maps"]}, ("north",), None),
        ({"federation": "skin"}, ("north", "west"), "skin"),
        ({"federation": "skin", "travels": ["maps"]}, ("north",), None),
    ],
)
def test_trainer_and_device_say_alike_whose_pictures_taught_the_model(changes, sites, federation, tmp_path, predictor):
    """FedAvg's mean is over the sites that took part (McMahan et al. 2017, algorithm 1): south never did."""
    folder = write_run(tmp_path / "run", predictor)
    path = folder / "summary.json"
    summary = json.loads(path.read_text())
    north, late = summary["sites"]["north"], {"took_part": {"rounds": 0, "of": 3}}
    summary |= {"sites": {"north": north, "south": north | late, "west": north}, "travels": ["weights"], **changes}
    path.write_text(json.dumps({**summary, "state_sha256": "0" * 64}))
    run = open_run(folder)
    model = assemble.site_model(run, "north")
    told = model_info(run, "north", predictor, known_among(run.classes))
    assert learned_from(model.card) == told.learned_from == sites
    assert learned_from_federation(model.card) == told.learned_from_federation == federation
    unknown = Labels(model.classes, (False, True, True), model.info)
    info = model_info(run, "north", replace(predictor, seen=unknown.seen), known_among(run.classes))
    assert shown_weaknesses(model.card, unknown) == info.warnings
    assert ("no training picture of the site north" in " ".join(info.warnings)) is ("weights" in summary["travels"])
