"""One question about one picture: what is answered, what is refused, and what is said of it.

Source: docs/reference/answers.md, docs/decisions/0046 and 0048.
"""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgefl_protocol.errors import QuestionError
from edgefl_protocol.pictures.answer import REFUSALS, AnswerRules, MeasuredAnswers, make_answer, read_question
from edgefl_protocol.pictures.answer_words import headline, learned_from, next_answers, not_read, what_it_is
from edgefl_protocol.pictures.light import Light, LightRange
from edgefl_protocol.pictures.score import ModelInfo
from edgefl_protocol.rules.questions import Questions

VOCABULARY = Questions(("is", "there", "air"), 4)
MODEL = ModelInfo(id="-/vqa/all", sha256="0" * 64, version=1, state_kind="bundle", state_sha256="1" * 64)
ANSWERS = ("no", "yes", "lung")
KNOWN = read_question("Is there air?", VOCABULARY)


def answer(probabilities=(0.2, 0.7, 0.1), question=KNOWN, **changes):
    rules = AnswerRules(
        answers=ANSWERS,
        seen=changes.pop("seen", (True,) * 3),
        unsure_above=changes.pop("unsure_above", 1.0),
        measured=changes.pop("measured", None),
        learned_from=changes.pop("learned_from", ()),
        light=changes.pop("usual", None),
    )
    given = {"name": "a.png", "faults": (), "expired": None, "model": MODEL, "milliseconds": 1.0} | changes
    outputs = None if probabilities is None else {"probabilities": np.array(probabilities, np.float32)}
    return make_answer(outputs, rules, question, **given)


def test_the_most_probable_answer_with_its_confidence():
    found = answer()
    assert (found.answer, found.refused, found.refuse_reasons) == ("yes", False, ())
    assert found.confidence == pytest.approx(0.7)
    assert [name for name, _ in found.ranked(2)] == ["yes", "no"]
    untried = "yes; nobody tried how often its answers are right; confidence 70%"
    assert headline(found) == untried and next_answers(found, 2) == "Next: no 20%"


@pytest.mark.parametrize(
    ("answered", "right", "said"),
    [
        (41, 26, "yes; right when tried: 26 of 41 answers (63.4%); confidence 70%"),
        (0, 0, "yes; it answered no question that it was tried on; confidence 70%"),
    ],
)
def test_beside_a_confidence_stands_how_many_answers_were_right(answered, right, said):
    """A model that was 80 % sure had been right about 63 % of what it answers: a softmax is no share of right ones."""
    found = answer(measured=MeasuredAnswers(answered=answered, right=right))
    assert headline(found) == said
    share = right / answered if answered else None
    assert found.to_json(1)["measured"] == {"answered": answered, "right": right, "share": share}
    assert answer().to_json(1)["measured"] is None


def test_an_answer_says_whose_pictures_the_model_learned_from():
    """Nothing knows what a picture shows, so each answer says what was compared, or that nobody looked."""
    one, two = answer(learned_from=("chest",)), answer(learned_from=("abdomen", "head"))
    assert learned_from(one) == (
        "It learned from pictures of the site chest; whether this is such a picture is not checked."
    )
    assert "of the sites abdomen and head; whether" in learned_from(two)
    assert learned_from(answer(learned_from=("chest",), usual=GREY, light=RADIOGRAPH)) == (
        "It learned from pictures of the site chest; of this one only brightness and colour were compared with these."
    )
    assert two.to_json(1)["learned_from"] == ["abdomen", "head"]


