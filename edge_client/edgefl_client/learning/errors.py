"""What keeps a device from learning."""

from edgefl_protocol.errors import EdgeflError


class LearningError(EdgeflError):
    """Learning cannot begin or cannot go on; `code` says why, and the values before are kept."""

    code = "learning"
