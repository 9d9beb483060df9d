"""What is said to one question about one picture, with the JSON keys that other programs rely on (docs/design.md 5).

Guarantees: an answer is the most probable one of those that the site learned; where a rule refuses it there is none,
and the probabilities beside it are no finding. The rules, in the order in which reasons are listed:

1. `no_known_word`: no word that the network reads of the question is in its table. It is then not run at all.
2. `no_subject`: no word of the whole question names what is asked about (`rules.questions.names_something`).
3. `several_questions`: more than one of its parts ends with a question mark.
4. `unknown_word`: some words are, but a word on which an answer may hang (`rules.questions.content_words`) is not.
5. `untaught_word`: such a word is in the table, and no question that the model learned from had it.
6. `unread_word`: such a word stands behind the last one that the network reads.
7. `negation`: the question negates. A network weighs words and knows no logic, so it may answer the opposite question.
8. `size`, `shape`, `transparent`: rules of the picture gate (`quality.faults_of_any_picture`). No other one of it is
   asked: those are about photographs of skin, and were measured on them (docs/decisions/0046).
9. `light`: brightness or colour of the picture is unlike that of nearly all pictures that the model learned from
   (`light.LightRange` of the card): a photograph is no radiograph. A card without a range never refuses for it.
10. `unsure`: the entropy of the probabilities is above the card's threshold, which was chosen on `tune` questions;
   where none was chosen, the confidence is below `DEFAULT_CONFIDENCE_FROM` (docs/decisions/0046).
11. `unseen_answer`: the most probable answer is one that the site's own questions never had.
12. `model_expired`: the bundle is past its expiry date.

The first seven look at the question alone (docs/decisions/0048 and 0051).

That no rule refuses never means that the answer is right, nor that the picture is of the kind that was learned: no
rule looks at what it shows. So every answer says how often the model's answers were right (`measured`), and from which
sites' pictures it learned.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from edgefl_protocol.pictures.light import Light, LightRange
from edgefl_protocol.pictures.referral import entropy_nats, in_force
from edgefl_protocol.pictures.score import ModelInfo, RolloutMap
from edgefl_protocol.rules.questions import (
    FIRST,
    Questions,
    check_question,
    content_words,
    names_something,
    negations,
    token_ids,
    words_of,
)

REFUSALS: Final = (
    "no_known_word", "no_subject", "several_questions", "unknown_word", "untaught_word", "unread_word", "negation",
    "size", "shape", "transparent", "light", "unsure", "unseen_answer", "model_expired",
)  # fmt: skip


DEFAULT_CONFIDENCE_FROM: Final = 0.5  # without a threshold: below it an answer is more probably wrong than right


@dataclass(frozen=True, kw_only=True)
class MeasuredAnswers:
    """How often a model's answers were right, to questions that were kept from learning."""

    answered: int  # questions that it did not refuse
    right: int  # of them, those that it answered rightly

    @property
    def share(self) -> float | None:
        """Share of the answers that were right; None where it answered none."""
        return self.right / self.answered if self.answered else None

    def to_json(self) -> dict[str, Any]:
        """Write the object `measured` of an answer."""
        return {"answered": self.answered, "right": self.right, "share": self.share}


@dataclass(frozen=True, eq=False)
class ReadQuestion:
    """A question as the network reads it."""

    text: str  # as it was asked
    tokens: NDArray[np.int64]  # (L,) numbers of its first words
    unknown: tuple[str, ...]  # of those, the words that are not in the table, each once
    unread: tuple[str, ...]  # the words after them, which the network does not read
    # of the first, the words in the table that the model was never taught, each once; None where nobody says which
    untaught: tuple[str, ...] | None = None

    @property
    def known(self) -> bool:
        """Whether any word that is read is in the table."""
        return bool((self.tokens >= FIRST).any())

    @property
    def asks(self) -> bool:
        """Whether its words name anything to answer about, be they read or not: "Is there a?" does not."""
        return names_something(words_of(self.text))

    @property
    def several(self) -> bool:
        """Whether these are several questions: "Is there fluid? Is there air?"."""
        return sum(bool(words_of(part)) for part in self.text.replace("\uff1f", "?").split("?")[:-1]) > 1

    @property
    def missed(self) -> tuple[str, ...]:
        """The words that are read and not known on which an answer may hang."""
        return content_words(self.unknown)

    @property
    def never_taught(self) -> tuple[str, ...]:
        """The words that are known and were never taught on which an answer may hang."""
        return content_words(self.untaught or ())

    @property
    def cut_off(self) -> tuple[str, ...]:
        """The words that are not read on which an answer may hang, each once."""
        return tuple(dict.fromkeys(content_words(self.unread)))

    @property
    def whole(self) -> bool:
        """Whether no rule refuses the question for its words: it asks one thing, what an answer may hang on is taught
        and read, and none negates."""
        lost = self.missed or self.never_taught or self.cut_off
        return self.known and self.asks and not (self.several or lost or self.negations)

    @property
    def negations(self) -> tuple[str, ...]:
        """The words that negate, each once: a network weighs words and knows no logic."""
        return negations(words_of(self.text))