GREY = LightRange(brightness=(100.0, 200.0), red_by_green=(0.98, 1.02), blue_by_green=(0.98, 1.02))
RADIOGRAPH = Light(brightness=150.0, red_by_green=1.0, blue_by_green=1.0, corners=1.0)
SKIN = Light(brightness=150.0, red_by_green=1.3, blue_by_green=0.9, corners=1.0)
WORD_RULES = ("no_known_word", "no_subject", "several_questions", "unknown_word", "unread_word", "negation")
PICTURE_RULES = ("size", "shape", "transparent")
UNTAUGHT = read_question("Is there air?", VOCABULARY, {"is"})  # no question that was learned from had air
REFUSED = {
    "no_known_word": ({"probabilities": None, "question": read_question("pneumothorax?", VOCABULARY)}, "knows no word"),
    "no_subject": (
        {"question": read_question("Is there a?", VOCABULARY)},
        "names nothing that an answer could hang on",
    ),
    "several_questions": (
        {"question": read_question("Is there air? Is air there?", Questions(("is", "there", "air"), 9))},
        "several questions",
    ),
    "unknown_word": ({"question": read_question("Is there tuberculosis?", VOCABULARY)}, "does not know tuberculosis"),
    "untaught_word": ({"question": UNTAUGHT}, "was never taught air"),
    "unread_word": ({"question": read_question("Is there air, is there fluid?", VOCABULARY)}, "the first 4 words"),
    "negation": (
        {"question": read_question("Is there no air?", Questions(("is", "there", "no", "air"), 4))},
        "negates (no)",
    ),
    "size": ({"faults": ("size",)}, "fewer pixels than the model reads"),
    "shape": ({"faults": ("shape",)}, "much longer one way than the other, and the model reads a square"),
    "transparent": ({"faults": ("transparent",)}, "more than a tenth of the picture is transparent"),
    "light": ({"usual": GREY, "light": SKIN}, "the picture is redder than nearly all that the model learned from"),
    "unsure": ({"unsure_above": 0.8}, "too unsure (uncertainty 0.730 of 1; the rule refuses above 0.728)"),
    "unseen_answer": ({"seen": (True, False, True)}, "never met in its own questions"),
    "model_expired": ({"expired": True}, "past its expiry date"),
}


@pytest.mark.parametrize("reason", REFUSALS)
def test_each_rule_refuses_and_no_answer_is_named(reason):
    changes, words = REFUSED[reason]
    found = answer(**changes)
    assert found.refuse_reasons == (reason,) and found.refused
    assert found.answer is None and found.confidence is None and found.to_json(3)["answer"] is None
    assert words in headline(found) and headline(found).startswith("No answer: ")
    assert not any(name in headline(found).split() for name in ANSWERS if name != "no")
    assert next_answers(found, 3) is None


@pytest.mark.parametrize(
    ("usual", "light", "refuses", "tried"),
    [(GREY, SKIN, True, True), (GREY, RADIOGRAPH, False, True), (None, SKIN, False, False), (GREY, None, False, False)],
)
def test_a_picture_unlike_those_learned_from_gets_no_answer(usual, light, refuses, tried):
    found = answer(usual=usual, light=light)
    assert (found.answer is None, "light" in found.refuse_reasons, "light" in found.rules_tried) == (
        refuses, refuses, tried,
    )  # fmt: skip
    assert found.light == found.to_json(1)["light"] == ("redder" if refuses else None)


def test_rules_without_a_threshold_or_date_are_not_tried():
    assert answer(unsure_above=None, expired=False).rules_tried == (
        *WORD_RULES, *PICTURE_RULES, "unsure", "unseen_answer", "model_expired",
    )  # fmt: skip
    assert answer().rules_tried == (*WORD_RULES, *PICTURE_RULES, "unsure", "unseen_answer")
    nothing = answer(None, read_question("x", VOCABULARY))
    assert nothing.rules_tried == (*WORD_RULES, *PICTURE_RULES) and nothing.probabilities == {}


