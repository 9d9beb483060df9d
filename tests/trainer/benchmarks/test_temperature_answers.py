"""What a temperature does to answers: nothing with equal priors, and what is counted is there."""

import numpy as np
import pytest
from temperature_answers import figures, lines

from edgefl_trainer.data import load_federation
from edgefl_trainer.engine.sites import report_rows


@pytest.fixture(scope="module")
def told(cached):
    """A federation, and features of which the first alone tells the class."""
    data = load_federation(["lesions:sites=2,images=60,px=36"], image_px=36, task="nevus", seed=0)
    features = np.random.default_rng(0).normal(size=(len(data.labels), 4)).astype(np.float32)
    features[:, 0] += 4 * data.labels
    return data, features


def test_with_equal_priors_no_temperature_changes_a_forced_answer(told):
    data, features = told
    rows = lines(data, features, equal_draws=True)
    assert len(rows) == 3 and len({(row[2], row[3]) for row in rows}) == 1


def test_the_class_of_the_largest_prior_is_the_rarest(told):
    data, features = told
    for name, site in data.sites.items():
        rarest = np.bincount(data.labels[site.train]).argmin()
        found = figures(data, features, name, equal_draws=False)
        assert found[0][0] == 1.0
        assert [row[6] for row in found] == [(data.labels[report_rows(data, name).rows] == rarest).sum()] * 3
