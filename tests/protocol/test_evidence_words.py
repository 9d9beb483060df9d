"""How much evidence a model has for its answer, in words.

Source: docs/reference/scores.md, "Evidence in words".
"""

import math

import pytest
from tests.protocol.judged_scores import CALM, DESCRIBED, ISIC, a_score, rules_for

from edgefl_protocol.pictures.class_info import known_among
from edgefl_protocol.pictures.wording import evidence_words, in_brief, outcome, tried_words


@pytest.mark.parametrize(
    ("vacuity", "word"), [(0.0, "much"), (0.33, "much"), (0.34, "some"), (0.66, "too little"), (0.9, "too little")]
)
def test_vacuity_in_words_never_contradicts_the_rule(vacuity, word) -> None:
    """With the number behind it; above the rule's threshold (0.6) it is too little by the rule."""
    text = evidence_words(a_score(CALM, rules_for((True, False, True)), vacuity=vacuity, info=known_among(ISIC)))
    assert (
        f"has {word} evidence for its answer" in text
        and ("not make it right" in text) is (word != "too little")
        and f"Vacuity {vacuity:.2f}" in text
    )
    assert "asks for a look above 0.60" in text and "seen" not in text and "like this" not in text


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
