"""What a card says of its model: never better than its own intervals, and never without the number of pictures.

Source: docs/reference/scores.md, "How good the model is"; a figure clears chance where the lower end of its interval
lies above what guessing reaches, 1/K for balanced accuracy over K tested classes and 1/2 for AUROC.
"""

from dataclasses import replace

import pytest

from edgefl_protocol.bundle.card_words import (
    at_chance_sentence,
    better_than_chance,
    card_lines,
    quality_lines,
    weaknesses,
)
from edgefl_protocol.bundle.figures import images_of_sites, learned_from, learned_from_federation
from edgefl_protocol.bundle.model_card import Card, Labels, referral_rules, rule_tried
from edgefl_protocol.bundle.question_table import QuestionTable
from edgefl_protocol.pictures.class_info import ClassInfo, known_among
from edgefl_protocol.pictures.suspicious import Suspicion, TriedRule
from edgefl_protocol.rules.questions import Questions
from edgefl_protocol.strict_json import parse_json, write_json

BAD = {
    "n_test": 17, "classes_tested": 2, "balanced_accuracy": 0.496, "balanced_accuracy_interval": [0.21, 0.75],
    "auroc": 0.489, "auroc_interval": [0.29, 0.87],
}  # fmt: skip
GOOD = BAD | {
    "balanced_accuracy": 0.93, "balanced_accuracy_interval": [0.85, 1], "auroc": 0.99, "auroc_interval": [0.98, 1],
}  # fmt: skip
LABELS = Labels(("MEL", "NV"), (True, True), known_among(("MEL", "NV")))
CHOSEN = Suspicion(threshold=0.2, sensitivity=0.96, specificity=0.5, suspicious=25, benign=40, statement="by a test")
CARD = Card(
    intended_use="tests", method="fedevprompt", site="msk", sites={"msk": 10}, metrics={"site": GOOD}, temperature=1.0,
    refer_above=0.6, backbone="none", licence_note="none", suspicion=CHOSEN,
)  # fmt: skip


def test_a_model_on_a_network_that_nobody_trained_says_so_first():
    """docs/design.md 7: `untrained` of card.json, which stands in a card where it is true alone."""
    card = replace(CARD, untrained=True)
    assert Card.from_bytes(card.to_bytes()) == card and b"untrained" not in CARD.to_bytes()
    told = "The network below this model was never trained: this trial shows the steps, not what a model can do."
    assert weaknesses(card, LABELS)[0] == told and told in card_lines(card, LABELS)
    table = QuestionTable(Questions(("a",), 4), None)
    assert weaknesses(card, LABELS, table)[0] == told and told not in weaknesses(CARD, LABELS, table)
    for wrong in (1, "yes", None):
        with pytest.raises(ValueError, match="untrained must be true or false"):
            Card.from_bytes(write_json(parse_json(card.to_bytes()) | {"untrained": wrong}))


@pytest.mark.parametrize(
    ("site", "rounds", "told"),
    [("msk", 2, ("msk",)), ("msk", None, ("msk",)), ("msk", 0, ("bcn",)), (None, None, ("bcn", "msk"))],
)
def test_a_model_learned_from_its_site_or_from_those_that_took_part(site, rounds, told):
    """Of a site that took part in no round the card says that nothing was learned from its pictures."""
    part = {} if rounds is None else {"took_part": {"rounds": rounds, "of": 5}}
    card = replace(CARD, site=site, sites={"bcn": 7, "msk": 10, "none": 0}, metrics={"site": GOOD | part})
    assert learned_from(card) == told


@pytest.mark.parametrize(
    ("figures", "expected"),
    [
        (GOOD, True), (BAD, False), ({}, None),
        (GOOD | {"auroc_interval": [0.5, 1]}, False),  # 0.5 is chance
        (GOOD | {"auroc_interval": [0.501, 1]}, True),
        (GOOD | {"balanced_accuracy_interval": [0.49, 1]}, False),
        (GOOD | {"classes_tested": 8, "balanced_accuracy_interval": [0.13, 1]}, True),  # 1/8
        (GOOD | {"classes_tested": 8, "balanced_accuracy_interval": [0.12, 1]}, False),
        (GOOD | {"auroc_interval": None}, None), (GOOD | {"auroc_interval": None, "auroc": 0.5}, False),
        (GOOD | {"balanced_accuracy": 1.0, "balanced_accuracy_interval": [1.0, 1.0]}, None),  # draws never vary
        (GOOD | {"auroc": 1.0, "auroc_interval": [1.0, 1.0]}, None),
        (GOOD | {"balanced_accuracy": 0.0, "balanced_accuracy_interval": [0.0, 0.0]}, False),
        (GOOD | {"auroc": None}, None), (GOOD | {"classes_tested": "many"}, None),
        ({"balanced_accuracy": "high", "auroc": [1], "n_test": {}}, None),
    ],
)  # fmt: skip
def test_better_than_chance_is_what_the_lower_ends_say(figures, expected):
    assert better_than_chance(figures) is expected
    assert (at_chance_sentence(figures, "msk") is not None) is (expected is False)


