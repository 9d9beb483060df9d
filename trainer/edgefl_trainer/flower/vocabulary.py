"""Answers and words that the sites of a federation learn, where their pictures are asked questions.

A network reads words that were in training questions and gives answers that they had. In a run on one machine these are
known from the data; here each site that allows it tells its own (`words=share` of --node-config), and the server gives
every site those of all. Source: docs/guides/flower.md.
"""

import json
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from edgefl_protocol import Payload
from edgefl_protocol.durable import read_bounded, write_atomic
from edgefl_protocol.errors import PayloadError
from edgefl_protocol.fields import octets
from edgefl_protocol.rules.questions import Questions
from edgefl_trainer.data.questions import Vocabulary

MOST_BYTES = 16 << 20
FILE = "vocabulary.json"  # in the server's folder


def vocabulary_payload(vocabulary: Vocabulary | None) -> Payload:
    """Write a vocabulary as it travels; none is an empty payload."""
    return (
        Payload({}, {}) if vocabulary is None else Payload({"json": np.frombuffer(_written(vocabulary), np.uint8)}, {})
    )


def read_vocabulary(payload: Payload) -> Vocabulary | None:
    """Read what `vocabulary_payload` wrote; a `PayloadError` where it is something else."""
    return _read(octets(payload, "json", MOST_BYTES)) if payload.arrays else None


def together(parts: Iterable[Vocabulary]) -> Vocabulary:
    """Return the answers and words of all sites, each sorted, as of one data source that holds them all."""
    parts = list(parts)
    answers = sorted({answer for part in parts for answer in part.answers})
    words = sorted({word for part in parts for word in part.questions.words})
    return Vocabulary(tuple(answers), Questions(tuple(words)))


def kept_vocabulary(folder: Path) -> Vocabulary | None:
    """Read the vocabulary that a server collected before; None where it did not yet."""
    path = folder / FILE
    return _read(read_bounded(path, MOST_BYTES)) if path.exists() else None


def keep_vocabulary(folder: Path, vocabulary: Vocabulary) -> None:
    """Keep what a federation began with."""
    write_atomic(folder / FILE, _written(vocabulary))


def _written(vocabulary: Vocabulary) -> bytes:
    return json.dumps({"answers": vocabulary.answers, "words": vocabulary.questions.words}).encode()


def _read(data: bytes) -> Vocabulary:
    try:
        found = json.loads(data)
        lists = [found["answers"], found["words"]]
    except (ValueError, KeyError, TypeError) as error:
        raise PayloadError("a vocabulary is damaged", "bad_message") from error
    if not all(isinstance(one, list) and all(isinstance(text, str) for text in one) for one in lists) or not lists[0]:
        raise PayloadError("a vocabulary is not made of lists of texts, with one answer at least", "bad_message")
    return Vocabulary(tuple(lists[0]), Questions(tuple(lists[1])))
