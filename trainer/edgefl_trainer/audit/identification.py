"""Re-identification: which of some candidate pictures made a payload?

    payload p, candidates x_1 … x_m, one of which is another view of a picture that p was made of
    the attacker turns each candidate into what it would have sent, f(x), in eight orientations,
    and names the one whose f(x) is nearest to p                                              game
    top-1: share of payloads for which that is the right one; ties are shared out             Game.hits

Nearness is one of `MEASURES`, whitened by pictures of other sites. The one to use is chosen on one half of the payloads
and judged on the other, both ways, so that the figure does not profit from the choice. For means of many pictures the
whitened correlation is the test of Dwork et al., "Robust traceability from trace amounts" (FOCS 2015).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from jaxtyping import Float, Int

MEASURES: Final = ("distance", "correlation", "whitened distance", "whitened correlation")
LEAST: Final = 1e-12  # of a length that is divided by
ROUNDING: Final = 1e-9  # within which two candidates fit alike


@dataclass(frozen=True)
class Game:
    """How well each candidate fits each payload: the right one, and the others."""

    own: Float[np.ndarray, " n"]
    rivals: Float[np.ndarray, "n m"]  # -inf: no candidate of this payload

    def hits(self) -> Float[np.ndarray, " n"]:
        """Give 1 where the right candidate fits best, 1/(t + 1) where t others fit as well, else 0."""
        room = ROUNDING * (1.0 + np.abs(self.own))
        better = (self.rivals > (self.own + room)[:, None]).any(axis=1)
        ties = (self.rivals >= (self.own - room)[:, None]).sum(axis=1)
        return np.where(better, 0.0, 1.0 / (1.0 + ties))


@dataclass(frozen=True)
class Whitening:
    """Mean and whitening of what pictures of others give."""

    mean: Float[np.ndarray, " P"]
    matrix: Float[np.ndarray, "P P"]

    @classmethod
    def of(cls, rows: Float[np.ndarray, "n P"]) -> "Whitening":
        """Fit to at least two rows, with the shrinkage of Ledoit and Wolf (2004)."""
        from sklearn.covariance import LedoitWolf

        spread = np.asarray(rows.std(axis=0), dtype=np.float64)
        scale = np.where(spread > 0, spread, 1.0)
        found = LedoitWolf().fit((rows - rows.mean(axis=0)) / scale).covariance_
        values, vectors = np.linalg.eigh(found)
        roots = 1.0 / np.sqrt(np.maximum(values, max(values.max() * 1e-6, LEAST)))
        return cls(rows.mean(axis=0).astype(np.float64), ((vectors * roots) @ vectors.T) / scale[:, None])

    def apply(self, rows: Float[np.ndarray, "*n P"]) -> Float[np.ndarray, "*n P"]:
        """Whiten rows."""
        return np.asarray((rows - self.mean) @ self.matrix)


def fit_of(
    measure: str,
    payloads: Float[np.ndarray, "n P"],
    views: Float[np.ndarray, "m V P"],
    whitening: Whitening,
    *,
    paired: bool = False,
) -> Float[np.ndarray, "n m"] | Float[np.ndarray, " n"]:
    """Say how well each candidate's best view fits each payload by one of `MEASURES`; a higher number fits better.

    Args:
        paired: only candidate i with payload i, which gives (n,).
    """
    if measure.startswith("whitened"):
        left, right = whitening.apply(payloads), whitening.apply(views)
    else:
        left, right = payloads - whitening.mean, views - whitening.mean
    if measure.endswith("correlation"):
        left, right = unit(left), unit(right)
    form = "np,nvp->nv" if paired else "np,mvp->nmv"
    inner = np.einsum(form, left, right, optimize=True)
    if measure.endswith("distance"):
        squares = np.square(right).sum(axis=-1)
        own = np.square(left).sum(axis=-1)
        inner = 2 * inner - squares - (own[:, None] if paired else own[:, None, None])
    best: Float[np.ndarray, "..."] = inner.max(axis=-1)
    return best


def games(
    payloads: Float[np.ndarray, "n P"],
    own: Float[np.ndarray, "n V P"],
    rivals: Float[np.ndarray, "m V P"],
    whitening: Whitening,
) -> dict[str, Game]:
    """Make a game by each measure.

    Args:
        payloads: one for each picture that is looked for.
        own: what views of the right candidates give.
        rivals: what views of the wrong ones give, the same for all payloads.
    """
    return {
        measure: Game(
            fit_of(measure, payloads, own, whitening, paired=True), fit_of(measure, payloads, rivals, whitening)
        )
        for measure in MEASURES
    }


def together(parts: Sequence[Mapping[str, Game]]) -> dict[str, Game]:
    """Put the games of several sites into one, with as many rivals each."""
    return {
        measure: Game(
            np.concatenate([part[measure].own for part in parts]),
            np.concatenate([part[measure].rivals for part in parts]),
        )
        for measure in parts[0]
    }


def knowing_classes(game: Game, labels: Int[np.ndarray, " n"], rival_labels: Int[np.ndarray, " m"]) -> Game:
    """Rule out candidates of another class than the payload's, for payloads that name their class."""
    other = labels[:, None] != rival_labels[None, :]
    return Game(game.own, np.where(other, -np.inf, game.rivals))


def guessed_hits(labels: Int[np.ndarray, " n"], rival_labels: Int[np.ndarray, " m"]) -> Float[np.ndarray, " n"]:
    """Compute how often who knows the class alone is right: one in as many as there are candidates of it."""
    return np.asarray(1.0 / (1.0 + (labels[:, None] == rival_labels[None, :]).sum(axis=1)))


def best_hits(found: Mapping[str, Game]) -> tuple[Float[np.ndarray, " n"], str]:
    """Choose a measure on each half of the payloads and judge it on the other; return hits, and the measure of all.

    Halves are every second payload.
    """
    hits = {measure: game.hits() for measure, game in found.items()}
    count = len(next(iter(hits.values())))
    judged = np.zeros(count)
    for half in (0, 1):
        chosen = max(hits, key=lambda measure: float(hits[measure][1 - half :: 2].sum()))
        judged[half::2] = hits[chosen][half::2]
    return judged, max(hits, key=lambda measure: float(hits[measure].sum()))


def unit(rows: Float[np.ndarray, "*n P"]) -> Float[np.ndarray, "*n P"]:
    """Scale each row to length 1; rows of nothing stay so."""
    return np.asarray(rows / np.maximum(np.linalg.norm(rows, axis=-1, keepdims=True), LEAST))