@pytest.mark.parametrize(
    ("accuracy", "auroc", "told"),
    [
        (0.0, 0.4, "balanced accuracy 0.000 (no interval: all are wrong, chance 0.500), AUROC 0.400 (no interval"),
        (1.0, 1.0, "balanced accuracy 1.000 (no interval: all are right, chance 0.500), AUROC 1.000 (no interval"),
        (
            0.5,
            0.5,
            "balanced accuracy 0.500 (no interval: all draws give the same, chance 0.500), AUROC 0.500 (no inter",
        ),
    ],
)
def test_an_interval_without_width_is_none(accuracy, auroc, told):
    """docs/methods.md 8.4: draws that never vary say nothing; "0.000 (95% interval 0.000 to 0.000)" claims certainty.

    An AUROC of 1 is no share of right answers. A model with every picture right is neither called better than chance
    nor the contrary.
    """
    flat = {"balanced_accuracy": accuracy, "balanced_accuracy_interval": [accuracy, accuracy]}
    figures = {"n_test": 9, "classes_tested": 2, **flat, "auroc": auroc, "auroc_interval": [auroc, auroc]}
    right = quality_lines(replace(CARD, metrics={"site": figures}), LABELS)[0]
    assert told in right and "95% interval" not in right
    assert f"AUROC {auroc:.3f} (no interval: all draws give the same, chance 0.500)" in right
    said = at_chance_sentence(figures, "msk")
    assert (said is None) is (accuracy == 1) and (said is None or told in said)


def test_the_two_lines_name_figures_interval_chance_pictures_and_site():
    right, suspicious = quality_lines(replace(CARD, metrics={"site": BAD}), LABELS)
    for words in ("balanced accuracy 0.496 (95% interval 0.210 to 0.750, chance 0.500)", "AUROC 0.489", "17 pictures"):
        assert words in right
    assert "site msk" in right
    assert "a look at 24 of 25 pictures (sensitivity 96.0%) of " in suspicious and "20.0% together" in suspicious
    assert "so that at least 95% of the site's tune pictures of them do; expect fewer of other pictures" in suspicious
    assert "for none at 20 of 40 pictures (specificity 50.0%) of benign classes" in suspicious
    assert "states neither" in quality_lines(replace(CARD, metrics={}), LABELS)[0]
    without = quality_lines(replace(CARD, suspicion=replace(CHOSEN, threshold=None, suspicious=3)), LABELS)[1]
    assert "expect fewer" not in without, "nothing was chosen on them"
    assert "no threshold was chosen, for there were 3 pictures" in without and "10% together" in without
    missed = replace(CHOSEN, threshold=None, suspicious=8, sensitivity=0.0)
    told = quality_lines(replace(CARD, suspicion=missed), LABELS)[1]
    assert "this rule asks for a look at 0 of 8 pictures (sensitivity 0.0%) of " in told


def test_an_older_bundles_threshold_is_told_as_the_third_that_is_in_force():
    """docs/decisions/0072: a device asks from a third in any case, which refers no fewer than what was chosen."""
    older = replace(CARD, suspicion=replace(CHOSEN, threshold=0.9))
    said = quality_lines(older, LABELS)[1]
    assert referral_rules(LABELS, older).suspicious_in_force == pytest.approx(1 / 3)
    assert said.startswith("suspicious classes: they ask for a look from 33.3% together, for no threshold in force is")
    assert "The card states 90.0%, chosen" in said and "and figures of that one. From 33.3% no fewer pictures" in said
    assert "the card's threshold asks for a look at 24 of 25 pictures (sensitivity 96.0%)" in said
    assert "this rule" not in said and "from 90.0%" not in said
    assert all(len(sentence.split()) <= 45 for sentence in said.split(". "))


