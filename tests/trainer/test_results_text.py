"""How a score, and a probe, are told in a line: nothing is named that its own figures contradict."""

import numpy as np
import pytest

from edgefl_protocol.pictures.referral import JudgedPicture, ReferralRules
from edgefl_protocol.pictures.score import ModelInfo, make_score
from edgefl_trainer.commands.results_text import map_lines, score_line, site_lines, summary_text


@pytest.mark.parametrize(
    ("probabilities", "told"),
    [
        ((0.82, 0.18), "p.png: no class named: it looks most like mal, which site east has never seen (mal 0.82, "),
        ((0.18, 0.82), "p.png: rest (mal 0.18, "),
    ],
)
def test_a_class_that_the_site_has_never_seen_is_not_hidden_behind_another(probabilities, told):
    score = make_score(
        {"probabilities": np.array(probabilities, dtype=np.float32)},
        name="p.png",
        classes=("mal", "rest"),
        seen=(False, True),
        rules=ReferralRules(uncertain_above=0.6, dissonance_above=None, suspicious=None, suspicious_from=None),
        picture=JudgedPicture(),
        expired=None,
        model=ModelInfo(id="run/east", sha256="a" * 64, version=0, state_kind="bundle", state_sha256="b" * 64),
        milliseconds=1.0,
        info=None,
    )
    assert score_line(score).startswith(told)
    assert score.to_json()["predicted"] == "rest"


def test_the_threshold_of_a_true_map_is_told():
    """docs/methods.md 1.8: from 0.05 on, for both ways."""
    effect = {"marked": 0.4, "random": 0.1, "kept": 0.1, "kept_random": 0.4}
    one = {
        "hidden": {"mean": effect, "blur": effect}, "advantage": {"value": 0.3, "low": 0.2, "high": 0.4},
        "better_than_chance": True, "in_lesion": None,
    }  # fmt: skip
    found = {"maps": {"share": one}, "shown": {"kind": "share", "shown": True, "why": None}, "pictures": 30}
    text = "\n".join(map_lines({"maps": {"a": found}}))
    assert "at least 5% of the answers more, with mean colour and with blur" in text and "95 % intervals" in text


def test_a_probe_of_a_site_of_one_class_is_told():
    """The constant answer to one class is always right: the mean of 0.6 and 0.4 stands beside that with 1.0."""
    sites = {"a": 0.6, "b": 0.4, "c": 1.0}
    probe = {"cls": {"mean": 2 / 3, "pooled": 0.7, "sites": sites, "one_class": ["c"]}}
    head = {"method": "fedmae", "task": "all", "seed": 0, "seconds": 1.0, "mean_balanced_accuracy": None, "rounds": 2}
    traffic = {"bytes_up_per_round": 1.0, "bytes_down_per_round": 1.0, "state_sha256": "a" * 64}
    text = summary_text({**head, **traffic, "probe": probe})
    assert "balanced accuracy 66.7 % as a mean of sites, 70.0 % over all their rows together" in text
    assert "c: one class only, says nothing; mean of the 2 sites with more than one class 50.0 %" in text
    del probe["cls"]["one_class"]  # a run from before
    assert "one class" not in summary_text({**head, **traffic, "probe": probe})


@pytest.mark.parametrize(("tested", "mark"), [(4, ""), (3, "†"), (1, "*")])
def test_a_site_that_is_judged_on_fewer_classes_is_marked(tested, mark):
    site = {"n_train": 9, "n_test": 9, "balanced_accuracy": 0.5, "classes_tested": tested}
    figures = {f"{name}_balanced_accuracy": 0.5 for name in ("mean", "std", "worst")}
    text = "\n".join(site_lines({"sites": {"a": site}, "reported_rows": "test", "classes": list("wxyz")} | figures))
    assert f"50.0 %{mark}\n" in text
    assert ("† judged on fewer classes than the run has: neither this figure nor the mean" in text) == (mark == "†")


@pytest.mark.parametrize(
    ("figure", "bounds", "told"),
    [
        (0.0, [0.0, 0.0], "0.0 % (no interval: all are wrong)"),
        (1.0, [1.0, 1.0], "100.0 % (no interval: all are right)"),
        (0.5, [0.5, 0.5], "50.0 % (no interval: all draws of its lesions give the same)"),
        (0.5, [0.4, 0.6], "50.0 % (40.0 to 60.0)"),
    ],
)
def test_an_interval_without_width_claims_no_certainty(figure, bounds, told):
    """Of ten wrong answers, "0.0 % (0.0 to 0.0)" reads as a figure that is known for sure (docs/methods.md 8.4)."""
    site = {"n_train": 9, "n_test": 9, "balanced_accuracy": figure, "balanced_accuracy_interval": bounds}
    means = {f"{name}_balanced_accuracy": figure for name in ("mean", "worst")}
    means["mean_balanced_accuracy_interval"] = bounds
    lines = site_lines({"sites": {"a": site}, "reported_rows": "test", "classes": list("wx")} | means)
    assert lines[1].endswith(told) and ("95 % interval" in lines[2]) == (bounds[0] < bounds[1])


