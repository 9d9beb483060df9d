"""The rule that a suspicious class is never passed over in silence, and what is said of a picture in words.

Source: docs/reference/scores.md, "Referral".
"""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.protocol.pictures.judged_scores import CALM, DESCRIBED, ISIC, MELANOMA, THREE, a_score, rules_for

from edgefl_protocol.pictures.class_info import MALIGNANCIES, ClassInfo, known_among, suspicious_classes
from edgefl_protocol.pictures.evidence_words import evidence_words
from edgefl_protocol.pictures.referral import (
    PICTURE_FAULTS,
    REASON_WORDS,
    JudgedPicture,
    Measures,
    predicted_class,
    refer_reasons,
)
from edgefl_protocol.pictures.wording import (
    in_brief,
    outcome,
    second_words,
    suspicious_words,
    tried_words,
)

shares = st.lists(st.floats(0, 1), min_size=3, max_size=8).filter(lambda found: sum(found) > 0.01)


@given(shares, st.data())
def test_a_predicted_class_that_is_not_benign_is_never_passed_over(found, data) -> None:
    """Issue of a clinician: "Prediction: MEL … No reason to refer" must not be possible, whatever the numbers."""
    probabilities = np.asarray(found, np.float32) / np.float32(sum(found))
    flags = tuple(data.draw(st.booleans()) for _ in found)
    start = data.draw(st.none() | st.floats(0, 1))
    measures = Measures(probabilities=probabilities, vacuity=None, dissonance=None, entropy_nats=0.0)
    seen = data.draw(st.lists(st.booleans(), min_size=len(found), max_size=len(found)).filter(any))
    rules = rules_for(flags, above=None, start=start)
    reasons = refer_reasons(measures, seen, rules, picture=JudgedPicture(), expired=None)
    predicted = predicted_class(measures, seen)
    if predicted is not None and flags[predicted]:
        assert reasons[0] == "suspicious_class"
    every = rules_for(None, above=None, start=start)
    assert "suspicious_class" in refer_reasons(measures, seen, every, picture=JudgedPicture(), expired=None)


@given(shares, st.data())
def test_more_probability_of_a_suspicious_class_never_silences_the_rule(found, data) -> None:
    flags = (True, *(data.draw(st.booleans()) for _ in found[1:]))
    more = [found[0] + data.draw(st.floats(0, 1)), *found[1:]]
    rules, seen, said = rules_for(flags, above=None, start=0.25), [True] * len(found), []
    for shares_of in (found, more):
        probabilities = np.asarray(shares_of, np.float64) / sum(shares_of)
        measures = Measures(
            probabilities=probabilities.astype(np.float32), vacuity=None, dissonance=None, entropy_nats=0.0
        )
        together = float(probabilities[np.asarray(flags)].sum())
        said.append("suspicious_class" in refer_reasons(measures, seen, rules, picture=JudgedPicture(), expired=None))
        if abs(together - 0.25) > 1e-5:  # beyond the rounding of float32
            expected = together >= 0.25 or flags[int(np.argmax(probabilities.astype(np.float32)))]
            assert said[-1] is bool(expected)
    assert said[1] or not said[0] or abs(together - 0.25) <= 1e-5


def test_the_sum_and_the_likeliest_suspicious_class_stand_beside_every_prediction() -> None:
    flags = suspicious_classes(ISIC, known_among(ISIC))
    nevus = (0.252, 0.28, 0.216, 0.001, 0.25, 0.0005, 0.0005, 0.0)
    words = suspicious_words(a_score(nevus, rules_for(flags), info=known_among(ISIC)))
    assert words == "suspicious classes 47% together, most probable Melanoma (MEL) 25%"
    two = a_score((0.01, 0.99), rules_for((True, False)), info=known_among(ISIC))
    assert suspicious_words(two) == "suspicious class Melanoma (MEL) 1%"


def test_a_class_of_benign_lesions_and_cancers_is_not_called_a_finding() -> None:
    """docs/reference/scores.md: `other` mixes both, and "suspicious class Other than a nevus 81%" read as a finding."""
    mixed = {"MEL": ClassInfo("Other than a nevus", "Both are mixed.", "unknown"), "NV": known_among(ISIC)["NV"]}
    words = suspicious_words(a_score((0.19, 0.81), rules_for((True, False)), info=mixed))
    assert words == "not known to be benign: Other than a nevus (MEL) 19%"
    several = {"MEL": mixed["MEL"], "NV": mixed["MEL"], "BCC": known_among(ISIC)["NV"]}
    words = suspicious_words(a_score((0.5, 0.31, 0.19), rules_for((True, True, False)), info=several))
    assert words == "classes not known to be benign 81% together, most probable Other than a nevus (MEL) 50%"


