"""What `benchmarks/uncertainty/uncertainty.py` compares: distances by scipy, an ensemble by its definition."""

import json

import numpy as np
import pytest
import torch
from benchmarks.uncertainty import uncertainty
from benchmarks.uncertainty.uncertainty_figures import figures_of
from benchmarks.uncertainty.uncertainty_measures import (
    HeadRecipe,
    Rows,
    Said,
    bench84_recipe,
    fit_gaussians,
    head_recipe_of,
    learned_heads,
    together,
)
from click.testing import CliRunner
from scipy.spatial.distance import mahalanobis
from tests.trainer.conftest import TINY

from edgefl_protocol.errors import EdgeflError
from edgefl_trainer.contract import Predictor
from edgefl_trainer.engine.models import FinishedRun, open_run
from edgefl_trainer.engine.settings import RunSettings
from edgefl_trainer.models.backbones import load_backbone
from edgefl_trainer.models.scoring import ScoreModule, ScoreOptions


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


@pytest.mark.parametrize("method", ["local", "fedevprompt", "fedavg"])
def test_heads_are_learned_as_the_run_learned_its_own(tmp_path, method):
    """min(1, t / 100) over ten epochs of five rounds (arXiv 2411.10071, 3.1), equal draws, the run's rate and batch."""
    hyper = {"anneal_epochs": 100, "lr_head": 3e-3, "batch": 16}
    settings = RunSettings(method=method, data=("lesions",), balance="class", rounds=5, epochs=2, hyper=hyper)
    found = head_recipe_of(FinishedRun(tmp_path, settings, {}, {}))
    assert found.kl_weights == pytest.approx([t / 100 for t in range(10)])
    assert (found.balance, found.rate, found.batch) == ("class", 3e-3, 16)
    alone = bench84_recipe(3)
    assert (alone.balance, alone.kl_weights, alone.rate) == ("none", (0, 1, 1), 5e-3)


def test_a_run_without_evidence_has_no_head_to_learn_anew(tmp_path):
    settings = RunSettings(method="local", data=("lesions",), hyper={"loss": "ce"})
    with pytest.raises(EdgeflError, match="the run has no evidence: name a run with an evidential loss"):
        head_recipe_of(FinishedRun(tmp_path, settings, {}, {}))


def test_a_study_of_a_run_has_the_runs_recipe(finished):
    """Of `tiny`: two rounds of one epoch, classes as they come."""
    run = open_run(finished["local"])
    recipe = uncertainty.seed_of_run(run, {}).study.recipe
    assert recipe == head_recipe_of(run) and len(recipe.kl_weights) == run.settings.rounds * run.settings.epochs


def evidence_learned(balance, kl_weight):
    """Evidence for 84 rows of class 0 and 12 of class 1 that look the same: only a bias can be learned."""
    module = ScoreModule(load_backbone("tiny", image_px=36), ScoreOptions(readout="mean", prompts=()))
    rows = Rows(torch.zeros(96, module.backbone.spec.width), torch.from_numpy(np.repeat([0, 1], [84, 12])))
    network = Predictor(module, {"prior": np.ones(2, np.float32)}, (True, True))
    (head,) = learned_heads(network, rows, rows, [0], HeadRecipe(balance, (kl_weight,) * 30, 0.05, 1e-2, 32))
    return np.log1p(np.exp(head.tensors["head.bias"]))  # softplus


def test_equal_draws_and_the_weight_of_the_kl_term_reach_the_heads():
    """Classes as they come give evidence for the frequent one, equal draws for neither; the KL term takes evidence."""
    natural, equal = evidence_learned("none", 0.0), evidence_learned("class", 0.0)
    assert natural[0] > 3 * natural[1] and equal.max() < 1.5 * equal.min()
    assert evidence_learned("class", 1.0).sum() < 0.5 * equal.sum()


def test_several_heads_stand_beside_one_of_them_draw_by_draw():
    """By hand, of three draws: the difference at each draw, and its middle 95 %."""
    one, five = np.array([0.40, 0.1, 0.5, 0.3]), np.array([0.37, 0.3, 0.4, 0.3])
    draws = {
        "vacuity": {"aurc": np.zeros(4)},
        "one new head, entropy": {"aurc": one},
        "5 heads, entropy": {"aurc": five},
        "5 heads, disagreement": {"aurc": five},
        "one new head": {"ece": one},
        "all new heads": {"ece": five},
    }
    found = figures_of(draws)
    for told in (found["5 heads, entropy"]["aurc"], found["all new heads"]["ece"]):
        assert told["over_one"] == pytest.approx(-0.03)
        assert told["over_one_interval"] == pytest.approx(np.percentile([0.2, -0.1, 0.0], [2.5, 97.5]).tolist())
    assert "over_one" not in found["5 heads, disagreement"]["aurc"] | found["one new head, entropy"]["aurc"]
    assert found["5 heads, entropy"]["aurc"]["difference"] == pytest.approx(0.37)


def test_the_epochs_of_a_run_are_not_chosen_anew(finished):
    refused = CliRunner().invoke(uncertainty.main, [str(finished["local"]), "--epochs", "1"])
    assert refused.exit_code == 2
    assert refused.output.splitlines()[-1] == (
        "Error: heads of a RUN learn for as many epochs as it did: leave out --epochs."
    )


def measured(*words):
    """What the command prints as JSON."""
    outcome = CliRunner().invoke(uncertainty.main, [*map(str, words), "--heads", "2", "--json"])
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
    table = CliRunner().invoke(uncertainty.main, [*map(str, seeds), "--heads", "2"]).stdout
    shown = [line for line in table.splitlines() if line.startswith(("| AURC |", "| dissonance |", "| 2 heads, 1"))]
    assert all(line.count("|") == shown[0].count("|") for line in shown)
    assert "| minus one new head (95 %) |" in shown[0] and shown[1].startswith("| dissonance |")
    assert f"{alone[0]['tune']['mean']['dissonance']['aurc']['difference']:+.3f}, " in shown[1]


def test_no_mean_is_taken_of_other_rows(finished, train, tmp_path):
    """A run of one site more is not a seed of these."""
    other = tmp_path / "other"
    words = ("run", "local", "--data", "lesions:sites=2,images=28,px=48", "--preset", "tiny", "--rounds", "1")
    made = train(*words, "--epochs", "1", "--out", other)
    assert made.code == 0, made.err
    refused = CliRunner().invoke(uncertainty.main, [str(finished["local"]), str(other)])
    assert refused.exit_code == 1
    assert refused.output.splitlines()[-1] == (
        "Error: the runs are judged on different rows: name the seeds of one command"
    )
