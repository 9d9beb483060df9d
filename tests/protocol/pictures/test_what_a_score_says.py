"""What a score says of its model: how it was tested, how often a pass was wrong, whose pictures taught it.

Source: docs/reference/scores.md, "Referral".
"""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.protocol.pictures.judged_scores import CALM, DESCRIBED, MELANOMA, MODEL, SOUND, THREE, a_score, rules_for

from edgefl_protocol.bundle import load_bundle
from edgefl_protocol.bundle.model_card import referral_rules
from edgefl_protocol.pictures.class_info import ClassInfo
from edgefl_protocol.pictures.fault_words import faults_in_words
from edgefl_protocol.pictures.light import LightRange
from edgefl_protocol.pictures.referral import JudgedPicture
from edgefl_protocol.pictures.score import make_score
from edgefl_protocol.pictures.suspicious import Suspicion, TriedRule
from edgefl_protocol.pictures.wording import in_brief, learned_where, outcome, suspicious_words, tried_words


def test_of_light_a_new_picture_by_the_same_camera_is_not_all_that_is_advised() -> None:
    """Another camera's pictures are all in its light: whoever took one again saw the same sentence again."""
    alone = a_score(CALM, THREE, info=DESCRIBED, picture=JudgedPicture(light="darker"))
    assert "If all pictures of your camera are like this, another camera or lamp helps" in outcome(alone)
    assert in_brief(alone).startswith("take the picture again in other light, or refer: it is darker")
    blurred = a_score(CALM, THREE, info=DESCRIBED, picture=JudgedPicture(faults=("blur",)))
    assert "camera" not in outcome(blurred) and "other light" not in outcome(blurred)
    small = a_score(CALM, THREE, info=DESCRIBED, picture=JudgedPicture(light="darker", faults=("size",)))
    assert "Take the picture again: it " in outcome(small) and "pixels than the model reads; it is " in outcome(small)
    corners = a_score(CALM, THREE, info=DESCRIBED, picture=JudgedPicture(light="darker in its corners"))
    assert outcome(corners).startswith("Take the picture again with even light: its corners are darker")


UNTESTED = replace(rules_for((True, False, False)), untested=(True, False, True))


@pytest.mark.parametrize(("shares", "reasons"), [
    ((0.01, 0.9, 0.09), ()), ((0.01, 0.09, 0.9), ("untested_class",)),
    ((0.9, 0.09, 0.01), ("suspicious_class", "untested_class")),
])  # fmt: skip
def test_a_class_that_hardly_a_test_picture_showed_asks_for_a_look(shares, reasons) -> None:
    """Its centre had no `val` picture of a vascular lesion, and a model named one with 90 %: benign, so it passed."""
    score = a_score(shares, UNTESTED, info=DESCRIBED)
    assert score.refer_reasons == reasons and "untested_class" in score.rules_tried
    told = "too few test pictures tell how well the model knows" in outcome(score)
    assert told is bool(reasons) and "hardly tested on" not in (outcome(score) if reasons else "")
    silent = a_score(shares, rules_for((True, False, False)), info=DESCRIBED)
    assert "untested_class" not in (*silent.rules_tried, *silent.refer_reasons)
    assert silent.refer or "No rule asks about classes that it was hardly tested on." in outcome(silent)
    none = a_score(shares, UNTESTED, info=DESCRIBED, picture=JudgedPicture(faults=("not_skin",)))
    assert "untested_class" not in none.refer_reasons  # nothing is named


