"""What prompts add, taken apart: the heads of a run, and a regression on the same features."""

import numpy as np
import pytest
from benchmarks.causes.what_prompts_add import table, taken
from benchmarks.federation.federation_scores import accuracy, reported, scores_of
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from edgefl_trainer.engine.models import open_run
from edgefl_trainer.engine.sites import report_rows


@pytest.fixture(scope="module")
def parts(finished):
    run = open_run(finished["local"])
    return run, reported(run), taken(run, reported(run))


def test_its_own_heads_answer_as_the_run_does(parts, tmp_path):
    run, data, found = parts
    for name, scored in scores_of(run, data, tmp_path).items():
        np.testing.assert_allclose(found.own[name].probabilities, scored.probabilities, atol=1e-5)


def test_the_regression_reads_what_the_head_reads(parts):
    """Scikit-learn's own pipeline on the prompted features gives the same answers, for one of the penalties."""
    import torch
    from benchmarks.federation.frozen_starts import STRENGTHS

    run, data, found = parts
    predictor, site = run.predictor("east"), data.sites["east"]
    tensors = {name: torch.from_numpy(np.array(value)) for name, value in predictor.tensors.items()}
    module = predictor.score_module.eval()
    assert module.options.prompts  # else nothing is prompted here

    def read(rows):
        with torch.inference_mode():
            images = torch.from_numpy(data.images[data.places(rows)])
            return module.features(module.output(images, tensors, need_attention=False), tensors).numpy()

    alike = []
    for strength in STRENGTHS:
        oracle = make_pipeline(StandardScaler(), LogisticRegression(C=strength, class_weight="balanced", max_iter=5000))
        oracle.fit(read(site.train), data.labels[site.train])
        alike.append(
            np.allclose(
                oracle.predict_proba(read(report_rows(data, "east").rows)),
                found.refitted["east"].probabilities,
                atol=5e-3,
            )
        )
    assert any(alike)


def test_the_table_sets_regressions_beside_the_first(parts):
    _, _, found = parts
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in table([found, found]).splitlines()[2:]]
    mean = 100 * np.mean([accuracy(scored) for scored in found.refitted.values()])
    assert lines[0][5].startswith(f"{mean:.1f} [") and lines[0][6] == ""
    assert lines[1][6].startswith("+0.0 [+0.0")
