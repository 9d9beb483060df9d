"""Words and answers of questions: docs/reference/data.md; MEVF's answer list (Nguyen et al., MICCAI 2019)."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgefl_protocol.errors import QuestionError
from edgefl_protocol.rules.questions import (
    FUNCTION_WORDS,
    LENGTH,
    MAX_CHARACTERS,
    Questions,
    check_question,
    content_words,
    known_words,
    names_something,
    negations,
    normalised_answer,
    token_ids,
    words_of,
)

WORDS = ("are", "is", "lung", "the")
ANY = st.text(max_size=60)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Are the  lungs\tclear?", ("are", "the", "lungs", "clear")),
        ("X-ray, x ray or xray", ("xray", "xray", "or", "xray")),
        ("Is it 5.6cm, or 1,000 mm (50%)?", ("is", "it", "5.6cm", "or", "1000", "mm", "50%")),
        ("the patient’s skin", ("the", "patient's", "skin")),
        ("ＣＴ图像里的肺?", ("ct", "图", "像", "里", "的", "肺")),  # wide letters; each Chinese character is a word
        ("?!…", ()),
    ],
)
def test_words(text: str, words: tuple[str, ...]) -> None:
    assert words_of(text) == words


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("Yes", "yes"),
        (" The Left  Lung. ", "left lung"),
        ("Two of the X-rays!", "2 of xrays"),  # number words are digits, articles go, x ray is xray
        ("X-ray", "xray"),
        ("none", "0"),
        ("6.5 x 6.2 x 8.8cm", "6.5 x 6.2 x 8.8cm"),
        ("ruq pain/nausea;fever", "ruq pain nausea fever"),
        ("The", "the"),  # nothing would be left
        ("+", "+"),
        ("", ""),
        ("肝脏, 肺", "肝脏 肺"),
    ],
)
def test_answers(text: str, answer: str) -> None:
    assert normalised_answer(text) == answer


def test_padding_unknown_words_and_the_tables_order() -> None:
    """Seam of trainer and device: 0 fills up to the right, 1 is unknown, 2 the first word of the table."""
    table = Questions(WORDS).table
    assert table == {"are": 2, "is": 3, "lung": 4, "the": 5}
    assert token_ids("Is the heart the lung?", table, 7).tolist() == [3, 5, 1, 5, 4, 0, 0]
    assert token_ids("Is the heart the lung?", table, 3).tolist() == [3, 5, 1]
    assert known_words("Is the heart the lung?", table) == 4
    assert known_words("Wo denn?", table) == 0


@given(ANY, st.integers(1, LENGTH))
def test_numbers_are_a_function_of_the_text(text: str, length: int) -> None:
    table = Questions(WORDS).table
    numbers = token_ids(text, table, length)
    assert numbers.dtype == np.int64 and numbers.shape == (length,)
    assert ((numbers >= 0) & (numbers < 2 + len(WORDS))).all()
    filled = int((numbers > 0).sum())
    assert (numbers[:filled] > 0).all() and filled == min(length, len(words_of(text)))  # padding is on the right
    np.testing.assert_array_equal(numbers, token_ids(text, table, length))
    assert known_words(text, table) == (token_ids(text, table, max(1, len(words_of(text)))) > 1).sum()


@given(ANY)
def test_an_answer_that_is_normalised_again_stays(text: str) -> None:
    once = normalised_answer(text)
    assert normalised_answer(once) == once == " ".join(once.split())
    assert bool(once) == bool(text.strip())


@given(st.lists(st.sampled_from(["lung", "LUNG", "a", "x", "ray", "2.5", "肺", ","]), max_size=12))
def test_words_that_are_split_again_stay(parts: list[str]) -> None:
    once = words_of(" ".join(parts))
    assert words_of(" ".join(once)) == once


def test_a_question_of_ten_thousand_words_is_bounded_and_refused() -> None:
    """The task's list of bad input."""
    text = "lung " * 10_000
    assert len(words_of(text)) == MAX_CHARACTERS // 5
    assert token_ids(text, Questions(WORDS).table, LENGTH).tolist() == [4] * LENGTH
    with pytest.raises(QuestionError, match="has 50,000 characters, at most 1,000 are allowed"):
        check_question(text)
    with pytest.raises(QuestionError, match="holds no word"):
        check_question("?!")
    check_question("lung?")


def test_function_words_are_a_part_of_a_published_stop_list() -> None:
    """The Glasgow group's list as scikit-learn has it; words that decide are in that list, not in ours."""
    published = pytest.importorskip("sklearn.feature_extraction.text").ENGLISH_STOP_WORDS
    assert published >= FUNCTION_WORDS
    decides = {
        "no",
        "not",
        "without",
        "or",
        "above",
        "below",
        "left",
        "few",
        "what",
        "where",
        "which",
        "who",
        "two",
        "her",
    }
    assert not decides & FUNCTION_WORDS and len(decides & published) > 10


@pytest.mark.parametrize(
    ("question", "words"),
    [
        ("Is there a fracture?", ("fracture",)),
        ("Is it in the left or the right lung?", ("in", "left", "or", "right", "lung")),
        ("Have these been there", ()),
        ("肺里有气吗", ("肺", "里", "有", "气", "吗")),
    ],
)
def test_words_that_an_answer_may_hang_on(question: str, words: tuple[str, ...]) -> None:
    assert content_words(words_of(question)) == words


@pytest.mark.parametrize(
    ("question", "names"),
    [
        ("Is there a?", False),
        ("Are there any? -yes/no", False),
        ("May it have been or not", False),
        ("Is there any air?", True),
        ("What is it?", True),
        ("有吗", True),
    ],
)
def test_a_question_names_what_it_asks_about(question: str, names: bool) -> None:
    assert names_something(words_of(question)) is names


@pytest.mark.parametrize(
    ("question", "words"),
    [
        ("Is there no evidence of blunting of the costophrenic angles?", ("no",)),  # of VQA-RAD, as the next six
        ("Why are the chostrochondral junctions not seen on this film?", ("not",)),
        ("was this image taken without motion artifact", ("without",)),
        ("Is/Are the ribs fractured? -yes/no", ()),  # a choice negates nothing
        ("Yes, no pneumothorax?", ("no",)),  # behind "yes" only the end of a question is a choice
        ("Say yes: without contrast?", ("without",)),
        ("Is this MRI with contrast or without contrast?", ()),
        ("Does this image use contrast or not?", ()),
        ("Does this CT have contrast or no contrast?", ()),
        ("Isn’t there a fracture, and are lesions absent?", ("isn't", "absent")),
        ("No, is there no fracture?", ("no",)),
        ("Is there a node or a notch?", ()),
        ("Are the lungs free of effusion?", ("free of",)),
        ("Are the lungs free from an effusion, and clear of air?", ("free from", "clear of")),
        ("Effusion-free?", ("free",)),
        ("Is there free air under the diaphragm?", ()),  # free and clear as plain adjectives
        ("Are the lungs clear?", ()),
        ("Is it free or loculated?", ()),
        ("Can you rule out pneumonia, or rule pneumonia out?", ("rule out",)),
        ("Is pneumonia ruled out or excluded?", ("ruled out",)),  # a choice all the same
        ("Can a fracture be excluded?", ("excluded",)),
        ("Is there absence of a fracture?", ("absence",)),
        ("Does the rule of thirds hold?", ()),
    ],
)
def test_negations(question: str, words: tuple[str, ...]) -> None:
    assert negations(words_of(question)) == words
