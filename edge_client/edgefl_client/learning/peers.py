"""The others' rollout maps, folded into what the distillation term of a step takes.

One mean map a class, the mean over peers of each peer's mean map, and the number of peers that hold the class: the cost
does not grow with the buffer. Peers are summed in the order of their means' bytes: the coordinator numbers them anew
for every receiver, and the same maps must give the same bits whatever the numbers. Source: FedEvPrompt (arXiv
2411.10071) eq. 7; docs/methods.md, distillation.
"""

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from edgefl_client.learning.errors import LearningError
from edgefl_protocol.bundle.training_plan import COUNTS, MEANS, TrainingPlan
from edgefl_protocol.payload import Payload

MEAN5 = 5.0  # kd_peers = mean5: five times the mean over peers


def renumbered(broadcast: Payload, theirs: Sequence[str], ours: Sequence[str]) -> Payload:
    """The same maps under this model's class numbers: a federation may number its classes in another order.

    Args:
        broadcast: arrays `maps.<peer>.<class>`, numbered as the federation's task does.
        theirs: names of the task's classes, in index order.
        ours: names of the model's classes, in index order.

    Raises:
        LearningError: other classes, or a number that is no class.
    """
    if set(theirs) != set(ours):
        raise LearningError(
            f"the model knows {', '.join(ours)}, the federation {', '.join(theirs)}: pull its bundle", "other_classes"
        )
    arrays = {}
    for name, array in broadcast.arrays.items():
        if name.startswith("maps."):
            peer, _, label = name.rpartition(".")
            if not label.isdecimal() or int(label) >= len(theirs):
                raise LearningError(f"the others' array {name[:40]} is of no class of the federation", "other_maps")
            arrays[f"{peer}.{list(ours).index(theirs[int(label)])}"] = array
        else:
            arrays[name] = array
    return Payload(arrays, broadcast.scalars)


def numbered_as(reply: Payload, ours: Sequence[str], theirs: Sequence[str]) -> Payload:
    """The same reply under the federation's class numbers.

    Args:
        reply: arrays `maps.<class>`, numbered as the model does; others keep their names.
        ours: names of the model's classes, in index order.
        theirs: names of the task's classes, in index order.
    """
    number = {str(index): str(list(theirs).index(name)) for index, name in enumerate(ours)}
    arrays = {
        f"maps.{number[name.removeprefix('maps.')]}" if name.startswith("maps.") else name: array
        for name, array in reply.arrays.items()
    }
    return Payload(arrays, reply.scalars)


def peer_targets(broadcast: Payload, plan: TrainingPlan, classes: int, tokens: int) -> dict[str, NDArray[np.float32]]:
    """Mean maps and their weights.

    Args:
        broadcast: arrays `maps.<peer>.<class>` (m, N), numbered as the model does.
        plan: says whether peers are summed or averaged.
        classes: K.
        tokens: N.

    Returns:
        `peers.means` (K, N) and `peers.counts` (K,), zero where no peer holds a class.

    Raises:
        LearningError: maps of another grid or class.
    """
    by_class: dict[int, list[NDArray[np.float64]]] = defaultdict(list)
    for name, maps in sorted(broadcast.arrays.items()):
        if not name.startswith("maps."):
            continue
        label = name.rpartition(".")[2]
        if not label.isdecimal() or int(label) >= classes or maps.ndim != 2 or maps.shape[1] != tokens:
            raise LearningError(
                f"the others' array {name[:40]} does not fit this model of {classes} classes and {tokens} patches; "
                "pull the federation's bundle",
                "other_maps",
            )
        if len(maps):
            by_class[int(label)].append(maps.astype(np.float64).mean(axis=0))
    means, counts = np.zeros((classes, tokens), np.float32), np.zeros(classes, np.float32)
    for index, found in by_class.items():
        means[index] = np.stack(_canonical(found)).mean(axis=0)
        counts[index] = MEAN5 if plan.kd_peers == "mean5" else len(found)
    return {MEANS: means, COUNTS: counts}


def _canonical(means: list[NDArray[np.float64]]) -> list[NDArray[np.float64]]:
    return sorted(means, key=lambda mean: mean.tobytes())
