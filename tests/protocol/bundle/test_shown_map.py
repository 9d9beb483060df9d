"""What a card says of its map: read as written, refused where it contradicts itself, told in a sentence."""

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.protocol.bundle.conftest import code_of

from edgefl_protocol.bundle import load_bundle
from edgefl_protocol.bundle.model_card import Card
from edgefl_protocol.bundle.shown_map import WAYS, Advantage, HidingEffect, ShownMap, how_true
from edgefl_protocol.strict_json import parse_json, write_json

SHARES = st.floats(0, 1)


@given(marked=SHARES, random=SHARES, kept=SHARES, pictures=st.integers(1, 10**6), grid=st.integers(2, 16))
def test_it_is_read_as_it_was_written(marked, random, kept, pictures, grid):
    effect = HidingEffect(marked=marked, random=random, kept=kept, kept_random=random)
    said = ShownMap(
        why="chance", kind="occlusion", cells=grid**2, pictures=pictures, hidden={"mean": effect, "blur": effect},
        advantage=Advantage(value=0.1, low=-0.1, high=0.2),
    )  # fmt: skip
    assert ShownMap.from_json(parse_json(write_json(said.to_json()))) == said
    assert said.passes == grid**2 + 1


WRONG = {
    "an unknown kind": {"kind": "gradient"},
    "an unknown reason": {"why": "late"},
    "shown and why not": {"why": "chance"},
    "other passes": {"passes": 50},
    "too many cells": {"kind": "occlusion", "cells": 289, "passes": 290},
    "cells of no square": {"kind": "occlusion", "cells": 48, "passes": 49},
    "no cells": {"kind": "occlusion"},
    "cells of a map of the graph": {"cells": 49, "passes": 50},
    "no figures": {"hidden": None, "advantage": None},
    "one way of hiding": {"hidden": {"mean": {"marked": 1, "random": 0, "kept": 0, "kept_random": 1}}},
    "a share above 1": {"hidden": {way: {"marked": 2, "random": 0, "kept": 0, "kept_random": 1} for way in WAYS}},
    "an interval around chance": {"advantage": {"value": 0.1, "low": -0.01, "high": 0.2}},
    "not a number": {"advantage": {"value": "high", "low": 0.1, "high": 0.2}},
    "too few keys": {"pictures": ...},
    "one key more": {"colour": "red"},
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_contradicts_itself_is_refused(lab, name):
    """docs/security.md check 29: a card is the strict record, and a map is shown only on figures that bear it."""
    record = {**lab.true_map("rollout").to_json(), **WRONG[name]}
    with pytest.raises(ValueError, match=r"\w"):
        ShownMap.from_json({key: value for key, value in record.items() if value is not ...})


@pytest.mark.parametrize(
    ("shares", "words"),
    [
        ((0.4896, 0.1510), ("changed 47 of 96 answers (49.0%)", "changed 29 of 192 answers (15.1%).")),
        ((0.6875, 0.0), ("changed 66 of 96 answers (68.8%)", "changed none of 192 answers (0.0%).")),
        ((0.36, 0.0052), ("changed 36.0% of the answers", "changed 1 of 192 answers (0.5%).")),
    ],
)
def test_the_sentence_gives_the_figures_of_the_way_with_the_smaller_difference(lab, shares, words):
    effect = HidingEffect(marked=shares[0], random=shares[1], kept=0, kept_random=0)
    said = lab.true_map(
        "rollout", hidden={"mean": HidingEffect(marked=1, random=0, kept=0, kept_random=1), "blur": effect}
    )
    assert all(one in how_true(said) for one in words) and "Measured on 96 pictures" in how_true(said)
    assert "2 times for each picture" in how_true(said)  # a count of answers may not exceed the pictures unexplained
    at_chance = how_true(replace(said, why="chance"))
    assert at_chance.startswith("No map is drawn") and all(one in at_chance for one in words)


@pytest.mark.parametrize("why", ["few_pictures", "no_pictures", "no_map", None])
def test_without_figures_the_sentence_says_why(why):
    said = None if why is None else ShownMap(why=why, kind=None, pictures=12)
    assert how_true(said).startswith("No map is drawn: ") and len(how_true(said)) > 50
    assert ("12 pictures" in how_true(said)) is (why == "few_pictures")
    assert not re.search(r"\{|_", how_true(said))


def test_an_old_card_says_nothing_of_its_map(good, lab):
    """The committed bundle is from before; it loads, and a card that is written again has the bytes it had."""
    card = good.load().card
    assert card.map is None
    assert Card.from_bytes(card.to_bytes()) == card
    assert card.to_bytes() == good.members["card.json"]
    new = replace(card, map=lab.true_map("rollout"))
    assert Card.from_bytes(new.to_bytes()) == new


def test_a_card_may_not_speak_of_a_map_that_the_graph_does_not_give(lab):
    """Step 9 of `load_bundle`: `attention` needs the output `shown`, which this graph lacks."""
    assert code_of(lambda: lab.bundle_bytes(shown=lab.true_map("attention"))) == "wrong_outputs"
    assert code_of(lambda: lab.bundle_bytes(shown=lab.true_map("rollout"), with_map=False)) == "wrong_outputs"
    occlusion = lab.true_map("occlusion", cells=36)
    found = load_bundle(lab.bundle_bytes(shown=occlusion, with_map=False), [lab.SIGNER.public], lab.NOW_MS)
    assert found.card.map == occlusion