def test_beside_a_pass_stands_how_many_suspicious_pictures_passed() -> None:
    """docs/reference/scores.md: of 92 suspicious pictures four passed, and 26 of 131 benign: 4 of 30 that passed. Both
    are told: "of 30 pictures that passed, 4" stood alike beside 5 suspicious pictures tried and beside 500."""
    chosen = Suspicion(
        threshold=0.25, sensitivity=88 / 92, specificity=26 / 131, suspicious=92, benign=131, statement="as chosen"
    )
    rules = replace(THREE, suspicious_tried=chosen.tried)
    first = "f 92 pictures of malignant classes, kept from learning, 4 passed the rule for suspicious classes"
    then = "f 30 pictures that passed in all, 4 were of these classes"
    passing = a_score(CALM, rules, info=DESCRIBED)
    assert f" O{first}. O{then}." in outcome(passing)
    assert f"; that is no all-clear: o{first}; o{then}; " in in_brief(passing)
    assert passing.to_json()["suspicious_tried"] == {"pictures": 92, "passed": 4, "benign_passed": 26}
    learned = replace(passing, model=replace(MODEL, state_kind="personal"))
    assert "kept from learning, before this device learned, 4 passed the rule for suspicious" in outcome(learned)
    one = a_score(
        CALM, replace(rules, suspicious_tried=TriedRule(pictures=50, passed=1, benign_passed=0)), info=DESCRIBED
    )
    assert "classes. Of 1 picture that passed in all, 1 was of these classes." in outcome(one)
    alone = replace(chosen, benign=0, specificity=None).tried
    told = outcome(a_score(CALM, replace(THREE, suspicious_tried=alone), info=DESCRIBED))
    assert f"O{first}. " in told and "in all" not in told
    referred = a_score(MELANOMA, rules, info=DESCRIBED)
    assert "92" not in outcome(referred) and "92" not in in_brief(referred)
    assert replace(chosen, suspicious=0, sensitivity=None).tried is None
    assert "kept from learning" not in outcome(a_score(CALM, THREE, info=DESCRIBED))


@pytest.mark.parametrize("benign", [0, None])
def test_where_no_tried_picture_passed_nobody_knows_what_a_pass_is_worth(benign: int | None) -> None:
    """ "Of 0 pictures that passed, 0 were of the class Melanoma" read like a rule without an error."""
    tried = TriedRule(pictures=40, passed=0, benign_passed=benign)
    rules = replace(rules_for((True, False)), suspicious_tried=tried)
    told = outcome(a_score((0.05, 0.95), rules, info=DESCRIBED))
    assert (
        "Of 40 pictures of the class Melanoma (MEL), kept from learning, 0 passed the rule for suspicious classes. "
        "No tried picture passed, so nobody knows how often a pass is wrong. "
    ) in told and "Of 0" not in told


BARE = replace(rules_for((True, False, True), above=None, start=None), untested=(False,) * 3)


@pytest.mark.parametrize(("rules", "missing"), [
    (BARE, ["No rule says when an uncertain picture asks for a look.",
            "No threshold for suspicious classes could be chosen on pictures: 10% is a default.",
            "No rule compares the light with that of the pictures learned from."]),
    (rules_for((False, False, False), above=0.999), [
            "No rule says when an uncertain picture asks for a look.",
            "No rule compares the light with that of the pictures learned from.",
            "No rule asks about classes that it was hardly tested on.",
            "This model knows benign classes only, so it cannot find a suspicious one."]),
    (replace(BARE, uncertain_above=0.6, suspicious_from=0.25, light=LightRange(brightness=(100.0, 200.0))), []),
])  # fmt: skip
def test_a_pass_says_in_line_and_picture_which_rules_have_no_threshold(rules, missing) -> None:
    """docs/reference/scores.md, "Referral"; the line was silent, and whoever read it missed the same rules."""
    score = a_score((0.04, 0.94, 0.02), rules, info=DESCRIBED)
    assert not score.refer and outcome(score).endswith(" ".join(["was not counted.", *missing]))
    clauses = [f"{one[0].lower()}{one[1:-1]}" for one in missing]
    assert in_brief(score).endswith("; ".join(["suspicious pictures pass was not counted", *clauses]))


