"""Why a device replies to no round of its federation, although its owner allowed that something leaves.

Only the device can say so: the coordinator sees that it asks, and tells whoever has not replied to ask again. Nothing
of the bundle is verified here, for nothing is run. Source: docs/reference/device-learning.md, keys of `sync --json`.
"""

from dataclasses import dataclass

from edgefl_client.home import Home
from edgefl_client.sharing.policy import load_policy
from edgefl_client.sharing.waiting_items import list_waiting
from edgefl_client.trust import models
from edgefl_exchange.membership import load_membership
from edgefl_protocol.bundle import unverified_manifest
from edgefl_protocol.bundle.archive import read_archive
from edgefl_protocol.bundle.learning_plan import RECORD, LearningPlan
from edgefl_protocol.bundle.onnx_training import read_plan
from edgefl_protocol.durable import read_bounded
from edgefl_protocol.errors import BundleError, StorageError
from edgefl_protocol.messages.requests import TaskReply


@dataclass(frozen=True, kw_only=True)
class Silent:
    """Why `edgefl sync` replies to no round here."""

    why: str
    advice: str  # what the owner does
    learner: bool  # whether the model would learn, were pictures named; else its owner contributes by hand

    def __str__(self) -> str:
        return f"{self.why}: {self.advice}"


def why_silent(home: Home, task: TaskReply, now_ms: int) -> Silent | None:
    """Tell why a member's device replies to no round, and what its owner does.

    None where pictures are named, for then a sync says what keeps it from learning; where a reply of the round is
    there, or waits; and where this owner, federation or model asks for none.

    Raises:
        PolicyError: the owner's policy cannot be read.
        StorageError: which pictures were named, or the outbox, cannot be read.
    """
    policy = load_policy(home)
    held = {kind for kind in policy.allowed if policy.holds(kind, now_ms)}
    if task.state == "done" or task.replied or not held or not held.issuperset(task.travels):
        return None
    if _named(home) or list_waiting(home, now_ms):
        return None
    try:
        data = read_bounded(models.current_file(home), models.MAX_BUNDLE_FILE_BYTES)
        manifest, members = unverified_manifest(data)[0], read_archive(data)
        plan = read_plan(members[RECORD]) if RECORD in members else None
    except (StorageError, BundleError, ValueError):  # none is in use, or `edgefl doctor` says what is wrong with it
        return None
    if manifest.line_key != (load_membership(home.member).federation, task.line, task.task):
        return None  # the operator has published none for these rounds
    return _silent(task, plan)


def _silent(task: TaskReply, plan: LearningPlan | None) -> Silent | None:
    """Say what a device without pictures does, by what its model can."""
    if plan is not None and plan.kind == task.method:
        naming = "edgefl train --labels TABLE" if plan.needs_labels else "edgefl sync --pictures DIR"
        return Silent(
            why="this device learns in no round, because no pictures are named, or those that were named were refused",
            advice=f"run {naming}, and from then on edgefl sync replies",
            learner=True,
        )
    if task.takes_maps:
        return Silent(
            why=f"this device learns in no round, because its model does not learn {task.method}",
            advice="edgefl contribute --labels TABLE --send gives maps of labelled pictures instead",
            learner=False,
        )
    return None


def _named(home: Home) -> bool:
    """Whether the owner named pictures to learn from."""
    if not home.learning.exists():
        return False
    # brings the runtime, which exchanging does without
    from edgefl_client.learning.own_pictures import remembered_table

    return remembered_table(home) is not None
