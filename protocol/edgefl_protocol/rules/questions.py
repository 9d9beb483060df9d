"""Questions about pictures: their words, the numbers that a network reads, and how an answer is written.

Server and device both call this, so that a question asked on a device is the one that was learned.

Guarantees: the same text and table give the same numbers; no text is read beyond `MAX_CHARACTERS`; number 0 is
padding, 1 a word that is not in the table, and 2 the table's first word. An answer that is normalised again stays.
Whether a word counts depends on the word alone, never on an answer.
Source: docs/reference/data.md (questions); for answers `tools/compute_softscore.py` of MEVF (Nguyen et al., 2019); for
words that do not count the stop list of the Glasgow Information Retrieval Group; for negations words and phrases of
NegEx (Chapman et al., 2001). docs/decisions/0048.
"""

import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final

import numpy as np
from numpy.typing import NDArray

from edgefl_protocol.errors import QuestionError

MAX_CHARACTERS: Final = 1000  # of a question or an answer; the longest of VQA-RAD and SLAKE has fewer than 200
LENGTH: Final = 20  # words of a question that a network reads: 99.9 % of VQA-RAD's have no more
PADDING: Final = 0
UNKNOWN: Final = 1
FIRST: Final = 2  # number of the table's first word

FUNCTION_WORDS: Final = frozenset({
    "a", "an", "the", "this", "that", "these", "those", "there", "and", "of", "please",
    "i", "me", "my", "we", "us", "our", "you", "your", "it", "its", "they", "them", "their",
    "am", "is", "are", "was", "were", "be", "been", "being", "has", "have", "had", "do",
    "can", "could", "will", "would", "should", "may", "might", "must",
})  # fmt: skip
"""Articles, pronouns and auxiliary verbs of English: an answer hardly hangs on whether one of them is read. Negations,
words of choice, place, number and sex, and the words that begin a question are not among them."""
_NAMES_NOTHING: Final = frozenset({"any", "or", "yes", "no", "not"})  # alone: "Is there any? yes/no" asks nothing
NEGATIONS: Final = frozenset({
    "no", "not", "nor", "neither", "never", "none", "without", "cannot", "absent", "absence", "lack", "lacks",
    "lacking", "negative", "exclude", "excludes", "excluded", "excluding",
})  # fmt: skip
_FREE: Final = frozenset({"free", "clear"})  # negate before one of the next: free air is no negation
_OF: Final = frozenset({"of", "from"})
_RULE: Final = frozenset({"rule", "rules", "ruled", "ruling"})  # negate with an "out" behind them

_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
_WORD = re.compile(r"\d*\.\d+[^\W_]*%?|[^\W_]+(?:'[^\W_]+)*%?")  # 2.5cm, .5, patient's, 50%
_IDEOGRAPH = re.compile("[\u3400-\u9fff]|[^\u3400-\u9fff]+")  # Chinese is written without spaces
_ARTICLES = frozenset({"a", "an", "the"})
_NUMBERS: Mapping[str, str] = {
    "none": "0", "zero": "0", "one": "1", "two": "2", "three": "3", "four": "4", "five": "5", "six": "6", "seven": "7",
    "eight": "8", "nine": "9", "ten": "10",
}  # fmt: skip


@dataclass(frozen=True)
class Questions:
    """What a network was told about questions: the words it knows, and how many of a question it reads."""

    words: tuple[str, ...]  # the first has the number 2
    length: int = LENGTH  # words of a question

    @property
    def table(self) -> dict[str, int]:
        """The number of each word."""
        return {word: number for number, word in enumerate(self.words, FIRST)}


def check_question(text: str) -> None:
    """Refuse, by a `QuestionError`, a text without a word or of more than `MAX_CHARACTERS`."""
    if len(text) > MAX_CHARACTERS:
        raise QuestionError(
            f"The question has {len(text):,} characters, at most {MAX_CHARACTERS:,} are allowed: ask in fewer words."
        )
    if not words_of(text):
        raise QuestionError("The question holds no word: write one.")


def words_of(text: str) -> tuple[str, ...]:
    """Split a text into its words, in lower case and without punctuation; each Chinese character is a word."""
    return _joined([part for word in _words(text) for part in _IDEOGRAPH.findall(word)])


def normalised_answer(text: str) -> str:
    """Write an answer as the answer lists of the field do: `Two of the X-rays.` becomes `2 of xrays`.

    Lower case, no punctuation, no article, digits for number words, `xray` for `x ray`. A text that is nothing else
    stays, in lower case.
    """
    words = _joined([_NUMBERS.get(word, word) for word in _words(text) if word not in _ARTICLES])
    return " ".join(words or _plain(text).split())


def token_ids(text: str, words: Mapping[str, int], length: int) -> NDArray[np.int64]:
    """Number the first words of a question, (length,); 0 fills up to the right.

    Args:
        words: a word's number, see `Questions.table`.
    """
    numbers = np.full(length, PADDING, dtype=np.int64)
    for place, word in enumerate(islice(words_of(text), length)):
        numbers[place] = words.get(word, UNKNOWN)
    return numbers


def known_words(text: str, words: Mapping[str, int]) -> int:
    """Count the words of a question that are in the table."""
    return sum(word in words for word in words_of(text))


def content_words(words: Iterable[str]) -> tuple[str, ...]:
    """Keep the words that an answer may hang on: all but `FUNCTION_WORDS`. In other languages every word is kept."""
    return tuple(word for word in words if word not in FUNCTION_WORDS)


def names_something(words: Iterable[str]) -> bool:
    """Tell whether a question asks anything: "Is there a?" and "Are there any? yes/no" name nothing to answer about."""
    return any(word not in _NAMES_NOTHING for word in content_words(words))


def negations(words: Sequence[str]) -> tuple[str, ...]:
    """List the English words and phrases that negate, each once.

    The second part of a choice does not: `with or without contrast`, and `yes/no` at the end of a question.
    """
    found = []
    for place, word in enumerate(words):
        rest = words[place + 1 :]
        before = words[place - 1] if place else None
        if before == "or" or (before == "yes" and not rest):
            continue
        if word in NEGATIONS or word.endswith("n't"):
            found.append(word)
        elif word in _FREE and rest and rest[0] in _OF:
            found.append(f"{word} {rest[0]}")
        elif word in _RULE and "out" in rest:
            found.append(f"{word} out")
        elif word == "free" and not rest:  # "effusion-free?"
            found.append(word)
    return tuple(dict.fromkeys(found))


def _plain(text: str) -> str:
    lower = unicodedata.normalize("NFKC", text[:MAX_CHARACTERS]).lower().replace("’", "'")
    return unicodedata.normalize("NFKC", _THOUSANDS.sub("", lower))


def _words(text: str) -> list[str]:
    return _WORD.findall(_plain(text))


def _joined(words: Sequence[str]) -> tuple[str, ...]:
    """The words with `x ray` as one."""
    joined: list[str] = []
    for word in words:
        if joined and joined[-1] == "x" and word in ("ray", "rays"):
            joined[-1] = f"x{word}"
        else:
            joined.append(word)
    return tuple(joined)
