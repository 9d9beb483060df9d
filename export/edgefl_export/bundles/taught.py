"""Which words a model that answers questions was taught, and which `tune` questions a device therefore reads whole.

A run lists the words of the training questions of all its sites. A model was taught those of the questions that moved
its own embedding of words: where weights travel, the questions of every site that took part in a round; where they
stay, its own site's. `tune` and reported questions teach nothing.
Guarantees: a method's name is not asked, what it declares to travel decides; only words that a network reads count.
Source: docs/decisions/0051.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from edgefl_protocol.bundle.figures import rounds_without
from edgefl_protocol.pictures.answer import read_question
from edgefl_protocol.rules.questions import FIRST
from edgefl_protocol.rules.travels import kind_of
from edgefl_trainer.data import Federation

WORDS: Final = "words.embedding"  # of an answer model (`edgefl_trainer.models.answers`)


@dataclass(frozen=True)
class TaughtWords:
    """What a bundle says of the words, and what follows for the questions that it was tried on."""

    words: tuple[bool, ...]  # of each word of the run, whether the model was taught it
    read_whole: NDArray[np.bool_]  # (n,) of the site's `tune` questions, which no device refuses for their words


def taught_words(summary: Mapping[str, Any], federation: Federation, site: str) -> TaughtWords | None:
    """Tell what the model of a site was taught in a run; None where its pictures are asked nothing.

    Args:
        summary: the run's, with what travelled and which sites took part.
    """
    asked = federation.questions
    if asked is None or site not in federation.sites:
        return None
    others = federation.sites if kind_of(WORDS) in summary["travels"] else ()
    trained = {*others, site} - {*federation.held_out}
    teaching = [name for name in trained if rounds_without(summary["sites"].get(name, {})) is None]
    rows = np.concatenate([np.zeros(0, np.int64), *(federation.sites[name].train for name in teaching)])
    read = frozenset(np.unique(asked.tokens[rows]).tolist())
    words = asked.vocabulary.words
    known = frozenset(word for number, word in enumerate(words, FIRST) if number in read)
    tune = federation.sites[site].tune
    whole = [read_question(asked.texts[row], asked.vocabulary, known).whole for row in tune]
    return TaughtWords(tuple(word in known for word in words), np.array(whole, dtype=np.bool_))
