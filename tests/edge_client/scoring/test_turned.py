"""A picture that no rule refers is scored turned, too: what the network says of it then may refer it."""

import numpy as np

from edgefl_client import Scorer
from edgefl_protocol.pictures.class_info import known_among


def watched(scorer: Scorer, monkeypatch, asks):
    """Let the network answer NV, but MEL where `asks` says so of an input (S, S, 3); note the inputs of each run."""
    real, runs = scorer.network.run, []

    def run(pixels):
        runs.append(len(pixels))
        found = real(pixels)
        for row, one in enumerate(pixels):
            found["probabilities"][row] = (0.9, 0.05, 0.05) if asks(one) else (0.02, 0.96, 0.02)
        return found

    monkeypatch.setattr(scorer.network, "run", run)
    return runs


def lit(photo, corner):
    """Make one corner of a photo brighter: 0 to 3, counted against the clock from the upper right one."""
    image = photo.copy()
    half = image.shape[0] // 2
    np.rot90(image, -corner)[:half, half:] += 20
    return image


def test_pictures_that_differ_by_a_turn_get_one_recommendation(lab, make_bundle, monkeypatch):
    """The network asks for a look where the lower left corner is the brightest: of four turns of a photo at one."""
    scorer = Scorer(make_bundle(refer_above=None, info=known_among(lab.CLASSES)), threads=1)
    corner = scorer.network.side_px // 2
    runs = watched(scorer, monkeypatch, lambda one: one[corner:, :corner].mean() > one.mean() + 5)
    photo = lab.photo(40, 40)
    turned = [lit(photo, corner) for corner in range(4)]
    scores = scorer.score_batch([*turned, photo])
    assert [score.refer_reasons for score in scores] == [("unsteady",)] * 2 + [("suspicious_class",), ("unsteady",), ()]
    assert [score.predicted for score in scores] == ["NV", "NV", "MEL", "NV", "NV"]
    assert runs == [5, 4, 4, 4], "the one that is referred as it is needs no turn"
    assert "unsteady" in scores[4].rules_tried and "unsteady" not in scores[2].rules_tried


def test_what_is_referred_as_it_is_costs_one_run(lab, make_bundle, monkeypatch):
    scorer = Scorer(make_bundle(refer_above=None, info=known_among(lab.CLASSES)), threads=1)
    runs = watched(scorer, monkeypatch, lambda one: True)
    assert scorer.score(lab.photo()).refer_reasons == ("suspicious_class",)
    assert runs == [1]
