"""A photograph of skin has no top: turning it changes no recommendation (docs/methods.md 1.8, rule `unsteady`)."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from tests.protocol.pictures.judged_scores import CALM, ISIC, MODEL, SOUND, rules_for

from edgefl_protocol.pictures.preprocess import turns
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
    assert score.probabilities["MEL"] == np.float32(CALM[0]), "what is told stays that of the picture as it is"
    assert in_brief(score) == "refer: turned by a quarter or a half, the same picture asks for a look"
    assert "Refer to a dermatologist: turned by a quarter" in outcome(score)


def test_a_pass_says_that_the_picture_was_turned():
    score = scored(CALM, [CALM] * 3)
    assert not score.refer and "unsteady" in score.rules_tried and "the same picture turned" in tried_words(score)
    assert "unsteady" not in scored(CALM).rules_tried
    assert scored(SUSPICIOUS, [CALM] * 3).refer_reasons == ("suspicious_class",), "no second reason beside the first"


POINTS = st.tuples(*[st.floats(0.01, 1)] * 3).map(lambda draw: tuple(np.array(draw) / np.sum(draw)))


@given(st.lists(POINTS, min_size=4, max_size=4), st.integers(1, 3))
def test_the_recommendation_does_not_hang_on_which_side_is_up(four, up):
    turned = [*four[up:], *four[:up]]
    assert scored(four[0], four[1:]).refer == scored(turned[0], turned[1:]).refer


def test_turns_are_those_of_pillow():
    inputs = np.random.default_rng(0).integers(0, 256, (2, 5, 5, 3), np.uint8)
    for angle, found in zip((90, 180, 270), turns(inputs), strict=True):
        by_pillow = [np.asarray(Image.fromarray(one).rotate(angle)) for one in inputs]
        np.testing.assert_array_equal(found, by_pillow)
