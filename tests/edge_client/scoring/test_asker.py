"""Asking a bundle on a device. Oracle: ten lines of numpy (`tests.asking.expected`). Source: docs/decisions/0044."""

import numpy as np
import pytest
from PIL import Image
from tests.asking import ANSWERS, NOW_MS, SIGNER, SIZE, WORDS, ask_bundle, expected
from tests.conftest import photo, true_map

from edgefl_client import Asker, Scorer
from edgefl_client.scoring import asker as asking
from edgefl_client.scoring.network import Network
from edgefl_protocol.bundle import load_bundle
from edgefl_protocol.errors import BundleError, QuestionError

GREY = np.random.default_rng(5).integers(0, 160, (60, 50, 1), np.uint8).repeat(3, axis=2)  # no skin, as a radiograph
DAY_MS = 86_400_000


def loaded(**options):
    return load_bundle(ask_bundle(**options), [SIGNER.public], NOW_MS)


@pytest.mark.parametrize("question", ["Is there a fracture?", "WHICH organ is shown", "fracture, please"])
def test_answers_are_those_of_the_formula(question):
    asker = Asker(loaded(unsure_above=1.6), threads=1)
    prepared = asker.prepare(GREY)
    found = asker.ask_prepared(prepared, question)
    wanted = expected(prepared.pixels, question)
    np.testing.assert_allclose([found.probabilities[name] for name in ANSWERS], wanted, atol=1e-6)
    assert found.answer == ANSWERS[int(wanted.argmax())]
    assert asker.ask(GREY, question).probabilities == found.probabilities


def test_an_unknown_word_names_no_answer_and_leaves_the_figures():
    asker = Asker(loaded(unsure_above=1.6), threads=1)
    found = asker.ask(GREY, "fracture pneumothorax")
    assert (found.answer, found.refuse_reasons) == (None, ("unknown_word",))
    wanted = expected(asker.prepare(GREY).pixels, "fracture pneumothorax")
    np.testing.assert_allclose([found.probabilities[name] for name in ANSWERS], wanted, atol=1e-6)


def test_bytes_pictures_and_pixels_are_answered_alike(lab):
    asker = Asker(loaded(), threads=1)
    found = [asker.ask(one, "which organ?") for one in (GREY, Image.fromarray(GREY), lab.encoded(GREY))]
    assert len({tuple(one.probabilities.items()) for one in found}) == 1


def test_no_rule_about_photographs_of_skin_is_asked(lab):
    """A radiograph is grey, dark and smooth: only rules for any picture are asked (docs/decisions/0046)."""
    asker = Asker(loaded(unsure_above=1.6), threads=1)
    dark = np.full((60, 60, 3), 3, np.uint8)
    assert not asker.ask(dark, "which organ?").refused and not asker.ask(GREY, "which organ?").refused
    small = asker.ask(GREY[: SIZE - 1], "which organ?")
    assert small.refuse_reasons == ("size",)
    assert not asker.ask(GREY[:SIZE, :SIZE], "which organ?").refused


@pytest.mark.parametrize(("width", "refused"), [(180, ()), (181, ("shape",))])
def test_a_strip_gets_no_answer(width, refused):
    """docs/reference/picture-gate.md, `shape`: more than three to one, and the network reads a square."""
    strip = np.resize(GREY, (60, width, 3))
    found = Asker(loaded(unsure_above=1.6), threads=1).ask(strip, "which organ?")
    assert found.refuse_reasons == refused and (found.answer is None) is bool(refused) and "shape" in found.rules_tried


@pytest.mark.parametrize(("opaque", "refused"), [(54, ()), (53, ("transparent",)), (0, ("transparent",))])
def test_a_picture_of_which_much_is_transparent_gets_no_answer(lab, opaque, refused):
    """docs/reference/picture-gate.md, `transparent`: more than a tenth is the white laid under it, of 60 lines six."""
    picture = np.dstack([GREY, np.zeros(GREY.shape[:2], np.uint8)])
    picture[:opaque, :, 3] = 255
    found = Asker(loaded(unsure_above=1.6), threads=1).ask(lab.encoded(picture), "which organ?")
    assert found.refuse_reasons == refused and found.transparent and (found.answer is None) is bool(refused)


def test_a_photograph_of_skin_is_no_radiograph():
    """Its colour is unlike that of the pictures that the model learned from: docs/decisions/0060."""
    usual = {"brightness": [20, 250], "red_by_green": [0.98, 1.02], "blue_by_green": [0.98, 1.02]}
    asker = Asker(loaded(unsure_above=1.6, metrics={"refer_light_outside": usual}), threads=1)
    skin = np.full((60, 50, 3), (200, 150, 140), np.uint8)
    found = asker.ask(skin, "which organ?")
    assert (found.answer, found.refuse_reasons, found.light) == (None, ("light",), "redder")
    grey = asker.ask(GREY, "which organ?")
    assert grey.answer == "lung" and "light" in grey.rules_tried
    said = Asker(loaded(unsure_above=1.6), threads=1).ask(skin, "which organ?")  # a card without a range
    assert said.answer == "lung" and "light" not in said.rules_tried


def test_the_network_is_not_run_where_no_word_is_known(monkeypatch):
    asker = Asker(loaded(), threads=1)

    def runs(*_, **__):
        raise AssertionError("it ran")

    monkeypatch.setattr(Network, "run", runs)
    found = asker.ask(GREY, "pneumothorax?")
    assert found.refuse_reasons == ("no_known_word",) and found.probabilities == {} and found.entropy_nats is None


