"""What keeps a device from learning, told in one sentence; the values that were there before are kept.

EdgeflError                 (edgefl_protocol)
└── LearningError           too few pictures, no training step, another process, a value that is not finite
    └── Paused              a limit of the owner stopped it between two steps
"""

from edgefl_protocol.errors import EdgeflError


class LearningError(EdgeflError):
    """Learning cannot begin or cannot go on; `code` says why, and the values before are kept."""

    code = "learning"


class Paused(LearningError):
    """A limit is reached, which `reason` names as a clause; the point is kept, and the next call goes on from there."""

    code = "paused"

    def __init__(self, reason: str) -> None:
        super().__init__(f"learning stopped for now: {reason}; the next time it continues from there")
        self.reason = reason
