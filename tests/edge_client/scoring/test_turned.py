"""A picture that no rule refers is scored turned, too: what the network says of it then may refer it."""

import numpy as np
import pytest

from edgefl_client import Scorer
from edgefl_client.doctor.measure import scoring
from edgefl_client.scoring import network
from edgefl_client.scoring.network import ScoreError
from edgefl_protocol.pictures.class_info import known_among
from edgefl_protocol.pictures.preprocess import TaughtPictures


def watched(scorer: Scorer, monkeypatch, asks):
    """Let the network answer NV, but MEL where `asks` says so of an input (S, S, 3); note the inputs of each run."""
    real, runs = scorer.network.run, []

    def run(pixels, **given):
        runs.append(len(pixels))
        found = real(pixels, **given)
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


def test_as_it_is_none_is_turned(lab, make_bundle, monkeypatch):
    """For who wants the network's figures alone: a contribution, and a time of one run."""
    scorer = Scorer(make_bundle(refer_above=None, info=known_among(lab.CLASSES)), threads=1)
    runs = watched(scorer, monkeypatch, lambda one: False)
    (score,) = scorer.score_batch([lab.photo()], as_it_is=True)
    assert runs == [1] and not score.refer and "unsteady" not in score.rules_tried


def test_turns_of_a_photograph_are_compressed_as_the_taught_pictures_were(lab, make_bundle):
    """The blocks of a JPEG do not turn with the picture: the turned inputs are those of the turned photograph."""
    taught = TaughtPictures(side=lab.SIZE // 2, jpeg_quality=60)
    scorer = Scorer(make_bundle(info=known_among(lab.CLASSES), taught=taught), threads=1)
    photo = lab.photo(100, 80) // 2 + np.random.default_rng(0).integers(0, 90, (80, 100, 3), np.uint8)
    upright = scorer.prepare(photo)
    for quarter, found in enumerate((upright.pixels, *upright.turned)):
        turned = scorer.prepare(np.ascontiguousarray(np.rot90(photo, quarter)))
        np.testing.assert_array_equal(found, turned.pixels)


def test_a_turned_run_without_finite_numbers_says_so(lab, make_bundle, monkeypatch):
    scorer = Scorer(make_bundle(refer_above=None, info=known_among(lab.CLASSES)), threads=1)
    watched(scorer, monkeypatch, lambda one: False)
    run, graphs = scorer.network.run, []

    def graph(*given):
        graphs.append(given)
        return {name: np.full_like(value, np.nan if len(graphs) > 1 else 0.5) for name, value in real(*given).items()}

    real = network.run_graph
    monkeypatch.setattr(network, "run_graph", graph)
    monkeypatch.setattr(scorer.network, "run", run)
    with pytest.raises(ScoreError, match="not finite for this picture, turned"):
        scorer.score(lab.photo())


def test_doctor_times_one_run_of_the_network(lab, make_bundle, monkeypatch):
    """docs/reference/doctor.md: how long the network takes, whether or not the drawn picture would pass."""
    scorer = Scorer(make_bundle(refer_above=None, info=known_among(lab.CLASSES)), threads=1)
    runs = watched(scorer, monkeypatch, lambda one: False)
    scoring(scorer).drawn(3)
    assert runs == [3]


def test_a_picture_that_the_gate_refers_is_not_turned(lab, make_bundle):
    """It is referred in any case, so neither a resize nor a run is spent on its turns."""
    scorer = Scorer(make_bundle(refer_above=None, info=known_among(lab.CLASSES)), threads=1)
    dark = scorer.prepare(lab.photo(colour=(4, 3, 3)))
    assert dark.judged.faults and dark.turned == ()
    assert scorer.score_batch([dark])[0].refer
    assert len(scorer.prepare(lab.photo()).turned) == 3 and scorer.prepare(lab.photo(), as_it_is=True).turned == ()