@pytest.mark.parametrize("unsure_above", [None, np.log(3)])
def test_without_a_threshold_an_answer_below_half_is_refused(unsure_above):
    """More probably wrong than right by the model's own word: docs/decisions/0046. ln 3 refuses none of three."""
    found = answer((0.4, 0.3, 0.3), unsure_above=unsure_above)
    assert (found.answer, found.refuse_reasons, found.entropy_from) == (None, ("unsure",), None)
    assert headline(found) == (
        "No answer: the model is too unsure (confidence 40%; without a threshold it refuses below 50%)"
    )
    assert "confidence just below 50.0%" in headline(answer((0.4997, 0.3003, 0.2), unsure_above=unsure_above))
    assert answer((0.5, 0.3, 0.2), unsure_above=unsure_above).answer == "no"
    assert answer((0.4, 0.3, 0.3), unsure_above=1.09).answer == "no"  # a threshold that was chosen stands


def test_at_the_threshold_it_still_answers():
    entropy = answer().entropy_nats
    assert answer(unsure_above=entropy).answer == "yes"
    assert answer(unsure_above=np.nextafter(entropy, 0)).refuse_reasons == ("unsure",)


@given(st.lists(st.floats(0, 1), min_size=3, max_size=3).filter(lambda one: sum(one) > 0.01))
def test_answers_are_ranked_and_every_one_is_there(shares):
    probabilities = np.array(shares, np.float32) / np.float32(sum(shares))
    ranked = answer(probabilities, unsure_above=None).ranked(3)
    assert sorted(name for name, _ in ranked) == sorted(ANSWERS)
    assert [share for _, share in ranked] == sorted((float(one) for one in probabilities), reverse=True)
    assert ranked[0][0] == ANSWERS[int(probabilities.argmax())]


def test_words_that_are_not_known_and_words_that_come_too_late_are_told():
    read = read_question("Is there (really) air, or is there a tube?", VOCABULARY)
    assert read.unknown == ("really",) and read.unread == ("or", "is", "there", "a", "tube")
    assert read.tokens.tolist() == [2, 3, 1, 4]
    found = answer(question=read)
    assert found.refuse_reasons == ("unknown_word", "unread_word") and found.answer is None
    assert not_read(found) == [
        "Ask in other words: without 'really' this would be another question.",
        "Ask in fewer words: without 'or' and 'tube' this would be another question.",
    ]


@pytest.mark.parametrize("probabilities", [(0.2, 0.7, 0.1), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0)])
def test_an_unknown_word_refuses_whatever_the_answer_would_be(probabilities):
    """The figures stay, marked as refused: docs/design.md 5."""
    found = answer(probabilities, read_question("Is there tuberculosis?", VOCABULARY), unsure_above=None)
    assert found.refuse_reasons == ("unknown_word",) and found.confidence is None
    told = found.to_json(3)
    assert told["model"]["looks"] == told["model"]["better_than_chance"]
    assert (told["answer"], told["refused"], told["unknown_words"]) == (None, True, ["tuberculosis"])
    assert [one["confidence"] for one in told["answers"]] == sorted(
        (pytest.approx(share) for share in probabilities), key=lambda one: -one.expected
    )
    assert next_answers(found, 3) is None


@given(st.sets(st.sampled_from(VOCABULARY.words)), st.sets(st.sampled_from(VOCABULARY.words)))
def test_a_word_that_was_not_taught_refuses_where_an_answer_may_hang_on_it(taught, asked):
    """Of the three words `air` alone counts: `is` and `there` are on the stop list. docs/decisions/0051."""
    asked = {*asked, "air"}
    read = read_question(" ".join(sorted(asked)), VOCABULARY, taught)
    found = answer((0.0, 1.0, 0.0), read, unsure_above=None)
    untaught = [word for word in sorted(asked) if word not in taught]
    assert found.refuse_reasons == (("untaught_word",) if "air" in untaught else ())
    assert (found.answer is None) is found.refused is not read.whole
    assert found.to_json(1)["untaught_words"] == untaught and "untaught_word" in found.rules_tried
    assert not_read(found) == (
        ["Ask in other words: without 'air' this would be another question."]
        if found.refused
        else [f"Never taught to the model, so not asked: {' and '.join(untaught)}."]
        if untaught
        else []
    )