def test_too_unsure_by_the_cards_threshold():
    sure = Asker(loaded(unsure_above=1.6), threads=1).ask(GREY, "which organ?")
    assert sure.answer == "lung" and sure.entropy_from == 1.6
    unsure = Asker(loaded(unsure_above=sure.entropy_nats - 0.01), threads=1).ask(GREY, "which organ?")
    assert unsure.refuse_reasons == ("unsure",) and unsure.probabilities == sure.probabilities
    never = Asker(loaded(unsure_above=float(np.log(5))), threads=1).ask(GREY, "which organ?")  # of five answers
    assert never.entropy_from is None and never.answer == "lung" and never.confidence > 0.5  # by default
    assert any("No threshold says when it is too unsure" in one for one in never.model.warnings)


def test_an_answer_that_the_site_never_met_is_refused():
    seen = tuple(name != "lung" for name in ANSWERS)
    found = Asker(loaded(seen=seen, unsure_above=1.6), threads=1).ask(GREY, "which organ?")
    assert found.refuse_reasons == ("unseen_answer",) and found.answer is None


def test_an_asker_that_outlives_its_bundle_refuses():
    now = [NOW_MS]
    asker = Asker(loaded(expires_ms=NOW_MS + DAY_MS), threads=1, clock=lambda: now[0])
    assert asker.ask(GREY, "which organ?").answer == "lung" and asker.network.left_ms == 86_400_000
    now[0] += DAY_MS
    assert asker.ask(GREY, "which organ?").refuse_reasons == ("model_expired",)


def test_a_question_that_is_none(lab):
    asker = Asker(loaded(), threads=1)
    for text in ("", "?", "word " * 10_000):
        with pytest.raises(QuestionError):
            asker.ask(GREY, text)


def test_the_two_kinds_of_bundles_refuse_each_other(plain_bundle):
    with pytest.raises(BundleError, match="edgefl ask") as caught:
        Scorer(loaded())
    assert caught.value.code == "other_kind"
    with pytest.raises(BundleError, match="edgefl score") as caught:
        Asker(plain_bundle)
    assert caught.value.code == "other_kind"


@pytest.fixture
def also_level(monkeypatch):
    monkeypatch.setattr(asking, "marks_nothing", lambda *_: False)


@pytest.mark.usefixtures("also_level")
def test_the_map_of_attention_is_that_of_the_graph():
    asker = Asker(loaded(shown=true_map("attention")), threads=1)
    pixels = photo(48, 48, (60, 40, 30))
    pixels[:16, :16] = 250
    prepared = asker.prepare(pixels)
    answer = asker.ask_prepared(prepared, "which organ?")
    found = asker.explain(prepared, answer)
    np.testing.assert_array_equal(found.values, answer.map)
    assert "Measured on 96 questions" in found.sentence and "for each question" in found.sentence


@pytest.mark.usefixtures("also_level")
@pytest.mark.parametrize("with_map", [True, False])
def test_occlusion_asks_the_same_question_of_every_hidden_cell(with_map):
    """By brute force: each cell hidden by hand and asked alone."""
    asker = Asker(loaded(shown=true_map("occlusion", cells=36), with_map=with_map, unsure_above=1.6), threads=1)
    pixels = photo(SIZE, SIZE, (40, 40, 40))
    pixels[4:12, 8:16] = (230, 80, 70)
    prepared = asker.prepare(pixels)
    answer = asker.ask_prepared(prepared, "is there a fracture?")
    assert answer.answer == "yes"  # for which brightness speaks
    found = asker.explain(prepared, answer)
    mean, falls = np.round(prepared.pixels.mean(axis=(0, 1))).astype(np.uint8), []
    for cell in range(36):
        row, column = divmod(cell, 6)
        hidden = prepared.pixels.copy()
        hidden[4 * row : 4 * row + 4, 4 * column : 4 * column + 4] = mean
        falls.append(answer.confidence - expected(hidden, "is there a fracture?")[1])
    assert found.values == pytest.approx(np.array(falls) / max(*falls, 0.01), abs=1e-3)
    assert answer.confidence - found.without == pytest.approx(max(falls), abs=1e-5)


def test_no_map_where_the_bundle_shows_none_or_nothing_is_answered():
    pictures = {}
    for name, options in {"none": {}, "shown": {"shown": true_map("attention")}}.items():
        asker = Asker(loaded(**options), threads=1)
        prepared = asker.prepare(GREY)
        pictures[name] = asker.explain(prepared, asker.ask_prepared(prepared, "pneumothorax?"))
    assert "does not say how true" in pictures["none"].sentence and pictures["none"].values is None
    assert "no answer that it could explain" in pictures["shown"].sentence and pictures["shown"].values is None


def test_the_question_to_try_a_model_with_is_one_that_it_was_taught():
    taught = tuple(word == "organ" for word in WORDS)
    asker = Asker(loaded(unsure_above=None, taught=taught), threads=1)
    assert asker.a_question == "organ" and asker.ask(GREY, asker.a_question).answer == "lung"
    nothing = Asker(loaded(unsure_above=None, taught=(False,) * len(WORDS)), threads=1)
    assert nothing.ask(GREY, nothing.a_question).probabilities  # a word that is read: the network can be tried