@pytest.mark.parametrize(
    ("bounds", "told"),
    [
        (None, "mean 70.0 %, no interval: b has none, worst"),
        ([1.0, 1.0], "mean 70.0 %, no interval: b has none, worst"),
        ([0.9, 1.0], "mean 70.0 %, 95 % interval (60.0 to 80.0), worst"),
    ],
)
def test_a_mean_has_no_interval_where_a_site_has_none(bounds, told):
    """A run from before kept an interval of its mean in which such a site counted as certain (docs/methods.md 8.4)."""
    site = {"n_train": 9, "n_test": 9, "balanced_accuracy": 0.4, "balanced_accuracy_interval": [0.3, 0.6]}
    sites = {"a": site, "b": site | {"balanced_accuracy": 1.0, "balanced_accuracy_interval": bounds}}
    means = {"mean_balanced_accuracy": 0.7, "worst_balanced_accuracy": 0.4}
    means["mean_balanced_accuracy_interval"] = [0.6, 0.8]
    judged = {"sites": sites, "reported_rows": "test", "classes": list("wx")} | means
    assert site_lines(judged)[3].startswith(told)
    sites["b"] |= {"held_out": True}  # in no mean
    assert site_lines(judged)[3].startswith("mean 70.0 %, 95 % interval (60.0 to 80.0), worst")


@pytest.mark.parametrize(
    ("std", "told"), [(0.1, "mean 50.0 % ± 10.0 % (std over sites), worst"), (None, "mean 50.0 %, w")]
)
def test_a_spread_says_what_it_is_over_and_one_site_has_none(std, told):
    """A mean of one site ended in "± undefined"."""
    site = {"balanced_accuracy": 0.5, "n_train": 9, "n_test": 9}
    figures = {"mean_balanced_accuracy": 0.5, "std_balanced_accuracy": std, "worst_balanced_accuracy": 0.5}
    apart = {"sites": 1, **figures}
    lines = site_lines({"sites": {"a": site}, "reported_rows": "val", "held_out": apart, **figures})
    assert lines[2].startswith(told) and lines[3].startswith(f"held-out sites: {told}")


@pytest.mark.parametrize(("low", "told"), [(0.10, True), (0.25, True), (0.26, False)])
def test_a_site_that_is_no_better_than_chance_is_named(low, told):
    """Of four classes an answer that never changes gets one: 25 %."""
    site = {"n_train": 9, "n_test": 40, "classes_tested": 4, "balanced_accuracy": 0.3, "classes_learned": 4}
    sites = {
        "a": site | {"balanced_accuracy_interval": [low, 0.6]},
        "b": site | {"balanced_accuracy_interval": [0.3, 0.6]},
    }
    figures = {"mean_balanced_accuracy": 0.3, "worst_balanced_accuracy": 0.3}
    text = "\n".join(site_lines({"sites": sites, "reported_rows": "val", "classes": list("wxyz"), **figures}))
    assert "worst 30.0 %, chance 25.0 %" in text
    assert ("balanced accuracy not above chance, by its interval: a" in text) == told


def test_a_site_without_an_interval_is_not_named_by_its_interval():
    """Below a figure of "0.0 % (no interval: all are wrong)" the site was named as at chance by its interval."""
    site = {"n_train": 9, "n_test": 9, "classes_tested": 2, "classes_learned": 2}
    bounds = {
        "by": (0.4, [0.3, 0.6]), "wrong": (0.0, [0.0, 0.0]), "few": (0.5, None), "right": (1.0, [1.0, 1.0]),
        "good": (0.9, None),
    }  # fmt: skip
    sites = {
        name: site | {"balanced_accuracy": figure, "balanced_accuracy_interval": pair}
        for name, (figure, pair) in bounds.items()
    }
    figures = {"mean_balanced_accuracy": 0.5, "worst_balanced_accuracy": 0.0}
    lines = site_lines({"sites": sites, "reported_rows": "val", "classes": ["x", "y"], **figures})
    assert [line for line in lines if "not above chance" in line] == [
        "balanced accuracy not above chance, by its interval: by",
        "balanced accuracy not above chance, without an interval: wrong, few",
    ]


def test_chance_stands_beside_the_mean_of_the_same_sites():
    """A site of one class has no chance, and its 100 % lifts the mean over all."""
    site = {"n_train": 9, "n_test": 40, "balanced_accuracy": 0.5, "classes_tested": 2, "classes_learned": 2}
    sites = {"a": site, "b": site | {"balanced_accuracy": 1.0, "classes_tested": 1, "classes_learned": 1}}
    figures = {"mean_balanced_accuracy": 0.75, "worst_balanced_accuracy": 0.5}
    lines = site_lines({"sites": sites, "reported_rows": "val", "classes": ["x", "y"], **figures})
    assert "chance" not in next(line for line in lines if line.startswith("mean"))
    assert next(line for line in lines if line.startswith("*")).endswith("chance 50.0 %")
