"""A head learned step by step beside a regression: both losses reach the optimum that the regression has."""

from dataclasses import replace

import numpy as np
import pytest
from head_recipe import head_scores, judged_on_tune, regression_scores, table

from edgefl_trainer.data import load_federation
from edgefl_trainer.engine.sites import report_rows


@pytest.fixture(scope="module")
def told(cached):
    """A federation, and features of which the first alone tells the class."""
    data = load_federation(["lesions:sites=2,images=60,px=36"], image_px=36, task="nevus", seed=0)
    rng = np.random.default_rng(0)
    features = rng.normal(size=(len(data.labels), 4)).astype(np.float32)
    features[:, 0] += 4 * data.labels
    return data, features


@pytest.mark.parametrize("loss", ["evidential", "cross-entropy"])
def test_a_head_learns_what_the_features_tell(told, loss):
    data, features = told
    found = head_scores(data, features, loss, 40, 0.05, 1e-2)
    for name, (learned, judged) in found.items():
        for rows, said in ((data.sites[name].train, learned), (report_rows(data, name).rows, judged)):
            assert (said.argmax(axis=1) == data.labels[rows]).mean() > 0.9


def test_reported_labels_change_no_head_and_no_regression(told):
    data, features = told
    shown = np.concatenate([report_rows(data, name).rows for name in data.sites])
    labels = data.labels.copy()
    labels[shown] = 1 - labels[shown]
    other = replace(data, labels=labels)
    pairs = (
        [head_scores(one, features, "evidential", 3, 5e-3, 1e-2) for one in (data, other)],
        [regression_scores(one, features) for one in (data, other)],
    )
    for first, second in pairs:
        for name in first:
            np.testing.assert_array_equal(first[name][1], second[name][1])


def test_the_table_compares_with_its_first_line(told):
    data, features = told
    arms = {"one": regression_scores(data, features), "the same": regression_scores(data, features)}
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in table(data, arms).splitlines()[2:]]
    assert [line[0] for line in lines] == ["one", "the same"] and lines[0][3] == ""
    assert lines[1][3].startswith("+0.0 [+0.0")


def test_a_recipe_is_chosen_on_tune_rows_alone(told):
    data, features = told
    chosen = judged_on_tune(data)
    for name in data.sites:
        np.testing.assert_array_equal(report_rows(chosen, name).rows, data.sites[name].tune)
        assert not set(report_rows(data, name).rows) & set(report_rows(chosen, name).rows)
    found, whole = (head_scores(one, features, "evidential", 3, 5e-3, 1e-2) for one in (chosen, data))
    for name in data.sites:
        np.testing.assert_array_equal(found[name][0], whole[name][0])  # the same head
        assert len(found[name][1]) == len(data.sites[name].tune)
