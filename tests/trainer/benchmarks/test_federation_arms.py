"""What stands behind the page on what a federation gives: regressions on frozen features, models judged elsewhere."""

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from benchmarks.federation import federation_scores, frozen_starts, joining_centre, keep_run
from benchmarks.federation.federation_arms import Found
from benchmarks.federation.federation_scores import accuracy, reported, scores_elsewhere, scores_of
from benchmarks.federation.what_federation_gives import home_table
from click.testing import CliRunner
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from edgefl_trainer.contract import Examples
from edgefl_trainer.data import load_federation
from edgefl_trainer.engine.models import open_run, predict_rows
from edgefl_trainer.engine.settings import RunSettings
from edgefl_trainer.engine.sites import report_rows
from edgefl_trainer.learning.features import frozen_features

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def federation(cached):
    return load_federation(["lesions:sites=2,images=60,px=36"], image_px=36, task="nevus", seed=0)


@pytest.fixture(scope="module")
def features(federation):
    return frozen_starts.features_of("colours", federation)


def test_a_start_is_a_regression_on_the_learners_own_labels(federation, features):
    """Scikit-learn's own pipeline over the learner's `train` rows gives the same probabilities at every centre."""
    found = frozen_starts.scores(features, federation, 0.1)
    labels = federation.labels
    names = list(federation.sites)
    assert sorted(found) == sorted(f"{one}.{other}" for one in names for other in names)
    for learner in names:
        fit = federation.sites[learner].train
        oracle = make_pipeline(
            StandardScaler(), LogisticRegression(C=0.1, class_weight="balanced", max_iter=5000, tol=1e-8)
        )
        oracle.fit(features[fit], labels[fit])
        for judged in names:
            rows = report_rows(federation, judged).rows
            expected = oracle.predict_proba(features[rows])
            np.testing.assert_allclose(found[f"{learner}.{judged}"], expected, atol=2e-3)


def test_the_penalty_is_chosen_without_a_reported_row(federation, features):
    """Reported labels turned over change nothing; `tune` labels do enter, as a choice by hand shows."""
    labels = federation.labels.copy()
    shown = np.concatenate([report_rows(federation, name).rows for name in federation.sites])
    labels[shown] = 1 - labels[shown]
    chosen = frozen_starts.best_strength(features, federation)
    assert frozen_starts.best_strength(features, replace(federation, labels=labels)) == chosen

    def by_hand(strength: float) -> float:
        recalls = []
        for site in federation.sites.values():
            oracle = make_pipeline(
                StandardScaler(), LogisticRegression(C=strength, class_weight="balanced", max_iter=5000)
            )
            oracle.fit(features[site.train], federation.labels[site.train])
            truth = federation.labels[site.tune]
            right = oracle.predict(features[site.tune]) == truth
            recalls.append(np.mean([right[truth == k].mean() for k in np.unique(truth)]))
        return float(np.mean(recalls))

    assert by_hand(chosen) == pytest.approx(max(map(by_hand, frozen_starts.STRENGTHS)), abs=1e-9)


@pytest.fixture(scope="module")
def judged(finished):
    run = open_run(finished["local"])
    return run, reported(run)


def test_elsewhere_each_model_is_judged_on_the_other_centres_patients(judged, tmp_path):
    run, data = judged
    found = scores_elsewhere(run, data, tmp_path)
    assert sorted(found) == ["east at west", "west at east"]
    rows = report_rows(data, "west")
    expected = predict_rows(run.predictor("east"), rows).probabilities
    np.testing.assert_array_equal(found["east at west"].probabilities, expected)
    assert accuracy(found["east at west"]) == pytest.approx(
        np.mean([(expected.argmax(1) == k)[rows.targets == k].mean() for k in np.unique(rows.targets)])
    )


def test_what_a_run_was_judged_by_is_not_computed_again(judged, tmp_path, monkeypatch):
    """The scores that its own judging kept are those of its models; rows that it did not judge are scored."""
    run, data = judged
    asked = []

    def counted(predictor, rows):
        asked.append(len(rows.rows))
        return predict_rows(predictor, rows)

    monkeypatch.setattr(federation_scores, "predict_rows", counted)
    kept = scores_of(run, data, tmp_path)
    assert asked == []
    for name, scored in kept.items():
        again = predict_rows(run.predictor(name), report_rows(data, name)).probabilities
        np.testing.assert_allclose(scored.probabilities, again, atol=1e-5)
        np.testing.assert_array_equal(scored.predicted, again.argmax(axis=1))
    shown = data.sites["east"]
    fewer = replace(data, sites={**data.sites, "east": replace(shown, val=shown.val[1:], test=shown.test[1:])})
    scores_of(run, fewer, tmp_path / "fewer")
    assert asked == [len(report_rows(fewer, "east").rows)]