def test_a_class_that_may_hold_cancers_is_said_to_beside_a_pass() -> None:
    """ "7 were of the class Other than a nevus" told nobody that cancers were among them."""
    mixed = {"MEL": ClassInfo("Other than a nevus", "Both are mixed.", "unknown"), "NV": DESCRIBED["NV"]}
    tried = TriedRule(pictures=50, passed=7, benign_passed=30)
    score = a_score((0.05, 0.95), replace(rules_for((True, False)), suspicious_tried=tried), info=mixed)
    told = outcome(score)
    assert (
        "Of 50 pictures of the class Other than a nevus (MEL), which may hold cancers, kept from learning, 7 " in told
    )
    assert "Of 37 pictures that passed in all, 7 were of this class." in told


def test_one_result_says_not_known_to_be_benign_once() -> None:
    mixed = {"MEL": ClassInfo("Other than a nevus", "Both are mixed.", "unknown"), "NV": DESCRIBED["NV"]}
    score = a_score((0.3, 0.7), rules_for((True, False)), info=mixed)
    line = f"{suspicious_words(score)}; {in_brief(score)}"
    assert (
        "Other than a nevus (MEL) has 30%, and the rule asks from 25%" in line
        and line.count("not known to be benign") == 1
    )


@pytest.mark.parametrize(("sites", "kind", "whose"), [
    (("rosendahl",), "bundle", "the site rosendahl"), (("a", "b"), "bundle", "the sites a and b"),
    (("a",), "personal", "the site a and of this device"), ((), "bundle", "sites that it does not name"),
])  # fmt: skip
def test_a_score_says_whose_pictures_the_model_learned_from(sites, kind, whose) -> None:
    """Of cancers of another centre 34 of 143 passed, and no result said that no other centre was tested."""
    model = replace(MODEL, learned_from=sites, state_kind=kind)
    said = f"It learned from pictures of {whose}; expect more wrong answers on pictures of another centre or camera."
    assert learned_where(model) == said
    assert replace(a_score(CALM, THREE), model=model).to_json()["learned_from"] == list(sites)


def test_the_other_sites_of_a_federation_are_elsewhere() -> None:
    """A user at b read that the model learned from b's pictures; its rules were set at a, and 12 of 99 melanomas of b
    passed where 3 of 53 of a did."""
    model = replace(MODEL, learned_from=("a", "b", "c"), site="a")
    assert learned_where(model) == (
        "It is the model of the site a, and also learned from pictures of b and c; expect more wrong answers on "
        "pictures of any centre or camera but a's."
    )
    personal = learned_where(replace(model, state_kind="personal"))  # its camera is this device's, not a's
    assert "a, b and c and of this device; expect more wrong answers on pictures of another centre" in personal
    shared = replace(model, learned_from=("b", "c"))
    assert "pictures of the sites b and c; expect more wrong answers on pictures of another" in learned_where(shared)
    assert replace(a_score(CALM, THREE), model=model).to_json()["model"]["site"] == "a"


@pytest.mark.parametrize(("sites", "kind", "whose"), [
    (("a",), "bundle", "the site a and of other sites of the federation skin, which it does not name"),
    ((), "bundle", "other sites of the federation skin, which it does not name"),
    (("a",), "personal", "the site a and of this device and of other sites of the federation skin, which it does not"),
])  # fmt: skip
def test_the_unnamed_sites_of_a_live_federation_are_told_of(sites, kind, whose) -> None:
    """A model of FedAvg said that it learned from its own site's pictures alone."""
    model = replace(MODEL, learned_from=sites, learned_from_federation="skin", state_kind=kind)
    assert f"It learned from pictures of {whose}" in learned_where(model)
    assert replace(a_score(CALM, THREE), model=model).to_json()["learned_from_federation"] == "skin"
    own = learned_where(replace(model, learned_from=("a",), site="a", state_kind="bundle"))
    assert own == (
        "It is the model of the site a, and also learned from pictures of other sites of the federation skin, which it "
        "does not name; expect more wrong answers on pictures of any centre or camera but a's."
    )


def test_what_passed_says_at_which_site() -> None:
    tried = replace(THREE, suspicious_tried=TriedRule(pictures=50, passed=7, benign_passed=23))
    score = replace(a_score(CALM, tried), model=replace(MODEL, site="a"))
    assert "kept from learning at the site a, 7 passed the rule" in outcome(score)


