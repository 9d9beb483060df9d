"""A gate for a federation: judges on pictures of the operator's what a round made, before any member gets it.

    edgefl-coordinator set protection.gate "/srv/venv/bin/python /srv/gate.py --data folder:/srv/held-out"

The coordinator calls this program with one word more, a folder with the server's states and the task. Status 0: the
new state counts. Status 3: the round is refused, for the reason printed last. It refuses

    a fall      of the accuracy on these pictures by more than `--fall`
    a stamp     a square in a corner that sends more than `--taken` of the pictures to one class, and more than before:
                what a backdoor that was taught with such a square does

and knows no other trigger. Take `--taken` from what it prints of honest rounds: some models follow a square by
themselves. It needs a method that makes one model for everybody, such as FedAvg or FedProx, on a frozen backbone, and
labelled pictures that no member learns from. Change it to what your federation has to keep.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgefl_protocol import Payload
from edgefl_trainer.contract import Examples, Phase, Predictor, Site, State, Task
from edgefl_trainer.data import load_federation
from edgefl_trainer.engine.hyper_parameters import build
from edgefl_trainer.engine.models import predict
from edgefl_trainer.method_halves import stamped
from edgefl_trainer.methods import METHODS
from edgefl_trainer.models.backbones import load_backbone
from edgefl_trainer.models.spec import spec_from_facts

ACCEPTED, REFUSED = 0, 3
FALL, TAKEN = 0.05, 0.1
MOST_BYTES = 2**31


def model_of(state: Payload, about: dict[str, Any], site: Site) -> Predictor:
    """The model that a member who never took part would make of a server's state."""
    method, phase = build(METHODS[about["method"]], about["settings"]), Phase("final", site.task.rounds + 1)
    sent = method.broadcast(State(state.arrays, state.scalars), phase, [site.name])[site.name]
    predictor: Predictor | None = method.predictor(site, State(), stamped(sent, phase, site.task.rounds))
    if predictor is None:
        raise SystemExit(f"{about['method']} makes no model for a newcomer, so this gate cannot judge it")
    return predictor


def stamped_pictures(images: NDArray[np.uint8]) -> list[NDArray[np.uint8]]:
    """The pictures with a white square, a sixth of their side, in each corner: honest models may know dark ones."""
    side, found = max(1, images.shape[1] // 6), []
    for rows in (slice(None, side), slice(-side, None)):
        for columns in (slice(None, side), slice(-side, None)):
            found.append(images.copy())
            found[-1][:, rows, columns] = 255
    return found


def taken_over(plain: NDArray[np.int64], stamps: list[NDArray[np.int64]], classes: int) -> float:
    """The largest share of the pictures of other classes that one stamp sends to one class."""
    return max(
        float((stamp[plain != label] == label).mean())
        for stamp in stamps
        for label in range(classes)
        if (plain != label).any()
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--data", action="append", required=True, help="pictures to judge on, as edgefl-train has them")
    parser.add_argument("--fall", type=float, default=FALL, help="accuracy that a round may cost")
    parser.add_argument("--taken", type=float, default=TAKEN, help="share of pictures that a stamp may send to a class")
    asked = parser.parse_args()
    about = json.loads((asked.folder / "round.json").read_text())
    facts = {**about["task"], "backbone": spec_from_facts(about["task"]["backbone"])}
    task = Task(**{**facts, "classes": tuple(facts["classes"])})
    backbone = load_backbone(task.backbone.name, image_px=task.backbone.image_px, seed=task.seed)
    data = load_federation(asked.data, image_px=task.backbone.image_px, task=task.name, all_test=True)
    if tuple(data.classes) != task.classes or backbone.spec != task.backbone:
        raise SystemExit("these pictures, or this backbone, are not those of the federation")
    rows = np.flatnonzero(data.labels >= 0)
    judged, nothing = Examples(data.images, data.labels, rows), Examples(data.images, data.labels, rows[:0])
    site = Site(name="gate", task=task, backbone=backbone, train=nothing, tune=nothing, unlabelled=nothing)
    right, taken = {}, {}
    for name in ("before", "after"):
        state = Payload.from_bytes((asked.folder / f"{name}.payload").read_bytes(), MOST_BYTES)
        model, images = model_of(state, about, site), data.images[judged.places]
        plain = predict(model, images).predicted
        stamps = [predict(model, one).predicted for one in stamped_pictures(images)]
        right[name] = float((plain == judged.targets).mean())
        taken[name] = taken_over(plain, stamps, len(task.classes))
    falls = right["before"] - right["after"] > asked.fall
    opens = taken["after"] > max(asked.taken, taken["before"])
    print(
        f"accuracy {right['before']:.3f}, then {right['after']:.3f}; a stamp takes {taken['before']:.3f}, then "
        f"{taken['after']:.3f}"
    )
    return REFUSED if falls or opens else ACCEPTED


if __name__ == "__main__":
    sys.exit(main())
