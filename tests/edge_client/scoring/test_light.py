"""A photograph in other light than the pictures that the model learned from asks for a look."""

from dataclasses import replace

import numpy as np
import pytest

from edgefl_client import Scorer
from edgefl_client.scoring.personal import PersonalState
from edgefl_protocol.errors import BundleError
from edgefl_protocol.pictures.fault_words import faults_in_words
from edgefl_protocol.pictures.light import LightRange, measure_light
from edgefl_protocol.pictures.wording import outcome

SKIN = (200, 150, 140)


@pytest.fixture(scope="module")
def usual():
    """Nearly the light of `SKIN`."""
    light = measure_light(np.full((8, 8, 3), SKIN, np.uint8))
    return LightRange(**{name: (0.9 * value, 1.1 * value) for name, value in vars(light).items()})


@pytest.mark.parametrize(
    ("colour", "side", "words"),
    [
        (SKIN, None, ""),
        ((140, 105, 98), "darker", "it is darker than the pictures that the model learned from"),
        ((160, 150, 125), "greener", "its light is greener than that of the pictures that the model learned from"),
        ((160, 150, 161), "bluer", "its light is bluer than that of the pictures that the model learned from"),
        ((200, 150, 175), "bluer", "its light is bluer than that of the pictures that the model learned from"),
    ],
)
def test_it_asks_and_says_how_the_light_differs(make_bundle, lab, usual, colour, side, words):
    bundle = make_bundle(metrics={"refer_light_outside": usual.to_json()})
    score = Scorer(bundle, threads=1).score(lab.photo(colour=colour))
    assert "light" in score.rules_tried and ("light" in score.refer_reasons) is (side is not None)
    assert score.light == score.to_json()["light"] == side
    assert (words in "; ".join(faults_in_words(score))) and (
        f"Take the picture again in other light: {words}" in outcome(score)
    ) is bool(words)


@pytest.mark.parametrize(
    ("levels", "side"), [((255, 255), "brighter"), ((250, 250), "brighter"), ((0, 0), "darker"), ((0, 255), "darker")]
)
def test_a_picture_without_a_pixel_to_measure_is_bright_where_most_of_it_is_white(usual, levels, side):
    """What is clipped or unlit is left out: a white picture was called darker. Of lines turn about, half are white."""
    image = np.empty((60, 40, 3), np.uint8)
    image[::2], image[1::2] = levels
    assert replace(usual, corners=None).unlike(measure_light(image)) == side


def test_a_card_without_a_range_asks_about_no_light(plain_bundle, lab):
    score = Scorer(plain_bundle, threads=1).score(lab.photo(colour=(140, 105, 98)))
    assert score.light is None and "light" not in (*score.rules_tried, *score.refer_reasons)


def test_a_range_that_cannot_be_read_is_a_faulty_card(make_bundle):
    with pytest.raises(BundleError, match="brightness must be two numbers") as refused:
        make_bundle(metrics={"refer_light_outside": {"brightness": [200, 100]}})
    assert refused.value.code == "bad_card"


def test_light_is_no_fault_of_the_picture(make_bundle, lab, usual):
    """Such a picture still teaches, and gives maps and features: another camera is what a federation wants to see."""
    scorer = Scorer(make_bundle(metrics={"refer_light_outside": usual.to_json()}), threads=1)
    prepared = scorer.prepare(lab.photo(colour=(140, 105, 98)))
    assert prepared.judged.light == "darker" and "light" not in prepared.judged.faults


def test_what_a_device_learned_from_no_longer_asks(make_bundle, lab, usual):
    bundle = make_bundle(metrics={"refer_light_outside": usual.to_json()})
    own = LightRange(brightness=(90.0, 120.0))
    state = PersonalState(
        bundle_sha256=bundle.sha256,
        weights=bundle.weights,
        seen=(True,) * 3,
        verdict=None,
        images=1,
        round=1,
        light=own,
    )
    photo = lab.photo(colour=(140, 105, 98))
    assert Scorer(bundle, threads=1, personal=state).score(photo).light is None
    assert Scorer(bundle, threads=1, personal=replace(state, light=None)).score(photo).light == "darker"