def test_where_nobody_says_what_was_taught_no_word_is_refused_for_it():
    """A bundle from before: docs/design.md 7."""
    found = answer()
    assert found.answer == "yes" and found.to_json(1)["untaught_words"] is None
    assert "untaught_word" not in found.rules_tried


def test_words_not_known_and_not_taught_are_told_together():
    found = answer(question=read_question("Is air there, tuberculosis?", VOCABULARY, set()))
    assert found.refuse_reasons == ("unknown_word", "untaught_word")
    assert headline(found) == "No answer: the model does not know tuberculosis; the model was never taught air"
    assert not_read(found) == ["Ask in other words: without 'tuberculosis' and 'air' this would be another question."]


def test_a_function_word_refuses_nothing_and_is_told():
    found = answer(question=read_question("Is there an air", VOCABULARY))
    assert found.answer == "yes" and headline(found).endswith("; confidence 70%, asked without: an")
    assert not_read(found) == ["Not known to the model, so not asked: an."]
    late = answer(question=read_question("there is there air is it", VOCABULARY))
    assert late.answer == "yes" and not_read(late) == ["Too late in the question to be read: is and it."]


def test_a_refusal_for_words_stays_short_however_long_the_question():
    words = [f"w{i}" for i in range(90)]
    for text in ("is " + " ".join(words), "is " + "a" * 900, "is there air is " + " ".join(words)):
        found = answer(question=read_question(text, VOCABULARY))
        assert found.refused and len(headline(found)) < 200 and all(len(one) < 200 for one in not_read(found))


@pytest.mark.parametrize("question", ["Is there a?", "Is there an?", "Are there?", "Is there any? - yes/no", "It is"])
def test_a_question_that_names_nothing_gets_no_answer(question):
    """What a script asks with nothing in its `$finding`: any answer to it is one to no question."""
    vocabulary = Questions(("is", "are", "there", "any", "yes", "no", "air"), 6)
    found = answer((0.98, 0.01, 0.01), question=read_question(question, vocabulary))
    assert (found.answer, found.refuse_reasons) == (None, ("no_subject",)) and not found.question.whole
    assert headline(found) == "No answer: the question names nothing that an answer could hang on"
    assert not_read(found)[-1] == "Name what you ask about." and "no_subject" in found.rules_tried
    asked = f"{question.partition('?')[0]} air?"
    assert answer(question=read_question(asked, vocabulary)).refuse_reasons == ()


@pytest.mark.parametrize("question", ["Is there no air?", "Is air absent?", "Are they free of air?", "Rule out air"])
def test_a_question_that_negates_gets_no_answer(question):
    """A "no" to it would be read as reassurance, and may be the answer to the plain question: docs/decisions/0048."""
    vocabulary = Questions(("is", "are", "they", "there", "no", "absent", "free", "of", "rule", "out", "air"), 6)
    found = answer(question=read_question(question, vocabulary))
    told = found.to_json(1)
    assert (found.answer, found.refuse_reasons) == (None, ("negation",)) and not found.question.whole
    assert found.probabilities and len(told["negating_words"]) == 1 and next_answers(found, 3) is None
    assert headline(found) == (
        f"No answer: the question negates ({told['negating_words'][0]}), and the model weighs words, not logic"
    )
    assert not_read(found) == ["Ask without a negation, and read the answer as one to the question without it."]


def test_a_question_that_does_not_negate_is_not_refused_for_it():
    assert not_read(answer()) == [] and answer().to_json(1)["negating_words"] == []
    assert "negation" in answer().rules_tried and answer().answer == "yes"


def test_a_known_word_that_comes_too_late_does_not_count():
    assert not read_question("one two three four air", VOCABULARY).known
    assert read_question("one two three air", VOCABULARY).known


