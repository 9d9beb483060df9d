"""The picture of a score: photo, map (`heatmap`), and what the score says in words.

The caption says the full name of the class and its probability, the second class, what the class means, what the
suspicious classes have together and which of them most, how much evidence the model has for its answer, the reasons to
refer in words or the rules that were tried; what the model's own card says against it; and whose pictures it learned
from. No sentence says that nothing needs a look. What to do comes first, or, where no rule asks for a look, what that
is worth. The rules that were tried and what the class means stand small.
"""

from dataclasses import replace

from PIL import Image

from edgefl_client.scoring.drawing.caption import BODY, HEAD, INK, QUIET, SMALL, WARN, CaptionLine
from edgefl_client.scoring.drawing.heatmap import Photo, Placed, draw_picture, map_lines, origin
from edgefl_client.scoring.explanation import Explanation
from edgefl_protocol.pictures.evidence_words import evidence_words
from edgefl_protocol.pictures.score import Score
from edgefl_protocol.pictures.wording import (
    class_title,
    learned_where,
    likely,
    meaning,
    on_white,
    outcome,
    second_class,
    second_place,
    second_words,
    suspicious_words,
    tried_words,
    without_strongest,
)
from edgefl_protocol.sentences import capital


def draw_heatmap(
    photo: Photo, score: Score, fit: str, explanation: Explanation, digits: str | None = None
) -> Image.Image:
    """Draw the finished picture of a score.

    Args:
        photo: (H, W, 3), upright.
        explanation: the map and how true it is, or why there is none.
        digits: first ones of the SHA-256 of the photo's file, which tell photos of one name apart; None without a file.
    """

    told = replace(score, heatmap_fall=explanation.fall_of(score))

    def caption(placed: Placed | None, size_words: str) -> list[CaptionLine]:
        end = origin(score.image, score.model, digits, "scored")
        return [*_lines(told), *map_lines(placed, explanation, _fall(told), size_words, "the lesion"), end]

    return draw_picture(photo, fit, explanation, caption)


def _lines(score: Score) -> list[CaptionLine]:
    lines = [CaptionLine(_headline(score), HEAD, INK)]
    warnings = [CaptionLine(sentence, BODY, WARN) for sentence in score.model.warnings]
    if (white := on_white(score)) is not None:
        lines.append(CaptionLine(f"{capital(white)}.", BODY, INK))
    lines += [CaptionLine(outcome(score), BODY, WARN), *warnings]  # a pass warns, too: it is no all-clear
    if (tried := tried_words(score)) is not None:
        lines.append(CaptionLine(tried, SMALL, QUIET))
    if score.predicted is not None:  # small: that a class is benign must reassure nobody about this picture
        lines.append(CaptionLine(meaning(score, score.predicted), SMALL, QUIET))
    if (second := second_class(score)) is not None and second_words(score) is not None:
        place = capital(second_place(score, second))
        lines.append(
            CaptionLine(f"{place}: {class_title(score, second)}, probability {likely(score, second)}", BODY, INK)
        )
    if (suspicious := suspicious_words(score)) is not None:
        lines.append(CaptionLine(f"{capital(suspicious)}.", BODY, INK))
    lines.append(CaptionLine(f"{evidence_words(score)}.", BODY, INK))
    return [*lines, CaptionLine(learned_where(score.model), BODY, INK)]


def _fall(score: Score) -> str | None:
    without = without_strongest(score)
    if without is None or score.predicted is None:
        return None
    return f"from {likely(score, score.predicted)} to {without}"


def _headline(score: Score) -> str:
    if score.predicted is None:
        return "No prediction"
    return f"Prediction: {class_title(score, score.predicted)}, probability {likely(score, score.predicted)}"
