"""What crossed between server and sites in a run, and what share that is of sending whole models.

Guarantees: bytes are those of payloads, as `metrics.jsonl` has them; a share is of the sites that replied, so that it
does not depend on how many take part in a round. Source: docs/methods.md 8.4, 11.4.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

FULL_MODEL = "full_model_bytes"  # of a site: its tensors and the network, frozen or learned
SHARES = {"share_of_models": "model_bytes", "share_of_full_models": FULL_MODEL}
"""Share in ``summary.json`` → the size of one model that it is a share of."""


def array_bytes(arrays: Mapping[str, NDArray[np.generic]]) -> int:
    """Sum the bytes of some arrays."""
    return sum(value.nbytes for value in arrays.values())


def traffic(lines: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Sum the bytes of payloads: mean over train rounds of the sum over sites, and the sum of all phases.

    Args:
        lines: of `metrics.jsonl`.
    """
    train = [line for line in lines if line["phase"] == "train"]
    rounds = len({line["round"] for line in train}) or 1
    figures: dict[str, float] = {}
    for way in ("up", "down"):
        figures[f"bytes_{way}_per_round"] = round(sum(int(line[f"bytes_{way}"]) for line in train) / rounds, 1)
        figures[f"bytes_{way}_total"] = sum(int(line[f"bytes_{way}"]) for line in lines)
    return figures


def shares_of_models(head: Mapping[str, Any], lines: Sequence[Mapping[str, Any]], bytes_up: float) -> dict[str, float]:
    """Compute what a round's replies are of the models of the sites that sent them, if these had sent those instead.

    Args:
        head: of a summary, with the sizes of a model; a share whose size it lacks is left out.
        lines: of `metrics.jsonl`.
        bytes_up: of a round.
    """
    train = [line for line in lines if line["phase"] == "train"]
    if not train:
        return {}
    replies = len(train) / len({line["round"] for line in train})
    return {share: bytes_up / (head[size] * replies) for share, size in SHARES.items() if head.get(size)}
