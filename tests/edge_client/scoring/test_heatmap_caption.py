"""What is written under the picture, and what never is."""

import csv
import hashlib
import io
import json
from dataclasses import replace

import numpy as np
import pytest
from PIL import ImageDraw
from tests.edge_client.scoring.drawn_pictures import drawn_picture, one_hot, score_with

from edgefl_client import Scorer
from edgefl_client.commands.score_text import human_line
from edgefl_client.scoring.drawing.score_picture import draw_heatmap
from edgefl_client.scoring.explanation import Explanation
from edgefl_client.scoring.pictures import FORMATS, PictureReader
from edgefl_client.scoring.score_files import ScoringJob, score_files


def test_caption_says_what_was_found(said):
    """Full name, meaning, second class, vacuity in words with its number, reasons or the rules that were tried."""
    pixels = np.full((500, 600, 3), 150, np.uint8)
    drawn_picture(pixels, score_with(one_hot(7, 1, 1), ("suspicious_class", "vacuity")), "squash")
    words = " ".join(said)
    assert "Prediction: Melanoma (MEL), probability 75%" in words
    assert "A cancer of the pigment cells" in words and "This class is malignant." in words
    assert "Second: Melanocytic nevus (NV), probability 25%" in words
    assert (
        "has too little evidence for its answer by its rule. Vacuity 0.40 (0: much evidence in all, 1: none)" in words
    )
    assert (
        "Refer to a dermatologist: the predicted class is malignant; the model has less evidence for this picture"
        in words
    )
    assert "Research use only" in words and "reduced" not in words
    said.clear()
    drawn_picture(pixels, score_with(one_hot(7, 1, 1), ("vacuity", "unseen_class"), predicted=None), "crop")
    worried = " ".join(said)
    assert "No prediction" in worried and "Second:" not in worried
    assert "not trained on" in worried
    assert "outside the white frame" in worried
    said.clear()
    drawn_picture(pixels, score_with(one_hot(7, 1, 1), predicted="NV"), "squash")
    calm = " ".join(said)
    assert "No rule asks for a look. That is no all-clear. How many suspicious pictures pass was not counted." in calm
    assert "Rules tried: too little evidence, blur." in calm
    assert "no reason" not in calm.lower()


def test_a_line_writes_numbers_as_the_picture_does():
    """The picture said 75%, the line 0.750; vacuity 0.40 and 0.400. What is not skin gets the same from every model."""
    score = score_with(one_hot(7, 1, 1))
    assert human_line(score).startswith(
        "x: Melanoma (MEL), probability 75%, second Melanocytic nevus (NV) 25%, vacuity 0.40; "
    )
    landscape = replace(score, predicted=None, refer=True, refer_reasons=("vacuity", "not_skin"))
    other = replace(landscape, vacuity=None, refer_reasons=("not_skin",))
    said = "x: no prediction; take the picture again, or refer: its colours are not those of skin"
    assert human_line(landscape) == human_line(other) == said


def test_a_class_that_is_never_predicted_is_not_called_second(said):
    """docs/reference/scores.md, "Referral": in line and picture."""
    found = {"NV": 0.2, "BKL": 0.06, "DF": 0.74}
    score = replace(score_with(one_hot(7, 1, 1), ("unseen_class",), predicted="NV"), probabilities=found)
    drawn_picture(np.full((500, 600, 3), 150, np.uint8), score, "squash")
    assert "Most probable, but never predicted here: Dermatofibroma (DF), probability 74%" in " ".join(said)
    line = "probability 20%, most probable, but never predicted here: Dermatofibroma (DF) 74%, vacuity"
    assert line in human_line(score) and "second" not in f"{human_line(score)} {' '.join(said)}".lower()


