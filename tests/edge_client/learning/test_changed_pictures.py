"""Pictures that change after a round was learned, or while it is: the reply is that of the pictures that are there.

FedCLF's `n_train` weighs a reply, and FedEvPrompt's maps are of the pictures that taught. A round that was learned and
whose reply did not leave (a limit of the policy, a full disk, a kill) is made again by the next `edgefl sync`.
Source: docs/design.md 9; docs/reference/device-learning.md.
"""

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tests.edge_client.learning.contrast_lab import contrast_bundle, contrast_plan
from tests.edge_client.learning.test_fedclf import LIMITS, REMOTE, ROWS, broadcast, learner, quiet
from tests.edge_client.learning.test_fedevprompt import LABELS, a_round, pictures

from edgefl_client.learning.errors import Paused
from edgefl_client.learning.limits import LearningLimits
from edgefl_protocol.payload import digest

STOPPED = LearningLimits(battery=lambda: None, minutes=1e-9)  # after the first step


@pytest.mark.parametrize("limits", [LIMITS, STOPPED], ids=["learned", "stopped"])
def test_fedclf_weighs_the_pictures_that_taught(lab: SimpleNamespace, tmp_path: Path, limits: LearningLimits) -> None:
    """State and reply are the bits of a round that only ever saw the new pictures, and it is told."""
    bundle, (here, fresh) = contrast_bundle(lab, contrast_plan()), (tmp_path / "here", tmp_path / "fresh")
    for folder in (here, fresh):
        folder.mkdir()
    begun, _ = learner(bundle, here).local_round({}, broadcast("warm", 0), quiet)
    with pytest.raises(Paused) if limits is STOPPED else nullcontext():
        learner(bundle, here, limits=limits).local_round(begun, broadcast(remote=REMOTE), quiet)
    told: list[Any] = []
    state, reply = learner(bundle, here, 3 * ROWS).local_round(begun, broadcast(remote=REMOTE), told.append)
    alone, expected = learner(bundle, fresh, 3 * ROWS).local_round(begun, broadcast(remote=REMOTE), quiet)
    assert reply.scalars["n_train"] == 3 * ROWS
    assert reply == expected and digest(dict(state)) == digest(dict(alone))
    assert sum("the round begins anew" in str(facts.get("warning")) for facts in told) == 1


def test_fedevprompt_sends_maps_of_the_pictures_that_taught(
    school: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every step of the round is taken again, from the state before it."""
    more = pictures(np.concatenate([LABELS, LABELS, 1 - LABELS]))
    a_round(school, tmp_path, monkeypatch)
    (tmp_path / "fresh").mkdir()
    found, alone = (a_round(school, folder, monkeypatch, learn=more) for folder in (tmp_path, tmp_path / "fresh"))
    assert len(found.steps) == len(alone.steps) > 0
    assert digest(dict(found.state)) == digest(dict(alone.state)) and found.reply == alone.reply
