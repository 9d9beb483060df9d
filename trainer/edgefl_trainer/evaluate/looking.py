"""Whether a model that answers questions looks at the picture: each question is asked with another one's picture, too.

A model that reads the words alone answers as before. d is 1 where a question is answered rightly with its own picture
and wrongly with the other one, −1 the reverse, else 0. The model looks where the 95 % interval of the mean of d, over
draws of whole pictures (`intervals`), lies above 0. Every picture gives its questions to one other, in a drawn circle.
Guarantees: same model and rows, same figures. Source: docs/decisions/0046.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, UInt8
from numpy.typing import NDArray

from edgefl_protocol.bundle.question_table import LEAST_TRIED, OtherPicture, TriedQuestions
from edgefl_protocol.pictures.answer import DEFAULT_CONFIDENCE_FROM
from edgefl_protocol.pictures.referral import in_force
from edgefl_trainer.contract import Examples, Predictor
from edgefl_trainer.evaluate.intervals import RESAMPLES, interval, lesion_weights
from edgefl_trainer.evaluate.metrics import entropy_nats
from edgefl_trainer.models.answers import AnswerModule

SEED = 0  # of no run
BATCH = 64


def answers_to(
    predictor: Predictor,
    images: UInt8[np.ndarray, "n S S 3"],
    tokens: Int[np.ndarray, "n L"],
    device: torch.device | None = None,
) -> dict[str, NDArray[np.float32]]:
    """Ask each picture its question; every output of the module by name, n rows each.

    A `TypeError` where the model scores pictures alone.
    """
    module, where = predictor.module, device or torch.device("cpu")
    if not isinstance(module, AnswerModule):
        raise TypeError("this model scores pictures: it answers no questions")
    module = module.to(where).eval()
    tensors = {name: torch.from_numpy(np.array(value)).to(where) for name, value in predictor.tensors.items()}
    parts = []
    with torch.inference_mode():
        for start in range(0, len(images), BATCH):
            batch, asked = (
                torch.from_numpy(np.ascontiguousarray(one[start : start + BATCH])).to(where) for one in (images, tokens)
            )
            parts.append({name: value.cpu().numpy() for name, value in module(batch, asked, tensors).named().items()})
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def tried_questions(
    probabilities: Float[np.ndarray, "n K"],
    targets: Int[np.ndarray, " n"],
    seen: Sequence[bool],
    unsure_above: float,
    other: OtherPicture | None,
    not_refused: Bool[np.ndarray, " n"] | None = None,
) -> TriedQuestions | None:
    """Count what a device would answer to a site's `tune` questions, and rightly; None of no question.

    Args:
        targets: the right answers; one below 0 is never given.
        not_refused: which of them a device refuses neither for their words nor for the picture's light; None: all.
    """
    if not len(targets):
        return None
    best = probabilities.argmax(axis=1)
    right = best == targets
    by_default = in_force(unsure_above, math.log(len(seen))) is None
    sure = (
        probabilities.max(axis=1) >= DEFAULT_CONFIDENCE_FROM
        if by_default
        else entropy_nats(probabilities) <= unsure_above
    )
    answered = sure & np.asarray(seen, dtype=bool)[best]
    answered &= True if not_refused is None else not_refused
    return TriedQuestions(
        questions=len(targets),
        right=int(right.sum()),
        answered=int(answered.sum()),
        answered_right=int((right & answered).sum()),
        other_picture=other,
    )


def other_picture(predictor: Predictor, tune: Examples, pictures: Sequence[str]) -> OtherPicture | None:
    """Ask a site's `tune` questions with another one's picture; None of fewer than 20, or of one picture alone.

    Args:
        pictures: of every row of the federation, which picture it shows.
    """
    own = np.array([pictures[row] for row in tune.rows])
    names = np.unique(own)
    if tune.tokens is None or len(own) < LEAST_TRIED or len(names) < 2:
        return None
    circle = np.random.default_rng(SEED).permutation(names)
    after = dict(zip(circle.tolist(), np.roll(circle, 1).tolist(), strict=True))
    place = {name: int(tune.places[own == name][0]) for name in names.tolist()}
    others = np.array([place[after[name]] for name in own.tolist()])
    right = [_right(predictor, tune, places) for places in (tune.places, others)]
    lost = right[0].astype(np.float64) - right[1]
    weights = np.concatenate(list(lesion_weights(own.tolist(), RESAMPLES)))
    low, high = interval(weights @ lost / weights.sum(axis=1)) or (0.0, 0.0)
    return OtherPicture(right=int(right[1].sum()), low=round(low, 4), high=round(high, 4))


def _right(predictor: Predictor, tune: Examples, places: NDArray[np.int64]) -> Bool[np.ndarray, " n"]:
    assert tune.tokens is not None
    found = answers_to(predictor, tune.images[places], tune.tokens[tune.rows])["probabilities"]
    return np.asarray(found.argmax(axis=1) == tune.targets)
