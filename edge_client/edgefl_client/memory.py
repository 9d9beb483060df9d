"""Memory goes back to the system as soon as a large block is free.

Source: glibc, mallopt(3): with each large block that is freed, the size from which blocks are mapped apart rises, up
to 32 MiB; later blocks then lie among small ones and stay with the process. For a model and a photograph that was a
fifth of the peak (docs/results/device.md). Setting the size, even to its default, ends the rising.
"""

import ctypes
from typing import Final

M_MMAP_THRESHOLD: Final = -3
DEFAULT_BYTES: Final = 128 * 1024


def map_large_blocks_apart() -> bool:
    """Keep glibc's default size from which blocks are mapped apart; other systems are left as they are.

    Returns:
        Whether this system took it.
    """
    try:
        return bool(ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, DEFAULT_BYTES))
    except (OSError, AttributeError, TypeError):  # no such function, or no way to ask for one
        return False
