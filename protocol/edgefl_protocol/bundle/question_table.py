"""What makes a bundle one that answers questions: the words it knows, and how it did on questions kept from learning.

Guarantees: a `QuestionTable` that exists satisfies the forms below; anything else is a `ValueError`.

    questions.json  {"words": [word, ...], "length": 1 to 256, "tried": null|{"questions": n, "right": n,
                    "answered": n, "answered_right": n, "other_picture": null|{"right": n, "low", "high"}}}
                  and, where it was counted, "taught": [bool, ...]    of each word, whether a question had it that the
                  model learned from; missing in bundles from before it

The first word has the number 2 (`rules.questions`). `tried` counts questions of the `tune` rows; null where there was
none. `other_picture` asks each of them with the picture of another one: who looks at pictures is then right less
often. `low` and `high` are the 95 % interval, by picture, of what is lost, as a share of the questions. Only a bundle
that answers questions has this member. Source: docs/design.md 7, docs/decisions/0046 and 0051.
"""

from dataclasses import asdict, dataclass
from typing import Any, Final

from edgefl_protocol.bundle.model_card import MAX_NAMES_BYTES
from edgefl_protocol.rules.questions import MAX_CHARACTERS, Questions
from edgefl_protocol.strict_json import MAX_INT, check_keys, parse_json, write_json

MEMBER: Final = "questions.json"
INPUT: Final = "question"  # of the scoring graph: int64 (B, length)
MAX_WORDS: Final = 20_000
MAX_LENGTH: Final = 256
LEAST_TRIED: Final = 20  # `tune` questions from which temperature and threshold are fitted, and looking is tried

_TRIED: Final = {"questions", "right", "answered", "answered_right", "other_picture"}


@dataclass(frozen=True, kw_only=True)
class OtherPicture:
    """What is left of the right answers where each question is asked with the picture of another one."""

    right: int  # questions answered rightly all the same
    low: float  # of the 95 % interval, by picture, of what is lost, as a share of the questions
    high: float

    def __post_init__(self) -> None:
        if not _is_count(self.right, MAX_INT):
            raise ValueError("other_picture must count its right answers")
        if not all(type(end) in (int, float) for end in (self.low, self.high)) or not -1 <= self.low <= self.high <= 1:
            raise ValueError("other_picture must have an interval within -1 and 1")

    @property
    def shows_looking(self) -> bool:
        """Whether the model was found to look at the picture."""
        return self.low > 0


@dataclass(frozen=True, kw_only=True)
class TriedQuestions:
    """How the model did on the site's `tune` questions, which chose its temperature and threshold."""

    questions: int
    right: int  # of them, questions whose most probable answer is right
    answered: int  # of them, questions about which it is not too unsure
    answered_right: int  # of those
    other_picture: OtherPicture | None  # None where it was not tried

    def __post_init__(self) -> None:
        if not _is_count(self.questions, MAX_INT) or self.questions == 0:
            raise ValueError("tried must count at least one question")
        other = 0 if self.other_picture is None else self.other_picture.right
        for count, most in (
            (self.right, self.questions),
            (self.answered, self.questions),
            (self.answered_right, self.answered),
            (self.answered_right, self.right),
            (other, self.questions),
        ):
            if not _is_count(count, most):
                raise ValueError("tried must hold numbers of questions that fit one another")


@dataclass(frozen=True)
class QuestionTable:
    """The words of a model, how many of a question it reads, and how it did on questions kept from learning."""

    vocabulary: Questions
    tried: TriedQuestions | None  # None where the site had no question to try
    # of each word, whether a question that the model learned from had it; None where the bundle does not say
    taught: tuple[bool, ...] | None = None

    def __post_init__(self) -> None:
        words = self.vocabulary.words
        if not 1 <= len(words) <= MAX_WORDS or not all(_is_word(word) for word in words):
            raise ValueError(f"words must be 1 to {MAX_WORDS} printable words without spaces")
        if len(set(words)) != len(words):
            raise ValueError("a word is listed twice")
        if type(self.vocabulary.length) is not int or not 1 <= self.vocabulary.length <= MAX_LENGTH:
            raise ValueError(f"length must be a whole number from 1 to {MAX_LENGTH}")
        if self.taught is not None and (
            len(self.taught) != len(words) or not all(type(one) is bool for one in self.taught)
        ):
            raise ValueError("taught must hold true or false for each word")

    @property
    def taught_words(self) -> frozenset[str] | None:
        """The words that a question had which the model learned from; None where the bundle does not say."""
        if self.taught is None:
            return None
        return frozenset(word for word, one in zip(self.vocabulary.words, self.taught, strict=True) if one)

    @property
    def looks(self) -> bool | None:
        """Whether the model was found to look at the picture; None where nobody tried."""
        if self.tried is None or self.tried.other_picture is None:
            return None
        return self.tried.other_picture.shows_looking

    def to_bytes(self) -> bytes:
        """Write `questions.json`."""
        tried = None if self.tried is None else asdict(self.tried)
        words = self.vocabulary
        record: dict[str, object] = {"words": list(words.words), "length": words.length, "tried": tried}
        if self.taught is not None:
            record["taught"] = list(self.taught)
        return write_json(record)

    @classmethod
    def from_bytes(cls, data: bytes) -> "QuestionTable":
        """Read `questions.json`."""
        record = check_keys(parse_json(data, max_bytes=MAX_NAMES_BYTES), {"words", "length", "tried"}, {"taught"})
        if not isinstance(record["words"], list) or not all(isinstance(word, str) for word in record["words"]):
            raise ValueError("words must be a list of text")
        if not isinstance(record.get("taught", []), list):
            raise ValueError("taught must be a list")
        tried = None if record["tried"] is None else _tried(record["tried"])
        taught = tuple(record["taught"]) if "taught" in record else None
        return cls(Questions(tuple(record["words"]), record["length"]), tried, taught)


def _tried(record: object) -> TriedQuestions:
    found: dict[str, Any] = dict(check_keys(record, _TRIED, what="tried"))
    other = found["other_picture"]
    if other is not None:
        found["other_picture"] = OtherPicture(**check_keys(other, {"right", "low", "high"}, what="other_picture"))
    return TriedQuestions(**found)


def _is_word(word: str) -> bool:
    return 1 <= len(word) <= MAX_CHARACTERS and word.isprintable() and " " not in word


def _is_count(value: object, most: int) -> bool:
    return type(value) is int and 0 <= value <= most