@pytest.mark.parametrize("text", ["", "   ", "?!", "word " * 10_000, "a" * 1001, "\x00" * 50])
def test_what_is_no_question_is_refused_in_one_sentence(text):
    with pytest.raises(QuestionError) as caught:
        read_question(text, VOCABULARY)
    assert caught.value.code == "bad_question" and str(caught.value).count("\n") == 0 and len(str(caught.value)) < 200


@given(st.text(max_size=1000))
def test_any_text_is_read_or_refused(text):
    try:
        read = read_question(text, VOCABULARY)
    except QuestionError:
        return
    assert read.tokens.shape == (4,) and read.tokens.dtype == np.int64
    assert read.tokens.min() >= 0 and read.tokens.max() <= 4
    assert read.known == any(word in VOCABULARY.words for word in read_words(text))
    assert not set(read.unknown) & set(VOCABULARY.words)


def read_words(text):
    from edgefl_protocol.rules.questions import words_of

    return words_of(text)[:4]


def test_what_an_answer_is_not_is_said():
    assert "may be wrong" in what_it_is(answer())
    assert "of the 3 answers that this model met in its own questions, of 3 that it knows;" in what_it_is(answer())
    assert "A no" not in what_it_is(answer())


@pytest.mark.parametrize("question", ["Is there air?", "Is the air clear?"])
def test_beside_a_no_stands_that_it_tells_little_whichever_way_the_question_asks(question):
    """To the second a no says that something is there, so what is said must not call it an absence."""
    read = read_question(question, Questions(("is", "there", "the", "air", "clear"), 6))
    said = what_it_is(answer((0.7, 0.2, 0.1), question=read))
    assert (
        "A no tells little: a model may say it to most questions, whether they ask for a finding or its absence" in said
    )
    yes = what_it_is(answer((0.2, 0.7, 0.1)))
    assert "A yes tells little: a model may say it to some wordings, whatever the picture shows. " in yes
    assert "nothing is there" not in said and "findings absent" not in said


def test_answers_that_it_never_met_are_not_told_as_next():
    """They would be refused; `--json` lists all."""
    found = answer((0.2, 0.6, 0.2), seen=(True, True, False))
    assert (
        next_answers(found, 3) == "Next: no 20%" and [one["answer"] for one in found.to_json(3)["answers"]][2] == "lung"
    )
    assert "of the 2 answers that this model met in its own questions, of 3 that it knows;" in what_it_is(found)
    assert next_answers(answer((0.2, 0.6, 0.2), seen=(False, True, False)), 3) is None


def test_two_answers_that_differ_are_never_written_alike():
    close = answer((0.2, 0.4012, 0.3988), unsure_above=1.09)
    assert headline(close).endswith("; confidence 40.1%") and next_answers(close, 2) == "Next: lung 39.9%"


@pytest.mark.parametrize(
    ("text", "several"),
    [
        ("Is there air?", False), ("Is there air??", False), ("Is there air? -yes/no", False), ("Is air there", False),
        ("? Is there air ?", False), ("Is there air? Is there fluid?", True), ("Air? Fluid", False),
        ("\u6709\u6c14\u5417\uff1f\u6709\u6c34\u5417\uff1f", True),
    ],
)  # fmt: skip
def test_two_questions_are_several(text, several):
    """The network gives one answer to all its words; VQA-RAD writes the kind of answer behind some questions."""
    assert read_question(text, VOCABULARY).several is several


def test_the_refusal_on_the_page_is_what_is_said():
    """docs/reference/answers.md, "When there is no answer"."""
    page = (Path(__file__).parents[3] / "docs/reference/answers.md").read_text(encoding="utf-8")
    shown = page.partition("## When there is no answer\n\n```\n")[2].partition("```")[0]
    found = answer(question=read_question("Is there tuberculosis?", VOCABULARY))
    assert shown.splitlines() == [f"chest.png: {headline(found)}", *not_read(found)]
