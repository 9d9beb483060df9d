"""Whether a model looks at the picture, and how true its map is, of models whose answers are known beforehand.

Source: docs/decisions/0046; docs/methods.md 1.8. The oracles say by their making whether they look.
"""

import numpy as np
import pytest

from edgefl_trainer.contract import Examples
from edgefl_trainer.evaluate import looking, measured_maps
from edgefl_trainer.evaluate.looking import other_picture, tried_questions

PX, PICTURES = 32, 24
SEEN = (True, True)


def rows(count: int = 48, pictures: int = PICTURES) -> tuple[Examples, list[str]]:
    """Questions in turn about pictures that are dark or bright; 2 asks for dark, 3 for bright."""
    images = np.zeros((pictures, PX, PX, 3), np.uint8)
    images[::2] = 220
    shown = np.arange(count) % pictures
    tokens = np.where(np.arange(count)[:, None] < count // 2, 2, 3) * np.ones((1, 2), np.int64)
    bright = images[shown, 0, 0, 0] > 100
    labels = np.where(tokens[:, 0] == 3, bright, ~bright).astype(np.int64)
    names = [f"picture {place}" for place in shown]
    return Examples(images, labels, np.arange(count), pictures=shown, tokens=tokens), names


def looks(_, images, tokens, device=None):
    """Answers rightly from picture and question."""
    bright = images.mean(axis=(1, 2, 3)) > 100
    yes = np.where(tokens[:, 0] == 3, bright, ~bright).astype(np.float32)
    return {"probabilities": np.stack([1 - yes, yes], axis=1) * 0.8 + 0.1}


def reads(_, images, tokens, device=None):
    """Answers from the question alone."""
    yes = (tokens[:, 0] == 3).astype(np.float32)
    return {"probabilities": np.stack([1 - yes, yes], axis=1) * 0.8 + 0.1}


@pytest.fixture
def predictor():
    class Nobody:
        seen = SEEN

    return Nobody()


def test_who_looks_is_found_and_who_reads_alone_is_not(predictor, monkeypatch):
    tune, names = rows()
    monkeypatch.setattr(looking, "answers_to", looks)
    found = other_picture(predictor, tune, names)
    assert found.shows_looking and found.right < 48 and 0 < found.low <= found.high <= 1
    monkeypatch.setattr(looking, "answers_to", reads)
    blind = other_picture(predictor, tune, names)
    assert not blind.shows_looking and (blind.low, blind.high) == (0.0, 0.0)
    assert (
        blind.right
        == (reads(None, tune.images[tune.places], tune.tokens)["probabilities"].argmax(1) == tune.targets).sum()
    )


def test_no_question_keeps_its_own_picture(predictor, monkeypatch):
    """Neither its row nor another row of the same picture."""
    tune, names = rows()
    asked = []

    def noted(_, images, tokens, device=None):
        asked.append(images)
        return reads(_, images, tokens)

    monkeypatch.setattr(looking, "answers_to", noted)
    marked = tune.images.copy()
    marked[:, 0, 0, 0] = np.arange(PICTURES)
    other_picture(predictor, Examples(marked, tune.labels, tune.rows, tune.pictures, tune.tokens), names)
    own, other = (images[:, 0, 0, 0] for images in asked)
    assert (own == tune.places).all() and (own != other).all() and len(set(other)) == PICTURES


@pytest.mark.parametrize(("count", "pictures"), [(19, 5), (48, 1), (0, 2)])
def test_too_few_questions_or_one_picture_tell_nothing(predictor, monkeypatch, count, pictures):
    monkeypatch.setattr(looking, "answers_to", looks)
    assert other_picture(predictor, *rows(count, pictures)) is None


def test_what_a_device_would_answer_is_counted_by_hand():
    """Four questions: sure and right, sure and wrong, unsure and right, and an answer that was never seen."""
    probabilities = np.array([[0.97, 0.02, 0.01], [0.97, 0.02, 0.01], [0.4, 0.3, 0.3], [0.01, 0.02, 0.97]], np.float32)
    targets = np.array([0, 1, 0, 2])
    found = tried_questions(probabilities, targets, (True, True, False), 0.5, None)
    assert (found.questions, found.right, found.answered, found.answered_right) == (4, 3, 2, 1)
    whole = np.array([False, True, True, True])  # the first has a word that the model was never taught
    found = tried_questions(probabilities, targets, (True, True, False), 0.5, None, whole)
    assert (found.questions, found.right, found.answered, found.answered_right) == (4, 3, 1, 0)
    assert tried_questions(probabilities[:0], targets[:0], (True,) * 3, 0.5, None) is None


def test_the_map_of_a_model_that_answers_is_measured_with_each_questions_own_words(predictor, monkeypatch):
    """A patch decides, a different one for each question: occlusion finds it, the map of the graph marks another."""
    count, patch = 40, PX // 4
    rng = np.random.default_rng(4)
    images = rng.integers(0, 60, (count, PX, PX, 3), dtype=np.uint8)
    tokens = np.stack([np.arange(count) % 16, np.zeros(count, np.int64)], axis=1)
    for image, (cell, _) in zip(images, tokens, strict=True):
        row, column = divmod(int(cell), 4)
        image[row * patch : (row + 1) * patch, column * patch : (column + 1) * patch] = 250

    def patchwise(_, pictures, asked, device=None):
        mean = np.empty(len(pictures), np.float32)
        for index, (picture, (cell, _)) in enumerate(zip(pictures, asked, strict=True)):
            row, column = divmod(int(cell), 4)
            mean[index] = picture[row * patch : (row + 1) * patch, column * patch : (column + 1) * patch].mean() / 255
        maps = np.zeros((len(pictures), 16), np.float32)
        maps[np.arange(len(pictures)), (asked[:, 0] + 1) % 16] = 1
        return {"probabilities": np.stack([1 - mean, mean], axis=1), "map": maps}

    class Spec:
        image_px, tokens = PX, 16

    monkeypatch.setattr(measured_maps, "answers_to", patchwise)
    monkeypatch.setattr(measured_maps._Asked, "gflop", lambda *_: 0.001)
    monkeypatch.setattr(measured_maps, "occlusion_cells", lambda _: 16)
    predictor.module = type("Module", (), {"backbone": type("Backbone", (), {"spec": Spec()})()})()
    table = measured_maps.measure_maps(predictor, images, [str(i) for i in range(count)], questions=tokens)
    assert set(table.maps) == {"attention", "occlusion"}
    assert table.maps["occlusion"].hidden["mean"].marked == 1 and table.shown.kind == "occlusion"
    assert not table.maps["attention"].better_than_chance
    assert table.pictures == count


def test_without_a_threshold_answers_below_half_count_as_refused():
    """As a device refuses them: docs/decisions/0046."""
    probabilities, targets = np.array([[0.4, 0.3, 0.3], [0.6, 0.2, 0.2], [0.5, 0.5, 0.0]]), np.array([0, 1, 0])
    found = tried_questions(probabilities, targets, (True,) * 3, float(np.log(3)), None)
    assert (found.answered, found.answered_right) == (2, 1)
    assert tried_questions(probabilities, targets, (True,) * 3, 1.09, None).answered == 3