def test_transparency_is_told_in_line_and_picture(said):
    """docs/decisions/0011: a half-transparent picture scored otherwise than an opaque one, and nothing said it."""
    score = score_with(one_hot(7, 1, 1))
    assert "transparent" not in human_line(score)
    first = "the picture's transparent parts were read as white; Melanoma"
    assert human_line(replace(score, transparent=True)).startswith(f"{score.image}: {first}")
    pixels = np.full((500, 600, 3), 150, np.uint8)
    drawn_picture(pixels, score, "squash")
    assert "transparent" not in " ".join(said)
    drawn_picture(pixels, replace(score, transparent=True), "squash")
    assert "The picture's transparent parts were read as white." in " ".join(said)


@pytest.mark.parametrize("reasons", [(), ("vacuity",)])
def test_caption_says_what_the_card_says_against_the_model(said, reasons):
    """docs/reference/scores.md: every picture says so. Standard error alone told that most answers were wrong."""
    score = score_with(one_hot(7, 1, 1), reasons)
    weak = replace(score, model=replace(score.model, warnings=("Not better than chance.", "Most answers were wrong.")))
    drawn_picture(np.full((500, 600, 3), 150, np.uint8), weak, "squash")
    assert {"Not better than chance.", "Most answers were wrong."} <= set(said)


def test_most_answers_wrong_goes_with_every_result(run, lab, tmp_path, said):
    """docs/reference/scores.md: `better_than_chance: true` alone read like praise; picture, JSON and CSV say it."""
    figures = {
        "site": {
            "balanced_accuracy": 0.44, "balanced_accuracy_interval": [0.38, 0.5], "auroc": 0.8,
            "auroc_interval": [0.7, 0.9], "accuracy": 0.414, "n_test": 367, "classes_tested": 3,
        }
    }  # fmt: skip
    (tmp_path / "weak.edgefl").write_bytes(lab.bundle_bytes(version=2, metrics=figures))
    (tmp_path / "a.png").write_bytes(lab.encoded(lab.photo(300, 300)))
    options = ("a.png", "--model", "weak.edgefl", "--trust", lab.SIGNER.public.hex())
    words = "More than half of this model's answers were wrong: accuracy 0.414 on 367 pictures"
    _, out, err = run("score", *options, "--json", "--heatmap", "maps")
    told = json.loads(out)["model"]
    assert told["better_than_chance"] is True and len(told["warnings"]) == 1 and told["warnings"][0].startswith(words)
    assert words in err and words in " ".join(said)
    (row,) = csv.DictReader(io.StringIO(run("score", *options, "--csv")[1]))
    assert row["better_than_chance"] == "true" and row["warnings"] == told["warnings"][0]


@pytest.mark.parametrize(("side", "words"), [("dark", "it is too dark"), ("bright", "it is too bright")])
def test_caption_says_which_side_of_exposure_is_wrong(said, side, words):
    score = replace(score_with(one_hot(7, 1, 1), ("exposure",)), exposure=side)
    drawn_picture(np.full((500, 600, 3), 150, np.uint8), score, "squash")
    assert (
        f"Take the picture again: {words}. If you cannot, refer to a dermatologist. A new picture that passes is no"
        in " ".join(said)
    )


def test_of_a_referred_picture_what_to_do_comes_first_and_benign_stands_small(monkeypatch):
    """The prediction stays in the headline; what may reassure comes after, in small print, and is of the class."""
    drawn: list[tuple[str, int]] = []
    original = ImageDraw.ImageDraw.text

    def spy(self, at, text, *args, font, **kwargs):
        drawn.append((text, round(font.size)))
        return original(self, at, text, *args, font=font, **kwargs)

    monkeypatch.setattr(ImageDraw.ImageDraw, "text", spy)
    sizes = {}
    for reasons in ((), ("blur",), ("vacuity",)):
        drawn.clear()
        score = score_with(one_hot(7, 1, 1), reasons, predicted="NV")
        drawn_picture(np.full((800, 1500, 3), 150, np.uint8), score, "squash")
        order = [text for text, _ in drawn]
        sizes["outcome", reasons] = next(
            size for text, size in drawn if text.startswith(("Take", "Refer", "No rule asks"))
        )
        benign = "This class is benign; the picture may show another."
        sizes[reasons] = next(size for text, size in drawn if benign in text)
        if reasons:
            do = "Take the picture again: it is blurred" if reasons == ("blur",) else "Refer to a dermatologist: "
            again = next(at for at, text in enumerate(order) if text.startswith(do))
            headline = next(at for at, text in enumerate(order) if text.startswith("Prediction: Melanocytic nevus"))
            assert headline < again < next(at for at, text in enumerate(order) if "benign" in text)
            assert sizes[reasons] < sizes["outcome", reasons]
    assert sizes[()] == sizes[("blur",)] < sizes["outcome", ()]


