"""Figures of a run beyond the sites': pooled rows, intervals, percentiles, foreign pictures (docs/methods.md 8.4)."""

import json

import numpy as np
import pytest
from tests.trainer.conftest import edgefl_train
from tests.trainer.engine.test_run import summary

from edgefl_trainer.data.sources.foreign import read_foreign
from edgefl_trainer.engine.models import open_run, predict

FIGURES = {
    "balanced_accuracy", "macro_precision", "macro_recall", "macro_f1", "specificity", "auroc", "accuracy", "ece",
    "brier", "aurc", "open_accuracy", "open_balanced_accuracy", "open_macro_precision", "open_macro_f1",
    "open_specificity",
}  # fmt: skip


@pytest.mark.parametrize("method", ["local", "fedavg", "fedevprompt"])
def test_a_summary_has_intervals_pooled_rows_and_percentiles(method, finished):
    found = summary(finished[method])
    for figures in (found["pooled"], *found["sites"].values()):
        assert figures.keys() >= FIGURES | {f"{name}_interval" for name in FIGURES}
        for name in FIGURES:
            bounds = figures[f"{name}_interval"]
            assert bounds is None or bounds[0] <= bounds[1]
        low, high = figures["accuracy_interval"]
        assert low <= figures["accuracy"] <= high
    assert found["pooled"]["n_test"] == sum(site["n_test"] for site in found["sites"].values())
    right = sum(site["accuracy"] * site["n_test"] for site in found["sites"].values())
    assert found["pooled"]["accuracy"] == pytest.approx(right / found["pooled"]["n_test"])
    values = [site["balanced_accuracy"] for site in found["sites"].values()]
    for share in (5, 10, 15):
        assert found[f"p{share}_balanced_accuracy"] == pytest.approx(np.percentile(values, share))
    bounds = [site["balanced_accuracy_interval"] for site in found["sites"].values()]
    unsure = all(pair is not None and pair[0] < pair[1] for pair in bounds)  # a site that never varies has no interval
    mean = found["mean_balanced_accuracy_interval"]
    assert unsure == (mean is not None)
    assert mean is None or mean[0] <= found["mean_balanced_accuracy"] <= mean[1]


def test_foreign_pictures_are_judged_by_vacuity(finished, ward, tmp_path):
    """The share of (reported row, foreign picture) pairs in which the foreign one has the higher vacuity."""
    arguments = ("evaluate", finished["local"], "--data", ward, "--device", "cpu", "--ood", "textures")
    found = edgefl_train(*arguments, "--ood", ward.removeprefix("folder:"), "--json").json()["ood"]
    assert set(found) == {"textures", ward.removeprefix("folder:")}
    run = open_run(finished["local"])
    px = run.backbone.spec.image_px
    from edgefl_trainer.engine.sites import load_data, report_rows

    federation = load_data(run.settings, px)
    for source, figures in found.items():
        foreign = read_foreign(source, px)
        assert figures["images"] == len(foreign)
        for name, area in figures["auroc"].items():
            rows = report_rows(federation, name)
            inside = predict(run.predictor(name), rows.images[rows.rows]).vacuity
            outside = predict(run.predictor(name), foreign).vacuity
            pairs = (outside[:, None] > inside) + 0.5 * (outside[:, None] == inside)
            assert area == pytest.approx(pairs.mean())
        assert figures["mean_auroc"] == pytest.approx(np.mean(list(figures["auroc"].values())))
        assert figures["worst_auroc"] == min(figures["auroc"].values())
    outcome = edgefl_train(*arguments)
    assert "240 foreign pictures of textures: AUROC of the uncertainty" in outcome.out


def test_a_missing_folder_of_foreign_pictures_is_a_sentence(finished, ward, tmp_path):
    outcome = edgefl_train("evaluate", finished["local"], "--data", ward, "--ood", tmp_path / "nowhere")
    assert outcome.code == 1 and "nowhere" in outcome.sentence()


def test_without_foreign_pictures_nothing_is_said_of_them(finished, ward):
    outcome = edgefl_train("evaluate", finished["local"], "--data", ward, "--json")
    assert "ood" not in json.loads(outcome.out)
