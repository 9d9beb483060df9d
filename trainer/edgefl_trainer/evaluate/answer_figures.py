"""Figures of answers: how many are right of all questions, of open and of closed ones, beside the usual answer.

The usual answer is the most frequent training answer to questions of the same kind at the same site: it reads neither
the picture nor the words of a question. Whether a question is closed, and of which kind, stands in the data. Each site
counts once in the means over sites; intervals as in `evaluate.intervals`, by picture.
Source: docs/methods.md 11.4.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int

from edgefl_trainer.evaluate.intervals import RESAMPLES, Scored, lesion_weights, share_interval

USUAL = "usual_answer"
KEPT = ("task", "seed", "preset", "rounds", "reported_rows", "partition_sha256")  # of a run, for the usual answer's row
PARTS = ("", "_open_questions", "_closed_questions")  # of the questions


def usual_answers(answers: Int[np.ndarray, " M"], kinds: Sequence[str], asked: Sequence[str]) -> Int[np.ndarray, " B"]:
    """Return for each kind that is asked its most frequent training answer, the first of equal ones.

    Of a kind that no training question has, the most frequent of all; −1 without any training question.

    Args:
        answers: of the training questions.
        kinds: of the training questions.
        asked: kinds of the questions to answer.
    """
    groups: dict[str, list[int]] = {}
    for answer, kind in zip(answers.tolist(), kinds, strict=True):
        groups.setdefault(kind, []).append(answer)
    usual = {kind: _most_frequent(found) for kind, found in groups.items()}
    otherwise = _most_frequent(answers.tolist())
    return np.array([usual.get(kind, otherwise) for kind in asked], dtype=np.int64)


def answer_figures(scored: Scored) -> dict[str, Any]:
    """Compute the shares of right answers of open and closed questions, and under `usual_answer` those of that answer.

    Nothing where no question was asked; a figure of no question is None.
    """
    if scored.asked is None:
        return {}
    weights = list(lesion_weights(scored.lesions, RESAMPLES)) if len(set(scored.lesions)) > 1 else []
    own = _accuracies(scored, scored.predicted, weights)
    apart = {name: value for name, value in own.items() if name not in ("accuracy", "accuracy_interval")}
    counts = {
        "n_open_questions": int((~scored.asked.closed).sum()),
        "n_closed_questions": int(scored.asked.closed.sum()),
    }
    return {**counts, **apart, USUAL: _accuracies(scored, scored.asked.usual, weights)}


def answer_summary(sites: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Compute mean and worst over sites of each share, and of the usual answer's; nothing where nothing was asked."""
    if not any(USUAL in figures for figures in sites.values()):
        return {}
    usual = [figures.get(USUAL, {}) for figures in sites.values()]
    return {**_summed(list(sites.values())), USUAL: _summed(usual)}


def usual_runs(summaries: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Make a run's summary of the usual answer, one for each seed, to stand beside the runs in a table."""
    seeds = set()
    for run in summaries:
        if USUAL in run and run.get("seed") not in seeds:
            seeds.add(run.get("seed"))
            kept = {name: run[name] for name in KEPT if name in run}
            sites = {name: site[USUAL] for name, site in run["sites"].items() if USUAL in site}
            shares = [name for name in ("share_of_models", "share_of_full_models") if name in run]
            nothing = dict.fromkeys(["bytes_up_per_round", "bytes_down_per_round", *shares], 0)
            pooled = run.get("pooled", {}).get(USUAL, {})
            yield {
                **kept,
                **nothing,
                "method": "usual answer",
                "label": "usual answer",
                "sites": sites,
                "pooled": pooled,
            }


def _summed(figures: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
    found: dict[str, float | None] = {}
    for part in PARTS:
        values = [one[f"accuracy{part}"] for one in figures if one.get(f"accuracy{part}") is not None]
        found[f"mean_accuracy{part}"] = float(np.mean(values)) if values else None
        found[f"worst_accuracy{part}"] = min(values) if values else None
    return found


def _most_frequent(answers: Sequence[int]) -> int:
    return int(np.bincount(answers).argmax()) if answers else -1


def _accuracies(
    scored: Scored, given: Int[np.ndarray, " B"], weights: Sequence[Float[np.ndarray, "R B"]]
) -> dict[str, Any]:
    """The share of right answers of all questions and of each part, with its interval over draws of pictures."""
    assert scored.asked is not None
    closed = scored.asked.closed
    correct = (given == scored.target).astype(np.float64)
    parts = dict(zip(PARTS, (np.ones_like(closed), ~closed, closed), strict=True))
    found: dict[str, Any] = {}
    for part, rows in parts.items():
        found[f"accuracy{part}"] = float(correct[rows].mean()) if rows.any() else None
        drawn = [_share(block, correct, rows) for block in weights] if rows.any() else []
        pictures = len({scored.lesions[row] for row in np.flatnonzero(rows)})
        value = found[f"accuracy{part}"]
        found[f"accuracy{part}_interval"] = share_interval(np.concatenate(drawn), value, pictures) if drawn else None
    return found


def _share(
    weights: Float[np.ndarray, "R B"], correct: Float[np.ndarray, " B"], rows: Bool[np.ndarray, " B"]
) -> Float[np.ndarray, " R"]:
    """The share in each draw; NaN where a draw has no such question."""
    counted = weights[:, rows].sum(axis=1)
    return np.where(counted > 0, weights[:, rows] @ correct[rows] / np.maximum(counted, 1), np.nan)
