"""What an answer says in words: the answer and its confidence, or why there is none, and what was not read.

Guarantees: a refusal names no answer, and one for the question's words names these; no sentence says that an answer is
right, and beside a confidence stands how many answers were; no list of words grows with the question. Two numbers that
differ are never written alike where a rule compares them. Source: docs/decisions/0046 and 0048.
"""

from collections.abc import Sequence
from typing import Final

from edgefl_protocol.pictures.answer import DEFAULT_CONFIDENCE_FROM, MeasuredAnswers, PictureAnswer
from edgefl_protocol.pictures.wording import taught_words
from edgefl_protocol.pictures.written_numbers import against, digits_apart, percent, uncertain_share
from edgefl_protocol.sentences import counted, listed

LONGEST_WORD: Final = 30  # characters of a word of the question that a sentence tells; `--json` has all
TELLS_LITTLE: Final = {
    "no": "A no tells little: a model may say it to most questions, whether they ask for a finding or its absence. ",
    "yes": "A yes tells little: a model may say it to some wordings, whatever the picture shows. ",
}
_REASONS = {
    "no_known_word": "the model knows no word of this question",
    "no_subject": "the question names nothing that an answer could hang on",
    "several_questions": "these are several questions, and the model would give them one answer",
    "size": "the picture has fewer pixels than the model reads",
    "shape": "the picture is much longer one way than the other, and the model reads a square",
    "transparent": "more than a tenth of the picture is transparent",
    "unseen_answer": "the most probable answer is one that it never met in its own questions",
    "model_expired": "the model is past its expiry date",
}


def headline(answer: PictureAnswer) -> str:
    """Say the answer, how many answers were right, its confidence and what was left out of the question.

    Or that there is no answer, and why.
    """
    if answer.answer is None:
        return f"No answer: {'; '.join(_reason(answer, one) for one in answer.refuse_reasons)}"
    lost = (*answer.question.unknown, *(answer.question.untaught or ()))
    left_out = f", asked without: {_few(lost)}" if lost else ""
    return f"{answer.answer}; {_measured(answer.measured)}; confidence {_likely(answer, answer.answer)}{left_out}"


def learned_from(answer: PictureAnswer) -> str:
    """Say whose pictures the model learned from, and whether anything compared this one with them."""
    whose = taught_words(answer.learned_from, answer.model.learned_from_federation)
    if "light" in answer.rules_tried:
        return f"{whose}; of this one only brightness and colour were compared with these."
    return f"{whose}; whether this is such a picture is not checked."


def next_answers(answer: PictureAnswer, top: int) -> str | None:
    """Say the next most probable answers, so that `top` are told in all; None where none is told.

    An answer that the site's questions never had is not among them: it would be refused.
    """
    others = [name for name, _ in answer.ranked_met(top)][1:]
    if answer.answer is None or not others:
        return None
    return "Next: " + ", ".join(f"{name} {_likely(answer, name)}" for name in others)


def not_read(answer: PictureAnswer) -> list[str]:
    """Say in sentences which words of the question told the model nothing, what negates, and what to do."""
    asked, reasons, said = answer.question, answer.refuse_reasons, []
    if lost := (*asked.missed, *asked.never_taught) if asked.known else ():
        said.append(f"Ask in other words: without {_quoted(lost)} this would be another question.")
    else:
        other = " Ask in other words." if "no_known_word" in reasons else ""
        said += [f"Not known to the model, so not asked: {_few(asked.unknown)}.{other}"] if asked.unknown else []
        said += [f"Never taught to the model, so not asked: {_few(asked.untaught)}."] if asked.untaught else []
    if "no_subject" in reasons:
        said.append("Name what you ask about.")
    if "several_questions" in reasons:
        said.append("Ask one question at a time.")
    if "unread_word" in reasons:
        said.append(f"Ask in fewer words: without {_quoted(asked.cut_off)} this would be another question.")
    elif asked.unread:
        said.append(f"Too late in the question to be read: {_few(asked.unread)}.")
    if "negation" in reasons:
        said.append("Ask without a negation, and read the answer as one to the question without it.")
    return said


def fall_words(answer: PictureAnswer) -> str | None:
    """Say from what to what hiding a part lowers the confidence; None without an answer, or if nothing was hidden."""
    if answer.confidence is None or answer.heatmap_fall is None:
        return None
    digits = _digits(answer)
    return f"from {percent(answer.confidence, digits)} to {percent(answer.confidence - answer.heatmap_fall, digits)}"


def what_it_is(answer: PictureAnswer) -> str:
    """Say what an answer is, and what it is not."""
    known, met = len(answer.probabilities), len(answer.met_answers)
    return (
        f"The most probable of the {counted(met, 'answer')} that this model met in its own questions, of {known:,} "
        f"that it knows; it can give no other, and it may be wrong. {TELLS_LITTLE.get(answer.answer or '', '')}"
        "Its confidence is no proof: it is an average over questions like those that it was tried on."
    )


def _measured(measured: MeasuredAnswers | None) -> str:
    if measured is None:
        return "nobody tried how often its answers are right"
    if measured.share is None:
        return "it answered no question that it was tried on"
    return f"right when tried: {measured.right} of {counted(measured.answered, 'answer')} ({measured.share:.1%})"


def _likely(answer: PictureAnswer, name: str) -> str:
    return percent(answer.probabilities[name], _digits(answer))


def _digits(answer: PictureAnswer) -> int:
    """Count the digits of every probability: first and second stay apart, and the first with and without a part."""
    first = [share for _, share in answer.ranked_met(2)]
    hidden = {first[0], first[0] - (answer.heatmap_fall or 0.0)}
    return max(digits_apart(set(first)), digits_apart(hidden))


def _reason(answer: PictureAnswer, reason: str) -> str:
    if reason == "unknown_word":
        return f"the model does not know {_few(answer.question.missed)}"
    if reason == "untaught_word":
        return f"the model was never taught {_few(answer.question.never_taught)}"
    if reason == "unread_word":
        return f"the question is too long, of which the model reads the first {len(answer.question.tokens)} words"
    if reason == "light":
        return (
            f"the picture is {answer.light} than nearly all that the model learned from, so it may be of another kind"
        )
    if reason == "negation":
        return f"the question negates ({_few(answer.question.negations)}), and the model weighs words, not logic"
    if reason != "unsure" or answer.entropy_nats is None:
        return _REASONS[reason]
    if answer.entropy_from is None:
        ((_, most),) = answer.ranked(1)
        share, least = against(most, DEFAULT_CONFIDENCE_FROM, digits_apart({most, DEFAULT_CONFIDENCE_FROM}))
        return f"the model is too unsure (confidence {share}; without a threshold it refuses below {least})"
    number, limit = uncertain_share(answer.entropy_nats, answer.entropy_from, len(answer.probabilities))
    return f"the model is too unsure (uncertainty {number} of 1; the rule refuses above {limit})"


def _quoted(words: Sequence[str]) -> str:
    return listed([f"'{_cut(one)}'" for one in words])


def _few(words: Sequence[str]) -> str:
    """List words of the question as `listed` does, long ones cut."""
    return listed([_cut(one) for one in words])


def _cut(word: str) -> str:
    return word if len(word) <= LONGEST_WORD else f"{word[:LONGEST_WORD]}..."