@pytest.mark.parametrize(("strongest", "where"), [
    (0, "in the upper left corner"), (5, "in the upper right corner"), (35, "in the lower right corner"),
    (3, "at the upper edge"), (12, "at the left edge"), (33, "at the lower edge"), (14, None), (7, None),
])  # fmt: skip
def test_an_answer_that_hangs_most_on_the_edge_is_told_whatever_else_is_outlined(said, strongest, where):
    """A lesion is photographed in the middle. Of thirty maps five had their strongest part on bare skin in a corner,
    and no word said it, for another outlined part lay on the lesion. Cells of 6 × 6 are counted row by row. Of a map
    for which nothing was hidden nobody knows what the answer hangs on."""
    shown = np.zeros(36, np.float32)
    shown[[15, 20]], shown[strongest] = 0.9, 1.0
    pixels, score = np.full((500, 600, 3), 150, np.uint8), score_with(one_hot(7, 1, 1), predicted="NV")
    for without, begins in ((0.1, "The answer hangs most on a part"), (None, "The strongest part of the map is")):
        for fit, seen in (("squash", "the picture"), ("crop", "the white frame")):
            said.clear()
            draw_heatmap(pixels, score, fit, Explanation(shown, "Measured.", without))
            told = [one for one in said if "Look at the photo itself" in one]
            sentence = f"{begins} {where} of {seen}. Look at the photo itself."
            assert told == ([] if where is None else [sentence]) and ("hangs most on" in " ".join(told)) is bool(
                told and without is not None
            )


@pytest.mark.parametrize(("kind", "words"), [("bundle", "the bundle's values"), ("personal", "learned on this device")])
def test_a_printed_picture_names_photo_model_and_values(said, kind, words):
    score = score_with(one_hot(7, 1, 1))
    score = replace(score, image="/ward 3/IMG_0042.jpg", model=replace(score.model, state_kind=kind, version=7))
    drawn_picture(np.full((500, 600, 3), 150, np.uint8), score, "squash")
    text = " ".join(said)
    assert "IMG_0042.jpg, scored by a/b/c version 7 with" in text and words in text and "ward" not in text
    said.clear()
    unnamed = replace(score, image=f"{'x' * 300}\n.png")
    drawn_picture(np.full((500, 600, 3), 150, np.uint8), unnamed, "squash")
    assert "x...x" in " ".join(said) and not any("\n" in one for one in said)


def test_the_referral_has_a_mark_that_needs_no_colour():
    """A bar beside the lines; the ink is dark enough for a print in grey (contrast of 7 to white: WCAG 2.1, 1.4.6).

    A pass has the bar, too: that no rule asks for a look is no all-clear.
    """
    pixels = np.full((500, 600, 3), 150, np.uint8)
    for reasons in (("vacuity",), ()):
        panel = np.asarray(drawn_picture(pixels, score_with(one_hot(7, 1, 1), reasons), "squash"))[500:]
        rows = (panel[:, :12].max(-1) < 140).any(1)
        assert rows.any() and not rows.all()  # beside what warns, and beside nothing else
    linear = [(one / 255 / 12.92 if one <= 10 else ((one / 255 + 0.055) / 1.055) ** 2.4) for one in (130, 14, 8)]
    assert 1.05 / (float(np.dot([0.2126, 0.7152, 0.0722], linear)) + 0.05) > 7