def test_what_the_rule_did_where_nothing_was_chosen_is_told_beside_it():
    """On the rows that chose it the rule reaches what was aimed at; a user took 96 % for what to expect."""
    counted = {"pictures": 50, "passed": 8, "benign_passed": 30}
    card = replace(CARD, metrics={"site": GOOD, "suspicious_reported": counted})
    suspicious = quality_lines(card, LABELS)[1]
    assert "on which nothing was chosen, it asks for a look at 42 of 50 (84.0%) of these classes" in suspicious
    assert suspicious.endswith("and passes 30 of benign classes")
    assert rule_tried(card) == TriedRule(pictures=50, passed=8, benign_passed=30)
    assert referral_rules(LABELS, card).suspicious_tried == TriedRule(pictures=50, passed=8, benign_passed=30)
    assert rule_tried(CARD) == CHOSEN.tried, "of an older bundle the pictures that chose it"
    assert "nothing was chosen" not in quality_lines(CARD, LABELS)[1]
    alone = replace(card, metrics={"suspicious_reported": {**counted, "benign_passed": None}})
    assert quality_lines(alone, LABELS)[1].endswith("of these classes")


@pytest.mark.parametrize(
    "change",
    [{"pictures": 0}, {"passed": 51}, {"passed": -1}, {"passed": None}, {"benign_passed": "30"},
     {"benign_passed": True}, {"more": 1}],
)  # fmt: skip
def test_other_counts_of_a_rule_are_refused(change):
    told = {"pictures": 50, "passed": 8, "benign_passed": 30, **change}
    with pytest.raises(ValueError, match="rule for suspicious classes"):
        rule_tried(replace(CARD, metrics={"suspicious_reported": told}))


@pytest.mark.parametrize(
    ("classes", "words"),
    [
        (("MEL", "NV", "AK"), "of MEL and AK (malignant or premalignant), and asks"),
        (("nevus", "other"), "of other (whether it is benign is not known), and asks"),  # holds benign lesions too
        (("NV", "wart", "other"), "of wart and other (whether they are benign is not known), and asks"),
        (("MEL", "wart"), "of MEL (malignant or premalignant) and of wart (whether it is benign is not known)"),
        (tuple(map(str, range(30))), "of 0, 1, 2, 3, 4, 5, 6, 7 and 22 more (whether they are"),
    ],
)
def test_sensitivity_names_the_classes_it_counts(classes, words):
    """A class that is not known to be benign is no cancer: what was found of it is not called so."""
    labels = Labels(classes, (True,) * len(classes), known_among(classes))
    assert words in quality_lines(CARD, labels)[1]


@pytest.mark.parametrize(
    ("part", "told"),
    [
        ({"rounds": 0, "of": 3}, "The site msk took part in none of 3 rounds, so this model has learned nothing from"),
        ({"rounds": 0, "of": "3"}, "The site msk took part in none of the rounds, so"),
        ({"rounds": 1, "of": 3}, None), ({"rounds": "0"}, None), ({"rounds": False}, None), (None, None), ([], None),
    ],
)  # fmt: skip
def test_a_site_that_took_part_in_no_round_is_told(part, told):
    """Export asks for --took-no-part; whoever scores with the model was told nothing."""
    card = replace(CARD, metrics={"site": GOOD | {"took_part": part}})
    said = [one for one in weaknesses(card, LABELS) if "took part" in one]
    assert [one.startswith(told) for one in said] == ([True] if told else [])
    assert [one for one in card_lines(card, LABELS) if "took part" in one] == said


EIGHT = Labels(tuple("ABCDEFGH"), (True,) * 8, known_among(()))
SEVEN = GOOD | {"classes_tested": 7, "n_test": 367}


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({}, "7 of 8 classes had pictures there"),
        ({"recall": [0.5] * 3 + [None] + [0.5] * 4}, "7 of 8 classes had pictures there, D had none"),
        ({"recall": [0.5] * 8}, "7 of 8 classes had pictures there"),  # it contradicts itself: none is named
        ({"recall": [None]}, "7 of 8 classes had pictures there"),
        ({"classes_tested": 8}, "on 367 pictures of the site msk"),
        ({"classes_tested": "7"}, "on 367 pictures of the site msk"),
    ],
)
def test_classes_without_pictures_are_told(more, words):
    """A figure over seven classes says nothing of the eighth."""
    right = quality_lines(replace(CARD, metrics={"site": SEVEN | more}), EIGHT)[0]
    assert right.endswith(words)


@pytest.mark.parametrize(("accuracy", "expected"), [(0.414, True), (0.5, False), (0.9, False), (None, False)])
def test_most_answers_wrong_is_a_weakness_of_a_model_better_than_chance(accuracy, expected):
    said = weaknesses(replace(CARD, metrics={"site": SEVEN | {"accuracy": accuracy}}), EIGHT)
    assert any("More than half of this model's answers were wrong: accuracy 0.414" in one for one in said) is expected
    assert all("7 of 8 classes had pictures there" in one for one in said)
    at_chance = weaknesses(replace(CARD, metrics={"site": BAD | {"accuracy": 0.3}}), LABELS)
    assert len(at_chance) == 1 and "not found better than chance" in at_chance[0]  # the harder word is enough