def test_where_nothing_is_predicted_no_sum_of_classes_is_said() -> None:
    """docs/reference/picture-gate.md: what is not skin gets no class, nor a probability of one. Programs still
    read it."""
    score = a_score((0.4, 0.5, 0.1), THREE, info=DESCRIBED, picture=JudgedPicture(faults=("not_skin",)))
    assert score.predicted is None and score.suspicious_probability == pytest.approx(0.5)
    assert suspicious_words(score) is None and "together" not in outcome(score) and "50" not in outcome(score)
    assert "class" not in outcome(score) and "class" not in in_brief(score)


@pytest.mark.parametrize("fault", [one for one in PICTURE_FAULTS if one != "transparent"])
def test_a_fault_of_the_picture_asks_for_a_new_one_first(fault) -> None:
    """A dermatologist reads this: \"Refer to a dermatologist: the picture is blurred\" helps nobody."""
    score = a_score(
        CALM,
        THREE,
        info=DESCRIBED,
        picture=JudgedPicture(faults=(fault,), exposure="dark" if fault == "exposure" else None),
    )
    assert outcome(score).startswith("Take the picture again: it") and "it" in in_brief(score)
    assert in_brief(score).startswith("take the picture again, or refer: it")
    assert "dermatologist: it" not in outcome(score)


GATE = ("exposure",)
SAID = {
    "malignant": (a_score(MELANOMA, THREE, info=DESCRIBED), "the predicted class is malignant"),
    "from the sum": (a_score((0.2, 0.7, 0.1), THREE, info=DESCRIBED), "have 30% together"),
    "old bundle": (a_score(CALM, rules_for(None)), "does not say which of its classes are benign"),
    "too dark": (
        a_score(CALM, THREE, info=DESCRIBED, picture=JudgedPicture(faults=GATE, exposure="dark")),
        "again: it is too dark.",
    ),
    "too bright": (
        a_score(CALM, THREE, info=DESCRIBED, picture=JudgedPicture(faults=GATE, exposure="bright")),
        "again: it is too bright.",
    ),
    "darker": (
        a_score(CALM, THREE, info=DESCRIBED, picture=JudgedPicture(light="darker")),
        "again in other light: it is darker than the pictures that the",
    ),
    "bluer": (
        a_score(CALM, THREE, info=DESCRIBED, picture=JudgedPicture(light="bluer")),
        "again in other light: its light is bluer than that of the pictures",
    ),
    "fault and melanoma": (
        a_score(MELANOMA, THREE, info=DESCRIBED, picture=JudgedPicture(faults=("blur",))),
        "Take the picture again: it is blurred. Refer to a dermatologist: the predicted class is malignant.",
    ),
    "not skin": (
        a_score(MELANOMA, THREE, info=DESCRIBED, picture=JudgedPicture(faults=("not_skin",))),
        "of skin. If you cannot, refer to a dermatologist. A new picture that passes is no all-clear either.",
    ),
    "nobody knows": (a_score(MELANOMA, THREE, info={}), "not known whether the predicted class is benign"),
}


def test_of_what_is_not_skin_every_model_says_the_same() -> None:
    """A landscape: one model found too little evidence besides, which is no finding about a landscape."""
    rules = rules_for((True, False, True), above=0.3)
    found = [
        a_score(MELANOMA, rules, vacuity=u, info=DESCRIBED, picture=JudgedPicture(faults=("not_skin",)))
        for u in (0.1, 0.9, None)
    ]
    assert len({one.refer_reasons for one in found}) > 1
    assert len({outcome(one) for one in found}) == len({in_brief(one) for one in found}) == 1


@pytest.mark.parametrize("case", SAID)
def test_a_reason_says_what_was_found(case) -> None:
    score, words = SAID[case]
    assert score.refer and words in outcome(score)


@pytest.mark.parametrize("above", [0.6, None])
@pytest.mark.parametrize("start", [0.25, None])
@pytest.mark.parametrize("vacuity", [0.1, None])
def test_silence_names_the_rules_that_were_tried(above, start, vacuity) -> None:
    """No sentence says that nothing needs a look; a rule without a threshold is said to be none."""
    rules = rules_for((True, False, True), above=above, start=start)
    score = a_score(CALM, rules, vacuity=vacuity, info=known_among(ISIC))
    text = outcome(score)
    assert not score.refer and text.startswith("No rule asks for a look. That is no all-clear. ")
    names = tried_words(score) or ""
    assert names.count(",") == len(score.rules_tried) - 1 + names.count("together, asks")
    assert ("No rule says when" in text) is (above is None)
    assert ("is a default" in text) is (start is None)
    for forbidden in ("no reason", "nothing", "safe", "healthy", "not need", "harmless"):
        assert forbidden not in text.lower()


def test_rules_that_were_tried_are_those_with_a_threshold() -> None:
    score = a_score(CALM, rules_for((True, False, True), above=None), info=known_among(ISIC))
    assert score.rules_tried == tuple(
        rule
        for rule in REASON_WORDS
        if rule not in {"vacuity", "dissonance", "light", "untested_class", "model_expired", "unsteady"}
    )