@pytest.mark.parametrize(
    ("probability", "words"), [(0.994, "99%"), (0.9951, ">99%"), (0.996, ">99%"), (1.0, ">99%"), (0.5, "50%")]
)
def test_no_probability_is_rounded_to_certainty(said, probability, words):
    """docs/design.md, section 5: a number shown to a reader is never surer than the model's."""
    score = replace(score_with(one_hot(7, 1, 1)), probabilities={"MEL": probability, "NV": 1 - probability})
    drawn_picture(np.full((500, 600, 3), 150, np.uint8), score, "squash")
    assert f"probability {words}" in " ".join(said)


@pytest.mark.parametrize("refer_above", [None, 0.9])
def test_without_a_rule_nothing_is_called_safe(lab, make_bundle, said, tmp_path, refer_above):
    """docs/methods.md, 1.8: where the card sets no threshold, silence is not a finding."""
    (tmp_path / "a.png").write_bytes(lab.encoded(lab.photo(80, 64)))
    scorer = Scorer(make_bundle(refer_above=refer_above), threads=1)
    with PictureReader(FORMATS) as reader:
        task = ScoringJob(scorer=scorer, reader=reader, heatmaps=tmp_path, not_drawn=pytest.fail)
        (score,) = score_files(task, [str(tmp_path / "a.png")])
    assert not score.refer
    words = " ".join(said)
    assert ("No rule says when" in words) is (refer_above is None)
    assert "No rule asks for a look. That is no all-clear." in words and "Rules tried: " in words
    assert "no reason" not in words.lower()


def test_two_files_of_one_name_make_pages_that_can_be_told_apart(lab, make_bundle, said, tmp_path):
    """The digits are those of the drawing's name: first ones of the file's SHA-256."""
    ends = []
    for folder, ink in (("a", (60, 40, 30)), ("b", (160, 110, 90))):
        (tmp_path / folder).mkdir()
        file = tmp_path / folder / "photo.png"
        file.write_bytes(lab.encoded(lab.photo(500, 400, ink)))
        with PictureReader(FORMATS) as reader:
            task = ScoringJob(scorer=Scorer(make_bundle()), reader=reader, heatmaps=tmp_path, not_drawn=pytest.fail)
            list(score_files(task, [str(file)]))
        ends.append(hashlib.sha256(file.read_bytes()).hexdigest()[:16])
    assert ends[0] != ends[1] and all(f"photo.png ({end}), scored by" in " ".join(said) for end in ends)


def test_a_map_by_hiding_says_how_little_it_changes(said):
    """Bright yellow stood for a fall by one percentage point; the scale's ends read like absolute figures."""
    pixels, score = np.full((500, 600, 3), 150, np.uint8), score_with(one_hot(7, 1, 1))
    draw_heatmap(pixels, score, "squash", Explanation(score.map, "So true.", 0.738))
    words = " ".join(said)
    assert "What the answer hangs on" in words and "where the model looked" not in words.lower()
    assert "hiding the strongest part lowers the probability from 75% to 74%" in words
    assert "Prediction: Melanoma (MEL), probability 75%" in said
    assert {"least", "most in this picture"} <= set(said) and "(0." not in words and "(1." not in words
    assert "An outlined part may lie beside the lesion" in words  # nothing on the device said so
    said.clear()
    drawn_picture(pixels, score, "squash")
    other = " ".join(said)
    assert "Where the model looked" in other and "they do not say how much the answer changes" in other


def test_without_a_true_map_the_photo_stands_alone_and_the_caption_says_why(said):
    pixels = np.random.default_rng(4).integers(0, 256, (500, 600, 3)).astype(np.uint8)
    picture = np.asarray(draw_heatmap(pixels, score_with(one_hot(7, 1, 1)), "squash", Explanation(None, "No map: so.")))
    assert (picture[:500, 600:] == 255).all()  # no second photo
    np.testing.assert_array_equal(picture[:500, :600], pixels)
    words = " ".join(said)
    assert "No map: so." in words and "Prediction: Melanoma (MEL)" in words
    assert "least" not in words and "where the model looked" not in words.lower()
