"""What a temperature does to answers: each way is judged on the same rows, and what is counted is there."""

import numpy as np
import pytest
from benchmarks.causes.temperature_answers import FITS, figures

from edgefl_trainer.data import load_federation
from edgefl_trainer.engine.sites import report_rows


@pytest.fixture(scope="module")
def told(cached):
    """A federation with 20 tune rows a site or more, and features of which the first alone tells the class, poorly."""
    data = load_federation(["lesions:sites=2,images=240,px=36"], image_px=36, task="nevus", seed=0)
    features = np.random.default_rng(0).normal(size=(len(data.labels), 4)).astype(np.float32)
    features[:, 0] += data.labels
    return data, features


@pytest.mark.parametrize("equal_draws", [False, True])
def test_each_way_of_choosing_is_judged_on_the_same_rows(told, equal_draws):
    data, features = told
    for name, site in data.sites.items():
        assert len(site.tune) >= 20
        none, likeliest, kept = figures(data, features, name, equal_draws=equal_draws)
        assert none[0] == 1.0 and 1.0 not in (likeliest[0], kept[0]) and len(FITS) == 3
        if equal_draws:  # no temperature changes a forced answer
            assert none[1:3] == likeliest[1:3] == kept[1:3]
            continue
        rarest = np.bincount(data.labels[site.train]).argmin()
        judged = data.labels[report_rows(data, name).rows]
        assert [row[6] for row in (none, likeliest, kept)] == [(judged == rarest).sum()] * 3