def test_a_kept_score_holds_for_one_state_alone(judged, tmp_path):
    """What lies in the cache is taken for the same state, and made again for another."""
    run, data = judged
    first = scores_of(run, data, tmp_path)
    file = tmp_path / "local.npz"
    kept = dict(np.load(file))
    np.savez(file, **{**kept, "east": 1 - kept["east"]})
    np.testing.assert_array_equal(scores_of(run, data, tmp_path)["east"].probabilities, 1 - kept["east"])
    np.savez(file, **{**kept, "east": 1 - kept["east"], "state": np.array("another")})
    np.testing.assert_array_equal(scores_of(run, data, tmp_path)["east"].probabilities, first["east"].probabilities)


def test_a_model_names_no_class_that_its_centre_has_not_seen(judged, tmp_path):
    """As a device does: the likeliest of the classes seen, however likely another is."""
    run, data = judged
    blind = replace(run.predictor("east"), seen=(True, False))
    asked = SimpleNamespace(
        folder=run.folder, sites=run.sites, summary=run.summary, classes=run.classes, predictor=lambda _: blind
    )
    found = scores_of(asked, data, tmp_path)["east"]
    assert (found.probabilities.argmax(axis=1) == 1).any() and not found.predicted.any()


def test_a_kept_run_gives_the_same_scores_without_a_model(finished, judged, tmp_path):
    """Neither weights nor a folder of this machine are kept; a run whose scores were lost is refused."""
    run, data = judged
    keep_run.keep(run, tmp_path / "kept", elsewhere=True)
    found = open_run(tmp_path / "kept")
    assert not any(path.suffix == ".safetensors" and path.parent.name != "tune" for path in found.folder.rglob("*"))
    assert "/" not in "".join(found.settings.data) and found.settings.seed == run.settings.seed
    for score in (scores_of, scores_elsewhere):
        again, first = (score(one, data, tmp_path / "scores") for one in (found, run))
        assert list(again) == list(first)
        for name in first:
            np.testing.assert_array_equal(again[name].probabilities, first[name].probabilities)
            np.testing.assert_array_equal(again[name].predicted, first[name].predicted)
            assert again[name].lesions == first[name].lesions
    (found.folder / "scores.npz").unlink()
    with pytest.raises(ValueError, match="make the run again"):
        scores_of(found, data, tmp_path / "scores")


def test_scores_of_other_rows_are_refused(judged, tmp_path):
    run, data = judged
    keep_run.keep(run, tmp_path / "kept", elsewhere=False)
    shown = data.sites["east"]
    fewer = replace(data, sites={**data.sites, "east": replace(shown, val=shown.val[1:], test=shown.test[1:])})
    with pytest.raises(ValueError, match="of other rows"):
        scores_of(open_run(tmp_path / "kept"), fewer, tmp_path)


def test_data_are_named_without_their_folder():
    assert keep_run.without_folder("manifest:/data/skin/six.zip@site=bcn") == "manifest:six.zip@site=bcn"
    settings = RunSettings(method="finetune", data=("manifest:/data/six.zip",), partition="/data/one_place.json")
    kept = keep_run.named_anywhere(settings)
    assert (kept.data, kept.partition) == (("manifest:six.zip",), "one_place.json")
    assert keep_run.named_anywhere(replace(settings, partition="")).partition == ""


def test_the_fit_at_home_is_set_beside_the_round_before_it(tmp_path):
    """By hand: the mean of 60 and 80 after the last round, of 90 and 70 after the fit; rounds before do not count."""
    folder = tmp_path / "together2000"
    folder.mkdir()
    lines = [
        ("train", 1, {"a": 0.1, "b": 0.1}),
        ("train", 2, {"a": 0.6, "b": 0.8}),
        ("final", 3, {"a": 0.9, "b": 0.7}),
    ]
    text = [
        json.dumps({"phase": phase, "round": number, "site": site, "tune_balanced_accuracy": value})
        for phase, number, sites in lines
        for site, value in sites.items()
    ]
    (folder / "metrics.jsonl").write_text("\n".join(text) + "\n")
    table = home_table(Found({"together2000": {0: SimpleNamespace(folder=folder)}}, {}, {}, {}))
    assert "| federation, fitted at home, up to 2,000 labels (seed 0) | 70.0 | 80.0 |" in table


