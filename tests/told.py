"""What a coordinator tells of its task, without a coordinator."""

from typing import Any

from edgefl_protocol.messages.requests import TaskReply


def told_task(**changes: Any) -> TaskReply:
    """The open first round of a method that shares no maps, from a coordinator that does not describe its task."""
    plain: dict[str, Any] = {
        "method": "fedclf", "task": "all", "line": "main", "classes": ("a", "b"), "rounds": 3, "round": 1,
        "phase": "train", "state": "open", "deadline_ms": 0, "tokens": 0, "maps_per_class": 0, "quorum_min": 1,
        "quorum_target": 2, "max_reply_bytes": 10**7, "replied": False, "settings": {},
    }  # fmt: skip
    return TaskReply(**{**plain, **changes})
