"""The picture of an answer: photo, map (`heatmap`), the question, and what is answered to it.

The caption says the question, or that the font lacks its characters; the answer, how many answers were right, its
confidence and the next ones, or why there is no answer; which words told the model nothing, and which negate; how often
it was right on questions kept from learning; whose pictures it learned from; and what an answer is not.
"""

from dataclasses import replace

from PIL import Image

from edgefl_client.scoring.drawing.caption import BODY, HEAD, INK, SMALL, WARN, CaptionLine, has_glyph
from edgefl_client.scoring.drawing.heatmap import Photo, Placed, draw_picture, map_lines, origin
from edgefl_client.scoring.explanation import Explanation
from edgefl_protocol.pictures.answer import PictureAnswer
from edgefl_protocol.pictures.answer_words import fall_words, headline, learned_from, next_answers, not_read, what_it_is
from edgefl_protocol.pictures.wording import ON_WHITE
from edgefl_protocol.sentences import capital

LONGEST_QUESTION = 300  # characters; of a longer one the end is left out


def draw_answer(
    photo: Photo,
    answer: PictureAnswer,
    fit: str,
    explanation: Explanation,
    how_right: str,
    top: int,
    digits: str | None,
) -> Image.Image:
    """Draw the finished picture of an answer.

    Args:
        photo: (H, W, 3), upright.
        explanation: the map and how true it is, or why there is none.
        how_right: how the model did on questions kept from learning, in a sentence.
        top: how many answers are told.
        digits: first ones of the SHA-256 of the photo's file, which tell photos of one name apart; None without a file.
    """

    told = replace(answer, heatmap_fall=explanation.fall_from(answer.confidence))

    def caption(placed: Placed | None, size_words: str) -> list[CaptionLine]:
        end = origin(answer.image, answer.model, digits, "answered")
        lines = _lines(told, how_right, top)
        return [*lines, *map_lines(placed, explanation, fall_words(told), size_words, "what is asked about"), end]

    return draw_picture(photo, fit, explanation, caption)


def _lines(answer: PictureAnswer, how_right: str, top: int) -> list[CaptionLine]:
    said = headline(answer)
    lines = [
        CaptionLine(_question(answer.question.text), BODY, INK),
        CaptionLine(said if answer.refused else f"Answer: {said}", HEAD, WARN if answer.refused else INK),
    ]
    if (others := next_answers(answer, top)) is not None:
        lines.append(CaptionLine(f"{others}.", BODY, INK))
    lines += [CaptionLine(sentence, BODY, WARN) for sentence in not_read(answer)]
    lines += [CaptionLine(f"{capital(ON_WHITE)}.", BODY, INK)] if answer.transparent else []
    lines += [CaptionLine(sentence, BODY, WARN) for sentence in answer.model.warnings]
    # Beside a refusal the share of right answers would read like its confidence.
    worth = () if answer.refused else (how_right, learned_from(answer), what_it_is(answer))
    return [*lines, *(CaptionLine(sentence, SMALL, INK) for sentence in worth)]


def _question(text: str) -> str:
    """Say the question, or where it is written in another script how the drawing can be told by it."""
    shown = "".join(one if one.isprintable() else "?" for one in text)
    if not any(one.isalnum() and has_glyph(one) for one in shown):
        return "The question is written in characters that this picture cannot show. Its digest is in the file's name."
    return "Question: " + (shown if len(shown) <= LONGEST_QUESTION else f"{shown[:LONGEST_QUESTION]}...")
