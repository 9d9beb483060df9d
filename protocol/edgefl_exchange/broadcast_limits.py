"""How large a round's broadcast may be before a device takes any of it.

    of the task     maps: 4,000 arrays (the most that travel together) of M maps of N float16; else a reply's largest
                    size, since what a site sends of a network is what it was sent, and the features of the others
                    where features travel
    of the device   half of its memory, for a broadcast lies in it more than once while it is read

The task is signed by the coordinator, so whoever is in between cannot raise its bound. Source: docs/security.md 2.2
(the signed task states the cap) and attack list (endless data); docs/methods.md, feature exchange.
"""

import os
from typing import Final

from edgefl_protocol.envelopes.blob import MAX_BLOB_BYTES
from edgefl_protocol.errors import BlobError
from edgefl_protocol.messages.requests import TaskReply
from edgefl_protocol.rules.feature_rows import FEATURES, MOST_ROWS
from edgefl_protocol.tensors import MAX_TENSORS

_HEADER_BYTES: Final = 1 << 20  # of a payload
_FEATURES_BYTES: Final = MOST_ROWS * FEATURES * 2  # of the others, float16


def memory_bytes() -> int:
    """Return this machine's physical memory; where the system does not tell, twice the largest payload there is."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return 2 * MAX_BLOB_BYTES


def largest_broadcast(task: TaskReply) -> int:
    """Compute the bytes of the largest payload that a round of this task, as the coordinator signed it, can need."""
    if task.takes_maps:
        needed = MAX_TENSORS * task.maps_per_class * task.tokens * 2
    else:
        needed = task.max_reply_bytes + (_FEATURES_BYTES if task.takes_features else 0)
    return min(needed + _HEADER_BYTES, MAX_BLOB_BYTES)


def check_broadcast(size: int, task: TaskReply, memory: int) -> None:
    """Refuse a broadcast before any of it is fetched.

    Args:
        size: bytes of its payload, as the coordinator signed it.
        memory: bytes of this device's.

    Raises:
        BlobError: it is larger than the task can need, or than half of the memory (`too_large`).
    """
    needed = largest_broadcast(task)
    if size > needed:
        raise BlobError(
            f"the round's broadcast holds {size} bytes, but a round of this task needs at most {needed}; tell the "
            "operator",
            "too_large",
        )
    if size > memory // 2:
        raise BlobError(
            f"the round's broadcast holds {size} bytes, but this device takes at most {memory // 2}, half of its "
            "memory: it cannot take part in these rounds",
            "too_large",
        )
