"""How good a card says a model is that answers questions, in sentences for whoever asks it.

Guarantees: a figure is never said without the number of questions behind it; a model that was not found to look at the
picture is called that. The figures are the site's of `summary.json` (docs/design.md 5), and those of the questions
that were kept from learning (`question_table`).
"""

import math
from collections.abc import Mapping
from typing import Final

from edgefl_protocol.bundle.figures import HALF, figures_of, number, site_figures, temperature_at_bound
from edgefl_protocol.bundle.model_card import Card, Labels
from edgefl_protocol.bundle.question_table import LEAST_TRIED, QuestionTable, TriedQuestions
from edgefl_protocol.bundle.shown_map import ShownMap, no_map
from edgefl_protocol.pictures.answer import DEFAULT_CONFIDENCE_FROM, MeasuredAnswers
from edgefl_protocol.pictures.referral import in_force
from edgefl_protocol.sentences import counted

_NAMES: Final = {
    "accuracy": "accuracy",
    "accuracy_open_questions": "of open questions",
    "accuracy_closed_questions": "of closed questions",
}
_NO_THRESHOLD: Final = (
    "No threshold says when it is too unsure: by default it gives no answer below a confidence of "
    f"{DEFAULT_CONFIDENCE_FROM:.0%}."
)


def question_lines(card: Card, labels: Labels, table: QuestionTable) -> tuple[str, str]:
    """Say in two lines how right the model was, and what it knows and did on questions kept from learning."""
    figures = site_figures(card)
    told = figures_of(figures, _NAMES, {})
    right = ", ".join([*map(str, told), _counted_on(figures, card.site)]) if told else "its card states no accuracy"
    usual = figures.get("usual_answer")
    always = number(usual.get("accuracy")) if isinstance(usual, dict) else None
    if told and always is not None:
        right += f"; giving the usual answer to each kind of question has accuracy {always:.3f}"
    words = len(table.vocabulary.words)
    learned = "" if table.taught is None else f", {sum(table.taught):,} of them taught"
    answers = f"{counted(len(labels.classes), 'answer')}, {sum(labels.seen):,} of them met in its own questions,"
    knows = f"{answers} and {counted(words, 'word')}{learned}"
    return f"how right it was: {right}", f"questions: it knows {knows}; {kept_from_learning(table)}"


def kept_from_learning(table: QuestionTable) -> str:
    """Say, as a clause, how the model did on questions kept from learning, which a card's figures do not show."""
    tried = table.tried
    if tried is None:
        return "nobody tried it on questions kept from learning"
    refused = tried.questions - tried.answered
    answered = f"of {counted(tried.questions, 'question')} kept from learning it refused {refused}"
    if tried.answered == 0:
        return answered
    answered += f" and answered {tried.answered}"
    share = tried.answered_right / tried.answered
    return f"{answered}, {tried.answered_right} of these rightly ({share:.1%})"


def measured(table: QuestionTable) -> MeasuredAnswers | None:
    """Give what was counted of a model's answers to questions kept from learning; None where nobody tried."""
    tried = table.tried
    return None if tried is None else MeasuredAnswers(answered=tried.answered, right=tried.answered_right)


def question_weaknesses(card: Card, labels: Labels, table: QuestionTable) -> tuple[str, ...]:
    """Say in sentences what its own card says against a model."""
    said = [
        not_looking(table),
        _one_answer(labels),
        _not_above_usual(site_figures(card), card.site),
        _mostly_wrong(site_figures(card), card.site),
        _NO_THRESHOLD if in_force(card.refer_above, math.log(len(labels.classes))) is None else None,
        _not_fitted(table),
        temperature_at_bound(card.temperature, "its confidence"),
    ]
    return tuple(one for one in said if one is not None)


def not_looking(table: QuestionTable) -> str | None:
    """Say that a model was not found to look at the picture; None where it was, or nobody tried."""
    if table.tried is None or table.tried.other_picture is None or table.looks:
        return None
    return f"This model was not found to look at the picture: {_with_other_pictures(table.tried)}."


def why_no_map(said: ShownMap | None, table: QuestionTable) -> str | None:
    """Say why a device draws no map beside any answer of this model; None where it draws one.

    A map of where a model looked would say of one that was not found to look that it does, however true the map.
    """
    if table.looks is False:
        return "No map is drawn: this model was not found to look at the picture."
    return no_map(said, "question")


def _not_fitted(table: QuestionTable) -> str | None:
    count = 0 if table.tried is None else table.tried.questions
    if count >= LEAST_TRIED:
        return None
    kept = "no question was" if count == 0 else f"only {counted(count, 'question')} {'was' if count == 1 else 'were'}"
    return f"Its confidence and its threshold were not fitted, for {kept} kept from learning."


def _with_other_pictures(tried: TriedQuestions) -> str:
    other = 0 if tried.other_picture is None else tried.other_picture.right
    return (
        f"of {counted(tried.questions, 'question')} kept from learning its most probable answer was right for "
        f"{tried.right} with their own picture, and for {other} with the picture of another one, refused ones counted "
        "too"
    )


def _one_answer(labels: Labels) -> str | None:
    """Say that a model can give one answer alone; None where it met several."""
    met = [name for name, seen in zip(labels.classes, labels.seen, strict=True) if seen]
    if len(met) != 1:
        return None
    return f"This model met one answer in its own questions, {met[0]}: it can give no other, whatever is asked."


def _not_above_usual(figures: Mapping[str, object], site: str | None) -> str | None:
    """Say that closed questions were answered no better than by their most frequent answer; None where they were."""
    closed = figures_of(figures, {"accuracy_closed_questions": "accuracy"}, {})
    usual, count = figures.get("usual_answer"), figures.get("n_closed_questions")
    always = number(usual.get("accuracy_closed_questions")) if isinstance(usual, dict) else None
    if not closed or always is None or (closed[0].interval or (closed[0].value,))[0] > always:
        return None
    questions = counted(count, "closed question") if type(count) is int else "closed questions"
    where = "" if site is None else f" of the site {site}"
    return (
        f"On {questions}{where}, such as those of yes or no, this model was not found better than the usual answer to "
        f"each kind of question: {closed[0]} against {always:.3f}."
    )


def _mostly_wrong(figures: Mapping[str, object], site: str | None) -> str | None:
    accuracy = number(figures.get("accuracy"))
    if accuracy is None or accuracy >= HALF:
        return None
    return f"More than half of this model's answers were wrong: accuracy {accuracy:.3f} {_counted_on(figures, site)}."


def _counted_on(figures: Mapping[str, object], site: str | None) -> str:
    count = figures.get("n_test")
    questions = counted(count, "question") if type(count) is int else "an unknown number of questions"
    return f"on {questions}{'' if site is None else f' of the site {site}'}"