@pytest.mark.parametrize(("vacuity", "above", "tried"), [
    (0.5, 0.999, False), (0.5, 1.0, False), (0.5, 0.99, True), (None, float(np.log(3)), False), (None, 1.0, True),
])  # fmt: skip
def test_a_rule_that_cannot_fire_is_none(vacuity, above, tried) -> None:
    """From 0.999 of vacuity nothing is predicted at all, and entropy is ln K at most. "Above 1.00" said a rule."""
    score = a_score(CALM, rules_for((True, False, True), above=above), vacuity=vacuity, info=known_among(ISIC))
    told = score.to_json()
    assert ("vacuity" in score.rules_tried) is tried
    assert (told["vacuity_from"], told["entropy_from"]) == (
        (above if tried and vacuity else None), (above if tried and not vacuity else None)
    )  # fmt: skip
    assert ("asks for a look above" in evidence_words(score)) is tried
    assert ("No rule says when" in outcome(score)) is not tried
    none = a_score((1 / 3,) * 3, rules_for((False, False, False), above=above), vacuity=vacuity and 0.9995)
    assert ("vacuity" in none.refer_reasons) is (tried or vacuity is not None)  # as ever


def test_where_every_class_is_benign_no_rule_for_suspicious_ones_is_said_to_be_tried() -> None:
    score = a_score((0.1, 0.9), rules_for((False, False), start=None), info=known_among(("NV",)))
    assert "suspicious_class" not in score.rules_tried and score.suspicious_from is None
    assert "knows benign classes only" in outcome(score)


def test_a_line_names_the_second_class() -> None:
    """Two benign classes nearly tied, and the line told one alone; the suspicious classes' clause names its own."""
    classes, rules = ("NV", "BKL", "MEL"), rules_for((False, False, True), start=0.5)
    told = known_among(classes)

    def line(*shares: float) -> str | None:
        score = a_score(shares, rules, info=told, classes=classes)
        return second_words(score)

    assert line(0.46, 0.45, 0.09) == "second Benign keratosis (BKL) 45%"
    assert line(0.7, 0.1, 0.2) is None  # `suspicious_words` says Melanoma
    assert second_words(a_score(CALM, rules_for(None))) == "second MEL 4%"


def test_a_class_that_is_more_probable_than_the_predicted_one_is_not_called_second() -> None:
    """docs/reference/scores.md, "Referral": only a class that no picture taught, so that it is never predicted."""
    classes, rules = ("NV", "BKL", "DF"), rules_for((False, False, False))
    given = {"info": known_among(classes), "classes": classes, "seen": [True, True, False]}
    score = a_score((0.2, 0.06, 0.74), rules, **given)
    assert score.predicted == "NV"
    assert second_words(score) == "most probable, but never predicted here: Dermatofibroma (DF) 74%"
    assert second_words(a_score((0.6, 0.06, 0.34), rules, **given)) == "second Dermatofibroma (DF) 34%"


@pytest.mark.parametrize("reason", ["size", "not_skin"])
def test_what_is_not_judged_gets_no_class(reason) -> None:
    score = a_score(MELANOMA, THREE, vacuity=0.9, info=DESCRIBED, picture=JudgedPicture(faults=(reason,)))
    assert score.predicted is None and not score.judged and second_words(score) is None
    assert "malignant" not in outcome(score) and "evidence" not in outcome(score)


def test_a_class_that_was_not_seen_is_named_in_full() -> None:
    """The reason spoke of "a class", and no line told which."""
    score = a_score(MELANOMA, THREE, info=DESCRIBED, seen=(False, True, True))
    assert score.predicted == "NV"
    assert "it looks most like Melanoma (MEL), which the model was not trained on" in outcome(score)
    averaged = replace(score.model, site="a", learned_from=("a", "b"))  # b may have shown it melanomas
    told = outcome(replace(score, model=averaged))
    assert "it looks most like Melanoma (MEL), which no training picture of the site a showed" in told


def test_the_score_tells_programs_the_same() -> None:
    told = a_score((0.8, 0.1, 0.1), rules_for((True, False, True)), info=known_among(ISIC)).to_json()
    assert (told["predicted"], told["predicted_name"], told["malignancy"]) == ("MEL", "Melanoma", "malignant")
    assert told["suspicious_probability"] == pytest.approx(0.9) and told["suspicious_from"] == 0.25
    assert told["exposure"] is None and told["malignancy"] in MALIGNANCIES
    unknown = a_score(CALM, rules_for(None)).to_json()
    assert (unknown["predicted_name"], unknown["malignancy"], unknown["suspicious_probability"]) == (
        "NV",
        "unknown",
        None,
    )


@pytest.mark.parametrize("fault", ["exposure", "not_skin"])
def test_of_light_nothing_is_said_beside_what_spoils_it(fault: str) -> None:
    score = a_score(CALM, THREE, info=DESCRIBED, picture=JudgedPicture(faults=(fault,), light="brighter"))
    assert "light" in score.refer_reasons and "learned from" not in outcome(score)
