"""A photograph of skin has no top: turning it changes no recommendation (docs/methods.md 1.8, rule `unsteady`)."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from tests.protocol.pictures.judged_scores import CALM, ISIC, MODEL, SOUND, rules_for

from edgefl_protocol.pictures.preprocess import Preprocess, TaughtPictures, prepare, prepare_turned
from edgefl_protocol.pictures.score import make_score
from edgefl_protocol.pictures.wording import in_brief, outcome, tried_words

RULES = rules_for((True, False, True))
SUSPICIOUS = (0.3, 0.65, 0.05)  # names a nevus, and asks from 0.25


def scored(first, others=(), vacuity=0.1):
    outputs = [
        {"probabilities": np.asarray(one, np.float32), "vacuity": np.float32(vacuity)} for one in (first, *others)
    ]
    return make_score(
        outputs[0], name="x", classes=ISIC[:3], seen=[True] * 3, rules=RULES, picture=SOUND, expired=None,
        model=MODEL, milliseconds=1.0, info=None, turned=outputs[1:],
    )  # fmt: skip


def test_a_picture_that_asks_for_a_look_when_turned_asks_as_it_is():
    score = scored(CALM, [CALM, SUSPICIOUS, CALM])
    assert score.refer and score.refer_reasons == ("unsteady",)
    assert score.turned_suspicious_probability == pytest.approx(0.35)
    assert score.probabilities["MEL"] == np.float32(CALM[0]), "what is told stays that of the picture as it is"
    assert in_brief(score).endswith("asks for a look: classes not known to be benign then have 35%")
    assert "Refer to a dermatologist: turned, the same picture" in outcome(score)


def test_a_pass_says_that_the_picture_was_turned():
    score = scored(CALM, [CALM] * 3)
    assert not score.refer and "unsteady" in score.rules_tried and "the same picture turned" in tried_words(score)
    assert score.turned_suspicious_probability is None
    assert "unsteady" not in scored(CALM).rules_tried
    assert scored(SUSPICIOUS, [CALM] * 3).refer_reasons == ("suspicious_class",), "no second reason beside the first"


def test_what_asks_in_a_turn_may_be_another_rule():
    """Nobody is told a share of suspicious classes that asks for nothing."""
    turned = {"probabilities": np.asarray(CALM, np.float32), "vacuity": np.float32(0.9)}
    score = make_score(
        {**turned, "vacuity": np.float32(0.1)}, name="x", classes=ISIC[:3], seen=[True] * 3, rules=RULES, picture=SOUND,
        expired=None, model=MODEL, milliseconds=1.0, info=None, turned=[turned] * 3,
    )  # fmt: skip
    assert score.refer_reasons == ("unsteady",)
    assert in_brief(score) == "refer: turned, the same picture asks for a look"


POINTS = st.tuples(*[st.floats(0.01, 1)] * 3).map(lambda draw: tuple(np.array(draw) / np.sum(draw)))


@given(st.lists(POINTS, min_size=4, max_size=4), st.integers(1, 3))
def test_the_recommendation_does_not_hang_on_which_side_is_up(four, up):
    turned = [*four[up:], *four[:up]]
    assert scored(four[0], four[1:]).refer == scored(turned[0], turned[1:]).refer


TAUGHT = (None, TaughtPictures(side=40), TaughtPictures(side=40, jpeg_quality=75), TaughtPictures(side=300))


@given(st.integers(1, 130), st.integers(1, 130), st.sampled_from(["squash", "crop"]), st.sampled_from(TAUGHT),
       st.sampled_from(["none", "shades_of_grey_6"]), st.integers(0, 99))  # fmt: skip
def test_inputs_are_those_of_the_photograph_turned(height, width, fit, taught, colour, seed):
    """To the last bit, so the same four inputs are judged whichever side of a photograph is up."""
    photo = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    preprocess = Preprocess(size=48, fit=fit, taught=taught, colour=colour)
    for quarters, found in enumerate(prepare_turned(photo, preprocess)):
        np.testing.assert_array_equal(found, prepare(np.ascontiguousarray(np.rot90(photo, quarters)), preprocess))


def test_a_turn_goes_against_the_clock():
    image = np.random.default_rng(0).integers(0, 256, (5, 5, 3), np.uint8)
    for angle, found in zip((0, 90, 180, 270), prepare_turned(image, Preprocess(size=5)), strict=True):
        np.testing.assert_array_equal(found, np.asarray(Image.fromarray(image).rotate(angle)))