def read_question(text: str, vocabulary: Questions, taught: Collection[str] | None = None) -> ReadQuestion:
    """Turn a question into numbers, and keep what is lost.

    Args:
        taught: the words that the model was taught, of those in the table; None where nobody says which.

    Raises:
        QuestionError: it is too long, or has no word.
    """
    check_question(text)
    words, table = words_of(text), vocabulary.table
    read, unread = words[: vocabulary.length], words[vocabulary.length :]
    unknown = tuple(dict.fromkeys(word for word in read if word not in table))
    untaught = None
    if taught is not None:
        untaught = tuple(dict.fromkeys(word for word in read if word in table and word not in taught))
    return ReadQuestion(text, token_ids(text, table, vocabulary.length), unknown, unread, untaught)


@dataclass(frozen=True, kw_only=True)
class PictureAnswer:
    """Result for one question about one picture."""

    image: str | None  # name of the picture as the caller gave it, or None
    question: ReadQuestion
    answer: str | None  # None where it is refused
    # probability of every answer that the model knows, the most probable first; empty where the network was not run
    probabilities: Mapping[str, float]
    met_answers: frozenset[str]  # of these answers, those that the site's own questions had
    refuse_reasons: tuple[str, ...]  # in the order of `REFUSALS`
    rules_tried: tuple[str, ...]  # the rules that were asked, in the same order; some have no threshold or date
    entropy_nats: float | None  # of the probabilities; None where the network was not run
    entropy_from: float | None  # above which `unsure` refuses; None: below `DEFAULT_CONFIDENCE_FROM` it does
    heatmap: str | None  # path of the drawn picture, or None
    model: ModelInfo  # which model answered
    milliseconds: float  # wall time of decoding, preparing and running
    measured: MeasuredAnswers | None = None  # how often such answers were right; None where nobody tried
    learned_from: tuple[str, ...] = ()  # sites whose pictures the model learned from
    light: str | None = None  # how the picture differs from these in brightness or colour, a word of `light.SIDES`
    transparent: bool = False  # whether parts of the picture were, and were laid on white
    heatmap_fall: float | None = None  # of the answer's probability, by hiding the map's strongest part
    map: RolloutMap | None = field(default=None, repr=False, compare=False)  # where the network looked; not in the JSON

    @property
    def refused(self) -> bool:
        """Whether a rule refuses the answer."""
        return bool(self.refuse_reasons)

    @property
    def confidence(self) -> float | None:
        """The answer's probability, after the temperature; None where it is refused."""
        return None if self.answer is None else self.probabilities[self.answer]

    def ranked(self, top: int) -> list[tuple[str, float]]:
        """List the `top` most probable answers with their probabilities."""
        return list(self.probabilities.items())[:top]

    def ranked_met(self, top: int) -> list[tuple[str, float]]:
        """List the `top` most probable of the answers that can be given."""
        return [one for one in self.probabilities.items() if one[0] in self.met_answers][:top]

    def to_json(self, top: int) -> dict[str, Any]:
        """Write the object that `edgefl ask --json` prints, with this many answers."""
        return {
            "image": self.image,
            "question": self.question.text,
            "answer": self.answer,
            "confidence": self.confidence,
            "measured": None if self.measured is None else self.measured.to_json(),
            "learned_from": list(self.learned_from),
            "learned_from_federation": self.model.learned_from_federation,
            "answers": [{"answer": name, "confidence": share} for name, share in self.ranked(top)],
            "refused": self.refused,
            "refuse_reasons": list(self.refuse_reasons),
            "rules_tried": list(self.rules_tried),
            "unknown_words": list(self.question.unknown),
            "untaught_words": None if self.question.untaught is None else list(self.question.untaught),
            "unread_words": list(self.question.unread),
            "negating_words": list(self.question.negations),
            "entropy_nats": self.entropy_nats,
            "entropy_from": self.entropy_from,
            "heatmap": self.heatmap,
            "heatmap_fall": self.heatmap_fall,
            "light": self.light,
            "transparent": self.transparent,
            "model": {**self.model.to_json(), "looks": self.model.better_than_chance},
            "milliseconds": round(self.milliseconds, 3),
        }


