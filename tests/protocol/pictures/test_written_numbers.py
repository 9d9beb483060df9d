"""How numbers of a score are written: two that are compared never read alike.

Source: docs/reference/scores.md, "Referral".
"""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.protocol.pictures.judged_scores import CALM, DESCRIBED, ISIC, THREE, a_score, rules_for

from edgefl_protocol.pictures.class_info import known_among, suspicious_classes
from edgefl_protocol.pictures.wording import (
    in_brief,
    likely,
    second_words,
    suspicious_words,
    tried_words,
    without_strongest,
)
from edgefl_protocol.pictures.written_numbers import apart


@pytest.mark.parametrize(
    ("value", "limit", "said"),
    [
        (0.474, 0.466, ("0.474", "0.466")), (0.4700001, 0.47, ("just above 0.470", "0.470")),
        (0.4703, 0.4704, ("just below 0.470", "0.470")), (0.2, 0.5, ("0.20", "0.50")),
        (0.2, 0.2, ("0.20", "0.20")),
    ],
)  # fmt: skip
def test_numbers_that_are_compared_are_never_written_alike(value, limit, said) -> None:
    assert apart(value, limit) == said


@pytest.mark.parametrize(
    ("melanoma", "start", "said"),
    [
        (0.2951, 0.2953, "just below 29.5% together, asks from 29.5%"),
        (0.2951, 0.296, "29.5% together, asks from 29.6%"),
        (0.082, 0.124, "8% together, asks from 12%"),
        (0.0004, 0.004, "<0.1% together, asks from 0.4%"), (0.0, 0.1, "0% together, asks from 10%"),
    ],
)  # fmt: skip
def test_a_sum_and_its_threshold_are_never_written_alike(melanoma, start, said) -> None:
    """A melanoma read "29.5% together, asks from 29.5%", and the rule did not ask."""
    score = a_score((melanoma, 1 - melanoma), rules_for((True, False), start=start), info=DESCRIBED)
    assert not score.refer and said in (tried_words(score) or "")


@pytest.mark.parametrize(("shares", "start", "said"), [
    ((0.0997, 0.9002, 0.0001), 0.1, "just below 10.0% together, most probable Melanoma (MEL) just below 10.0%"),
    ((0.08, 0.9, 0.02), 0.10004, "just below 10.0% together, most probable Melanoma (MEL) 8.0%"),
    ((0.12, 0.85, 0.03), 0.1, "15% together, most probable Melanoma (MEL) 12%"),
    ((0.2052, 0.595, 0.1998), 0.208, "41% together, most probable Melanoma (MEL) 21%"),
])  # fmt: skip
def test_a_single_class_below_the_threshold_never_reads_like_it(shares, start, said) -> None:
    """docs/reference/scores.md, "Referral": a number that would read like its threshold is "just below" it.

    Not where the classes together reach it: there a melanoma of 20.5 % read as if it had passed.
    """
    score = a_score(shares, rules_for((True, False, True), start=start), info=DESCRIBED)
    assert score.predicted == "NV" and suspicious_words(score) == f"suspicious classes {said}"
    alone = a_score((0.2499, 0.7501), rules_for((True, False)), info=DESCRIBED)
    assert suspicious_words(alone) == "suspicious class Melanoma (MEL) just below 25.0%"
    predicted = a_score(
        (0.2499, 0.2498, 0.2497, 0.2506), rules_for((True, False, False, True), start=0.2508), info=DESCRIBED
    )
    assert likely(predicted, "AK") == "25.1%" and (suspicious_words(predicted) or "").endswith("keratosis (AK) 25.1%")


def test_one_number_is_written_alike_everywhere() -> None:
    """A picture said 77 % in its headline, 76.8 % two lines below, and a line of text 0.768."""
    score = a_score((0.768, 0.232), rules_for((True, False)), info=DESCRIBED)
    assert likely(score, "MEL") == "77%" and suspicious_words(score) is None  # the headline says it
    score = replace(score, heatmap_fall=0.003)
    assert [likely(score, "MEL"), without_strongest(score), likely(score, "NV")] == ["76.8%", "76.5%", "23.2%"]
    nevus = replace(score, predicted="NV", heatmap_fall=None)
    assert suspicious_words(nevus) == "suspicious class Melanoma (MEL) 77%" and second_words(nevus) is None


def test_the_sum_in_a_sentence_is_told_apart_from_the_threshold() -> None:
    info = known_among(ISIC[:2])
    silent = a_score([0.2499, 0.7501], rules_for((True, False)), info=info)
    assert not silent.refer and "just below 25.0% together, asks from 25.0%" in (tried_words(silent) or "")


def test_first_and_second_class_never_read_alike() -> None:
    """Both read 21%, so nobody could tell by how much the first one leads."""
    shares = (0.2110, 0.2136, 0.2105, 0.3650 / 5, 0.3650 / 5, 0.3650 / 5, 0.3650 / 5, 0.3650 / 5)
    score = a_score(shares, rules_for(suspicious_classes(ISIC, DESCRIBED)), info=DESCRIBED)
    assert [likely(score, name) for name in ("NV", "MEL")] == ["21.4%", "21.1%"]
    assert (suspicious_words(score) or "").endswith("Melanoma (MEL) 21.1%")
    assert likely(a_score(CALM, THREE, info=DESCRIBED), "NV") == "92%"


@given(st.floats(1e-6, 1 - 1e-6))
def test_of_two_probabilities_none_reads_like_the_other_nor_like_none_or_certainty(first) -> None:
    score = replace(
        a_score((0.5, 0.5), rules_for((True, False)), info=DESCRIBED), probabilities={"MEL": first, "NV": 1 - first}
    )
    said = [likely(score, name) for name in ("MEL", "NV")]
    assert abs(first - 0.5) < 0.0006 or said[0] != said[1]  # a tie within a tenth of a point may read like one
    assert not {float(one.strip("%")) for one in said if one[0] not in "<>"} & {0.0, 100.0}


def test_a_line_of_a_pass_says_how_near_the_threshold_it_is():
    """A pass at 16.7 % under a threshold of 17.5 % read like one at 1 %."""
    line = in_brief(a_score([0.167, 0.833], rules_for((True, False), start=0.175), info=known_among(ISIC)))
    assert line.startswith("no rule asks for a look (suspicious classes ask from 18%); that is no all-clear")