@pytest.mark.parametrize(
    ("shown", "gap", "interval", "words"),
    [
        (0.44, -0.25, [-0.29, -0.21], "too low: the class that it names has 44% on average and is right in 69%"),
        (0.89, 0.2, [0.0501, 0.3], "too high: the class that it names has 89% on average and is right in 69%"),
        (0.89, 0.2, [0.05, 0.3], None), (0.5, -0.1, [-0.2, -0.05], None), (0.5, 0.0, [-0.3, 0.3], None),
        (0.9, 0.4, None, None), (0.9, None, [0.3, 0.4], None), (None, 0.3, [0.2, 0.4], None),
        (0.9, "much", [0.3, 0.4], None), (1e308, 1e308, [1e307, 1e308], None), (1.5, 0.7, [0.6, 0.8], None),
        (0.4, 0.9, [0.8, 0.95], None), (0.9, -0.3, [0.06, 0.3], None), (0.9, 0.2, [0.4, -0.9], None),
        (float("nan"), 0.2, [0.1, 0.3], None), (0.9, 0.2, [0.1, float("inf")], None),
    ],
)  # fmt: skip
def test_probabilities_that_are_clearly_off_are_told(shown, gap, interval, words):
    """docs/decisions/0075: the whole interval lies more than five points from 0. Contradictions are not told."""
    figures = GOOD | {"shown_probability": shown, "overconfidence": gap, "overconfidence_interval": interval}
    said = weaknesses(replace(CARD, metrics={"site": figures}), LABELS)
    expected = f"This model's probabilities are {words}, on 17 pictures of the site msk."
    assert said == (() if words is None else (expected,))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"metrics": {"site": BAD}}, "not found better than chance: balanced accuracy 0.496"),
        ({"temperature": 9.999}, "temperature 9.999 lies at a bound"),
        ({"temperature": 0.1003}, "temperature 0.100 lies at a bound"),
        ({"suspicion": None}, "No threshold for suspicious classes"),
        ({"suspicion": replace(CHOSEN, threshold=None)}, "No threshold for suspicious classes"),
    ],
)
def test_what_speaks_against_a_model_is_said(change, words):
    assert weaknesses(CARD, LABELS) == ()
    (said,) = weaknesses(replace(CARD, **change), LABELS)
    assert words in said


def test_use_and_status_say_a_missing_threshold_once():
    said = "\n".join(card_lines(replace(CARD, suspicion=None, temperature=9.999), LABELS))
    assert said.count("threshold") == 1 and "temperature 9.999" in said


def test_a_model_of_benign_classes_needs_no_threshold():
    benign = Labels(("NV", "DF"), (True, True), known_among(("NV", "DF")))
    assert weaknesses(replace(CARD, suspicion=None), benign) == ()


def test_suspicious_classes_that_are_never_predicted_speak_against_a_model():
    """Whoever reads "benign" has to know which cancers the model cannot name: by full name, the suspicious ones first.

    A benign class that it never predicts costs nobody a look.
    """
    names = ("DF", "SCC", "odd", "MEL", "NV")
    labels = Labels(names, (False, False, False, True, True), known_among(names))
    assert weaknesses(CARD, labels) == (
        "This model never predicts Squamous cell carcinoma (SCC, malignant) and odd (not known to be benign), nor "
        "Dermatofibroma (DF, benign), whatever a picture shows: no picture that it learned from showed one.",
    )
    assert card_lines(CARD, labels)[-1] == weaknesses(CARD, labels)[0]
    assert weaknesses(CARD, replace(labels, seen=(False, True, True, True, True))) == ()
    (unknown,) = weaknesses(CARD, Labels(("a", "b"), (True, False)))  # a bundle from before class information
    assert "never predicts b (not known to be benign)" in unknown


def test_every_suspicious_class_that_is_never_predicted_is_named():
    """After eight a list stops, and "2 more" may be cancers. Of benign ones the first are enough."""
    asking, benign = [f"c{number}" for number in range(10)], [f"b{number}" for number in range(10)]
    info = known_among(("NV",)) | {name: ClassInfo(name, "Harmless.", "benign") for name in benign}
    labels = Labels((*benign, *asking, "NV"), (False,) * 20 + (True,), info | known_among(asking))
    (told,) = weaknesses(CARD, labels)
    assert all(f"{name} (not known to be benign)" in told for name in asking)
    assert ", nor b0 (benign), b1 (benign)" in told and "b7 (benign) and 2 more, whatever a picture shows" in told


