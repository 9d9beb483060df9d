"""What `benchmarks/uncertainty/uncertainty.py` compares: distances by scipy, an ensemble by its definition."""

import json

import numpy as np
import pytest
import torch
from benchmarks.uncertainty import uncertainty
from benchmarks.uncertainty.uncertainty_measures import Rows, Said, fit_gaussians, together
from click.testing import CliRunner
from scipy.spatial.distance import mahalanobis
from tests.trainer.conftest import TINY


def test_the_distance_is_that_to_the_nearest_class_under_one_covariance():
    """Lee et al., arXiv 1807.03888, eq. 1 and 2; the covariance shrunk as in docs/methods.md 1.8."""
    rng = np.random.default_rng(0)
    features, targets = rng.normal(size=(60, 4)), np.repeat([0, 2, 5], 20)
    features[targets == 2] += 3
    means = {k: features[targets == k].mean(axis=0) for k in (0, 2, 5)}
    inside = np.concatenate([features[targets == k] - mean for k, mean in means.items()])
    covariance = inside.T @ inside / 60
    inverse = np.linalg.inv(0.9 * covariance + 0.1 * np.trace(covariance) / 4 * np.eye(4))
    new = rng.normal(size=(5, 4)) * 4
    wanted = [min(mahalanobis(one, mean, inverse) ** 2 for mean in means.values()) for one in new]
    found = fit_gaussians(Rows(torch.from_numpy(features), torch.from_numpy(targets))).nearest(new)
    assert found == pytest.approx(wanted)


def test_members_that_agree_disagree_by_nothing_and_others_by_the_entropy_they_add():
    """Entropy of the mean less the mean entropy: 0 for equal members, ln 2 for two that are sure of other classes."""
    sure = [np.array([[1.0, 0.0]]), np.array([[0.0, 1.0]])]
    said = [Said(one, one.argmax(axis=1), {"entropy": np.zeros(1)}) for one in sure]
    apart, alike = together(said, (True, True)), together([said[0], said[0]], (True, True))
    assert apart.measures["2 heads, disagreement"] == pytest.approx(np.log(2))
    assert alike.measures["2 heads, disagreement"] == pytest.approx(0)
    assert alike.predicted.tolist() == [0] and apart.measures["2 heads, 1 - p"] == pytest.approx(0.5)


def measured(*words):
    """What the command prints as JSON."""
    outcome = CliRunner().invoke(uncertainty.main, [*map(str, words), "--epochs", "1", "--heads", "2", "--json"])
    assert outcome.exit_code == 0, outcome.output
    return json.loads(outcome.stdout)


@pytest.fixture(scope="module")
def seeds(finished, ward, mae, train, shared):
    """The run of a method with its seed 0, and with seed 1."""

    def make(folder):
        words = ("run", "local", "--data", ward, "--out", folder / "run", "--backbone", f"run:{mae}", "--seed", "1")
        made = train(*words, *TINY)
        assert made.code == 0, made.err

    return finished["local"], shared.made("uncertainty-seed-1", make) / "run"


def test_several_seeds_give_their_mean_and_each_ones_difference(seeds):
    """Every value is the mean of what the seeds give alone. Each drew its own `tune` rows: no interval stands there."""
    alone, both = [measured(folder) for folder in seeds], measured(*seeds)
    for kind in ("tune", "reported"):
        for site in both["rows"]:
            for measure, figures in both[kind][site].items():
                each = [one[kind][site][measure] for one in alone]
                for figure, told in figures.items():
                    wanted = np.mean([one[figure]["value"] for one in each])
                    assert told["value"] == pytest.approx(wanted, nan_ok=True)
        for measure in ("dissonance", "1 - p"):
            told = both[kind]["mean"][measure]["aurc"]
            assert told["by_seed"] == pytest.approx([one[kind]["mean"][measure]["aurc"]["difference"] for one in alone])
            assert told["difference"] == pytest.approx(np.mean(told["by_seed"]))
            assert (told["interval"] is None) is (kind == "tune")
    table = CliRunner().invoke(uncertainty.main, [*map(str, seeds), "--epochs", "1", "--heads", "2"]).stdout
    shown = [line for line in table.splitlines() if line.startswith("| dissonance |")]
    assert all(line.count("|") == shown[0].count("|") for line in shown)
    assert f"{alone[0]['tune']['mean']['dissonance']['aurc']['difference']:+.3f}, " in shown[0]


def test_no_mean_is_taken_of_other_rows(finished, train, tmp_path):
    """A run of one site more is not a seed of these."""
    other = tmp_path / "other"
    words = ("run", "local", "--data", "lesions:sites=2,images=28,px=48", "--preset", "tiny", "--rounds", "1")
    made = train(*words, "--epochs", "1", "--out", other)
    assert made.code == 0, made.err
    refused = CliRunner().invoke(uncertainty.main, [str(finished["local"]), str(other), "--epochs", "1"])
    assert refused.exit_code == 1
    assert refused.output.splitlines()[-1] == (
        "Error: the runs are judged on different rows: name the seeds of one command"
    )
