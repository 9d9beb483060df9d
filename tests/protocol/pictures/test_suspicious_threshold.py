"""From which sum suspicious classes ask for a look: chosen, by default, and in any case."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from tests.protocol.pictures.judged_scores import DESCRIBED, ISIC, a_score, rules_for

from edgefl_protocol.pictures.class_info import known_among, suspicious_classes
from edgefl_protocol.pictures.suspicious import DEFAULT_SUSPICIOUS_FROM
from edgefl_protocol.pictures.wording import outcome, tried_words


def test_the_threshold_itself_refers() -> None:
    """docs/reference/scores.md: from the threshold on."""
    info = known_among(ISIC[:2])
    said = [a_score([p, 1 - p], rules_for((True, False)), info=info).refer_reasons for p in (0.25, 0.2499)]
    assert said == [("suspicious_class",), ()]


def test_without_a_chosen_threshold_a_default_one_asks() -> None:
    """docs/decisions/0043: MEL 25.2 % and BCC 21.6 % under a predicted nevus of 28 % are never passed over."""
    flags = suspicious_classes(ISIC, known_among(ISIC))
    nevus = (0.252, 0.28, 0.216, 0.001, 0.25, 0.0005, 0.0005, 0.0)
    score = a_score(nevus, rules_for(flags, start=None), info=known_among(ISIC))
    assert score.predicted == "NV" and score.refer_reasons == ("suspicious_class",)
    assert "47% together, and the rule asks from 10% by default" in outcome(score)
    assert (score.suspicious_from, score.suspicious_rule) == (DEFAULT_SUSPICIOUS_FROM, "default")
    said = [a_score([p, 1 - p], rules_for((True, False), start=None), info=DESCRIBED) for p in (0.1001, 0.0999)]
    assert [one.refer_reasons for one in said] == [("suspicious_class",), ()]
    assert "10.0% is a default" in outcome(said[1])
    assert "just below 10.0% together, asks from 10.0%" in (tried_words(said[1]) or "")


@given(st.floats(0, 1), st.integers(0, 10_000))
def test_a_third_asks_whatever_was_chosen(start, seed) -> None:
    """docs/decisions/0072: "nevus 46 %, melanoma 45 %" passed a threshold of 1.0, which older bundles carry."""
    shares = np.random.default_rng(seed).dirichlet(np.ones(8))
    flags = suspicious_classes(ISIC, known_among(ISIC))
    score = a_score(shares, rules_for(flags, start=start), info=known_among(ISIC))
    if score.suspicious_probability > 1 / 3 + 1e-6:
        assert "suspicious_class" in score.refer_reasons
    assert score.suspicious_from == min(start, 1 / 3)
