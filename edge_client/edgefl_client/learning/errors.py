"""What keeps a device from learning, told in one sentence; the values that were there before are kept.

EdgeflError                 (edgefl_protocol)
└── LearningError           too few pictures, no training step, another process, a value that is not finite
"""

from edgefl_protocol.errors import EdgeflError


class LearningError(EdgeflError):
    """Learning cannot begin or cannot go on; `code` says why, and the values before are kept."""

    code = "learning"