def test_runs_stand_beside_a_head_on_their_own_network(finished, tmp_path):
    """The head is scikit-learn's, over the run's frozen features; the row of a run is what `scores_of` says."""
    from benchmarks.federation import over_head

    run = open_run(finished["local"])
    head, again = over_head.heads_alone([run, run])
    np.testing.assert_array_equal(again["east"].probabilities, head["east"].probabilities)
    rows = load_federation(run.settings.data, image_px=36, task=run.settings.task, seed=0)
    features = frozen_features(run.backbone, Examples(rows.images, rows.labels, np.arange(len(rows.labels))), CPU)
    mean = features["mean"]
    own = {}
    for strength in frozen_starts.STRENGTHS:  # one of them is the chosen one
        oracle = make_pipeline(StandardScaler(), LogisticRegression(C=strength, class_weight="balanced", max_iter=5000))
        fit = rows.sites["east"].train
        oracle.fit(mean[fit], rows.labels[fit])
        own[strength] = oracle.predict_proba(mean[report_rows(rows, "east").rows])
    assert any(np.allclose(head["east"].probabilities, found, atol=5e-3) for found in own.values())
    arm = scores_of(run, reported(run), tmp_path)
    lines = over_head.table([("head alone", [head]), ("local", [arm])], [0]).splitlines()[2:]
    assert [line.split("|")[1].strip() for line in lines] == ["head alone", "local"]
    assert f"| {100 * accuracy(arm['east']):.1f} | {100 * accuracy(arm['west']):.1f} |" in lines[1]
    gap = np.mean([accuracy(arm[name]) - accuracy(head[name]) for name in head])
    assert f"| {100 * gap:+.1f} [" in lines[1]
    other = {name: replace(found, predicted=1 - found.predicted) for name, found in arm.items()}  # of another seed
    arms = [("head alone", [head, head]), ("local", [arm, other])]
    two = over_head.table(arms, [0]).splitlines()[3]
    gaps = [np.mean([accuracy(one[name]) - accuracy(head[name]) for name in head]) for one in (arm, other)]
    assert f"| {100 * np.mean(gaps):+.1f} [" in two
    assert two.endswith(f"| {100 * gaps[0]:+.1f}, {100 * gaps[1]:+.1f} |")
    below = over_head.table(arms, [0, 1]).splitlines()[2]  # the head beside the row, and nothing beside itself
    assert below.endswith(f"| {-100 * gaps[0]:+.1f}, {-100 * gaps[1]:+.1f} |") and "|  |  | +" in below


def test_a_kept_run_stands_on_the_network_that_its_settings_name(judged, tmp_path):
    """No network lies beside it, and another of the same name is refused."""
    from benchmarks.federation import over_head

    run, _ = judged
    keep_run.keep(run, tmp_path / "kept", elsewhere=False)
    kept = open_run(tmp_path / "kept")
    assert over_head.network_of(kept).spec.sha256 == run.backbone.spec.sha256
    over_head.alike([kept, kept])
    other = replace(kept, summary={**kept.summary, "backbone_sha256": "0" * 64})
    with pytest.raises(ValueError, match="is not the network"):
        over_head.network_of(other)
    with pytest.raises(ValueError, match="different networks"):
        over_head.alike([kept, other])


def test_runs_on_other_rows_or_networks_are_no_pair(finished):
    from benchmarks.federation import over_head

    run = open_run(finished["local"])
    other = replace(run, settings=replace(run.settings, seed=1))
    with pytest.raises(ValueError, match="differ in seed"):
        over_head.alike([run, other])
    proximal = replace(run, settings=replace(run.settings, method="fedprox"))
    with pytest.raises(ValueError, match="missing: fedprox seed 1"):
        over_head.rows_of([run, other, proximal])
    with pytest.raises(ValueError, match="one is twice"):
        over_head.rows_of([run, run])
    assert list(over_head.rows_of([other, run])[run.settings.method]) == [0, 1]
    with pytest.raises(ValueError, match="a share of labels"):
        over_head.heads_alone([replace(run, settings=replace(run.settings, labels=0.5))])


def test_a_network_of_one_place_is_handed_to_a_centre_of_its_data(train, cached, tmp_path):
    """The centre is judged on its own reported rows, as it came by the one model, and otherwise after it learned; the
    draw is the one that is asked for."""
    data, run, dealt = "lesions:sites=2,images=60,px=36", tmp_path / "run", tmp_path / "one.json"
    assert train("partition", "--data", data, "--scheme", "iid", "--sites", "1", "-o", dealt).code == 0
    words = f"--data {data} --task nevus --backbone cnn:resnet18 --image-px 36 --preset tiny --rounds 1 --epochs 1"
    made = train("run", "finetune", *words.split(), "--partition", dealt, "--select", "last", "--out", run)
    assert made.code == 0, made.err
    asked = "--site site-2 --labels 20 --draws 1 --first-draw 2 --epochs 1 --only federation --way none --way home"
    outcome = CliRunner().invoke(joining_centre.main, [str(run), *asked.split(), "--out", str(tmp_path / "out")])
    assert outcome.exit_code == 0, outcome.output
    files = {file.name: dict(np.load(file)) for file in (tmp_path / "out" / "site-2").iterdir()}
    assert sorted(files) == ["federation-home-20-2.npz", "federation-none-0-0.npz"]
    opened = open_run(run)
    rows = report_rows(reported(opened), "site-2")
    expected = predict_rows(opened.predictor("iid-1"), rows).probabilities
    as_it_came = files["federation-none-0-0.npz"]["probabilities"]
    np.testing.assert_allclose(as_it_came, expected, atol=1e-5)
    assert np.abs(files["federation-home-20-2.npz"]["probabilities"] - expected).max() > 1e-3