@dataclass(frozen=True, kw_only=True)
class AnswerRules:
    """What a bundle says of its answers."""

    answers: tuple[str, ...]  # in the order of the network's outputs
    seen: tuple[bool, ...]  # for each, whether the site's own questions had it
    unsure_above: float | None  # entropy in nats; None where no threshold was chosen
    measured: MeasuredAnswers | None = None  # None where nobody tried
    learned_from: tuple[str, ...] = ()  # sites
    light: LightRange | None = None  # of the pictures learned from; None where nobody says

    @property
    def unsure_in_force(self) -> float | None:
        """Above which entropy an answer is refused; None where no threshold says: entropy is ln K at most."""
        return in_force(self.unsure_above, math.log(len(self.answers)))

    def unlike(self, light: Light | None) -> str | None:
        """Say how a picture's light differs from that of the pictures learned from; None where nobody can tell."""
        return None if light is None or self.light is None else self.light.unlike(light)

    def too_unsure(self, entropy: float, confidence: float) -> bool:
        """Tell whether an answer is refused, by the threshold or, without one, by default."""
        above = self.unsure_in_force
        return confidence < DEFAULT_CONFIDENCE_FROM if above is None else entropy > above


def make_answer(
    outputs: Mapping[str, NDArray[np.float32]] | None,
    rules: AnswerRules,
    question: ReadQuestion,
    *,
    name: str | None,
    faults: Collection[str],
    expired: bool | None,
    model: ModelInfo,
    milliseconds: float,
    transparent: bool = False,
    light: Light | None = None,
) -> PictureAnswer:
    """Judge one question from what the network gave for it.

    Args:
        outputs: one row of each output, `probabilities` (K,) and, where there is one, `map` (N,); None where the
            network was not run, for want of a known word.
        faults: reasons that `quality.faults_of_any_picture` gives for the picture.
        expired: whether the model is past its date; None for a model without one.
        transparent: whether parts of the picture were.
        light: of the picture; None where nobody measured it.
    """
    probabilities = np.zeros(0, np.float32) if outputs is None else outputs["probabilities"]
    entropy = None if outputs is None else entropy_nats(probabilities)
    best = None if outputs is None else int(probabilities.argmax())
    found = {
        "no_known_word": not question.known,
        "no_subject": question.known and not question.asks,
        "several_questions": question.known and question.several,
        "unknown_word": question.known and bool(question.missed),
        "untaught_word": bool(question.never_taught),
        "unread_word": question.known and bool(question.cut_off),
        "negation": question.known and bool(question.negations),
        **{fault: fault in faults for fault in ("size", "shape", "transparent")},
        "light": rules.unlike(light) is not None,
        "unsure": entropy is not None and rules.too_unsure(entropy, float(probabilities.max())),
        "unseen_answer": best is not None and not rules.seen[best],
        "model_expired": expired is True,
    }
    reasons = tuple(reason for reason in REFUSALS if found[reason])
    return PictureAnswer(
        image=name,
        question=question,
        answer=None if reasons or best is None else rules.answers[best],
        probabilities=_ranked(rules.answers, probabilities),
        met_answers=frozenset(name for name, seen in zip(rules.answers, rules.seen, strict=True) if seen),
        refuse_reasons=reasons,
        rules_tried=_tried(question, rules, light, ran=outputs is not None, expired=expired),
        entropy_nats=entropy,
        entropy_from=rules.unsure_in_force,
        heatmap=None,
        model=model,
        milliseconds=milliseconds,
        measured=rules.measured,
        learned_from=rules.learned_from,
        light=rules.unlike(light),
        transparent=transparent,
        map=None if outputs is None or "map" not in outputs else outputs["map"].copy(),
    )


def _tried(
    question: ReadQuestion, rules: AnswerRules, light: Light | None, *, ran: bool, expired: bool | None
) -> tuple[str, ...]:
    asked = {
        "untaught_word": question.untaught is not None,
        "light": light is not None and rules.light is not None,
        "unsure": ran,
        "unseen_answer": ran,
        "model_expired": expired is not None,
    }
    return tuple(rule for rule in REFUSALS if asked.get(rule, True))


def _ranked(answers: Sequence[str], probabilities: NDArray[np.float32]) -> dict[str, float]:
    """Sort from the most probable down; of equal ones the first in the bundle's order comes first."""
    order = np.argsort(-probabilities, kind="stable")
    return {answers[index]: float(probabilities[index]) for index in order}