@pytest.mark.parametrize(("faults", "told"), [
    (("blur", "exposure", "not_skin", "dark_corners"), ["it is too dark"]),
    (("size", "exposure"), ["it is too dark", "it has fewer pixels than the model reads"]),
    (("not_skin", "dark_corners"), ["its colours are not those of skin"]),
    (("size", "dark_corners"), ["it has fewer pixels than the model reads", "it has a frame, an even side or dark "
                                "corners, and a model can answer by these"]),
])  # fmt: skip
def test_what_is_a_mere_consequence_of_another_fault_is_not_told(faults, told) -> None:
    """Of a picture that was only darkened four causes were told, three of them wrong; `refer_reasons` keeps all."""
    picture = JudgedPicture(faults=faults, exposure="dark", light="darker")
    score = a_score(CALM, THREE, info=DESCRIBED, picture=picture)
    dim = a_score(CALM, THREE, info=DESCRIBED, picture=JudgedPicture(faults=("blur",), light="darker"))
    assert faults_in_words(dim) == ["it is darker than the pictures that the model learned from"]
    assert faults_in_words(score) == told and set(faults) <= set(score.refer_reasons)


@pytest.mark.parametrize(("exposure", "told"), [
    ("bright", ["more than a tenth of it is transparent and was read as white"]),
    ("dark", ["it is too dark", "more than a tenth of it is transparent and was read as white"]),
])  # fmt: skip
def test_the_white_behind_a_transparent_part_is_not_called_bright_light(exposure, told) -> None:
    """A picture whose upper third was transparent was "too bright"; a dark one is dark all the same."""
    faults = ("exposure", "not_skin", "dark_corners", "transparent")
    picture = JudgedPicture(faults=faults, exposure=exposure, light="brighter")
    score = a_score(CALM, THREE, info=DESCRIBED, picture=picture)
    assert faults_in_words(score) == told and set(faults) <= set(score.refer_reasons)
    dim = JudgedPicture(faults=("not_skin", "transparent"), light="darker")
    assert faults_in_words(a_score(CALM, THREE, info=DESCRIBED, picture=dim)) == [
        "more than a tenth of it is transparent and was read as white",
        "it is darker than the pictures that the model learned from",
    ]  # fmt: skip
    blurred = JudgedPicture(faults=("blur", "exposure", "transparent"), exposure="bright")
    assert faults_in_words(a_score(CALM, THREE, info=DESCRIBED, picture=blurred)) == [
        "it is blurred", "more than a tenth of it is transparent and was read as white",
    ]  # fmt: skip


ROOT = Path(__file__).parents[3]


def test_the_pass_on_the_page_is_what_is_said() -> None:
    """docs/reference/scores.md shows a pass of a model to try: its card, and answers of which one is 94% sure."""
    signer = bytes.fromhex((ROOT / "examples/models/signing.pub").read_text().split()[-1])
    data = (ROOT / "examples/models/eight-diagnoses.edgefl").read_bytes()
    bundle = load_bundle(data, trust=[signer], now_ms=1_796_000_000_000)
    labels, rules = bundle.labels, referral_rules(bundle.labels, bundle.card)
    shares = dict.fromkeys(("AK", "BCC", "MEL", "SCC"), 0.015) | {"NV": 0.94}
    outputs = {"probabilities": np.array([shares.get(name, 0.0) for name in labels.classes], np.float32)}
    score = make_score(
        outputs, name="x", classes=labels.classes, seen=labels.seen, rules=rules, picture=SOUND, expired=None,
        model=replace(MODEL, site=bundle.card.site), milliseconds=1.0, info=labels.info, turned=[outputs] * 3,
    )  # fmt: skip
    page = (ROOT / "docs/reference/scores.md").read_text(encoding="utf-8")
    [shown] = re.findall(r"^```\n(No rule asks for a look\..*?)^```", page, re.M | re.S)
    assert shown.split() == f"{outcome(score)}\n{tried_words(score)}".split()
