"""How much evidence a model has for its answer, in words.

Source: docs/reference/scores.md, "Evidence in words".
"""

import math

import pytest
from tests.protocol.pictures.judged_scores import CALM, DESCRIBED, ISIC, a_score, rules_for

from edgefl_protocol.pictures.class_info import known_among
from edgefl_protocol.pictures.evidence_words import evidence_words
from edgefl_protocol.pictures.wording import in_brief, outcome, tried_words


@pytest.mark.parametrize(
    ("vacuity", "word"), [(0.0, "much"), (0.33, "much"), (0.34, "some"), (0.66, "too little"), (0.9, "too little")]
)
def test_vacuity_in_words_never_contradicts_the_rule(vacuity, word) -> None:
    """With the number behind it; above the rule's threshold (0.6) it is too little by the rule. All evidence is for
    the answer: u = K/(K + e)."""
    given = {"vacuity": vacuity, "evidence": (0, 3 / max(vacuity, 1e-6) - 3, 0), "info": known_among(ISIC)}
    text = evidence_words(a_score(CALM, rules_for((True, False, True)), **given))
    assert (
        f"has {word} evidence for its answer" in text
        and ("not make it right" in text) is (word != "too little")
        and f"Vacuity {vacuity:.2f}" in text
    )
    assert "asks for a look above 0.60" in text and "seen" not in text and "like this" not in text


def worded(*evidence: float, prior=(1.0, 1.0, 1.0), seen=(True, True, True), above: float | None = None) -> str:
    """What is said of MEL, NV and BCC with this evidence: alpha = e + W, S its sum, u = K/S (docs/methods.md 1.3)."""
    alpha = [e + w for e, w in zip(evidence, prior, strict=True)]
    given = {"vacuity": 3 / sum(alpha), "evidence": evidence, "seen": seen, "info": known_among(ISIC)}
    return evidence_words(
        a_score([a / sum(alpha) for a in alpha], rules_for((True, False, True), above=above), **given)
    )


@pytest.mark.parametrize(("named", "word"), [(6.1, "much"), (5.9, "some"), (1.6, "some"), (1.4, "little")])
def test_the_word_is_that_of_the_named_class(named, word) -> None:
    """Much is above twice the prior's weight (6 of three classes), little up to half of it, whatever others hold."""
    assert f"The model has {word} evidence for its answer" in worded(0, named, 0)
    for other in (0.2, named * 0.95):
        assert f"The model has {word} evidence for its answer" in worded(0, named, other)


def test_evidence_for_a_class_that_is_never_predicted_is_none_for_the_answer() -> None:
    """NV was named with evidence of 0.18, BCC had 20, no picture taught BCC, and it read "much evidence for its
    answer"."""
    assert worded(0, 0.18, 20, seen=(True, True, False)) == (
        "The model has little evidence for its answer. It has more for Basal cell carcinoma (BCC), which is never "
        "predicted here. Vacuity 0.13 (0: much evidence in all, 1: none)"
    )


@pytest.mark.parametrize(("other", "said"), [
    (16.0, "It has as much for Basal cell carcinoma (BCC)."),
    (15.84, "It has almost as much for Basal cell carcinoma (BCC)."),
    (14.3, "It has more than half as much for Basal cell carcinoma (BCC)."),
    (7.9, None),
])  # fmt: skip
def test_much_evidence_for_another_class_is_told_beside_it(other, said) -> None:
    """docs/methods.md 1.8: evidence of several classes contradicts itself. Of 16.0 and 15.84 the word was "much"."""
    text = worded(0, 16.0, other)
    much = "The model has much evidence for its answer, which does not make it right."
    assert text.startswith(f"{much} {'Vacuity' if said is None else f'{said} Vacuity'} ")


def test_a_class_that_only_its_prior_names_has_less_evidence_than_another() -> None:
    """Many nevi taught the model: its prior alone puts NV first (docs/methods.md 1.3)."""
    text = worded(1.5, 0.1, 0, prior=(0.1, 2.8, 0.1))
    assert "little evidence for its answer. It has more for Melanoma (MEL). Vacuity" in text


def test_a_rule_that_asks_is_never_softened_by_the_word() -> None:
    """docs/reference/scores.md: too little by its rule, and the other class is told all the same."""
    text = worded(0, 16.0, 15.84, above=0.05)
    assert "has too little evidence for its answer by its rule. It has almost as much for Basal cell" in text


def test_without_any_evidence_no_class_has_more() -> None:
    """At a vacuity of 1 nothing is predicted (docs/reference/scores.md, `predicted`)."""
    too_little = "The model has too little evidence for any answer by its rule. Vacuity 1.00"
    assert worded(0, 0, 0).startswith(too_little) and worded(0, 0, 0, prior=(0.5, 2.1, 0.4)).startswith(too_little)


def test_two_pictures_on_either_side_of_the_threshold_are_told_apart() -> None:
    """Both read "Vacuity 0.47", one referred and one not: a digit or a word tells number and threshold apart."""
    rules = rules_for((True, False, True), above=0.4703)
    found = [a_score(CALM, rules, vacuity=vacuity, info=DESCRIBED) for vacuity in (0.4701, 0.4708)]
    assert [one.refer_reasons for one in found] == [(), ("vacuity",)]
    said = [evidence_words(one) for one in found]
    assert "Vacuity just below 0.470" in said[0] and "above 0.470" in said[0]
    assert "Vacuity 0.471" in said[1] and "above 0.470" in said[1]
    assert found[0].to_json()["vacuity_from"] == 0.4703 and found[0].to_json()["dissonance_from"] is None


def test_a_softmax_model_says_its_uncertainty_and_threshold() -> None:
    text = evidence_words(a_score(CALM, rules_for((True, False, True), above=0.5), vacuity=None, info=DESCRIBED))
    assert (
        "cannot say how much evidence" in text and "alike); the rule asks for a look above 0.46" in text
    )  # 0.5 of ln 3


@pytest.mark.parametrize(("above", "reasons"), [(0.5, ("vacuity",)), (0.9, ())])
def test_without_vacuity_no_reason_speaks_of_evidence(above, reasons) -> None:
    """Entropy tells how uncertain an answer is; a model that cannot count evidence must not be said to have little."""
    score = a_score((0.2, 0.05, 0.75), rules_for((True, False, False), above=above), vacuity=None, info=DESCRIBED)
    assert score.refer_reasons == reasons and "evidence" not in outcome(score)
    said = f"{outcome(score)} {evidence_words(score)}"
    share = -(0.2 * math.log(0.2) + 0.05 * math.log(0.05) + 0.75 * math.log(0.75)) / math.log(3)
    assert said.lower().count("uncertainty") == 1 and f"Uncertainty {share:.2f} (0: none" in said
    assert f"; the rule asks for a look above {above / math.log(3):.2f}" in said
    if reasons:
        assert "its answer is too uncertain" in in_brief(score)
    else:
        assert ", uncertain answer, blur" in (tried_words(score) or "")
    told = score.to_json()
    assert (told["vacuity_from"], told["entropy_from"]) == (None, above)
    assert a_score(CALM, rules_for((True, False, True))).to_json()["entropy_from"] is None