@pytest.mark.parametrize(("figures", "untested"), [
    ({"recall_lesions": [9, 10]}, (True, False)), ({"recall_lesions": [0, 400]}, (True, False)),
    ({"recall_lesions": [12, 12], "recall_interval": [None, [0.1, 0.2]]}, (False, False)),
    ({"recall_interval": [None, [0.1, 0.2]]}, (True, False)), ({"recall_interval": None}, None), ({}, None),
    ({"recall_lesions": [5]}, None), ({"recall_lesions": "ab"}, None),
])  # fmt: skip
def test_a_class_with_fewer_than_ten_test_lesions_is_hardly_tested(figures, untested):
    """docs/methods.md 8.4: below ten lesions of a class its recall has no interval. A card that says nothing asks
    nothing."""
    rules = referral_rules(LABELS, replace(CARD, metrics={"site": figures}))
    assert rules.untested == untested
    assert rules.suspicious_tried == CHOSEN.tried and CHOSEN.tried is not None and CHOSEN.tried.passed == 1


def test_a_held_out_site_taught_nothing():
    """Its model came from the others' pictures."""
    assert learned_from(replace(CARD, sites={"bcn": 7, "msk": 0})) == ("bcn",)


@pytest.mark.parametrize(
    ("travels", "told"),
    [
        (["weights", "features"], ("bcn", "msk")),
        (["maps"], ("msk",)),
        ([], ("msk",)),
        ("weights", ("msk",)),
        (None, ("msk",)),
    ],
)
def test_where_weights_travel_every_site_taught_the_model(travels, told):
    """An average of weights is of all who sent some (FedAvg), and a card from before does not say."""
    card = replace(CARD, sites={"bcn": 7, "msk": 10, "none": 0}, metrics={"site": GOOD, "travels": travels})
    assert learned_from(card) == told


def test_a_site_that_took_part_in_no_round_taught_nobody():
    """FedAvg's mean (McMahan et al. 2017, algorithm 1) is over those that took part."""
    part = {"bcn": {"rounds": 2, "of": 2}, "msk": {"rounds": 1, "of": 2}, "late": {"rounds": 0, "of": 2}}
    run = {name: {"n_train": 10, "took_part": one} for name, one in part.items()} | {"old": {"n_train": 3}}
    assert images_of_sites(run) == {"bcn": 10, "msk": 10, "old": 3}  # a run from before had all sites in every round


@pytest.mark.parametrize(
    ("live", "travels", "told"),
    [("skin", ["weights"], "skin"), ("skin", ["maps"], None), ("skin", None, None), (None, ["weights"], None),
     (3, ["weights"], None), ("\x1b[2J", ["weights"], None)],
)  # fmt: skip
def test_a_live_site_names_the_federation_of_those_that_taught_its_model(live, travels, told):
    """Its summary holds itself alone (docs/design.md 5), and an average of weights is of all (FedAvg)."""
    card = replace(CARD, metrics={"site": GOOD, "travels": travels, "live_federation": live})
    assert (learned_from(card), learned_from_federation(card)) == (("msk",), told)


@pytest.mark.parametrize("others", [{"sites": {"msk": 10, "bcn": 7}}, {"sites": {"msk": 10}, "live": "skin"}])
def test_what_other_sites_showed_is_not_denied(others):
    """`seen` of labels.json is of the site's own rows: where weights travel, others may have shown the class."""
    labels = Labels(("MEL", "NV"), (False, True), known_among(("MEL", "NV")))
    metrics = {"site": GOOD, "travels": ["weights"], "live_federation": others.get("live")}
    averaged = replace(CARD, sites=others["sites"], metrics=metrics)
    assert weaknesses(averaged, labels)[0] == (
        "This model never predicts Melanoma (MEL, malignant), whatever a picture shows: no training picture of the "
        "site msk showed one."
    )
    held_out = replace(averaged, sites={"bcn": 7, "msk": 0})
    assert "no training picture of the site msk" in weaknesses(held_out, labels)[0]
    for alone in (CARD, replace(averaged, metrics={**metrics, "travels": ["maps"]}), replace(averaged, site=None)):
        assert "no picture that it learned from showed one" in weaknesses(alone, labels)[0]
    assert "no picture that they learned from" in weaknesses(averaged, labels, learned_here=True)[0]
